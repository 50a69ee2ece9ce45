"""TD weights by least squares on the products of traces met along trajectories."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import Trajectory
from marginax.weights._data import (
    assemble,
    count_starts,
    eliminate,
    estimate,
    features_of,
    fixed_discount,
    link_steps,
    rows_of,
    start_of,
    table_of,
    traces_of,
)
from marginax.weights.monte_carlo import monte_carlo

__all__ = ["Regression", "regression"]


class Regression(eqx.Module):
    r"""Least squares on products of traces, updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    The factor $u$ of the path (see `paths`) is the conditional mean of the product of the traces on the way to a state, so least
    squares over all starts $t$ and later arrivals $s$ estimates it,

    $$
    \min_θ \sum_{t < s} γ^{s-t} \left(c_{t+1} \cdots c_{s-1} - u_θ(x_t,a_t,x_s)\right)^2 ,
    $$

    with $u$ linear in features φ of the state: $u = θ_{x,a} \cdot φ(x')$ with coefficients of its own for every start, or, with
    features ψ of the start too, $u = ψ(x,a)^\top Θ\, φ(x')$. The weights are $w = u c$. Kept are the normal equations. All starts are
    served by one backward pass in time, $k^2$ operations per step. On states (V-trace) the product is $c_t \cdots c_{s-1}$, visits
    at time $s = t$ count too, and the fit is $w$ itself.

    Attributes:
        gram: the matrix of the normal equations: `[n, k, k]` for each of the `n` starts, or `[j, j, k, k]` with start features.
        moment: their right-hand side, `[n, k]` or `[j, k]`.
        features: φ, `[S, k]`.
        start_features: ψ, `[n, j]` with `n = S*A` pairs or `S` states, or None.
        visits: how often each pair was a start, and the sum of its discounted returns to itself, `[2, S*A]`; None on states.
        discount: γ.
        ridge: added to the diagonal, relative to its mean.
        shape: `(S, A)`, on states `(S,)`.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> c = mx.traces.retrace(pi, mu)
    >>> estimator = Regression.init(jnp.eye(3), 2, mdp.discount)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=20)
    >>> estimator = estimator.update(batch, c)
    >>> estimator.weights(c)[0, 0, 1].round(2)
    Array([1., 0.], dtype=float32)
    """

    gram: Float[Array, "..."]
    moment: Float[Array, "..."]
    features: Float[Array, "S k"]
    start_features: Float[Array, "n j"] | None
    visits: Float[Array, "2 n"] | None
    discount: Float[Array, ""]
    ridge: Float[Array, ""]
    shape: tuple[int, ...] = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        features: ArrayLike,
        num_actions: int,
        discount: ArrayLike | float,
        *,
        start_features: ArrayLike | None = None,
        ridge: float = 1e-6,
        on_states: bool = False,
    ) -> "Regression":
        """The estimator before any data.

        Args:
            features: φ, `[S, k]`.
            num_actions: A.
            discount: γ.
            start_features: ψ, `[S, A, j]`, on states `[S, j]`. When omitted, every start has coefficients of its own.
            ridge: added to the diagonal of the normal equations, relative to its mean.
            on_states: whether the weights are `[S, S]`, for V-trace.
        """
        phi = jnp.asarray(features_of("features", features, (None,)), jnp.result_type(float))
        states, k = phi.shape
        shape = (states,) if on_states else (states, checks.count("num_actions", num_actions))
        psi = None
        if start_features is not None:
            psi = jnp.asarray(features_of("start_features", start_features, shape), phi.dtype)
        starts = math.prod(shape)
        lead = (starts,) if psi is None else (psi.shape[-1],)
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
            start_features=None if psi is None else psi.reshape(starts, -1),
            visits=None if on_states else jnp.zeros((2, starts), phi.dtype),
            discount=fixed_discount(discount),
            ridge=jnp.asarray(checks.at_least("ridge", ridge, 0.0), phi.dtype),
            shape=shape,
        )

    def update(self, trajectories: Trajectory, c: ArrayLike) -> "Regression":
        """The estimator after more trajectories, fields `[..., T]`, with traces `c[S, A]`."""
        on_states = len(self.shape) == 1
        links = link_steps(trajectories, c, self.discount, self.shape, paths=not on_states)

        def step(carry: Any, inputs: tuple[Array, ...]) -> tuple[Any, None]:
            gram, moment, gram_tail, moment_tail = carry
            start, valid, visit, lead, discounted, traced = inputs
            phi = self.features[visit]
            here = lead[:, None] * phi
            gram_tail = here[:, :, None] * phi[:, None, :] + discounted[:, None, None] * gram_tail
            moment_tail = here + traced[:, None] * moment_tail
            if self.start_features is None:
                row = jnp.where(valid, start, gram.shape[0])  # out of range: padding is no start
                gram, moment = gram.at[row].add(gram_tail), moment.at[row].add(moment_tail)
            else:
                psi = jnp.where(valid[:, None], self.start_features[start], 0)
                gram = gram + jnp.einsum("bi,bj,bkl->ijkl", psi, psi, gram_tail, precision="highest")
                moment = moment + jnp.einsum("bi,bk->ik", psi, moment_tail, precision="highest")
            return (gram, moment, gram_tail, moment_tail), None

        batch, k = links.start.shape[0], self.features.shape[1]
        dtype = self.features.dtype
        tails = (jnp.zeros((batch, k, k), dtype), jnp.zeros((batch, k), dtype))
        fields = (links.start, links.steps.valid, links.visit, links.lead, links.discounted, links.traced)
        inputs = jax.tree.map(jnp.transpose, fields)
        (gram, moment, _, _), _ = jax.lax.scan(step, (self.gram, self.moment, *tails), inputs, reverse=True)
        changed = eqx.tree_at(lambda e: (e.gram, e.moment), self, (gram, moment))
        if self.visits is None:
            return changed
        starts = self.visits.shape[1]
        visits = self.visits + count_starts(links, rows_of(links, starts, None), starts, starts)
        return eqx.tree_at(lambda e: e.visits, changed, visits)

    def paths(self) -> Float[Array, "n S"]:
        """The fit for each start: u, on states w; zero for a start without data."""
        if self.start_features is None:
            return _solve(self.gram, self.moment, self.ridge) @ self.features.T
        j, k = self.moment.shape
        gram = jnp.transpose(self.gram, (0, 2, 1, 3)).reshape(1, j * k, j * k)
        theta = _solve(gram, self.moment.reshape(1, -1), self.ridge).reshape(j, k)
        return self.start_features @ theta @ self.features.T

    def weights(self, c: ArrayLike | None = None) -> Array:
        """The weights so far, `[S, A, S, A]` or on states `[S, S]`.

        Args:
            c: traces `[S, A]` of the last action; not needed on states.
        """
        table = self.paths()
        if self.visits is not None:
            table = assemble(table, table_of(c, self.shape, table.dtype), self.visits, None)
        return table.reshape(self.shape * 2)


def regression(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    discount: float | None = None,
    on_states: bool = False,
    features: ArrayLike | None = None,
    start_features: ArrayLike | None = None,
    ridge: float = 1e-6,
) -> Float[Array, "*table"]:
    r"""TD weights $w = u c$ by least squares on products of traces, $\min_u \sum γ^{s-t} (c_{t+1} \cdots c_{s-1} - u(x_t,a_t,x_s))^2$.

    No adversary: $u$ is the conditional mean of the products. As tables the minimiser is the average of `monte_carlo`; with
    features it generalises between states. `Regression` has the details and the incremental form.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: a pair `(x, a)`, or a state if `on_states`: only its row.
        discount: γ; read from the trajectories when omitted.
        on_states: whether to return weights between states, for V-trace: a fit of $c_t \cdots c_{s-1}$.
        features: φ of the state reached, `[S, k]`; tables when omitted.
        start_features: ψ of the start, `[S, A, j]` or `[S, j]`; when omitted, every start has coefficients of its own.
        ridge: added to the diagonal of the normal equations, relative to its mean.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`, on states `[S, S]`; `[S, A]` or `[S]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> regression(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(1)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """
    if features is None and start_features is None:
        return monte_carlo(trajectories, c, discount=discount, start=start, on_states=on_states)
    if features is None:
        raise ValueError("start_features needs features: without, the weights are tables")
    states, actions = traces_of(c).shape
    start = start_of(start, states, actions, on_states)
    phi = features_of("features", features, (states,))

    def make(states: int, actions: int, gamma: float) -> Regression:
        return Regression.init(
            phi, actions, gamma, start_features=start_features, ridge=ridge, on_states=on_states
        )

    weights = estimate(make, trajectories, c, discount)
    if not jnp.isfinite(weights).all():
        raise ValueError(
            f"ridge = {ridge} is too small: on these data the features are linearly dependent and the weights are not determined"
        )
    return weights if start is None else weights[start]


def _solve(gram: Float[Array, "n k k"], moment: Float[Array, "n k"], ridge: Array) -> Float[Array, "n k"]:
    """Solves positive definite systems side by side."""
    k = gram.shape[-1]
    mean = jnp.trace(gram, axis1=1, axis2=2)[:, None, None] / k
    scale = jnp.where(mean > 0, mean, 1)
    system = jnp.concatenate([gram / scale + ridge * jnp.eye(k), moment[:, :, None] / scale], axis=2)
    # A direction without data (or all of them, at a start without any): its coefficient is zero.
    empty = jnp.diagonal(system, axis1=1, axis2=2) <= ridge
    system = system + jnp.where(empty, 1.0, 0.0)[:, :, None] * jnp.eye(k, k + 1)
    return jax.vmap(eliminate)(system)
