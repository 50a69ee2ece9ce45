"""TD weights chosen by a linear program: the fastest contraction under a cap on the weights, and the worst-case critic.

Section 5.1 measures weights by the game ``min_w max_q L(q, w)``: over the critics |q| ≤ 1 the maximum is (1-γ) times the local
contraction rate. ``worst_critic`` is the critic's best answer to given weights, ``fastest`` the best weights of all
that respect 0 ≤ w ≤ w̄, and ``frontier`` the rate they reach as w̄ grows.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.linear_programs._balance import NO_SUPPORT, balance_matrix, pair_name, with_violations
from marginax.linear_programs._highs import Program, progress_bar
from marginax.mdp import TabularMDP, policy_of
from marginax.operators import marginalized

__all__ = ["Frontier", "WorstCritic", "critic_loss", "fastest", "frontier", "worst_critic"]

BLOCK = 32  # start pairs solved in a row by one thread, each from the basis of the one before


def fastest(
    mdp: TabularMDP,
    pi: ArrayLike,
    mu: ArrayLike,
    max_weight: float,
    *,
    start: tuple[int, int] | None = None,
    threads: int | None = None,
    time_limit: float | None = None,
    progress: bool = False,
) -> FloatArray:
    """The weights 0 ≤ w ≤ w̄ with the smallest local contraction rate, for each start pair by a linear program.

    With d = w ∘ d^μ_{x,a}::

        min ‖(1-γ) δ_{x,a} + γ (P^π)ᵀ d - d‖₁  subject to  0 ≤ d ≤ w̄ d^μ_{x,a}.

    The optimum is unique and is the flow of π cut off at the cap, ``d = min(w̄ d^μ, (1-γ) δ + γ (P^π)ᵀ d)``: what arrives above the cap
    is what the rate loses. π may have support where μ has none; nothing can be weighted there.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        max_weight: the cap w̄ > 0; may be infinite.
        start: one start pair ``(x, a)`` instead of all.
        threads: how many programs are solved at a time, by default one per core; results do not depend on it.
        time_limit: seconds HiGHS may take for one program; None for no limit.
        progress: draw a progress bar.

    Returns:
        ``w[x, a, x', a']``, ``[S, A, S, A]``, zero where μ never goes; ``[S, A]`` with ``start``.

    Raises:
        ValueError: if pi or mu is not a policy, the cap is not positive, or start is not a pair (x, a).
        ProgramError: HiGHS did not find an optimum; names the pair and HiGHS's status.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> w = fastest(mdp, pi, mu, max_weight=1.5)
        >>> bool(w.max() <= 1.5)
        True
        >>> retrace = mx.weights.exact(mdp, mu, mx.traces.retrace(pi, mu))  # its weights are at most 1
        >>> rates = [mx.marginalized(mdp, pi, mu, weights).contraction_rates() for weights in (w, retrace)]
        >>> bool(np.all(rates[0] <= rates[1] + 1e-9))
        True
    """
    cap = checks.positive("max_weight", max_weight, infinite=True)
    visits, starts = _visits(mdp, mu, start)
    weights = np.zeros(visits.shape)

    def keep(row: int, _: int, credit: FloatArray, rate: float) -> None:
        supported = visits[row] > NO_SUPPORT
        weights[row][supported] = np.clip(credit[supported] / visits[row][supported], 0.0, cap)

    _solve(
        mdp, policy_of(mdp, "pi", pi), visits, starts, np.array([cap]), keep, threads, time_limit, progress
    )
    return weights.reshape(mdp.r.shape if start is not None else (*mdp.r.shape, *mdp.r.shape))


class Frontier(NamedTuple):
    """The best local contraction rates against the cap on the weights.

    Attributes:
        max_weights: the caps w̄, ascending, ``[K]``.
        rates: smallest local rate of each start pair under each cap, ``[K, S, A]``.

    Example:
        >>> Frontier(np.array([1.0]), np.array([[[0.5]]])).rates.shape
        (1, 1, 1)
    """

    max_weights: FloatArray
    rates: FloatArray


def frontier(
    mdp: TabularMDP,
    pi: ArrayLike,
    mu: ArrayLike,
    max_weights: ArrayLike,
    *,
    threads: int | None = None,
    time_limit: float | None = None,
    progress: bool = False,
) -> Frontier:
    """The curve of best rate against the cap, ``w̄ -> min { η^w_{x,a} : 0 ≤ w ≤ w̄ }``, for every start pair.

    Each curve is convex and decreasing; it reaches 0 where the cap admits the ratios w^{π,μ}. No weights below the
    cap, from a trace, from data or from a network, lie under it.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        max_weights: caps w̄ > 0, ``[K]``, in any order.
        threads: how many programs are solved at a time, by default one per core; results do not depend on it.
        time_limit: seconds HiGHS may take for one program; None for no limit.
        progress: draw a progress bar.

    Returns:
        The caps in ascending order ``[K]`` and the rates ``[K, S, A]``.

    Raises:
        ValueError: if pi or mu is not a policy, or a cap is not positive.
        ProgramError: HiGHS did not find an optimum; names the pair and HiGHS's status.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> curve = frontier(mdp, pi, mu, [0.5, 1.0, 2.0, 100.0])
        >>> bool(np.all(np.diff(curve.rates, axis=0) <= 0)), bool(np.allclose(curve.rates[-1], 0))
        (True, True)
    """
    values = np.atleast_1d(np.asarray(max_weights))
    if values.ndim != 1 or not values.size:
        raise ValueError(f"max_weights must be a list of at least one cap, got shape {values.shape}")
    caps = np.sort(
        [checks.positive(f"max_weights[{k}]", value, infinite=True) for k, value in enumerate(values)]
    )
    visits, starts = _visits(mdp, mu, None)
    rates = np.empty((caps.size, len(visits)))

    def keep(row: int, k: int, credit: FloatArray, rate: float) -> None:
        rates[k, row] = rate

    _solve(mdp, policy_of(mdp, "pi", pi), visits, starts, caps, keep, threads, time_limit, progress)
    return Frontier(caps, rates.reshape(-1, *mdp.r.shape))


class WorstCritic(NamedTuple):
    """The critic that scores given weights worst, for every start pair.

    Attributes:
        critic: q*, ``[S, A, S, A]``: ``critic[x, a]`` is the critic of start pair (x, a), entries in [-1, 1].
        loss: ``L(q*, w) = max_q L(q, w) = (1-γ) η^w_{x,a}``, ``[S, A]``.

    Example:
        >>> WorstCritic(np.ones((1, 1, 1, 1)), np.array([[0.1]])).loss
        array([[0.1]])
    """

    critic: FloatArray
    loss: FloatArray


def worst_critic(mdp: TabularMDP, pi: ArrayLike, mu: ArrayLike, w: ArrayLike) -> WorstCritic:
    """``argmax L(q, w)`` over the hypercube |q| ≤ 1, which is the sign of the residual of the balance equation (Section 5.1).

    The maximum is ``‖E^w_{x,a}‖₁``, that is (1-γ) times the local contraction rate; the paper's Proposition 7 lacks the factor and
    its signed one-hot critics give only ‖E‖_∞.

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        w: TD weights ``[S, A, S, A]``.

    Returns:
        The critics ``[S, A, S, A]`` (zero where the residual is) and their losses ``[S, A]``.

    Raises:
        ValueError: if pi or mu is not a policy, or w has the wrong shape.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> w = np.ones((4, 2, 4, 2))
        >>> rates = mx.marginalized(mdp, pi, mu, w).contraction_rates()
        >>> bool(np.allclose(worst_critic(mdp, pi, mu, w).loss, (1 - mdp.discount) * rates))
        True
    """
    critic = np.sign(marginalized(mdp, pi, mu, w).residual())
    return WorstCritic(critic, critic_loss(mdp, pi, mu, w, critic))


def critic_loss(mdp: TabularMDP, pi: ArrayLike, mu: ArrayLike, w: ArrayLike, critic: ArrayLike) -> FloatArray:
    """``L(q, w) = (1-γ) q(x,a) + E_{(x',a') ~ d^μ_{x,a}} [w(x',a') (γ E[q(x'',π)] - q(x',a'))]`` (Eq. (td-estimate) with π̃ = π).

    Args:
        mdp: the MDP.
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        w: TD weights ``[S, A, S, A]``.
        critic: q for each start pair, ``[S, A, S, A]``, or one for all, ``[S, A]``.

    Returns:
        The loss of each start pair, ``[S, A]``.

    Raises:
        ValueError: if pi or mu is not a policy, or w or critic has the wrong shape.

    Example:
        The ratios w^{π,μ} leave no critic anything to say; for π = μ they are 1.

        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
        >>> loss = critic_loss(mdp, mu, mu, np.ones((4, 2, 4, 2)), np.arange(8.0).reshape(4, 2))
        >>> bool(np.allclose(loss, 0.0))
        True
    """
    target, behaviour = policy_of(mdp, "pi", pi), policy_of(mdp, "mu", mu)
    shape = mdp.r.shape
    w = checks.array("w", w, (*shape, *shape))
    one = np.ndim(critic) == 2
    q = np.broadcast_to(checks.array("critic", critic, shape if one else (*shape, *shape)), w.shape)
    states = (target * q).sum(axis=-1)  # q(x, π) for each start pair, [S, A, S]
    following = mdp.expect_next(states.reshape(-1, shape[0]).T)  # [S, A, start pairs]
    following = np.moveaxis(following, -1, 0).reshape(w.shape)
    expectation = (mdp.visitation(behaviour) * w * (mdp.discount * following - q)).sum(axis=(2, 3))
    return (1.0 - mdp.discount) * np.einsum("xaxa->xa", q) + expectation


def _visits(mdp: TabularMDP, mu: ArrayLike, start: tuple[int, int] | None) -> tuple[FloatArray, np.ndarray]:
    """Discounted visits d^μ/(1-γ) of μ, one row per start pair, and which pairs those are."""
    behaviour = policy_of(mdp, "mu", mu)
    if start is not None:
        state, action = mdp.pair(start)
        row = mdp.credit_row(behaviour, (state, action)).reshape(1, -1)
        return row, np.array([state * mdp.num_actions + action])
    pairs = mdp.r.size
    checks.fits_in_memory(
        f"the weights of {pairs} by {pairs} pairs", pairs**2, copies=4, instead="ask for one start (start=)"
    )
    return mdp.credit(behaviour).reshape(pairs, pairs), np.arange(pairs)


def _solve(
    mdp: TabularMDP,
    pi: FloatArray,
    visits: FloatArray,
    starts: np.ndarray,
    caps: FloatArray,
    keep: Callable[[int, int, FloatArray, float], None],
    threads: int | None,
    time_limit: float | None,
    progress: bool,
) -> None:
    """Solves every start pair (a row of ``visits``) under every cap; ``keep(row, k, credit, rate)`` takes each optimum.

    A block of start pairs is always solved in the same order from the same first basis, so that neither the number of
    threads nor which of them solves it can change a digit.
    """
    blocks = [range(first, min(first + BLOCK, len(starts))) for first in range(0, len(starts), BLOCK)]
    wanted = checks.count("threads", threads) if threads is not None else os.cpu_count() or 1
    workers = min(wanted, len(blocks))
    programs: SimpleQueue[_CappedProgram] = SimpleQueue()
    for _ in range(workers):
        programs.put(_CappedProgram(mdp, pi, time_limit))

    def solve_block(rows: range) -> int:
        program = programs.get()
        try:
            program.reset()
            for row in rows:
                for k, cap in enumerate(caps):
                    keep(row, k, *program.solve(int(starts[row]), visits[row], cap))
        finally:
            programs.put(program)  # another block may be waiting for it
        return len(rows)

    with (
        progress_bar("fastest weights", len(starts), progress) as advance,
        ThreadPoolExecutor(workers) as pool,
    ):
        for solved in pool.map(solve_block, blocks):
            advance(solved)


class _CappedProgram:
    """``min Σ (e⁺ + e⁻)`` over the balance equations with 0 ≤ D ≤ w̄ d^μ/(1-γ), one HiGHS model for all starts and caps."""

    def __init__(self, mdp: TabularMDP, pi: FloatArray, time_limit: float | None) -> None:
        states, pairs = mdp.num_states, mdp.r.size
        self._mdp, self._pairs, self._first_pair_row, self._start = mdp, pairs, states, 0
        columns = np.arange(3 * pairs + states)
        free = (columns >= pairs) & (columns < pairs + states)
        self._program = Program(
            with_violations(balance_matrix(mdp, pi), pairs),
            cost=(columns >= pairs + states).astype(float),
            lower=np.where(free, -np.inf, 0.0),
            upper=np.full(columns.size, np.inf),
            rows_lower=np.zeros(states + pairs),
            rows_upper=np.zeros(states + pairs),
            strategy="dual",
            time_limit=time_limit,
        )
        # Without caps the optimum is d^π; its basis has admissible prices under any cap and for any start.
        self._first_basis = self._program.basis(
            columns < pairs + states, np.zeros(states + pairs, dtype=bool)
        )

    def reset(self) -> None:
        """Forgets all that was solved before."""
        self._program.start_from(self._first_basis)

    def solve(self, pair: int, visits: FloatArray, cap: float) -> tuple[FloatArray, float]:
        """The optimal credit ``[S*A]`` and its rate."""
        upper = np.where(visits > NO_SUPPORT, cap, 0.0)
        upper = np.multiply(upper, visits, out=upper, where=upper > 0.0)
        self._program.set_row(self._first_pair_row + self._start, 0.0)
        self._program.set_row(self._first_pair_row + pair, 1.0)
        self._start = pair
        self._program.set_bounds(0, np.zeros(self._pairs), upper)
        rate = self._program.solve(pair_name(self._mdp, pair))
        return self._program.columns()[: self._pairs], max(rate, 0.0)
