r"""Q-learning for discrete actions, whose target is any operator of this library. See `td3` for what a trainer needs.

The behaviour policy is ε-greedy and its probabilities are stored, so every operator can correct for it. The target
policy π is greedy in Q, ε-greedy or softmax. With `double`, π is computed from the online network and its values from the
target network, a copy that is renewed every `target_every` updates.
"""

from dataclasses import replace
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
    all_step_targets,
    init_estimator,
)
from marginax.deep.discrete_config import DiscreteConfig, QConfig
from marginax.deep.networks import ObservationNetwork, adam_step, dense_vector, observation_network
from marginax.deep.replay import Sequences, draw
from marginax.deep.update_metrics import METRICS, measured, update_metrics
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
MEASURE_EVERY = 1000  # steps
SHARED = (
    *("hidden", "filters", "batch_size", "learning_rate", "target_every"),
    *("update_every", "block_updates", "update_after", "environments"),
)


class QState(eqx.Module):
    """Everything that learning changes.

    Attributes:
        network: Q, with one output for each action.
        target: The target network.
        optimiser: Adam's state.
        count: Number of updates so far.
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
    target = jax.tree.map(jnp.copy, network)  # a copy, so that both can be donated
    optimiser = optax.adam(config.learning_rate).init(network)
    estimator = init_estimator(config, network.inputs, num_actions, second)
    return QState(network, target, optimiser, jnp.zeros((), jnp.int32), estimator)


def split(state: QState) -> tuple[QState, Estimator | None]:
    """The agent without its TD weights, and the TD weights."""
    return replace(state, estimator=None), state.estimator


def join(state: QState, estimator: Estimator | None) -> QState:
    """The agent with these TD weights: the inverse of `split`."""
    return replace(state, estimator=estimator)


def observe(state: S, rows: Array) -> S:
    """The agent itself: new transitions change nothing in it."""
    return state


def policy(state: QState) -> Float[Array, " n"]:
    """The parameters of Q as one vector of a perceptron: see `simulators.policy`."""
    return dense_vector(state.network)


def behaviour(
    state: QState, observations: Float[Array, "E *shape"], epsilon: Float[Array, " E"]
) -> Float[Array, "E actions"]:
    """Probabilities of the ε-greedy policy in each environment."""
    return epsilon_greedy(state.network(observations.reshape(len(epsilon), -1)), epsilon[:, None])


def epsilon_greedy(q: Float[Array, "*batch actions"], epsilon: Any) -> Float[Array, "*batch actions"]:
    """Probabilities of the ε-greedy policy: the best action with probability 1 - ε, a uniform one with probability ε.

    >>> epsilon_greedy(jnp.array([1.0, 3.0]), 0.5)
    Array([0.25, 0.75], dtype=float32)
    """
    count = q.shape[-1]
    return (1 - epsilon) * jax.nn.one_hot(jnp.argmax(q, -1), count) + epsilon / count


def target_policy(config: QConfig, q: Float[Array, "*batch actions"]) -> Float[Array, "*batch actions"]:
    """Probabilities of the target policy π, given the values of all actions.

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

    Traces are $\lambda \min(\bar c, \pi/\mu)$; for tree backup they are $\lambda \pi$, for Peng's Q(λ) λ, and for n-step 1.
    The Bellman errors of the last two subtract $Q(x_t, \pi)$, those of the others $Q(x_t, a_t)$.
    """
    observations = jnp.concatenate([batch.observations[:1], batch.next_observations])
    q_all = target(observations)
    pi = target_policy(config, network(observations) if config.double else q_all)
    v = jnp.sum(pi * q_all, -1)
    action = jax.nn.one_hot(batch.actions[..., 0].astype(jnp.int32), q_all.shape[-1])
    pi_taken = jnp.sum(pi[:-1] * action, -1)
    q = jnp.sum(q_all[:-1] * action, -1)
    if config.operator == "n-step":
        traces, q = jnp.ones_like(v[:-1]), v[:-1]
    elif config.operator == "peng":
        traces, q = config.decay * jnp.ones_like(v[:-1]), v[:-1]
    elif config.operator == "tree-backup":
        traces = config.decay * pi_taken
    else:
        traces = clip_ratios(pi_taken / jnp.exp(batch.log_behaviour), config.clip, config.decay)
    features = jnp.concatenate([batch.observations, action], -1)
    return Bootstrap(v[1:], traces.at[0].set(1.0), q, features)


def targets(
    config: QConfig, state: QState, batches: Sequences, keys: Array, *, train: bool
) -> tuple[CriticTarget, Estimator | None, Float[Array, ""]]:
    """The half of an update that depends on the operator; TD weights learn in every update."""
    values = jax.vmap(partial(bootstrap, config, state.network, state.target))(batches)
    return all_step_targets(config, state.estimator, batches, values, train=train)


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
        The agent, the loss, and the values before the step.
    """
    loss_and_gradient = jax.value_and_grad(q_loss, has_aux=True)
    (loss, values), gradient = loss_and_gradient(state.network, pairs, target)
    network, optimiser = adam_step(config.learning_rate, gradient, state.optimiser, state.network)
    count = state.count + 1
    renew = count % config.target_every == 0
    renewed = jax.tree.map(lambda new, old: jnp.where(renew, new, old), network, state.target)
    return QState(network, renewed, optimiser, count, state.estimator), loss, values


def q_loss(
    network: ObservationNetwork, pairs: Float[Array, "batch n"], target: Float[Array, " batch"]
) -> tuple[Float[Array, ""], Float[Array, " batch"]]:
    """The mean squared error of Q at pairs [observation, one-hot action], and the values of the pairs."""
    observations, action = jnp.split(pairs, [network.inputs], axis=-1)
    values = jnp.sum(network(observations) * action, -1)
    return jnp.mean((values - target) ** 2), values


def rounds(config: DiscreteConfig, key: Array, updates: int) -> Array:
    """The keys `[updates, 1]` of the updates of a block: every round is one update."""
    return jax.random.split(key, updates)[:, None]


def delayed_rounds(config: DiscreteConfig, updates: int, done: Array | int) -> None:
    """No update is delayed: all rounds are alike."""


def run_round(one_round: Any, state: Any, batches: Any, delayed: None) -> Any:
    """Run `one_round(state, batches, delayed=True)`."""
    return one_round(state, batches, delayed=True)


def measure(config: QConfig, state: QState, batch: Sequences, key: Array) -> Float[Array, " metrics"]:
    """`METRICS` of the next update if it were made on this batch. Nothing is updated."""
    one: Sequences = jax.tree.map(lambda x: x[None], batch)
    found, _, weight_loss = targets(config, state, one, key[None], train=True)
    loss, values = q_loss(state.network, found.pairs[0], found.target[0])
    own = update_metrics(found, loss[None], values[None], weight_loss)

    def targets_of(rival: QConfig, one: Sequences) -> CriticTarget:
        return targets(rival, replace(state, estimator=None), one, key[None], train=False)[0]

    return measured(config, own, values, batch, targets_of)
