"""Fitted Q evaluation and the two saddle points, against fixed points, one another and the jackknife."""

import numpy as np
import pytest

import marginax as mx
from marginax.offline import Log, _duality, _fitted_q, evaluate
from marginax.offline._counts import count
from marginax.offline._model import certainty_equivalence
from marginax.offline._tabular import _td_weights
from reference import offline as naive
from reference.offline_logs import GAMMA, garnet_log


def prepared(log, pi):
    counts = count([log], 5, 3)
    return counts, certainty_equivalence(counts, pi, GAMMA)


def test_retrace_fit_is_the_fixed_point_of_averaged_targets():
    _, pi, mu, log = garnet_log(0)
    _, model = prepared(log, pi)
    traces = mx.traces.retrace(pi, mu)
    fit = _fitted_q.fit(log, model, pi, traces, GAMMA)
    v = (pi * fit.q).sum(axis=1)
    averaged = naive.mean_targets(naive.episodes_of(log), fit.q, v, traces, GAMMA, (5, 3))
    np.testing.assert_allclose(averaged, fit.q, atol=1e-6)
    assert fit.residual < 1e-6


def test_one_step_fit_is_certainty_equivalence():
    _, pi, _, log = garnet_log(1)
    _, model = prepared(log, pi)
    fit = _fitted_q.fit(log, model, pi, np.zeros((5, 3)), GAMMA)
    np.testing.assert_allclose(fit.q, model.q, atol=1e-6)


def test_marginalized_fit_is_near_certainty_equivalence():
    _, pi, mu, log = garnet_log(3, episodes=800)
    counts, model = prepared(log, pi)
    traces = mx.traces.retrace(pi, mu)
    fit = _fitted_q.fit(log, model, pi, traces, GAMMA, _td_weights(counts, traces, GAMMA))
    retrace = _fitted_q.fit(log, model, pi, traces, GAMMA)
    assert fit.residual < 1e-6
    assert 0 < np.abs(fit.q - model.q).max() < 0.5
    assert np.abs(fit.q - retrace.q).max() > 1e-6


def test_influences_of_fitted_values():
    _, pi, mu, log = garnet_log(4, episodes=384)
    traces = mx.traces.retrace(pi, mu)

    def estimate(part):
        counts, model = prepared(part, pi)
        fit = _fitted_q.fit(part, model, pi, traces, GAMMA)
        return _fitted_q.estimate(fit, part, counts, model, pi, traces, GAMMA)

    full = estimate(log)
    chosen = np.argsort(full.influence)[[0, 1, 2, 100, 200, 300, -3, -2, -1]]
    change = np.array([full.value - estimate(log.select(np.delete(np.arange(384), i))).value for i in chosen])
    np.testing.assert_allclose(change * 384, full.influence[chosen], atol=0.2 * np.abs(full.influence).max())
    assert np.corrcoef(change, full.influence[chosen])[0, 1] > 0.98


@pytest.mark.parametrize("method", ["saddle-point", "fenchel"])
def test_saddle_points_meet_certainty_equivalence(method):
    _, pi, _, log = garnet_log(5)
    counts, model = prepared(log, pi)
    weights, error = _duality.solve_weights(counts, model, pi, GAMMA, method)
    np.testing.assert_allclose(weights, model.weights, atol=1e-6)
    assert error < 1e-6


def test_saddle_points_without_full_support():
    log = Log.from_episodes(
        [{"states": [0, 1, 0], "actions": [0, 0], "rewards": [1.0, 2.0], "terminal": True}] * 4
    )
    pi = np.array([[0.9, 0.1], [0.5, 0.5]])
    names = ("certainty-equivalence", "saddle-point", "fenchel", "fqe-one-step")
    answers = evaluate(log, pi, discount=GAMMA, estimators=names).answers
    for name in names[1:]:
        np.testing.assert_allclose(answers[name].value, answers[names[0]].value, rtol=1e-6)
