"""`evaluate`: open, count, weigh, estimate, intervals, verdict. What is this policy worth?

The steps for logs of indices are below, in this order; `observations.py` has those for logs with observations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.engine import Engine, make
from marginax.offline import fitted_q
from marginax.offline.behaviour import Calibration, behaviour_table, calibration
from marginax.offline.certainty_equivalence import (
    Counts,
    Endless,
    Model,
    ModelInfluence,
    certainty_equivalence,
    effective_transitions,
)
from marginax.offline.importance import FEW, ImportanceSums
from marginax.offline.log import Log
from marginax.offline.markov import MarkovSums, MarkovTest
from marginax.offline.networks import Training
from marginax.offline.passes import Passes, passes_over
from marginax.offline.policies import Policy, RowPolicy, load_policy, target_table
from marginax.offline.ranking import rank
from marginax.offline.ratios import (
    LoggedValue,
    RegressionSums,
    SecondLook,
    StateRatioEstimate,
    StateRatioSums,
)
from marginax.offline.results import (
    ESTIMATORS,
    ROBUST,
    STATE_RATIOS,
    Answer,
    Estimate,
    Evaluation,
    answer,
    concentration,
)
from marginax.offline.sources import open_data
from marginax.offline.verdict import compare, disagreeing, judge
from marginax.statistics import Interval, studentised_bootstrap
from marginax.traces import clip_ratios
from marginax.weights.empirical import EmpiricalMDP

PREFERRED = ("certainty-equivalence", "fqe-retrace", "fqe-one-step", "fenchel", "saddle-point")
STOPPED = 0.01  # share of the discount after truncated steps from which the log's plain average is not its policy's value
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
    horizon: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What may be sent to another machine: without the display."""
        return {**self.__dict__, "progress": None}

    def wants(self, *names: str) -> list[str]:
        """Those of `names` that were asked for."""
        return [name for name in names if name in self.estimators]

    def cut(self, log: Log) -> Log:
        """The log up to the horizon."""
        return log if self.horizon is None else log.first_steps(self.horizon)

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
    horizon: int | None = None,
    policy_kind: str | None = None,
    estimators: Iterable[str] | None = None,
    behaviour: Any = "auto",
    reward_range: tuple[float, float] | None = None,
    level: float = 0.95,
    seed: int = 0,
    progress: Callable[[str, Iterable[Any]], Iterator[Any]] | None = None,
    training: Training | None = None,
    engine: str | Engine = "local",
    address: str | None = None,
) -> Any:
    """Estimates the value of `policy` from a log that another policy made, by every estimator that applies.

    The value is E[Σ_t γ^t r_t] under π until the episode terminates, started where the log's episodes start. A truncated episode
    goes on beyond the log: estimators that bootstrap estimate what follows, the others count it as zero.

    Args:
        data: a `Log`, a `Trajectory`, a file, a frame, a Minari id or folder (see `open_data`).
        policy: the target policy π (see `load_policy`), or a mapping of names to several.
        discount: γ in [0, 1].
        horizon: number of steps whose rewards count; None for all. Where the log is shorter, estimators bootstrap.
        policy_kind: what a two-dimensional array is, a `table` of states or probabilities of the log's `rows`.
        estimators: names from `ESTIMATORS`; None takes all that apply.
        behaviour: `auto` (the log's probabilities, or estimated where it has none), `logged`, `estimated`,
            or a table [S, A].
        reward_range: least and largest possible reward, for the concentration bound; None takes the log's.
        level: of the intervals.
        seed: of the bootstrap.
        progress: called as `progress(name, parts)` and yields the parts (chunks of the log, or things to do).
        training: how networks are fitted, for logs with observations.
        engine: where the work runs: `local`, or `ray` for tabular logs in many files.
        address: of a Ray cluster; by default one that runs already, or one that is started here.

    Returns:
        Answers, diagnostics and a verdict; for several policies a `Ranking` of them.

    Raises:
        ValueError: where data, policy and settings do not fit together, naming the place.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=5, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=200)
    >>> result = evaluate(batch, pi, discount=mdp.discount, estimators=["certainty-equivalence"])
    >>> float(mdp.initial @ mdp.v_values(pi)) in result.answers["certainty-equivalence"].interval
    True
    """
    discount = 1.0 if discount == 1 else checks.discount(discount)
    horizon = None if horizon is None else checks.count("horizon", horizon)
    if horizon is not None and 0 < discount < 1 and discount**horizon < 1e-10:
        horizon = None  # nothing of weight follows
    if not 0.5 <= level < 1:
        raise ValueError(f"level must lie in [0.5, 1), got {level}")
    names = tuple(ESTIMATORS) if estimators is None else tuple(estimators)
    for name in names:
        checks.choice("an estimator", name, ESTIMATORS)
    source = open_data(data)
    request = Request(
        discount=discount,
        estimators=names,
        behaviour=behaviour,
        reward_range=reward_range,
        level=level,
        seed=seed,
        progress=progress or (lambda _, parts: iter(parts)),
        training=training or Training(),
        horizon=horizon,
    )
    several = policy if isinstance(policy, Mapping) else {"policy": policy}
    if not several:
        raise ValueError("policy is an empty mapping: give at least one policy")
    with make(engine, address=address) as place, passes_over(source, request.progress, place) as passes:
        source = passes.source  # sorted, if need be
        targets = {name: load_policy(one, source, policy_kind) for name, one in several.items()}
        if source.first().tabular:
            found = {name: evaluate_tabular(passes, target, request) for name, target in targets.items()}
        elif place.remote:
            raise ValueError("logs with observations are evaluated on one machine: use the engine 'local'")
        else:
            from marginax.offline.observations import evaluate_observations

            found = {name: evaluate_observations(source, each, request) for name, each in targets.items()}
    return rank(found, level, seed) if isinstance(policy, Mapping) else found["policy"]


def evaluate_tabular(passes: Passes, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of indices, in two or three passes over it."""
    source = passes.source
    pi, notes = target_table(policy, source)
    counts = passes.count(Counts(*pi.shape))  # step 2
    need_episodes(counts.episodes)
    whole = counts.whole
    mu, how = behaviour_table(request.behaviour, whole, bool(counts.has_behaviour))
    try:
        model = certainty_equivalence(whole, pi, request.discount, horizon=request.horizon)
    except Endless:
        request = replace(request, horizon=counts.longest)
        notes.append(
            f"without a discount, and with states that never end in the log's counts, values are those of the first "
            f"{counts.longest} steps, the length of the longest episode"
        )
        model = certainty_equivalence(whole, pi, request.discount, horizon=request.horizon)
    weighing = passes.gather("weighting", Weighing(policy, pi, mu, counts, model, request))
    sums = weighing.sums

    by_model = weighing.influence.estimate(whole.visits)
    estimates = sums.estimates(by_model)
    again = weighing.second_look()
    if again:
        estimates |= passes.gather("second look", SecondLook(weighing.ratios, again)).estimates()
    logged = estimates.pop("logged value", None)
    if request.wants("certainty-equivalence", *SAME_IN_TABLES):
        estimates["certainty-equivalence"] = by_model
        if request.wants(*SAME_IN_TABLES):
            notes.append(SAME)
    estimates |= _fitted(passes, counts, model, pi, mu, request, notes)
    asked = {*request.estimators, *(["certainty-equivalence"] if request.wants(*SAME_IN_TABLES) else [])}
    estimates = {name: estimates[name] for name in ESTIMATORS if name in estimates and name in asked}

    check = calibration(whole, mu) if how != "estimated" else None
    never = unreachable(whole, mu, model, how)
    room, unreached = (unsupported_room(mass, model, sums) for mass in (model.unsupported, never))
    target, visits = model.occupancy.ravel(), np.asarray(whole.visits)
    diagnostics = diagnostics_of(sums, how, check, weighing.markov.result(), request)
    diagnostics |= _pairs(visits, model) | {"unreachable": never}
    return conclude(
        intervals(estimates, sums, request, how, room, unreached),
        estimates,
        sums,
        diagnostics,
        request,
        preferred=PREFERRED,
        room=room,
        logged=logged,
        settings={
            "data": source.name,
            "policy": policy.name,
            "behaviour": how,
            "reward_range": weighing.rewards,
        },
        notes=(*notes, *source.notes, *passes.notes),
        curves=curves_of(
            sums, visits.ravel() / visits.sum(), target / max(float(target.sum()), 1e-300), check
        ),
    )


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
        self.policy, self.pi, self.mu, self.request = policy, pi, mu, request
        gamma, horizon, states = request.discount, request.horizon, len(pi)
        self.whole = counts.whole
        self.critics: list[Model] | None = None
        if request.wants(
            *ROBUST, "doubly-robust-state-ratio"
        ):  # the critic of each fold is fitted on the others
            self.critics = [
                certainty_equivalence(fold, pi, gamma, starts=self.whole.starts, horizon=horizon)
                for fold in reversed(counts.folds)
            ]
        self.rewards = request.rewards(counts.reward_min, counts.reward_max)
        longest = counts.longest if horizon is None else min(counts.longest, horizon)
        robust = self.critics is not None
        self.sums = ImportanceSums(counts.episodes, longest, gamma, with_zero(self.rewards), robust, horizon)
        self.influence = ModelInfluence(model, counts.episodes)
        single = model
        if len(model.q) > 1 or gamma == 1:  # the test needs one value for each pair
            single = certainty_equivalence(self.whole, pi, min(gamma, 1 - 1 / max(longest, 2)))
        self.markov = MarkovSums(single)
        regression = RegressionSums(states, pi.shape[1], gamma, horizon)
        self.regression = regression if request.wants("regression") else None
        self.states = StateRatioSums(states, gamma) if request.wants(*STATE_RATIOS) else None
        self.logged = StateRatioSums(states, gamma) if counts.truncated else None

    def update(self, log: Log, first: int | None = None) -> None:
        """Adds a chunk, its episodes numbered from `first`."""
        ratios = self.ratios(log)
        cut = self.request.cut(log)
        number = self.sums.seen if first is None else first
        errors = None if self.critics is None else critic_errors(cut, self.critics, number)
        self.sums.update(cut, ratios if cut is log else self.ratios(cut), errors, number)
        self.influence.update(log, number)
        self.markov.update(log)
        if self.regression is not None:
            self.regression.update(log, ratios)
        if self.states is not None:
            self.states.update(log, ratios, number)
        if self.logged is not None:
            self.logged.update(log, np.ones(len(log)), number)

    def merge(self, other: Weighing) -> None:
        """Adds what was gathered from other chunks of the same log."""
        for name in ("sums", "influence", "markov", "regression", "states", "logged"):
            if getattr(self, name) is not None:
                getattr(self, name).merge(getattr(other, name))

    def second_look(self) -> list[Any]:
        """What needs another pass over the log to find its influences."""
        horizon = self.request.horizon
        found: list[Any] = []
        if self.regression is not None:
            found.append(self.regression.estimator(self.sums.episodes, self.sums.unseen_rewards()))
        if self.states is not None:
            critics = self.critics if self.request.wants("doubly-robust-state-ratio") else None
            found.append(StateRatioEstimate(self.states, critics, self.whole.successors, horizon))
        if self.logged is not None and self.sums.sums["tail"][0] > STOPPED * self.sums.episodes:
            found.append(LoggedValue(self.logged, None, None, horizon))
        return found

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
        delta[rows == k] = critic.errors(log)[rows == k]
        base[fold == k] = critic.v[0, begin[fold == k]]
    return delta, base


def _fitted(
    passes: Passes,
    counts: Counts,
    model: Model,
    pi: np.ndarray,
    mu: np.ndarray | None,
    request: Request,
    notes: list[str],
) -> dict[str, Estimate]:
    """Fitted Q evaluation with multi-step and marginalized backups."""
    wanted = request.wants("fqe-retrace", "fqe-marginalized")
    if wanted and (request.horizon is not None or request.discount == 1):
        notes.append("fitted Q needs a discount below 1 and no horizon; it was left out")
        return {}
    if "fqe-marginalized" in wanted and pi.size > fitted_q.PAIR_LIMIT:
        notes.append(f"fqe-marginalized left out above {fitted_q.PAIR_LIMIT:,} pairs")
        wanted.remove("fqe-marginalized")
    if mu is None:
        n = counts.whole.visits
        mu = np.divide(counts.whole.behaviour_sums, n, out=np.zeros_like(n), where=n > 0)
    retrace = clip_ratios(np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0))
    found = {}
    for name in request.progress("fitted Q", wanted):
        backup: fitted_q.Backup
        settings = (counts, model, pi, retrace, request.discount)
        if name == "fqe-marginalized":
            backup = fitted_q.MarginalizedBackup(partial(passes.gather, "fitted Q"), *settings)
        else:
            backup = passes.backup(fitted_q.Backup(passes.source, *settings))
        found[name] = fitted_q.estimate(backup.solve(), backup)
    return found


def with_zero(rewards: tuple[float, float]) -> tuple[float, float]:
    """The range of rewards with 0 in it, which is what ended episodes earn."""
    return min(rewards[0], 0.0), max(rewards[1], 0.0)


def unsupported_room(mass: float, model: Model, sums: ImportanceSums) -> tuple[float, float]:
    """How much lower and higher the value may be if π, with discounted probability `mass`, does what was never seen, and that
    has any value that the rewards permit."""
    if mass == 0:
        return 0.0, 0.0
    low, high = sums.value_range()
    below, above = max(model.default_value - low, 0.0), max(high - model.default_value, 0.0)
    return mass * below, mass * above


def unreachable(counts: EmpiricalMDP, mu: np.ndarray | None, model: Model, how: str) -> float:
    """Discounted visits of π to pairs that the behaviour policy never takes, as far as its probabilities say.

    A pair that the log missed by chance is none of them: the logged probabilities of the actions that were taken leave something
    over for it. Estimated probabilities leave nothing.
    """
    if how == "estimated":
        return model.unsupported
    if mu is None:
        mean = np.divide(
            counts.behaviour_sums, counts.visits, out=np.zeros(counts.visits.shape), where=counts.support
        )
        never = np.broadcast_to(1.0 - mean.sum(axis=1, keepdims=True) < 1e-3, mean.shape)
    else:
        never = mu <= 0
    return float(min((model.off_support_occupancy * never).sum(), model.unsupported))


def intervals(
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    request: Request,
    how: str,
    room: tuple[float, float] = (0.0, 0.0),
    unreached: tuple[float, float] = (0.0, 0.0),
) -> dict[str, Answer]:
    """Step 5: intervals of all estimates, and the bound where it applies.

    Pairs that the log never took leave `room` below and above for what rests on a model. What rests on ratios has to leave
    `unreached` for those that the behaviour policy never takes.
    """
    possible = sums.value_range()
    bound = None
    if how == "logged" and np.isfinite(possible).all():
        bound = concentration(sums.sums["lower"], sums.sums["upper"], possible, level=request.level)
    answers = {}
    for name, estimate in estimates.items():
        share = estimate.model_share
        below, above = (share * own + (1 - share) * other for own, other in zip(room, unreached, strict=True))
        found = answer(
            name,
            estimate,
            level=request.level,
            seed=request.seed,
            room=(below, above),
            bound=bound if name == "per-decision-is" else None,
        )
        answers[name] = within(found, possible)
    return answers


def within(found: Answer, possible: tuple[float, float]) -> Answer:
    """An answer whose value and interval do not leave what the rewards permit; `beyond` says that the value did."""
    low, high = possible
    slack = 1e-9 * max(abs(low), abs(high))
    ends = Interval(
        float(np.clip(found.interval.low, low, high)),
        float(np.clip(found.interval.high, low, high)),
        found.interval.level,
    )
    beyond = not low - slack <= found.value <= high + slack
    return replace(found, value=float(np.clip(found.value, low, high)), interval=ends, beyond=beyond)


def conclude(
    answers: dict[str, Answer],
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    diagnostics: dict[str, Any],
    request: Request,
    *,
    preferred: tuple[str, ...],
    room: tuple[float, float] = (0.0, 0.0),
    logged: Estimate | None = None,
    settings: dict[str, Any],
    notes: Iterable[str],
    curves: dict[str, Any],
) -> Evaluation:
    """Step 6: the verdict on the answers, the difference to the log's own policy, and all of it together."""
    level, seed = request.level, request.seed
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    average = sums.behaviour()
    diagnostics["disagreeing"] = disagreeing(answers, estimates)
    diagnostics["room"] = room
    verdict = judge(answers, estimates, diagnostics, preferred, max(room))
    stopped = diagnostics["tail_behaviour"] > STOPPED  # the plain average stops at truncation
    own, reason, advantage = average, "", None
    if stopped:
        if logged is None:
            reason = "the log is truncated, and its own value past that point is not known"
        elif diagnostics["markov_fails"]:
            reason = "the log is truncated, and its states do not tell what follows"
        else:
            own = logged
    diagnostics["behaviour_value"] = None if reason else own.value
    chosen = estimates.get(verdict.estimator or "")
    if verdict.estimator is None:
        reason = ""
    elif chosen is None:
        reason = f"{verdict.estimator} has no influence of single episodes"
    elif not reason:
        gap, psi = chosen.value - own.value, chosen.influence - own.influence
        advantage = studentised_bootstrap(gap, psi, level=level, seed=seed)
        if verdict.estimator in preferred:
            advantage = Interval(advantage.low - room[0], advantage.high + room[1], level)
    beyond = [a.name for a in answers.values() if a.beyond]
    if beyond:
        low, high = sums.value_range()
        notes = (
            *notes,
            f"{', '.join(beyond)} went beyond what rewards from {settings['reward_range'][0]:.4g} to "
            f"{settings['reward_range'][1]:.4g} permit and {'were' if len(beyond) > 1 else 'was'} cut to "
            f"{low:.4g} to {high:.4g}",
        )
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", average, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage, reason),
        diagnostics=diagnostics,
        settings={
            **settings,
            "discount": request.discount,
            "horizon": request.horizon,
            "level": level,
            "seed": seed,
        },
        notes=tuple(notes),
        curves=curves,
        estimates=estimates,
    )


def diagnostics_of(
    sums: ImportanceSums, how: str, check: Calibration | None, markov: MarkovTest, request: Request
) -> dict[str, Any]:
    """What the weights of episodes, the behaviour probabilities and the states look like."""
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
        "markov_score": markov.score,
        "markov_degrees": markov.degrees,
        "markov_fails": markov.fails,
        "returns": returns_of(sums, request.level),
        "span": sums.return_span,
    }


def returns_of(sums: ImportanceSums, level: float) -> dict[str, Any]:
    """The distribution of returns, of π where its weights allow and of the log, unless truncation hides a part of them."""
    if sums.sums["tail"][0] > STOPPED * sums.episodes:
        return {
            "target": None,
            "behaviour": None,
            "reason": "truncated episodes hide a part of their returns",
        }
    logged = sums.distribution(level, weighted=False)
    found: dict[str, Any] = {"behaviour": logged, "target": None, "reason": None}
    if sums.ess() >= FEW:
        found["target"] = sums.distribution(level)
    else:
        found["reason"] = f"{sums.ess():.0f} effective episodes are too few"
    return found


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
