"""The balance equations as rows of a linear program, for both kinds of programs of this package."""

import numpy as np
import scipy.sparse as sp

from marginax._checks import FloatArray
from marginax.mdp import TabularMDP

NO_SUPPORT = 1e-300
"""Visits below which a ratio to them could overflow count as none."""


def balance_matrix(mdp: TabularMDP, pi: FloatArray) -> sp.csc_array:
    """The balance equations on (credit, flow): rows ``f - pᵀ D`` (one per state), then ``D - γ π f`` (one per pair)."""
    states, pairs = mdp.num_states, mdp.r.size
    p = mdp.p if mdp.is_sparse else sp.csr_array(mdp.p.reshape(pairs, states))
    policy = sp.csr_array(
        (pi.flatten(), np.arange(pairs), np.arange(0, pairs + 1, mdp.num_actions)), shape=(states, pairs)
    )
    policy.eliminate_zeros()
    top = sp.hstack([-p.T, sp.eye_array(states)])
    bottom = sp.hstack([sp.eye_array(pairs), -mdp.discount * policy.T])
    return sp.csc_array(sp.vstack([top, bottom]))


def with_violations(balance: sp.csc_array, pairs: int) -> sp.csc_array:
    """The balance equations on (credit, flow, e⁺, e⁻): the last ``pairs`` rows, those of the pairs, hold up to ``e⁺ - e⁻``."""
    states = balance.shape[0] - pairs
    violations = sp.vstack([sp.csc_array((states, pairs)), sp.eye_array(pairs)])
    return sp.csc_array(sp.hstack([balance, violations, -violations]))


def pair_name(mdp: TabularMDP, pair: int) -> str:
    """How errors call a start pair."""
    return "the pair (x, a) = ({}, {})".format(*divmod(pair, mdp.num_actions))
