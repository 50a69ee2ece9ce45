"""Certainty equivalence with features: the Bellman equation projected on random features, solved at once.

For features φ(x,a) and φ_π(x) = Σ_a π(a|x) φ(x,a), with sums over the log's transitions,

    A = Σ φ (φ - γ φ_π')ᵀ + ridge,   Q = φ·θ, θ = A⁻¹ Σ φ r,   w = φ·A⁻ᵀ Σ_i φ_π(x_0)

(LSTD-Q). Both saddle points of the paper with linear weights and a linear critic over these features have this
solution; with one feature a pair it is the tabular certainty equivalence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from marginax.offline._observations import Choices, Pairs

FEATURES = 400
_BLOCK = 20_000


class Features:
    """Random tanh features of standardised observations; one block of them for each discrete action.

    Args:
        dimension: D of observations.
        actions: K of actions.
        discrete: whether actions are one-hot.
        seed: of the random directions.
        features: how many, in all.
    """

    def __init__(
        self, dimension: int, actions: int, discrete: bool, seed: int, features: int = FEATURES
    ) -> None:
        rng = np.random.default_rng(seed)
        self.discrete, self.actions = discrete, actions
        inputs = dimension if discrete else dimension + actions
        count = max(30, features // actions) if discrete else features
        self.directions = rng.normal(size=(inputs, count)) * 1.5 / np.sqrt(inputs)
        self.shifts = rng.uniform(-2, 2, size=count)
        self.size = (count + inputs + 1) * (actions if discrete else 1)

    def _base(self, inputs: np.ndarray) -> np.ndarray:
        hidden = np.tanh(inputs @ self.directions + self.shifts)
        return np.concatenate([hidden, inputs, np.ones((len(inputs), 1))], axis=1)

    def of_pairs(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """[n, F] φ(x,a)."""
        if not self.discrete:
            return self._base(np.concatenate([observations, actions], axis=1))
        return self._spread(self._base(observations), actions)

    def of_policy(self, choices: Choices) -> np.ndarray:
        """[n, F] Σ_a π(a|x) φ(x,a)."""
        if self.discrete:
            return self._spread(self._base(choices.observations), choices.weights)
        total = np.zeros((len(choices.observations), self.size))
        for m in range(choices.weights.shape[1]):
            inputs = np.concatenate([choices.observations, choices.actions[:, m]], axis=1)
            total += choices.weights[:, m, None] * self._base(inputs)
        return total

    def _spread(self, base: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return (weights[:, :, None] * base[:, None, :]).reshape(len(base), -1)


@dataclass(frozen=True)
class LinearFit:
    """The projected solution.

    Attributes:
        delta: [N] r + γ V(x') - Q(x,a).
        weights: [N] w(x,a), so that (1/E) Σ w r is the value.
        starts: [E] V(x_0).
    """

    delta: np.ndarray
    weights: np.ndarray
    starts: np.ndarray


def fit(pairs: Pairs, discount: float, seed: int, *, rows: np.ndarray | None = None) -> LinearFit:
    """Solves on the transitions where `rows` is true (all of them if None), and applies everywhere."""
    log = pairs.log
    features = Features(pairs.observations.shape[1], pairs.actions.shape[1], pairs.discrete, seed)
    used = np.ones(len(log), bool) if rows is None else rows
    system = np.zeros((features.size, features.size))
    rewards = np.zeros(features.size)
    blocks = [np.arange(i, min(i + _BLOCK, len(log))) for i in range(0, len(log), _BLOCK)]
    for block in blocks:
        phi = features.of_pairs(pairs.observations[block], pairs.actions[block]) * used[block, None]
        change = phi - discount * features.of_policy(pairs.following.take(block))
        system += phi.T @ change
        rewards += phi.T @ log.rewards[block]
    ridge = 1e-6 * np.trace(system) / features.size
    system += ridge * np.eye(features.size)
    first = features.of_policy(pairs.starts)
    theta = np.linalg.solve(system, rewards)
    dual = np.linalg.solve(system.T, first.mean(axis=0) * log.num_episodes)
    delta, weights = np.empty(len(log)), np.empty(len(log))
    for block in blocks:
        phi = features.of_pairs(pairs.observations[block], pairs.actions[block])
        following = features.of_policy(pairs.following.take(block)) @ theta
        delta[block] = log.rewards[block] + discount * following - phi @ theta
        weights[block] = phi @ dual
    return LinearFit(delta, weights, first @ theta)
