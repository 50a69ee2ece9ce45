"""The empirical MDP against counts made one transition at a time."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.weights import EmpiricalMDP, estimate_behaviour
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(1)
FIELDS = ("visits", "successors", "reward_sums", "starts", "behaviour_sums")


def batch(seed=0, episodes=40, horizon=12, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


def table(counts, name):
    field = getattr(counts, name)
    return np.asarray(field) if counts.dense or name != "successors" else field.toarray().reshape(5, 2, 5)


def counted(data):
    """All fields by a loop over episodes."""
    found = {"visits": np.zeros((5, 2)), "successors": np.zeros((5, 2, 5)), "reward_sums": np.zeros((5, 2))}
    found |= {"starts": np.zeros(5), "behaviour_sums": np.zeros((5, 2))}
    for episode in mx.trajectories.to_episodes(data):
        found["starts"][episode.observations[0]] += 1
        steps = len(episode.actions)
        for t in range(steps):
            x, a, y = episode.observations[t], episode.actions[t], episode.observations[t + 1]
            found["visits"][x, a] += 1
            found["reward_sums"][x, a] += episode.rewards[t]
            found["behaviour_sums"][x, a] += episode.behaviour[t]
            if t < steps - 1 or not episode.terminated:
                found["successors"][x, a, y] += 1
    return found


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize("reset", [False, True], ids=["padded", "packed"])
def test_counts_are_those_of_a_loop_and_padding_is_never_read(reset, dense):
    data = batch(reset=reset)
    update = jax.jit(lambda counts, data: counts.update(data)) if dense else EmpiricalMDP.update
    counts = update(EmpiricalMDP.empty(5, 2, dense=dense), reference.poisoned(data))
    for name, expected in counted(data).items():
        np.testing.assert_allclose(table(counts, name), expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_two_parts_merged_are_the_whole(dense):
    first, second = batch(0), batch(1, episodes=7, horizon=5)
    empty = EmpiricalMDP.empty(5, 2, dense=dense)
    one_by_one = empty.update(first).update(second)
    merged = empty.update(first).merge(empty.update(second))
    for name in FIELDS:
        np.testing.assert_allclose(table(merged, name), table(one_by_one, name), rtol=1e-6)


def test_folds_of_flat_arrays_add_up():
    generator = np.random.default_rng(0)
    x, a, y = (
        generator.integers(5, size=200),
        generator.integers(2, size=200),
        generator.integers(5, size=200),
    )
    ended, fold = generator.random(200) < 0.1, generator.random(200) < 0.5
    columns = {"rewards": generator.normal(size=200), "first": ended, "behaviour": np.full(200, 0.5)}
    empty = EmpiricalMDP.empty(5, 2)
    parts = [empty.add(x, a, y, ended, valid=kept, **columns) for kept in (fold, ~fold)]
    whole, merged = empty.add(x, a, y, ended, **columns), parts[0].merge(parts[1])
    for name in FIELDS:
        np.testing.assert_allclose(table(merged, name), table(whole, name), atol=1e-12)
    assert merged.has_behaviour and not empty.has_behaviour


@pytest.mark.parametrize("unseen", ["end", "average"])
def test_both_forms_read_the_same_model_from_few_data(unseen):
    data = batch(episodes=2, horizon=3)
    host, dense = (EmpiricalMDP.empty(5, 2, dense=d).update(data) for d in (False, True))
    assert not host.support.all() and host.support.any(axis=1).sum() < 5
    np.testing.assert_allclose(
        dense.transitions(unseen, MU), host.transitions(unseen, MU).toarray().reshape(5, 2, 5), atol=1e-6
    )
    for method in ("rewards", "action_frequencies", "logged_behaviour"):
        np.testing.assert_allclose(getattr(dense, method)(), getattr(host, method)(), atol=1e-6)
    found = host.mdp(0.9, unseen=unseen, mu=MU)
    np.testing.assert_allclose(found.initial, host.starts / host.starts.sum())


@pytest.mark.parametrize("prior", [0.0, 0.1])
def test_the_mdp_of_jax_counts_is_made_in_double_precision(prior):
    """Against frequencies by division of whole numbers; thirds and pseudo-counts of 0.1 have no exact single-precision number."""
    data = batch(horizon=30)
    expected = counted(data)
    successors = expected["successors"] + prior
    visits = expected["visits"] + 5 * prior
    ended = expected["visits"] - expected["successors"].sum(axis=-1)
    mdp = EmpiricalMDP.empty(5, 2, dense=True).update(data).with_prior(prior).mdp(0.9)
    np.testing.assert_allclose(mdp.p, successors / visits[..., None], rtol=1e-6)
    np.testing.assert_allclose(mdp.p.sum(axis=-1), 1 - ended / visits, rtol=0, atol=1e-8 if prior else 1e-15)
    np.testing.assert_array_equal(mdp.termination > 0, ended > 0)


def test_a_behaviour_policy_in_single_precision_leaves_no_mass_behind():
    counts = EmpiricalMDP.empty(2, 3).add([0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1], ended=[False] * 4)
    mdp = counts.mdp(0.9, unseen="average", mu=np.array([[0.1, 0.6, 0.3], [0.3, 0.4, 0.3]], np.float32))
    np.testing.assert_allclose(mdp.p[0, 2], [1 / 7, 6 / 7], rtol=1e-6)
    np.testing.assert_allclose(mdp.p.sum(axis=-1), 1, rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match=r"mu must have shape \(2, 3\), got \(2, 2\)"):
        counts.mdp(0.9, unseen="average", mu=np.full((2, 2), 0.5))


def test_what_an_unseen_pair_does_is_a_choice():
    """In state 0 actions 0 and 1 were taken, never 2; state 1 was never left."""
    counts = EmpiricalMDP.empty(2, 3).add([0, 0, 0], [0, 0, 1], [0, 1, 1], ended=[False] * 3)
    mu = [[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]
    p = counts.transitions("end").toarray().reshape(2, 3, 2)
    np.testing.assert_allclose(p[0], [[0.5, 0.5], [0, 1], [0, 0]])
    p = counts.transitions("average", mu).toarray().reshape(2, 3, 2)
    np.testing.assert_allclose(p[0, 2], 0.4 * p[0, 0] + 0.6 * p[0, 1])
    np.testing.assert_array_equal(p[1], 0)
    np.testing.assert_allclose(counts.action_frequencies(), [[2 / 3, 1 / 3, 0], [1 / 3] * 3])


def test_a_prior_counts_everywhere():
    for dense in (False, True):
        counts = EmpiricalMDP.empty(5, 2, dense=dense).with_prior(0.5)
        assert counts.support.all()
        np.testing.assert_allclose(table(counts, "successors"), 0.5)
        np.testing.assert_allclose(counts.visits, 2.5)


def test_no_prior_needs_no_table_of_all_transitions():
    counts = EmpiricalMDP.empty(10**6, 1)
    assert counts.with_prior(0.0) is counts


def test_logged_probabilities_are_averaged_and_completed():
    counts = EmpiricalMDP.empty(1, 3).add(
        [0, 0, 0], [0, 0, 1], [0, 0, 0], ended=[False] * 3, behaviour=[0.4, 0.6, 0.2]
    )
    np.testing.assert_allclose(counts.logged_behaviour(), [[0.5, 0.2, 0.3]])


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize("kind", [bool, int, float])
def test_flags_may_be_zeros_and_ones(kind, dense):
    ended, first, valid = (np.array(flags).astype(kind) for flags in ([0, 1, 0], [1, 0, 1], [1, 1, 0]))
    counts = EmpiricalMDP.empty(2, 1, dense=dense).add(
        [0, 1, 1], [0, 0, 0], [1, 1, 1], ended, first=first, valid=valid
    )
    successors = counts.successors if dense else counts.successors.toarray()
    np.testing.assert_array_equal(np.reshape(successors, (2, 2)), [[0, 1], [0, 0]])
    np.testing.assert_array_equal(counts.starts, [1, 0])
    np.testing.assert_array_equal(counts.visits, [[1], [1]])


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize("name", ["actions", "ended", "rewards", "valid"])
def test_arrays_of_different_lengths_are_refused(name, dense):
    columns = {"actions": [0, 0], "next_states": [0, 1], "ended": [False, True], name: [0]}
    with pytest.raises(ValueError, match=rf"{name} must have the shape of states, \(2,\), got \(1,\)"):
        EmpiricalMDP.empty(2, 1, dense=dense).add([0, 1], **columns)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_indices_are_integers_and_may_be_none(dense):
    empty = EmpiricalMDP.empty(2, 1, dense=dense)
    for name in ("states", "actions", "next_states"):
        columns = {"states": [1], "actions": [0], "next_states": [1], "ended": [False], name: [0.7]}
        with pytest.raises(ValueError, match=f"{name} must be whole numbers, got float64"):
            empty.add(**columns)
    assert not empty.add([], [], [], ended=[], rewards=[], first=[]).visits.any()


def test_a_prior_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr("marginax._checks.available_memory", lambda: 2**20)
    with pytest.raises(ValueError, match=r"pseudo-counts of all transitions needs about .* use prior=0"):
        EmpiricalMDP.empty(1000, 4).with_prior(0.1)
    assert not EmpiricalMDP.empty(1000, 4).with_prior(0.0).visits.any()


def test_bad_data_are_refused():
    empty = EmpiricalMDP.empty(2, 1)
    logged, not_logged = empty.add([0], [0], [0], [False], behaviour=[1.0]), empty.add([0], [0], [0], [False])
    for one, other in ((logged, not_logged), (not_logged, logged)):
        with pytest.raises(ValueError, match="behaviour probabilities are present in one part"):
            one.merge(other)
    assert logged.merge(empty).has_behaviour and empty.merge(logged).has_behaviour
    with pytest.raises(ValueError, match=r"next_states must lie in range\(2\), but next_states\[0\] = 2"):
        empty.add([0], [0], [2], ended=[False])
    with pytest.raises(ValueError, match=r"states must be a flat array \[N\], got shape \(1, 1\)"):
        empty.add([[0]], [[0]], [[0]], ended=[[False]])
    empty.add([0], [0], [2], ended=[True])  # what follows the end is not read
    with pytest.raises(ValueError, match="behaviour probabilities are present in one part"):
        not_logged.add([0], [0], [0], [False], behaviour=[1.0])
    with pytest.raises(ValueError, match="unseen must be"):
        empty.transitions("ignore")
    with pytest.raises(ValueError, match="cannot be merged"):
        empty.merge(EmpiricalMDP.empty(3, 1))
    with pytest.raises(ValueError, match="valid step"):
        estimate_behaviour(jax.tree.map(lambda f: f[:0], batch()), 5, 2)


def test_a_discount_in_double_precision_is_read_to_its_last_digit():
    """In single precision 0.123456789 would be 0.12345679, and the other one 1, which is refused."""
    for gamma in (0.123456789, 1 - 1e-9):
        one = np.ones(2)
        data = mx.trajectories.Trajectory(
            np.arange(2), np.zeros(2, int), one, gamma * one, np.array([1, 0]), one < 0, None, one > 0
        )
        _, info = mx.weights.certainty_equivalence(data, np.ones((2, 1)), return_info=True)
        assert info.discount == gamma
