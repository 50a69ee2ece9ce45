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
from marginax.engine import Engine, using
from marginax.offline import fitted_q
from marginax.offline.behaviour import behaviour_table, calibration, mean_logged
from marginax.offline.certainty_equivalence import (
    Counts,
    Endless,
    Model,
    ModelInfluence,
    certainty_equivalence,
)
from marginax.offline.conclusion import conclude
from marginax.offline.diagnostics import STOPPED, curves_of, diagnostics_of, labelled, pairs_of, unreachable
from marginax.offline.importance import FAINT, NEGLIGIBLE, ImportanceSums
from marginax.offline.log import Accumulator, Log, divided
from marginax.offline.markov import MarkovSums
from marginax.offline.networks import Training
from marginax.offline.passes import Passes, passes_over
from marginax.offline.policies import Policy, RowPolicy, load_policy, require_order, target_table
from marginax.offline.ranking import rank
from marginax.offline.ratios import (
    LoggedValue,
    RegressionEstimate,
    RegressionSums,
    SecondLook,
    StateRatioEstimate,
    StateRatioSums,
)
from marginax.offline.results import (
    ESTIMATORS,
    ROBUST,
    STATE_RATIOS,
    Estimate,
    Evaluation,
    intervals,
    with_room,
)
from marginax.offline.sources import Source, open_data
from marginax.traces import clip_ratios

PREFERRED = ("certainty-equivalence", "fqe-retrace", "fqe-one-step", "fenchel", "saddle-point")
SAME_IN_TABLES = ("saddle-point", "fenchel", "fqe-one-step")
SAME = (
    "with tables, saddle-point, fenchel and fqe-one-step have the solution of certainty-equivalence: they are shown as one row, "
    "certainty-equivalence"
)


@dataclass(frozen=True)
class Request:
    """The checked arguments of `evaluate`; see there."""

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

    @property
    def bootstrap(self) -> dict[str, Any]:
        """Level of the intervals and seed of the bootstrap."""
        return {"level": self.level, "seed": self.seed}

    def settings(
        self, source: Source, policy: Policy, how: str, rewards: tuple[float, float]
    ) -> dict[str, Any]:
        """The settings of the evaluation, for the report."""
        what = {"data": source.name, "policy": policy.name, "behaviour": how, "reward_range": rewards}
        return what | {"discount": self.discount, "horizon": self.horizon, **self.bootstrap}

    def wants(self, *names: str) -> list[str]:
        """Those of `names` among the estimators to run."""
        return [name for name in names if name in self.estimators]

    def cut(self, log: Log) -> tuple[Log, np.ndarray | slice]:
        """The log up to the horizon, and which rows of the whole one these are."""
        if self.horizon is None:
            return log, slice(None)
        return log.first_steps(self.horizon), log.times < self.horizon

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
    estimators: str | Iterable[str] | None = None,
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
        estimators: names from `ESTIMATORS`, or one of them; None takes all that apply.
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
    discount, level = checks.fraction("discount", discount), checks.number("level", level)
    if not 0.5 <= level < 1:
        raise ValueError(f"level must lie in [0.5, 1), got {level}")
    horizon = None if horizon is None else checks.count("horizon", horizon)
    if horizon is not None and 0 < discount < 1 and discount**horizon < NEGLIGIBLE:
        horizon = None
    training = training or Training()
    checks.count("training.members", training.members, least=2)  # their spread is the interval
    request = Request(
        discount=discount,
        estimators=_estimators(estimators),
        behaviour=behaviour,
        reward_range=_reward_range(reward_range),
        level=level,
        seed=checks.count("seed", seed, 0),
        progress=progress or (lambda _, parts: iter(parts)),
        training=training,
        horizon=horizon,
    )
    several = policy if isinstance(policy, Mapping) else {"policy": policy}
    if not several:
        raise ValueError("policy is an empty mapping: give at least one policy")
    for name in several:
        if not isinstance(name, str):
            raise ValueError(f"the names of policies must be strings, got {name!r}")
    source = open_data(data)
    with using(engine, address=address) as place, passes_over(source, request.progress, place) as passes:
        source = passes.source  # sorted, if need be
        targets = {name: load_policy(one, source, policy_kind) for name, one in several.items()}
        if not isinstance(behaviour, str):
            require_order("the behaviour table", source, "state", "action")
        if source.first().tabular:
            found = {name: evaluate_tabular(passes, target, request) for name, target in targets.items()}
        elif place.remote:
            raise ValueError("logs with observations are evaluated on one machine: use the engine 'local'")
        else:
            from marginax.offline.observations import evaluate_observations

            found = {name: evaluate_observations(source, each, request) for name, each in targets.items()}
    return rank(found, **request.bootstrap) if isinstance(policy, Mapping) else found["policy"]


def _estimators(given: Any) -> tuple[str, ...]:
    """The names of the estimators to run, checked."""
    if given is None:
        return tuple(ESTIMATORS)
    names = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"estimators must be names, got {given!r}")
    if not names:
        raise ValueError("estimators is empty: give at least one, or None for all")
    for name in names:
        checks.choice("an estimator", name, ESTIMATORS)
    return names


def _reward_range(given: Any) -> tuple[float, float] | None:
    """The least and the largest reward, checked."""
    if given is None:
        return None
    if np.shape(given) != (2,):
        raise ValueError(f"reward_range must be the least and the largest reward, got {given!r}")
    return checks.number("reward_range", given[0]), checks.number("reward_range", given[1])


def evaluate_tabular(passes: Passes, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of indices, in two or three passes over it."""
    source = passes.source
    pi, notes = target_table(policy, source)

    # Step 2: count, and solve the equations of the counts.
    counts = passes.count(Counts(*pi.shape))
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

    # Step 3: weigh.
    weighing = passes.gather("weighting", Weighing(policy, pi, mu, counts, model, request))
    sums = weighing.sums

    # Step 4: estimate.
    by_model = weighing.influence.estimate(whole.visits)
    estimates = sums.estimates(by_model) | {"certainty-equivalence": by_model}
    if again := weighing.second_look():
        estimates |= passes.gather("second look", SecondLook(weighing.ratios, again)).estimates()
    logged = estimates.pop("logged value", None)
    asked = set(request.estimators)
    if request.wants(*SAME_IN_TABLES):
        asked.add("certainty-equivalence")
        notes.append(SAME)
    estimates |= _fitted_q(passes, counts, model, pi, mu, request, notes)
    estimates = {name: estimates[name] for name in ESTIMATORS if name in estimates and name in asked}

    # Step 5: intervals.
    never, possible = unreachable(whole, mu, model, how), sums.value_range()
    support = {"default": model.default_value, "unsupported": model.unsupported, "unreachable": never}
    estimates = with_room(estimates, possible, episodes=counts.episodes, same=sums.same, **support)
    bound = sums.bound(request.level) if how == "logged" else None
    answers = intervals(estimates, possible, **request.bootstrap, bound=bound)

    # Step 6: diagnostics and verdict.
    check = calibration(whole, mu) if how != "estimated" else None
    visits, target = np.asarray(whole.visits), model.occupancy.ravel()
    shares = visits.ravel() / visits.sum(), target / max(float(target.sum()), 1e-300)
    diagnostics = diagnostics_of(sums, how, check, weighing.markov.result(), request.level)
    diagnostics |= pairs_of(visits, model)
    diagnostics["unreachable"] = never
    diagnostics["set_aside"] = source.share_set_aside(counts.steps, counts.episodes, counts.truncated)
    return conclude(
        answers,
        estimates,
        sums,
        labelled(diagnostics, source.encoding),
        request.settings(source, policy, how, weighing.rewards),
        preferred=PREFERRED,
        logged=logged,
        notes=(*notes, *source.notes, *passes.notes),
        curves=curves_of(sums, shares, check),
    )


class Weighing(Accumulator):
    """Step 3: what the second pass over a tabular log gathers."""

    added = ("sums", "influence", "markov", "regression", "states", "logged")

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
        (states, actions), gamma, horizon = pi.shape, request.discount, request.horizon
        self.whole = counts.whole
        self.rewards = request.rewards(counts.reward_min, counts.reward_max)
        self.critics: list[Model] | None = None
        if request.wants(*ROBUST, "doubly-robust-state-ratio"):  # each fold's critic is fitted on the others
            self.critics = [
                certainty_equivalence(fold, pi, gamma, starts=self.whole.starts, horizon=horizon)
                for fold in reversed(counts.folds)
            ]
        longest = counts.longest if horizon is None else min(counts.longest, horizon)
        self.sums = ImportanceSums(
            counts.episodes,
            longest,
            gamma,
            self.rewards,
            robust=self.critics is not None,
            horizon=horizon,
            missed=model.unsupported > FAINT,
        )
        self.influence = ModelInfluence(model, counts.episodes)
        single = model
        if len(model.q) > 1 or gamma == 1:  # the test needs one value for each pair
            single = certainty_equivalence(self.whole, pi, min(gamma, 1 - 1 / max(longest, 2)))
        self.markov = MarkovSums(single, counts.steps)
        wanted = bool(request.wants("regression"))
        self.regression = RegressionSums(states, actions, gamma, horizon) if wanted else None
        self.states = StateRatioSums(states, gamma) if request.wants(*STATE_RATIOS) else None
        self.logged = StateRatioSums(states, gamma) if counts.truncated else None

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        ratios = self.ratios(log)
        cut, inside = self.request.cut(log)
        errors = None if self.critics is None else critic_errors(cut, self.critics, first)
        self.sums.update(cut, ratios[inside], errors, first)
        self.influence.update(log, first)
        self.markov.update(log, first)
        if self.regression is not None:
            self.regression.update(log, ratios)
        if self.states is not None:
            self.states.update(log, ratios, first)
        if self.logged is not None:
            self.logged.update(log, np.ones(len(log)), first)

    def second_look(self) -> list[Any]:
        """What needs another pass over the log to find its influences."""
        horizon = self.request.horizon
        found: list[Any] = []
        if self.regression is not None:
            found.append(RegressionEstimate(self.regression, self.sums.episodes, self.sums.unseen_rewards()))
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
    """[N] r + γV(x') - Q(x,a) and [E] V(x_0), for episodes numbered from `first`, each by the critic of its fold."""
    fold, begin = log.folds(first), log.states[log.offsets[:-1]]
    delta = np.choose(fold[log.episode], [critic.errors(log) for critic in critics])
    return delta, np.choose(fold, [critic.v[0, begin] for critic in critics])


def _fitted_q(
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
        mu = mean_logged(counts.whole)
    retrace = clip_ratios(divided(pi, mu))
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
