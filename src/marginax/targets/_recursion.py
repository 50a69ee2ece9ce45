"""The recursion that every target is made of, `y[t] = b[t] + a[t] y[t+1]`."""

from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks

from ._inputs import compiled

Backend = Literal["auto", "scan", "associative"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def zero_where(mask: Array, array: Array) -> Array:
    """`array` with zeros where `mask` is true.

    The zeros are made of the mask: with a constant, `jax.vmap` would move the batch to the front, and arrays with time
    first would be transposed twice.
    """
    return jnp.where(mask, (mask * 0).astype(array.dtype), array)


def shifted(array: Array) -> Array:
    """What `array` holds one step later; zero at the last step."""
    later = jax.lax.slice_in_dim(array, 1, None)
    return jax.lax.pad(later, jnp.zeros((), array.dtype), [(0, 1, 0)] + [(0, 0, 0)] * (array.ndim - 1))


def _scan(b: Array, a: Array, axis: int = 0) -> Array:
    """Step by step: best on a CPU, where the amount of work counts."""

    def step(following: Array, here: tuple[Array, Array]) -> tuple[Array, Array]:
        b, a = here
        y = b + a * zero_where(a == 0, following)
        return y, y

    b, a = (jnp.moveaxis(x, axis, 0) for x in (b, a))
    return jnp.moveaxis(jax.lax.scan(step, jnp.zeros_like(b[0]), (b, a), reverse=True)[1], 0, axis)


def _associative(b: Array, a: Array, axis: int = 0) -> Array:
    """In about 2 log₂ T rounds: best on an accelerator, where the number of steps in a row counts."""

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        (b_later, a_later), (b, a) = later, earlier
        return b + a * zero_where(a == 0, b_later), a * zero_where(a == 0, a_later)

    return jax.lax.associative_scan(join, (b, a), reverse=True, axis=axis)[0]


_BACKENDS = {"scan": _scan, "associative": _associative}

# The choice between the two, made when a program is compiled for a device. A primitive, because `jax.vmap` tells a
# primitive which axis is the batch's; `jax.lax.platform_dependent` would transpose batches with time first.
_recursion_p = Primitive("marginax_recursion")
_recursion_p.def_impl(_associative)
_recursion_p.def_abstract_eval(lambda b, a, axis: b)
mlir.register_lowering(_recursion_p, mlir.lower_fun(_associative, multiple_results=False))
mlir.register_lowering(_recursion_p, mlir.lower_fun(_scan, multiple_results=False), platform="cpu")


def _batched(operands: Any, dims: Any, *, axis: int) -> tuple[Array, int]:
    at = next(dim for dim in dims if dim is not None)
    size = next(x.shape[at] for x, dim in zip(operands, dims, strict=True) if dim == at)

    def placed(x: Array, dim: Any) -> Array:
        if dim is not None:
            return jnp.moveaxis(x, dim, at)
        return jnp.broadcast_to(jnp.expand_dims(x, at), (*x.shape[:at], size, *x.shape[at:]))

    arrays = [placed(x, dim) for x, dim in zip(operands, dims, strict=True)]
    return _recursion_p.bind(*arrays, axis=axis + (at <= axis)), at


batching.primitive_batchers[_recursion_p] = _batched


@partial(jax.custom_jvp, nondiff_argnums=(3,))
def _sums(b: Array, a: Array, cut: Array, backend: Backend) -> Array:
    if backend == "auto":
        return _recursion_p.bind(b, a, axis=0)
    return _BACKENDS[backend](b, a)


@_sums.defjvp
def _derivative_of_sums(backend, primals, tangents):
    b, a, cut = primals
    y = _sums(b, a, cut, backend)
    # dy[t] = (db[t] + da[t] y[t+1]) + a[t] dy[t+1]: the same recursion
    db = tangents[0] + tangents[1] * zero_where(cut, shifted(y))
    if backend == "auto":  # not the primitive, which has no transpose
        return y, jax.lax.platform_dependent(db, a, cpu=_scan, default=_associative)
    return y, _BACKENDS[backend](db, a)


@compiled
def recursion(
    b: ArrayLike,
    a: ArrayLike,
    cut: ArrayLike | None = None,
    backend: Backend = "auto",
) -> Float[Array, "T *vector"]:
    r"""Computes `y[t] = b[t] + a[t] y[t+1]` backwards from `y[T] = 0`.

    With $\hat\Delta_t = r_t + \gamma V(x_{t+1}) - Q(x_t,a_t)$, where `V(x)` is `Q(x, π)` and `v_next[t] = V(x_{t+1})`:

    | target                            | b[t]                              | a[t]       | times read            |
    |-----------------------------------|-----------------------------------|------------|-----------------------|
    | `multi_step`: Q + y               | Δ[t]                              | γ c[t+1]   | c: 1 to T-1           |
    | `marginalized`, weights [T]: Q + y | w[t] Δ[t]                        | γ          | w: 0 to T-1           |
    | `marginalized`, [T, T]: Q + ⟨w[t], y⟩ | Δ[t] e_t, a vector            | γ          | w[t, s]: t ≤ s ≤ T-1  |
    | `vtrace`: V + y                   | ρ[t] (r[t] + γ v_next[t] - V[t])  | γ c[t]     | c: 0 to T-2, ρ: 0 to T-1 |
    | `peng`: y                         | r[t] + γ (1 - c[t+1]) v_next[t]   | γ c[t+1]   | c: 1 to T-1           |

    Everywhere `a[t] = 0` if step `t` ends the episode, is truncated or is last in the array (for `peng`, `c[t+1] = 0` there); Q, V,
    `v_next` and `r` are read at times 0 to T-1. In an array of several episodes these ranges hold for each of them.
    With random times `b[t]` is divided by 1-γ where step `t` is a stop and 0 elsewhere, and `a[t]` is 0 where step `t` is a stop
    and has no γ elsewhere.

    Args:
        b: `[T]`, or `[T, ...]` if `y[t]` is an array.
        a: the same shape, or sizes of 1 instead. Where it is zero nothing that follows is read, not even NaN.
        cut: the steps at which `a` is zero for good, because an episode ended there: the derivative with respect to
            such an `a[t]` is zero. At any other zero it is `y[t+1]`.
        backend: `scan`, `associative`, or `auto`: the first on CPU, the second on accelerators.

    Returns:
        y, of the shape of `b`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> recursion(jnp.array([1.0, 2.0, 4.0]), jnp.array([0.5, 0.0, 9.0]))
    Array([2., 2., 4.], dtype=float32)
    """
    checks.choice("backend", backend, BACKENDS)
    b, a = jnp.asarray(b), jnp.asarray(a)
    cut = jnp.zeros_like(a, bool) if cut is None else jnp.asarray(cut, bool)
    if b.ndim == 0 or b.shape[0] == 0:
        raise ValueError(f"b must have at least one step, but has shape {b.shape}.")
    for name, array in (("a", a), ("cut", cut)):
        fits = array.ndim == b.ndim and array.shape[0] == b.shape[0]
        if not fits or any(n not in (1, m) for n, m in zip(array.shape, b.shape, strict=True)):
            raise ValueError(
                f"{name} must have the shape {b.shape} of b, or sizes of 1 after the first, but has shape {array.shape}."
            )
    dtype = jnp.result_type(b, a, float)
    return _sums(b.astype(dtype), a.astype(dtype), cut, backend)
