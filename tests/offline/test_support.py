"""Actions that the log does not show: what they leave open in values, differences and verdicts."""

from dataclasses import replace

import numpy as np
import pytest

from marginax.offline import Log, evaluate, observations
from offline.test_observations import QUICK, gaussian, log_of, softmax
from reference.offline_logs import GAMMA, garnet_log


def bandit(rewards=(0.0, 1.0), chance=0.5, episodes=200):
    """Episodes of one step that take each action in turn."""
    return Log.from_episodes(
        [
            {
                "states": [0, 0],
                "actions": [i % 2],
                "rewards": [rewards[i % 2]],
                "terminal": True,
                "behaviour": [chance],
            }
            for i in range(episodes)
        ]
    )


def test_what_rests_on_weights_keeps_a_finite_interval_where_nothing_bounds_the_value():
    """Without a discount an unseen action may be worth anything. The behaviour policy takes it with 2%: weights know of it."""
    log = bandit(chance=0.49)
    log = replace(log, rewards=log.rewards + 0.1 * np.random.default_rng(0).normal(size=len(log)))
    for names in (None, ["weighted-doubly-robust"]):
        result = evaluate(log, [[0.49, 0.49, 0.02]], discount=1.0, estimators=names)
        assert np.isfinite(result.answers["weighted-doubly-robust"].interval.width)
        assert result.verdict.estimator is not None
    only = evaluate(log, [[0.49, 0.49, 0.02]], discount=1.0, estimators=["certainty-equivalence"])
    assert (only.verdict.status, only.verdict.estimator) == ("cannot tell", None)
    assert "wider than the range" in only.verdict.text[0]


@pytest.mark.parametrize("name", ["certainty-equivalence", "state-ratio", "weighted-doubly-robust"])
def test_differences_leave_as_much_open_as_the_values(name):
    """π takes with 10% an action that the log never takes, worth anything in [0, 1]; the two others are worth 0 and 1."""
    settings = {"discount": 0.0, "reward_range": (0.0, 1.0), "estimators": [name]}
    pi, known = [[0.45, 0.45, 0.1]], [[0.5, 0.5, 0.0]]
    ranked = evaluate(bandit(), {"pi": pi, "known": known}, **settings)
    one = ranked.policies["pi"]
    if one.verdict.estimator is None:  # weights that average 0.9 show that something is missing
        assert name == "weighted-doubly-robust"
        return
    least, most = (0.45 - 0.5, 0.55 - 0.5)  # of π's value less that of the log, or of the known policy
    assert one.advantage.low <= least < most <= one.advantage.high
    [d] = ranked.differences
    sign = 1 if d.first == "pi" else -1
    low, high = sorted((sign * d.interval.low, sign * d.interval.high))
    assert low <= least < most <= high
    # And no more than that. Certainty equivalence sees no episode that differs: for each policy 1 - 0.025^(1/200) may.
    width = 0.1 + (2 * 0.0183 if name == "certainty-equivalence" else 0.0)
    assert high - low == pytest.approx(width, abs=0.02)


def test_a_ranking_holds_what_each_recommended_interval_holds():
    """The log takes the second action with 56% where it says 50%: estimates disagree, and either may be right."""
    actions = [int(i % 25 < 14) for i in range(400)]
    log = Log.from_episodes(
        [
            {"states": [0, 0], "actions": [a], "rewards": [float(a)], "terminal": True, "behaviour": [0.5]}
            for a in actions
        ]
    )
    names = ["per-decision-is", "certainty-equivalence"]
    ranked = evaluate(log, {"pi": [[0.2, 0.8]], "mu": [[0.5, 0.5]]}, discount=0.0, estimators=names)
    one = ranked.policies["pi"]
    assert one.verdict.estimator == "per-decision-is"
    assert "widened to hold that of certainty-equivalence" in " ".join(one.verdict.text)
    [d] = ranked.differences
    assert 0.8 - ranked.policies["mu"].answers[ranked.policies["mu"].verdict.estimator].value in d.interval


def test_a_ranking_has_room_for_the_choice_of_both_estimators():
    """Chosen from two families, each recommended interval is wider than alone; their difference is so by as much."""
    _, pi, mu, log = garnet_log(0, episodes=300)
    policies, name = {"pi": pi, "half": (pi + mu) / 2}, "certainty-equivalence"
    chosen = evaluate(log, policies, discount=GAMMA, estimators=[name, "weighted-doubly-robust"])
    alone = evaluate(log, policies, discount=GAMMA, estimators=[name])
    assert all(one.verdict.estimator == name for one in chosen.policies.values())
    below, above = {}, {}
    for policy in policies:
        wide, narrow = (x.policies[policy].answers[name].interval for x in (chosen, alone))
        below[policy], above[policy] = narrow.low - wide.low, wide.high - narrow.high
        assert min(below[policy], above[policy]) > 0.005
    [d], [bare] = chosen.differences, alone.differences
    assert (d.first, d.second) == (bare.first, bare.second)
    assert bare.interval.low - d.interval.low == pytest.approx(below[d.first] + above[d.second])
    assert d.interval.high - bare.interval.high == pytest.approx(above[d.first] + below[d.second])


def rare(seed, episodes=300):
    """Two steps; the second state is reached with 15%, and the only action that π takes there is logged with 0.2%."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(episodes):
        first = int(rng.random() < 0.5)
        parts = [(0, first, 0.5 * first + 0.1 * rng.integers(3), 0.5)]
        if rng.random() < 0.15:
            second = int(rng.random() < 0.002)
            parts.append((1, second, 1.0 - 2 * second, 0.002 if second else 0.998))
        states, actions, rewards, chances = (list(column) for column in zip(*parts, strict=True))
        found.append(
            {
                "states": [*states, 0],
                "actions": actions,
                "rewards": rewards,
                "terminal": True,
                "behaviour": chances,
            }
        )
    return Log.from_episodes(found)


def test_states_where_no_logged_action_has_weight_are_left_open():
    truth = 0.25 + 0.1 - 0.15
    settings = {"discount": 1.0, "horizon": 2, "reward_range": (-1.0, 1.2)}
    for seed in range(4):
        result = evaluate(rare(seed), [[0.5, 0.5], [0.0, 1.0]], **settings)
        assert result.diagnostics["unreachable"] == 0.0
        for name in ("state-ratio", "doubly-robust-state-ratio"):
            assert truth in result.answers[name].interval, (seed, name)


def walks(chances, episodes=300, seed=0):
    """Two cells that follow each other at random and end with 10%; the third action pays -3."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(episodes):
        n = rng.geometric(0.1)
        actions = rng.choice(3, p=chances, size=n)
        found.append(
            {
                "states": rng.integers(2, size=n + 1),
                "actions": actions,
                "rewards": np.array([1.0, 0.5, -3.0])[actions],
                "terminal": True,
                "behaviour": np.array(chances)[actions],
            }
        )
    return Log.from_episodes(found)


def test_returns_of_a_policy_that_leaves_the_log_are_not_known():
    """Weights that average 0.2 were normalised, and gave the returns of episodes that stay in the log as the policy's."""
    log = walks([0.5, 0.5, 0.0], episodes=100)
    for chance, known in ((0.0, True), (0.3, False)):
        pi = [[0.5 - chance / 2, 0.5 - chance / 2, chance]] * 2
        found = evaluate(log, pi, discount=0.9, estimators=["weighted-is"]).diagnostics["returns"]
        assert (found["target"] is not None) == known
        assert (found["reason"] is None) == known
    assert "the weights of episodes average" in found["reason"]


def test_observations_leave_as_much_open_as_tables():
    """The same log as indices and as one-hot observations; the log never takes the third action."""
    log, pi = walks([0.5, 0.5, 0.0]), np.array([0.48, 0.48, 0.04])
    truth = (0.48 * 1.5 - 0.12) / (1 - 0.9 * 0.9)
    settings = {"discount": 0.9, "reward_range": (-3.0, 1.0), "training": QUICK}
    settings["estimators"] = ["per-decision-is", "weighted-doubly-robust", "certainty-equivalence", "fenchel"]
    eye = np.eye(2)
    spread = replace(log, states=eye[log.states], next_states=eye[log.next_states])
    found = evaluate(spread, lambda x: np.tile(pi, (len(x), 1)), **settings)
    table = evaluate(log, np.tile(pi, (2, 1)), **settings)
    # E[γ^τ] of the first third action, while each step goes on with 0.9
    assert table.diagnostics["unsupported"] == pytest.approx(0.04 / (1 - 0.96 * 0.81), rel=0.1)
    assert found.diagnostics["unsupported"] == pytest.approx(table.diagnostics["unsupported"], rel=0.05)
    for name, one in found.answers.items():
        assert truth in one.interval, name


@pytest.mark.parametrize("horizon", [1, 2, None])
def test_only_the_steps_that_count_leave_the_log(horizon):
    """Two steps; the log never takes the third action, and π takes it at the second step."""
    rng = np.random.default_rng(0)
    states, rest = np.eye(2)[[0, 1, 1]], {"rewards": [0.0, 1.0], "terminal": True, "behaviour": [0.5, 0.5]}
    log = Log.from_episodes(
        [{"states": states, "actions": rng.integers(2, size=2)} | rest for _ in range(100)]
    )
    found = evaluate(
        log,
        lambda x: np.where(x[:, :1] > 0, [[0.5, 0.5, 0.0]], [[0.0, 0.0, 1.0]]),
        discount=0.9,
        horizon=horizon,
        training=QUICK,
        estimators=["certainty-equivalence"],
    )
    assert found.diagnostics["unsupported"] == pytest.approx(0.0 if horizon == 1 else 0.9, abs=1e-3)


def test_continuous_actions_far_from_a_log_of_single_steps_are_outside_it():
    rng = np.random.default_rng(0)
    actions = rng.normal(size=(200, 1))
    log = Log.from_episodes(
        [
            {"states": x, "actions": [a], "rewards": -((a - 1) ** 2), "terminal": True}
            for x, a in zip(rng.normal(size=(200, 1, 2)), actions, strict=True)
        ]
    )
    settings = {"discount": 0.9, "training": QUICK, "estimators": ["certainty-equivalence"]}
    far = evaluate(log, lambda x: (np.full((len(x), 1), 6.0), 0.3), **settings)  # worth -25
    near = evaluate(log, lambda x: (np.zeros((len(x), 1)), 1.0), **settings)
    assert far.verdict.status == "cannot tell"
    assert far.diagnostics["unsupported"] > 0.9
    assert near.diagnostics["unsupported"] < 0.05


def test_features_may_be_wrong_about_actions_outside_the_log():
    """Rewards rise with the action as far as the log goes, and are 0 beyond; features carry the line on."""

    def worth(a):
        return np.where(np.abs(a) < 3.1, 0.5 + 0.15 * a, 0.0)

    rng = np.random.default_rng(0)
    actions = np.clip(rng.normal(size=(1500, 1)), -3.0, 3.0)
    log = Log.from_episodes(
        [
            {"states": x, "actions": [a], "rewards": worth(a), "terminal": True}
            for x, a in zip(rng.normal(size=(1500, 1, 1)), actions, strict=True)
        ]
    )
    truth = worth(rng.normal(1.5, 1.0, size=100_000)).mean()
    result = evaluate(
        log,
        lambda x: (np.full((len(x), 1), 1.5), 1.0),
        discount=0.0,
        reward_range=(0.0, 1.0),
        training=QUICK,
        estimators=["certainty-equivalence"],
    )
    assert result.answers["certainty-equivalence"].value > truth + 0.03
    assert truth in result.answers["certainty-equivalence"].interval
    assert "of its (discounted) steps; the interval allows for any reward at these steps" in " ".join(
        result.verdict.text
    )


def test_what_is_known_on_rows_alone_has_an_unknown_support():
    log = log_of(softmax(0.3), episodes=40, steps=5)
    result = evaluate(log, log.behaviour, discount=0.9)
    assert result.diagnostics["unsupported"] is None
    assert "what the log has seen" not in " ".join(result.verdict.text)
    with pytest.raises(ValueError, match="behaviour cannot be estimated where the policy is known on"):
        evaluate(log, log.behaviour, discount=0.9, behaviour="estimated")


def test_without_a_discount_truncated_observations_are_cut_at_the_longest_episode():
    log = log_of(softmax(0.3), episodes=40, steps=5)
    cut, whole = (
        evaluate(
            log, softmax(0.5), discount=1.0, horizon=h, training=QUICK, estimators=["certainty-equivalence"]
        )
        for h in (5, None)
    )
    assert whole.answers["certainty-equivalence"] == cut.answers["certainty-equivalence"]
    assert any("first 5 steps" in note for note in whole.notes)


def test_what_observations_cannot_have_is_refused_before_anything_is_trained(monkeypatch):
    monkeypatch.setattr(observations, "prepare", None)
    log = log_of(softmax(0.3), episodes=4, steps=5)
    with pytest.raises(ValueError, match="does not contain the log's rewards"):
        evaluate(log, softmax(0.5), reward_range=(0.9, 1.0))
    with pytest.raises(ValueError, match="a single episode"):
        evaluate(log.select([0]), softmax(0.5))


@pytest.mark.parametrize("mu", [softmax(2.0), gaussian(0.2)], ids=["discrete", "continuous"])
def test_the_log_s_own_policy_hardly_leaves_it_whatever_the_discount(mu):
    log = log_of(mu, episodes=60, steps=15)
    found = evaluate(log, mu, discount=0.99, estimators=["certainty-equivalence"], training=QUICK)
    assert found.diagnostics["unsupported"] < 0.15
