"""Tabular policy iteration from a stream of trajectories, with any operator (appendix on experiments, Figure 5)."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, get_args, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.learning._steps import (
    Visits,
    check_estimator,
    checked_policy,
    estimator_of,
    initial_progress,
    learn_from,
    with_seeds,
)
from marginax.mdp import TabularMDP
from marginax.traces import clip_ratios
from marginax.trajectories import Trajectory
from marginax.weights import Estimator


class Improvement(NamedTuple):
    """What policy iteration went through.

    >>> Improvement._fields
    ('policies', 'q')
    """

    policies: Float[Array, "*seeds iterations S A"]
    """The policy after every iteration."""
    q: Float[Array, "*seeds iterations S A"]
    """Q after every iteration."""


@runtime_checkable
class Traces(Protocol):
    """Traces as a function of the target policy, which changes: `pi[S, A] -> c[S, A]`; a pytree.

    >>> retrace([[0.5, 0.5]])(jnp.array([[1.0, 0.0]]))
    Array([[1., 0.]], dtype=float32)
    """

    def __call__(self, pi: Array) -> Array: ...


class _Retrace(eqx.Module):
    mu: Float[Array, "S A"]
    clip: Float[Array, ""]
    decay: Float[Array, ""]

    def __call__(self, pi: Array) -> Array:
        if pi.shape != self.mu.shape:
            raise ValueError(f"pi must have the shape of mu, {self.mu.shape}, got {pi.shape}")
        return clip_ratios(pi / self.mu, self.clip, self.decay)


def retrace(mu: ArrayLike, clip: float = 1.0, decay: float = 1.0) -> Traces:
    """Retrace's traces of whatever the policy is by then, `λ min(c̄, π/μ)`; with a clip of 0, one-step.

    Args:
        mu: behaviour policy `[S, A]`, positive everywhere: the policy may come to take any action.
        clip: c̄ ≥ 0.
        decay: λ in [0, 1].

    >>> retrace([[0.5, 0.5]], clip=2.0)(jnp.array([[1.0, 0.0]]))
    Array([[2., 0.]], dtype=float32)
    """
    behaviour, kind = checked_policy("mu", mu), jnp.result_type(float)
    if not isinstance(mu, jax.core.Tracer) and not np.all(mu):
        place = checks.where(np.argwhere(np.asarray(mu) == 0)[0])
        raise ValueError(
            f"mu must be positive, because the policy may come to take any action, but mu{place} = 0"
        )
    limit = checks.at_least("clip", clip, 0.0, infinite=True)
    return _Retrace(behaviour, jnp.asarray(limit, kind), jnp.asarray(checks.fraction("decay", decay), kind))


def improve(
    trajectories: Trajectory,
    initial: ArrayLike,
    traces: Traces,
    weights: Estimator | ArrayLike | None = None,
    *,
    step_size: float = 0.1,
    policy_step_size: float = 0.1,
    refresh_every: int = 1,
    visits: Visits = "each",
) -> Improvement:
    r"""Policy iteration: evaluates with one trajectory, then moves the policy towards the greedy one.

    At iteration i, Q takes one step of `evaluate` with the targets of the current $π^{(i)}$, and

    $$π^{(i+1)} = (1-α)\, π^{(i)} + α\, π_{\text{greedy}}(Q),$$

    where the greedy policy shares its mass among all best actions, so that states in which nothing is known yet
    keep a uniform one. The trajectories all come from the same behaviour policy.

    Args:
        trajectories: fields `[iterations, T]`, or `[seeds, iterations, T]`.
        initial: $π^{(0)}$, `[S, A]`.
        traces: the traces of a policy, for instance `retrace(mu)`.
        weights: as in `evaluate`; estimates and known weights are those of the traces as they change.
        step_size: of Q.
        policy_step_size: α; 0.1 is *soft* and 1 is *hard* policy iteration.
        refresh_every: iterations between two readings of the weights.
        visits: as in `evaluate`.

    Returns:
        Policies and Q after every iteration.

    >>> import marginax as mx
    >>> mdp, pi, mu = mx.problems.open_world(n=3)
    >>> stream = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=100, horizon=50)
    >>> found = improve(stream, mu, retrace(mu), policy_step_size=1.0)
    >>> found.policies.shape
    (100, 9, 4)
    >>> bool(mdp.v_values(found.policies[-1])[0] > 0.97)
    True
    """
    pi = checked_policy("initial", initial)
    if isinstance(traces, type) or not callable(traces):
        got = getattr(traces, "__name__", type(traces).__name__)
        raise ValueError(f"traces must be a function of the policy, such as learning.retrace(mu), got {got}")
    estimator = estimator_of(weights, pi.shape)
    trajectories, single = with_seeds(trajectories, pi.shape, estimator)
    every = checks.count("refresh_every", refresh_every)
    refresh = jnp.arange(trajectories.states.shape[-2]) % every == 0 if every > 1 else None
    sizes = [checks.step_size(step_size), checks.step_size(policy_step_size, "policy_step_size")]
    checks.choice("visits", visits, get_args(Visits))
    found = _improve(trajectories, pi, traces, estimator, jnp.asarray(sizes, pi.dtype), refresh, visits)
    return jax.tree.map(lambda field: field[0], found) if single else found


@eqx.filter_jit
def _improve(
    trajectories, initial, traces: Callable[[Array], Array], estimator, sizes, refresh, visits: Visits
) -> Improvement:
    c = traces(initial)
    checks.shaped("traces(pi)", np.shape(c), initial.shape)
    check_estimator(estimator, c)

    def iterate(before, now):
        pi, progress = before
        trajectory, refresh = now
        progress = learn_from(trajectory, progress, pi, traces(pi), refresh, sizes[0], visits)
        pi = (1 - sizes[1]) * pi + sizes[1] * _greedy(progress.q)
        return (pi, progress), Improvement(pi, progress.q)

    def one_seed(stream: Trajectory) -> Improvement:
        start = initial, initial_progress(jnp.zeros_like(initial), estimator, refresh)
        return jax.lax.scan(iterate, start, (stream, refresh))[1]

    return jax.vmap(one_seed)(trajectories)


def _greedy(q: Array) -> Array:
    best = q == q.max(axis=1, keepdims=True)
    return best / best.sum(axis=1, keepdims=True)


def average_return(mdp: TabularMDP, policies: ArrayLike, states: ArrayLike | None = None) -> np.ndarray:
    r"""Expected discounted return from a uniformly drawn state, exactly: the mean of $V^π$.

    Args:
        mdp: the MDP.
        policies: `[..., S, A]`.
        states: the states to draw from; when omitted, those from which something can happen (that is, not states
            whose every action ends the episode without a reward).

    Returns:
        `[...]`.

    Raises:
        ValueError: if a policy is not one of this MDP, a state is out of range, or there is none to draw from.

    >>> import marginax as mx
    >>> mdp, pi, mu = mx.problems.open_world(n=2, discount=0.5)
    >>> round(float(average_return(mdp, pi)), 3)
    0.556
    """
    several = np.shape(policies)[:-2]
    table = checks.distribution("policies", policies, (*several, *mdp.r.shape))
    if states is None:
        states = np.flatnonzero((mdp.termination < 1).any(axis=1) | mdp.r.any(axis=1))
    kept = checks.indices("states", states, mdp.num_states)
    if not kept.size:
        raise ValueError(
            "states must name at least one state, got none; when omitted, at least one must lead on or pay a reward"
        )
    values = [mdp.v_values(pi)[kept].mean() for pi in table.reshape(-1, *mdp.r.shape)]
    return np.reshape(values, several)
