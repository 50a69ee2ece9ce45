"""The half of an update that depends on the operator: what the critics are to learn from a batch.

A batch may be several batches side by side, with a key for each: the target networks are asked once for all.
"""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from marginax.deep import losses, replay, weight_network
from marginax.deep.config import TD3Config
from marginax.deep.networks import act
from marginax.deep.replay import Sequences
from marginax.deep.state import TD3State
from marginax.deep.weight_network import Estimator
from marginax.weights.losses import cumulative, normalise


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

    >>> from marginax.deep.state import init
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
        credit, estimator, weight_loss = td_weights(
            config, estimator, batch, ahead, discounts, key, train=train
        )
    target = losses.critic_targets(config, batch, ahead, credit)
    trace_mean = jax.vmap(later_mean, 1)(*(each(x, key) for x in (batch.valid, ahead.traces)))
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
    last = size_of_each(batch, key) if train else 0
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
        trace_mean = trace_mean.at[-1].set(later_mean(whole.valid, traces))
        products = jax.vmap(cumulative, 1, 1)(traces, whole.terminal | whole.truncated)[0]
        place = (steps[rest:], jnp.arange(last))
        coefficients = coefficients.at[1, rest:].set(products[place])
        seen = jnp.concatenate([seen, jnp.stack([along[0], along[place]])], axis=1)
    ahead = losses.look_ahead(config, state.target_critic, two, seen, coefficients, noise_key)
    power = config.discount ** (steps - 1) / probability  # beside the γ that a step's successor has anyway
    discounts = jnp.where(two.terminal, 0.0, config.discount * jnp.stack([power, jnp.ones_like(power)]))
    credit, estimator, weight_loss = td_weights(config, estimator, two, ahead, discounts, key, train=train)
    target = losses.critic_targets(config, two, ahead, credit.at[1].multiply(power))
    share = jnp.ones_like(credit).at[1].set(probability)
    result = (credit, share, two.valid, trace_mean, estimator, weight_loss)
    return Aim(jax.lax.stop_gradient(target), ahead.features[0], *result)


def size_of_each(batch: Sequences, keys: Array) -> int:
    """How many sequences each of several batches side by side has.

    >>> size_of_each(replay.unpack(jnp.zeros((2, 6, 7)), jnp.ones((2, 6), bool), 1), jax.random.split(jax.random.key(0)))
    3
    """
    return batch.rewards.shape[1] // keys.size


def each(x: Array, keys: Array) -> Array:
    """An array of several batches side by side, with an axis for them: `[T, batches, batch]`.

    >>> each(jnp.zeros((5, 6)), jax.random.split(jax.random.key(0))).shape
    (5, 2, 3)
    """
    return x.reshape(x.shape[0], keys.size, -1)


def td_weights(
    config: TD3Config,
    estimator: Estimator,
    batch: Sequences,
    ahead: losses.Bootstrap,
    discounts: Array,
    keys: Array,
    *,
    train: bool,
) -> tuple[Array, Estimator, Array]:
    """TD weights for the targets, and the estimator and its loss after its training on the last batch, if there is any.

    >>> config = TD3Config(operator="marginalized", hidden=(8,))
    >>> batch = replay.unpack(jnp.zeros((2, 3, 7)), jnp.ones((2, 3), bool), 1)
    >>> ahead = losses.Bootstrap(*[jnp.zeros((2, 3))] * 4, jnp.zeros((2, 3, 2)))
    >>> arguments = (batch, ahead, jnp.full((2, 3), 0.99), jax.random.key(0))
    >>> td_weights(config, weight_network.init(config, 2, jax.random.key(0)), *arguments, train=False)[0].shape
    (2, 3)
    """
    pairs = weight_network.inputs(config, ahead.features)
    weight_loss, network = jnp.zeros(()), estimator.weights
    rest, parts = pairs.shape[1] - (size_of_each(batch, keys) if train else 0), []
    if rest:
        parts.append(weight_network.predict(config, network, pairs[:, :rest]))
    if train:
        sequence = (pairs, ahead.traces, discounts, batch.truncated)
        estimator, weight_loss, w = weight_network.update(config, estimator, *(x[:, rest:] for x in sequence))
        parts.append(w)
    w = jnp.where(batch.valid, jnp.concatenate(parts, axis=1), 0)
    if config.normalisation == "none":
        w = jnp.minimum(w, 1)  # no trace exceeds 1, so no mean of their products does
    else:
        power = config.normalisation_power if config.normalisation == "power" else 1.0
        one = partial(normalise, power=power)
        w = jax.vmap(one, 1, 1)(each(w, keys), each(batch.valid, keys)).reshape(w.shape)
    return w, estimator, weight_loss


def later_mean(valid: Array, values: Array) -> Array:
    """Mean over the valid steps t ≥ 1; 0 if there are none.

    >>> later_mean(jnp.array([[True], [True], [False]]), jnp.array([[1.0], [2.0], [jnp.nan]]))
    Array(2., dtype=float32)
    """
    later = valid.at[0].set(False)
    return jnp.sum(jnp.where(later, values, 0)) / jnp.maximum(jnp.sum(later), 1)
