"""The PyBullet tasks against the environments that pybullet_envs_gymnasium registers, called directly."""

import subprocess
import sys

import numpy as np
import pytest

from marginax.simulators import make
from marginax.simulators.gymnasium import GymnasiumSimulator, pybullet_id
from marginax.simulators.pybullet_tasks import TASKS

gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("pybullet_envs_gymnasium", reason="PyBullet has no wheels for this Python")


def environment(task, render_mode=None):
    """The registered environment after its very first reset, which differs from all later ones."""
    made = gymnasium.make(f"{task}BulletEnv-v0", render_mode=render_mode, disable_env_checker=True)
    made.reset(seed=0)
    return made


def episode_seed(seed, episode):
    return int(np.random.SeedSequence((seed, episode)).generate_state(1, np.uint32)[0])


@pytest.mark.parametrize("task", sorted(TASKS))
def test_equal_to_the_registered_environment_step_by_step(task):
    """Observation, reward, both ends of episodes and every start, bit by bit; actions also leave their range."""
    theirs, ours = environment(task), make(f"pybullet/{task}", 7)
    generator, episode, ends = np.random.default_rng(0), 0, []
    np.testing.assert_array_equal(theirs.reset(seed=episode_seed(7, 0))[0], ours.reset())
    for t in range(1100):
        scale = 1.5 if episode == 0 else 0.2  # Ant survives the first episode and falls in the next
        action = generator.uniform(-scale, scale, ours.action_size).astype(np.float32)
        state, reward, terminated, truncated, _ = theirs.step(action.copy())
        observation, *others = ours.step(action)
        assert observation.dtype == np.float32
        np.testing.assert_array_equal(state, observation, err_msg=f"step {t}")
        assert [float(reward), terminated, truncated] == others, t
        if terminated or truncated:
            episode += 1
            ends.append((terminated, truncated))
            np.testing.assert_array_equal(theirs.reset(seed=episode_seed(7, episode))[0], ours.reset())
    assert ((False, True) in ends) == (task in ("Ant", "HalfCheetah"))
    assert ((True, False) in ends) == (task != "HalfCheetah")
    theirs.close()
    ours.close()


def test_a_robot_that_is_not_a_number_ends_the_episode():
    theirs, ours = environment("HalfCheetah"), make("pybullet/HalfCheetah", 7)
    theirs.reset(seed=episode_seed(7, 0))
    ours.reset()
    inner = theirs.unwrapped
    joint = ours._joints[0]
    inner._p.resetJointState(inner.robot.objects[0], joint, 0.0, np.nan)
    ours._reset_joint(jointIndex=joint, targetValue=0.0, targetVelocity=np.nan)
    state, _, terminated, _, _ = theirs.step(np.zeros(6, np.float32))
    observation, _, ended, _ = ours.step(np.zeros(6, np.float32))
    assert np.isnan(observation).any()
    np.testing.assert_array_equal(state, observation)
    assert terminated is ended is True


def test_checkpoint_of_the_wrapped_environment_continues():
    """Runs saved before this module existed go on."""
    wrapped, ours = GymnasiumSimulator(pybullet_id("Hopper"), 3), make("pybullet/Hopper", 0)
    generator = np.random.default_rng(0)
    for _ in range(3):
        wrapped.reset()
    for _ in range(5):
        wrapped.step(generator.uniform(-1, 1, 3))
    ours.set_state(wrapped.get_state())
    for _ in range(2):
        action = generator.uniform(-1, 1, 3)
        for a, b in zip(wrapped.step(action), ours.step(action), strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(wrapped.reset(), ours.reset())


def test_picture_is_the_same():
    theirs, ours = environment("Hopper", "rgb_array"), make("pybullet/Hopper", 0, render=True)
    theirs.reset(seed=episode_seed(0, 0))
    ours.reset()
    np.testing.assert_array_equal(theirs.render(), ours.render())
    with pytest.raises(RuntimeError, match="render=True"):
        make("pybullet/Hopper", 0).render()


def test_bad_actions_are_refused():
    simulator = make("pybullet/Ant", 0)
    simulator.reset()
    with pytest.raises(RuntimeError, match="action must be finite"):
        simulator.step(np.full(8, np.inf))


def test_neither_gymnasium_nor_the_environments_are_needed():
    program = """
import sys
for name in ("gymnasium", "pybullet_envs_gymnasium", "mujoco", "jax"):
    sys.modules[name] = None
from marginax.simulators import make
for task in ("Ant", "HalfCheetah"):
    simulator = make("pybullet/" + task, 0)
    simulator.reset()
    simulator.step([0.0] * simulator.action_size)
print("fine")
"""
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.stdout.strip().endswith("fine"), out.stderr
