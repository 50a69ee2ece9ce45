"""Intervals that cover as often as they say, paired samples, and means worked out by hand."""

import numpy as np
import pytest

from marginax.statistics import Interval, bootstrap, interquartile_mean, studentised_bootstrap


def test_percentile_intervals_cover_a_mean():
    rng = np.random.default_rng(1)
    hits = sum(0.0 in bootstrap(rng.normal(size=60), replicates=400, seed=k) for k in range(200))
    assert 180 <= hits <= 199


def test_samples_in_a_tuple_are_paired():
    noise = np.random.default_rng(2).normal(size=50)
    assert bootstrap((noise + 1, noise), lambda x, y: (x - y).mean()).width < 1e-12
    assert bootstrap((noise + 1, noise[::-1]), lambda x, y: (x - y).mean()).width > 0.1


def test_the_interval_of_a_vector_is_that_of_its_entries():
    values = np.random.default_rng(3).normal(size=(20, 3))
    whole = bootstrap(values, interquartile_mean, replicates=300)
    for k in range(3):
        each = bootstrap(values[:, k], interquartile_mean, replicates=300)
        np.testing.assert_allclose([whole.low[k], whole.high[k]], [each.low, each.high], rtol=1e-12)


@pytest.mark.parametrize("values", [(np.zeros(3), np.zeros(4)), np.zeros((0, 2)), 1.0])
def test_rows_that_do_not_match_are_refused(values):
    with pytest.raises(ValueError, match="values must have the same, non-zero number of rows, got"):
        bootstrap(values, lambda *x: 0.0)


def test_interquartile_mean_counts_the_edges_in_part():
    # Of six values, a quarter is one and a half: half of the second and of the fifth count.
    assert interquartile_mean([0, 1, 2, 3, 4, 50]) == pytest.approx((0.5 * 1 + 2 + 3 + 0.5 * 4) / 3)
    assert interquartile_mean([7.0]) == 7.0
    table = np.arange(12.0).reshape(3, 4)
    np.testing.assert_allclose(interquartile_mean(table, axis=1), table.mean(axis=1))


def test_studentised_interval_of_a_skewed_mean_covers_where_the_normal_one_falls_short():
    rng = np.random.default_rng(0)
    inside = normal = 0
    for _ in range(400):
        x = rng.lognormal(sigma=1.0, size=40)
        truth = np.exp(0.5)
        inside += truth in studentised_bootstrap(x.mean(), x - x.mean())
        normal += abs(x.mean() - truth) < 1.96 * x.std(ddof=1) / np.sqrt(40)
    assert inside / 400 > 0.91
    assert inside >= normal


def test_degenerate_samples_have_no_false_width():
    assert studentised_bootstrap(2.0, np.zeros(10)).width < 1e-5
    assert studentised_bootstrap(2.0, np.zeros(1)).width == np.inf
    assert Interval(1.0, 1.0).width == 0.0


@pytest.mark.parametrize(
    ("values", "settings", "message"),
    [
        ([1.0, 2.0, 3.0], {"level": 95.0}, r"level must lie in \(0, 1\), got 95"),
        ([1.0, 2.0, 3.0], {"replicates": 0}, "replicates must be at least 1"),
    ],
)
def test_impossible_settings_of_the_bootstrap_are_refused(values, settings, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(values, **settings)


def test_a_row_that_is_not_finite_leaves_the_interval_of_its_columns_alone_undefined():
    values = np.array([[1.0, 1.0], [2.0, np.nan], [3.0, 3.0]])
    found, known = bootstrap(values, interquartile_mean), bootstrap(values[:, 0], interquartile_mean)
    np.testing.assert_array_equal([found.low, found.high], [[known.low, np.nan], [known.high, np.nan]])


def test_nothing_has_no_interquartile_mean():
    with pytest.raises(ValueError, match="at least one entry"):
        interquartile_mean(np.zeros((0, 3)))
