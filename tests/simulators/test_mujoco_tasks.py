"""The bare MuJoCo loop against dm_control itself, called directly."""

import numpy as np
import pytest

from marginax.simulators import make


def suite_environment(task, seed):
    import os

    os.environ.setdefault("MUJOCO_GL", "disabled")
    from dm_control import suite

    domain, kind = task.split("-")
    return suite.load(domain, kind, task_kwargs={"random": seed})


def flat(observation):
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)


@pytest.mark.parametrize("task", ["cheetah-run", "walker-run"])
@pytest.mark.parametrize("prefix", ["mujoco", "dm_control"])
def test_equal_to_dm_control_step_by_step(task, prefix):
    """Observation, reward, time limit and three starts in a row, bit by bit, over two whole episodes."""
    environment, simulator = suite_environment(task, 7), make(f"{prefix}/{task}", 7)
    generator = np.random.default_rng(0)
    np.testing.assert_array_equal(flat(environment.reset().observation), simulator.reset())
    for episode in range(2):
        step, truncated = None, False
        for t in range(1000):
            assert not truncated
            scale = 1.0 if episode == 0 else 1.5  # the second episode leaves the range of the actuators
            action = generator.uniform(-scale, scale, 6).astype(np.float32)
            step = environment.step(action)
            observation, reward, terminated, truncated = simulator.step(action)
            np.testing.assert_array_equal(flat(step.observation), observation, err_msg=f"step {t}")
            assert float(step.reward) == reward, t
            assert not terminated
        assert truncated
        assert step.last()
        assert step.discount == 1.0
        np.testing.assert_array_equal(flat(environment.reset().observation), simulator.reset())


def test_rewards_cover_their_range():
    """Both tasks' rewards are compared where they are not trivially zero: push the state, then step."""
    for task in ("cheetah-run", "walker-run"):
        environment, simulator = suite_environment(task, 0), make(f"mujoco/{task}", 0)
        environment.reset()
        simulator.reset()
        seen = set()
        for speed in (-3.0, 1.0, 5.0, 7.0, 12.0):
            for target in (environment.physics.data.qvel, simulator._qvel):
                target[:] = 0
                target[0 if task == "cheetah-run" else 1] = speed
            for height in (environment.physics.data.qpos, simulator._qpos):
                height[1 if task == "cheetah-run" else 0] = 0.3
            environment.physics.forward()
            simulator._mujoco.mj_forward(simulator._model, simulator._data)
            for _ in range(3):
                step, (_, reward, _, _) = environment.step(np.zeros(6)), simulator.step(np.zeros(6))
                assert float(step.reward) == reward
                seen.add(round(reward, 6))
        assert len(seen) >= 5
