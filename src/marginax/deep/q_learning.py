r"""Q-learning for discrete actions, whose target is any operator of this library; it offers what `td3` offers a trainer.

The behaviour policy is ε-greedy and its probabilities are stored, so every operator can correct for it. The target
policy π is greedy in Q, ε-greedy or softmax. With `double`, π is that of the learned network and values come from the
target network, a copy that is renewed every `target_every` updates.
"""

import dataclasses
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from marginax.deep.critic_targets import (
    Bootstrap,
    CriticTarget,
    Estimator,
    Metrics,
    from_bootstrap,
    init_estimator,
    summarise,
)
from marginax.deep.discrete_config import DiscreteConfig, DiscreteOperator, QConfig
from marginax.deep.networks import ObservationNetwork, dense_vector, observation_network
from marginax.deep.replay import Sequences, draw
from marginax.deep.weight_network import adam
from marginax.traces import clip_ratios

__all__ = [
    "METRICS",
    "SHARED",
    "QState",
    "behaviour",
    "draw",
    "init",
    "join",
    "learn",
    "observe",
    "policy",
    "split",
    "targets",
]

S = TypeVar("S")
_NETWORKS = ("hidden", "filters", "batch_size", "learning_rate")
SHARED = (*_NETWORKS, "target_every", "update_every", "block_updates", "update_after", "environments")
MEASURE_EVERY = 1000  # steps
RIVALS: tuple[DiscreteOperator, ...] = ("one-step", "retrace")
METRICS = (*(field.name for field in fields(Metrics)), *(f"error_variance_{name}" for name in RIVALS))


class QState(eqx.Module):
    """Everything that learning changes.

    Attributes:
        network: Q, with one output for each action.
        target: The target network.
        optimiser: Adam's state.
        count: Updates so far.
        estimator: The TD weights; None unless the operator is `marginalized`.
    """

    network: ObservationNetwork
    target: ObservationNetwork
    optimiser: Any
    count: Int[Array, "..."]
    estimator: Estimator | None


def init(config: QConfig, *, observation_shape: tuple[int, ...], num_actions: int, key: Array) -> QState:
    """A fresh agent.

    >>> state = init(QConfig(hidden=(8,)), observation_shape=(4,), num_actions=2, key=jax.random.key(0))
    >>> state.network(jnp.zeros((3, 4))).shape
    (3, 2)
    """
    first, second = jax.random.split(key)
    network = observation_network(observation_shape, num_actions, config.hidden, config.filters, key=first)
    copied = jax.tree.map(jnp.copy, network)  # so that both can be donated
    optimiser = optax.adam(config.learning_rate).init(network)
    own = init_estimator(config, network.inputs, num_actions, second)
    return QState(network, copied, optimiser, jnp.zeros((), jnp.int32), own)


def split(state: QState) -> tuple[QState, Estimator | None]:
    """The agent without what belongs to its operator, and that."""
    return replace(state, estimator=None), state.estimator


def join(state: QState, own: Estimator | None) -> QState:
    """The agent that `split` took apart."""
    return replace(state, estimator=own)


def observe(state: S, rows: Array) -> S:
    """The agent after it has met a block of transitions: the same."""
    return state


def policy(state: QState) -> Float[Array, " n"]:
    """The network that acts as the vector of a perceptron: see `simulators.policy`."""
    return dense_vector(state.network)


def behaviour(
    state: QState, observations: Float[Array, "E *shape"], epsilon: Float[Array, " E"]
) -> Float[Array, "E actions"]:
    """Probabilities of the ε-greedy policy in each environment."""
    return epsilon_greedy(state.network(observations.reshape(len(epsilon), -1)), epsilon[:, None])


def epsilon_greedy(q: Float[Array, "*batch actions"], epsilon: Any) -> Float[Array, "*batch actions"]:
    """The best action with probability 1 - ε, any with probability ε.

    >>> epsilon_greedy(jnp.array([1.0, 3.0]), 0.5)
    Array([0.25, 0.75], dtype=float32)
    """
    count = q.shape[-1]
    return (1 - epsilon) * jax.nn.one_hot(jnp.argmax(q, -1), count) + epsilon / count


def target_policy(config: QConfig, q: Float[Array, "*batch actions"]) -> Float[Array, "*batch actions"]:
    """π of the values of all actions.

    >>> target_policy(QConfig(target_policy="softmax", temperature=1.0), jnp.zeros(2))
    Array([0.5, 0.5], dtype=float32)
    """
    if config.target_policy == "softmax":
        return jax.nn.softmax(q / config.temperature)
    return epsilon_greedy(q, config.target_epsilon if config.target_policy == "epsilon-greedy" else 0.0)


def bootstrap(
    config: QConfig, network: ObservationNetwork, target: ObservationNetwork, batch: Sequences
) -> Bootstrap:
    r"""Values and traces of a batch of sequences $x_0 \dots x_T$.

    Traces are $\lambda \min(\bar c, \pi/\mu)$, for tree backup $\lambda \pi$, for Peng's Q(λ) λ and for n-step 1. The last
    two subtract $Q(x_t, \pi)$ from step t, the others $Q(x_t, a_t)$.
    """
    along = jnp.concatenate([batch.observations[:1], batch.next_observations])
    late = target(along)
    pi = target_policy(config, network(along) if config.double else late)
    v = jnp.sum(pi * late, -1)
    action = jax.nn.one_hot(batch.actions[..., 0].astype(jnp.int32), late.shape[-1])
    taken = jnp.sum(pi[:-1] * action, -1)
    ones = jnp.ones_like(taken)
    if config.operator in ("n-step", "peng"):
        traces, q = (1.0 if config.operator == "n-step" else config.decay) * ones, v[:-1]
    else:
        q = jnp.sum(late[:-1] * action, -1)
        ratio = taken / jnp.exp(batch.log_behaviour)
        tree = config.operator == "tree-backup"
        traces = config.decay * taken if tree else clip_ratios(ratio, config.clip, config.decay)
    features = jnp.concatenate([batch.observations, action], -1)
    return Bootstrap(v[1:], traces.at[0].set(1.0), q, features)


def targets(
    config: QConfig, state: QState, batches: Sequences, keys: Array, *, train: bool
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """The half of an update that depends on the operator; TD weights learn in every update."""
    ahead = jax.vmap(partial(bootstrap, config, state.network, state.target))(batches)
    return from_bootstrap(config, state.estimator, batches, ahead, train=train)


def learn(
    config: QConfig,
    state: QState,
    pairs: Float[Array, "batch n"],
    target: Float[Array, " batch"],
    *,
    delayed: bool,
) -> tuple[QState, Float[Array, ""], Float[Array, " batch"]]:
    """The half of an update that is the same for all operators: one step of Adam on the squared error.

    Returns:
        The agent, the loss and the values before the step.
    """

    def loss(network: ObservationNetwork) -> tuple[Array, Array]:
        values = taken_values(network, pairs)
        return jnp.mean((values - target) ** 2), values

    (error, values), slope = jax.value_and_grad(loss, has_aux=True)(state.network)
    network, optimiser = adam(config.learning_rate, slope, state.optimiser, state.network)
    count = state.count + 1
    renew = count % config.target_every == 0
    copied = jax.tree.map(lambda new, old: jnp.where(renew, new, old), network, state.target)
    return QState(network, copied, optimiser, count, state.estimator), error, values


def taken_values(network: ObservationNetwork, pairs: Float[Array, "batch n"]) -> Float[Array, " batch"]:
    """Q of pairs [observation, one-hot action]."""
    observations, action = jnp.split(pairs, [network.inputs], axis=-1)
    return jnp.sum(network(observations) * action, -1)


def rounds(config: DiscreteConfig, key: Array, updates: int) -> Array:
    """Keys `[updates, 1]`: one update in each round."""
    return jax.random.split(key, updates)[:, None]


def delayed_rounds(config: DiscreteConfig, updates: int, done: Array | int) -> None:
    """All rounds are alike."""


def run_round(one_round: Any, carry: Any, material: Any, delayed: None) -> Any:
    """Run a round."""
    return one_round(carry, material, delayed=True)


def measure(config: QConfig, state: QState, batch: Sequences, key: Array) -> Float[Array, " metrics"]:
    """`METRICS` of the update that would come next on a batch; nothing is updated."""
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    found, _, weight_loss = targets(config, state, one, key[None], train=True)
    _, loss, values = learn(config, state, found.pairs[0], found.target[0], delayed=True)
    own = summarise(found, loss[None], values[None], weight_loss)
    spread = []
    for name in RIVALS:
        rival = dataclasses.replace(config, operator=name)
        if config.length < rival.length:
            spread.append(jnp.full((), jnp.nan))
            continue
        short: Sequences = jax.tree.map(lambda x, n=rival.length: x[:, :n], one)
        other, *_ = targets(rival, replace(state, estimator=None), short, key[None], train=False)
        spread.append(jnp.var(other.target[0] - values))
    return jnp.stack([*(getattr(own, field.name)[0] for field in fields(Metrics)), *spread])
