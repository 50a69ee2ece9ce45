"""TD weights as averages of the products of traces met along trajectories (Algorithm 2, made consistent)."""

import math
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import Trajectory
from marginax.weights._data import (
    assemble,
    count_starts,
    divide,
    estimate,
    fixed_discount,
    link_steps,
    row_of,
    rows_of,
    table_of,
)

__all__ = ["MonteCarlo", "monte_carlo"]


class MonteCarlo(eqx.Module):
    r"""Monte Carlo weights that are updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    Every step of every trajectory is a start. The default is `factored`: only the products of the traces on the way to a state
    are averaged, and the trace of the action taken there is put in exactly, $w = u c$ (see `paths`). For a start at time $t$ and an
    arrival in $x_s$ at a later time of the same episode, numerator and denominator of the pair's row grow by

    $$
    N_{x_t,a_t}(x_s) \mathrel{+}= \gamma^{s-t} c_{t+1} \cdots c_{s-1}, \qquad
    D_{x_t,a_t}(x_s) \mathrel{+}= \gamma^{s-t}, \qquad u = N / D .
    $$

    Not factored, the sums are over pairs, as in Algorithm 2:

    $$
    N_{x_t,a_t}(x_s,a_s) \mathrel{+}= \gamma^{s-t} c_{t+1} \cdots c_s, \qquad
    D_{x_t,a_t}(x_s,a_s) \mathrel{+}= \gamma^{s-t}, \qquad w = N / D .
    $$

    Weights are zero where nothing was met. All starts are served by one backward pass in time, $T \cdot S$ operations for a
    trajectory of $T$ steps ($T \cdot SA$ if not factored). On states (V-trace) the product is $c_t \cdots c_{s-1}$, which holds
    no trace of the last action, so that there is nothing to factor.

    Where a trajectory is cut off, so are the sums: from starts near the cut both are those of a shorter horizon, a bias that
    vanishes as $\gamma^T$ and does not vanish with the number of trajectories.

    Attributes:
        sums: numerator and denominator `[rows, 2, n]`, with `n` states, or pairs if not factored; `[rows, 1, n]` if `as_printed`.
        visits: how often each row was a start, and the sum of its discounted returns to itself, `[2, rows]`; None if not factored.
        discount: γ.
        shape: `(S, A)`, on states `(S,)`.
        average: "running": all starts count alike. "exponential": each visit of a start moves its row of numerator and
            denominator by `step_size` towards what followed.
        step_size: α of the exponential average.
        factored: whether only the path is averaged.
        as_printed: Algorithm 2 as printed, see `monte_carlo`.
        start: the only row that is kept; all if None.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> c = mx.traces.retrace(pi, mu)
    >>> estimator = MonteCarlo.init(3, 2, mdp.discount)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=20)
    >>> estimator = estimator.update(batch, c)
    >>> estimator.weights(c)[0, 0, 1]
    Array([1., 0.], dtype=float32)
    """

    sums: Float[Array, "rows k n"]
    visits: Float[Array, "2 rows"] | None
    discount: Float[Array, ""]
    shape: tuple[int, ...] = eqx.field(static=True)
    average: str = eqx.field(static=True)
    step_size: float = eqx.field(static=True)
    factored: bool = eqx.field(static=True)
    as_printed: bool = eqx.field(static=True)
    start: int | None = eqx.field(static=True)

    @classmethod
    def init(
        cls,
        num_states: int,
        num_actions: int,
        discount: ArrayLike | float,
        *,
        average: str = "running",
        step_size: float = 0.1,
        factored: bool = True,
        as_printed: bool = False,
        on_states: bool = False,
        start: tuple[int, int] | int | None = None,
    ) -> "MonteCarlo":
        """The estimator before any data; its arguments are the class's attributes, `on_states` is for V-trace."""
        states, actions = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
        if average not in ("running", "exponential"):
            raise ValueError(f"average must be 'running' or 'exponential', got {average!r}")
        factored = factored and not (as_printed or on_states)
        n = states if on_states else states * actions
        row = row_of(start, states, actions, on_states)
        rows = n if row is None else 1
        checks.fits_in_memory(f"weights between {n} and {n}", n * rows, instead="ask for one row (start=)")
        return cls(
            sums=jnp.zeros((rows, 1 if as_printed else 2, states if factored else n)),
            visits=jnp.zeros((2, rows)) if factored else None,
            discount=fixed_discount(discount),
            shape=(states,) if on_states else (states, actions),
            average="exponential" if as_printed else average,
            step_size=checks.step_size(step_size),
            factored=factored,
            as_printed=as_printed,
            start=row,
        )

    def update(self, trajectories: Trajectory, c: ArrayLike) -> "MonteCarlo":
        """The estimator after more trajectories.

        Args:
            trajectories: fields `[..., T]`; each sequence may hold several episodes. With exponential averages they count in
                the order of the batch, the last most.
            c: traces `[S, A]`.

        Returns:
            The new estimator.
        """
        links = link_steps(trajectories, c, self.discount, self.shape, self.factored)
        rows, n = self.sums.shape[0], self.sums.shape[-1]
        row = rows_of(links, rows, self.start)
        sums, share = self.sums, jnp.ones(row.shape, self.sums.dtype)
        if self.average == "exponential":
            later, times = _later_visits(row, rows)
            keep = 1 - self.step_size
            share = self.step_size * keep ** later.astype(sums.dtype)
            sums = sums * (keep ** times.astype(sums.dtype))[:, None, None]
        below = links.steps.follows.astype(sums.dtype) if self.as_printed else links.discounted

        def step(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
            sums, tails = carry
            row, visit, lead, share, *factors = inputs
            # Sums over what follows each step: discounted traces, and discounted visits (or their count), of each place.
            here = jax.nn.one_hot(visit, n, dtype=sums.dtype)
            here = lead[:, None] * here if self.factored else here
            tails = here[:, None] + jnp.stack(factors, axis=1)[:, :, None] * tails
            new = divide(tails[:, :1], tails[:, 1:]) if self.as_printed else tails
            return (sums.at[row].add(share[:, None, None] * new), tails), None

        tails = jnp.zeros((row.shape[0], 2, n), sums.dtype)
        inputs = jax.tree.map(jnp.transpose, (row, links.visit, links.lead, share, links.traced, below))
        (sums, _), _ = jax.lax.scan(step, (sums, tails), inputs, reverse=True)
        visits = self.visits
        if visits is not None:
            visits = visits + count_starts(links, row, rows, math.prod(self.shape))
        return eqx.tree_at(lambda e: (e.sums, e.visits), self, (sums, visits), is_leaf=lambda x: x is None)

    def paths(self) -> Float[Array, "rows S"]:
        """u of each start; only if factored."""
        return divide(self.sums[:, 0], self.sums[:, 1])

    def weights(self, c: ArrayLike | None = None) -> Array:
        """The weights so far: `[S, A, S, A]`, on states `[S, S]`, for one start `[S, A]` or `[S]`.

        Args:
            c: traces `[S, A]` of the last action; needed if factored.
        """
        table = self.sums[:, 0] if self.as_printed else divide(self.sums[:, 0], self.sums[:, 1])
        if self.visits is not None:
            table = assemble(table, table_of(c, self.shape, table.dtype), self.visits, self.start)
        return table.reshape(self.shape if self.start is not None else self.shape * 2)


def monte_carlo(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    discount: float | None = None,
    on_states: bool = False,
    average: str = "running",
    step_size: float = 0.1,
    factored: bool = True,
    as_printed: bool = False,
) -> Float[Array, "*table"]:
    r"""TD weights from averages of products of traces, $\hat w = \hat u c$ with $\hat u$ the mean product on the way to a state.

    The averages run over all trajectories and all starts along them (`MonteCarlo` has the details and the incremental form).
    Behaviour probabilities are not needed. Entries that were never met are zero.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: a pair `(x, a)`, or a state if `on_states`: only its row.
        discount: γ; read from the trajectories when omitted.
        on_states: whether to return weights between states, for V-trace: averages of $c_t \cdots c_{s-1}$.
        average: "running", or "exponential" with `step_size` in the order of the trajectories.
        step_size: α.
        factored: whether to average the path only and to put in the last trace exactly. If False, products that include the last
            trace are averaged per pair: Algorithm 2 in its consistent form, with more variance.
        as_printed: Algorithm 2 as printed: $γ^t C_t$ divided by an undiscounted count, exponentially averaged, entries that a
            trajectory did not visit drawn towards zero. It does not estimate $w^c$; it is here to be compared with. Its factor
            1-γ, which the factor 1/(1-γ) of the paper's target takes away again, is left out.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`, on states `[S, S]`; `[S, A]` or `[S]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> monte_carlo(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(1)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """
    make = partial(
        MonteCarlo.init,
        start=start,
        on_states=on_states,
        average=average,
        step_size=step_size,
        factored=factored,
        as_printed=as_printed,
    )
    return estimate(make, trajectories, c, discount)


def _later_visits(rows: Int[Array, "B T"], size: int) -> tuple[Int[Array, "B T"], Int[Array, "size"]]:
    """How often the row of each step occurs later in the batch, and how often each row occurs in all."""
    flat = rows.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    after = jnp.searchsorted(ordered, ordered, side="right") - 1 - jnp.arange(flat.size)
    later = jnp.zeros_like(after).at[order].set(after)
    return later.reshape(rows.shape), jnp.bincount(flat, length=size + 1)[:size]
