"""Trajectories: the steps of episodes as a pytree, the sampler that draws them, and lookups along them."""

from ._sampling import Simulator, sample, simulator
from ._trajectory import Trajectory, gather, gather_pairs, gather_states, gather_weights

__all__ = [
    "Simulator",
    "Trajectory",
    "gather",
    "gather_pairs",
    "gather_states",
    "gather_weights",
    "sample",
    "simulator",
]
