"""Step 5, intervals; and the results of an evaluation: plain dataclasses that turn into JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.offline.log import Accumulator
from marginax.statistics import Interval, rounding, studentised_bootstrap

MAX_GROUPS = 1000  # with more episodes than that the bootstrap resamples groups of them

ESTIMATORS = {
    "trajectory-is": ("importance sampling", "stops"),
    "per-decision-is": ("importance sampling", "stops"),
    "weighted-is": ("importance sampling", "stops"),
    "weighted-per-decision-is": ("importance sampling", "stops"),
    "doubly-robust": ("doubly robust", "bootstraps"),
    "weighted-doubly-robust": ("doubly robust", "bootstraps"),
    "magic": ("doubly robust", "bootstraps"),
    "slope": ("doubly robust", "bootstraps"),
    "doubly-robust-state-ratio": ("doubly robust", "bootstraps"),
    "state-ratio": ("marginalized", "bootstraps"),
    "certainty-equivalence": ("marginalized", "bootstraps"),
    "saddle-point": ("marginalized", "bootstraps"),
    "fenchel": ("marginalized", "bootstraps"),
    "regression": ("marginalized", "stops"),
    "fqe-one-step": ("fitted Q", "bootstraps"),
    "fqe-retrace": ("fitted Q", "bootstraps"),
    "fqe-marginalized": ("fitted Q", "bootstraps"),
}
"""The kind of each estimator, and what it does at a truncated step: it `bootstraps`, or it `stops` and counts nothing after it."""

ROBUST = ("doubly-robust", "weighted-doubly-robust", "magic", "slope")
STATE_RATIOS = ("doubly-robust-state-ratio", "state-ratio")


@dataclass(frozen=True)
class Estimate:
    """An estimate of the value, and what its interval is made of.

    Attributes:
        value: the estimate.
        influence: [G] independent entries. To first order, the error of the estimate is their mean.
        ess: effective sample size, for estimators with weights.
        ess_of: the unit of `ess`: `episodes` or `transitions`.
        bias_bound: bound on the bias that resampling cannot show. It is added on both sides of the interval. A self-normalised
            average has such a bias if one episode has most of the weight, because then the average hardly varies. So has an
            average whose weights have a mean far below 1, because then the episodes that matter were not drawn.
        model_share: share of the value that rests on a model of the log's pairs: nothing is known of it at other pairs.
        lost: discounted probability of states in which no logged action has weight under π.
        room: how far the truth may lie below and above the value because of actions outside the log. That of the recommended
            estimate also includes the widening by the verdict.
        alike: (effective) number of episodes, if they are all alike, in themselves or to the estimator. Then resampling does not
            show the error. None if they differ.
        possible: least and largest value that the rewards permit, if episodes are alike.
    """

    value: float
    influence: np.ndarray
    ess: float | None = None
    ess_of: str = "episodes"
    bias_bound: float = 0.0
    model_share: float = 0.0
    lost: float = 0.0
    room: tuple[float, float] = (0.0, 0.0)
    alike: float | None = None
    possible: tuple[float, float] = (0.0, 0.0)

    @property
    def error(self) -> float:
        """Standard error."""
        n = len(self.influence)
        return float(self.influence.std(ddof=1) / np.sqrt(n)) if n > 1 else float("inf")

    def unseen(self, level: float) -> float:
        """Clopper and Pearson's bound on the probability of a kind of episode that was not seen, if all are alike; else 0."""
        return 0.0 if self.alike is None else 1.0 - ((1 - level) / 2) ** (1 / self.alike)

    def left_open(self, level: float = 0.95) -> tuple[float, float]:
        """Room below and above for what resampling cannot show: `room`, `bias_bound`, and unseen kinds of episodes."""
        below, above = room_for(self.unseen(level), self.value, self.possible)
        return self.room[0] + self.bias_bound + below, self.room[1] + self.bias_bound + above


class Influence(Accumulator):
    """Sums of influences over groups of episodes, chunk by chunk.

    >>> influence = Influence(episodes=4)
    >>> influence.add(np.array([1.0, -1.0]), first=0), influence.add(np.array([2.0, -2.0]), first=2)
    (None, None)
    >>> influence.groups()
    array([ 1., -1.,  2., -2.])
    """

    added = ("total", "size")

    def __init__(self, episodes: int) -> None:
        self.episodes = episodes
        self.total, self.size = np.zeros((2, min(episodes, MAX_GROUPS)))

    def add(self, psi: np.ndarray, first: int = 0) -> None:
        """Adds the influences [E] of episodes numbered from `first`."""
        group = (first + np.arange(len(psi))) % len(self.total)
        self.total += np.bincount(group, psi, minlength=len(self.total))
        self.size += np.bincount(group, minlength=len(self.total))

    def groups(self, centre: float = 0.0) -> np.ndarray:
        """[G] entries whose mean is the mean influence of episodes, less `centre`."""
        return (self.total - centre * self.size) * (len(self.total) / self.episodes)


@dataclass(frozen=True)
class Answer:
    """One estimator's answer.

    Attributes:
        name: see `ESTIMATORS`.
        value: estimate of π's value from the log's starts.
        interval: by a bootstrap over episodes, widened for what resampling cannot show.
        kind: kind of the estimator; see `ESTIMATORS`.
        truncation: `stops` (rewards after a truncated step count as zero) or `bootstraps`.
        ess: effective sample size, in units of `ess_of`.
        ess_of: `episodes` or `transitions`.
        bound: interval with guaranteed coverage, for per-decision importance sampling.
        error: standard error.
        beyond: whether the estimate lay outside what the rewards permit, and was clipped.
    """

    name: str
    value: float
    interval: Interval
    kind: str
    truncation: str
    ess: float | None = None
    ess_of: str = "episodes"
    bound: Interval | None = None
    error: float = 0.0
    beyond: bool = False


@dataclass(frozen=True)
class Verdict:
    """The recommended estimate and the reasons, or why the data cannot tell.

    Attributes:
        status: `trust`, `caution` or `cannot tell`.
        estimator: name of the recommended estimator, or None.
        text: the reasons, in words; an entry for each thought.
        better: whether π is `better` or `worse` than the policy that made the log, or `cannot tell`.
    """

    status: str
    estimator: str | None
    text: tuple[str, ...]
    better: str = "cannot tell"


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate` for one policy.

    Attributes:
        answers: the answer of each estimator, by name.
        behaviour: the average return of the log.
        advantage: interval of the value of π less that of μ, by the recommended estimator; None if it is not known.
        verdict: the recommended estimate and the reasons.
        diagnostics: numbers and short lists on overlap, weights, support, truncation and calibration.
        settings: the arguments of `evaluate`.
        notes: what was done to the data, and what was left out.
        curves: data of the figures.
        estimates: values with influences, by name, for paired comparisons; not in the JSON.

    >>> import marginax as mx
    >>> log = mx.offline.Log.from_episodes(
    ...     [dict(states=[0, 0], actions=[a], rewards=[float(a)], terminal=True, behaviour=[0.5])
    ...      for a in [0, 1] * 20])
    >>> result = mx.offline.evaluate(log, [[0.25, 0.75]], discount=0.9)
    >>> round(result.answers["per-decision-is"].value, 3), round(result.behaviour.value, 3)
    (0.75, 0.5)
    """

    answers: dict[str, Answer]
    behaviour: Answer
    advantage: Interval | None
    verdict: Verdict
    diagnostics: dict[str, Any]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    curves: dict[str, Any] = field(default_factory=dict, repr=False)
    estimates: dict[str, Estimate] = field(default_factory=dict, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain numbers, strings and lists, ready for JSON (infinities become null)."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self) if f.name != "estimates"}


def plain(value: Any) -> Any:
    """Plain Python numbers, lists and dicts; NaN and infinities become None."""
    if isinstance(value, Answer | Verdict | Interval):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def effective(episodes: float) -> str:
    """A number of effective episodes in words."""
    return f"{episodes:,.0f} effective episode{'' if round(episodes) == 1 else 's'}"


def effective_size(total: float, squares: float) -> float:
    """(Σw)²/Σw²: how many equal weights carry as much as these."""
    return total**2 / squares if squares > 0 else 0.0


def share(value: float | None) -> str:
    """A probability in words; `not known` for None."""
    return "not known" if value is None else f"{value:.2%}"


def answer(name: str, estimate: Estimate, *, level: float = 0.95, seed: int = 0) -> Answer:
    """The answer of an estimator: its estimate with an interval."""
    kind, truncation = ESTIMATORS.get(name, ("average return", "stops"))
    interval = studentised_bootstrap(estimate.value, estimate.influence, level=level, seed=seed)
    interval = interval.widened(*estimate.left_open(level))
    return Answer(
        name=name,
        value=estimate.value,
        interval=interval,
        kind=kind,
        truncation=truncation,
        ess=estimate.ess,
        ess_of=estimate.ess_of,
        error=estimate.error,
    )


def concentration(
    lower: np.ndarray,
    upper: np.ndarray,
    value_range: tuple[float, float],
    *,
    level: float = 0.95,
) -> Interval:
    """An interval with guaranteed coverage for any number of episodes, if rewards lie in their range and μ is as logged.

    For X ≥ 0 the mean of min(X, b) is at most that of X. So an empirical Bernstein bound (Maurer and Pontil) on clipped
    estimates bounds J from below, however large the weights are. One twentieth of the episodes is used to choose b, the rest
    for the bound (Thomas, Theocharous and Ghavamzadeh 2015).

    Args:
        lower: [E] non-negative per-episode estimates whose mean does not exceed J - value_range[0].
        upper: [E] the same for value_range[1] - J.
        value_range: least and largest value of any policy.
        level: the guaranteed coverage.

    Raises:
        ValueError: an argument has a wrong shape, is not finite or lies out of range.

    >>> half = np.tile([0.0, 1.0], 500)
    >>> bound = concentration(half, 1 - half, (0.0, 1.0))
    >>> bool(0.4 < bound.low < 0.5 < bound.high < 0.6)
    True
    """
    lower = checks.array("lower", lower, (None,))
    upper = checks.array("upper", upper, lower.shape)
    rounded = -1e-9 * max(lower.max(initial=1.0), upper.max(initial=1.0))
    for name, values in (("lower", lower), ("upper", upper)):
        if values.min(initial=0.0) < rounded:
            checks.non_negative(name, values)
    if np.shape(value_range) != (2,) or not value_range[0] <= value_range[1]:
        raise ValueError(f"value_range must be the least and the largest value, got {value_range!r}")
    least, largest = (checks.number("value_range", end) for end in value_range)
    level = checks.number("level", level)
    if not 0 < level < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    each = (1 - level) / 2
    low = least + clipped_lower_bound(lower, each)
    high = largest - clipped_lower_bound(upper, each)
    if low > high:  # no value fits both: rewards or μ are not as said
        return Interval(least, largest, level)
    return Interval(max(low, least), min(high, largest), level)


def clipped_lower_bound(x: np.ndarray, delta: float) -> float:
    """Lower bound, with probability 1 - delta, on the mean of independent non-negative variables [E]."""
    n = len(x)
    if n < 40:
        return 0.0
    picked = np.random.default_rng(0).permutation(n)[: max(10, n // 20)]  # by chance: a log may have an order
    tuning, rest = x[picked], np.delete(x, picked)
    grid = np.quantile(tuning, np.linspace(0.5, 1.0, 21))
    grid = np.unique(np.concatenate([grid, grid[-1:] * [2.0, 4.0]]))
    grid = grid[grid > 0]
    if not len(grid):
        return 0.0
    bounds = [_bernstein(np.minimum(tuning, b), b, len(rest), delta) for b in grid]
    best = float(grid[int(np.argmax(bounds))])
    return max(0.0, _bernstein(np.minimum(rest, best), best, len(rest), delta))


def _bernstein(x: np.ndarray, bound: float, n: int, delta: float) -> float:
    """Maurer-Pontil lower bound for variables in [0, bound], as if `x` were `n` of them."""
    log = np.log(2 / delta)
    variance = x.var(ddof=1)
    return float(x.mean() - np.sqrt(2 * variance * log / n) - 7 * bound * log / (3 * (n - 1)))


def room_for(mass: float, default: float, possible: tuple[float, float]) -> tuple[float, float]:
    """How far the truth may lie below and above a value, if a share of `mass` was not seen.

    That share has the value `default` in the estimate, and may have any value between those in `possible`.
    """
    if mass == 0:
        return 0.0, 0.0
    return mass * max(default - possible[0], 0.0), mass * max(possible[1] - default, 0.0)


def if_alike(
    estimate: Estimate, possible: tuple[float, float], episodes: int, same: bool = False
) -> Estimate:
    """The estimate, marked as `alike` if all episodes are the `same`, or if their influences do not vary."""
    if not (same or estimate.error <= rounding(estimate.value, min(max(map(abs, possible)), 1.0))):
        return estimate
    alike = episodes if estimate.ess is None else min(episodes, estimate.ess)
    return replace(estimate, alike=max(alike, 1.0), possible=possible)


def with_room(
    estimates: dict[str, Estimate],
    possible: tuple[float, float],
    *,
    episodes: int,
    same: bool,
    default: float,
    unsupported: float,
    unreachable: float,
    extrapolated: float = 0.0,
) -> dict[str, Estimate]:
    """Estimates with room for actions outside the log, and for kinds of episodes that were not seen.

    A model knows nothing of pairs that the log never took (`unsupported`). Estimators with ratios miss only those that the
    behaviour policy never takes (`unreachable`), and states in which no logged action has weight (`Estimate.lost`). Both are
    parts of `unsupported`. The value of an unsupported pair is `default`. Features give `extrapolated` pairs any value: the room
    is the whole range on both sides.
    """
    found = {}
    for name, one in estimates.items():
        by_ratios = max(one.lost, min(one.lost + unreachable, unsupported))
        mass = one.model_share * unsupported + (1 - one.model_share) * by_ratios
        below, above = room_for(mass, default, possible)
        if guessed := one.model_share * extrapolated:
            below, above = (side + guessed * (possible[1] - possible[0]) for side in (below, above))
        found[name] = if_alike(replace(one, room=(below, above)), possible, episodes, same)
    return found


def intervals(
    estimates: dict[str, Estimate],
    possible: tuple[float, float],
    *,
    level: float,
    seed: int,
    bound: Interval | None = None,
) -> dict[str, Answer]:
    """Step 5: the answers of all estimators, clipped to what is `possible`; `bound` is that of per-decision importance sampling."""
    answers = {}
    for name, estimate in estimates.items():
        found = answer(name, estimate, level=level, seed=seed)
        found = replace(found, bound=bound if name == "per-decision-is" else None)
        answers[name] = within(found, possible)
    return answers


def difference(a: Estimate, b: Estimate, *, level: float, seed: int) -> Interval:
    """The interval of a - b, from the same episodes, with room for what both leave open."""
    found = studentised_bootstrap(a.value - b.value, a.influence - b.influence, level=level, seed=seed)
    return found.widened(*open_difference(a, b, level))


def open_difference(a: Estimate, b: Estimate, level: float = 0.95) -> tuple[float, float]:
    """Room below and above a - b for what both estimates leave open."""
    (a_below, a_above), (b_below, b_above) = a.left_open(level), b.left_open(level)
    return a_below + b_above, a_above + b_below


def within(found: Answer, possible: tuple[float, float]) -> Answer:
    """The answer, its value and interval clipped to what the rewards permit; `beyond` says whether the value was outside."""
    low, high = possible
    slack = 1e-9 * max(abs(low), abs(high))
    value, least, most = (
        float(np.clip(x, low, high)) for x in (found.value, found.interval.low, found.interval.high)
    )
    beyond = not low - slack <= found.value <= high + slack
    return replace(found, value=value, interval=Interval(least, most, found.interval.level), beyond=beyond)
