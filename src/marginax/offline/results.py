"""Step 5, intervals, and what an evaluation answers: plain dataclasses that turn into JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from marginax.offline.log import Accumulator
from marginax.statistics import Interval, rounding, studentised_bootstrap

MAX_GROUPS = 1000  # the bootstrap resamples episodes, or so many groups of them

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
"""The estimators by name: their kind, and what each does at a truncated step."""

ROBUST = ("doubly-robust", "weighted-doubly-robust", "magic", "slope")
STATE_RATIOS = ("doubly-robust-state-ratio", "state-ratio")


@dataclass(frozen=True)
class Estimate:
    """An estimate of the value with what its interval needs.

    Attributes:
        value: the estimate.
        influence: [G] to first order the error is the mean of these (independent) entries.
        ess: effective sample size, where weights make one meaningful.
        ess_of: what `ess` counts, `episodes` or `transitions`.
        model_share: share of the value that is left to a model of the log's pairs, and open where it has none.
        lost: discounted probability of states in which no action of the log has weight under π.
        room: how far below and above the truth may lie because of actions that the log does not show. That of the recommended
            estimate also covers the choice among estimators, and reaches another estimate that may be the right one.
        bias_bound: what resampling cannot show, to be added on both sides. Where one episode carries most of a
            self-normalised average, that average hardly varies, and says nothing of what others would give; where weights
            average far less than 1, the episodes that matter were not drawn.
        alike: number of (effective) episodes where none differs from another, in itself or in what the estimator sees, so that
            resampling does not say how sure it is; None where they differ.
        possible: what the rewards permit, where episodes are alike.
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
        """The probability that a kind of episode which was not seen may have: where all are alike, up to Clopper and Pearson's bound."""
        return 0.0 if self.alike is None else 1.0 - ((1 - level) / 2) ** (1 / self.alike)

    def left_open(self, level: float = 0.95) -> tuple[float, float]:
        """What resampling cannot show, below and above: the room, the bias bound, and unseen kinds of episodes."""
        below, above = room_for(self.unseen(level), self.value, self.possible)
        return self.room[0] + self.bias_bound + below, self.room[1] + self.bias_bound + above


class Influence(Accumulator):
    """Sums the influences of episodes, handed over chunk by chunk, into groups.

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
        """[G] so scaled that their mean is the mean over episodes, less `centre`."""
        return (self.total - centre * self.size) * (len(self.total) / self.episodes)


@dataclass(frozen=True)
class Answer:
    """One estimator's answer.

    Attributes:
        name: see `ESTIMATORS`.
        value: the estimate of π's value from the log's starts.
        interval: over episodes, widened by what π's unseen actions may be worth.
        kind: family of the estimator.
        truncation: `stops` (rewards after a truncated step count as zero) or `bootstraps`.
        ess: effective sample size, in units of `ess_of`.
        bound: an interval with guaranteed coverage, where one applies.
        error: standard error.
        beyond: whether the estimate went beyond what the rewards permit, and was cut.
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
    """Which estimate to trust and why, or that the data cannot tell.

    Attributes:
        status: `trust`, `caution` or `cannot tell`.
        estimator: the estimate recommended, or None.
        text: the verdict in words, one sentence in each entry.
        better: `better`, `worse` or `cannot tell`: π against the policy that made the log.
    """

    status: str
    estimator: str | None
    text: tuple[str, ...]
    better: str = "cannot tell"


@dataclass(frozen=True)
class Evaluation:
    """Everything `evaluate` found out about one policy.

    Attributes:
        answers: one for each estimator, by name.
        behaviour: the plain average return of the log, with its interval.
        advantage: interval of the value of π minus that of μ, by the recommended estimator.
        verdict: in words.
        diagnostics: overlap, weights, support, truncation, calibration (numbers and short lists).
        settings: what was asked.
        notes: what was done to the data and what was left out.
        curves: data behind the figures.
        estimates: values with their influences, for paired comparisons; not part of the JSON.

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
    """Plain Python numbers, lists and dicts; what is not finite becomes None."""
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
    """A probability in words, or that it is not known."""
    return "not known" if value is None else f"{value:.2%}"


def answer(name: str, estimate: Estimate, *, level: float = 0.95, seed: int = 0) -> Answer:
    """An estimate with its interval, widened by what it leaves open."""
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
    """A bound that holds for any number of episodes, if rewards lie in their range and μ is as logged.

    The mean of min(X, b) never exceeds that of X ≥ 0, so an empirical Bernstein bound (Maurer and Pontil) on the clipped
    estimates bounds J from below however large the weights are; b is chosen on the first twentieth of the episodes and the
    bound computed on the rest (Thomas, Theocharous and Ghavamzadeh 2015).

    Args:
        lower: [E] non-negative per-episode estimates whose mean does not exceed J - value_range[0].
        upper: [E] the same for value_range[1] - J.
        value_range: values no policy can leave.
        level: coverage guaranteed.

    >>> half = np.tile([0.0, 1.0], 500)
    >>> bound = concentration(half, 1 - half, (0.0, 1.0))
    >>> bool(0.4 < bound.low < 0.5 < bound.high < 0.6)
    True
    """
    each = (1 - level) / 2
    low = value_range[0] + clipped_lower_bound(lower, each)
    high = value_range[1] - clipped_lower_bound(upper, each)
    return Interval(max(low, value_range[0]), min(high, value_range[1]), level)


def clipped_lower_bound(x: np.ndarray, delta: float) -> float:
    """Lower bound, with probability 1 - delta, on the mean of independent non-negative variables."""
    n = len(x)
    if n < 40:
        return 0.0
    first = max(10, n // 20)
    tuning, rest = x[:first], x[first:]
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
    """How much lower and higher the value may be if with probability `mass` there is something that was never seen, which counts
    with a default value and for which the rewards permit all that is `possible`."""
    if mass == 0:
        return 0.0, 0.0
    return mass * max(default - possible[0], 0.0), mass * max(possible[1] - default, 0.0)


def if_alike(
    estimate: Estimate, possible: tuple[float, float], episodes: int, same: bool = False
) -> Estimate:
    """The estimate, marked where no episode differs from another in what it sees, or all are the `same` in themselves."""
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
) -> dict[str, Estimate]:
    """Estimates with the room that actions outside the log leave, and kinds of episodes: the only place where it is computed.

    A model lacks every pair that the log never took (`unsupported`). What rests on ratios lacks those that the behaviour policy
    never takes (`unreachable`), and the states where it has no weight at all (`Estimate.lost`). Both are among the former.
    """
    found = {}
    for name, one in estimates.items():
        by_ratios = max(one.lost, min(one.lost + unreachable, unsupported))
        mass = one.model_share * unsupported + (1 - one.model_share) * by_ratios
        roomy = replace(one, room=room_for(mass, default, possible))
        found[name] = if_alike(roomy, possible, episodes, same)
    return found


def intervals(
    estimates: dict[str, Estimate],
    possible: tuple[float, float],
    *,
    level: float,
    seed: int,
    bound: Interval | None = None,
) -> dict[str, Answer]:
    """Step 5: intervals of all estimates, inside what is `possible`; the `bound` belongs to per-decision importance sampling."""
    answers = {}
    for name, estimate in estimates.items():
        found = answer(name, estimate, level=level, seed=seed)
        found = replace(found, bound=bound if name == "per-decision-is" else None)
        answers[name] = within(found, possible)
    return answers


def difference(a: Estimate, b: Estimate, *, level: float, seed: int) -> Interval:
    """The interval of a - b, both from the same episodes, widened by what each leaves open."""
    found = studentised_bootstrap(a.value - b.value, a.influence - b.influence, level=level, seed=seed)
    return found.widened(*open_difference(a, b, level))


def open_difference(a: Estimate, b: Estimate, level: float = 0.95) -> tuple[float, float]:
    """How much lower and higher a - b may be by what both leave open."""
    (a_below, a_above), (b_below, b_above) = a.left_open(level), b.left_open(level)
    return a_below + b_above, a_above + b_below


def within(found: Answer, possible: tuple[float, float]) -> Answer:
    """An answer whose value and interval do not leave what the rewards permit; `beyond` says that the value did."""
    low, high = possible
    slack = 1e-9 * max(abs(low), abs(high))
    value, least, most = (
        float(np.clip(x, low, high)) for x in (found.value, found.interval.low, found.interval.high)
    )
    beyond = not low - slack <= found.value <= high + slack
    return replace(found, value=value, interval=Interval(least, most, found.interval.level), beyond=beyond)
