"""The DeepMind control suite, used plainly, with exact checkpoints of every task."""

from __future__ import annotations

from typing import Any

import numpy as np

from marginax.simulators.mujoco_tasks import integration_state, mujoco_frame, set_integration_state
from marginax.simulators.protocol import (
    action_vector,
    check_begun,
    generator_state,
    optional_import,
    prefer_rendering,
    set_generator_state,
)

_SHAPES = ("mesh_", "tex_", "bvh_", "oct_", "skin_", "flex_", "name")  # large, and never changed by a task


class SuiteSimulator:
    """`dm_control/<domain>-<task>`; see [`Simulator`][marginax.simulators.Simulator].

    The observation is the suite's dictionary, flattened in its own order. The suite gives every task 1,000
    control steps; here the count is ours, so that a checkpoint can hold it.

    A task keeps part of its state outside the physics: reacher's target is a position in the model, cheetah's
    time-out an attribute of the task. A checkpoint holds those arrays of the model that differ from the
    compiled ones, and the task's numbers and arrays.
    """

    num_actions: int | None = None

    def __init__(self, task: str, seed: int, *, render: bool = False) -> None:
        if render:
            prefer_rendering()
        suite = optional_import("dm_control.suite", f"dm_control/{task}")
        self._mujoco = optional_import("mujoco", f"dm_control/{task}")
        domain, _, kind = task.partition("-")
        if (domain, kind) not in suite.ALL_TASKS:
            known = ", ".join(sorted(f"dm_control/{d}-{t}" for d, t in suite.ALL_TASKS))
            raise ValueError(
                f"name must be a task of the control suite, got 'dm_control/{task}'; there are {known}"
            )
        self._load = lambda random: suite.load(
            domain, kind, task_kwargs={"random": random, "time_limit": float("inf")}
        )
        self._renderer: Any = None
        self._build(seed)
        spec = self._environment.action_spec()
        self.action_size = int(spec.shape[0])
        self.action_low = np.broadcast_to(spec.minimum, spec.shape).astype(np.float32)
        self.action_high = np.broadcast_to(spec.maximum, spec.shape).astype(np.float32)
        shapes = [value.shape for value in self._environment.observation_spec().values()]
        self.observation_size = int(sum(np.prod(shape, dtype=int) for shape in shapes))
        self.time_limit = 1000

    def _build(self, seed: int) -> None:
        """Load the task; a few tasks draw their model from the generator, so the seed decides it."""
        self._seed = seed
        self._random = np.random.RandomState(seed)
        self._environment = self._load(self._random)
        physics = self._environment.physics
        # quadruped-escape asks for a rendering context at every start; we draw with a renderer of our own.
        physics.__class__ = type("Physics", (type(physics),), {"contexts": property(lambda self: None)})
        self._compiled = {name: array.copy() for name, array in self._model_arrays().items()}
        self._changed: dict[str, np.ndarray] = {}
        self._steps = -1

    def _model_arrays(self) -> dict[str, np.ndarray]:
        """Views of the model's arrays that a task may change."""
        model = self._environment.physics.model.ptr
        names = [name for name in dir(model) if not name.startswith(("_", *_SHAPES))]
        return {name: value for name in names if isinstance(value := getattr(model, name), np.ndarray)}

    def reset(self) -> np.ndarray:
        """Start an episode."""
        self._steps = 0
        observation = _flatten(self._environment.reset().observation)
        self._changed = {  # the suite changes models only at the start of an episode
            name: array.copy()
            for name, array in self._model_arrays().items()
            if not np.array_equal(array, self._compiled[name])
        }
        return observation

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One control step."""
        check_begun(self._steps >= 0)
        given = action_vector(action, self.action_size).copy()
        if not np.isfinite(given).all():
            raise RuntimeError(f"action must be finite, got {given!r} at step {self._steps}")
        out = self._environment.step(given)
        self._steps += 1
        return _flatten(out.observation), float(out.reward), bool(out.last()), self._steps >= self.time_limit

    def get_state(self) -> dict[str, Any]:
        """Physics with the solver's warm start, what the task changed in the model and in itself, generator."""
        physics = self._environment.physics
        return {
            "physics": integration_state(self._mujoco, physics.model.ptr, physics.data.ptr),
            "steps": self._steps,
            "seed": self._seed,
            **{f"model.{name}": array.copy() for name, array in self._changed.items()},
            **{
                f"task.{name}": np.array(value)
                for name, value in vars(self._environment.task).items()
                if isinstance(value, (bool, int, float, np.generic, np.ndarray))
            },
            **generator_state(self._random),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        if int(state["seed"]) != self._seed:
            self.close()
            self._build(int(state["seed"]))
        self._environment.reset()
        task, physics = self._environment.task, self._environment.physics
        for name, array in self._model_arrays().items():
            array[...] = state.get(f"model.{name}", self._compiled[name])
        self._changed = {
            name.removeprefix("model."): np.array(value)
            for name, value in state.items()
            if name.startswith("model.")
        }
        for name in state:
            if name.startswith("task."):
                value = np.array(state[name])
                setattr(task, name.removeprefix("task."), value if value.ndim else value.item())
        set_integration_state(self._mujoco, physics.model.ptr, physics.data.ptr, state["physics"])
        self._steps = int(state["steps"])
        set_generator_state(self._random, state)

    def render(self) -> np.ndarray:
        """The scene from the task's first camera, `[240, 320, 3]`."""
        physics = self._environment.physics
        if "hfield_data" in self._changed:  # a renderer copies the terrain when it is made
            self._close_renderer()
        self._renderer, image = mujoco_frame(
            self._mujoco, physics.model.ptr, physics.data.ptr, self._renderer
        )
        return image

    def close(self) -> None:
        """Free the environment."""
        self._close_renderer()
        self._environment.close()

    def _close_renderer(self) -> None:
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


def _flatten(observation: dict[str, Any]) -> np.ndarray:
    return np.concatenate([np.ravel(value) for value in observation.values()]).astype(np.float32)
