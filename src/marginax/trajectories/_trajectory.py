"""`Trajectory`, and the lookups that turn one and some tables into the arrays that targets take."""

from functools import reduce
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike


def _flags(value: Any) -> Any:
    """Flags that may come as 0 and 1, of which `~` would make -1 and -2."""
    return value.astype(bool) if hasattr(value, "astype") and value.dtype != bool else value


class Trajectory(eqx.Module):
    r"""Steps $(x_t, a_t, r_t)$ of one sequence `[T]`, or of a batch of sequences `[..., T]`; a pytree.

    A sequence may hold one episode, part of one, or several one after another. Episodes end in two ways that
    are told apart: a *terminal* step has discount 0; a *truncated* one was cut off by a time limit (or by the
    end of the data), and its successor is still worth something.

    Attributes:
        states: `x_t`, int32.
        actions: `a_t`, int32.
        rewards: `r_t`.
        discounts: γ, or 0 where step `t` ended the episode.
        next_states: `x_{t+1}`, int32, the true successor also where truncated; some valid index after a
            terminal step.
        truncated: whether the episode was cut off after step `t`; flags may be given as 0 and 1.
        behaviour: `μ(a_t|x_t)`, or None where unknown.
        valid: False for padding, which nothing may read.

    >>> one = jnp.ones(3)
    >>> steps = jnp.arange(3)
    >>> Trajectory(steps, steps, one, 0.9 * one, steps + 1, one < 0, one, one > 0).ends
    Array([False, False, False], dtype=bool)
    """

    states: Int[Array, "*batch T"] | Int[np.ndarray, "*batch T"]
    actions: Int[Array, "*batch T"] | Int[np.ndarray, "*batch T"]
    rewards: Float[Array, "*batch T"] | Float[np.ndarray, "*batch T"]
    discounts: Float[Array, "*batch T"] | Float[np.ndarray, "*batch T"]
    next_states: Int[Array, "*batch T"] | Int[np.ndarray, "*batch T"]
    truncated: Bool[Array, "*batch T"] | Bool[np.ndarray, "*batch T"] = eqx.field(converter=_flags)
    behaviour: Float[Array, "*batch T"] | Float[np.ndarray, "*batch T"] | None
    valid: Bool[Array, "*batch T"] | Bool[np.ndarray, "*batch T"] = eqx.field(converter=_flags)

    def __check_init__(self) -> None:
        shape = np.shape(self.states)
        for name, value in vars(self).items():
            if value is None and name != "behaviour":
                raise ValueError(f"{name} must be an array, got None")
            if value is not None and np.shape(value) != shape:
                raise ValueError(f"{name} must have the shape {shape} of states, got {np.shape(value)}")

    @property
    def ends(self) -> Array | np.ndarray:
        """Whether an episode ends with step `t`, by termination or truncation."""
        return ((self.discounts == 0) | self.truncated) & self.valid


def require_trajectory(value: Any) -> None:
    """Raises a `ValueError` for data that are no `Trajectory`, such as a list of episodes.

    >>> require_trajectory([{"observations": [0, 1]}])
    Traceback (most recent call last):
        ...
    ValueError: trajectories must be a Trajectory, which `sample` draws and `from_episodes` makes of episodes, got list
    """
    if not isinstance(value, Trajectory):
        raise ValueError(
            "trajectories must be a Trajectory, which `sample` draws and `from_episodes` makes of episodes, "
            f"got {type(value).__name__}"
        )


def look_up(table: ArrayLike, *indices: ArrayLike) -> Array:
    """`table[i, j, ...]`; NaN where an index lies outside of the table, where JAX would read another row."""
    table = jnp.asarray(table)
    table = table.astype(jnp.result_type(table, float))
    # In 8 bits the size of the table may be out of range itself.
    places = [i.astype(jnp.promote_types(i.dtype, jnp.int32)) for i in map(jnp.asarray, indices)]
    inside = [(i >= 0) & (i < n) for i, n in zip(places, table.shape, strict=True)]
    return jnp.where(reduce(jnp.logical_and, inside), table[tuple(places)], jnp.nan)


def _table(name: str, value: ArrayLike, *shapes: str) -> Array:
    """A table with as many axes as one of the shapes."""
    table = jnp.asarray(value)
    if table.ndim not in [shape.count(",") + 1 for shape in shapes] or 0 in table.shape:
        raise ValueError(f"{name} must have shape {' or '.join(shapes)}, got {table.shape}")
    return table


def gather(trajectory: Trajectory, q: ArrayLike, pi: ArrayLike) -> tuple[Array, Array]:
    r"""Looks up $Q(x_t,a_t)$ and $Q(x_{t+1},\pi) = \sum_a \pi(a|x_{t+1}) Q(x_{t+1},a)$ for every step.

    Args:
        trajectory: fields `[..., T]`.
        q: `[S, A]`.
        pi: `[S, A]`.

    Returns:
        `q` and `v_next` as `targets.multi_step` and `targets.marginalized` take them, each `[..., T]`; NaN for a state or action
        that the tables do not have.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> trajectory = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=3, horizon=5)
    >>> q, v_next = gather(trajectory, mdp.q_values(pi), pi)
    >>> q.shape
    (3, 5)
    """
    q, pi = _table("q", q, "[S, A]"), jnp.asarray(pi)
    if pi.shape != q.shape:
        raise ValueError(f"pi must have the shape {q.shape} of q, got {pi.shape}")
    here = look_up(q, trajectory.states, trajectory.actions)
    return here, look_up((q * pi).sum(axis=-1), trajectory.next_states)


def gather_states(trajectory: Trajectory, v: ArrayLike) -> tuple[Array, Array]:
    r"""Looks up $V(x_t)$ and $V(x_{t+1})$ for every step.

    Args:
        trajectory: fields `[..., T]`.
        v: `[S]`.

    Returns:
        `v` and `v_next` as `targets.vtrace` takes them, each `[..., T]`; NaN for a state that the table does not have.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> trajectory = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=3, horizon=5)
    >>> v, v_next = gather_states(trajectory, mdp.v_values(pi))
    >>> v_next.shape
    (3, 5)
    """
    v = _table("v", v, "[S]")
    return look_up(v, trajectory.states), look_up(v, trajectory.next_states)


def gather_pairs(trajectory: Trajectory, table: ArrayLike) -> Array:
    r"""Looks up a table of pairs at $(x_t, a_t)$ for every step: traces, ratios, weights of one start.

    Args:
        trajectory: fields `[..., T]`.
        table: `[S, A]`; or time-dependent traces `[H, S, A]`, where `table[h]` is the trace $c_{h+1}$ that
            meets step `h + 1` of the sequence, and zero thereafter. These count from the sequence's first
            step, so that a target made of them estimates the operator at that step only.

    Returns:
        `[..., T]`; NaN for a state or action that the table does not have.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> trajectory = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=3, horizon=5)
    >>> gather_pairs(trajectory, mx.traces.retrace(pi, mu)).shape
    (3, 5)
    """
    table = _table("table", table, "[S, A]", "[H, S, A]")
    if table.ndim == 2:
        return look_up(table, trajectory.states, trajectory.actions)
    steps = jnp.arange(trajectory.states.shape[-1])
    horizon = table.shape[0]
    traces = look_up(table, jnp.clip(steps - 1, 0, horizon - 1), trajectory.states, trajectory.actions)
    return jnp.where(steps <= horizon, traces, 0)


def gather_weights(trajectory: Trajectory, weights: ArrayLike) -> Array:
    r"""Looks up TD weights between all steps, $w_{x_t,a_t}(x_s,a_s)$ or $w_{x_t}(x_s)$.

    Args:
        trajectory: fields `[..., T]`.
        weights: `[S, A, S, A]`, or for V-trace `[S, S]`.

    Returns:
        `[..., T, T]`, start `t` and step `s` at `[..., t, s]`, as `targets.marginalized` takes it; NaN for a state or action that
        the table does not have.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> trajectory = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=3, horizon=5)
    >>> gather_weights(trajectory, mx.weights.exact(mdp, mu, mx.traces.retrace(pi, mu))).shape
    (3, 5, 5)
    """
    w = _table("weights", weights, "[S, A, S, A]", "[S, S]")
    if w.shape[: w.ndim // 2] != w.shape[w.ndim // 2 :]:
        raise ValueError(f"weights must have shape [S, A, S, A] or [S, S], got {w.shape}")
    x, a = jnp.asarray(trajectory.states), jnp.asarray(trajectory.actions)
    if w.ndim == 2:
        return look_up(w, x[..., :, None], x[..., None, :])
    return look_up(w, x[..., :, None], a[..., :, None], x[..., None, :], a[..., None, :])
