"""Networks for logs with observations: their inputs and their training.

Every estimator is an ensemble. Each member has its own resample of the episodes, so the spread of the members is a bootstrap
over episodes. Losses are means over transitions of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from marginax import _checks as checks
from marginax.deep.networks import MLP
from marginax.offline.features import Choices, Pairs
from marginax.traces import clip_ratios


@dataclass(frozen=True)
class Training:
    """How networks are fitted.

    Attributes:
        steps: gradient steps.
        batch: transitions (or windows) in each step.
        rate: learning rate of Adam, decayed to a tenth.
        hidden: sizes of the hidden layers.
        members: networks in an ensemble.
        window: steps of a multi-step target.
        polyak: share of the online network that enters the target network at each step.

    >>> Training(steps=100).members
    5
    """

    steps: int = 1500
    batch: int = 128
    rate: float = 1e-3
    hidden: tuple[int, ...] = (64, 64)
    members: int = 5
    window: int = 8
    polyak: float = 0.02

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "members", "window"):
            checks.count(f"training.{name}", getattr(self, name))
        for size in self.hidden:
            checks.count("training.hidden", size)
        checks.positive("training.rate", self.rate)
        checks.step_size(self.polyak, "training.polyak")


class Rows(eqx.Module):
    """A log as arrays of the device."""

    observations: Float[Array, "N D"]
    actions: Float[Array, "N K"]
    rewards: Float[Array, N]
    terminal: Float[Array, N]
    last: Int[Array, N]
    episode: Int[Array, N]
    following: Choices
    starts: Choices
    traces: Float[Array, N]
    cumulative: Float[Array, N]
    per_episode: Float[Array, "members E"]  # how often each episode counts in each member


def rows_of(
    pairs: Pairs, ratios: np.ndarray | None, weights: np.ndarray, discount: float, scale: float
) -> Rows:
    """Puts a log on the device: rewards divided by `scale`, traces min(1, π/μ), and γ^t ρ_t for regression."""
    log = pairs.log
    ones = np.ones(len(log))
    rho = ones if ratios is None else log.products(ratios)

    def floats(x: np.ndarray) -> Array:
        return jnp.asarray(x, jnp.float32)

    return Rows(
        observations=floats(pairs.observations),
        actions=floats(pairs.actions),
        rewards=floats(log.rewards / scale),
        terminal=floats(log.terminal),
        last=jnp.asarray(log.last[log.episode], jnp.int32),
        episode=jnp.asarray(log.episode, jnp.int32),
        following=jax.tree.map(floats, pairs.following),
        starts=jax.tree.map(floats, pairs.starts),
        traces=floats(ones if ratios is None else clip_ratios(ratios)),
        cumulative=floats(np.minimum(discount ** log.times.astype(float) * rho, 1e6)),
        per_episode=floats(weights),
    )


def at(network: MLP, rows: Rows, index: Array) -> Array:
    """[members, n, outputs] f(x,a) at some rows."""
    return network(jnp.concatenate([rows.observations[index], rows.actions[index]], axis=-1))


def expected(network: MLP, choices: Choices, key: Array | None = None) -> Array:
    """[members, n, outputs] Σ_a π(a|x) f(x,a) at n states.

    With a key, a continuous policy is averaged over two of its draws instead of all. This is unbiased, and cheaper.
    """
    actions, weights = choices.actions, choices.weights
    n, m = weights.shape
    if key is not None and actions.ndim == 3 and m > 2:  # a draw and its mirror image
        one = jax.random.randint(key, (), 0, m // 2)
        both = jnp.stack([one, one + m // 2])
        actions, weights, m = actions[:, both], weights[:, both] * (m / 2), 2
    acts = jnp.broadcast_to(actions, (n, m, actions.shape[-1]))
    states = jnp.broadcast_to(choices.observations[:, None], (n, m, choices.observations.shape[-1]))
    inputs = jnp.concatenate([states, acts], axis=-1).reshape(n * m, -1)
    values = network(inputs)
    return jnp.einsum("...nmo,nm->...no", values.reshape(*values.shape[:-2], n, m, -1), weights)


def hidden(network: MLP) -> MLP:
    """The network without its last layer, and with a constant output 1. The value of the network is linear in these outputs."""
    lead = network.weights[-1].shape[:-2]
    size = network.weights[-1].shape[-2]
    through = jnp.concatenate([jnp.eye(size), jnp.zeros((size, 1))], axis=1)
    one = jnp.zeros((1, size + 1)).at[0, -1].set(1.0)
    matrices = (jnp.broadcast_to(x, (*lead, *x.shape)) for x in (through, one))
    return eqx.tree_at(lambda net: (net.weights[-1], net.biases[-1]), network, tuple(matrices))


def member(network: MLP, k: int) -> MLP:
    """One of the copies."""
    return jax.tree.map(lambda x: x[k], network)


def everywhere(function: Callable[[Array], Array], size: int) -> np.ndarray:
    """`function` of all row numbers, in blocks [n]; float64."""
    blocks = np.array_split(np.arange(size), max(1, size // 20_000))
    return np.concatenate([np.asarray(function(jnp.asarray(b)), np.float64) for b in blocks], axis=-2)


def basis(network: MLP, rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The outputs φ of `hidden` on a log: φ(x,a) [N, F], φ(x',π) [N, F], φ(x_0,π) [E, F]."""
    features, steps = hidden(network), len(rows.rewards)
    return (
        everywhere(lambda i: at(features, rows, i), steps),
        everywhere(lambda i: expected(features, rows.following.take(i)), steps),
        everywhere(lambda i: expected(features, rows.starts.take(i)), len(rows.starts.weights)),
    )


def whitening(phi: np.ndarray, per_row: np.ndarray, ridge: float = 1e-6) -> np.ndarray:
    """[F, F] U such that the weighted mean of (φU)ᵀ(φU) is the identity, up to a relative ridge."""
    gram = phi.T @ (per_row[:, None] * phi) / len(phi)
    gram += ridge * np.trace(gram) / len(gram) * np.eye(len(gram))
    return np.linalg.inv(np.linalg.cholesky(gram)).T


Loss = Callable[[Any, Any, Array, Any], Array]


def descend(
    loss: Loss, parameters: Any, key: Array, training: Training, rows: Any, *, slow: bool = False
) -> Any:
    """Adam on `loss(parameters, slow_parameters, key, rows)`; returns the average of the parameters over the second half of the steps.

    With `slow` the second argument of the loss is a Polyak-averaged copy (a target network), else the parameters themselves.
    """
    schedule = optax.cosine_decay_schedule(training.rate, training.steps, 0.1)
    optimiser = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))

    @eqx.filter_jit
    def run(parameters: Any, key: Array, rows: Any) -> Any:
        dynamic, static = eqx.partition(parameters, eqx.is_inexact_array)

        def step(carry: Any, key: Array) -> tuple[Any, None]:
            now, behind, average, state, i = carry
            other = behind if slow else now

            def total(p: Any) -> Array:
                return loss(eqx.combine(p, static), eqx.combine(other, static), key, rows)

            gradient = jax.grad(total)(now)
            updates, state = optimiser.update(gradient, state, now)
            now = optax.apply_updates(now, updates)
            behind = _mixed(behind, now, training.polyak)
            late = i >= training.steps // 2
            count = jnp.maximum(i - training.steps // 2, 0) + 1
            average = _mixed(average, now, jnp.where(late, 1.0 / count, 1.0))
            return (now, behind, average, state, i + 1), None

        carry = (dynamic, dynamic, dynamic, optimiser.init(dynamic), jnp.asarray(0))
        carry, _ = jax.lax.scan(step, carry, jax.random.split(key, training.steps))
        return eqx.combine(carry[2], static)

    return run(parameters, key, rows)


def _mixed(first: Any, second: Any, share: Any) -> Any:
    return jax.tree.map(lambda x, y: (1 - share) * x + share * y, first, second)


def resample(episodes: int, members: int, seed: int) -> np.ndarray:
    """[members, episodes] how often each episode counts in each member: a bootstrap over episodes."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(episodes, size=(members, episodes))
    return np.stack([np.bincount(row, minlength=episodes) for row in draws]).astype(np.float32)
