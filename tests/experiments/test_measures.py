"""Measures on learning curves, against values worked out by hand."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.experiments import measures


def test_relative_error_is_the_sum_over_actions():
    q = np.zeros((3, 7, 2, 2))
    q_pi = np.array([[2.0, 4.0], [9.0, 9.0]])
    assert measures.relative_error(q, q_pi).shape == (3, 7)
    assert np.all(measures.relative_error(q, q_pi) == 2.0)
    q[..., 0, 0] = 3.0
    np.testing.assert_allclose(measures.relative_error(q, q_pi), 1.5)


def test_time_to_counts_from_one_and_wants_the_level_for_good():
    assert measures.time_to(np.array([[0.5, 0.5]]), 1.0) == 1
    assert measures.time_to(np.array([[3.0, 0.5, 3.0, 0.5]]), 1.0) == 4
    assert measures.time_to(np.array([[3.0, 3.0]]), 1.0) == 3
    # It is the mean over seeds that counts.
    assert measures.time_to(np.array([[0.0, 0.0], [4.0, 1.0]]), 1.0) == 2


def test_a_curve_that_diverged_never_reached_a_level():
    assert measures.time_to(np.array([[3.0, 0.5, np.nan, np.nan]]), 1.0) == 5
    assert measures.time_to(np.array([[0.5, 0.5], [0.5, np.nan]]), 1.0) == 3
    assert measures.time_to(np.array([[np.nan, 0.5]]), 1.0) == 2
    assert measures.time_to(np.array([[0.5, 0.5]]), np.nan) == 3


def test_final_is_the_mean_of_the_last_fifth():
    curve = np.arange(10.0)[None].repeat(2, 0)
    assert measures.final(curve) == 8.5


@pytest.mark.slow
def test_streams_do_not_depend_on_their_neighbours():
    problem = mx.problems.open_world(n=3)
    both = measures.streams(problem, range(4), 3, 20, seed=5)
    some = measures.streams(problem, range(2, 4), 3, 20, seed=5)
    for one, other in zip(jax.tree.leaves(both), jax.tree.leaves(some), strict=True):
        np.testing.assert_array_equal(one[2:], other)
    assert (both.actions[0] != both.actions[1]).any()
