"""Solving ``(I - γP) y = b`` for a non-negative kernel P on states: the one linear system behind everything exact.

The method is chosen by the kernel's structure:

- dense kernels: LU of the transpose. ``I - γP`` is an M-matrix with dominant rows, so its transpose needs no pivoting, nothing
  cancels, small entries of the inverse are as accurate as large ones and impossible ones are exactly zero;
- sparse, no cycles but self-loops (a chain, a grid walked right and down): one triangular substitution in topological order;
- sparse, one successor per state (deterministic policy and transitions): repeated squaring of the successor map;
- sparse and small: sparse LU of the transpose;
- sparse and large: BiCGSTAB, restarted where it breaks down, finished by plain sweeps, the error bounded by the residual.
"""

import warnings
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp
import scipy.sparse.linalg as spla

from marginax._checks import FloatArray

DIRECT_LIMIT = 20_000
"""States up to which a sparse kernel without special structure is factored rather than iterated on."""

RELATIVE_ERROR = 1e-11
"""The bound that iterative solutions must meet, relative to their largest entry."""


class Resolvent:
    """``(I - γP)^{-1}`` for a kernel P ``[S, S]``, dense or CSR, ready to be applied from either side."""

    def __init__(self, kernel: Any, discount: float):
        self.discount = discount
        if sp.issparse(kernel):
            kernel = kernel.tocsr()
            kernel.sum_duplicates()
            kernel.eliminate_zeros()
        self.kernel = kernel

    def __call__(self, b: FloatArray) -> FloatArray:
        """Returns ``y = b + γ P y`` for ``b`` ``[S]`` or ``[S, k]``."""
        return self._solve(b, transposed=False)

    def transposed(self, b: FloatArray) -> FloatArray:
        """Returns ``y = b + γ P^T y`` for ``b`` ``[S]`` or ``[S, k]``."""
        return self._solve(b, transposed=True)

    def matrix(self) -> FloatArray:
        """Returns ``(I - γP)^{-1}`` as a dense ``[S, S]`` array."""
        return self.transposed(np.eye(self.kernel.shape[0])).T

    @cached_property
    def gain(self) -> float:
        """``γ max_x Σ_x' |P(x, x')|``: below 1, the series ``Σ_t (γP)^t`` converges at that rate."""
        if not self.kernel.shape[0]:
            return 0.0
        return float(self.discount * abs(self.kernel).sum(axis=1).max())

    @cached_property
    def converges(self) -> bool:
        """Whether the series ``Σ_t (γ|P|)^t`` converges.

        For a non-negative A the spectral radius is below 1 exactly when ``y = 1 + A y`` has a solution ``y ≥ 1``.
        """
        if self.gain < 1.0:
            return True
        magnitude = Resolvent(abs(self.kernel), self.discount)
        # At a spectral radius of exactly 1 the system is singular; the solvers warn or raise, and the answer is no.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", scipy.linalg.LinAlgWarning)
            try:
                y = magnitude(np.ones(self.kernel.shape[0]))
            except (RuntimeError, np.linalg.LinAlgError):
                return False
        return bool(np.all(np.isfinite(y)) and y.min() >= 1.0 - 1e-9)

    def _solve(self, b: FloatArray, transposed: bool) -> FloatArray:
        if not sp.issparse(self.kernel):
            return scipy.linalg.lu_solve(self._dense_factors, b, trans=0 if transposed else 1)
        if self._order is not None:
            return self._substitute(b, transposed)
        if self._is_map:
            return self._square(b, transposed)
        if self.kernel.shape[0] <= DIRECT_LIMIT or self.gain >= 1.0:
            return self._sparse_factors.solve(b, "N" if transposed else "T")
        columns = [self._iterate(column, transposed) for column in np.atleast_2d(b.T)]
        return columns[0] if b.ndim == 1 else np.stack(columns, axis=1)

    @cached_property
    def _dense_factors(self) -> Any:
        return scipy.linalg.lu_factor(np.eye(self.kernel.shape[0]) - self.discount * self.kernel.T)

    @cached_property
    def _system(self) -> Any:
        return (sp.eye_array(self.kernel.shape[0], format="csr") - self.discount * self.kernel).tocsr()

    @cached_property
    def _sparse_factors(self) -> Any:
        return spla.splu(self._system.T.tocsc(), diag_pivot_thresh=0.0)

    @cached_property
    def _order(self) -> Any:
        """An order of the states in which the kernel is triangular; ``None`` if two states or more form a cycle."""
        size = self.kernel.shape[0]
        if self._runs_forward or self._runs_backward:
            return slice(None)
        pieces, labels = sp.csgraph.connected_components(self.kernel, directed=True, connection="strong")
        if pieces < size:
            return None
        # Strong components are numbered as they are closed: successors first.
        order = np.empty(size, dtype=np.int64)
        order[labels] = np.arange(size)
        return order

    @cached_property
    def _rows(self) -> Any:
        return np.repeat(np.arange(self.kernel.shape[0]), np.diff(self.kernel.indptr))

    @cached_property
    def _runs_forward(self) -> bool:
        """Whether no state leads to one of smaller index."""
        return bool((self.kernel.indices >= self._rows).all())

    @cached_property
    def _runs_backward(self) -> bool:
        """Whether no state leads to one of larger index."""
        return bool((self.kernel.indices <= self._rows).all())

    @cached_property
    def _triangle(self) -> tuple[Any, FloatArray]:
        """The system in that order, each row divided by its diagonal, and the diagonal.

        Upper triangular if states lead to larger indices only, lower triangular otherwise.
        """
        system = self._system if isinstance(self._order, slice) else self._system[self._order][:, self._order]
        system = system.tocsr(copy=True)
        diagonal = system.diagonal()
        system.data /= np.repeat(diagonal, np.diff(system.indptr))
        return system, diagonal

    @cached_property
    def _triangle_transposed(self) -> Any:
        return self._triangle[0].T.tocsr()

    def _substitute(self, b: FloatArray, transposed: bool) -> FloatArray:
        system, diagonal = self._triangle
        diagonal = diagonal if b.ndim == 1 else diagonal[:, None]
        result = np.empty(b.shape)
        upper = self._runs_forward != transposed
        if transposed:
            below = spla.spsolve_triangular(
                self._triangle_transposed, b[self._order], lower=not upper, unit_diagonal=True
            )
            result[self._order] = below / diagonal
        else:
            result[self._order] = spla.spsolve_triangular(
                system, b[self._order] / diagonal, lower=not upper, unit_diagonal=True
            )
        return result

    @cached_property
    def _is_map(self) -> bool:
        return bool(np.diff(self.kernel.indptr).max(initial=0) <= 1) and self.gain < 1.0

    def _square(self, b: FloatArray, transposed: bool) -> FloatArray:
        """``(I + A^{2^k}) … (I + A²)(I + A) b`` with A = γP, a weighted map ``x -> successor[x]``."""
        size = self.kernel.shape[0]
        has = np.diff(self.kernel.indptr) == 1
        successor, weight = np.zeros(size, dtype=np.int64), np.zeros(size)
        successor[has] = self.kernel.indices
        weight[has] = self.discount * self.kernel.data
        y = np.array(b, dtype=np.float64)
        columns = y[:, None] if y.ndim == 1 else y
        while np.abs(weight).max(initial=0.0) > 1e-20:
            if transposed:
                for k in range(columns.shape[1]):
                    columns[:, k] += np.bincount(successor, weights=weight * columns[:, k], minlength=size)
            else:
                columns += weight[:, None] * columns[successor]
            weight = weight * weight[successor]
            successor = successor[successor]
        return y

    def _iterate(self, b: FloatArray, transposed: bool) -> FloatArray:
        kernel = (self.kernel.T.tocsr() if transposed else self.kernel) * self.discount
        system = self._system.T.tocsr() if transposed else self._system
        # |error| ≤ |residual| / (1 - gain), in the norm in which the kernel shrinks (max for P, sum for P^T).
        order = 1 if transposed else np.inf
        y = b.copy()
        for _ in range(8):
            scale = max(float(np.linalg.norm(y, order)), float(np.linalg.norm(b, order)))
            wanted = RELATIVE_ERROR * (1.0 - self.gain) * scale
            residual = b - system @ y
            size = float(np.linalg.norm(residual, order))
            if size <= wanted or scale == 0.0:
                return y
            step, _ = spla.bicgstab(
                system, residual, rtol=min(0.1 * wanted / size, 0.1), atol=0.0, maxiter=2000
            )
            if not np.linalg.norm(residual - system @ step, order) < size:
                break
            y = y + step
        return self._sweep(kernel, b, y, order)

    def _sweep(self, kernel: Any, b: FloatArray, y: FloatArray, order: float) -> FloatArray:
        rounding = np.finfo(float).eps * (1 + np.diff(kernel.indptr).max(initial=0))
        change = np.inf
        while True:
            new = b + kernel @ y
            previous, change = change, float(np.linalg.norm(new - y, order))
            y = new
            scale = max(float(np.linalg.norm(y, order)), 1e-300)
            if change * self.gain <= RELATIVE_ERROR * (1.0 - self.gain) * scale:
                return y
            # For γ near 1 the bound is below the rounding of one sweep: then stop when sweeps change y no less than before.
            if not change > rounding * scale and not change < previous:
                return y
