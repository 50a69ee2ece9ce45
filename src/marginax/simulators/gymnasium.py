"""Gymnasium environments, among them PyBullet's."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from marginax.simulators.protocol import optional_import

_DEFAULT_TIME_LIMIT = 1000


def pybullet_id(task: str) -> str:
    """The Gymnasium id of a PyBullet task, which is registered by its package.

    >>> pybullet_id("Ant")
    'AntBulletEnv-v0'
    """
    optional_import("pybullet_envs_gymnasium", f"pybullet/{task}")
    gymnasium = optional_import("gymnasium", f"pybullet/{task}")
    if f"{task}BulletEnv-v0" not in gymnasium.registry:
        known = sorted(
            n.removesuffix("BulletEnv-v0") for n in gymnasium.registry if n.endswith("BulletEnv-v0")
        )
        raise ValueError(f"name must be pybullet/ with one of {', '.join(known)}, got 'pybullet/{task}'")
    return f"{task}BulletEnv-v0"


class GymnasiumSimulator:
    """Any Gymnasium id with box observations and actions; see [`Simulator`][marginax.simulators.Simulator].

    Gymnasium has no checkpoints, so ours is the episode's number and its actions so far: episode k is seeded
    from (seed, k), and `set_state` plays the actions again. That is exact for every environment whose
    randomness comes from its seed. An environment without a time limit is given one of 1,000 steps.

    >>> simulator = GymnasiumSimulator("Pendulum-v1", seed=3)
    >>> _ = simulator.reset()
    >>> state = simulator.get_state()
    >>> first = simulator.step(np.ones(1))
    >>> again = GymnasiumSimulator("Pendulum-v1", seed=3)
    >>> again.set_state(state)
    >>> bool(np.all(again.step(np.ones(1))[0] == first[0]))
    True
    """

    def __init__(self, name: str, seed: int) -> None:
        gymnasium = optional_import("gymnasium", name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                wrapped = gymnasium.make(name, disable_env_checker=True)
        except gymnasium.error.Error as error:
            raise ValueError(f"name must be a simulator or a Gymnasium id, got {name!r}: {error}") from error
        spaces = {"observations": wrapped.observation_space, "actions": wrapped.action_space}
        for what, space in spaces.items():
            if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
                wrapped.close()
                raise ValueError(f"{name!r} must have {what} in a one-dimensional box, got {space}")
        self.time_limit = int(wrapped.spec.max_episode_steps or _DEFAULT_TIME_LIMIT)
        self._environment = wrapped.unwrapped
        self.observation_size = int(spaces["observations"].shape[0])
        self.action_size = int(spaces["actions"].shape[0])
        self.action_low = spaces["actions"].low.astype(np.float32)
        self.action_high = spaces["actions"].high.astype(np.float32)
        self._dtype = spaces["actions"].dtype
        self._seed = seed
        self._episode = -1
        self._actions: list[np.ndarray] = []
        # PyBullet's very first reset differs from all later ones: take it now, so no episode depends on it.
        self._environment.reset(seed=0)

    def reset(self) -> np.ndarray:
        """Start the next episode, seeded by its number."""
        self._episode += 1
        self._actions = []
        seed = np.random.SeedSequence((self._seed, self._episode)).generate_state(1, np.uint32)[0]
        observation, _ = self._environment.reset(seed=int(seed))
        return np.asarray(observation, np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        """One step of the environment."""
        action = np.array(action, self._dtype)
        self._actions.append(action)
        observation, reward, terminated, truncated, _ = self._environment.step(action)
        truncated = bool(truncated) or len(self._actions) >= self.time_limit
        return np.asarray(observation, np.float32), float(reward), bool(terminated), truncated

    def get_state(self) -> dict[str, Any]:
        """The episode's number and the actions taken in it."""
        actions = np.array(self._actions, self._dtype).reshape(-1, self.action_size)
        return {"episode": self._episode, "actions": actions, "seed": self._seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Play the saved actions again."""
        self._seed = int(state["seed"])
        self._episode = int(state["episode"]) - 1
        if self._episode < -1:
            self._episode = -1
            return
        self.reset()
        for action in state["actions"]:
            self.step(action)

    def close(self) -> None:
        """Free the environment."""
        self._environment.close()
