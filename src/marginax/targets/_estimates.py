"""Sampled estimates of the operators: multi-step, marginalized, V-trace and marginalized V-trace."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from ._loop import shifted, zero_where
from ._recursion import Backend, Form, from_every_start, recursion


class RandomTimes(eqx.Module):
    r"""Geometric random times, one for every step of a sequence, drawn by `random_times`.

    Each step tosses a coin that says *stop* with probability `1 - γ`; the random time of step `t` ends at the
    first stop at or after `t`, so that $P(\tau_t = t + n) = (1-\gamma)\gamma^n$ for every `t`. Steps share
    their coins: each time has the right law, and times of neighbouring steps are dependent.

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

    >>> v_next, rewards = jnp.array([2.0, 2.0]), jnp.ones(2)
    >>> times = random_times(jax.random.key(0), steps=2, discount=0.9)
    >>> multi_step(jnp.zeros(2), v_next, rewards, jnp.full(2, 0.9), jnp.ones(2), times=times).shape
    (2,)
    """
    gamma = jnp.asarray(discount, jnp.result_type(float))
    return RandomTimes(jax.random.uniform(key, (steps,), gamma.dtype) >= gamma, gamma)


class Given(NamedTuple):
    """The arrays of a sequence, checked: `[T]`, or a scalar that stands for all steps (`values` is always `[T]`)."""

    values: Array
    v_next: Array
    rewards: Array
    discounts: Array
    closed: Array | None  # lets no credit through: truncated, padding, or the step before padding
    valid: Array | None
    times: RandomTimes | None


class Steps(NamedTuple):
    """What every target needs of a sequence, with all that must not be read taken out."""

    values: Array
    errors: Array  # r + γ V(x') - Q(x, a), over 1 - γ at a random time and zero elsewhere
    carry: Array  # what multiplies the following step's sum: γ, or zero where `cut`
    cut: Array
    valid: Array | None

    def kept(self, factor: Array) -> Array:
        """A factor of each step's error (`[T]`, or `[T, T]` for each start), with zeros in the padding."""
        return factor if self.valid is None else zero_where(~self.valid, factor)


def floats(name: str, value: ArrayLike, like: Array | None = None) -> Array:
    """A floating-point array, of the length of `like` if that is given, or a scalar."""
    array = jnp.asarray(value)
    array = array.astype(jnp.result_type(array, float))
    if like is None:
        if array.ndim != 1 or array.shape[0] == 0:
            raise ValueError(f"{name} must be a sequence [T] with T >= 1, but has shape {array.shape}.")
        return array
    return _of_length(name, array, like)


def _flags(name: str, value: ArrayLike | None, like: Array) -> Array | None:
    return None if value is None else _of_length(name, jnp.asarray(value, bool), like)


def _of_length(name: str, array: Array, like: Array) -> Array:
    if array.ndim and array.shape != like.shape:
        raise ValueError(
            f"{name} must have shape {like.shape}, one entry a step, but has shape {array.shape}."
        )
    return array


def _weights(value: ArrayLike, like: Array) -> Array:
    array = jnp.asarray(value)
    if array.ndim < 2:
        return floats("weights", array, like)
    if array.shape != 2 * like.shape:
        raise ValueError(
            f"weights must have shape {like.shape} or {2 * like.shape} ([start, step]), not {array.shape}."
        )
    return array.astype(jnp.result_type(array, float))


def _number(name: str, value: ArrayLike | None, like: Array) -> Array | None:
    array = None if value is None else jnp.asarray(value, like.dtype)
    if array is not None and array.ndim:
        raise ValueError(f"{name} must be a number, but has shape {array.shape}.")
    return array


def following(array: Array) -> Array:
    """What the next step has; a scalar is the same for all steps."""
    return shifted(array) if array.ndim else array


def checked(
    values: ArrayLike | None,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None,
    valid: ArrayLike | None,
    times: RandomTimes | None = None,
) -> Given:
    """Checks the arguments that all targets share. Without values, errors will be r + γ V(x')."""
    first = floats("values", values) if values is not None else jnp.zeros_like(floats("v_next", v_next))
    cut, kept = _flags("truncated", truncated, first), _flags("valid", valid, first)
    if kept is not None:
        beside = ~kept | ~following(kept)
        cut = beside if cut is None else cut | beside
    if times is not None:
        _of_length("times.stop", times.stop, first)
    return Given(
        first,
        floats("v_next", v_next, first),
        floats("rewards", rewards, first),
        floats("discounts", discounts, first),
        cut,
        kept,
        times,
    )


def steps_of(given: Given) -> Steps:
    """The steps of a sequence or of any part of it: this works entry by entry."""
    values, v_next, rewards, discounts, closed, valid, times = given
    if valid is not None:
        values, v_next, rewards, discounts = (
            zero_where(~valid, x) for x in (values, v_next, rewards, discounts)
        )
    cut = discounts == 0 if closed is None else (discounts == 0) | closed
    errors = rewards + discounts * zero_where(discounts == 0, v_next) - values
    if times is not None:
        gamma = times.discount
        errors = zero_where(~times.stop, errors / (1 - gamma))
        discounts = discounts / jnp.where(gamma == 0, 1, gamma)
        cut = cut | times.stop
    return Steps(values, errors, zero_where(cut, discounts), cut, valid)


def targets(form: Form, arrays: tuple, stop_gradient: bool, backend: Backend, in_loop: bool = False) -> Array:
    """The recursion whose terms `form` makes of the arrays, as a constant if so wished."""
    return recursion(form, jax.lax.stop_gradient(arrays) if stop_gradient else arrays, backend, in_loop)


def _multi_step_form(given: Given, following_trace: Array) -> tuple[Array, Array, Array, Array]:
    steps = steps_of(given)
    return steps.values, steps.errors, steps.carry * zero_where(steps.cut, following_trace), steps.cut


def _marginalized_form(given: Given, weights: Array, rhos: Array) -> tuple[Array, Array, Array, Array]:
    steps = steps_of(given)
    errors = steps.kept(weights) * (steps.kept(rhos) * steps.errors)
    return steps.values, errors, steps.carry, steps.cut


def _vtrace_form(
    given: Given,
    traces: Array,
    rhos: Array | None,  # None: the traces are the ratios of both
    clip: Array | None,
    rho_clip: Array | None,
    decay: Array | None,
) -> tuple[Array, Array, Array, Array]:
    steps = steps_of(given)
    rhos = traces if rhos is None else rhos
    if clip is not None:
        traces = jnp.minimum(traces, clip)
    if decay is not None:
        traces = decay * traces
    if rho_clip is not None:
        rhos = jnp.minimum(rhos, rho_clip)
    coefficients = steps.carry * zero_where(steps.cut, traces)
    return steps.values, steps.kept(rhos) * steps.errors, coefficients, steps.cut


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
        traces: `c(x_t, a_t)`, or one number for all. The first one of each episode is never read.
        truncated: where an episode was cut off: the step still bootstraps from `v_next`, and lets no credit
            through from what follows it in the array. The last step of the array is always such a step.
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
    given = checked(q, v_next, rewards, discounts, truncated, valid, times)
    later = following(floats("traces", traces, given.values))
    return targets(_multi_step_form, (given, later), stop_gradient, backend)


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

    Args:
        q: `Q(x_t, a_t)`, times 0 to T-1.
        v_next: `Q(x_{t+1}, π)`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode; nothing beyond such a step is read.
        weights: `[T, T]` with the weight of step `s` for start `t` at `[t, s]`; or `[T]`, the same for all
            starts; or a number. Pairs with `s < t`, or with the end of an episode in between, are never read.
        truncated: as in `multi_step`.
        valid: as in `multi_step`.
        times: random times; then the estimate is
            $Q + (1-\gamma)^{-1} w_{x_t,a_t}(x_\tau,a_\tau) \hat\Delta_\tau$.
        stop_gradient: as in `multi_step`.
        backend: as in `multi_step`; weights `[T, T]` are met row by row or all at once.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree.

    >>> q, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> rewards, discounts = jnp.ones(2), jnp.array([0.5, 0.0])
    >>> marginalized(q, v_next, rewards, discounts, weights=jnp.array([1.0, 0.8]))
    Array([1.6, 1.2], dtype=float32)
    >>> marginalized(q, v_next, rewards, discounts, weights=jnp.array([[1.0, 0.8], [jnp.nan, 1.0]]))
    Array([1.6, 1. ], dtype=float32)
    """
    given = checked(q, v_next, rewards, discounts, truncated, valid, times)
    return _marginalized(given, 1.0, weights, stop_gradient, backend)


def vtrace(
    v: ArrayLike,
    v_next: ArrayLike,
    rewards: ArrayLike,
    discounts: ArrayLike,
    traces: ArrayLike,
    rhos: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    clip: ArrayLike | None = None,
    rho_clip: ArrayLike | None = None,
    decay: ArrayLike | None = None,
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

    Args:
        v: `V(x_t)`, times 0 to T-1.
        v_next: `V(x_{t+1})`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode; nothing beyond such a step is read.
        traces: `c(x_t, a_t)`, usually min(c̄, π/μ); or one number for all.
        rhos: `ρ(x_t, a_t)`, usually min(ρ̄, π/μ); or one number for all.
        truncated: as in `multi_step`.
        clip: c̄. Then `traces` may be the ratios π/μ as they are: min(c̄, π/μ) is formed on the way, which spares
            a pass over the arrays.
        rho_clip: ρ̄, likewise for `rhos`.
        decay: λ, a factor of the traces after they are clipped.
        valid: as in `multi_step`.
        times: random times, as in `multi_step`.
        stop_gradient: as in `multi_step`.
        backend: as in `multi_step`.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree.

    >>> v, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> vtrace(v, v_next, jnp.ones(2), jnp.array([0.5, 0.0]), traces=jnp.array([0.8, 1.0]), rhos=1.0)
    Array([1.6, 1. ], dtype=float32)
    >>> ratios = jnp.array([3.0, 0.5])
    >>> vtrace(v, v_next, jnp.ones(2), jnp.array([0.5, 0.0]), ratios, ratios, clip=0.8, rho_clip=1.0)
    Array([1.8, 1.5], dtype=float32)
    """
    given = checked(v, v_next, rewards, discounts, truncated, valid, times)
    c = floats("traces", traces, given.values)
    rho = None if rhos is traces else floats("rhos", rhos, given.values)
    limits = (
        _number("clip", clip, c),
        _number("rho_clip", rho_clip, c if rho is None else rho),
        _number("decay", decay, c),
    )
    as_they_are = clip is not None and rho_clip is not None and valid is None
    return targets(_vtrace_form, (given, c, rho, *limits), stop_gradient, backend, in_loop=as_they_are)


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

    Args:
        v: `V(x_t)`, times 0 to T-1.
        v_next: `V(x_{t+1})`, for the successors of times 0 to T-1. Not read where `discounts` is 0.
        rewards: `r_t`, times 0 to T-1.
        discounts: γ, or 0 where step `t` ended the episode; nothing beyond such a step is read.
        weights: `w_{x_t}(x_s)`, `[T, T]` or `[T]`, as in `marginalized`.
        rhos: `ρ(x_t, a_t)`, or one number for all.
        truncated: as in `multi_step`.
        valid: as in `multi_step`.
        times: random times, as in `marginalized`.
        stop_gradient: as in `multi_step`.
        backend: as in `marginalized`.

    Returns:
        One target for every step.

    Raises:
        ValueError: if the shapes do not agree.

    >>> v, v_next = jnp.array([1.0, 2.0]), jnp.array([2.0, 9.0])
    >>> marginalized_vtrace(v, v_next, jnp.ones(2), jnp.array([0.5, 0.0]), jnp.array([1.0, 0.8]), rhos=1.0)
    Array([1.6, 1.2], dtype=float32)
    """
    given = checked(v, v_next, rewards, discounts, truncated, valid, times)
    return _marginalized(given, rhos, weights, stop_gradient, backend)


def _marginalized(given: Given, rhos, weights, stop_gradient: bool, backend: Backend) -> Array:
    rhos, w = floats("rhos", rhos, given.values), _weights(weights, given.values)
    if w.ndim < 2:
        return targets(_marginalized_form, (given, w, rhos), stop_gradient, backend)
    steps = steps_of(given)
    carry, cut = (jnp.broadcast_to(x, steps.values.shape) for x in (steps.carry, steps.cut))
    sums = from_every_start(steps.kept(rhos) * steps.errors, carry, cut, steps.kept(w), backend)
    target = steps.values + sums
    return jax.lax.stop_gradient(target) if stop_gradient else target
