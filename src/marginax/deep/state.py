"""The whole agent as one pytree."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from marginax.deep import weight_network
from marginax.deep.config import TD3Config
from marginax.deep.networks import MLP, Critics
from marginax.deep.weight_network import Estimator


class TD3State(eqx.Module):
    """Everything that learning changes.

    Attributes:
        actor: The policy's network.
        critic: The twin critics: one leading axis of 2, or (inside `update_block`) two networks.
        target_actor: The actor, delayed.
        target_critic: The critics, delayed.
        actor_optimiser: Adam's state for the actor.
        critic_optimiser: Adam's state for the critics.
        estimator: The TD weights; None unless the operator is `marginalized`.

    >>> init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0)).estimator is None
    True
    """

    actor: MLP
    critic: Critics
    target_actor: MLP
    target_critic: Critics
    actor_optimiser: Any
    critic_optimiser: Any
    estimator: Estimator | None


def init(config: TD3Config, *, observation_size: int, action_size: int, key: Array) -> TD3State:
    """A fresh agent.

    >>> state = init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0))
    >>> state.critic.weights[0].shape
    (2, 4, 8)
    """
    actor_key, critic_key, weight_key = jax.random.split(key, 3)
    pair = observation_size + action_size
    actor = MLP(observation_size, action_size, config.hidden, key=actor_key)
    critic = MLP(pair, 1, config.hidden, copies=2, key=critic_key)
    optimiser = optax.adam(config.learning_rate)
    estimator = weight_network.init(config, pair, weight_key) if config.operator == "marginalized" else None
    copied_actor, copied_critic = jax.tree.map(jnp.copy, (actor, critic))  # so that both can be donated
    return TD3State(
        actor, critic, copied_actor, copied_critic, optimiser.init(actor), optimiser.init(critic), estimator
    )


def with_estimator(state: TD3State, estimator: Estimator | None) -> TD3State:
    """The agent with other TD weights.

    >>> state = init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0))
    >>> with_estimator(state, None).estimator is None
    True
    """
    return TD3State(
        state.actor,
        state.critic,
        state.target_actor,
        state.target_critic,
        state.actor_optimiser,
        state.critic_optimiser,
        estimator,
    )


def with_critics(change: Callable[[Any], Any], state: TD3State) -> TD3State:
    """The agent with its critics in another form: `apart` or `together`.

    >>> state = init(TD3Config(hidden=(8,)), observation_size=3, action_size=1, key=jax.random.key(0))
    >>> from marginax.deep.networks import apart
    >>> len(with_critics(apart, state).critic)
    2
    """
    critic, target_critic, optimiser = map(
        change, (state.critic, state.target_critic, state.critic_optimiser)
    )
    return TD3State(
        state.actor,
        critic,
        state.target_actor,
        target_critic,
        state.actor_optimiser,
        optimiser,
        state.estimator,
    )
