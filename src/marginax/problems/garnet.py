"""Random MDPs."""

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax.mdp import TabularMDP
from marginax.problems.problem import Problem

__all__ = ["garnet"]


def garnet(
    states: int = 20,
    actions: int = 4,
    branching: int = 3,
    *,
    seed: int = 0,
    discount: float = 0.99,
    termination: float = 0.0,
    reward_std: float = 0.0,
    sparse: bool = False,
) -> Problem:
    """A random MDP: every pair leads to ``branching`` random successors; rewards are N(0,1), π and μ drawn from Dirichlet(1).

    Args:
        states: S.
        actions: A.
        branching: number of different successors of a pair, at most S.
        seed: of NumPy's generator.
        discount: γ.
        termination: chance that a step ends the episode, in [0, 1].
        reward_std: standard deviation of the reward noise.
        sparse: whether to keep the transitions sparse.

    Returns:
        ``(mdp, pi, mu)``.

    Example:
        >>> mdp, pi, mu = garnet(states=5, actions=2, branching=2, seed=1)
        >>> int((mdp.p > 0).sum())
        20
    """
    size, moves = checks.count("states", states), checks.count("actions", actions)
    width = checks.count("branching", branching)
    if width > size:
        raise ValueError(f"branching must be at most the number of states {size}, got {branching}")
    ends = checks.fraction("termination", termination)
    generator = np.random.default_rng(checks.count("seed", seed, least=0))
    pairs = size * moves
    successors = np.stack([generator.choice(size, width, replace=False) for _ in range(pairs)])
    chances = (1.0 - ends) * generator.dirichlet(np.ones(width), size=pairs)
    entries = (chances.ravel(), (np.repeat(np.arange(pairs), width), successors.ravel()))
    p = sp.csr_array(entries, shape=(pairs, size))
    r = generator.standard_normal((size, moves))
    mdp = TabularMDP(p if sparse else p.toarray().reshape(size, moves, size), r, discount, None, reward_std)
    pi, mu = (generator.dirichlet(np.ones(moves), size=size) for _ in range(2))
    return Problem(mdp, pi, mu)
