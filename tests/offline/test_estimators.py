"""Every tabular estimator against plain loops, exact values and identities."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.offline import Log, evaluate
from marginax.offline.certainty_equivalence import Counts, ModelInfluence, certainty_equivalence
from marginax.offline.importance import ImportanceSums
from marginax.offline.pipeline import critic_errors
from marginax.offline.ratios import (
    RegressionEstimate,
    RegressionSums,
    SecondLook,
    StateRatioEstimate,
    StateRatioSums,
)
from marginax.offline.sources import Source
from reference import offline as naive
from reference.offline_logs import GAMMA, garnet_log


def counted(log, shape=(5, 3)):
    counts = Counts(*shape)
    counts.update(log)
    return counts


def model_of(log, pi):
    return certainty_equivalence(counted(log, pi.shape).whole, pi, GAMMA)


def weighted(log, pi, critics=None):
    result = ImportanceSums(log.num_episodes, int(log.lengths.max()), GAMMA, (-5.0, 5.0), critics is not None)
    errors = None
    if critics is not None:
        base = model_of(log, pi)
        models = [replace(base, q=q[None], v=np.stack([v, v])) for q, v in critics]
        errors = critic_errors(log, models, 0)
    result.update(log, pi[log.states, log.actions] / log.behaviour, errors)
    return result


@pytest.mark.parametrize("seed", [0, 1])
def test_importance_sampling_equals_plain_loops(seed):
    _, pi, _, log = garnet_log(seed)
    assert 0 < log.truncated.sum() < log.num_episodes
    episodes = naive.episodes_of(log)
    estimates = weighted(log, pi).estimates()
    for name, reference in (
        ("trajectory-is", naive.trajectory_is),
        ("per-decision-is", naive.per_decision_is),
        ("weighted-is", naive.weighted_is),
        ("weighted-per-decision-is", naive.weighted_per_decision_is),
    ):
        np.testing.assert_allclose(estimates[name].value, reference(episodes, pi, GAMMA), rtol=1e-5)


def test_doubly_robust_equals_plain_loops():
    _, pi, _, log = garnet_log(2)
    rng = np.random.default_rng(0)
    critics = [(rng.normal(size=(5, 3)), rng.normal(size=5)) for _ in range(2)]
    episodes = naive.episodes_of(log)
    value = weighted(log, pi, critics).estimates()["doubly-robust"].value
    # The recursion holds for v(x) = Σ_a π q and for any other v alike.
    expected = naive.doubly_robust(episodes, pi, GAMMA, [critics[fold] for fold in log.folds()])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    value = weighted(log, pi, critics[:1] * 2).estimates()["weighted-doubly-robust"].value
    np.testing.assert_allclose(
        value, naive.weighted_doubly_robust(episodes, pi, GAMMA, critics[0]), rtol=1e-5
    )


def test_certainty_equivalence_is_the_value_in_the_empirical_mdp():
    _, pi, _, log = garnet_log(3, episodes=300)
    p, r, starts, n = naive.empirical_mdp(naive.episodes_of(log), 5, 3)
    assert n.min() > 0
    model = model_of(log, pi)
    exact = mx.TabularMDP(p, r, GAMMA, initial=starts)
    np.testing.assert_allclose(model.v[0], exact.v_values(pi), rtol=1e-9)
    np.testing.assert_allclose(model.q[0], exact.q_values(pi), rtol=1e-9)
    assert model.unsupported == 0
    # Balance: the occupancy meets its own flow, and its inner product with rewards is the value.
    flow = (starts + GAMMA * np.einsum("xa,xay->y", model.occupancy, p))[:, None] * pi
    np.testing.assert_allclose(model.occupancy, flow, rtol=1e-9)
    np.testing.assert_allclose((model.occupancy * r).sum(), model.value, rtol=1e-9)
    # The same as marginalized importance sampling over the log's transitions.
    rows = model.weights[log.states, log.actions] * log.rewards
    np.testing.assert_allclose(rows.sum() / log.num_episodes, model.value, rtol=1e-9)


def test_mass_without_support_is_what_leaves_the_log():
    """State 0 steps to 1 under the only logged action; in 1 half of π's mass is on an action never taken."""
    log = Log.from_episodes(
        [{"states": [0, 1, 0], "actions": [0, 0], "rewards": [1.0, 2.0], "terminal": True} for _ in range(4)]
    )
    pi = np.array([[1.0, 0.0], [0.5, 0.5]])
    model = model_of(log, pi)
    np.testing.assert_allclose(model.unsupported, GAMMA * 0.5)
    assert model.off_support_occupancy[1, 1] > 0
    assert model.off_support_occupancy.sum() == model.off_support_occupancy[1, 1]
    # V(0) = 1 + γ V(1), V(1) = ½·2 + ½ fill, fill the mean of the two.
    v1 = lambda fill: 1 + 0.5 * fill  # noqa: E731
    np.testing.assert_allclose(
        model.default_value, ((1 + GAMMA * v1(model.default_value)) + v1(model.default_value)) / 2
    )


@pytest.mark.slow
def test_chunks_and_groups_change_nothing():
    _, pi, _, log = garnet_log(4, episodes=90)

    class Pieces(Source):
        def chunks(self):
            for i in range(0, 90, 30):
                yield log.select(np.arange(i, min(i + 30, 90)))

    whole, pieces = (evaluate(data, pi, discount=GAMMA) for data in (log, Pieces()))
    for name, one in whole.answers.items():
        np.testing.assert_allclose(one.value, pieces.answers[name].value, rtol=1e-9)
        np.testing.assert_allclose(one.interval.low, pieces.answers[name].interval.low, rtol=1e-6)


def all_estimates(log, pi):
    """Estimates with their influences, an entry an episode."""
    counts = counted(log)
    model = certainty_equivalence(counts.whole, pi, GAMMA)
    critic = (np.ones((5, 3)), np.arange(5.0))
    found = weighted(log, pi, [critic, critic]).estimates()
    marginal = ModelInfluence(model, counts.episodes)
    marginal.update(log)
    found["certainty-equivalence"] = marginal.estimate(counts.whole.visits)
    regression = RegressionSums(5, 3, GAMMA)
    ratios = pi[log.states, log.actions] / log.behaviour
    regression.update(log, ratios)
    states = StateRatioSums(5, GAMMA)
    states.update(log, ratios)
    critics = [
        certainty_equivalence(fold, pi, GAMMA, starts=counts.whole.starts) for fold in counts.folds[::-1]
    ]
    again = (
        RegressionEstimate(regression, counts.episodes),
        StateRatioEstimate(states, critics, counts.whole.successors, None),
    )
    look = SecondLook(lambda _: ratios, list(again))
    look.update(log)
    return found | look.estimates()


def test_influences_are_the_derivatives_of_the_estimates():
    """Dropping an episode changes each estimate by that episode's influence, up to second order."""
    _, pi, _, log = garnet_log(5, episodes=400)
    full = all_estimates(log, pi)
    chosen = np.arange(0, 400, 10)
    without = [all_estimates(log.select(np.delete(np.arange(400), i)), pi) for i in chosen]
    assert len(full) == 10
    for name, estimate in full.items():
        if name == "doubly-robust-state-ratio":
            continue  # its folds change places when an episode is left out
        change = np.array([estimate.value - other[name].value for other in without]) * 400
        influence = estimate.influence[chosen]
        assert np.abs(change - influence).max() < 0.15 * np.abs(influence).max(), name


def test_the_influence_of_certainty_equivalence_is_the_jackknife_where_pairs_have_few_visits():
    """Thirty short episodes on fifteen pairs: a derivative would miss a third of the spread."""
    _, pi, _, log = garnet_log(8, episodes=30)
    log = log.first_steps(4)

    def influence(part):
        counts = counted(part)
        found = ModelInfluence(certainty_equivalence(counts.whole, pi, GAMMA), counts.episodes)
        found.update(part)
        return found.estimate(counts.whole.visits)

    full = influence(log)
    left = np.array([influence(log.select(np.delete(np.arange(30), i))).value for i in range(30)])
    jackknife = 29 * (full.value - left)
    assert np.corrcoef(jackknife, full.influence)[0, 1] > 0.9
    assert 0.8 < full.influence.std() / jackknife.std() < 1.25


def test_with_the_log_s_own_policy_all_agree_with_the_average_return():
    mdp, _, mu, _ = garnet_log(6)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(9), episodes=400, horizon=400)
    log = Log.from_trajectories(batch)
    assert not log.truncated.any()
    result = evaluate(log, mu, discount=GAMMA)
    average = result.behaviour
    for name, one in result.answers.items():
        if one.kind == "importance sampling" or name == "regression":
            np.testing.assert_allclose(one.value, average.value, rtol=1e-4)
        assert abs(one.value - average.value) < 2 * average.error, name
    assert result.verdict.status == "trust"
    assert result.verdict.better == "cannot tell"


@pytest.mark.slow
def test_estimates_are_unbiased_and_errors_fall_with_the_square_root():
    mdp, pi, mu, _ = garnet_log(7)
    truth = float(mdp.initial @ mdp.v_values(pi))
    names = ("per-decision-is", "doubly-robust", "certainty-equivalence")
    errors = {}
    for episodes in (80, 1280):
        batch = mx.trajectories.sample(mdp, mu, jax.random.key(1), episodes=20 * episodes, horizon=80)
        log = Log.from_trajectories(batch)
        values = []
        for k in range(20):
            part = log.select(np.arange(k * episodes, (k + 1) * episodes))
            found = evaluate(part, pi, discount=GAMMA, estimators=names).answers
            values.append([found[name].value for name in names])
        errors[episodes] = np.array(values) - truth
    for j, name in enumerate(names):
        large = errors[1280][:, j]
        assert abs(large.mean()) < 4 * large.std() / np.sqrt(20), name
        ratio = np.sqrt((errors[80][:, j] ** 2).mean() / (large**2).mean())
        assert 2.2 < ratio < 7, name  # 4 in expectation


def test_truncation_is_bootstrapped_or_left_out():
    """One state, reward 1 for ever: the value is 10, the log stops after five steps."""
    log = Log.from_episodes(
        [
            {
                "states": [0] * 6,
                "actions": [0] * 5,
                "rewards": [1.0] * 5,
                "terminal": False,
                "behaviour": [1.0] * 5,
            }
        ]
        * 10
    )
    result = evaluate(log, [[1.0]], discount=GAMMA)
    for name, one in result.answers.items():
        expected = 10.0 if one.truncation == "bootstraps" else (1 - GAMMA**5) / (1 - GAMMA)
        np.testing.assert_allclose(one.value, expected, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(result.diagnostics["tail_target"], GAMMA**5)
    assert "Truncation hides 59.0% of the discounted future" in " ".join(result.verdict.text)
    # Against the log's own policy it is compared by a value that bootstraps, too: both are the same here.
    np.testing.assert_allclose(result.diagnostics["behaviour_value"], 10.0)
    assert 0.0 in result.advantage


def test_variable_lengths_keep_ended_episodes_in_the_average():
    """Half of the episodes end at once with 0, half earn 1 in their second step: the value is γ/2."""
    short = {"states": [0], "actions": [0], "rewards": [0.0], "terminal": True, "behaviour": [0.5]}
    long = {
        "states": [0, 1],
        "actions": [1, 0],
        "rewards": [0.0, 1.0],
        "terminal": True,
        "behaviour": [0.5, 1.0],
    }
    log = Log.from_episodes([short, short, long, long] * 10)
    pi = np.array([[0.5, 0.5], [1.0, 0.0]])
    result = evaluate(log, pi, discount=GAMMA)
    for name, one in result.answers.items():
        np.testing.assert_allclose(one.value, GAMMA / 2, rtol=1e-4, err_msg=name)


def test_folds_halve_every_pair_of_episodes_and_follow_no_turns():
    one = {"states": [0], "actions": [0], "rewards": [0.0], "terminal": True}
    log = Log.from_episodes([one] * 1000)
    fold = log.folds()
    assert (fold.reshape(-1, 2).sum(axis=1) == 1).all()
    for arms in range(2, 17):  # episodes that get one of so many arms by turns
        share = [fold[arm::arms].mean() for arm in range(arms)]
        assert 0.25 < min(share) <= max(share) < 0.75
    chunk = log.select(np.arange(10))
    np.testing.assert_array_equal(chunk.folds(first=490), fold[490:500])


def test_doubly_robust_of_a_log_in_which_actions_were_taken_by_turns():
    """Of two folds by turns, neither would show what the other's action pays."""
    rng, names = (
        np.random.default_rng(0),
        ["doubly-robust", "weighted-doubly-robust", "doubly-robust-state-ratio"],
    )
    inside = dict.fromkeys(names, 0)
    for _ in range(20):
        log = Log.from_episodes(
            [
                {
                    "states": [0],
                    "actions": [a],
                    "rewards": [a + rng.normal()],
                    "terminal": True,
                    "behaviour": [0.5],
                }
                for a in [0, 1] * 100
            ]
        )
        answers = evaluate(log, [[0.3, 0.7]], discount=0.9, estimators=names).answers
        for name in names:
            inside[name] += 0.7 in answers[name].interval
    assert min(inside.values()) >= 17, inside
