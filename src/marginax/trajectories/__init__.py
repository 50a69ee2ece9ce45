"""Trajectories: the steps of episodes as a pytree, the sampler that draws them, and lookups along them."""

from ._episodes import Episode, from_episodes, pack, to_episodes
from ._sampling import Simulator, sample, simulator
from ._trajectory import Trajectory, gather, gather_pairs, gather_states, gather_weights

__all__ = [
    "Episode",
    "Simulator",
    "Trajectory",
    "from_episodes",
    "gather",
    "gather_pairs",
    "gather_states",
    "gather_weights",
    "pack",
    "sample",
    "simulator",
    "to_episodes",
]
