"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module an estimator."""

from marginax.weights._model import EstimateInfo
from marginax.weights.certainty_equivalence import (
    CertaintyEquivalence,
    certainty_equivalence,
    certainty_equivalence_states,
)
from marginax.weights.empirical import EmpiricalMDP, estimate_behaviour
from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, to_traces
from marginax.weights.fenchel import fenchel, fenchel_states
from marginax.weights.monte_carlo import MonteCarlo, monte_carlo, monte_carlo_states
from marginax.weights.regression import Regression, regression, regression_states
from marginax.weights.saddle_point import saddle_point, saddle_point_states

__all__ = [
    "CertaintyEquivalence",
    "EmpiricalMDP",
    "EstimateInfo",
    "MonteCarlo",
    "NonMarkovianTraces",
    "Regression",
    "certainty_equivalence",
    "certainty_equivalence_states",
    "estimate_behaviour",
    "exact",
    "exact_states",
    "fenchel",
    "fenchel_states",
    "monte_carlo",
    "monte_carlo_states",
    "regression",
    "regression_states",
    "saddle_point",
    "saddle_point_states",
    "to_traces",
]
