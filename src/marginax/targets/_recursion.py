"""The two sums that targets are made of: one backward recursion, and a form for weights that know the start.

The recursion is `y[t] = b[t] + a[t] y[t+1]`. A plain reverse scan is best on a CPU, where the work is what
costs; an associative scan is best on an accelerator, where the number of steps in a row is.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Backend = Literal["auto", "scan", "associative"]


def _step(following: Array, here: tuple[Array, Array]) -> tuple[Array, Array]:
    increment, coefficient = here
    total = increment + jnp.where(coefficient == 0, 0, coefficient * following)
    return total, total


def _scan(increments: Array, coefficients: Array) -> Array:
    return jax.lax.scan(_step, jnp.zeros_like(increments[0]), (increments, coefficients), reverse=True)[1]


def _join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
    b_later, a_later = later
    b, a = earlier
    closed = (a == 0) | (a_later == 0)
    return b + jnp.where(a == 0, 0, a * b_later), jnp.where(closed, 0, a * a_later)


def _associative(increments: Array, coefficients: Array) -> Array:
    return jax.lax.associative_scan(_join, (increments, coefficients), reverse=True)[0]


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _solve(increments: Array, coefficients: Array, cut: Array, backend: Backend) -> Array:
    if backend == "scan":
        return _scan(increments, coefficients)
    if backend == "associative":
        return _associative(increments, coefficients)
    return jax.lax.platform_dependent(increments, coefficients, cpu=_scan, default=_associative)


@_solve.defjvp
def _derivative(backend, primals, tangents):
    increments, coefficients, cut = primals
    y = _solve(increments, coefficients, cut, backend)
    following = jnp.where(cut, 0, jnp.concatenate([y[1:], jnp.zeros_like(y[:1])]))
    return y, _solve(tangents[0] + tangents[1] * following, coefficients, cut, backend)


@partial(jax.jit, static_argnames="backend")
def backward(
    increments: Float[Array, "T"],
    coefficients: Float[Array, "T"],
    cut: Bool[Array, "T"],
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    """Solves `y[t] = increments[t] + coefficients[t] y[t+1]` backwards from `y[T] = 0`.

    Where a coefficient is zero, nothing that follows is read, NaN included. `cut` marks the steps whose
    coefficient is zero for good (an episode ended, or was cut): the derivative with respect to that
    coefficient is zero, too, while for a coefficient that only happens to be zero it is `y[t+1]`.
    """
    return _solve(increments, coefficients, cut, backend)


@jax.jit
def from_every_start(
    errors: Float[Array, "T"],
    carry: Float[Array, "T"],
    cut: Bool[Array, "T"],
    weights: Float[Array, "T T"],
) -> Float[Array, "T"]:
    """Sums `(carry[t] ... carry[s-1]) weights[t,s] errors[s]` over the steps `s >= t` that `t` can reach.

    No step reaches beyond a cut. The products are differences of cumulated logarithms, so that the whole is
    one pass over the weights.
    """
    opened = carry > 0
    steps = jnp.log(jnp.where(opened, carry, 1))
    log_product = jnp.cumsum(steps) - steps
    segment = jnp.cumsum(cut) - cut
    time = jnp.arange(errors.shape[0])
    reached = (time[:, None] <= time[None, :]) & (segment[:, None] == segment[None, :])
    product = jnp.exp(jnp.where(reached, log_product[None, :] - log_product[:, None], 0))
    terms = jnp.where(reached, weights, 0) * product * jnp.where(reached, errors[None, :], 0)
    return terms.sum(axis=1)
