"""What targets take: checked arrays, and from policies and action values the values of the actions taken, means and traces."""

import inspect
from collections.abc import Callable
from functools import reduce, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax.traces import clip_log_ratios

F = TypeVar("F", bound=Callable[..., Any])
FEW = 16  # actions up to which a choice or a sum written out beats indexing and reduction, on a CPU by far


def real_array(name: str, value: Any) -> Array:
    """Returns `value` as a JAX array of real numbers or flags; raises for anything else, by name."""
    try:
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        is_real = jnp.isdtype(array.dtype, ("bool", "integral", "real floating"))
    except (TypeError, ValueError, OverflowError):
        is_real = False
    if not is_real:
        kind = f" of {value.dtype}" if hasattr(value, "dtype") else ""
        got = "None" if value is None else type(value).__name__ + kind
        raise ValueError(f"{name} must be an array of real numbers, got {got}")
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        wrong = value != value.astype(array.dtype)
        if wrong.any():
            raise ValueError(f"{name} must fit into {array.dtype}, got {value[wrong][0]}")
    return array


def compiled(function: F) -> F:
    """`jax.jit` with the options held static.

    Arguments are made arrays first: of a list, `jax.jit` would make one argument for each entry.
    """
    signature = inspect.signature(function)
    options = {"steps", "stop_gradient", "backend"}.intersection(signature.parameters)
    program = jax.jit(function, static_argnames=tuple(options))

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        for name, value in given.items():
            omitted = value is None and signature.parameters[name].default is None
            if not omitted and name not in {*options, "times"}:
                given[name] = real_array(name, value)
        return program(**given)

    return call  # type: ignore[return-value]


def _column(table: Array, action: int) -> Array:
    """`table[..., action]`, as a sum over one action: `jax.vmap` keeps the batch where it is through that, but
    through indexing it moves the batch to the front, and arrays with time first would be transposed."""
    return jax.lax.slice_in_dim(table, action, action + 1, axis=-1).sum(axis=-1, dtype=table.dtype)


def _table(name: str, value: ArrayLike) -> Array:
    table = real_array(name, value)
    if table.ndim == 0 or table.shape[-1] == 0:
        raise ValueError(f"{name} must have shape [..., A] with A >= 1, got {table.shape}")
    return table


def select_actions(table: ArrayLike, actions: ArrayLike) -> Float[Array, "..."]:
    r"""Looks up `table[t, a_t]`, for example $Q(x_t, a_t)$ or $\pi(a_t|x_t)$.

    Args:
        table: `[..., A]`.
        actions: integers in `[0, A)` of any type, `[...]`.

    Returns:
        `[...]`; NaN where an action is out of range.

    Raises:
        ValueError: if the shapes do not agree, or actions are not whole numbers.

    >>> select_actions(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0]))
    Array([2., 3.], dtype=float32)
    """
    table, actions = _table("table", table), real_array("actions", actions)
    if jnp.issubdtype(actions.dtype, jnp.inexact):
        raise ValueError(f"actions must be whole numbers, got {actions.dtype}")
    # In 8 bits the number of actions may be out of range itself.
    actions = actions.astype(jnp.promote_types(actions.dtype, jnp.int32))
    if table.shape[:-1] != actions.shape:
        raise ValueError(
            f"actions must have shape {table.shape[:-1]}, that of table's steps, got {actions.shape}"
        )
    count, nowhere = table.shape[-1], (actions * 0).astype(jnp.result_type(table, float)) + jnp.nan
    if count > FEW:
        found = jnp.take_along_axis(table, actions[..., None], axis=-1)[..., 0]
        return jnp.where((actions >= 0) & (actions < count), found, nowhere)
    return reduce(lambda found, a: jnp.where(actions == a, _column(table, a), found), range(count), nowhere)


def expectation(table: ArrayLike, policy: ArrayLike) -> Float[Array, "..."]:
    r"""Averages over a policy's actions, $\sum_a \pi(a|x_t)\, Q(x_t,a)$.

    Args:
        table: `[..., A]`.
        policy: `[..., A]`.

    Returns:
        `[...]`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> expectation(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]]))
    Array([1.5, 3. ], dtype=float32)
    """
    table, policy = _table("table", table), real_array("policy", policy)
    if table.shape != policy.shape:
        raise ValueError(f"policy must have table's shape {table.shape}, got {policy.shape}")
    if table.shape[-1] > FEW:
        return (table * policy).sum(axis=-1)
    return reduce(jnp.add, [_column(table, a) * _column(policy, a) for a in range(table.shape[-1])])


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
        ValueError: if the shapes do not agree, or a clip, decay or temperature that JAX is not tracing is out of range.

    >>> traces_from_log_ratios(jnp.array([0.0, 500.0, -jnp.inf]), jnp.array([0.0, -500.0, 0.0]), decay=0.5)
    Array([0.5, 0.5, 0. ], dtype=float32)
    """
    given = {"log_pi": log_pi, "log_mu": log_mu, "clip": clip, "decay": decay, "temperature": temperature}
    arrays = {name: real_array(name, value) for name, value in given.items()}
    shape: tuple[int, ...] = ()
    for name, array in arrays.items():
        try:
            shape = jnp.broadcast_shapes(shape, array.shape)
        except ValueError:
            raise ValueError(f"{name} must fit the shape {shape}, got {array.shape}") from None
    for name, allowed in (("clip", "at least 0"), ("decay", "at least 0"), ("temperature", "positive")):
        if not isinstance(given[name], jax.core.Tracer):
            values = np.asarray(given[name])
            bad = ~(values > 0 if allowed == "positive" else values >= 0)
            if bad.any():
                raise ValueError(f"{name} must be {allowed}, got {values[bad][0]}")
    dtype = jnp.result_type(arrays["log_pi"], arrays["log_mu"], float)
    log_pi, log_mu, clip, decay, temperature = (array.astype(dtype) for array in arrays.values())
    impossible = log_pi == -jnp.inf
    alike = (log_pi == log_mu) & ~impossible
    largest = 0.99 * jnp.log(jnp.finfo(dtype).max)  # a logarithm that the exponential survives
    far = jnp.sqrt(jnp.finfo(dtype).max)  # stands for infinity, times which a derivative of zero is zero
    difference = jnp.clip(jnp.where(alike | impossible, 0, log_pi - log_mu), -far, far)
    powers = jnp.minimum(temperature * difference, largest)
    c = clip_log_ratios(powers, clip, decay)
    return jnp.where(impossible, 0, c)
