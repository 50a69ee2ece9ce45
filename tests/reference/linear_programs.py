"""The programs of Section 4.3 written out as the paper has them, on dense pairs-by-pairs matrices, for SciPy's linprog."""

from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from marginax import TabularMDP


class Case(NamedTuple):
    mdp: TabularMDP
    pi: np.ndarray
    mu: np.ndarray
    q: np.ndarray


def random_case(
    seed: int,
    states: int = 4,
    actions: int = 3,
    discount: float = 0.9,
    zeros: bool = True,
    ending: bool = True,
    sparse: bool = False,
) -> Case:
    """A random MDP; ``ending``: rows that sum to less than 1 and a terminal state; ``zeros``: π and μ with zeros."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(states, 0.5), size=(states, actions))
    if ending:
        p *= rng.choice([1.0, 0.7], size=(states, actions, 1))
        p[-1] = 0.0
    policies = rng.dirichlet(np.ones(actions), size=(2, states))
    if zeros:
        policies[0][rng.random((states, actions)) < 0.3] = 0.0
        policies[1][rng.random((states, actions)) < 0.2] = 0.0
        policies[policies.sum(axis=2) == 0.0] = 1.0
        policies /= policies.sum(axis=2, keepdims=True)
    r, q = rng.normal(size=(2, states, actions))
    if sparse:
        import scipy.sparse as sp

        p = sp.csr_array(p.reshape(states * actions, states))
    return Case(TabularMDP(p, r, discount), policies[0], policies[1], q)


def pair_kernel(mdp: TabularMDP, policy: np.ndarray) -> np.ndarray:
    """``P[(x,a), (x',a')] = p(x'|x,a) π(a'|x')``, entry by entry."""
    p = mdp.dense_p()
    kernel = np.zeros((*mdp.r.shape, *mdp.r.shape))
    for x, a, y, b in np.ndindex(kernel.shape):
        kernel[x, a, y, b] = p[x, a, y] * policy[y, b]
    return kernel.reshape(mdp.r.size, mdp.r.size)


def power_visitation(mdp: TabularMDP, policy: np.ndarray) -> np.ndarray:
    """``(1-γ) Σ_t γ^t (P^μ)^t``, summed until nothing is left."""
    kernel = pair_kernel(mdp, policy)
    term, total = np.eye(mdp.r.size), np.zeros((mdp.r.size, mdp.r.size))
    while term.max() > 1e-17:
        total += term
        term = mdp.discount * term @ kernel
    return (1 - mdp.discount) * total


def backup_values(mdp: TabularMDP, policy: np.ndarray) -> np.ndarray:
    """Q^π as the limit of one-step backups, ``[S, A]``."""
    kernel, r, q = pair_kernel(mdp, policy), mdp.r.ravel(), np.zeros(mdp.r.size)
    while True:
        after = r + mdp.discount * kernel @ q
        if np.abs(after - q).max() < 1e-15 * max(1.0, np.abs(q).max()):
            return after.reshape(mdp.r.shape)
        q = after


def residual(mdp: TabularMDP, pi: np.ndarray, occupancy: np.ndarray) -> np.ndarray:
    """``(1-γ) δ + γ (P^π)ᵀ d - d`` for every start pair, ``[pairs, pairs]``."""
    d = occupancy.reshape(mdp.r.size, mdp.r.size)
    return (1 - mdp.discount) * np.eye(mdp.r.size) + mdp.discount * d @ pair_kernel(mdp, pi) - d


def bellman_error(mdp: TabularMDP, pi: np.ndarray, q: np.ndarray) -> np.ndarray:
    return mdp.r.ravel() + mdp.discount * pair_kernel(mdp, pi) @ q.ravel() - q.ravel()


def solve_dual(mdp: TabularMDP, pi: np.ndarray, start: int) -> float:
    """Eq. (eval-duallp)."""
    n, g = mdp.r.size, mdp.discount
    result = linprog(
        mdp.r.ravel() / (1 - g),
        A_eq=np.eye(n) - g * pair_kernel(mdp, pi).T,
        b_eq=(1 - g) * np.eye(n)[start],
        bounds=[(None, None)] * n,
    )
    assert result.status == 0
    return result.fun


def solve_relaxed(mdp: TabularMDP, pi: np.ndarray, q: np.ndarray, rate: float, start: int) -> float:
    """Eq. (eval-duallp-augmented-relaxed), with u, on variables (d, u)."""
    n, g = mdp.r.size, mdp.discount
    balance = g * pair_kernel(mdp, pi).T - np.eye(n)
    delta = (1 - g) * np.eye(n)[start]
    allowed = (1 - g) * np.eye(n)
    result = linprog(
        np.concatenate([bellman_error(mdp, pi, q) / (1 - g), np.zeros(n)]),
        A_ub=np.block(
            [[balance, -allowed], [-balance, -allowed], [np.zeros((1, n)), np.ones((1, n))]],
        ),
        b_ub=np.concatenate([-delta, delta, [rate]]),
        bounds=[(None, None)] * n + [(0, None)] * n,
    )
    assert result.status == 0
    return q.ravel()[start] + result.fun


def solve_fastest(mdp: TabularMDP, pi: np.ndarray, mu: np.ndarray, cap: float, start: int) -> float:
    """The smallest local rate of weights in [0, cap], on variables (w, u)."""
    n, g = mdp.r.size, mdp.discount
    visits = power_visitation(mdp, mu)[start]
    balance = (g * pair_kernel(mdp, pi).T - np.eye(n)) * visits
    delta = (1 - g) * np.eye(n)[start]
    result = linprog(
        np.concatenate([np.zeros(n), np.ones(n)]),
        A_ub=np.block([[balance, -np.eye(n)], [-balance, -np.eye(n)]]),
        b_ub=np.concatenate([-delta, delta]),
        bounds=[(0, cap)] * n + [(0, None)] * n,
    )
    assert result.status == 0
    return result.fun / (1 - g)


def capped_flow(mdp: TabularMDP, pi: np.ndarray, mu: np.ndarray, cap: float) -> np.ndarray:
    """The fixed point of ``d = min(cap d^μ, (1-γ) δ + γ (P^π)ᵀ d)`` for every start pair, by repetition."""
    caps = cap * power_visitation(mdp, mu)
    kernel = pair_kernel(mdp, pi)
    d = np.zeros_like(caps)
    while True:
        after = np.minimum(caps, (1 - mdp.discount) * np.eye(mdp.r.size) + mdp.discount * d @ kernel)
        if np.abs(after - d).max() < 1e-16:
            return after.reshape(*mdp.r.shape, *mdp.r.shape)
        d = after
