"""The networks of all agents: perceptrons, small convolutions on grids, scaled observations, and one step of Adam."""

import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


class MLP(eqx.Module):
    """A perceptron: ReLU hidden layers and a linear output layer.

    Weights and biases start uniform in ±1/√(inputs), as in PyTorch (and so in Spinning Up). With `normal`, weights are
    normal with variance 1/inputs and biases are zero, as in Flax (and so in cleanrl's `dqn_jax`). With `copies`, the module
    holds that many independent networks: every parameter has a leading axis, and so has the output.

    Attributes:
        weights: One matrix `[(copies,) inputs, outputs]` per layer.
        biases: One vector `[(copies,) 1, outputs]` per layer.
        layer_norm: Whether every hidden layer is scaled to mean 0 and variance 1 over its units, before its ReLU.
    """

    weights: list[Float[Array, "..."]]
    biases: list[Float[Array, "..."]]
    layer_norm: bool = eqx.field(static=True, default=False)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        hidden: Sequence[int],
        *,
        key: Array,
        copies: int | None = None,
        normal: bool = False,
        layer_norm: bool = False,
    ) -> None:
        self.layer_norm = layer_norm
        sizes = [inputs, *hidden, outputs]
        keys = jax.random.split(key, (len(sizes) - 1, 2))
        lead = () if copies is None else (copies,)
        self.weights, self.biases = [], []
        for (w_key, b_key), n, m in zip(keys, sizes[:-1], sizes[1:], strict=True):
            if normal:
                fresh = jax.nn.initializers.lecun_normal(batch_axis=() if copies is None else 0)
                self.weights.append(fresh(w_key, (*lead, n, m)))
                self.biases.append(jnp.zeros((*lead, 1, m)))
            else:
                bound = n**-0.5
                self.weights.append(jax.random.uniform(w_key, (*lead, n, m), minval=-bound, maxval=bound))
                self.biases.append(jax.random.uniform(b_key, (*lead, 1, m), minval=-bound, maxval=bound))

    def __call__(self, inputs: Float[Array, "batch n"]) -> Float[Array, "..."]:
        x = inputs
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if i < len(self.weights) - 1:
                x = jax.nn.relu(jax.nn.standardize(x, epsilon=1e-5) if self.layer_norm else x)
        return x


def act(actor: MLP, observations: Float[Array, "*batch n"]) -> Float[Array, "*batch m"]:
    """The deterministic policy: tanh of the network, actions in [-1, 1]."""
    rows = observations.reshape(-1, observations.shape[-1])  # one product for all of them
    return jnp.tanh(actor(rows)).reshape(*observations.shape[:-1], -1)


# Twin critics. A batched product runs on one core of a CPU and two products side by side on two; an accelerator
# prefers one large product. The numbers are the same.
Critics = MLP | tuple[MLP, MLP]


def twins(inputs: int, hidden: Sequence[int], *, key: Array, layer_norm: bool = False) -> Critics:
    """Two critics: two networks on a CPU, one with a leading axis of 2 on an accelerator."""
    both = MLP(inputs, 1, hidden, copies=2, key=key, layer_norm=layer_norm)
    if jax.default_backend() != "cpu":
        return both
    first, second = (jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))
    return first, second


def value(critic: Critics, features: Float[Array, "*batch n"]) -> Float[Array, "..."]:
    """Q of [state, action] features `[*batch, n]`: `[*batch]`, or `[2, *batch]` for twin critics."""
    if isinstance(critic, tuple):
        return jnp.stack([value(twin, features) for twin in critic])
    values = critic(features.reshape(-1, features.shape[-1]))[..., 0]
    return values.reshape(*values.shape[:-1], *features.shape[:-1])


def first_twin(critic: Critics) -> MLP:
    """The first of the twin critics: the one that the actor follows."""
    return critic[0] if isinstance(critic, tuple) else jax.tree.map(lambda x: x[0], critic)


def adam_step(rate: float, gradient: Any, optimiser: Any, parameters: Any) -> tuple[Any, Any]:
    """One step of Adam: the new parameters and the new state of the optimiser."""
    updates, optimiser = optax.adam(rate).update(gradient, optimiser)
    return optax.apply_updates(parameters, updates), optimiser


def with_separate_twins(agents: Any) -> Any:
    """Agents, every leaf `[agents, …]`, with the twin critics of a CPU, wherever they learn. Checkpoints have this form."""

    def separate(x: Any) -> Any:
        return tuple(jax.tree.map(lambda y, i=i: y[:, i], x) for i in range(2)) if _are_one(x) else x

    return jax.tree.map(separate, agents, is_leaf=_are_one)


def with_twins_as_in(here: Any, agents: Any) -> Any:
    """What `with_separate_twins` returned, with twin critics in the form that they have in `here`."""

    def join(x: Any, found: Any) -> Any:
        return jax.tree.map(lambda *y: jnp.stack(y, 1), *found) if _are_one(x) else found

    return jax.tree.map(join, here, agents, is_leaf=_are_one)


def _are_one(x: Any) -> bool:
    """Whether part of the agents' tree is twin critics in one network: parameters `[agents, 2, inputs, outputs]`."""
    return isinstance(x, MLP) and x.weights[0].ndim == 4


def actor_vector(actor: MLP) -> Float[Array, " n"]:
    """All parameters as one vector: for each layer the weights in row order, then the biases (`simulators.policy`)."""
    layers = zip(actor.weights, actor.biases, strict=True)
    return jnp.concatenate([jnp.ravel(x) for layer in layers for x in layer])


class Scaler(eqx.Module):
    """Running mean and variance of the observations; calling it scales observations to mean 0 and variance 1.

    Attributes:
        count: Number of observations so far.
        mean: Mean of each entry.
        squares: Sum of the squared deviations from the mean, for each entry.

    >>> scaler = Scaler.fresh(1).add(jnp.array([[1.0], [3.0]]))
    >>> scaler(jnp.array([[3.0]]))
    Array([[1.]], dtype=float32)
    """

    count: Float[Array, ""]
    mean: Float[Array, " n"]
    squares: Float[Array, " n"]

    @classmethod
    def fresh(cls, size: int) -> "Scaler":
        """A scaler that has seen no observation, and returns observations as they are."""
        return cls(jnp.zeros(()), jnp.zeros(size), jnp.zeros(size))

    @property
    def deviation(self) -> Float[Array, " n"]:
        """Standard deviation of each entry, at least 0.01; 1 before the first observation."""
        found = jnp.sqrt(self.squares / jnp.maximum(self.count, 1))
        return jnp.where(self.count > 0, jnp.maximum(found, 0.01), 1.0)

    def add(self, observations: Float[Array, "batch n"]) -> "Scaler":
        """The scaler after more observations."""
        new, count = len(observations), self.count + len(observations)
        mean = jnp.mean(observations, axis=0)
        shift = mean - self.mean
        squares = jnp.sum((observations - mean) ** 2, axis=0) + shift**2 * self.count * new / count
        return Scaler(count, self.mean + shift * new / count, self.squares + squares)

    def __call__(self, observations: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
        return (observations - self.mean) / self.deviation

    def folded(self, network: MLP) -> MLP:
        """A network that maps plain observations to what `network` returns for scaled ones."""
        weight = network.weights[0] / self.deviation[:, None]
        # In TF32, what acts would differ from what learns.
        shift = jnp.matmul(self.mean, weight, precision="highest")
        bias = network.biases[0] - shift
        layers = ([weight, *network.weights[1:]], [bias, *network.biases[1:]])
        return eqx.tree_at(lambda m: (m.weights, m.biases), network, layers)


class ObservationNetwork(eqx.Module):
    """A perceptron on flat observations; on grids `[rows, columns, planes]` a 3 × 3 convolution comes before it.

    Attributes:
        dense: The perceptron.
        filters: The convolution, as a perceptron without hidden layers that is applied to each patch; None without one.
        shape: Shape of an observation before it was flattened.

    >>> network = observation_network((10, 10, 4), 3, (8,), key=jax.random.key(0))
    >>> network(jnp.zeros((5, 400))).shape, network.filters.weights[0].shape
    ((5, 3), (36, 16))
    """

    dense: MLP
    filters: MLP | None
    shape: tuple[int, ...] = eqx.field(static=True)

    @property
    def inputs(self) -> int:
        """Length of a flattened observation."""
        return math.prod(self.shape)

    def __call__(self, observations: Float[Array, "*batch n"]) -> Float[Array, "*batch outputs"]:
        rows = observations.reshape(-1, observations.shape[-1])  # one product for all of them
        if self.filters is not None:
            rows = jax.nn.relu(self._planes(rows))
        return self.dense(rows).reshape(*observations.shape[:-1], -1)

    def _planes(self, rows: Array) -> Array:
        """The output of the convolution, flattened, before its ReLU."""
        assert self.filters is not None
        seen = patches(rows.reshape(-1, *self.shape))
        return self.filters(seen.reshape(-1, seen.shape[-1])).reshape(len(rows), -1)

    def as_perceptron(self) -> MLP:
        """The same function as a perceptron, in which the convolution is a (sparse) first layer."""
        if self.filters is None:
            return self.dense
        bias = self._planes(jnp.zeros((1, self.inputs)))
        weight = self._planes(jnp.eye(self.inputs)) - bias
        layers = ([weight, *self.dense.weights], [bias, *self.dense.biases])
        return eqx.tree_at(lambda m: (m.weights, m.biases), self.dense, layers)


def observation_network(
    shape: Sequence[int], outputs: int, hidden: Sequence[int], filters: int | None = None, *, key: Array
) -> ObservationNetwork:
    """A network for observations of this shape, with Flax's initial weights.

    Observations `[rows, columns, planes]` of at least 3 × 3 pass a convolution of `filters` filters; None means 16 for them
    and 0 for all others.

    >>> observation_network((4,), 2, (8,), key=jax.random.key(0)).filters is None
    True
    """
    sizes, count = layer_sizes(shape, outputs, hidden, filters), _filters(shape, filters)
    first, second = jax.random.split(key)
    dense = MLP(sizes[1] if count else sizes[0], outputs, hidden, key=first, normal=True)
    planes = MLP(9 * shape[2], count, (), key=second, normal=True) if count else None
    return ObservationNetwork(dense, planes, tuple(shape))


def layer_sizes(
    shape: Sequence[int], outputs: int, hidden: Sequence[int], filters: int | None = None
) -> list[int]:
    """Layer sizes of `ObservationNetwork.as_perceptron`, inputs and outputs included.

    >>> layer_sizes((10, 10, 4), 3, (128,))
    [400, 1024, 128, 3]
    """
    count = _filters(shape, filters)
    planes = [(shape[0] - 2) * (shape[1] - 2) * count] if count else []
    return [math.prod(shape), *planes, *hidden, outputs]


def _filters(shape: Sequence[int], filters: int | None) -> int:
    """The number of filters for observations of this shape."""
    grid = len(shape) == 3 and min(shape[:2]) >= 3
    if filters and not grid:
        raise ValueError(f"filters must be 0 for observations of shape {list(shape)}, got {filters}.")
    return (16 if grid else 0) if filters is None else filters


def dense_vector(network: ObservationNetwork) -> Float[Array, " n"]:
    """The parameters of the equivalent perceptron as one vector: see `actor_vector`."""
    return actor_vector(network.as_perceptron())


def patches(observations: Float[Array, "*batch rows columns planes"]) -> Float[Array, "*batch places patch"]:
    """All 3 × 3 patches of `[..., rows, columns, planes]`, as `[..., places, 9 planes]`.

    >>> patches(jnp.zeros((2, 10, 10, 4))).shape
    (2, 64, 36)
    """
    rows, columns = observations.shape[-3] - 2, observations.shape[-2] - 2
    parts = [observations[..., i : i + rows, j : j + columns, :] for i in range(3) for j in range(3)]
    return jnp.concatenate(parts, -1).reshape(*observations.shape[:-3], rows * columns, -1)
