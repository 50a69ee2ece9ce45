"""A log of episodes as flat arrays, which every estimator of this room reads, and the one place that checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.trajectories import check_lengths, check_steps, step_name

NO_SUCCESSORS = "nothing is left of the log: its episodes have one step, are truncated and come without their final observation"
EMPTY = "the log is empty: there is no transition in it"
HALF_LOGGED = "behaviour probabilities are present in one part of the log and not in another"
_NEEDED = ("states", "actions", "rewards", "terminal")  # of an episode
_COLUMNS = ("states", "actions", "rewards", "next_states", "terminal", "behaviour", "rows")
FOLDS = 2  # of episodes, for cross-fitting: doubly robust never meets its own data
_LARGEST_LOG = 300.0  # products of ratios are cut at e^300, so that their squares stay finite


@dataclass(frozen=True)
class Log:
    """Whole episodes laid end to end; row n is the transition (x_n, a_n, r_n, x'_n).

    Episode i occupies rows `offsets[i]` to `offsets[i+1] - 1`. The last row of each episode is either
    terminal (the process ended: nothing follows) or truncated (it went on, the log does not).

    Args:
        states: [N] integers, or [N, D] observations.
        actions: [N] integers, or [N, K] continuous actions.
        rewards: [N].
        next_states: like `states`; not read where `terminal`.
        terminal: [N] bool.
        offsets: [E + 1] first row of each episode, then N.
        behaviour: [N] probability (or density) μ(a_n|x_n) with which the action was drawn, or None.
        rows: [N] row of the file each transition came from, for policies given as a file of probabilities.
        names: episode names for error messages; None counts from 0.
        set_aside: how many last steps of truncated episodes are not here, because their next state was not known.

    >>> log = Log.from_episodes([dict(states=[0, 1, 0], actions=[0, 1], rewards=[0., 1.], terminal=False)])
    >>> log.num_episodes, len(log), log.next_states.tolist(), log.truncated.tolist()
    (1, 2, [1, 0], [False, True])
    """

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_states: np.ndarray
    terminal: np.ndarray
    offsets: np.ndarray
    behaviour: np.ndarray | None = None
    rows: np.ndarray | None = None
    names: Sequence[Any] | np.ndarray | None = None
    set_aside: int = 0

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[E] number of transitions in each episode."""
        return np.diff(self.offsets)

    @property
    def last(self) -> np.ndarray:
        """[E] row of the last transition of each episode."""
        return self.offsets[1:] - 1

    @property
    def truncated(self) -> np.ndarray:
        """[N] bool: the last row of an episode that did not terminate."""
        flags = np.zeros(len(self), dtype=bool)
        flags[self.last] = ~self.terminal[self.last]
        return flags

    @property
    def episode(self) -> np.ndarray:
        """[N] the episode of each row, counted from 0."""
        return np.repeat(np.arange(self.num_episodes), self.lengths)

    @property
    def times(self) -> np.ndarray:
        """[N] step t of each row within its episode, from 0."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def tabular(self) -> bool:
        """Whether states and actions are indices."""
        return self.states.ndim == 1 and self.actions.ndim == 1 and self.states.dtype.kind in "iu"

    @property
    def discrete_actions(self) -> bool:
        """Whether actions are indices."""
        return self.actions.ndim == 1 and self.actions.dtype.kind in "iu"

    @property
    def following(self) -> np.ndarray:
        """[N] next states as indices that can be looked up: 0 where the step is terminal and nothing may be read."""
        return np.where(self.terminal, 0, self.next_states)

    def pairs(self, num_actions: int) -> np.ndarray:
        """[N] the pair of each row as a number x·A + a, for logs of indices."""
        return self.states * num_actions + self.actions

    def name(self, episode: int) -> str:
        """The name of an episode, as error messages give it."""
        return str(episode if self.names is None else self.names[episode])

    def numbers(self, first: int) -> np.ndarray:
        """[E] the numbers of the episodes in the whole log, of which the first one is given."""
        return first + np.arange(self.num_episodes)

    def folds(self, first: int = 0) -> np.ndarray:
        """[E] the fold of each episode, 0 or 1. Of episodes 2k and 2k + 1, one is in each fold, by chance.

        Folds by turns would separate the arms of an experiment whose episodes get them by turns.
        """
        number = self.numbers(first).astype(np.uint64)
        pair = number // np.uint64(2) + np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # SplitMix64
            pair = (pair ^ (pair >> np.uint64(shift))) * np.uint64(factor)
        return ((number ^ (pair >> np.uint64(63))) % np.uint64(FOLDS)).astype(np.intp)

    def sums(self, x: np.ndarray) -> np.ndarray:
        """[E] sum of `x` [N] over each episode."""
        return np.add.reduceat(x, self.offsets[:-1])

    def products(self, ratios: np.ndarray) -> np.ndarray:
        """[N] running product of `ratios` within each episode, up to and including each row."""
        zero = ratios == 0
        logs = np.log(np.where(zero, 1.0, ratios))
        total = np.cumsum(logs)
        before = np.repeat(total[self.offsets[:-1]] - logs[self.offsets[:-1]], self.lengths)
        products = np.exp(np.minimum(total - before, _LARGEST_LOG))
        if zero.any():
            seen = np.cumsum(zero)
            first = np.repeat(seen[self.offsets[:-1]] - zero[self.offsets[:-1]], self.lengths)
            products[seen > first] = 0.0
        return products

    def select(self, episodes: ArrayLike) -> Log:
        """The log of the given episodes, in the given order (repeats allowed)."""
        chosen = checks.indices("episodes", episodes, self.num_episodes)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)
        return self._take(rows, offsets, [self.name(int(i)) for i in chosen])

    def first_steps(self, horizon: int) -> Log:
        """The first `horizon` steps of each episode. Longer episodes count as ended there: later rewards have no effect."""
        if int(self.lengths.max()) <= horizon:
            return self
        cut = replace(self, terminal=self.terminal | (self.times == horizon - 1))
        offsets = np.concatenate([[0], np.cumsum(np.minimum(self.lengths, horizon))])
        return cut._take(self.times < horizon, offsets, self.names)

    def _take(self, rows: np.ndarray, offsets: np.ndarray, names: Any) -> Log:
        columns = {name: getattr(self, name) for name in _COLUMNS}
        taken: dict[str, Any] = {name: None if x is None else x[rows] for name, x in columns.items()}
        share = len(taken["rewards"]) / len(self)
        return Log(**taken, offsets=offsets, names=names, set_aside=round(share * self.set_aside))

    @staticmethod
    def from_episodes(episodes: Sequence[dict[str, Any]]) -> Log:
        """Builds a log from episodes given one by one.

        Args:
            episodes: each a dict with `states` (N or N+1 of them), `actions` [N], `rewards` [N], `terminal`
                (did the last step end the episode?) and, if known, `behaviour` [N]. With N states the last step of an episode
                that is not terminal is set aside, because its next state is not known; `set_aside` counts such steps.

        Raises:
            ValueError: naming the episode and step where the data are broken.
        """
        parts = []
        for i, episode in enumerate(episodes):
            if not isinstance(episode, Mapping):
                raise ValueError(f"episode {i} must be a dict of its columns, got {type(episode).__name__}")
            for key in _NEEDED:
                if episode.get(key) is None:
                    raise ValueError(f"episode {i}: it has no {key!r}")
            for key in episode:
                checks.choice(f"episode {i}: a column", key, (*_NEEDED, "behaviour"))
            ended = np.asarray(episode["terminal"])
            if ended.ndim or ended.item() not in (False, True):
                raise ValueError(
                    f"episode {i}: terminal must be True or False, for its last step, got {episode['terminal']!r}"
                )
            part: dict[str, Any] = {"name": i, "behaviour": episode.get("behaviour")}
            part |= {key: episode[key] for key in ("states", "actions", "rewards")}
            part["rewards"] = _numbers(part, "rewards", np.float64)
            part["terminal"] = np.zeros(len(part["rewards"]), dtype=bool)
            part["terminal"][-1:] = bool(ended)
            parts.append(part)
        log, set_aside = lay(parts)
        if log is None:
            raise ValueError(NO_SUCCESSORS)
        return replace(log, set_aside=set_aside)

    @staticmethod
    def from_trajectories(batch: Any) -> Log:
        """Builds a log from a `marginax.trajectories.Trajectory`, one sequence [T] or a batch [..., T].

        Each sequence is cut into episodes where a step ended (`discounts` 0) or was `truncated`; the end of
        a sequence that did neither is a truncation. Steps that are not `valid` are dropped.
        """
        fields = ("states", "actions", "rewards", "discounts", "next_states", "truncated", "valid")

        def flat_rows(values: Any) -> np.ndarray:
            array = np.atleast_1d(np.asarray(values))
            return array.reshape(-1, array.shape[-1])

        columns = {k: flat_rows(getattr(batch, k)) for k in fields}
        valid = columns.pop("valid").astype(bool)
        last = np.zeros_like(valid)
        ends = valid.shape[1] - 1 - np.argmax(valid[:, ::-1], axis=1)
        last[np.arange(len(valid)), ends] = True
        flat = {k: v[valid] for k, v in columns.items()}
        if not valid.any():
            raise ValueError("the trajectories hold no valid step")
        done = (flat["discounts"] == 0) | flat["truncated"].astype(bool) | last[valid]
        behaviour = None
        if getattr(batch, "behaviour", None) is not None:
            behaviour = flat_rows(batch.behaviour)[valid].astype(np.float64)
        return Log(
            states=flat["states"].astype(np.int64),
            actions=flat["actions"].astype(np.int64),
            rewards=flat["rewards"].astype(np.float64),
            next_states=flat["next_states"].astype(np.int64),
            terminal=flat["discounts"] == 0,
            offsets=np.concatenate([[0], np.flatnonzero(done) + 1]),
            behaviour=behaviour,
        ).checked()

    def checked(self) -> Log:
        """This log, after the checks that every source shares.

        Raises:
            ValueError: naming the episode and step of the first broken entry.
        """
        n = len(self)
        if n == 0:
            raise ValueError(EMPTY)
        for name in _COLUMNS:
            values = getattr(self, name)
            if values is not None and values.shape[:1] != (n,):
                raise ValueError(
                    f"{name} must have {n} rows, as many as there are rewards, got shape {values.shape}"
                )
        if self.terminal.dtype != bool:
            raise ValueError(f"terminal must be an array of bool, got {self.terminal.dtype}")
        if self.offsets[0] != 0 or self.offsets[-1] != n or (self.lengths < 1).any():
            raise ValueError(f"offsets must rise from 0 to the number of rows, {n}, got {self.offsets}")
        if self.names is not None and len(self.names) != self.num_episodes:
            raise ValueError(f"names must be those of {self.num_episodes} episodes, got {len(self.names)}")
        steps = (self.states, self.actions, self.rewards, self.next_states, self.terminal, self.offsets)
        check_steps(*steps, behaviour=self.behaviour, names=self.names)
        return self

    def where(self, row: int) -> str:
        """`episode E, step T` of a row, for messages."""
        return step_name(row, self.offsets, self.names)


def join(logs: list[Log]) -> Log:
    """One log of the episodes of several."""
    if len(logs) == 1:
        return logs[0]
    if not logs:
        raise ValueError(EMPTY)
    starts = np.cumsum([0] + [len(log) for log in logs])
    offsets = [log.offsets[:-1] + start for log, start in zip(logs, starts, strict=False)]
    if len({log.behaviour is None for log in logs}) > 1:
        raise ValueError(HALF_LOGGED)
    parts = {name: [getattr(log, name) for log in logs] for name in _COLUMNS}
    columns: dict[str, Any] = {
        name: None if any(x is None for x in part) else np.concatenate(part) for name, part in parts.items()
    }
    return Log(
        **columns,
        offsets=np.concatenate([*offsets, starts[-1:]]),
        names=[log.name(i) for log in logs for i in range(log.num_episodes)],
        set_aside=sum(log.set_aside for log in logs),
    )


def lay(episodes: Sequence[dict[str, Any]]) -> tuple[Log | None, int]:
    """Lays episodes of n transitions with n or n + 1 states end to end; returns what `assemble` does.

    Each is a dict of its name and columns: states, actions, rewards, terminal [n] and, where known, truncated, behaviour, rows.
    """
    if not episodes:
        raise ValueError(EMPTY)
    dtypes = {"rewards": np.float64, "terminal": bool, "behaviour": np.float64}
    parts: dict[str, list[Any]] = {name: [] for name in episodes[0] if name != "name"}
    extra = []
    for episode in episodes:
        part: dict[str, Any] = {
            name: None if episode[name] is None else _numbers(episode, name, dtypes.get(name))
            for name in parts
        }
        states, n = part.pop("states"), len(part["rewards"])
        check_lengths(episode["name"], states, n, **part)
        extra += [np.arange(len(states)) == n]
        if len(states) == n + 1:  # a last row without an action
            part = {k: None if v is None else np.concatenate([v, v[:1]]) for k, v in part.items()}
        for name, values in (part | {"states": states}).items():
            parts[name].append(values)
    names = [episode["name"] for episode in episodes]
    known = [values is not None for values in parts["behaviour"]]
    if any(known) and not all(known):
        name = names[known.index(False)]
        raise ValueError(f"episode {name}: behaviour probabilities are missing here but not elsewhere")
    for name in ("states", "actions"):
        shapes = {values.shape[1:] for values in parts[name]}
        if len(shapes) > 1:
            raise ValueError(f"{name} have different shapes in different episodes: {sorted(shapes)}")
    columns: dict[str, Any] = {
        name: None if part[0] is None else np.concatenate(part) for name, part in parts.items()
    }
    columns |= {name: as_indices_or_floats(columns[name]) for name in ("states", "actions")}
    return assemble(np.array([len(x) for x in extra]), names, columns, np.concatenate(extra))


def _numbers(episode: dict[str, Any], name: str, dtype: Any) -> np.ndarray:
    try:
        found = np.asarray(episode[name])
        if found.size and found.dtype.kind not in "biuf":
            raise ValueError(f"got {found.dtype}")
        if found.ndim != 1 and (found.ndim == 0 or name not in ("states", "actions")):
            raise ValueError(f"one for each step, got shape {found.shape}")
        return found.astype(dtype) if dtype is not None else found
    except ValueError as error:
        raise ValueError(f"episode {episode['name']}: {name} must be numbers: {error}") from None


def assemble(
    lengths: np.ndarray,
    names: Sequence[Any] | np.ndarray,
    columns: Mapping[str, Any],
    extra: np.ndarray,
) -> tuple[Log | None, int]:
    """The checked log of rows [n] laid end to end, and the number of steps that were set aside.

    This is the one place that knows the contract of an episode: N steps with N + 1 states (its last row is `extra`, a state
    without an action), or N steps with `next_states`, or N steps alone. In the last case the successor of a step is the state
    of the next row; the last step of a truncated episode then has none and is set aside.

    Args:
        lengths: [E] rows of each episode.
        names: [E] their names, for messages.
        columns: states, actions, rewards, terminal [n] and, where known, truncated, next_states, behaviour, rows; as in `Log`.
        extra: [n] rows that hold a final state and nothing else.

    Raises:
        ValueError: naming the episode and step of the first broken row.
    """
    states, n = columns["states"], len(extra)
    place = Place(lengths, names)
    last = np.cumsum(lengths) - 1
    place.refuse(extra & (place.step == 0), "the episode has an observation and no steps")
    ends = np.zeros(n, dtype=bool)
    ends[last - extra[last]] = True  # the last transition of each episode
    terminal = columns["terminal"] & ~extra
    following, known = np.concatenate([states[1:], states[:1]]), np.ones(n, dtype=bool)
    if columns.get("next_states") is not None:
        inner = np.ones(n, dtype=bool)
        inner[last] = False
        differs = columns["next_states"] != following
        differs = differs if differs.ndim == 1 else differs.any(axis=1)
        place.refuse(
            inner & differs & ~terminal,
            "next_state is not the state of the next row: are the columns shifted by one step?",
        )
        following = columns["next_states"]
    else:
        known[last] = False
    place.refuse(terminal & ~ends, "the step is terminal, yet more steps of the episode follow")
    if columns.get("truncated") is not None:
        truncated = columns["truncated"] & ~extra
        place.refuse(truncated & ~ends, "the step is truncated, yet more steps of the episode follow")
        place.refuse(ends & ~terminal & ~truncated, "the last step is neither terminal nor truncated")
        place.refuse(terminal & truncated, "the step is both terminal and truncated: it can only be one")
    lost = ends & ~terminal & ~known
    keep = ~extra & ~lost
    if not keep.any():
        return None, int(lost.sum())
    size = np.bincount(place.index[keep], minlength=len(lengths))
    given = {name: columns.get(name) for name in _COLUMNS} | {"next_states": following, "terminal": terminal}
    kept: dict[str, Any] = {name: None if x is None else x[keep] for name, x in given.items()}
    left = np.flatnonzero(size)
    names = names[left] if isinstance(names, np.ndarray) else [names[i] for i in left.tolist()]
    log = Log(
        **kept,
        offsets=np.concatenate([[0], np.cumsum(size[left])]),
        names=names,
    )
    return log.checked(), int(lost.sum())


class Accumulator:
    """What a pass over a log gathers, chunk by chunk; it adds up between parts of the log.

    Each has `update(log, …, first)`, which adds a chunk whose first episode has that number in the whole log. `added` names what
    `merge` adds: numbers, arrays, sparse tables, and other accumulators.
    """

    added: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Any) -> None:
        """Adds what was gathered from other chunks of the same log."""
        for name in self.added:
            mine, more = getattr(self, name), getattr(other, name)
            if isinstance(mine, Accumulator):
                mine.merge(more)
            elif mine is not None:
                setattr(self, name, mine + more)


class Place:
    """Names rows by episode and step in messages."""

    def __init__(self, lengths: np.ndarray, names: Sequence[Any] | np.ndarray) -> None:
        self.offsets, self.names = np.concatenate([[0], np.cumsum(lengths)]), names
        self.index = np.repeat(np.arange(len(lengths)), lengths)
        self.step = np.arange(len(self.index)) - np.repeat(self.offsets[:-1], lengths)

    def refuse(self, bad: np.ndarray, message: str, values: np.ndarray | None = None) -> None:
        """Raises for the first row that is bad."""
        if bad.any():
            row = int(np.argmax(bad))
            text = message if values is None else message.format(values[row])
            raise ValueError(f"{step_name(row, self.offsets, self.names)}: {text}")

    def name(self, row: int) -> Any:
        """The name of the episode of a row."""
        return self.names[self.index[row]]


def as_indices_or_floats(x: np.ndarray) -> np.ndarray:
    """Indices as int64 [N]; anything else as float32 [N, D] (float64 is kept)."""
    x = np.asarray(x)
    if x.dtype.kind in "iub" and (x.ndim == 1 or (x.ndim == 2 and x.shape[1] == 1)):
        return x.reshape(len(x)).astype(np.int64)
    floats = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    return floats.reshape(len(x), -1)


def divided(numerator: Any, denominator: Any) -> np.ndarray:
    """Entry by entry; zero where the denominator is not positive."""
    shape = np.broadcast_shapes(np.shape(numerator), np.shape(denominator))
    return np.divide(numerator, denominator, out=np.zeros(shape), where=denominator > 0)


def add_at(table: np.ndarray, cell: np.ndarray, values: np.ndarray) -> None:
    """Adds values to the cells [N] of a table, numbered as in memory."""
    table += np.bincount(cell, values, minlength=table.size).reshape(table.shape)
