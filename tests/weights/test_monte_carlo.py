"""Monte Carlo weights against loops over episodes, starts and visits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax.weights import MonteCarlo, monte_carlo
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(0)


def batch(seed=0, episodes=6, horizon=12, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


@pytest.mark.parametrize("reset", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("on_states", [False, True], ids=["pairs", "states"])
def test_every_form_equals_its_definition(on_states, reset):
    data = batch(reset=reset)
    assert data.ends.any(axis=0)[:-1].any()
    assert data.valid.all() == reset
    estimate = partial(monte_carlo, on_states=on_states)
    close = {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(
        estimate(data, C, factored=False), reference.running(data, C, 0.9, on_states), **close
    )
    np.testing.assert_allclose(
        estimate(data, C, factored=False, average="exponential", step_size=0.3),
        reference.exponential(data, C, 0.9, 0.3, on_states),
        **close,
    )
    np.testing.assert_allclose(
        estimate(data, C, as_printed=True), reference.algorithm_2(data, C, 0.9, 0.1, on_states), **close
    )


@pytest.mark.parametrize("reset", [False, True], ids=["padded", "packed"])
def test_the_default_averages_the_path_and_puts_in_the_last_trace(reset):
    data = batch(reset=reset)
    u = reference.paths(data, C, 0.9)
    with jax.enable_x64(True):
        estimate = monte_carlo(data, C, discount=0.9)
        assert estimate.dtype == np.float64
        np.testing.assert_allclose(estimate, reference.from_paths(u, data, C, 0.9), rtol=1e-12)


def test_in_double_precision_the_sums_are_exact():
    data = batch()
    with jax.enable_x64(True):
        estimate = monte_carlo(data, C, discount=0.9, factored=False)
        np.testing.assert_allclose(estimate, reference.running(data, C, 0.9), rtol=1e-12)


def test_one_row_equals_that_of_the_table():
    data = batch()
    for form in [{}, {"factored": False}, {"average": "exponential"}, {"as_printed": True}]:
        np.testing.assert_allclose(
            monte_carlo(data, C, start=(3, 1), **form), monte_carlo(data, C, **form)[3, 1], rtol=1e-6
        )
        np.testing.assert_allclose(
            monte_carlo(data, C, on_states=True, start=2, **form),
            monte_carlo(data, C, on_states=True, **form)[2],
            rtol=1e-6,
        )


@pytest.mark.parametrize(
    "form", [{}, {"factored": False}, {"average": "exponential"}, {"as_printed": True}], ids=str
)
def test_updates_one_by_one_equal_the_batch(form):
    data = batch()
    estimator = MonteCarlo.init(5, 2, 0.9, **form)
    update = jax.jit(lambda estimator, one: estimator.update(one, C))
    for i in range(6):
        estimator = update(estimator, jax.tree.map(lambda f, i=i: f[i], data))
    np.testing.assert_allclose(estimator.weights(C), monte_carlo(data, C, **form), rtol=1e-5)


@pytest.mark.slow
def test_seeds_side_by_side_equal_a_loop():
    seeds = [batch(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *seeds)
    blank = MonteCarlo.init(5, 2, 0.9, average="exponential")
    together = jax.vmap(lambda data: blank.update(data, C).weights(C))(stacked)
    for one, data in zip(together, seeds, strict=True):
        np.testing.assert_allclose(one, monte_carlo(data, C, average="exponential"), rtol=1e-5)


def test_padding_is_never_read():
    data = batch()
    assert not data.valid.all()
    np.testing.assert_array_equal(monte_carlo(reference.poisoned(data), C), monte_carlo(data, C))


@pytest.mark.slow
def test_converges_to_the_exact_weights_and_the_printed_form_does_not():
    exact = mx.weights.exact(MDP, MU, C)
    errors = [
        np.abs(monte_carlo(batch(1, episodes=n, horizon=40), C) - exact).mean() for n in (100, 5_000, 40_000)
    ]
    assert errors[2] < 0.015 * exact.mean()
    assert errors[1] < 0.25 * errors[0]
    on_pairs = monte_carlo(batch(1, episodes=5_000, horizon=40), C, factored=False)
    assert errors[1] < 0.8 * np.abs(on_pairs - exact).mean()
    printed = monte_carlo(batch(1, episodes=5_000, horizon=40), C, as_printed=True)
    assert np.abs(printed - exact).mean() > 0.5 * exact.mean()


@pytest.mark.slow
def test_state_weights_converge_to_the_exact_ones():
    exact = mx.weights.exact_states(MDP, MU, C)
    estimate = monte_carlo(batch(1, episodes=40_000, horizon=40), C, on_states=True)
    assert np.abs(estimate - exact).max() < 0.05


@pytest.mark.slow
def test_cutting_trajectories_short_biases_the_sums():
    exact = mx.weights.exact(MDP, MU, C)
    short = monte_carlo(batch(1, episodes=40_000, horizon=3), C)
    assert np.abs(short - exact).mean() > 0.05 * exact.mean()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"c": -C}, "c must not be negative"),
        ({"c": C[:2]}, r"trajectories.states must lie in range\(2\)"),
        ({"discount": 0.5}, "discount = 0.5 but trajectories.discounts hold 0.89"),
        ({"start": (9, 0)}, r"start\[0\] must lie in range\(5\), got 9"),
        ({"step_size": 0.0}, "step_size must lie in"),
        ({"average": "median"}, "average must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(arguments, words):
    arguments = {"c": C} | arguments
    with pytest.raises((ValueError, TypeError), match=words):
        monte_carlo(batch(), **arguments)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, "must be 0 or one value, but they hold both 0.5 and 0.89"),
        (np.nan, r"must be finite, but trajectories.discounts\[0, 3\] = nan"),
    ],
)
def test_refuses_discounts_that_differ_or_are_missing(value, words):
    data = batch(episodes=200)
    mixed = np.where(np.arange(12) == 3, value, np.asarray(data.discounts)).astype(np.float32)
    data = mx.trajectories.Trajectory(
        data.states, data.actions, data.rewards, mixed, data.next_states, data.truncated, None, data.valid
    )
    assert data.valid[0, 3]
    with pytest.raises(ValueError, match=words):
        monte_carlo(data, C)
