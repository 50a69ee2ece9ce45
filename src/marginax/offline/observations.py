"""Evaluation of a log with observations: importance sampling, features and networks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from scipy.stats import t as student

from marginax.offline import features, networks
from marginax.offline.behaviour import BEHAVIOURS, NOT_LOGGED, Behaviour, doubts, fit_behaviour
from marginax.offline.conclusion import conclude
from marginax.offline.diagnostics import curves_of, diagnostics_of
from marginax.offline.features import LinearFit, Pairs, prepare, target_probability
from marginax.offline.importance import ONE_EPISODE, ImportanceSums
from marginax.offline.log import Log
from marginax.offline.markov import MarkovTest, markov_of_observations
from marginax.offline.network_estimators import balanced, fit_ratios, fitted_q, learn, moments_of
from marginax.offline.pipeline import Request
from marginax.offline.policies import FunctionPolicy, Policy, RowPolicy, TablePolicy, require_sizes
from marginax.offline.results import (
    ESTIMATORS,
    ROBUST,
    Answer,
    Estimate,
    Evaluation,
    Influence,
    effective_size,
    if_alike,
    intervals,
    with_room,
    within,
)
from marginax.offline.sources import Source
from marginax.statistics import Interval

PREFERRED = ("certainty-equivalence", "fqe-one-step", "fqe-retrace", "fenchel", "saddle-point")
NETWORKS = ("saddle-point", "fenchel", "regression", "fqe-one-step", "fqe-retrace", "fqe-marginalized")
_STREAMS = dict(zip(NETWORKS, range(7, 13), strict=True))  # of random numbers
_WITHOUT_RATIOS = ("saddle-point", "fenchel", "fqe-one-step")
DOUBTS = 4.0  # standard errors by which a fitted policy may explain held-out actions better than the logged probabilities
DRAWS = 4  # of random features
UNSEEN = 0.0  # the value that features give to actions which the log never takes
SAMPLE = 50_000  # transitions that are enough to train networks on and to test assumptions: see `Training`


@dataclass(frozen=True)
class Fitted:
    """What is fitted to a log if the policy can be asked for its actions anywhere, and what tests of the fit say.

    Attributes:
        pairs: the log as inputs of function approximation.
        sample: episodes of it for what needs no more of them: networks, and tests of assumptions.
        rows: [n] rows of the log that are in the sample.
        behaviour: the behaviour policy, fitted even where its probabilities were logged.
        linear: certainty equivalence with the first draw of random features.
        estimate: the value by certainty equivalence, from all draws.
        markov: whether the observations hold all that matters.
        doubt: standard errors by which a fitted policy explains actions better than the logged probabilities do.
    """

    pairs: Pairs
    sample: Pairs
    rows: np.ndarray
    behaviour: Behaviour
    linear: LinearFit
    estimate: Estimate
    markov: MarkovTest
    doubt: float


def evaluate_observations(source: Source, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of observations; see `marginax.offline.evaluate`."""
    log = source.read()
    if log.num_episodes < 2:
        raise ValueError(ONE_EPISODE)
    if isinstance(policy, TablePolicy):
        raise ValueError("a table of states cannot be a policy for a log with observations")
    rewards = request.rewards(float(log.rewards.min()), float(log.rewards.max()))
    how = _behaviour_from(log, policy, request.behaviour)
    notes: list[str] = []
    if request.discount == 1 and request.horizon is None and log.truncated.any():
        request = replace(request, horizon=int(log.lengths.max()))
        notes.append(
            f"without a discount, and with truncated episodes, values are those of the first {request.horizon} steps, the length "
            "of the longest episode"
        )

    # Step 2: fit the behaviour policy, and certainty equivalence, where the policy can be asked.
    fitted = None
    if isinstance(policy, FunctionPolicy):
        fitted = _fit(source, log, policy, how, request, notes)
    else:
        notes.append(
            "the policy is known on the log's rows only, so that only importance sampling applies: every other "
            "estimator asks what it does elsewhere (give it as module:function)"
        )

    # Step 3: weigh.
    chance = log.behaviour if fitted is None or how == "logged" else fitted.behaviour.chance
    ratios = _ratios(policy, log, chance, notes)
    sums = _weigh(log, ratios, fitted, rewards, request)

    # Step 4: estimate.
    by_model = None if fitted is None else fitted.estimate
    estimates = {} if ratios is None else sums.estimates(by_model)
    if by_model is not None:
        estimates["certainty-equivalence"] = by_model
    estimates = {name: estimates[name] for name in request.estimators if name in estimates}
    by_networks: dict[str, Answer] = {}
    if fitted is not None:
        seen = None if ratios is None else ratios[fitted.rows]
        wanted = _networks_wanted(request, seen is not None, notes)
        by_networks = _network_answers(fitted.sample, seen, wanted, request, sums.unseen_rewards())

    # Step 5: intervals.
    never, support = _support(fitted, request.discount)
    left, possible = support["unsupported"] or 0.0, sums.value_range()
    alike: dict[str, Any] = {"episodes": log.num_episodes, "same": sums.same}
    missing: dict[str, Any] = {"default": UNSEEN, "unsupported": left, "unreachable": never}
    estimates = with_room(estimates, possible, **alike, **missing)
    bound = sums.bound(request.level) if how == "logged" and ratios is not None else None
    answers = intervals(estimates, possible, **request.bootstrap, bound=bound)
    for name, one in by_networks.items():
        mass = never if name == "regression" else left
        room = mass * (possible[1] - possible[0])  # networks may say anything there
        bare = Estimate(one.value, one.error * np.array([1.0, -1.0]))  # of networks, without influences
        below, above = if_alike(bare, possible, **alike).left_open(request.level)
        wider = one.interval.widened(room + below, room + above)
        answers[name] = within(replace(one, interval=wider), possible)

    # Step 6: diagnostics and verdict.
    check = None if fitted is None else fitted.behaviour.calibration
    markov = MarkovTest(0.0, 0) if fitted is None else fitted.markov
    diagnostics = diagnostics_of(sums, how, check, markov, request.level) | support
    ends = log.num_episodes, int(log.truncated.sum())
    diagnostics["set_aside"] = source.share_set_aside(len(log), *ends)
    if how == "logged":
        doubt = 0.0 if fitted is None else fitted.doubt
        diagnostics |= {"behaviour_suspicious": doubt > DOUBTS, "behaviour_deviation": doubt}
    if ratios is None:
        diagnostics["largest_weights"] = []
    return conclude(
        answers,
        estimates,
        sums,
        diagnostics,
        request.settings(source, policy, how, rewards),
        preferred=PREFERRED,
        notes=(*notes, *source.notes),
        curves=curves_of(sums, *_overlap(fitted), check),
    )


def _behaviour_from(log: Log, policy: Policy, behaviour: Any) -> str:
    """Where behaviour probabilities come from: `logged` or `estimated`."""
    if not isinstance(behaviour, str) or behaviour not in BEHAVIOURS:
        raise ValueError("behaviour must be auto, logged or estimated for a log with observations")
    logged = log.behaviour is not None
    if behaviour == "logged" and not logged:
        raise ValueError(NOT_LOGGED)
    if isinstance(policy, RowPolicy):
        if not logged:
            raise ValueError(
                "probabilities aligned with rows need behaviour probabilities in the log, which has none"
            )
        if behaviour == "estimated":
            raise ValueError("behaviour cannot be estimated where the policy is known on the log's rows only")
    return "logged" if logged and behaviour != "estimated" else "estimated"


def _fit(
    source: Source, log: Log, policy: FunctionPolicy, how: str, request: Request, notes: list[str]
) -> Fitted:
    """Step 2: the behaviour policy and certainty equivalence, and tests of what they assume."""
    seed = request.seed
    pairs = prepare(log, policy, seed)
    if pairs.discrete:
        require_sizes(f"the policy {policy.name}", source, action=pairs.actions.shape[1])
    sample, rows = pairs.some(SAMPLE, seed)
    if sample is not pairs:
        notes.append(
            f"networks and tests of assumptions saw {sample.log.num_episodes:,} of the episodes, drawn at random "
            f"({len(rows):,} transitions)"
        )
    for _ in request.progress("behaviour", ["network"]):
        behaviour = fit_behaviour(pairs, seed, request.training)
    for _ in request.progress("certainty equivalence", ["features"]):
        estimate, linear = _linear_estimate(pairs, request)
        markov = markov_of_observations(sample, linear.delta[rows], seed)
    logged = sample.log.behaviour
    doubt = 0.0 if logged is None or how != "logged" else doubts(sample, logged, seed)
    return Fitted(pairs, sample, rows, behaviour, linear, estimate, markov, doubt)


def _ratios(
    policy: RowPolicy | FunctionPolicy, log: Log, chance: np.ndarray | None, notes: list[str]
) -> np.ndarray | None:
    """[N] π/μ of the logged actions, which μ takes with these chances; None for a policy without a density."""
    assert chance is not None
    if isinstance(policy, RowPolicy):
        return policy.at(log) / chance
    try:
        target = target_probability(policy, log)
    except ValueError as error:
        notes.append(f"no importance sampling: {error}")
        return None
    return target / np.maximum(chance, 1e-300)


def _weigh(
    log: Log,
    ratios: np.ndarray | None,
    fitted: Fitted | None,
    rewards: tuple[float, float],
    request: Request,
) -> ImportanceSums:
    """Step 3: importance sampling and, with the critics of the other fold, doubly robust; weights of 0 where ratios are not known."""
    cut, inside = request.cut(log)
    errors = None
    if fitted is not None and ratios is not None and request.wants(*ROBUST):
        delta, starts = fitted.linear.crossed
        errors = delta[inside], starts
    longest, robust = int(cut.lengths.max()), errors is not None
    sums = ImportanceSums(log.num_episodes, longest, request.discount, rewards, robust, request.horizon)
    sums.update(cut, np.zeros(len(cut)) if ratios is None else ratios[inside], errors)
    return sums


def _linear_estimate(pairs: Pairs, request: Request) -> tuple[Estimate, LinearFit]:
    """The mean over draws of random features; twice their spread is what the choice of features leaves open. And the first draw."""
    log, seeds = pairs.log, range(request.seed, request.seed + DRAWS)
    draws = [features.fit(pairs, request.discount, seed, horizon=request.horizon) for seed in seeds]
    values = np.array([fit.starts.mean() for fit in draws])
    influence = Influence(log.num_episodes)
    psi = [fit.starts - fit.starts.mean() + log.sums(fit.weighted_errors) for fit in draws]
    influence.add(np.mean(psi, axis=0))
    weights = np.mean([fit.weights for fit in draws], axis=0)
    ess = effective_size(float(weights.sum()), float((weights**2).sum()))
    spread = 2 * float(values.std(ddof=1))
    estimate = Estimate(float(values.mean()), influence.groups(), ess, "transitions", spread, model_share=1.0)
    return estimate, draws[0]


def _networks_wanted(request: Request, has_ratios: bool, notes: list[str]) -> list[str]:
    """The estimators with networks that were asked for and apply."""
    wanted = [name for name in request.wants(*NETWORKS) if has_ratios or name in _WITHOUT_RATIOS]
    if wanted and (request.horizon is not None or request.discount == 1):
        notes.append("networks need a discount below 1 and no horizon; they were left out")
        return []
    return wanted


def _network_answers(
    pairs: Pairs, ratios: np.ndarray | None, wanted: list[str], request: Request, unseen: float
) -> dict[str, Answer]:
    """Ensembles whose members resample the episodes; `unseen` is what regression leaves open."""
    log, training, discount = pairs.log, request.training, request.discount
    if not wanted:
        return {}
    scale = max(float(np.abs(log.rewards).max()), 1e-8)
    weights = networks.resample(log.num_episodes, training.members, request.seed)
    rows = networks.rows_of(pairs, ratios, weights, discount, scale)
    balances = bool({"saddle-point", "fenchel"} & set(wanted))  # they balance the log against fitted values
    moments = moments_of(pairs, discount, request.seed) if balances else None

    def train(name: str) -> Any:
        """Networks of values for fitted Q, else ratios [members, N]."""
        key = jax.random.fold_in(jax.random.key(request.seed), _STREAMS[name])
        if name.startswith("fqe-"):
            return learn(rows, name.removeprefix("fqe-"), discount, key, training)
        return fit_ratios(rows, moments, name, discount, key, training)

    needed = {*wanted, *(["fqe-one-step"] if balances else [])} - {"fenchel"}
    pool = ThreadPoolExecutor(2)  # a training of small networks uses one core
    trained = {name: pool.submit(train, name) for name in NETWORKS if name in needed}
    pool.shutdown(wait=False)

    def values(name: str) -> np.ndarray:
        """[members] estimates."""
        if name.startswith("fqe-"):
            backup = name.removeprefix("fqe-")
            return fitted_q(log, rows, trained[name].result(), backup, discount, training)
        w = None if name == "fenchel" else trained[name].result()
        if name != "regression":
            assert moments is not None
            w = balanced(rows, moments, trained["fqe-one-step"].result()[0], discount, w)
        return (weights[:, log.episode] * w * log.rewards).sum(axis=1) / weights.sum(axis=1)

    return {
        name: _answer_of_members(name, values(name), request.level, unseen if name == "regression" else 0.0)
        for name in request.progress("networks", wanted)
    }


def _answer_of_members(name: str, values: np.ndarray, level: float, unseen: float) -> Answer:
    """The mean of an ensemble, with an interval from the spread of its members, and room for what is `unseen`.

    Members scatter around the estimate as the estimate does around the truth, so that their mean, of m members,
    lies √(1 + 1/m) standard deviations from it.
    """
    kind, truncation = ESTIMATORS[name]
    value, error = float(values.mean()), float(values.std(ddof=1))
    reach = float(student.ppf((1 + level) / 2, len(values) - 1)) * error
    reach = reach * np.sqrt(1 + 1 / len(values)) + unseen
    interval = Interval(float(value - reach), float(value + reach), level)
    return Answer(name, value, interval, kind, truncation, error=error)


def _support(fitted: Fitted | None, discount: float) -> tuple[float, dict[str, Any]]:
    """How often π does what the log never shows (discounted), and the diagnostics of support: how often it does what the behaviour
    policy hardly does, and where the ratios are large.

    A policy that is known on the log's rows alone has an unknown share elsewhere: None.
    """
    if fitted is None:
        return 0.0, {"unsupported": None, "unsupported_pairs": [], "largest_ratios": []}
    pairs, linear, log = fitted.pairs, fitted.linear, fitted.pairs.log

    def mass(starts: np.ndarray, following: np.ndarray) -> float:
        """Σ_t γ^t of a share along π's path: at the first observations, and at those that follow its weighted steps."""
        ahead = discount * linear.leading / log.num_episodes
        if pairs.discrete:
            return float(np.clip(starts.mean() + ahead @ following, 0.0, 1.0))
        # Densities are too rough to be added up: the mean share over π's steps.
        ahead = np.maximum(ahead, 0.0)
        steps = 1.0 + ahead @ ~log.terminal
        return float(np.clip((starts.mean() + ahead @ following) / steps, 0.0, 1.0))

    never = 0.0
    if pairs.never.any():
        never = mass(*(at.weights[:, pairs.never].sum(axis=1) for at in (pairs.starts, pairs.following)))
    hardly = mass(fitted.behaviour.unsupported_starts, fitted.behaviour.unsupported)
    episode, times, ratios = log.episode, log.times, linear.weights
    largest = [
        {"episode": log.name(int(episode[i])), "step": int(times[i]), "ratio": float(ratios[i])}
        for i in np.argsort(ratios)[::-1][:10]
        if ratios[i] > 0
    ]
    return never, {
        "unsupported": max(hardly, never),
        "unsupported_pairs": [],
        "largest_ratios": largest,
    }


def _overlap(fitted: Fitted | None) -> tuple[np.ndarray, np.ndarray]:
    """Twentieths of the log, in the order of their ratios, and the share of π in each."""
    seen = target = np.full(20, 0.05)
    if fitted is not None:
        ordered = np.sort(np.maximum(fitted.linear.weights, 0.0))
        total = max(float(ordered.sum()), 1e-300)
        target = np.array([part.sum() for part in np.array_split(ordered, 20)]) / total
    return seen, target
