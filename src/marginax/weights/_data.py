"""What every estimator reads from a batch of trajectories, padding put out of reach."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.trajectories import Trajectory

__all__ = ["Links", "Steps", "discount_of", "link_steps", "read_steps", "start_of", "traces_of"]


class Steps(NamedTuple):
    """The steps of a batch ``[B, T]``; indices are 0 and flags False where there is padding."""

    states: Int[Array, "B T"]
    actions: Int[Array, "B T"]
    next_states: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    ended: Bool[Array, "B T"]
    """Whether the step ended its episode (discount 0): no successor."""
    follows: Bool[Array, "B T"]
    """Whether the next step of the array continues the same episode."""


def read_steps(trajectories: Trajectory) -> Steps:
    """Reads a batch ``[..., T]`` (or one sequence ``[T]``) as ``[B, T]``; works under ``jit``."""

    def rows(field: Array | np.ndarray) -> Array:
        return jnp.asarray(field).reshape(-1, field.shape[-1])

    valid = rows(trajectories.valid)
    ended = valid & (rows(trajectories.discounts) == 0)
    goes_on = valid & ~ended & ~(rows(trajectories.truncated) & valid)
    next_valid = jnp.concatenate([valid[:, 1:], jnp.zeros_like(valid[:, :1])], axis=1)
    return Steps(
        states=jnp.where(valid, rows(trajectories.states), 0),
        actions=jnp.where(valid, rows(trajectories.actions), 0),
        next_states=jnp.where(valid & ~ended, rows(trajectories.next_states), 0),
        valid=valid,
        ended=ended,
        follows=goes_on & next_valid,
    )


class Links(NamedTuple):
    """The steps of a batch ``[B, T]`` as places (pairs or states), and what joins each to the one after it."""

    place: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    follows: Bool[Array, "B T"]
    discounted: Float[Array, "B T"]
    """γ where the episode goes on, else 0."""
    traced: Float[Array, "B T"]
    """The same times the trace of the step: ``c_{t+1}`` on pairs, ``c_t`` on states."""


def link_steps(trajectories: Trajectory, c: ArrayLike, discount: Array, on_states: bool) -> Links:
    """Reads what sums over starts and later visits need; works under ``jit``."""
    steps, table = read_steps(trajectories), jnp.asarray(c, discount.dtype)
    traces = table[steps.states, steps.actions]
    discounted = jnp.where(steps.follows, discount, 0)
    return Links(
        place=steps.states if on_states else steps.states * table.shape[1] + steps.actions,
        valid=steps.valid,
        follows=steps.follows,
        discounted=discounted,
        traced=discounted * (traces if on_states else jnp.roll(traces, -1, axis=1)),
    )


def traces_of(c: ArrayLike) -> FloatArray:
    """Returns traces as a float64 table ``[S, A]``, none negative."""
    table = checks.array("c", c, (None, None))
    checks.non_negative("c", table)
    return table


def discount_of(trajectories: Trajectory, discount: float | None, num_states: int, num_actions: int) -> float:
    """Checks a batch against the size of the tables, and returns its discount.

    It is the one value that the discounts of the batch have apart from the zeros; ``discount``, where given, must agree.
    """
    valid = np.asarray(trajectories.valid)
    if valid.ndim < 1 or not valid.any():
        raise ValueError(f"trajectories must hold at least one valid step, got shape {valid.shape}")
    for name, size in (("states", num_states), ("actions", num_actions)):
        _indices(name, np.asarray(getattr(trajectories, name)), valid, size)
    discounts = np.asarray(trajectories.discounts, dtype=np.float64)
    alive = valid & (discounts != 0)
    _indices("next_states", np.asarray(trajectories.next_states), alive, num_states)
    if not alive.any():
        return checks.discount(0.0 if discount is None else discount)
    least, most = discounts[alive].min(), discounts[alive].max()
    if not most - least <= 1e-6:
        raise ValueError(
            f"trajectories.discounts must be 0 or one value, but they hold both {least} and {most}"
        )
    if discount is None:
        return checks.discount(_shortest(most), "trajectories.discounts")
    if abs(discount - most) > 1e-6:
        raise ValueError(f"discount = {discount} but trajectories.discounts hold {most}")
    return checks.discount(discount)


def _shortest(value: float) -> float:
    """The decimal that was meant: 0.99 for the single-precision 0.9900000095."""
    return float(str(np.float32(value)))


def _indices(name: str, values: np.ndarray, where: np.ndarray, size: int) -> None:
    bad = where & ((values < 0) | (values >= size))
    if bad.any():
        place = np.argwhere(bad)[0]
        raise ValueError(
            f"trajectories.{name} must lie in range({size}), but {name}{checks.where(place)} = {values[tuple(place)]}"
        )


def start_of(
    start: tuple[int, int] | int | None, num_states: int, num_actions: int, on_states: bool
) -> tuple[int, int] | int | None:
    """Checks a start: a pair, or a state for weights on states."""
    if start is None:
        return None
    if on_states:
        return checks.index("start", start, num_states)
    try:
        state, action = start  # type: ignore[misc]
    except TypeError:
        raise ValueError(f"start must be a pair (state, action), got {start!r}") from None
    return checks.index("start[0]", state, num_states), checks.index("start[1]", action, num_actions)
