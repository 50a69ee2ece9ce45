"""The names under which simulators are made."""

from __future__ import annotations

import os
import sys
import warnings
from functools import lru_cache, partial

import numpy as np

from marginax.simulators.accelerated import HostSimulator
from marginax.simulators.dm_control import SuiteSimulator
from marginax.simulators.gymnasium import GymnasiumSimulator, pybullet_id, resumes_exactly
from marginax.simulators.mujoco_tasks import mujoco_task
from marginax.simulators.protocol import Simulator, TimeFeature
from marginax.simulators.pybullet_tasks import TASKS as PYBULLET_TASKS


def make(name: str, seed: int, *, allow_import: bool = False, render: bool = False) -> Simulator:
    """Build a simulator by name.

    | name | simulator |
    |---|---|
    | `dm_control/cheetah-run`, `dm_control/reacher-easy`, … | the DeepMind control suite, any `domain-task` |
    | `mujoco/cheetah-run`, `mujoco/walker-run`, … | some of these tasks on MuJoCo alone, equal and faster |
    | `pybullet/HalfCheetah`, `pybullet/Ant`, … | PyBullet's tasks; those that walk on PyBullet alone, equal and faster |
    | `gymnax/CartPole-v1`, `gymnax/Breakout-MinAtar`, … | gymnax, one step at a time; see [`make_accelerated`][marginax.simulators.make_accelerated] |
    | `grid/catch`, `grid/noisy-catch`, `grid/four-rooms` | small games of our own, likewise |
    | `module:Id` | an environment of your own: `module` is imported, and registers `Id` with Gymnasium |
    | any other name | a Gymnasium id with one-dimensional box observations, and box or discrete actions |
    | any of these with `+time` at its end | the same, and the share of the episode's time that is left in the observation |

    Args:
        name: One of the names above.
        seed: Non-negative integer below 2³²; two simulators of one name and seed behave alike.
        allow_import: Accept `module:Id`. Importing a module runs its code, so pass True only for a name that the
            user has given, never for one that was read from a file.
        render: Prepare for `render()`.

    Returns:
        A `Simulator`, before its first reset.

    Raises:
        ValueError: If the name is unknown, its spaces do not fit, or the seed is out of range.
        ImportError: If the package behind the name is not installed.

    >>> simulator = make("Pendulum-v1", seed=0)
    >>> observation = simulator.reset()
    >>> observation.shape, observation.dtype, simulator.time_limit
    ((3,), dtype('float32'), 200)
    >>> observation, reward, terminated, truncated = simulator.step(np.zeros(1))
    >>> terminated, truncated
    (False, False)
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be a non-negative integer below 2**32, got {seed!r}")
    seed = int(seed)
    if not isinstance(name, str):
        raise ValueError(f"name must be the name of a simulator, got {name!r}")
    if name.endswith("+time"):
        plain = make(name.removesuffix("+time"), seed, allow_import=allow_import, render=render)
        return TimeFeature(plain)
    if ":" in name:
        if not allow_import:
            raise ValueError(
                f"name must be a known simulator, got {name!r}: module:Id imports a module, "
                "and is accepted only where you give it yourself"
            )
        if os.getcwd() not in sys.path:  # a console script does not look here by itself
            sys.path.insert(0, os.getcwd())
    family, _, task = name.partition("/")
    if family == "dm_control" and task:
        return SuiteSimulator(task, seed, render=render)
    if family == "mujoco" and task:
        return mujoco_task(task, seed, render=render)
    if family == "pybullet" and task in PYBULLET_TASKS:
        return PYBULLET_TASKS[task](seed, render=render)
    if family in ("gymnax", "grid") and task:
        return HostSimulator(name, seed)
    return GymnasiumSimulator(
        pybullet_id(task) if family == "pybullet" and task else name, seed, render=render
    )


def check_actions(name: str, simulator: Simulator, *, discrete: bool, command: str = "") -> None:
    """Refuse a simulator whose actions an agent cannot choose, and name the command that can.

    An environment of Gymnasium takes a step as well: what it returns may not fit either.
    """
    if discrete == (simulator.num_actions is not None):
        if isinstance(simulator, GymnasiumSimulator):
            simulator.reset()
            simulator.step(simulator.action_low)
        return
    kinds = "actions in a box", f"{simulator.num_actions} discrete actions"
    has, needs = (kinds[0], "discrete actions") if discrete else (kinds[1], kinds[0])
    hint = f": use {command}" if command else ""
    raise ValueError(f"{name!r} has {has}, but this agent needs {needs}{hint}")


def observation_shape(simulator: Simulator) -> tuple[int, ...]:
    """The shape of an observation before it was made flat."""
    return getattr(simulator, "observation_shape", (simulator.observation_size,))


@lru_cache(maxsize=64)
def warn_if_resume_differs(name: str, allow_import: bool = False) -> None:
    """Try a checkpoint of a Gymnasium environment, once per name, and warn if its state cannot be captured."""
    maker, name = partial(make, allow_import=allow_import), name.removesuffix("+time")
    probe = maker(name, 0)
    probe.close()
    if isinstance(probe, GymnasiumSimulator) and not resumes_exactly(name, maker):
        warnings.warn(
            f"{name!r} keeps state that is no plain data (or draws from a generator that its seed does not reach): "
            "training works, but a resumed run will differ from an uninterrupted one",
            stacklevel=3,
        )
