"""`evaluate`: open, count, weigh, estimate, intervals, verdict. What is this policy worth?

The steps for logs of indices are below, in this order; `observations.py` has those for logs with observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.offline import fitted_q
from marginax.offline.behaviour import Calibration, behaviour_table, calibration
from marginax.offline.certainty_equivalence import (
    Counts,
    Model,
    ModelInfluence,
    certainty_equivalence,
    effective_transitions,
)
from marginax.offline.importance import ImportanceSums
from marginax.offline.log import Log
from marginax.offline.networks import Training
from marginax.offline.policies import Policy, RowPolicy, load_policy, target_table
from marginax.offline.ratios import RegressionSums
from marginax.offline.results import ESTIMATORS, ROBUST, Answer, Estimate, Evaluation, answer, concentration
from marginax.offline.sources import Source, open_data
from marginax.offline.verdict import agreement, compare, judge
from marginax.statistics import Interval, studentised_bootstrap
from marginax.traces import clip_ratios

PREFERRED = ("certainty-equivalence", "fqe-retrace", "fqe-one-step", "fenchel", "saddle-point")
SAME_IN_TABLES = ("saddle-point", "fenchel", "fqe-one-step")
SAME = "with tables, saddle-point, fenchel and fqe-one-step have the solution of certainty-equivalence: one row stands for all"


@dataclass(frozen=True)
class Request:
    """What was asked of `evaluate`; see there."""

    discount: float
    estimators: tuple[str, ...]
    behaviour: Any
    reward_range: tuple[float, float] | None
    level: float
    seed: int
    progress: Callable[[str, Iterable[Any]], Iterator[Any]]
    training: Training

    def wants(self, *names: str) -> list[str]:
        """Those of `names` that were asked for."""
        return [name for name in names if name in self.estimators]

    def rewards(self, least: float, largest: float) -> tuple[float, float]:
        """The range of rewards: as given, if it holds those of the log, else the log's own."""
        given = self.reward_range or (least, largest)
        if not given[0] <= least <= largest <= given[1]:
            raise ValueError(
                f"reward_range {given} does not contain the log's rewards, "
                f"which go from {least:g} to {largest:g}"
            )
        return given


def evaluate(
    data: Any,
    policy: Any,
    *,
    discount: float = 0.99,
    estimators: Iterable[str] | None = None,
    behaviour: Any = "auto",
    reward_range: tuple[float, float] | None = None,
    level: float = 0.95,
    seed: int = 0,
    progress: Callable[[str, Iterable[Any]], Iterator[Any]] | None = None,
    training: Training | None = None,
    engine: str = "local",
) -> Evaluation:
    """Estimates the value of `policy` from a log that another policy made, by every estimator that applies.

    The value is E[Σ_t γ^t r_t] under π until the episode terminates, started where the log's episodes start. Truncated episodes go
    on unseen: estimators that bootstrap account for that, the others stop there.

    Args:
        data: a `Log`, a `Trajectory`, a file, a frame, a Minari id or folder (see `open_data`).
        policy: the target policy π (see `load_policy`).
        discount: γ in [0, 1).
        estimators: names from `ESTIMATORS`; None takes all that apply.
        behaviour: `auto` (the log's probabilities, or estimated where it has none), `logged`, `estimated`,
            or a table [S, A].
        reward_range: least and largest possible reward, for the concentration bound; None takes the log's.
        level: of the intervals.
        seed: of the bootstrap.
        progress: called as `progress(name, parts)` and yields the parts (chunks of the log, or things to do).
        training: how networks are fitted, for logs with observations.
        engine: where the work runs; `local`.

    Returns:
        Answers, diagnostics and a verdict.

    Raises:
        ValueError: where data, policy and settings do not fit together, naming the place.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=5, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=200)
    >>> result = evaluate(batch, pi, discount=mdp.discount, estimators=["certainty-equivalence"])
    >>> float(mdp.initial @ mdp.v_values(pi)) in result.answers["certainty-equivalence"].interval
    True
    """
    discount = checks.discount(discount)
    if not 0.5 <= level < 1:
        raise ValueError(f"level must lie in [0.5, 1), got {level}")
    if engine != "local":
        raise ValueError(f"engine must be 'local', got {engine!r}")
    names = tuple(ESTIMATORS) if estimators is None else tuple(estimators)
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(f"unknown estimator {name!r}: choose from {', '.join(ESTIMATORS)}")
    source = open_data(data)
    target = load_policy(policy, source)
    request = Request(
        discount=discount,
        estimators=names,
        behaviour=behaviour,
        reward_range=reward_range,
        level=level,
        seed=seed,
        progress=progress or (lambda _, parts: iter(parts)),
        training=training or Training(),
    )
    if source.first().tabular:
        return evaluate_tabular(source, target, request)
    from marginax.offline.observations import evaluate_observations

    return evaluate_observations(source, target, request)


def evaluate_tabular(source: Source, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of indices, in two or three passes over it."""
    pi, notes = target_table(policy, source)
    counts = count(source, pi.shape, request)
    whole = counts.whole
    mu, how = behaviour_table(request.behaviour, whole, bool(counts.has_behaviour))
    model = certainty_equivalence(whole, pi, request.discount)
    weighing = Weighing(policy, pi, mu, counts, model, request)
    for log in request.progress("weighting", source.chunks()):
        weighing.update(log)
    sums = weighing.sums

    estimates = sums.estimates()
    if weighing.regression is not None:
        passes = request.progress("regression", source.chunks())
        chunks = ((log, weighing.ratios(log)) for log in passes)
        unseen = sums.unseen_rewards()
        estimates["regression"] = weighing.regression.estimate(chunks, counts.episodes, unseen)
    if request.wants("certainty-equivalence", *SAME_IN_TABLES):
        estimates["certainty-equivalence"] = weighing.influence.estimate(whole.visits)
        if request.wants(*SAME_IN_TABLES):
            notes.append(SAME)
    estimates |= _fitted(source, counts, model, pi, mu, request, notes)
    asked = {*request.estimators, *(["certainty-equivalence"] if request.wants(*SAME_IN_TABLES) else [])}
    estimates = {name: estimates[name] for name in ESTIMATORS if name in estimates and name in asked}

    check = calibration(whole, mu) if how != "estimated" else None
    room = unsupported_room(model)
    target, visits = model.occupancy.ravel(), np.asarray(whole.visits)
    return conclude(
        intervals(estimates, sums, request, how, room),
        estimates,
        sums,
        diagnostics_of(sums, how, check) | _pairs(visits, model),
        request,
        preferred=PREFERRED,
        room=room,
        settings={
            "data": source.name,
            "policy": policy.name,
            "behaviour": how,
            "reward_range": weighing.rewards,
        },
        notes=(*notes, *source.notes),
        curves=curves_of(
            sums, visits.ravel() / visits.sum(), target / max(float(target.sum()), 1e-300), check
        ),
    )


def count(source: Source, shape: tuple[int, ...], request: Request) -> Counts:
    """Step 2: the counts of a whole log, in one pass over its chunks."""
    counts = Counts(*shape)
    for chunk in request.progress("counting", source.chunks()):
        counts.update(chunk)
    need_episodes(counts.episodes)
    return counts


def need_episodes(episodes: int) -> None:
    """Refuses a log of one episode."""
    if episodes < 2:
        raise ValueError("the log has a single episode: an interval over episodes needs at least two")


class Weighing:
    """Step 3: what the second pass over a tabular log gathers, all of it mergeable between chunks."""

    def __init__(
        self,
        policy: Policy,
        pi: np.ndarray,
        mu: np.ndarray | None,
        counts: Counts,
        model: Model,
        request: Request,
    ) -> None:
        self.policy, self.pi, self.mu, gamma = policy, pi, mu, request.discount
        self.critics: list[Model] | None = None
        if request.wants(*ROBUST):  # the critic of each fold is fitted on the others
            starts = counts.whole.starts
            self.critics = [
                certainty_equivalence(fold, pi, gamma, starts=starts) for fold in reversed(counts.folds)
            ]
        self.rewards = request.rewards(counts.reward_min, counts.reward_max)
        robust = self.critics is not None
        self.sums = ImportanceSums(counts.episodes, counts.longest, gamma, with_zero(self.rewards), robust)
        self.regression = (
            RegressionSums(pi.shape[0], pi.shape[1], gamma) if request.wants("regression") else None
        )
        self.influence = ModelInfluence(model, counts.episodes)

    def update(self, log: Log) -> None:
        """Adds a chunk."""
        ratios = self.ratios(log)
        errors = None if self.critics is None else critic_errors(log, self.critics, self.sums.seen)
        self.sums.update(log, ratios, errors)
        self.influence.update(log)
        if self.regression is not None:
            self.regression.update(log, ratios)

    def merge(self, other: Weighing) -> None:
        """Adds what was gathered from other chunks of the same log."""
        self.sums.merge(other.sums)
        self.influence.merge(other.influence)
        if self.regression is not None and other.regression is not None:
            self.regression.merge(other.regression)

    def ratios(self, log: Log) -> np.ndarray:
        """[N] π/μ of the logged actions."""
        policy = self.policy
        target = policy.at(log) if isinstance(policy, RowPolicy) else self.pi[log.states, log.actions]
        chance = log.behaviour if self.mu is None else self.mu[log.states, log.actions]
        assert chance is not None
        if (chance == 0).any():
            row = int(np.argmax(chance == 0))
            raise ValueError(
                f"{log.where(row)}: the behaviour table gives probability 0 to an action that was taken"
            )
        return target / chance


def critic_errors(log: Log, critics: list[Model], first: int) -> tuple[np.ndarray, np.ndarray]:
    """[N] r + γV(x') - Q(x,a) and [E] V(x_0), for episodes numbered from `first`; episode i has critic i modulo their number."""
    fold = (first + np.arange(log.num_episodes)) % len(critics)
    rows = np.repeat(fold, log.lengths)
    begin = log.states[log.offsets[:-1]]
    delta, base = np.empty(len(log)), np.empty(log.num_episodes)
    for k, critic in enumerate(critics):
        delta[rows == k] = critic.errors(log, log.times)[rows == k]
        base[fold == k] = critic.v[0, begin[fold == k]]
    return delta, base


def _fitted(
    source: Source,
    counts: Counts,
    model: Model,
    pi: np.ndarray,
    mu: np.ndarray | None,
    request: Request,
    notes: list[str],
) -> dict[str, Estimate]:
    """Fitted Q evaluation with multi-step and marginalized backups."""
    wanted = request.wants("fqe-retrace", "fqe-marginalized")
    if "fqe-marginalized" in wanted and pi.size > fitted_q.PAIR_LIMIT:
        notes.append(f"fqe-marginalized left out above {fitted_q.PAIR_LIMIT:,} pairs")
        wanted.remove("fqe-marginalized")
    if mu is None:
        n = counts.whole.visits
        mu = np.divide(counts.whole.behaviour_sums, n, out=np.zeros_like(n), where=n > 0)
    retrace = clip_ratios(np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0))
    found = {}
    for name in request.progress("fitted Q", wanted):
        weights = None
        if name == "fqe-marginalized":
            weights = fitted_q.td_weights(counts, retrace, request.discount)
        backup = fitted_q.Backup(source, counts, model, pi, retrace, request.discount, weights)
        found[name] = fitted_q.estimate(backup.solve(), backup)
    return found


def with_zero(rewards: tuple[float, float]) -> tuple[float, float]:
    """The range of rewards with 0 in it, which is what ended episodes earn."""
    return min(rewards[0], 0.0), max(rewards[1], 0.0)


def unsupported_room(model: Model) -> tuple[float, float]:
    """How much lower and higher the value may be if what was never seen has any value seen elsewhere."""
    low, high = model.value_range
    below, above = max(model.default_value - low, 0.0), max(high - model.default_value, 0.0)
    return model.unsupported * below, model.unsupported * above


def intervals(
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    request: Request,
    how: str,
    room: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Answer]:
    """Step 5: intervals of all estimates, with `room` for those that rest on a model, and the bound where it applies."""
    bound = None
    if how == "logged":
        lower, upper = sums.sums["lower"], sums.sums["upper"]
        bound = concentration(lower, upper, sums.value_range(), level=request.level)
    answers = {}
    for name, estimate in estimates.items():
        model_based = ESTIMATORS[name][1] == "bootstraps" and name not in ROBUST
        answers[name] = answer(
            name,
            estimate,
            level=request.level,
            seed=request.seed,
            room=room if model_based else (0.0, 0.0),
            bound=bound if name == "per-decision-is" else None,
        )
    return answers


def conclude(
    answers: dict[str, Answer],
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    diagnostics: dict[str, Any],
    request: Request,
    *,
    preferred: tuple[str, ...],
    room: tuple[float, float] = (0.0, 0.0),
    settings: dict[str, Any],
    notes: Iterable[str],
    curves: dict[str, Any],
) -> Evaluation:
    """Step 6: the verdict on the answers, the difference to the log's own policy, and all of it together."""
    level, seed = request.level, request.seed
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    logged = sums.behaviour()
    diagnostics["disagreeing"] = agreement(answers)
    verdict = judge(answers, diagnostics, preferred)
    advantage = None
    comparable = diagnostics["tail_behaviour"] <= 0.01  # else the log's own average stops at truncation
    if verdict.estimator in estimates and comparable:
        chosen = estimates[verdict.estimator]
        difference = chosen.influence - logged.influence
        advantage = studentised_bootstrap(chosen.value - logged.value, difference, level=level, seed=seed)
        if verdict.estimator in preferred:
            advantage = Interval(advantage.low - room[0], advantage.high + room[1], level)
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", logged, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage),
        diagnostics=diagnostics,
        settings={**settings, "discount": request.discount, "level": level, "seed": seed},
        notes=tuple(notes),
        curves=curves,
        estimates=estimates,
    )


def diagnostics_of(sums: ImportanceSums, how: str, check: Calibration | None) -> dict[str, Any]:
    """What the weights of episodes and the behaviour probabilities look like."""
    weights, n = sums.weights, sums.episodes
    ratio, ratio_error = sums.mean_ratio()
    tail_behaviour, tail_target = sums.sums["tail"] / n
    return {
        "episodes": n,
        "transitions": sums.steps,
        "longest": sums.longest,
        "truncated": sums.truncated,
        "tail_behaviour": float(tail_behaviour),
        "tail_target": float(tail_target),
        "ess": sums.ess(),
        "tail_index": sums.tail_index(),
        "mean_weight": float(weights.mean()),
        "mean_weight_error": float(weights.std(ddof=1) / np.sqrt(n)),
        "mean_ratio": ratio,
        "mean_ratio_error": ratio_error,
        "largest_weights": [
            {"weight": w, "episode": name, "step": step, "state": state, "action": action}
            for w, name, step, state, action in sums.top
        ],
        "behaviour": how,
        "behaviour_deviation": None if check is None else check.deviation,
        "behaviour_error": None if check is None else check.error,
        "behaviour_suspicious": check is not None and check.suspicious,
        "span": sums.return_span,
    }


def _pairs(visits: np.ndarray, model: Model) -> dict[str, Any]:
    """Diagnostics of pairs: where π leaves the log, and where its ratios are large."""
    a = visits.shape[1]
    left, ratios, visits = model.off_support_occupancy.ravel(), model.weights.ravel(), visits.ravel()
    worst, most = np.argsort(left)[::-1][:10], np.argsort(ratios)[::-1][:10]
    return {
        "ess_transitions": effective_transitions(ratios, visits),
        "unsupported": model.unsupported,
        "unsupported_pairs": [
            {"state": int(i // a), "action": int(i % a), "mass": float(left[i])} for i in worst if left[i] > 0
        ],
        "largest_ratios": [
            {"state": int(i // a), "action": int(i % a), "ratio": float(ratios[i]), "visits": int(visits[i])}
            for i in most
            if ratios[i] > 0
        ],
    }


def curves_of(
    sums: ImportanceSums, seen: np.ndarray, target: np.ndarray, check: Calibration | None
) -> dict[str, Any]:
    """Data behind the plots of the page: weights, and the shares of the log and of π in each pair."""
    positive = sums.weights[sums.weights > 0]
    logs = np.log10(np.maximum(positive, 1e-12)) if len(positive) else np.zeros(1)
    heights, edges = np.histogram(logs, bins=40, range=(logs.min() - 0.05, logs.max() + 0.05))
    zeros = int((sums.weights == 0).sum())
    return {
        "ess_by_time": sums.ess_by_time(),
        "weight_histogram": {"edges": edges, "heights": heights, "zeros": zeros},
        "overlap": {"behaviour": seen, "target": target},
        "calibration": None
        if check is None
        else {"predicted": check.predicted, "observed": check.observed, "weight": check.weight},
    }
