r"""TD weights by temporal differences in reversed time: u of a state is learned from u of the state before it.

From a start pair, let $d(y) = \sum_{t \ge 1} γ^t \Pr(x_t = y)$ be the discounted arrivals in $y$, and $u(y)$ the mean product of the
traces on the way there (`paths`). Looking back from an arrival at the step before,

$$
d(y)\, u(y) = γ\, p(y|x_0,a_0) + γ \sum_{x,a} d(x)\, u(x)\, μ(a|x)\, c(x,a)\, p(y|x,a) ,
$$

so $u(y)$ is the mean of a target over the discounted arrivals in $y$: 1 if $y$ is the first state after the start, and
$c(x_t,a_t)\, u(x_t)$ if the arrival came from $(x_t, a_t)$. The target bootstraps, so no product of many traces is ever formed.
`ReverseTD` keeps the sums of this equation for each start and solves it: the fixed point of reverse TD on the data so far.
"""

import math
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import Trajectory
from marginax.weights._data import (
    assemble,
    count_starts,
    divide,
    eliminate,
    estimate,
    fixed_behaviour,
    fixed_discount,
    link_steps,
    row_of,
    rows_of,
    table_of,
)

__all__ = ["ReverseTD", "reverse_td"]


class ReverseTD(eqx.Module):
    r"""Reverse TD weights that are updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    Every step of every trajectory is a start. A start that happened $k$ steps ago is eligible with $γ^k$; a step from $x$ to $y$ adds the
    eligibility of each start to its sums, $T \cdot SA$ operations for a trajectory of $T$ steps. Memory is $S^2$ numbers per start.

    Given $x$, the action does not depend on the path to it. So in each start's flow out of $x$, the mean trace of the few actions taken
    after that start is replaced by that of all data (or of `mu`). This keeps the equation solvable when a
    start has little data. Without `mu`, mean traces above 1 count as 1, as in `certainty_equivalence`.

    Attributes:
        flows: discounted steps from x to y after each start, times their traces, `[S, S, rows]`.
        departures: discounted departures from x with and without the trace, `[2, S, rows]`.
        arrivals: discounted arrivals in y: those of the first step, and all, `[2, S, rows]`.
        actions: how often each action was taken, `[S, A]`.
        visits: how often each row was a start, and the sum of its discounted returns to itself, `[2, rows]`.
        discount: γ.
        mu: the behaviour policy `[S, A]`, or None for action frequencies.
        on_states: whether the weights are `[S, S]`, for V-trace.
        start: the only row that is kept; all if None.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> c = mx.traces.retrace(pi, mu)
    >>> estimator = ReverseTD.init(3, 2, mdp.discount)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=20)
    >>> estimator = estimator.update(batch, c)
    >>> estimator.weights(c)[0, 0].round(1)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """

    flows: Float[Array, "S S rows"]
    departures: Float[Array, "2 S rows"]
    arrivals: Float[Array, "2 S rows"]
    actions: Float[Array, "S A"]
    visits: Float[Array, "2 rows"]
    discount: Float[Array, ""]
    mu: Float[Array, "S A"] | None
    on_states: bool = eqx.field(static=True)
    start: int | None = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        num_states: int,
        num_actions: int,
        discount: ArrayLike | float,
        *,
        mu: ArrayLike | None = None,
        on_states: bool = False,
        start: tuple[int, int] | int | None = None,
    ) -> "ReverseTD":
        """The estimator before any data; its arguments are the class's attributes."""
        s, a = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
        row = row_of(start, s, a, on_states)
        rows = 1 if row is not None else s if on_states else s * a
        checks.fits_in_memory(
            f"flows between {s} states for {rows} starts",
            s * s * rows,
            copies=2,
            instead="ask for one row (start=)",
        )
        return cls(
            flows=jnp.zeros((s, s, rows)),
            departures=jnp.zeros((2, s, rows)),
            arrivals=jnp.zeros((2, s, rows)),
            actions=jnp.zeros((s, a)),
            visits=jnp.zeros((2, rows)),
            discount=fixed_discount(discount),
            mu=fixed_behaviour(mu, s, a),
            on_states=on_states,
            start=row,
        )

    def update(self, trajectories: Trajectory, c: ArrayLike) -> "ReverseTD":
        """The estimator after more trajectories, fields `[..., T]`, with traces `c[S, A]`."""
        table, rows = table_of(c, self.actions.shape, self.flows.dtype), self.visits.shape[1]
        shape = table.shape[:1] if self.on_states else table.shape
        links = link_steps(trajectories, table, self.discount, shape, paths=True)
        row = rows_of(links, rows, self.start)

        def step(carry: Any, now: tuple[Array, ...]) -> tuple[Any, None]:
            flows, departures, arrivals, eligible = carry
            x, y, row, trace, lead, discounted = now
            begins = jax.nn.one_hot(row, rows, dtype=flows.dtype)
            traced = trace[:, None] * eligible
            first = trace[:, None] * begins if self.on_states else begins
            flows = flows.at[x, y].add(lead[:, None] * traced)
            departures = departures.at[:, x].add(jnp.stack([traced, eligible]))
            arrivals = arrivals.at[:, y].add(lead[:, None] * jnp.stack([first, eligible + begins]))
            return (flows, departures, arrivals, discounted[:, None] * (eligible + begins)), None

        steps = links.steps
        eligible = jnp.zeros((row.shape[0], rows), self.flows.dtype)
        now = (steps.states, links.visit, row, links.traces, links.lead, links.discounted)
        carry = (self.flows, self.departures, self.arrivals, eligible)
        (*sums, _), _ = jax.lax.scan(step, carry, jax.tree.map(jnp.transpose, now))
        actions = self.actions.at[steps.states, steps.actions].add(steps.valid)
        visits = self.visits + count_starts(links, row, rows, math.prod(shape))
        return eqx.tree_at(
            lambda e: (e.flows, e.departures, e.arrivals, e.actions, e.visits), self, (*sums, actions, visits)
        )

    def paths(self, c: ArrayLike) -> Float[Array, "rows S"]:
        """u of each start, for the traces `c[S, A]` of the updates; NaN for a start from which the sum over time diverges."""
        traces = table_of(c, self.actions.shape, self.flows.dtype)
        if self.mu is None:
            mean = divide((self.actions * traces).sum(axis=1), self.actions.sum(axis=1))
            mean = jnp.minimum(mean, 1)
        else:
            mean = (self.mu * traces).sum(axis=1)
        scale = mean[:, None] * divide(self.departures[1], self.departures[0])
        first, total = self.arrivals
        identity = jnp.eye(len(mean), dtype=self.flows.dtype)

        def solve(each: tuple[Array, Array, Array, Array]) -> Array:
            flows, scale, first, total = each
            # In units of arrivals, m = d u: m = first + m F / d, whose rows sum to less than γ.
            kernel = divide(scale[:, None] * flows, jnp.broadcast_to(total[:, None], flows.shape))
            arrived = eliminate(jnp.column_stack([(identity - kernel).T, first]))
            # The sum over time has no negative terms: if the system's solution has a negative entry, the sum diverges.
            return jnp.where((arrived >= 0).all(), divide(arrived, total), jnp.nan)

        by_row = jax.tree.map(lambda field: jnp.moveaxis(field, -1, 0), (self.flows, scale, first, total))
        return jax.lax.map(solve, by_row)  # one system at a time stays in the cache

    def weights(self, c: ArrayLike) -> Array:
        """The weights so far: `[S, A, S, A]`, on states `[S, S]`, for one start `[S, A]` or `[S]`; NaN where `paths` is.

        Args:
            c: the traces `[S, A]` of the updates.
        """
        states, actions = self.actions.shape
        paths = self.paths(c)
        last = jnp.ones((states, 1)) if self.on_states else jnp.asarray(c, paths.dtype)
        table = assemble(paths, last, self.visits, self.start)
        one = (states,) if self.on_states else (states, actions)
        return table.reshape(one if self.start is not None else one * 2)


def reverse_td(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    discount: float | None = None,
    on_states: bool = False,
    mu: ArrayLike | None = None,
) -> Float[Array, "*table"]:
    r"""TD weights $\hat w = \hat u c$ with $\hat u$ the fixed point of reverse TD, $u(x_{t+1}) \leftarrow c_t\, u(x_t)$, $u(x_1) \leftarrow 1$.

    The head of this module derives it; `ReverseTD` has the details and the incremental form. It needs no model and forms no
    products of traces. With little data its errors are close to those of `certainty_equivalence`; where trajectories are cut off, it
    keeps the bias of `monte_carlo`, which falls with their length and not with their number.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: a pair `(x, a)`, or a state if `on_states`: only its row.
        discount: γ; read from the trajectories when omitted.
        on_states: whether to return weights between states, for V-trace: $u(x_1) \leftarrow c_0$.
        mu: the behaviour policy `[S, A]`; action frequencies when omitted, and then mean traces above 1 count as 1.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`, on states `[S, S]`; `[S, A]` or `[S]` for one start.

    Raises:
        ValueError: for a bad argument, and where the sum over time of the traces does not converge.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=100, horizon=50)
    >>> reverse_td(batch, mx.traces.retrace(pi, mu), start=(0, 0), mu=mu).round(2)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """
    make = partial(ReverseTD.init, mu=mu, start=start, on_states=on_states)
    weights = estimate(make, trajectories, c, discount)
    diverges = np.argwhere(np.isnan(weights))
    if diverges.size:
        first = diverges[0].tolist()
        place = start if start is not None else first[0] if on_states else tuple(first[:2])
        raise ValueError(
            f"c is too large: the sum over time of its traces does not converge (condition C.1) from start {place}"
        )
    return weights
