"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module an estimator."""

from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, to_traces
from marginax.weights.fastest import Frontier, WorstCritic, critic_loss, fastest, frontier, worst_critic

__all__ = [
    "Frontier",
    "NonMarkovianTraces",
    "WorstCritic",
    "critic_loss",
    "exact",
    "exact_states",
    "fastest",
    "frontier",
    "to_traces",
    "worst_critic",
]
