"""Estimators with networks: fitted Q evaluation, and marginalized ratios by the saddle point, its Fenchel form and regression.

Fitted Q finds its hidden layers by descent and solves for the last one. Descent alone is far from the fixed point when γ is near 1:
each target network step moves the values by a share 1 - γ of the way. On the features that it finds the projected backup is
affine, and its fixed point is solved for.

A saddle point with the inner player solved exactly, over whitened features ψ of pairs, is a plain minimisation. Adversarial
training of two networks did not find the value on our test problems.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marginax import targets
from marginax.deep.networks import MLP
from marginax.offline.features import Features, Pairs
from marginax.offline.fitted_q import fixed_point
from marginax.offline.log import Log
from marginax.offline.networks import (
    Rows,
    Training,
    at,
    basis,
    descend,
    everywhere,
    expected,
    member,
    whitening,
)
from marginax.offline.sequences import pack, sampled_targets
from marginax.weights import losses as weight_losses

MOMENTS = 150  # features that a marginalized ratio is balanced against
_RIDGE = 1e-6


def learn(rows: Rows, backup: str, discount: float, key: Array, training: Training) -> tuple[MLP, MLP]:
    """An ensemble of value networks, by descent on `one-step`, `retrace` or `marginalized` targets.

    Multi-step targets are those of `marginax.targets` on windows of the log. For `marginalized` a second network estimates the
    TD weights from the first step of each window, by regression on cumulative traces.

    Args:
        rows: the log on the device.
        backup: which targets.
        discount: γ.
        key: of initial values and batches.
        training: settings.
    """
    first, second, third = jax.random.split(key, 3)
    size = rows.observations.shape[1] + rows.actions.shape[1]
    q = MLP(size, 1, training.hidden, key=first, copies=training.members)
    w = MLP(2 * size, 1, training.hidden, key=second, copies=training.members)
    # Begin at the value of the mean reward in all steps: the ensemble learns the differences.
    going = 1 - float(rows.terminal.mean())
    level = float(rows.rewards.mean()) / (1 - discount * going)
    q = eqx.tree_at(lambda net: net.biases[-1], q, q.biases[-1] + level)
    loss = _loss(backup, discount, training)
    return descend(loss, (q, w), third, training, rows, slow=True)


def fitted_q(
    log: Log, rows: Rows, networks: tuple[MLP, MLP], backup: str, discount: float, training: Training
) -> np.ndarray:
    """[members] values by fitted Q evaluation: the networks of `learn`, with the last layer solved for."""
    values = []
    for k, per_episode in enumerate(np.asarray(rows.per_episode, np.float64)):
        q, w = (member(network, k) for network in networks)
        traces = np.asarray(rows.traces, np.float64) * (backup != "one-step")
        ratios = w if backup == "marginalized" else None
        values.append(_solve(log, rows, per_episode, q, traces, ratios, discount, training))
    return np.array(values)


def _loss(backup: str, discount: float, training: Training) -> Any:
    length = 1 if backup == "one-step" else training.window
    batch = training.batch if length == 1 else max(1, training.batch // 4)

    def loss(networks: Any, slow: Any, key: Array, rows: Rows) -> Array:
        key, other = jax.random.split(key)
        start = jax.random.randint(key, (batch,), 0, len(rows.rewards))
        index = start[:, None] + jnp.arange(length)
        valid = index <= rows.last[start][:, None]
        index = jnp.minimum(index, rows.last[start][:, None])
        shape = (training.members, batch, length)
        slow_q = at(slow[0], rows, index.ravel()).reshape(shape)
        v_next = expected(slow[0], rows.following.take(index.ravel()), other).reshape(shape)
        discounts = jnp.where(rows.terminal[index] > 0, 0.0, discount)
        truncated = (index == rows.last[index]) & (rows.terminal[index] == 0)
        rewards, traces = rows.rewards[index], rows.traces[index]
        per_row = rows.per_episode[:, rows.episode[start]]
        if backup == "marginalized":
            ratio = _window_ratios(networks[1], rows, index)
            cut = truncated | ~jnp.concatenate([valid[:, 1:], valid[:, :1] | True], axis=1)
            per_window = jax.vmap(weight_losses.regression)
            fit = jax.vmap(lambda x: per_window(x, traces, discounts, cut))(ratio)
            used = jax.lax.stop_gradient(ratio)
            one = jax.vmap(lambda a, b, r, d, x, t, ok: targets.marginalized(a, b, r, d, x, t, valid=ok))
            goal = jax.vmap(lambda a, b, x: one(a, b, rewards, discounts, x, truncated, valid))(
                slow_q, v_next, used
            )
        else:
            fit = jnp.zeros(shape[:2])
            one = jax.vmap(lambda a, b, r, d, c, t, ok: targets.multi_step(a, b, r, d, c, t, valid=ok))
            goal = jax.vmap(lambda a, b: one(a, b, rewards, discounts, traces, truncated, valid))(
                slow_q, v_next
            )
        error = at(networks[0], rows, start)[..., 0] - jax.lax.stop_gradient(goal[..., 0])
        return (per_row * (error**2 + fit)).mean(axis=1).sum()

    return loss


def _window_ratios(network: MLP, rows: Rows, index: Array) -> Array:
    """[..., B, T] w of each step of windows [B, T], seen from the window's first step."""
    pair = jnp.concatenate([rows.observations[index], rows.actions[index]], axis=-1)
    both = jnp.concatenate([jnp.broadcast_to(pair[:, :1], pair.shape), pair], axis=-1)
    values = network(both.reshape(-1, both.shape[-1]))
    return jax.nn.softplus(values.reshape(*values.shape[:-2], *index.shape))


def _solve(
    log: Log,
    rows: Rows,
    per_episode: np.ndarray,
    network: MLP,
    traces: np.ndarray,
    ratios: MLP | None,
    discount: float,
    training: Training,
) -> float:
    """The value by one member. Its last layer is the fixed point of θ ↦ the least-squares fit of φ·θ to the targets of φ·θ."""
    phi, following, start = basis(network, rows)
    per_row = per_episode[log.episode] / len(log)
    white = whitening(phi, per_row * len(log))
    phi, following, start = phi @ white, following @ white, start @ white
    number = np.arange(len(log))
    with jax.enable_x64(True):
        packed = pack(log, number, number, None if ratios is None else training.window)
        weights = None if ratios is None else _matrices(ratios, rows, packed.steps.here)
        rest = (packed.steps, jnp.asarray(discount), jnp.asarray(traces), weights)

        def project(theta: np.ndarray) -> np.ndarray:
            found = sampled_targets(jnp.asarray(phi @ theta), jnp.asarray(following @ theta), *rest)
            return phi.T @ (per_row * packed.at_rows(found))

        theta, _ = fixed_point(project, np.zeros(phi.shape[1]), tolerance=1e-6)
    return float(per_episode @ (start @ theta) / per_episode.sum())


def _matrices(network: MLP, rows: Rows, windows: Array) -> Array:
    """[B, T, T] w of step s seen from step t, of windows [B, T] of row numbers."""

    def one(window: Array) -> Array:
        starts = jax.vmap(lambda i: window.at[0].set(window[i]))(jnp.arange(len(window)))
        return _window_ratios(network, rows, starts)

    return jax.lax.map(one, windows, batch_size=1024).astype(float)


class Moments(eqx.Module):
    """Whitened features ψ of the log: E_log[ψψᵀ] = I, up to a ridge."""

    here: Float[Array, "N F"]
    change: Float[Array, "N F"]
    start: Float[Array, "E F"]


def moments_of(pairs: Pairs, discount: float, seed: int) -> Moments:
    """ψ(x,a), ψ(x,a) - γ ψ(x',π), and ψ(x_0,π)."""
    features = Features(pairs.observations.shape[1], pairs.actions.shape[1], pairs.discrete, seed, MOMENTS)
    phi = features.of_pairs(pairs.observations, pairs.actions)
    white = whitening(phi, np.ones(len(phi)), ridge=1e-4)
    after = features.of_policy(pairs.following)
    parts = (phi @ white, (phi - discount * after) @ white, features.of_policy(pairs.starts) @ white)
    return Moments(*(jnp.asarray(part, jnp.float32) for part in parts))


def _balanced(rows: Rows, moments: Moments, share: float) -> Array:
    """[members, F] the weights ψ·α that balance each member's log: E_log[(ψ·α) (ψ - γψ')] = c E_start ψ."""
    here, change, start = (np.asarray(x, np.float64) for x in (moments.here, moments.change, moments.start))
    found = []
    for per_episode in np.asarray(rows.per_episode, np.float64):
        per_row = per_episode[np.asarray(rows.episode)]
        system = change.T @ (per_row[:, None] * here) / len(here)
        begin = share * per_episode @ start / len(per_episode)
        found.append(np.linalg.solve(system + 1e-5 * np.eye(len(begin)), begin))
    return jnp.asarray(np.stack(found), jnp.float32)


def fit_ratios(
    rows: Rows,
    moments: Moments | None,
    method: str,
    discount: float,
    key: Array,
    training: Training,
) -> np.ndarray:
    """[members, N] marginalized ratios d^π/d^log at the log's transitions, scaled so that (1/E) Σ w r is the value.

    With L(w, q) = c E_start[q(x_0,π)] + E_log[w (γ q(x',π) - q(x,a))] and c = episodes over transitions:

    - `saddle-point`: min_w max_q L, w a positive network and q the value of any reward θ·ψ, ‖θ‖ ≤ 1, over whitened
      features ψ. With ψ·α the linear weights that balance the log against ψ, the maximum is ‖E_log[(ψ·α - w) ψ]‖: a
      critic that ranges over values of rewards sees all directions alike, one that ranges over ψ itself hardly sees
      the level of w when γ is near 1;
    - `regression`: min_w E_log[(w(x,a) - γ^t ρ_t)²], w a positive network.

    Squares of expectations are products over two independent batches.
    """
    size = rows.observations.shape[1] + rows.actions.shape[1]
    first, second = jax.random.split(key)
    network = MLP(size, 1, training.hidden, key=first, copies=training.members)
    episodes, steps, batch = len(rows.starts.weights), len(rows.rewards), training.batch
    share = episodes / steps
    horizon = 1 / (1 - discount * (1 - float(rows.terminal.mean())))
    level = share * horizon

    def positive(network: MLP, rows: Rows, index: Array) -> Array:
        return level * jax.nn.softplus(at(network, rows, index)[..., 0] + 0.54)

    def regression(network: Any, _: Any, key: Array, rows: Rows) -> Array:
        index = jax.random.randint(key, (2 * batch,), 0, steps)
        error = positive(network, rows, index) - rows.cumulative[index]
        return (rows.per_episode[:, rows.episode[index]] * (error / level) ** 2).mean(axis=1).sum()

    def saddle_point(network: Any, _: Any, key: Array, data: tuple[Rows, Moments, Array]) -> Array:
        rows, moments, linear = data

        def gap(key: Array) -> Array:
            index = jax.random.randint(key, (4 * batch,), 0, steps)
            difference = linear @ moments.here[index].T - positive(network, rows, index)
            weighted = rows.per_episode[:, rows.episode[index]] * difference
            return weighted @ moments.here[index] / (len(index) * level)

        one, other = jax.random.split(key)
        return 0.5 * (gap(one) * gap(other)).sum()

    if method == "regression":
        fitted = descend(regression, network, second, training, rows)
    else:
        assert moments is not None
        linear = _balanced(rows, moments, share)
        fitted = descend(saddle_point, network, second, training, (rows, moments, linear))
    return everywhere(lambda i: positive(fitted, rows, i)[..., None], steps)[..., 0]


def balanced(
    rows: Rows, moments: Moments, values: MLP, discount: float, base: np.ndarray | None = None
) -> np.ndarray:
    """[members, N] the ratios nearest to `base` that balance the log against networks fitted to values of π.

    With φ the last hidden layer of the networks `values`, min ‖w - base‖ over w - base linear in ψ, subject to
    E_log[w (φ - γφ')] = c E_start[φ]: with M = E_log[ψ (φ - γφ')ᵀ],

        w = base + ψ·Mβ,   MᵀM β = c E_start[φ] - E_log[base (φ - γφ')].

    From zero this is the Fenchel form (DualDICE), min_ν max_w E_log[(ν - γν') w - ½ w²] - c E_start[ν], with ν linear in
    φ. Descent on that loss hardly finds the value when γ is near 1.
    """
    steps, psi = len(rows.rewards), np.asarray(moments.here, np.float64)
    found = []
    for k, per_episode in enumerate(np.asarray(rows.per_episode, np.float64)):
        phi, following, start = basis(member(values, k), rows)
        per_row = per_episode[np.asarray(rows.episode)]
        white = whitening(phi, per_row)
        change = per_row[:, None] * ((phi - discount * following) @ white) / steps
        first = np.zeros(steps) if base is None else base[k]
        explained = psi.T @ change
        missing = per_episode @ (start @ white) / steps - first @ change
        normal = explained.T @ explained + _RIDGE * np.eye(len(missing))
        found.append(first + psi @ (explained @ np.linalg.solve(normal, missing)))
    return np.stack(found)
