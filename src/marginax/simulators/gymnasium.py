"""Gymnasium environments, among them PyBullet's, as they were registered: with all their wrappers."""

from __future__ import annotations

import contextlib
import json
import math
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from marginax.simulators.protocol import (
    action_index,
    action_vector,
    check_begun,
    optional_import,
    prefer_rendering,
)

_DEFAULT_TIME_LIMIT = 1000
_NOT_STATE = ("env", "spec", "_cached_spec", "metadata", "observation_space", "action_space")


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
    """Any Gymnasium id with box observations, and actions in a box or a discrete set.

    See [`Simulator`][marginax.simulators.Simulator]. The environment is stepped through all wrappers that it
    was registered with. An environment without a time limit is given one of 1,000 steps.

    Gymnasium has no checkpoints. Ours holds the number of the episode, the actions taken in it, and the data of
    every layer (numbers, arrays, generators, containers and plain objects of these) at the start of the episode.
    Episode k is seeded from (seed, k). `set_state` puts the data back and plays the actions again. That is exact
    for an environment whose state is such data or follows from its seed; `resumes_exactly` tries it.

    >>> simulator = GymnasiumSimulator("Pendulum-v1", seed=3)
    >>> _ = simulator.reset()
    >>> state = simulator.get_state()
    >>> first = simulator.step(np.ones(1))
    >>> again = GymnasiumSimulator("Pendulum-v1", seed=3)
    >>> again.set_state(state)
    >>> bool(np.all(again.step(np.ones(1))[0] == first[0]))
    True
    """

    def __init__(self, name: str, seed: int, *, render: bool = False) -> None:
        if render:
            prefer_rendering()
        gymnasium = optional_import("gymnasium", name)
        mode = {"render_mode": "rgb_array"} if render else {}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._environment = gymnasium.make(name, disable_env_checker=True, **mode)
        except gymnasium.error.Error as error:
            raise ValueError(f"name must be a simulator or a Gymnasium id, got {name!r}: {error}") from error
        except Exception as error:
            if render and isinstance(error, TypeError) and "render_mode" in str(error):
                raise ValueError(f"{name!r} cannot be drawn: it does not accept render_mode") from error
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(f"{name!r} cannot be made: {type(error).__name__}: {error}") from error
        try:
            self._read_spaces(name, gymnasium.spaces)
        except ValueError:
            self._environment.close()
            raise
        self._name, spec = name, self._environment.spec
        self.time_limit = int((spec and spec.max_episode_steps) or _DEFAULT_TIME_LIMIT)
        self._layers = list(_layers(self._environment))
        self._seed = seed
        self._episode = -1
        self._actions: list[np.ndarray] = []
        # PyBullet's very first reset differs from all later ones: take it now, so no episode depends on it.
        self._reset(0)
        self._fresh = self._at_start = _layer_data(self._layers)

    def _read_spaces(self, name: str, spaces: Any) -> None:
        observations, actions = self._environment.observation_space, self._environment.action_space
        if not isinstance(observations, spaces.Box) or len(observations.shape) != 1:
            raise ValueError(
                f"{name!r} must have observations in a one-dimensional box, got {observations}: "
                "register it with gymnasium.wrappers.FlattenObservation"
            )
        self.observation_size = int(observations.shape[0])
        self.num_actions: int | None = None
        self._first_action, self._dtype = 0, np.dtype(np.int64)
        self._zeros = np.zeros(actions.shape)
        if isinstance(actions, spaces.Discrete):
            self.num_actions, self._first_action = int(actions.n), int(actions.start)
            self.action_size = 1
            self.action_low = np.zeros(1, np.float32)
            self.action_high = np.full(1, self.num_actions - 1, np.float32)
            return
        if not isinstance(actions, spaces.Box) or len(actions.shape) != 1:
            raise ValueError(
                f"{name!r} must have actions in a one-dimensional box or a discrete set, got {actions}"
            )
        self._dtype = np.dtype(actions.dtype)
        if not np.issubdtype(self._dtype, np.floating):
            raise ValueError(f"{name!r} must have actions of real numbers, got a box of {self._dtype}")
        self.action_size = int(actions.shape[0])
        with np.errstate(over="ignore"):
            self.action_low, self.action_high = (
                np.asarray(x, np.float32) for x in (actions.low, actions.high)
            )
        finite = np.isfinite(self.action_low) & np.isfinite(self.action_high)
        if not finite.all():
            i = int(np.argmin(finite))
            raise ValueError(
                f"{name!r} must have finite bounds for its actions, got [{actions.low[i]}, {actions.high[i]}] "
                f"for action {i}: register it with gymnasium.wrappers.RescaleAction, or bounds of its own"
            )

    def reset(self) -> np.ndarray:
        """Start the next episode, seeded by its number."""
        self._at_start = _layer_data(self._layers)
        self._episode += 1
        self._actions = []
        seed = np.random.SeedSequence((self._seed, self._episode)).generate_state(1, np.uint32)[0]
        return self._reset(int(seed))

    def _reset(self, seed: int) -> np.ndarray:
        expected = "reset must accept a seed and return (observation, info)"
        try:
            found = self._environment.reset(seed=seed)
        except (TypeError, ValueError) as error:
            if "argument 'seed'" in str(error) or _of_a_wrapper(error):
                raise self._misfit(expected) from error
            raise
        if not isinstance(found, tuple) or len(found) != 2:
            raise self._misfit(expected)
        return self._observed(found[0])

    def _observed(self, observation: Any) -> np.ndarray:
        found = np.array(observation, np.float32)
        if found.shape != (self.observation_size,):
            raise ValueError(
                f"{self._name!r} must return observations of the shape of its observation_space, "
                f"{(self.observation_size,)}, got {found.shape}"
            )
        return found

    def _misfit(self, expected: str) -> ValueError:
        return ValueError(
            f"{self._name!r} does not have Gymnasium's interface, but perhaps old Gym's: {expected}"
        )

    def step(self, action: np.ndarray | np.integer | int) -> tuple[np.ndarray, float, bool, bool]:
        """One step of the environment, on a copy of the action; a discrete action is its index from 0."""
        check_begun(self._episode >= 0)
        if self.num_actions is not None:
            index = action_index(action, self.num_actions)
            kept: Any = np.array([index])
            given: Any = index + self._first_action
        else:
            kept = action_vector(action, self.action_size).astype(self._dtype)
            if not math.isfinite(kept.dot(self._zeros)):  # cheaper than np.isfinite
                raise RuntimeError(f"action must be finite, got {kept!r} at step {len(self._actions)}")
            given = kept.copy()  # an environment may write into it
        self._actions.append(kept)
        try:
            observation, reward, terminated, truncated, _ = self._environment.step(given)
        except ValueError as error:
            if _of_a_wrapper(error):
                raise self._misfit(
                    "step must return (observation, reward, terminated, truncated, info)"
                ) from error
            raise
        truncated = bool(truncated) or len(self._actions) >= self.time_limit
        return self._observed(observation), float(reward), bool(terminated), truncated

    def get_state(self) -> dict[str, Any]:
        """The episode's number and actions, and the data of every layer at its start."""
        actions = np.array(self._actions, self._dtype).reshape(-1, self.action_size)
        changed = [  # a number that never changes may be a handle, valid in this process only
            {name: now[name] for name in now if name not in fresh or not _same(now[name], fresh[name])}
            for now, fresh in zip(self._at_start, self._fresh, strict=True)
        ]
        return {"episode": self._episode, "actions": actions, "seed": self._seed, **_to_arrays(changed)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Put the layers' data back and play the saved actions again."""
        self._seed = int(state["seed"])
        self._episode = max(int(state["episode"]) - 1, -1)
        if int(state["episode"]) < 0:
            return
        saved = _from_arrays(state)
        if len(saved) != len(self._layers):
            raise ValueError(
                f"state has {len(saved)} layers of wrappers, the environment {len(self._layers)}"
            )
        _set_layer_data(self._layers, self._fresh)
        _set_layer_data(self._layers, saved)
        self.reset()
        for action in state["actions"]:
            self.step(action)

    def render(self) -> np.ndarray:
        """The environment's own picture, `[height, width, 3]`; needs `make(…, render=True)`."""
        if self._environment.render_mode != "rgb_array":
            raise RuntimeError("the simulator must be made with render=True to be drawn")
        try:
            return np.asarray(self._environment.render(), np.uint8)
        except Exception as error:
            raise RuntimeError(f"{self._environment.spec.id} cannot be drawn here: {error}") from error

    def close(self) -> None:
        """Free the environment."""
        self._environment.close()


def _of_a_wrapper(error: Exception) -> bool:
    """Whether an answer could not be taken apart here or in a wrapper, so that it is not the environment's own error."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals["__name__"]
    return "to unpack" in str(error) and module.startswith((__name__, "gymnasium.wrappers"))


def resumes_exactly(name: str, make: Any) -> bool:
    """Whether a copy, made from a checkpoint in a second episode, goes on as the original does.

    It plays a few random steps of three episodes; `make(name, seed)` makes the simulators.

    >>> resumes_exactly("Pendulum-v1", GymnasiumSimulator)
    True
    """
    original, copy = make(name, 0), make(name, 1)
    generator = np.random.default_rng(0)

    def actions() -> np.ndarray:
        if original.num_actions is not None:
            return generator.integers(original.num_actions, size=(10, 1))
        low, high = original.action_low, original.action_high
        return generator.uniform(low, high, (10, original.action_size)).astype(np.float32)

    def play(simulator: Any, sequence: np.ndarray) -> list[np.ndarray]:
        seen = []
        for action in sequence:
            observation, reward, terminated, truncated = simulator.step(action)
            seen += [observation, np.array([reward, terminated, truncated])]
            if terminated or truncated:
                seen.append(simulator.reset())
        return seen

    for simulator in (original, copy):
        simulator.reset()
    for _ in range(2):
        play(original, actions())
        original.reset()
    play(original, actions()[:5])
    copy.set_state(original.get_state())
    same = True
    for _ in range(2):
        sequence = actions()
        pairs = zip(play(original, sequence), play(copy, sequence), strict=False)
        same = same and all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
        same = same and np.array_equal(original.reset(), copy.reset(), equal_nan=True)
    original.close()
    copy.close()
    return same


# The data of every layer of wrappers. What a layer holds is copied attribute by attribute into plain trees of
# numbers, strings, arrays and tagged containers; an attribute that is anything else is left alone.


class _NotDataError(Exception):
    """The value is not made of numbers, arrays, generators and containers of these."""


def _layers(environment: Any) -> Iterator[Any]:
    while True:
        yield environment
        if "env" not in vars(environment):
            return
        environment = environment.env


def _layer_data(layers: list[Any]) -> list[dict[str, Any]]:
    out = []
    for layer in layers:
        data = {}
        for name, value in vars(layer).items():
            if name not in _NOT_STATE:
                with contextlib.suppress(_NotDataError):
                    data[name] = _copy(value, (id(layer),))
        out.append(data)
    return out


def _copy(value: Any, parents: tuple[int, ...]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.hasobject:
            raise _NotDataError
        return np.array(value) if isinstance(value, np.ndarray) else {"scalar": np.array(value)}
    if isinstance(value, np.random.Generator):
        return {"generator": _copy(value.bit_generator.state, parents)}
    if isinstance(value, np.random.RandomState):
        return {"generator": _copy(value.get_state(legacy=False), parents)}
    if id(value) in parents or len(parents) > 5:
        raise _NotDataError
    parents = (*parents, id(value))
    if type(value) in (list, tuple, deque):
        return {type(value).__name__: [_copy(item, parents) for item in value]}
    if type(value) is dict:
        return {"dict": [[_copy(k, parents), _copy(v, parents)] for k, v in value.items()]}
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, type):
        return {"object": {name: _copy(v, parents) for name, v in vars(value).items()}}
    raise _NotDataError


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)


def _to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """A tree as a JSON text, in bytes, and the arrays it refers to by number."""
    arrays: list[np.ndarray] = []

    def refer(array: np.ndarray) -> dict[str, int]:
        arrays.append(array)
        return {"__array__": len(arrays) - 1}

    text = json.dumps(tree, default=refer)
    return {
        "layers": np.frombuffer(text.encode(), np.uint8),
        **{f"layers.{i}": a for i, a in enumerate(arrays)},
    }


def _from_arrays(state: dict[str, Any]) -> Any:
    def find(item: dict[str, Any]) -> Any:
        return np.array(state[f"layers.{item['__array__']}"]) if item.keys() == {"__array__"} else item

    return json.loads(np.asarray(state["layers"], np.uint8).tobytes(), object_hook=find)


def _set_layer_data(layers: list[Any], data: list[dict[str, Any]]) -> None:
    for layer, attributes in zip(layers, data, strict=True):
        for name, saved in attributes.items():
            with contextlib.suppress(_NotDataError):
                vars(layer)[name] = _restore(saved, vars(layer).get(name))


def _restore(saved: Any, now: Any) -> Any:
    """The value of a tree; arrays, generators and objects that are there now are written in place.

    Raises:
        _NotDataError: an object is not there now, and cannot be made.
    """
    if isinstance(saved, np.ndarray):
        if not isinstance(now, np.ndarray) or (now.shape, now.dtype) != (saved.shape, saved.dtype):
            return saved.copy()
        now[...] = saved
        return now
    if not isinstance(saved, dict):
        return saved
    ((kind, inner),) = saved.items()
    if kind == "scalar":
        return inner[()]
    if kind == "generator":
        return _restore_generator(_restore(inner, None), now)
    if kind == "object":
        if not hasattr(now, "__dict__"):
            raise _NotDataError
        for name, value in inner.items():
            vars(now)[name] = _restore(value, vars(now).get(name))
        return now
    if kind == "dict":
        before = now if isinstance(now, dict) else {}
        return {(key := _restore(k, None)): _restore_item(v, before.get(key)) for k, v in inner}
    there = list(now) if isinstance(now, (list, tuple, deque)) else []
    there += [None] * (len(inner) - len(there))
    items = [_restore_item(item, old) for item, old in zip(inner, there, strict=False)]
    if kind == "deque":
        return deque(items, maxlen=now.maxlen if isinstance(now, deque) else None)
    return tuple(items) if kind == "tuple" else items


def _restore_item(saved: Any, now: Any) -> Any:
    """An item of a container: arrays are new, because a container may hold the same array twice."""
    return _restore(saved, None if isinstance(saved, np.ndarray) else now)


def _restore_generator(state: dict[str, Any], now: Any) -> Any:
    if "has_gauss" in state:
        if not isinstance(now, np.random.RandomState):
            now = np.random.RandomState()
        now.set_state(state)
        return now
    kind = state["bit_generator"]
    if kind not in _BIT_GENERATORS:
        raise _NotDataError
    if not isinstance(now, np.random.Generator) or now.bit_generator.state["bit_generator"] != kind:
        now = np.random.Generator(getattr(np.random, kind)())
    now.bit_generator.state = state
    return now


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
