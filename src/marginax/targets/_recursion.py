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


def _row_by_row(errors: Array, carry: Array, cut: Array, weights: Array) -> Array:
    """Keeps the discounted errors of all later steps, and meets them with one start's weights after another."""
    time, segment = jnp.arange(errors.shape[0]), _segments(cut)

    def step(later: Array, here: tuple[Array, ...]) -> tuple[Array, Array]:
        t, discount, closed, row, own = here
        terms = jnp.where(time == t, errors, jnp.where(closed, 0, discount * later))
        reached = (time >= t) & (segment == own)
        return terms, (jnp.where(reached, row, 0) * jnp.where(reached, terms, 0)).sum()

    rows = time, carry, cut, weights, segment
    return jax.lax.scan(step, jnp.zeros_like(errors), rows, reverse=True)[1]


def _at_once(errors: Array, carry: Array, cut: Array, weights: Array) -> Array:
    """One parallel pass over the weights; products are differences of cumulated logarithms."""
    steps = jnp.log(jnp.where(carry > 0, carry, 1))
    log_product = jnp.cumsum(steps) - steps
    time, segment = jnp.arange(errors.shape[0]), _segments(cut)
    reached = (time[:, None] <= time[None, :]) & (segment[:, None] == segment[None, :])
    product = jnp.exp(jnp.where(reached, log_product[None, :] - log_product[:, None], 0))
    terms = jnp.where(reached, weights, 0) * product * jnp.where(reached, errors[None, :], 0)
    return terms.sum(axis=1)


def _segments(cut: Array) -> Array:
    """A number for each step, the same for steps with no cut between them."""
    return jnp.cumsum(cut) - cut


@partial(jax.jit, static_argnames="backend")
def from_every_start(
    errors: Float[Array, "T"],
    carry: Float[Array, "T"],
    cut: Bool[Array, "T"],
    weights: Float[Array, "T T"],
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    """Sums `(carry[t] ... carry[s-1]) weights[t,s] errors[s]` over the steps `s >= t` that `t` can reach.

    No step reaches beyond a cut, and nothing there is read.
    """
    if backend == "scan":
        return _row_by_row(errors, carry, cut, weights)
    if backend == "associative":
        return _at_once(errors, carry, cut, weights)
    return jax.lax.platform_dependent(errors, carry, cut, weights, cpu=_row_by_row, default=_at_once)
