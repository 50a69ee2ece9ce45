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


def zero_where(mask: Array, array: Array) -> Array:
    """`array` with zeros where `mask` is true.

    The zeros are made of the mask: beside a constant, `jax.vmap` would move the batch to the front, and arrays with
    time first would be transposed there and back.
    """
    return jnp.where(mask, (mask * 0).astype(array.dtype), array)


def _step(following: Array, increment: Array, coefficient: Array) -> tuple[Array, Array]:
    total = increment + coefficient * zero_where(coefficient == 0, following)
    return total, total


def _scan(increments: Array, coefficients: Array) -> Array:
    start = jnp.zeros_like(increments[0])
    return jax.lax.scan(lambda y, here: _step(y, *here), start, (increments, coefficients), reverse=True)[1]


def shifted(array: Array) -> Array:
    """What `array` holds one step later (its first entry is dropped; the last step gets a zero)."""
    return jax.lax.pad(array[1:], jnp.zeros((), array.dtype), [(0, 1, 0)])


def _join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
    b_later, a_later = later
    b, a = earlier
    closed = (a == 0) | (a_later == 0)
    return b + jnp.where(a == 0, 0, a * b_later), jnp.where(closed, 0, a * a_later)


def _associative(increments: Array, coefficients: Array) -> Array:
    return jax.lax.associative_scan(_join, (increments, coefficients), reverse=True)[0]


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _sums(increments: Array, coefficients: Array, cut: Array, backend: Backend) -> Array:
    if backend == "scan":
        return _scan(increments, coefficients)
    if backend == "associative":
        return _associative(increments, coefficients)
    return jax.lax.platform_dependent(increments, coefficients, cpu=_scan, default=_associative)


@_sums.defjvp
def _derivative_of_sums(backend, primals, tangents):
    increments, coefficients, cut = primals
    y = _sums(increments, coefficients, cut, backend)
    following = zero_where(cut, shifted(y))
    return y, _sums(tangents[0] + tangents[1] * following, coefficients, cut, backend)


def _plain(values: Array, increments: Array, coefficients: Array, cut: Array, backend: Backend) -> Array:
    return values + _sums(increments, coefficients, cut, backend)


def _packed(level: Array, coefficients: Array) -> Array:
    """The scan with the two numbers of a step as one complex number: there is one array for the loop to read, and,
    with the batch first, one to transpose for it."""
    pairs, start = jax.lax.complex(level, coefficients), jnp.zeros_like(level[0])
    return jax.lax.scan(lambda z, here: _step(z, here.real, here.imag), start, pairs, reverse=True)[1]


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _targets(values: Array, increments: Array, coefficients: Array, cut: Array, backend: Backend) -> Array:
    """`_plain`, on a CPU by a loop on the targets themselves, so that no pass over the arrays follows it.

    With `y = z - values`, `z[t] = level[t] + a[t] z[t+1]`. Two cores, V-trace, against `_plain`: 1.1 to 1.4 times
    faster with time first, 1.2 to 1.9 times with the batch first, from 128 steps by 256 sequences up.
    """
    if backend == "associative" or values.dtype not in (jnp.float32, jnp.float64):
        return _plain(values, increments, coefficients, cut, backend)
    level = values + increments - coefficients * zero_where(coefficients == 0, shifted(values))
    if backend == "scan":
        return _packed(level, coefficients)
    return jax.lax.platform_dependent(
        values,
        increments,
        coefficients,
        level,
        cpu=lambda v, b, a, level: _packed(level, a),
        default=lambda v, b, a, level: v + _associative(b, a),
    )


@_targets.defjvp
def _derivative_of_targets(backend, primals, tangents):
    return _targets(*primals, backend), jax.jvp(partial(_plain, backend=backend), primals, tangents)[1]


@partial(jax.jit, static_argnames="backend")
def backward(
    values: Float[Array, "T"],
    increments: Float[Array, "T"],
    coefficients: Float[Array, "T"],
    cut: Bool[Array, "T"],
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    """Computes `values + y`, where `y[t] = increments[t] + coefficients[t] y[t+1]` backwards from `y[T] = 0`.

    Where a coefficient is zero, nothing that follows is read, NaN included. `cut` marks the steps whose
    coefficient is zero for good (an episode ended, or was cut): the derivative with respect to that
    coefficient is zero, too, while for a coefficient that only happens to be zero it is `y[t+1]`.
    """
    dtype = jnp.result_type(values, increments, coefficients)
    values, increments, coefficients = (x.astype(dtype) for x in (values, increments, coefficients))
    return _targets(values, increments, coefficients, cut, backend)


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
