"""The empirical MDP of a batch of trajectories, on the states that it holds."""

import math
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax._credit import converging
from marginax._solve import Resolvent
from marginax.mdp import TabularMDP
from marginax.trajectories import Trajectory
from marginax.weights._data import discount_of, start_of, traces_of

__all__ = ["EmpiricalModel", "EstimateInfo", "empirical_model"]


class EstimateInfo(NamedTuple):
    """What stands behind an estimate of TD weights.

    >>> EstimateInfo(behaviour="counts", discount=0.9, steps=100, visited_pairs=7).gap is None
    True
    """

    behaviour: str
    """Where μ came from: "given" as an argument, "logged" with the data, or estimated from "counts"."""
    discount: float
    """γ."""
    steps: int
    """Steps in the data, padding left out."""
    visited_pairs: int
    """Pairs that occur in the data."""
    iterations: int | None = None
    """Iterations of a saddle-point solver."""
    gap: float | None = None
    """The largest duality gap over all starts when it stopped."""


class EmpiricalModel(NamedTuple):
    """Frequencies as probabilities, on the ``K`` states that the data (or the prior) hold."""

    mdp: TabularMDP
    """Transition frequencies; see ``_fill`` for pairs that were never visited."""
    states: np.ndarray
    """Which of the S states the K are."""
    behaviour: FloatArray
    """μ, ``[K, A]``."""
    traced: FloatArray
    """π̃ = cμ, ``[K, A]``."""
    num_states: int
    """S."""
    on_states: bool
    """Whether weights are wanted between states rather than pairs."""
    start: tuple[int, int] | int | None
    """The start whose row is wanted, among the K states; all if None."""
    info: EstimateInfo

    def credit(self, measure: FloatArray) -> FloatArray:
        """``(I - γ P̂^m)^{-1}`` on pairs or on states, ``[n, n]``, or the row of one start ``[n]``."""
        if not self.on_states:
            if self.start is None:
                return self.mdp.credit(measure).reshape(measure.size, measure.size)
            assert isinstance(self.start, tuple)
            return self.mdp.credit_row(measure, self.start).ravel()
        resolvent = Resolvent(self.mdp.state_kernel(measure), self.mdp.discount)
        if self.start is None:
            return resolvent.matrix()
        first = np.zeros(len(self.states))
        first[self.start] = 1.0
        return resolvent.transposed(first)

    def kernel(self, measure: FloatArray) -> Any:
        """``P̂^m`` on pairs or on states, ``[n, n]``; sparse where the data are."""
        if self.on_states:
            return self.mdp.state_kernel(measure)
        size, num_actions = measure.size, measure.shape[1]
        columns = np.arange(size)
        choose = sp.csr_array(
            (measure.ravel(), (columns // num_actions, columns)), shape=(len(measure), size)
        )
        if self.mdp.is_sparse:
            return sp.csr_array(self.mdp.p @ choose)
        return self.mdp.dense_p().reshape(size, -1) @ choose

    def most_traced(self) -> float:
        """The largest total mass ``(1-γ) Σ_t γ^t C_t`` that the traces keep from any state; at most 1 for 0 ≤ c ≤ π/μ."""
        paths = Resolvent(self.mdp.state_kernel(self.traced), self.mdp.discount)
        return float((1 - self.mdp.discount) * paths(np.ones(len(self.states))).max())

    def spread(self, weights: FloatArray) -> FloatArray:
        """Weights between the K states, ``[n, n]`` or one row ``[n]``, as weights between all S in their proper shape.

        A pair without data has the weights of the one-step operator.
        """
        num_actions = self.behaviour.shape[1]
        shape = (self.num_states,) if self.on_states else (self.num_states, num_actions)
        size = math.prod(shape)
        here = (
            self.states
            if self.on_states
            else (self.states[:, None] * num_actions + np.arange(num_actions)).ravel()
        )
        if weights.ndim == 1:
            full = np.zeros(size)
            full[here] = weights
            return full.reshape(shape)
        if here.size == size:
            return weights.reshape(shape * 2)
        checks.fits_in_memory(
            f"weights between {size} and {size}", size**2, copies=2, instead="ask for one row (start=)"
        )
        full = np.eye(size)
        full[np.ix_(here, here)] = weights
        return full.reshape(shape * 2)


def empirical_model(
    trajectories: Trajectory,
    c: ArrayLike,
    mu: ArrayLike | None,
    discount: float | None,
    prior: ArrayLike | float,
    start: tuple[int, int] | int | None,
    on_states: bool,
    all_states: bool = False,
) -> EmpiricalModel:
    """Counts a batch of trajectories into an MDP on the states that it holds (and that of the start), or on all.

    The arguments are those of ``certainty_equivalence``.
    """
    traces = traces_of(c)
    num_states, num_actions = traces.shape
    start = start_of(start, num_states, num_actions, on_states)
    gamma = discount_of(trajectories, discount, num_states, num_actions)
    valid = np.asarray(trajectories.valid)
    ended = np.asarray(trajectories.discounts)[valid] == 0
    x, a, y = (
        np.asarray(f)[valid] for f in (trajectories.states, trajectories.actions, trajectories.next_states)
    )
    pair = x.astype(np.int64) * num_actions + a

    counts = sp.csr_array(
        (np.ones((~ended).sum()), (pair[~ended], y[~ended])), shape=(num_states * num_actions, num_states)
    )
    visits = np.bincount(pair, minlength=num_states * num_actions).astype(np.float64)
    visited_pairs = int((visits > 0).sum())
    if np.any(np.asarray(prior) != 0):
        pseudo = prior_counts(prior, num_states, num_actions)
        counts = sp.csr_array(counts + sp.csr_array(pseudo.reshape(-1, num_states)))
        visits += pseudo.sum(axis=-1).ravel()
    counts.sum_duplicates()

    held = (visits.reshape(num_states, -1).sum(axis=1) + counts.sum(axis=0)) > 0
    held |= all_states
    if start is not None:
        held[start[0] if isinstance(start, tuple) else start] = True
    states = np.flatnonzero(held)
    place = np.cumsum(held) - 1
    if start is not None:
        start = (int(place[start[0]]), start[1]) if isinstance(start, tuple) else int(place[start])
    rows = (states[:, None] * num_actions + np.arange(num_actions)).ravel()
    frequency = sp.diags_array(1.0 / np.maximum(visits[rows], 1e-300)) @ counts[rows][:, states]
    behaviour, source = _behaviour(trajectories, mu, traces.shape, visits.reshape(num_states, -1))
    behaviour = behaviour[states]
    frequency = _fill(frequency, behaviour, visits[rows].reshape(behaviour.shape) > 0)
    traced = traces[states] * behaviour
    if source == "counts":
        traced = traced / np.maximum(traced.sum(axis=1, keepdims=True), 1.0)
    dense = frequency.nnz > 0.1 * frequency.shape[0] * frequency.shape[1]
    p = frequency.toarray().reshape(len(states), num_actions, len(states)) if dense else frequency.tocsr()
    mdp = TabularMDP(p, np.zeros(behaviour.shape), gamma)
    converging(mdp, traced)
    return EmpiricalModel(
        mdp=mdp,
        states=states,
        behaviour=behaviour,
        traced=traced,
        num_states=num_states,
        on_states=on_states,
        start=start,
        info=EstimateInfo(source, gamma, int(valid.sum()), visited_pairs),
    )


def prior_counts(prior: ArrayLike | float, num_states: int, num_actions: int) -> FloatArray:
    """Pseudo-counts ``[S, A, S]`` from one number or a table."""
    pseudo = np.asarray(prior, dtype=np.float64)
    shape = (num_states, num_actions, num_states)
    pseudo = checks.array("prior", np.broadcast_to(pseudo, shape) if pseudo.ndim == 0 else pseudo, shape)
    checks.non_negative("prior", pseudo)
    return pseudo


def _fill(frequency: sp.csr_array, behaviour: FloatArray, seen: np.ndarray) -> sp.csr_array:
    """Lets an action that was never taken in a state lead where those that were lead on average, under μ.

    Were its mass lost instead, visits would be underestimated and weights blow up. States without any data end the episode.
    """
    known = np.where(seen, behaviour, 0.0)
    total = known.sum(axis=1, keepdims=True)
    share = np.divide(known, total, out=np.zeros_like(known), where=total > 0)
    x, a = np.nonzero(~seen & (total > 0))
    num_actions = behaviour.shape[1]
    mixing = sp.csr_array(
        (
            share[x].ravel(),
            (
                np.repeat(x * num_actions + a, num_actions),
                (x[:, None] * num_actions + np.arange(num_actions)).ravel(),
            ),
        ),
        shape=(behaviour.size, behaviour.size),
    )
    return sp.csr_array(frequency + mixing @ frequency)


def _frequencies(visits: FloatArray) -> FloatArray:
    total = visits.sum(axis=1, keepdims=True)
    return np.where(total > 0, visits / np.maximum(total, 1e-300), 1.0 / visits.shape[1])


def _behaviour(
    trajectories: Trajectory, mu: ArrayLike | None, shape: tuple[int, int], visits: FloatArray
) -> tuple[FloatArray, str]:
    if mu is not None:
        return checks.distribution("mu", mu, shape), "given"
    if trajectories.behaviour is None:
        return _frequencies(visits), "counts"
    valid = np.asarray(trajectories.valid)
    logged = np.asarray(trajectories.behaviour, dtype=np.float64)
    bad = valid & ~((logged > 0) & (logged <= 1 + 1e-6))
    if bad.any():
        place = np.argwhere(bad)[0]
        raise ValueError(
            f"trajectories.behaviour must lie in (0, 1], but behaviour{checks.where(place)} = {logged[tuple(place)]}"
        )
    x, a = np.asarray(trajectories.states)[valid], np.asarray(trajectories.actions)[valid]
    times, total = np.zeros(shape), np.zeros(shape)
    np.add.at(times, (x, a), 1.0)
    np.add.at(total, (x, a), logged[valid])
    mean = total / np.maximum(times, 1.0)  # they may differ, where several policies gathered the data
    unseen = times == 0
    rest = np.maximum(1.0 - mean.sum(axis=1, keepdims=True), 0.0)
    mean += np.where(unseen, rest / np.maximum(unseen.sum(axis=1, keepdims=True), 1), 0.0)
    return mean / np.maximum(mean.sum(axis=1, keepdims=True), 1.0), "logged"
