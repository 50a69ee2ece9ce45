r"""An actor-critic with V-trace, or marginalized V-trace, from stale actors and replay; a trainer takes it as it takes `td3`.

One network has the logits of π and V. The data come from actors that are up to `actor_delay` updates old, and a stated
share of every batch from replay, so both the values and the policy gradient need the correction: with targets
$v_t$ of V-trace (or its marginalized form, whose weights $w_{x_t}(x_s)$ are the mean product of traces on the way from
$x_t$ to $x_s$) the policy follows $\rho_t (r_t + \gamma v_{t+1} - V(x_t)) \nabla \log \pi(a_t|x_t)$.
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
from marginax.deep.networks import ObservationNetwork, actor_vector, observation_network
from marginax.deep.path_network import PathNetwork, Paths
from marginax.deep.q_learning import delayed_rounds, observe, rounds, run_round
from marginax.deep.replay import Replay, Sequences
from marginax.deep.weight_network import adam
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

_LOSS = ("learning_rate", "entropy", "value_factor", "gradient_clip", "actor_delay")
SHARED = (
    "hidden",
    "filters",
    "batch_size",
    "sequence_length",
    "update_every",
    "block_updates",
    "update_after",
    "environments",
    *_LOSS,
)
MEASURE_EVERY = 1000
METRICS = (
    *("critic_loss", "q_mean", "q_size", "target_mean", "error_variance", "error_variance_vtrace"),
    *("entropy", "trace_mean", "weight_mean", "weight_max", "weight_loss"),
)


class ActorCriticState(eqx.Module):
    """Everything that learning changes.

    Attributes:
        network: Logits of all actions, and V last.
        acting: The network that acts, a copy renewed every `actor_delay` updates.
        optimiser: Adam's state.
        count: Updates so far.
        paths: The weights between states; None for V-trace.
    """

    network: ObservationNetwork
    acting: ObservationNetwork
    optimiser: Any
    count: Int[Array, "..."]
    paths: Paths | None


class Targets(eqx.Module):
    """What the network is to learn from the batches of a round.

    Attributes:
        pairs: [observation, one-hot action] of every step, `[batches, T, batch, n]`.
        target: Value target, weighted advantage and whether the step is valid, `[batches, T, batch, 3]`.
        traces: λ c of every step.
        weights: Credit $w_{x_0}(x_t)$ of the first step's target.
        valid: Which steps are no padding.
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
        of_states = PathNetwork(network.inputs, network.inputs, config.hidden, key=second)
        paths = path_network.init(path_loss(config), of_states)
    optimiser = optax.adam(config.learning_rate).init(network)
    return ActorCriticState(
        network, jax.tree.map(jnp.copy, network), optimiser, jnp.zeros((), jnp.int32), paths
    )


def split(state: ActorCriticState) -> tuple[ActorCriticState, Paths | None]:
    """The agent without what belongs to its operator, and that."""
    return replace(state, paths=None), state.paths


def join(state: ActorCriticState, own: Paths | None) -> ActorCriticState:
    """The agent that `split` took apart."""
    return replace(state, paths=own)


def policy(state: ActorCriticState) -> Float[Array, " n"]:
    """The logits' network as the vector of a perceptron: see `simulators.policy`."""
    dense = state.acting.as_perceptron()
    weights, biases = ([*x[:-1], x[-1][..., :-1]] for x in (dense.weights, dense.biases))
    return actor_vector(eqx.tree_at(lambda m: (m.weights, m.biases), dense, (weights, biases)))


def behaviour(
    state: ActorCriticState, observations: Float[Array, "E *shape"], epsilon: Float[Array, " E"]
) -> Float[Array, "E actions"]:
    """Probabilities of the stale actor, mixed with uniform ones in each environment."""
    pi = jax.nn.softmax(state.acting(observations.reshape(len(observations), -1))[:, :-1])
    return (1 - epsilon[:, None]) * pi + epsilon[:, None] / pi.shape[-1]


def draw(config: ActorCriticConfig, buffer: Replay, keys: Array) -> tuple[Sequences, Array]:
    """The batches of a round: `replay_share` of the sequences from all that is stored, the others from the last block."""
    old = round(config.replay_share * config.batch_size)
    new = config.update_every - config.environments * (config.sequence_length - 1)

    def one(key: Array) -> Sequences:
        first, second = jax.random.split(key)
        shape: dict[str, Any] = {"length": config.length, "environments": config.environments}
        shape["time_limits_end"] = config.time_limits_end
        parts = []
        if old:
            parts.append(replay.sample(buffer, first, batch=old, **shape))
        if old < config.batch_size:
            parts.append(replay.sample(buffer, second, batch=config.batch_size - old, newest=new, **shape))
        return jax.tree.map(lambda *x: jnp.concatenate(x, 1), *parts)

    return jax.vmap(one)(keys), keys


def targets(
    config: ActorCriticConfig, state: ActorCriticState, batches: Sequences, keys: Array, *, train: bool
) -> tuple[Targets, Paths | None, Float[Array, ""]]:
    """The half of an update that depends on the operator: value targets and advantages, and a step of the weights.

    The weights learn from the last of the batches, after the targets of all.
    """
    each: list[Sequences] = [jax.tree.map(lambda x, k=k: x[k], batches) for k in range(len(keys))]
    found, ratios = zip(*(batch_targets(config, state, batch) for batch in each), strict=True)
    paths, loss = state.paths, jnp.zeros(())
    if train and paths is not None:
        paths, loss = train_paths(config, paths, each[-1], ratios[-1])
    stacked: Targets = jax.tree.map(lambda *x: jnp.stack(x), *found)
    return jax.lax.stop_gradient(stacked), paths, loss


def batch_targets(
    config: ActorCriticConfig, state: ActorCriticState, batch: Sequences
) -> tuple[Targets, Float[Array, "T batch"]]:
    r"""What the network is to learn from one batch, and the ratios $\min(\bar c, \pi/\mu)$ without the decay."""
    out = state.network(jnp.concatenate([batch.observations[:1], batch.next_observations]))
    logits, v, v_next = out[:-1, :, :-1], out[:-1, :, -1], out[1:, :, -1]
    action = jax.nn.one_hot(batch.actions[..., 0].astype(jnp.int32), logits.shape[-1])
    log_pi = jnp.sum(jax.nn.log_softmax(logits) * action, -1)
    log_ratio = log_pi - batch.log_behaviour
    # Products of traces, and of those that are known, carry no decay here: λ^(s - t) is exact.
    ratios, rhos = (clip_log_ratios(log_ratio, c) for c in (config.clip, config.rho_clip))
    traces = config.decay * ratios
    if state.paths is None:
        value = vtrace(config, v, v_next, batch, ratios, rhos)
        weights = jnp.cumprod(jnp.concatenate([jnp.ones_like(traces[:1]), traces[:-1]]), 0)
    else:
        value, weights = marginalized(config, state.paths, v, v_next, batch, ratios, rhos)
    following = jnp.where(batch.truncated, v_next, jnp.concatenate([value[1:], v_next[-1:]]))
    advantage = rhos * (batch.rewards + batch.discounts(config.discount) * following - v)
    target = jnp.stack([value, advantage, batch.valid], -1)
    pairs = jnp.concatenate([batch.observations, action], -1)
    kept = jnp.where(batch.valid[..., None], target, 0)
    return Targets(pairs, kept, traces, weights, batch.valid), ratios


def vtrace(
    config: ActorCriticConfig, v: Array, v_next: Array, batch: Sequences, ratios: Array, rhos: Array
) -> Float[Array, "T batch"]:
    """V-trace targets of every step, by `marginax.targets`."""

    def one(v, v_next, rewards, discounts, traces, rhos, truncated, valid) -> Array:
        return estimates.vtrace(v, v_next, rewards, discounts, traces, rhos, truncated, valid=valid)

    discounts = batch.discounts(config.discount)
    arrays = (v, v_next, batch.rewards, discounts, config.decay * ratios, rhos, batch.truncated, batch.valid)
    return jax.vmap(one, 1, 1)(*arrays)


def marginalized(
    config: ActorCriticConfig,
    paths: Paths,
    v: Array,
    v_next: Array,
    batch: Sequences,
    ratios: Array,
    rhos: Array,
) -> tuple[Float[Array, "T batch"], Float[Array, "T batch"]]:
    r"""Targets of marginalized V-trace for every step t, with weights $\lambda^{s-t} u(x_s \mid x_t)$, at most $\bar c^{s-t}$."""
    steps = jnp.arange(len(v))
    ahead = steps[None, :] - steps[:, None]  # of step s as seen from step t
    states = jnp.swapaxes(batch.observations, 0, 1)
    shape = (states.shape[0], len(v), *states.shape[1:])  # [batch, t, s, n]
    later_, start = jnp.broadcast_to(states[:, None], shape), jnp.broadcast_to(states[:, :, None], shape)
    most = jnp.log(config.clip) * jnp.maximum(ahead, 0)
    u = jnp.exp(jnp.minimum(paths.average(later_, start), most))
    weights = jnp.where(ahead == 0, 1.0, jnp.where(ahead > 0, config.decay ** jnp.maximum(ahead, 0) * u, 0.0))

    def one(v, v_next, rewards, discounts, weights, rhos, truncated, valid) -> Array:
        return estimates.marginalized_vtrace(
            v, v_next, rewards, discounts, weights, rhos, truncated, valid=valid
        )

    discounts = batch.discounts(config.discount)
    arrays = (rhos, batch.truncated, batch.valid)
    found = jax.vmap(one, (1, 1, 1, 1, 0, 1, 1, 1), 1)(v, v_next, batch.rewards, discounts, weights, *arrays)
    return found, weights[:, 0].T


def train_paths(
    config: ActorCriticConfig, paths: Paths, batch: Sequences, ratios: Float[Array, "T batch"]
) -> tuple[Paths, Float[Array, ""]]:
    """One step of the weights between states, from the first state of every sequence.

    `path_network` counts the traces after the first step; of states the first counts as well, so all is one step later.
    """
    states = jnp.swapaxes(batch.observations, 0, 1)
    start = jnp.broadcast_to(states[:, :1], states.shape)

    def log_u(network: PathNetwork) -> Float[Array, "batch T"]:
        return jnp.pad(network(states, start), ((0, 0), (1, 0)))

    discounts = batch.discounts(config.discount)
    late = [
        jnp.concatenate([jnp.full_like(x[:1], first), x]).T
        for x, first in ((ratios, 1.0), (discounts, config.discount), (batch.truncated, False))
    ]
    paths, loss, _ = path_network.update(path_loss(config), paths, log_u, *late, clip=config.clip)
    return paths, loss


def learn(
    config: ActorCriticConfig,
    state: ActorCriticState,
    pairs: Float[Array, "T batch n"],
    target: Float[Array, "T batch 3"],
    *,
    delayed: bool,
) -> tuple[ActorCriticState, Float[Array, ""], Float[Array, "T batch"]]:
    """One step of Adam on policy gradient, squared error of V and entropy; also the error and the values before it."""
    value_target, advantage, valid = jnp.moveaxis(target, -1, 0)
    observations, action = jnp.split(pairs, [state.network.inputs], axis=-1)
    count = jnp.maximum(jnp.sum(valid), 1)

    def loss(network: ObservationNetwork) -> tuple[Array, tuple[Array, Array]]:
        out = network(observations)
        log_pi = jax.nn.log_softmax(out[..., :-1])
        entropy = -jnp.sum(jnp.exp(log_pi) * log_pi, -1)
        error = jnp.sum(valid * (out[..., -1] - value_target) ** 2) / count
        gain = valid * (advantage * jnp.sum(log_pi * action, -1) + config.entropy * entropy)
        return config.value_factor * error - jnp.sum(gain) / count, (error, out[..., -1])

    slope, (error, values) = jax.grad(loss, has_aux=True)(state.network)
    slope, _ = optax.clip_by_global_norm(config.gradient_clip).update(slope, optax.EmptyState())
    network, optimiser = adam(config.learning_rate, slope, state.optimiser, state.network)
    updates = state.count + 1
    renew = updates % config.actor_delay == 0
    acting = jax.tree.map(lambda new, old: jnp.where(renew, new, old), network, state.acting)
    return ActorCriticState(network, acting, optimiser, updates, state.paths), error, values


def measure(
    config: ActorCriticConfig, state: ActorCriticState, batch: Sequences, key: Array
) -> Float[Array, " metrics"]:
    """`METRICS` of the update that would come next on a batch; nothing is updated."""
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    found, _, weight_loss = targets(config, state, one, key[None], train=True)
    rival, *_ = targets(config, replace(state, paths=None), one, key[None], train=False)
    _, loss, values = learn(config, state, found.pairs[0], found.target[0], delayed=True)
    value_target, valid = found.target[0, ..., 0], batch.valid
    mean = partial(masked_mean, valid)

    def spread(target: Array) -> Array:
        error = target - values
        return mean((error - mean(error)) ** 2)

    log_pi = jax.nn.log_softmax(state.network(batch.observations)[..., :-1])
    entropy = mean(-jnp.sum(jnp.exp(log_pi) * log_pi, -1))
    weights, after = found.weights[0], later(valid)
    return jnp.stack(
        [
            *(loss, mean(values), mean(jnp.abs(values)), mean(value_target)),
            *(spread(value_target), spread(rival.target[0, ..., 0]), entropy, mean(found.traces[0])),
            *(masked_mean(after, weights), jnp.max(jnp.where(after, weights, 0)), weight_loss),
        ]
    )
