"""TD3 whose critic target is any operator of this library: the whole agent is one pytree, and an update is a pure function.

`update_block` runs a block of updates as one program. It can be vmapped over agents: the number of updates and
the policy delay are fixed when it is traced, so no agent's state decides what is computed.
"""

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
from marginax.deep.networks import MLP
from marginax.deep.replay import Replay, Sequences
from marginax.deep.weights import cumulative, normalise


class TD3State(eqx.Module):
    """Everything that learning changes.

    Attributes:
        actor: The policy's network.
        critic: The twin critics, one leading axis of 2.
        target_actor: The actor, delayed.
        target_critic: The critics, delayed.
        actor_optimiser: Adam's state for the actor.
        critic_optimiser: Adam's state for the critics.
        estimator: The TD weights; None unless the operator is `marginalized`.

    >>> init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0)).estimator is None
    True
    """

    actor: MLP
    critic: MLP
    target_actor: MLP
    target_critic: MLP
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
    aimed = aim(config, state, batch, key, train=delayed)
    state = with_estimator(state, aimed.estimator)
    pairs, observations = aimed.ahead.features[0], batch.observations[0]
    state, critic_loss, values = learn(config, state, pairs, aimed.target, observations, delayed=delayed)
    return state, _metrics(aimed, critic_loss, values[0])


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
        ahead: What the target networks say along the sequences.
        credit: TD weights, or cumulative traces for the other operators.
        share: Probability with which a step was read; 1 where all are.
        valid: Which entries of the credit count.
        trace_mean: Mean trace over steps t ≥ 1; 0 where none was computed.
        estimator: The TD weights' networks, after their training if there was any.
        weight_loss: Their loss; 0 where they are not trained.

    >>> sorted(Aim.__annotations__)[0]
    'ahead'
    """

    target: Float[Array, " batch"]
    ahead: losses.Bootstrap
    credit: Float[Array, "T batch"]
    share: Float[Array, "T batch"]
    valid: Bool[Array, "T batch"]
    trace_mean: Float[Array, ""]
    estimator: Estimator | None
    weight_loss: Float[Array, ""]


def aim(config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, train: bool) -> Aim:
    """The half of an update that depends on the operator: targets and, if `train`, a step of the TD weights.

    Only the target networks and the estimator of the state are read.

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
        credit, estimator, weight_loss = _weights(config, estimator, batch, ahead, discounts, train=train)
    target = losses.critic_targets(config, state.target_critic, batch, ahead, credit)
    trace_mean = _later_mean(batch.valid, ahead.traces)
    share = jnp.ones_like(credit)
    return Aim(
        jax.lax.stop_gradient(target), ahead, credit, share, batch.valid, trace_mean, estimator, weight_loss
    )


def _aim_at_one(config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, train: bool) -> Aim:
    """Marginalized targets from the first step and one later step τ, weighted by 1 / P(τ): the same on average.

    The weight of a step needs no walk along the path to it, so only the training of the weights, which learn
    from products of traces, looks at the steps in between.
    """
    step_key, noise_key = jax.random.split(key)
    steps, probability = losses.draw_steps(config, batch.rewards.shape[1], step_key)
    two = replay.pick(batch, steps)
    trace_mean, coefficients = jnp.zeros(()), jnp.ones(two.rewards.shape)
    if train:
        means = losses.policy_means(state.target_actor, batch)
        traces = losses.traces(config, batch, means)
        trace_mean = _later_mean(batch.valid, traces)
        products = jax.vmap(cumulative, 1, 1)(traces, batch.terminal | batch.truncated)[0]
        place = (steps, jnp.arange(len(steps)))
        coefficients = coefficients.at[1].set(products[place])
        means = jnp.stack([means[0], means[place]])
    else:
        means = losses.policy_means(state.target_actor, two)
    ahead = losses.look_ahead(config, state.target_critic, two, means, coefficients, noise_key)
    power = config.discount ** (steps - 1) / probability  # beside the γ that a step's successor has anyway
    discounts = jnp.where(two.terminal, 0.0, config.discount * jnp.stack([power, jnp.ones_like(power)]))
    estimator = state.estimator
    if estimator is None:
        raise ValueError("state must have an estimator of TD weights.")
    credit, estimator, weight_loss = _weights(config, estimator, two, ahead, discounts, train=train)
    weights = credit.at[1].multiply(power)
    target = losses.critic_targets(config, state.target_critic, two, ahead, weights)
    share = jnp.ones_like(credit).at[1].set(probability)
    return Aim(
        jax.lax.stop_gradient(target), ahead, credit, share, two.valid, trace_mean, estimator, weight_loss
    )


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
    """A block of updates, each on a batch of its own; the first of every `policy_delay` is a delayed one.

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

    def group(state: TD3State, keys: Array) -> tuple[TD3State, Metrics]:
        collected = []
        for i in range(len(keys)):
            sample_key, noise_key = jax.random.split(keys[i])
            batch = replay.sample(buffer, sample_key, batch=config.batch_size, length=config.length)
            state, metrics = update(config, state, batch, noise_key, delayed=i == 0)
            collected.append(metrics)
        return state, jax.tree.map(lambda *x: jnp.stack(x), *collected)

    keys = jax.random.split(key, updates)
    whole = updates - updates % delay
    state, metrics = jax.lax.scan(group, state, keys[:whole].reshape(-1, delay))
    metrics = jax.tree.map(jnp.ravel, metrics)
    if whole < updates:
        state, rest = group(state, keys[whole:])
        metrics = jax.tree.map(lambda *x: jnp.concatenate(x), metrics, rest)
    return state, metrics


def _weights(
    config: TD3Config,
    estimator: Estimator,
    batch: Sequences,
    ahead: losses.Bootstrap,
    discounts: Array,
    *,
    train: bool,
) -> tuple[Array, Estimator, Array]:
    """TD weights for the targets, and the estimator after its training on the same batch."""
    pairs = estimation.inputs(config, ahead.features)
    weight_loss = jnp.zeros(())
    if train:
        sequence = (pairs, ahead.traces, discounts, batch.truncated)
        estimator, weight_loss, w = estimation.update(config, estimator, *sequence)
    else:
        w = estimation.predict(config, estimator.weights, pairs)
    w = jnp.where(batch.valid, w, 0)
    if config.normalise != "none":
        power = config.normalisation_power if config.normalise == "power" else 1.0
        w = normalise(w, batch.valid, power)
    return w, estimator, weight_loss


def _delayed(config: TD3Config, state: TD3State, observations: Array) -> TD3State:
    """The actor's step, and the target networks' after it."""
    slope = jax.grad(losses.actor_loss)(state.actor, state.critic, observations)
    actor, actor_optimiser = adam(config.learning_rate, slope, state.actor_optimiser, state.actor)

    def blend(old: MLP, new: MLP) -> MLP:
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
    target, credit = aimed.target, aimed.credit
    return Metrics(
        critic_loss=critic_loss,
        q_mean=jnp.mean(values),
        q_size=jnp.mean(jnp.abs(values)),
        target_mean=jnp.mean(target),
        target_variance=jnp.var(target),
        error_variance=jnp.var(target - values),
        trace_mean=aimed.trace_mean,
        weight_mean=_later_mean(aimed.valid, credit),
        weight_max=jnp.max(credit),
        effective_length=jnp.mean(jnp.sum(credit / aimed.share, axis=0)),
        weight_loss=aimed.weight_loss,
    )
