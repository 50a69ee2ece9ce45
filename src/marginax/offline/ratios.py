"""Marginalized importance sampling with ratios that the log's own weights give: by regression on pairs, and on states.

Under a Markov behaviour policy the action taken in x does not know how x was reached, so that the ratio of a pair factorises,
w(x,a) = u(x) π(a|x)/μ(a|x). `StateRatioSums` estimates only u, on states; the action keeps its own ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax.offline.certainty_equivalence import (
    Layers,
    Model,
    WeightedErrors,
    effective_transitions,
    left_out,
)
from marginax.offline.log import FOLDS, Accumulator, Log, add_at, divided
from marginax.offline.results import Estimate, Influence, effective_size


class RegressionSums(Accumulator):
    """w(x,a) = Σ γ^t ρ_t / Σ γ^t over visits of (x,a): least squares on cumulative ratios, tabular.

    It is the paper's ratio form E[C_τ | x_τ, a_τ] with traces π/μ and the start distribution as the start. The value is
    (1/E) Σ γ^t w(x_t,a_t) r_t.
    """

    added = ("weighted", "visits", "rewards")

    def __init__(
        self, num_states: int, num_actions: int, discount: float, horizon: int | None = None
    ) -> None:
        self.shape, self.discount, self.horizon = (num_states, num_actions), discount, horizon
        self.weighted, self.visits, self.rewards = (np.zeros(self.shape) for _ in range(3))

    def update(self, log: Log, ratios: np.ndarray, first: int = 0) -> None:
        """Adds a chunk."""
        rho, gamma, pairs = self._terms(log, ratios)
        add_at(self.weighted, pairs, gamma * rho)
        add_at(self.visits, pairs, gamma)
        add_at(self.rewards, pairs, gamma * log.rewards)

    def _terms(self, log: Log, ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        times = log.times
        gamma = self.discount ** times.astype(np.float64)
        if self.horizon is not None:
            gamma = np.where(times < self.horizon, gamma, 0.0)
        return log.products(ratios), gamma, log.pairs(self.shape[1])

    def weights(self) -> np.ndarray:
        """[S, A] ratios, zero where the log never went."""
        return divided(self.weighted, self.visits)


class RegressionEstimate(Accumulator):
    """The value and its influence, ψ_i = Σ_t γ^t (ρ_t r̂ + w r_t - w r̂) - value, in one more pass.

    `unseen` is what the episodes that its weights miss may add.
    """

    added = ("influence",)

    def __init__(self, sums: RegressionSums, episodes: int, unseen: float = 0.0) -> None:
        self.sums, self.unseen = sums, unseen
        self.weights = sums.weights().ravel()
        self.mean = divided(sums.rewards, sums.visits).ravel()
        self.value = float(self.weights @ sums.rewards.ravel()) / episodes
        self.influence = Influence(episodes)

    def update(self, log: Log, ratios: np.ndarray, first: int = 0) -> None:
        """Adds a chunk."""
        rho, gamma, pairs = self.sums._terms(log, ratios)
        w, mean = self.weights[pairs], self.mean[pairs]
        terms = gamma * (rho * mean + w * (log.rewards - mean))
        self.influence.add(log.sums(terms) - self.value, first)

    def estimates(self) -> dict[str, Estimate]:
        """By name."""
        visits, w = self.sums.visits.ravel(), self.weights
        ess = effective_transitions(w, visits)
        return {"regression": Estimate(self.value, self.influence.groups(), ess, "transitions", self.unseen)}


class StateRatioSums(Accumulator):
    """Sums of one-step ratios by state, for each fold of episodes: Σρ, Σρr, and Σρ by successor.

    They make a process on states, K(x'|x) = Σρ 1{x'} / Σρ and r̂(x) = Σρr / Σρ, in which nothing is lost where π takes an action
    that the log missed by chance: the actions seen there stand for it. With ratios 1 it is the process of the log's own policy.
    """

    added = ("mass", "rewards", "squares", "starts", "seen")

    def __init__(self, num_states: int, discount: float) -> None:
        s = num_states
        self.discount = discount
        self.mass, self.rewards, self.squares = (np.zeros((FOLDS, s)) for _ in range(3))
        self.starts = np.zeros(s)
        self.successors = [sp.csr_array((s, s)) for _ in range(FOLDS)]
        self.seen = np.zeros(FOLDS, int)

    def update(self, log: Log, ratios: np.ndarray, first: int = 0) -> None:
        """Adds a chunk."""
        folds = log.folds(first)
        fold = folds[log.episode]
        s = len(self.starts)
        key = fold * s + log.states
        add_at(self.mass, key, ratios)
        add_at(self.rewards, key, ratios * log.rewards)
        add_at(self.squares, key, ratios**2)
        self.starts += np.bincount(log.states[log.offsets[:-1]], minlength=s)
        for k in range(FOLDS):
            rows = (fold == k) & ~log.terminal & (ratios > 0)
            entries = (ratios[rows], (log.states[rows], log.next_states[rows]))
            self.successors[k] = self.successors[k] + sp.coo_array(entries, shape=(s, s)).tocsr()
        self.seen += np.bincount(folds, minlength=FOLDS)

    def merge(self, other: StateRatioSums) -> None:
        """Adds the sums of other chunks."""
        super().merge(other)
        self.successors = [a + b for a, b in zip(self.successors, other.successors, strict=True)]

    def solve(self, horizon: int | None, fold: int | None = None) -> tuple[Layers, np.ndarray, Any]:
        """Values and visits on states, the ratio Σ_t γ^t d_t(x) per unit of Σρ and episode, and the sums by successor."""
        picked = range(FOLDS) if fold is None else (fold,)
        mass, rewards = (sum(table[k] for k in picked) for table in (self.mass, self.rewards))
        successors = sum((self.successors[k] for k in picked), sp.csr_array(self.successors[0].shape))
        inverse = divided(1.0, mass)
        kernel = sp.csr_array(sp.diags_array(inverse) @ successors)
        starts = self.starts / self.starts.sum()
        unknown = (mass == 0).astype(float)
        layers = Layers(kernel, rewards * inverse, unknown, starts, mass, self.discount, horizon)
        return layers, layers.d * inverse * self.seen[list(picked)].sum(), successors


class StateRatioEstimate(Accumulator):
    """`state-ratio` and its doubly robust form, with influences, in one more pass.

    - state-ratio: J = Σ ρ₀ V, where V = r̂ + γKV; equivalently (1/E) Σ u(x) ρ r. To first order an episode changes it by
      ψ_i = V(x_0) - J + Σ_t u(x_t) ρ_t (r_t + γV(x_{t+1}) - V(x_t)).
    - doubly robust: the mean over episodes of V(x_0) + Σ_t u(x_t) ρ_t (r_t + γV(x_{t+1}) - Q(x_t,a_t)), with Q by certainty
      equivalence and u from the other fold. It is right if either is (Kallus and Uehara 2020).

    Args:
        sums: of the whole log.
        critics: the critic of each fold, fitted on the others; None leaves the doubly robust form out.
        successors: [S*A, S] which successors the whole log has seen.
        horizon: number of steps whose rewards count.
    """

    added = ("influence", "robust", "total")

    def __init__(
        self, sums: StateRatioSums, critics: list[Model] | None, successors: Any, horizon: int | None
    ) -> None:
        self.sums, self.critics, self.mass = sums, critics, sums.mass.sum(axis=0)
        self.layers, self.ratio, of_states = sums.solve(horizon)
        starts = sums.starts / sums.starts.sum()
        self.value = float(starts @ self.layers.v[0])
        self.errors = WeightedErrors(self.ratio, self.layers.v[:-1], self.layers.v, of_states, sums.discount)
        self.episodes = int(sums.seen.sum())
        self.influence = Influence(self.episodes)
        if critics is not None:
            others = [sums.solve(horizon, fold)[1] for fold in reversed(range(FOLDS))]
            self.robust_errors = [
                _pair_errors(u, m, successors) for u, m in zip(others, critics, strict=True)
            ]
        self.robust = Influence(self.episodes)
        self.total = 0.0

    def update(self, log: Log, ratios: np.ndarray, first: int = 0) -> None:
        """Adds a chunk."""
        begin = log.states[log.offsets[:-1]]
        factor = left_out(log, log.states, self.mass, ratios)
        errors = ratios * self.errors(log, log.states) * np.where(np.isinf(factor), 1.0, factor)
        psi = self.layers.v[0, begin] - self.value + log.sums(errors)
        self.influence.add(psi, first)
        if self.critics is None:
            return
        fold = log.folds(first)
        pairs = log.pairs(self.critics[0].weights.shape[1])
        terms = np.choose(fold[log.episode], [errors(log, pairs) for errors in self.robust_errors])
        base = np.choose(fold, [critic.v[0, begin] for critic in self.critics])
        each = base + log.sums(ratios * terms)
        self.robust.add(each, first)
        self.total += float(each.sum())

    def estimates(self) -> dict[str, Estimate]:
        """By name."""
        u, mass = self.ratio.sum(axis=0), self.mass
        squares = self.sums.squares.sum(axis=0)
        ess = effective_size(float((mass * u).sum()), float((squares * u**2).sum()))
        lost = self.layers.unsupported
        found = {"state-ratio": Estimate(self.value, self.influence.groups(), ess, "transitions", lost=lost)}
        if self.critics is not None:
            value = self.total / self.episodes
            influence = self.robust.groups(value)
            found["doubly-robust-state-ratio"] = Estimate(value, influence, ess, "transitions", lost=lost)
        return found


def _pair_errors(ratio: np.ndarray, critic: Model, successors: Any) -> WeightedErrors:
    """u of states and the critic's errors, as a table of pairs."""
    layers, s = ratio.shape
    a = critic.weights.shape[1]
    wide = np.repeat(ratio, a, axis=1)
    return WeightedErrors(wide, critic.q.reshape(layers, s * a), critic.v, successors, critic.discount)


class LoggedValue(StateRatioEstimate):
    """The value of the log's own policy on states (all ratios are 1), which bootstraps where the plain average stops."""

    def update(self, log: Log, ratios: np.ndarray, first: int = 0) -> None:
        """Adds a chunk."""
        super().update(log, np.ones(len(log)), first)

    def estimates(self) -> dict[str, Estimate]:
        """By name."""
        return {"logged value": super().estimates()["state-ratio"]}


class SecondLook(Accumulator):
    """Estimators that need a second pass over the log, which is shown to all of them together.

    Args:
        ratios: π/μ of the logged actions of a chunk.
        estimators: with `update(log, ratios, first)`, `merge` and `estimates`.
    """

    def __init__(self, ratios: Callable[[Log], np.ndarray], estimators: list[Any]) -> None:
        self.ratios, self.estimators = ratios, estimators

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        ratios = self.ratios(log)
        for estimator in self.estimators:
            estimator.update(log, ratios, first)

    def merge(self, other: SecondLook) -> None:
        """Adds what was gathered from other chunks."""
        for mine, others in zip(self.estimators, other.estimators, strict=True):
            mine.merge(others)

    def estimates(self) -> dict[str, Estimate]:
        """By name."""
        return {name: value for estimator in self.estimators for name, value in estimator.estimates().items()}
