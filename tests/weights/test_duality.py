"""Saddle point and Fenchel duality: agreement with certainty equivalence as tables, with closed forms in features."""

from functools import partial
from inspect import signature

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marginax as mx
from marginax.weights import (
    certainty_equivalence,
    fenchel,
    saddle_point,
)
from marginax.weights.duality import _duality_gap as duality_gap
from marginax.weights.duality import _Problem as Problem
from marginax.weights.duality import _solve as solve
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(3)
BOTH = pytest.mark.parametrize("estimate", [saddle_point, fenchel], ids=["saddle point", "fenchel"])
BOTH_STATES = pytest.mark.parametrize(
    "estimate",
    [partial(saddle_point, on_states=True), partial(fenchel, on_states=True)],
    ids=["saddle point", "fenchel"],
)


def batch(seed=0, episodes=40, horizon=12, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


@BOTH
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000), episodes=st.sampled_from([1, 5, 40]), logged=st.booleans())
def test_as_tables_both_agree_with_certainty_equivalence(estimate, seed, episodes, logged):
    data = batch(seed, episodes=episodes)
    data = data if logged else reference.without_behaviour(data)
    ours, info = estimate(data, C, tolerance=1e-9, return_info=True)
    np.testing.assert_allclose(ours, certainty_equivalence(data, C), atol=2e-5)
    assert info.gap <= 1e-9
    assert info.behaviour == ("logged" if logged else "counts")


@BOTH
def test_traces_above_the_ratio_where_episodes_end_are_not_cut_off(estimate):
    """0 -> 1 -> the end with γ = 1/2 and c = 5 on arrival: the credit of 1 is more than that of any path from a state."""
    one = np.ones(2, np.float32)
    data = mx.trajectories.Trajectory(
        np.array([0, 1]),
        np.array([0, 0]),
        one,
        np.float32([0.5, 0.0]),
        np.array([1, 0]),
        one < 0,
        None,
        one > 0,
    )
    w = estimate(data, [[1.0], [5.0]], mu=np.ones((2, 1)), tolerance=1e-9)
    np.testing.assert_allclose(w[:, 0, :, 0], [[1, 5], [0, 1]], atol=1e-5)


@BOTH_STATES
def test_on_states_too(estimate):
    data = batch()
    np.testing.assert_allclose(
        estimate(data, C, tolerance=1e-9), certainty_equivalence(data, C, on_states=True), atol=1e-5
    )


@BOTH
def test_one_row_equals_that_of_the_table(estimate):
    data = batch(episodes=2)
    table = estimate(data, C, tolerance=1e-9)
    for start in ((0, 0), (3, 1)):
        np.testing.assert_allclose(estimate(data, C, tolerance=1e-9, start=start), table[start], atol=2e-5)


@BOTH
def test_long_horizons_and_large_traces(estimate):
    mdp, pi, mu = mx.problems.open_world(n=4)
    c = mx.traces.retrace(pi, mu, clip=2.0)
    data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=30, horizon=200)
    ours, info = estimate(data, c, return_info=True)
    exact = certainty_equivalence(data, c)
    error = (mdp.visitation(mu) * np.abs(ours - exact)).sum(axis=(2, 3)).max()
    assert error < 1e-5
    assert info.gap <= 1e-7
    assert info.iterations < 10_000


@BOTH
def test_converges_to_the_exact_weights(estimate):
    exact = mx.weights.exact(MDP, MU, C)
    errors = [np.abs(estimate(batch(1, episodes=n, horizon=30), C) - exact).mean() for n in (20, 5_000)]
    assert errors[1] < 0.02 * exact.mean()
    assert errors[1] < 0.3 * errors[0]


def closed_form(data, phi, start):
    """θ with Σ_{x',a'} d(x',a') φ·θ (φ - γ E[c φ(x'',a'')]) = (1-γ) φ(x,a), sums over the empirical MDP."""
    p, _ = reference.empirical(data, 5, 2)
    visits = np.zeros((5, 2))
    current = np.zeros((5, 2))
    current[start] = 1.0
    for _ in range(500):
        visits += 0.1 * current
        current = 0.9 * np.einsum("xa,xay->y", current, p)[:, None] * MU
    left = np.zeros((phi.shape[-1],) * 2)
    for x in range(5):
        for a in range(2):
            ahead = sum(p[x, a, y] * MU[y, b] * C[y, b] * phi[y, b] for y in range(5) for b in range(2))
            left += visits[x, a] * np.outer(phi[x, a] - 0.9 * ahead, phi[x, a])
    return phi @ np.linalg.solve(left, 0.1 * phi[start])


@BOTH
def test_linear_features_solve_the_projected_balance_equation(estimate):
    data = batch(episodes=200)
    phi = np.random.default_rng(1).normal(size=(5, 2, 3))
    table = estimate(data, C, mu=MU, features=phi, tolerance=1e-9)
    for start in ((0, 0), (2, 1)):
        np.testing.assert_allclose(table[start], closed_form(data, phi, start), atol=2e-4)
        row = estimate(data, C, mu=MU, features=phi, tolerance=1e-9, start=start)
        np.testing.assert_allclose(row, table[start], atol=2e-4)


@BOTH
def test_one_hot_features_are_tables(estimate):
    data = batch(episodes=200)
    one_hot = np.eye(10).reshape(5, 2, 10)
    np.testing.assert_allclose(
        estimate(data, C, features=one_hot, tolerance=1e-9), certainty_equivalence(data, C), atol=2e-4
    )


@BOTH_STATES
def test_one_hot_state_features_are_tables(estimate):
    data = batch(episodes=200)
    ours = estimate(data, C, features=np.eye(5), tolerance=1e-9)
    np.testing.assert_allclose(ours, certainty_equivalence(data, C, on_states=True), atol=2e-4)


def test_a_larger_critic_class_measures_a_larger_residual():
    """With more critics than weights the balance equation cannot hold in full, and the rest is found in the L1 norm."""
    data = batch(episodes=200)
    phi, psi = np.ones((5, 2, 1)), np.eye(10).reshape(5, 2, 10)
    start = (1, 0)
    w = saddle_point(data, C, mu=MU, features=phi, critic_features=psi, start=start, tolerance=1e-8)
    p, _ = reference.empirical(data, 5, 2)
    kernel = np.einsum("xay,yb->xayb", p, C * MU).reshape(10, 10)
    behaviour = np.einsum("xay,yb->xayb", p, MU).reshape(10, 10)
    first = np.eye(10)[2]
    d = 0.1 * np.linalg.solve(np.eye(10) - 0.9 * behaviour.T, first)

    def residual(theta):
        return np.abs(0.1 * first - (np.eye(10) - 0.9 * kernel.T) @ (d * theta)).sum()

    grid = np.linspace(0, 2, 20_001)
    assert residual(w[0, 0]) == pytest.approx(min(residual(theta) for theta in grid), abs=1e-5)


@BOTH
def test_padding_is_never_read(estimate):
    data = batch()
    np.testing.assert_array_equal(estimate(reference.poisoned(data), C), estimate(data, C))


def test_the_gap_is_the_difference_of_the_two_optima():
    rng = np.random.default_rng(0)
    matrix, b = rng.normal(size=(3, 2)), rng.normal(size=(2, 1))
    x, y = rng.uniform(0, 1, (3, 1)), rng.uniform(-1, 1, (2, 1))
    problem = Problem(
        lambda y: matrix @ y,
        lambda x: matrix.T @ x,
        np.abs(matrix).sum(axis=1)[:, None],
        np.abs(matrix).sum(axis=0)[:, None],
        b,
        0.0,
        0.0,
        1.0,
        1.0,
    )

    def loss(x, y):
        return (x * (matrix @ y)).sum() - (b * y).sum()

    corners_x = np.array(np.meshgrid([0, 1], [0, 1], [0, 1])).reshape(3, -1)
    corners_y = np.array(np.meshgrid([-1, 1], [-1, 1])).reshape(2, -1)
    most = max(loss(corner[:, None], y) for corner in corners_x.T)
    least = min(loss(x, corner[:, None]) for corner in corners_y.T)
    assert duality_gap(problem, x, y)[0] == pytest.approx(most - least)
    assert solve(problem, 1e-8, 10_000).gap <= 1e-8


def test_both_take_the_same_arguments():
    assert signature(fenchel).parameters == signature(saddle_point).parameters


@BOTH
def test_says_when_the_gap_was_not_reached(estimate):
    with pytest.warns(UserWarning, match="not reached in 40 iterations: the duality gap is"):
        _, info = estimate(batch(), C, max_iterations=40, tolerance=1e-12, return_info=True)
    assert info.gap > 1e-12
    assert info.iterations == 40


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"max_iterations": 0}, "max_iterations must be at least 1"),
        ({"features": np.ones((4, 2, 1))}, r"features must have shape \(5, 2, any\)"),
        ({"features": np.ones((5, 2, 0))}, r"features must have at least one column, got shape \(5, 2, 0\)"),
        ({"features": np.ones((5, 2, 1)), "radius": -1.0}, "radius must be positive, got -1"),
        ({"critic_features": np.ones((5, 2, 1))}, "critic_features needs features"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@BOTH
def test_refuses(estimate, arguments, words):
    with pytest.raises(ValueError, match=words):
        estimate(batch(), C, **arguments)
