"""Step-wise traces ``c(x, a)``: how much of the credit passes through a step (Section 2).

The multi-step operator with traces ``c`` weighs the Bellman error at time t by ``γ^t c(x_1,a_1) … c(x_t,a_t)``.

| trace               | c(x, a)            |
|---------------------|--------------------|
| one-step            | 0                  |
| importance sampling | π/μ                |
| Retrace             | λ min(c̄, π/μ)      |
| tree backup         | λ π                |
| Q(λ)                | λ                  |

Traces with ``0 ≤ c ≤ π/μ`` always give a contraction with fixed point Q^π (Munos et al., 2016).
"""

from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray

__all__ = [
    "clip_log_ratios",
    "clip_ratios",
    "importance_sampling",
    "one_step",
    "q_lambda",
    "retrace",
    "tree_backup",
]


def _namespace(array: Any) -> ModuleType:
    """`jax.numpy` for a JAX array, else `numpy`."""
    return array.__array_namespace__() if hasattr(array, "__array_namespace__") else np


def clip_ratios(ratios: Any, clip: Any = 1.0, decay: Any = 1.0) -> Any:
    """Retrace's traces of ratios π/μ, ``c = λ min(c̄, π/μ)``, entry by entry. Nothing is checked.

    Args:
        ratios: π/μ, a NumPy or JAX array of any shape.
        clip: c̄.
        decay: λ.

    Returns:
        c, an array of the same kind.

    Example:
        >>> clip_ratios(np.array([0.5, 2.0]), clip=1.0, decay=0.9)
        array([0.45, 0.9 ])
    """
    return decay * _namespace(ratios).minimum(clip, ratios)


def clip_log_ratios(log_ratios: Any, clip: Any = 1.0, decay: Any = 1.0) -> Any:
    """`clip_ratios` of ``exp(log_ratios)``. The clip comes before the exponential, so that nothing overflows.

    Example:
        >>> clip_log_ratios(np.array([-np.inf, 0.0, 1e4]), clip=2.0, decay=0.5)
        array([0. , 0.5, 1. ])
    """
    xp = _namespace(log_ratios)
    with np.errstate(divide="ignore"):
        limit = xp.log(clip)
    return decay * xp.exp(xp.minimum(limit, log_ratios))


def one_step(pi: ArrayLike, mu: ArrayLike) -> FloatArray:
    """Traces of the one-step operator, ``c = 0``: no credit beyond the first step (Section 2.2).

    Args:
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.

    Returns:
        c ``[S, A]``.

    Example:
        >>> one_step([[1.0, 0.0]], [[0.5, 0.5]])
        array([[0., 0.]])
    """
    target, _ = checks.two_policies(pi, mu)
    return np.zeros_like(target)


def importance_sampling(pi: ArrayLike, mu: ArrayLike) -> FloatArray:
    """Traces of importance sampling, ``c = π/μ`` (Section 2.2); zero where both are zero.

    Args:
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``, positive wherever ``pi`` is.

    Returns:
        c ``[S, A]``.

    Example:
        >>> importance_sampling([[1.0, 0.0]], [[0.5, 0.5]])
        array([[2., 0.]])
    """
    return checks.ratio(*checks.two_policies(pi, mu))


def retrace(pi: ArrayLike, mu: ArrayLike, clip: float = 1.0, decay: float = 1.0) -> FloatArray:
    """Traces of Retrace, ``c = λ min(c̄, π/μ)`` (Section 2.2).

    Args:
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``, positive wherever ``pi`` is.
        clip: c̄ ≥ 0; 0 gives the one-step operator, infinity importance sampling.
        decay: λ in [0, 1].

    Returns:
        c ``[S, A]``.

    Example:
        >>> retrace([[0.9, 0.1]], [[0.5, 0.5]], clip=1.0)
        array([[1. , 0.2]])
    """
    limit = checks.at_least("clip", clip, 0.0, infinite=True)
    return clip_ratios(importance_sampling(pi, mu), limit, checks.fraction("decay", decay))


def tree_backup(pi: ArrayLike, mu: ArrayLike, decay: float = 1.0) -> FloatArray:
    """Traces of tree backup, ``c = λ π`` (Section 2.2); they need no behaviour probabilities.

    Args:
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        decay: λ in [0, 1].

    Returns:
        c ``[S, A]``.

    Example:
        >>> tree_backup([[0.9, 0.1]], [[0.5, 0.5]])
        array([[0.9, 0.1]])
    """
    target, _ = checks.two_policies(pi, mu)
    return checks.fraction("decay", decay) * target


def q_lambda(pi: ArrayLike, mu: ArrayLike, decay: float) -> FloatArray:
    """Traces of Q^π(λ), ``c = λ`` whatever the policies (Section 2.2); not below π/μ, so it may fail to contract.

    Args:
        pi: target policy ``[S, A]``.
        mu: behaviour policy ``[S, A]``.
        decay: λ in [0, 1].

    Returns:
        c ``[S, A]``.

    Example:
        >>> q_lambda([[0.9, 0.1]], [[0.5, 0.5]], decay=0.7)
        array([[0.7, 0.7]])
    """
    target, _ = checks.two_policies(pi, mu)
    return np.full_like(target, checks.fraction("decay", decay))
