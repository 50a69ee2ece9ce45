"""Values over the first steps and without a discount, by every estimator that can, against exact values."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.offline import Log, evaluate
from marginax.offline.certainty_equivalence import Counts, ModelInfluence, certainty_equivalence
from marginax.offline.features import fit, prepare
from marginax.offline.policies import FunctionPolicy
from reference import offline as naive
from reference.offline_logs import garnet_log

NAMES = (
    "per-decision-is",
    "weighted-per-decision-is",
    "doubly-robust",
    "weighted-doubly-robust",
    "doubly-robust-state-ratio",
    "state-ratio",
    "certainty-equivalence",
    "regression",
)


def value_of_steps(p, r, starts, pi, discount, steps):
    """Σ_{t<steps} γ^t ρ₀ (P^π)^t r^π, term by term."""
    kernel, rewards = np.einsum("xa,xay->xy", pi, p), (pi * r).sum(axis=1)
    total, d = 0.0, starts
    for t in range(steps):
        total += discount**t * d @ rewards
        d = d @ kernel
    return float(total)


@pytest.mark.parametrize("discount", [0.9, 1.0])
def test_certainty_equivalence_is_the_value_of_the_first_steps_in_the_empirical_mdp(discount):
    _, pi, _, log = garnet_log(0, episodes=300)
    p, r, starts, n = naive.empirical_mdp(naive.episodes_of(log), 5, 3)
    assert n.min() > 0
    found = evaluate(log, pi, discount=discount, horizon=7, estimators=["certainty-equivalence"])
    expected = value_of_steps(p, r, starts, pi, discount, 7)
    np.testing.assert_allclose(found.answers["certainty-equivalence"].value, expected, rtol=1e-9)
    # Rewards times occupancy give the same, and so do the layers from the last step to the first.
    counts = Counts(5, 3)
    counts.update(log)
    model = certainty_equivalence(counts.whole, pi, discount, horizon=7)
    np.testing.assert_allclose((model.occupancy * r).sum(), expected, rtol=1e-9)
    assert len(model.q) == 7
    np.testing.assert_allclose(model.q[-1], r)


@pytest.mark.parametrize("horizon", [1, 6])
def test_the_influence_with_a_horizon_is_the_jackknife(horizon):
    _, pi, _, log = garnet_log(1, episodes=200)

    def estimate(part):
        counts = Counts(5, 3)
        counts.update(part)
        model = certainty_equivalence(counts.whole, pi, 1.0, horizon=horizon)
        influence = ModelInfluence(model, counts.episodes)
        influence.update(part)
        return influence.estimate(counts.whole.visits)

    full = estimate(log)
    chosen = np.arange(0, 200, 8)
    change = [full.value - estimate(log.select(np.delete(np.arange(200), i))).value for i in chosen]
    np.testing.assert_allclose(
        np.array(change) * 200, full.influence[chosen], atol=0.1 * np.abs(full.influence).max()
    )


@pytest.mark.parametrize("horizon", [1, 4, None])
def test_state_ratios_equal_plain_loops(horizon):
    _, pi, _, log = garnet_log(4, episodes=200)
    episodes, folds, steps = naive.episodes_of(log), log.folds(), horizon or 250
    names = ["state-ratio", "doubly-robust-state-ratio"]
    found = evaluate(log, pi, discount=0.9, horizon=horizon, estimators=names).answers
    starts = np.bincount(log.states[log.offsets[:-1]], minlength=5) / log.num_episodes
    expected = naive.state_ratio(episodes, pi, starts, 0.9, steps)
    np.testing.assert_allclose(found["state-ratio"].value, expected, rtol=1e-9)
    critics = []
    for k in (0, 1):
        p, r, _, n = naive.empirical_mdp([e for e, f in zip(episodes, folds, strict=True) if f != k], 5, 3)
        assert n.min() > 0
        q, v = [], [np.zeros(5)]
        for _ in range(steps):  # from the last step to the first
            q.insert(0, r + 0.9 * p @ v[0])
            v.insert(0, (pi * q[0]).sum(axis=1))
        critics.append((q, v) if horizon else ([q[0]] * steps, [v[0]] * (steps + 1)))
    expected = naive.doubly_robust_state_ratio(episodes, pi, starts, 0.9, critics, folds)
    np.testing.assert_allclose(found["doubly-robust-state-ratio"].value, expected, rtol=1e-9)


def test_importance_sampling_of_the_first_steps_is_that_of_a_shorter_log():
    _, pi, _, log = garnet_log(2, episodes=100)
    found = evaluate(log, pi, discount=1.0, horizon=4, estimators=["per-decision-is"])
    episodes = [
        {
            "states": log.states[a:b][:4],
            "actions": log.actions[a:b][:4],
            "rewards": log.rewards[a:b][:4],
            "behaviour": log.behaviour[a:b][:4],
        }
        for a, b in zip(log.offsets[:-1], log.offsets[1:], strict=True)
    ]
    total = 0.0
    for e in episodes:
        rho = 1.0
        for x, a, r, b in zip(*e.values(), strict=True):
            rho *= pi[x, a] / b
            total += rho * r
    np.testing.assert_allclose(found.answers["per-decision-is"].value, total / 100, rtol=1e-9)


@pytest.mark.parametrize(("discount", "steps"), [(1.0, 6), (0.9, 3)])
def test_every_estimator_finds_the_value_of_the_first_steps(discount, steps):
    mdp, pi, mu, _ = garnet_log(3)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(5), episodes=4000, horizon=8)
    truth = value_of_steps(np.asarray(mdp.p), mdp.r, mdp.initial, pi, discount, steps)
    result = evaluate(batch, pi, estimators=NAMES, discount=discount, horizon=steps)
    assert set(result.answers) == set(NAMES)
    for name, one in result.answers.items():
        assert abs(one.value - truth) < 4 * one.error, name
    assert result.settings["horizon"] == steps


def test_the_discount_does_not_matter_for_the_first_step():
    _, pi, _, log = garnet_log(3, episodes=200)
    found, expected = (evaluate(log, pi, discount=d, horizon=1, estimators=NAMES) for d in (0.9, 0.0))
    for name, one in found.answers.items():
        other = expected.answers[name]
        np.testing.assert_allclose(
            [one.value, one.interval.low, one.interval.high],
            [other.value, other.interval.low, other.interval.high],
            err_msg=name,
        )


def test_a_log_shorter_than_the_horizon_is_bootstrapped():
    """Rewards of 1 for ever, logged for three steps: ten steps are worth 10 by estimators that bootstrap, 3 by the others."""
    one = {
        "states": [0] * 4,
        "actions": [0] * 3,
        "rewards": [1.0] * 3,
        "terminal": False,
        "behaviour": [1.0] * 3,
    }
    result = evaluate(Log.from_episodes([one] * 10), [[1.0]], discount=1.0, horizon=10)
    for name, answer in result.answers.items():
        np.testing.assert_allclose(
            answer.value, 10.0 if answer.truncation == "bootstraps" else 3.0, err_msg=name
        )


def test_without_a_discount_a_process_that_never_ends_is_cut_at_the_longest_episode():
    one = {"states": [0] * 4, "actions": [0] * 3, "rewards": [1.0] * 3, "terminal": False}
    result = evaluate(Log.from_episodes([one] * 10), [[1.0]], discount=1.0)
    np.testing.assert_allclose(result.answers["certainty-equivalence"].value, 3.0)
    assert any("first 3 steps" in note for note in result.notes)
    assert result.settings["horizon"] == 3


def test_features_with_a_horizon_are_tabular_certainty_equivalence():
    _, pi, _, log = garnet_log(0, episodes=200)
    eye = np.eye(5)
    spread = Log(eye[log.states], log.actions, log.rewards, eye[log.next_states], log.terminal, log.offsets)
    linear = fit(prepare(spread, FunctionPolicy(lambda x: x @ pi), 0), 0.9, 0, horizon=6)
    tabular = evaluate(log, pi, discount=0.9, horizon=6, estimators=["certainty-equivalence"])
    expected = tabular.answers["certainty-equivalence"].value
    assert abs(float(linear.starts.mean()) - expected) < 0.02
    dual = float((linear.weights * log.rewards).sum() / log.num_episodes)
    np.testing.assert_allclose(dual, linear.starts.mean(), rtol=1e-4)
    # The sums over steps of the influence have mean zero, as the tabular ones.
    assert abs(linear.weighted_errors.sum()) < 1e-3 * np.abs(linear.weighted_errors).sum()
