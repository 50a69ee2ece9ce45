"""Lookups in tables of action values, with few actions and with many."""

import numpy as np
import pytest

from marginax.targets import expected, taken


@pytest.mark.parametrize("actions", [1, 3, 40])
@pytest.mark.parametrize("lead", [(7,), (2, 5)])
def test_lookups_are_plain_indexing(actions, lead):
    rng = np.random.default_rng(0)
    table, policy = rng.normal(size=(2, *lead, actions))
    chosen = rng.integers(actions, size=lead)
    want = np.take_along_axis(table, chosen[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(taken(table, chosen), want, rtol=1e-6)
    np.testing.assert_allclose(expected(table, policy), (table * policy).sum(-1), rtol=1e-5, atol=1e-5)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"actions must have shape \(3,\)"):
        taken(np.ones((3, 2)), np.ones(4, int))
    with pytest.raises(ValueError, match=r"policy must have table's shape \(3, 2\)"):
        expected(np.ones((3, 2)), np.ones((3, 1)))
