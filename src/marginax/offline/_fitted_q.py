"""Fitted Q evaluation on tables: the backup is any sampled operator of the library, averaged over visits.

Q ← mean over visits t of (x,a) of a target at t: one-step, Retrace (`targets.multi_step`) or marginalized
(`targets.marginalized` with weights by certainty equivalence). With one-step targets the fixed point is certainty
equivalence, which counts give at once; with longer ones the log's own returns take the place of part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marginax.mdp import TabularMDP
from marginax.offline._backups import Packed, fixed_point, pack, pieces, pulled_back, sampled_targets
from marginax.offline._counts import Counts
from marginax.offline._estimates import Estimate, Influence
from marginax.offline._log import Log
from marginax.offline._model import Model
from marginax.offline._sources import Source
from marginax.weights import exact

HELD = 10_000_000  # steps up to which the log is kept in memory between backups; above, it is read again
PAIR_LIMIT = 1000  # pairs up to which marginalized weights for all starts are formed
WINDOW = 48  # steps of credit in a marginalized target


@dataclass(frozen=True)
class Fit:
    """A fitted Q.

    Attributes:
        q: [S, A].
        v: [S] of the target policy.
        residual: largest remaining change of Q under one more backup.
    """

    q: np.ndarray
    v: np.ndarray
    residual: float


class Backup:
    """Q [S, A] to the mean over visits of the sampled targets; one pass over the log each time.

    Args:
        source: the log.
        counts: its counts.
        model: gives the value of pairs that the log never took.
        pi: [S, A] target policy.
        traces: [S, A] traces; zeros give one-step targets.
        discount: γ.
        weights: [S, A, S, A] TD weights for marginalized targets; None uses `traces`.
    """

    def __init__(
        self,
        source: Source,
        counts: Counts,
        model: Model,
        pi: np.ndarray,
        traces: np.ndarray,
        discount: float,
        weights: np.ndarray | None = None,
    ) -> None:
        self.source, self.counts, self.model, self.pi, self.traces = source, counts, model, pi, traces
        self.discount, self.weights = discount, weights
        self.visits = counts.visits.sum(axis=0)
        self._held: list[tuple[Log, Packed]] | None = None

    def parts(self) -> Iterable[tuple[Log, Packed]]:
        """The log in pieces with their steps: from memory where it fits, else read again."""
        if self.counts.steps > HELD:
            return self._read()
        if self._held is None:
            self._held = list(self._read())
        return self._held

    def _read(self) -> Iterator[tuple[Log, Packed]]:
        window = None if self.weights is None else WINDOW
        for log in pieces(self.source.chunks()):
            yield log, pack(log, self.pairs(log), log.next_states, window)

    def pairs(self, log: Log) -> np.ndarray:
        """[N] index of each row's pair."""
        return log.states * self.pi.shape[1] + log.actions

    def values(self, q: np.ndarray) -> np.ndarray:
        """[S] of π, with what it does outside its table filled in."""
        return (self.pi * q).sum(axis=1) + (1 - self.pi.sum(axis=1)) * self.model.fill

    def _arguments(self, q: np.ndarray) -> tuple[Any, ...]:
        """Of `sampled_targets`: Q, V, and what comes after the steps; to be called in double precision."""
        size = self.pi.size
        table = None if self.weights is None else jnp.asarray(self.weights.reshape(size, size))
        values = jnp.asarray(q.ravel()), jnp.asarray(self.values(q))
        return *values, jnp.asarray(self.discount), jnp.asarray(self.traces.ravel(), float), table

    def targets(self, q: np.ndarray) -> Iterator[tuple[Log, np.ndarray]]:
        """Each piece of the log with the target [N] of each of its rows."""
        with jax.enable_x64(True):
            flat, v, *rest = self._arguments(q)
            for log, packed in self.parts():
                yield log, packed.at_rows(sampled_targets(flat, v, packed.steps, *rest))

    def __call__(self, q: np.ndarray) -> np.ndarray:
        """Q after one backup; pairs that the log never took keep their value."""
        total = np.zeros(q.size)
        for log, found in self.targets(q):
            total += np.bincount(self.pairs(log), found, minlength=q.size)
        return np.where(self.visits > 0, total.reshape(q.shape) / np.maximum(self.visits, 1), q)

    def transposed(self, y: np.ndarray) -> np.ndarray:
        """[S, A] the linear part of the backup, transposed, times `y`, on the pairs of the log."""
        per_visit = (y / np.maximum(self.visits, 1)).ravel()
        total = np.zeros(y.shape)
        with jax.enable_x64(True):
            flat, v, *rest = self._arguments(np.zeros(y.shape))
            for log, packed in self.parts():
                cotangents = packed.laid(per_visit[self.pairs(log)])
                of_q, of_v = pulled_back(cotangents, flat, v, packed.steps, *rest)
                total += np.asarray(of_q).reshape(y.shape) + self.pi * np.asarray(of_v)[:, None]
        return np.where(self.visits > 0, total, 0.0)

    def solve(self) -> Fit:
        """The fixed point."""
        support = self.visits > 0
        base = np.full(self.pi.shape, self.model.fill)

        def expand(x: np.ndarray) -> np.ndarray:
            q = base.copy()
            q[support] = x
            return q

        found, residual = fixed_point(lambda x: self(expand(x))[support], self.model.q[support])
        q = expand(found)
        return Fit(q, self.values(q), residual)


def estimate(fitted: Fit, backup: Backup) -> Estimate:
    """The value Σ starts · V with its influence, in one more pass.

    At the fixed point the errors of all targets from each pair average to zero. With b = starts ⊗ π and B the linear
    part of the backup, what an episode changes is, to first order,

        ψ_i = V(x_0) - value + Σ_t λ(x_t,a_t) (target_t - Q(x_t,a_t)),   (I - Bᵀ) λ·visits = b,

    where the log's own B holds whatever operator, window and weights the targets have.
    """
    counts, n = backup.counts, backup.visits
    support = n > 0
    starts = counts.starts.sum(axis=0) / counts.episodes
    begin = starts[:, None] * backup.pi

    def flow(x: np.ndarray) -> np.ndarray:
        y = np.zeros(n.shape)
        y[support] = x
        return (begin + backup.transposed(y))[support]

    solution, _ = fixed_point(flow, backup.model.occupancy[support], tolerance=1e-6)
    lam = np.zeros(n.shape)
    lam[support] = solution / n[support] * counts.episodes
    value = float(starts @ fitted.v)
    influence = Influence(counts.episodes)
    for log, found in backup.targets(fitted.q):
        error = found - fitted.q[log.states, log.actions]
        first = fitted.v[log.states[log.offsets[:-1]]]
        influence.add(first - value + log.sums(lam[log.states, log.actions] * error))
    return Estimate(value, influence.groups(), open=fitted.residual / (1 - backup.discount))


def td_weights(counts: Counts, traces: np.ndarray, discount: float) -> np.ndarray:
    """[S, A, S, A] TD weights of the traces in the MDP of the log's counts."""
    n = counts.visits.sum(axis=0)
    s, a = n.shape
    p = counts.transitions().toarray().reshape(s, a, s) / np.maximum(n, 1.0)[..., None]
    empirical = TabularMDP(p, np.zeros((s, a)), discount)
    return exact(empirical, counts.behaviour(), traces)
