r"""The half of an update that depends on the operator: what the critics are to learn from replayed sequences.

For every operator the target at the first pair of a sequence is
$Q(x_0,a_0) + \sum_t \gamma^t w_t (r_t + \gamma Q(x_{t+1},\pi) - Q(x_t,a_t))$ with the delayed networks; operators
differ in the credits $w_t$: products of traces, or TD weights. A round of updates between two moves of the target
networks has one batch per update; their targets are computed together, along a leading axis of batches.
"""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from marginax import targets
from marginax.deep import path_network, replay, weight_network
from marginax.deep.config import AgentConfig, TD3Config
from marginax.deep.networks import MLP, Critics, act, value
from marginax.deep.path_network import PathLoss, PathNetwork, Paths
from marginax.deep.replay import Sequences
from marginax.traces import clip_log_ratios
from marginax.weights.losses import cumulative, normalise

Estimator = weight_network.Estimator | Paths


class CriticTarget(eqx.Module):
    """What the critics are to learn from the batches of a round.

    Attributes:
        target: One constant target per sequence.
        pairs: [state, action] features of the first step of each.
        credit: TD weights, or products of traces for the other operators.
        share: Probability with which a step was read; 1 where all are.
        valid: Which entries of the credit count.
        trace_mean: Mean trace over steps t ≥ 1 of each batch; 0 where none was computed.
    """

    target: Float[Array, "batches batch"]
    pairs: Float[Array, "batches batch n"]
    credit: Float[Array, "batches T batch"]
    share: Float[Array, "batches T batch"]
    valid: Bool[Array, "batches T batch"]
    trace_mean: Float[Array, " batches"]


class Metrics(eqx.Module):
    """What one update says about itself (of a block: one entry per update).

    Attributes:
        critic_loss: Squared error, summed over the twins.
        q_mean: Mean of the first critic on the batch.
        q_size: Mean of its absolute value.
        target_mean: Mean of the targets.
        target_variance: Variance of the targets over the batch.
        error_variance: Variance of target minus the first critic's value: what the operator's sampling adds.
        trace_mean: Mean trace c(x_t, a_t) over steps t ≥ 1; 0 where there are none.
        weight_mean: Mean credit of the steps t ≥ 1: TD weights, or products of traces for the other operators.
        weight_max: Largest credit of any step.
        effective_length: Mean over sequences of the sum of credits; 1 for one-step.
        weight_loss: Loss of the TD weights; 0 in updates that do not train them.
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


class Bootstrap(eqx.Module):
    """What the target networks say along a batch of sequences.

    Attributes:
        v_next: $Q(x_{t+1}, π)$ with the smoothing noise of TD3, the smaller of the twins.
        traces: $c(x_t, a_t)$; 1 at the first step, where it is never read.
        q: What the operator subtracts from step t: $Q(x_t, a_t)$, or $Q(x_t, π)$ for `n-step` and `retrace-paper`;
            0 at the first step where it cancels.
        features: [state, action], actions clipped to the box.
    """

    v_next: Float[Array, "T batch"]
    traces: Float[Array, "T batch"]
    q: Float[Array, "T batch"]
    features: Float[Array, "T batch n"]


class Along(NamedTuple):
    """What TD weights are learned from: sequences `[batches, T, batch, …]`, features of pairs, traces and discounts."""

    sequences: Sequences
    features: Float[Array, "batches T batch n"]
    traces: Float[Array, "batches T batch"]
    discounts: Float[Array, "batches T batch"]


def init_estimator(
    config: AgentConfig, observation_size: int, action_size: int, key: Array
) -> Estimator | None:
    """Fresh networks of the TD weights; None unless the operator is `marginalized`."""
    if config.operator != "marginalized":
        return None
    pair = observation_size + action_size
    if config.weights != "paths":
        return weight_network.init(config, pair, key)
    network = PathNetwork(observation_size, pair if config.start_conditioned else 0, config.hidden, key=key)
    return path_network.init(path_loss(config), network)


def path_loss(config: AgentConfig) -> PathLoss:
    """How the weights of paths are learned."""
    return PathLoss(config.path_power, config.path_mixture, learning_rate=config.weight_learning_rate)


def critic_targets(
    config: TD3Config,
    target_actor: MLP,
    target_critic: Critics,
    estimator: Estimator | None,
    batches: Sequences,
    keys: Array,
    *,
    train: bool,
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """Targets of the batches of a round and, if `train`, one step of the TD weights on the last of them.

    Args:
        config: Says which operator.
        target_actor: The delayed actor.
        target_critic: The delayed critics.
        estimator: The TD weights; None unless the operator is `marginalized`.
        batches: Sequences with fields `[batches, T, batch, …]`.
        keys: One JAX random key per batch.
        train: Whether the TD weights learn.

    Returns:
        The targets, the estimator, and its loss (0 where it does not learn).
    """
    if config.operator == "marginalized" and estimator is None:
        raise ValueError("estimator must be given for the marginalized operator.")
    if estimator is not None and config.samples_a_step:
        return _from_one_step(config, target_actor, target_critic, estimator, batches, keys, train=train)
    ahead = jax.vmap(partial(bootstrap, config, target_actor, target_critic))(batches, keys)
    return from_bootstrap(config, estimator, batches, ahead, train=train)


def from_bootstrap(
    config: AgentConfig,
    estimator: Estimator | None,
    batches: Sequences,
    ahead: Bootstrap,
    *,
    train: bool,
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """Targets that read all steps, from what the target networks say along the batches: see `critic_targets`."""
    if estimator is None:
        credit, loss = jax.vmap(products)(ahead.traces, batches), jnp.zeros(())
    else:
        along = Along(batches, ahead.features, ahead.traces, batches.discounts(config.discount))
        credit, estimator, loss = td_weights(config, estimator, along, train=train)
    target = jax.vmap(partial(operator_target, config))(batches, ahead, credit)
    found = CriticTarget(
        target=jax.lax.stop_gradient(target),
        pairs=ahead.features[:, 0],
        credit=credit,
        share=jnp.ones_like(credit),
        valid=batches.valid,
        trace_mean=jax.vmap(masked_mean)(later(batches.valid), ahead.traces),
    )
    return found, estimator, loss


def _from_one_step(
    config: TD3Config,
    target_actor: MLP,
    target_critic: Critics,
    estimator: Estimator,
    batches: Sequences,
    keys: Array,
    *,
    train: bool,
) -> tuple[CriticTarget, Estimator, Float[Array, ""]]:
    """Marginalized targets from the first step and one later step τ, weighted by 1 / P(τ): the same on average.

    The weight of a step needs no walk along the path to it, so only the training of the weights, which learn
    from products of traces, looks at the steps in between.
    """
    step_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    steps, probability = jax.vmap(partial(draw_steps, config, batches.rewards.shape[2]))(step_keys)
    two = jax.vmap(replay.pick)(batches, steps)
    traces, trace_mean = jnp.ones(two.rewards.shape), jnp.zeros(len(keys))
    if train:
        last: Sequences = jax.tree.map(lambda x: x[-1], batches)
        along = act(target_actor, last.next_observations)
        whole = trace(config, last, along)
        place = (steps[-1], jnp.arange(steps.shape[1]))
        traces = traces.at[-1, 1].set(products(whole, last)[place])
        trace_mean = trace_mean.at[-1].set(masked_mean(later(last.valid), whole))
        means = jnp.stack([along[0], along[place]])[None]
        if len(keys) > 1:
            means = jnp.concatenate([act(target_actor, two.next_observations[:-1]), means])
    else:
        means = act(target_actor, two.next_observations)
    ahead = jax.vmap(partial(look_ahead, config, target_critic))(two, means, traces, noise_keys)
    power = config.discount ** (steps - 1) / probability  # beside the γ that a step's successor has anyway
    discounts = jnp.where(two.terminal, 0.0, config.discount * jnp.stack([power, jnp.ones_like(power)], 1))
    along_two = Along(two, ahead.features, traces, discounts)
    credit, estimator, loss = td_weights(config, estimator, along_two, train=train)
    target = jax.vmap(partial(operator_target, config))(two, ahead, credit.at[:, 1].multiply(power))
    share = jnp.ones_like(credit).at[:, 1].set(probability)
    found = (jax.lax.stop_gradient(target), ahead.features[:, 0], credit, share, two.valid, trace_mean)
    return CriticTarget(*found), estimator, loss


def bootstrap(
    config: TD3Config, target_actor: MLP, target_critic: Critics, batch: Sequences, key: Array
) -> Bootstrap:
    """Bootstrap values and traces of a batch; the policy π is a Gaussian around the target actor's output."""
    means = act(target_actor, batch.next_observations)
    return look_ahead(config, target_critic, batch, means, trace(config, batch, means), key)


def trace(config: TD3Config, batch: Sequences, means: Float[Array, "T batch m"]) -> Float[Array, "T batch"]:
    r"""The traces $c_t = \lambda \min(\bar c, (\pi/\mu)^{\text{temperature}})$ of a batch, 1 at the first step.

    `means` are the delayed actor's actions at the successors $x_{t+1}$.
    """
    ones = jnp.ones(batch.rewards.shape)
    if len(ones) == 1 or config.operator == "n-step":
        return ones
    # The state of step t is the successor of step t - 1.
    log_ratio = log_density(batch.actions[1:], means[:-1], config.policy_scale) - batch.log_behaviour[1:]
    return ones.at[1:].set(clip_log_ratios(config.trace_temperature * log_ratio, config.clip, config.decay))


def log_density(
    actions: Float[Array, "*batch m"], mean: Float[Array, "*batch m"], scale: float
) -> Float[Array, "*batch"]:
    """Log-density of a Gaussian with the same scale in every direction."""
    log_scale = jnp.log(scale) + 0.5 * jnp.log(2 * jnp.pi)
    return -jnp.sum(0.5 * ((actions - mean) / scale) ** 2 + log_scale, axis=-1)


def products(traces: Float[Array, "T batch"], batch: Sequences) -> Float[Array, "T batch"]:
    """$C_t = c_1 ⋯ c_t$ of each sequence, zero in the padding."""
    return jax.vmap(cumulative, 1, 1)(traces, batch.terminal | batch.truncated)[0]


def look_ahead(
    config: TD3Config,
    target_critic: Critics,
    batch: Sequences,
    means: Float[Array, "T batch m"],
    traces: Float[Array, "T batch"],
    key: Array,
) -> Bootstrap:
    """Values at the policy's actions, smoothed as TD3 has it, and at those taken, beside the traces of a batch."""
    noise = config.target_noise * jax.random.normal(key, means.shape)
    smoothed = jnp.clip(means + jnp.clip(noise, -config.noise_clip, config.noise_clip), -1, 1)
    following = jnp.concatenate([batch.next_observations, smoothed], -1)
    features = jnp.concatenate([batch.observations, jnp.clip(batch.actions, -1, 1)], -1)
    # The first value cancels unless the first weight differs from 1.
    first = 0 if config.operator == "marginalized" and not first_weight_is_one(config) else 1
    taken = config.operator not in ("n-step", "retrace-paper") and first < len(features)
    pairs = jnp.concatenate([following, features[first:]]) if taken else following
    values = jnp.min(value(target_critic, pairs), axis=0)
    v_next, others = values[: len(means)], values[len(means) :]
    q = jnp.concatenate([jnp.zeros_like(v_next[:first]), others if taken else v_next[:-1]])
    return Bootstrap(v_next, traces, q, features)


def draw_steps(
    config: TD3Config, batch: int, key: Array
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    r"""One later step for each sequence, $1 \le \tau < T$, and its probability, in proportion to $(\gamma\lambda)^\tau$.

    Weights of traces with decay λ are of the order of $\lambda^\tau$, so steps are drawn about as often as they count.
    """
    times = jnp.arange(1, config.sequence_length)
    logits = times * jnp.log(config.discount * max(config.decay, 0.1) + 1e-6)
    steps = 1 + jax.random.categorical(key, logits, shape=(batch,)).astype(jnp.int32)
    return steps, jax.nn.softmax(logits)[steps - 1]


def td_weights(
    config: AgentConfig, estimator: Estimator, along: Along, *, train: bool
) -> tuple[Float[Array, "batches T batch"], Estimator, Float[Array, ""]]:
    """TD weights for the targets, and the estimator and its loss after its training on the last batch, if any."""
    if isinstance(estimator, Paths):
        weights, estimator, loss = _path_weights(config, estimator, along, train)
    else:
        weights, estimator, loss = _pair_weights(config, estimator, along, train)
    valid = along.sequences.valid
    weights = jnp.where(valid, weights, 0)
    if config.normalisation == "none":
        return jnp.minimum(weights, config.weight_bound), estimator, loss
    power = config.normalisation_power if config.normalisation == "power" else 1.0
    return jax.vmap(partial(normalise, power=power))(weights, valid), estimator, loss


def _pair_weights(
    config: AgentConfig, estimator: weight_network.Estimator, along: Along, train: bool
) -> tuple[Array, Estimator, Array]:
    """`td_weights` of a network that sees pairs, before bounds and normalisation."""
    pairs = jax.vmap(partial(weight_network.inputs, config))(along.features)
    predict = jax.vmap(partial(weight_network.predict, config, estimator.weights))
    loss, earlier = jnp.zeros(()), pairs[:-1] if train else pairs
    weights = [predict(earlier)] if len(earlier) else []
    if train:
        last = (x[-1] for x in (pairs, along.traces, along.discounts, along.sequences.truncated))
        estimator, loss, own = weight_network.update(config, estimator, *last)
        weights.append(own[None])
    return jnp.concatenate(weights), estimator, loss


def _path_weights(
    config: AgentConfig, estimator: Paths, along: Along, train: bool
) -> tuple[Array, Estimator, Array]:
    r"""`td_weights` of paths, $\lambda^t u(x_t \mid x_0, a_0) \min(\bar c, \pi/\mu)$: the action's own trace is exact."""
    start = along.features[:, 0] if config.start_conditioned else along.features[:, 0, :, :0]
    ratios = along.traces / config.decay if config.decay else along.traces

    def log_u(network: PathNetwork, k: int) -> Float[Array, "batch T"]:
        return network(along.sequences.observations[k], start[k]).T

    u = path_network.mean_products(
        jnp.stack([log_u(estimator.average, k) for k in range(len(ratios))]), config.clip
    )
    weights = jnp.swapaxes(path_network.credit(u, jnp.swapaxes(ratios, 1, 2), config.decay), 1, 2)
    if not train:
        return weights, estimator, jnp.zeros(())
    last = (x[-1].T for x in (ratios, along.discounts, along.sequences.truncated))
    step = (path_loss(config), estimator, partial(log_u, k=-1))
    estimator, loss, _ = path_network.update(*step, *last, clip=config.clip)
    return weights, estimator, loss


def operator_target(
    config: AgentConfig, batch: Sequences, ahead: Bootstrap, credit: Float[Array, "T batch"]
) -> Float[Array, " batch"]:
    """The operator's sampled estimate at the first pair of every sequence, by `marginax.targets`."""
    marginalized = config.operator == "marginalized"
    estimate = targets.marginalized if marginalized else targets.multi_step

    def one(q, v_next, rewards, discounts, coefficients, truncated, valid) -> Array:
        return estimate(q, v_next, rewards, discounts, coefficients, truncated, valid=valid)[0]

    discounts = batch.discounts(config.discount)
    coefficients = credit if marginalized else ahead.traces
    arrays = (ahead.q, ahead.v_next, batch.rewards, discounts, coefficients, batch.truncated, batch.valid)
    return jax.vmap(one, in_axes=1)(*arrays)


def first_weight_is_one(config: AgentConfig) -> bool:
    """Whether the weight of the start pair itself is taken as 1, its exact value where no state is met twice."""
    known = config.weights == "paths" or (config.start_conditioned and config.exact_first_weight)
    return known and config.normalisation == "none"


def later(valid: Bool[Array, "*batches T batch"]) -> Bool[Array, "*batches T batch"]:
    """The valid steps t ≥ 1."""
    return valid.at[..., 0, :].set(False)


def masked_mean(mask: Bool[Array, "T batch"], values: Float[Array, "T batch"]) -> Float[Array, ""]:
    """Mean of the entries that the mask keeps; 0 if it keeps none."""
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


def summarise(found: CriticTarget, loss: Array, values: Array, weight_loss: Array) -> Metrics:
    """One entry for each of the batches, whose losses `[batches]` and values `[batches, batch]` are given."""
    return Metrics(
        critic_loss=loss,
        q_mean=jnp.mean(values, axis=1),
        q_size=jnp.mean(jnp.abs(values), axis=1),
        target_mean=jnp.mean(found.target, axis=1),
        target_variance=jnp.var(found.target, axis=1),
        error_variance=jnp.var(found.target - values, axis=1),
        trace_mean=found.trace_mean,
        weight_mean=jax.vmap(masked_mean)(later(found.valid), found.credit),
        weight_max=jnp.max(found.credit, axis=(1, 2)),
        effective_length=jnp.mean(jnp.sum(found.credit / found.share, axis=1), axis=1),
        weight_loss=jnp.zeros_like(loss).at[-1].set(weight_loss),
    )
