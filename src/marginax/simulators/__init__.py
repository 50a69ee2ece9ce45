"""Simulators with continuous observations and actions, behind one small interface.

`make(name, seed)` builds any of them; see [`Simulator`][marginax.simulators.Simulator] for what they share.
Nothing here needs JAX, and each simulator's own packages are imported only when it is made.
"""

from __future__ import annotations

from marginax.simulators.interface import Simulator, make

__all__ = ["Simulator", "make"]
