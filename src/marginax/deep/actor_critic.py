r"""An actor-critic with V-trace, or marginalized V-trace, from stale actors and replay. See `td3` for what a trainer needs.

One network computes the logits of π and V. The data come from actors that are up to `actor_delay` updates old, and a share
of every batch comes from replay, so values and policy gradient both need an off-policy correction. The value targets $v_t$
are those of V-trace, or of its marginalized form, whose weight $w_{x_t}(x_s)$ is the mean product of the traces on the
way from $x_t$ to $x_s$. The policy follows $\rho_t (r_t + \gamma v_{t+1} - V(x_t)) \nabla \log \pi(a_t|x_t)$.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from marginax import targets as estimates
from marginax.deep import path_network, replay
from marginax.deep.critic_targets import later, masked_mean, path_loss
from marginax.deep.discrete_config import ActorCriticConfig
from marginax.deep.networks import ObservationNetwork, actor_vector, adam_step, observation_network
from marginax.deep.path_network import PathNetwork, Paths
from marginax.deep.q_learning import delayed_rounds, observe, rounds, run_round
from marginax.deep.replay import Replay, Sequences
from marginax.traces import clip_log_ratios

__all__ = [
    "METRICS",
    "SHARED",
    "ActorCriticState",
    "delayed_rounds",
    "draw",
    "init",
    "learn",
    "observe",
    "rounds",
    "run_round",
    "targets",
]

MEASURE_EVERY = 1000  # steps
SHARED = (
    *("hidden", "filters", "batch_size", "sequence_length", "learning_rate"),
    *("entropy", "value_factor", "gradient_clip", "actor_delay"),
    *("update_every", "block_updates", "update_after", "environments"),
)
METRICS = (
    *("critic_loss", "q_mean", "q_size", "target_mean", "error_variance", "error_variance_vtrace"),
    *("entropy", "trace_mean", "weight_mean", "weight_max", "weight_loss"),
)


class ActorCriticState(eqx.Module):
    """Everything that learning changes.

    Attributes:
        network: Logits of all actions, followed by V.
        acting: The network that acts, a copy that is renewed every `actor_delay` updates.
        optimiser: Adam's state.
        count: Number of updates so far.
        paths: The TD weights between states; None for V-trace.
    """

    network: ObservationNetwork
    acting: ObservationNetwork
    optimiser: Any
    count: Int[Array, "..."]
    paths: Paths | None


class Targets(eqx.Module):
    r"""The targets of the network on one batch, or on the batches of a round.

    Attributes:
        pairs: [observation, one-hot action] of every step.
        target: Value target, advantage times ρ, and whether the step is valid.
        traces: The trace $\lambda \min(\bar c, \pi/\mu)$ of every step.
        weights: The credit of every step in the first target: $w_{x_0}(x_t)$, or the product of traces on the way.
        valid: Which steps are not padding.
    """

    pairs: Float[Array, "*batches T batch n"]
    target: Float[Array, "*batches T batch 3"]
    traces: Float[Array, "*batches T batch"]
    weights: Float[Array, "*batches T batch"]
    valid: Bool[Array, "*batches T batch"]


def init(
    config: ActorCriticConfig, *, observation_shape: tuple[int, ...], num_actions: int, key: Array
) -> ActorCriticState:
    """A fresh agent."""
    first, second = jax.random.split(key)
    network = observation_network(
        observation_shape, num_actions + 1, config.hidden, config.filters, key=first
    )
    paths = None
    if config.operator == "marginalized":
        between_states = PathNetwork(network.inputs, network.inputs, config.hidden, key=second)
        paths = path_network.init(path_loss(config), between_states)
    acting = jax.tree.map(jnp.copy, network)  # a copy, so that both can be donated
    optimiser = optax.adam(config.learning_rate).init(network)
    return ActorCriticState(network, acting, optimiser, jnp.zeros((), jnp.int32), paths)


def split(state: ActorCriticState) -> tuple[ActorCriticState, Paths | None]:
    """The agent without its TD weights, and the TD weights."""
    return replace(state, paths=None), state.paths


def join(state: ActorCriticState, paths: Paths | None) -> ActorCriticState:
    """The agent with these TD weights: the inverse of `split`."""
    return replace(state, paths=paths)


def policy(state: ActorCriticState) -> Float[Array, " n"]:
    """The parameters that compute the logits, as one vector of a perceptron: see `simulators.policy`."""
    dense = state.acting.as_perceptron()
    logits_only = (dense.weights[-1][..., :-1], dense.biases[-1][..., :-1])
    return actor_vector(eqx.tree_at(lambda m: (m.weights[-1], m.biases[-1]), dense, logits_only))


def behaviour(
    state: ActorCriticState, observations: Float[Array, "E *shape"], epsilon: Float[Array, " E"]
) -> Float[Array, "E actions"]:
    """Probabilities of the actor in each environment, mixed with the uniform policy by ε."""
    pi = jax.nn.softmax(state.acting(observations.reshape(len(observations), -1))[:, :-1])
    return (1 - epsilon[:, None]) * pi + epsilon[:, None] / pi.shape[-1]


def draw(config: ActorCriticConfig, buffer: Replay, keys: Array) -> tuple[Sequences, Array]:
    """The batches of a round: a share of `replay_share` is drawn from all of replay, the rest from the last block."""
    replayed = round(config.replay_share * config.batch_size)
    fresh = config.batch_size - replayed
    # Sequences that lie in the last block with all their steps.
    fresh_starts = config.update_every - config.environments * (config.sequence_length - 1)
    sample = partial(
        replay.sample,
        buffer,
        length=config.length,
        environments=config.environments,
        time_limits_end=config.time_limits_end,
    )

    def one(key: Array) -> Sequences:
        first, second = jax.random.split(key)
        parts = [sample(first, batch=replayed)] if replayed else []
        parts += [sample(second, batch=fresh, newest=fresh_starts)] if fresh else []
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)

    return jax.vmap(one)(keys), keys


def targets(
    config: ActorCriticConfig, state: ActorCriticState, batches: Sequences, keys: Array, *, train: bool
) -> tuple[Targets, Paths | None, Float[Array, ""]]:
    """The half of an update that depends on the operator: value targets and advantages.

    With `train`, the TD weights then take one step on the last batch.
    """
    parts: list[Sequences] = [jax.tree.map(lambda x, k=k: x[k], batches) for k in range(len(keys))]
    found, ratios = zip(*(batch_targets(config, state, batch) for batch in parts), strict=True)
    paths, loss = state.paths, jnp.zeros(())
    if train and paths is not None:
        paths, loss = train_paths(config, paths, parts[-1], ratios[-1])
    stacked: Targets = jax.tree.map(lambda *x: jnp.stack(x), *found)
    return jax.lax.stop_gradient(stacked), paths, loss


def batch_targets(
    config: ActorCriticConfig, state: ActorCriticState, batch: Sequences
) -> tuple[Targets, Float[Array, "T batch"]]:
    r"""The targets of one batch, and the ratios $\min(\bar c, \pi/\mu)$, which the TD weights learn from."""
    out = state.network(jnp.concatenate([batch.observations[:1], batch.next_observations]))
    logits, v, v_next = out[:-1, :, :-1], out[:-1, :, -1], out[1:, :, -1]
    action = jax.nn.one_hot(batch.actions[..., 0].astype(jnp.int32), logits.shape[-1])
    log_pi = jnp.sum(jax.nn.log_softmax(logits) * action, -1)
    log_ratio = log_pi - batch.log_behaviour
    ratios, rhos = (clip_log_ratios(log_ratio, clip) for clip in (config.clip, config.rho_clip))
    traces = config.decay * ratios
    if state.paths is None:
        value = vtrace(config, v, v_next, batch, traces, rhos)
        weights = jnp.cumprod(jnp.concatenate([jnp.ones_like(traces[:1]), traces[:-1]]), 0)
    else:
        value, weights = marginalized(config, state.paths, v, v_next, batch, rhos)
    value_next = jnp.where(batch.truncated, v_next, jnp.concatenate([value[1:], v_next[-1:]]))
    advantage = rhos * (batch.rewards + batch.discounts(config.discount) * value_next - v)
    target = jnp.stack([value, advantage, batch.valid], -1)
    pairs = jnp.concatenate([batch.observations, action], -1)
    kept = jnp.where(batch.valid[..., None], target, 0)
    return Targets(pairs, kept, traces, weights, batch.valid), ratios


def vtrace(
    config: ActorCriticConfig, v: Array, v_next: Array, batch: Sequences, traces: Array, rhos: Array
) -> Float[Array, "T batch"]:
    """V-trace targets of every step, by `marginax.targets`."""

    def one(v, v_next, rewards, discounts, traces, rhos, truncated, valid) -> Array:
        return estimates.vtrace(v, v_next, rewards, discounts, traces, rhos, truncated, valid=valid)

    sequence = (batch.rewards, batch.discounts(config.discount), traces, rhos, batch.truncated, batch.valid)
    return jax.vmap(one, 1, 1)(v, v_next, *sequence)


def marginalized(
    config: ActorCriticConfig,
    paths: Paths,
    v: Array,
    v_next: Array,
    batch: Sequences,
    rhos: Array,
) -> tuple[Float[Array, "T batch"], Float[Array, "T batch"]]:
    r"""Targets of marginalized V-trace for every step t, and the weights of the first target.

    The weight of step s for start t is $\lambda^{s-t} u(x_s \mid x_t)$, with $u \le \bar c^{\,s-t}$.
    """
    steps = jnp.arange(len(v))
    distance = steps[None, :] - steps[:, None]  # s - t at [t, s]
    later_steps = jnp.maximum(distance, 0)
    states = jnp.swapaxes(batch.observations, 0, 1)
    shape = (states.shape[0], len(v), *states.shape[1:])  # [batch, t, s, n]
    ends, starts = jnp.broadcast_to(states[:, None], shape), jnp.broadcast_to(states[:, :, None], shape)
    u = jnp.exp(jnp.minimum(paths.average(ends, starts), jnp.log(config.clip) * later_steps))
    weights = jnp.where(distance == 0, 1.0, jnp.where(distance > 0, config.decay**later_steps * u, 0.0))

    def one(v, v_next, rewards, discounts, weights, rhos, truncated, valid) -> Array:
        return estimates.marginalized_vtrace(
            v, v_next, rewards, discounts, weights, rhos, truncated, valid=valid
        )

    discounts = batch.discounts(config.discount)
    sequence = (batch.rewards, discounts, weights, rhos, batch.truncated, batch.valid)
    value = jax.vmap(one, (1, 1, 1, 1, 0, 1, 1, 1), 1)(v, v_next, *sequence)
    return value, weights[:, 0].T


def train_paths(
    config: ActorCriticConfig, paths: Paths, batch: Sequences, ratios: Float[Array, "T batch"]
) -> tuple[Paths, Float[Array, ""]]:
    """One step of the TD weights between states, from the first state of every sequence.

    For pairs, `path_network` leaves out the trace of the first step. For states it counts as well, so a step is put in front.
    """
    states = jnp.swapaxes(batch.observations, 0, 1)
    start = jnp.broadcast_to(states[:, :1], states.shape)

    def log_u(network: PathNetwork) -> Float[Array, "batch T"]:
        return jnp.pad(network(states, start), ((0, 0), (1, 0)))

    def preceded_by(first: float | bool, x: Array) -> Array:
        return jnp.concatenate([jnp.full_like(x[:1], first), x]).T

    paths, loss, _ = path_network.update(
        path_loss(config),
        paths,
        log_u,
        preceded_by(1.0, ratios),
        preceded_by(config.discount, batch.discounts(config.discount)),
        preceded_by(False, batch.truncated),
        clip=config.clip,
    )
    return paths, loss


def learn(
    config: ActorCriticConfig,
    state: ActorCriticState,
    pairs: Float[Array, "T batch n"],
    target: Float[Array, "T batch 3"],
    *,
    delayed: bool,
) -> tuple[ActorCriticState, Float[Array, ""], Float[Array, "T batch"]]:
    """One step of Adam on the policy gradient, the squared error of V and the entropy.

    Returns:
        The agent, the mean squared error of V, and the values before the step.
    """
    value_target, advantage, valid = jnp.moveaxis(target, -1, 0)
    observations, action = jnp.split(pairs, [state.network.inputs], axis=-1)
    steps = jnp.maximum(jnp.sum(valid), 1)

    def loss(network: ObservationNetwork) -> tuple[Array, tuple[Array, Array]]:
        out = network(observations)
        log_pi = jax.nn.log_softmax(out[..., :-1])
        entropy = -jnp.sum(jnp.exp(log_pi) * log_pi, -1)
        error = jnp.sum(valid * (out[..., -1] - value_target) ** 2) / steps
        gain = valid * (advantage * jnp.sum(log_pi * action, -1) + config.entropy * entropy)
        return config.value_factor * error - jnp.sum(gain) / steps, (error, out[..., -1])

    gradient, (error, values) = jax.grad(loss, has_aux=True)(state.network)
    gradient, _ = optax.clip_by_global_norm(config.gradient_clip).update(gradient, optax.EmptyState())
    network, optimiser = adam_step(config.learning_rate, gradient, state.optimiser, state.network)
    count = state.count + 1
    renew = count % config.actor_delay == 0
    acting = jax.tree.map(lambda new, old: jnp.where(renew, new, old), network, state.acting)
    return ActorCriticState(network, acting, optimiser, count, state.paths), error, values


def measure(
    config: ActorCriticConfig, state: ActorCriticState, batch: Sequences, key: Array
) -> Float[Array, " metrics"]:
    """`METRICS` of the next update if it were made on this batch. Nothing is updated."""
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    found, _, weight_loss = targets(config, state, one, key[None], train=True)
    vtrace_targets, *_ = targets(config, replace(state, paths=None), one, key[None], train=False)
    _, loss, values = learn(config, state, found.pairs[0], found.target[0], delayed=True)
    mean = partial(masked_mean, batch.valid)

    def variance(error: Array) -> Array:
        return mean((error - mean(error)) ** 2)

    value_target, vtrace_target = found.target[0, ..., 0], vtrace_targets.target[0, ..., 0]
    log_pi = jax.nn.log_softmax(state.network(batch.observations)[..., :-1])
    entropy = -jnp.sum(jnp.exp(log_pi) * log_pi, -1)
    weights, after_start = found.weights[0], later(batch.valid)
    metrics = {
        "critic_loss": loss,
        "q_mean": mean(values),
        "q_size": mean(jnp.abs(values)),
        "target_mean": mean(value_target),
        "error_variance": variance(value_target - values),
        "error_variance_vtrace": variance(vtrace_target - values),
        "entropy": mean(entropy),
        "trace_mean": mean(found.traces[0]),
        "weight_mean": masked_mean(after_start, weights),
        "weight_max": jnp.max(jnp.where(after_start, weights, 0)),
        "weight_loss": weight_loss,
    }
    return jnp.stack([metrics[name] for name in METRICS])
