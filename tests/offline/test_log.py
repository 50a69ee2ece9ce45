"""The flat layout of a log: products, sums and selections within episodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marginax.offline import Log, open_data


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    zeros=st.booleans(),
)
def test_products_sums_and_selections_stay_within_episodes(lengths, seed, zeros):
    rng = np.random.default_rng(seed)
    log = Log.from_episodes(
        [
            {
                "states": rng.integers(3, size=n + 1),
                "actions": rng.integers(2, size=n),
                "rewards": rng.normal(size=n),
                "terminal": bool(rng.integers(2)),
            }
            for n in lengths
        ]
    )
    x = rng.exponential(size=len(log))
    if zeros:
        x[rng.random(len(log)) < 0.3] = 0.0
    parts = np.split(x, np.cumsum(lengths)[:-1])
    np.testing.assert_allclose(
        log.products(x), np.concatenate([np.cumprod(part) for part in parts]), rtol=1e-9
    )
    np.testing.assert_allclose(log.sums(x), [part.sum() for part in parts], rtol=1e-12)
    np.testing.assert_array_equal(log.times, np.concatenate([np.arange(n) for n in lengths]))
    assert log.truncated.sum() == (~log.terminal[log.last]).sum()
    order = rng.integers(len(lengths), size=4)
    chosen = log.select(order)
    np.testing.assert_array_equal(chosen.lengths, np.array(lengths)[order])
    expected = np.concatenate([np.split(log.rewards, np.cumsum(lengths)[:-1])[i] for i in order])
    np.testing.assert_array_equal(chosen.rewards, expected)


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ([True, False], "episodes must be whole numbers, got bool"),
        ([0, 2], r"episodes must lie in range\(2\), but episodes\[1\] = 2"),
        ([-1], r"episodes must lie in range\(2\), but episodes\[0\] = -1"),
        ([0.5], "episodes must be whole numbers, got float64"),
    ],
)
def test_selections_of_episodes_that_are_not_there_are_refused(episodes, message):
    log = Log.from_episodes([{"states": [0], "actions": [0], "rewards": [0.0], "terminal": True}] * 2)
    with pytest.raises(ValueError, match=message):
        log.select(episodes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"states": np.zeros(3, int)},
            r"states must have 4 rows, as many as there are rewards, got shape \(3,\)",
        ),
        ({"behaviour": np.ones(2)}, r"behaviour must have 4 rows"),
        ({"terminal": np.array([0, 1, 0, 1])}, "terminal must be an array of bool, got int64"),
        ({"offsets": np.array([0, 2, 5])}, "offsets must rise from 0 to the number of rows, 4"),
        ({"offsets": np.array([0, 2, 2, 4])}, "offsets must rise from 0 to the number of rows, 4"),
        ({"names": ["a"]}, "names must be those of 2 episodes, got 1"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(change, message):
    log = Log.from_episodes(
        [{"states": [0] * 3, "actions": [0] * 2, "rewards": [0.0] * 2, "terminal": True}] * 2
    )
    assert log.checked() is log
    with pytest.raises(ValueError, match=message):
        open_data(replace(log, **change))


def test_products_do_not_overflow():
    log = Log.from_episodes(
        [{"states": [0] * 501, "actions": [0] * 500, "rewards": [0.0] * 500, "terminal": True}] * 2
    )
    products = log.products(np.full(1000, 100.0))
    assert np.isfinite(products**2).all()
    np.testing.assert_allclose(products[:3], [1e2, 1e4, 1e6])
    np.testing.assert_allclose(products[500:503], [1e2, 1e4, 1e6])
