"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module for each estimator."""

from marginax.weights._data import Estimator
from marginax.weights._model import EstimateInfo
from marginax.weights.certainty_equivalence import (
    CertaintyEquivalence,
    certainty_equivalence,
    certainty_equivalence_states,
)
from marginax.weights.duality import fenchel, fenchel_states, saddle_point, saddle_point_states
from marginax.weights.empirical import EmpiricalMDP, estimate_behaviour
from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, paths, paths_states, to_traces
from marginax.weights.monte_carlo import MonteCarlo, monte_carlo, monte_carlo_states
from marginax.weights.regression import Regression, regression, regression_states
from marginax.weights.reverse_td import ReverseTD, reverse_td, reverse_td_states

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
    "certainty_equivalence_states",
    "estimate_behaviour",
    "exact",
    "exact_states",
    "fenchel",
    "fenchel_states",
    "monte_carlo",
    "monte_carlo_states",
    "paths",
    "paths_states",
    "regression",
    "regression_states",
    "reverse_td",
    "reverse_td_states",
    "saddle_point",
    "saddle_point_states",
    "to_traces",
]
