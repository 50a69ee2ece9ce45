"""Certainty equivalence against sums of powers of kernels counted one transition at a time."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax.weights import (
    CertaintyEquivalence,
    certainty_equivalence,
    estimate_behaviour,
)
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(1)


def batch(seed=0, episodes=40, horizon=12, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


def by_definition(data, behaviour="counts", on_states=False):
    p, frequencies = reference.empirical(data, 5, 2)
    assert frequencies.all()
    if behaviour == "counts":
        mass = np.maximum((C * frequencies).sum(axis=1, keepdims=True), 1)
        return reference.weights_by_powers(p, frequencies, C / mass, 0.9, on_states)
    return reference.weights_by_powers(p, MU, C, 0.9, on_states)


@pytest.mark.parametrize("reset", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("on_states", [False, True], ids=["pairs", "states"])
def test_equals_sums_of_powers_of_the_empirical_kernels(on_states, reset):
    data = batch(reset=reset)
    estimate = partial(certainty_equivalence, on_states=on_states)
    close = {"rtol": 1e-6, "atol": 1e-9}
    unlogged = reference.without_behaviour(data)
    np.testing.assert_allclose(estimate(data, C, mu=MU), by_definition(data, "known", on_states), **close)
    np.testing.assert_allclose(estimate(data, C), by_definition(data, "known", on_states), rtol=1e-5)
    np.testing.assert_allclose(estimate(unlogged, C), by_definition(data, "counts", on_states), **close)


def test_says_where_the_behaviour_came_from():
    data = batch()
    unlogged = reference.without_behaviour(data)
    info = [
        certainty_equivalence(data, C, mu=MU, return_info=True)[1],
        certainty_equivalence(data, C, return_info=True)[1],
        certainty_equivalence(unlogged, C, on_states=True, return_info=True)[1],
    ]
    assert [i.behaviour for i in info] == ["given", "logged", "counts"]
    assert info[0][1:4] == (0.9, data.valid.sum(), 10)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False], ids=["mu", "counts"])
@pytest.mark.parametrize("episodes", [1, 40], ids=["few data", "more data"])
def test_updates_one_by_one_equal_the_batch(known, episodes):
    data = reference.without_behaviour(batch(episodes=episodes, horizon=6))
    mu = MU if known else None
    estimator = CertaintyEquivalence.init(5, 2, 0.9, mu=mu)
    update = jax.jit(lambda estimator, one: estimator.update(one))
    for i in range(episodes):
        estimator = update(estimator, jax.tree.map(lambda f, i=i: f[i], data))
    for ours, batched in (
        (estimator.weights(C), certainty_equivalence(data, C, mu=mu)),
        (estimator.state_weights(C), certainty_equivalence(data, C, on_states=True, mu=mu)),
    ):
        np.testing.assert_allclose(ours, batched, rtol=2e-5, atol=1e-6)


def test_seeds_side_by_side_equal_a_loop():
    seeds = [batch(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *seeds)
    blank = CertaintyEquivalence.init(5, 2, 0.9, mu=MU)
    together = jax.jit(jax.vmap(lambda data: blank.update(data).weights(C)))(stacked)
    for one, data in zip(together, seeds, strict=True):
        np.testing.assert_allclose(one, certainty_equivalence(data, C, mu=MU), rtol=2e-5, atol=1e-6)


def test_in_double_precision_the_incremental_form_is_exact():
    data = batch()
    with jax.enable_x64(True):
        weights = CertaintyEquivalence.init(5, 2, 0.9, mu=MU).update(data).weights(C)
        np.testing.assert_allclose(weights, by_definition(data, "known"), rtol=1e-11)


def test_one_row_equals_that_of_the_table():
    data = batch(episodes=1, horizon=4)
    table, states = certainty_equivalence(data, C), certainty_equivalence(data, C, on_states=True)
    for x in range(5):
        for a in range(2):
            np.testing.assert_allclose(certainty_equivalence(data, C, start=(x, a)), table[x, a], atol=1e-12)
        np.testing.assert_allclose(
            certainty_equivalence(data, C, on_states=True, start=x), states[x], atol=1e-12
        )


def test_padding_is_never_read():
    data = batch()
    assert not data.valid.all()
    np.testing.assert_array_equal(
        certainty_equivalence(reference.poisoned(data), C), certainty_equivalence(data, C)
    )


def test_a_truncated_step_counts_its_successor_and_a_terminal_one_none():
    one = np.ones(1, np.float32)
    for discount, expected in ((0.9, [0, 1.0]), (0.0, [0, 0])):
        data = mx.trajectories.Trajectory(
            np.array([0]), np.array([0]), one, discount * one, np.array([1]), one > 0, None, one > 0
        )
        estimator = CertaintyEquivalence.init(2, 1, 0.9).update(data)
        np.testing.assert_array_equal(estimator.counts.successors[0, 0], expected)
        reach = certainty_equivalence(data, [[1.0], [0.5]], discount=0.9, mu=np.ones((2, 1)))[0, 0, 1, 0]
        assert reach == pytest.approx(0.5 if discount else 0.0)


def test_a_state_without_data_has_the_weights_of_one_step():
    data = batch(episodes=1, horizon=2, start_states=0)
    missing = sorted(
        set(range(5)) - set(np.asarray(data.states).ravel()) - set(np.asarray(data.next_states).ravel())
    )
    assert missing
    table = certainty_equivalence(data, C)
    for x in missing:
        for a in range(2):
            expected = np.zeros((5, 2))
            expected[x, a] = 1
            np.testing.assert_array_equal(table[x, a], expected)


def test_an_action_without_data_leads_where_the_others_do():
    """Two states that swap; in state 0 only action 0 was ever taken."""
    one = np.ones(4, np.float32)
    data = mx.trajectories.Trajectory(
        np.array([0, 1, 0, 1]),
        np.array([0, 0, 0, 1]),
        one,
        0.9 * one,
        np.array([1, 0, 1, 0]),
        one < 0,
        None,
        one > 0,
    )
    mu, c = np.full((2, 2), 0.5), np.array([[1.0, 0.2], [0.7, 0.4]])
    p = np.zeros((2, 2, 2))
    p[0, :, 1] = p[1, :, 0] = 1
    mdp = mx.TabularMDP(p, np.zeros((2, 2)), 0.9)
    np.testing.assert_allclose(certainty_equivalence(data, c, mu=mu), mx.weights.exact(mdp, mu, c), rtol=1e-9)
    estimator = CertaintyEquivalence.init(2, 2, 0.9, mu=mu).update(data)
    np.testing.assert_allclose(estimator.weights(c), mx.weights.exact(mdp, mu, c), rtol=1e-5)


def test_a_prior_adds_its_counts():
    data = reference.without_behaviour(batch(episodes=3))
    prior = np.random.default_rng(0).uniform(0.1, 1, (5, 2, 5))
    p, _ = reference.empirical(data, 5, 2)
    visits = np.zeros((5, 2))
    for episode in reference.episodes(data):
        for x, a, _, _ in episode:
            visits[x, a] += 1
    smooth_visits = visits + prior.sum(axis=-1)
    smooth = (p * visits[..., None] + prior) / smooth_visits[..., None]
    expected = reference.weights_by_powers(smooth, MU, C, 0.9)
    np.testing.assert_allclose(certainty_equivalence(data, C, mu=MU, prior=prior), expected, rtol=1e-8)
    estimator = CertaintyEquivalence.init(5, 2, 0.9, mu=MU, prior=prior).update(data)
    np.testing.assert_allclose(estimator.weights(C), expected, rtol=2e-5)
    assert certainty_equivalence(data, C, prior=0.5).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("logged", [True, False], ids=["mu", "counts"])
def test_converges_to_the_exact_weights(logged):
    exact, states = mx.weights.exact(MDP, MU, C), mx.weights.exact_states(MDP, MU, C)
    errors = []
    for episodes in (20, 2_000, 20_000):
        data = batch(3, episodes=episodes, horizon=30)
        data = data if logged else reference.without_behaviour(data)
        errors.append(np.abs(certainty_equivalence(data, C) - exact).mean())
        state_error = np.abs(certainty_equivalence(data, C, on_states=True) - states).max()
    assert errors[2] < 0.01 * exact.mean()
    assert state_error < 0.02
    assert errors[1] < 0.25 * errors[0]


@pytest.mark.slow
def test_certainty_equivalence_needs_a_fifth_of_the_data_of_monte_carlo_on_open_world():
    mdp, pi, mu = mx.problems.open_world(n=10)
    c = mx.traces.retrace(pi, mu, clip=2.0)
    exact, visitation = mx.weights.exact(mdp, mu, c), mdp.visitation(mu)
    data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=500, horizon=1000)
    few = reference.without_behaviour(jax.tree.map(lambda f: f[:100], data))

    def error(w):
        return (visitation * np.abs(np.asarray(w) - exact)).sum(axis=(2, 3)).mean()

    assert error(certainty_equivalence(few, c)) < 0.5 * error(mx.weights.monte_carlo(data, c))


def test_estimated_behaviour():
    data = reference.without_behaviour(batch())
    _, frequencies = reference.empirical(data, 5, 2)
    np.testing.assert_allclose(estimate_behaviour(data, 5, 2), frequencies)
    few = batch(episodes=1, horizon=1, start_states=2, start_actions=1)
    expected = np.full((5, 2), 0.5)
    expected[2] = [0, 1]
    np.testing.assert_allclose(estimate_behaviour(few, 5, 2), expected)
    expected[2] = [0.25, 0.75]
    np.testing.assert_allclose(estimate_behaviour(few, 5, 2, prior=0.5), expected)


def test_logged_probabilities_outside_their_range_are_refused():
    data = batch()
    broken = np.array(data.behaviour)
    broken[2, 0] = 1.5
    data = mx.trajectories.Trajectory(
        data.states,
        data.actions,
        data.rewards,
        data.discounts,
        data.next_states,
        data.truncated,
        broken,
        data.valid,
    )
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\], but behaviour\[2, 0\] = 1.5"):
        certainty_equivalence(data, C)


def test_traces_that_diverge_are_refused():
    with pytest.raises(ValueError, match="c is too large"):
        certainty_equivalence(batch(), np.full((5, 2), 3.0))


def test_traces_that_diverge_name_the_state_by_its_number_in_the_tables():
    """States 3 and 5 of 6 swap; the others are not in the data."""
    one = np.ones(2, np.float32)
    states = np.array([3, 5])
    data = mx.trajectories.Trajectory(
        states, 0 * states, one, 0.9 * one, states[::-1], one < 0, None, one > 0
    )
    c = np.array([[1.0], [1.0], [1.0], [1.0], [1.0], [3.0]])
    with pytest.raises(ValueError, match=r"is 3 in state 5$"):
        certainty_equivalence(data, c, mu=np.ones((6, 1)))
