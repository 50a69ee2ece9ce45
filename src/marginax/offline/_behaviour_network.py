"""A behaviour policy fitted to a log with observations, and its calibration on episodes it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.stats import norm

from marginax.deep.networks import MLP
from marginax.offline._behaviour import Calibration
from marginax.offline._networks import Training, descend
from marginax.offline._observations import Choices, Pairs

HELD_OUT = 10  # every tenth episode is kept for calibration
_FINE = 0.02  # mean calibration error that a good fit reaches; six times as much is suspicious


@dataclass(frozen=True)
class Behaviour:
    """A fitted behaviour policy.

    Attributes:
        chance: [N] probability or density of the logged actions.
        calibration: on held-out episodes.
        support: share of π's actions that the behaviour policy hardly ever takes, at each row [N].
    """

    chance: np.ndarray
    calibration: Calibration
    support: np.ndarray


def fit_behaviour(pairs: Pairs, seed: int, training: Training) -> Behaviour:
    """Fits a softmax (indices) or a Gaussian with its own spread (vectors) by maximum likelihood."""
    log = pairs.log
    episode = np.repeat(np.arange(log.num_episodes), log.lengths)
    held = episode % HELD_OUT == HELD_OUT - 1 if log.num_episodes >= HELD_OUT else np.zeros(len(log), bool)
    used = np.flatnonzero(~held)
    size, k = pairs.observations.shape[1], pairs.actions.shape[1]
    first, second = jax.random.split(jax.random.key(seed))
    network = MLP(size, k if pairs.discrete else 2 * k, training.hidden, key=first)
    data = (jnp.asarray(pairs.observations[used]), jnp.asarray(pairs.actions[used]))

    def loss(network: Any, _: Any, key: Array, data: Any) -> Array:
        index = jax.random.randint(key, (2 * training.batch,), 0, len(used))
        return -_log_density(network(data[0][index]), data[1][index], pairs.discrete).mean()

    fitted = descend(loss, network, second, training, data)
    outputs = np.asarray(fitted(jnp.asarray(pairs.observations)), dtype=np.float64)
    logs = np.asarray(_log_density(outputs, pairs.actions, pairs.discrete))
    check = held if held.any() else ~held
    following = pairs.following
    ahead = np.asarray(fitted(jnp.asarray(following.observations)), dtype=np.float64)
    return Behaviour(
        chance=np.exp(logs - pairs.log_volume),
        calibration=_calibrate(outputs[check], pairs.actions[check], pairs.discrete),
        support=_unsupported(ahead, following, pairs.discrete, float(np.quantile(logs, 0.002))),
    )


def _log_density(outputs: Any, actions: Any, discrete: bool) -> Any:
    if discrete:
        return (jax.nn.log_softmax(outputs) * actions).sum(axis=-1)
    mean, spread = jnp.split(outputs, 2, axis=-1)
    log_std = jnp.clip(spread, -5.0, 2.0)
    z = (actions - mean) * jnp.exp(-log_std)
    return (-0.5 * z**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(axis=-1)


def _calibrate(outputs: np.ndarray, actions: np.ndarray, discrete: bool) -> Calibration:
    if discrete:
        said = np.asarray(jax.nn.softmax(outputs)).ravel()
        seen = actions.ravel()
        index = np.clip((said * 10).astype(int), 0, 9)
        n = np.bincount(index, minlength=10)
        filled = n > 0
        levels, shares = (np.bincount(index, x, minlength=10)[filled] / n[filled] for x in (said, seen))
        n = n[filled]
    else:
        mean_action, spread = np.split(outputs, 2, axis=-1)
        quantile = norm.cdf((actions - mean_action) * np.exp(-np.clip(spread, -5.0, 2.0))).ravel()
        levels = np.linspace(0.05, 0.95, 19)
        shares = (quantile[:, None] <= levels).mean(axis=0)
        n = np.full(19, len(quantile) / 19)
    error = float((np.abs(levels - shares) * n).sum() / n.sum())
    return Calibration(levels, shares, n, deviation=error / _FINE, error=error)


def _unsupported(outputs: np.ndarray, choices: Choices, discrete: bool, rare: float) -> np.ndarray:
    """[N] weight of π's choices that μ takes with less than 1%, or with less density than 0.2% of its own."""
    if discrete:
        return (choices.weights * (np.asarray(jax.nn.softmax(outputs)) < 0.01)).sum(axis=1)
    share = np.zeros(len(outputs))
    for m in range(choices.weights.shape[1]):
        density = np.asarray(_log_density(outputs, choices.actions[:, m], discrete))
        share += choices.weights[:, m] * (density < rare)
    return share
