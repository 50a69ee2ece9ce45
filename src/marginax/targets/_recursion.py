"""The two sums that targets are made of: one backward recursion, and a form for weights that know the start.

The recursion is `y[t] = b[t] + a[t] y[t+1]`. A loop is best on a CPU, where the work is what costs (`_loop.py`); an
associative scan is best on an accelerator, where the number of steps in a row is.

On a CPU the best loop depends on where the batch lies. A function under `jax.vmap` cannot know; a primitive is told.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Bool, Float

from ._loop import shifted, step, targets_by_loop, zero_where

Backend = Literal["auto", "scan", "associative"]

# From the arrays of a sequence, entry by entry, to values, increments, coefficients and cuts (see `recursion`).
Form = Callable[..., tuple[Array, Array, Array, Array]]


def _scan(increments: Array, coefficients: Array, axis: int = 0) -> Array:
    def turn(following: Array, here: tuple[Array, Array]) -> tuple[Array, Array]:
        total = step(following, *here)
        return total, total

    b, a = (jnp.moveaxis(x, axis, 0) for x in (increments, coefficients))
    return jnp.moveaxis(jax.lax.scan(turn, jnp.zeros_like(b[0]), (b, a), reverse=True)[1], 0, axis)


def _join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
    b_later, a_later = later
    b, a = earlier
    closed = (a == 0) | (a_later == 0)
    return b + jnp.where(a == 0, 0, a * b_later), jnp.where(closed, 0, a * a_later)


def _associative(increments: Array, coefficients: Array, axis: int = 0) -> Array:
    return jax.lax.associative_scan(_join, (increments, coefficients), reverse=True, axis=axis)[0]


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


class _Plan(NamedTuple):
    """What is to be computed from the leaves of some arrays; see `recursion`."""

    form: Form
    tree: Any
    backend: Backend
    in_loop: bool

    def terms(self, *leaves: Array) -> tuple[Array, Array, Array, Array]:
        """What the form makes of the leaves, with all numbers of one type."""
        *numbers, cut = self.form(*jax.tree.unflatten(self.tree, leaves))
        values, increments, coefficients = (x.astype(jnp.result_type(*numbers)) for x in numbers)
        return values, increments, coefficients, cut

    def dtype(self, leaves: Any) -> Any:
        """The type of the targets."""
        return jax.eval_shape(self.terms, *(jax.ShapeDtypeStruct((), x.dtype) for x in leaves))[0].dtype


def _plain(plan: _Plan, *leaves: Array) -> Array:
    """What is computed, and what is differentiated: the recursion of one sequence."""
    values, increments, coefficients, cut = jnp.broadcast_arrays(*plan.terms(*leaves))
    return values + _sums(increments, coefficients, cut, plan.backend)


# The same for batches, as a primitive: time is the given axis of all leaves but scalars, all others are the batch.
_targets_p = Primitive("marginax_targets")


@_targets_p.def_abstract_eval
def _like_the_sequence(*leaves, plan: _Plan, axis: int):
    return max(leaves, key=lambda x: x.ndim).update(dtype=plan.dtype(leaves), weak_type=False)


@_targets_p.def_impl
def _on_accelerators(*leaves: Array, plan: _Plan, axis: int) -> Array:
    values, increments, coefficients, _ = jnp.broadcast_arrays(*plan.terms(*leaves))
    sums = _scan if plan.backend == "scan" else _associative
    return values + sums(increments, coefficients, axis)


def _on_cpu(*leaves: Array, plan: _Plan, axis: int) -> Array:
    dtype = plan.dtype(leaves)
    if dtype in (jnp.float32, jnp.float64):
        return targets_by_loop(lambda *x: plan.terms(*x)[:3], leaves, axis, dtype, plan.in_loop)
    return _on_accelerators(*leaves, plan=plan._replace(backend="scan"), axis=axis)


def _batched(leaves, places, *, plan: _Plan, axis: int):
    """All arrays get the new axis where the first of them has it; scalars that differ become arrays."""
    pairs = list(zip(leaves, places, strict=True))
    size = next(x.shape[place] for x, place in pairs if place is not None)
    at = next((place for x, place in pairs if place is not None and x.ndim > 1), 0)
    alone = (x.shape if place is None else (*x.shape[:place], *x.shape[place + 1 :]) for x, place in pairs)
    whole = list(max(alone, key=len))
    whole.insert(at, size)

    def placed(x, place):
        if place is None:
            return x if x.ndim == 0 else jnp.broadcast_to(jnp.expand_dims(x, at), whole)
        if x.ndim == 1:
            return jnp.broadcast_to(x.reshape([size if i == at else 1 for i in range(len(whole))]), whole)
        return jnp.moveaxis(x, place, at)

    leaves = [placed(x, place) for x, place in pairs]
    return _targets_p.bind(*leaves, plan=plan, axis=axis + (at <= axis)), at


batching.primitive_batchers[_targets_p] = _batched
mlir.register_lowering(_targets_p, mlir.lower_fun(_on_accelerators, multiple_results=False))
mlir.register_lowering(_targets_p, mlir.lower_fun(_on_cpu, multiple_results=False), platform="cpu")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _targets(plan: _Plan, *leaves: Array) -> Array:
    """`_plain`, by the primitive unless that would do the same."""
    return (
        _plain(plan, *leaves)
        if plan.backend == "associative"
        else _targets_p.bind(*leaves, plan=plan, axis=0)
    )


@_targets.defjvp
def _derivative_of_targets(plan, primals, tangents):
    return _targets(plan, *primals), jax.jvp(partial(_plain, plan), primals, tangents)[1]


@partial(jax.jit, static_argnames=("form", "backend", "in_loop"))
def recursion(form: Form, arrays: Any, backend: Backend = "auto", in_loop: bool = False) -> Float[Array, "T"]:
    """Computes `values + y`, where `y[t] = increments[t] + coefficients[t] y[t+1]` backwards from `y[T] = 0`.

    Args:
        form: takes the entries of `arrays`, each `[T]` or a scalar, and returns values, increments, coefficients and
            cuts. It may be called with any part of the arrays, so it must work entry by entry; and, being what programs
            are remembered by, it must be a function of a module.
        arrays: the arguments of `form`, a tuple of arrays or structures of arrays. One of them at least is `[T]`.
        backend: `scan`, `associative`, or `auto`: the first on CPU, the second on accelerators.
        in_loop: where a CPU forms the terms, in the loop or in one pass before it. The first is better for arrays that
            exist, the second for arrays that the program has yet to compute from others.

    Where a coefficient is zero, nothing that follows is read, NaN included. Cuts are the steps whose coefficient is
    zero for good (an episode ended, or was cut): the derivative with respect to that coefficient is zero, too, while
    for a coefficient that only happens to be zero it is `y[t+1]`.
    """
    leaves, tree = jax.tree.flatten(arrays)
    return _targets(_Plan(form, tree, backend, in_loop), *leaves)


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
