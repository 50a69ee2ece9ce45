"""Regression weights against a design matrix with one row for every start and visit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax.weights import Regression, monte_carlo, regression
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(2)
RNG = np.random.default_rng(0)
FEATURES = RNG.normal(size=(5, 3))
START_FEATURES = RNG.normal(size=(5, 2, 2))


def batch(seed=0, episodes=8, horizon=10, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


@pytest.mark.slow
def test_without_features_it_is_the_monte_carlo_ratio():
    data = batch()
    np.testing.assert_array_equal(regression(data, C), monte_carlo(data, C))
    np.testing.assert_array_equal(
        regression(data, C, on_states=True, start=1), monte_carlo(data, C, on_states=True, start=1)
    )


def test_one_hot_features_are_tables():
    data = batch()
    np.testing.assert_allclose(
        regression(data, C, features=np.eye(5), ridge=1e-7), monte_carlo(data, C), rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("reset", [False, True], ids=["padded", "packed"])
def test_equals_least_squares_on_every_start_and_visit(reset):
    data = batch(reset=reset, episodes=20)
    close = {"rtol": 1e-3, "atol": 1e-3}
    for psi in (None, START_FEATURES):
        u = reference.least_squares(data, C, 0.9, FEATURES, psi)
        np.testing.assert_allclose(
            regression(data, C, features=FEATURES, start_features=psi, ridge=0.0),
            reference.from_paths(u, data, C, 0.9),
            **close,
        )
    np.testing.assert_allclose(
        regression(data, C, on_states=True, features=FEATURES, ridge=0.0, start=3),
        reference.least_squares(data, C, 0.9, FEATURES, on_states=True)[3],
        **close,
    )


@pytest.mark.slow
@pytest.mark.parametrize("start_features", [None, START_FEATURES], ids=["each start", "start features"])
def test_updates_one_by_one_and_side_by_side_equal_the_batch(start_features):
    seeds = [batch(seed, episodes=20) for seed in range(2)]
    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *seeds)

    def run(data):
        first = Regression.init(FEATURES, 2, 0.9, start_features=start_features)
        last, _ = jax.lax.scan(lambda estimator, one: (estimator.update(one, C), None), first, data)
        return last.weights(C)

    for one, data in zip(jax.jit(jax.vmap(run))(stacked), seeds, strict=True):
        np.testing.assert_allclose(
            one, regression(data, C, features=FEATURES, start_features=start_features), rtol=2e-3, atol=1e-3
        )


def test_a_start_without_data_has_zero_weights():
    data = batch(episodes=1, horizon=2, start_states=0, start_actions=0)
    table = np.asarray(regression(data, C, features=FEATURES))
    missing = np.ones((5, 2), bool)
    for episode in reference.episodes(data):
        for x, a, _, _ in episode:
            missing[x, a] = False
    assert not table[missing].any()
    assert np.isfinite(table).all()


def test_padding_is_never_read():
    data = batch()
    np.testing.assert_array_equal(
        regression(reference.poisoned(data), C, features=FEATURES), regression(data, C, features=FEATURES)
    )


@pytest.mark.slow
def test_converges_to_exact_weights_that_the_features_hold():
    exact = mx.weights.exact(MDP, MU, C)
    left, scale, right = np.linalg.svd(mx.weights.paths(MDP, MU, C).reshape(10, 5), full_matrices=False)
    features, starts = right.T, (left * scale).reshape(5, 2, 5)
    errors = [
        np.abs(
            regression(batch(1, episodes=n, horizon=40), C, features=features, start_features=starts) - exact
        ).mean()
        for n in (200, 20_000)
    ]
    assert errors[1] < 0.05 * exact.mean()
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"features": FEATURES[:3]}, r"features must have shape \(5, any\), got \(3, 3\)"),
        ({"start_features": START_FEATURES}, "start_features needs features"),
        ({"features": FEATURES, "ridge": -1.0}, "ridge must be at least 0"),
        ({"features": np.ones((5, 2)), "ridge": 0.0}, "ridge = 0.0 is too small: .* linearly dependent"),
        ({"features": np.ones((5, 0))}, r"features must have at least one column, got shape \(5, 0\)"),
        (
            {"features": FEATURES, "start_features": FEATURES},
            r"start_features must have shape \(5, 2, any\), got \(5, 3\)",
        ),
        ({"features": FEATURES, "start": (0, 7)}, r"start\[1\] must lie in range\(2\), got 7"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        regression(batch(), C, **arguments)
