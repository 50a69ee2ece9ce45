r"""Marginalize the path, keep the action's own trace: a network of u, one step of its training, and the TD weights u c.

For a Markov behaviour policy the TD weight away from the start pair is $w = u(x \mid x_0, a_0)\, c(x, a)$, where u is the
mean product of the traces on the way to x. Only u is learned; the last trace and the decay λ are known. Replay holds data
of many behaviour policies. Then u is an average over them, and the factorisation is approximate. With expected Bellman
errors, as in targets of Q, a wrong u changes how fast Q converges, but not what it converges to.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from marginax import _checks as checks
from marginax.deep.networks import MLP, adam_step
from marginax.weights import losses


@dataclasses.dataclass(frozen=True)
class PathLoss:
    """How u is learned: by Adam on `marginax.weights.losses.path_deviance`.

    Attributes:
        power: 0 is least squares, 1 Poisson's deviance, 2 the gamma deviance.
        mixture: 1 is regression on products of traces, 0 is reverse-time TD, and numbers between are a mixture.
        average: Share of the old running average of the parameters that each update keeps. TD weights use the averaged
            network, and reverse-time TD bootstraps from it.
        learning_rate: Adam's step size.
    """

    power: float = 1.0
    mixture: float = 0.8
    average: float = 0.999
    learning_rate: float = 3e-4

    def __post_init__(self) -> None:
        checks.number("power", self.power)
        checks.fraction("mixture", self.mixture)
        checks.fraction("average", self.average)
        checks.positive("learning_rate", self.learning_rate)


class PathNetwork(eqx.Module):
    r"""A network of $\log u(x \mid x_0, a_0)$, so that u is positive; u is 1 before any training.

    Attributes:
        head: Maps the features of x and of the start pair to log u.
        trunk: A network whose features of observations the caller gives to the head, so that it is trained with it;
            None where observations are features themselves.
    """

    head: MLP
    trunk: Any

    def __init__(
        self, features: int, start: int, hidden: Sequence[int], *, key: Array, trunk: Any = None
    ) -> None:
        head = MLP(features + start, 1, hidden, key=key)
        zeros = (jnp.zeros_like(head.weights[-1]), jnp.zeros_like(head.biases[-1]))
        self.head = eqx.tree_at(lambda m: (m.weights[-1], m.biases[-1]), head, zeros)
        self.trunk = trunk

    def __call__(self, later: Float[Array, "*steps n"], start: Float[Array, "..."]) -> Float[Array, "*steps"]:
        """log u of states with features `later`, for start pairs whose features `start` broadcast to the same steps."""
        steps = later.shape[:-1]
        inputs = jnp.concatenate([later, jnp.broadcast_to(start, (*steps, start.shape[-1]))], -1)
        return self.head(inputs.reshape(-1, inputs.shape[-1]))[:, 0].reshape(steps)


class Paths(eqx.Module):
    """The network in training, its running average, and Adam's state."""

    network: PathNetwork
    average: PathNetwork
    optimiser: Any


def init(loss: PathLoss, network: PathNetwork) -> Paths:
    """The state of training, from a fresh network."""
    optimiser = optax.adam(loss.learning_rate).init(network)
    return Paths(network, jax.tree.map(jnp.copy, network), optimiser)


def mean_products(scores: Float[Array, "*batch T"], clip: Any) -> Float[Array, "*batch T"]:
    r"""u of every step of a sequence, from log u: 1 where no trace lies on the way (t ≤ 1), and at most $\bar c^{\,t-1}$."""
    times = jnp.arange(scores.shape[-1])
    log_bound = jnp.log(clip) * jnp.maximum(times - 1, 0)
    return jnp.exp(jnp.where(times < 2, 0, jnp.minimum(scores, log_bound)))


def credit(
    u: Float[Array, "*batch T"], ratios: Float[Array, "*batch T"], decay: Any
) -> Float[Array, "*batch T"]:
    r"""The TD weights $\lambda^t\, u(x_t) \min(\bar c, \pi/\mu)$ of a sequence, 1 at its start.

    Args:
        u: From `mean_products`.
        ratios: $\min(\bar c, \pi/\mu)$, without the decay; the first is not read.
        decay: λ.
    """
    times = jnp.arange(u.shape[-1])
    return jnp.where(times == 0, 1, decay**times * u * ratios)


def update(
    loss: PathLoss,
    paths: Paths,
    scores_of: Callable[[PathNetwork], Float[Array, "batch T"]],
    ratios: Float[Array, "batch T"],
    discounts: Float[Array, "batch T"],
    truncated: Bool[Array, "batch T"] | None = None,
    *,
    clip: Any,
) -> tuple[Paths, Float[Array, ""], Float[Array, "batch T"]]:
    r"""One step of Adam on a batch of sequences. It can be vmapped over networks with different clips.

    Args:
        loss: The loss.
        paths: The network, its average and the optimiser.
        scores_of: Maps a network to its log u of every step of the batch; those of the first two steps are not read.
        ratios: $\min(\bar c, \pi/\mu)$, without the decay.
        discounts: γ, or 0 where step t ended the episode.
        truncated: Steps after which the sequence does not go on.
        clip: c̄.

    Returns:
        The new state of training, the loss before the step, and u of the averaged network before the step.
    """
    u = mean_products(scores_of(paths.average), clip)

    def one(f: Array, *sequence: Array) -> Array:
        *arrays, bootstrap = sequence
        return losses.path_deviance(f, *arrays, power=loss.power, mixture=loss.mixture, bootstrap=bootstrap)

    def objective(network: PathNetwork) -> Array:
        arrays = (ratios, discounts) if truncated is None else (ratios, discounts, truncated)
        return jnp.mean(jax.vmap(one)(scores_of(network), *arrays, u))

    value, gradient = jax.value_and_grad(objective)(paths.network)
    network, optimiser = adam_step(loss.learning_rate, gradient, paths.optimiser, paths.network)
    keep = loss.average
    average = jax.tree.map(lambda old, new: keep * old + (1 - keep) * new, paths.average, network)
    return Paths(network, average, optimiser), value, u
