"""Gymnasium environments that carry their transition table."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax.mdp import TabularMDP

__all__ = ["from_gymnasium"]


def from_gymnasium(environment: Any, discount: float = 0.99, **options: Any) -> TabularMDP:
    """The exact MDP of a Gymnasium environment with a transition table ``P`` (FrozenLake, CliffWalking, Taxi).

    A step that terminates is missing mass in ``p``. Rewards that depend on the successor become their mean, and their standard
    deviation becomes reward noise. Time limits are not part of the table.

    Args:
        environment: an id such as ``"FrozenLake-v1"``, or an environment.
        discount: γ.
        **options: passed to ``gymnasium.make``, if the environment is an id.

    Returns:
        The MDP, with the environment's own start distribution.

    Raises:
        ValueError: there is no table, it has gaps or chances that do not sum to 1, or options come with an environment.

    Example:
        >>> from_gymnasium("CliffWalking-v1").num_states
        48
    """
    try:
        import gymnasium
    except ImportError:
        raise checks.missing_package("from_gymnasium", "gymnasium", "control") from None

    if isinstance(environment, str):
        made = gymnasium.make(environment, **options)
        try:
            return from_gymnasium(made, discount)
        finally:
            made.close()
    if options:
        raise ValueError(
            f"options are for an environment that is made from its id, got {', '.join(options)} with one that is made already"
        )
    bare = getattr(environment, "unwrapped", environment)
    table = getattr(bare, "P", None)
    if not table:
        raise ValueError(f"environment must have a transition table P, but {bare} has none")
    states = len(table)
    actions = max(map(len, table.values() if isinstance(table, dict) else table))
    rows, columns, chances = [], [], []
    total, mean, square = np.zeros((3, states, actions))
    for state, action in np.ndindex(states, actions):
        try:
            steps = table[state][action]
        except (KeyError, IndexError):
            raise ValueError(
                f"P must have {states} states from 0 on with {actions} actions each, but there is no P[{state}][{action}]"
            ) from None
        for chance, successor, reward, terminated in steps:
            total[state, action] += chance
            mean[state, action] += chance * reward
            square[state, action] += chance * reward**2
            if not terminated:
                rows.append(state * actions + action)
                columns.append(checks.index(f"successors in P[{state}][{action}]", successor, states))
                chances.append(chance)
    wrong = np.argwhere(~(np.abs(total - 1.0) <= checks.TOLERANCE))
    if wrong.size:
        state, action = wrong[0]
        raise ValueError(f"chances in P[{state}][{action}] must sum to 1, but sum to {total[state, action]}")
    p = sp.csr_array((chances, (rows, columns)), shape=(states * actions, states))
    spread = square - mean**2
    std = np.sqrt(np.where(spread > 1e-12, spread, 0.0))
    initial = checks.distribution("initial_state_distrib", bare.initial_state_distrib, (states,))
    keep_sparse = states * actions * states > 10**6
    return TabularMDP(
        p if keep_sparse else p.toarray().reshape(states, actions, states),
        mean,
        discount,
        initial,
        std,
    )
