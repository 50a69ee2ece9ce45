"""TD weights by duality: the saddle point of the paper's loss (Section 5), and DualDICE's (the appendix on Fenchel duality).

One solver serves both, many starts side by side. Each column of its arrays is a problem (a start) of the form

    min over |y| ≤ critic_bound   max over low ≤ x ≤ high    x·My - ½ Σ h x² - b·y .

With ``h = 0`` this is the paper's ``min_w max_q L(q, w)`` with its sign turned, x the weights and y the critic; with ``h > 0`` it
is the extension of DualDICE, x its ψ and y its v. The method is the primal-dual hybrid gradient of Chambolle and Pock with
diagonal steps (Pock and Chambolle, 2011: with ``τ_j = 1 / Σ_i |M_ij|`` and ``σ_i = 1 / Σ_j |M_ij|`` it converges for every M),
averaging of the iterates, and restarts from the average, which turn its O(1/k) into a linear rate on problems like these
(Applegate et al., 2023).
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax._solve import Resolvent
from marginax.trajectories import Trajectory
from marginax.weights._data import features_of
from marginax.weights._model import EstimateInfo, Model, model_of

__all__ = ["fenchel", "saddle_point"]

CHECK_EVERY = 20
"""Iterations between looks at the duality gap."""

BLOCK = 64
"""Starts that are solved side by side: few enough for the cache, and for quick ones not to wait for slow ones."""


def saddle_point(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    on_states: bool = False,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    features: ArrayLike | None = None,
    critic_features: ArrayLike | None = None,
    radius: float = 100.0,
    tolerance: float = 1e-7,
    max_iterations: int = 50_000,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights by $\min_w \max_{|q| \le 1} L(q, w)$ with the empirical loss (Section 5), for every start $(x,a)$

    $$
    L(q, w) = (1-γ)\, q(x,a) + \mathbb{E}_{(x',a') \sim \hat d^μ_{x,a}}\left[w(x',a') \left(γ\, \hat{\mathbb{E}}[q(x'',\tilde{\pi})]
        - q(x',a')\right)\right], \qquad \tilde{\pi} = cμ .
    $$

    Visitations and expectations are those of the empirical MDP of `certainty_equivalence`: as tables, the two agree. The critic
    lives on the hypercube, so the maximum is the $L^1$ norm of the balance equation's residual.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: a pair `(x, a)`, or a state if `on_states`: only its row.
        on_states: whether to return weights between states, for V-trace: $w(x')$, $q(x')$, the kernel
            $\sum_a c(x,a)\, μ(a|x)\, \hat p(x'|x,a)$ and features `[S, k]`.
        mu: the behaviour policy; when omitted, as logged; when not logged, action frequencies.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, as for `certainty_equivalence`.
        features: `[S, A, k]`: the weights of each start are linear in them. Tables when omitted.
        critic_features: `[S, A, k]` of the critic; the same as `features` when omitted.
        radius: with features, a bound on each whitened coefficient, and so on the size of the weights.
        tolerance: the duality gap at which to stop, in units of the loss (which has a factor `1-γ`).
        max_iterations: after which a warning says that the gap is still larger.
        return_info: whether to return an `EstimateInfo` too: iterations, gap, and where μ came from.

    Returns:
        `w` of shape `[S, A, S, A]`, on states `[S, S]`; `[S, A]` or `[S]` for one start. With `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> saddle_point(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(2)
    array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]])
    """
    model = model_of(trajectories, c, mu, discount, prior, start, on_states, all_states=features is not None)
    return _estimate(
        model, features, critic_features, radius, tolerance, max_iterations, return_info, quadratic=False
    )


def fenchel(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    on_states: bool = False,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    features: ArrayLike | None = None,
    critic_features: ArrayLike | None = None,
    radius: float = 100.0,
    tolerance: float = 1e-7,
    max_iterations: int = 50_000,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights as the ψ of DualDICE's saddle point with target $\tilde{\pi} = cμ$, for every start $(x,a)$

    $$
    \min_v \max_ψ\ \mathbb{E}_{(x',a') \sim \hat d^μ_{x,a}}\left[\left(v(x',a') - γ\, \hat{\mathbb{E}}[v(x'',\tilde{\pi})]\right) ψ(x',a')
        - \tfrac12 ψ(x',a')^2\right] - (1-γ)\, v(x,a) .
    $$

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: as for `saddle_point`, like all that follow.
        on_states: weights between states, for V-trace.
        mu: the behaviour policy.
        discount: γ.
        prior: pseudo-counts.
        features: `[S, A, k]` of ψ; tables when omitted.
        critic_features: `[S, A, k]` of v; the same as `features` when omitted.
        radius: with features, `radius / (1-γ)` bounds each coefficient of v; ψ is not bounded.
        tolerance: the duality gap at which to stop.
        max_iterations: after which a warning says that the gap is still larger.
        return_info: whether to return an `EstimateInfo` too.

    Returns:
        What `saddle_point` returns.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> fenchel(batch, mx.traces.retrace(pi, mu), start=(0, 0)).round(2)
    array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]])
    """
    model = model_of(trajectories, c, mu, discount, prior, start, on_states, all_states=features is not None)
    return _estimate(
        model, features, critic_features, radius, tolerance, max_iterations, return_info, quadratic=True
    )


def _estimate(
    model: Model,
    features: ArrayLike | None,
    critic_features: ArrayLike | None,
    radius: float,
    tolerance: float,
    max_iterations: int,
    return_info: bool,
    *,
    quadratic: bool,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    """What `saddle_point` returns; with ``quadratic`` what `fenchel` returns."""
    tolerance = checks.positive("tolerance", tolerance)
    iterations = checks.count("max_iterations", max_iterations)
    if features is not None:
        phi = _features("features", features, model)
        psi = phi if critic_features is None else _features("critic_features", critic_features, model)
        estimate = partial(_linear, model, phi, psi, checks.positive("radius", radius))
    elif critic_features is None:
        estimate = partial(_tabular, model)
    else:
        raise ValueError("critic_features needs features: without, both weights and critic are tables")
    visitation = (1 - model.mdp.discount) * np.atleast_2d(model.credit(model.behaviour))
    starts = np.arange(len(visitation)) if model.start is None else np.array([model.start])
    blocks = max(1, len(starts) // BLOCK)
    found = []
    for block, rows in zip(np.array_split(starts, blocks), np.array_split(visitation, blocks), strict=True):
        found.append(estimate(block, rows, quadratic, tolerance, iterations))
    table = np.concatenate([weights for weights, _ in found])
    info = model.info._replace(
        iterations=max(solution.iterations for _, solution in found),
        gap=max(solution.gap for _, solution in found),
    )
    weights = model.spread(table if model.start is None else table[0])
    return (weights, info) if return_info else weights


class _Problem(NamedTuple):
    """Columns of saddle-point problems; ``[k, m]`` for y and ``[n, m]`` for x, or what broadcasts to these."""

    forward: Callable[[FloatArray], FloatArray]
    """y -> My."""
    adjoint: Callable[[FloatArray], FloatArray]
    """x -> M^T x."""
    row_sums: FloatArray
    """``Σ_j |M_ij|``, ``[n, m]`` or ``[n, 1]``, or an upper bound."""
    column_sums: FloatArray
    """``Σ_i |M_ij|``, likewise for y."""
    b: FloatArray
    h: FloatArray | float
    low: float
    high: float
    critic_bound: float
    """Infinite: no bound; in the gap it is then twice the largest entry of y so far."""


class _Solution(NamedTuple):
    """The point with the smallest gap, and that gap."""

    x: FloatArray
    y: FloatArray
    iterations: int
    gap: float


def _deltas(model: Model, starts: np.ndarray, size: int) -> FloatArray:
    """``(1-γ) δ`` of every start, one column per start."""
    columns = np.zeros((size, len(starts)))
    columns[starts, np.arange(len(starts))] = 1 - model.mdp.discount
    return columns


def _tabular(
    model: Model,
    starts: np.ndarray,
    visitation: FloatArray,
    quadratic: bool,
    tolerance: float,
    iterations: int,
) -> tuple[FloatArray, _Solution]:
    """Unknown is ``x = d^μ ∘ w``, which makes M the same for all starts: steps of size 1/d^μ in w."""
    gamma, kernel = model.mdp.discount, model.kernel(model.traced)
    transposed = kernel.T if isinstance(kernel, np.ndarray) else kernel.T.tocsr()
    ones = np.ones(kernel.shape[0])
    d = visitation.T
    problem = _Problem(
        forward=lambda y: y - gamma * (kernel @ y),
        adjoint=lambda x: x - gamma * (transposed @ x),
        row_sums=(1 + gamma * (kernel @ ones))[:, None],
        column_sums=(1 + gamma * (transposed @ ones))[:, None],
        b=_deltas(model, starts, kernel.shape[0]),
        h=1 / np.maximum(d, 1e-12) if quadratic else 0.0,
        low=-np.inf if quadratic else 0.0,
        high=np.inf if quadratic else max(1.0, _most_traced(model)),
        critic_bound=np.inf if quadratic else 1.0,
    )
    solution = _solve(problem, tolerance, iterations)
    return np.divide(solution.x, d, out=np.zeros_like(d), where=d > 0).T, solution


def _linear(
    model: Model,
    phi: FloatArray,
    psi: FloatArray,
    radius: float,
    starts: np.ndarray,
    visitation: FloatArray,
    quadratic: bool,
    tolerance: float,
    iterations: int,
) -> tuple[FloatArray, _Solution]:
    """Unknowns are coefficients, for the weights in coordinates in which ``Σ x² = E_{d^μ}[w²]``."""
    gamma, kernel = model.mdp.discount, model.kernel(model.traced)
    bellman = psi - gamma * (kernel @ psi)
    matrices = _moments(visitation, phi, bellman)
    gram = _moments(visitation, phi, phi)
    size = phi.shape[1]
    ridge = 1e-10 * np.trace(gram, axis1=1, axis2=2) / size + 1e-300
    root = np.linalg.cholesky(gram + ridge[:, None, None] * np.eye(size))
    whitened = np.linalg.solve(root, matrices)
    problem = _Problem(
        forward=lambda y: np.einsum("mij,jm->im", whitened, y, optimize=True),
        adjoint=lambda x: np.einsum("mij,im->jm", whitened, x, optimize=True),
        row_sums=np.abs(whitened).sum(axis=2).T,
        column_sums=np.abs(whitened).sum(axis=1).T,
        b=psi.T @ _deltas(model, starts, phi.shape[0]),
        h=1.0 if quadratic else 0.0,
        low=-np.inf if quadratic else -radius,
        high=np.inf if quadratic else radius,
        critic_bound=radius / (1 - gamma) if quadratic else 1.0,
    )
    solution = _solve(problem, tolerance, iterations)
    coefficients = np.linalg.solve(np.swapaxes(root, 1, 2), solution.x.T[:, :, None])[:, :, 0]
    return coefficients @ phi.T, solution


def _most_traced(model: Model) -> float:
    """The largest total mass ``(1-γ) E[Σ_t γ^t C_t]`` that the traces keep from any start; at most 1 for 0 ≤ c ≤ π/μ."""
    discount = model.mdp.discount
    paths = Resolvent(model.mdp.state_kernel(model.traced), discount)
    if model.on_states:
        return float((1 - discount) * paths(np.ones(len(model.states))).max())
    after = model.mdp.expect_next(paths(model.traced.sum(axis=1)))
    return float((1 - discount) * (1 + discount * after.max()))


def _moments(weights: FloatArray, left: FloatArray, right: FloatArray) -> FloatArray:
    """``Σ_n weights[m, n] left[n, i] right[n, j]``, ``[m, i, j]``."""
    products = left[:, :, None] * right[:, None, :]
    return (weights @ products.reshape(len(left), -1)).reshape(len(weights), *products.shape[1:])


def _features(name: str, value: Any, model: Model) -> FloatArray:
    shape = (model.num_states,) if model.on_states else (model.num_states, model.behaviour.shape[1])
    features = features_of(name, value, shape)
    return features.reshape(-1, features.shape[-1])


def _solve(problem: _Problem, tolerance: float, max_iterations: int) -> _Solution:
    """Solves all columns until the largest duality gap is at most ``tolerance``; warns where it is not reached."""
    b = problem.b
    x, y = np.zeros((problem.row_sums.shape[0], b.shape[1])), np.zeros(b.shape)
    sigma, tau = 1 / np.maximum(problem.row_sums, 1e-300), 1 / np.maximum(problem.column_sums, 1e-300)
    balance = np.ones(b.shape[1])  # between the step sizes of x and y, learned at each restart
    from_x, from_y, from_gap = x, y, _duality_gap(problem, x, y)
    sum_x, sum_y, since = np.zeros_like(x), np.zeros_like(y), np.zeros(b.shape[1])
    for iteration in range(1, max_iterations + 1):
        x, y = _step(problem, x, y, sigma / balance, balance * tau)
        sum_x, sum_y, since = sum_x + x, sum_y + y, since + 1
        if iteration % CHECK_EVERY and iteration < max_iterations:
            continue
        best_x, best_y, gap = _better(problem, (x, y), (sum_x / since, sum_y / since))
        if gap.max() <= tolerance:
            break
        # Restart from the better point if the gap fell far since the last restart. If that was long ago, a small fall is enough,
        # and after the first iterations none is needed.
        long = since >= 0.36 * iteration
        restart = (gap <= 0.2 * from_gap) | (
            long & ((gap <= 0.8 * from_gap) | (iteration > 10 * CHECK_EVERY))
        )
        if restart.any():
            moved = _rebalanced(balance, best_x - from_x, best_y - from_y)
            balance = np.where(restart, moved, balance)
            x, y = np.where(restart, best_x, x), np.where(restart, best_y, y)
            from_x, from_y = np.where(restart, x, from_x), np.where(restart, y, from_y)
            from_gap = np.where(restart, gap, from_gap)
            sum_x, sum_y, since = (np.where(restart, 0.0, s) for s in (sum_x, sum_y, since))
    else:
        warnings.warn(
            f"the saddle point was not reached in {max_iterations} iterations: the duality gap is {gap.max():.3g} and not "
            f"{tolerance:.3g}",
            stacklevel=5,  # the call of saddle_point or fenchel, which _estimate and _tabular (or _linear) lie below
        )
    return _Solution(best_x, best_y, iteration, float(gap.max()))


def _step(
    problem: _Problem, x: FloatArray, y: FloatArray, sigma: FloatArray, tau: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """One step of the primal-dual hybrid gradient: y down, then x up from where y is about to go."""
    new_y = np.clip(y - tau * (problem.adjoint(x) - problem.b), -problem.critic_bound, problem.critic_bound)
    new_x = (x + sigma * problem.forward(2 * new_y - y)) / (1 + sigma * problem.h)
    return np.clip(new_x, problem.low, problem.high), new_y


def _better(
    problem: _Problem, last: tuple[FloatArray, FloatArray], mean: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """For each column x and y of the last iterate or of the mean of iterates, whichever has the smaller duality gap, and that gap."""
    gap_last, gap_mean = _duality_gap(problem, *last), _duality_gap(problem, *mean)
    use_mean = gap_mean < gap_last
    x, y = (np.where(use_mean, m, z) for m, z in zip(mean, last, strict=True))
    return x, y, np.where(use_mean, gap_mean, gap_last)


def _rebalanced(balance: FloatArray, moved_x: FloatArray, moved_y: FloatArray) -> FloatArray:
    """The geometric mean of the balance and of |Δy| / |Δx|, the ratio of the distances moved; unchanged where one of them is zero."""
    distance_x, distance_y = np.linalg.norm(moved_x, axis=0), np.linalg.norm(moved_y, axis=0)
    known = (distance_x > 1e-12) & (distance_y > 1e-12)
    ratio = np.divide(distance_y, distance_x, out=np.ones_like(distance_x), where=known)
    return np.where(known, np.sqrt(ratio * balance), balance)


def _duality_gap(problem: _Problem, x: FloatArray, y: FloatArray) -> FloatArray:
    """``max_x' L(x', y) - min_y' L(x, y')`` of each column; zero exactly at a saddle point."""
    gain, h = problem.forward(y), problem.h
    greedy = np.where(gain > 0, problem.high, problem.low) if np.ndim(h) == 0 and h == 0 else gain / h
    most = np.sum(gain * greedy - 0.5 * h * greedy**2, axis=0) - np.sum(problem.b * y, axis=0)
    bound = problem.critic_bound
    if not np.isfinite(bound):
        bound = 2 * np.maximum(1.0, np.abs(y).max(axis=0))
    least = -np.sum(0.5 * h * x**2, axis=0) - bound * np.abs(problem.adjoint(x) - problem.b).sum(axis=0)
    return most - least
