"""The control suite's cheetah-run and walker-run as a bare MuJoCo loop.

Equal to dm_control step by step: the same model files, the same order of MuJoCo calls, the same draws from
the same generator. What is left out is dm_control's bookkeeping (named views, warning masks, dictionaries of
observations), which costs more than the physics of these small models.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from marginax.simulators.protocol import generator_state, optional_import, set_generator_state

TASKS = {"cheetah-run": "cheetah.xml", "walker-run": "walker.xml"}
_SUBSTEPS = {"cheetah-run": 1, "walker-run": 10}  # walker: control step 0.025 s, physics step 0.0025 s
_SETTLE_STEPS = 200
_CHEETAH_SPEED = 10.0
_WALKER_SPEED = 8.0
_STAND_HEIGHT = 1.2


def model_folder(models: str | None = None) -> Path:
    """The folder that holds the suite's XML files: the argument, `MARGINAX_MODELS`, or dm_control's own.

    The dm_control package is located but not imported.

    >>> (model_folder() / "cheetah.xml").is_file()
    True
    """
    given = models or os.environ.get("MARGINAX_MODELS")
    if given:
        folder = Path(given)
        if not (folder / "cheetah.xml").is_file():
            raise ValueError(f"models must be a folder with cheetah.xml in it, got {str(folder)!r}")
        return folder
    found = importlib.util.find_spec("dm_control")
    if found is None or not found.submodule_search_locations:
        raise ImportError(
            "mujoco/… reads its models from the package dm_control: pip install "
            '"marginax[control]", or set MARGINAX_MODELS to a folder with its suite/*.xml files'
        )
    return Path(next(iter(found.submodule_search_locations))) / "suite"


@lru_cache(maxsize=4)
def _model(path: str) -> Any:
    """A compiled model, read once a process: simulators change nothing in it that lasts."""
    import mujoco

    return mujoco.MjModel.from_xml_path(path)


class MujocoTask:
    """`mujoco/cheetah-run` or `mujoco/walker-run`; see [`Simulator`][marginax.simulators.Simulator].

    >>> simulator = MujocoTask("cheetah-run", seed=0)
    >>> simulator.reset().shape, simulator.action_size, simulator.time_limit
    ((17,), 6, 1000)
    """

    def __init__(self, task: str, seed: int, *, models: str | None = None) -> None:
        if task not in TASKS:
            raise ValueError(
                f"name must be one of {sorted(f'mujoco/{t}' for t in TASKS)}, got 'mujoco/{task}'"
            )
        self._mujoco = optional_import("mujoco", f"mujoco/{task}")
        if self._mujoco.get_mju_user_warning() is None:  # else MuJoCo writes MUJOCO_LOG.TXT
            self._mujoco.set_mju_user_warning(logging.getLogger(__name__).debug)
        self._model = _model(str(model_folder(models) / TASKS[task]))
        self._data = self._mujoco.MjData(self._model)
        self._random = np.random.RandomState(seed)
        self._substeps = _SUBSTEPS[task]
        self._interval = self._model.opt.timestep * self._substeps
        self._is_cheetah = task == "cheetah-run"
        self._views()
        self.action_size = int(self._model.nu)
        self.observation_size = 17 if self._is_cheetah else 24
        self.action_low = self._model.actuator_ctrlrange[:, 0].astype(np.float32)
        self.action_high = self._model.actuator_ctrlrange[:, 1].astype(np.float32)
        self.time_limit = 1000
        self._steps = 0

    def _views(self) -> None:
        # Views into MuJoCo's memory, taken once: reading an attribute of MjData builds a new array each time.
        data, body = self._data, self._mujoco.mjtObj.mjOBJ_BODY
        torso = self._mujoco.mj_name2id(self._model, body, "torso")
        self._control, self._qpos, self._qvel = data.ctrl, data.qpos, data.qvel
        self._sensors = data.sensordata  # the one sensor: velocity of the torso's subtree
        self._orientations = data.xmat[1:, 0:3:2]  # xx and xz of every body but the world
        self._torso_place = data.xpos[torso]
        self._torso_rotation = data.xmat[torso]

    def _forward_without_actuation(self) -> None:
        options, flag = self._model.opt, self._mujoco.mjtDisableBit.mjDSBL_ACTUATION.value
        before = options.disableflags
        options.disableflags = before | flag
        self._mujoco.mj_forward(self._model, self._data)
        options.disableflags = before

    def _advance(self, steps: int) -> None:
        # mj_step1 has been called for this state already, so the observation read after it is up to date.
        self._mujoco.mj_step2(self._model, self._data)
        if steps > 1:
            self._mujoco.mj_step(self._model, self._data, steps - 1)
        self._mujoco.mj_step1(self._model, self._data)

    def reset(self) -> np.ndarray:
        """Start an episode from the suite's own start distribution."""
        self._mujoco.mj_resetData(self._model, self._data)
        self._forward_without_actuation()
        if self._is_cheetah:
            limited = self._model.jnt_limited == 1
            lower, upper = self._model.jnt_range[limited].T
            self._qpos[limited] = self._random.uniform(lower, upper)
            self._advance(_SETTLE_STEPS)
            self._data.time = 0.0
        else:
            hinge = self._mujoco.mjtJoint.mjJNT_HINGE
            for joint in range(self._model.njnt):
                address = self._model.jnt_qposadr[joint]
                if self._model.jnt_limited[joint]:
                    self._qpos[address] = self._random.uniform(*self._model.jnt_range[joint])
                elif self._model.jnt_type[joint] == hinge:
                    self._qpos[address] = self._random.uniform(-np.pi, np.pi)
        self._forward_without_actuation()
        self._steps = 0
        return self._observation()

    def _observation(self) -> np.ndarray:
        out = np.empty(self.observation_size, np.float32)
        if self._is_cheetah:
            out[:8] = self._qpos[1:]
            out[8:] = self._qvel
        else:
            out[:14] = self._orientations.ravel()
            out[14] = self._torso_place[2]
            out[15:] = self._qvel
        return out

    def _reward(self) -> float:
        speed = float(self._sensors[0])
        if self._is_cheetah:
            return min(1.0, max(0.0, 1.0 - (_CHEETAH_SPEED - speed) / _CHEETAH_SPEED))
        distance = (_STAND_HEIGHT - float(self._torso_place[2])) / (_STAND_HEIGHT / 2)
        standing = 1.0
        if distance > 0:  # a Gaussian that is 0.1 at distance one
            standing = float(np.exp(-0.5 * (distance * np.sqrt(-2 * np.log(0.1))) ** 2))
        upright = (1.0 + float(self._torso_rotation[8])) / 2
        shortfall = (_WALKER_SPEED - speed) / (_WALKER_SPEED / 2) * 0.5
        moving = 1.0 if shortfall <= 0 else (1.0 - shortfall if shortfall < 1 else 0.0)
        return (3 * standing + upright) / 4 * (5 * moving + 1) / 6

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One control step; raises RuntimeError when the action is not finite or the physics breaks down."""
        self._control[:] = action
        if not math.isfinite(self._control.dot(self._control)):
            raise RuntimeError(f"action must be finite, got {np.asarray(action)!r} at step {self._steps}")
        self._advance(self._substeps)
        self._steps += 1
        if self._data.time < (self._steps - 0.5) * self._interval:  # MuJoCo resets itself on a bad state
            raise RuntimeError(f"MuJoCo found an invalid state at step {self._steps} of the episode")
        return self._observation(), self._reward(), False, self._steps >= self.time_limit

    def get_state(self) -> dict[str, Any]:
        """Integration state of MuJoCo, warm start of its solver, step count and random generator."""
        return {
            "physics": integration_state(self._mujoco, self._model, self._data),
            "steps": self._steps,
            **generator_state(self._random),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        set_integration_state(self._mujoco, self._model, self._data, state["physics"])
        self._steps = int(state["steps"])
        set_generator_state(self._random, state)

    def close(self) -> None:
        """Nothing to free beyond the object itself."""


def integration_state(mujoco: Any, model: Any, data: Any) -> np.ndarray:
    """Everything of MjData that the next step depends on.

    >>> simulator = MujocoTask("cheetah-run", seed=0)
    >>> integration_state(simulator._mujoco, simulator._model, simulator._data).ndim
    1
    """
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    out = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, out, kind)
    return out


def set_integration_state(mujoco: Any, model: Any, data: Any, physics: np.ndarray) -> None:
    """Put back an integration state and what mj_step1 derives from it.

    >>> simulator = MujocoTask("cheetah-run", seed=0)
    >>> parts = (simulator._mujoco, simulator._model, simulator._data)
    >>> set_integration_state(*parts, integration_state(*parts))
    """
    mujoco.mj_setState(model, data, np.asarray(physics, np.float64), mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_step1(model, data)
