"""Marginalized ratios with networks: the saddle point, its Fenchel form, and regression.

A saddle point with the inner player solved exactly, over whitened features ψ of pairs, is a plain minimisation:
adversarial training of two networks did not find the value on our test problems.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marginax.deep.networks import MLP
from marginax.offline._features import Features
from marginax.offline._networks import Rows, Training, at, basis, descend, everywhere, member, whitening
from marginax.offline._observations import Pairs

MOMENTS = 150  # features that a marginalized ratio is balanced against
_RIDGE = 1e-6


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


def ratios(
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
    episodes, steps, batch = len(rows.start_weights), len(rows.rewards), training.batch
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
