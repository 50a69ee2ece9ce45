"""Simulators with vectors as observations, and actions in a box or discrete ones, behind one small interface.

`make(name, seed)` builds any of them; see [`Simulator`][marginax.simulators.Simulator] for what they share.
`Pool` plays many agents in worker processes. Nothing here needs JAX, and each simulator's own packages are
imported only when it is made.
"""

from __future__ import annotations

from marginax.simulators.accelerated import AcceleratedSimulator, make_accelerated
from marginax.simulators.pool import Evaluation, Pool, WorkerDied
from marginax.simulators.protocol import Simulator
from marginax.simulators.registry import make
from marginax.simulators.rollout import AgentSpec, Transitions

__all__ = [
    "AcceleratedSimulator",
    "AgentSpec",
    "Evaluation",
    "Pool",
    "Simulator",
    "Transitions",
    "WorkerDied",
    "make",
    "make_accelerated",
]
