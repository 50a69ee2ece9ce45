"""Logs with observations as inputs of function approximation, and certainty equivalence with random features.

For features φ(x,a) and φ_π(x) = Σ_a π(a|x) φ(x,a), with sums over the log's transitions,

    A = Σ φ (φ - γ φ_π')ᵀ + ridge,   Q = φ·θ, θ = A⁻¹ Σ φ r,   w = φ·A⁻ᵀ Σ_i φ_π(x_0)

(LSTD-Q). Both saddle points of the paper with linear weights and a linear critic over these features have this solution; with
one feature per pair it is the tabular certainty equivalence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import numpy as np

from marginax.offline.log import Log
from marginax.offline.policies import FunctionPolicy

SAMPLES = 8  # actions drawn from a continuous target policy to average over
FEATURES = 400
_BLOCK = 20_000
_EXACT = 100_000  # transitions above which products of features have single precision; values change by about 3e-5 of themselves


class Choices(eqx.Module):
    """What π does in n states: M actions with weights that sum to 1. They are all actions, or draws.

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

    @property
    def never(self) -> np.ndarray:
        """[K] actions that the log never takes; none of them where actions are continuous."""
        if not self.discrete:
            return np.zeros(self.actions.shape[1], bool)
        return np.asarray(self.actions.sum(axis=0) == 0)

    def some(self, most: int, seed: int) -> tuple[Pairs, np.ndarray]:
        """Episodes with about `most` transitions, drawn without replacement, and their rows in the log; all if there are no more."""
        log = self.log
        if len(log) <= most:
            return self, np.arange(len(log))
        order = np.random.default_rng(seed).permutation(log.num_episodes)
        enough = int(np.searchsorted(np.cumsum(log.lengths[order]), most)) + 1
        drawn = np.sort(order[:enough])
        rows = np.flatnonzero(np.isin(log.episode, drawn))
        taken = (
            self.observations[rows],
            self.actions[rows],
            self.following.take(rows),
            self.starts.take(drawn),
        )
        return Pairs(log.select(drawn), *taken, self.log_volume), rows


class Standard(NamedTuple):
    """Shift and scale that give columns mean 0 and standard deviation 1. A constant column is only shifted."""

    centre: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, columns: np.ndarray) -> Standard:
        """For columns [n, D] like these."""
        scale = columns.std(axis=0)
        return cls(columns.mean(axis=0), np.where(scale > 1e-8, scale, 1.0))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """[..., D] standardised, in single precision."""
        return ((values - self.centre) / self.scale).astype(np.float32)


def prepare(log: Log, policy: FunctionPolicy, seed: int) -> Pairs:
    """Standardises a log, and asks the policy for its actions at the next and the first observations.

    Raises:
        ValueError: if the policy's answer does not fit the log's actions.
    """
    rng = np.random.default_rng(seed)
    standard = Standard.of(_matrix(log.states))
    standard_action, log_volume = None, 0.0
    if log.discrete_actions:
        taken = np.eye(_number_of_actions(log, policy), dtype=np.float32)[log.actions]
    else:
        standard_action = Standard.of(log.actions)
        taken, log_volume = standard_action(log.actions), float(np.log(standard_action.scale).sum())

    def ask(states: np.ndarray) -> Choices:
        observations, answer = standard(_matrix(states)), policy(states)
        if not isinstance(answer, tuple):
            if standard_action is not None:
                raise ValueError(
                    f"the policy {policy.name} returned probabilities; the log's actions are vectors"
                )
            return Choices(observations, np.eye(answer.shape[1], dtype=np.float32), answer.astype(np.float32))
        mean, std = answer
        if mean.shape[1] != taken.shape[1]:
            raise ValueError(
                f"the policy {policy.name} returned actions of {mean.shape[1]} numbers, the log has {taken.shape[1]}"
            )
        assert standard_action is not None
        noise = rng.standard_normal((len(mean), SAMPLES // 2, mean.shape[1]))
        noise = np.concatenate([noise, -noise], axis=1)
        draws = standard_action(mean[:, None] + std[:, None] * noise)
        return Choices(observations, draws, np.full((len(mean), SAMPLES), 1 / SAMPLES, np.float32))

    ended = np.expand_dims(log.terminal, tuple(range(1, log.states.ndim)))
    following = ask(np.where(ended, log.states, log.next_states))
    following = replace(following, weights=following.weights * ~log.terminal[:, None])
    starts = ask(log.states[log.offsets[:-1]])
    return Pairs(log, standard(_matrix(log.states)), taken, following, starts, log_volume)


def _number_of_actions(log: Log, policy: FunctionPolicy) -> int:
    """How many actions the policy has, for logs whose actions are indices."""
    answer = policy(log.states[:1])
    if isinstance(answer, tuple):
        raise ValueError(f"the policy {policy.name} is Gaussian, and the log's actions are indices")
    number: int = answer.shape[1]
    if int(log.actions.max()) >= number:
        row = int(np.argmax(log.actions >= number))
        raise ValueError(f"{log.where(row)}: action {log.actions[row]}, and the policy has {number} actions")
    return number


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
        dtype: of the features.
    """

    def __init__(
        self,
        dimension: int,
        actions: int,
        discrete: bool,
        seed: int,
        features: int = FEATURES,
        dtype: Any = np.float64,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.discrete, self.actions = discrete, actions
        inputs = dimension if discrete else dimension + actions
        count = max(30, features // actions) if discrete else features
        self.directions = (rng.normal(size=(inputs, count)) * 1.5 / np.sqrt(inputs)).astype(dtype)
        self.shifts = rng.uniform(-2, 2, size=count).astype(dtype)
        self.size = (count + inputs + 1) * (actions if discrete else 1)

    def _base(self, inputs: np.ndarray) -> np.ndarray:
        n, count = len(inputs), len(self.shifts)
        base = np.empty((n, count + inputs.shape[1] + 1), self.shifts.dtype)
        hidden = inputs @ self.directions
        hidden += self.shifts
        np.tanh(hidden, out=base[:, :count])
        base[:, count:-1], base[:, -1] = inputs, 1.0
        return base

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

    def blocks(self, actions: np.ndarray) -> list[tuple[np.ndarray, slice]]:
        """Rows of one-hot actions by the block of φ that is not zero there; all rows and all of φ for other actions."""
        if not self.discrete:
            return [(np.arange(len(actions)), slice(None))]
        width = self.size // self.actions
        return [
            (np.flatnonzero(actions[:, a]), slice(a * width, (a + 1) * width)) for a in range(self.actions)
        ]

    def in_block(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """[n, width] the entries of φ(x,a) in its block, which is the same for all rows."""
        return self._base(observations if self.discrete else np.concatenate([observations, actions], axis=1))

    def pairs_times(self, observations: np.ndarray, actions: np.ndarray, theta: np.ndarray) -> np.ndarray:
        """[n, K] φ(x,a)·θ, for θ [F, K]."""
        if self.discrete:
            return self._blocks_times(observations, actions, theta)
        return self.of_pairs(observations, actions) @ theta

    def policy_times(self, choices: Choices, theta: np.ndarray) -> np.ndarray:
        """[n, K] Σ_a π(a|x) φ(x,a)·θ."""
        if self.discrete:
            return self._blocks_times(choices.observations, choices.weights, theta)
        return self.of_policy(choices) @ theta

    def _blocks_times(self, observations: np.ndarray, weights: np.ndarray, theta: np.ndarray) -> np.ndarray:
        blocks = theta.reshape(self.actions, -1, theta.shape[1]).swapaxes(0, 1)
        table = self._base(observations) @ blocks.reshape(len(blocks), -1)
        return np.einsum("na,nak->nk", weights, table.reshape(len(table), self.actions, -1))


@dataclass(frozen=True)
class LinearFit:
    """The solution of LSTD-Q.

    Attributes:
        delta: [N] r + γ V(x') - Q(x,a), with the values of its step where there is a horizon.
        weights: [N] w(x,a), so that (1/E) Σ w r is the value.
        leading: [N] the same without the last step of the horizon, which no other step follows.
        weighted_errors: [N] w δ, with a horizon summed over the steps at which π may visit the pair.
        starts: [E] V(x_0).
        crossed: [N] δ and [E] V(x_0) by a fit to the other half of the episodes.
    """

    delta: np.ndarray
    weights: np.ndarray
    leading: np.ndarray
    weighted_errors: np.ndarray
    starts: np.ndarray
    crossed: tuple[np.ndarray, np.ndarray]


def fit(pairs: Pairs, discount: float, seed: int, *, horizon: int | None = None) -> LinearFit:
    """LSTD-Q on all transitions, and for each half of the episodes on those of the other half."""
    log = pairs.log
    sizes = pairs.observations.shape[1], pairs.actions.shape[1]
    dtype = np.float64 if len(log) <= _EXACT else np.float32
    features = Features(*sizes, pairs.discrete, seed, dtype=dtype)
    size, fold = features.size, log.folds()
    by_row = fold[log.episode]
    step = max(500, min(_BLOCK, 4_000_000 // (horizon or 1)))
    blocks = [  # rows of one fold whose features are zero outside of the same entries
        (k, rows[i : i + step], entries)
        for own, entries in features.blocks(pairs.actions)
        for k, rows in enumerate((own[by_row[own] == 0], own[by_row[own] == 1]))
        for i in range(0, len(rows), step)
    ]

    # Σ φφᵀ, γ Σ φφ_π'ᵀ and Σ φr of each fold.
    gram, ahead = np.zeros((2, 2, size, size))
    rewards = np.zeros((2, size))
    for k, block, entries in blocks:
        phi = features.in_block(pairs.observations[block], pairs.actions[block])
        gram[k, entries, entries] += phi.T @ phi
        ahead[k, entries] += discount * (phi.T @ features.of_policy(pairs.following.take(block)))
        rewards[k, entries] += log.rewards[block] @ phi

    first = features.of_policy(pairs.starts)
    begin = first.mean(axis=0) * log.num_episodes
    now, later, dual = _solve(gram.sum(axis=0), ahead.sum(axis=0), rewards.sum(axis=0), begin, horizon)
    others = [_solve(gram[1 - k], ahead[1 - k], rewards[1 - k], begin, horizon)[:2] for k in (0, 1)]

    delta, weights, leading, weighted, crossed = np.empty((5, len(log)))
    for k, block, _ in blocks:
        now_other, later_other = others[k]
        r, following = log.rewards[block], pairs.following.take(block)
        thetas = np.concatenate([now, now_other, dual], axis=1), np.concatenate([later, later_other], axis=1)
        here = features.pairs_times(pairs.observations[block], pairs.actions[block], thetas[0])
        after = features.policy_times(following, thetas[1])
        q, q_other, w = np.split(here, 3, axis=1)  # for each step that counts
        v, v_other = np.split(after, 2, axis=1)
        change, change_other = discount * v - q, discount * v_other - q_other
        t = np.minimum(log.times[block], now.shape[1] - 1)[:, None]
        delta[block] = r + np.take_along_axis(change, t, axis=1)[:, 0]
        crossed[block] = r + np.take_along_axis(change_other, t, axis=1)[:, 0]
        weights[block] = w.sum(axis=1)
        leading[block] = w[:, : None if horizon is None else -1].sum(axis=1)
        weighted[block] = weights[block] * r + (w * change).sum(axis=1)
    starts = np.where(fold == 0, *(first @ theta[:, 0] for theta, _ in others))
    return LinearFit(delta, weights, leading, weighted, first @ now[:, 0], (crossed, starts))


def _solve(
    gram: np.ndarray, ahead: np.ndarray, rewards: np.ndarray, begin: np.ndarray, horizon: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[F, H] θ, θ of the following step and the dual, for each step of the horizon; without a horizon H = 1.

    With a horizon the equation is solved backwards: θ_h = G⁻¹ (Σ φ r + γ Σ φ φ_π'ᵀ θ_{h+1}), G = Σ φφᵀ + ridge.
    """
    system = gram - ahead if horizon is None else gram.copy()
    system += 1e-6 * np.trace(system) / len(system) * np.eye(len(system))
    if horizon is None:
        theta = np.linalg.solve(system, rewards)[:, None]
        return theta, theta, np.linalg.solve(system.T, begin)[:, None]
    inverse = np.linalg.inv(system)
    thetas, duals = np.zeros((horizon + 1, len(system))), np.empty((horizon, len(system)))
    for h in reversed(range(horizon)):
        thetas[h] = inverse @ (rewards + ahead @ thetas[h + 1])
    for h in range(horizon):
        duals[h] = inverse.T @ begin
        begin = ahead.T @ duals[h]
    return thetas[:-1].T, thetas[1:].T, duals.T
