"""What is this policy worth? Off-policy evaluation from logged episodes, with intervals and a verdict."""

from marginax.offline._answers import ESTIMATORS, Answer, Evaluation, Verdict
from marginax.offline._evaluate import evaluate
from marginax.offline._intervals import Interval, bootstrap, concentration
from marginax.offline._log import Log
from marginax.offline._networks import Training
from marginax.offline._page import write_report
from marginax.offline._policies import load_policy
from marginax.offline._sources import open_data

__all__ = [
    "ESTIMATORS",
    "Answer",
    "Evaluation",
    "Interval",
    "Log",
    "Training",
    "Verdict",
    "bootstrap",
    "concentration",
    "evaluate",
    "load_policy",
    "open_data",
    "write_report",
]
