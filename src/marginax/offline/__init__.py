"""What is this policy worth? Off-policy evaluation from logged episodes, with intervals and a verdict."""

from typing import TYPE_CHECKING

from marginax._lazy import lazy
from marginax.statistics import Interval

if TYPE_CHECKING:
    from marginax.offline.log import Log
    from marginax.offline.networks import Training
    from marginax.offline.page import write_report
    from marginax.offline.pipeline import evaluate
    from marginax.offline.policies import load_policy
    from marginax.offline.ranking import Ranking
    from marginax.offline.results import ESTIMATORS, Answer, Evaluation, Verdict, concentration
    from marginax.offline.sources import open_data

__all__ = [
    "ESTIMATORS",
    "Answer",
    "Evaluation",
    "Interval",
    "Log",
    "Ranking",
    "Training",
    "Verdict",
    "concentration",
    "evaluate",
    "load_policy",
    "open_data",
    "write_report",
]

__getattr__ = lazy(
    __name__,
    {
        "Log": "log",
        "Ranking": "ranking",
        "Training": "networks",
        "write_report": "page",
        "evaluate": "pipeline",
        "load_policy": "policies",
        "open_data": "sources",
        **dict.fromkeys(("ESTIMATORS", "Answer", "Evaluation", "Verdict", "concentration"), "results"),
    },
)
