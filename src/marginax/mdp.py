"""Finite Markov decision processes and their exact values, visitations and kernels (Section 2)."""

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax._solve import Resolvent
from marginax.policies import greedy

__all__ = ["TabularMDP"]

MAX_SWEEPS = 2_000
"""Sweeps of value iteration before policy iteration takes over."""


class TabularMDP:
    """A finite MDP with exact values: transition probabilities, mean rewards, a discount, starts and reward noise.

    Rows of ``p`` sum to at most 1; what is missing is the chance that the episode ends with that step. Rows that sum to 1 up to
    the rounding of their precision are scaled to 1. Inputs are copied and never modified; the attributes are read-only float64
    arrays.

    Args:
        p: transition probabilities, dense ``[S, A, S]`` with ``p[x, a, x']``, or SciPy sparse ``(S*A, S)`` with row ``x*A + a``.
        r: mean rewards ``[S, A]``.
        discount: γ in [0, 1).
        initial: distribution of the first state ``[S]``; uniform when omitted.
        reward_std: standard deviation of the (Gaussian) reward noise, ``[S, A]`` or one number; none when omitted.

    Raises:
        ValueError: naming the argument, the place and the value, on a wrong shape, a NaN or infinity, a negative probability, a
            row above 1 or a discount outside [0, 1).

    Example:
        Two states; the second leads to the end of the episode with a reward of 1.

        >>> mdp = TabularMDP(p=[[[0, 1]], [[0, 0]]], r=[[0], [1]], discount=0.5)
        >>> mdp.q_values([[1.0], [1.0]])
        array([[0.5],
               [1. ]])
    """

    def __init__(
        self,
        p: Any,
        r: ArrayLike,
        discount: float,
        initial: ArrayLike | None = None,
        reward_std: ArrayLike | float | None = None,
    ):
        self.discount = checks.discount(discount)
        self.r = checks.array("r", r, (None, None))
        self.num_states, self.num_actions = self.r.shape
        if not self.r.size:
            raise ValueError(f"r must have at least one state and one action, got shape {self.r.shape}")
        shape = self.r.shape
        self.p: Any = self._sparse(p) if sp.issparse(p) else self._dense(p)
        self.termination = self._close_rows(checks.tolerance(p))
        if initial is None:
            self.initial = np.full(shape[0], 1.0 / shape[0])
        else:
            self.initial = checks.distribution("initial", initial, (shape[0],))
        if reward_std is None or np.ndim(reward_std) == 0:
            self.reward_std = np.full(
                shape, checks.number("reward_std", 0.0 if reward_std is None else reward_std)
            )
        else:
            self.reward_std = checks.array("reward_std", reward_std, shape)
        checks.non_negative("reward_std", self.reward_std)
        p_arrays = (
            (self.p,) if isinstance(self.p, np.ndarray) else (self.p.data, self.p.indices, self.p.indptr)
        )
        for values in (*p_arrays, self.r, self.termination, self.initial, self.reward_std):
            values.setflags(write=False)

    def __repr__(self) -> str:
        kind = f"sparse, {self.p.nnz} transitions" if self.is_sparse else "dense"
        return f"TabularMDP({self.num_states} states, {self.num_actions} actions, discount {self.discount:g}, {kind})"

    @property
    def is_sparse(self) -> bool:
        """Whether ``p`` is kept as a sparse ``(S*A, S)`` matrix."""
        return sp.issparse(self.p)

    def dense_p(self) -> FloatArray:
        """The transition probabilities as a dense array, ``p(x'|x,a)``.

        Returns:
            ``[S, A, S]``.

        Example:
            >>> TabularMDP([[[0.5]]], [[1.0]], 0.9).dense_p()
            array([[[0.5]]])
        """
        if not self.is_sparse:
            return self.p
        shape = (self.num_states, self.num_actions, self.num_states)
        checks.fits_in_memory("dense_p", int(np.prod(shape)), copies=2, instead="keep p sparse")
        return self.p.toarray().reshape(shape)

    def policy(self, name: str, value: ArrayLike) -> FloatArray:
        """Checks that ``value`` is a policy of this MDP, ``Σ_a π(a|x) = 1`` for every x.

        Args:
            name: what to call it in an error.
            value: ``[S, A]``.

        Returns:
            A float64 copy ``[S, A]``.

        Example:
            >>> TabularMDP([[[0.5]]], [[1.0]], 0.9).policy("pi", [[1]])
            array([[1.]])
        """
        return checks.policy(name, value, self.num_states, self.num_actions)

    def expect_next(self, v: FloatArray) -> FloatArray:
        """The expectation over successors, ``(p v)(x,a) = Σ_x' p(x'|x,a) v(x')``; an episode that ends adds zero.

        Args:
            v: ``[S]`` or ``[S, k]``.

        Returns:
            ``[S, A]`` or ``[S, A, k]``.

        Example:
            >>> TabularMDP([[[0.5]]], [[1.0]], 0.9).expect_next(np.array([2.0]))
            array([[1.]])
        """
        v = np.asarray(v)
        if v.ndim not in (1, 2) or len(v) != self.num_states:
            raise ValueError(
                f"v must have shape ({self.num_states},) or ({self.num_states}, k), got {v.shape}"
            )
        if not self.is_sparse:
            return self.p @ v
        return (self.p @ v).reshape(self.num_states, self.num_actions, *v.shape[1:])

    def state_kernel(self, measure: FloatArray) -> Any:
        """The kernel on states of a measure over actions, ``P(x,x') = Σ_a m(x,a) p(x'|x,a)``.

        The measure is a policy, or μ(a|x) c(x,a); it need not sum to 1.

        Args:
            measure: ``[S, A]``.

        Returns:
            ``[S, S]``, dense or CSR as ``p`` is.

        Example:
            >>> TabularMDP([[[0.5]]], [[1.0]], 0.9).state_kernel(np.array([[1.0]]))
            array([[0.5]])
        """
        measure = checks.array("measure", measure, self.r.shape)
        if not self.is_sparse:
            return np.einsum("xa,xay->xy", measure, self.p)
        # Rows x*A, …, x*A + A-1 lie side by side in CSR, so a state's row is their concatenation.
        data = self.p.data * np.repeat(measure.ravel(), np.diff(self.p.indptr))
        kept = data != 0.0
        before = np.concatenate([[0], np.cumsum(kept)])
        indptr = before[self.p.indptr[:: self.num_actions]]
        shape = (self.num_states, self.num_states)
        return sp.csr_array((data[kept], self.p.indices[kept], indptr), shape=shape)

    def v_values(self, pi: ArrayLike) -> FloatArray:
        """State values, ``V^π = (I - γ P^π)^{-1} r^π`` (Section 2.1), solved on states.

        Args:
            pi: policy ``[S, A]``.

        Returns:
            ``[S]``.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).v_values([[1.0]])
            array([2.])
        """
        policy = self.policy("pi", pi)
        return Resolvent(self.state_kernel(policy), self.discount)((policy * self.r).sum(axis=1))

    def q_values(self, pi: ArrayLike) -> FloatArray:
        """Action values, ``Q^π(x,a) = r(x,a) + γ Σ_x' p(x'|x,a) V^π(x')`` (Section 2.1).

        Args:
            pi: policy ``[S, A]``.

        Returns:
            ``[S, A]``.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).q_values([[1.0]])
            array([[2.]])
        """
        return self.r + self.discount * self.expect_next(self.v_values(pi))

    def visitation(self, mu: ArrayLike) -> FloatArray:
        """Discounted visitation of every pair from every pair, ``d^μ = (1-γ) (I - γ P^μ)^{-1}`` (Section 2.3).

        Args:
            mu: policy ``[S, A]``.

        Returns:
            ``d[x, a, x', a']``, ``[S, A, S, A]``; a row sums to 1 when episodes never end, to less when they do.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).visitation([[1.0]]).item()
            1.0
        """
        return (1.0 - self.discount) * self.credit(self.policy("mu", mu))

    def credit(self, measure: FloatArray) -> FloatArray:
        """Discounted visits between all pairs if actions are weighed by a measure m, ``(I - γ P^m)^{-1}`` with ``P^m = p(x'|x,a) m(x',a')``.

        Solved on states: the sum over paths from (x,a) to (x',a') is ``1{same} + γ Σ_y p(y|x,a) G(y,x') m(x',a')``, with G the
        resolvent on states.

        Args:
            measure: ``[S, A]``.

        Returns:
            ``[S, A, S, A]``.

        Raises:
            ValueError: if the sum over time does not converge.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).credit(np.array([[1.0]])).item()
            2.0
        """
        pairs = self.num_states * self.num_actions
        checks.fits_in_memory(
            f"a matrix of {pairs} by {pairs} pairs",
            pairs**2,
            copies=2,
            instead="ask for one row (start=) or apply the operator",
        )
        spread = self.discount * self.expect_next(self._paths(measure).matrix())
        result = np.einsum("xay,yb->xayb", spread, measure)
        result.reshape(pairs, pairs)[np.diag_indices(pairs)] += 1.0
        return result

    def credit_row(self, measure: FloatArray, start: tuple[int, int]) -> FloatArray:
        """One row of `credit`, ``δ_{x,a}^T (I - γ P^m)^{-1}``, without forming the others.

        Args:
            measure: ``[S, A]``.
            start: the pair ``(x, a)``.

        Returns:
            ``[S, A]``.

        Raises:
            ValueError: if the sum over time does not converge.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).credit_row(np.array([[1.0]]), (0, 0))
            array([[2.]])
        """
        flow = self._paths(measure).transposed(self.successors(start))
        result = self.discount * flow[:, None] * np.asarray(measure)
        result[self.pair(start)] += 1.0
        return result

    def successors(self, start: tuple[int, int]) -> FloatArray:
        """The transition probabilities of one pair, ``p(·|x,a)``.

        Args:
            start: the pair ``(x, a)``.

        Returns:
            ``[S]``.

        Example:
            >>> TabularMDP([[[0.5]]], [[1.0]], 0.9).successors((0, 0))
            array([0.5])
        """
        state, action = self.pair(start)
        if not self.is_sparse:
            return self.p[state, action]
        result = np.zeros(self.num_states)
        row = state * self.num_actions + action
        inside = slice(self.p.indptr[row], self.p.indptr[row + 1])
        result[self.p.indices[inside]] = self.p.data[inside]
        return result

    def pair(self, start: tuple[int, int]) -> tuple[int, int]:
        """Checks that ``start`` is a pair of this MDP, ``(x, a)`` with x < S and a < A.

        Args:
            start: ``(x, a)``.

        Returns:
            The same as two integers.

        Example:
            >>> TabularMDP([[[1.0]]], [[1.0]], 0.5).pair((0, 0))
            (0, 0)
        """
        return checks.pair("start", start, self.num_states, self.num_actions)

    def greedy_policy(self, q: ArrayLike) -> FloatArray:
        """The policy that takes the first best action of ``q``, ``π(a|x) = 1{a = argmax q(x, ·)}``.

        Args:
            q: ``[S, A]``.

        Returns:
            ``[S, A]``.

        Example:
            >>> TabularMDP([[[0.0], [0.0]]], [[1.0, 2.0]], 0.5).greedy_policy([[1.0, 2.0]])
            array([[0., 1.]])
        """
        return greedy(checks.array("q", q, self.r.shape))

    def optimal_values(self) -> FloatArray:
        """Optimal action values, ``Q* = r + γ p max_a Q*``, by value iteration, then policy iteration.

        Returns:
            ``[S, A]``.

        Example:
            >>> TabularMDP([[[1.0], [0.0]]], [[0.0, 1.0]], 0.5).optimal_values()
            array([[0.5, 1. ]])
        """
        q = self.r.copy()
        for _ in range(MAX_SWEEPS):
            previous, q = q, self.r + self.discount * self.expect_next(q.max(axis=1))
            if np.abs(q - previous).max() <= 1e-6 * (1.0 - self.discount) * np.abs(q).max():
                break
        # The sweeps leave a nearly greedy policy; policy iteration makes it exact in a few steps.
        best = q.argmax(axis=1)
        while True:
            q = self.q_values(np.eye(self.num_actions)[best])
            # Change an action only for a gain above the rounding of the largest value, so that ties cannot alternate.
            current = np.take_along_axis(q, best[:, None], axis=1)[:, 0]
            improved = q.max(axis=1) > current + 1e-10 * np.abs(q).max()
            if not improved.any():
                return q
            best = np.where(improved, q.argmax(axis=1), best)

    def _paths(self, measure: FloatArray) -> Resolvent:
        """The resolvent on states of a measure over actions."""
        paths = Resolvent(self.state_kernel(measure), self.discount)
        if not paths.converges:
            raise ValueError("measure is too large: its sum over time does not converge")
        return paths

    def _dense(self, p: Any) -> FloatArray:
        states, actions = self.r.shape
        result = checks.array("p", p, (states, actions, states))
        checks.non_negative("p", result)
        return result

    def _sparse(self, p: Any) -> Any:
        states, actions = self.r.shape
        if p.shape != (states * actions, states):
            raise ValueError(f"p must have shape ({states * actions}, {states}) when sparse, got {p.shape}")
        result = sp.csr_array(p, copy=True).astype(np.float64)
        result.sum_duplicates()
        for problem, bad in (("be finite", ~np.isfinite(result.data)), ("not be negative", result.data < 0)):
            if bad.any():
                entry = int(np.argmax(bad))
                row = int(np.searchsorted(result.indptr, entry, side="right")) - 1
                place = checks.where([*divmod(row, actions), result.indices[entry]])
                raise ValueError(f"p must {problem}, but p{place} = {result.data[entry]}")
        result.eliminate_zeros()
        return result

    def _close_rows(self, tolerance: float) -> FloatArray:
        """Scales rows that sum to 1 up to the rounding of their precision to 1: they never end. Returns the chance of the others."""
        total = (self.p.sum(axis=1) if self.is_sparse else self.p.sum(axis=2)).reshape(self.r.shape)
        if total.max() > 1.0 + tolerance:
            place = np.argwhere(total > 1.0 + tolerance)[0]
            raise ValueError(
                f"rows of p must sum to at most 1, but p{checks.where(place)} sums to {total[tuple(place)]}"
            )
        closed = total > 1.0 - (checks.ROUNDING if tolerance == checks.TOLERANCE else tolerance)
        rounded = closed & (np.abs(total - 1.0) > checks.ROUNDING)
        if rounded.any():
            scale = 1.0 / np.where(rounded, total, 1.0)
            if self.is_sparse:
                self.p.data *= np.repeat(scale.ravel(), np.diff(self.p.indptr))
            else:
                self.p *= scale[..., None]
        return np.where(closed, 0.0, 1.0 - total)


def policy_of(mdp: TabularMDP, name: str, value: ArrayLike) -> FloatArray:
    """Checks ``mdp`` and a policy of it, which is returned as a float64 copy ``[S, A]``."""
    if not isinstance(mdp, TabularMDP):
        raise ValueError(f"mdp must be a TabularMDP, got {type(mdp).__name__}")
    return mdp.policy(name, value)
