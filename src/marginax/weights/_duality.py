"""What `saddle_point` and `fenchel` have in common: the empirical loss as a saddle-point problem, tabular or in features."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.trajectories import Trajectory
from marginax.weights._model import EmpiricalModel, EstimateInfo, empirical_model
from marginax.weights._primal_dual import Problem, Solution, solve

__all__ = ["Settings", "estimate"]

BLOCK = 64
"""Starts that are solved side by side: few enough for the cache, and for quick ones not to wait for slow ones."""


class Settings(NamedTuple):
    """The arguments of a duality-based estimator that are not data."""

    mu: ArrayLike | None
    discount: float | None
    prior: ArrayLike | float
    start: tuple[int, int] | int | None
    features: ArrayLike | None
    critic_features: ArrayLike | None
    radius: float
    tolerance: float
    max_iterations: int
    return_info: bool


def estimate(
    trajectories: Trajectory, c: ArrayLike, settings: Settings, *, quadratic: bool, on_states: bool
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    """TD weights from the bilinear loss (``quadratic`` False) or from the one with ``-ψ²/2`` (True)."""
    tolerance = checks.number("tolerance", settings.tolerance)
    if tolerance <= 0:
        raise ValueError(f"tolerance must be positive, got {settings.tolerance}")
    iterations = checks.count("max_iterations", settings.max_iterations)
    in_features = settings.features is not None
    if settings.critic_features is not None and not in_features:
        raise ValueError("critic_features needs features: without, both weights and critic are tables")
    model = empirical_model(
        trajectories,
        c,
        settings.mu,
        settings.discount,
        settings.prior,
        settings.start,
        on_states,
        all_states=in_features,
    )
    visitation = (1 - model.mdp.discount) * np.atleast_2d(model.credit(model.behaviour))
    weights, solutions = [], []
    for block in np.array_split(_places(model), max(1, len(visitation) // BLOCK)):
        rows = visitation[block] if model.start is None else visitation
        if in_features:
            found, solution = _linear(model, block, rows, settings, quadratic, tolerance, iterations)
        else:
            found, solution = _tabular(model, block, rows, quadratic, tolerance, iterations)
        weights.append(found)
        solutions.append(solution)
    table = np.concatenate(weights)
    result = model.spread(table if model.start is None else table[0])
    info = model.info._replace(
        iterations=max(s.iterations for s in solutions), gap=max(s.gap for s in solutions)
    )
    return (result, info) if settings.return_info else result


def _places(model: EmpiricalModel) -> np.ndarray:
    """The starts, by their places among pairs or states."""
    start, num_actions = model.start, model.behaviour.shape[1]
    if start is None:
        return np.arange(len(model.states) * (1 if model.on_states else num_actions))
    return np.array([start[0] * num_actions + start[1] if isinstance(start, tuple) else start])


def _starts(model: EmpiricalModel, block: np.ndarray, size: int) -> FloatArray:
    """``(1-γ) δ`` of every start of a block, a column each."""
    columns = np.zeros((size, len(block)))
    columns[block, np.arange(len(block))] = 1 - model.mdp.discount
    return columns


def _tabular(
    model: EmpiricalModel,
    block: np.ndarray,
    visitation: FloatArray,
    quadratic: bool,
    tolerance: float,
    iterations: int,
) -> tuple[FloatArray, Solution]:
    """Unknown is ``x = d^μ ∘ w``, which makes M the same for all starts: steps of size 1/d^μ in w."""
    gamma, kernel = model.mdp.discount, model.kernel(model.traced)
    transposed = kernel.T if isinstance(kernel, np.ndarray) else kernel.T.tocsr()
    ones = np.ones(kernel.shape[0])
    d = visitation.T
    problem = Problem(
        forward=lambda y: y - gamma * (kernel @ y),
        adjoint=lambda x: x - gamma * (transposed @ x),
        row_sums=(1 + gamma * (kernel @ ones))[:, None],
        column_sums=(1 + gamma * (transposed @ ones))[:, None],
        b=_starts(model, block, kernel.shape[0]),
        h=1 / np.maximum(d, 1e-12) if quadratic else 0.0,
        low=-np.inf if quadratic else 0.0,
        high=np.inf if quadratic else max(1.0, model.most_traced()),
        critic_bound=np.inf if quadratic else 1.0,
    )
    solution = solve(problem, tolerance, iterations)
    return np.divide(solution.x, d, out=np.zeros_like(d), where=d > 0).T, solution


def _linear(
    model: EmpiricalModel,
    block: np.ndarray,
    visitation: FloatArray,
    settings: Settings,
    quadratic: bool,
    tolerance: float,
    iterations: int,
) -> tuple[FloatArray, Solution]:
    """Unknowns are coefficients, for the weights in coordinates in which ``Σ x² = E_{d^μ}[w²]``."""
    phi = _features("features", settings.features, model)
    psi = (
        phi
        if settings.critic_features is None
        else _features("critic_features", settings.critic_features, model)
    )
    gamma, kernel = model.mdp.discount, model.kernel(model.traced)
    radius = checks.number("radius", settings.radius)
    bellman = psi - gamma * (kernel @ psi)
    matrices = _moments(visitation, phi, bellman)
    gram = _moments(visitation, phi, phi)
    size = phi.shape[1]
    ridge = 1e-10 * np.trace(gram, axis1=1, axis2=2) / size + 1e-300
    root = np.linalg.cholesky(gram + ridge[:, None, None] * np.eye(size))
    whitened = np.linalg.solve(root, matrices)
    problem = Problem(
        forward=lambda y: np.einsum("mij,jm->im", whitened, y, optimize=True),
        adjoint=lambda x: np.einsum("mij,im->jm", whitened, x, optimize=True),
        row_sums=np.abs(whitened).sum(axis=2).T,
        column_sums=np.abs(whitened).sum(axis=1).T,
        b=psi.T @ _starts(model, block, phi.shape[0]),
        h=1.0 if quadratic else 0.0,
        low=-np.inf if quadratic else -radius,
        high=np.inf if quadratic else radius,
        critic_bound=radius / (1 - gamma) if quadratic else 1.0,
    )
    solution = solve(problem, tolerance, iterations)
    coefficients = np.linalg.solve(np.swapaxes(root, 1, 2), solution.x.T[:, :, None])[:, :, 0]
    return coefficients @ phi.T, solution


def _moments(weights: FloatArray, left: FloatArray, right: FloatArray) -> FloatArray:
    """``Σ_n weights[m, n] left[n, i] right[n, j]``, ``[m, i, j]``."""
    products = left[:, :, None] * right[:, None, :]
    return (weights @ products.reshape(len(left), -1)).reshape(len(weights), *products.shape[1:])


def _features(name: str, value: Any, model: EmpiricalModel) -> FloatArray:
    shape = (model.num_states,) if model.on_states else (model.num_states, model.behaviour.shape[1])
    array = checks.array(name, value, (*shape, None))
    return array.reshape(-1, array.shape[-1])
