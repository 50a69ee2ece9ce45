"""From plain episodes, as Gymnasium's `step` returns them, to trajectories and back; several in one sequence."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from marginax import _checks as checks

from ._contract import check_lengths, check_steps
from ._trajectory import Trajectory


class Episode(NamedTuple):
    r"""One episode as it comes out of a Gymnasium environment, on the host.

    `N` steps have `N + 1` observations: `observations[t]` is what action `t` was chosen on, and
    `observations[N]` what the last step returned. `terminated` and `truncated` are those of the last step.

    >>> Episode(np.array([0, 1, 2]), np.array([1, 0]), np.array([0.0, 1.0]), terminated=True).truncated
    False
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    terminated: bool
    truncated: bool = False
    behaviour: np.ndarray | None = None


def from_episodes(
    episodes: Iterable[Any], discount: float, *, final_observation: bool = True, length: int | None = None
) -> Trajectory:
    r"""Puts episodes side by side, one per row, padded to the longest.

    An `Episode`, a mapping, or any object with fields of these names will do, so that Minari's episodes can
    be given as they are: `observations`, `actions`, `rewards`; `terminated` and `truncated`, or `terminations`
    and `truncations`, of the last step or of all; `behaviour` (μ(a_t|x_t)) if known. A step that both terminates
    and truncates is terminal; an episode that does neither was cut off by the end of the data: truncated.

    Args:
        episodes: of discrete observations and actions.
        discount: γ in [0, 1).
        final_observation: whether the observations include the one after the last step: N + 1 of them for N
            actions. Set to False for data that have N: then every episode must end in termination, because
            the successor of a truncated step is needed and not there.
        length: pads to this length instead.

    Returns:
        A `Trajectory` with fields `[episodes, length]`.

    Raises:
        ValueError: naming episode and step, if lengths do not fit together, an episode ends before its last
            step, or a number is out of range.

    >>> episode = dict(observations=[0, 1, 2], actions=[1, 0], rewards=[0, 1], terminated=True)
    >>> trajectory = from_episodes([episode], discount=0.9)
    >>> trajectory.next_states, trajectory.discounts
    (Array([[1, 2]], dtype=int32), Array([[0.9, 0. ]], dtype=float32))
    """
    gamma = checks.discount(discount)
    rows = [_steps(item, i, gamma, final_observation) for i, item in enumerate(episodes)]
    if not rows:
        raise ValueError("episodes must hold at least one episode, but there are none")
    longest = max(len(row["states"]) for row in rows)
    length = longest if length is None else checks.count("length", length)
    if longest > length:
        raise ValueError(f"length must be at least {longest}, that of the longest episode, got {length}")
    if len({row["behaviour"] is None for row in rows}) > 1:
        lacking = [row["behaviour"] is None for row in rows].index(True)
        raise ValueError(f"behaviour must be given for all episodes or none, but episode {lacking} has none")
    return _filled(rows, [(i, 0) for i in range(len(rows))], (len(rows), length))


def to_episodes(trajectory: Trajectory) -> list[Episode]:
    """Takes a batch apart into its episodes, row by row and in order of time, with `N + 1` observations each.

    Args:
        trajectory: fields `[T]` or `[..., T]`; a row may hold several episodes. (With a discount of zero
            every step is an episode of its own: that is what its arrays say.)

    Returns:
        Episodes on the host. One that neither terminates nor is truncated ends with its row. The last
        observation of a terminated one is whatever `next_states` held.

    >>> episode = Episode(np.array([0, 1, 2]), np.array([1, 0]), np.array([0.0, 1.0]), terminated=True)
    >>> to_episodes(from_episodes([episode], discount=0.9))[0].observations
    array([0, 1, 2], dtype=int32)
    """
    return [
        Episode(
            observations=np.append(row["states"], row["next_states"][-1:]),
            actions=row["actions"],
            rewards=row["rewards"],
            terminated=bool(row["discounts"][-1] == 0),
            truncated=bool(row["truncated"][-1]),
            behaviour=row["behaviour"],
        )
        for row in _episodes(trajectory)
    ]


def pack(trajectory: Trajectory, length: int) -> Trajectory:
    """Puts whole episodes one after another into sequences of a given length, in order, to waste less on padding.

    Targets of a packed sequence are those of its episodes one by one. An episode that ended with its row,
    without an end of its own, becomes truncated there.

    Args:
        trajectory: fields `[..., T]`; rows may hold several episodes.
        length: of the new sequences.

    Returns:
        A `Trajectory` with fields `[sequences, length]`; `to_episodes` gives the same episodes as before.

    Raises:
        ValueError: if an episode is longer than `length`.

    >>> episodes = [dict(observations=[0, 1], actions=[0], rewards=[i], terminated=True) for i in range(3)]
    >>> pack(from_episodes(episodes, discount=0.9), length=2).rewards
    Array([[0., 1.],
           [2., 0.]], dtype=float32)
    """
    length = checks.count("length", length)
    rows = list(_episodes(trajectory))
    places = []
    row, used = -1, length
    for i, steps in enumerate(rows):
        size = len(steps["states"])
        if size > length:
            raise ValueError(f"length must be at least {size}, that of episode {i}, got {length}")
        if used + size > length:
            row, used = row + 1, 0
        places.append((row, used))
        used += size
        steps["truncated"][-1] |= steps["discounts"][-1] != 0
    return _filled(rows, places, (row + 1, length))


_FILL = {
    "states": (0, np.int32),
    "actions": (0, np.int32),
    "rewards": (0, None),
    "discounts": (0, None),
    "next_states": (0, np.int32),
    "truncated": (False, np.bool_),
    "behaviour": (1, None),
    "valid": (False, np.bool_),
}


def _filled(rows: list[dict], places: list[tuple[int, int]], shape: tuple[int, int]) -> Trajectory:
    """Copies each episode's arrays to its place (row and first step) in arrays full of padding."""
    fields: dict[str, Any] = {}
    for name, (fill, dtype) in _FILL.items():
        if name == "behaviour" and (not rows or rows[0]["behaviour"] is None):
            fields[name] = None
            continue
        array = np.full(shape, fill, dtype or jnp.result_type(float))
        for values, (row, start) in zip(rows, places, strict=True):
            array[row, start : start + len(values["states"])] = True if name == "valid" else values[name]
        fields[name] = jnp.asarray(array)
    return Trajectory(**fields)


def _episodes(trajectory: Trajectory) -> Iterable[dict]:
    """Yields the fields of one episode after another, as fresh host arrays."""
    names = [name for name in _FILL if getattr(trajectory, name) is not None]
    arrays = {name: np.asarray(getattr(trajectory, name)) for name in names}
    arrays = {name: array.reshape(-1, array.shape[-1]) for name, array in arrays.items()}
    ends = np.asarray(trajectory.ends).reshape(arrays["valid"].shape)
    for i, valid in enumerate(arrays["valid"]):
        # A run of steps ends with an episode's end, before padding, and with the row.
        stops = np.flatnonzero(valid & (ends[i] | ~np.append(valid[1:], False))) + 1
        starts = np.flatnonzero(valid & np.append(True, ~valid[:-1] | ends[i][:-1]))
        for start, stop in zip(starts, stops, strict=True):
            yield dict.fromkeys(_FILL) | {name: arrays[name][i, start:stop].copy() for name in names}


def _steps(item: Any, i: int, discount: float, final_observation: bool) -> dict:
    """The fields of one given episode, checked."""
    observations = _numbers(item, i, "observations", "whole")
    actions = _numbers(item, i, "actions", "whole")
    rewards = _numbers(item, i, "rewards", "real")
    behaviour = None if _field(item, "behaviour") is None else _numbers(item, i, "behaviour", "real")
    count = len(actions)
    terminal = _flags(item, i, "terminations", "terminated", count)
    truncated = _flags(item, i, "truncations", "truncated", count)
    columns = {"rewards": rewards, "behaviour": behaviour, "terminations": terminal, "truncations": truncated}
    check_lengths(i, observations, count, final=bool(final_observation), **columns)
    states, next_states = observations[:count], observations[1:]
    if not final_observation:
        next_states = np.append(next_states, observations[-1])  # not read: the last step must terminate
    check_steps(
        states,
        actions,
        rewards,
        next_states,
        terminal,
        offsets=np.array([0, count]),
        truncated=truncated,
        behaviour=behaviour,
        names=[i],
    )
    if not final_observation and not terminal[-1]:
        raise ValueError(
            f"episode {i}, step {count - 1}: it does not terminate and has no final observation, so that its successor is "
            "unknown; drop that step, or give N + 1 observations"
        )
    last = np.arange(count) == count - 1
    return {
        "states": states,
        "actions": actions,
        "rewards": rewards,
        "discounts": np.where(terminal, 0.0, discount),
        "next_states": next_states,
        "truncated": last & ~terminal,
        "behaviour": behaviour,
    }


def _field(item: Any, name: str) -> Any:
    """A field of a given episode; None where it has none."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def _numbers(item: Any, i: int, name: str, kind: Literal["whole", "real"]) -> np.ndarray:
    """A field of episode i as a sequence of numbers; whole ones fit into 32 bits."""
    if _field(item, name) is None:
        raise ValueError(f"episode {i}: it has no {name}")
    try:
        array = np.asarray(_field(item, name))
    except ValueError as error:
        raise ValueError(f"episode {i}: {name} must be a sequence of {kind} numbers: {error}") from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in ("iu" if kind == "whole" else "iuf")):
        raise ValueError(
            f"episode {i}: {name} must be a sequence of {kind} numbers, got {array.dtype} of shape {array.shape}"
        )
    if kind == "whole":
        if array.size and array.max() >= 2**31:
            raise ValueError(f"episode {i}: {name} must be below 2**31, got {array.max()}")
        return array
    with np.errstate(
        over="ignore"
    ):  # what is too large for the type of the trajectory becomes infinite, and is refused
        return array.astype(jnp.result_type(float))


def _flags(item: Any, i: int, of_all: str, of_last: str, count: int) -> np.ndarray:
    """One flag for each of the `count` steps of episode i, from the field of all steps, or else from that of the last."""
    name = of_last if _field(item, of_all) is None else of_all
    given = np.asarray(False if _field(item, name) is None else _field(item, name))
    if given.ndim > 1 or given.dtype.kind not in "biuf" or not np.isin(given, (0, 1)).all():
        raise ValueError(f"episode {i}: {name} must be true or false, got {_field(item, name)!r}")
    flags = given.astype(bool)
    return flags if flags.ndim == 1 else flags & (np.arange(count) == count - 1)
