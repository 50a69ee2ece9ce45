"""Exact checkpoints on every task of the control suite."""

import os

import numpy as np
import pytest

from marginax.simulators import make

os.environ.setdefault("MUJOCO_GL", "disabled")
suite = pytest.importorskip("dm_control.suite", reason="dm-control has no wheels for this Python")

# One of each kind of state outside the physics; the rest takes its time.
FAST = {("reacher", "hard"), ("finger", "turn_easy"), ("manipulator", "bring_ball"), ("lqr", "lqr_2_1")}


def play(simulator, steps, seed):
    generator = np.random.default_rng(seed)
    record = []
    for _ in range(steps):
        action = generator.uniform(simulator.action_low, simulator.action_high).astype(np.float32)
        observation, reward, terminated, truncated = simulator.step(action)
        record.append([*observation, reward, terminated, truncated])
        if terminated or truncated:
            record.append([*simulator.reset(), 0, 0, 0])
    return np.array(record, float)


@pytest.mark.parametrize(
    ("domain", "task"),
    [pair if pair in FAST else pytest.param(*pair, marks=pytest.mark.slow) for pair in suite.ALL_TASKS],
)
def test_a_checkpoint_goes_on_bit_by_bit(domain, task):
    """In the middle of a second episode, into simulators of another seed, over the ends of two episodes."""
    name = f"dm_control/{domain}-{task}"
    first, second = make(name, 1), make(name, 2)
    for simulator in (first, second):
        simulator.reset()
        simulator.time_limit = 25
    play(first, 38, seed=0)
    play(second, 3, seed=9)
    state = first.get_state()
    assert all(isinstance(v, (int, np.ndarray, np.generic)) for v in state.values())
    second.set_state({key: np.array(value) for key, value in state.items()})  # as a file gives it
    for seed in (1, 2):
        np.testing.assert_array_equal(play(first, 30, seed), play(second, 30, seed))
    later = first.get_state()
    for key, value in second.get_state().items():
        np.testing.assert_array_equal(value, later[key], err_msg=key)
