"""Problems with exact answers: the paper's chain and Open World, random garnets, Gymnasium's toy-text tables."""

from marginax.problems.chain import chain
from marginax.problems.garnet import garnet
from marginax.problems.open_world import open_world
from marginax.problems.problem import Problem
from marginax.problems.toy_text import from_gymnasium

__all__ = ["Problem", "chain", "from_gymnasium", "garnet", "open_world"]
