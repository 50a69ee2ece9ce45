"""Evaluation operators: one type, ``Q -> Q + D (r + γ P^π Q - Q)``, with several constructors (Sections 2 and 3).

| constructor             | credit D                                                               |
|-------------------------|------------------------------------------------------------------------|
| ``one_step``            | I                                                                      |
| ``multi_step``          | (I - γ P^{cμ})^{-1}, or its finite sum for time-dependent traces       |
| ``marginalized``        | (I - γ P^μ)^{-1} ∘ w                                                   |
| ``vtrace``              | (I - γ P^{cμ}_states)^{-1}, with ρ inside the Bellman error            |
| ``marginalized_vtrace`` | (I - γ P^μ_states)^{-1} ∘ w, with ρ inside the Bellman error           |
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._bellman import Bellman, PairBellman, StateBellman
from marginax._checks import FloatArray
from marginax._credit import Composed, Credit, Dense, Identity, StateTraced, Timed, converging, trace_array
from marginax._solve import Resolvent
from marginax.mdp import TabularMDP, policy_of

__all__ = ["Operator", "marginalized", "marginalized_vtrace", "multi_step", "one_step", "vtrace"]


@dataclass(frozen=True, eq=False)
class Operator:
    """An evaluation operator ``q -> q + D (b - A q)``; for Q-functions ``A = I - γ P^π`` and ``b = r``.

    Made by ``one_step``, ``multi_step``, ``marginalized``, ``vtrace`` and ``marginalized_vtrace``. Calling it applies it,
    ``first @ second`` composes two of them, and everything else about it is read off D (Proposition 1). Two operators are equal only
    if they are the same object.

    Example:
        >>> import marginax as mx
        >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
        >>> op = mx.multi_step(mdp, pi, mu, mx.traces.retrace(pi, mu))
        >>> op
        Operator(multi-step on 4 states, 2 actions: contractive, rate 0.861312)
    """

    name: str
    bellman: Bellman
    credit_form: Credit
    residual_is_non_negative: bool

    __array_ufunc__ = None  # NumPy leaves `array @ operator` alone, which is a TypeError then

    def __call__(self, q: ArrayLike) -> FloatArray:
        """Applies the operator once, ``q + D (b - A q)`` (Equations 1 and 3).

        Args:
            q: ``[S, A]``; ``[S]`` for the operators on states.

        Returns:
            An array of the same shape.
        """
        return self._apply(self._values(q))

    def __matmul__(self, other: object) -> "Operator":
        """Composes two operators for the same values: ``(self @ other)(q) = self(other(q))``."""
        if not isinstance(other, Operator):
            raise TypeError(
                f"other must be an Operator, got {type(other).__name__}: operator(q) applies it to values"
            )
        same = (
            self.shape == other.shape
            and self.bellman.mdp is other.bellman.mdp
            and np.array_equal(self.bellman.measure, other.bellman.measure)
        )
        if not same:
            raise ValueError(
                "other must evaluate the same policy (for V-trace, have the same mu * rho) on the same MDP object for a composition"
            )
        return Operator(
            name=f"{self.name} after {other.name}",
            bellman=self.bellman,
            credit_form=Composed(self.credit_form, other.credit_form, self.bellman),
            residual_is_non_negative=self.residual_is_non_negative and other.residual_is_non_negative,
        )

    def __repr__(self) -> str:
        size = " states, ".join(str(n) for n in self.shape) + (
            " actions" if len(self.shape) == 2 else " states"
        )
        if not self.residual_is_non_negative and np.prod(self.shape) > 2000:
            return f"Operator({self.name} on {size})"
        says = "contractive" if self.is_contractive() else "not contractive"
        return f"Operator({self.name} on {size}: {says}, rate {self.contraction_rate():.6g})"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what it acts on: ``(S, A)``, or ``(S,)`` for the operators on states."""
        return self.bellman.shape

    @property
    def policy(self) -> FloatArray:
        """The policy whose values it evaluates ``[S, A]``: π, or for V-trace ``π_ρ ∝ μ ρ``."""
        return self.bellman.evaluated_policy().copy()

    def iterate(self, q: ArrayLike, steps: int) -> FloatArray:
        """The sequence ``q, T q, T² q, …`` of repeated applications.

        Args:
            q: where to begin, ``[S, A]`` or ``[S]``.
            steps: how often to apply the operator.

        Returns:
            ``[steps+1, S, A]`` (or ``[steps+1, S]``), the first entry being ``q``.

        Example:
            >>> mdp = TabularMDP([[[1.0]]], [[1.0]], 0.5)
            >>> one_step(mdp, [[1.0]]).iterate([[0.0]], 2).ravel()
            array([0. , 1. , 1.5])
        """
        sequence = [self._values(q)]
        for _ in range(checks.count("steps", steps, least=0)):
            sequence.append(self._apply(sequence[-1]))
        return np.stack(sequence)

    def credit(self) -> FloatArray:
        """The credit matrix D.

        Returns:
            ``D[x, a, x', a']`` of shape ``[S, A, S, A]``; ``[S, S]`` for the operators on states.

        Example:
            >>> mdp = TabularMDP([[[1.0]]], [[1.0]], 0.5)
            >>> multi_step(mdp, [[1.0]], [[1.0]], [[1.0]]).credit().item()
            2.0
        """
        return self.credit_form.matrix().reshape(self.shape + self.shape)

    def residual(self) -> FloatArray:
        """The residual E of the balance equation (Proposition 1), ``E = (1-γ) (I - D A)``.

        For Q-functions row (x,a) is ``(1-γ) δ_{x,a} + γ (P^π)^T d - d`` with d the row of ``(1-γ) D``. The operator maps a
        difference ``q_1 - q_2`` to ``(1-γ)^{-1} E (q_1 - q_2)``.

        Returns:
            ``[S, A, S, A]``; ``[S, S]`` for the operators on states.

        Example:
            >>> mdp = TabularMDP([[[1.0]]], [[1.0]], 0.5)
            >>> one_step(mdp, [[1.0]]).residual().item()
            0.25
        """
        credit = self.credit_form.matrix()
        scale = 1.0 - self.bellman.mdp.discount
        result = -scale * self.bellman.after(credit)
        result[np.diag_indices(len(result))] += scale
        return result.reshape(self.shape + self.shape)

    def contraction_rates(self) -> FloatArray:
        """Local contraction rates, ``η_{x,a} = (1-γ)^{-1} ‖E_{x,a}‖_1`` (Proposition 1).

        Where the residual is known to be non-negative (traces with ``0 ≤ c ≤ π/μ``) they come from one linear solve,
        ``1 - D A 1``, and no matrix of pairs is formed.

        Returns:
            ``[S, A]``; ``[S]`` for the operators on states.

        Example:
            >>> mdp = TabularMDP([[[1.0]]], [[1.0]], 0.5)
            >>> one_step(mdp, [[1.0]]).contraction_rates()
            array([[0.5]])
        """
        if self.residual_is_non_negative:
            ones = np.ones(self.shape)
            return np.maximum(ones - self.credit_form.times(self.bellman.times(ones)), 0.0)
        size = int(np.prod(self.shape))
        rows = np.abs(self.residual().reshape(size, size)).sum(axis=1)
        return rows.reshape(self.shape) / (1.0 - self.bellman.mdp.discount)

    @cached_property
    def _rate(self) -> float:
        return float(self.contraction_rates().max())

    def contraction_rate(self) -> float:
        """The global contraction rate in the maximum norm, ``η = max_{x,a} η_{x,a}``.

        Returns:
            A number; below 1 the operator contracts.

        Example:
            >>> one_step(TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]]).contraction_rate()
            0.5
        """
        return self._rate

    def is_contractive(self) -> bool:
        """Whether it contracts in the maximum norm, ``η < 1``.

        Returns:
            True or False.

        Example:
            >>> one_step(TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]]).is_contractive()
            True
        """
        return self._rate < 1.0

    def fixed_point(self) -> FloatArray:
        """The values that the operator leaves as they are: Q^π, or for V-trace the V of ``π_ρ``.

        Returns:
            ``[S, A]``; ``[S]`` for the operators on states. It is the only fixed point if the operator contracts.

        Example:
            >>> one_step(TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]]).fixed_point()
            array([[2.]])
        """
        return self.bellman.solution()

    def _values(self, q: ArrayLike) -> FloatArray:
        return checks.array("q" if len(self.shape) == 2 else "v", q, self.shape)

    def _apply(self, q: FloatArray) -> FloatArray:
        return q + self.credit_form.times(self.bellman.error(q))


def one_step(mdp: TabularMDP, pi: ArrayLike) -> Operator:
    """The one-step Bellman operator, ``T^π Q = r + γ P^π Q``: credit ``D = I`` (Section 2.2).

    Args:
        mdp: the MDP.
        pi: the policy to evaluate ``[S, A]``.

    Returns:
        An operator on ``[S, A]``.

    Example:
        >>> one_step(TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]])([[4.0]])
        array([[3.]])
    """
    bellman = PairBellman(mdp, policy_of(mdp, "pi", pi))
    return Operator("one-step", bellman, Identity(mdp.r.size), residual_is_non_negative=True)


def multi_step(mdp: TabularMDP, pi: ArrayLike, mu: ArrayLike, c: ArrayLike) -> Operator:
    """The multi-step operator R^c, ``Q + E_μ[Σ_t γ^t c_1…c_t Δ_t]``: credit ``(I - γ P^{cμ})^{-1}`` (Equation 1).

    Args:
        mdp: the MDP.
        pi: the policy to evaluate ``[S, A]``.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``, ``c[x, a]``, or time-dependent ones ``[H, S, A]``: ``c[h]`` is the trace at time ``h+1``, and traces
            are zero after time H.

    Returns:
        An operator on ``[S, A]``.

    Raises:
        ValueError: if the sum over time does not converge (condition C.1 of the appendix).

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> op = multi_step(mdp, pi, mu, traces.importance_sampling(pi, mu))
        >>> bool(abs(op(0 * mdp.r) - mdp.q_values(pi)).max() < 1e-12)
        True
    """
    bellman = PairBellman(mdp, policy_of(mdp, "pi", pi))
    measure = policy_of(mdp, "mu", mu) * trace_array(mdp, c)
    non_negative = bool(measure.min(initial=0.0) >= 0.0 and (measure <= bellman.pi * (1.0 + 1e-12)).all())
    if measure.ndim == 3:
        return Operator("multi-step with time-dependent traces", bellman, Timed(mdp, measure), non_negative)
    return Operator("multi-step", bellman, converging(mdp, measure), non_negative)


def marginalized(mdp: TabularMDP, pi: ArrayLike, mu: ArrayLike, w: ArrayLike) -> Operator:
    """The marginalized operator M^w, ``Q + (1-γ)^{-1} E_{d^μ}[w Δ]``: credit ``(I - γ P^μ)^{-1} ∘ w`` (Equation 3).

    Args:
        mdp: the MDP.
        pi: the policy to evaluate ``[S, A]``.
        mu: the behaviour policy ``[S, A]``.
        w: TD weights ``[S, A, S, A]``, ``w[x, a, x', a']`` for start (x,a); any real numbers.

    Returns:
        An operator on ``[S, A]``.

    Example:
        >>> from marginax import problems, traces, weights
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> c = traces.retrace(pi, mu)
        >>> q = mdp.q_values(mu)
        >>> same = marginalized(mdp, pi, mu, weights.exact(mdp, mu, c))(q) - multi_step(mdp, pi, mu, c)(q)
        >>> bool(abs(same).max() < 1e-12)
        True
    """
    bellman = PairBellman(mdp, policy_of(mdp, "pi", pi))
    behaviour = policy_of(mdp, "mu", mu)
    size = mdp.r.size
    weights = checks.array("w", w, mdp.r.shape * 2).reshape(size, size)
    credit = mdp.credit(behaviour).reshape(size, size) * weights
    return Operator("marginalized", bellman, Dense(credit), residual_is_non_negative=False)


def vtrace(mdp: TabularMDP, mu: ArrayLike, c: ArrayLike, rho: ArrayLike) -> Operator:
    """The V-trace operator R^{c,ρ} on states, ``V + E_μ[Σ_t γ^t c_0…c_{t-1} ρ_t Δ_t]`` (Appendix on V-trace).

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        c: traces ``[S, A]``.
        rho: weights ρ(x,a) ≥ 0 of the Bellman errors ``[S, A]``; they fix the policy that is evaluated, ``π_ρ ∝ μ ρ``.

    Returns:
        An operator on ``[S]``.

    Example:
        >>> from marginax import problems, traces
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> op = vtrace(mdp, mu, traces.retrace(pi, mu), traces.importance_sampling(pi, mu))
        >>> bool(abs(op.fixed_point() - mdp.v_values(pi)).max() < 1e-12)
        True
    """
    bellman = _state_bellman(mdp, mu, rho)
    traces = checks.array("c", c, mdp.r.shape)
    credit = StateTraced(converging(mdp, bellman.mu * traces).paths)
    support = bellman.mu > 0.0
    non_negative = bool(
        bellman.scale.max() <= 1.0 + 1e-12
        and (traces[support] >= 0.0).all()
        and (traces[support] <= bellman.rho[support] * (1.0 + 1e-12)).all()
    )
    return Operator("V-trace", bellman, credit, non_negative)


def marginalized_vtrace(mdp: TabularMDP, mu: ArrayLike, w: ArrayLike, rho: ArrayLike) -> Operator:
    """The marginalized V-trace operator M^{w,ρ}, ``V + (1-γ)^{-1} E_{d^μ}[w ρ Δ]`` (Appendix on V-trace).

    Args:
        mdp: the MDP.
        mu: the behaviour policy ``[S, A]``.
        w: TD weights on states ``[S, S]``, ``w[x, x']`` for start x.
        rho: weights ρ(x,a) ≥ 0 of the Bellman errors ``[S, A]``.

    Returns:
        An operator on ``[S]``.

    Example:
        >>> from marginax import problems, traces, weights
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> c, rho = traces.retrace(pi, mu), traces.importance_sampling(pi, mu)
        >>> op = marginalized_vtrace(mdp, mu, weights.exact_states(mdp, mu, c), rho)
        >>> v = mdp.v_values(mu)
        >>> bool(abs(op(v) - vtrace(mdp, mu, c, rho)(v)).max() < 1e-12)
        True
    """
    bellman = _state_bellman(mdp, mu, rho)
    states = mdp.num_states
    weights = checks.array("w", w, (states, states))
    visits = StateTraced(Resolvent(mdp.state_kernel(bellman.mu), mdp.discount)).matrix()
    return Operator("marginalized V-trace", bellman, Dense(visits * weights), residual_is_non_negative=False)


def _state_bellman(mdp: TabularMDP, mu: ArrayLike, rho: ArrayLike) -> StateBellman:
    behaviour = policy_of(mdp, "mu", mu)
    values = checks.array("rho", rho, mdp.r.shape)
    checks.non_negative("rho", values)
    return StateBellman(mdp, behaviour, values)
