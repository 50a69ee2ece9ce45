"""Tabular policy evaluation from a stream of trajectories, with any operator (Section 6.1 and its appendix)."""

from collections.abc import Sequence
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.learning._steps import (
    Progress,
    Visits,
    check_estimator,
    checked_policy,
    checked_table,
    estimator_of,
    initial_progress,
    learn_from,
    with_seeds,
)
from marginax.trajectories import Trajectory
from marginax.weights import Estimator


def refresh_schedule(iterations: int, refresh_growth: float = 1.0) -> np.ndarray:
    """When weights are read off anew: at the first iteration, and whenever the count has grown by a factor.

    Args:
        iterations: how many there are.
        refresh_growth: 1 for every iteration; 1.1 for iterations 1, 2, …, 10, 11, 13, 15, 17, 19, 21, 24, …

    Returns:
        One flag for every iteration.

    >>> np.flatnonzero(refresh_schedule(12, 1.5)) + 1
    array([ 1,  2,  3,  5,  8, 12])
    """
    flags, following = np.zeros(checks.count("iterations", iterations, least=0), bool), 1.0
    growth = checks.at_least("refresh_growth", refresh_growth, 1.0)
    for iteration in range(1, iterations + 1):
        if iteration >= following:
            flags[iteration - 1] = True
            following = max(iteration + 1, np.ceil(iteration * growth))
    return flags


def evaluate(
    trajectories: Trajectory,
    pi: ArrayLike,
    c: ArrayLike,
    weights: Estimator | ArrayLike | None = None,
    *,
    step_size: float = 0.1,
    initial: ArrayLike | None = None,
    refresh_growth: float = 1.0,
    states: Sequence[int] | None = None,
    visits: Visits = "each",
) -> Float[Array, "*seeds iterations kept A"]:
    r"""Learns Q^π from trajectories, one per iteration, with the targets of any operator.

    At iteration i every step of trajectory i gets a target computed from the same $Q^{(i)}$, and then, step by
    step in the order of time,

    $$Q(x_t,a_t) \leftarrow (1-\alpha) Q(x_t,a_t) + \alpha \hat Q(x_t,a_t)$$

    (appendix on experiments), so that a pair met k times in a trajectory moves k times (unless `visits` says otherwise). Estimated weights take
    in trajectory i before they are used on it.

    | operator | c | weights |
    |---|---|---|
    | one-step | zeros | None |
    | Retrace, tree backup, … | its traces | None |
    | marginalized | traces | where the TD weights of these traces come from: an estimator, or a table |

    Args:
        trajectories: fields `[iterations, T]`, or `[seeds, iterations, T]` for many seeds side by side.
        pi: the policy to evaluate, `[S, A]`.
        c: traces `[S, A]`.
        weights: an incremental estimator of TD weights such as `weights.MonteCarlo`, known weights `[S, A, S, A]` such as
            `weights.exact`, or None for the multi-step operator.
        step_size: α.
        initial: Q at the start, `[S, A]`; zero when omitted.
        refresh_growth: weights are read off the estimator whenever the number of trajectories has grown by this factor;
            1 is every time.
        states: the states whose values are returned; all when omitted.
        visits: "each": a pair met k times in a trajectory moves k times. "mean": it moves once, towards the mean
            of its targets; slower, and steadier where trajectories come back to the same pairs often.

    Returns:
        Q after every iteration.

    Raises:
        ValueError: naming the argument, the place and the value. Values that JAX is tracing are checked for their shape only.

    >>> import marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2, noise=0.0)
    >>> stream = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=3)
    >>> q = evaluate(stream, pi, mx.traces.retrace(pi, mu))
    >>> q.shape
    (200, 3, 2)
    >>> bool(abs(q[-1] - mdp.q_values(pi)).max() < 0.05)
    True
    """
    pi = checked_policy("pi", pi)
    c = checked_table("c", c, pi.shape)
    initial = jnp.zeros_like(pi) if initial is None else checked_table("initial", initial, pi.shape)
    estimator = estimator_of(weights, pi.shape)
    trajectories, single = with_seeds(trajectories, pi.shape, estimator)
    iterations = trajectories.states.shape[-2]
    refresh = None if refresh_growth == 1 else jnp.asarray(refresh_schedule(iterations, refresh_growth))
    step = jnp.asarray(checks.step_size(step_size), pi.dtype)
    kept = None if states is None else jnp.asarray(checks.indices("states", states, len(pi)), jnp.int32)
    checks.choice("visits", visits, get_args(Visits))
    q = _evaluate(trajectories, pi, c, estimator, step, initial, refresh, kept, visits)
    return q[0] if single else q


@partial(jax.jit, static_argnames="visits")
def _evaluate(trajectories, pi, c, estimator, step_size, initial, refresh, states, visits):
    check_estimator(estimator, c)

    def iterate(before: Progress, now: tuple[Trajectory, Array | None]) -> tuple[Progress, Array]:
        trajectory, refresh = now
        after = learn_from(trajectory, before, pi, c, refresh, step_size, visits)
        return after, after.q if states is None else after.q[states]

    def one_seed(stream: Trajectory) -> Array:
        return jax.lax.scan(iterate, initial_progress(initial, estimator, refresh), (stream, refresh))[1]

    return jax.vmap(one_seed)(trajectories)
