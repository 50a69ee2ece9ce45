"""Logs with observations as inputs of function approximation, and certainty equivalence with random features.

For features φ(x,a) and φ_π(x) = Σ_a π(a|x) φ(x,a), with sums over the log's transitions,

    A = Σ φ (φ - γ φ_π')ᵀ + ridge,   Q = φ·θ, θ = A⁻¹ Σ φ r,   w = φ·A⁻ᵀ Σ_i φ_π(x_0)

(LSTD-Q). Both saddle points of the paper with linear weights and a linear critic over these features have this solution; with
one feature per pair it is the tabular certainty equivalence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import numpy as np

from marginax.offline.log import Log
from marginax.offline.policies import FunctionPolicy

SAMPLES = 8  # actions drawn from a continuous target policy to average over
FEATURES = 400
_BLOCK = 20_000


class Choices(eqx.Module):
    """What π does in n states: M actions with weights that sum to 1 (all actions, or draws).

    Attributes:
        observations: [n, D], standardised.
        actions: [M, K] the same actions everywhere (one-hot), or [n, M, K] draws, standardised.
        weights: [n, M].
    """

    observations: Any
    actions: Any
    weights: Any

    def take(self, rows: Any) -> Choices:
        """The choices at some of the states."""
        actions = self.actions if self.actions.ndim == 2 else self.actions[rows]
        return Choices(self.observations[rows], actions, self.weights[rows])


@dataclass(frozen=True)
class Pairs:
    """A log as standardised inputs for function approximation.

    Attributes:
        observations: [N, D].
        actions: [N, K]: one-hot, or standardised.
        following: π at the next observations (weights are zero where the step is terminal).
        starts: π at the first observation of each episode.
        log_volume: log of the volume by which standardising shrank continuous actions.
    """

    log: Log
    observations: np.ndarray
    actions: np.ndarray
    following: Choices
    starts: Choices
    log_volume: float = 0.0

    @property
    def discrete(self) -> bool:
        """Whether actions are one-hot."""
        return self.starts.actions.ndim == 2


def prepare(log: Log, policy: FunctionPolicy, seed: int) -> Pairs:
    """Standardises a log and asks the policy at every state that matters.

    Raises:
        ValueError: if the policy's answer does not fit the log's actions.
    """
    rng = np.random.default_rng(seed)
    observations = _matrix(log.states)
    centre, scale = observations.mean(axis=0), observations.std(axis=0)
    scale = np.where(scale > 1e-8, scale, 1.0)
    first = log.offsets[:-1]
    if log.discrete_actions:
        probabilities = policy(log.states[:1])
        if isinstance(probabilities, tuple):
            raise ValueError(f"the policy {policy.name} is Gaussian, and the log's actions are indices")
        num_actions = probabilities.shape[1]
        if int(log.actions.max()) >= num_actions:
            row = int(np.argmax(log.actions >= num_actions))
            raise ValueError(
                f"{log.where(row)}: action {log.actions[row]}, and the policy has {num_actions} actions"
            )
        taken = np.eye(num_actions, dtype=np.float32)[log.actions]
        action_centre, action_scale = np.zeros(num_actions), np.ones(num_actions)
    else:
        action_centre, action_scale = log.actions.mean(axis=0), log.actions.std(axis=0)
        action_scale = np.where(action_scale > 1e-8, action_scale, 1.0)
        taken = ((log.actions - action_centre) / action_scale).astype(np.float32)

    def ask(states: np.ndarray) -> Choices:
        standard = ((_matrix(states) - centre) / scale).astype(np.float32)
        answer = policy(states)
        if not isinstance(answer, tuple):
            if not log.discrete_actions:
                raise ValueError(
                    f"the policy {policy.name} returned probabilities; the log's actions are vectors"
                )
            return Choices(standard, np.eye(answer.shape[1], dtype=np.float32), answer.astype(np.float32))
        mean, std = answer
        if mean.shape[1] != taken.shape[1]:
            raise ValueError(
                f"the policy {policy.name} returned actions of {mean.shape[1]} numbers, the log has {taken.shape[1]}"
            )
        noise = rng.standard_normal((len(mean), SAMPLES // 2, mean.shape[1]))
        noise = np.concatenate([noise, -noise], axis=1)
        draws = (mean[:, None] + std[:, None] * noise - action_centre) / action_scale
        weights = np.full((len(mean), SAMPLES), 1 / SAMPLES, np.float32)
        return Choices(standard, draws.astype(np.float32), weights)

    following = ask(np.where(log.terminal[:, None], _matrix(log.states), _matrix(log.next_states)))
    following = Choices(following.observations, following.actions, following.weights * ~log.terminal[:, None])
    standard = ((observations - centre) / scale).astype(np.float32)
    volume = 0.0 if log.discrete_actions else float(np.log(action_scale).sum())
    return Pairs(log, standard, taken, following, ask(log.states[first]), volume)


def target_probability(policy: FunctionPolicy, log: Log) -> np.ndarray:
    """[N] probability or density of the logged actions under the target policy.

    Raises:
        ValueError: for a deterministic policy over continuous actions, which has no density.
    """
    answer = policy(log.states)
    if not isinstance(answer, tuple):
        return np.take_along_axis(answer, log.actions[:, None], axis=1)[:, 0]
    mean, std = answer
    if (std <= 0).any():
        raise ValueError(
            f"the policy {policy.name} is deterministic: it has no density for importance sampling; give it a std"
        )
    z = (log.actions - mean) / std
    return np.exp(-0.5 * (z**2).sum(axis=1) - np.log(std).sum(axis=1) - 0.5 * z.shape[1] * np.log(2 * np.pi))


def _matrix(states: np.ndarray) -> np.ndarray:
    return states.reshape(len(states), -1).astype(np.float64)


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
        delta: [N] r + γ V(x') - Q(x,a), with the values of its step where there is a horizon.
        weights: [N] w(x,a), so that (1/E) Σ w r is the value.
        weighted_errors: [N] w δ, summed over the steps at which π may meet the pair.
        starts: [E] V(x_0).
    """

    delta: np.ndarray
    weights: np.ndarray
    weighted_errors: np.ndarray
    starts: np.ndarray


def fit(
    pairs: Pairs, discount: float, seed: int, *, rows: np.ndarray | None = None, horizon: int | None = None
) -> LinearFit:
    """Solves on the transitions where `rows` is true (all of them if None), and applies everywhere.

    With a horizon the equation is solved backwards: θ_h = G⁻¹ (Σ φ r + γ Σ φ φ_π'ᵀ θ_{h+1}), G = Σ φφᵀ + ridge.
    """
    log = pairs.log
    features = Features(pairs.observations.shape[1], pairs.actions.shape[1], pairs.discrete, seed)
    used = np.ones(len(log), bool) if rows is None else rows
    gram, ahead = np.zeros((2, features.size, features.size))
    rewards = np.zeros(features.size)
    blocks = [np.arange(i, min(i + _BLOCK, len(log))) for i in range(0, len(log), _BLOCK)]
    for block in blocks:
        phi = features.of_pairs(pairs.observations[block], pairs.actions[block]) * used[block, None]
        after = discount * features.of_policy(pairs.following.take(block))
        if horizon is None:
            gram += phi.T @ (phi - after)
        else:
            gram += phi.T @ phi
            ahead += phi.T @ after
        rewards += phi.T @ log.rewards[block]
    gram += 1e-6 * np.trace(gram) / features.size * np.eye(features.size)
    first = features.of_policy(pairs.starts)
    begin = first.mean(axis=0) * log.num_episodes
    delta, weights, weighted = np.empty((3, len(log)))
    if horizon is None:
        theta, dual = np.linalg.solve(gram, rewards), np.linalg.solve(gram.T, begin)
        for block in blocks:
            phi = features.of_pairs(pairs.observations[block], pairs.actions[block])
            following = features.of_policy(pairs.following.take(block)) @ theta
            delta[block] = log.rewards[block] + discount * following - phi @ theta
            weights[block] = phi @ dual
        return LinearFit(delta, weights, weights * delta, first @ theta)
    inverse = np.linalg.inv(gram)
    thetas, duals = np.zeros((horizon + 1, features.size)), np.empty((horizon, features.size))
    for h in reversed(range(horizon)):
        thetas[h] = inverse @ (rewards + ahead @ thetas[h + 1])
    for h in range(horizon):
        duals[h] = inverse.T @ begin
        begin = ahead.T @ duals[h]
    total, next_terms, here_terms = duals.sum(axis=0), duals.T @ thetas[1:], duals.T @ thetas[:-1]
    times = np.minimum(log.times, horizon - 1)
    for block in blocks:
        phi = features.of_pairs(pairs.observations[block], pairs.actions[block])
        after = discount * features.of_policy(pairs.following.take(block))
        t = times[block]
        delta[block] = log.rewards[block] + ((after * thetas[t + 1]) - (phi * thetas[t])).sum(axis=1)
        weights[block] = phi @ total
        bilinear = ((phi @ next_terms) * after - (phi @ here_terms) * phi).sum(axis=1)
        weighted[block] = weights[block] * log.rewards[block] + bilinear
    return LinearFit(delta, weights, weighted, first @ thetas[0])
