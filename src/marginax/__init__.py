"""Off-policy evaluation operators for reinforcement learning: exact, sampled, learned.

Every evaluation operator here is one line, ``Q -> Q + D (r + γ P^π Q - Q)``. The *credit* ``D`` says how much a
Bellman error met at ``(x', a')`` counts for the value of ``(x, a)``; the operators differ in nothing else.

>>> import marginax as mx
>>> mdp, pi, mu = mx.problems.chain(n=10)
>>> retrace = mx.multi_step(mdp, pi, mu, mx.traces.retrace(pi, mu))
>>> q_pi = mdp.q_values(pi)
>>> bool(abs(retrace(q_pi) - q_pi).max() < 1e-12)
True
"""

from typing import TYPE_CHECKING

from marginax._lazy import lazy

if TYPE_CHECKING:
    from marginax import (
        deep,
        learning,
        linear_programs,
        mdp,
        offline,
        operators,
        policies,
        problems,
        report,
        simulators,
        statistics,
        targets,
        testing,
        torch,
        traces,
        trajectories,
        weights,
    )
    from marginax.mdp import TabularMDP
    from marginax.operators import Operator, marginalized, marginalized_vtrace, multi_step, one_step, vtrace

__version__ = "0.1.0"

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
    "report",
    "simulators",
    "statistics",
    "targets",
    "testing",
    "torch",
    "traces",
    "trajectories",
    "vtrace",
    "weights",
]


_FROM = {
    "TabularMDP": "mdp",
    **dict.fromkeys(
        ("Operator", "marginalized", "marginalized_vtrace", "multi_step", "one_step", "vtrace"), "operators"
    ),
}

__getattr__ = lazy(__name__, {name: _FROM.get(name, "") for name in __all__ if name != "__version__"})


def __dir__() -> list[str]:
    return sorted(__all__)
