"""What certainty equivalence and the saddle points solve on: the empirical MDP of a batch, on the states that it holds."""

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
from marginax.weights._data import discount_of, row_of, traces_of
from marginax.weights.empirical import EmpiricalMDP


class EstimateInfo(NamedTuple):
    """How an estimate of TD weights was made."""

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


class Model(NamedTuple):
    """The empirical MDP on the ``K`` states that the data (or the prior) hold."""

    mdp: TabularMDP
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
    start: int | None
    """The number of the only start whose row is wanted, among the pairs (or states) of the K states; all if None."""
    info: EstimateInfo

    def credit(self, measure: FloatArray) -> FloatArray:
        """``(I - γ P̂^m)^{-1}`` on pairs or on states, ``[n, n]``, or the row of one start ``[n]``."""
        if not self.on_states:
            if self.start is None:
                return self.mdp.credit(measure).reshape(measure.size, measure.size)
            return self.mdp.credit_row(measure, divmod(self.start, measure.shape[1])).ravel()
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
        size, columns = measure.size, np.arange(measure.size)
        choose = sp.csr_array(
            (measure.ravel(), (columns // measure.shape[1], columns)), shape=(len(measure), size)
        )
        if self.mdp.is_sparse:
            return sp.csr_array(self.mdp.p @ choose)
        return self.mdp.dense_p().reshape(size, -1) @ choose

    def spread(self, weights: FloatArray) -> FloatArray:
        """Weights between the K states, ``[n, n]`` or one row ``[n]``, as weights between all S in their proper shape.

        A pair without data has the weights of the one-step operator.
        """
        num_actions = self.behaviour.shape[1]
        shape = (self.num_states,) if self.on_states else (self.num_states, num_actions)
        size = math.prod(shape)
        here = _numbers(self.states, 1 if self.on_states else num_actions)
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


def model_of(
    trajectories: Trajectory,
    c: ArrayLike,
    mu: ArrayLike | None,
    discount: float | None,
    prior: ArrayLike | float,
    start: tuple[int, int] | int | None,
    on_states: bool,
    all_states: bool = False,
) -> Model:
    """Counts a batch of trajectories into an MDP on the states that it holds (and that of the start), or on all.

    The arguments are those of ``certainty_equivalence``.
    """
    traces = traces_of(c)
    num_states, num_actions = traces.shape
    row = row_of(start, num_states, num_actions, on_states)
    gamma = discount_of(trajectories, discount, num_states, num_actions)
    data = EmpiricalMDP.empty(num_states, num_actions).update(trajectories)
    counts = data.with_prior(prior)
    behaviour, source = _behaviour(trajectories, mu, data, counts)

    held = (counts.visits.sum(axis=1) + counts.successors.sum(axis=0)) > 0
    held |= all_states
    per_state = 1 if on_states else num_actions
    if row is not None:
        held[row // per_state] = True
    states = np.flatnonzero(held)
    if row is not None:
        row = int(np.searchsorted(states, row // per_state)) * per_state + row % per_state
    p = counts.transitions("average", behaviour)[_numbers(states, num_actions)][:, states]
    behaviour = behaviour[states]
    traced = traces[states] * behaviour
    if source == "counts":
        traced = traced / np.maximum(traced.sum(axis=1, keepdims=True), 1.0)
    if p.nnz > 0.1 * math.prod(p.shape):
        p = p.toarray().reshape(len(states), num_actions, len(states))
    mdp = TabularMDP(p, np.zeros(behaviour.shape), gamma)
    converging(mdp, traced, states)
    info = EstimateInfo(source, gamma, int(data.visits.sum()), int(data.support.sum()))
    return Model(mdp, states, behaviour, traced, num_states, on_states, row, info)


def _behaviour(
    trajectories: Trajectory, mu: ArrayLike | None, data: EmpiricalMDP, counts: EmpiricalMDP
) -> tuple[FloatArray, str]:
    """μ ``[S, A]``, and where it comes from: given, else logged with the data, else the frequencies of the counts."""
    if mu is not None:
        return checks.distribution("mu", mu, data.visits.shape), "given"
    if trajectories.behaviour is None:
        return counts.action_frequencies(), "counts"
    logged = np.asarray(trajectories.behaviour, dtype=np.float64)
    bad = np.asarray(trajectories.valid) & ~((logged > 0) & (logged <= 1 + 1e-6))
    if bad.any():
        place = np.argwhere(bad)[0]
        raise ValueError(
            f"trajectories.behaviour must lie in (0, 1], but behaviour{checks.where(place)} = {logged[tuple(place)]}"
        )
    return data.logged_behaviour(), "logged"


def _numbers(states: np.ndarray, per_state: int) -> np.ndarray:
    """The numbers of the pairs of some states among all pairs; with 1 per state those of the states."""
    return (states[:, None] * per_state + np.arange(per_state)).ravel()
