"""What every estimator reads from a batch of trajectories, padding put out of reach."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.trajectories import Trajectory, require_trajectory


@runtime_checkable
class Estimator(Protocol):
    """An estimator of TD weights that is updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    Traces are passed in each time, because in policy iteration they change with the policy.
    """

    def update(self, trajectories: Trajectory, c: Array) -> Any:
        """The estimator after more trajectories, fields `[..., T]`, with traces `c[S, A]`."""

    def weights(self, c: Array) -> Array:
        """The estimate of the TD weights of traces `c[S, A]`: `w[S, A, S, A]`."""


class Steps(NamedTuple):
    """The steps of a batch ``[B, T]``; indices are 0 and flags False where there is padding."""

    states: Int[Array, "B T"]
    actions: Int[Array, "B T"]
    next_states: Int[Array, "B T"]
    valid: Bool[Array, "B T"]
    arrives: Bool[Array, "B T"]
    """Whether the step has a successor: it did not end its episode."""
    follows: Bool[Array, "B T"]
    """Whether the next step of the array continues the same episode."""


def read_steps(trajectories: Trajectory) -> Steps:
    """Reads a batch ``[..., T]`` (or one sequence ``[T]``) as ``[B, T]``; works under ``jit``."""
    require_trajectory(trajectories)

    def rows(field: Array | np.ndarray) -> Array:
        return jnp.asarray(field).reshape(-1, field.shape[-1])

    def indices(kept: Array, name: str) -> Array:
        field = getattr(trajectories, name)
        if field.dtype.kind not in "iu":
            raise ValueError(f"trajectories.{name} must be whole numbers, got {field.dtype}")
        # The number of a pair may need more than 8 bits.
        return jnp.where(kept, rows(field).astype(jnp.int32), 0)

    valid = rows(trajectories.valid)
    arrives = valid & (rows(trajectories.discounts) != 0)
    next_valid = jnp.concatenate([valid[:, 1:], jnp.zeros_like(valid[:, :1])], axis=1)
    return Steps(
        states=indices(valid, "states"),
        actions=indices(valid, "actions"),
        next_states=indices(arrives, "next_states"),
        valid=valid,
        arrives=arrives,
        follows=arrives & ~rows(trajectories.truncated) & next_valid,
    )


def traces_along(steps: Steps, c: Float[Array, "S A"]) -> Float[Array, "B T"]:
    """``c(x_t, a_t)`` of every step; all NaN if a step lies outside of the table, which cannot be refused under ``jit``."""
    num_states, num_actions = c.shape
    sizes = ((steps.states, num_states), (steps.next_states, num_states), (steps.actions, num_actions))
    outside = [((index < 0) | (index >= size)).any() for index, size in sizes]
    return jnp.where(jnp.stack(outside).any(), jnp.nan, c[steps.states, steps.actions])


class Links(NamedTuple):
    """The steps of a batch ``[B, T]`` as starts and as visits, and what joins each to the one after it.

    Sums over all later visits of all starts are one backward pass, ``tail_t = lead_t 1{visit_t} + factor_t tail_{t+1}``.
    """

    steps: Steps
    traces: Float[Array, "B T"]
    """``c(x_t, a_t)``."""
    start: Int[Array, "B T"]
    """The pair (or state) of the step."""
    visit: Int[Array, "B T"]
    """What the step visits: its pair or state; for weights of paths the state that it arrives in."""
    lead: Float[Array, "B T"]
    """The discount of that visit: 1; for arrivals γ, or 0 where the episode ends."""
    discounted: Float[Array, "B T"]
    """γ where the episode goes on, else 0."""
    traced: Float[Array, "B T"]
    """The same times the trace of the step: ``c_{t+1}`` for pairs and arrivals, ``c_t`` on states."""


def link_steps(
    trajectories: Trajectory, c: ArrayLike, discount: Array, shape: tuple[int, ...], paths: bool = False
) -> Links:
    """Reads what sums over starts and later visits need, for an estimator of shape ``(S, A)`` or ``(S,)``; works under ``jit``."""
    steps, table, on_states = read_steps(trajectories), table_of(c, shape, discount.dtype), len(shape) == 1
    traces = traces_along(steps, table)
    discounted = jnp.where(steps.follows, discount, 0)
    start = steps.states if on_states else steps.states * table.shape[1] + steps.actions
    return Links(
        steps=steps,
        traces=traces,
        start=start,
        visit=steps.next_states if paths else start,
        lead=jnp.where(steps.arrives, discount, 0) if paths else jnp.ones_like(discounted),
        discounted=discounted,
        traced=discounted * (traces if on_states else jnp.roll(traces, -1, axis=1)),
    )


def table_of(c: ArrayLike | None, shape: tuple[int, ...], dtype: Any) -> Float[Array, "S A"]:
    """Traces as an estimator of shape ``(S, A)`` or ``(S,)`` reads them; works under ``jit``."""
    if c is None:
        raise ValueError("c is needed: the traces [S, A] that the weights are those of")
    table = jnp.asarray(c if isinstance(c, jax.core.Tracer) else traces_of(c), dtype)
    checks.shaped("c", table.shape, shape if len(shape) == 2 else (*shape, None))
    return table


def traces_of(c: ArrayLike) -> FloatArray:
    """Returns traces as a float64 table ``[S, A]``, none negative."""
    table = checks.array("c", c, (None, None))
    checks.non_negative("c", table)
    return table


def features_of(name: str, value: ArrayLike, shape: tuple[int | None, ...]) -> FloatArray:
    """Returns features ``[*shape, k]`` as a float64 array; k is at least 1."""
    features = checks.array(name, value, (*shape, None))
    if not features.shape[-1]:
        raise ValueError(f"{name} must have at least one column, got shape {features.shape}")
    return features


def discount_of(trajectories: Trajectory, discount: float | None, num_states: int, num_actions: int) -> float:
    """Checks a batch against the size of the tables, and returns its discount.

    It is the one value that the discounts of the batch have apart from the zeros; ``discount``, where given, must agree.
    """
    require_trajectory(trajectories)
    given = None if discount is None else checks.discount(discount)
    valid = np.asarray(trajectories.valid)
    if valid.ndim < 1 or not valid.any():
        raise ValueError(f"trajectories must hold at least one valid step, got shape {valid.shape}")
    checks.steps(trajectories, num_states, num_actions)
    held = np.asarray(trajectories.discounts)
    discounts = held.astype(np.float64)
    alive = valid & (discounts != 0)
    if not alive.any():
        return 0.0 if given is None else given
    checks.finite("trajectories.discounts", np.where(alive, discounts, 0.0))
    least, most = discounts[alive].min(), discounts[alive].max()
    if not most - least <= 1e-6:
        raise ValueError(
            f"trajectories.discounts must be 0 or one value, but they hold both {least} and {most}"
        )
    if given is None:
        meant = float(most) if held.dtype == np.float64 else _shortest(most)
        return checks.discount(meant, "trajectories.discounts")
    if abs(given - most) > 1e-6:
        raise ValueError(f"discount = {given} but trajectories.discounts hold {most}")
    return given


def _shortest(value: float) -> float:
    """The decimal that was meant: 0.99 for the single-precision 0.9900000095."""
    return float(str(np.float32(value)))


def fixed_discount(discount: ArrayLike | float) -> Float[Array, ""]:
    """The discount of an incremental estimator, checked unless JAX is tracing it."""
    traced = isinstance(discount, jax.core.Tracer)
    return jnp.asarray(discount if traced else checks.discount(discount), jnp.result_type(float))


def fixed_behaviour(mu: ArrayLike | None, num_states: int, num_actions: int) -> Float[Array, "S A"] | None:
    """The behaviour policy of an incremental estimator, if it has one, checked unless JAX is tracing it."""
    if mu is None:
        return None
    table = mu if isinstance(mu, jax.core.Tracer) else checks.policy("mu", mu, num_states, num_actions)
    return jnp.asarray(table, jnp.result_type(float))


def start_of(
    start: tuple[int, int] | int | None, num_states: int, num_actions: int, on_states: bool
) -> tuple[int, int] | int | None:
    """Checks a start: a pair, or a state for weights on states."""
    if start is None:
        return None
    if on_states:
        return checks.index("start", start, num_states)
    return checks.pair("start", start, num_states, num_actions)


def row_of(
    start: tuple[int, int] | int | None, num_states: int, num_actions: int, on_states: bool
) -> int | None:
    """The row of a start in a table of all pairs or states; None if all rows are wanted."""
    start = start_of(start, num_states, num_actions, on_states)
    return start[0] * num_actions + start[1] if isinstance(start, tuple) else start


def estimate(
    make: Callable[..., Any], trajectories: Trajectory, c: ArrayLike, discount: float | None
) -> Array:
    """The weights of a fresh estimator `make(S, A, γ)` after a batch of trajectories, checked before anything is computed."""
    traces = traces_of(c)
    gamma = discount_of(trajectories, discount, *traces.shape)
    return _updated_weights(make(*traces.shape, gamma), trajectories, jnp.asarray(traces))


@eqx.filter_jit
def _updated_weights(estimator: Any, trajectories: Trajectory, c: Array) -> Array:
    return estimator.update(trajectories, c).weights(c)


def divide(numerator: Array, denominator: Array) -> Array:
    """Entry by entry; zero where nothing was met, NaN where that is not known."""
    empty = denominator <= 0
    return jnp.where(empty, 0, numerator / jnp.where(empty, 1, denominator))


def eliminate(system: Float[Array, "k k_and_one"]) -> Float[Array, "k"]:
    """Solves ``A x = b`` given as ``[A | b]`` by Gauss-Jordan elimination, for A that needs no pivoting.

    `vmap` and any device take it well. (LAPACK's solver inside a loop can block XLA's few threads on a CPU for good.)
    """

    def step(i: Array, system: Array) -> Array:
        row = system[i] / system[i, i]
        return (system - system[:, i][:, None] * row).at[i].set(row)

    k = system.shape[0]
    return jax.lax.fori_loop(0, k, step, system)[:, k]


def rows_of(links: Links, rows: int, start: int | None) -> Int[Array, "B T"]:
    """The row that each step is a start of, in a table of all starts or of one; out of range if there is none."""
    counted = links.steps.valid if start is None else links.steps.valid & (links.start == start)
    return jnp.where(counted, links.start if start is None else 0, rows)


def count_starts(links: Links, row: Int[Array, "B T"], rows: int, num_places: int) -> Float[Array, "2 rows"]:
    """How often each row was a start, and the sum of its returns: discounted later visits of the start in the same episode.

    If a start is visited again k steps later, its returns are ``γ^k (1 + returns from there)``: one look-up per step.
    """
    batch, length = links.start.shape
    gamma = jnp.max(links.discounted)
    sequence = jnp.arange(batch)

    def step(carry: Any, now: Any) -> tuple[Any, Array]:
        returns, when, last = carry
        time, pair, valid, follows = now
        last = jnp.where(follows, last, time)  # the last step of the episode
        gap = when[sequence, pair] - time
        again = jnp.where(
            when[sequence, pair] <= last, gamma ** gap.astype(gamma.dtype) * (1 + returns[sequence, pair]), 0
        )
        pair = jnp.where(valid, pair, num_places)  # JAX drops writes out of range, here those of padding
        carry = returns.at[sequence, pair].set(again), when.at[sequence, pair].set(time), last
        return carry, again

    carry = (
        jnp.zeros((batch, num_places), gamma.dtype),
        jnp.full((batch, num_places), length),
        jnp.full(batch, length - 1),
    )
    now = (jnp.arange(length), links.start.T, links.steps.valid.T, links.steps.follows.T)
    _, returns = jax.lax.scan(step, carry, now, reverse=True)
    total = jnp.zeros((2, rows), gamma.dtype)
    return total.at[:, row].add(jnp.stack([jnp.ones(row.shape), returns.T]))


def assemble(
    paths: Float[Array, "rows S"], c: Float[Array, "S A"], visits: Float[Array, "2 rows"], start: int | None
) -> Float[Array, "rows SA"]:
    """Weights ``u c`` of learned paths; at the start itself, the mean of 1 at time 0 and of ``u c`` at its returns.

    Args:
        paths: u of each start.
        c: traces.
        visits: from `count_starts`.
        start: the pair of the only row; all pairs in order if None.
    """
    weights = (paths[:, :, None] * c).reshape(len(paths), -1)
    row = jnp.arange(len(paths))
    pair = row if start is None else jnp.full_like(row, start)
    starts, returns = visits
    return weights.at[row, pair].set(divide(starts + returns * weights[row, pair], starts + returns))
