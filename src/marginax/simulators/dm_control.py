"""The DeepMind control suite, used plainly."""

from __future__ import annotations

from typing import Any

import numpy as np

from marginax.simulators.mujoco_tasks import integration_state, set_integration_state
from marginax.simulators.protocol import generator_state, optional_import, set_generator_state


class SuiteSimulator:
    """`dm_control/<domain>-<task>`; see [`Simulator`][marginax.simulators.Simulator].

    The observation is the suite's dictionary, flattened in its own order. The suite gives every task 1,000
    control steps; here the count is ours, so that a checkpoint can hold it.

    >>> SuiteSimulator("walker-run", seed=0).reset().shape
    (24,)
    """

    def __init__(self, task: str, seed: int) -> None:
        suite = optional_import("dm_control.suite", f"dm_control/{task}")
        self._mujoco = optional_import("mujoco", f"dm_control/{task}")
        domain, _, kind = task.partition("-")
        if (domain, kind) not in suite.ALL_TASKS:
            known = ", ".join(sorted(f"dm_control/{d}-{t}" for d, t in suite.BENCHMARKING))
            raise ValueError(
                f"name must be a task of the control suite, got 'dm_control/{task}'; there are {known}"
            )
        self._random = np.random.RandomState(seed)
        arguments = {"random": self._random, "time_limit": float("inf")}
        self._environment = suite.load(domain, kind, task_kwargs=arguments)
        spec = self._environment.action_spec()
        self.action_size = int(spec.shape[0])
        self.action_low = np.broadcast_to(spec.minimum, spec.shape).astype(np.float32)
        self.action_high = np.broadcast_to(spec.maximum, spec.shape).astype(np.float32)
        shapes = [value.shape for value in self._environment.observation_spec().values()]
        self.observation_size = int(sum(np.prod(shape, dtype=int) for shape in shapes))
        self.time_limit = 1000
        self._steps = 0

    def reset(self) -> np.ndarray:
        """Start an episode."""
        self._steps = 0
        return _flatten(self._environment.reset().observation)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One control step."""
        out = self._environment.step(np.asarray(action))
        self._steps += 1
        return _flatten(out.observation), float(out.reward), bool(out.last()), self._steps >= self.time_limit

    def get_state(self) -> dict[str, Any]:
        """Integration state of MuJoCo, warm start of its solver, step count and random generator."""
        physics = self._environment.physics
        return {
            "physics": integration_state(self._mujoco, physics.model.ptr, physics.data.ptr),
            "steps": self._steps,
            **generator_state(self._random),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        self._environment.reset()
        physics = self._environment.physics
        set_integration_state(self._mujoco, physics.model.ptr, physics.data.ptr, state["physics"])
        self._steps = int(state["steps"])
        set_generator_state(self._random, state)

    def close(self) -> None:
        """Free the environment."""
        self._environment.close()


def _flatten(observation: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)
