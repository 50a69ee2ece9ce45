"""What an off-policy evaluation problem consists of."""

from typing import NamedTuple

from marginax._checks import FloatArray
from marginax.mdp import TabularMDP

__all__ = ["Problem"]


class Problem(NamedTuple):
    """An MDP with a target policy π to evaluate and a behaviour policy μ that gathers the data.

    Example:
        >>> from marginax import problems
        >>> mdp, pi, mu = problems.chain(n=3, actions=2)
        >>> mdp
        TabularMDP(3 states, 2 actions, discount 0.99, dense)
    """

    mdp: TabularMDP
    pi: FloatArray
    """Target policy ``[S, A]``."""
    mu: FloatArray
    """Behaviour policy ``[S, A]``."""
