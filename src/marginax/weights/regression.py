"""TD weights by least squares on the cumulative traces met along trajectories."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import Trajectory
from marginax.weights._data import discount_of, link_steps, start_of, traces_of
from marginax.weights.monte_carlo import monte_carlo, monte_carlo_states

__all__ = ["Regression", "regression", "regression_states"]


class Regression(eqx.Module):
    r"""Least squares on cumulative traces, updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    $w^c$ is the conditional mean $\mathbb{E}[C_τ | x_0,a_0,x_τ,a_τ]$ for a geometric time τ, so least squares over all starts
    $t$ and later visits $s$ estimates it,

    $$
    \min_θ \sum_{t \le s} γ^{s-t} \left(c_{t+1} \cdots c_s - w_θ(x_t,a_t,x_s,a_s)\right)^2 ,
    $$

    with weights linear in features φ of the visited pair: $w = θ_{x,a} \cdot φ(x',a')$ with coefficients of its own for every
    start, or, with features ψ of the start too, $w = ψ(x,a)^\top Θ\, φ(x',a')$. Kept are the normal equations. All starts are
    served by one backward pass in time, $k^2$ operations a step. On states (V-trace) the product is $c_t \cdots c_{s-1}$.

    Attributes:
        gram: the matrix of the normal equations: `[n, k, k]` for each of the `n` starts, or `[j, j, k, k]` with start features.
        moment: their right-hand side, `[n, k]` or `[j, k]`.
        features: φ, `[n, k]` with `n = S*A` pairs or `S` states.
        start_features: ψ, `[n, j]`, or None.
        discount: γ.
        ridge: added to the diagonal, relative to its mean.
        shape: `(S, A)`, on states `(S,)`.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> estimator = Regression.init(jnp.eye(6).reshape(3, 2, 6), mdp.discount)
    >>> for key in jax.random.split(jax.random.key(0), 50):
    ...     batch = mx.trajectories.sample(mdp, mu, key, episodes=1, horizon=20)
    ...     estimator = estimator.update(batch, mx.traces.retrace(pi, mu))
    >>> estimator.weights().shape
    (3, 2, 3, 2)
    """

    gram: Float[Array, "..."]
    moment: Float[Array, "..."]
    features: Float[Array, "n k"]
    start_features: Float[Array, "n j"] | None
    discount: Float[Array, ""]
    ridge: Float[Array, ""]
    shape: tuple[int, ...] = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        features: ArrayLike,
        discount: ArrayLike | float,
        *,
        start_features: ArrayLike | None = None,
        ridge: float = 1e-6,
    ) -> "Regression":
        """The estimator before any data.

        Args:
            features: φ, `[S, A, k]`; on states `[S, k]`.
            discount: γ.
            start_features: ψ, `[S, A, j]` or `[S, j]`. When omitted, every start has coefficients of its own.
            ridge: added to the diagonal of the normal equations, relative to its mean.

        >>> Regression.init(jnp.ones((3, 1)), 0.9).weights().shape
        (3, 3)
        """
        phi = jnp.asarray(features, jnp.result_type(float))
        if phi.ndim not in (2, 3):
            raise ValueError(f"features must have shape [S, A, k], or [S, k] on states, got {phi.shape}")
        shape, k = phi.shape[:-1], phi.shape[-1]
        psi = None if start_features is None else jnp.asarray(start_features, phi.dtype)
        if psi is not None and psi.shape[:-1] != shape:
            raise ValueError(f"start_features must begin with {shape} as features do, got {psi.shape}")
        phi = phi.reshape(-1, k)
        lead = (phi.shape[0],) if psi is None else (psi.shape[-1],)
        gram_lead = lead if psi is None else lead * 2
        checks.fits_in_memory(
            "the normal equations",
            math.prod(gram_lead) * k * k,
            copies=2,
            instead="use fewer features",
        )
        return cls(
            gram=jnp.zeros((*gram_lead, k, k), phi.dtype),
            moment=jnp.zeros((*lead, k), phi.dtype),
            features=phi,
            start_features=None if psi is None else psi.reshape(phi.shape[0], -1),
            discount=jnp.asarray(discount, phi.dtype),
            ridge=jnp.asarray(checks.at_least("ridge", ridge, 0.0), phi.dtype),
            shape=shape,
        )

    def update(self, trajectories: Trajectory, c: ArrayLike) -> "Regression":
        """The estimator after more trajectories.

        Args:
            trajectories: fields `[..., T]`.
            c: traces `[S, A]`.

        Returns:
            The new estimator.

        >>> import jax, marginax as mx
        >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
        >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=5, horizon=20)
        >>> Regression.init(jnp.ones((3, 2, 1)), mdp.discount).update(batch, mx.traces.retrace(pi, mu)).moment.shape
        (6, 1)
        """
        links = link_steps(trajectories, c, self.discount, on_states=len(self.shape) == 1)

        def step(carry: Any, inputs: tuple[Array, ...]) -> tuple[Any, None]:
            gram, moment, gram_tail, moment_tail = carry
            place, valid, discounted, traced = inputs
            phi = self.features[place]
            gram_tail = phi[:, :, None] * phi[:, None, :] + discounted[:, None, None] * gram_tail
            moment_tail = phi + traced[:, None] * moment_tail
            if self.start_features is None:
                row = jnp.where(valid, place, gram.shape[0])  # out of range: padding is no start
                gram, moment = gram.at[row].add(gram_tail), moment.at[row].add(moment_tail)
            else:
                psi = jnp.where(valid[:, None], self.start_features[place], 0)
                gram = gram + jnp.einsum("bi,bj,bkl->ijkl", psi, psi, gram_tail, precision="highest")
                moment = moment + jnp.einsum("bi,bk->ik", psi, moment_tail, precision="highest")
            return (gram, moment, gram_tail, moment_tail), None

        batch, k = links.place.shape[0], self.features.shape[1]
        dtype = self.features.dtype
        tails = (jnp.zeros((batch, k, k), dtype), jnp.zeros((batch, k), dtype))
        inputs = jax.tree.map(jnp.transpose, (links.place, links.valid, links.discounted, links.traced))
        (gram, moment, _, _), _ = jax.lax.scan(step, (self.gram, self.moment, *tails), inputs, reverse=True)
        return eqx.tree_at(lambda e: (e.gram, e.moment), self, (gram, moment))

    def weights(self) -> Array:
        """The weights so far, `[S, A, S, A]` or on states `[S, S]`; zero for a start without data.

        >>> Regression.init(jnp.ones((2, 1, 1)), 0.9).weights().shape
        (2, 1, 2, 1)
        """
        if self.start_features is None:
            table = _solve(self.gram, self.moment, self.ridge) @ self.features.T
        else:
            j, k = self.moment.shape
            gram = jnp.transpose(self.gram, (0, 2, 1, 3)).reshape(1, j * k, j * k)
            theta = _solve(gram, self.moment.reshape(1, -1), self.ridge).reshape(j, k)
            table = self.start_features @ theta @ self.features.T
        return table.reshape(self.shape * 2)


def regression(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    features: ArrayLike | None = None,
    start_features: ArrayLike | None = None,
    ridge: float = 1e-6,
    discount: float | None = None,
    start: tuple[int, int] | None = None,
) -> Float[Array, "*table"]:
    r"""TD weights by least squares on cumulative traces, $\min_w \sum γ^{s-t} (c_{t+1} \cdots c_s - w(x_t,a_t,x_s,a_s))^2$.

    No adversary: $w^c$ is the conditional mean of the products of traces. As tables the minimiser is the ratio of
    `monte_carlo`; with features it generalises between pairs. `Regression` has the details and the incremental form.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        features: φ of the visited pair, `[S, A, k]`; tables when omitted.
        start_features: ψ of the start, `[S, A, j]`; when omitted, every start has coefficients of its own.
        ridge: added to the diagonal of the normal equations, relative to its mean.
        discount: γ; read from the trajectories when omitted.
        start: a pair `(x, a)`: only its row.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`; `[S, A]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> regression(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(1)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """
    if features is None and start_features is None:
        return monte_carlo(trajectories, c, discount=discount, start=start)
    return _run(trajectories, c, features, start_features, ridge, discount, start, False)


def regression_states(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    features: ArrayLike | None = None,
    start_features: ArrayLike | None = None,
    ridge: float = 1e-6,
    discount: float | None = None,
    start: int | None = None,
) -> Float[Array, "*table"]:
    r"""TD weights on states for V-trace: as `regression`, with the product $c_t \cdots c_{s-1}$.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        features: φ of the visited state, `[S, k]`; tables when omitted.
        start_features: ψ of the start, `[S, j]`; when omitted, every start has coefficients of its own.
        ridge: added to the diagonal of the normal equations, relative to its mean.
        discount: γ; read from the trajectories when omitted.
        start: a state: only its row.

    Returns:
        `w[x, x']` of shape `[S, S]`; `[S]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> regression_states(batch, mx.traces.retrace(pi, mu), start=0).round(1)
    Array([1. , 0.5, 0.2], dtype=float32)
    """
    if features is None and start_features is None:
        return monte_carlo_states(trajectories, c, discount=discount, start=start)
    return _run(trajectories, c, features, start_features, ridge, discount, start, True)


def _run(
    trajectories: Trajectory,
    c: ArrayLike,
    features: ArrayLike | None,
    start_features: ArrayLike | None,
    ridge: float,
    discount: float | None,
    start: tuple[int, int] | int | None,
    on_states: bool,
) -> Array:
    traces = traces_of(c)
    num_states, num_actions = traces.shape
    gamma = discount_of(trajectories, discount, num_states, num_actions)
    start = start_of(start, num_states, num_actions, on_states)
    shape = traces.shape[:1] if on_states else traces.shape
    if features is None:
        raise ValueError("start_features needs features: without, the weights are tables")
    phi = checks.array("features", features, (*shape, None))
    psi = None if start_features is None else checks.array("start_features", start_features, (*shape, None))
    estimator = Regression.init(phi, gamma, start_features=psi, ridge=ridge)
    weights = _updated_weights(estimator, trajectories, jnp.asarray(traces))
    return weights if start is None else weights[start]


@eqx.filter_jit
def _updated_weights(estimator: Regression, trajectories: Trajectory, c: Array) -> Array:
    return estimator.update(trajectories, c).weights()


def _solve(gram: Float[Array, "n k k"], moment: Float[Array, "n k"], ridge: Array) -> Float[Array, "n k"]:
    """Solves positive definite systems side by side by Gauss-Jordan elimination, which `vmap` and any device take well."""
    k = gram.shape[-1]
    mean = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / k
    scale = jnp.where(mean > 0, mean, 1)
    system = jnp.concatenate([gram / scale + ridge * jnp.eye(k), moment[:, :, None] / scale], axis=2)
    # A direction without data (or all of them, at a start without any): its coefficient is zero.
    empty = jnp.diagonal(system, axis1=1, axis2=2) <= ridge
    system = system + jnp.where(empty, 1.0, 0.0)[:, :, None] * jnp.eye(k, k + 1)

    def eliminate(i: Array, system: Array) -> Array:
        row = system[:, i] / system[:, i, i][:, None]
        others = system - system[:, :, i][:, :, None] * row[:, None, :]
        return others.at[:, i].set(row)

    return jax.lax.fori_loop(0, k, eliminate, system)[:, :, k]
