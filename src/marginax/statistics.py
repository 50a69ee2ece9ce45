"""Confidence intervals and robust means, once for reports, agents and evaluation from logs. NumPy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks

__all__ = ["Interval", "bootstrap", "interquartile_mean", "studentised_bootstrap"]

_ROUNDING = 1e-6  # logs hold single precision: no interval is narrower than that, relative to the value
_LEAST = 1e-9  # a resample in which nothing varies says nothing: its t* is infinite
_MOST = 20.0  # standard errors; beyond this the resampling has lost the few episodes that matter


@dataclass(frozen=True)
class Interval:
    """A closed interval [low, high] at the given confidence level.

    The ends are arrays where the interval is one of an array of statistics.

    >>> 0.5 in Interval(0.0, 1.0), Interval(0.0, 1.0).width
    (True, 1.0)
    """

    low: Any
    high: Any
    level: float = 0.95

    @property
    def width(self) -> Any:
        """high - low."""
        return self.high - self.low

    def widened(self, below: Any, above: Any) -> Interval:
        """The interval with room below and above."""
        return Interval(self.low - below, self.high + above, self.level)

    def holding(self, other: Interval) -> Interval:
        """The smallest interval that contains both this one and another."""
        return Interval(min(self.low, other.low), max(self.high, other.high), self.level)

    def __contains__(self, value: float) -> bool:
        return bool(self.low <= value <= self.high)


def bootstrap(
    values: ArrayLike | tuple[ArrayLike, ...],
    statistic: Callable[..., Any] = np.mean,
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of a statistic over rows, usually one row per seed.

    Args:
        values: an array whose first axis is resampled with replacement, or a tuple of such arrays. The rows of a
            tuple are resampled together, so that a difference of two methods on the same seeds is a paired one.
        statistic: takes the resampled array (or arrays) and returns a number or an array.
        level: coverage of the interval.
        replicates: number of resamples.
        seed: seed of the resampling.

    Returns:
        The interval between the quantiles of the replicates, an array of intervals where the statistic is an array. It is not
        finite where the statistic is not, as for the mean of a column with NaN: a seed that diverged is no mistake of the caller.

    Raises:
        ValueError: the arrays have no rows, or different numbers of rows; or level or replicates are out of range.

    >>> interval = bootstrap(np.arange(100.0))
    >>> print(f"{interval.low:.2f} {interval.high:.2f}")
    43.82 54.95
    """
    arrays = [checks.reals("values", each) for each in (values if isinstance(values, tuple) else (values,))]
    counts = [array.shape[0] if array.ndim else 0 for array in arrays]
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(f"values must have the same, non-zero number of rows, got {counts}")
    _check_settings(level, replicates, seed)
    rows = np.random.default_rng(seed).integers(counts[0], size=(replicates, counts[0]))
    found = np.array([statistic(*(array[row] for array in arrays)) for row in rows])
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2], axis=0)
    low, high = (end if end.ndim else float(end) for end in (low, high))
    return Interval(low, high, level)


def interquartile_mean(values: ArrayLike, axis: int = 0) -> Any:
    """The mean of the middle half along an axis; entries at the edges count in part.

    >>> float(interquartile_mean([0.0, 1.0, 2.0, 100.0]))
    1.5
    """
    numbers = checks.reals("values", values)
    if not -numbers.ndim <= checks.whole("axis", axis) < numbers.ndim:
        raise ValueError(f"axis must be an axis of values, which have {numbers.ndim}, got {axis}")
    ordered = np.sort(np.moveaxis(numbers, axis, 0), axis=0)
    count = len(ordered)
    if count == 0:
        raise ValueError("values must have at least one entry along the axis, got none")
    edges = np.arange(count + 1)
    share = np.clip(np.minimum(edges[1:], 0.75 * count) - np.maximum(edges[:-1], 0.25 * count), 0, None)
    return np.tensordot(share, ordered, 1) / (count / 2)


def studentised_bootstrap(
    value: float,
    influence: ArrayLike,
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> Interval:
    """Studentised bootstrap over episodes (or equal groups of episodes).

    An estimator that is smooth in its episodes is, to first order, a mean over them: estimate - truth ≈ mean_i ψ_i.
    Resampling the ψ_i and studentising each replicate, t* = mean*/se*, gives how far the truth may lie on each
    side in units of the standard error: the larger of the symmetric quantile of |t*| and the one-sided quantile,
    never below the normal one. The first keeps coverage for heavy tails, the second follows skewness.

    Args:
        value: the estimate.
        influence: [G] contributions ψ, scaled so that their mean is the estimator's error; they are centred.
        level: coverage of the interval.
        replicates: number of resamples.
        seed: seed of the resampling.

    >>> interval = studentised_bootstrap(0.0, np.linspace(-1, 1, 101))
    >>> bool(-0.13 < interval.low < -0.1) and bool(0.1 < interval.high < 0.13)
    True
    """
    _check_settings(level, replicates, seed)
    value, psi = checks.number("value", value, infinite=True), checks.reals("influence", influence)
    if psi.ndim != 1:
        raise ValueError(f"influence must have shape [G], got {psi.shape}")
    n = len(psi)
    if n < 2:
        return Interval(-np.inf, np.inf, level)
    psi = psi - psi.mean()
    error = psi.std(ddof=1) / np.sqrt(n)
    if not np.isfinite(error):
        return Interval(-np.inf, np.inf, level)
    least = rounding(value)
    if error <= least:
        return Interval(value - least, value + least, level)
    scaled = psi / (error * np.sqrt(n))
    counts = _resamples(n, replicates, seed)
    mean, square = (counts @ np.stack([scaled, scaled**2], axis=1) / n).T
    se = np.sqrt(np.maximum(square - mean**2, 0.0) / (n - 1))
    t = np.divide(mean, se, out=np.full(replicates, np.inf), where=se > _LEAST)
    tail = (1 - level) / 2
    sides = np.abs(np.quantile(t, [1 - tail, tail], method="nearest"))
    both = max(float(np.quantile(np.abs(t), level, method="nearest")), NormalDist().inv_cdf(1 - tail))
    below, above = np.minimum(np.maximum(sides, both), _MOST) * error
    return Interval(float(value - below), float(value + above), level)


def _check_settings(level: float, replicates: int, seed: int) -> None:
    if not 0 < checks.number("level", level) < 1:
        raise ValueError(f"level must lie in (0, 1), got {level}")
    checks.count("replicates", replicates)
    checks.count("seed", seed, least=0)


def rounding(value: float, scale: float = 1.0) -> float:
    """The error that rounding may have made in a value, which was computed from numbers of that scale."""
    return _ROUNDING * max(scale, abs(value))


@lru_cache(maxsize=2)
def _resamples(n: int, replicates: int, seed: int) -> np.ndarray:
    """[replicates, n] how often each entry is drawn in each resample."""
    rng = np.random.default_rng(seed)
    counts = np.empty((replicates, n))
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts
