"""TD weights as averages of the cumulative traces met along trajectories (Algorithm 2, made consistent)."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import Trajectory
from marginax.weights._data import discount_of, link_steps, start_of, traces_of

__all__ = ["MonteCarlo", "monte_carlo", "monte_carlo_states"]


class MonteCarlo(eqx.Module):
    r"""Monte Carlo weights that are updated trajectory by trajectory: a pytree for `jit`, `vmap` and `scan`.

    Every step of every trajectory is a start. For a start at time $t$ and a visit at time $s \ge t$ of the same
    episode, numerator and denominator of the pair's row grow by

    $$
    N_{x_t,a_t}(x_s,a_s) \mathrel{+}= \gamma^{s-t} c_{t+1} \cdots c_s, \qquad
    D_{x_t,a_t}(x_s,a_s) \mathrel{+}= \gamma^{s-t},
    $$

    and the weights are $N / D$, zero where nothing was met. All starts are served by one backward pass in time,
    $T \cdot SA$ operations for a trajectory of $T$ steps. On states (V-trace) the product is $c_t \cdots c_{s-1}$.

    Where a trajectory is cut off, so are the sums: from starts near the cut both are those of a shorter horizon, a bias that
    vanishes as $\gamma^T$ and does not vanish with the number of trajectories.

    Attributes:
        sums: numerator and denominator `[rows, 2, n]`, with `n = S*A` pairs or `S` states; `[rows, 1, n]` if `literal`.
        discount: γ.
        num_states: S.
        num_actions: A.
        average: "running": all starts count alike. "exponential": each visit of a start moves its row of numerator and
            denominator by `step_size` towards what followed.
        step_size: α of the exponential average.
        literal: Algorithm 2 as printed, see `monte_carlo`.
        on_states: whether the weights are `[S, S]`, for V-trace.
        start: the only row that is kept; all if None.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> c = mx.traces.retrace(pi, mu)
    >>> estimator = MonteCarlo.init(3, 2, mdp.discount)
    >>> for key in jax.random.split(jax.random.key(0), 50):
    ...     estimator = estimator.update(mx.trajectories.sample(mdp, mu, key, episodes=1, horizon=20), c)
    >>> estimator.weights().shape
    (3, 2, 3, 2)
    """

    sums: Float[Array, "rows k n"]
    discount: Float[Array, ""]
    num_states: int = eqx.field(static=True)
    num_actions: int = eqx.field(static=True)
    average: str = eqx.field(static=True)
    step_size: float = eqx.field(static=True)
    literal: bool = eqx.field(static=True)
    on_states: bool = eqx.field(static=True)
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
        literal: bool = False,
        on_states: bool = False,
        start: tuple[int, int] | int | None = None,
    ) -> "MonteCarlo":
        """The estimator before any data; its arguments are the class's attributes.

        >>> MonteCarlo.init(3, 2, 0.9, on_states=True).weights().shape
        (3, 3)
        """
        states, actions = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
        if average not in ("running", "exponential"):
            raise ValueError(f"average must be 'running' or 'exponential', got {average!r}")
        if not 0 < step_size <= 1:
            raise ValueError(f"step_size must lie in (0, 1], got {step_size}")
        n = states if on_states else states * actions
        start = start_of(start, states, actions, on_states)
        row = start[0] * actions + start[1] if isinstance(start, tuple) else start
        checks.fits_in_memory(
            f"weights between {n} and {n}", n * n if row is None else n, instead="ask for one row (start=)"
        )
        return cls(
            sums=jnp.zeros((n if row is None else 1, 1 if literal else 2, n)),
            discount=jnp.asarray(discount, dtype=jnp.result_type(float)),
            num_states=states,
            num_actions=actions,
            average="exponential" if literal else average,
            step_size=step_size,
            literal=literal,
            on_states=on_states,
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

        >>> import jax, marginax as mx
        >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
        >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=5, horizon=20)
        >>> MonteCarlo.init(3, 2, mdp.discount).update(batch, mx.traces.retrace(pi, mu)).sums.shape
        (6, 2, 6)
        """
        links = link_steps(trajectories, c, self.discount, self.on_states)
        place = links.place
        rows, n = self.sums.shape[0], self.sums.shape[-1]
        row = place if self.start is None else jnp.zeros_like(place)
        counted = links.valid if self.start is None else links.valid & (place == self.start)
        row = jnp.where(counted, row, rows)  # out of range: such steps are starts of no row
        sums, share = self.sums, jnp.ones(place.shape, self.sums.dtype)
        if self.average == "exponential":
            later, visits = _later_visits(row, rows)
            keep = 1 - self.step_size
            share = self.step_size * keep ** later.astype(sums.dtype)
            sums = sums * (keep ** visits.astype(sums.dtype))[:, None, None]
        below = links.follows.astype(sums.dtype) if self.literal else links.discounted
        factors = (links.traced, below)

        def step(carry: tuple[Array, Array], inputs: tuple[Array, ...]) -> tuple[tuple[Array, Array], None]:
            sums, tails = carry
            row, place, share, *factors = inputs
            # What follows each trajectory's step: discounted traces, and discounted visits (or their count) of each place.
            tails = (
                jax.nn.one_hot(place, n, dtype=sums.dtype)[:, None]
                + jnp.stack(factors, axis=1)[:, :, None] * tails
            )
            new = (1 - self.discount) * _divide(tails[:, :1], tails[:, 1:]) if self.literal else tails
            return (sums.at[row].add(share[:, None, None] * new), tails), None

        tails = jnp.zeros((place.shape[0], 2, n), sums.dtype)
        inputs = jax.tree.map(jnp.transpose, (row, place, share, *factors))
        (sums, _), _ = jax.lax.scan(step, (sums, tails), inputs, reverse=True)
        return eqx.tree_at(lambda estimator: estimator.sums, self, sums)

    def weights(self) -> Array:
        """The weights so far: `[S, A, S, A]`, on states `[S, S]`, for one start `[S, A]` or `[S]`.

        >>> MonteCarlo.init(2, 1, 0.9).weights().shape
        (2, 1, 2, 1)
        """
        table = self.sums[:, 0] if self.literal else _divide(self.sums[:, 0], self.sums[:, 1])
        one = (self.num_states,) if self.on_states else (self.num_states, self.num_actions)
        return table.reshape(one if self.start is not None else one * 2)


def monte_carlo(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    discount: float | None = None,
    average: str = "running",
    step_size: float = 0.1,
    literal: bool = False,
    start: tuple[int, int] | None = None,
) -> Float[Array, "*table"]:
    r"""TD weights as ratios of sample averages, $\hat w = \sum γ^t C_t 1\{x_t=x',a_t=a'\} / \sum γ^t 1\{x_t=x',a_t=a'\}$.

    The sums run over all trajectories and all starts along them (Algorithm 2 in its consistent form; `MonteCarlo` has the
    details and the incremental form). Behaviour probabilities are not needed. Entries that were never met are zero.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        discount: γ; read from the trajectories when omitted.
        average: "running", or "exponential" with `step_size` in the order of the trajectories.
        step_size: α.
        literal: Algorithm 2 as printed: `(1-γ) γ^t C_t` divided by an undiscounted count, exponentially averaged, entries that
            a trajectory did not visit drawn towards zero. It does not estimate $w^c$; it is here to be compared with.
        start: a pair `(x, a)`: only its row.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`; `[S, A]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> monte_carlo(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(1)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """
    return _run(trajectories, c, discount, average, step_size, literal, False, start)


def monte_carlo_states(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    discount: float | None = None,
    average: str = "running",
    step_size: float = 0.1,
    literal: bool = False,
    start: int | None = None,
) -> Float[Array, "*table"]:
    r"""TD weights on states for V-trace: as `monte_carlo`, with the product $c_0 \cdots c_{t-1}$.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        discount: γ; read from the trajectories when omitted.
        average: "running", or "exponential" with `step_size`.
        step_size: α.
        literal: the literal Algorithm 2, on states.
        start: a state: only its row.

    Returns:
        `w[x, x']` of shape `[S, S]`; `[S]` for one start.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=4000, horizon=50)
    >>> monte_carlo_states(batch, mx.traces.retrace(pi, mu), start=0).round(1)
    Array([1. , 0.5, 0.2], dtype=float32)
    """
    return _run(trajectories, c, discount, average, step_size, literal, True, start)


def _run(
    trajectories: Trajectory,
    c: ArrayLike,
    discount: float | None,
    average: str,
    step_size: float,
    literal: bool,
    on_states: bool,
    start: tuple[int, int] | int | None,
) -> Array:
    traces = traces_of(c)
    gamma = discount_of(trajectories, discount, *traces.shape)
    num_states, num_actions = traces.shape
    estimator = MonteCarlo.init(
        num_states,
        num_actions,
        gamma,
        average=average,
        step_size=step_size,
        literal=literal,
        on_states=on_states,
        start=start,
    )
    return _updated_weights(estimator, trajectories, jnp.asarray(traces))


@eqx.filter_jit
def _updated_weights(estimator: MonteCarlo, trajectories: Trajectory, c: Array) -> Array:
    return estimator.update(trajectories, c).weights()


def _later_visits(rows: Int[Array, "B T"], size: int) -> tuple[Int[Array, "B T"], Int[Array, "size"]]:
    """How often each step's row comes again later in the batch, and how often each row comes at all."""
    flat = rows.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    ordered = flat[order]
    after = jnp.searchsorted(ordered, ordered, side="right") - 1 - jnp.arange(flat.size)
    later = jnp.zeros_like(after).at[order].set(after)
    return later.reshape(rows.shape), jnp.bincount(flat, length=size + 1)[:size]


def _divide(numerator: Array, denominator: Array) -> Array:
    met = denominator > 0
    return jnp.where(met, numerator / jnp.where(met, denominator, 1), 0)
