"""Losses of weight networks: least at the mean, zero products included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.weights import losses


@pytest.mark.parametrize(
    ("power", "shift"), [(0, 0), (0.5, 0), (1, 0), (1.5, 0), (1.5, 0.01), (2, 0.01), (2, 0.5)]
)
def test_deviance_is_least_at_the_mean(power, shift):
    products, chances = jnp.array([0.0, 0.5, 8.0]), jnp.array([0.6, 0.3, 0.1])
    scores = jnp.linspace(-6, 4, 20_001)
    each = losses.deviance(jnp.tile(scores, (3, 1)), jnp.tile(products[:, None], 20_001), power, shift)
    average = chances @ each
    assert np.exp(scores[jnp.argmin(average)]) == pytest.approx(float(chances @ products), rel=1e-2)


def test_gamma_deviance_of_zero_is_bounded_by_the_shift_alone():
    low, zero = jnp.array([-10.0, -20.0]), jnp.zeros(2)
    assert losses.deviance(low, zero, 2)[1] == pytest.approx(-20)
    np.testing.assert_allclose(losses.deviance(low, zero, 2, 0.01), np.log(0.01) + 1, atol=0.1)


def test_nothing_is_read_after_an_end():
    f, traces = jnp.array([0.0, 0.0, 0.3, 0.1, jnp.nan]), jnp.array([jnp.nan, 0.5, 2.0, jnp.nan, jnp.nan])
    discounts = jnp.array([0.9, 0.9, 0.9, 0.0, 0.9])
    for mixture in (0.0, 1.0):
        value, slope = jax.value_and_grad(losses.path_deviance)(f, traces, discounts, mixture=mixture)
        assert np.isfinite(value) and np.isfinite(slope).all() and slope[4] == 0
    truncated = jnp.array([False, False, True, False, False])
    slope = jax.grad(losses.path_deviance)(f, traces, discounts, truncated)
    assert slope[2] != 0 and (slope[3:] == 0).all()


def test_bootstraps_come_from_the_target_network_if_there_is_one():
    f, traces, discounts = jnp.zeros(4), jnp.array([9.0, 2.0, 2.0, 9.0]), jnp.ones(4)
    own, given = (
        jax.grad(
            lambda f, b=b: losses.path_deviance(f, traces, discounts, mixture=0.0, shift=0.0, bootstrap=b)
        )(f)
        for b in (None, jnp.array([1.0, 1.0, 3.0, 1.0]))
    )
    np.testing.assert_allclose(own, [0, 0, 1 - 2, 1 - 2], atol=1e-6)
    np.testing.assert_allclose(given, [0, 0, 1 - 2, 1 - 6], atol=1e-6)
