"""Intervals over episodes: studentised bootstrap, and a concentration bound that needs no bounded weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.stats import norm

_ROUNDING = 1e-6  # logs hold single precision: no interval is narrower than that, relative to the value
_LEAST = 1e-9  # a resample in which nothing varies says nothing: its t* is infinite
_MOST = 20.0  # standard errors; beyond this the resampling has lost the few episodes that matter


@dataclass(frozen=True)
class Interval:
    """A closed interval [low, high] at the given level.

    >>> 0.5 in Interval(0.0, 1.0), Interval(0.0, 1.0).width
    (True, 1.0)
    """

    low: float
    high: float
    level: float = 0.95

    @property
    def width(self) -> float:
        """high - low."""
        return self.high - self.low

    def __contains__(self, value: float) -> bool:
        return bool(self.low <= value <= self.high)


def bootstrap(
    value: float,
    influence: np.ndarray,
    *,
    level: float = 0.95,
    replicates: int = 1000,
    seed: int = 0,
) -> Interval:
    """Studentised bootstrap over episodes (or equal groups of episodes).

    Every estimator here is, to first order, a mean over episodes: estimate - truth ≈ mean_i ψ_i. Resampling
    the ψ_i and studentising each replicate, t* = mean*/se*, gives how far the truth may lie on each side in
    units of the standard error: the larger of the symmetric quantile of |t*| and the one-sided quantile,
    never below the normal one. The first keeps coverage for heavy tails, the second follows skewness.

    Args:
        value: the estimate.
        influence: [G] contributions ψ, scaled so that their mean is the estimator's error; they are centred.
        level: coverage asked for.
        replicates: bootstrap resamples.
        seed: of the resampling.

    >>> interval = bootstrap(0.0, np.linspace(-1, 1, 101))
    >>> bool(-0.13 < interval.low < -0.1) and bool(0.1 < interval.high < 0.13)
    True
    """
    n = len(influence)
    psi = influence - influence.mean()
    if n < 2:
        return Interval(-np.inf, np.inf, level)
    error = psi.std(ddof=1) / np.sqrt(n)
    if not np.isfinite(error):
        return Interval(-np.inf, np.inf, level)
    rounding = _ROUNDING * max(1.0, abs(value))
    if error <= rounding:
        return Interval(value - rounding, value + rounding, level)
    scaled = psi / (error * np.sqrt(n))
    counts = _resamples(n, replicates, seed)
    mean, square = (counts @ np.stack([scaled, scaled**2], axis=1) / n).T
    se = np.sqrt(np.maximum(square - mean**2, 0.0) / (n - 1))
    t = np.divide(mean, se, out=np.full(replicates, np.inf), where=se > _LEAST)
    tail = (1 - level) / 2
    sides = np.abs(np.quantile(t, [1 - tail, tail], method="nearest"))
    both = max(float(np.quantile(np.abs(t), level, method="nearest")), float(norm.ppf(1 - tail)))
    below, above = np.minimum(np.maximum(sides, both), _MOST) * error
    return Interval(float(value - below), float(value + above), level)


@lru_cache(maxsize=2)
def _resamples(n: int, replicates: int, seed: int) -> np.ndarray:
    """[replicates, n] how often each entry is drawn in each resample."""
    rng = np.random.default_rng(seed)
    counts = np.empty((replicates, n))
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts


def concentration(
    lower: np.ndarray,
    upper: np.ndarray,
    value_range: tuple[float, float],
    *,
    level: float = 0.95,
) -> Interval:
    """A bound that holds for any number of episodes, if rewards lie in their range and μ is as logged.

    Args:
        lower: [E] non-negative per-episode estimates whose mean does not exceed J - value_range[0].
        upper: [E] the same for value_range[1] - J.
        value_range: values no policy can leave.
        level: coverage guaranteed.

    The mean of min(X, b) never exceeds that of X ≥ 0, so an empirical Bernstein bound (Maurer and Pontil)
    on the clipped estimates bounds J from below however large the weights are; b is chosen on the first
    twentieth of the episodes and the bound computed on the rest (Thomas, Theocharous and Ghavamzadeh 2015).

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
