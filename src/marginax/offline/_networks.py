"""Networks for logs with observations: behaviour, fitted Q with any backup, and marginalized ratios.

Every estimator is trained as an ensemble whose members weight the episodes by their own resample, so that the
spread of the members is a bootstrap over episodes. Losses are means over transitions of the log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from marginax import targets
from marginax.deep import weights as deep_weights
from marginax.deep.networks import MLP
from marginax.offline._features import Features
from marginax.offline._observations import Pairs

MOMENTS = 90  # features that a marginalized ratio is balanced against


@dataclass(frozen=True)
class Training:
    """How networks are fitted.

    Attributes:
        steps: gradient steps.
        batch: transitions (or windows) a step.
        rate: learning rate of Adam, decayed to a tenth.
        hidden: sizes of the hidden layers.
        members: networks in an ensemble.
        window: steps of a multi-step target.
        polyak: share of the online network that enters the target network at each step.

    >>> Training(steps=100).members
    5
    """

    steps: int = 3000
    batch: int = 128
    rate: float = 1e-3
    hidden: tuple[int, ...] = (64, 64)
    members: int = 5
    window: int = 8
    polyak: float = 0.02


class Rows(eqx.Module):
    """A log on the device."""

    observations: Float[Array, "N D"]
    actions: Float[Array, "N K"]
    rewards: Float[Array, N]
    terminal: Float[Array, N]
    last: Int[Array, N]
    episode: Int[Array, N]
    next_observations: Float[Array, "N D"]
    next_actions: Float[Array, ...]
    next_weights: Float[Array, "N M"]
    traces: Float[Array, N]
    cumulative: Float[Array, N]
    start_observations: Float[Array, "E D"]
    start_actions: Float[Array, ...]
    start_weights: Float[Array, "E M"]


def rows_of(pairs: Pairs, ratios: np.ndarray | None, discount: float, scale: float) -> Rows:
    """Puts a log on the device: rewards over `scale`, traces min(1, π/μ), and γ^t ρ_t for regression."""
    log = pairs.log
    ones = np.ones(len(log))
    rho = ones if ratios is None else log.products(ratios)
    floats = lambda x: jnp.asarray(x, jnp.float32)  # noqa: E731
    return Rows(
        observations=floats(pairs.observations),
        actions=floats(pairs.actions),
        rewards=floats(log.rewards / scale),
        terminal=floats(log.terminal),
        last=jnp.asarray(np.repeat(log.last, log.lengths), jnp.int32),
        episode=jnp.asarray(np.repeat(np.arange(log.num_episodes), log.lengths), jnp.int32),
        next_observations=floats(pairs.following.observations),
        next_actions=floats(pairs.following.actions),
        next_weights=floats(pairs.following.weights),
        traces=floats(ones if ratios is None else np.minimum(1.0, ratios)),
        cumulative=floats(np.minimum(discount ** log.times.astype(float) * rho, 1e6)),
        start_observations=floats(pairs.starts.observations),
        start_actions=floats(pairs.starts.actions),
        start_weights=floats(pairs.starts.weights),
    )


def _expected(network: MLP, observations: Array, actions: Array, weights: Array) -> Array:
    """[members, n] Σ_m weights[n,m] f(x_n, a_m)."""
    n, m = weights.shape
    acts = jnp.broadcast_to(actions, (n, m, actions.shape[-1]))
    states = jnp.broadcast_to(observations[:, None], (n, m, observations.shape[-1]))
    inputs = jnp.concatenate([states, acts], axis=-1).reshape(n * m, -1)
    values = network(inputs)[..., 0].reshape(-1, n, m)
    return (values * weights).sum(axis=-1)


def _at(network: MLP, rows: Rows, index: Array) -> Array:
    """[members, n] f(x,a) at some rows."""
    inputs = jnp.concatenate([rows.observations[index], rows.actions[index]], axis=-1)
    return network(inputs)[..., 0]


def _next(network: MLP, rows: Rows, index: Array) -> Array:
    actions = rows.next_actions if rows.next_actions.ndim == 2 else rows.next_actions[index]
    return _expected(network, rows.next_observations[index], actions, rows.next_weights[index])


def _start(network: MLP, rows: Rows, index: Array) -> Array:
    actions = rows.start_actions if rows.start_actions.ndim == 2 else rows.start_actions[index]
    return _expected(network, rows.start_observations[index], actions, rows.start_weights[index])


Loss = Callable[[Any, Any, Array, Any], Array]


def descend(
    loss: Loss, parameters: Any, key: Array, training: Training, rows: Any, *, slow: bool = False
) -> Any:
    """Adam on `loss(parameters, slow_parameters, key, rows)`; returns the averaged parameters of the second half.

    With `slow`, a Polyak-averaged copy is handed to the loss (a target network); else the parameters themselves.
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
            mix = lambda a, b, r: jax.tree.map(lambda x, y: (1 - r) * x + r * y, a, b)  # noqa: E731
            behind = mix(behind, now, training.polyak)
            late = i >= training.steps // 2
            count = jnp.maximum(i - training.steps // 2, 0) + 1
            average = mix(average, now, jnp.where(late, 1.0 / count, 1.0))
            return (now, behind, average, state, i + 1), None

        carry = (dynamic, dynamic, dynamic, optimiser.init(dynamic), jnp.asarray(0))
        carry, _ = jax.lax.scan(step, carry, jax.random.split(key, training.steps))
        return eqx.combine(carry[2], static)

    return run(parameters, key, rows)


def resample(episodes: int, members: int, seed: int) -> np.ndarray:
    """[members, episodes] how often each episode counts in each member: a bootstrap over episodes."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(episodes, size=(members, episodes))
    return np.stack([np.bincount(row, minlength=episodes) for row in draws]).astype(np.float32)


def fitted_q(
    rows: Rows, weights: np.ndarray, backup: str, discount: float, key: Array, training: Training
) -> Any:
    """[members] values by fitted Q evaluation: `one-step`, `retrace` or `marginalized` targets.

    Windows of the log give multi-step targets through `marginax.targets`; for `marginalized` a second network
    estimates the TD weights of each window's start by regression on cumulative traces.
    """
    size = rows.observations.shape[1] + rows.actions.shape[1]
    first, second, third = jax.random.split(key, 3)
    members, length = training.members, 1 if backup == "one-step" else training.window
    q = MLP(size, 1, training.hidden, key=first, copies=members)
    w = MLP(2 * size, 1, training.hidden, key=second, copies=members)
    # Start from the value of the mean reward for ever: the ensemble then learns differences only.
    going = 1 - float(rows.terminal.mean())
    level = float(rows.rewards.mean()) / (1 - discount * going)
    q = eqx.tree_at(lambda net: net.biases[-1], q, q.biases[-1] + level)
    per_episode = jnp.asarray(weights)
    batch = training.batch if length == 1 else max(1, training.batch // 4)

    def loss(networks: Any, slow: Any, key: Array, rows: Rows) -> Array:
        start = jax.random.randint(key, (batch,), 0, len(rows.rewards))
        index = start[:, None] + jnp.arange(length)
        valid = index <= rows.last[start][:, None]
        index = jnp.minimum(index, rows.last[start][:, None])
        flat = index.ravel()
        shape = (members, batch, length)
        slow_q = _at(slow[0], rows, flat).reshape(shape)
        v_next = _next(slow[0], rows, flat).reshape(shape)
        discounts = jnp.where(rows.terminal[index] > 0, 0.0, discount)
        truncated = (index == rows.last[index]) & (rows.terminal[index] == 0)
        rewards, traces = rows.rewards[index], rows.traces[index]
        per_row = per_episode[:, rows.episode[start]]
        if backup == "marginalized":
            pair = jnp.concatenate([rows.observations[index], rows.actions[index]], axis=-1)
            both = jnp.concatenate([jnp.broadcast_to(pair[:, :1], pair.shape), pair], axis=-1)
            ratio = jax.nn.softplus(networks[1](both.reshape(-1, 2 * size))[..., 0]).reshape(shape)
            cut = truncated | ~jnp.concatenate([valid[:, 1:], valid[:, :1] | True], axis=1)
            per_window = jax.vmap(deep_weights.regression)
            fit = jax.vmap(lambda x: per_window(x, traces, discounts, cut))(ratio)
            used = jax.lax.stop_gradient(ratio)
            one = jax.vmap(lambda a, b, r, d, x, t, ok: targets.marginalized(a, b, r, d, x, t, valid=ok))
            goal = jax.vmap(lambda a, b, x: one(a, b, rewards, discounts, x, truncated, valid))(
                slow_q, v_next, used
            )
        else:
            fit = jnp.zeros((members, batch))
            one = jax.vmap(lambda a, b, r, d, c, t, ok: targets.multi_step(a, b, r, d, c, t, valid=ok))
            goal = jax.vmap(lambda a, b: one(a, b, rewards, discounts, traces, truncated, valid))(
                slow_q, v_next
            )
        error = _at(networks[0], rows, start) - jax.lax.stop_gradient(goal[..., 0])
        return (per_row * (error**2 + fit)).mean(axis=1).sum()

    fitted = descend(loss, (q, w), third, training, rows, slow=True)
    values = _start(fitted[0], rows, jnp.arange(len(rows.start_weights)))
    return np.asarray((per_episode * values).sum(axis=1) / per_episode.sum(axis=1))


class Moments(eqx.Module):
    """Whitened features ψ of the log: E_log[ψψᵀ] = I, up to a ridge."""

    here: Float[Array, "N F"]
    change: Float[Array, "N F"]
    start: Float[Array, "E F"]


def moments_of(pairs: Pairs, discount: float, seed: int) -> Moments:
    """ψ(x,a), ψ(x,a) - γ ψ(x',π), and ψ(x_0,π)."""
    features = Features(pairs.observations.shape[1], pairs.actions.shape[1], pairs.discrete, seed, MOMENTS)
    phi = features.of_pairs(pairs.observations, pairs.actions)
    gram = phi.T @ phi / len(phi)
    gram += 1e-4 * np.trace(gram) / len(gram) * np.eye(len(gram))
    white = np.linalg.inv(np.linalg.cholesky(gram)).T
    after = features.of_policy(pairs.following)
    parts = (phi @ white, (phi - discount * after) @ white, features.of_policy(pairs.starts) @ white)
    return Moments(*(jnp.asarray(part, jnp.float32) for part in parts))


def _balanced(moments: Moments, per_row: Array, per_episode: Array, share: float) -> Array:
    """[members, F] the weights ψ·α that balance each member's log: E_log[(ψ·α) (ψ - γψ')] = c E_start ψ."""
    steps = per_row.shape[1]
    found = []
    for of_rows, of_episodes in zip(np.asarray(per_row), np.asarray(per_episode), strict=True):
        system = np.asarray(moments.change).T @ (of_rows[:, None] * np.asarray(moments.here)) / steps
        begin = share * of_episodes @ np.asarray(moments.start) / len(of_episodes)
        system = system.astype(np.float64) + 1e-5 * np.eye(len(begin))
        found.append(np.linalg.solve(system, begin))
    return jnp.asarray(np.stack(found), jnp.float32)


def ratios(
    rows: Rows,
    moments: Moments | None,
    weights: np.ndarray,
    method: str,
    discount: float,
    key: Array,
    training: Training,
) -> Any:
    """[members, N] marginalized ratios d^π/d^log at the log's transitions, scaled so that (1/E) Σ w r is the value.

    With L(w, q) = c E_start[q(x_0,π)] + E_log[w (γ q(x',π) - q(x,a))] and c = episodes over transitions:

    - `saddle-point`: min_w max_q L, w a positive network and q the value of any reward θ·ψ, ‖θ‖ ≤ 1, over whitened
      features ψ. With ψ·α the linear weights that balance the log against ψ, the maximum is ‖E_log[(ψ·α - w) ψ]‖: a
      critic that ranges over values of rewards sees all directions alike, one that ranges over ψ itself hardly sees
      the level of w when γ is near 1;
    - `fenchel`: min_ν max_w E_log[(ν - γν') w - ½ w²] - c E_start[ν], ν a network and w linear in ψ, so that the
      maximum is known: w = ψ·e with e = E_log[ψ (ν - γν')];
    - `regression`: min_w E_log[(w(x,a) - γ^t ρ_t)²], w a positive network.

    A saddle point with the inner player solved exactly is a plain minimisation. Squares of expectations are
    products over two independent batches.
    """
    size = rows.observations.shape[1] + rows.actions.shape[1]
    first, second = jax.random.split(key)
    members = training.members
    network = MLP(size, 1, training.hidden, key=first, copies=members)
    per_episode = jnp.asarray(weights)
    episodes, steps = len(rows.start_weights), len(rows.rewards)
    share = episodes / steps
    horizon = 1 / (1 - discount * (1 - float(rows.terminal.mean())))
    level = share * horizon
    batch = training.batch
    if method == "fenchel":  # ν of weights that are `level` everywhere
        network = eqx.tree_at(lambda net: net.biases[-1], network, network.biases[-1] + horizon)

    def positive(network: MLP, rows: Rows, index: Array) -> Array:
        return level * jax.nn.softplus(_at(network, rows, index) + 0.54)

    def loss(network: Any, _: Any, key: Array, data: tuple[Rows, Moments | None]) -> Array:
        rows, moments = data
        keys = jax.random.split(key, 4)
        if method == "regression":
            index = jax.random.randint(keys[0], (2 * batch,), 0, steps)
            error = positive(network, rows, index) - rows.cumulative[index]
            return (per_episode[:, rows.episode[index]] * (error / level) ** 2).mean(axis=1).sum()
        assert moments is not None

        def balance(key: Array) -> Array:
            index = jax.random.randint(key, (8 * batch,), 0, steps)
            per_row = per_episode[:, rows.episode[index]]
            if linear is not None and method == "saddle-point":
                gap = linear @ moments.here[index].T - positive(network, rows, index)
                return (per_row * gap) @ moments.here[index] / (len(index) * level)
            error = _at(network, rows, index) - discount * _next(network, rows, index)
            return (per_row * error) @ moments.here[index] / len(index)

        product = 0.5 * (balance(keys[0]) * balance(keys[1])).sum()
        if method == "saddle-point":
            return product
        begin = jax.random.randint(keys[2], (batch,), 0, episodes)
        start = (per_episode[:, begin] * _start(network, rows, begin)).mean(axis=1)
        return product - share / level * start.sum()

    linear = _balanced(moments, per_episode[:, rows.episode], per_episode, share) if moments else None
    faster = replace(training, rate=3 * training.rate) if method == "fenchel" else training
    fitted = descend(loss, network, second, faster, (rows, moments))
    blocks = np.array_split(np.arange(steps), max(1, steps // 50_000))
    if method == "fenchel":
        assert moments is not None
        error = [_at(fitted, rows, b) - discount * _next(fitted, rows, b) for b in map(jnp.asarray, blocks)]
        e = (per_episode[:, rows.episode] * jnp.concatenate(error, axis=1)) @ moments.here / steps
        return np.asarray(level * e @ moments.here.T)
    return np.concatenate([np.asarray(positive(fitted, rows, jnp.asarray(b))) for b in blocks], axis=1)
