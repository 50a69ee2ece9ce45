"""The networks: multi-layer perceptrons on states or on [state, action] features."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class MLP(eqx.Module):
    """A perceptron with ReLU layers and a linear last one, on batches of any shape.

    Weights start uniform in ±1/√(inputs), as PyTorch (and so Spinning Up) has them. With `copies`, that many
    independent networks in one: every parameter has a leading axis, and so has the output.

    Attributes:
        weights: One matrix `[(copies,) inputs, outputs]` per layer.
        biases: One vector `[(copies,) 1, outputs]` per layer.
    """

    weights: list[Float[Array, "..."]]
    biases: list[Float[Array, "..."]]

    def __init__(
        self, inputs: int, outputs: int, hidden: Sequence[int], *, key: Array, copies: int | None = None
    ) -> None:
        sizes = [inputs, *hidden, outputs]
        keys = jax.random.split(key, (len(sizes) - 1, 2))
        lead = () if copies is None else (copies,)
        self.weights, self.biases = [], []
        for (w_key, b_key), n, m in zip(keys, sizes[:-1], sizes[1:], strict=True):
            bound = n**-0.5
            self.weights.append(jax.random.uniform(w_key, (*lead, n, m), minval=-bound, maxval=bound))
            self.biases.append(jax.random.uniform(b_key, (*lead, 1, m), minval=-bound, maxval=bound))

    def __call__(self, inputs: Float[Array, "batch n"]) -> Float[Array, "..."]:
        x = inputs
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x @ weight + bias
            if i < len(self.weights) - 1:
                x = jax.nn.relu(x)
        return x


def act(actor: MLP, observations: Float[Array, "*batch n"]) -> Float[Array, "*batch m"]:
    """The deterministic policy: tanh of the network, actions in [-1, 1]."""
    rows = observations.reshape(-1, observations.shape[-1])  # one product for all of them
    return jnp.tanh(actor(rows)).reshape(*observations.shape[:-1], -1)


# Twin critics. A batched product runs on one core of a CPU and two products side by side on two; an accelerator
# prefers one large product. The numbers are the same.
Critics = MLP | tuple[MLP, MLP]


def twins(inputs: int, hidden: Sequence[int], *, key: Array) -> Critics:
    """Two critics: two networks on a CPU, one with a leading axis of 2 on an accelerator."""
    both = MLP(inputs, 1, hidden, copies=2, key=key)
    if jax.default_backend() != "cpu":
        return both
    first, second = (jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))
    return first, second


def value(critic: Critics, features: Float[Array, "*batch n"]) -> Float[Array, "..."]:
    """Q of [state, action] features `[*batch, n]`: `[*batch]`, or `[2, *batch]` for twin critics."""
    if isinstance(critic, tuple):
        return jnp.stack([value(twin, features) for twin in critic])
    found = critic(features.reshape(-1, features.shape[-1]))[..., 0]
    return found.reshape(*found.shape[:-1], *features.shape[:-1])


def first_twin(critic: Critics) -> MLP:
    """The first of the twins."""
    return critic[0] if isinstance(critic, tuple) else jax.tree.map(lambda x: x[0], critic)


def actor_vector(actor: MLP) -> Float[Array, " n"]:
    """The policy as one vector: layer by layer the weight in row order, then the bias (`simulators.policy`)."""
    layers = zip(actor.weights, actor.biases, strict=True)
    return jnp.concatenate([jnp.ravel(x) for layer in layers for x in layer])
