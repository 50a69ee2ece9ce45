"""Evaluation of a log with observations: importance sampling, features and networks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from scipy.stats import t as student

from marginax.offline import features, networks
from marginax.offline.behaviour import (
    BEHAVIOURS,
    NOT_LOGGED,
    Behaviour,
    Calibration,
    doubts,
    fit_behaviour,
)
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
SAMPLE = 50_000  # transitions that are enough to train networks and to test assumptions


@dataclass(frozen=True)
class Fitted:
    """What is fitted to a log, for a policy that can be asked for its actions anywhere, and tests of the fit.

    Attributes:
        pairs: the log as inputs of function approximation.
        sample: some episodes of it, enough for networks and for tests of assumptions.
        rows: [n] rows of the log that are in the sample.
        behaviour: the behaviour policy, fitted even if its probabilities were logged.
        linear: certainty equivalence with the first draw of random features.
        estimate: the value by certainty equivalence, from all draws.
        markov: test whether the observations hold all that matters.
        doubt: by how many standard errors a fitted policy explains the actions better than the logged probabilities do.
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
    # Step 1: open the log, and refuse what cannot be evaluated before anything is fitted.
    log = source.read()
    if log.num_episodes < 2:
        raise ValueError(ONE_EPISODE)
    if isinstance(policy, TablePolicy):
        raise ValueError("a table of states cannot be a policy for a log with observations")
    rewards = request.rewards(float(log.rewards.min()), float(log.rewards.max()))
    how = _behaviour_from(log, policy, request.behaviour)
    request, notes = _with_horizon(request, log)

    # Step 2: fit the behaviour policy and certainty equivalence, if the policy can be asked for its actions anywhere.
    fitted = None
    if isinstance(policy, FunctionPolicy):
        fitted = _fit(source, log, policy, how, request, notes)
    else:
        notes.append(
            "the policy is known on the log's rows only, so that only importance sampling applies: every other "
            "estimator asks what it does elsewhere (give it as module:function)"
        )

    # Step 3: weigh.
    ratios = _ratios(policy, log, how, fitted, notes)
    sums = _weigh(log, ratios, fitted, rewards, request)

    # Step 4: estimate.
    estimates = _estimates(sums, ratios, fitted, request)
    by_networks = {} if fitted is None else _network_values(fitted, ratios, request, notes)

    # Step 5: intervals.
    never, hardly = _support(fitted, request.discount)
    possible, episodes, same = sums.value_range(), log.num_episodes, sums.same
    estimates = with_room(
        estimates,
        possible,
        episodes=episodes,
        same=same,
        default=UNSEEN,
        unsupported=never,
        unreachable=never,
        extrapolated=hardly,
    )
    bound = sums.bound(request.level) if how == "logged" and ratios is not None else None
    answers = intervals(estimates, possible, **request.bootstrap, bound=bound)
    for name, values in by_networks.items():
        unseen, mass = (sums.unseen_rewards(), never) if name == "regression" else (0.0, never + hardly)
        room = unseen + mass * (possible[1] - possible[0])  # networks may say anything there
        answers[name] = _answer_of_members(name, values, request.level, room, possible, episodes, same)

    # Step 6: diagnostics and verdict.
    check = None if fitted is None or how == "logged" else fitted.behaviour.calibration
    diagnostics = _diagnostics(sums, ratios, fitted, how, check, request.level)
    diagnostics["unsupported"] = None if fitted is None else never + hardly
    diagnostics["unsupported_steps"] = not log.discrete_actions
    diagnostics["set_aside"] = source.share_set_aside(len(log), episodes, int(log.truncated.sum()))
    return conclude(
        answers,
        estimates,
        sums,
        diagnostics,
        request.settings(source, policy, how, rewards),
        preferred=PREFERRED,
        notes=(*notes, *source.notes),
        curves=curves_of(sums, None if fitted is None else _overlap(fitted), check),
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


def _with_horizon(request: Request, log: Log) -> tuple[Request, list[str]]:
    """The request, with a horizon if values would be infinite without one, and a note that says so."""
    if request.discount < 1 or request.horizon is not None or not log.truncated.any():
        return request, []
    longest = int(log.lengths.max())
    note = (
        f"without a discount, and with truncated episodes, values are those of the first {longest} steps, the length of the "
        "longest episode"
    )
    return replace(request, horizon=longest), [note]


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
    policy: RowPolicy | FunctionPolicy, log: Log, how: str, fitted: Fitted | None, notes: list[str]
) -> np.ndarray | None:
    """[N] π/μ of the logged actions; None for a policy without a density."""
    chance = log.behaviour if fitted is None or how == "logged" else fitted.behaviour.chance
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
    """Step 3: sums of importance sampling and, with critics of the other fold, of doubly robust. Unknown ratios count as 0."""
    cut, inside = request.cut(log)
    errors = None
    if fitted is not None and ratios is not None and request.wants(*ROBUST):
        delta, starts = fitted.linear.crossed
        errors = delta[inside], starts
    longest, robust = int(cut.lengths.max()), errors is not None
    sums = ImportanceSums(log.num_episodes, longest, request.discount, rewards, robust, request.horizon)
    sums.update(cut, np.zeros(len(cut)) if ratios is None else ratios[inside], errors)
    return sums


def _estimates(
    sums: ImportanceSums, ratios: np.ndarray | None, fitted: Fitted | None, request: Request
) -> dict[str, Estimate]:
    """Step 4: the estimates that were asked for, without those of networks."""
    by_model = None if fitted is None else fitted.estimate
    found = {} if ratios is None else sums.estimates(by_model)
    if by_model is not None:
        found["certainty-equivalence"] = by_model
    return {name: found[name] for name in request.wants(*found)}


def _linear_estimate(pairs: Pairs, request: Request) -> tuple[Estimate, LinearFit]:
    """The mean over draws of random features, with a bias bound of twice their spread; and the fit with the first draw."""
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


def _network_values(
    fitted: Fitted, ratios: np.ndarray | None, request: Request, notes: list[str]
) -> dict[str, np.ndarray]:
    """Step 4: values [members] by networks, for each of these estimators that was asked for and applies."""
    wanted = [name for name in request.wants(*NETWORKS) if ratios is not None or name in _WITHOUT_RATIOS]
    if wanted and (request.horizon is not None or request.discount == 1):
        notes.append("networks need a discount below 1 and no horizon; they were left out")
        return {}
    if not wanted:
        return {}
    pairs, log = fitted.sample, fitted.sample.log
    training, discount = request.training, request.discount
    scale = max(float(np.abs(log.rewards).max()), 1e-8)
    weights = networks.resample(log.num_episodes, training.members, request.seed)
    rows = networks.rows_of(pairs, None if ratios is None else ratios[fitted.rows], weights, discount, scale)
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

    return {name: values(name) for name in request.progress("networks", wanted)}


def _answer_of_members(
    name: str,
    values: np.ndarray,
    level: float,
    room: float,
    possible: tuple[float, float],
    episodes: int,
    same: bool,
) -> Answer:
    """The mean of an ensemble [members], with an interval from their spread, and `room` on both sides.

    Members scatter around the estimate as the estimate does around the truth. So the truth lies √(1 + 1/m) standard
    deviations from the mean of m members.
    """
    kind, truncation = ESTIMATORS[name]
    value, error = float(values.mean()), float(values.std(ddof=1))
    reach = float(student.ppf((1 + level) / 2, len(values) - 1)) * error * np.sqrt(1 + 1 / len(values))
    influence = error * np.array([1.0, -1.0])  # networks have none: two entries with that standard error
    bare = Estimate(value, influence, bias_bound=reach + room)
    below, above = if_alike(bare, possible, episodes, same).left_open(level)
    interval = Interval(value - below, value + above, level)
    return within(Answer(name, value, interval, kind, truncation, error=error), possible)


def _support(fitted: Fitted | None, discount: float) -> tuple[float, float]:
    """Discounted probabilities that π takes an action that the log never takes, and one that μ hardly takes, beyond those.

    For continuous actions the second is the share of π's discounted steps. A sum over the steps would multiply the error of the
    fitted density by 1/(1 - γ), and the log's own policy would leave the log. Both are 0 for a policy that is known on the
    log's rows only.
    """
    if fitted is None:
        return 0.0, 0.0
    pairs, linear, log = fitted.pairs, fitted.linear, fitted.pairs.log

    def mass(starts: np.ndarray, following: np.ndarray) -> float:
        """Σ_t γ^t of a share along π's path: at the first observations, and at those that follow weighted steps of the log."""
        ahead = discount * linear.leading / log.num_episodes
        if pairs.discrete:
            return float(np.clip(starts.mean() + ahead @ following, 0.0, 1.0))
        ahead = np.maximum(ahead, 0.0)
        steps = 1.0 + ahead @ ~log.terminal
        return float(np.clip((starts.mean() + ahead @ following) / steps, 0.0, 1.0))

    never = 0.0
    if pairs.never.any():
        never = mass(*(at.weights[:, pairs.never].sum(axis=1) for at in (pairs.starts, pairs.following)))
    hardly = mass(fitted.behaviour.unsupported_starts, fitted.behaviour.unsupported)
    return never, max(hardly - never, 0.0)


def _largest_ratios(fitted: Fitted) -> list[dict[str, Any]]:
    """The ten steps of the log with the largest marginalized ratios."""
    log, ratios = fitted.pairs.log, fitted.linear.weights
    episode, times = log.episode, log.times
    return [
        {"episode": log.name(int(episode[i])), "step": int(times[i]), "ratio": float(ratios[i])}
        for i in np.argsort(ratios)[::-1][:10]
        if ratios[i] > 0
    ]


def _diagnostics(
    sums: ImportanceSums,
    ratios: np.ndarray | None,
    fitted: Fitted | None,
    how: str,
    check: Calibration | None,
    level: float,
) -> dict[str, Any]:
    """Step 6: diagnostics of weights, behaviour probabilities, observations and returns."""
    markov = MarkovTest(0.0, 0) if fitted is None else fitted.markov
    found = diagnostics_of(sums, how, check, markov, level, weighed=ratios is not None)
    found |= {"unsupported_pairs": [], "largest_ratios": []}
    if fitted is not None:
        found["largest_ratios"] = _largest_ratios(fitted)
        if how == "logged":
            found |= {"behaviour_suspicious": fitted.doubt > DOUBTS, "behaviour_deviation": fitted.doubt}
    return found


def _overlap(fitted: Fitted) -> tuple[np.ndarray, np.ndarray]:
    """Twentieths of the log, in the order of their ratios, and the share of π in each."""
    ordered = np.sort(np.maximum(fitted.linear.weights, 0.0))
    total = max(float(ordered.sum()), 1e-300)
    return np.full(20, 0.05), np.array([part.sum() for part in np.array_split(ordered, 20)]) / total
