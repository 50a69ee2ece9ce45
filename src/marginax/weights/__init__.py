"""TD weights ``w[x, a, x', a']``: exact, estimated from data, or chosen by a program. One module an estimator."""

from marginax.weights.exact import NonMarkovianTraces, exact, exact_states, to_traces

__all__ = ["NonMarkovianTraces", "exact", "exact_states", "to_traces"]
