"""Networks that estimate the TD weights w(x, a | x_0, a_0) of the `marginalized` operator, and one step of their training."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from marginax.deep.config import AgentConfig
from marginax.deep.networks import MLP, adam_step
from marginax.weights import losses


class Estimator(eqx.Module):
    """The networks of the TD weights and their optimisers.

    Attributes:
        weights: The network of w. The weight is the softplus of its output (`fenchel`: the output itself).
        critic: The adversary of `saddle-point` and `fenchel`; None for `regression`.
        weights_optimiser: Adam's state for `weights`.
        critic_optimiser: Adam's state for `critic`.
    """

    weights: MLP
    critic: MLP | None
    weights_optimiser: Any
    critic_optimiser: Any


def init(config: AgentConfig, features: int, key: Array) -> Estimator:
    """Fresh networks for [state, action] pairs with this number of features."""
    inputs = features * (2 if config.start_conditioned else 1)
    first, second = jax.random.split(key)
    weights = MLP(inputs, 1, config.hidden, key=first)
    critic = None if config.weights == "regression" else MLP(inputs, 1, config.hidden, key=second)
    return Estimator(
        weights,
        critic,
        optax.adam(config.weight_learning_rate).init(weights),
        None if critic is None else optax.adam(config.weight_critic_learning_rate).init(critic),
    )


def evaluate(network: MLP, inputs: Float[Array, "T batch n"]) -> Float[Array, "T batch"]:
    """The output of a network for every step of a batch of sequences."""
    return network(inputs.reshape(-1, inputs.shape[-1]))[:, 0].reshape(inputs.shape[:2])


def inputs(config: AgentConfig, features: Float[Array, "T batch n"]) -> Float[Array, "T batch m"]:
    """The networks' inputs: the features of each pair and, with `start_conditioned`, those of the start pair."""
    if not config.start_conditioned:
        return features
    return jnp.concatenate([features, jnp.broadcast_to(features[0], features.shape)], -1)


def predict(config: AgentConfig, network: MLP, pairs: Float[Array, "T batch m"]) -> Float[Array, "T batch"]:
    """The weights of a batch of sequences: never negative, and 1 at the start pair with `exact_first_weight`."""
    return jnp.maximum(_unclipped(config, network, pairs), 0)


def _unclipped(
    config: AgentConfig, network: MLP, pairs: Float[Array, "T batch m"]
) -> Float[Array, "T batch"]:
    """The weights that the losses read: those of `fenchel` may be negative."""
    first_is_one = config.start_conditioned and config.exact_first_weight
    raw = evaluate(network, pairs[1:] if first_is_one else pairs)
    w = raw if config.weights == "fenchel" else jax.nn.softplus(raw)
    return jnp.concatenate([jnp.ones(pairs.shape[:2])[:1], w]) if first_is_one else w


def loss(
    config: AgentConfig,
    networks: tuple[MLP, MLP | None],
    pairs: Float[Array, "T batch m"],
    traces: Float[Array, "T batch"],
    discounts: Float[Array, "T batch"],
    truncated: Bool[Array, "T batch"],
) -> tuple[Float[Array, ""], Float[Array, "T batch"]]:
    """The mean loss of the sequences of a batch, and the weights that it was computed from."""
    network, critic = networks
    w = _unclipped(config, network, pairs)
    sequence = (traces, discounts, truncated)
    if critic is None:
        return jnp.mean(jax.vmap(losses.regression, 1)(w, *sequence)), w
    scores = evaluate(critic, pairs)
    if config.weights == "fenchel":
        return jnp.mean(jax.vmap(losses.fenchel, 1)(w, scores, *sequence)), w
    balance = jnp.mean(jax.vmap(losses.saddle_point, 1)(w, jnp.tanh(scores), *sequence))
    size = jnp.mean(jax.vmap(losses.penalty, 1)(scores, discounts, truncated))
    return balance - config.weight_critic_penalty * size, w


def update(
    config: AgentConfig,
    estimator: Estimator,
    pairs: Float[Array, "T batch m"],
    traces: Float[Array, "T batch"],
    discounts: Float[Array, "T batch"],
    truncated: Bool[Array, "T batch"],
) -> tuple[Estimator, Float[Array, ""], Float[Array, "T batch"]]:
    """One step of Adam on the loss; of a saddle point one network descends and the other ascends.

    Returns:
        The new estimator, the loss before the step, and the weights before the step (never negative).
    """

    def objective(networks: tuple[MLP, MLP | None]) -> tuple[Array, Array]:
        return loss(config, networks, pairs, traces, discounts, truncated)

    networks = (estimator.weights, estimator.critic)
    (value, w), (gradient, critic_gradient) = jax.value_and_grad(objective, has_aux=True)(networks)
    # Fenchel's loss is maximised over w and minimised over the critic, the saddle point's the other way round.
    if config.weights == "fenchel":
        gradient = jax.tree.map(jnp.negative, gradient)
    else:
        critic_gradient = jax.tree.map(jnp.negative, critic_gradient)
    rate = config.weight_learning_rate
    weights, weights_optimiser = adam_step(rate, gradient, estimator.weights_optimiser, estimator.weights)
    critic, critic_optimiser = estimator.critic, estimator.critic_optimiser
    if critic is not None:
        rate = config.weight_critic_learning_rate
        critic, critic_optimiser = adam_step(rate, critic_gradient, critic_optimiser, critic)
    return Estimator(weights, critic, weights_optimiser, critic_optimiser), value, jnp.maximum(w, 0)


def fit(
    config: AgentConfig,
    draw: Callable[[Array], tuple[Array, Array, Array, Array]],
    features: int,
    *,
    key: Array,
    updates: int,
    average: float = 0.998,
) -> MLP:
    """Train TD weights alone, without an agent.

    Args:
        config: The loss, the inputs and sizes of the networks, and the step sizes.
        draw: Makes a batch from a key: features `[T, batch, n]`, traces, discounts and truncated `[T, batch]`.
        features: Number of features n of a pair.
        key: A JAX random key.
        updates: Number of steps of Adam.
        average: Share of the old running average of the parameters that each step keeps.

    Returns:
        The network of the weights with averaged parameters; `predict` evaluates it.

    >>> from marginax.deep.config import TD3Config
    >>> def draw(key):
    ...     return jnp.ones((5, 2, 3)), jnp.full((5, 2), 0.5), jnp.full((5, 2), 0.9), jnp.zeros((5, 2), bool)
    >>> config = TD3Config(weights="regression", hidden=(8,))
    >>> fit(config, draw, 3, key=jax.random.key(0), updates=3).weights[0].shape
    (6, 8)
    """

    def step(carry: tuple[Estimator, MLP], key: Array) -> tuple[tuple[Estimator, MLP], None]:
        estimator, mean = carry
        pairs, *sequence = draw(key)
        estimator, _, _ = update(config, estimator, inputs(config, pairs), *sequence)
        mean = jax.tree.map(lambda old, new: average * old + (1 - average) * new, mean, estimator.weights)
        return (estimator, mean), None

    first, rest = jax.random.split(key)
    estimator = init(config, features, first)
    keys = jax.random.split(rest, updates)
    (_, mean), _ = jax.jit(lambda: jax.lax.scan(step, (estimator, estimator.weights), keys))()
    return mean
