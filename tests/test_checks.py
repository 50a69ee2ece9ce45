"""Values of the wrong type are named as users see it: without the run-time check of annotations that tests have."""

import jax
import jaxtyping
import numpy as np
import pytest

from marginax import (
    TabularMDP,
    learning,
    linear_programs,
    marginalized,
    marginalized_vtrace,
    multi_step,
    one_step,
    problems,
    statistics,
    traces,
    trajectories,
    vtrace,
    weights,
)

MDP, PI, MU = problems.chain(n=3, actions=2)
C = traces.retrace(PI, MU)
BATCH = trajectories.sample(MDP, MU, jax.random.key(0), episodes=2, horizon=3)
ESTIMATORS = [weights.monte_carlo, weights.reverse_td, weights.certainty_equivalence, weights.saddle_point]


@pytest.fixture(autouse=True)
def _as_users_have_it(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def refused(sentence, call, *arguments, **options):
    with pytest.raises(ValueError) as caught:
        call(*arguments, **options)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("value", [None, float("inf"), float("nan"), "a", "3", 2.5, True, [3]])
def test_counts(value):
    refused(f"n must be a whole number, got {value!r}", problems.chain, n=value)


@pytest.mark.parametrize("value", [(0, 0, 0), 0, "start"])
def test_starts(value):
    sentence = f"start must be a pair (state, action), got {value!r}"
    for call in (weights.exact, weights.paths):
        refused(sentence, call, MDP, MU, C, start=value)
    for call in ESTIMATORS:
        refused(sentence, call, BATCH, C, start=value)


def test_places_of_a_start():
    refused("start[0] must be a whole number, got 'a'", weights.exact, MDP, MU, C, start=("a", "b"))
    refused("start must be a whole number, got (0, 0)", weights.exact_states, MDP, MU, C, start=(0, 0))
    refused("start must be a whole number, got (0, 0)", ESTIMATORS[0], BATCH, C, start=(0, 0), on_states=True)


def test_choices_and_step_sizes():
    for call in (
        lambda **options: learning.evaluate(BATCH, PI, C, **options),
        lambda **options: learning.improve(BATCH, MU, learning.retrace(MU), **options),
    ):
        refused("visits must be one of each, mean, got 'foo'", call, visits="foo")
        refused("step_size must be a number, got 'x'", call, step_size="x")
    refused("refresh_growth must be a number, got 'x'", learning.evaluate, BATCH, PI, C, refresh_growth="x")
    refused("states must be whole numbers, got float64", learning.evaluate, BATCH, PI, C, states=[0.5])


def test_numbers():
    refused("clip must be a number, got None", traces.retrace, PI, MU, clip=None)
    refused("clip must be a number, got '0.5'", traces.retrace, PI, MU, clip="0.5")
    refused("clip must be at least 0, got nan", traces.retrace, PI, MU, clip=float("nan"))
    refused("max_weight must be a number, got 'x'", linear_programs.fastest, MDP, PI, MU, "x")
    refused("time_limit must be a number, got 'x'", linear_programs.evaluate, MDP, PI, time_limit="x")
    for call in ESTIMATORS:
        refused("discount must be a number, got 'a'", call, BATCH, C, discount="a")


@pytest.mark.parametrize(
    "r",
    [[["1", "2"]], np.array([[1 + 1j, 2.0]]), np.zeros((1, 2), "datetime64[s]")],
    ids=["strings", "complex", "dates"],
)
def test_arrays_of_other_things_than_real_numbers(r):
    kind = type(r).__name__
    with pytest.raises(ValueError, match=rf"r must be an array of real numbers, got {kind}: its entries are"):
        TabularMDP(np.zeros((1, 2, 1)), r, 0.9)


def test_trajectories():
    episodes = trajectories.to_episodes(BATCH)
    calls = [
        lambda data, call=call: call(data, C) for call in (*ESTIMATORS, weights.regression, weights.fenchel)
    ]
    calls += [weights.EmpiricalMDP.empty(3, 2, dense=dense).update for dense in (False, True)]
    calls.append(lambda data: weights.estimate_behaviour(data, 3, 2))
    for kind in (weights.MonteCarlo, weights.ReverseTD, weights.CertaintyEquivalence, weights.Regression):
        empty = kind.init(np.eye(3) if kind is weights.Regression else 3, 2, 0.9)
        calls.append(lambda data, empty=empty: empty.update(data, C))
    for call in calls:
        for data in (episodes, episodes[0], None):
            with pytest.raises(ValueError, match=r"^trajectories must be a Trajectory, .* got \w+$"):
                call(data)


def test_traces_of_incremental_estimators():
    for estimator in (weights.MonteCarlo.init(3, 2, 0.9), weights.CertaintyEquivalence.init(3, 2, 0.9)):
        refused("c must be finite, but c[0, 0] = nan", estimator.weights, np.full((3, 2), np.nan))
        refused("c must not be negative, but c[0, 0] = -1.0", estimator.weights, np.full((3, 2), -1.0))
    with pytest.raises(ValueError, match="c must be an array of real numbers, got dict"):
        weights.ReverseTD.init(3, 2, 0.9).update(BATCH, {})


def test_mdps():
    problem = problems.chain(n=3, actions=2)
    calls = [
        lambda mdp: one_step(mdp, PI),
        lambda mdp: multi_step(mdp, PI, MU, C),
        lambda mdp: marginalized(mdp, PI, MU, C),
        lambda mdp: vtrace(mdp, MU, C, C),
        lambda mdp: marginalized_vtrace(mdp, MU, C, C),
        *(
            lambda mdp, call=call: call(mdp, MU, C)
            for call in (weights.exact, weights.exact_states, weights.paths, weights.paths_states)
        ),
        lambda mdp: weights.to_traces(mdp, MU, C, (0, 0)),
        lambda mdp: linear_programs.evaluate(mdp, PI),
        lambda mdp: linear_programs.relaxed(mdp, PI, MU, C, 0.5),
        lambda mdp: linear_programs.iterate(mdp, PI, MU, C, 0.5, 2),
        lambda mdp: linear_programs.fastest(mdp, PI, MU, 1.0),
        lambda mdp: linear_programs.frontier(mdp, PI, MU, [1.0]),
        lambda mdp: linear_programs.worst_critic(mdp, PI, MU, C),
        lambda mdp: linear_programs.critic_loss(mdp, PI, MU, C, C),
    ]
    for call in calls:
        refused("mdp must be a TabularMDP, got Problem", call, problem)


def test_counts_and_their_behaviour():
    counts = weights.EmpiricalMDP.empty(3, 2).update(BATCH)
    refused("other must be an EmpiricalMDP, got NoneType", counts.merge, None)
    refused(
        "actions must lie in range(2), but actions[1] = 2", counts.add, [0, 0], [1, 2], [1, 1], [False, False]
    )
    refused("ended must have the shape of states, (1,), got ()", counts.add, [0], [0], [0], None)
    refused("num_states must be a whole number, got 'x'", weights.estimate_behaviour, BATCH, "x", 2)
    dense = weights.EmpiricalMDP.empty(3, 2, dense=True).update(BATCH)
    for each in (counts, dense):
        np.testing.assert_allclose(
            each.mdp(0.9, unseen="average", mu=MU.tolist()).dense_p(),
            each.mdp(0.9, unseen="average", mu=MU).dense_p(),
        )
        refused("mu must not be negative, but mu[0, 0] = -0.5", each.transitions, "average", MU - 1)


def test_statistics():
    values = np.arange(4.0)
    for call in (
        statistics.bootstrap,
        lambda x, **options: statistics.studentised_bootstrap(0.0, x, **options),
    ):
        refused("level must lie in (0, 1), got 95", call, values, level=95)
        refused("level must be a number, got '0.9'", call, values, level="0.9")
        refused("replicates must be at least 1, got 0", call, values, replicates=0)
        refused("seed must be at least 0, got -1", call, values, seed=-1)
    refused("influence must have shape [G], got (2, 2)", statistics.studentised_bootstrap, 0.0, np.eye(2))
    refused("value must be a number, got None", statistics.studentised_bootstrap, None, values)
    refused(
        "axis must be an axis of values, which have 1, got 1", statistics.interquartile_mean, values, axis=1
    )
    assert statistics.studentised_bootstrap(0.0, [0.0, 1.0, 3.0]).width > 0
    assert statistics.studentised_bootstrap(0.0, []).width == np.inf
    with pytest.raises(ValueError, match="values must be an array of real numbers, got dict"):
        statistics.interquartile_mean({})
