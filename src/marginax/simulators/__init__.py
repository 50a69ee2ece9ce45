"""Simulators with continuous observations and actions, behind one small interface.

`make(name, seed)` builds any of them; see [`Simulator`][marginax.simulators.Simulator] for what they share.
`Pool` plays many agents in worker processes. Nothing here needs JAX, and each simulator's own packages are
imported only when it is made.
"""

from __future__ import annotations

from marginax.simulators.agents import AgentSpec, Block
from marginax.simulators.interface import Simulator, make
from marginax.simulators.workers import Evaluation, Pool, WorkerDied

__all__ = ["AgentSpec", "Block", "Evaluation", "Pool", "Simulator", "WorkerDied", "make"]
