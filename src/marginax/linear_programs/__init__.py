"""Linear programs (Sections 4.3 and 5.1): policy evaluation and its relaxations, and the fastest weights under a cap."""

from marginax.linear_programs._highs import ProgramError
from marginax.linear_programs.fastest import (
    Frontier,
    WorstCritic,
    critic_loss,
    fastest,
    frontier,
    worst_critic,
)
from marginax.linear_programs.relaxed import Iterates, Relaxed, evaluate, iterate, relaxed

__all__ = [
    "Frontier",
    "Iterates",
    "ProgramError",
    "Relaxed",
    "WorstCritic",
    "critic_loss",
    "evaluate",
    "fastest",
    "frontier",
    "iterate",
    "relaxed",
    "worst_critic",
]
