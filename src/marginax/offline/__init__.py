"""What is this policy worth? Off-policy evaluation from logged episodes, with intervals and a verdict."""

from marginax.offline.log import Log
from marginax.offline.networks import Training
from marginax.offline.page import write_report
from marginax.offline.pipeline import evaluate
from marginax.offline.policies import load_policy
from marginax.offline.ranking import Ranking
from marginax.offline.results import ESTIMATORS, Answer, Evaluation, Verdict, concentration
from marginax.offline.sources import open_data
from marginax.statistics import Interval

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
