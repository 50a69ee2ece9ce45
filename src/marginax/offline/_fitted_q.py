"""Fitted Q evaluation on tables: the backup is any sampled operator of the library, averaged over visits.

Q ← mean over visits t of (x,a) of a target at t: one-step, Retrace (`targets.multi_step`) or marginalized
(`targets.marginalized` with weights by certainty equivalence). With one-step targets the fixed point is certainty
equivalence, which counts give at once; with longer ones the log's own returns take the place of part of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from marginax.mdp import TabularMDP
from marginax.offline._backups import Packed, fixed_point, pack, pieces, sampled_targets
from marginax.offline._counts import Counts
from marginax.offline._estimates import Estimate, Influence
from marginax.offline._log import Log
from marginax.offline._model import Model
from marginax.offline._sources import Source
from marginax.weights import exact

HELD = 10_000_000  # steps up to which the log is kept in memory between backups; above, it is read again
PAIR_LIMIT = 4000  # pairs up to which marginalized weights for all starts are formed
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

    def targets(self, q: np.ndarray) -> Iterator[tuple[Log, np.ndarray]]:
        """Each piece of the log with the target [N] of each of its rows."""
        size = self.pi.size
        with jax.enable_x64(True):
            table = None if self.weights is None else jnp.asarray(self.weights.reshape(size, size))
            v, traces = jnp.asarray(self.values(q)), jnp.asarray(self.traces.ravel(), float)
            flat, gamma = jnp.asarray(q.ravel()), jnp.asarray(self.discount)
            for log, packed in self.parts():
                yield log, packed.at_rows(sampled_targets(flat, v, packed.steps, gamma, traces, table))

    def __call__(self, q: np.ndarray) -> np.ndarray:
        """Q after one backup; pairs that the log never took keep their value."""
        total = np.zeros(q.size)
        for log, found in self.targets(q):
            total += np.bincount(self.pairs(log), found, minlength=q.size)
        return np.where(self.visits > 0, total.reshape(q.shape) / np.maximum(self.visits, 1), q)

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

    At the fixed point the errors of all targets from each pair average to zero. Perturbing the log perturbs
    them, and through (I - γP^π)⁻¹ the credit D of the operator cancels: with d the occupancy of π,

        ψ_i = V(x_0) - value + Σ_t λ(x_t,a_t) (target_t - Q(x_t,a_t)),   λ = d (I - γ P^{cμ}) / visits.
    """
    counts, model, n = backup.counts, backup.model, backup.visits
    safe = np.maximum(n, 1.0)
    flow = counts.transitions().T @ (model.occupancy / safe).ravel()  # [S]: what of d arrives in each state
    arrived = backup.discount * flow[:, None] * counts.behaviour() * backup.traces
    lam = np.where(n > 0, (model.occupancy - arrived) / safe * counts.episodes, 0.0)
    starts = counts.starts.sum(axis=0)
    value = float(starts @ fitted.v / starts.sum())
    influence = Influence(counts.episodes)
    for log, found in backup.targets(fitted.q):
        error = found - fitted.q[log.states, log.actions]
        begin = fitted.v[log.states[log.offsets[:-1]]]
        influence.add(begin - value + log.sums(lam[log.states, log.actions] * error))
    return Estimate(value, influence.groups(), open=fitted.residual / (1 - backup.discount))


def td_weights(counts: Counts, traces: np.ndarray, discount: float) -> np.ndarray:
    """[S, A, S, A] TD weights of the traces in the MDP of the log's counts."""
    n = counts.visits.sum(axis=0)
    s, a = n.shape
    p = counts.transitions().toarray().reshape(s, a, s) / np.maximum(n, 1.0)[..., None]
    empirical = TabularMDP(p, np.zeros((s, a)), discount)
    return exact(empirical, counts.behaviour(), traces)
