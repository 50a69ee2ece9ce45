"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module for each estimator."""

from marginax.weights._data import Estimator
from marginax.weights._model import EstimateInfo
from marginax.weights.certainty_equivalence import CertaintyEquivalence, certainty_equivalence
from marginax.weights.duality import fenchel, saddle_point
from marginax.weights.empirical import EmpiricalMDP, estimate_behaviour
from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, paths, paths_states, to_traces
from marginax.weights.monte_carlo import MonteCarlo, monte_carlo
from marginax.weights.regression import Regression, regression
from marginax.weights.reverse_td import ReverseTD, reverse_td

__all__ = [
    "CertaintyEquivalence",
    "EmpiricalMDP",
    "EstimateInfo",
    "Estimator",
    "MonteCarlo",
    "NonMarkovianTraces",
    "Regression",
    "ReverseTD",
    "certainty_equivalence",
    "estimate_behaviour",
    "exact",
    "exact_states",
    "fenchel",
    "monte_carlo",
    "paths",
    "paths_states",
    "regression",
    "reverse_td",
    "saddle_point",
    "to_traces",
]
