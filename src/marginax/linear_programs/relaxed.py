"""Policy evaluation by linear programs (Section 4.3): Q^π from the dual program, and the sequence of relaxed ones.

The programs are written in the *credit* D = d/(1-γ), which keeps every coefficient of order one, and with the flow
into each state f(x') = Σ p(x'|x,a) D(x,a) as further unknowns, which keeps the matrix as sparse as the transitions:

    f - pᵀ D = 0,    D(x,a) - γ π(a|x) f(x) + e⁺(x,a) - e⁻(x,a) = δ_{x,a},    Σ (e⁺ + e⁻) ≤ η,    e⁺, e⁻ ≥ 0.

Start pairs differ in the right-hand side only, so that one optimal basis answers all the pairs for which it is
feasible: HiGHS solves the program of one pair, its factorisation of the basis gives the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._bellman import PairBellman
from marginax._checks import FloatArray
from marginax.linear_programs._balance import NO_SUPPORT, balance_matrix, pair_name, with_violations
from marginax.linear_programs._highs import Program, progress_bar
from marginax.mdp import TabularMDP, policy_of

__all__ = ["Iterates", "Relaxed", "evaluate", "iterate", "relaxed"]

FEASIBLE = 1e-9  # how far a basis may leave its bounds and still count as feasible


class Relaxed(NamedTuple):
    """The optima of all relaxed programs, one per start pair.

    Attributes:
        values: optimal objective, the paper's Q_{t+1}, ``[S, A]``.
        occupancy: optimal d*, ``d[x, a, x', a']``, ``[S, A, S, A]``; may be negative.
        weights: w* = d*/d^μ, zero where d^μ is zero, ``[S, A, S, A]``.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> values, occupancy, weights = relaxed(mdp, pi, mu, np.zeros((4, 2)), rate=0.5)
        >>> weights.shape
        (4, 2, 4, 2)
    """

    values: FloatArray
    occupancy: FloatArray
    weights: FloatArray

    @property
    def lost_mass(self) -> FloatArray:
        """Σ |d*(x',a')| over the pairs that μ never reaches from the start pair, ``[S, A]``.

        Where it is zero, ``M^{w*} Q = values`` and the rate of w* is at most η. Where it is not, w* cannot express d*
        on the data of μ.
        """
        return np.where(self.weights == 0.0, np.abs(self.occupancy), 0.0).sum(axis=(2, 3))


@dataclass(frozen=True, eq=False)
class Iterates:
    """The sequence Q_0, Q_1, … of relaxed programs.

    Attributes:
        values: Q_t, ``[steps + 1, S, A]``; ``values[0]`` is the given q.
        errors: ‖Q_t - Q^π‖_∞, ``[steps + 1]``.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> result = iterate(mdp, pi, mu, np.zeros((4, 2)), rate=0.5, steps=3)
        >>> (result.errors[1:] / result.errors[:-1]).round(6)
        array([0.5, 0.5, 0.5])
        >>> result.step(2).weights.shape  # those that lead from Q_2 to Q_3
        (4, 2, 4, 2)
    """

    values: FloatArray
    errors: FloatArray
    _mdp: TabularMDP
    _policies: tuple[FloatArray, FloatArray]
    _rate: float

    def step(self, t: int) -> Relaxed:
        """The relaxed programs solved at step t, with the occupancies and weights that lead from Q_t to Q_{t+1}."""
        t = checks.index("t", t, len(self.values) - 1)
        return relaxed(self._mdp, *self._policies, self.values[t], self._rate)


def evaluate(mdp: TabularMDP, pi: ArrayLike, *, time_limit: float | None = None) -> FloatArray:
    """Q^π through the dual program, ``min (1-γ)^{-1} dᵀ r`` subject to ``(1-γ) δ_{x,a} + γ (P^π)ᵀ d - d = 0``.

    Eq. (eval-duallp). The constraints have the single solution d^π_{x,a}, so that one basis is optimal for every start
    pair, and the row prices of that basis are the values of all of them: one program, however many pairs.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        time_limit: seconds HiGHS may take; None for no limit.

    Returns:
        Q^π, ``[S, A]``.

    Raises:
        ValueError: if pi is not a policy.
        ProgramError: HiGHS did not find an optimum.

    Example:
        >>> import marginax as mx
        >>> evaluate(mx.TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]])
        array([[2.]])
    """
    programs = _StartPrograms(mdp, policy_of(mdp, "pi", pi), None, time_limit)
    programs.set_cost(mdp.r.ravel())
    values = np.empty(mdp.r.size)
    for pairs in programs.optimal_bases():
        values[pairs] = programs.values(pairs)
    return values.reshape(mdp.r.shape)


def relaxed(
    mdp: TabularMDP,
    pi: ArrayLike,
    mu: ArrayLike,
    q: ArrayLike,
    rate: float,
    *,
    time_limit: float | None = None,
    progress: bool = False,
) -> Relaxed:
    """The relaxed program of every start pair: balance equations may be violated by (1-γ)η in total.

    Eq. (eval-duallp-augmented-relaxed), with d free in sign::

        min  Q(x,a) + (1-γ)^{-1} dᵀ (r + γ P^π Q - Q)
        subject to  |(1-γ) δ_{x,a} + γ (P^π)ᵀ d - d| ≤ (1-γ) u,  1ᵀu ≤ η,  u ≥ 0.

    Every feasible d is ``w ∘ d^μ`` for TD weights w of local rate at most η (where μ reaches). The optimal value is
    ``Q^π(x,a) - η ‖Q - Q^π‖_∞``; the solver is not told so.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``; only the weights depend on it.
        q: the paper's Q_t, ``[S, A]``.
        rate: η in [0, 1).
        time_limit: seconds HiGHS may take for one program; None for no limit.
        progress: draw a progress bar.

    Returns:
        ``values [S, A]``, ``occupancy [S, A, S, A]``, ``weights [S, A, S, A]``, and ``lost_mass [S, A]`` as a property.

    Raises:
        ValueError: if pi or mu is not a policy, q has the wrong shape, or the rate is outside [0, 1).
        ProgramError: HiGHS did not find an optimum; names the pair and HiGHS's status.

    Example:
        >>> import marginax as mx
        >>> mdp = mx.TabularMDP([[[1.0]]], [[1.0]], 0.5)  # Q^π = 2
        >>> relaxed(mdp, [[1.0]], [[1.0]], q=[[0.0]], rate=0.25).values
        array([[1.5]])
    """
    target, behaviour = policy_of(mdp, "pi", pi), policy_of(mdp, "mu", mu)
    q = checks.array("q", q, mdp.r.shape)
    pairs = mdp.r.size
    checks.fits_in_memory(
        f"the occupancies of {pairs} by {pairs} pairs",
        pairs**2,
        copies=5,
        instead="iterate keeps values only, and fastest takes one start",
    )
    programs = _StartPrograms(mdp, target, checks.discount(rate, "rate"), time_limit)
    programs.set_cost(PairBellman(mdp, target).error(q).ravel())
    values, occupancy = q.ravel(), np.empty((pairs, pairs))
    with progress_bar("relaxed programs", pairs, progress) as advance:
        for covered in programs.optimal_bases():
            values[covered] += programs.values(covered)
            for pair in covered.tolist():
                occupancy[pair] = (1.0 - mdp.discount) * programs.credit(pair)
                advance(1)
    shape = (*mdp.r.shape, *mdp.r.shape)
    occupancy = occupancy.reshape(shape)
    visited = mdp.visitation(behaviour)
    weights = np.divide(occupancy, visited, out=np.zeros(shape), where=visited > NO_SUPPORT)
    return Relaxed(values.reshape(mdp.r.shape), occupancy, weights)


def iterate(
    mdp: TabularMDP,
    pi: ArrayLike,
    mu: ArrayLike,
    q: ArrayLike,
    rate: float,
    steps: int,
    *,
    time_limit: float | None = None,
    progress: bool = False,
) -> Iterates:
    """The sequence of Section 4.3: Q_{t+1}(x,a) is the optimal value of the relaxed program of (x,a) at Q_t.

    ``‖Q_{t+1} - Q^π‖_∞ ≤ η ‖Q_t - Q^π‖_∞`` (Proposition 5). One model serves all steps and pairs; from step to step only
    its costs change, and the last basis is where HiGHS starts. Only values are computed, so that memory grows with
    the number of pairs, not its square; ``result.step(t)`` gives the occupancies and weights of one step.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``, which the weights of ``result.step(t)`` refer to; the values do not depend on it.
        q: Q_0, ``[S, A]``.
        rate: η in [0, 1).
        steps: number of steps, at least 0.
        time_limit: seconds HiGHS may take for one program; None for no limit.
        progress: draw a progress bar.

    Returns:
        ``values [steps + 1, S, A]`` and ``errors [steps + 1]``.

    Raises:
        ValueError: if pi or mu is not a policy, q has the wrong shape, the rate is outside [0, 1), or steps is negative.
        ProgramError: HiGHS did not find an optimum; names the pair and HiGHS's status.

    Example:
        >>> import marginax as mx
        >>> mdp = mx.TabularMDP([[[1.0]]], [[1.0]], 0.5)  # Q^π = 2
        >>> iterate(mdp, [[1.0]], [[1.0]], q=[[0.0]], rate=0.5, steps=3).errors
        array([2.  , 1.  , 0.5 , 0.25])
    """
    target, behaviour = policy_of(mdp, "pi", pi), policy_of(mdp, "mu", mu)
    rate = checks.discount(rate, "rate")
    steps = checks.count("steps", steps, least=0)
    values = np.empty((steps + 1, *mdp.r.shape))
    values[0] = checks.array("q", q, mdp.r.shape)
    programs, bellman = _StartPrograms(mdp, target, rate, time_limit), PairBellman(mdp, target)
    with progress_bar("relaxed programs", steps, progress) as advance:
        for t in range(steps):
            programs.set_cost(bellman.error(values[t]).ravel())
            after = values[t].ravel().copy()
            for pairs in programs.optimal_bases():
                after[pairs] += programs.values(pairs)
            values[t + 1] = after.reshape(mdp.r.shape)
            advance(1)
    errors = np.abs(values - mdp.q_values(target)).max(axis=(1, 2))
    return Iterates(values, errors, mdp, (target, behaviour), rate)


class _StartPrograms:
    """The programs of all start pairs as one HiGHS model; with a rate the relaxed ones, without it the exact ones."""

    def __init__(self, mdp: TabularMDP, pi: FloatArray, rate: float | None, time_limit: float | None) -> None:
        states, pairs = mdp.num_states, mdp.r.size
        self._mdp, self._rate = mdp, rate or 0.0
        self._first_pair_row, self._num_pairs, self._start = states, pairs, 0
        self._free = states + pairs  # credits and flows; what follows are violations, at least 0
        matrix = balance_matrix(mdp, pi)
        if rate is not None:
            budget = np.concatenate([np.zeros(self._free), np.ones(2 * pairs)])[None]
            matrix = sp.vstack([with_violations(matrix, pairs), sp.csr_array(budget)])
        balanced = np.zeros(states + pairs)
        balanced[states] = 1.0
        columns, rows = matrix.shape[1], matrix.shape[0]
        self.program = Program(
            matrix,
            cost=np.zeros(columns),
            lower=np.where(np.arange(columns) < self._free, -np.inf, 0.0),
            upper=np.full(columns, np.inf),
            rows_lower=np.append(balanced, np.full(rows - balanced.size, -np.inf)),
            rows_upper=np.append(balanced, np.full(rows - balanced.size, self._rate)),
            strategy="primal",
            time_limit=time_limit,
        )
        # d^π satisfies the balance equations without violation: a feasible basis for every start pair, rate and cost.
        self.program.start_from(
            self.program.basis(np.arange(columns) < self._free, np.arange(rows) >= self._free)
        )

    def set_cost(self, cost: FloatArray) -> None:
        """Sets the cost of the credits, scaled to one so that HiGHS's tolerances are relative to it."""
        self._scale = float(np.abs(cost).max()) or 1.0
        self._cost = cost / self._scale
        self.program.set_cost(0, self._cost)

    def optimal_bases(self) -> Iterator[np.ndarray]:
        """Solves the program of one pair after the other and yields each time all the pairs its basis is optimal for.

        A basis that is optimal for one pair has the right prices for all, and is optimal wherever it is feasible.
        """
        pending = np.arange(self._num_pairs)
        while pending.size:
            self.program.set_row(self._first_pair_row + self._start, 0.0)
            self._start = int(pending[0])
            self.program.set_row(self._first_pair_row + self._start, 1.0)
            self.program.solve(pair_name(self._mdp, self._start))
            self._basic = self.program.basic_variables()
            self._credits = np.flatnonzero((self._basic >= 0) & (self._basic < self._num_pairs))
            feasible = self._feasible(pending)
            feasible[0] = True
            yield pending[feasible]
            pending = pending[~feasible]

    def values(self, pairs: np.ndarray) -> FloatArray:
        """Optimal objectives of pairs for which the current basis is optimal: its prices times right-hand sides."""
        cost = np.zeros(self._basic.size)
        cost[self._credits] = self._cost[self._basic[self._credits]]
        return self._scale * self._times_right_hand_side(self.program.basis_transpose_solve(cost), pairs)

    def credit(self, pair: int) -> FloatArray:
        """Optimal D of one pair for which the current basis is optimal, flat."""
        right_hand_side = np.zeros(self._basic.size)
        right_hand_side[self._first_pair_row + pair] = 1.0
        right_hand_side[self._free :] = self._rate
        solution = self.program.basis_solve(right_hand_side)
        result = np.zeros(self._num_pairs)
        result[self._basic[self._credits]] = solution[self._credits]
        return result

    def _feasible(self, pairs: np.ndarray) -> np.ndarray:
        """For which start pairs the violations in the current basis are non-negative and within the budget."""
        total, feasible = np.zeros(pairs.size), np.ones(pairs.size, dtype=bool)
        for position in np.flatnonzero(self._basic >= self._free):
            unit = np.zeros(self._basic.size)
            unit[position] = 1.0
            violation = self._times_right_hand_side(self.program.basis_transpose_solve(unit), pairs)
            feasible &= violation >= -FEASIBLE
            total += violation
        return feasible & (total <= self._rate + FEASIBLE)

    def _times_right_hand_side(self, row: FloatArray, pairs: np.ndarray) -> FloatArray:
        """``row · b`` for the right-hand side b of each start pair: δ in the pair's row and η in the budget's."""
        return row[self._first_pair_row + pairs] + self._rate * row[self._free :].sum()
