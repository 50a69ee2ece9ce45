"""Simulators that are JAX programs (gymnax, grids), to be stepped inside a compiled program, many at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from marginax.simulators.protocol import action_index, action_vector, check_begun, optional_import


@dataclass(frozen=True, eq=False)
class AcceleratedSimulator:
    """Pure functions of one copy of a simulator: `jax.vmap` makes many, `jax.lax.scan` plays many steps.

    `step` returns the true successor and never resets: `restart` begins anew where an episode ended.

    Attributes:
        name: As `make_accelerated` takes it.
        observation_shape: Shape of an observation, `(10, 10, 4)` for a MinAtar game.
        num_actions: Number of discrete actions; None where actions lie in a box.
        action_low: Smallest action, shape `[action_size]`; `[0]` for discrete actions.
        action_high: Largest action, shape `[action_size]`.
        time_limit: Steps after which an episode is cut off.
        reset: `reset(key)` starts an episode; returns (state, observation), float32.
        step: `step(key, state, action)` applies an index, or a vector `[action_size]`; returns (state, observation,
            reward, terminated, truncated). A step at the time limit that ends the episode as well is terminated only.

    >>> import jax, jax.numpy as jnp
    >>> simulator = make_accelerated("gymnax/CartPole-v1")
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> state, observation = jax.vmap(simulator.reset)(keys)
    >>> state, observation, reward, terminated, truncated = jax.vmap(simulator.step)(keys, state, jnp.zeros(3, int))
    >>> observation.shape, reward.shape, simulator.num_actions
    ((3, 4), (3,), 2)
    """

    name: str
    observation_shape: tuple[int, ...]
    num_actions: int | None
    action_low: np.ndarray
    action_high: np.ndarray
    time_limit: int
    reset: Callable[[Any], tuple[Any, Any]]
    step: Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]

    def restart(self, key: Any, state: Any, observation: Any, ended: Any) -> tuple[Any, Any]:
        """The state and its observation, or those of a new episode where the last one ended."""
        import jax
        import jax.numpy as jnp

        return jax.tree.map(
            lambda new, old: jnp.where(ended, new, old), self.reset(key), (state, observation)
        )


@lru_cache(maxsize=64)
def make_accelerated(name: str) -> AcceleratedSimulator:
    """The simulator `gymnax/NAME` (classic control, MinAtar, bsuite, small games), or `grid/catch`, `grid/noisy-catch` or
    `grid/four-rooms`.

    Raises:
        ValueError: If the name is unknown.
        ImportError: If gymnax is not installed.

    >>> make_accelerated("gymnax/Breakout-MinAtar").observation_shape
    (10, 10, 4)
    """
    family, _, task = name.partition("/")
    if family == "grid":
        from marginax.simulators.grids import GRIDS

        if task not in GRIDS:
            raise ValueError(
                f"name must be one of {', '.join(f'grid/{each}' for each in GRIDS)}, got {name!r}"
            )
        return GRIDS[task]()
    gymnax = optional_import("gymnax", name, extra="accelerator")
    if family != "gymnax" or task not in gymnax.registered_envs:
        known = ", ".join(f"gymnax/{known}" for known in gymnax.registered_envs)
        raise ValueError(f"name must be a simulator on the accelerator, got {name!r}; there are {known}")
    return _of_gymnax(name, *gymnax.make(task))


def _of_gymnax(name: str, environment: Any, params: Any) -> AcceleratedSimulator:
    """A gymnax environment as ours: without its resets, and with the types that its state has at the start."""
    import jax
    import jax.numpy as jnp

    observations, actions = environment.observation_space(params), environment.action_space(params)
    count = int(actions.n) if hasattr(actions, "n") else None
    low, high = (0, count - 1) if count is not None else (actions.low, actions.high)

    def read(observation: Any) -> Any:
        if observations.shape:
            return jnp.asarray(observation, jnp.float32)
        return jax.nn.one_hot(observation, observations.n)  # a discrete observation

    def reset(key: Any) -> tuple[Any, Any]:
        observation, state = environment.reset_env(key, params)
        return jax.tree.map(jnp.asarray, state), read(observation)

    def step(key: Any, state: Any, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        observation, following, reward, terminated, _ = environment.step_env(key, state, action, params)
        # Where gymnax mixes Python numbers and arrays, the types of the state stay those of the reset.
        following = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), following, state)
        terminated = jnp.asarray(terminated, bool)
        truncated = environment.is_truncated(following, params) & ~terminated
        return following, read(observation), jnp.asarray(reward, jnp.float32), terminated, truncated

    return AcceleratedSimulator(
        name,
        observation_shape=tuple(observations.shape) or (int(observations.n),),
        num_actions=count,
        action_low=np.broadcast_to(np.float32(low), actions.shape or 1).copy(),
        action_high=np.broadcast_to(np.float32(high), actions.shape or 1).copy(),
        time_limit=int(params.max_steps_in_episode),
        reset=reset,
        step=step,
    )


class HostSimulator:
    """`gymnax/NAME` or `grid/NAME` step by step, as any other [`Simulator`][marginax.simulators.Simulator]."""

    def __init__(self, name: str, seed: int) -> None:
        self._functions = functions = make_accelerated(name)
        self._reset, self._step = _compiled(name)
        self.observation_shape, self.time_limit = functions.observation_shape, functions.time_limit
        self.observation_size = int(np.prod(functions.observation_shape))
        self.num_actions, self.action_size = functions.num_actions, len(functions.action_low)
        self.action_low, self.action_high = functions.action_low, functions.action_high
        self._observation = np.zeros(functions.observation_shape, np.float32)
        self._seed, self._calls = seed, 0
        self._state: Any = None

    def _next_call(self) -> tuple[np.uint32, np.uint32]:
        """Seed and number of this call, from which its key is made."""
        self._calls += 1
        return np.uint32(self._seed & 0xFFFFFFFF), np.uint32(self._calls)

    def reset(self) -> np.ndarray:
        """Start an episode."""
        self._state, observation = self._reset(*self._next_call())
        self._observation = np.array(observation)
        return self._observation.ravel()

    def step(self, action: np.ndarray | np.integer | int) -> tuple[np.ndarray, float, bool, bool]:
        """One step."""
        check_begun(self._state is not None)
        if self.num_actions is not None:
            given: Any = np.int32(action_index(action, self.num_actions))
        else:
            given = action_vector(action, self.action_size).astype(np.float32)
            if not np.isfinite(given).all():
                raise RuntimeError(f"action must be finite, got {given!r}")
        self._state, observation, reward, terminated, truncated = self._step(
            *self._next_call(), self._state, given
        )
        self._observation = np.array(observation)
        return self._observation.ravel(), float(reward), bool(terminated), bool(truncated)

    def get_state(self) -> dict[str, Any]:
        """The arrays of the simulator's state, and how many calls have drawn from its seed."""
        import jax

        leaves = jax.tree.leaves(self._state)
        return {
            "seed": self._seed,
            "calls": self._calls,
            **{f"state.{i}": np.array(leaf) for i, leaf in enumerate(leaves)},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned."""
        import jax
        import jax.numpy as jnp

        self._seed, self._calls = int(state["seed"]), int(state["calls"])
        if "state.0" not in state:
            self._state = None
            return
        start, _ = jax.eval_shape(self._reset, np.uint32(0), np.uint32(0))
        leaves = [jnp.asarray(state[f"state.{i}"]) for i in range(len(jax.tree.leaves(start)))]
        self._state = jax.tree.unflatten(jax.tree.structure(start), leaves)

    def render(self) -> np.ndarray:
        """The planes of a grid game's observation in one colour each, `[160, 160, 3]` for MinAtar."""
        board = self._observation > 0
        if board.ndim != 3:
            raise RuntimeError(f"{self._functions.name} cannot be drawn: it has no picture of its own")
        hues = np.linspace(0, 1, board.shape[2], endpoint=False)
        colours = 0.5 + 0.5 * np.cos(2 * np.pi * (hues[:, None] + np.array([0, 1 / 3, 2 / 3])))
        top = np.where(board.any(-1, keepdims=True), colours[np.argmax(board, axis=-1)], 0)
        return np.kron(np.round(255 * top).astype(np.uint8), np.ones((16, 16, 1), np.uint8))

    def close(self) -> None:
        """Nothing to free."""


@lru_cache(maxsize=64)
def _compiled(name: str) -> tuple[Any, Any]:
    """Compiled `reset` and `step` of one simulator, keyed by seed and call."""
    import jax

    functions = make_accelerated(name)

    def key(seed: Any, call: Any) -> Any:
        return jax.random.fold_in(jax.random.key(seed), call)

    return (
        jax.jit(lambda seed, call: functions.reset(key(seed, call))),
        jax.jit(lambda seed, call, state, action: functions.step(key(seed, call), state, action)),
    )
