"""Every simulator keeps the interface: shapes, time limits, seeds and exact checkpoints."""

import subprocess
import sys

import numpy as np
import pytest

from marginax.simulators import Simulator, make
from marginax.simulators.policy import to_bounds

NAMES = [
    "dm_control/cheetah-run",
    "dm_control/reacher-easy",
    "dm_control/lqr-lqr_2_1",
    "mujoco/cheetah-run",
    "mujoco/walker-run",
    "pybullet/HalfCheetah",
    "pybullet/Ant",
    "pybullet/InvertedPendulumSwingup",
    "Pendulum-v1",
    "HalfCheetah-v5",
]


def play(simulator, steps, seed):
    """A record of what happens under random actions, with a reset at every episode's end."""
    generator = np.random.default_rng(seed)
    record = []
    for _ in range(steps):
        action = generator.uniform(simulator.action_low, simulator.action_high).astype(np.float32)
        observation, reward, terminated, truncated = simulator.step(action)
        record.append(np.concatenate([observation, [reward, terminated, truncated]]))
        if terminated or truncated:
            record.append(np.concatenate([simulator.reset(), [0, 0, 0]]))
    return np.array([np.asarray(row, np.float64) for row in record])


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_types(name):
    simulator = make(name, 0)
    assert isinstance(simulator, Simulator)
    observation = simulator.reset()
    assert observation.shape == (simulator.observation_size,)
    assert observation.dtype == np.float32
    assert simulator.action_low.shape == simulator.action_high.shape == (simulator.action_size,)
    assert simulator.action_low.dtype == np.float32
    observation, reward, terminated, truncated = simulator.step(np.zeros(simulator.action_size, np.float32))
    assert observation.dtype == np.float32
    assert (type(reward), type(terminated), type(truncated)) == (float, bool, bool)
    simulator.close()


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_in_the_middle_of_an_episode_is_exact(name):
    """A fresh simulator, of another seed, continues bit by bit, through the next reset as well."""
    first, second = make(name, 1), make(name, 2)
    first.reset()
    play(first, 230, seed=0)
    state = first.get_state()
    assert all(isinstance(v, (int, np.ndarray, np.generic)) for v in state.values())
    second.set_state(state)
    np.testing.assert_array_equal(play(first, 60, seed=1), play(second, 60, seed=1))
    np.testing.assert_array_equal(first.reset(), second.reset())
    np.testing.assert_array_equal(play(first, 60, seed=2), play(second, 60, seed=2))


@pytest.mark.parametrize("name", NAMES)
def test_seed_decides_everything(name):
    a, b, c = make(name, 5), make(name, 5), make(name, 6)
    starts = [s.reset() for s in (a, b, c)]
    np.testing.assert_array_equal(starts[0], starts[1])
    assert not np.array_equal(starts[0], starts[2])
    np.testing.assert_array_equal(play(a, 20, seed=0), play(b, 20, seed=0))
    assert not np.array_equal(a.reset(), starts[0])


@pytest.mark.parametrize(
    "name", ["mujoco/cheetah-run", "mujoco/walker-run", "Pendulum-v1", "pybullet/HalfCheetah"]
)
def test_time_limit_truncates_and_never_terminates(name):
    simulator = make(name, 0)
    simulator.reset()
    action = np.zeros(simulator.action_size, np.float32)
    flags = [simulator.step(action)[2:] for _ in range(simulator.time_limit)]
    assert not any(terminated for terminated, _ in flags)
    assert [truncated for _, truncated in flags] == [False] * (simulator.time_limit - 1) + [True]
    simulator.reset()
    assert simulator.step(action)[3] is False


def test_falling_hopper_terminates():
    simulator = make("pybullet/Hopper", 0)
    simulator.reset()
    ends = play(simulator, 100, seed=0)[:, -2:]
    assert ends[:, 0].any()
    assert not ends[:, 1].any()


def test_bad_names_and_seeds():
    for name, seed in (("Pendulum-v1", -1), ("grid/catch", 2**32)):
        with pytest.raises(
            ValueError, match=rf"seed must be a non-negative integer below 2\*\*32, got {seed}"
        ):
            make(name, seed)
    with pytest.raises(ValueError, match="mujoco/cheetah-run"):
        make("mujoco/cheetah-fly", 0)
    with pytest.raises(ValueError, match="control suite, got 'dm_control/cheetah-fly'"):
        make("dm_control/cheetah-fly", 0)
    with pytest.raises(ValueError, match="pybullet/Cow"):
        make("pybullet/Cow", 0)
    with pytest.raises(ValueError, match="Gymnasium id, got 'Nothing-v7'"):
        make("Nothing-v7", 0)
    with pytest.raises(ValueError, match="accelerator, got 'gymnax/Cow'"):
        make("gymnax/Cow", 0)


def test_non_finite_action_is_refused():
    simulator = make("mujoco/cheetah-run", 0)
    simulator.reset()
    with pytest.raises(RuntimeError, match="action must be finite"):
        simulator.step(np.full(6, np.nan))


def test_mujoco_tasks_need_neither_dm_control_nor_jax():
    program = """
import sys
for name in ("gymnasium", "dm_control", "tyro", "highspy", "beartype", "pybullet", "jax"):
    sys.modules[name] = None
from marginax.simulators import make
from marginax.simulators.mujoco_tasks import TASKS
for task in TASKS:
    simulator = make("mujoco/" + task, 0)
    simulator.reset()
    simulator.step([0.0] * simulator.action_size)
print("fine")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip() == "fine", out.stderr


FAMILIES = ["Pendulum-v1", "mujoco/pendulum-swingup", "dm_control/pendulum-swingup", "gymnax/Pendulum-v1"]


@pytest.mark.parametrize(
    "name", [*FAMILIES, "pybullet/Hopper", "Pendulum-v1+time", "CartPole-v1", "grid/catch"]
)
def test_a_step_before_the_first_reset_is_refused(name):
    simulator = make(name, 0)
    with pytest.raises(RuntimeError, match="no episode has begun: call reset before step"):
        simulator.step(simulator.action_low)


@pytest.mark.parametrize("name", [*FAMILIES, "pybullet/Hopper"])
@pytest.mark.parametrize("action", [0.5, [], [[0.0]], [0.0, 0.0], ["0"], [True], [None]])
def test_an_action_that_is_no_vector_of_the_box_is_refused(name, action):
    simulator = make(name, 0)
    simulator.reset()
    with pytest.raises(ValueError, match=f"action must be {simulator.action_size} numbers, got "):
        simulator.step(np.array(action))


@pytest.mark.parametrize("name", ["CartPole-v1", "grid/catch"])
@pytest.mark.parametrize("action", [0.5, None, "0", [], [0, 1], np.nan, np.inf, -1])
def test_an_action_that_is_no_index_is_refused(name, action):
    simulator = make(name, 0)
    simulator.reset()
    with pytest.raises(ValueError, match=f"action must be an index below {simulator.num_actions}, got "):
        simulator.step(np.array(action))


def test_scaled_actions_stay_within_the_bounds():
    generator = np.random.default_rng(0)
    low = generator.uniform(-3, 1, 1000).astype(np.float32)
    high = low + generator.uniform(0.01, 3, 1000).astype(np.float32)
    for action in (-7, -1, 0.3, 1, 2):
        scaled = to_bounds(np.full(1000, action, np.float32), low, high)
        assert (low <= scaled).all() and (scaled <= high).all()
        share = (1 + np.clip(action, -1, 1)) / 2
        np.testing.assert_allclose(scaled, low + share * (high.astype(float) - low), atol=1e-6)
