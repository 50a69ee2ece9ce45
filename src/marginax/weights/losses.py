r"""TD weights with function approximation: losses on one sequence, for use in any JAX code.

Each loss takes the outputs of networks for the pairs $(x_t, a_t)$ of a sequence that starts at $(x_0, a_0)$, and
returns a scalar to differentiate. For batches, use `jax.vmap` and take the mean. If the networks also see the start pair,
they estimate $w^c_{x_0,a_0}(x_t,a_t)$; otherwise they estimate its average over starts.

| argument: a JAX or NumPy array `[T]`, or a list | |
|---|---|
| `weights` | $w(x_t, a_t)$ |
| `critic` | the adversary's value of $(x_t, a_t)$ |
| `traces` | $c(x_t, a_t)$; the first is never read |
| `discounts` | γ, or 0 where step `t` ended the episode |
| `truncated` | steps after which the sequence does not go on; none when omitted |

Time runs as in `marginax.targets`, and nothing after a truncated or terminal step is read. A sequence of
length T has no data of later times, so traces count as zero from T on. The weights are therefore those of
the T-step operator, $w = E[C_\tau \mid x_0, a_0, x_\tau, a_\tau, \tau < T]$; as T grows they become the paper's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks


def cumulative(traces: ArrayLike, cut: ArrayLike | None = None) -> tuple[Float[Array, "T"], Bool[Array, "T"]]:
    r"""The products $C_t = c_1 \cdots c_t$, with $C_0 = 1$, and which steps come before a cut.

    Args:
        traces: $c(x_t, a_t)$; the first is never read.
        cut: Steps after which the sequence does not go on.

    Returns:
        $C_t$, zero after a cut, and whether the sequence reaches step `t`.

    >>> cumulative(jnp.array([9.0, 0.5, 0.5]))[0]
    Array([1.  , 0.5 , 0.25], dtype=float32)
    """
    (traces,) = _sequences(traces=traces)
    first = jnp.ones_like(traces[:1])
    reached = jnp.ones(traces.shape, bool)
    if cut is not None:
        reached = jnp.concatenate([first > 0, jnp.cumprod(~_flags("cut", cut, traces)[:-1], dtype=bool)])
    factors = jnp.concatenate([first, traces[1:]])
    return jnp.cumprod(jnp.where(reached, factors, 0)), reached


def regression(
    weights: ArrayLike,
    traces: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None = None,
) -> Float[Array, ""]:
    r"""Least squares on the products of traces.

    $$\sum_t \gamma^t \bigl(w(x_t, a_t) - C_t\bigr)^2$$

    Its minimiser is $E[C_\tau \mid x_\tau, a_\tau]$ under a geometric time τ, which is $w^c$: no adversary needed.

    >>> regression(jnp.array([1.0, 0.25]), jnp.array([1.0, 0.5]), jnp.full(2, 0.5))
    Array(0.03125, dtype=float32)
    """
    weights, traces, discounts = _sequences(weights=weights, traces=traces, discounts=discounts)
    seen = _read(traces, discounts, truncated)
    return jnp.sum(seen.powers * jnp.where(seen.reached, weights - seen.products, 0) ** 2)


def deviance(
    scores: ArrayLike,
    products: ArrayLike,
    power: float | int,
    shift: float | int = 0.0,
) -> Float[Array, "*shape"]:
    r"""A loss of $u = e^f$ on products of traces C, whose average is least where u is the mean of C.

    $$\frac{C u^{1-p}}{p-1} + \frac{u^{2-p}}{2-p}, \qquad \frac{C}{u} + \log u \text{ for } p = 2, \qquad
    u - C \log u \text{ for } p = 1$$

    Its derivative by u is $u^{-p}(u - C)$, so for every power p the mean of C is its only stationary point. p = 0 is
    least squares, p = 1 Poisson's deviance, 1 < p < 2 Tweedie's deviance, and p = 2 the gamma deviance, which does not
    depend on scale. Products have heavy tails; a larger p gives errors at large u less weight. For p = 2 a product of
    zero leaves the loss unbounded below. A positive `shift` s compares u + s to C + s. This does not move the minimum and
    bounds the loss below; for p = 2 its derivative by f then lies between -C / (4s) and 1.

    Args:
        scores: f.
        products: C, not negative.
        power: p.
        shift: s, not negative; it must be positive for p = 2 if a product may be zero.

    >>> deviance(jnp.log(jnp.array([1.0, 2.0, 4.0])), jnp.full(3, 2.0), power=2)
    Array([2.       , 1.6931472, 1.8862944], dtype=float32)
    """
    scores, products = jnp.asarray(scores), jnp.asarray(products)
    checks.number("power", power)
    if checks.at_least("shift", shift, 0.0):
        scores, products = jnp.logaddexp(scores, jnp.log(shift)), products + shift
    if power == 1:
        return jnp.exp(scores) - products * scores
    if power == 2:
        return products * jnp.exp(-scores) + scores
    fit = products * jnp.exp((1 - power) * scores) / (power - 1)
    size = jnp.exp((2 - power) * scores) / (2 - power)
    return fit + size


def path_deviance(
    scores: ArrayLike,
    traces: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None = None,
    *,
    power: float | int = 1.0,
    mixture: float | int = 1.0,
    shift: float | int = 0.01,
    bootstrap: ArrayLike | None = None,
) -> Float[Array, ""]:
    r"""The loss of $u(x_t \mid x_0, a_0) = e^{f_t}$, the mean product of the traces on the way to $x_t$.

    $$\sum_{t \ge 2} \gamma^t\, d_p\bigl(f_t, G_t\bigr), \qquad
    G_{t+1} = c_t \bigl((1 - \kappa)\, u(x_t) + \kappa\, G_t\bigr), \qquad G_1 = 1$$

    The mixture κ = 1 is regression on the products $c_1 \cdots c_{t-1}$ themselves. κ = 0 is reverse-time TD, which
    bootstraps from the state before and needs no product. No gradient flows through the bootstrap. With clips above 1,
    reverse-time TD needs a bounded and delayed $u(x_t)$: no product exceeds $\bar c^{t-1}$, but a bootstrapped one may.

    Under a Markov behaviour policy $w = u\,c$ away from the start pair, so the last trace need not be learned. The decay λ
    of the traces is known as well: leave it out here, and multiply by $\lambda^t$ where u is used.

    Args:
        scores: $f_t$. At t = 0 and 1 no trace lies on the way, so u is 1, and these two scores are not read: f learns the
            mean over times t ≥ 2.
        traces: As in the table of this module.
        discounts: As in the table.
        truncated: As in the table.
        power: p of `deviance`.
        mixture: κ, from 0 to 1.
        shift: s of `deviance`.
        bootstrap: $u(x_t)$ of a target network to bootstrap from; when omitted, $e^{f_t}$.

    >>> traces, discounts = jnp.array([9.0, 0.5, 0.5, 9.0]), jnp.ones(4)
    >>> f = jnp.log(jnp.array([1.0, 1.0, 0.5, 0.25]))
    >>> bool(jnp.abs(jax.grad(path_deviance)(f, traces, discounts)).max() < 1e-6)
    True
    """
    if isinstance(mixture, int | float):  # not where it is traced
        checks.fraction("mixture", mixture)
    scores, traces, discounts = _sequences(scores=scores, traces=traces, discounts=discounts)
    seen = _read(traces, discounts, truncated)
    known = (jnp.arange(len(scores)) < 2) | ~seen.reached
    scores = jnp.where(known, 0, scores)
    traces = jnp.where(seen.reached, traces, 0)

    def step(product: Array, each: tuple[Array, Array]) -> tuple[Array, Array]:
        trace, u = each
        return trace * ((1 - mixture) * u + mixture * product), product

    one = jnp.ones_like(scores[0])
    u = jnp.exp(scores) if bootstrap is None else _sequences(scores=scores, bootstrap=bootstrap)[1]
    u = jax.lax.stop_gradient(jnp.where(known, 1, u))
    _, products = jax.lax.scan(step, one, (traces[1:], u[1:]), unroll=min(16, len(scores)))
    each = deviance(scores, jnp.concatenate([one[None], products]), power, shift)
    return jnp.sum(seen.powers * jnp.where(known, 0, each))


def saddle_point(
    weights: ArrayLike,
    critic: ArrayLike,
    traces: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None = None,
) -> Float[Array, ""]:
    r"""The violation of the weights' balance equation, measured by a critic (the paper's $\hat L$, corrected).

    $$\hat L = q(x_0,a_0) + \sum_t \gamma^t w(x_t,a_t) \bigl(\gamma c_{t+1} q(x_{t+1},a_{t+1}) - q(x_t,a_t)\bigr)$$

    without the constant factor $1-\gamma$. For $w_t = C_t$ it is zero for every critic.

    Minimise it over the weights, usually the softplus of a network, and maximise it over the critic, usually a tanh.

    >>> traces = jnp.array([1.0, 0.5])
    >>> saddle_point(jnp.array([1.0, 0.5]), jnp.array([0.5, -0.5]), traces, jnp.full(2, 0.5))
    Array(0., dtype=float32)
    """
    weights, critic, traces, discounts = _sequences(
        weights=weights, critic=critic, traces=traces, discounts=discounts
    )
    seen = _read(traces, discounts, truncated)
    kept = jnp.where(seen.reached, weights, 0)
    return critic[0] - jnp.sum(seen.powers * kept * _differences(critic, traces, discounts, seen))


def penalty(scores: ArrayLike, discounts: ArrayLike, truncated: ArrayLike | None = None) -> Float[Array, ""]:
    r"""A penalty of the critic's output before its tanh, $\tfrac12 \sum_t \gamma^t s_t^2$: subtract it from the saddle point.

    Without it, plain ascent ends in a critic with one sign everywhere, and a saturated tanh has no gradient. At the
    solution the saddle point's loss is zero for every critic, so the zero critic is optimal, and the penalty does not
    move the solution.

    `scores` are $s_t$, with $q(x_t, a_t) = \tanh s_t$.

    >>> penalty(jnp.array([2.0, 1.0]), jnp.full(2, 0.5))
    Array(2.25, dtype=float32)
    """
    scores, discounts = _sequences(scores=scores, discounts=discounts)
    seen = _read(scores, discounts, truncated)
    return 0.5 * jnp.sum(seen.powers * jnp.where(seen.reached, scores, 0) ** 2)


def fenchel(
    weights: ArrayLike,
    critic: ArrayLike,
    traces: ArrayLike,
    discounts: ArrayLike,
    truncated: ArrayLike | None = None,
) -> Float[Array, ""]:
    r"""The Fenchel dual form of DualDICE with target policy $\tilde\pi = c\mu$ (the paper's appendix).

    $$\sum_t \gamma^t \Bigl[ \bigl(v(x_t,a_t) - \gamma c_{t+1} v(x_{t+1},a_{t+1})\bigr) w(x_t,a_t)
    - \tfrac12 w(x_t,a_t)^2 \Bigr] - v(x_0,a_0)$$

    without the constant factor $1-\gamma$. Minimise it over the critic v and maximise it over the weights, the paper's ψ.
    Leave both unbounded, so that weights of zero can be learned.

    >>> fenchel(jnp.array([1.0, 0.5]), jnp.zeros(2), jnp.array([1.0, 0.5]), jnp.full(2, 0.9))
    Array(-0.6125, dtype=float32)
    """
    weights, critic, traces, discounts = _sequences(
        weights=weights, critic=critic, traces=traces, discounts=discounts
    )
    seen = _read(traces, discounts, truncated)
    kept = jnp.where(seen.reached, weights, 0)
    errors = _differences(critic, traces, discounts, seen)
    return jnp.sum(seen.powers * (errors * kept - kept**2 / 2)) - critic[0]


def normalise(weights: ArrayLike, valid: ArrayLike, power: float | int = 1.0) -> Float[Array, "*batch"]:
    r"""Weights of a batch raised to a power and divided by their mean: $\tilde w_j = w_j^T / \mathrm{mean}_k w_k^T$.

    The paper divides by the sum and multiplies the target by $(1-\gamma)^{-1}$, which is the same at
    batch size 100 and γ = 0.99.

    Args:
        weights: Weights of any shape; those below 1e-8 count as 1e-8.
        valid: Which of the weights count, of the same shape; the others are returned as zero.
        power: The paper's T.

    Returns:
        Weights whose mean over the valid entries is one.

    >>> normalise(jnp.array([1.0, 3.0, 9.0]), jnp.array([True, True, False]))
    Array([0.5, 1.5, 0. ], dtype=float32)
    """
    weights = jnp.asarray(weights)
    valid = _flags("valid", valid, weights)
    checks.number("power", power)
    raised = jnp.where(valid, jnp.maximum(weights, 1e-8) ** power, 0)
    count = jnp.sum(valid)
    total = jnp.where(count > 0, jnp.sum(raised), 1)
    return raised / (total / jnp.maximum(count, 1))


class _Read(NamedTuple):
    r"""The part of a sequence that a loss may read: the steps before its first cut.

    Attributes:
        products: $C_t$, zero after the cut.
        powers: $\gamma^t$, zero after the cut.
        reached: Which steps the sequence reaches.
        cut: The steps after which the sequence does not go on, and those that it does not reach.
    """

    products: Array
    powers: Array
    reached: Array
    cut: Array


def _sequences(**arrays: ArrayLike) -> list[Array]:
    """The arguments of a loss as floating-point arrays of one length `[T]`."""
    found: list[Array] = []
    for name, value in arrays.items():
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} must be an array of real numbers, got {type(value).__name__}") from None
        if array.dtype.kind == "c":
            raise ValueError(f"{name} must be an array of real numbers, got {array.dtype}")
        found.append(array.astype(jnp.result_type(array, float)))
        if array.ndim != 1 or array.size == 0 or array.shape != found[0].shape:
            wanted = (
                f"{found[0].shape}, that of {next(iter(arrays))}" if len(found) > 1 else "[T] with T >= 1"
            )
            raise ValueError(f"{name} must have shape {wanted}, got {array.shape}; jax.vmap makes batches")
    return found


def _flags(name: str, value: ArrayLike, like: Array) -> Array:
    """An array of truth values, of the shape of another."""
    flags = jnp.asarray(value, bool)
    if flags.shape != like.shape:
        raise ValueError(f"{name} must have shape {like.shape}, one entry per step, got {flags.shape}")
    return flags


def _read(traces: Array, discounts: Array, truncated: ArrayLike | None) -> _Read:
    """Which part of a sequence may be read, with its products of traces and powers of γ."""
    cut = (discounts == 0).at[-1].set(True)
    cut = cut if truncated is None else cut | _flags("truncated", truncated, discounts)
    products, reached = cumulative(traces, cut)
    cut = cut | ~reached
    powers = jnp.cumprod(jnp.where(cut, 0, discounts)[:-1])
    return _Read(products, jnp.concatenate([jnp.ones_like(discounts[:1]), powers]), reached, cut)


def _differences(values: Array, traces: Array, discounts: Array, seen: _Read) -> Array:
    """The value at t minus γ c_{t+1} times the value at t + 1, which counts as zero where the sequence does not go on."""
    following = jnp.concatenate([traces[1:] * values[1:], jnp.zeros_like(values[:1])])
    successor = jnp.where(seen.cut, 0, discounts * jnp.where(seen.cut, 0, following))
    return jnp.where(seen.reached, values - successor, 0)
