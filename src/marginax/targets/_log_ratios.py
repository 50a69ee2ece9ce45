"""Traces from log-densities, for actions that are not drawn from a table."""

import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax.traces import clip_log_ratios


def traces_from_log_ratios(
    log_pi: ArrayLike,
    log_mu: ArrayLike,
    *,
    clip: ArrayLike = 1.0,
    decay: ArrayLike = 1.0,
    temperature: ArrayLike = 1.0,
) -> Float[Array, "..."]:
    r"""Computes $c = \lambda \min\{\bar c, (\pi/\mu)^\kappa\}$ from log-probabilities or log-densities.

    The ratio is capped before it is exponentiated, so nothing overflows: without a clip (`jnp.inf`) it is
    capped at the largest finite ratio. Where π has no mass the trace is 0; where only μ has none it is the
    clip; where both are infinite alike (π = μ, a point mass) the ratio is 1. Derivatives are finite
    throughout.

    Args:
        log_pi: $\log \pi(a_t|x_t)$, any shape, -inf and inf allowed.
        log_mu: $\log \mu(a_t|x_t)$, likewise.
        clip: $\bar c \ge 0$; the ratio of V-trace, ρ, is made in the same way with $\bar\rho$.
        decay: λ.
        temperature: the exponent κ > 0. Below 1 it draws ratios towards 1 and keeps more mass, at the cost of
            a trace that is no longer bounded by π/μ.

    Returns:
        Traces of the broadcast shape.

    Raises:
        ValueError: if a clip, decay or temperature that is a plain number is out of range.

    >>> traces_from_log_ratios(jnp.array([0.0, 500.0, -jnp.inf]), jnp.array([0.0, -500.0, 0.0]), decay=0.5)
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    for name, value, low in [("clip", clip, 0.0), ("decay", decay, 0.0), ("temperature", temperature, None)]:
        if isinstance(value, int | float) and not (value > 0 if low is None else value >= low):
            raise ValueError(
                f"{name} must be {'positive' if low is None else f'at least {low:g}'}, got {value}"
            )
    log_pi, log_mu = jnp.broadcast_arrays(jnp.asarray(log_pi), jnp.asarray(log_mu))
    dtype = jnp.result_type(log_pi, log_mu, float)
    log_pi, log_mu = log_pi.astype(dtype), log_mu.astype(dtype)
    impossible = log_pi == -jnp.inf
    alike = (log_pi == log_mu) & ~impossible
    largest = 0.99 * jnp.log(jnp.finfo(dtype).max)  # a logarithm that the exponential survives
    far = jnp.sqrt(jnp.finfo(dtype).max)  # stands for infinity, times which a derivative of zero is zero
    difference = jnp.clip(jnp.where(alike | impossible, 0, log_pi - log_mu), -far, far)
    powers = jnp.minimum(jnp.asarray(temperature, dtype) * difference, largest)
    c = clip_log_ratios(powers, jnp.asarray(clip, dtype), jnp.asarray(decay, dtype))
    return jnp.where(impossible, 0, c)
