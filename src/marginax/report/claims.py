"""Claims with a measured effect, a bootstrap interval and a verdict computed from both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from marginax.statistics import Interval, bootstrap

REPRODUCED, NOT_REPRODUCED, UNDECIDED = VERDICTS = ("reproduced", "not reproduced", "cannot be decided")


def number(value: float) -> str:
    """A number as a reader wants it: three digits, thousands in full.

    >>> number(0.12345), number(999.7), number(-1718.2), number(1e12)
    ('0.123', '1,000', '-1,718', '1e+12')
    """
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


@dataclass(frozen=True)
class Claim:
    """One line of a table of claims.

    Attributes:
        text: what is claimed, in the words of the claimant, shortened.
        where: figure or section the claim comes from.
        measure: what was measured, in words.
        effect: the measured number.
        interval: its confidence interval.
        verdict: "reproduced", "not reproduced" or "cannot be decided"; see `verdict`.
        main: whether it is one of the few that a summary shows.

    >>> made = claim("positive", "here", "mean", np.mean, np.ones(5), low=0.0)
    >>> made.verdict, made.numbers
    ('reproduced', '1 [1, 1]')
    """

    text: str
    where: str
    measure: str
    effect: float
    interval: Interval
    verdict: str
    main: bool = False

    @property
    def numbers(self) -> str:
        """The effect and its interval as text."""
        return f"{number(self.effect)} [{number(self.interval.low)}, {number(self.interval.high)}]"


def claim(
    text: str,
    where: str,
    measure: str,
    statistic: Callable[..., Any],
    *samples: np.ndarray,
    low: float = -np.inf,
    high: float = np.inf,
    main: bool = False,
) -> Claim:
    """A claim that a statistic of some samples lies between `low` and `high`, with its verdict.

    Args:
        text: the claim, in brief.
        where: where it is made.
        measure: what `statistic` is, in words.
        statistic: takes the samples and returns a number; see `statistics.bootstrap`.
        samples: arrays whose first axis is the seed, resampled together.
        low: where the claim's region begins.
        high: where it ends.
        main: whether it is one of the few that a summary shows.
    """
    arrays = tuple(np.asarray(sample, float) for sample in samples)
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not finite cannot be decided
        effect, interval = float(statistic(*arrays)), bootstrap(arrays, statistic)
    return Claim(text, where, measure, effect, interval, verdict(interval, low, high), main)


def verdict(interval: Interval, low: float = -np.inf, high: float = np.inf) -> str:
    """Whether an effect lies between `low` and `high`: the verdict of a claim that says it does.

    "reproduced" when the whole interval lies strictly between the bounds, "not reproduced" when all of it lies on a
    bound or beyond, and "cannot be decided" when some of it does or it is not finite. So no effect is never an effect.

    >>> verdict(Interval(0.25, 0.75), low=0.0)
    'reproduced'
    >>> verdict(Interval(0.25, 0.75), high=0.1)
    'not reproduced'
    >>> verdict(Interval(-0.25, 0.75), low=0.0)
    'cannot be decided'
    >>> verdict(Interval(0.0, 0.0), low=0.0)
    'not reproduced'
    """
    if not np.all(np.isfinite([interval.low, interval.high])):
        return UNDECIDED
    if low < interval.low and interval.high < high:
        return REPRODUCED
    if interval.high <= low or interval.low >= high:
        return NOT_REPRODUCED
    return UNDECIDED


def count_verdicts(claims: list[Claim]) -> str:
    """How many claims have each verdict, as text.

    >>> count_verdicts([claim("positive", "here", "mean", np.mean, np.ones(5), low=0.0)])
    '1 reproduced'
    """
    counts = {word: sum(each.verdict == word for each in claims) for word in VERDICTS}
    return ", ".join(f"{n} {word}" for word, n in counts.items() if n)
