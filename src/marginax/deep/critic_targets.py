r"""The half of an update that depends on the operator: the targets of the critics on replayed sequences.

For every operator the target at the first pair of a sequence is
$Q(x_0,a_0) + \sum_t \gamma^t w_t (r_t + \gamma Q(x_{t+1},\pi) - Q(x_t,a_t))$ with the delayed networks. Operators
differ in the credit $w_t$ of step t: a product of traces, or a TD weight. The target networks do not move within a round
of updates, so the targets of all batches of a round are computed together, along a leading axis `batches`.
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
    """The targets of the critics on the batches of a round.

    Attributes:
        target: One constant target per sequence.
        pairs: [state, action] features of the first step of each sequence.
        credit: Credit of each step: a TD weight, or a product of traces for the other operators.
        share: Probability with which each step was read; 1 where the target reads all steps.
        valid: Which steps are not padding.
        trace_mean: Mean trace over steps t ≥ 1 of each batch; 0 where no traces were computed.
    """

    target: Float[Array, "batches batch"]
    pairs: Float[Array, "batches batch n"]
    credit: Float[Array, "batches T batch"]
    share: Float[Array, "batches T batch"]
    valid: Bool[Array, "batches T batch"]
    trace_mean: Float[Array, " batches"]


class Bootstrap(eqx.Module):
    """Values of the target networks and traces for every step of a batch of sequences.

    Attributes:
        v_next: $Q(x_{t+1}, π)$. For TD3 it is the smaller of the twins, at an action with smoothing noise.
        traces: $c(x_t, a_t)$; 1 at the first step, where it is never read.
        q: The value that the Bellman error of step t subtracts: $Q(x_t, a_t)$, or $Q(x_t, π)$ for `n-step`, `peng` and
            `retrace-paper`. It may be 0 at the first step, where it cancels unless the first weight differs from 1.
        features: [state, action] features of each pair, with actions clipped to the box.
    """

    v_next: Float[Array, "T batch"]
    traces: Float[Array, "T batch"]
    q: Float[Array, "T batch"]
    features: Float[Array, "T batch n"]


class WeightData(NamedTuple):
    """The data that TD weights are evaluated on and learned from, for the batches of a round.

    Attributes:
        sequences: Replayed sequences.
        features: [state, action] features of each pair.
        traces: $c(x_t, a_t)$; the first is never read.
        discounts: γ, or 0 where step t ended the episode.
    """

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
    """The loss of `weights="paths"` with the settings of an agent."""
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
    """Targets of TD3 on the batches of a round and, with `train`, one step of the TD weights on the last batch.

    Args:
        config: The settings, among them the operator.
        target_actor: The delayed actor.
        target_critic: The delayed critics.
        estimator: The TD weights; None unless the operator is `marginalized`.
        batches: Sequences with fields `[batches, T, batch, …]`.
        keys: One JAX random key per batch.
        train: Whether the TD weights learn.

    Returns:
        The targets, the estimator, and its loss (0 without training).
    """
    if config.operator == "marginalized" and estimator is None:
        raise ValueError("estimator must be given for the marginalized operator.")
    if estimator is not None and config.samples_a_step:
        return _sampled_step_targets(
            config, target_actor, target_critic, estimator, batches, keys, train=train
        )
    values = jax.vmap(partial(bootstrap, config, target_actor, target_critic))(batches, keys)
    return all_step_targets(config, estimator, batches, values, train=train)


def all_step_targets(
    config: AgentConfig,
    estimator: Estimator | None,
    batches: Sequences,
    values: Bootstrap,
    *,
    train: bool,
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """Targets that read every step of the sequences: see `critic_targets`."""
    if estimator is None:
        credit, loss = jax.vmap(products)(values.traces, batches), jnp.zeros(())
    else:
        data = WeightData(batches, values.features, values.traces, batches.discounts(config.discount))
        credit, estimator, loss = td_weights(config, estimator, data, train=train)
    target = jax.vmap(partial(operator_target, config))(batches, values, credit)
    found = CriticTarget(
        target=jax.lax.stop_gradient(target),
        pairs=values.features[:, 0],
        credit=credit,
        share=jnp.ones_like(credit),
        valid=batches.valid,
        trace_mean=jax.vmap(masked_mean)(later(batches.valid), values.traces),
    )
    return found, estimator, loss


def _sampled_step_targets(
    config: TD3Config,
    target_actor: MLP,
    target_critic: Critics,
    estimator: Estimator,
    batches: Sequences,
    keys: Array,
    *,
    train: bool,
) -> tuple[CriticTarget, Estimator, Float[Array, ""]]:
    """Marginalized targets from the first step and one random later step τ, weighted by 1 / P(τ): the same on average.

    The TD weight of a step does not need the steps before it. Only the training of the weights, which learn from products
    of traces, reads the whole sequence, and only of the last batch.
    """
    step_keys, noise_keys = jnp.moveaxis(jax.vmap(jax.random.split)(keys), 1, 0)
    steps, probability = jax.vmap(partial(draw_steps, config, batches.rewards.shape[2]))(step_keys)
    pairs = jax.vmap(replay.pick)(batches, steps)  # steps 0 and τ: sequences of length 2
    traces, trace_mean = jnp.ones(pairs.rewards.shape), jnp.zeros(len(keys))
    if train:
        last: Sequences = jax.tree.map(lambda x: x[-1], batches)
        all_means = act(target_actor, last.next_observations)
        all_traces = trace(config, last, all_means)
        drawn = (steps[-1], jnp.arange(steps.shape[1]))
        # The product of all traces up to τ takes the place of the trace of the second step.
        traces = traces.at[-1, 1].set(products(all_traces, last)[drawn])
        trace_mean = trace_mean.at[-1].set(masked_mean(later(last.valid), all_traces))
        means = jnp.stack([all_means[0], all_means[drawn]])[None]
        if len(keys) > 1:
            means = jnp.concatenate([act(target_actor, pairs.next_observations[:-1]), means])
    else:
        means = act(target_actor, pairs.next_observations)
    values = jax.vmap(partial(critic_values, config, target_critic))(pairs, means, traces, noise_keys)
    # γ^τ / P(τ), without the factor γ that the second of two steps has anyway.
    factor = config.discount ** (steps - 1) / probability
    discounts = config.discount * jnp.stack([factor, jnp.ones_like(factor)], 1)
    discounts = jnp.where(pairs.terminal, 0.0, discounts)
    data = WeightData(pairs, values.features, traces, discounts)
    credit, estimator, loss = td_weights(config, estimator, data, train=train)
    target = jax.vmap(partial(operator_target, config))(pairs, values, credit.at[:, 1].multiply(factor))
    found = CriticTarget(
        target=jax.lax.stop_gradient(target),
        pairs=values.features[:, 0],
        credit=credit,
        share=jnp.ones_like(credit).at[:, 1].set(probability),
        valid=pairs.valid,
        trace_mean=trace_mean,
    )
    return found, estimator, loss


def bootstrap(
    config: TD3Config, target_actor: MLP, target_critic: Critics, batch: Sequences, key: Array
) -> Bootstrap:
    """Bootstrap values and traces of a batch; the policy π is a Gaussian around the target actor's output."""
    means = act(target_actor, batch.next_observations)
    return critic_values(config, target_critic, batch, means, trace(config, batch, means), key)


def trace(config: TD3Config, batch: Sequences, means: Float[Array, "T batch m"]) -> Float[Array, "T batch"]:
    r"""The traces $c_t = \lambda \min(\bar c, (\pi/\mu)^{\text{temperature}})$ of a batch, 1 at the first step.

    `means` are the target actor's actions at the successors $x_{t+1}$.
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
    """Log-density of a Gaussian with the same standard deviation in every direction."""
    log_scale = jnp.log(scale) + 0.5 * jnp.log(2 * jnp.pi)
    return -jnp.sum(0.5 * ((actions - mean) / scale) ** 2 + log_scale, axis=-1)


def products(traces: Float[Array, "T batch"], batch: Sequences) -> Float[Array, "T batch"]:
    """The products $C_t = c_1 ⋯ c_t$ of each sequence, zero in the padding."""
    return jax.vmap(cumulative, 1, 1)(traces, batch.terminal | batch.truncated)[0]


def critic_values(
    config: TD3Config,
    target_critic: Critics,
    batch: Sequences,
    means: Float[Array, "T batch m"],
    traces: Float[Array, "T batch"],
    key: Array,
) -> Bootstrap:
    """`Bootstrap` of a batch: the smaller of the target critics, with TD3's smoothing noise on the policy's actions.

    `means` are the target actor's actions at the successors, and `traces` are passed through.
    """
    noise = config.target_noise * jax.random.normal(key, means.shape)
    smoothed = jnp.clip(means + jnp.clip(noise, -config.noise_clip, config.noise_clip), -1, 1)
    successors = jnp.concatenate([batch.next_observations, smoothed], -1)
    features = jnp.concatenate([batch.observations, jnp.clip(batch.actions, -1, 1)], -1)
    # The value of the first pair cancels unless the first weight differs from 1. What cancels is not computed.
    first = 0 if config.operator == "marginalized" and not first_weight_is_one(config) else 1
    subtracts_policy_value = config.operator in ("n-step", "retrace-paper")
    pairs = successors if subtracts_policy_value else jnp.concatenate([successors, features[first:]])
    values = jnp.min(value(target_critic, pairs), axis=0)
    v_next, q_taken = values[: len(means)], values[len(means) :]
    q = jnp.concatenate([jnp.zeros_like(v_next[:first]), v_next[:-1] if subtracts_policy_value else q_taken])
    return Bootstrap(v_next, traces, q, features)


def draw_steps(
    config: TD3Config, batch: int, key: Array
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    r"""A random later step $1 \le \tau < T$ for each sequence, and its probability, proportional to $(\gamma\lambda)^\tau$.

    TD weights of traces with decay λ are of the order of $\lambda^\tau$, so a step is drawn about as often as it counts.
    """
    times = jnp.arange(1, config.sequence_length)
    logits = times * jnp.log(config.discount * max(config.decay, 0.1) + 1e-6)
    steps = 1 + jax.random.categorical(key, logits, shape=(batch,)).astype(jnp.int32)
    return steps, jax.nn.softmax(logits)[steps - 1]


def td_weights(
    config: AgentConfig, estimator: Estimator, data: WeightData, *, train: bool
) -> tuple[Float[Array, "batches T batch"], Estimator, Float[Array, ""]]:
    """TD weights of all steps; with `train`, the estimator then takes one step on the last batch.

    Returns:
        The weights before the step, the estimator after it, and the loss (0 without training).
    """
    if isinstance(estimator, Paths):
        weights, estimator, loss = _path_weights(config, estimator, data, train)
    else:
        weights, estimator, loss = _pair_weights(config, estimator, data, train)
    valid = data.sequences.valid
    weights = jnp.where(valid, weights, 0)
    if config.normalisation == "none":
        return jnp.minimum(weights, config.weight_bound), estimator, loss
    power = config.normalisation_power if config.normalisation == "power" else 1.0
    return jax.vmap(partial(normalise, power=power))(weights, valid), estimator, loss


def _pair_weights(
    config: AgentConfig, estimator: weight_network.Estimator, data: WeightData, train: bool
) -> tuple[Array, Estimator, Array]:
    """`td_weights` of a network of w, before the bound and the normalisation."""
    pairs = jax.vmap(partial(weight_network.inputs, config))(data.features)
    predict = jax.vmap(partial(weight_network.predict, config, estimator.weights))
    loss, earlier = jnp.zeros(()), pairs[:-1] if train else pairs
    weights = [predict(earlier)] if len(earlier) else []
    if train:
        last = (x[-1] for x in (pairs, data.traces, data.discounts, data.sequences.truncated))
        estimator, loss, own = weight_network.update(config, estimator, *last)
        weights.append(own[None])
    return jnp.concatenate(weights), estimator, loss


def _path_weights(
    config: AgentConfig, estimator: Paths, data: WeightData, train: bool
) -> tuple[Array, Estimator, Array]:
    r"""`td_weights` of a network of u, $\lambda^t u(x_t \mid x_0, a_0) \min(\bar c, \pi/\mu)$: the last trace is exact."""
    start = data.features[:, 0] if config.start_conditioned else data.features[:, 0, :, :0]
    ratios = data.traces / config.decay if config.decay else data.traces

    def log_u(network: PathNetwork, batch: int) -> Float[Array, "batch T"]:
        return network(data.sequences.observations[batch], start[batch]).T

    u = path_network.mean_products(
        jnp.stack([log_u(estimator.average, k) for k in range(len(ratios))]), config.clip
    )
    weights = jnp.swapaxes(path_network.credit(u, jnp.swapaxes(ratios, 1, 2), config.decay), 1, 2)
    if not train:
        return weights, estimator, jnp.zeros(())
    last = (x[-1].T for x in (ratios, data.discounts, data.sequences.truncated))
    log_u_of_last = partial(log_u, batch=-1)
    estimator, loss, _ = path_network.update(
        path_loss(config), estimator, log_u_of_last, *last, clip=config.clip
    )
    return weights, estimator, loss


def operator_target(
    config: AgentConfig, batch: Sequences, values: Bootstrap, credit: Float[Array, "T batch"]
) -> Float[Array, " batch"]:
    """The operator's sampled estimate at the first pair of every sequence, by `marginax.targets`."""
    marginalized = config.operator == "marginalized"
    estimate = targets.marginalized if marginalized else targets.multi_step

    def one(q, v_next, rewards, discounts, coefficients, truncated, valid) -> Array:
        return estimate(q, v_next, rewards, discounts, coefficients, truncated, valid=valid)[0]

    discounts = batch.discounts(config.discount)
    coefficients = credit if marginalized else values.traces
    sequence = (batch.rewards, discounts, coefficients, batch.truncated, batch.valid)
    return jax.vmap(one, in_axes=1)(values.q, values.v_next, *sequence)


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
