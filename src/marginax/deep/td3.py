"""TD3 whose critic target is any operator of this library: the whole agent is one pytree, and an update is a pure function.

Updates come in rounds of `policy_delay`. The last of a round moves the actor, the target networks and the TD weights,
so the target networks stay as they are within a round, and are evaluated once for all of its batches.

A trainer (`marginax.deep.learner`) takes from an agent's module: `init`, `split` and `join` (what learns alike under
every operator, and what belongs to one), `observe` (new transitions), `targets` and `learn` (the two halves of an update), `draw`, `rounds`,
`delayed_rounds` and `run_round` (its batches), `measure`, `METRICS` and `MEASURE_EVERY`, `policy` (the parameters that act)
and `SHARED` (the settings that agents of one program must have in common).
"""

import dataclasses
from dataclasses import fields, replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from marginax.deep.config import Operator, TD3Config
from marginax.deep.critic_targets import (
    CriticTarget,
    Estimator,
    Metrics,
    critic_targets,
    init_estimator,
    summarise,
)
from marginax.deep.networks import MLP, Critics, Scaler, actor_vector, first_twin, twins, value
from marginax.deep.replay import Replay, Sequences, draw
from marginax.deep.weight_network import adam

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
        target_actor: The actor, delayed.
        target_critic: The critics, delayed.
        actor_optimiser: Adam's state for the actor.
        critic_optimiser: Adam's state for the critics.
        scaler: What scales observations; None where they are taken as they are.
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


MEASURE_EVERY = 1  # steps: after every block
# Other operators whose targets' variance is measured on the same batches and networks.
RIVALS: tuple[Operator, ...] = ("one-step", "retrace")
METRICS = (*(field.name for field in fields(Metrics)), *(f"error_variance_{name}" for name in RIVALS))


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
    copied_actor, copied_critic = jax.tree.map(jnp.copy, (actor, critic))  # so that both can be donated
    optimisers = (optax.adam(config.actor_rate).init(actor), optax.adam(config.learning_rate).init(critic))
    return TD3State(actor, critic, copied_actor, copied_critic, *optimisers, scaler, estimator)


def split(state: TD3State) -> tuple[TD3State, Estimator | None]:
    """The agent without what belongs to its operator, and that."""
    return replace(state, estimator=None), state.estimator


def join(state: TD3State, own: Estimator | None) -> TD3State:
    """The agent that `split` took apart."""
    return replace(state, estimator=own)


def policy(state: TD3State) -> Float[Array, " n"]:
    """The parameters that act, as one vector; observations need no scaling for it."""
    return actor_vector(state.actor if state.scaler is None else state.scaler.folded(state.actor))


def observe(state: TD3State, rows: Float[Array, "steps width"]) -> TD3State:
    """The agent after it has met a block of transitions, packed as replay has them."""
    if state.scaler is None:
        return state
    return replace(state, scaler=state.scaler.add(rows[:, : len(state.scaler.mean)]))


def targets(
    config: TD3Config, state: TD3State, batches: Sequences, keys: Array, *, train: bool
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """The half of an update that depends on the operator: see `critic_targets`. Reads only the delayed networks."""
    if state.scaler is not None:
        scaled = map(state.scaler, (batches.observations, batches.next_observations))
        batches = replace(batches, **dict(zip(("observations", "next_observations"), scaled, strict=True)))
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
    """The half of an update that is the same for all operators: the critics and, if `delayed`, what follows them.

    Args:
        config: The settings; nothing of the operator is read.
        state: The agent; its estimator is passed through.
        pairs: [state, action] features of the first step of each sequence.
        target: Their targets.
        delayed: Whether the actor and the target networks take a step as well.

    Returns:
        The agent, the critics' loss and the first one's values before the step.
    """
    gradient = jax.value_and_grad(critic_loss, has_aux=True)
    (loss, values), slope = gradient(state.critic, pairs, target)
    critic, optimiser = adam(config.learning_rate, slope, state.critic_optimiser, state.critic)
    state = replace(state, critic=critic, critic_optimiser=optimiser)
    if delayed:
        observations = pairs[:, : state.actor.weights[0].shape[0]]
        slope = jax.grad(actor_loss)(state.actor, critic, observations, config.saturation_penalty)
        moved = adam(config.actor_rate, slope, state.actor_optimiser, state.actor)
        if config.actor_after:
            waits = optax.tree.get(optimiser, "count") <= config.actor_after
            stays = (state.actor, state.actor_optimiser)
            moved = jax.tree.map(lambda old, new: jnp.where(waits, old, new), stays, moved)
        actor, optimiser = moved
        state = replace(
            state,
            actor=actor,
            actor_optimiser=optimiser,
            target_actor=optax.incremental_update(actor, state.target_actor, 1 - config.polyak),
            target_critic=optax.incremental_update(critic, state.target_critic, 1 - config.polyak),
        )
    return state, loss, values[0]


def critic_loss(
    critic: Critics, features: Float[Array, "batch n"], target: Float[Array, " batch"]
) -> tuple[Float[Array, ""], Float[Array, "2 batch"]]:
    """Squared error of both critics, summed over the two; also their values."""
    values = value(critic, features)
    return jnp.sum(jnp.mean((values - target) ** 2, axis=-1)), values


def actor_loss(
    actor: MLP, critic: Critics, observations: Float[Array, "batch n"], saturation_penalty: float = 0.0
) -> Float[Array, ""]:
    """Minus the first critic's mean value of the actor's own actions, plus the penalty of large outputs."""
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
        key: A JAX random key, for the noise on target actions.
        delayed: Whether this is an update that comes only every `policy_delay`-th time.

    Returns:
        The agent after the update, and what can be said about it.

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
    """One update per batch; if `delayed`, the last is a delayed one."""
    found, estimator, weight_loss = targets(config, state, batches, keys, train=delayed)
    state = replace(state, estimator=estimator)
    losses, values = [], []
    for i in range(len(keys)):
        step = (found.pairs[i], found.target[i])
        state, loss, q = learn(config, state, *step, delayed=delayed and i == len(keys) - 1)
        losses.append(loss)
        values.append(q)
    return state, summarise(found, jnp.stack(losses), jnp.stack(values), weight_loss)


def update_block(
    config: TD3Config, state: TD3State, buffer: Replay, key: Array, *, updates: int, done: Array | int = 0
) -> tuple[TD3State, Metrics]:
    """A block of updates, each on a batch of its own. It can be jitted, and vmapped over agents.

    Args:
        config: The settings.
        state: The agent; jit with it donated.
        buffer: At least one transition. Whoever adds to it shows `observe` the same rows, which scale the observations.
        key: A JAX random key; the block is a pure function of it.
        updates: How many.
        done: Updates before this block, a multiple of `updates`: the policy delay counts on. Leave it unbatched
            under `vmap`.

    Returns:
        The agent after the block, and metrics with one entry per update.
    """

    def one_round(state: TD3State, keys: Array, *, delayed: bool) -> tuple[TD3State, Metrics]:
        return _round(config, state, *draw(config, buffer, keys), delayed=delayed)

    material = (rounds(config, key, updates), delayed_rounds(config, updates, done))
    state, metrics = jax.lax.scan(lambda s, m: run_round(one_round, s, *m), state, material)
    return state, jax.tree.map(jnp.ravel, metrics)


def rounds(config: TD3Config, key: Array, updates: int) -> Array:
    """Keys `[rounds, batches]` of a block's updates.

    A round is `policy_delay` updates where a block has a whole number of those, and a single update otherwise.
    """
    size = 1 if updates % config.policy_delay else config.policy_delay
    return jax.random.split(key, updates).reshape(-1, size)


def delayed_rounds(config: TD3Config, updates: int, done: Array | int) -> Array | None:
    """Whether the last update of each round is a delayed one; None: always."""
    if updates % config.policy_delay == 0:
        return None
    return (done + jnp.arange(updates) + 1) % config.policy_delay == 0


def run_round(one_round: Any, carry: Any, material: Any, delayed: Array | None) -> Any:
    """Run a round, delayed or not; under `vmap`, `delayed` must not be batched, or both would be computed."""
    if delayed is None:
        return one_round(carry, material, delayed=True)
    both = (partial(one_round, delayed=True), partial(one_round, delayed=False))
    return jax.lax.cond(delayed, *both, carry, material)


def measure(config: TD3Config, state: TD3State, batch: Sequences, key: Array) -> Float[Array, " metrics"]:
    """`METRICS` of the update that would come next on a batch; nothing is updated."""
    _, own = update(config, state, batch, key, delayed=True)
    rivals = [_error_variance(config, name, state, batch, key) for name in RIVALS]
    return jnp.stack([*(getattr(own, field.name) for field in fields(Metrics)), *rivals])


def _error_variance(
    config: TD3Config, operator: Operator, state: TD3State, batch: Sequences, key: Array
) -> Array:
    """Variance over a batch of target minus Q for another operator; NaN where the sequences are too short for it."""
    if operator != "one-step" and config.length == 1:
        return jnp.full((), jnp.nan)
    rival = dataclasses.replace(config, operator=operator)
    one: Sequences = jax.tree.map(lambda x: x[None, : rival.length], batch)
    found, *_ = targets(rival, replace(state, estimator=None), one, key[None], train=False)
    return jnp.var(found.target[0] - value(state.critic, found.pairs[0])[0])
