"""Evaluation of a log with observations: importance sampling, features and networks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from scipy.stats import t as student

from marginax.offline import _features, _networks
from marginax.offline._answers import ESTIMATORS, Answer, Evaluation, answer
from marginax.offline._behaviour_network import Behaviour, fit_behaviour
from marginax.offline._importance import MAX_GROUPS, Estimate, Weighted
from marginax.offline._intervals import Interval, bootstrap, concentration
from marginax.offline._log import Log
from marginax.offline._networks import Training
from marginax.offline._observations import Pairs, prepare, target_probability
from marginax.offline._policies import FunctionPolicy, Policy, RowPolicy
from marginax.offline._sources import Source
from marginax.offline._tabular import ROBUST, Progress
from marginax.offline._verdict import agreement, compare, judge

PREFERRED = ("certainty-equivalence", "fqe-one-step", "fqe-retrace", "fenchel", "saddle-point")


def evaluate_neural(
    source: Source,
    policy: Policy,
    *,
    discount: float,
    estimators: tuple[str, ...],
    behaviour: Any,
    reward_range: tuple[float, float] | None,
    level: float,
    seed: int,
    progress: Progress,
    training: Training,
) -> Evaluation:
    """The answers of all `estimators` for a log of observations; see `marginax.offline.evaluate`."""
    log = source.read()
    if log.num_episodes < 2:
        raise ValueError("the log has a single episode: an interval over episodes needs at least two")
    notes: list[str] = []
    pairs = prepare(log, policy, seed) if isinstance(policy, FunctionPolicy) else None
    if pairs is None:
        if not isinstance(policy, RowPolicy):
            raise ValueError("a table of states cannot be a policy for a log with observations")
        notes.append("the policy is known on the log's rows only: importance sampling is all that applies")
    fitted, how = _behaviour(log, pairs, behaviour, seed, training, progress)
    ratios = _ratios(policy, log, fitted, how, notes)
    rewards = reward_range or (float(log.rewards.min()), float(log.rewards.max()))
    if not rewards[0] <= log.rewards.min() <= log.rewards.max() <= rewards[1]:
        raise ValueError(f"reward_range {rewards} does not contain the log's rewards")
    with_zero = (min(rewards[0], 0.0), max(rewards[1], 0.0))
    robust = pairs is not None and bool(set(ROBUST) & set(estimators))
    weighted = Weighted(log.num_episodes, int(log.lengths.max()), discount, with_zero, robust)
    errors = _cross_fitted(pairs, discount, seed) if robust and pairs is not None else None
    weighted.update(log, np.zeros(len(log)) if ratios is None else ratios, errors)

    answers: dict[str, Answer] = {}
    estimates = {} if ratios is None else {k: e for k, e in weighted.estimates().items() if k in estimators}
    linear = None
    if pairs is not None:
        linear = _features.fit(pairs, discount, seed)
        if "certainty-equivalence" in estimators:
            estimates["certainty-equivalence"] = _linear_estimate(log, linear)
    bound = None
    if how == "logged" and ratios is not None:
        values = (with_zero[0] / (1 - discount), with_zero[1] / (1 - discount))
        bound = concentration(weighted.lower, weighted.upper, values, level=level)
    for name, estimate in estimates.items():
        only = bound if name == "per-decision-is" else None
        answers[name] = answer(name, estimate, level=level, seed=seed, bound=only)
    if pairs is not None:
        wanted = [n for n in _NETWORKS if n in estimators and (ratios is not None or n in _WITHOUT_RATIOS)]
        answers |= _network_answers(pairs, ratios, wanted, discount, level, seed, training, progress)
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    logged = weighted.behaviour()
    diagnostics = _diagnose(log, weighted, linear, fitted, how, ratios)
    diagnostics["disagreeing"] = agreement(answers)
    verdict = judge(answers, diagnostics, PREFERRED)
    advantage = None
    comparable = diagnostics["tail_behaviour"] <= 0.01  # else the log's own average stops at truncation
    if verdict.estimator in estimates and comparable:
        chosen = estimates[verdict.estimator]
        difference = chosen.influence - logged.influence
        advantage = bootstrap(chosen.value - logged.value, difference, level=level, seed=seed)
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", logged, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage),
        diagnostics=diagnostics,
        settings={
            "data": source.name,
            "policy": policy.name,
            "discount": discount,
            "behaviour": how,
            "level": level,
            "seed": seed,
            "reward_range": rewards,
        },
        notes=(*notes, *source.notes),
        curves=_curves(weighted, linear, fitted),
    )


_NETWORKS = ("saddle-point", "fenchel", "regression", "fqe-one-step", "fqe-retrace", "fqe-marginalized")
_WITHOUT_RATIOS = ("saddle-point", "fenchel", "fqe-one-step")


def _behaviour(
    log: Log, pairs: Pairs | None, behaviour: Any, seed: int, training: Training, progress: Progress
) -> tuple[Behaviour | None, str]:
    if not isinstance(behaviour, str) or behaviour not in ("auto", "logged", "estimated"):
        raise ValueError("behaviour must be auto, logged or estimated for a log with observations")
    logged = log.behaviour is not None
    if behaviour == "logged" and not logged:
        raise ValueError("behaviour is to be taken from the log, which has no behaviour probabilities")
    if pairs is None:
        if not logged:
            raise ValueError(
                "probabilities aligned with rows need behaviour probabilities in the log, which has none"
            )
        return None, "logged"
    fitted = None
    for _ in progress("behaviour", ["network"]):
        fitted = fit_behaviour(pairs, seed, training)
    return fitted, "estimated" if behaviour == "estimated" or not logged else "logged"


def _ratios(
    policy: Policy, log: Log, fitted: Behaviour | None, how: str, notes: list[str]
) -> np.ndarray | None:
    chance = log.behaviour if how == "logged" or fitted is None else fitted.chance
    assert chance is not None
    if isinstance(policy, RowPolicy):
        return policy.at(log) / chance
    assert isinstance(policy, FunctionPolicy)
    try:
        target = target_probability(policy, log)
    except ValueError as error:
        notes.append(f"no importance sampling: {error}")
        return None
    return target / np.maximum(chance, 1e-300)


def _cross_fitted(pairs: Pairs, discount: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Errors and start values of each episode by a critic fitted on the other half."""
    log = pairs.log
    fold = np.arange(log.num_episodes) % 2
    rows = np.repeat(fold, log.lengths)
    delta, starts = np.empty(len(log)), np.empty(log.num_episodes)
    for k in (0, 1):
        fit = _features.fit(pairs, discount, seed, rows=rows != k)
        delta[rows == k] = fit.delta[rows == k]
        starts[fold == k] = fit.starts[fold == k]
    return delta, starts


def _linear_estimate(log: Log, linear: _features.LinearFit) -> Estimate:
    value = float(linear.starts.mean())
    psi = linear.starts - value + log.sums(linear.weights * linear.delta)
    groups = min(log.num_episodes, MAX_GROUPS)
    total = np.bincount(np.arange(log.num_episodes) % groups, psi, minlength=groups)
    square = float((linear.weights**2).sum())
    ess = float(linear.weights.sum()) ** 2 / square if square > 0 else 0.0
    return Estimate(value, total * (groups / log.num_episodes), ess, "transitions")


def _network_answers(
    pairs: Pairs,
    ratios: np.ndarray | None,
    wanted: list[str],
    discount: float,
    level: float,
    seed: int,
    training: Training,
    progress: Progress,
) -> dict[str, Answer]:
    """Ensembles whose members resample the episodes: the spread of their values gives the interval."""
    log = pairs.log
    if not wanted:
        return {}
    scale = max(float(np.abs(log.rewards).max()), 1e-8)
    rows = _networks.rows_of(pairs, ratios, discount, scale)
    weights = _networks.resample(log.num_episodes, training.members, seed)
    episode = np.repeat(np.arange(log.num_episodes), log.lengths)
    moments = None
    if {"saddle-point", "fenchel"} & set(wanted):
        moments = _networks.moments_of(pairs, discount, seed)
    found = {}
    for name in progress("networks", wanted):
        key = jax.random.fold_in(jax.random.key(seed), list(ESTIMATORS).index(name))
        if name.startswith("fqe-"):
            backup = name.removeprefix("fqe-")
            values = _networks.fitted_q(rows, weights, backup, discount, key, training) * scale
        else:
            w = _networks.ratios(rows, moments, weights, name, discount, key, training)
            values = (weights[:, episode] * w * log.rewards).sum(axis=1) / weights.sum(axis=1)
        kind, truncation = ESTIMATORS[name]
        error = float(values.std(ddof=1))
        reach = float(student.ppf((1 + level) / 2, len(values) - 1)) * error
        value = float(values.mean())
        interval = Interval(value - reach, value + reach, level)
        found[name] = Answer(name, value, interval, kind, truncation, error=error)
    return found


def _diagnose(
    log: Log,
    weighted: Weighted,
    linear: _features.LinearFit | None,
    fitted: Behaviour | None,
    how: str,
    ratios: np.ndarray | None,
) -> dict[str, Any]:
    ratio, ratio_error = weighted.mean_ratio()
    weights = weighted.weights
    unsupported, largest = 0.0, []
    if linear is not None and fitted is not None:
        positive = np.maximum(linear.weights, 0.0)
        total = float(positive.sum())
        unsupported = float((positive * fitted.support).sum()) / total if total > 0 else 1.0
        for row in np.argsort(positive)[::-1][:10]:
            where = int(np.searchsorted(log.offsets, row, side="right")) - 1
            largest.append(
                {
                    "episode": log.name(where),
                    "step": int(row - log.offsets[where]),
                    "ratio": float(positive[row]),
                    "visits": 1,
                }
            )
    check = None if fitted is None else fitted.calibration
    n = len(weights)
    return {
        "episodes": log.num_episodes,
        "transitions": len(log),
        "longest": int(log.lengths.max()),
        "truncated": int((~log.terminal[log.last]).sum()),
        "tail_behaviour": weighted.tail_behaviour / n,
        "tail_target": weighted.tail_target / n,
        "ess": weighted.ess(),
        "tail_index": weighted.tail_index(),
        "mean_weight": float(weights.mean()),
        "mean_weight_error": float(weights.std(ddof=1) / np.sqrt(n)),
        "mean_ratio": ratio,
        "mean_ratio_error": ratio_error,
        "unsupported": unsupported,
        "unsupported_pairs": [],
        "largest_weights": [
            {"weight": w, "episode": name, "step": step, "state": None, "action": None}
            for w, name, step, _, _ in (weighted.top if ratios is not None else [])
        ],
        "largest_ratios": largest,
        "behaviour": how,
        "behaviour_deviation": None if check is None else check.deviation,
        "behaviour_error": None if check is None else check.error,
        "behaviour_suspicious": how == "estimated" and check is not None and check.suspicious,
        "span": weighted.return_range[1] - weighted.return_range[0],
    }


def _curves(
    weighted: Weighted, linear: _features.LinearFit | None, fitted: Behaviour | None
) -> dict[str, Any]:
    positive = weighted.weights[weighted.weights > 0]
    logs = np.log10(np.maximum(positive, 1e-12)) if len(positive) else np.zeros(1)
    heights, edges = np.histogram(logs, bins=40, range=(logs.min() - 0.05, logs.max() + 0.05))
    seen = target = np.full(20, 0.05)
    if linear is not None:
        ordered = np.sort(np.maximum(linear.weights, 0.0))
        total = max(float(ordered.sum()), 1e-300)
        target = np.array([part.sum() for part in np.array_split(ordered, 20)]) / total
    check = None if fitted is None else fitted.calibration
    return {
        "ess_by_time": weighted.ess_by_time(),
        "weight_histogram": {"edges": edges, "heights": heights, "zeros": int((weighted.weights == 0).sum())},
        "overlap": {"behaviour": seen, "target": target},
        "calibration": None
        if check is None
        else {"said": check.said, "seen": check.seen, "weight": check.weight},
    }
