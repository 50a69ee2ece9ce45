"""Parts of policy evaluation with networks: a convolutional network, rollouts in many copies of a game, and true values."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from marginax.deep.networks import patches
from marginax.deep.run_config import Sizes
from marginax.simulators.accelerated import AcceleratedSimulator as Game

Policy = Callable[[Float[Array, "batch *shape"]], Float[Array, "batch A"]]


class Network(eqx.Module):
    """A network with a 3 × 3 convolution, one hidden layer and a linear output.

    It takes the patches of an observation, which all agents share, so that the convolution is a matrix product.

    >>> network = Network((10, 10, 4), 3, filters=8, units=16, key=jax.random.key(0))
    >>> network(patches(jnp.zeros((5, 10, 10, 4)))).shape
    (5, 3)
    """

    filters: Float[Array, "patch filters"]
    dense: Float[Array, "features units"]
    out: Float[Array, "units outputs"]
    biases: tuple[Array, Array, Array]

    def __init__(self, shape: Sequence[int], outputs: int, *, filters: int, units: int, key: Array) -> None:
        features = (shape[0] - 2) * (shape[1] - 2) * filters
        first, second, third = jax.random.split(key, 3)
        self.filters = _he_normal(first, 9 * shape[2], filters)
        self.dense = _he_normal(second, features, units)
        self.out = 0.1 * _he_normal(third, units, outputs)
        self.biases = (jnp.zeros(filters), jnp.zeros(units), jnp.zeros(outputs))

    def features(self, patches: Float[Array, "*batch places patch"]) -> Float[Array, "*batch units"]:
        """The outputs of the hidden layer."""
        planes = jax.nn.relu(patches @ self.filters + self.biases[0])
        return jax.nn.relu(planes.reshape(*planes.shape[:-2], -1) @ self.dense + self.biases[1])

    def __call__(self, patches: Float[Array, "*batch places patch"]) -> Float[Array, "*batch outputs"]:
        return self.features(patches) @ self.out + self.biases[2]


def _he_normal(key: Array, inputs: int, outputs: int) -> Array:
    return jax.random.normal(key, (inputs, outputs)) * (2 / inputs) ** 0.5


def actions_of(game: Game) -> int:
    """The number of actions of a game.

    Raises:
        ValueError: If the networks of this module cannot play the game: its actions are not discrete, or its observations
            are not `[rows, columns, planes]` of at least 3 × 3.

    >>> from marginax.simulators import make_accelerated
    >>> actions_of(make_accelerated("grid/catch"))
    3
    """
    if game.num_actions is None:
        raise ValueError(f"game {game.name} must have discrete actions, and its actions lie in a box")
    if len(game.observation_shape) != 3 or min(game.observation_shape[:2]) < 3:
        raise ValueError(
            f"game {game.name} must show [rows, columns, planes] of at least 3 × 3, got {game.observation_shape}"
        )
    return game.num_actions


def epsilon_greedy(network: Network, epsilon: float) -> Policy:
    """The greedy policy of a network, mixed with the uniform one.

    >>> network = Network((10, 10, 4), 2, filters=8, units=16, key=jax.random.key(0))
    >>> epsilon_greedy(network, 0.5)(jnp.zeros((1, 10, 10, 4))).sum()
    Array(1., dtype=float32)
    """

    def policy(observations: Array) -> Array:
        q = network(patches(observations))
        return (1 - epsilon) * jax.nn.one_hot(q.argmax(-1), q.shape[-1]) + epsilon / q.shape[-1]

    return policy


class Sequences(NamedTuple):
    """Sequences of T steps of the behaviour policy, with the T + 1 states before and after them.

    Attributes:
        observations: Observations `[…, T+1, rows, columns, planes]` as bytes: the planes of the games are 0 or 1.
        actions: `a_t`.
        rewards: `r_t`.
        ended: Whether step t ended the episode.
        pi: Target probabilities of all actions at every state.
        mu: Behaviour probability of `a_t`.
    """

    observations: Array
    actions: Int[Array, "*batch T"]
    rewards: Float[Array, "*batch T"]
    ended: Bool[Array, "*batch T"]
    pi: Float[Array, "*batch T+1 A"]
    mu: Float[Array, "*batch T"]


def rollout(
    game: Game, pi: Policy, mu: Policy, states: Any, key: Array, steps: int, actions: Array | None = None
) -> tuple[Any, Sequences]:
    """Steps of the behaviour policy in many copies of a game, episode after episode.

    Args:
        game: The game.
        pi: Target policy, whose probabilities are recorded.
        mu: Behaviour policy, which acts.
        states: States and observations `[copies]`, as `game.reset` returns them.
        key: A JAX random key.
        steps: Number of steps of each copy.
        actions: First actions `[copies]`; drawn from the behaviour policy when omitted.

    Returns:
        The states at the end, and the sequences `[copies, steps]`.
    """

    def step(states: Any, key_and_number: tuple[Array, Array]) -> tuple[Any, Sequences]:
        key, number = key_and_number
        act_key, step_key, reset_key = jax.random.split(key, 3)
        observations = states[1]
        behaviour = mu(observations)
        chosen = jax.random.categorical(act_key, jnp.log(behaviour))
        if actions is not None:
            chosen = jnp.where(number == 0, actions, chosen)
        probability = jnp.take_along_axis(behaviour, chosen[:, None], 1)[:, 0]
        copies = len(chosen)
        states, rewards, ended = _move(game, jax.random.split(step_key, copies), states, chosen)
        states = jax.vmap(game.restart)(jax.random.split(reset_key, copies), states[0], states[1], ended)
        data = Sequences(
            observations.astype(jnp.uint8), chosen, rewards, ended, pi(observations), probability
        )
        return states, data

    states, data = jax.lax.scan(step, states, (jax.random.split(key, steps), jnp.arange(steps)))
    data = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), data)
    last = states[1]
    return states, data._replace(
        observations=jnp.concatenate([data.observations, last[:, None].astype(jnp.uint8)], 1),
        pi=jnp.concatenate([data.pi, pi(last)[:, None]], 1),
    )


def _move(game: Game, keys: Array, states: Any, actions: Array) -> tuple[Any, Array, Array]:
    """One step of every copy. Time limits are ignored: an episode ends only at a terminal state."""
    inner, observations, rewards, ended, _ = jax.vmap(game.step)(keys, states[0], actions)
    return (inner, observations), rewards, ended


class Truth(NamedTuple):
    """Held-out pairs and their values by Monte Carlo.

    Attributes:
        observations: The observation of each pair's state.
        actions: The action of each pair.
        values: Mean return of the target policy after each pair.
        errors: Standard errors of those means.
        probes: Sequences of the behaviour policy that start at the first `sizes.probes` pairs, `[probes, repeats, T]`.
    """

    observations: Array
    actions: Int[Array, "pairs"]
    values: Float[Array, "pairs"]
    errors: Float[Array, "pairs"]
    probes: Sequences


def truth(game: Game, pi: Policy, mu: Policy, discount: float, sizes: Sizes, key: Array) -> Truth:
    """Pairs that the behaviour policy meets at random times, and the target policy's mean return after each of them."""
    reset_key, play_key, time_key, action_key, return_key, probe_key = jax.random.split(key, 6)
    states = jax.vmap(game.reset)(jax.random.split(reset_key, sizes.pairs))
    times = jax.random.randint(time_key, (sizes.pairs,), sizes.burn_in // 2, sizes.burn_in)

    def play(carry: tuple[Any, Any], number_and_key: tuple[Array, Array]) -> tuple[tuple[Any, Any], None]:
        states, kept = carry
        number, key = number_and_key
        states, _ = rollout(game, pi, mu, states, key, 1)
        return (states, _where(times == number, states, kept)), None

    numbers = jnp.arange(sizes.burn_in)
    keys = jax.random.split(play_key, sizes.burn_in)
    (_, states), _ = jax.lax.scan(play, (states, states), (numbers, keys))
    observations = states[1]
    actions = jax.random.categorical(action_key, jnp.log(mu(observations)))

    def repeated(first: int, times: int) -> tuple[Any, Array]:
        """The first pairs, each several times."""
        return jax.tree.map(lambda x: jnp.repeat(x[:first], times, 0), (states, actions))

    def earn(carry: tuple[Any, Array, Array], key: Array) -> tuple[tuple[Any, Array, Array], Array]:
        states, alive, chosen = carry
        step_key, act_key = jax.random.split(key)
        states, rewards, ended = _move(game, jax.random.split(step_key, len(chosen)), states, chosen)
        following = jax.random.categorical(act_key, jnp.log(pi(states[1])))
        return (states, alive & ~ended, following), jnp.where(alive, rewards, 0)

    start_states, start_actions = repeated(sizes.pairs, sizes.rollouts)
    keys = jax.random.split(return_key, sizes.horizon)
    alive = jnp.ones(len(start_actions), bool)
    _, rewards = jax.lax.scan(earn, (start_states, alive, start_actions), keys)
    powers = discount ** jnp.arange(sizes.horizon)
    returns = jnp.tensordot(powers, rewards, 1).reshape(sizes.pairs, sizes.rollouts)
    probe_states, probe_actions = repeated(sizes.probes, sizes.repeats)
    _, probes = rollout(game, pi, mu, probe_states, probe_key, sizes.length, probe_actions)
    probes = jax.tree.map(lambda x: x.reshape(sizes.probes, sizes.repeats, *x.shape[1:]), probes)
    spread = returns.std(1, ddof=1) / sizes.rollouts**0.5
    return Truth(observations, actions, returns.mean(1), spread, probes)


def _where(mask: Array, new: Any, old: Any) -> Any:
    """`jnp.where` of the first axis, for every array of a tree."""
    return jax.tree.map(lambda x, y: jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, old)


def check_policies(game: Game, pi: Policy, mu: Policy, key: Array, *, steps: int = 64) -> None:
    """Raises ValueError unless both are distributions over the game's actions and μ is positive wherever π is.

    They are checked at the states that μ meets in 256 copies of the game.

    >>> from marginax.simulators import make_accelerated
    >>> def left(observations):
    ...     return jnp.tile(jnp.array([1.0, 0.0, 0.0]), (len(observations), 1))
    >>> def uniform(observations):
    ...     return jnp.full((len(observations), 3), 1 / 3)
    >>> check_policies(make_accelerated("grid/catch"), uniform, left, jax.random.key(0))
    Traceback (most recent call last):
    ...
    ValueError: mu must be positive wherever pi is, got mu = 0 and pi = 0.333333 for action 1 ...
    """
    states = jax.vmap(game.reset)(jax.random.split(key, 256))
    first = states[1]
    for name, policy in (("pi", pi), ("mu", mu)):
        shape = np.shape(policy(first))
        if shape != (256, game.num_actions):
            raise ValueError(
                f"{name} must give {game.num_actions} probabilities for each observation of {game.name}, "
                f"got shape {shape} for 256 observations"
            )
    _, data = rollout(game, mu, mu, states, key, steps)
    met = data.observations.reshape(-1, *game.observation_shape).astype(jnp.float32)
    tables = {name: np.asarray(policy(met)) for name, policy in (("pi", pi), ("mu", mu))}
    for name, table in tables.items():
        wrong = ~(np.isfinite(table).all(1) & (table >= 0).all(1) & (np.abs(table.sum(1) - 1) < 1e-4))
        if wrong.any():
            k = int(wrong.argmax())
            raise ValueError(
                f"{name} must be a distribution over {game.num_actions} actions, got {table[k]} for observation {k}"
            )
    uncovered = np.argwhere((tables["mu"] == 0) & (tables["pi"] > 0))
    if len(uncovered):
        k, a = uncovered[0]
        raise ValueError(
            f"mu must be positive wherever pi is, got mu = 0 and pi = {tables['pi'][k, a]:g} for action {a} "
            f"of observation {k}"
        )
