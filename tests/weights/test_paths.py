"""The factor of the path: exact against sums over times in the paper's notation, and against the weights it makes."""

import numpy as np
import pytest

import marginax as mx
from marginax.weights import exact, exact_states, paths, paths_states


def random_case(seed, states=6, actions=3, sparse=False):
    """Returns to the start, missing mass, actions that μ never takes, and states that are never reached."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(states, 0.3), (states, actions)) * rng.uniform(0.7, 1.0, (states, actions, 1))
    p[:, :, -1] = 0.0  # no pair leads to the last state
    mu = rng.dirichlet(np.ones(actions), states)
    mu[1] = [0.0, 0.4, 0.6]
    mdp = mx.TabularMDP(p, np.zeros((states, actions)), 0.9)
    if sparse:
        import scipy.sparse as sp

        mdp = mx.TabularMDP(sp.csr_array(p.reshape(-1, states)), np.zeros((states, actions)), 0.9)
    return mdp, mu, rng.uniform(0, 1.5, (states, actions)) / (1 + 1.5 * rng.random((states, actions)))


def by_times(mdp, mu, c, start):
    """Σ_{t≥1} γ^t E[c_1…c_{t-1} 1{x_t=y}] and Σ_{t≥1} γ^t P(x_t=y), one t after the other."""
    p, gamma = mdp.dense_p(), mdp.discount
    traced = visits = gamma * p[start]
    n, d = traced.copy(), visits.copy()
    for _ in range(1000):
        traced = gamma * np.einsum("x,xa,xa,xay->y", traced, mu, c, p)
        visits = gamma * np.einsum("x,xa,xay->y", visits, mu, p)
        n, d = n + traced, d + visits
    return n, d


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_are_paths_times_the_last_trace(seed, sparse):
    mdp, mu, c = random_case(seed, sparse=sparse)
    u, w = paths(mdp, mu, c), exact(mdp, mu, c)
    for start in np.ndindex(6, 3):
        n, d = by_times(mdp, mu, c, start)
        np.testing.assert_allclose(u[start], np.where(d > 0, n / np.where(d > 0, d, 1), 0), atol=1e-12)
        np.testing.assert_allclose(paths(mdp, mu, c, start=start), u[start], atol=1e-12)
        expected = np.where(mu > 0, u[start][:, None] * c, 0)
        returns = d[start[0]] * mu[start]
        expected[start] = (1 + returns * expected[start]) / (1 + returns)
        np.testing.assert_allclose(w[start], expected, atol=1e-12)
    assert not u[:, :, -1].any(), "a state that is never reached"
    assert (np.diagonal(u.sum(axis=1)) > 0)[:-1].all(), "paths that return"


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_on_states_they_are_the_weights_but_for_the_start(sparse):
    mdp, mu, c = random_case(4, sparse=sparse)
    u, w = paths_states(mdp, mu, c), exact_states(mdp, mu, c)
    pairs = paths(mdp, mu, c)
    for x in range(6):
        sums = [by_times(mdp, mu, c, (x, a)) for a in range(3)]
        d = sum(mu[x, a] * sums[a][1] for a in range(3))
        n = sum(mu[x, a] * c[x, a] * sums[a][1] * pairs[x, a] for a in range(3))
        expected = np.where(d > 0, n / np.where(d > 0, d, 1), 0)
        np.testing.assert_allclose(u[x], expected, atol=1e-12)
        np.testing.assert_allclose(paths_states(mdp, mu, c, start=x), u[x], atol=1e-12)
        expected[x] = (1 + d[x] * expected[x]) / (1 + d[x])
        np.testing.assert_allclose(w[x], expected, atol=1e-12)


@pytest.mark.parametrize("n", [300, pytest.param(1000, marks=pytest.mark.slow)])
def test_one_row_of_up_to_a_million_states(n):
    mdp, pi, _ = mx.problems.open_world(n)
    c = mx.traces.tree_backup(pi, pi)  # one way only: right and down
    u = paths(mdp, pi, c, start=(0, 2))
    assert u.shape == (n * n,)
    w = exact(mdp, pi, c, start=(0, 2))
    for x in (1, 2, n + 1, 5 * n + 3):
        np.testing.assert_allclose(w[x, 2:], u[x] * c[x, 2:], rtol=1e-9)
    assert u[1] == pytest.approx(1.0)
    assert u[2] == pytest.approx(0.5)


def test_refuses_time_dependent_traces_and_a_start_that_is_none():
    mdp, mu, c = random_case(0)
    for function in (paths, paths_states):
        with pytest.raises(ValueError, match="time-dependent traces have no factor of the path"):
            function(mdp, mu, np.stack([c, c]))
    with pytest.raises(ValueError, match=r"start\[0\] must lie in range\(6\), got 6"):
        paths(mdp, mu, c, start=(6, 0))
    with pytest.raises(ValueError, match="c is too large"):
        paths(mdp, mu, 10 + c)
