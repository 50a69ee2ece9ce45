"""TD3 whose critic target is any operator of this library: the whole agent is one pytree, and an update is a pure function.

`update_block` runs a block of updates as one program. It can be vmapped over agents: the number of updates and
the policy delay are fixed when it is traced, so no agent's state decides what is computed. Updates come in rounds
of `policy_delay`. The last of a round moves the actor, the target networks and the TD weights, so the target networks
stay as they are within a round and are asked once for all of its batches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from marginax.deep import estimator as estimation
from marginax.deep import losses, replay
from marginax.deep.config import TD3Config
from marginax.deep.estimator import Estimator, adam
from marginax.deep.networks import MLP, Critics, act, apart, together
from marginax.deep.replay import Replay, Sequences
from marginax.deep.weights import cumulative, normalise


class TD3State(eqx.Module):
    """Everything that learning changes.

    Attributes:
        actor: The policy's network.
        critic: The twin critics: one leading axis of 2, or (inside `update_block`) two networks.
        target_actor: The actor, delayed.
        target_critic: The critics, delayed.
        actor_optimiser: Adam's state for the actor.
        critic_optimiser: Adam's state for the critics.
        estimator: The TD weights; None unless the operator is `marginalized`.

    >>> init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0)).estimator is None
    True
    """

    actor: MLP
    critic: Critics
    target_actor: MLP
    target_critic: Critics
    actor_optimiser: Any
    critic_optimiser: Any
    estimator: Estimator | None


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


def init(config: TD3Config, *, observation_size: int, action_size: int, key: Array) -> TD3State:
    """A fresh agent.

    >>> state = init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0))
    >>> state.critic.weights[0].shape
    (2, 4, 8)
    """
    actor_key, critic_key, weight_key = jax.random.split(key, 3)
    pair = observation_size + action_size
    actor = MLP(observation_size, action_size, config.hidden, key=actor_key)
    critic = MLP(pair, 1, config.hidden, copies=2, key=critic_key)
    optimiser = optax.adam(config.learning_rate)
    estimator = estimation.init(config, pair, weight_key) if config.operator == "marginalized" else None
    copied_actor, copied_critic = jax.tree.map(jnp.copy, (actor, critic))  # so that both can be donated
    return TD3State(
        actor, critic, copied_actor, copied_critic, optimiser.init(actor), optimiser.init(critic), estimator
    )


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


def with_estimator(state: TD3State, estimator: Estimator | None) -> TD3State:
    """The agent with other TD weights.

    >>> state = init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0))
    >>> with_estimator(state, None).estimator is None
    True
    """
    return TD3State(
        state.actor,
        state.critic,
        state.target_actor,
        state.target_critic,
        state.actor_optimiser,
        state.critic_optimiser,
        estimator,
    )


class Aim(eqx.Module):
    """What the critics are to learn from a batch.

    Attributes:
        target: One constant target a sequence.
        pairs: [state, action] features of the first step of each.
        credit: TD weights, or cumulative traces for the other operators.
        share: Probability with which a step was read; 1 where all are.
        valid: Which entries of the credit count.
        trace_mean: Mean trace over steps t ≥ 1, of each batch; 0 where none was computed.
        estimator: The TD weights' networks, after their training if there was any.
        weight_loss: Their loss; 0 where they are not trained.

    >>> sorted(Aim.__annotations__)[0]
    'credit'
    """

    target: Float[Array, " batch"]
    pairs: Float[Array, "batch n"]
    credit: Float[Array, "T batch"]
    share: Float[Array, "T batch"]
    valid: Bool[Array, "T batch"]
    trace_mean: Float[Array, " batches"]
    estimator: Estimator | None
    weight_loss: Float[Array, ""]


def aim(config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, train: bool) -> Aim:
    """The half of an update that depends on the operator: targets and, if `train`, a step of the TD weights.

    Only the target networks and the estimator of the state are read. With several keys the batch is so many
    batches side by side, and the weights learn from the last of them.

    >>> config = TD3Config(hidden=(8,))
    >>> state = init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> batch = replay.sample(replay.add(replay.empty(4, 1, 1), rows), jax.random.key(0), batch=3, length=1)
    >>> aim(config, state, batch, jax.random.key(1), train=False).target
    Array([1., 1., 1.], dtype=float32)
    """
    if config.samples_a_step:
        return _aim_at_one(config, state, batch, key, train=train)
    ahead = losses.bootstrap(config, state.target_actor, state.target_critic, batch, key)
    credit, estimator, weight_loss = ahead.products, state.estimator, jnp.zeros(())
    if estimator is not None:
        discounts = jnp.where(batch.terminal, 0.0, config.discount)
        credit, estimator, weight_loss = _weights(
            config, estimator, batch, ahead, discounts, key, train=train
        )
    target = losses.critic_targets(config, batch, ahead, credit)
    trace_mean = jax.vmap(_later_mean, 1)(*(_batches(x, key) for x in (batch.valid, ahead.traces)))
    share = jnp.ones_like(credit)
    result = (credit, share, batch.valid, trace_mean, estimator, weight_loss)
    return Aim(jax.lax.stop_gradient(target), ahead.features[0], *result)


def _aim_at_one(config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, train: bool) -> Aim:
    """Marginalized targets from the first step and one later step τ, weighted by 1 / P(τ): the same on average.

    The weight of a step needs no walk along the path to it, so only the training of the weights, which learn
    from products of traces, looks at the steps in between.
    """
    step_key, noise_key = jnp.moveaxis(jax.vmap(jax.random.split)(key.reshape(-1)), 1, 0)
    estimator = state.estimator
    if estimator is None:
        raise ValueError("state must have an estimator of TD weights.")
    steps, probability = losses.draw_steps(config, batch.rewards.shape[1], step_key)
    two = replay.pick(batch, steps)
    last = _last(batch, key) if train else 0
    rest = len(steps) - last
    # One evaluation of the actor: two steps of what is only aimed at, all steps of what is learned from.
    whole = jax.tree.map(lambda x: x[:, rest:], batch)
    following = (two.next_observations[:, :rest], whole.next_observations)
    rows = jnp.concatenate([x.reshape(x.shape[0] * x.shape[1], x.shape[2]) for x in following])
    means, size = act(state.target_actor, rows), batch.actions.shape[-1]
    seen = means[: 2 * rest].reshape(2, rest, size)
    coefficients = jnp.ones(two.rewards.shape)
    trace_mean = jnp.zeros(key.size)
    if train:
        along = means[2 * rest :].reshape(*whole.rewards.shape, size)
        traces = losses.traces(config, whole, along)
        trace_mean = trace_mean.at[-1].set(_later_mean(whole.valid, traces))
        products = jax.vmap(cumulative, 1, 1)(traces, whole.terminal | whole.truncated)[0]
        place = (steps[rest:], jnp.arange(last))
        coefficients = coefficients.at[1, rest:].set(products[place])
        seen = jnp.concatenate([seen, jnp.stack([along[0], along[place]])], axis=1)
    ahead = losses.look_ahead(config, state.target_critic, two, seen, coefficients, noise_key)
    power = config.discount ** (steps - 1) / probability  # beside the γ that a step's successor has anyway
    discounts = jnp.where(two.terminal, 0.0, config.discount * jnp.stack([power, jnp.ones_like(power)]))
    credit, estimator, weight_loss = _weights(config, estimator, two, ahead, discounts, key, train=train)
    target = losses.critic_targets(config, two, ahead, credit.at[1].multiply(power))
    share = jnp.ones_like(credit).at[1].set(probability)
    result = (credit, share, two.valid, trace_mean, estimator, weight_loss)
    return Aim(jax.lax.stop_gradient(target), ahead.features[0], *result)


def _last(batch: Sequences, keys: Array) -> int:
    """How many sequences the last of several batches side by side has."""
    return batch.rewards.shape[1] // keys.size


def _batches(x: Array, keys: Array) -> Array:
    """Several batches side by side, apart: `[T, batches, batch]`."""
    return x.reshape(x.shape[0], keys.size, -1)


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
    state = _with_critics(apart, state) if on_cpu else state

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
    return (_with_critics(together, state) if on_cpu else state), metrics


def _round(
    config: TD3Config, state: TD3State, batch: Sequences, keys: Array, *, delayed: bool
) -> tuple[TD3State, Metrics]:
    """One update for each key, on its own part of the batch; if `delayed`, the last is a delayed one."""
    aimed = aim(config, state, batch, keys, train=delayed)
    state = with_estimator(state, aimed.estimator)
    loss, values, size = [], [], _last(batch, keys)
    for i in range(len(keys)):
        part = slice(i * size, (i + 1) * size)
        inputs = (aimed.pairs[part], aimed.target[part], batch.observations[0, part])
        state, critic_loss, value = learn(config, state, *inputs, delayed=delayed and i == len(keys) - 1)
        loss.append(critic_loss)
        values.append(value[0])
    return state, _metrics(aimed, jnp.stack(loss), jnp.stack(values))


def _with_critics(change: Callable[[Any], Any], state: TD3State) -> TD3State:
    """The agent with its critics in another form: `apart` or `together`."""
    critic, target_critic, optimiser = map(
        change, (state.critic, state.target_critic, state.critic_optimiser)
    )
    return TD3State(
        state.actor,
        critic,
        state.target_actor,
        target_critic,
        state.actor_optimiser,
        optimiser,
        state.estimator,
    )


def _weights(
    config: TD3Config,
    estimator: Estimator,
    batch: Sequences,
    ahead: losses.Bootstrap,
    discounts: Array,
    keys: Array,
    *,
    train: bool,
) -> tuple[Array, Estimator, Array]:
    """TD weights for the targets, and the estimator after its training on the last batch."""
    pairs = estimation.inputs(config, ahead.features)
    weight_loss, network = jnp.zeros(()), estimator.weights
    rest, parts = pairs.shape[1] - (_last(batch, keys) if train else 0), []
    if rest:
        parts.append(estimation.predict(config, network, pairs[:, :rest]))
    if train:
        sequence = (pairs, ahead.traces, discounts, batch.truncated)
        estimator, weight_loss, w = estimation.update(config, estimator, *(x[:, rest:] for x in sequence))
        parts.append(w)
    w = jnp.where(batch.valid, jnp.concatenate(parts, axis=1), 0)
    if config.normalise != "none":
        power = config.normalisation_power if config.normalise == "power" else 1.0
        one = partial(normalise, power=power)
        w = jax.vmap(one, 1, 1)(_batches(w, keys), _batches(batch.valid, keys)).reshape(w.shape)
    return w, estimator, weight_loss


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


def _later_mean(valid: Array, values: Array) -> Array:
    """Mean over the valid steps t ≥ 1; 0 if there are none."""
    later = valid.at[0].set(False)
    return jnp.sum(jnp.where(later, values, 0)) / jnp.maximum(jnp.sum(later), 1)


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
        weight_mean=jax.vmap(_later_mean, 1)(valid, credit),
        weight_max=jnp.max(credit, axis=(0, 2)),
        effective_length=jnp.mean(jnp.sum(credit / share, axis=0), axis=1),
        weight_loss=jnp.zeros_like(critic_loss).at[-1].set(aimed.weight_loss),
    )
