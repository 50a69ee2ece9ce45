"""What every simulator offers, and what their modules share."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Simulator(Protocol):
    """One simulated episode after another, with exact checkpoints.

    `step` returns the true successor, also on the last step of an episode: it never resets by itself. A time
    limit sets `truncated`, never `terminated`. `get_state` returns a flat dictionary of NumPy arrays and
    integers that holds the simulator and its random generator; after `set_state` on a fresh simulator of
    the same name, everything that follows is the same bit by bit.

    Attributes:
        observation_size: Length of the observation vector.
        action_size: Length of the action vector.
        action_low: Smallest action, shape `[action_size]`.
        action_high: Largest action, shape `[action_size]`.
        time_limit: Steps after which an episode is cut off.

    >>> from marginax.simulators import make
    >>> isinstance(make("Pendulum-v1", seed=0), Simulator)
    True
    """

    observation_size: int
    action_size: int
    action_low: np.ndarray
    action_high: np.ndarray
    time_limit: int

    def reset(self) -> np.ndarray:
        """Start an episode; returns its first observation, float32."""

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """Apply an action; returns (observation, reward, terminated, truncated)."""

    def get_state(self) -> dict[str, Any]:
        """The whole state as a dictionary of arrays and integers."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""

    def close(self) -> None:
        """Free what the simulator holds."""


def optional_import(module: str, name: str) -> ModuleType:
    """Import a package that only some simulators need, or say which extra brings it.

    >>> optional_import("no_such_package", "the simulator")
    Traceback (most recent call last):
        ...
    ImportError: the simulator needs the package no_such_package: pip install "marginax[control]"
    """
    import importlib

    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "disabled")
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'{name} needs the package {module.split(".")[0]}: pip install "marginax[control]"'
        ) from error


def generator_state(random: np.random.RandomState) -> dict[str, Any]:
    """The state of a Mersenne twister as arrays and integers.

    >>> sorted(generator_state(np.random.RandomState(0)))
    ['random_cached', 'random_has_gauss', 'random_keys', 'random_position']
    """
    _, keys, position, has_gauss, cached = random.get_state()
    return {
        "random_keys": np.array(keys),
        "random_position": int(position),
        "random_has_gauss": int(has_gauss),
        "random_cached": np.float64(cached),
    }


def set_generator_state(random: np.random.RandomState, state: dict[str, Any]) -> None:
    """Put back what `generator_state` returned.

    >>> first, second = np.random.RandomState(0), np.random.RandomState(1)
    >>> set_generator_state(second, generator_state(first))
    >>> first.rand() == second.rand()
    True
    """
    random.set_state(
        (
            "MT19937",
            np.asarray(state["random_keys"], np.uint32),
            int(state["random_position"]),
            int(state["random_has_gauss"]),
            float(state["random_cached"]),
        )
    )
