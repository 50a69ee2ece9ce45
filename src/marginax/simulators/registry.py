"""The names under which simulators are made."""

from __future__ import annotations

import numpy as np

from marginax.simulators.dm_control import SuiteSimulator
from marginax.simulators.gymnasium import GymnasiumSimulator, pybullet_id
from marginax.simulators.mujoco_tasks import MujocoTask
from marginax.simulators.protocol import Simulator


def make(name: str, seed: int, *, models: str | None = None) -> Simulator:
    """Build a simulator by name.

    | name | simulator |
    |---|---|
    | `dm_control/cheetah-run`, `dm_control/walker-run`, … | the DeepMind control suite, any `domain-task` |
    | `mujoco/cheetah-run`, `mujoco/walker-run` | the same two tasks on bare MuJoCo, equal and faster |
    | `pybullet/HalfCheetah`, `pybullet/Ant`, … | PyBullet's locomotion tasks |
    | any other name | a Gymnasium id with one-dimensional box observations and box actions |

    Args:
        name: One of the names above.
        seed: Non-negative integer; two simulators of one name and seed behave alike.
        models: Only for `mujoco/…`: the folder with `cheetah.xml`, `walker.xml` and `common/`. Otherwise the
            environment variable `MARGINAX_MODELS`, otherwise the dm_control package's own folder.

    Returns:
        A `Simulator`, before its first reset.

    Raises:
        ValueError: If the name is unknown or its spaces are not boxes, or the seed is negative.
        ImportError: If the package behind the name is not installed.

    >>> simulator = make("Pendulum-v1", seed=0)
    >>> observation = simulator.reset()
    >>> observation.shape, observation.dtype, simulator.time_limit
    ((3,), dtype('float32'), 200)
    >>> observation, reward, terminated, truncated = simulator.step(np.zeros(1))
    >>> terminated, truncated
    (False, False)
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")
    seed = int(seed)
    family, _, task = name.partition("/")
    if family == "dm_control" and task:
        return SuiteSimulator(task, seed)
    if family == "mujoco" and task:
        return MujocoTask(task, seed, models=models)
    return GymnasiumSimulator(pybullet_id(task) if family == "pybullet" and task else name, seed)
