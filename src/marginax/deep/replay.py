"""A replay buffer of transitions on the device, from which sequences are drawn.

Transition number `i` (counted from the start of the run) lies in row `i % capacity`; of E environments that are
played side by side, number `i` belongs to environment `i % E`. A sequence starts at a
stored transition, each equally likely, and goes on until it has the asked length, or its episode ends, or the
newest transition is reached, whichever comes first; what remains of its length is padding (`valid` False).
So terminal steps, and the last steps of an episode, are starts like any other, and no sequence crosses an
episode's end or the ring's write head.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marginax.deep.config import AgentConfig
from marginax.simulators.rollout import Transitions, row_width


class Sequences(eqx.Module):
    """A batch of sequences; every field is `[T, batch, ...]`, time first.

    Attributes:
        observations: x_t.
        actions: a_t as it was drawn, before it was clipped to [-1, 1].
        rewards: r_t.
        terminal: Whether step t ended the episode.
        truncated: Whether the sequence goes no further than step t although the episode does: the time limit,
            the newest transition, or the sequence's own length.
        log_behaviour: log μ(a_t|x_t), the density that drew the action.
        next_observations: x_{t+1}, also where the episode ended.
        valid: False for padding, whose other fields are arbitrary.
    """

    observations: Float[Array, "*batch n"]
    actions: Float[Array, "*batch m"]
    rewards: Float[Array, "*batch"]
    terminal: Bool[Array, "*batch"]
    truncated: Bool[Array, "*batch"]
    log_behaviour: Float[Array, "*batch"]
    next_observations: Float[Array, "*batch n"]
    valid: Bool[Array, "*batch"]

    def discounts(self, discount: float) -> Float[Array, "*batch"]:
        """γ, or 0 where step t ended the episode."""
        return jnp.where(self.terminal, 0.0, discount)


class Replay(eqx.Module):
    """A ring of transitions, one packed row each.

    Attributes:
        rows: `[capacity, width]`, packed as `marginax.simulators.Transitions` has them.
        added: Transitions added since the start, those overwritten included.
        observation_size: Length of an observation.
    """

    rows: Float[Array, "capacity width"]
    added: Int[Array, ""]
    observation_size: int = eqx.field(static=True)


def empty(capacity: int, observation_size: int, action_size: int) -> Replay:
    """A buffer without transitions.

    >>> empty(8, 3, 2).rows.shape
    (8, 12)
    """
    rows = jnp.zeros((capacity, row_width(observation_size, action_size)))
    return Replay(rows, jnp.zeros((), jnp.int32), observation_size)


def pack(observations, actions, rewards, terminal, truncated, log_behaviour, next_observations) -> np.ndarray:
    """Transitions as rows of the buffer, from arrays (or lists) with one entry per transition.

    >>> pack([[0.0]], [[0.5]], [1.0], [False], [True], [-0.7], [[0.1]])
    array([[ 0. ,  0.5,  1. ,  0. ,  1. , -0.7,  0.1]], dtype=float32)
    """
    first, second = np.asarray(observations, np.float32), np.asarray(actions, np.float32)
    rows = np.zeros((len(first), row_width(first.shape[1], second.shape[1])), np.float32)
    columns = Transitions(rows, first.shape[1])
    columns.observations[:], columns.actions[:], columns.rewards[:] = first, second, rewards
    columns.terminated[:], columns.truncated[:] = terminal, truncated
    columns.log_behaviour[:], columns.next_observations[:] = log_behaviour, next_observations
    return rows


def add(buffer: Replay, rows: Float[Array | np.ndarray, "n width"]) -> Replay:
    """The buffer with new transitions; the oldest make way. Jit it with the buffer donated: then nothing is copied.

    >>> int(add(empty(4, 1, 1), np.zeros((3, 7), np.float32)).added)
    3
    """
    capacity = buffer.rows.shape[0]
    if len(rows) > capacity:
        raise ValueError(f"rows has {len(rows)} transitions, more than the buffer's {capacity}.")
    where = (buffer.added + jnp.arange(len(rows))) % capacity
    added = buffer.added + len(rows)
    return Replay(buffer.rows.at[where].set(rows), added, buffer.observation_size)


def sample(
    buffer: Replay,
    key: Array,
    *,
    batch: int,
    length: int,
    environments: int = 1,
    newest: int | None = None,
    time_limits_end: bool = False,
) -> Sequences:
    """Draw sequences whose starts are uniform over the stored transitions.

    Args:
        buffer: A buffer with at least one transition.
        key: A JAX random key.
        batch: Number of sequences.
        length: Their length T, padding included.
        environments: Simulators whose transitions are stored in turn: a sequence stays in one of them.
        newest: Draw only from this number of starts: the last ones that have all their steps stored.
        time_limits_end: Whether a time limit counts as the end of an episode, after which nothing is earned.

    Returns:
        Sequences with fields `[length, batch, ...]`.

    >>> rows = pack([[0.0], [1.0]], [[0.0], [0.0]], [0.0, 0.0], [False] * 2, [False] * 2, [0.0] * 2, [[1.0], [2.0]])
    >>> sample(add(empty(2, 1, 1), rows), jax.random.key(1), batch=1, length=2).observations.shape
    (2, 1, 1)
    """
    capacity = buffer.rows.shape[0]
    size = jnp.minimum(buffer.added, capacity)
    first, count = buffer.added - size, size
    if newest is not None:
        count = jnp.minimum(newest, size)
        first = jnp.maximum(buffer.added - environments * (length - 1) - count, first)
    starts = first + jax.random.randint(key, (batch,), 0, count)
    times = starts + environments * jnp.arange(length)[:, None]
    rows, stored = buffer.rows[times % capacity], times < buffer.added
    return unpack(rows, stored, buffer.observation_size, time_limits_end=time_limits_end)


def draw(config: AgentConfig, buffer: Replay, keys: Array) -> tuple[Sequences, Array]:
    """The batches of a round, fields `[batches, T, batch, …]`, and the keys of their noise."""
    sample_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    what: dict[str, Any] = {"batch": config.batch_size, "length": config.length}
    what |= {"environments": config.copies, "time_limits_end": config.time_limits_end}
    return jax.vmap(lambda key: sample(buffer, key, **what))(sample_keys), noise_keys


def unpack(
    rows: Float[Array, "T batch width"],
    stored: Bool[Array, "T batch"],
    observation_size: int,
    *,
    time_limits_end: bool = False,
) -> Sequences:
    """Rows of consecutive transitions as sequences, cut where the episode or what is stored ends.

    Args:
        rows: Transitions, time first.
        stored: Whether a row is that of the transition which really followed.
        observation_size: Length of an observation.
        time_limits_end: Whether a time limit counts as the end of an episode.
    """
    columns = Transitions(rows, observation_size)
    terminal = columns.terminated > 0
    if time_limits_end:
        terminal = terminal | (columns.truncated > 0)
    goes_on = ~terminal & ~(columns.truncated > 0)
    arrived = jnp.concatenate([jnp.ones_like(goes_on[:1]), jnp.cumprod(goes_on[:-1], 0, dtype=bool)])
    valid = arrived & stored
    has_next = jnp.concatenate([valid[1:], jnp.zeros_like(valid[:1])])
    return Sequences(
        observations=columns.observations,
        actions=columns.actions,
        rewards=columns.rewards,
        terminal=terminal,
        truncated=~has_next & ~terminal,
        log_behaviour=columns.log_behaviour,
        next_observations=columns.next_observations,
        valid=valid,
    )


def pick(batch: Sequences, steps: Int[Array, " batch"]) -> Sequences:
    """Sequences of two steps: the first, and the one at the given time of each."""
    two = jax.tree.map(lambda x: jnp.stack([x[0], x[steps, jnp.arange(len(steps))]]), batch)
    follows = jnp.stack([two.valid[1], jnp.zeros_like(two.valid[1])])
    return eqx.tree_at(lambda b: b.truncated, two, ~follows & ~two.terminal)
