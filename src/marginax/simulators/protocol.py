"""What every simulator offers, and what their modules share."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from marginax import _checks as checks

_NEWEST_PYTHON = {"dm_control": (3, 12), "pybullet_envs_gymnasium": (3, 11), "pybullet": (3, 11)}


@runtime_checkable
class Simulator(Protocol):
    """One simulated episode after another, with exact checkpoints.

    `step` returns the true successor, also on the last step of an episode: it never resets by itself. A time
    limit sets `truncated`, never `terminated`. `get_state` returns a flat dictionary of NumPy arrays and
    integers that holds the simulator and its random generator; after `set_state` on a fresh simulator of
    the same name, everything that follows is the same bit by bit.

    Attributes:
        observation_size: Length of the observation vector.
        num_actions: Number of discrete actions; None where actions lie in a box.
        action_size: Length of the action vector; 1 for discrete actions, whose vector holds an index from 0.
        action_low: Smallest action, shape `[action_size]`.
        action_high: Largest action, shape `[action_size]`.
        time_limit: Steps after which an episode is cut off.

    >>> from marginax.simulators import make
    >>> isinstance(make("Pendulum-v1", seed=0), Simulator)
    True
    """

    observation_size: int
    num_actions: int | None
    action_size: int
    action_low: np.ndarray
    action_high: np.ndarray
    time_limit: int

    def reset(self) -> np.ndarray:
        """Start an episode; returns its first observation, float32."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        """Apply an action, a vector or the index of a discrete one; returns (observation, reward, terminated, truncated)."""

    def get_state(self) -> dict[str, Any]:
        """The whole state as a dictionary of arrays and integers."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""

    def render(self) -> np.ndarray:
        """A picture `[height, width, 3]`, uint8, by the simulator's own renderer; needs `make(…, render=True)`."""

    def close(self) -> None:
        """Free what the simulator holds."""


class TimeFeature:
    """A simulator whose observations end with the share of the episode's time that is left, from 1 to 0.

    See [`Simulator`][marginax.simulators.Simulator]. It is made by a name with `+time` at its end.

    >>> from marginax.simulators import make
    >>> simulator = make("Pendulum-v1+time", seed=0)
    >>> float(simulator.reset()[-1]), round(float(simulator.step(np.zeros(1))[0][-1]), 4)
    (1.0, 0.995)
    """

    def __init__(self, simulator: Simulator) -> None:
        self.simulator, self._step = simulator, 0
        self.observation_size = simulator.observation_size + 1
        self.num_actions, self.action_size = simulator.num_actions, simulator.action_size
        self.action_low, self.action_high = simulator.action_low, simulator.action_high
        self.time_limit = simulator.time_limit

    def _with_time(self, observation: np.ndarray) -> np.ndarray:
        return np.append(observation, np.float32(1 - self._step / self.time_limit))

    def reset(self) -> np.ndarray:
        """Start an episode."""
        self._step = 0
        return self._with_time(self.simulator.reset())

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool]:
        """Apply an action."""
        observation, reward, terminated, truncated = self.simulator.step(action)
        self._step += 1
        return self._with_time(observation), reward, terminated, truncated

    def get_state(self) -> dict[str, Any]:
        """The whole state, with the steps of the episode."""
        return {**self.simulator.get_state(), "time_feature_step": self._step}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        self._step = int(state["time_feature_step"])
        self.simulator.set_state({k: v for k, v in state.items() if k != "time_feature_step"})

    def render(self) -> np.ndarray:
        """The simulator's own picture."""
        return self.simulator.render()

    def close(self) -> None:
        """Free what the simulator holds."""
        self.simulator.close()


def optional_import(module: str, name: str, *, extra: str = "control") -> ModuleType:
    """Import a package that only some simulators need, or say which extra brings it."""
    import importlib

    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "disabled")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        newest = _NEWEST_PYTHON.get(package)
        if newest is not None and sys.version_info[:2] > newest:
            raise ImportError(
                f"{name} needs the package {package}, which has no wheels for Python above "
                f"{newest[0]}.{newest[1]}: use that Python, or a mujoco/… or Gymnasium task"
            ) from error
        raise checks.missing_package(name, package, extra) from error


def action_index(action: Any, num_actions: int) -> int:
    """The index of a discrete action, from 0.

    >>> action_index(np.array([2]), 3)
    2
    """
    found = np.asarray(action)
    index: Any = found.item() if found.size == 1 else None
    if index not in range(num_actions):
        raise ValueError(f"action must be an index below {num_actions}, got {action!r}")
    return int(index)


def action_vector(action: Any, size: int) -> np.ndarray:
    """An action in a box as an array `[size]`.

    >>> action_vector([0.5, -1], 2)
    array([ 0.5, -1. ])
    """
    found = np.asarray(action)
    if found.shape != (size,) or found.dtype.kind not in "fiu":
        raise ValueError(f"action must be {size} numbers, got {action!r}")
    return found


def check_begun(begun: bool) -> None:
    """Refuse a step before the first reset."""
    if not begun:
        raise RuntimeError("no episode has begun: call reset before step")


def prefer_rendering() -> None:
    """Choose off-screen rendering for MuJoCo, unless the user has chosen; call it before MuJoCo is imported."""
    if not os.environ.get("DISPLAY") and os.environ.get("MUJOCO_GL") in (None, "disabled"):
        os.environ["MUJOCO_GL"] = "egl"


def generator_state(random: np.random.RandomState) -> dict[str, Any]:
    """The state of a Mersenne twister as arrays and integers."""
    _, keys, position, has_gauss, cached = random.get_state()
    return {
        "random_keys": np.array(keys),
        "random_position": int(position),
        "random_has_gauss": int(has_gauss),
        "random_cached": np.float64(cached),
    }


def set_generator_state(random: np.random.RandomState, state: dict[str, Any]) -> None:
    """Put back what `generator_state` returned."""
    random.set_state(
        (
            "MT19937",
            np.asarray(state["random_keys"], np.uint32),
            int(state["random_position"]),
            int(state["random_has_gauss"]),
            float(state["random_cached"]),
        )
    )
