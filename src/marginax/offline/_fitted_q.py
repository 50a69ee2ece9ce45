"""Fitted Q evaluation on tables: the backup is any sampled operator of the library, averaged over visits.

Q ← mean over visits t of (x,a) of a target at t: one-step, Retrace (`targets.multi_step`) or marginalized
(`targets.marginalized` with weights by certainty equivalence). Each backup is affine in Q, so that its fixed
point is found by GMRES instead of thousands of sweeps. With one-step targets it is certainty equivalence;
with longer ones the log's own returns take the place of part of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from scipy.sparse.linalg import LinearOperator, gmres

from marginax import targets
from marginax.offline._counts import Counts
from marginax.offline._importance import MAX_GROUPS, Estimate
from marginax.offline._log import Log
from marginax.offline._model import Model

STEP_LIMIT = 4_000_000  # padded steps that are held in memory
PAIR_LIMIT = 600  # pairs up to which marginalized weights for all starts are formed
WINDOW = 48  # steps of credit in a marginalized target


class Steps(eqx.Module):
    """Sequences of a log side by side, padded to one length."""

    pairs: Int[Array, "B T"]
    rewards: Float[Array, "B T"]
    discounts: Float[Array, "B T"]
    next_states: Int[Array, "B T"]
    truncated: Bool[Array, "B T"]
    valid: Bool[Array, "B T"]


@dataclass(frozen=True)
class Fit:
    """A fitted Q with the target errors of each step at the fixed point.

    Attributes:
        q: [S, A].
        errors: [N] target minus Q at each step of the log.
        residual: largest remaining change of Q under one more backup.
    """

    q: np.ndarray
    errors: np.ndarray
    residual: float


def fit(
    log: Log,
    model: Model,
    pi: np.ndarray,
    traces: np.ndarray,
    discount: float,
    weights: np.ndarray | None = None,
) -> Fit:
    """The fixed point of the averaged backup.

    Args:
        log: tabular, in memory.
        model: gives the value of pairs that the log never took.
        pi: [S, A] target policy.
        traces: [S, A] traces; zeros give one-step targets.
        discount: γ.
        weights: [S, A, S, A] TD weights for marginalized targets; None uses `traces`.
    """
    s, a = pi.shape
    with jax.enable_x64(True):
        steps, rows, columns = _lay_out(log, a, discount, None if weights is None else WINDOW)
        table = None if weights is None else jnp.asarray(weights.reshape(s * a, s * a))
        rest = (jnp.asarray(model.fill), steps, jnp.asarray(pi), jnp.asarray(traces).ravel(), table)
        support = model.support.ravel()
        base = np.where(support, 0.0, model.fill)

        def expand(x: np.ndarray) -> np.ndarray:
            q = base.copy()
            q[support] = x
            return q

        def backup(x: np.ndarray) -> tuple[np.ndarray, Array]:
            mean, errors = _backup(jnp.asarray(expand(x)), *rest)
            return np.asarray(mean)[support], errors

        constant = backup(np.zeros(int(support.sum())))[0]

        def change(x: np.ndarray) -> np.ndarray:
            return x - (backup(x)[0] - constant)

        size = len(constant)
        operator = LinearOperator((size, size), matvec=change, dtype=np.float64)
        start = model.q.ravel()[support]
        found, _ = gmres(operator, constant, x0=start, rtol=1e-9, atol=0.0, restart=min(50, size), maxiter=20)
        after, errors = backup(found)
        residual = float(np.abs(after - found).max())
        return Fit(expand(found).reshape(s, a), np.asarray(errors)[rows, columns], residual)


@eqx.filter_jit
def _backup(
    q: Array, fill: Array, steps: Steps, pi: Array, traces: Array, table: Array | None
) -> tuple[Array, Array]:
    """One averaged backup: the new Q [S*A], and target minus Q at each step [B, T]."""
    v = (pi * q.reshape(pi.shape)).sum(axis=1) + (1 - pi.sum(axis=1)) * fill

    def one(row: Steps) -> Array:
        common = (q[row.pairs], v[row.next_states], row.rewards, row.discounts)
        if table is None:
            found = targets.multi_step(*common, traces[row.pairs], row.truncated, valid=row.valid)
        else:
            weights = table[row.pairs[:, None], row.pairs[None, :]]
            found = targets.marginalized(*common, weights, row.truncated, valid=row.valid)
        return jnp.where(row.valid, found, 0.0)

    found = jax.vmap(one)(steps)
    visits = jnp.zeros(q.shape).at[steps.pairs].add(steps.valid)
    total = jnp.zeros(q.shape, found.dtype).at[steps.pairs].add(found)
    mean = jnp.where(visits > 0, total / jnp.maximum(visits, 1), q)
    return mean, jnp.where(steps.valid, found - q[steps.pairs], 0.0)


def _lay_out(log: Log, num_actions: int, discount: float, window: int | None) -> tuple[Steps, Any, Any]:
    """The log as padded sequences (whole episodes, or windows of them), and where each row went."""
    times = log.times
    longest = int(log.lengths.max())
    length = longest if window is None else min(window, longest)
    pieces = -(-log.lengths // length)
    first = np.concatenate([[0], np.cumsum(pieces)])[:-1]
    rows = np.repeat(first, log.lengths) + times // length
    columns = times % length
    shape = (_rounded(int(pieces.sum())), _rounded(length))
    cut = log.truncated | ((columns == length - 1) & ~log.terminal)

    def place(values: np.ndarray, dtype: Any) -> Array:
        table = np.zeros(shape, dtype)
        table[rows, columns] = values
        return jnp.asarray(table)

    steps = Steps(
        pairs=place(log.states * num_actions + log.actions, np.int32),
        rewards=place(log.rewards, np.float64),
        discounts=place(np.where(log.terminal, 0.0, discount), np.float64),
        next_states=place(np.where(log.terminal, 0, log.next_states), np.int32),
        truncated=place(cut, bool),
        valid=place(np.ones(len(log), bool), bool),
    )
    return steps, rows, columns


def _rounded(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, …: few shapes to compile for, at most half wasted."""
    power = 1 << max(size - 1, 0).bit_length()
    return power if size > 3 * power // 4 or power < 4 else 3 * power // 4


def padded_steps(counts: Counts) -> int:
    """How many steps a log takes when its episodes are padded to the longest."""
    return counts.episodes * counts.longest


def estimate(
    fitted: Fit, log: Log, counts: Counts, model: Model, pi: np.ndarray, traces: np.ndarray, discount: float
) -> Estimate:
    """The value Σ starts · V with its influence.

    At the fixed point the errors of all targets from each pair average to zero. Perturbing the log perturbs
    them, and through (I - γP^π)⁻¹ the credit D of the operator cancels: with d the occupancy of π,

        ψ_i = V(x_0) - value + Σ_t λ(x_t,a_t) (target_t - Q(x_t,a_t)),   λ = d (I - γ P^{cμ}) / visits.
    """
    v = (pi * fitted.q).sum(axis=1) + (1 - pi.sum(axis=1)) * model.fill
    n = counts.visits.sum(axis=0)
    safe = np.maximum(n, 1.0)
    flow = counts.transitions().T @ (model.occupancy / safe).ravel()  # [S]: what of d arrives in each state
    arrived = discount * flow[:, None] * counts.behaviour() * traces
    lam = np.where(n > 0, (model.occupancy - arrived) / safe * counts.episodes, 0.0)
    starts = v[log.states[log.offsets[:-1]]]
    value = float(starts.mean())
    psi = starts - value + log.sums(lam[log.states, log.actions] * fitted.errors)
    groups = min(log.num_episodes, MAX_GROUPS)
    total = np.bincount(np.arange(log.num_episodes) % groups, psi, minlength=groups)
    return Estimate(value, total * (groups / log.num_episodes))
