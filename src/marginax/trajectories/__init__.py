"""Trajectories: the steps of episodes as a pytree, the sampler that draws them, and lookups along them."""

from ._contract import check_lengths, check_steps, step_name
from ._episodes import Episode, from_episodes, pack, to_episodes
from ._sampling import SamplingTables, sample, sampling_tables
from ._trajectory import Trajectory, gather, gather_pairs, gather_states, gather_weights, require_trajectory

__all__ = [
    "Episode",
    "SamplingTables",
    "Trajectory",
    "check_lengths",
    "check_steps",
    "from_episodes",
    "gather",
    "gather_pairs",
    "gather_states",
    "gather_weights",
    "pack",
    "require_trajectory",
    "sample",
    "sampling_tables",
    "step_name",
    "to_episodes",
]
