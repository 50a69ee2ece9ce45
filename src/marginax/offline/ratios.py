"""Marginalized importance sampling by regression: the weight of a pair is the mean of the weights met there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from marginax.offline.log import Log
from marginax.offline.results import Estimate, Influence


class RegressionSums:
    """w(x,a) = Σ γ^t ρ_t / Σ γ^t over visits of (x,a): least squares on cumulative ratios, tabular.

    It is the paper's ratio form E[C_τ | x_τ, a_τ] with traces π/μ and the start distribution as the start. The value is
    (1/E) Σ γ^t w(x_t,a_t) r_t.
    """

    def __init__(self, num_states: int, num_actions: int, discount: float) -> None:
        self.shape, self.discount = (num_states, num_actions), discount
        self.weighted, self.visits, self.rewards = (np.zeros(self.shape) for _ in range(3))

    def update(self, log: Log, ratios: np.ndarray) -> None:
        """Adds a chunk."""
        rho, gamma, pairs = self._terms(log, ratios)
        for table, values in (
            (self.weighted, gamma * rho),
            (self.visits, gamma),
            (self.rewards, gamma * log.rewards),
        ):
            table += np.bincount(pairs, values, minlength=table.size).reshape(self.shape)

    def merge(self, other: RegressionSums) -> None:
        """Adds the sums of other chunks."""
        self.weighted += other.weighted
        self.visits += other.visits
        self.rewards += other.rewards

    def _terms(self, log: Log, ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gamma = self.discount ** log.times.astype(np.float64)
        return log.products(ratios), gamma, log.states * self.shape[1] + log.actions

    def weights(self) -> np.ndarray:
        """[S, A] ratios, zero where the log never went."""
        return np.divide(self.weighted, self.visits, out=np.zeros(self.shape), where=self.visits > 0)

    def estimate(
        self, chunks: Iterable[tuple[Log, np.ndarray]], episodes: int, unseen: float = 0.0
    ) -> Estimate:
        """The value and its influence, ψ_i = Σ_t γ^t (ρ_t r̂ + w r_t - w r̂) - value, in one more pass.

        `unseen` is what the episodes that its weights miss may add (`ImportanceSums.unseen_rewards`).
        """
        w = self.weights().ravel()
        seen = self.visits > 0
        mean = np.divide(self.rewards, self.visits, out=np.zeros(self.shape), where=seen).ravel()
        value = float(w @ self.rewards.ravel()) / episodes
        influence = Influence(episodes)
        for log, ratios in chunks:
            rho, gamma, pairs = self._terms(log, ratios)
            terms = gamma * (rho * mean[pairs] + w[pairs] * (log.rewards - mean[pairs]))
            influence.add(log.sums(terms) - value)
        visits = self.visits.ravel()
        square = float((visits * w**2).sum())
        ess = float((visits * w).sum()) ** 2 / square if square > 0 else 0.0
        return Estimate(value, influence.groups(), ess, "transitions", unseen)
