"""The targets: sampled estimates of the operators, and two that do not correct for the behaviour policy."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks

from ._inputs import compiled
from ._recursion import BACKENDS, Backend, recursion, shifted, zero_where


class RandomTimes(eqx.Module):
    r"""Geometric random times, one for every step of a sequence, drawn by `random_times`.

    Each step tosses a coin that says *stop* with probability `1 - γ`. The random time of step `t` is the first stop
    at or after `t`, so that $P(\tau_t = t + n) = (1-\gamma)\gamma^n$ for every `t`. The coins are shared: each time has
    the right law, and times of neighbouring steps are dependent.

    Attributes:
        stop: whether the coin of step `t` says stop, `[T]`.
        discount: γ.

    >>> times = random_times(jax.random.key(0), steps=5, discount=0.5)
    >>> times.stop.shape
    (5,)
    """

    stop: Bool[Array, "..."]
    discount: Float[Array, ""]


def random_times(key: Array, steps: int, discount: ArrayLike) -> RandomTimes:
    r"""Draws the random times of the paper's random-time estimates (Section 4.1).

    Args:
        key: a JAX random key.
        steps: the length `T` of the sequence.
        discount: γ in [0, 1), which may be traced.

    Returns:
        What the argument `times` of the targets takes. The same times given to two targets make them
        comparable draw by draw.

    Raises:
        ValueError: if `steps` or a discount that JAX is not tracing is out of range.

    >>> v_next, rewards = jnp.array([2.0, 2.0]), jnp.ones(2)
    >>> times = random_times(jax.random.key(0), steps=2, discount=0.9)
    >>> multi_step(jnp.zeros(2), v_next, rewards, jnp.full(2, 0.9), jnp.ones(2), times=times).shape
    (2,)
    """
    if np.ndim(discount):
        raise ValueError(f"discount must be one number, but has shape {np.shape(discount)}.")
    if not isinstance(discount, jax.core.Tracer):
        checks.discount(discount)
    gamma = jnp.asarray(discount, jnp.result_type(float))
    coins = jax.random.uniform(key, (checks.count("steps", steps),), gamma.dtype)
    return RandomTimes(coins >= gamma, gamma)


class _Steps(NamedTuple):
    """What every target needs of a sequence, with all that must not be read replaced by zeros."""

    values: Array
    v_next: Array  # zero at cuts
    errors: Array  # r + γ V(x') - Q(x, a); divided by 1 - γ at a random time, and zero before it
    carry: Array  # γ, or zero at cuts
    cut: Array  # lets no credit through: the end of an episode, a truncated step, padding, the step before padding
    valid: Array | None

    def kept(self, factor: Array) -> Array:
        """A factor of each step's error (`[T]`, or `[T, T]` for each start), with zeros in the padding."""
        return factor if self.valid is None else zero_where(~self.valid, factor)

    def target(self, b: Array, a: Array, stop_gradient: bool, backend: Backend) -> Array:
        """`values + y` for the recursion with these coefficients."""
        values, b, a, cut = jnp.broadcast_arrays(self.values, b, a, self.cut)
        if stop_gradient:
            values, b, a = jax.lax.stop_gradient((values, b, a))
        return values + recursion(b, a, cut, backend)


def _floats(name: str, value: ArrayLike | None, like: Array | None = None) -> Array:
    """A floating-point array: `[T]`, or if `like` is given, of its shape or a scalar."""
    array = jnp.asarray(value)
    array = array.astype(jnp.result_type(array, float))
    if like is None and (array.ndim != 1 or array.shape[0] == 0):
        raise ValueError(f"{name} must be a sequence [T] with T >= 1, but has shape {array.shape}.")
    return array if like is None else _of_length(name, array, like)


def _of_length(name: str, array: Array, like: Array) -> Array:
    if array.ndim and array.shape != like.shape:
        raise ValueError(
            f"{name} must have shape {like.shape}, one entry per step, but has shape {array.shape}."
        )
    return array


def _following(array: Array) -> Array:
    """What the next step has; a scalar is the same for all steps."""
    return shifted(array) if array.ndim else array


def _steps(
    name: str,
    values: ArrayLike | None,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None,
    valid: ArrayLike | None,
    times: RandomTimes | None = None,
) -> _Steps:
    """Checks the arguments that all targets share; `values` go by a name. Those of "v_next" are zero: errors are r + γ V(x')."""
    first = jnp.zeros_like(_floats(name, v_next)) if name == "v_next" else _floats(name, values)
    ahead = _floats("v_next", v_next, first)
    r, gamma = _floats("rewards", rewards, first), _floats("discounts", discounts, first)
    kept = None
    if valid is not None:
        kept = _of_length("valid", jnp.asarray(valid, bool), first)
        first, ahead, r, gamma = (zero_where(~kept, x) for x in (first, ahead, r, gamma))
    cut = ended = gamma == 0
    if truncated is not None:
        cut = cut | _of_length("truncated", jnp.asarray(truncated, bool), first)
    if kept is not None:
        cut = cut | ~kept | ~_following(kept)
    errors = r + gamma * zero_where(ended, ahead) - first
    if times is not None:
        if not isinstance(times, RandomTimes):
            raise ValueError("times must be what random_times returns.")
        stop = _of_length("times.stop", times.stop, first)
        errors = zero_where(~stop, errors / (1 - times.discount))
        gamma = gamma / jnp.where(times.discount == 0, 1, times.discount)
        cut = cut | stop
    return _Steps(first, zero_where(cut, ahead), errors, zero_where(cut, gamma), cut, kept)


@compiled
def multi_step(
    q: ArrayLike,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    traces: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Estimates the multi-step operator $\mathcal R^c Q$ at every step of one sequence.

    $$\hat{\mathcal R}^c Q(x_t,a_t) = Q(x_t,a_t) + \sum_{s \ge t} \gamma^{s-t} (c_{t+1} \cdots c_s)\,
    \hat\Delta_s, \qquad \hat\Delta_s = r_s + \gamma Q(x_{s+1}, \pi) - Q(x_s, a_s)$$

    (Section 4.1). The traces make the algorithm: 0 gives one-step targets, π/μ importance sampling,
    λ min(c̄, π/μ) Retrace, λπ tree backup, λ Harutyunyan's Q(λ).

    Args:
        q: `Q(x_t, a_t)`, times 0 to T-1.
        v_next: `Q(x_{t+1}, π)`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode; nothing beyond such a step is read.
        traces: `c(x_t, a_t)`, times 0 to T-1, or one number for all. The first one of each episode is never read.
        truncated: where an episode was cut off: the step still bootstraps from `v_next`, but its target does not
            depend on what follows it in the array. The last step of the array is always such a step.
        valid: False for padding, which is never read; its targets are 0.
        times: random times; then the estimate is $Q + (1-\gamma)^{-1} (c_{t+1} \cdots c_\tau)
            \hat\Delta_\tau$.
        stop_gradient: whether to return a constant; otherwise every argument is differentiated through.
        backend: `scan`, `associative`, or `auto`: the first on CPU, the second on accelerators.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree.

    >>> q, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> rewards, discounts = jnp.ones(2), jnp.array([0.5, 0.0])
    >>> multi_step(q, v_next, rewards, discounts, traces=jnp.array([9.0, 0.8]))
    Array([1.6, 1. ], dtype=float32)
    """
    steps = _steps("q", q, v_next, rewards, discounts, truncated, valid, times)
    c = _following(_floats("traces", traces, steps.values))
    return steps.target(steps.errors, steps.carry * zero_where(steps.cut, c), stop_gradient, backend)


@compiled
def marginalized(
    q: ArrayLike,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    weights: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Estimates the marginalized operator $\mathcal M^w Q$ at every step of one sequence.

    $$\hat{\mathcal M}^w Q(x_t,a_t) = Q(x_t,a_t) + \sum_{s \ge t} \gamma^{s-t} w_{x_t,a_t}(x_s,a_s)\,
    \hat\Delta_s$$

    (Section 4.1). The error of the start itself is weighted, too: $w_{x,a}(x,a)$ is 1 only if the pair
    is not met again. With weights `[T]`, `weights[s]` stands for every start: that is the formula for weights
    that do not depend on the start; and if they are those of the first pair, $w_{x_0,a_0}(x_s,a_s)$, the
    formula holds for the first target (of the first episode) only.

    `weights` are `[T, T]` with the weight of step `s` for start `t` at `[t, s]`; or `[T]`, the same for all starts; or a
    number. Pairs with `s < t`, or with the end of an episode in between, are never read. With random times the
    estimate is $Q + (1-\gamma)^{-1} w_{x_t,a_t}(x_\tau,a_\tau) \hat\Delta_\tau$. The other arguments are as in `multi_step`.

    >>> q, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> rewards, discounts = jnp.ones(2), jnp.array([0.5, 0.0])
    >>> marginalized(q, v_next, rewards, discounts, weights=jnp.array([1.0, 0.8]))
    Array([1.6, 1.2], dtype=float32)
    >>> marginalized(q, v_next, rewards, discounts, weights=jnp.array([[1.0, 0.8], [jnp.nan, 1.0]]))
    Array([1.6, 1. ], dtype=float32)
    """
    steps = _steps("q", q, v_next, rewards, discounts, truncated, valid, times)
    return _marginalized(steps, steps.errors, weights, stop_gradient, backend)


@compiled
def vtrace(
    v: ArrayLike,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    traces: ArrayLike,
    rhos: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Estimates the V-trace operator $\mathcal R^{c,\rho} V$ at every step of one sequence.

    $$\hat{\mathcal R}^{c,\rho} V(x_t) = V(x_t) + \sum_{s \ge t} \gamma^{s-t} (c_t \cdots c_{s-1})\,\rho_s
    \bigl(r_s + \gamma V(x_{s+1}) - V(x_s)\bigr)$$

    (the appendix on V-trace). Unlike `multi_step`, the trace of the start itself counts, because a state's
    action is still to be corrected for, and the trace of an episode's last step is never read.

    `v` is `V(x_t)`, `v_next` is `V(x_{t+1})`, `traces` are usually λ min(c̄, π/μ) (`traces.clip_ratios`) and `rhos`, the
    `ρ(x_t, a_t)`, usually min(ρ̄, π/μ); each may be one number for all steps. The other arguments are as in `multi_step`.

    >>> v, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> vtrace(v, v_next, jnp.ones(2), jnp.array([0.5, 0.0]), traces=jnp.array([0.8, 1.0]), rhos=1.0)
    Array([1.6, 1. ], dtype=float32)
    """
    steps = _steps("v", v, v_next, rewards, discounts, truncated, valid, times)
    c, rho = _floats("traces", traces, steps.values), _floats("rhos", rhos, steps.values)
    coefficients = steps.carry * zero_where(steps.cut, c)
    return steps.target(steps.kept(rho) * steps.errors, coefficients, stop_gradient, backend)


@compiled
def marginalized_vtrace(
    v: ArrayLike,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    weights: ArrayLike,
    rhos: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Estimates the marginalized V-trace operator $\mathcal M^{w,\rho} V$ at every step of one sequence.

    $$\hat{\mathcal M}^{w,\rho} V(x_t) = V(x_t) + \sum_{s \ge t} \gamma^{s-t} w_{x_t}(x_s)\,\rho_s
    \bigl(r_s + \gamma V(x_{s+1}) - V(x_s)\bigr)$$

    (the appendix on V-trace).

    The arguments are those of `vtrace`, with weights `w_{x_t}(x_s)`, `[T, T]` or `[T]`, as in `marginalized`.

    >>> v, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> marginalized_vtrace(v, v_next, jnp.ones(2), jnp.array([0.5, 0.0]), jnp.array([1.0, 0.8]), rhos=1.0)
    Array([1.6, 1.2], dtype=float32)
    """
    steps = _steps("v", v, v_next, rewards, discounts, truncated, valid, times)
    errors = steps.kept(_floats("rhos", rhos, steps.values)) * steps.errors
    return _marginalized(steps, errors, weights, stop_gradient, backend)


def _marginalized(
    steps: _Steps, errors: Array, weights: ArrayLike, stop_gradient: bool, backend: Backend
) -> Array:
    """Weighted sums of the errors: for weights `[T]` the recursion itself, for `[T, T]` that of a vector."""
    w, shape = jnp.asarray(weights), steps.values.shape
    checks.choice("backend", backend, BACKENDS)
    if w.ndim < 2:
        w = _floats("weights", w, steps.values)
        return steps.target(steps.kept(w) * errors, steps.carry, stop_gradient, backend)
    if w.shape != 2 * shape:
        raise ValueError(f"weights must have shape {shape} or {2 * shape} ([start, step]), not {w.shape}.")
    w = steps.kept(w.astype(jnp.result_type(w, float)))
    target = steps.values + _sums_of_starts(steps, errors, w, backend)
    return jax.lax.stop_gradient(target) if stop_gradient else target


def _sums_of_starts(steps: _Steps, errors: Array, w: Array, backend: Backend) -> Array:
    """`Σ_s w[t, s] y[t, s]` for every start t, where `y[t, s]` is the discounted error of step s as seen from step t."""
    shape = steps.values.shape
    carry, cut = (jnp.broadcast_to(x, shape) for x in (steps.carry, steps.cut))
    time, episode = jnp.arange(shape[0]), jnp.cumsum(cut) - cut

    def at_once(errors: Array, w: Array) -> Array:
        unreached = (time[:, None] > time) | (episode[:, None] != episode)
        y = recursion(jnp.diag(errors), carry[:, None], cut[:, None], "associative")
        return (zero_where(unreached, w) * y).sum(axis=1)

    def row_by_row(errors: Array, w: Array) -> Array:
        def step(y: Array, here: tuple[Array, ...]) -> tuple[Array, Array]:
            t, own, a, row = here
            y = jnp.where(time == t, errors, a * zero_where(a == 0, y))
            return y, (zero_where((time < t) | (episode != own), row) * y).sum()

        return jax.lax.scan(step, jnp.zeros_like(errors), (time, episode, carry, w), reverse=True)[1]

    if backend == "auto":
        return jax.lax.platform_dependent(errors, w, cpu=row_by_row, default=at_once)
    return row_by_row(errors, w) if backend == "scan" else at_once(errors, w)


@compiled
def peng(
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    traces: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    stop_gradient: bool = True,
    backend: Backend = "auto",
) -> Float[Array, "T"]:
    r"""Computes Peng's and Williams' Q(λ), which follows the actions taken as if π had taken them.

    $$G_t = r_t + \gamma \bigl((1 - c_{t+1})\, Q(x_{t+1},\pi) + c_{t+1} G_{t+1}\bigr)$$

    With `traces=λ` it is Peng's Q(λ); unless μ = π its fixed point is not $Q^\pi$. With Retrace's traces it
    is the multi-step baseline of the paper's deep experiments, which bootstraps from π's action where Retrace
    has $Q(x_{t+1},a_{t+1})$. With `traces=1` it is the uncorrected return.

    `traces` is λ, or a trace for every step, of which an episode's first is never read. The other arguments are as in
    `multi_step`.

    >>> peng(jnp.array([2.0, 4.0]), jnp.ones(2), jnp.array([0.5, 0.5]), traces=0.5)
    Array([2.25, 3.  ], dtype=float32)
    """
    steps = _steps("v_next", None, v_next, rewards, discounts, truncated, valid)
    # An array even if all traces are one number: the last step has none after it, and bootstraps in full.
    c = shifted(jnp.broadcast_to(_floats("traces", traces, steps.values), steps.values.shape))
    coefficients = steps.carry * zero_where(steps.cut, c)
    return steps.target(steps.errors - coefficients * steps.v_next, coefficients, stop_gradient, backend)


@compiled
def n_step(
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    steps: int,
    truncated: ArrayLike | None = None,
    *,
    valid: ArrayLike | None = None,
    stop_gradient: bool = True,
) -> Float[Array, "T"]:
    r"""Computes uncorrected n-step targets, the usual choice where off-policy correction is neglected.

    $$G_t = r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n Q(x_{t+n},\pi)$$

    shortened where the episode ends, is truncated or leaves the array before `n` steps are through.

    `steps` is n, at least 1; 1 gives one-step targets. The other arguments are as in `multi_step`.

    >>> n_step(jnp.array([2.0, 4.0]), jnp.ones(2), jnp.array([0.5, 0.5]), steps=2)
    Array([2.5, 3. ], dtype=float32)
    """
    here = _steps("v_next", None, v_next, rewards, discounts, truncated, valid)
    length = here.errors.shape[0]
    last = here.cut | (jnp.arange(length) == length - 1)
    bootstrap = zero_where(last, here.v_next)

    def extend(_: Array, target: Array) -> Array:
        """From targets of n steps to those of n + 1: the bootstrap value gives way to the next step's target."""
        return here.errors + here.carry * (zero_where(last, shifted(target)) - bootstrap)

    extensions = min(checks.count("steps", steps), length) - 1
    target = jax.lax.fori_loop(0, extensions, extend, here.errors)
    return jax.lax.stop_gradient(target) if stop_gradient else target
