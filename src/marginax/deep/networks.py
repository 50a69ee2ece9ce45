"""The networks: multi-layer perceptrons on states or on [state, action] features."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marginax.simulators.policy import Layers


class MLP(eqx.Module):
    """A perceptron with ReLU layers and a linear last one, on batches of any shape.

    Weights start uniform in ±1/√(inputs), as PyTorch (and so Spinning Up) has them. With `copies`, so many
    independent networks in one: every parameter has a leading axis, and so has the output.

    Attributes:
        weights: One matrix `[(copies,) inputs, outputs]` a layer.
        biases: One vector `[(copies,) 1, outputs]` a layer.

    >>> network = MLP(3, 2, (8, 8), key=jax.random.key(0))
    >>> network(jnp.ones((5, 3))).shape
    (5, 2)
    >>> MLP(3, 2, (8, 8), copies=2, key=jax.random.key(0))(jnp.ones((5, 3))).shape
    (2, 5, 2)
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


def act(actor: MLP, observations: Float[Array, "batch n"]) -> Float[Array, "batch m"]:
    """The deterministic policy: tanh of the network, actions in [-1, 1].

    >>> act(MLP(3, 2, (8,), key=jax.random.key(0)), jnp.ones((5, 3))).shape
    (5, 2)
    """
    return jnp.tanh(actor(observations))


# Twin critics: one network with a leading axis of 2, or two networks.
Critics = MLP | tuple[MLP, MLP]


def value(critic: Critics, features: Float[Array, "batch n"]) -> Float[Array, "*copies batch"]:
    """Q of a batch of [state, action] features: `[batch]`, or `[2, batch]` for twin critics.

    >>> value(MLP(3, 1, (8,), copies=2, key=jax.random.key(0)), jnp.ones((5, 3))).shape
    (2, 5)
    """
    if isinstance(critic, tuple):
        return jnp.stack([value(twin, features) for twin in critic])
    return critic(features)[..., 0]


def first_twin(critic: Critics) -> MLP:
    """The first of the twins.

    >>> first_twin(MLP(3, 1, (8,), copies=2, key=jax.random.key(0))).weights[0].shape
    (3, 8)
    """
    return critic[0] if isinstance(critic, tuple) else jax.tree.map(lambda x: x[0], critic)


def apart(tree: Any) -> Any:
    """Networks of two copies as pairs of networks, wherever they are in a tree.

    A batched product runs on one core of a CPU, and two products side by side on two; an accelerator
    prefers one large product. Either way the numbers are the same.

    >>> twins = MLP(3, 1, (8,), copies=2, key=jax.random.key(0))
    >>> len(apart({"critic": twins})["critic"])
    2
    """

    def pair(node: Any) -> Any:
        if not isinstance(node, MLP):
            return node
        return tuple(jax.tree.map(lambda x, i=i: x[i], node) for i in range(2))

    return jax.tree.map(pair, tree, is_leaf=lambda node: isinstance(node, MLP))


def together(tree: Any) -> Any:
    """What `apart` was given.

    >>> twins = MLP(3, 1, (8,), copies=2, key=jax.random.key(0))
    >>> together(apart(twins)).weights[0].shape
    (2, 3, 8)
    """

    def is_pair(node: Any) -> bool:
        return type(node) is tuple and len(node) == 2 and all(isinstance(x, MLP) for x in node)

    def join(node: Any) -> Any:
        return jax.tree.map(lambda *x: jnp.stack(x), *node) if is_pair(node) else node

    return jax.tree.map(join, tree, is_leaf=is_pair)


def layers(actor: MLP) -> Layers:
    """The actor as NumPy arrays, for the processes that act: see `marginax.simulators.policy`.

    >>> from marginax.simulators import policy
    >>> actor = MLP(3, 2, (8,), key=jax.random.key(0))
    >>> bool(np.allclose(policy.act(layers(actor), np.ones(3)), act(actor, jnp.ones((1, 3)))[0], atol=1e-6))
    True
    """
    pairs = zip(actor.weights, actor.biases, strict=True)
    return [(np.asarray(weight), np.asarray(bias)[0]) for weight, bias in pairs]
