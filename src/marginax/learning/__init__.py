"""Tabular learning: policy evaluation and policy iteration from a stream of trajectories, driven by any operator.

`evaluate` learns Q^π with the targets of one operator, `improve` looks for the best policy; both take all seeds side
by side. A marginalized operator takes its TD weights from a table or from an incremental estimator of `marginax.weights`.
"""

from marginax.learning.evaluation import evaluate, refresh_schedule
from marginax.learning.improvement import Improvement, Traces, average_return, improve, retrace

__all__ = ["Improvement", "Traces", "average_return", "evaluate", "improve", "refresh_schedule", "retrace"]
