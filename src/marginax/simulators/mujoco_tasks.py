"""Tasks of the DeepMind control suite on MuJoCo alone: cheetah, walker, hopper, cartpole, pendulum.

Equal to dm_control step by step: the same models (`models/*.xml`), the same order of MuJoCo calls, the same draws
from the same generator. What is left out is dm_control's bookkeeping (named views, warning masks, dictionaries of
observations), which costs more than the physics of these small models. dm_control need not be installed.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from marginax.simulators.protocol import (
    action_vector,
    check_begun,
    generator_state,
    optional_import,
    prefer_rendering,
    set_generator_state,
)


class MujocoTask:
    """A task `mujoco/…`; see [`Simulator`][marginax.simulators.Simulator] and `mujoco_task`, which makes it.

    A subclass says which model it plays, how an episode starts, what is observed, and what is rewarded.
    """

    model = ""
    substeps = 1
    time_limit = 1000
    num_actions: int | None = None

    def __init__(self, seed: int, *, render: bool = False) -> None:
        if render:
            prefer_rendering()
        self._mujoco = optional_import("mujoco", f"mujoco/{self.model}")
        if self._mujoco.get_mju_user_warning() is None:  # else MuJoCo writes MUJOCO_LOG.TXT
            self._mujoco.set_mju_user_warning(logging.getLogger(__name__).debug)
        self._model = _compiled(self.model)
        self._data = data = self._mujoco.MjData(self._model)
        self._random = np.random.RandomState(seed)
        self._interval = self._model.opt.timestep * self.substeps
        self._is_runge_kutta = self._model.opt.integrator == self._mujoco.mjtIntegrator.mjINT_RK4
        # Views into MuJoCo's memory, taken once: reading an attribute of MjData builds a new array each time.
        self._control, self._qpos, self._qvel = data.ctrl, data.qpos, data.qvel
        self._sensors, self._rotations = data.sensordata, data.xmat
        self._places, self._centres = data.xpos, data.xipos
        self.action_size = int(self._model.nu)
        self.action_low = self._model.actuator_ctrlrange[:, 0].astype(np.float32)
        self.action_high = self._model.actuator_ctrlrange[:, 1].astype(np.float32)
        self._renderer: Any = None
        self._steps = -1
        self._mujoco.mj_forward(self._model, data)
        self.observation_size = sum(part.size for part in self._observe())

    def _start(self) -> None:
        """Draw the first state of an episode into `_qpos` and `_qvel`."""
        raise NotImplementedError

    def _observe(self) -> tuple[np.ndarray, ...]:
        """The parts of the observation."""
        raise NotImplementedError

    def _reward(self) -> float:
        raise NotImplementedError

    def _body(self, name: str) -> int:
        return self._mujoco.mj_name2id(self._model, self._mujoco.mjtObj.mjOBJ_BODY, name)

    def _randomise_joints(self) -> None:
        """Limited joints uniformly within their limits, other hinges at any angle."""
        hinge = self._mujoco.mjtJoint.mjJNT_HINGE
        for joint in range(self._model.njnt):
            address = self._model.jnt_qposadr[joint]
            if self._model.jnt_limited[joint]:
                self._qpos[address] = self._random.uniform(*self._model.jnt_range[joint])
            elif self._model.jnt_type[joint] == hinge:
                self._qpos[address] = self._random.uniform(-np.pi, np.pi)

    def _forward_without_actuation(self) -> None:
        options, flag = self._model.opt, self._mujoco.mjtDisableBit.mjDSBL_ACTUATION.value
        before = options.disableflags
        options.disableflags = before | flag
        self._mujoco.mj_forward(self._model, self._data)
        options.disableflags = before

    def _advance(self, steps: int) -> None:
        # mj_step1 has been called for this state already, so the observation read after it is up to date.
        if self._is_runge_kutta:
            self._mujoco.mj_step(self._model, self._data, steps)
        else:
            self._mujoco.mj_step2(self._model, self._data)
            if steps > 1:
                self._mujoco.mj_step(self._model, self._data, steps - 1)
        self._mujoco.mj_step1(self._model, self._data)

    def reset(self) -> np.ndarray:
        """Start an episode from the suite's own start distribution."""
        self._mujoco.mj_resetData(self._model, self._data)
        self._forward_without_actuation()
        self._start()
        self._forward_without_actuation()
        self._steps = 0
        return self._observation()

    def _observation(self) -> np.ndarray:
        out = np.empty(self.observation_size, np.float32)
        start = 0
        for part in self._observe():
            out[start : start + part.size] = part
            start += part.size
        return out

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One control step; raises RuntimeError when the action is not finite or the physics breaks down."""
        check_begun(self._steps >= 0)
        self._control[:] = action_vector(action, self.action_size)
        if not math.isfinite(self._control.dot(self._control)):
            raise RuntimeError(f"action must be finite, got {np.asarray(action)!r} at step {self._steps}")
        self._advance(self.substeps)
        self._steps += 1
        if self._data.time < (self._steps - 0.5) * self._interval:  # MuJoCo resets itself on a bad state
            raise RuntimeError(f"MuJoCo found an invalid state at step {self._steps} of the episode")
        return self._observation(), float(self._reward()), False, self._steps >= self.time_limit

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

    def render(self) -> np.ndarray:
        """The scene from the model's first camera, `[240, 320, 3]`."""
        self._renderer, image = mujoco_frame(self._mujoco, self._model, self._data, self._renderer)
        return image

    def close(self) -> None:
        """Free the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None


class Cheetah(MujocoTask):
    """Run: the reward grows linearly to 1 at 10 m/s."""

    model = "cheetah"

    def _start(self) -> None:
        limited = self._model.jnt_limited == 1
        lower, upper = self._model.jnt_range[limited].T
        self._qpos[limited] = self._random.uniform(lower, upper)
        self._advance(200)  # let it settle
        self._data.time = 0.0

    def _observe(self) -> tuple[np.ndarray, ...]:
        return self._qpos[1:], self._qvel

    def _reward(self) -> float:
        return _linear(float(self._sensors[0]), 10.0, margin=10.0, at_margin=0.0)


class Walker(MujocoTask):
    """Stand upright, and walk or run at a speed."""

    model, substeps, speed = "walker", 10, 0.0

    def __init__(self, seed: int, *, render: bool = False) -> None:
        super().__init__(seed, render=render)
        torso = self._body("torso")
        self._torso_place, self._torso_rotation = self._places[torso], self._rotations[torso]

    def _start(self) -> None:
        self._randomise_joints()

    def _observe(self) -> tuple[np.ndarray, ...]:
        return self._rotations[1:, 0:3:2].ravel(), self._places[1, 2:], self._qvel

    def _reward(self) -> float:
        standing = _gaussian(1.2 - float(self._torso_place[2]), margin=0.6)
        upright = (1.0 + float(self._torso_rotation[8])) / 2
        stand = (3 * standing + upright) / 4
        if self.speed == 0:
            return stand
        moving = _linear(float(self._sensors[0]), self.speed, margin=self.speed / 2, at_margin=0.5)
        return stand * (5 * moving + 1) / 6


class WalkerWalk(Walker):
    """Walk at 1 m/s."""

    speed = 1.0


class WalkerRun(Walker):
    """Run at 8 m/s."""

    speed = 8.0


class Hopper(MujocoTask):
    """Stand with little control."""

    model, substeps = "hopper", 4

    def __init__(self, seed: int, *, render: bool = False) -> None:
        super().__init__(seed, render=render)
        self._torso, self._foot = self._centres[self._body("torso")], self._centres[self._body("foot")]

    def _start(self) -> None:
        self._randomise_joints()

    def _observe(self) -> tuple[np.ndarray, ...]:
        return self._qpos[1:], self._qvel, np.log1p(self._sensors[3:])

    def _standing(self) -> float:
        return 1.0 if 0.6 <= self._torso[2] - self._foot[2] <= 2 else 0.0

    def _reward(self) -> float:
        return self._standing() * ((_small(self._control).mean() + 4) / 5)


class HopperHop(Hopper):
    """Hop at 2 m/s."""

    def _reward(self) -> float:
        return self._standing() * _linear(float(self._sensors[0]), 2.0, margin=1.0, at_margin=0.5)


class Cartpole(MujocoTask):
    """Keep the pole upright and the cart in the middle, from an almost upright start."""

    model = "cartpole"

    def _start(self) -> None:
        self._qpos[0] = self._random.uniform(-0.1, 0.1)
        self._qpos[1:] = self._random.uniform(-0.034, 0.034, 1)
        self._qvel[:] = 0.01 * self._random.randn(2)

    def _observe(self) -> tuple[np.ndarray, ...]:
        return self._qpos[:1], self._rotations[2, [8, 2]], self._qvel

    def _reward(self) -> float:
        upright = (self._rotations[2, 8] + 1) / 2
        centred = (1 + _gaussian(abs(self._qpos[0]), margin=2.0)) / 2
        little_control = (4 + _small(self._control)[0]) / 5
        slow = (1 + _gaussian(abs(self._qvel[1]), margin=5.0)) / 2
        return upright * little_control * slow * centred


class CartpoleSwingup(Cartpole):
    """The same from a hanging pole."""

    def _start(self) -> None:
        self._qpos[0] = 0.01 * self._random.randn()
        self._qpos[1] = np.pi + 0.01 * self._random.randn()
        self._qvel[:] = 0.01 * self._random.randn(2)


class _Sparse(Cartpole):
    def _reward(self) -> float:
        return float(-0.25 <= self._qpos[0] <= 0.25 and 0.995 <= self._rotations[2, 8] <= 1)


class CartpoleSparse(_Sparse, Cartpole):
    """Reward 1 while the pole is upright and the cart in the middle, from an almost upright start."""


class CartpoleSwingupSparse(_Sparse, CartpoleSwingup):
    """The same from a hanging pole."""


class Pendulum(MujocoTask):
    """Swing up: reward 1 within 8 degrees of upright."""

    model = "pendulum"

    def _start(self) -> None:
        self._qpos[0] = self._random.uniform(-np.pi, np.pi)

    def _observe(self) -> tuple[np.ndarray, ...]:
        return self._rotations[1, [8, 2]], self._qvel

    def _reward(self) -> float:
        return float(np.cos(np.deg2rad(8)) <= self._rotations[1, 8] <= 1)


TASKS: dict[str, type[MujocoTask]] = {
    "cartpole-balance": Cartpole,
    "cartpole-balance_sparse": CartpoleSparse,
    "cartpole-swingup": CartpoleSwingup,
    "cartpole-swingup_sparse": CartpoleSwingupSparse,
    "cheetah-run": Cheetah,
    "hopper-hop": HopperHop,
    "hopper-stand": Hopper,
    "pendulum-swingup": Pendulum,
    "walker-run": WalkerRun,
    "walker-stand": Walker,
    "walker-walk": WalkerWalk,
}


def mujoco_task(task: str, seed: int, *, render: bool = False) -> MujocoTask:
    """Make `mujoco/<task>`.

    >>> simulator = mujoco_task("cheetah-run", seed=0)
    >>> simulator.reset().shape, simulator.action_size, simulator.time_limit
    ((17,), 6, 1000)
    """
    if task not in TASKS:
        known = ", ".join(f"mujoco/{known}" for known in TASKS)
        raise ValueError(f"name must be one of {known}, got 'mujoco/{task}'")
    return TASKS[task](seed, render=render)


@lru_cache(maxsize=8)
def _compiled(model: str) -> Any:
    """A compiled model, read once per process: simulators change nothing in it that lasts."""
    import mujoco

    return mujoco.MjModel.from_xml_path(str(Path(__file__).parent / "models" / f"{model}.xml"))


def _linear(x: float, bound: float, *, margin: float, at_margin: float) -> float:
    """1 from the bound on; below it a line that passes `at_margin` at a distance of `margin`."""
    shortfall = (bound - x) / margin * (1 - at_margin)
    return 1.0 if x >= bound else (1.0 - shortfall if shortfall < 1 else 0.0)


def _gaussian(distance: float, *, margin: float) -> float:
    """1 up to distance 0, and a Gaussian beyond it that is 0.1 at a distance of `margin`."""
    if distance <= 0:
        return 1.0
    return float(np.exp(-0.5 * (distance / margin * np.sqrt(-2 * np.log(0.1))) ** 2))


def _small(control: np.ndarray) -> np.ndarray:
    """1 at 0, and a parabola that is 0 from 1 on; for each actuator."""
    return np.where(abs(control) < 1, 1 - control**2, 0.0)


def integration_state(mujoco: Any, model: Any, data: Any) -> np.ndarray:
    """Everything of MjData that the next step depends on."""
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    out = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, out, kind)
    return out


def set_integration_state(mujoco: Any, model: Any, data: Any, physics: np.ndarray) -> None:
    """Put back an integration state and what mj_step1 derives from it."""
    mujoco.mj_setState(model, data, np.asarray(physics, np.float64), mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_step1(model, data)


def mujoco_frame(mujoco: Any, model: Any, data: Any, renderer: Any) -> tuple[Any, np.ndarray]:
    """Draw the scene from the model's first camera, `[240, 320, 3]`; returns the renderer, made if need be, too."""
    if renderer is None:
        try:
            renderer = mujoco.Renderer(model, 240, 320)
        except Exception as error:
            raise RuntimeError(
                f"MuJoCo cannot render on this machine ({type(error).__name__}): set MUJOCO_GL to egl, osmesa "
                "or glfw, whichever is installed, and make the simulator with render=True"
            ) from error
    renderer.update_scene(data, camera=0 if model.ncam else -1)
    return renderer, renderer.render()
