"""The chain of Section 6.1."""

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax import policies
from marginax.mdp import TabularMDP
from marginax.problems.problem import Problem

__all__ = ["chain"]


def chain(
    n: int = 10, actions: int = 5, beta: float = 0.0, noise: float = 0.1, discount: float = 0.99
) -> Problem:
    """The chain MDP: n states walked left to right whatever the action; only the last one pays (Section 6.1, Table 1).

    At the rightmost state action ``a* = 0`` pays ``N(1, σ²)``, every other action ``N(0, σ²)``, and the episode ends. Episodes
    start at the leftmost state. π always takes a*; ``μ = β π + (1-β) uniform``.

    Args:
        n: number of states, the horizon T of the paper.
        actions: number of actions.
        beta: off-policy level β in [0, 1]; 1 is on-policy.
        noise: σ.
        discount: γ.

    Returns:
        ``(mdp, pi, mu)``.

    Example:
        >>> mdp, pi, mu = chain(n=3, discount=0.5)
        >>> mdp.v_values(pi)
        array([0.25, 0.5 , 1.  ])
    """
    states, size = checks.count("n", n), checks.count("actions", actions)
    rows = np.arange((states - 1) * size)
    p = sp.csr_array((np.ones(rows.size), (rows, rows // size + 1)), shape=(states * size, states))
    r = np.zeros((states, size))
    r[-1, 0] = 1.0
    std = np.zeros((states, size))
    std[-1] = checks.at_least("noise", noise, 0.0)
    initial = np.zeros(states)
    initial[0] = 1.0
    few = states * states * size <= 10**6
    mdp = TabularMDP(p.toarray().reshape(states, size, states) if few else p, r, discount, initial, std)
    pi = policies.deterministic(np.zeros(states), size)
    return Problem(mdp, pi, policies.mixture(pi, policies.uniform(states, size), beta))
