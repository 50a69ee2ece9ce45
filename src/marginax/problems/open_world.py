"""The Open World of Section 6.2."""

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax import policies
from marginax.mdp import TabularMDP
from marginax.problems.problem import Problem

__all__ = ["open_world"]


def open_world(n: int = 10, discount: float = 0.99, *, sparse: bool | None = None) -> Problem:
    """The Open World: an n × n grid, four moves, a reward of 1 on entering the lower right corner (Section 6.2).

    State ``row*n + column``; actions left, up, right, down in this order; a move off the grid stays. Entering the corner ends the
    episode, so the corner's own rows are empty. Episodes start in the upper left. π takes right or down with probability 1/2
    each; μ is uniform.

    Args:
        n: side of the square, at least 2.
        discount: γ.
        sparse: whether to keep the transitions sparse; when omitted, from n = 18 on.

    Returns:
        ``(mdp, pi, mu)``.

    Example:
        >>> mdp, pi, mu = open_world(n=2, discount=0.5)
        >>> mdp.v_values(pi)
        array([0.33333333, 0.66666667, 0.66666667, 0.        ])
    """
    side = checks.count("n", n, least=2)
    size = side * side
    state = np.arange(size)
    row, column = np.divmod(state, side)
    moves = np.stack(
        [
            np.where(column > 0, state - 1, state),
            np.where(row > 0, state - side, state),
            np.where(column < side - 1, state + 1, state),
            np.where(row < side - 1, state + side, state),
        ],
        axis=1,
    )
    corner = size - 1
    enters = (moves == corner) & (state != corner)[:, None]
    goes_on = ((moves != corner) & (state != corner)[:, None]).ravel()
    rows = np.arange(4 * size)[goes_on]
    p = sp.csr_array((np.ones(rows.size), (rows, moves.ravel()[goes_on])), shape=(4 * size, size))
    initial = np.zeros(size)
    initial[0] = 1.0
    keep_sparse = size > 300 if sparse is None else sparse
    mdp = TabularMDP(
        p if keep_sparse else p.toarray().reshape(size, 4, size), enters.astype(float), discount, initial
    )
    pi = np.tile([0.0, 0.0, 0.5, 0.5], (size, 1))
    return Problem(mdp, pi, policies.uniform(size, 4))
