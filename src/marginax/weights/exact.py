"""Exact TD weights of given traces, their factor of the path, and the way back from weights to traces (Section 3, Lemmas 2 and 3)."""

from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax._credit import StateTraced, Timed, converging, trace_array
from marginax._solve import Resolvent
from marginax.mdp import TabularMDP, policy_of

__all__ = ["NonMarkovianTraces", "exact", "exact_states", "paths", "paths_states", "to_traces"]


def exact(
    mdp: TabularMDP, mu: ArrayLike, c: ArrayLike, *, start: tuple[int, int] | None = None
) -> FloatArray:
    """TD weights of traces, ``w^c = E_μ[Σ_t γ^t C_t 1{x_t=x',a_t=a'}] / E_μ[Σ_t γ^t 1{x_t=x',a_t=a'}]`` (Proposition 2).

    ``C_t = c_1 … c_t``. In matrices, ``W = (I - γ P^{cμ})^{-1} / (I - γ P^μ)^{-1}`` entry by entry; zero where μ never goes.

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``, or time-dependent ones ``[H, S, A]`` (``c[h]`` at time ``h+1``, zero after time H).
        start: a pair ``(x, a)``: only its row is computed, and no matrix of pairs is formed.

    Returns:
        ``w[x, a, x', a']`` of shape ``[S, A, S, A]``; ``[S, A]`` for one start.

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> exact(mdp, mu, traces.retrace(pi, mu), start=(0, 0))
        array([[1. , 0. ],
               [1. , 0. ],
               [0.5, 0. ]])
    """
    behaviour = policy_of(mdp, "mu", mu)
    traces = trace_array(mdp, c)
    measure = behaviour * traces
    if measure.ndim == 2:
        converging(mdp, measure)
    if start is not None:
        traced = _timed_row(mdp, measure, start) if measure.ndim == 3 else mdp.credit_row(measure, start)
        return _divide(traced, mdp.credit_row(behaviour, start))
    if measure.ndim == 3:
        traced = Timed(mdp, measure).matrix().reshape(mdp.r.shape * 2)
    else:
        traced = mdp.credit(measure)
    return _divide(traced, mdp.credit(behaviour))


def exact_states(mdp: TabularMDP, mu: ArrayLike, c: ArrayLike, *, start: int | None = None) -> FloatArray:
    """TD weights on states for V-trace, ``w = E_μ[Σ_t γ^t c_0…c_{t-1} 1{x_t=x'}] / E_μ[Σ_t γ^t 1{x_t=x'}]`` (Appendix on V-trace).

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``.
        start: a state: only its row is computed.

    Returns:
        ``w[x, x']`` of shape ``[S, S]``; ``[S]`` for one start.

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> exact_states(mdp, mu, traces.retrace(pi, mu), start=0)
        array([1.  , 0.5 , 0.25])
    """
    traced, visits = _on_states(mdp, mu, c)
    if start is None:
        return _divide(StateTraced(traced).matrix(), StateTraced(visits).matrix())
    first = np.zeros(mdp.num_states)
    first[checks.index("start", start, mdp.num_states)] = 1.0
    return _divide(traced.transposed(first), visits.transposed(first))


def paths(
    mdp: TabularMDP, mu: ArrayLike, c: ArrayLike, *, start: tuple[int, int] | None = None
) -> FloatArray:
    """The mean product of the traces on the way to a state, the factor u of TD weights: ``w = u(x') c(x',a')``.

    Over discounted arrivals in x' after the start, ``u = E_μ[Σ_{t≥1} γ^t C_{t-1} 1{x_t=x'}] / E_μ[Σ_{t≥1} γ^t 1{x_t=x'}]`` with
    ``C_{t-1} = c_1 … c_{t-1}``. Given x', the action taken there does not depend on the path, so that

        exact(mdp, mu, c)[x, a, x', a'] = paths(mdp, mu, c)[x, a, x'] c[x', a']

    for every pair that μ visits but the start itself. There time 0 counts too, with weight 1: with ``d = E_μ[Σ_{t≥1} γ^t 1{x_t=x}]``,
    ``w = (1 + d μ(a|x) u c) / (1 + d μ(a|x))``.

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``. Time-dependent traces have no such factor and are refused.
        start: a pair ``(x, a)``: only its row is computed.

    Returns:
        ``u[x, a, x']`` of shape ``[S, A, S]``, zero where μ never goes; ``[S]`` for one start.

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> paths(mdp, mu, traces.retrace(pi, mu), start=(0, 0))
        array([0. , 1. , 0.5])
    """
    traced, visits = _on_states(mdp, mu, _markovian(c))
    if start is not None:
        first = mdp.successors(start)
        return _divide(traced.transposed(first), visits.transposed(first))
    checks.fits_in_memory(
        "paths between all pairs and states",
        mdp.r.size * mdp.num_states,
        copies=4,
        instead="ask for one row (start=)",
    )
    return _divide(mdp.expect_next(traced.matrix()), mdp.expect_next(visits.matrix()))


def paths_states(mdp: TabularMDP, mu: ArrayLike, c: ArrayLike, *, start: int | None = None) -> FloatArray:
    """The mean product ``c_0 … c_{t-1}`` over discounted arrivals in x' at times t ≥ 1, for V-trace.

    V-trace's products hold no trace of the last action, so this is ``exact_states`` itself for every state but the start. There,
    with ``d = E_μ[Σ_{t≥1} γ^t 1{x_t=x}]``, ``exact_states = (1 + d u) / (1 + d)``.

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``.
        start: a state: only its row is computed.

    Returns:
        ``u[x, x']`` of shape ``[S, S]``, zero where μ never goes; ``[S]`` for one start.

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> paths_states(mdp, mu, traces.retrace(pi, mu), start=0)
        array([0.  , 0.5 , 0.25])
    """
    traced, visits = _on_states(mdp, mu, _markovian(c))
    if start is None:
        # P Σ_t (γP)^t: what a path of at least one step reaches, without subtracting.
        return _divide(
            traced.kernel @ StateTraced(traced).matrix(), visits.kernel @ StateTraced(visits).matrix()
        )
    state = checks.index("start", start, mdp.num_states)
    return _divide(
        traced.transposed(_row(traced.kernel, state)), visits.transposed(_row(visits.kernel, state))
    )


class NonMarkovianTraces(NamedTuple):
    """Traces that depend on where the path began, ``c_0 = w(x_0,a_0)`` and ``c_t = w(x_t,a_t) / w(x_{t-1},a_{t-1})`` (Lemma 2).

    Example:
        >>> NonMarkovianTraces(initial=1.0, steps=np.ones((1, 1, 1, 1))).initial
        1.0
    """

    initial: float
    """``c_0``, the weight of the start itself."""
    steps: FloatArray
    """``[S, A, S, A]``: ``steps[y, b, y', b']`` is the trace of the step from (y,b) to (y',b'); zero where it cannot occur."""


def to_traces(mdp: TabularMDP, mu: ArrayLike, w: ArrayLike, start: tuple[int, int]) -> NonMarkovianTraces:
    """Traces whose products along a path from ``start`` are its TD weights, ``c_0 c_1 … c_t = w(x_t,a_t)`` (Lemma 2).

    The product must begin with ``c_0 = w(x_0,a_0)``: with ``C_0 = 1``, as the multi-step operator has it, only weights with
    ``w(x_0,a_0) = 1`` come out of this construction.

    Lemma 2 covers positive weights. Weights with zeros may still come from other traces, such as Retrace's: the products of those
    equal w on average over paths, not along each path.

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        w: the TD weights of this start ``[S, A]``.
        start: the pair ``(x, a)``.

    Returns:
        The first trace and one for every possible step.

    Raises:
        ValueError: where μ goes from a pair of weight zero to one whose weight is not: the product along that path would have to
            come back from zero.

    Example:
        >>> from marginax import problems
        >>> mdp, pi, mu = problems.chain(n=2, actions=1)
        >>> to_traces(mdp, mu, [[1.0], [0.5]], (0, 0)).steps[0, 0, 1, 0].item()
        0.5
    """
    behaviour = policy_of(mdp, "mu", mu)
    weights = checks.array("w", w, mdp.r.shape)
    origin = mdp.pair(start)
    checks.fits_in_memory("traces of all steps", mdp.r.size**2, copies=3, instead="use a smaller MDP")
    possible = (mdp.dense_p()[:, :, :, None] * behaviour) > 0.0
    possible &= _reached(possible, origin)[:, :, None, None]
    regenerates = possible & (weights == 0.0)[:, :, None, None] & (weights != 0.0)
    if regenerates.any():
        y, b, z, d = (int(i) for i in np.argwhere(regenerates)[0])
        raise ValueError(
            f"w from start {origin} has no traces of Lemma 2: their product would have to equal w on every path, but "
            f"w[{y}, {b}] = 0 leads to w[{z}, {d}] = {weights[z, d]}, and a product that has reached zero stays zero"
        )
    ratio = np.divide(
        weights,
        weights[:, :, None, None],
        out=np.zeros(possible.shape),
        where=possible & (weights != 0.0)[:, :, None, None],
    )
    return NonMarkovianTraces(float(weights[origin]), ratio)


def _on_states(mdp: TabularMDP, mu: ArrayLike, c: ArrayLike) -> tuple[Resolvent, Resolvent]:
    """The resolvents of ``P^{cμ}`` and ``P^μ`` on states: what paths of μ reach, with the traces and without."""
    behaviour = policy_of(mdp, "mu", mu)
    traced = converging(mdp, behaviour * checks.array("c", c, mdp.r.shape)).paths
    return traced, Resolvent(mdp.state_kernel(behaviour), mdp.discount)


def _markovian(c: ArrayLike) -> ArrayLike:
    if np.ndim(c) == 3:
        raise ValueError(
            "c must have shape [S, A]: time-dependent traces have no factor of the path, because the last trace depends on when "
            "the state is reached"
        )
    return c


def _row(kernel: Any, state: int) -> FloatArray:
    row = kernel[[state]]
    return (row.toarray() if sp.issparse(row) else row)[0]


def _divide(traced: FloatArray, visits: FloatArray) -> FloatArray:
    return np.divide(traced, visits, out=np.zeros_like(visits), where=visits > 0.0)


def _reached(possible: np.ndarray, start: tuple[int, int]) -> np.ndarray:
    """Which pairs can be met from ``start``, itself included, given which steps are possible; ``[S, A]``."""
    reached = np.zeros(possible.shape[:2], dtype=bool)
    reached[start] = True
    while True:
        more = reached | possible[reached].any(axis=0)
        if (more == reached).all():
            return reached
        reached = more


def _timed_row(mdp: TabularMDP, measures: FloatArray, start: tuple[int, int]) -> FloatArray:
    """``δ_{x,a}^T Σ_t γ^t P^{m_1} … P^{m_t}``, forward in time."""
    current = np.zeros(mdp.r.shape)
    current[mdp.pair(start)] = 1.0
    total = current.copy()
    p = mdp.p if mdp.is_sparse else mdp.p.reshape(mdp.r.size, -1)
    for measure in measures:
        current = mdp.discount * (current.ravel() @ p)[:, None] * measure
        total += current
    return total
