"""Fitted Q evaluation and the two saddle points, against fixed points, one another and the jackknife."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax.offline import Log, evaluate, fitted_q, open_data, sequences
from marginax.offline.certainty_equivalence import Counts, certainty_equivalence
from reference import offline as naive
from reference.offline_logs import GAMMA, garnet_log


def backup_of(log, pi, traces, *, weights=False):
    counts = Counts(5, 3)
    counts.update(log)
    model = certainty_equivalence(counts.whole, pi, GAMMA)
    if not weights:
        return fitted_q.Backup(open_data(log), counts, model, pi, traces, GAMMA)

    def gather(empty):
        half = log.num_episodes // 2
        parts = [copy.deepcopy(empty) for _ in range(2)]
        parts[0].update(log.select(np.arange(half)), 0)
        parts[1].update(log.select(np.arange(half, log.num_episodes)), half)
        parts[0].merge(parts[1])
        return parts[0]

    return fitted_q.MarginalizedBackup(gather, counts, model, pi, traces, GAMMA)


def test_retrace_fit_is_the_fixed_point_of_averaged_targets():
    _, pi, mu, log = garnet_log(0)
    traces = mx.traces.retrace(pi, mu)
    fit = backup_of(log, pi, traces).solve()
    v = (pi * fit.q).sum(axis=1)
    averaged = naive.mean_targets(naive.episodes_of(log), fit.q, v, traces, GAMMA, (5, 3))
    np.testing.assert_allclose(averaged, fit.q, atol=1e-6)
    assert fit.residual < 1e-6


def test_one_step_fit_is_certainty_equivalence():
    _, pi, _, log = garnet_log(1)
    backup = backup_of(log, pi, np.zeros((5, 3)))
    np.testing.assert_allclose(backup.solve().q, backup.model.q[0], atol=1e-6)


def test_marginalized_fit_is_near_certainty_equivalence():
    _, pi, mu, log = garnet_log(3, episodes=800)
    traces = mx.traces.retrace(pi, mu)
    backup = backup_of(log, pi, traces, weights=True)
    fit, retrace = backup.solve(), backup_of(log, pi, traces).solve()
    assert fit.residual < 1e-6
    assert 0 < np.abs(fit.q - backup.model.q[0]).max() < 0.5
    assert np.abs(fit.q - retrace.q).max() > 1e-6


def test_a_log_in_pieces_read_again_for_each_backup_gives_the_same(monkeypatch):
    _, pi, mu, log = garnet_log(3, episodes=90)
    traces = mx.traces.retrace(pi, mu)
    whole = backup_of(log, pi, traces)
    expected = fitted_q.estimate(whole.solve(), whole)
    monkeypatch.setattr(sequences, "PIECE", 150)
    monkeypatch.setattr(fitted_q, "HELD", 0)
    streamed = backup_of(log, pi, traces)
    assert len(list(streamed.parts())) > 3
    found = fitted_q.estimate(streamed.solve(), streamed)
    np.testing.assert_allclose(found.value, expected.value, rtol=1e-7)
    np.testing.assert_allclose(found.influence, expected.influence, atol=1e-6)


def test_the_marginalized_backup_is_the_mean_of_sampled_targets(monkeypatch):
    """Against `targets.marginalized` on each window of each episode, for the backup, its targets and its transpose."""
    monkeypatch.setattr(fitted_q, "WINDOW", 4)
    _, pi, mu, log = garnet_log(2, episodes=40)
    backup = backup_of(log, pi, mx.traces.retrace(pi, mu), weights=True)
    rng = np.random.default_rng(0)
    q, y = rng.normal(size=(2, 5, 3)) * (backup.visits > 0)
    v, pairs = (pi * q).sum(axis=1), log.states * 3 + log.actions
    expected = np.empty(len(log))
    for i in range(log.num_episodes):
        for begin in range(log.offsets[i], log.offsets[i + 1], 4):
            rows = np.arange(begin, min(begin + 4, log.offsets[i + 1]))
            expected[rows] = mx.targets.marginalized(
                q.ravel()[pairs[rows]],
                v[np.where(log.terminal[rows], 0, log.next_states[rows])],
                log.rewards[rows],
                np.where(log.terminal[rows], 0.0, GAMMA),
                backup.sums.weights[np.ix_(pairs[rows], pairs[rows])],
            )
    found = backup.sums.targets(log, q, v)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    mean = np.bincount(pairs, found, minlength=15) / np.maximum(np.bincount(pairs, minlength=15), 1)
    np.testing.assert_allclose(backup(q).ravel(), mean, rtol=1e-9)
    linear = backup(q) - backup(np.zeros((5, 3)))
    np.testing.assert_allclose((y * linear).sum(), (backup.transposed(y) * q).sum(), rtol=1e-9)


@pytest.mark.parametrize("window", [None, 4])
def test_packed_targets_equal_those_of_single_episodes(window):
    """Episodes share sequences; each must see its own steps only, and a window bootstraps at its end."""
    _, pi, mu, log = garnet_log(2, episodes=40)
    rng = np.random.default_rng(0)
    q, v, traces = rng.normal(size=15), rng.normal(size=5), mx.traces.retrace(pi, mu)
    pairs = log.states * 3 + log.actions
    packed = sequences.pack(log, pairs, log.next_states, window)
    width = packed.steps.valid.shape[1]
    assert packed.steps.valid.sum() == len(log)
    assert np.asarray(packed.steps.valid).shape[0] * width < log.num_episodes * int(log.lengths.max())
    found = packed.at_rows(
        sequences.sampled_targets(
            jnp.asarray(q), jnp.asarray(v), packed.steps, jnp.asarray(GAMMA), jnp.asarray(traces.ravel())
        )
    )
    for i in range(log.num_episodes):
        for begin in range(log.offsets[i], log.offsets[i + 1], window or 10**6):
            end = min(begin + (window or 10**6), log.offsets[i + 1])
            expected = 0.0
            for n in range(end - 1, begin - 1, -1):
                after = 0.0 if log.terminal[n] else GAMMA * v[log.next_states[n]]
                carried = 0.0 if n == end - 1 else GAMMA * traces.ravel()[pairs[n + 1]] * expected
                expected = log.rewards[n] + after - q[pairs[n]] + carried
                np.testing.assert_allclose(found[n] - q[pairs[n]], expected, atol=1e-5)


@pytest.mark.parametrize("weights", [False, True], ids=["retrace", "marginalized"])
def test_influences_of_fitted_values(weights):
    _, pi, mu, log = garnet_log(4, episodes=384)
    traces = mx.traces.retrace(pi, mu)

    def estimate(part):
        backup = backup_of(part, pi, traces, weights=weights)
        return fitted_q.estimate(backup.solve(), backup)

    full = estimate(log)
    chosen = np.argsort(full.influence)[[0, 1, 2, 100, 200, 300, -3, -2, -1]]
    change = np.array([full.value - estimate(log.select(np.delete(np.arange(384), i))).value for i in chosen])
    np.testing.assert_allclose(change * 384, full.influence[chosen], atol=0.2 * np.abs(full.influence).max())
    assert np.corrcoef(change, full.influence[chosen])[0, 1] > 0.98


def test_one_row_stands_for_all_solutions_of_the_balance_equation():
    """The saddle point and the Fenchel form of the weights room, from a start pair that leads to the log's starts."""
    log = Log.from_episodes(
        [{"states": [0, 1, 0], "actions": [0, 0], "rewards": [1.0, 2.0], "terminal": True}] * 4
    )
    pi = np.array([[0.9, 0.1], [0.5, 0.5]])
    names = ("certainty-equivalence", "saddle-point", "fenchel", "fqe-one-step")
    for name in names:
        result = evaluate(log, pi, discount=GAMMA, estimators=[name])
        assert list(result.answers) == ["certainty-equivalence"]
        assert any("they are shown as one row, certainty-equivalence" in note for note in result.notes) == (
            name != names[0]
        )
