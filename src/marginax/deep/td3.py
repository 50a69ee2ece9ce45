"""TD3 whose critic target is any operator of this library: the whole agent is one pytree, and an update is a pure function.

`update_block` runs a block of updates as one program. It can be vmapped over agents: the number of updates and
the policy delay are fixed when it is traced, so no agent's state decides what is computed. Updates come in rounds
of `policy_delay`. The last of a round moves the actor, the target networks and the TD weights, so the target networks
stay as they are within a round and are asked once for all of its batches.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marginax.deep import losses, replay
from marginax.deep.aims import Aim, aim, later_mean, size_of_each
from marginax.deep.config import TD3Config
from marginax.deep.networks import apart, together
from marginax.deep.replay import Replay, Sequences
from marginax.deep.state import TD3State, init, with_critics, with_estimator
from marginax.deep.weight_network import adam

__all__ = ["Metrics", "TD3State", "init", "learn", "update", "update_block"]


class Metrics(eqx.Module):
    """What one update says about itself (a block: one entry an update).

    Attributes:
        critic_loss: Squared error, summed over the twins.
        q_mean: Mean of the first critic on the batch.
        q_size: Mean of its absolute value.
        target_mean: Mean of the targets.
        target_variance: Variance of the targets over the batch.
        error_variance: Variance of target minus the first critic's value: what the operator's sampling adds.
        trace_mean: Mean trace c(x_t, a_t) over steps t ≥ 1; 0 where there are none.
        weight_mean: Mean credit of the steps t ≥ 1: TD weights, or cumulative traces for the other operators.
        weight_max: Largest credit of any step.
        effective_length: Mean over sequences of the sum of credits; 1 for one-step.
        weight_loss: Loss of the TD weights; 0 in updates that do not train them.

    >>> Metrics(*[jnp.zeros(())] * 11).q_mean
    Array(0., dtype=float32)
    """

    critic_loss: Float[Array, "..."]
    q_mean: Float[Array, "..."]
    q_size: Float[Array, "..."]
    target_mean: Float[Array, "..."]
    target_variance: Float[Array, "..."]
    error_variance: Float[Array, "..."]
    trace_mean: Float[Array, "..."]
    weight_mean: Float[Array, "..."]
    weight_max: Float[Array, "..."]
    effective_length: Float[Array, "..."]
    weight_loss: Float[Array, "..."]


def update(
    config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, delayed: bool
) -> tuple[TD3State, Metrics]:
    """One update of the critics and, if `delayed`, of the TD weights, the actor and the target networks.

    Args:
        config: The settings.
        state: The agent.
        batch: Sequences of `config.length` steps.
        key: A JAX random key, for the noise on target actions.
        delayed: Whether this is an update that comes only every `policy_delay`-th time.

    Returns:
        The agent after the update, and what can be said about it.

    >>> config = TD3Config(operator="marginalized", hidden=(8,), batch_size=4)
    >>> state = init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> batch = replay.sample(replay.add(replay.empty(4, 1, 1), rows), jax.random.key(0), batch=4, length=5)
    >>> state, metrics = update(config, state, batch, jax.random.key(1), delayed=True)
    >>> float(metrics.target_mean)
    1.0
    """
    state, metrics = _round(config, state, batch, key.reshape(1), delayed=delayed)
    return state, jax.tree.map(lambda x: x[0], metrics)


def learn(
    config: TD3Config,
    state: TD3State,
    pairs: Float[Array, "batch n"],
    target: Float[Array, " batch"],
    observations: Float[Array, "batch m"],
    *,
    delayed: bool,
) -> tuple[TD3State, Float[Array, ""], Float[Array, "2 batch"]]:
    """The half of an update that is the same for all operators: the critics and, if `delayed`, what follows them.

    Args:
        config: The settings; nothing of the operator is read.
        state: The agent; its estimator is passed through.
        pairs: [state, action] features of the first step of each sequence.
        target: Their targets.
        observations: States for the actor's step.
        delayed: Whether the actor and the target networks take a step as well.

    Returns:
        The agent, the critics' loss and their values before the step.

    >>> config = TD3Config(hidden=(8,))
    >>> state = init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> learn(config, state, jnp.ones((3, 2)), jnp.ones(3), jnp.ones((3, 1)), delayed=True)[2].shape
    (2, 3)
    """
    gradient = jax.value_and_grad(losses.critic_loss, has_aux=True)
    (critic_loss, values), slope = gradient(state.critic, pairs, target)
    critic, critic_optimiser = adam(config.learning_rate, slope, state.critic_optimiser, state.critic)
    state = TD3State(
        state.actor,
        critic,
        state.target_actor,
        state.target_critic,
        state.actor_optimiser,
        critic_optimiser,
        state.estimator,
    )
    return (_delayed(config, state, observations) if delayed else state), critic_loss, values


def update_block(
    config: TD3Config, state: TD3State, buffer: Replay, key: Array, *, updates: int
) -> tuple[TD3State, Metrics]:
    """A block of updates, each on a batch of its own; the last of every `policy_delay` is a delayed one.

    Args:
        config: The settings.
        state: The agent; jit with it donated.
        buffer: At least one transition.
        key: A JAX random key; the block is a pure function of it.
        updates: How many.

    Returns:
        The agent after the block, and metrics with one entry an update.

    >>> config = TD3Config(hidden=(8,), batch_size=4)
    >>> state = init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> buffer = replay.add(replay.empty(4, 1, 1), rows)
    >>> state, metrics = update_block(config, state, buffer, jax.random.key(1), updates=5)
    >>> metrics.critic_loss.shape
    (5,)
    """
    delay = min(config.policy_delay, updates)
    on_cpu = jax.default_backend() == "cpu"
    state = with_critics(apart, state) if on_cpu else state

    def group(state: TD3State, keys: Array) -> tuple[TD3State, Metrics]:
        sample_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
        batch = replay.sample(buffer, sample_keys, batch=config.batch_size, length=config.length)
        return _round(config, state, batch, noise_keys, delayed=len(keys) == delay)

    keys = jax.random.split(key, updates)
    whole = updates - updates % delay
    state, metrics = jax.lax.scan(group, state, keys[:whole].reshape(-1, delay))
    metrics = jax.tree.map(jnp.ravel, metrics)
    if whole < updates:
        state, rest = group(state, keys[whole:])
        metrics = jax.tree.map(lambda *x: jnp.concatenate(x), metrics, rest)
    return (with_critics(together, state) if on_cpu else state), metrics


def _round(
    config: TD3Config, state: TD3State, batch: Sequences, keys: Array, *, delayed: bool
) -> tuple[TD3State, Metrics]:
    """One update for each key, on its own part of the batch; if `delayed`, the last is a delayed one."""
    aimed = aim(config, state, batch, keys, train=delayed)
    state = with_estimator(state, aimed.estimator)
    loss, values, size = [], [], size_of_each(batch, keys)
    for i in range(len(keys)):
        part = slice(i * size, (i + 1) * size)
        inputs = (aimed.pairs[part], aimed.target[part], batch.observations[0, part])
        state, critic_loss, value = learn(config, state, *inputs, delayed=delayed and i == len(keys) - 1)
        loss.append(critic_loss)
        values.append(value[0])
    return state, _metrics(aimed, jnp.stack(loss), jnp.stack(values))


def _delayed(config: TD3Config, state: TD3State, observations: Array) -> TD3State:
    """The actor's step, and the target networks' after it."""
    slope = jax.grad(losses.actor_loss)(state.actor, state.critic, observations)
    actor, actor_optimiser = adam(config.learning_rate, slope, state.actor_optimiser, state.actor)

    def blend(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: config.polyak * x + (1 - config.polyak) * y, old, new)

    return TD3State(
        actor,
        state.critic,
        blend(state.target_actor, actor),
        blend(state.target_critic, state.critic),
        actor_optimiser,
        state.critic_optimiser,
        state.estimator,
    )


def _metrics(aimed: Aim, critic_loss: Array, values: Array) -> Metrics:
    """One entry for each of the batches, whose losses `[batches]` and values `[batches, batch]` are given."""
    target = aimed.target.reshape(values.shape)
    credit, share, valid = (
        x.reshape(len(x), *values.shape) for x in (aimed.credit, aimed.share, aimed.valid)
    )
    return Metrics(
        critic_loss=critic_loss,
        q_mean=jnp.mean(values, axis=1),
        q_size=jnp.mean(jnp.abs(values), axis=1),
        target_mean=jnp.mean(target, axis=1),
        target_variance=jnp.var(target, axis=1),
        error_variance=jnp.var(target - values, axis=1),
        trace_mean=aimed.trace_mean,
        weight_mean=jax.vmap(later_mean, 1)(valid, credit),
        weight_max=jnp.max(credit, axis=(0, 2)),
        effective_length=jnp.mean(jnp.sum(credit / share, axis=0), axis=1),
        weight_loss=jnp.zeros_like(critic_loss).at[-1].set(aimed.weight_loss),
    )
