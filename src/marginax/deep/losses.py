"""The pure functions of the agent: traces, targets and losses; no state, no optimiser."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from marginax import targets
from marginax.deep.config import TD3Config
from marginax.deep.networks import MLP, Critics, act, first_twin, value
from marginax.deep.replay import Sequences
from marginax.traces import clip_log_ratios
from marginax.weights import losses as weight_losses


class Bootstrap(eqx.Module):
    """What the target networks say along a batch of sequences.

    Attributes:
        v_next: $Q(x_{t+1}, π)$ with the smoothing noise of TD3, the smaller of the twins.
        traces: $c(x_t, a_t)$; 1 at the first step, where it is never read.
        products: $C_t = c_1 ⋯ c_t$, zero in the padding.
        q: What the operator subtracts from step t: $Q(x_t, a_t)$, or $Q(x_t, π)$ for `n-step` and `retrace-paper`;
            0 at the first step where it cancels.
        features: [state, action], actions clipped to the box.

    >>> Bootstrap(*[jnp.zeros((2, 3))] * 4, jnp.zeros((2, 3, 4))).v_next.shape
    (2, 3)
    """

    v_next: Float[Array, "T batch"]
    traces: Float[Array, "T batch"]
    products: Float[Array, "T batch"]
    q: Float[Array, "T batch"]
    features: Float[Array, "T batch n"]


def log_density(
    actions: Float[Array, "*batch m"], mean: Float[Array, "*batch m"], scale: float
) -> Float[Array, "*batch"]:
    """Log-density of a Gaussian with the same scale in every direction.

    >>> log_density(jnp.zeros((1, 2)), jnp.zeros((1, 2)), 1.0)
    Array([-1.837877], dtype=float32)
    """
    log_scale = jnp.log(scale) + 0.5 * jnp.log(2 * jnp.pi)
    return -jnp.sum(0.5 * ((actions - mean) / scale) ** 2 + log_scale, axis=-1)


def trace(
    log_target: Float[Array, "*batch"],
    log_behaviour: Float[Array, "*batch"],
    decay: float,
    temperature: float,
) -> Float[Array, "*batch"]:
    """The trace λ min(1, (π/μ)^temperature), from log-densities.

    >>> trace(jnp.array([0.0, 2.0]), jnp.array([1.0, 1.0]), decay=0.5, temperature=1.0)
    Array([0.18393973, 0.5       ], dtype=float32)
    """
    return clip_log_ratios(temperature * (log_target - log_behaviour), 1.0, decay)


def bootstrap(
    config: TD3Config, target_actor: MLP, target_critic: Critics, batch: Sequences, key: Array
) -> Bootstrap:
    """Bootstrap values and traces of a batch; the policy π is a Gaussian around the target actor's output.

    >>> from marginax.deep import replay, td3
    >>> config = TD3Config(hidden=(8,))
    >>> state = td3.init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> batch = replay.sample(replay.add(replay.empty(4, 1, 1), rows), jax.random.key(0), batch=3, length=2)
    >>> bootstrap(config, state.target_actor, state.target_critic, batch, jax.random.key(1)).products.T
    Array([[1., 0.],
           [1., 0.],
           [1., 0.]], dtype=float32)
    """
    mean = policy_means(target_actor, batch)
    return look_ahead(config, target_critic, batch, mean, traces(config, batch, mean), key)


def policy_means(target_actor: MLP, batch: Sequences) -> Float[Array, "T batch m"]:
    """The delayed actor's actions at the successors $x_{t+1}$.

    >>> from marginax.deep import replay
    >>> batch = replay.unpack(jnp.zeros((2, 3, 7)), jnp.ones((2, 3), bool), 1)
    >>> policy_means(MLP(1, 1, (8,), key=jax.random.key(0)), batch).shape
    (2, 3, 1)
    """
    following = batch.next_observations
    return act(target_actor, following.reshape(-1, following.shape[-1])).reshape(*following.shape[:2], -1)


def traces(config: TD3Config, batch: Sequences, means: Float[Array, "T batch m"]) -> Float[Array, "T batch"]:
    """The traces $c(x_t, a_t)$ of the operator, 1 at the first step; `means` are those of `policy_means`.

    >>> from marginax.deep import replay
    >>> batch = replay.unpack(jnp.zeros((2, 1, 7)), jnp.ones((2, 1), bool), 1)
    >>> traces(TD3Config(operator="retrace"), batch, jnp.zeros((2, 1, 1)))[:, 0]
    Array([1. , 0.7], dtype=float32)
    """
    ones = jnp.ones(batch.rewards.shape)
    if len(ones) == 1 or config.operator == "n-step":
        return ones
    # The state of step t is the successor of step t - 1.
    log_target = log_density(batch.actions[1:], means[:-1], config.policy_scale)
    later = trace(log_target, batch.log_behaviour[1:], config.decay, config.trace_temperature)
    return ones.at[1:].set(later)


def look_ahead(
    config: TD3Config,
    target_critic: Critics,
    batch: Sequences,
    means: Float[Array, "T batch m"],
    coefficients: Float[Array, "T batch"],
    key: Array,
) -> Bootstrap:
    """Values at the policy's actions, smoothed as TD3 has it, and at those taken, beside the traces of the sequences.

    With several keys the batch is so many batches side by side, and each draws its noise from its own.

    >>> from marginax.deep import replay
    >>> batch = replay.unpack(jnp.zeros((2, 3, 7)), jnp.ones((2, 3), bool), 1)
    >>> critic = MLP(2, 1, (8,), copies=2, key=jax.random.key(0))
    >>> look_ahead(TD3Config(), critic, batch, jnp.zeros((2, 3, 1)), jnp.ones((2, 3)), jax.random.key(1)).v_next.shape
    (2, 3)
    """
    noise = config.target_noise * side_by_side(jax.random.normal, key, means.shape)
    smoothed = jnp.clip(means + jnp.clip(noise, -config.noise_clip, config.noise_clip), -1, 1)
    following = jnp.concatenate([batch.next_observations, smoothed], -1)
    features = jnp.concatenate([batch.observations, jnp.clip(batch.actions, -1, 1)], -1)
    # The first value cancels unless the first weight differs from 1.
    first = 0 if config.operator == "marginalized" and not first_weight_is_one(config) else 1
    taken = config.operator not in ("n-step", "retrace-paper") and first < len(features)
    pairs = jnp.concatenate([following, features[first:]]) if taken else following
    values = _smaller(target_critic, pairs.reshape(-1, pairs.shape[-1])).reshape(pairs.shape[:2])
    v_next, others = values[: len(means)], values[len(means) :]
    q = jnp.concatenate([jnp.zeros_like(v_next[:first]), others if taken else v_next[:-1]])
    cut = batch.terminal | batch.truncated
    products = jax.vmap(weight_losses.cumulative, 1, 1)(coefficients, cut)[0]
    return Bootstrap(v_next, coefficients, products, q, features)


def side_by_side(draw: Callable[..., Array], keys: Array, shape: tuple[int, ...]) -> Array:
    """Random numbers `[T, batch, …]`: one key, or one for each of several batches side by side.

    >>> side_by_side(jax.random.normal, jax.random.split(jax.random.key(0)), (3, 8, 1)).shape
    (3, 8, 1)
    """
    if keys.ndim == 0:
        return draw(keys, shape)
    one = (shape[0], shape[1] // len(keys), *shape[2:])
    return jax.vmap(lambda key: draw(key, one), out_axes=1)(keys).reshape(shape)


def draw_steps(
    config: TD3Config, batch: int, key: Array
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    r"""One later step for each sequence, $1 \le \tau < T$, and its probability, in proportion to $(\gamma\lambda)^\tau$.

    Weights of traces with decay λ are of the order of $\lambda^\tau$, so steps are drawn about as often as they count.

    >>> steps, share = draw_steps(TD3Config(sequence_length=2), 3, jax.random.key(0))
    >>> steps, share
    (Array([1, 1, 1], dtype=int32), Array([1., 1., 1.], dtype=float32))
    """
    times = jnp.arange(1, config.sequence_length)
    logits = times * jnp.log(config.discount * max(config.decay, 0.1) + 1e-6)

    def draw(key: Array, shape: tuple[int, ...]) -> Array:
        return jax.random.categorical(key, logits, shape=shape)

    steps = 1 + side_by_side(draw, key, (1, batch))[0].astype(jnp.int32)
    return steps, jax.nn.softmax(logits)[steps - 1]


def critic_targets(
    config: TD3Config,
    batch: Sequences,
    ahead: Bootstrap,
    weights: Float[Array, "T batch"] | None = None,
) -> Float[Array, "batch"]:
    """The operator's sampled estimate at the first pair of every sequence.

    All operators go through `marginax.targets`.

    Args:
        config: Says which operator.
        batch: The sequences.
        ahead: What `bootstrap` returned for them.
        weights: TD weights w(x_t, a_t), for `marginalized`.

    Returns:
        One constant target a sequence.

    >>> from marginax.deep import replay, td3
    >>> config = TD3Config(hidden=(8,))
    >>> state = td3.init(config, observation_size=1, action_size=1, key=jax.random.key(0))
    >>> rows = replay.pack([[0.0]], [[0.5]], [1.0], [True], [False], [0.0], [[0.1]])
    >>> batch = replay.sample(replay.add(replay.empty(4, 1, 1), rows), jax.random.key(0), batch=3, length=1)
    >>> ahead = bootstrap(config, state.target_actor, state.target_critic, batch, jax.random.key(1))
    >>> critic_targets(config, batch, ahead)
    Array([1., 1., 1.], dtype=float32)
    """
    if config.operator == "marginalized":
        if weights is None:
            raise ValueError("weights are needed by the marginalized operator.")
        coefficients = weights
    else:
        coefficients = ahead.traces
    estimate = targets.marginalized if config.operator == "marginalized" else targets.multi_step

    def one(q, v_next, rewards, discounts, coefficients, truncated, valid) -> Array:
        return estimate(q, v_next, rewards, discounts, coefficients, truncated, valid=valid)[0]

    discounts = jnp.where(batch.terminal, 0.0, config.discount)
    arrays = (ahead.q, ahead.v_next, batch.rewards, discounts, coefficients, batch.truncated, batch.valid)
    return jax.vmap(one, in_axes=1)(*arrays)


def first_weight_is_one(config: TD3Config) -> bool:
    """Whether the weight of the start pair itself is taken as 1, its exact value where no state is met twice.

    >>> first_weight_is_one(TD3Config(operator="marginalized", weights="regression"))
    True
    """
    return config.start_conditioned and config.exact_first_weight and config.normalisation == "none"


def critic_loss(
    critic: Critics, features: Float[Array, "batch n"], target: Float[Array, "batch"]
) -> tuple[Float[Array, ""], Float[Array, "2 batch"]]:
    """Squared error of both critics, summed over the two; also their values.

    >>> critic = MLP(2, 1, (8,), copies=2, key=jax.random.key(0))
    >>> loss, values = critic_loss(critic, jnp.ones((3, 2)), jnp.ones(3))
    >>> values.shape
    (2, 3)
    """
    values = value(critic, features)
    return jnp.sum(jnp.mean((values - target) ** 2, axis=-1)), values


def actor_loss(actor: MLP, critic: Critics, observations: Float[Array, "batch n"]) -> Float[Array, ""]:
    """Minus the first critic's mean value of the actor's own actions.

    >>> actor, critic = (MLP(n, 1, (8,), copies=k, key=jax.random.key(0)) for n, k in ((2, None), (3, 2)))
    >>> actor_loss(actor, critic, jnp.ones((3, 2))).shape
    ()
    """
    return -jnp.mean(value(first_twin(critic), jnp.concatenate([observations, act(actor, observations)], -1)))


def _smaller(critic: Critics, features: Float[Array, "batch n"]) -> Float[Array, "batch"]:
    return jnp.min(value(critic, features), axis=0)
