"""A linear program held by HiGHS: built once, changed in place, solved again from where it stands.

``min cost·x`` subject to ``lower <= x <= upper`` and ``rows_lower <= matrix x <= rows_upper``. Bounds, right-hand sides
and costs may change between solves and the matrix may not, so that HiGHS keeps its factorisation of the basis and
starts from it. ``basis_solve`` and ``basis_transpose_solve`` give that factorisation to the caller: while a basis stays
optimal, further right-hand sides are one solve each and need no simplex iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks

TOLERANCE = 1e-10  # HiGHS's own feasibility tolerances; the smallest it accepts

_STRATEGIES = {"dual": 1, "primal": 4}


class ProgramError(RuntimeError):
    """A linear program that HiGHS did not solve to optimality; the message carries HiGHS's own status."""


class Program:
    """One linear program and its HiGHS solver.

    Args:
        matrix: sparse [rows, columns].
        cost: [columns].
        lower: [columns], may be -inf.
        upper: [columns], may be inf.
        rows_lower: [rows], may be -inf.
        rows_upper: [rows], may be inf.
        strategy: ``"dual"`` where bounds change between solves, ``"primal"`` where costs do.
        time_limit: seconds for one solve; None for no limit.
    """

    def __init__(
        self,
        matrix: sp.sparray,
        cost: np.ndarray,
        lower: np.ndarray,
        upper: np.ndarray,
        rows_lower: np.ndarray,
        rows_upper: np.ndarray,
        *,
        strategy: str,
        time_limit: float | None = None,
    ) -> None:
        import highspy

        columnwise = sp.csc_array(matrix)
        self.num_rows, self.num_columns = columnwise.shape
        self._highspy = highspy
        self._highs: Any = highspy.Highs()  # its stubs lack the basis solves
        self._option("output_flag", False)
        self._option("solver", "simplex")
        self._option("simplex_strategy", _STRATEGIES[strategy])
        self._option("presolve", "off")  # it would throw the warm start away
        self._option("threads", 1)
        self._option("small_matrix_value", 1e-12)  # the default drops probabilities below 1e-9
        self._option("primal_feasibility_tolerance", TOLERANCE)
        self._option("dual_feasibility_tolerance", TOLERANCE)
        if time_limit is not None:
            self._option("time_limit", checks.at_least("time_limit", time_limit, 0.0, infinite=True))

        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = self.num_columns, self.num_rows
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = _finite(cost), lower, upper
        lp.row_lower_, lp.row_upper_ = rows_lower, rows_upper
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = columnwise.indptr, columnwise.indices
        lp.a_matrix_.value_ = columnwise.data
        self._accepted(self._highs.passModel(lp), "the model")

    def set_cost(self, first: int, cost: np.ndarray) -> None:
        """Replaces the costs of the columns from ``first`` on."""
        index = np.arange(first, first + cost.size, dtype=np.int32)
        self._accepted(self._highs.changeColsCost(index.size, index, _finite(cost)), "costs")

    def set_bounds(self, first: int, lower: np.ndarray, upper: np.ndarray) -> None:
        """Replaces the bounds of the columns from ``first`` on."""
        index = np.arange(first, first + lower.size, dtype=np.int32)
        self._accepted(self._highs.changeColsBounds(index.size, index, lower, upper), "bounds")

    def set_row(self, row: int, value: float) -> None:
        """Sets the right-hand side of one equality row."""
        self._accepted(self._highs.changeRowBounds(row, value, value), "a right-hand side")

    def basis(self, basic_columns: np.ndarray, basic_rows: np.ndarray) -> Any:
        """A basis with the given columns and rows (boolean masks) basic and all others at their lower bound."""
        status = self._highspy.HighsBasisStatus
        names = np.array([status.kLower, status.kBasic], dtype=object)
        basis = self._highspy.HighsBasis()
        basis.col_status = names[basic_columns.astype(int)].tolist()
        basis.row_status = names[basic_rows.astype(int)].tolist()
        basis.valid = True
        return basis

    def start_from(self, basis: Any) -> None:
        """Makes the next solve start from a basis made by ``basis``, with nothing left from earlier solves."""
        self._accepted(self._highs.clearSolver(), "to start afresh")
        self._accepted(self._highs.setBasis(basis), "the starting basis")

    def solve(self, name: str) -> float:
        """Solves from the current basis and returns the optimal objective.

        Raises:
            ProgramError: HiGHS ended in anything but an optimum; says which program (``name``) and its status.
        """
        self._highs.run()
        status = self._highs.getModelStatus()
        objective = float(self._highs.getObjectiveValue())
        if status != self._highspy.HighsModelStatus.kOptimal or not np.isfinite(objective):
            words = self._highs.modelStatusToString(status)
            raise ProgramError(f"the linear program of {name} was not solved: HiGHS reports {words!r}")
        return objective

    def columns(self) -> np.ndarray:
        """The columns' values at the optimum, [columns]."""
        return np.asarray(self._highs.getSolution().col_value)

    def basic_variables(self) -> np.ndarray:
        """What is basic, in the order of the basis matrix: a column j as j, a row i as -1 - i; [rows]."""
        status, variables = self._highs.getBasicVariables()
        self._accepted(status, "the question which variables are basic")
        return np.asarray(variables)

    def basis_solve(self, right_hand_side: np.ndarray) -> np.ndarray:
        """x with ``B x = right_hand_side`` for the current basis matrix B, in the order of ``basic_variables``."""
        return self._basis_solve(self._highs.getBasisSolve, right_hand_side)

    def basis_transpose_solve(self, right_hand_side: np.ndarray) -> np.ndarray:
        """y with ``Bᵀ y = right_hand_side`` for the current basis matrix B, one entry per row."""
        return self._basis_solve(self._highs.getBasisTransposeSolve, right_hand_side)

    def _basis_solve(self, method: Callable[..., Any], right_hand_side: np.ndarray) -> np.ndarray:
        status, solution = method(np.ascontiguousarray(right_hand_side, dtype=float))[:2]
        self._accepted(status, "a solve with the basis")
        return np.asarray(solution)

    def _option(self, name: str, value: object) -> None:
        self._accepted(self._highs.setOptionValue(name, value), f"option {name} = {value!r}")

    def _accepted(self, status: Any, what: str) -> None:
        if status == self._highspy.HighsStatus.kError:
            raise ProgramError(f"HiGHS refused {what}")


def _finite(cost: np.ndarray) -> np.ndarray:
    """Costs are checked here because HiGHS calls a program with a NaN cost optimal."""
    if not np.all(np.isfinite(cost)):
        raise ProgramError(
            f"cost {np.flatnonzero(~np.isfinite(cost))[0]} of the linear program is not finite"
        )
    return cost


@contextmanager
def progress_bar(description: str, total: int, shown: bool) -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the number of programs just solved; draws a bar only where ``shown``."""
    if not shown:
        yield lambda solved: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(description, total=total)
        yield lambda solved: bar.advance(task, solved)
