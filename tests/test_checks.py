"""Values of the wrong type are named as users see it: without the run-time check of annotations that tests have."""

import jax
import jaxtyping
import pytest

from marginax import learning, linear_programs, problems, traces, trajectories, weights

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
    refused("clip must be a number, got 'x'", traces.retrace, PI, MU, clip="x")
    refused("clip must be at least 0, got nan", traces.retrace, PI, MU, clip=float("nan"))
    refused("max_weight must be a number, got 'x'", linear_programs.fastest, MDP, PI, MU, "x")
    refused("time_limit must be a number, got 'x'", linear_programs.evaluate, MDP, PI, time_limit="x")
    for call in ESTIMATORS:
        refused("discount must be a number, got 'a'", call, BATCH, C, discount="a")
