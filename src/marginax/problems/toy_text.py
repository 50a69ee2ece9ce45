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
        **options: passed to ``gymnasium.make``.

    Returns:
        The MDP, with the environment's own start distribution.

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
    bare = environment.unwrapped
    table = getattr(bare, "P", None)
    if not table:
        raise ValueError(f"environment must have a transition table P, but {bare} has none")
    states, actions = len(table), len(table[0])
    rows, columns, chances = [], [], []
    mean, square = np.zeros((states, actions)), np.zeros((states, actions))
    for state in range(states):
        for action in range(actions):
            for chance, successor, reward, terminated in table[state][action]:
                mean[state, action] += chance * reward
                square[state, action] += chance * reward**2
                if not terminated:
                    rows.append(state * actions + action)
                    columns.append(int(successor))
                    chances.append(chance)
    p = sp.csr_array((chances, (rows, columns)), shape=(states * actions, states))
    spread = square - mean**2
    std = np.sqrt(np.where(spread > 1e-12, spread, 0.0))
    initial = np.asarray(bare.initial_state_distrib, dtype=float)
    keep_sparse = states * actions * states > 10**6
    return TabularMDP(
        p if keep_sparse else p.toarray().reshape(states, actions, states),
        mean,
        discount,
        initial / initial.sum(),
        std,
    )
