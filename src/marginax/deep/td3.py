"""TD3 whose critic target is any operator of this library. The agent is one pytree, and an update is a pure function.

Updates come in rounds of `policy_delay`. The last update of a round also moves the actor, the target networks and the TD
weights. So the target networks do not move within a round, and are evaluated once for all of its batches.

The trainer (`marginax.deep.learner`) needs the following of an agent's module:

| name | what it does |
|---|---|
| `init` | makes a fresh agent |
| `split`, `join` | take the agent apart into what learns alike under every operator and what belongs to its operator; put it together again |
| `observe` | takes in new transitions |
| `draw` | draws the batches of a round from replay |
| `rounds`, `delayed_rounds`, `run_round` | divide the updates of a block into rounds |
| `targets`, `learn` | the two halves of an update: the operator's targets, and the steps of the networks |
| `measure`, `METRICS`, `MEASURE_EVERY` | the metrics, their names, and the steps between two measurements |
| `policy` | the parameters that act, as one vector |
| `SHARED` | names of the settings that all agents of one program must share |
"""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from marginax.deep.config import TD3Config
from marginax.deep.critic_targets import CriticTarget, Estimator, critic_targets, init_estimator
from marginax.deep.networks import MLP, Critics, Scaler, actor_vector, adam_step, first_twin, twins, value
from marginax.deep.replay import Replay, Sequences, draw
from marginax.deep.update_metrics import METRICS as METRICS
from marginax.deep.update_metrics import Metrics, measured, update_metrics

MEASURE_EVERY = 1  # steps: after every block
SHARED = (
    *("hidden", "policy_delay", "batch_size", "learning_rate", "actor_rate", "polyak"),
    *("update_every", "update_after", "scale_observations", "layer_norm", "saturation_penalty"),
    "actor_after",
)


class TD3State(eqx.Module):
    """Everything that learning changes.

    Attributes:
        actor: The policy's network.
        critic: The twin critics.
        target_actor: The delayed copy of the actor.
        target_critic: The delayed copy of the critics.
        actor_optimiser: Adam's state for the actor.
        critic_optimiser: Adam's state for the critics.
        scaler: Scales observations; None without `scale_observations`.
        estimator: The TD weights; None unless the operator is `marginalized`.
    """

    actor: MLP
    critic: Critics
    target_actor: MLP
    target_critic: Critics
    actor_optimiser: Any
    critic_optimiser: Any
    scaler: Scaler | None
    estimator: Estimator | None


def init(config: TD3Config, *, observation_size: int, action_size: int, key: Array) -> TD3State:
    """A fresh agent."""
    actor_key, critic_key, weight_key = jax.random.split(key, 3)
    pair = observation_size + action_size
    actor = MLP(observation_size, action_size, config.hidden, key=actor_key)
    last = (actor.weights[-1] * config.actor_scale, actor.biases[-1] * config.actor_scale)
    actor = eqx.tree_at(lambda m: (m.weights[-1], m.biases[-1]), actor, last)
    critic = twins(pair, config.hidden, key=critic_key, layer_norm=config.layer_norm)
    scaler = Scaler.fresh(observation_size) if config.scale_observations else None
    estimator = init_estimator(config, observation_size, action_size, weight_key)
    target_actor, target_critic = jax.tree.map(
        jnp.copy, (actor, critic)
    )  # copies, so that all can be donated
    optimisers = (optax.adam(config.actor_rate).init(actor), optax.adam(config.learning_rate).init(critic))
    return TD3State(actor, critic, target_actor, target_critic, *optimisers, scaler, estimator)


def split(state: TD3State) -> tuple[TD3State, Estimator | None]:
    """The agent without its TD weights, and the TD weights."""
    return replace(state, estimator=None), state.estimator


def join(state: TD3State, estimator: Estimator | None) -> TD3State:
    """The agent with these TD weights: the inverse of `split`."""
    return replace(state, estimator=estimator)


def policy(state: TD3State) -> Float[Array, " n"]:
    """The actor's parameters as one vector. Scaling is folded into them: they take observations as they are."""
    return actor_vector(state.actor if state.scaler is None else state.scaler.folded(state.actor))


def observe(state: TD3State, rows: Float[Array, "steps width"]) -> TD3State:
    """The agent after new transitions, which update the scaling of observations; rows are packed as in replay."""
    if state.scaler is None:
        return state
    return replace(state, scaler=state.scaler.add(rows[:, : len(state.scaler.mean)]))


def targets(
    config: TD3Config, state: TD3State, batches: Sequences, keys: Array, *, train: bool
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """The half of an update that depends on the operator: see `critic_targets`. It reads only the delayed networks."""
    if state.scaler is not None:
        batches = replace(
            batches,
            observations=state.scaler(batches.observations),
            next_observations=state.scaler(batches.next_observations),
        )
    networks = (state.target_actor, state.target_critic, state.estimator)
    return critic_targets(config, *networks, batches, keys, train=train)


def learn(
    config: TD3Config,
    state: TD3State,
    pairs: Float[Array, "batch n"],
    target: Float[Array, " batch"],
    *,
    delayed: bool,
) -> tuple[TD3State, Float[Array, ""], Float[Array, " batch"]]:
    """The half of an update that is the same for all operators: a step of the critics and, if `delayed`, of the actor.

    Args:
        config: The settings; those of the operator are not read.
        state: The agent; its estimator is passed through.
        pairs: [state, action] features of the first step of each sequence.
        target: Their targets.
        delayed: Whether the actor and the target networks move as well.

    Returns:
        The agent, the critics' loss, and the first critic's values before the step.
    """
    loss_and_gradient = jax.value_and_grad(critic_loss, has_aux=True)
    (loss, values), gradient = loss_and_gradient(state.critic, pairs, target)
    critic, critic_optimiser = adam_step(config.learning_rate, gradient, state.critic_optimiser, state.critic)
    state = replace(state, critic=critic, critic_optimiser=critic_optimiser)
    if delayed:
        observations = pairs[:, : state.actor.weights[0].shape[0]]
        gradient = jax.grad(actor_loss)(state.actor, critic, observations, config.saturation_penalty)
        moved = adam_step(config.actor_rate, gradient, state.actor_optimiser, state.actor)
        if config.actor_after:
            waits = optax.tree.get(critic_optimiser, "count") <= config.actor_after
            unmoved = (state.actor, state.actor_optimiser)
            moved = jax.tree.map(lambda old, new: jnp.where(waits, old, new), unmoved, moved)
        actor, actor_optimiser = moved
        state = replace(
            state,
            actor=actor,
            actor_optimiser=actor_optimiser,
            target_actor=optax.incremental_update(actor, state.target_actor, 1 - config.polyak),
            target_critic=optax.incremental_update(critic, state.target_critic, 1 - config.polyak),
        )
    return state, loss, values[0]


def critic_loss(
    critic: Critics, features: Float[Array, "batch n"], target: Float[Array, " batch"]
) -> tuple[Float[Array, ""], Float[Array, "2 batch"]]:
    """The mean squared error summed over both critics, and the critics' values."""
    values = value(critic, features)
    return jnp.sum(jnp.mean((values - target) ** 2, axis=-1)), values


def actor_loss(
    actor: MLP, critic: Critics, observations: Float[Array, "batch n"], saturation_penalty: float = 0.0
) -> Float[Array, ""]:
    """Minus the first critic's mean value at the actor's actions, plus the penalty of large outputs before the tanh."""
    raw = actor(observations)
    values = value(first_twin(critic), jnp.concatenate([observations, jnp.tanh(raw)], -1))
    return saturation_penalty * jnp.mean(raw**2) - jnp.mean(values)


def update(
    config: TD3Config, state: TD3State, batch: Sequences, key: Array, *, delayed: bool
) -> tuple[TD3State, Metrics]:
    """One update of the critics and, if `delayed`, of the TD weights, the actor and the target networks.

    Args:
        config: The settings.
        state: The agent.
        batch: Sequences of `config.length` steps.
        key: A JAX random key for the noise on target actions.
        delayed: Whether this is the delayed update, every `policy_delay`-th.

    Returns:
        The agent after the update, and its metrics.

    >>> from marginax.deep import replay
    >>> config = TD3Config(operator="marginalized", hidden=(8,), batch_size=4)
    >>> state = init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> batch = replay.sample(replay.add(replay.empty(4, 1, 1), rows), jax.random.key(0), batch=4, length=5)
    >>> state, metrics = jax.jit(partial(update, config, delayed=True))(state, batch, jax.random.key(1))
    >>> float(metrics.target_mean)
    1.0
    """
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    state, metrics = _round(config, state, one, key[None], delayed=delayed)
    return state, jax.tree.map(lambda x: x[0], metrics)


def _round(
    config: TD3Config, state: TD3State, batches: Sequences, keys: Array, *, delayed: bool
) -> tuple[TD3State, Metrics]:
    """One update per batch; if `delayed`, the last of them is the delayed update."""
    found, estimator, weight_loss = targets(config, state, batches, keys, train=delayed)
    state = replace(state, estimator=estimator)
    losses, values = [], []
    for i in range(len(keys)):
        last = i == len(keys) - 1
        state, loss, q = learn(config, state, found.pairs[i], found.target[i], delayed=delayed and last)
        losses.append(loss)
        values.append(q)
    return state, update_metrics(found, jnp.stack(losses), jnp.stack(values), weight_loss)


def update_block(
    config: TD3Config, state: TD3State, buffer: Replay, key: Array, *, updates: int, done: Array | int = 0
) -> tuple[TD3State, Metrics]:
    """A block of updates, each on a batch of its own. It can be jitted, and vmapped over agents.

    Args:
        config: The settings.
        state: The agent; jit with it donated.
        buffer: Replay with at least one transition. Call `observe` with the rows that you add to it: they scale observations.
        key: A JAX random key, which determines the block.
        updates: Number of updates.
        done: Number of updates before this block, from which the policy delay counts on. Do not batch it under `vmap`.

    Returns:
        The agent after the block, and metrics with one entry per update.
    """

    def one_round(state: TD3State, keys: Array, *, delayed: bool) -> tuple[TD3State, Metrics]:
        return _round(config, state, *draw(config, buffer, keys), delayed=delayed)

    xs = (rounds(config, key, updates), delayed_rounds(config, updates, done))
    state, metrics = jax.lax.scan(lambda state, x: run_round(one_round, state, *x), state, xs)
    return state, jax.tree.map(jnp.ravel, metrics)


def rounds(config: TD3Config, key: Array, updates: int) -> Array:
    """The keys `[rounds, batches]` of the updates of a block.

    A round has `policy_delay` updates if a block is a whole number of such rounds, and otherwise a single update.
    """
    size = 1 if updates % config.policy_delay else config.policy_delay
    return jax.random.split(key, updates).reshape(-1, size)


def delayed_rounds(config: TD3Config, updates: int, done: Array | int) -> Array | None:
    """For each round, whether its last update is a delayed one; None if all are."""
    if updates % config.policy_delay == 0:
        return None
    return (done + jnp.arange(updates) + 1) % config.policy_delay == 0


def run_round(one_round: Any, state: Any, batches: Any, delayed: Array | None) -> Any:
    """Run `one_round(state, batches, delayed=…)`. If `delayed` is batched under `vmap`, both branches are computed."""
    if delayed is None:
        return one_round(state, batches, delayed=True)
    branches = (partial(one_round, delayed=True), partial(one_round, delayed=False))
    return jax.lax.cond(delayed, *branches, state, batches)


def measure(config: TD3Config, state: TD3State, batch: Sequences, key: Array) -> Float[Array, " metrics"]:
    """`METRICS` of the next update if it were made on this batch. Nothing is updated."""
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    found, _, weight_loss = targets(config, state, one, key[None], train=True)
    loss, values = critic_loss(state.critic, found.pairs[0], found.target[0])
    own = update_metrics(found, loss[None], values[:1], weight_loss)

    def targets_of(rival: TD3Config, one: Sequences) -> CriticTarget:
        return targets(rival, replace(state, estimator=None), one, key[None], train=False)[0]

    return measured(config, own, values[0], batch, targets_of)
