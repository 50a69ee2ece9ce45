"""Evaluation of a log with observations: importance sampling, features and networks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from scipy.stats import t as student

from marginax.offline import features, networks
from marginax.offline.behaviour import NOT_LOGGED, Behaviour, doubts, fit_behaviour
from marginax.offline.diagnostics import curves_of, diagnostics_of
from marginax.offline.features import Pairs, prepare, target_probability
from marginax.offline.importance import ONE_EPISODE, ImportanceSums
from marginax.offline.log import Log
from marginax.offline.markov import MarkovTest, markov_of_observations
from marginax.offline.network_estimators import balanced, fitted_q, learn, moments_of, ratios
from marginax.offline.pipeline import Request
from marginax.offline.policies import FunctionPolicy, Policy, RowPolicy, require_sizes
from marginax.offline.results import (
    ESTIMATORS,
    ROBUST,
    Answer,
    Estimate,
    Evaluation,
    Influence,
    if_alike,
    intervals,
    with_room,
    within,
)
from marginax.offline.sources import Source
from marginax.offline.verdict import conclude
from marginax.statistics import Interval

PREFERRED = ("certainty-equivalence", "fqe-one-step", "fqe-retrace", "fenchel", "saddle-point")
NETWORKS = ("saddle-point", "fenchel", "regression", "fqe-one-step", "fqe-retrace", "fqe-marginalized")
_STREAMS = dict(zip(NETWORKS, range(7, 13), strict=True))  # of random numbers
_WITHOUT_RATIOS = ("saddle-point", "fenchel", "fqe-one-step")
DOUBTS = 4.0  # standard errors by which a fitted policy may explain held-out actions better than the logged probabilities
DRAWS = 4  # of random features
UNSEEN = 0.0  # the value that features give to actions which the log never takes
SAMPLE = 50_000  # transitions that are enough to train networks on and to test assumptions: see `Training`


def evaluate_observations(source: Source, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of observations; see `marginax.offline.evaluate`."""
    log, discount, seed = source.read(), request.discount, request.seed
    if log.num_episodes < 2:
        raise ValueError(ONE_EPISODE)
    rewards = request.rewards(float(log.rewards.min()), float(log.rewards.max()))
    notes: list[str] = []
    if discount == 1 and request.horizon is None and log.truncated.any():
        request = replace(request, horizon=int(log.lengths.max()))
        notes.append(
            f"without a discount, and with truncated episodes, values are those of the first {request.horizon} steps, the length "
            "of the longest episode"
        )
    horizon = request.horizon
    pairs = prepare(log, policy, seed) if isinstance(policy, FunctionPolicy) else None
    if pairs is not None and pairs.discrete:
        require_sizes(f"the policy {policy.name}", source, action=pairs.actions.shape[1])
    if pairs is None:
        if not isinstance(policy, RowPolicy):
            raise ValueError("a table of states cannot be a policy for a log with observations")
        notes.append(
            "the policy is known on the log's rows only, so that only importance sampling applies: every other "
            "estimator asks what it does elsewhere (give it as module:function)"
        )
    else:
        sample, rows = pairs.some(SAMPLE, seed)
        if sample is not pairs:
            notes.append(
                f"networks and tests of assumptions saw {sample.log.num_episodes:,} of the episodes, drawn at random "
                f"({len(rows):,} transitions)"
            )
    fitted, how = _behaviour(log, pairs, request)
    chances = _chances(policy, log, fitted, how, notes)
    robust = pairs is not None and chances is not None and bool(request.wants(*ROBUST))
    cut = request.cut(log)
    inside = slice(None) if cut is log else log.times < (horizon or 0)
    longest = int(cut.lengths.max())
    sums = ImportanceSums(log.num_episodes, longest, discount, rewards, robust, horizon)
    errors, linear, by_model, markov = None, None, None, MarkovTest(0.0, 0)
    if pairs is not None:
        for _ in request.progress("certainty equivalence", ["features"]):
            by_model, linear = _linear_estimate(pairs, request)
            delta, starts = linear.crossed
            errors = (delta[inside], starts) if robust else None
            markov = markov_of_observations(sample, linear.delta[rows], seed)
    sums.update(cut, np.zeros(len(cut)) if chances is None else chances[inside], errors)
    estimates = {} if chances is None else sums.estimates(by_model)
    if by_model is not None:
        estimates["certainty-equivalence"] = by_model
    estimates = {name: estimates[name] for name in request.estimators if name in estimates}
    possible, support = sums.value_range(), _support(log, pairs, linear, fitted, discount)
    left, never = support["unsupported"] or 0.0, support.pop("never")
    alike: dict[str, Any] = {"episodes": log.num_episodes, "same": sums.same}
    missing = {"default": UNSEEN, "unsupported": left, "unreachable": never}
    estimates = with_room(estimates, possible, **alike, **missing)
    bound = sums.bound(request.level) if how == "logged" and chances is not None else None
    answers = intervals(estimates, possible, **request.bootstrap, bound=bound)
    if pairs is not None:
        wanted = [n for n in request.wants(*NETWORKS) if chances is not None or n in _WITHOUT_RATIOS]
        if wanted and (horizon is not None or discount == 1):
            notes.append("networks need a discount below 1 and no horizon; they were left out")
            wanted = []
        seen = None if chances is None else chances[rows]
        by_network = _network_answers(sample, seen, wanted, request, sums.unseen_rewards())
        for name, one in by_network.items():
            mass = never if name == "regression" else left
            room = mass * (possible[1] - possible[0])  # networks may say anything there
            bare = Estimate(one.value, one.error * np.array([1.0, -1.0]))  # of networks, without influences
            below, above = if_alike(bare, possible, **alike).left_open(request.level)
            wider = one.interval.widened(room + below, room + above)
            answers[name] = within(replace(one, interval=wider), possible)
    check = None if fitted is None else fitted.calibration
    diagnostics = diagnostics_of(sums, how, check, markov, request.level) | support
    ends = log.num_episodes, int(log.truncated.sum())
    diagnostics["set_aside"] = source.share_set_aside(len(log), *ends)
    if how == "logged":
        chance = None if pairs is None else sample.log.behaviour
        found = 0.0 if chance is None else doubts(sample, chance, seed)
        diagnostics |= {"behaviour_suspicious": found > DOUBTS, "behaviour_deviation": found}
    if chances is None:
        diagnostics["largest_weights"] = []
    return conclude(
        answers,
        estimates,
        sums,
        diagnostics,
        request.settings(source, policy, how, rewards),
        preferred=PREFERRED,
        notes=(*notes, *source.notes),
        curves=curves_of(sums, *_overlap(linear), check),
    )


def _behaviour(log: Log, pairs: Pairs | None, request: Request) -> tuple[Behaviour | None, str]:
    behaviour = request.behaviour
    if not isinstance(behaviour, str) or behaviour not in ("auto", "logged", "estimated"):
        raise ValueError("behaviour must be auto, logged or estimated for a log with observations")
    logged = log.behaviour is not None
    if behaviour == "logged" and not logged:
        raise ValueError(NOT_LOGGED)
    if pairs is None:
        if not logged:
            raise ValueError(
                "probabilities aligned with rows need behaviour probabilities in the log, which has none"
            )
        if behaviour == "estimated":
            raise ValueError("behaviour cannot be estimated where the policy is known on the log's rows only")
        return None, "logged"
    fitted = None
    for _ in request.progress("behaviour", ["network"]):
        fitted = fit_behaviour(pairs, request.seed, request.training)
    return fitted, "estimated" if behaviour == "estimated" or not logged else "logged"


def _chances(
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


def _linear_estimate(pairs: Pairs, request: Request) -> tuple[Estimate, features.LinearFit]:
    """The mean over draws of random features; twice their spread is what the choice of features leaves open. And the first draw."""
    log, seeds = pairs.log, range(request.seed, request.seed + DRAWS)
    draws = [features.fit(pairs, request.discount, seed, horizon=request.horizon) for seed in seeds]
    values = np.array([fit.starts.mean() for fit in draws])
    influence = Influence(log.num_episodes)
    psi = [fit.starts - fit.starts.mean() + log.sums(fit.weighted_errors) for fit in draws]
    influence.add(np.mean(psi, axis=0))
    weights = np.mean([fit.weights for fit in draws], axis=0)
    square, total = float((weights**2).sum()), float(weights.sum())
    ess = total**2 / square if square > 0 else 0.0
    spread = 2 * float(values.std(ddof=1))
    estimate = Estimate(float(values.mean()), influence.groups(), ess, "transitions", spread, model_share=1.0)
    return estimate, draws[0]


def _network_answers(
    pairs: Pairs, chances: np.ndarray | None, wanted: list[str], request: Request, unseen: float
) -> dict[str, Answer]:
    """Ensembles whose members resample the episodes: the spread of their values gives the interval.

    Members scatter around the estimate as the estimate does around the truth, so that their mean, of m members,
    lies √(1 + 1/m) standard deviations from it.
    """
    log, training, discount = pairs.log, request.training, request.discount
    if not wanted:
        return {}
    scale = max(float(np.abs(log.rewards).max()), 1e-8)
    weights = networks.resample(log.num_episodes, training.members, request.seed)
    rows = networks.rows_of(pairs, chances, weights, discount, scale)
    moments = moments_of(pairs, discount, request.seed) if {"saddle-point", "fenchel"} & set(wanted) else None
    found = {}

    def key(name: str) -> jax.Array:
        return jax.random.fold_in(jax.random.key(request.seed), _STREAMS[name])

    def train(name: str) -> Any:
        if name.startswith("fqe-"):
            return learn(rows, name.removeprefix("fqe-"), discount, key(name), training)
        return ratios(rows, moments, name, discount, key(name), training)

    needed = {"fqe-one-step"} if moments is not None else set()
    pool = ThreadPoolExecutor(2)  # a training of small networks uses one core
    trained = {
        name: pool.submit(train, name) for name in NETWORKS if name in needed.union(wanted) - {"fenchel"}
    }
    pool.shutdown(wait=False)
    for name in request.progress("networks", wanted):
        if name.startswith("fqe-"):
            backup = name.removeprefix("fqe-")
            values = fitted_q(log, rows, trained[name].result(), backup, discount, training)
        else:
            w = None if name == "fenchel" else trained[name].result()
            if name != "regression":
                assert moments is not None
                w = balanced(rows, moments, trained["fqe-one-step"].result()[0], discount, w)
            values = (weights[:, log.episode] * w * log.rewards).sum(axis=1) / weights.sum(axis=1)
        kind, truncation = ESTIMATORS[name]
        error = float(values.std(ddof=1))
        reach = float(student.ppf((1 + request.level) / 2, len(values) - 1)) * error
        reach = reach * np.sqrt(1 + 1 / len(values)) + (unseen if name == "regression" else 0.0)
        value = float(values.mean())
        interval = Interval(float(value - reach), float(value + reach), request.level)
        found[name] = Answer(name, value, interval, kind, truncation, error=error)
    return found


def _support(
    log: Log,
    pairs: Pairs | None,
    linear: features.LinearFit | None,
    fitted: Behaviour | None,
    discount: float,
) -> dict[str, Any]:
    """How often π does what the behaviour policy hardly does, or `never` (discounted), and where the ratios are large.

    A policy that is known on the log's rows alone has an unknown share elsewhere: None.
    """
    if pairs is None or linear is None or fitted is None:
        return {"unsupported": None, "never": 0.0, "unsupported_pairs": [], "largest_ratios": []}

    def mass(starts: np.ndarray, following: np.ndarray) -> float:
        """Σ_t γ^t of a share along π's path: at the first observations, and at those that follow its weighted steps."""
        ahead = discount * linear.leading / log.num_episodes
        if pairs.discrete:
            return float(np.clip(starts.mean() + ahead @ following, 0.0, 1.0))
        # Densities are too rough to be added up: the mean share over π's steps.
        ahead = np.maximum(ahead, 0.0)
        steps = 1.0 + ahead @ ~log.terminal
        return float(np.clip((starts.mean() + ahead @ following) / steps, 0.0, 1.0))

    largest, never = [], 0.0
    if pairs.never.any():
        never = mass(*(at.weights[:, pairs.never].sum(axis=1) for at in (pairs.starts, pairs.following)))
    for row in (r for r in np.argsort(linear.weights)[::-1][:10] if linear.weights[r] > 0):
        where = int(np.searchsorted(log.offsets, row, side="right")) - 1
        step = int(row - log.offsets[where])
        largest.append({"episode": log.name(where), "step": step, "ratio": float(linear.weights[row])})
    return {
        "unsupported": max(mass(fitted.unsupported_starts, fitted.unsupported), never),
        "never": never,
        "unsupported_pairs": [],
        "largest_ratios": largest,
    }


def _overlap(linear: features.LinearFit | None) -> tuple[np.ndarray, np.ndarray]:
    """Twentieths of the log, in the order of their ratios, and the share of π in each."""
    seen = target = np.full(20, 0.05)
    if linear is not None:
        ordered = np.sort(np.maximum(linear.weights, 0.0))
        total = max(float(ordered.sum()), 1e-300)
        target = np.array([part.sum() for part in np.array_split(ordered, 20)]) / total
    return seen, target
