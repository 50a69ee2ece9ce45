"""Episodes of a log side by side, and the targets of all their steps at once, as the library's sampled operators give them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marginax import targets
from marginax.offline.log import Log

PIECE = 200_000  # rows whose targets are computed at a time


class Steps(eqx.Module):
    """Sequences of a log side by side; `here` and `following` say where values of a step are looked up."""

    here: Int[Array, "B T"]
    following: Int[Array, "B T"]
    rewards: Float[Array, "B T"]
    terminal: Bool[Array, "B T"]
    truncated: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]


@dataclass(frozen=True)
class Packed:
    """The steps of a log, and the place `[N]` of each of its rows in them."""

    steps: Steps
    place: np.ndarray

    def at_rows(self, values: Array) -> np.ndarray:
        """[N] values [B, T] in the order of the log."""
        return np.asarray(values).reshape(-1)[self.place]

    def laid(self, values: np.ndarray) -> Array:
        """[B, T] values [N] of the log in their places, zero elsewhere."""
        table = np.zeros(self.steps.valid.size)
        table[self.place] = values
        return jnp.asarray(table.reshape(self.steps.valid.shape))


def pack(log: Log, here: np.ndarray, following: np.ndarray, window: int | None = None) -> Packed:
    """Lays the episodes of a log (or windows of them) end to end in sequences as long as the longest.

    Args:
        log: whole episodes.
        here: [N] where Q(x_t, a_t) is looked up, and the trace.
        following: [N] where V(x_{t+1}) is looked up; not read where the step is terminal.
        window: cut episodes into pieces of this number of steps; the cut bootstraps, as a truncation does.
    """
    longest = int(log.lengths.max())
    length = longest if window is None else min(window, longest)
    count = -(-log.lengths // length)  # windows of each episode
    within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    sizes = np.minimum(np.repeat(log.lengths, count) - within * length, length)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    first, width = [0], _rounded(length)  # the window that each sequence begins with
    while (later := int(np.searchsorted(ends, starts[first[-1]] + width, side="right"))) < len(sizes):
        first.append(later)
    row = np.repeat(np.arange(len(first)), np.diff([*first, len(sizes)]))
    offset = row * width + starts - starts[np.array(first)][row]
    place = np.arange(len(log)) + np.repeat(offset - starts, sizes)
    cut = log.truncated
    cut[ends - 1] |= ~log.terminal[ends - 1]
    shape = (_rounded(len(first)), width)

    def laid(values: np.ndarray, dtype: Any) -> Array:
        table = np.zeros(shape[0] * shape[1], dtype)
        table[place] = values
        return jnp.asarray(table.reshape(shape))

    steps = Steps(
        here=laid(here, np.int32),
        following=laid(np.where(log.terminal, 0, following), np.int32),
        rewards=laid(log.rewards, np.float64),
        terminal=laid(log.terminal, bool),
        truncated=laid(cut, bool),
        valid=laid(np.ones(len(log), bool), bool),
    )
    return Packed(steps, place)


def pieces(logs: Iterable[Log]) -> Iterator[Log]:
    """The logs in parts of at most `PIECE` rows, or of one episode."""
    for log in logs:
        begin = 0
        while begin < log.num_episodes:
            end = int(np.searchsorted(log.offsets, log.offsets[begin] + PIECE, side="right")) - 1
            end = max(end, begin + 1)
            whole = begin == 0 and end == log.num_episodes
            yield log if whole else log.select(np.arange(begin, end))
            begin = end


@eqx.filter_jit
def sampled_targets(
    q: Float[Array, N],
    v: Float[Array, M],
    steps: Steps,
    discount: Array,
    traces: Float[Array, N],
    weights: Float[Array, ...] | None = None,
) -> Float[Array, "B T"]:
    """The target of each step: multi-step with `traces`, or marginalized with `weights`.

    Weights are one matrix [T, T] for each sequence.
    """

    def one(row: Steps, matrix: Array | None) -> Array:
        discounts = jnp.where(row.terminal, 0.0, discount)
        common = (q[row.here], v[row.following], row.rewards, discounts)
        if matrix is None:
            return targets.multi_step(
                *common, traces[row.here], row.truncated, valid=row.valid, stop_gradient=False
            )
        return targets.marginalized(*common, matrix, row.truncated, valid=row.valid, stop_gradient=False)

    return jnp.where(steps.valid, jax.vmap(one)(steps, weights), 0.0)


@eqx.filter_jit
def pulled_back(
    cotangents: Float[Array, "B T"], q: Float[Array, N], v: Float[Array, M], *rest: Any
) -> tuple[Float[Array, N], Float[Array, M]]:
    """How much each entry of `q` and `v` moves the sum of all targets times `cotangents`."""
    return jax.vjp(lambda q, v: sampled_targets(q, v, *rest), q, v)[1](cotangents)


def _rounded(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: few shapes to compile for, at most half wasted."""
    power = 1 << max(size - 1, 0).bit_length()
    return power if size > 3 * power // 4 or power < 4 else 3 * power // 4
