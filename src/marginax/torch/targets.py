"""Targets for learning on tensors: every function of `marginax.targets`, batched, on CPU and CUDA, in pure PyTorch.

Time is the last dimension, `[..., T]`, and all dimensions before it are the batch. Say `dim=0` for `[T, B]`, or `dim=-2`
for `[B, T, 1]` as in torchrl. In a sequence `q[t] = Q(x_t, a_t)`, `v_next[t] = Q(x_{t+1}, π)`, `discounts[t]` is γ, or 0
where step `t` ended the episode, and a *truncated* step still bootstraps from `v_next[t]`, but its target does not
depend on what follows it in the array. What must not be read may be NaN; it reaches neither targets nor gradients.

Arguments are tensors of one shape, or numbers that stand for all steps. All targets are one `recursion`; the table
of its coefficients is in the documentation of `marginax.targets.recursion`.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from marginax import _checks as checks
from marginax.torch._recursion import check_dim, floats, recursion, shifted, tensor, torch, zero_where

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

__all__ = [
    "RandomTimes",
    "expectation",
    "marginalized",
    "marginalized_vtrace",
    "multi_step",
    "n_step",
    "peng",
    "random_times",
    "recursion",
    "select_actions",
    "traces_from_log_ratios",
    "vtrace",
]


class RandomTimes(NamedTuple):
    """Geometric random times, drawn by `random_times`; see `marginax.targets.RandomTimes`.

    >>> import torch
    >>> random_times(torch.Generator().manual_seed(0), (2, 5), discount=0.5).stop.shape
    torch.Size([2, 5])
    """

    stop: Tensor
    """Whether the coin of a step says stop."""
    discount: float
    """γ."""


def random_times(
    generator: "torch.Generator | None", shape: int | tuple[int, ...], discount: float
) -> RandomTimes:
    """Draws the random times of the paper's random-time estimates (Section 4.1).

    Args:
        generator: a `torch.Generator`, on whose device the coins are tossed, or None for the default one.
        shape: of the tensors that the targets take; a number T for one sequence.
        discount: γ in [0, 1).

    Returns:
        What the argument `times` of the targets takes.

    >>> import torch
    >>> times = random_times(None, 2, discount=0.9)
    >>> multi_step(torch.zeros(2), torch.ones(2), torch.ones(2), 0.9, 1.0, times=times).shape
    torch.Size([2])
    """
    checks.discount(discount)
    device = None if generator is None else generator.device
    given = shape if isinstance(shape, tuple | list) else (shape,)
    sizes = [checks.count("shape", size, least=0) for size in given]
    return RandomTimes(torch.rand(sizes, generator=generator, device=device) >= discount, discount)


class _Steps(NamedTuple):
    """What every target needs, time last, with all that must not be read replaced by zeros."""

    values: Tensor
    v_next: Tensor  # zero at cuts
    errors: Tensor  # r + γ V(x') - Q(x, a); divided by 1 - γ at a random time, and zero before it
    carry: Tensor  # γ, or zero at cuts
    cut: Tensor  # lets no credit through
    valid: Tensor | None
    shape: tuple[int, ...]  # as the user gave it
    dim: int
    stop_gradient: bool

    def tensor(self, name: str, value: Any) -> Tensor:
        """An argument of the shape of values, or a number, with time last."""
        return _time_last(name, floats(name, value, self.values), self.shape, self.dim)

    def kept(self, factor: Tensor) -> Tensor:
        """A factor of each step's error, with zeros in the padding."""
        return factor if self.valid is None else zero_where(~self.valid, factor)

    def result(self, target: Tensor) -> Tensor:
        target = target.movedim(-1, self.dim)
        return target.detach() if self.stop_gradient else target

    def target(self, b: Tensor, a: Tensor) -> Tensor:
        """`values + y` for the recursion with these coefficients."""
        return self.result(self.values + recursion(b, a, self.cut))


def _time_last(name: str, tensor: Tensor, shape: tuple[int, ...], dim: int) -> Tensor:
    """A tensor of that shape, or one number for all steps, with time moved from `dim` to the last dimension."""
    if tensor.ndim and tensor.shape != shape:
        raise ValueError(f"{name} must be a number or have shape {shape}, got {tuple(tensor.shape)}")
    return tensor.expand(shape).movedim(dim, -1)


def _steps(
    name: str,
    values: Any,
    v_next: Any,
    rewards: Any,
    discounts: Any,
    truncated: Any,
    valid: Any,
    times: RandomTimes | None,
    dim: int,
    stop_gradient: bool,
) -> _Steps:
    """Checks the arguments that all targets share; `values` go by a name. Those of "v_next" are zero: errors are r + γ V(x')."""
    first = floats(name, v_next if name == "v_next" else values)
    check_dim(name, first, dim)
    shape = tuple(first.shape)
    first = (torch.zeros_like(first) if name == "v_next" else first).movedim(dim, -1)

    def numbers(name: str, value: Any) -> Tensor:
        return _time_last(name, floats(name, value, first), shape, dim)

    def flags(name: str, value: Any) -> Tensor:
        return _time_last(name, tensor(name, value, first), shape, dim).bool()

    ahead, r, gamma = numbers("v_next", v_next), numbers("rewards", rewards), numbers("discounts", discounts)
    kept = None if valid is None else flags("valid", valid)
    if kept is not None:
        first, ahead, r, gamma = (zero_where(~kept, x) for x in (first, ahead, r, gamma))
    cut = ended = gamma == 0
    if truncated is not None:
        cut = cut | flags("truncated", truncated)
    if kept is not None:
        cut = cut | ~kept | ~shifted(kept)
    errors = r + gamma * zero_where(ended, ahead) - first
    if times is not None:
        if not isinstance(times, RandomTimes):
            raise ValueError("times must be what random_times returns.")
        stop = flags("times.stop", times.stop)
        errors = zero_where(~stop, errors / (1 - times.discount))
        gamma = gamma / (times.discount or 1)
        cut = cut | stop
    carry, ahead = zero_where(cut, gamma), zero_where(cut, ahead)
    return _Steps(first, ahead, errors, carry, cut, kept, shape, dim, stop_gradient)


def multi_step(
    q: Any,
    v_next: Any,
    rewards: Any,
    discounts: Any,
    traces: Any,
    truncated: Any = None,
    *,
    valid: Any = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Estimates the multi-step operator $\mathcal R^c Q$ at every step (Section 4.1).

    $$\hat{\mathcal R}^c Q(x_t,a_t) = Q(x_t,a_t) + \sum_{s \ge t} \gamma^{s-t} (c_{t+1} \cdots c_s)\,
    \hat\Delta_s, \qquad \hat\Delta_s = r_s + \gamma Q(x_{s+1}, \pi) - Q(x_s, a_s)$$

    The traces make the algorithm: 0 gives one-step targets, π/μ importance sampling, λ min(c̄, π/μ) Retrace, λπ tree
    backup, λ Harutyunyan's Q(λ).

    Args:
        q: `Q(x_t, a_t)`, `[..., T]`.
        v_next: `Q(x_{t+1}, π)`, the same shape. Not read where `discounts` is 0.
        rewards: `r_t`.
        discounts: γ, or 0 where step `t` ended the episode; nothing beyond such a step is read.
        traces: `c(x_t, a_t)`. The first one of each episode is never read.
        truncated: where an episode was cut off: the step still bootstraps from `v_next`, but its target does not depend on
            what follows it in the array. The last step is always such a step.
        valid: False for padding, which is never read; its targets are 0.
        times: random times, for the random-time estimate.
        stop_gradient: whether to detach the targets; otherwise every argument is differentiated through.
        dim: the dimension of time.

    Returns:
        One target for every step, of the shape of `q`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> import torch
    >>> q, v_next = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 9.0])
    >>> multi_step(q, v_next, torch.ones(2), torch.tensor([0.5, 0.0]), traces=torch.tensor([9.0, 0.8]))
    tensor([1.6000, 1.0000])
    """
    steps = _steps("q", q, v_next, rewards, discounts, truncated, valid, times, dim, stop_gradient)
    c = shifted(steps.tensor("traces", traces))
    return steps.target(steps.errors, steps.carry * zero_where(steps.cut, c))


def marginalized(
    q: Any,
    v_next: Any,
    rewards: Any,
    discounts: Any,
    weights: Any,
    truncated: Any = None,
    *,
    valid: Any = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Estimates the marginalized operator $\mathcal M^w Q$ at every step (Section 4.1).

    $$\hat{\mathcal M}^w Q(x_t,a_t) = Q(x_t,a_t) + \sum_{s \ge t} \gamma^{s-t} w_{x_t,a_t}(x_s,a_s)\,
    \hat\Delta_s$$

    `weights` are `w(x_s, a_s)` of the shape of `q`, the same for all starts; or they have one dimension more, the last,
    for the step `s`: `[..., T, T]` with the weight of step `s` for start `t` at `[..., t, s]` (`[T, B, T]` for `dim=0`).
    The other arguments are as in `multi_step`.

    >>> import torch
    >>> q, v_next = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 9.0])
    >>> marginalized(q, v_next, torch.ones(2), torch.tensor([0.5, 0.0]), weights=torch.tensor([1.0, 0.8]))
    tensor([1.6000, 1.2000])
    """
    steps = _steps("q", q, v_next, rewards, discounts, truncated, valid, times, dim, stop_gradient)
    return _marginalized(steps, steps.errors, weights)


def vtrace(
    v: Any,
    v_next: Any,
    rewards: Any,
    discounts: Any,
    traces: Any,
    rhos: Any,
    truncated: Any = None,
    *,
    valid: Any = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Estimates the V-trace operator $\mathcal R^{c,\rho} V$ at every step (the appendix on V-trace).

    $$\hat{\mathcal R}^{c,\rho} V(x_t) = V(x_t) + \sum_{s \ge t} \gamma^{s-t} (c_t \cdots c_{s-1})\,\rho_s
    \bigl(r_s + \gamma V(x_{s+1}) - V(x_s)\bigr)$$

    `v` is `V(x_t)`, `v_next` is `V(x_{t+1})`, `traces` are usually λ min(c̄, π/μ), of which the last one of each episode
    is never read, and `rhos` usually min(ρ̄, π/μ). The other arguments are as in `multi_step`.

    >>> import torch
    >>> v, v_next = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 9.0])
    >>> vtrace(v, v_next, 1.0, torch.tensor([0.5, 0.0]), traces=torch.tensor([0.8, 1.0]), rhos=1.0)
    tensor([1.6000, 1.0000])
    """
    steps = _steps("v", v, v_next, rewards, discounts, truncated, valid, times, dim, stop_gradient)
    c, rho = steps.tensor("traces", traces), steps.tensor("rhos", rhos)
    return steps.target(steps.kept(rho) * steps.errors, steps.carry * zero_where(steps.cut, c))


def marginalized_vtrace(
    v: Any,
    v_next: Any,
    rewards: Any,
    discounts: Any,
    weights: Any,
    rhos: Any,
    truncated: Any = None,
    *,
    valid: Any = None,
    times: RandomTimes | None = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Estimates the marginalized V-trace operator $\mathcal M^{w,\rho} V$ at every step (the appendix on V-trace).

    $$\hat{\mathcal M}^{w,\rho} V(x_t) = V(x_t) + \sum_{s \ge t} \gamma^{s-t} w_{x_t}(x_s)\,\rho_s
    \bigl(r_s + \gamma V(x_{s+1}) - V(x_s)\bigr)$$

    The arguments are those of `vtrace`, with weights as in `marginalized`.

    >>> import torch
    >>> v, v_next = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 9.0])
    >>> marginalized_vtrace(v, v_next, 1.0, torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.8]), rhos=1.0)
    tensor([1.6000, 1.2000])
    """
    steps = _steps("v", v, v_next, rewards, discounts, truncated, valid, times, dim, stop_gradient)
    return _marginalized(steps, steps.kept(steps.tensor("rhos", rhos)) * steps.errors, weights)


def _marginalized(steps: _Steps, errors: Tensor, weights: Any) -> Tensor:
    """Weighted sums of the errors; with weights for every start, `y[t, s]` is the error of step s seen from step t."""
    w, length = floats("weights", weights, steps.values), steps.values.shape[-1]
    if w.ndim <= len(steps.shape):
        return steps.target(steps.kept(steps.tensor("weights", w)) * errors, steps.carry)
    if w.shape != (*steps.shape, length):
        wanted = f"{steps.shape} or {(*steps.shape, length)}"
        raise ValueError(f"weights must have shape {wanted} (the step last), but has shape {tuple(w.shape)}.")
    w = w.movedim(steps.dim if steps.dim >= 0 else steps.dim - 1, -2)
    w = w if steps.valid is None else zero_where(~steps.valid[..., None, :], w)
    y = recursion(torch.diag_embed(errors), steps.carry[..., None], steps.cut[..., None], dim=-2)
    time, episode = torch.arange(length, device=w.device), steps.cut.cumsum(-1) - steps.cut.long()
    unreached = (time[:, None] > time) | (episode[..., :, None] != episode[..., None, :])
    return steps.result(steps.values + (zero_where(unreached, w) * y).sum(-1))


def peng(
    v_next: Any,
    rewards: Any,
    discounts: Any,
    traces: Any,
    truncated: Any = None,
    *,
    valid: Any = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Computes Peng's and Williams' Q(λ), which follows the actions taken as if π had taken them.

    $$G_t = r_t + \gamma \bigl((1 - c_{t+1})\, Q(x_{t+1},\pi) + c_{t+1} G_{t+1}\bigr)$$

    With `traces=λ` it is Peng's Q(λ), and with `traces=1` the uncorrected return. The other arguments are as in
    `multi_step`; `v_next` is a tensor.

    >>> import torch
    >>> peng(torch.tensor([2.0, 4.0]), 1.0, 0.5, traces=0.5)
    tensor([2.2500, 3.0000])
    """
    steps = _steps("v_next", None, v_next, rewards, discounts, truncated, valid, None, dim, stop_gradient)
    coefficients = steps.carry * zero_where(steps.cut, shifted(steps.tensor("traces", traces)))
    return steps.target(steps.errors - coefficients * steps.v_next, coefficients)


def n_step(
    v_next: Any,
    rewards: Any,
    discounts: Any,
    steps: int,
    truncated: Any = None,
    *,
    valid: Any = None,
    stop_gradient: bool = True,
    dim: int = -1,
) -> Tensor:
    r"""Computes uncorrected n-step targets, the usual choice where off-policy correction is neglected.

    $$G_t = r_t + \gamma r_{t+1} + \dots + \gamma^{n-1} r_{t+n-1} + \gamma^n Q(x_{t+n},\pi)$$

    shortened where the episode ends, is truncated or leaves the array before `n = steps` steps are through. The other
    arguments are as in `multi_step`; `v_next` is a tensor.

    >>> import torch
    >>> n_step(torch.tensor([2.0, 4.0]), 1.0, 0.5, steps=2)
    tensor([2.5000, 3.0000])
    """
    here = _steps("v_next", None, v_next, rewards, discounts, truncated, valid, None, dim, stop_gradient)
    last = here.cut.clone()
    last[..., -1] = True
    target, bootstrap = here.errors, zero_where(last, here.v_next)
    for _ in range(min(checks.count("steps", steps), last.shape[-1]) - 1):
        target = here.errors + here.carry * (zero_where(last, shifted(target)) - bootstrap)
    return here.result(target)


def _table(name: str, value: Any) -> Tensor:
    table = floats(name, value)
    if table.ndim == 0 or table.shape[-1] == 0:
        raise ValueError(f"{name} must have shape [..., A] with A >= 1, got {tuple(table.shape)}")
    return table


def select_actions(table: Tensor, actions: Tensor) -> Tensor:
    r"""Looks up `table[..., a]`, for example $Q(x_t, a_t)$ or $\pi(a_t|x_t)$.

    Args:
        table: `[..., A]`.
        actions: integers in `[0, A)` of any type, `[...]`; where one is out of range, NaN is returned.

    >>> import torch
    >>> select_actions(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, 0]))
    tensor([2., 3.])
    """
    table, actions = _table("table", table), tensor("actions", actions)
    if table.shape[:-1] != actions.shape:
        raise ValueError(f"actions must have shape {(*table.shape[:-1],)}, got {(*actions.shape,)}")
    if actions.is_floating_point():
        raise ValueError(f"actions must be whole numbers, got {actions.dtype}")
    actions = actions.long()
    chosen = actions.clamp(0, table.shape[-1] - 1)
    return table.gather(-1, chosen[..., None])[..., 0].masked_fill(chosen != actions, math.nan)


def expectation(table: Tensor, policy: Tensor) -> Tensor:
    r"""Averages over a policy's actions, $\sum_a \pi(a|x_t)\, Q(x_t,a)$, of two tensors `[..., A]`.

    >>> import torch
    >>> expectation(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([1.5000, 3.0000])
    """
    table, policy = _table("table", table), floats("policy", policy)
    if table.shape != policy.shape:
        raise ValueError(f"policy must have table's shape {tuple(table.shape)}, got {tuple(policy.shape)}")
    return (table * policy).sum(-1)


def traces_from_log_ratios(
    log_pi: Tensor, log_mu: Tensor, *, clip: float = 1.0, decay: float = 1.0, temperature: float = 1.0
) -> Tensor:
    r"""Computes $c = \lambda \min\{\bar c, (\pi/\mu)^\kappa\}$ from log-probabilities or log-densities.

    The ratio is capped before it is exponentiated, so nothing overflows and derivatives are finite. Where π has no mass
    the trace is 0; where only μ has none it is the clip; where both are infinite alike the ratio is 1. The ρ of V-trace
    is made in the same way.

    Args:
        log_pi: $\log \pi(a_t|x_t)$, any shape, -inf and inf allowed.
        log_mu: $\log \mu(a_t|x_t)$, likewise.
        clip: $\bar c \ge 0$, which may be `math.inf`.
        decay: λ.
        temperature: the exponent κ > 0.

    >>> import torch
    >>> traces_from_log_ratios(torch.tensor([0.0, 500.0, -math.inf]), torch.tensor([0.0, -500.0, 0.0]), decay=0.5)
    tensor([0.5000, 0.5000, 0.0000])
    """
    checks.at_least("clip", clip, 0, infinite=True)
    checks.at_least("decay", decay, 0)
    checks.positive("temperature", temperature)
    log_pi, log_mu = floats("log_pi", log_pi), floats("log_mu", log_mu)
    try:
        log_pi, log_mu = torch.broadcast_tensors(log_pi, log_mu)
    except RuntimeError:
        raise ValueError(
            f"log_mu must fit the shape {tuple(log_pi.shape)}, got {tuple(log_mu.shape)}"
        ) from None
    largest = torch.finfo(torch.result_type(log_pi, log_mu)).max
    impossible = log_pi == -math.inf
    alike = (log_pi == log_mu) & ~impossible
    far = math.sqrt(largest)  # stands for infinity, times which a derivative of zero is zero
    difference = (log_pi - log_mu).masked_fill(alike | impossible, 0).clamp(-far, far)
    limit = min(math.log(clip) if clip > 0 else -math.inf, 0.99 * math.log(largest))
    return decay * (temperature * difference).clamp(max=limit).exp().masked_fill(impossible, 0)
