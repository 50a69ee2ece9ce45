"""Logs with observations: features against tables, networks against features, behaviour against what was logged."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from marginax.deep.networks import MLP
from marginax.offline import Log, Training, evaluate
from marginax.offline.behaviour import fit_behaviour
from marginax.offline.features import Features, fit, prepare, target_probability
from marginax.offline.log import join
from marginax.offline.network_estimators import balanced, fitted_q, learn, moments_of
from marginax.offline.networks import basis, expected, member, rows_of
from marginax.offline.policies import FunctionPolicy

GAMMA = 0.9
QUICK = Training(steps=200, batch=64, hidden=(16, 16), members=3)


def softmax(slope):
    def policy(x):
        z = np.exp(np.stack([slope * x[:, 0], np.zeros(len(x)), -slope * x[:, 0]], axis=1))
        return z / z.sum(axis=1, keepdims=True)

    return policy


def gaussian(slope, std=0.4):
    return lambda x: (-slope * x[:, :1], np.full((len(x), 1), std))


def roll(policy, episodes, steps, seed):
    """A noisy linear process that pays for being near the origin; discrete or continuous pushes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(episodes, 2))
    states, actions, rewards, chances = [x], [], [], []
    for _ in range(steps):
        answer = policy(x)
        if isinstance(answer, tuple):
            mean, std = answer
            a = mean + std * rng.normal(size=mean.shape)
            z = ((a - mean) / std)[:, 0]
            chance, push = np.exp(-0.5 * z**2) / (np.sqrt(2 * np.pi) * std[:, 0]), a[:, 0]
        else:
            a = np.minimum((rng.random(episodes)[:, None] > answer.cumsum(axis=1)).sum(axis=1), 2)
            chance, push = answer[np.arange(episodes), a], (a - 1.0) * 0.5
        rewards.append(1 - np.minimum((x**2).sum(axis=1), 4) / 4)
        x = np.stack([0.9 * x[:, 0] + push, 0.8 * x[:, 1] + 0.3 * x[:, 0]], axis=1)
        x = x + 0.2 * rng.normal(size=x.shape)
        states.append(x)
        actions.append(a)
        chances.append(chance)
    return tuple(np.stack(part, axis=1) for part in (states, actions, rewards, chances))


def log_of(policy, episodes=200, steps=30, seed=0, known=True):
    states, actions, rewards, chances = roll(policy, episodes, steps, seed)
    parts = zip(states, actions, rewards, chances, strict=True)
    return Log.from_episodes(
        [
            {"states": s, "actions": a, "rewards": r, "terminal": False, "behaviour": c if known else None}
            for s, a, r, c in parts
        ]
    )


def value_of(policy):
    rewards = roll(policy, 20_000, 120, 99)[2]
    return float((rewards * GAMMA ** np.arange(120)).sum(axis=1).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu", "pi"),
    [(softmax(0.3), softmax(1.0)), (gaussian(0.1), gaussian(0.3))],
    ids=["discrete", "continuous"],
)
def test_features_and_doubly_robust_find_the_value(mu, pi):
    log = log_of(mu)
    names = ("per-decision-is", "doubly-robust", "weighted-doubly-robust", "certainty-equivalence")
    result = evaluate(log, pi, discount=GAMMA, estimators=names, training=QUICK)
    truth = value_of(pi)
    for name in names[1:]:
        one = result.answers[name]
        assert abs(one.value - truth) < max(4 * one.error, 0.1), name
    assert result.answers["certainty-equivalence"].error < 0.15
    assert abs(result.behaviour.value - truth) > 0.3  # the log itself is no answer
    assert result.diagnostics["unsupported"] < 0.05


def test_features_with_one_hot_observations_are_tabular_certainty_equivalence():
    from reference.offline_logs import GAMMA as gamma
    from reference.offline_logs import garnet_log

    _, pi, _, log = garnet_log(0, episodes=200)
    tabular = evaluate(log, pi, discount=gamma, estimators=["certainty-equivalence"])
    eye = np.eye(5)
    spread = Log(eye[log.states], log.actions, log.rewards, eye[log.next_states], log.terminal, log.offsets)
    linear = fit(prepare(spread, FunctionPolicy(lambda x: x @ pi), 0), gamma, 0)
    expected = tabular.answers["certainty-equivalence"]
    assert abs(float(linear.starts.mean()) - expected.value) < 0.02 * max(1.0, abs(expected.value))
    dual = float((linear.weights * log.rewards).sum() / log.num_episodes)
    np.testing.assert_allclose(dual, linear.starts.mean(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mu", [softmax(0.6), gaussian(0.2)], ids=["discrete", "continuous"])
def test_a_fitted_behaviour_policy_is_near_the_true_one_and_calibrated(mu):
    log = log_of(mu, episodes=300)
    fitted = fit_behaviour(prepare(log, FunctionPolicy(mu), 0), 0, Training(steps=800, batch=128))
    error = np.log(fitted.chance) - np.log(log.behaviour)
    assert np.sqrt((error**2).mean()) < 0.15
    assert fitted.calibration.error < 0.04
    assert not fitted.calibration.suspicious
    assert fitted.unsupported.mean() < 0.02


@pytest.mark.slow
def test_networks_find_the_value():
    """Each estimator within its interval or 3%, where the log itself is off by more than 10%."""
    log = log_of(softmax(0.3), episodes=200, steps=20)
    names = ["saddle-point", "fenchel", "fqe-one-step", "fqe-marginalized"]
    training = Training(steps=400, batch=32, hidden=(24, 24), members=2)
    answers = evaluate(log, softmax(0.8), discount=GAMMA, estimators=names, training=training).answers
    truth = value_of(softmax(0.8))
    for name in names:
        assert abs(answers[name].value - truth) < 0.03 * truth, name
        assert answers[name].interval.width > 0


@pytest.mark.slow
@pytest.mark.parametrize("backup", ["one-step", "retrace"])
def test_the_last_layer_is_the_fixed_point_of_the_projected_backup(backup):
    """With γ near 1 and hardly any training: descent is far from the value, the solved last layer is not."""
    mu, pi, gamma = softmax(0.3), softmax(0.8), 0.98
    log = log_of(mu, episodes=150, steps=20)
    pairs = prepare(log, FunctionPolicy(pi), 0)
    ratios = target_probability(FunctionPolicy(pi), log) / log.behaviour
    rows = rows_of(pairs, ratios, np.ones((1, 150)), gamma, 1.0)
    training = Training(steps=100, batch=32, hidden=(24, 24), members=1)
    networks = learn(rows, backup, gamma, jax.random.key(0), training)
    value = fitted_q(log, rows, networks, backup, gamma, training)[0]
    rewards = roll(pi, 4000, 400, 99)[2]
    truth = float((rewards * gamma ** np.arange(400)).sum(axis=1).mean())
    first = np.asarray(expected(networks[0], rows.starts)).mean()
    assert abs(value - truth) < 0.06 * truth
    assert abs(first - truth) > 2 * abs(value - truth)


@pytest.mark.slow
def test_balanced_ratios_give_the_values_of_the_networks():
    """E_log[w (φ - γφ')] = c E_start φ means that w prices every reward φ - γφ' at its value."""
    log = log_of(softmax(0.3), episodes=100, steps=15)
    pairs = prepare(log, FunctionPolicy(softmax(0.8)), 0)
    rows = rows_of(pairs, None, np.ones((1, 100)), GAMMA, 1.0)
    network = MLP(5, 1, (16,), key=jax.random.key(0), copies=1)
    w = balanced(rows, moments_of(pairs, GAMMA, 0), network, GAMMA)[0]
    phi, following, start = basis(member(network, 0), rows)
    found = w @ (phi - GAMMA * following) / 100
    np.testing.assert_allclose(found, start.mean(axis=0), atol=0.02 * np.abs(start.mean(axis=0)).max())


@pytest.mark.slow
def test_the_spread_of_random_features_is_in_the_interval():
    log = log_of(softmax(0.3), episodes=60, steps=15)
    names = ("certainty-equivalence",)
    one = evaluate(log, softmax(0.8), discount=GAMMA, estimators=names, training=QUICK).answers[names[0]]
    pairs = prepare(log, FunctionPolicy(softmax(0.8)), 0)
    values = [fit(pairs, GAMMA, k).starts.mean() for k in range(4)]
    np.testing.assert_allclose(one.value, np.mean(values), rtol=1e-6)
    assert one.interval.width > 2 * 1.95 * one.error + 3.9 * np.std(values, ddof=1)


@pytest.mark.slow
def test_a_deterministic_policy_has_no_importance_sampling():
    log = log_of(gaussian(0.1), episodes=60, steps=15)
    names = ("per-decision-is", "certainty-equivalence")
    result = evaluate(log, gaussian(0.3, std=0.0), discount=GAMMA, estimators=names, training=QUICK)
    assert list(result.answers) == ["certainty-equivalence"]
    assert any("deterministic" in note for note in result.notes)
    assert result.verdict.status != "trust"


def test_a_continuous_policy_outside_the_support_is_not_scored():
    log = log_of(gaussian(0.1), episodes=60, steps=15)

    def far(x):
        mean, std = gaussian(0.1)(x)
        return mean + 2.0, std  # five standard deviations away

    names = ("per-decision-is", "certainty-equivalence")
    result = evaluate(log, far, discount=GAMMA, estimators=names, training=QUICK)
    assert result.diagnostics["unsupported"] > 0.9
    assert result.verdict.status == "cannot tell"
    assert result.verdict.estimator is None


def test_density_of_a_gaussian_target():
    log = log_of(gaussian(0.1), episodes=5, steps=4)
    np.testing.assert_allclose(
        target_probability(FunctionPolicy(gaussian(0.1)), log), log.behaviour, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("log", "policy", "message"),
    [
        (lambda: log_of(softmax(0.3), 5, 4), gaussian(0.1), "is Gaussian, and the log's actions are indices"),
        (lambda: log_of(gaussian(0.1), 5, 4), softmax(0.3), "returned probabilities; the log's actions are"),
        (lambda: log_of(softmax(0.3), 5, 4), lambda x: np.ones((len(x), 1)), "the policy has 1 actions"),
        (lambda: log_of(softmax(0.3), 5, 4), lambda x: np.ones((2, 3)) / 3, r"returned shape \(2, 3\) for 1"),
        (lambda: log_of(softmax(0.3), 5, 4), np.full((2, 3), 1 / 3), "a table of states cannot be a policy"),
    ],
)
def test_policies_that_do_not_fit_are_refused(log, policy, message):
    with pytest.raises(ValueError, match=message):
        evaluate(log(), policy, discount=GAMMA, training=QUICK)


@pytest.mark.parametrize("policy", [softmax(0.8), gaussian(0.5)], ids=["discrete", "continuous"])
def test_the_other_half_gives_each_episode_its_critic(policy):
    """LSTD-Q by its formula, on whole features of the other half's rows."""
    log = log_of(policy, episodes=40, steps=10)
    pairs = prepare(log, FunctionPolicy(policy), 0)
    features = Features(2, pairs.actions.shape[1], pairs.discrete, 3)
    phi, after = features.of_pairs(pairs.observations, pairs.actions), features.of_policy(pairs.following)
    fold = log.folds()
    rows = np.repeat(fold, log.lengths)
    half = phi[rows == 1]
    system = half.T @ (half - GAMMA * after[rows == 1])
    system += 1e-6 * np.trace(system) / len(system) * np.eye(len(system))
    theta = np.linalg.solve(system, half.T @ log.rewards[rows == 1])
    delta, starts = fit(pairs, GAMMA, 3).crossed
    expected_delta = log.rewards + (GAMMA * after - phi) @ theta
    np.testing.assert_allclose(delta[rows == 0], expected_delta[rows == 0], atol=1e-5)
    expected_starts = features.of_policy(pairs.starts) @ theta
    np.testing.assert_allclose(starts[fold == 0], expected_starts[fold == 0], atol=1e-5)


def test_a_sample_of_a_log_has_whole_episodes():
    policy = softmax(0.8)
    pairs = prepare(log_of(policy, episodes=30, steps=10), FunctionPolicy(policy), 0)
    assert pairs.some(300, 0)[0] is pairs
    sample, rows = pairs.some(95, 0)
    assert sample.log.num_episodes == 10
    assert len(sample.log) == len(rows) == 100
    np.testing.assert_array_equal(sample.observations, pairs.observations[rows])
    np.testing.assert_array_equal(sample.log.states, pairs.log.states[rows])
    np.testing.assert_array_equal(sample.starts.weights, pairs.starts.weights[rows[::10] // 10])


def test_a_policy_is_asked_with_states_as_the_log_has_them():
    """Indices of states and vectors of actions: the policy looks its means up."""
    rng = np.random.default_rng(0)
    means = np.array([[0.0], [1.0], [2.0]])
    log = Log.from_episodes(
        [
            {"states": rng.integers(3, size=4), "actions": rng.normal(size=(3, 1)), "rewards": np.ones(3)}
            | {"terminal": bool(i % 2), "behaviour": np.full(3, 0.4)}
            for i in range(10)
        ]
    )
    asked = []

    def policy(states):
        asked.append(states)
        return means[states], 0.5

    pairs = prepare(log, FunctionPolicy(policy), 0)
    following, starts = asked
    np.testing.assert_array_equal(following, np.where(log.terminal, log.states, log.next_states))
    np.testing.assert_array_equal(starts, log.states[log.offsets[:-1]])
    assert pairs.following.actions.shape == (len(log), 8, 1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"steps": 0}, r"training\.steps must be at least 1, got 0"),
        ({"hidden": (64, 0)}, r"training\.hidden must be at least 1, got 0"),
        ({"rate": 0.0}, r"training\.rate must be positive, got 0"),
        ({"polyak": 1.5}, r"training\.polyak must lie in \(0, 1\], got 1\.5"),
        ({"members": 1}, r"training\.members must be at least 2, got 1"),  # one network has no spread
    ],
)
def test_training_that_gives_no_interval_is_refused(settings, sentence):
    log = log_of(softmax(0.5), episodes=10, steps=5)
    with pytest.raises(ValueError, match=sentence):
        evaluate(log, softmax(0.8), discount=GAMMA, training=Training(**settings))


def test_a_log_of_observations_has_behaviour_probabilities_everywhere_or_nowhere():
    """They were dropped in silence where one part had none."""
    log = log_of(softmax(0.5), episodes=10, steps=5)
    with pytest.raises(ValueError, match="present in one part of the log and not in another"):
        join([log.select(np.arange(5)), replace(log.select(np.arange(5, 10)), behaviour=None)])
