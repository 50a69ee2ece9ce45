"""The MuJoCo tasks against dm_control itself, called directly."""

import os

import numpy as np
import pytest

from marginax.simulators import make
from marginax.simulators.mujoco_tasks import TASKS

os.environ.setdefault("MUJOCO_GL", "disabled")
suite = pytest.importorskip("dm_control.suite", reason="dm-control has no wheels for this Python")


def suite_environment(task, seed):
    domain, kind = task.split("-")
    return suite.load(domain, kind, task_kwargs={"random": seed})


def flat(observation):
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)


@pytest.mark.parametrize(
    ("prefix", "task"),
    [("mujoco", task) for task in sorted(TASKS) if task not in ("walker-stand", "walker-walk")]
    + [pytest.param("mujoco", task, marks=pytest.mark.slow) for task in ("walker-stand", "walker-walk")]
    + [pytest.param("dm_control", task, marks=pytest.mark.slow) for task in sorted(TASKS)],
)
def test_equal_to_dm_control_step_by_step(prefix, task):
    """Observation, reward, time limit and three starts in a row, bit by bit, over two whole episodes."""
    environment, simulator = suite_environment(task, 7), make(f"{prefix}/{task}", 7)
    generator = np.random.default_rng(0)
    np.testing.assert_array_equal(flat(environment.reset().observation), simulator.reset())
    for episode in range(2):
        step, truncated = None, False
        for t in range(1000):
            assert not truncated
            scale = 1.0 if episode == 0 else 1.5  # the second episode leaves the range of the actuators
            action = generator.uniform(-scale, scale, simulator.action_size).astype(np.float32)
            step = environment.step(action)
            observation, reward, terminated, truncated = simulator.step(action)
            np.testing.assert_array_equal(flat(step.observation), observation, err_msg=f"step {t}")
            assert float(step.reward) == reward, t
            assert not terminated
        assert truncated
        assert step.last()
        assert step.discount == 1.0
        np.testing.assert_array_equal(flat(environment.reset().observation), simulator.reset())


@pytest.mark.parametrize("task", sorted(TASKS))
def test_rewards_cover_their_range(task):
    """Rewards are compared where they are not trivially zero: push the state, then step."""
    environment, simulator = suite_environment(task, 0), make(f"mujoco/{task}", 0)
    environment.reset()
    simulator.reset()
    seen = set()
    generator = np.random.default_rng(1)
    for speed in (-3.0, 0.0, 0.5, 1.0, 5.0, 7.0, 12.0):
        for angle in (0.0, 0.1, 0.5):
            height = generator.uniform(-0.3, 0.5)
            for data in (environment.physics.data, simulator._data):
                data.qpos[:] = angle if task.startswith(("pendulum", "cartpole")) else height
                data.qvel[:] = speed
            environment.physics.forward()
            simulator._mujoco.mj_forward(simulator._model, simulator._data)
            for _ in range(2):
                action = generator.uniform(-1, 1, simulator.action_size).astype(np.float32)
                step, (_, reward, _, _) = environment.step(action), simulator.step(action)
                assert float(step.reward) == reward
                seen.add(round(reward, 6))
    assert len(seen) >= 2
