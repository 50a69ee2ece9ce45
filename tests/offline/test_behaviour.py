"""Logged behaviour probabilities against how often the actions were taken."""

import numpy as np
import pytest
from scipy.stats import binom, chi2, norm

from marginax.offline import Log
from marginax.offline.behaviour import calibration
from marginax.offline.certainty_equivalence import Counts


def counted(decisions, logged):
    """The counts of `decisions` [S, A] in episodes of one step, with probabilities `logged` [S, A]."""
    episodes = [
        {"states": [x], "actions": [a], "rewards": [0.0], "terminal": True, "behaviour": [logged[x][a]]}
        for x, row in enumerate(decisions)
        for a, number in enumerate(row)
        for _ in range(number)
    ]
    counts = Counts(*np.shape(logged))
    counts.update(Log.from_episodes(episodes))
    return counts.whole


@pytest.mark.parametrize(
    ("decisions", "logged"),
    [
        ([[60, 40]], [[0.5, 0.5]]),
        ([[80, 120, 100]], [[0.3, 0.3, 0.4]]),
        ([[60, 40], [30, 70]], [[0.55, 0.45], [0.25, 0.75]]),
    ],
)
def test_the_deviation_is_that_of_pearsons_test(decisions, logged):
    n, p = np.array(decisions, float), np.array(logged)
    expected = n.sum(axis=1, keepdims=True) * p
    freedom = n.size - len(n)
    exact = norm.isf(chi2.sf(((n - expected) ** 2 / expected).sum(), freedom))
    assert calibration(counted(decisions, logged)).deviation == pytest.approx(exact, abs=0.06)


def test_rare_actions_are_left_out_of_pearsons_test_and_the_scale_is_right():
    """The third action is expected in fewer than five decisions; deviations of true probabilities are like those of a normal variable."""
    rng = np.random.default_rng(0)
    p = np.array([[0.6, 0.39, 0.01], [0.2, 0.3, 0.5]])
    found = [calibration(counted([rng.multinomial(100, row) for row in p], p)).deviation for _ in range(300)]
    assert abs(np.mean(found)) < 0.15
    assert np.std(found) == pytest.approx(1.0, abs=0.12)


def test_a_fair_coin_that_falls_unevenly_by_chance_is_not_suspicious():
    """3.3 standard errors: one log in a thousand."""
    assert not calibration(counted([[5165, 4835]], [[0.5, 0.5]])).suspicious
    assert calibration(counted([[5500, 4500]], [[0.5, 0.5]])).suspicious


@pytest.mark.parametrize("probability", [0.001, 0.004])
def test_a_rare_action_that_is_taken_often_is_suspicious(probability):
    """Pearson's test leaves it out, and with it the other action; `rare_deviation` is that of the binomial tail."""
    logged = [[1 - probability, probability]] * 2
    found = calibration(counted([[1100, 100], [1200, 0]], logged))
    assert found.deviation == 0.0 and found.suspicious
    few = calibration(counted([[1195, 5], [1200, 0]], logged)).rare_deviation
    p = probability
    seen = 1 - (1 - p) ** 1200
    assert few == pytest.approx(norm.isf(binom.sf(4, 1200, p) / seen), abs=0.5)


def test_rare_actions_of_the_logged_policy_are_not_suspicious():
    """Five hundred states with a few decisions each, most of whose pairs are rare."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        p = rng.dirichlet(np.full(4, 0.3), 500) * 0.99 + 0.0025
        found = calibration(counted([rng.multinomial(rng.integers(1, 30), row) for row in p], p))
        assert found.rare_deviation < 4
