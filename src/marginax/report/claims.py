"""Claims with a measured effect, a bootstrap interval and a verdict computed from both."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "cannot be decided"


MOST_NUMBERS = 4_000_000  # of a resampled array in memory at once


def number(value: float) -> str:
    """A number as a reader wants it: three digits, thousands in full.

    >>> number(0.12345), number(999.7), number(-1718.2), number(1e12)
    ('0.123', '1,000', '-1,718', '1e+12')
    """
    return f"{value:,.0f}" if 999.5 <= abs(value) < 1e9 else f"{value:.3g}"


@dataclass(frozen=True)
class Interval:
    """An effect with its confidence interval.

    >>> print(Interval(0.5, 0.25, 0.75))
    0.5 [0.25, 0.75]
    """

    effect: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{number(self.effect)} [{number(self.low)}, {number(self.high)}]"


@dataclass(frozen=True)
class Claim:
    """One line of the claims table.

    Attributes:
        text: what is claimed, in the words of the claimant, shortened.
        where: figure or section the claim comes from.
        measure: what was measured, in words; the numbers follow from `interval`.
        interval: the effect and its interval.
        verdict: "reproduced", "not reproduced" or "cannot be decided"; see `verdict`.
        command: the command that measures it.

    >>> effect = Interval(0.5, 0.25, 0.75)
    >>> claim = Claim("it is faster", "Fig. 1", "difference", effect, verdict(effect, low=0), "marginax")
    >>> claim.verdict
    'reproduced'
    """

    text: str
    where: str
    measure: str
    interval: Interval
    verdict: str
    command: str


def bootstrap(
    statistic: Callable[..., np.ndarray | float],
    *samples: ArrayLike,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic over seeds.

    The first axis of every sample is the seed; the samples are resampled together (they share their random
    numbers seed by seed), so that a difference between two methods is a paired difference.

    Args:
        statistic: takes one array `[B, N, ...]` for each sample (B resamples of N seeds) and returns `[B]`.
        samples: arrays `[N, ...]`.
        level: coverage of the interval.
        resamples: number of bootstrap resamples.
        seed: seed of the resampling.

    >>> bootstrap(lambda x: x.mean(1), [1.0, 1.0, 1.0, 1.0])
    Interval(effect=1.0, low=1.0, high=1.0)
    """
    arrays = [np.asarray(sample, dtype=float) for sample in samples]
    count = arrays[0].shape[0]
    if any(array.shape[0] != count for array in arrays) or count == 0:
        raise ValueError(f"samples must have the same, non-zero number of seeds: {[len(a) for a in arrays]}")
    effect = float(np.asarray(statistic(*(array[None] for array in arrays)))[0])
    rows = np.random.default_rng(seed).integers(count, size=(resamples, count))
    block = max(1, MOST_NUMBERS // max(array.size for array in arrays))
    values = np.concatenate(
        [
            np.asarray(statistic(*(array[rows[first : first + block]] for array in arrays)))
            for first in range(0, resamples, block)
        ]
    )
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return Interval(effect, float(low), float(high))


def verdict(interval: Interval, low: float | int = -np.inf, high: float | int = np.inf) -> str:
    """Whether an effect lies in `[low, high]`: the verdict of a claim that says it does.

    "reproduced" when the whole interval lies inside, "not reproduced" when all of it lies outside, and
    "cannot be decided" when it straddles a bound or is not finite.

    >>> verdict(Interval(0.5, 0.25, 0.75), low=0.0)
    'reproduced'
    >>> verdict(Interval(0.5, 0.25, 0.75), high=0.1)
    'not reproduced'
    >>> verdict(Interval(0.5, -0.25, 0.75), low=0.0)
    'cannot be decided'
    """
    if not np.all(np.isfinite([interval.low, interval.high])):
        return UNDECIDED
    if low <= interval.low and interval.high <= high:
        return REPRODUCED
    if interval.high < low or interval.low > high:
        return NOT_REPRODUCED
    return UNDECIDED
