"""The behaviour policy μ: logged with each action, given as a table, or estimated; and is it right?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.optimize import minimize
from scipy.special import log_softmax
from scipy.stats import norm, poisson

from marginax import _checks as checks
from marginax.deep.networks import MLP
from marginax.offline.features import Choices, Pairs
from marginax.offline.log import divided
from marginax.offline.networks import Training, descend, everywhere
from marginax.offline.policies import probabilities
from marginax.weights.empirical import EmpiricalMDP

BEHAVIOURS = ("auto", "logged", "estimated")  # where its probabilities may come from
NOT_LOGGED = "behaviour is to be taken from the log, which has no behaviour probabilities"
HELD_OUT = 10  # every tenth episode is kept for calibration
_RARE = 0.002  # of the log's own actions have a density that counts as outside it
_FINE = 0.02  # mean calibration error that a good fit reaches; six times as much is suspicious


@dataclass(frozen=True)
class Calibration:
    """Predicted probabilities against observed frequencies, in bins of the prediction.

    Attributes:
        predicted: [B] mean probability in each bin.
        observed: [B] frequency of the actions concerned.
        weight: [B] number of decisions behind each bin.
        deviation: how far, in standard errors, all frequencies together lie from the predictions.
        error: mean |predicted - observed| over decisions.
        rare_deviation: how far, in standard errors, rare actions were taken more often than predicted.
    """

    predicted: np.ndarray
    observed: np.ndarray
    weight: np.ndarray
    deviation: float
    error: float
    rare_deviation: float = 0.0

    @property
    def suspicious(self) -> bool:
        """Whether chance hardly explains the difference (six standard errors)."""
        return max(self.deviation, self.rare_deviation) > 6.0


def calibration(counts: EmpiricalMDP, table: np.ndarray | None = None) -> Calibration:
    """Compares logged (or given) behaviour probabilities with how often each action was taken.

    Under the logged policy, Pearson's sum Σ_a N(x) (f(a|x) - μ(a|x))² / μ(a|x), of the frequencies f of the N(x) decisions in x,
    is chi-squared, with as many degrees of freedom as there are actions, less one; see `_chi_squared_deviation`. It needs
    actions that are expected five times or more. For the others see `_rare_deviation`.
    """
    n = counts.visits
    total = n.sum(axis=1, keepdims=True)
    seen = counts.support
    frequency = divided(n, total)
    if table is None:
        predicted, usable = mean_logged(counts), seen
    else:
        predicted, usable = table, np.broadcast_to(total > 0, n.shape)
    common = usable & (total * np.minimum(predicted, 1 - predicted) >= 5)
    squares = divided(total * (frequency - predicted) ** 2, predicted) * common
    deviation = _chi_squared_deviation(float(squares.sum()), predicted * common, common.sum(axis=1))
    rare = usable & seen & (total * predicted < 5)
    impossible = usable & (predicted < 1e-12) & seen
    index = np.clip(np.digitize(predicted[usable], np.linspace(0, 1, 11)) - 1, 0, 9)
    weight = np.broadcast_to(total, n.shape)[usable]
    size = np.bincount(index, weight, minlength=10)
    filled = size > 0

    def binned(x: np.ndarray) -> np.ndarray:
        return np.bincount(index, x * weight, minlength=10)[filled] / size[filled]

    return Calibration(
        predicted=binned(predicted[usable]),
        observed=binned(frequency[usable]),
        weight=size[filled],
        deviation=np.inf if impossible.any() else deviation,
        error=float((n * np.abs(predicted - frequency))[usable].sum() / n.sum()),
        rare_deviation=_rare_deviation(n[rare], np.broadcast_to(total, n.shape)[rare], predicted[rare]),
    )


def _chi_squared_deviation(squares: float, probabilities: np.ndarray, actions: np.ndarray) -> float:
    """How far a sum of squares over states lies above its mean, in standard errors of a normal variable as improbable.

    In a state the standardised frequencies of K actions with probabilities v² have covariance M = I - vvᵀ, so that the sum of their
    squares has mean tr M and variance 2 tr M². The sum over states is taken as a multiple of a chi-squared variable with these
    two moments, which is exact where no action is left out; its cube root is nearly normal (Wilson and Hilferty).

    Args:
        squares: the sum.
        probabilities: [S, A] of the actions that count, zero for others.
        actions: [S] their number.
    """
    length = probabilities.sum(axis=1)
    mean = float((actions - length).sum())
    variance = 2 * float((actions - 2 * length + length**2).sum())
    if mean <= 0:
        return 0.0
    spread = variance / (9 * mean**2)  # 2 / (9 degrees of freedom)
    return float((np.cbrt(squares / mean) - (1 - spread)) / np.sqrt(spread))


def _rare_deviation(taken: Any, decisions: np.ndarray, probabilities: np.ndarray) -> float:
    """How far rare actions were taken more often than predicted, in standard errors of a normal variable as improbable.

    Of N decisions with probability p, the number n of those that took the action has mean Np / (1 - (1 - p)^N) given that it was
    taken at all. The sum over rare pairs of n - 1, which is nearly Poisson, is compared with its mean.

    Args:
        taken: n of each rare pair that was taken.
        decisions: N.
        probabilities: p.
    """
    p = np.maximum(probabilities, 1e-12)
    mean = decisions * p / -np.expm1(decisions * np.log1p(-np.minimum(p, 1 - 1e-12)))
    improbable = poisson.sf((taken - 1).sum() - 1, max(float((mean - 1).sum()), 0.0))
    return float(norm.isf(improbable)) if improbable < 0.5 else 0.0


def mean_logged(counts: EmpiricalMDP) -> np.ndarray:
    """[S, A] the mean logged probability of each pair, zero where the log never took it."""
    return divided(counts.behaviour_sums, counts.visits)


def behaviour_table(behaviour: Any, counts: EmpiricalMDP, logged: bool) -> tuple[np.ndarray | None, str]:
    """The table to take μ from (None: the log's own column), and in a word where it comes from."""
    if isinstance(behaviour, str):
        if behaviour not in BEHAVIOURS:
            raise ValueError(f"behaviour must be auto, logged, estimated or a table, got {behaviour!r}")
        if behaviour == "logged" and not logged:
            raise ValueError(NOT_LOGGED)
        if behaviour != "estimated" and logged:
            return None, "logged"
        return counts.action_frequencies(), "estimated"
    table = checks.array("behaviour", behaviour, counts.visits.shape)
    return probabilities("behaviour", table), "given"


@dataclass(frozen=True)
class Behaviour:
    """A fitted behaviour policy.

    Attributes:
        chance: [N] probability or density of the logged actions.
        calibration: on held-out episodes.
        unsupported: share of π's actions that the behaviour policy hardly ever takes, at the next observation of each row [N].
        unsupported_starts: the same at the first observation of each episode [E].
    """

    chance: np.ndarray
    calibration: Calibration
    unsupported: np.ndarray
    unsupported_starts: np.ndarray


def fit_behaviour(pairs: Pairs, seed: int, training: Training) -> Behaviour:
    """Fits a softmax (indices) or a Gaussian with its own spread (vectors) by maximum likelihood."""
    log = pairs.log
    held = (
        log.episode % HELD_OUT == HELD_OUT - 1 if log.num_episodes >= HELD_OUT else np.zeros(len(log), bool)
    )
    used = np.flatnonzero(~held)
    size, k = pairs.observations.shape[1], pairs.actions.shape[1]
    first, second = jax.random.split(jax.random.key(seed))
    network = MLP(size, k if pairs.discrete else 2 * k, training.hidden, key=first)
    data = (jnp.asarray(pairs.observations[used]), jnp.asarray(pairs.actions[used]))

    def loss(network: Any, _: Any, key: Array, data: Any) -> Array:
        index = jax.random.randint(key, (2 * training.batch,), 0, len(used))
        return -_log_density(network(data[0][index]), data[1][index], pairs.discrete).mean()

    fitted = descend(loss, network, second, training, data)

    def predicted(observations: np.ndarray) -> np.ndarray:
        return everywhere(lambda i: fitted(jnp.asarray(observations[i])), len(observations))

    outputs = predicted(pairs.observations)
    logs = np.asarray(_log_density(outputs, pairs.actions, pairs.discrete))
    check = held if held.any() else ~held
    rare = float(np.quantile(logs, _RARE))
    left, left_first = (
        _unsupported(predicted(choices.observations), choices, pairs.discrete, rare, pairs.never)
        for choices in (pairs.following, pairs.starts)
    )
    return Behaviour(
        chance=np.exp(logs - pairs.log_volume),
        calibration=_calibrate(outputs[check], pairs.actions[check], pairs.discrete),
        unsupported=left,
        unsupported_starts=left_first,
    )


def doubts(pairs: Pairs, logged: np.ndarray, seed: int) -> float:
    """How many standard errors better a fitted policy explains the actions of episodes that it has not seen than the logged
    probabilities do.

    Right probabilities have the largest expected likelihood of all, so that nothing fitted to other episodes beats them but by
    chance. Each half of the episodes is judged by a fit to the other, linear in the observations and in a few random features.
    """
    log, rng = pairs.log, np.random.default_rng(seed)
    if log.num_episodes < 10:
        return 0.0
    inputs = pairs.observations.astype(np.float64)
    hidden = inputs @ rng.normal(size=(inputs.shape[1], min(50, len(log) // 400)))
    phi = np.concatenate([np.tanh(hidden), inputs, np.ones((len(log), 1))], axis=1)
    fold = log.folds()[log.episode]
    gain = -np.log(logged)
    for k in (0, 1):
        used = np.flatnonzero(fold != k)
        used = rng.choice(used, 50_000, replace=False) if len(used) > 50_000 else used
        outputs = _linear_outputs(phi[used], pairs.actions[used].astype(np.float64), phi, pairs.discrete)
        density = np.asarray(_log_density(outputs, pairs.actions, pairs.discrete)) - pairs.log_volume
        gain += np.where(fold == k, density, 0.0)
    by_episode = log.sums(gain)
    spread = float(by_episode.std(ddof=1))
    return float(by_episode.sum()) / max(spread * np.sqrt(len(by_episode)), 1e-12)


def _linear_outputs(
    phi: np.ndarray, actions: np.ndarray, everywhere: np.ndarray, discrete: bool
) -> np.ndarray:
    """What `_log_density` takes, from features: logits by maximum likelihood, or means by least squares with one spread."""
    ridge = np.eye(phi.shape[1])
    if not discrete:
        theta = np.linalg.solve(phi.T @ phi + ridge, phi.T @ actions)
        spread = np.log((actions - phi @ theta).std(axis=0) + 1e-12)
        return np.concatenate([everywhere @ theta, np.tile(spread, (len(everywhere), 1))], axis=1)
    shape = phi.shape[1], actions.shape[1]

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        theta = flat.reshape(shape)
        logs = log_softmax(phi @ theta, axis=1)
        slope = phi.T @ (np.exp(logs) - actions) + theta
        return float(-(logs * actions).sum() + 0.5 * (theta**2).sum()), slope.ravel()

    found = minimize(loss, np.zeros(shape).ravel(), jac=True, method="L-BFGS-B", options={"maxiter": 200})
    return everywhere @ found.x.reshape(shape)


def _log_density(outputs: Any, actions: Any, discrete: bool) -> Any:
    if discrete:
        return (jax.nn.log_softmax(outputs) * actions).sum(axis=-1)
    mean, spread = jnp.split(outputs, 2, axis=-1)
    log_std = jnp.clip(spread, -5.0, 2.0)
    z = (actions - mean) * jnp.exp(-log_std)
    return (-0.5 * z**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(axis=-1)


def _calibrate(outputs: np.ndarray, actions: np.ndarray, discrete: bool) -> Calibration:
    if discrete:
        predicted = np.asarray(jax.nn.softmax(outputs)).ravel()
        observed = actions.ravel()
        index = np.clip((predicted * 10).astype(int), 0, 9)
        n = np.bincount(index, minlength=10)
        filled = n > 0
        levels, shares = (
            np.bincount(index, x, minlength=10)[filled] / n[filled] for x in (predicted, observed)
        )
        n = n[filled]
    else:
        mean_action, spread = np.split(outputs, 2, axis=-1)
        quantile = norm.cdf((actions - mean_action) * np.exp(-np.clip(spread, -5.0, 2.0))).ravel()
        levels = np.linspace(0.05, 0.95, 19)
        shares = (quantile[:, None] <= levels).mean(axis=0)
        n = np.full(19, len(quantile) / 19)
    error = float((np.abs(levels - shares) * n).sum() / n.sum())
    return Calibration(levels, shares, n, deviation=error / _FINE, error=error)


def _unsupported(
    outputs: np.ndarray, choices: Choices, discrete: bool, rare: float, never: np.ndarray
) -> np.ndarray:
    """[N] weight of π's choices that the log never has, or that μ takes with less than 1% (or with less density than 0.2% of its
    own), beyond what μ itself gives them: a policy like μ leaves nothing."""
    if discrete:
        chance = np.asarray(jax.nn.softmax(outputs))
        beyond = np.where(chance < 0.01, np.maximum(choices.weights - chance, 0.0), 0.0)
        return np.where(never, choices.weights, beyond).sum(axis=1)
    share = np.zeros(len(outputs))
    for m in range(choices.weights.shape[1]):
        density = np.asarray(_log_density(outputs, choices.actions[:, m], discrete))
        share += choices.weights[:, m] * ((density < rare) - _RARE)
    return share
