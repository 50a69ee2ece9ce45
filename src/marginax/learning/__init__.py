"""Tabular learning: policy evaluation and policy iteration from a stream of trajectories, driven by any operator.

`evaluate` learns Q^π with the targets of one operator, `improve` looks for the best policy; both take all seeds side
by side. A marginalized operator takes its TD weights from an estimator: `given`, `monte_carlo` or
`certainty_equivalence`.
"""

from marginax.learning.estimators import Estimator, certainty_equivalence, given, monte_carlo
from marginax.learning.evaluation import evaluate, refresh_schedule
from marginax.learning.improvement import Improvement, Traces, average_return, improve, retrace

__all__ = [
    "Estimator",
    "Improvement",
    "Traces",
    "average_return",
    "certainty_equivalence",
    "evaluate",
    "given",
    "improve",
    "monte_carlo",
    "refresh_schedule",
    "retrace",
]
