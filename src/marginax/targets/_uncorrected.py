"""Targets that do not correct for the behaviour policy, for comparison: Peng's and n-step."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks

from ._estimates import Given, checked, floats, steps_of, targets
from ._loop import shifted, zero_where
from ._recursion import Backend


def peng(
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    traces: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Computes Peng's and Williams' Q(λ), which follows the actions taken as if π had taken them.

    $$G_t = r_t + \gamma \bigl((1 - c_{t+1})\, Q(x_{t+1},\pi) + c_{t+1} G_{t+1}\bigr)$$

    With `traces=λ` it is Peng's Q(λ); unless μ = π its fixed point is not $Q^\pi$. With Retrace's traces it
    is the multi-step baseline of the paper's deep experiments, which bootstraps from π's action where Retrace
    has $Q(x_{t+1},a_{t+1})$. With `traces=1` it is the uncorrected return.

    Args:
        v_next: `Q(x_{t+1}, π)`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode.
        traces: λ, or a trace for every step, times 0 to T-1, of which an episode's first is never read.
        truncated: as in `multi_step`.
        valid: as in `multi_step`.
        stop_gradient: as in `multi_step`.
        backend: as in `multi_step`.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree.

    >>> peng(jnp.array([2.0, 4.0]), jnp.ones(2), jnp.array([0.5, 0.5]), traces=0.5)
    Array([2.25, 3.  ], dtype=float32)
    """
    given = checked(None, v_next, rewards, discounts, truncated, valid)
    # An array even if all traces are one number: the last step has none after it, and bootstraps in full.
    later = shifted(jnp.broadcast_to(floats("traces", traces, given.values), given.values.shape))
    return targets(_peng_form, (given, later), stop_gradient, backend)


def _peng_form(given: Given, following_trace: Array) -> tuple[Array, Array, Array, Array]:
    steps = steps_of(given)
    carry = steps.carry * zero_where(steps.cut, following_trace)
    return steps.values, steps.errors - carry * zero_where(steps.cut, given.v_next), carry, steps.cut


def n_step(
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    steps: int,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    stop_gradient: bool = True,
) -> Float[Array, "T"]:
    r"""Computes uncorrected n-step targets, the usual choice where off-policy correction is neglected.

    $$G_t = r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n Q(x_{t+n},\pi)$$

    shortened where the episode ends, is truncated or leaves the array before `n` steps are through.

    Args:
        v_next: `Q(x_{t+1}, π)`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode.
        steps: n, at least 1; 1 gives one-step targets.
        truncated: as in `multi_step`.
        valid: as in `multi_step`.
        stop_gradient: as in `multi_step`.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree, or `steps` is not a positive whole number.

    >>> n_step(jnp.array([2.0, 4.0]), jnp.ones(2), jnp.array([0.5, 0.5]), steps=2)
    Array([2.5, 3. ], dtype=float32)
    """
    prepared = steps_of(checked(None, v_next, rewards, discounts, truncated, valid))
    length = prepared.errors.shape[0]
    last = prepared.cut | (jnp.arange(length) == length - 1)
    bootstrap = zero_where(last, floats("v_next", v_next))

    def extend(_: Array, target: Array) -> Array:
        gain = zero_where(last, shifted(target)) - bootstrap
        return prepared.errors + prepared.carry * gain

    extensions = min(checks.count("steps", steps), length) - 1
    target = jax.lax.fori_loop(0, extensions, extend, prepared.errors)
    return jax.lax.stop_gradient(target) if stop_gradient else target
