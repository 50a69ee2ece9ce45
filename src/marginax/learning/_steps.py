"""One iteration of tabular learning: a target for every step of a trajectory, and a step towards each of them."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax import targets
from marginax.trajectories import Trajectory, gather, gather_pairs, gather_weights, require_trajectory
from marginax.weights import Estimator

Visits = Literal["each", "mean"]


class _Given(eqx.Module):
    """Known weights as an estimator."""

    w: Float[Array, "S A S A"]

    def update(self, trajectories: Trajectory, c: Array) -> "_Given":
        return self

    def weights(self, c: Array) -> Array:
        return self.w


def checked_table(name: str, value: ArrayLike, shape: Sequence[int]) -> Float[Array, "..."]:
    """A table as a JAX array; its numbers are checked unless JAX is tracing them."""
    if isinstance(value, jax.core.Tracer):
        checks.shaped(name, value.shape, shape)
    else:
        value = checks.array(name, value, shape)
    return jnp.asarray(value, jnp.result_type(float))


def checked_policy(name: str, value: ArrayLike) -> Float[Array, "S A"]:
    """A policy as a JAX array; its numbers are checked unless JAX is tracing them."""
    if isinstance(value, jax.core.Tracer):
        checks.shaped(name, value.shape, (None, None))
    else:
        value = checks.distribution(name, value, (None, None))
    return jnp.asarray(value, jnp.result_type(float))


def estimator_of(weights: Estimator | ArrayLike | None, shape: tuple[int, ...]) -> Estimator | None:
    """An estimator as it is, a table as one that never changes."""
    if isinstance(weights, type):  # it has the methods of an estimator, too
        raise ValueError(
            f"weights must be an estimator such as weights.MonteCarlo.init(S, A, discount), got the class {weights.__name__}"
        )
    if weights is None or isinstance(weights, Estimator):
        return weights
    return _Given(checked_table("weights", weights, shape * 2))


def check_estimator(estimator: Estimator | None, c: Float[Array, "S A"]) -> None:
    """Raises if an estimator gives anything but weights `[S, A, S, A]`: those of other tables, on states, or of one start.

    Only shapes are needed, so that this runs when the loop is compiled and later calls do not pay for it.
    """
    if estimator is None:
        return
    try:
        shape = jax.eval_shape(estimator.weights, c).shape
    except (TypeError, ValueError) as error:
        states, actions = c.shape
        raise ValueError(f"weights must be an estimator for {states} states and {actions} actions") from error
    checks.shaped("weights", shape, c.shape * 2)


def with_seeds(
    trajectories: Any, shape: tuple[int, ...], estimator: Estimator | None
) -> tuple[Trajectory, bool]:
    """Trajectories `[seeds, iterations, T]` with indices of 32 bits, and whether they came without the axis of seeds.

    States and actions are checked against tables `[S, A]`, rewards and discounts to be finite, and discounts to be 0 or that of the
    estimator, unless JAX is tracing them.
    """
    require_trajectory(trajectories)
    ndim = trajectories.states.ndim
    if ndim not in (2, 3):
        raise ValueError(
            f"trajectories must have fields [iterations, T] or [seeds, iterations, T], got {ndim} axes"
        )
    if not any(isinstance(field, jax.core.Tracer) for field in jax.tree.leaves(trajectories)):
        _check_stream(trajectories, shape, getattr(estimator, "discount", None))

    def with_axis(field: Array | np.ndarray) -> Array | np.ndarray:
        wide = field.astype(jnp.int32) if jnp.issubdtype(field.dtype, jnp.integer) else field
        return wide[None] if ndim == 2 else wide

    return jax.tree.map(with_axis, trajectories), ndim == 2


def _check_stream(trajectories: Trajectory, shape: tuple[int, ...], gamma: Any) -> None:
    """Raises for an index outside the tables, a reward or discount that is not finite, and a discount that is neither 0 nor γ.

    Padding is not read. γ may be unknown: None, or traced by JAX.
    """
    checks.steps(trajectories, *shape)
    valid = np.asarray(trajectories.valid)
    rewards, discounts = (
        np.where(valid, np.asarray(field), 0) for field in (trajectories.rewards, trajectories.discounts)
    )
    checks.finite("trajectories.rewards", rewards)
    checks.finite("trajectories.discounts", discounts)
    if gamma is None or isinstance(gamma, jax.core.Tracer):
        return
    other = np.argwhere((discounts != 0) & ~(abs(discounts - np.asarray(gamma)) <= 1e-6))
    if other.size:
        place = tuple(other[0])
        raise ValueError(
            f"weights were made for the discount {gamma:g}, but trajectories.discounts{checks.where(place)} = {discounts[place]:g}"
        )


class Progress(NamedTuple):
    """What learning carries from one trajectory to the next."""

    q: Float[Array, "S A"]
    estimator: Estimator | None
    """None for the multi-step operator."""
    w: Float[Array, "S A S A"] | None
    """The weights as they were last read off the estimator; None if that is done for every trajectory."""


def initial_progress(q: Float[Array, "S A"], estimator: Estimator | None, refresh: Array | None) -> Progress:
    """What learning begins with; weights are carried along only where `refresh` says for every trajectory whether they are read anew."""
    kept = estimator is not None and refresh is not None
    return Progress(q, estimator, jnp.zeros(q.shape * 2, q.dtype) if kept else None)


def learn_from(
    trajectory: Trajectory,
    before: Progress,
    pi: Float[Array, "S A"],
    c: Float[Array, "S A"],
    refresh: Array | None,
    step_size: Float[Array, ""],
    visits: Visits,
) -> Progress:
    """One iteration: the estimator takes in the trajectory, targets are computed, and Q moves towards them.

    Weights are read off the estimator anew where `refresh` says so; always if it is None.
    """
    q, estimator, w = before
    if estimator is None:
        goals = multi_step_targets(trajectory, q, pi, c)
    else:
        estimator = estimator.update(trajectory, c)
        if refresh is None:
            now_w = estimator.weights(c)
        else:
            # The flag is the same for all seeds, so that under vmap this stays a branch.
            now_w = w = jax.lax.cond(refresh, lambda e, w: e.weights(c), lambda e, w: w, estimator, w)
        goals = marginalized_targets(trajectory, q, pi, now_w)
    return Progress(move_towards(q, trajectory, goals, step_size, visits), estimator, w)


def multi_step_targets(
    trajectory: Trajectory, q: Float[Array, "S A"], pi: Float[Array, "S A"], c: Float[Array, "S A"]
) -> Float[Array, "T"]:
    """Trajectory-based estimates of `R^c Q` at every step."""
    here, v_next = gather(trajectory, q, pi)
    return targets.multi_step(
        here,
        v_next,
        trajectory.rewards,
        trajectory.discounts,
        gather_pairs(trajectory, c),
        trajectory.truncated,
        valid=trajectory.valid,
        backend="scan",
    )


def marginalized_targets(
    trajectory: Trajectory, q: Float[Array, "S A"], pi: Float[Array, "S A"], w: Float[Array, "S A S A"]
) -> Float[Array, "T"]:
    """Trajectory-based estimates of `M^w Q` at every step, `Q_t + Σ_{s≥t} γ^{s-t} w[x_t,a_t,x_s,a_s] Δ_s`.

    Short sequences look up a weight for every two steps. Where there are fewer pairs (x, a) than steps, the
    errors that follow step t are kept summed by the pair they occurred at, `g_t = Δ_t e_{x_t,a_t} + γ g_{t+1}`,
    so that the sum is `<w[x_t, a_t], g_t>`: work of steps times pairs instead of steps squared.
    """
    steps = trajectory.states.shape[-1]
    here, v_next = gather(trajectory, q, pi)
    if steps <= q.size:
        return targets.marginalized(
            here,
            v_next,
            trajectory.rewards,
            trajectory.discounts,
            gather_weights(trajectory, w),
            trajectory.truncated,
            valid=trajectory.valid,
        )
    # The one-step targets hold the errors; padding has none.
    one_step = targets.multi_step(
        here,
        v_next,
        trajectory.rewards,
        trajectory.discounts,
        0.0,
        trajectory.truncated,
        valid=trajectory.valid,
        backend="scan",
    )
    errors = jnp.where(trajectory.valid, one_step - here, 0)
    carry = jnp.where(trajectory.valid & ~trajectory.truncated, trajectory.discounts, 0)
    pair = trajectory.states * q.shape[1] + trajectory.actions
    rows = w.reshape(q.size, q.size)

    # `targets.recursion` with the vector g_t would do it, too, but writes all vectors down: 7 times slower on a CPU.
    def step(later: Array, now: tuple[Any, ...]) -> tuple[Array, Array]:
        pair, error, carry = now
        sums = (carry * later).at[pair].add(error)
        return sums, jnp.dot(rows[pair], sums)

    _, total = jax.lax.scan(step, jnp.zeros(q.size, q.dtype), (pair, errors, carry), reverse=True)
    return jnp.where(trajectory.valid, here + total, 0)


def move_towards(
    q: Float[Array, "S A"],
    trajectory: Trajectory,
    goals: Float[Array, "T"],
    step_size: Float[Array, ""],
    visits: Visits,
) -> Float[Array, "S A"]:
    """`Q(x_t,a_t) ← (1-α) Q(x_t,a_t) + α goal_t` for t = 0, 1, … in turn; a pair met k times moves k times.

    With `visits="mean"` it moves once, towards the mean of its goals.
    """
    pair = trajectory.states * q.shape[1] + trajectory.actions
    sizes = jnp.where(trajectory.valid, step_size, 0).astype(q.dtype)
    if visits == "mean":
        count = jnp.zeros(q.size, q.dtype).at[pair].add(trajectory.valid)
        errors = jnp.where(trajectory.valid, goals - q.reshape(-1)[pair], 0)
        total = jnp.zeros(q.size, q.dtype).at[pair].add(sizes * errors)
        return q + (total / jnp.maximum(count, 1)).reshape(q.shape)

    def step(values: Array, now: tuple[Any, ...]) -> tuple[Array, None]:
        pair, goal, size = now
        return values.at[pair].add(size * (goal - values[pair])), None

    values, _ = jax.lax.scan(step, q.reshape(-1), (pair, goals, sizes))
    return values.reshape(q.shape)
