"""Targets for learning: sampled estimates of the operators, one for every step of one sequence.

Every function takes the arrays of *one* sequence; use `jax.vmap` for batches. In a sequence `q[t] = Q(x_t,
a_t)`, `v_next[t] = Q(x_{t+1}, π)`, `discounts[t]` is γ, or 0 where step `t` ended the episode, and a
*truncated* step still bootstraps from `v_next[t]`, but its target does not depend on what follows it in the
array. All of them are one `recursion`, whose documentation lists the coefficients of each.
"""

from ._estimates import (
    RandomTimes,
    marginalized,
    marginalized_vtrace,
    multi_step,
    n_step,
    peng,
    random_times,
    vtrace,
)
from ._inputs import expectation, select_actions, traces_from_log_ratios
from ._recursion import recursion

__all__ = [
    "RandomTimes",
    "expectation",
    "marginalized",
    "marginalized_vtrace",
    "multi_step",
    "n_step",
    "peng",
    "random_times",
    "recursion",
    "select_actions",
    "traces_from_log_ratios",
    "vtrace",
]
