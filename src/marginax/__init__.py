"""Off-policy evaluation operators for reinforcement learning: exact, sampled, learned.

Every evaluation operator here is one line, ``Q -> Q + D (r + γ P^π Q - Q)``. The *credit* ``D`` says how much a
Bellman error met at ``(x', a')`` counts for the value of ``(x, a)``; the operators differ in nothing else.

>>> import marginax as mx
>>> mdp, pi, mu = mx.problems.chain(n=10)
>>> retrace = mx.multi_step(mdp, pi, mu, mx.traces.retrace(pi, mu))
>>> bool(abs(retrace.fixed_point() - mdp.q_values(pi)).max() < 1e-12)
True
"""

import importlib
from typing import TYPE_CHECKING, Any

from marginax import mdp, operators, policies, traces
from marginax.mdp import TabularMDP
from marginax.operators import Operator, marginalized, marginalized_vtrace, multi_step, one_step, vtrace

if TYPE_CHECKING:
    from marginax import (
        deep,
        learning,
        linear_programs,
        offline,
        problems,
        simulators,
        targets,
        trajectories,
        weights,
    )

__version__ = "0.1.0"

# Loaded on first use: they need JAX, HiGHS or an optional dependency, and `import marginax` should stay quick.
_LAZY = (
    "deep",
    "learning",
    "linear_programs",
    "offline",
    "problems",
    "simulators",
    "targets",
    "trajectories",
    "weights",
)

__all__ = [
    "Operator",
    "TabularMDP",
    "__version__",
    "deep",
    "learning",
    "linear_programs",
    "marginalized",
    "marginalized_vtrace",
    "mdp",
    "multi_step",
    "offline",
    "one_step",
    "operators",
    "policies",
    "problems",
    "simulators",
    "targets",
    "traces",
    "trajectories",
    "vtrace",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"marginax.{name}")
    raise AttributeError(f"module 'marginax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
