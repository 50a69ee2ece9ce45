"""One saddle-point solver for both duality-based estimators, many problems side by side.

Each column of the arrays is a problem (a start) of the form

    min over |y| ≤ critic_bound   max over low ≤ x ≤ high    x·My - ½ Σ h x² - b·y .

With ``h = 0`` this is the paper's ``min_w max_q L(q, w)`` with its sign turned, x the weights and y the critic; with ``h > 0`` it is the
extension of DualDICE, x its ψ and y its v. The method is the primal-dual hybrid gradient of Chambolle and Pock with diagonal steps
(Pock and Chambolle, 2011: with ``τ_j = 1 / Σ_i |M_ij|`` and ``σ_i = 1 / Σ_j |M_ij|`` it converges for every M), averaging of the
iterates, and restarts from the average, which turn its O(1/k) into a linear rate on problems like these (Applegate et al., 2023).
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from marginax._checks import FloatArray

__all__ = ["Problem", "Solution", "solve"]

CHECK_EVERY = 20
"""Iterations between looks at the duality gap."""


class Problem(NamedTuple):
    """Columns of saddle-point problems; ``[k, m]`` for y and ``[n, m]`` for x, or what broadcasts to these."""

    forward: Callable[[FloatArray], FloatArray]
    """y -> My."""
    adjoint: Callable[[FloatArray], FloatArray]
    """x -> M^T x."""
    row_sums: FloatArray
    """``Σ_j |M_ij|``, ``[n, m]`` or ``[n, 1]``, or an upper bound."""
    column_sums: FloatArray
    """``Σ_i |M_ij|``, likewise for y."""
    b: FloatArray
    h: FloatArray | float
    low: float
    high: float
    critic_bound: float
    """Infinite: no bound; in the gap it is then twice the largest entry of y so far."""


class Solution(NamedTuple):
    """The point with the smallest gap, and that gap."""

    x: FloatArray
    y: FloatArray
    iterations: int
    gap: float


def solve(problem: Problem, tolerance: float, max_iterations: int) -> Solution:
    """Solves all columns until the largest duality gap is at most ``tolerance``; warns where it is not reached."""
    b = problem.b
    x, y = np.zeros((problem.row_sums.shape[0], b.shape[1])), np.zeros(b.shape)
    sigma, tau = 1 / np.maximum(problem.row_sums, 1e-300), 1 / np.maximum(problem.column_sums, 1e-300)
    balance = np.ones(b.shape[1])  # between the step sizes of x and y, learned at each restart
    from_x, from_y, from_gap = x, y, duality_gap(problem, x, y)
    sum_x, sum_y, since = np.zeros_like(x), np.zeros_like(y), np.zeros(b.shape[1])
    best_x, best_y, gap = x, y, from_gap
    for iteration in range(1, max_iterations + 1):
        new_y = y - balance * tau * (problem.adjoint(x) - b)
        new_y = np.clip(new_y, -problem.critic_bound, problem.critic_bound)
        step = sigma / balance
        x = np.clip(
            (x + step * problem.forward(2 * new_y - y)) / (1 + step * problem.h), problem.low, problem.high
        )
        y = new_y
        sum_x, sum_y, since = sum_x + x, sum_y + y, since + 1
        if iteration % CHECK_EVERY and iteration < max_iterations:
            continue
        mean_x, mean_y = sum_x / since, sum_y / since
        gap_last, gap_mean = duality_gap(problem, x, y), duality_gap(problem, mean_x, mean_y)
        use_mean = gap_mean < gap_last
        best_x, best_y = np.where(use_mean, mean_x, x), np.where(use_mean, mean_y, y)
        gap = np.where(use_mean, gap_mean, gap_last)
        if gap.max() <= tolerance:
            break
        long = since >= 0.36 * iteration
        restart = (gap <= 0.2 * from_gap) | (
            long & ((gap <= 0.8 * from_gap) | (iteration > 10 * CHECK_EVERY))
        )
        if restart.any():
            moved_x, moved_y = (
                np.linalg.norm(best_x - from_x, axis=0),
                np.linalg.norm(best_y - from_y, axis=0),
            )
            known = restart & (moved_x > 1e-12) & (moved_y > 1e-12)
            ratio = np.divide(moved_y, moved_x, out=np.ones_like(moved_x), where=known)
            balance = np.where(known, np.sqrt(ratio * balance), balance)
            x, y = np.where(restart, best_x, x), np.where(restart, best_y, y)
            from_x, from_y = np.where(restart, x, from_x), np.where(restart, y, from_y)
            from_gap = np.where(restart, gap, from_gap)
            sum_x, sum_y, since = (np.where(restart, 0.0, s) for s in (sum_x, sum_y, since))
    else:
        warnings.warn(
            f"the saddle point was not reached in {max_iterations} iterations: the duality gap is {gap.max():.3g} and not "
            f"{tolerance:.3g}",
            stacklevel=4,
        )
    return Solution(best_x, best_y, iteration, float(gap.max()))


def duality_gap(problem: Problem, x: FloatArray, y: FloatArray) -> FloatArray:
    """``max_x' L(x', y) - min_y' L(x, y')`` of each column; zero exactly at a saddle point."""
    gain, h = problem.forward(y), problem.h
    greedy = np.where(gain > 0, problem.high, problem.low) if np.ndim(h) == 0 and h == 0 else gain / h
    most = np.sum(gain * greedy - 0.5 * h * greedy**2, axis=0) - np.sum(problem.b * y, axis=0)
    bound = problem.critic_bound
    if not np.isfinite(bound):
        bound = 2 * np.maximum(1.0, np.abs(y).max(axis=0))
    least = -np.sum(0.5 * h * x**2, axis=0) - bound * np.abs(problem.adjoint(x) - problem.b).sum(axis=0)
    return most - least
