"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module an estimator."""

from marginax.weights._model import EstimateInfo, estimate_behaviour
from marginax.weights.certainty_equivalence import (
    CertaintyEquivalence,
    certainty_equivalence,
    certainty_equivalence_states,
)
from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, to_traces
from marginax.weights.fastest import Frontier, WorstCritic, critic_loss, fastest, frontier, worst_critic
from marginax.weights.monte_carlo import MonteCarlo, monte_carlo, monte_carlo_states

__all__ = [
    "CertaintyEquivalence",
    "EstimateInfo",
    "Frontier",
    "MonteCarlo",
    "NonMarkovianTraces",
    "WorstCritic",
    "certainty_equivalence",
    "certainty_equivalence_states",
    "critic_loss",
    "estimate_behaviour",
    "exact",
    "exact_states",
    "fastest",
    "frontier",
    "monte_carlo",
    "monte_carlo_states",
    "to_traces",
    "worst_critic",
]
