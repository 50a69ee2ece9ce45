"""Plain episodes to trajectories and back, packing, and the many ways in which episodes are broken."""

from types import SimpleNamespace

import jax
import jaxtyping
import numpy as np
import pytest

import marginax as mx
from marginax import targets
from marginax.trajectories import (
    Episode,
    Trajectory,
    from_episodes,
    gather,
    gather_pairs,
    pack,
    sample,
    to_episodes,
)


def episode(**change):
    """Three steps, four observations, terminated."""
    return {
        "observations": np.array([0, 1, 2, 3]),
        "actions": np.array([1, 0, 1]),
        "rewards": np.array([0.5, -1.0, 2.0]),
        "terminated": True,
    } | change


def test_n_steps_have_n_plus_one_observations():
    batch = from_episodes([episode(), episode(terminated=False, truncated=True)], discount=0.9)
    np.testing.assert_array_equal(batch.states, [[0, 1, 2]] * 2)
    np.testing.assert_array_equal(batch.next_states, [[1, 2, 3]] * 2)
    np.testing.assert_allclose(batch.discounts, [[0.9, 0.9, 0], [0.9, 0.9, 0.9]])
    np.testing.assert_array_equal(batch.truncated, [[False] * 3, [False, False, True]])
    assert batch.behaviour is None


def test_shorter_episodes_are_padded():
    short = Episode(np.array([4, 5]), np.array([1]), np.array([1.0]), terminated=False, truncated=True)
    batch = from_episodes([episode(), short], discount=0.9, length=4)
    np.testing.assert_array_equal(batch.valid, [[True, True, True, False], [True, False, False, False]])
    np.testing.assert_array_equal(batch.truncated[1], [True, False, False, False])
    assert not np.asarray(batch.discounts)[~np.asarray(batch.valid)].any()


def test_objects_with_flags_for_every_step_are_welcome():
    flags = {"terminations": np.array([False, False, True]), "truncations": np.zeros(3, bool)}
    given = SimpleNamespace(**{k: v for k, v in episode().items() if k != "terminated"}, **flags)
    one, other = (from_episodes([e], discount=0.9) for e in (given, episode()))
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_n_observations_will_do_only_for_episodes_that_terminate():
    batch = from_episodes([episode(observations=[0, 1, 2])], discount=0.9, final_observation=False)
    np.testing.assert_array_equal(batch.next_states[:, :2], [[1, 2]])
    with pytest.raises(
        ValueError, match=r"episode 0, step 2: it does not terminate .* its successor is unknown"
    ):
        from_episodes(
            [episode(observations=[0, 1, 2], terminated=False)], discount=0.9, final_observation=False
        )


def test_termination_counts_for_more_than_truncation_and_silence_for_truncation():
    both = from_episodes([episode(truncated=True)], discount=0.9)
    assert both.discounts[0, -1] == 0
    assert not both.truncated.any()
    neither = from_episodes([episode(terminated=False)], discount=0.9)
    assert neither.truncated[0, -1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": [0, 1, 2]}, "episode 1: 3 observations for 3 steps; expected 4"),
        ({"observations": [0, 1, 2, 3, 4]}, "episode 1: 5 observations for 3 steps; expected 4"),
        ({"rewards": [1.0, 2.0]}, "episode 1: 2 rewards for 3 steps"),
        ({"rewards": [1.0, np.nan, 0.0]}, "episode 1, step 1: reward nan is not a finite number"),
        ({"actions": [0, -1, 0]}, "episode 1, step 1: action -1 is negative"),
        ({"actions": [0.5, 1.0, 0.0]}, "episode 1: actions must be a sequence of whole numbers"),
        ({"rewards": [0.5, [1.0, 2.0], 0.0]}, "episode 1: rewards must be a sequence of real numbers: "),
        ({"observations": np.zeros((4, 2), int)}, r"episode 1: observations must be .* of shape \(4, 2\)"),
        ({"observations": [0], "actions": np.array([], int), "rewards": []}, "episode 1: it has no steps"),
        ({"observations": None}, "episode 1: it has no observations"),
        ({"terminations": [False, True, True]}, "episode 1, step 1: the step is terminal, yet more steps"),
        ({"truncations": [True, False, False]}, "episode 1, step 0: the step is truncated, yet more steps"),
        ({"terminations": [True]}, "episode 1: 1 terminations for 3 steps"),
        ({"behaviour": [0.5, 0.0, 1.0]}, "episode 1, step 1: behaviour probability is 0"),
        ({"behaviour": [0.5, 0.5]}, "episode 1: 2 behaviour for 3 steps"),
    ],
)
def test_broken_episodes_are_refused(change, message):
    fine = episode(behaviour=np.ones(3)) if "behaviour" in change else episode()
    with pytest.raises(ValueError, match=message):
        from_episodes([fine, episode(**change)], discount=0.9)


def test_other_refusals():
    with pytest.raises(ValueError, match="at least one episode"):
        from_episodes([], discount=0.9)
    with pytest.raises(ValueError, match="discount must lie in"):
        from_episodes([episode()], discount=1.0)
    with pytest.raises(ValueError, match="length must be at least 3"):
        from_episodes([episode()], discount=0.9, length=2)
    with pytest.raises(ValueError, match="behaviour must be given for all episodes or none, but episode 1"):
        from_episodes([episode(behaviour=np.ones(3)), episode()], discount=0.9)
    with pytest.raises(ValueError, match="length must be at least 3, that of episode 0"):
        pack(from_episodes([episode()], discount=0.9), length=2)


@pytest.fixture(scope="module")
def sampled():
    problem = mx.problems.garnet(6, 2, 3, seed=1, discount=0.9, termination=0.2)
    return problem, sample(problem.mdp, problem.mu, jax.random.key(0), episodes=30, horizon=8)


def test_there_and_back(sampled):
    _, batch = sampled
    again = from_episodes(to_episodes(batch), discount=0.9, length=8)
    valid = np.asarray(batch.valid)
    for name, field in vars(batch).items():
        other = getattr(again, name)
        np.testing.assert_allclose(
            np.asarray(other)[valid], np.asarray(field)[valid], rtol=1e-6, err_msg=name
        )
    np.testing.assert_array_equal(again.valid, valid)


def same_episodes(ones, others):
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        for name, a, b in zip(Episode._fields, one, other, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)


def test_packing_keeps_every_episode_and_their_order(sampled):
    _, batch = sampled
    packed = pack(batch, 20)
    assert packed.states.shape[0] < 30 * 8 / 20 + 1
    same_episodes(to_episodes(packed), to_episodes(batch))
    same_episodes(to_episodes(pack(packed, 8)), to_episodes(batch))


def test_sequences_of_several_episodes_come_apart(sampled):
    problem, _ = sampled
    stream = sample(problem.mdp, problem.mu, jax.random.key(0), episodes=5, horizon=40, reset=True)
    episodes = to_episodes(stream)
    assert sum(len(e.actions) for e in episodes) == 200
    assert sum(e.terminated for e in episodes) == int((stream.discounts == 0).sum())
    for e in episodes:
        assert len(e.observations) == len(e.actions) + 1
        assert e.terminated != e.truncated


def test_packed_targets_are_those_of_the_episodes_one_by_one(sampled):
    problem, batch = sampled
    q = np.random.default_rng(0).normal(size=(6, 2))
    c = mx.traces.retrace(problem.pi, problem.mu, clip=2.0)
    w = mx.weights.exact(problem.mdp, problem.mu, c)

    def all_targets(batch: Trajectory):
        q_t, v_next = gather(batch, q, problem.pi)
        common = (q_t, v_next, batch.rewards, batch.discounts)
        traces, weights = gather_pairs(batch, c), mx.trajectories.gather_weights(batch, w)
        for function, factor in [(targets.multi_step, traces), (targets.marginalized, weights)]:
            result = jax.vmap(function)(*common, factor, batch.truncated)
            yield np.asarray(result)[np.asarray(batch.valid)]

    alone = all_targets(batch)
    packed = all_targets(pack(batch, 24))
    for one, other in zip(alone, packed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_episodes_without_an_end_do_not_run_into_each_other():
    unfinished = from_episodes([episode(), episode()], discount=0.9)
    ones = np.ones((2, 3), np.float32)
    unfinished = Trajectory(
        **(vars(unfinished) | {"discounts": 0.9 * ones, "truncated": np.zeros((2, 3), bool)})
    )
    packed = pack(unfinished, 6)
    np.testing.assert_array_equal(packed.truncated, [[False, False, True, False, False, True]])


def test_gymnasium_episodes():
    """Stepping FrozenLake itself: every recorded transition is one the table knows, ends included."""
    gymnasium = pytest.importorskip("gymnasium")
    env = gymnasium.make("FrozenLake-v1", max_episode_steps=6)
    env.action_space.seed(0)
    episodes = []
    for seed in range(40):
        observation, _ = env.reset(seed=seed)
        observations, actions, rewards = [observation], [], []
        terminated = truncated = False
        while not (terminated or truncated):
            actions.append(env.action_space.sample())
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(reward)
        episodes.append(
            Episode(np.array(observations), np.array(actions), np.array(rewards), terminated, truncated)
        )
    batch = from_episodes(episodes, discount=0.99)
    same_lengths = [int(row.sum()) for row in np.asarray(batch.valid)]
    assert same_lengths == [len(e.actions) for e in episodes]
    mdp = mx.problems.from_gymnasium("FrozenLake-v1", discount=0.99)
    steps = jax.tree.map(lambda field: np.asarray(field)[np.asarray(batch.valid)], batch)
    ended = steps.discounts == 0
    assert ended.any()
    assert steps.truncated.any()
    p = mdp.dense_p()
    assert (mdp.termination[steps.states, steps.actions][ended] > 0).all()
    assert (p[steps.states, steps.actions, steps.next_states][~ended] > 0).all()


def test_flags_are_those_of_the_last_step_or_of_all():
    steps = {"observations": [0, 1, 2], "actions": [0, 1], "rewards": [0.0, 1.0]}
    for name, flags, ends in (
        ("terminated", False, [0, 0]),
        ("terminated", 1, [0, 1]),
        ("terminated", [False, False], [0, 0]),
        ("terminations", [0.0, 1.0], [0, 1]),
    ):
        read = from_episodes([steps | {name: flags}], 0.9)
        np.testing.assert_array_equal(read.discounts[0] == 0, ends)
        np.testing.assert_array_equal(read.truncated[0], [False, not ends[1]])
    for name, flags in (("terminated", "False"), ("truncated", np.nan), ("terminations", ["False", "True"])):
        with pytest.raises(ValueError, match=f"episode 0: {name} must be true or false, got "):
            from_episodes([steps | {name: flags}], 0.9)


def test_states_that_32_bits_do_not_hold_are_refused():
    episode = {"observations": [0, 2**32, 2], "actions": [0, 1], "rewards": [0.0, 1.0], "terminated": True}
    with pytest.raises(ValueError, match=r"episode 0: observations must be below 2\*\*31, got 4294967296"):
        from_episodes([episode], 0.9)


@pytest.mark.parametrize("field", ["rewards", "behaviour"])
def test_numbers_that_single_precision_does_not_hold_are_refused(field):
    episode = {"observations": [0, 1], "actions": [0], "rewards": [0.0], "terminated": True}
    wrong, said = (
        (1e300, "reward inf is not a finite") if field == "rewards" else (1e-300, "probability is 0")
    )
    with pytest.raises(ValueError, match=rf"episode 0, step 0: .*{said}"):
        from_episodes([episode | {field: [wrong]}], 0.9)


@pytest.mark.parametrize("field", ["actions", "truncated", "behaviour"])
def test_fields_of_another_shape_are_refused(field, monkeypatch):
    fields = vars(from_episodes([{"observations": [0, 1, 2], "actions": [0, 1], "rewards": [0, 1]}], 0.9))
    fields = fields | {"behaviour": fields["rewards"]}
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its run-time checks would come first
    with pytest.raises(ValueError, match=rf"{field} must have the shape \(1, 2\) of states, got \(1, 1\)"):
        Trajectory(**fields | {field: fields[field][:, :1]})


def test_behaviour_probabilities_of_1_may_be_integers():
    episode = {"observations": [0, 1], "actions": [0], "rewards": [0.0], "terminated": True, "behaviour": [1]}
    np.testing.assert_array_equal(from_episodes([episode], 0.9).behaviour, [[1.0]])


def test_a_trajectory_takes_flags_of_0_and_1():
    mdp, _, mu = mx.problems.garnet(5, 2, 2, seed=0, termination=0.1)
    batch = jax.tree.map(np.asarray, sample(mdp, mu, jax.random.key(0), episodes=9, horizon=12))
    fields = {name: getattr(batch, name) for name in vars(batch)}
    same = Trajectory(**fields | {name: fields[name].astype(np.uint8) for name in ("valid", "truncated")})
    assert len(to_episodes(same)) == len(to_episodes(batch)) == 9
    counts = [mx.weights.EmpiricalMDP.empty(5, 2).update(data).starts for data in (same, batch)]
    np.testing.assert_array_equal(*counts)
