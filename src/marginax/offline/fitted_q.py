"""Fitted Q evaluation on tables: the backup is any sampled operator of the library, averaged over visits.

Q ← mean over visits t of (x,a) of a target at t: Retrace (`targets.multi_step`) or marginalized (`targets.marginalized` with
weights by certainty equivalence). With one-step targets the fixed point is certainty equivalence, which counts give at once;
with longer ones the log's own returns take the place of part of the model.

Whole episodes are packed end to end into sequences of one length, which a truncated or terminal step cuts. Every backup is
affine in Q, so that its fixed point is found by GMRES instead of thousands of sweeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse.linalg import LinearOperator, gmres

from marginax.offline.certainty_equivalence import Counts, Model
from marginax.offline.log import Accumulator, Log, add_at
from marginax.offline.results import Estimate, Influence
from marginax.offline.sequences import Packed, pack, pieces, pulled_back, sampled_targets
from marginax.offline.sources import Source
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

    def influences(self, log: Log, targets: np.ndarray, lam: np.ndarray, value: float) -> np.ndarray:
        """[E] V(x_0) - value + Σ_t λ(x_t,a_t) (target_t - Q(x_t,a_t)) of each episode; see `estimate`."""
        errors = targets - self.q[log.states, log.actions]
        start = self.v[log.states[log.offsets[:-1]]]
        return start - value + log.sums(lam[log.states, log.actions] * errors)


class Backup:
    """Q [S, A] to the mean over visits of the sampled targets; one pass over the log each time.

    Args:
        source: the log.
        counts: its counts.
        model: gives the value of pairs that the log never took.
        pi: [S, A] target policy.
        traces: [S, A] traces; zeros give one-step targets.
        discount: γ.
    """

    def __init__(
        self,
        source: Source,
        counts: Counts,
        model: Model,
        pi: np.ndarray,
        traces: np.ndarray,
        discount: float,
    ) -> None:
        self.source, self.counts, self.model, self.pi, self.traces = source, counts, model, pi, traces
        self.discount, self.steps = discount, counts.steps
        self.visits: Any = counts.whole.visits
        self._held: list[tuple[Log, Packed]] | None = None

    def parts(self) -> Iterable[tuple[Log, Packed]]:
        """The log in pieces with their steps: from memory where it fits, else read again."""
        if self.steps > HELD:
            return self._read()
        if self._held is None:
            self._held = list(self._read())
        return self._held

    def _read(self) -> Iterator[tuple[Log, Packed]]:
        for log in pieces(self.source.chunks()):
            yield log, pack(log, log.pairs(self.pi.shape[1]), log.next_states)

    def values(self, q: np.ndarray) -> np.ndarray:
        """[S] of π, with what it does outside its table filled in."""
        return (self.pi * q).sum(axis=1) + (1 - self.pi.sum(axis=1)) * self.model.default_value

    def _arguments(self, q: np.ndarray) -> tuple[Any, ...]:
        """The arguments of `sampled_targets` but for the steps: Q, V, discount and traces. Call it in double precision."""
        values = jnp.asarray(q.ravel()), jnp.asarray(self.values(q))
        return *values, jnp.asarray(self.discount), jnp.asarray(self.traces.ravel(), float)

    def targets(self, q: np.ndarray) -> Iterator[tuple[Log, np.ndarray]]:
        """Each piece of the log with the target [N] of each of its rows."""
        with jax.enable_x64(True):
            flat, v, *rest = self._arguments(q)
            for log, packed in self.parts():
                yield log, packed.at_rows(sampled_targets(flat, v, packed.steps, *rest))

    def __call__(self, q: np.ndarray) -> np.ndarray:
        """Q after one backup; pairs that the log never took keep their value."""
        return np.where(self.visits > 0, self.total(q) / np.maximum(self.visits, 1), q)

    def total(self, q: np.ndarray) -> np.ndarray:
        """[S, A] sums of the targets of all visits."""
        total = np.zeros(q.size)
        for log, found in self.targets(q):
            total += np.bincount(log.pairs(q.shape[1]), found, minlength=q.size)
        return total.reshape(q.shape)

    def transposed(self, y: np.ndarray) -> np.ndarray:
        """[S, A] the linear part of the backup, transposed, times `y`, on the pairs of the log."""
        return np.where(self.visits > 0, self.transposed_total(y), 0.0)

    def transposed_total(self, y: np.ndarray) -> np.ndarray:
        """[S, A] the same, from every pair."""
        per_visit = (y / np.maximum(self.visits, 1)).ravel()
        total = np.zeros(y.shape)
        with jax.enable_x64(True):
            flat, v, *rest = self._arguments(np.zeros(y.shape))
            for log, packed in self.parts():
                cotangents = packed.laid(per_visit[log.pairs(y.shape[1])])
                of_q, of_v = pulled_back(cotangents, flat, v, packed.steps, *rest)
                total += np.asarray(of_q).reshape(y.shape) + self.pi * np.asarray(of_v)[:, None]
        return total

    def influence(self, fitted: Fit, lam: np.ndarray, value: float, first: int = 0) -> Influence:
        """Influences of the episodes, numbered from `first`; see `estimate`."""
        influence = Influence(self.counts.episodes)
        for log, found in self.targets(fitted.q):
            influence.add(fitted.influences(log, found, lam, value), first)
            first += log.num_episodes
        return influence

    def solve(self) -> Fit:
        """The fixed point."""
        support = self.visits > 0
        base = np.full(self.pi.shape, self.model.default_value)

        def expand(x: np.ndarray) -> np.ndarray:
            q = base.copy()
            q[support] = x
            return q

        found, residual = fixed_point(lambda x: self(expand(x))[support], self.model.q[0][support])
        q = expand(found)
        return Fit(q, self.values(q), residual)


class MarginalizedSums(Accumulator):
    """Sums of γ^k w(p, p') over the steps t with pair p and t + k with pair p' of a log, within windows.

    The marginalized target is Q(x_t,a_t) + Σ_k γ^k w(x_t,a_t,x_{t+k},a_{t+k}) δ_{t+k}. Averaged over visits it is a matrix of pairs:
    sums by (p, p') multiply -Q, those by (p, successor) multiply γV. They add up between chunks.

    Args:
        weights: [S, A, S, A] TD weights.
        discount: γ.
    """

    added = ("of_pairs", "of_states", "of_rewards")

    def __init__(self, weights: np.ndarray, discount: float) -> None:
        self.states, self.actions = weights.shape[:2]
        self.size, self.discount = self.states * self.actions, discount
        self.weights = weights.reshape(self.size, self.size)
        self.of_pairs = np.zeros((self.size, self.size))
        self.of_states = np.zeros((self.size, self.states))
        self.of_rewards = np.zeros(self.size)

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        pairs, following = log.pairs(self.actions), log.following
        for here, there, coefficient in self.lags(log):
            start = pairs[here]
            add_at(self.of_pairs, start * self.size + pairs[there], coefficient)
            cell = start * self.states + following[there]
            add_at(self.of_states, cell, coefficient * ~log.terminal[there])
            add_at(self.of_rewards, start, coefficient * log.rewards[there])

    def lags(self, log: Log) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For each lag k: the rows t whose window reaches t + k, those rows t + k, and γ^k w."""
        times, pairs = log.times, log.pairs(self.actions)
        here = np.arange(len(log))
        end = np.minimum(here + WINDOW - times % WINDOW, log.last[log.episode] + 1)
        for k in range(WINDOW):
            here = here[here + k < end[here]]
            if not len(here):
                return
            yield here, here + k, self.discount**k * self.weights[pairs[here], pairs[here + k]]

    def targets(self, log: Log, q: np.ndarray, v: np.ndarray) -> np.ndarray:
        """[N] the target of each row."""
        ahead = self.discount * np.where(log.terminal, 0.0, v[log.following])
        found = q[log.states, log.actions]
        delta = log.rewards + ahead - found
        for here, there, coefficient in self.lags(log):
            found[here] += coefficient * delta[there]
        return found


class MarginalizedInfluence(Accumulator):
    """Influences of the episodes on a fitted value with marginalized targets; see `estimate`."""

    added = ("influence",)

    def __init__(
        self, sums: MarginalizedSums, fitted: Fit, lam: np.ndarray, value: float, episodes: int
    ) -> None:
        self.sums, self.fitted, self.lam, self.value = sums, fitted, lam, value
        self.influence = Influence(episodes)

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        targets = self.sums.targets(log, self.fitted.q, self.fitted.v)
        self.influence.add(self.fitted.influences(log, targets, self.lam, self.value), first)


class MarginalizedBackup(Backup):
    """The backup with marginalized targets, from sums that one pass over the log has gathered.

    Args:
        gather: shows the whole log to an accumulator and returns it.
        counts, model, pi, traces, discount: as for `Backup`.
    """

    def __init__(
        self,
        gather: Callable[[Any], Any],
        counts: Counts,
        model: Model,
        pi: np.ndarray,
        traces: np.ndarray,
        discount: float,
    ) -> None:
        self.gather, self.counts, self.model, self.pi, self.discount = gather, counts, model, pi, discount
        self.visits: Any = counts.whole.visits
        self.sums: MarginalizedSums = gather(MarginalizedSums(td_weights(counts, traces, discount), discount))

    def __call__(self, q: np.ndarray) -> np.ndarray:
        """Q after one backup; pairs that the log never took keep their value."""
        ahead = self.discount * self.sums.of_states @ self.values(q)
        change = (self.sums.of_rewards + ahead - self.sums.of_pairs @ q.ravel()).reshape(q.shape)
        return q + np.where(self.visits > 0, change / np.maximum(self.visits, 1), 0.0)

    def transposed(self, y: np.ndarray) -> np.ndarray:
        """[S, A] the linear part of the backup, transposed, times `y`, on the pairs of the log."""
        per_visit = (y / np.maximum(self.visits, 1)).ravel()
        ahead = self.pi * (self.discount * per_visit @ self.sums.of_states)[:, None]
        total = y + ahead - (per_visit @ self.sums.of_pairs).reshape(y.shape)
        return np.where(self.visits > 0, total, 0.0)

    def influence(self, fitted: Fit, lam: np.ndarray, value: float, first: int = 0) -> Influence:
        """Influences of the episodes; see `estimate`."""
        empty = MarginalizedInfluence(self.sums, fitted, lam, value, self.counts.episodes)
        return self.gather(empty).influence


def estimate(fitted: Fit, backup: Backup) -> Estimate:
    """The value Σ starts · V with its influence, in one more pass.

    At the fixed point the errors of all targets from each pair average to zero. With b = starts ⊗ π and B the linear
    part of the backup, what an episode changes is, to first order,

        ψ_i = V(x_0) - value + Σ_t λ(x_t,a_t) (target_t - Q(x_t,a_t)),   (I - Bᵀ) λ·visits = b,

    where the log's own B holds whatever operator, window and weights the targets have.
    """
    counts, n = backup.counts, backup.visits
    support = n > 0
    starts: Any = counts.whole.starts / counts.episodes
    begin = starts[:, None] * backup.pi

    def flow(x: np.ndarray) -> np.ndarray:
        y = np.zeros(n.shape)
        y[support] = x
        return (begin + backup.transposed(y))[support]

    solution, _ = fixed_point(flow, backup.model.occupancy[support], tolerance=1e-6)
    lam = np.zeros(n.shape)
    lam[support] = solution / n[support] * counts.episodes
    value = float(starts @ fitted.v)
    influence = backup.influence(fitted, lam, value)
    return Estimate(
        value, influence.groups(), bias_bound=fitted.residual / (1 - backup.discount), model_share=1.0
    )


def td_weights(counts: Counts, traces: np.ndarray, discount: float) -> np.ndarray:
    """[S, A, S, A] TD weights of the traces in the MDP of the log's counts."""
    whole = counts.whole
    return np.asarray(exact(whole.mdp(discount), whole.action_frequencies(), traces))


def fixed_point(
    backup: Callable[[np.ndarray], np.ndarray], start: np.ndarray, tolerance: float = 1e-9
) -> tuple[np.ndarray, float]:
    """The fixed point of an affine backup of vectors, and the largest change that one more backup makes.

    >>> fixed_point(lambda x: 0.5 * x + 1.0, np.zeros(3))[0]
    array([2., 2., 2.])
    """
    constant = backup(np.zeros_like(start))
    size = len(start)
    operator = LinearOperator(
        (size, size), matvec=lambda x: x - (backup(x) - constant), dtype=np.dtype(np.float64)
    )
    found, _ = gmres(
        operator, constant, x0=start, rtol=tolerance, atol=0.0, restart=min(50, size), maxiter=20
    )
    return found, float(np.abs(backup(found) - found).max())
