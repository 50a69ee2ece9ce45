"""The pure functions of the agent: traces, targets and losses; no state, no optimiser."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from marginax import targets
from marginax.deep import weights as td_weights
from marginax.deep.config import TD3Config
from marginax.deep.networks import MLP, act, value
from marginax.deep.replay import Sequences


class Bootstrap(eqx.Module):
    """What the target networks say along a batch of sequences.

    Attributes:
        v_next: $Q(x_{t+1}, π)$ with the smoothing noise of TD3, the smaller of the twins.
        traces: $c(x_t, a_t)$; 1 at the first step, where it is never read.
        products: $C_t = c_1 ⋯ c_t$, zero in the padding.
        features: [state, action], actions clipped to the box.

    >>> Bootstrap(*[jnp.zeros((2, 3))] * 3, jnp.zeros((2, 3, 4))).v_next.shape
    (2, 3)
    """

    v_next: Float[Array, "T batch"]
    traces: Float[Array, "T batch"]
    products: Float[Array, "T batch"]
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
    return decay * jnp.exp(temperature * jnp.minimum(log_target - log_behaviour, 0))


def bootstrap(
    config: TD3Config, target_actor: MLP, target_critic: MLP, batch: Sequences, key: Array
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
    length, size = batch.rewards.shape
    following = batch.next_observations.reshape(length * size, -1)
    mean = act(target_actor, following)
    noise = config.target_noise * jax.random.normal(key, mean.shape)
    smoothed = jnp.clip(mean + jnp.clip(noise, -config.noise_clip, config.noise_clip), -1, 1)
    v_next = _smaller(target_critic, jnp.concatenate([following, smoothed], -1)).reshape(length, size)
    features = jnp.concatenate([batch.observations, jnp.clip(batch.actions, -1, 1)], -1)
    traces = jnp.ones((length, size))
    if length > 1 and config.operator != "n-step":
        means = mean.reshape(length, size, -1)[:-1]  # x_t is the successor of step t - 1
        log_target = log_density(batch.actions[1:], means, config.policy_scale)
        strength = (config.decay, config.trace_temperature)
        traces = traces.at[1:].set(trace(log_target, batch.log_behaviour[1:], *strength))
    products = jax.vmap(td_weights.cumulative, 1, 1)(traces, batch.terminal | batch.truncated)[0]
    return Bootstrap(v_next, traces, products, features)


def critic_targets(
    config: TD3Config,
    target_critic: MLP,
    batch: Sequences,
    ahead: Bootstrap,
    weights: Float[Array, "T batch"] | None = None,
) -> Float[Array, "batch"]:
    """The operator's sampled estimate at the first pair of every sequence.

    All operators go through `marginax.targets`. `n-step` (uncorrected) and `retrace-paper` put Q(x_t, π)
    where Retrace has Q(x_t, a_t).

    Args:
        config: Says which operator.
        target_critic: The delayed twin critics.
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
    >>> critic_targets(config, state.target_critic, batch, ahead)
    Array([1., 1., 1.], dtype=float32)
    """
    if config.operator == "marginalized":
        if weights is None:
            raise ValueError("weights are needed by the marginalized operator.")
        coefficients = weights
    else:
        coefficients = ahead.traces
    q = jnp.zeros_like(ahead.v_next)  # the first one cancels unless the first weight differs from 1
    first = 0 if config.operator == "marginalized" and not first_weight_is_one(config) else 1
    if config.operator in ("n-step", "retrace-paper"):
        q = q.at[1:].set(ahead.v_next[:-1])
    elif first < len(q):
        pairs = ahead.features[first:]
        values = _smaller(target_critic, pairs.reshape(-1, pairs.shape[-1]))
        q = q.at[first:].set(values.reshape(pairs.shape[:2]))

    estimate = targets.marginalized if config.operator == "marginalized" else targets.multi_step

    def one(q, v_next, rewards, discounts, coefficients, truncated, valid) -> Array:
        return estimate(q, v_next, rewards, discounts, coefficients, truncated, valid=valid)[0]

    discounts = jnp.where(batch.terminal, 0.0, config.discount)
    arrays = (q, ahead.v_next, batch.rewards, discounts, coefficients, batch.truncated, batch.valid)
    return jax.vmap(one, in_axes=1)(*arrays)


def first_weight_is_one(config: TD3Config) -> bool:
    """Whether the weight of the start pair itself is taken as 1, its exact value where no state is met twice.

    >>> first_weight_is_one(TD3Config(operator="marginalized", weights="regression"))
    True
    """
    return config.start_conditioned and config.exact_first_weight and config.normalise == "none"


def critic_loss(
    critic: MLP, features: Float[Array, "batch n"], target: Float[Array, "batch"]
) -> tuple[Float[Array, ""], Float[Array, "2 batch"]]:
    """Squared error of both critics, summed over the two; also their values.

    >>> critic = MLP(2, 1, (8,), copies=2, key=jax.random.key(0))
    >>> loss, values = critic_loss(critic, jnp.ones((3, 2)), jnp.ones(3))
    >>> values.shape
    (2, 3)
    """
    values = value(critic, features)
    return jnp.sum(jnp.mean((values - target) ** 2, axis=-1)), values


def actor_loss(actor: MLP, critic: MLP, observations: Float[Array, "batch n"]) -> Float[Array, ""]:
    """Minus the first critic's mean value of the actor's own actions.

    >>> actor, critic = (MLP(n, 1, (8,), copies=k, key=jax.random.key(0)) for n, k in ((2, None), (3, 2)))
    >>> actor_loss(actor, critic, jnp.ones((3, 2))).shape
    ()
    """
    first = jax.tree.map(lambda x: x[0], critic)
    return -jnp.mean(value(first, jnp.concatenate([observations, act(actor, observations)], -1)))


def _smaller(critic: MLP, features: Float[Array, "batch n"]) -> Float[Array, "batch"]:
    return jnp.min(value(critic, features), axis=0)
