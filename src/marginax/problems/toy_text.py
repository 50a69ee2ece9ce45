"""Gymnasium environments that carry their transition table."""

from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax._checks import FloatArray
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
    p, rewards, reward_std = _read_table(table)
    initial = getattr(bare, "initial_state_distrib", None)
    if initial is None:
        raise ValueError(
            f"environment must have a start distribution initial_state_distrib, but {bare} has none"
        )
    initial = checks.distribution("initial_state_distrib", initial, (len(table),))
    if p.shape[0] * p.shape[1] <= 10**6:
        p = p.toarray().reshape(*rewards.shape, len(table))
    return TabularMDP(p, rewards, discount, initial, reward_std)


def _read_table(table: Any) -> tuple[Any, FloatArray, FloatArray]:
    """Transitions as a sparse ``(S*A, S)`` array, mean rewards ``[S, A]`` and their standard deviations, from ``P[x][a]``."""
    states = len(table)
    actions = max(map(len, table.values() if isinstance(table, dict) else table))
    rows, successors, chances = [], [], []
    mean, deviation = np.zeros((2, states, actions))
    for state, action in np.ndindex(states, actions):
        name = f"P[{state}][{action}]"
        try:
            steps = table[state][action]
        except (KeyError, IndexError):
            raise ValueError(
                f"P must have {states} states from 0 on with {actions} actions each, but there is no {name}"
            ) from None
        mean[state, action], deviation[state, action] = _reward_moments(steps, name)
        for chance, successor, _, terminated in steps:
            if not terminated:
                rows.append(state * actions + action)
                successors.append(checks.index(f"successors in {name}", successor, states))
                chances.append(chance)
    p = sp.csr_array((chances, (rows, successors)), shape=(states * actions, states))
    return p, mean, deviation


def _reward_moments(steps: Any, name: str) -> tuple[float, float]:
    """Mean and standard deviation of the reward over the steps ``(chance, successor, reward, terminated)`` of one pair."""
    if any(len(step) != 4 for step in steps):
        raise ValueError(f"{name} must hold tuples (chance, successor, reward, terminated), got {steps!r}")
    total = sum(chance for chance, *_ in steps)
    if not abs(total - 1.0) <= checks.TOLERANCE:
        raise ValueError(f"chances in {name} must sum to 1, but sum to {total}")
    mean = sum(chance * reward for chance, _, reward, _ in steps)
    deviation = np.sqrt(sum(chance * (reward - mean / total) ** 2 for chance, _, reward, _ in steps))
    rounding = 1e-12 * max(abs(reward) for _, _, reward, _ in steps)
    return mean, deviation if deviation > rounding else 0.0
