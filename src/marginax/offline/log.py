"""A log of episodes as flat arrays, which every estimator of this room reads, and the one place that checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from marginax.trajectories import check_lengths, check_steps, step_name

NO_SUCCESSORS = "nothing is left of the log: its episodes have one step, are truncated and come without their final observation"
EMPTY = "the log is empty: there is no transition in it"
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

    def name(self, episode: int) -> str:
        """The name of an episode, as error messages give it."""
        return str(episode if self.names is None else self.names[episode])

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
        chosen = np.asarray(episodes, dtype=np.int64)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)

        def take(x: np.ndarray | None) -> np.ndarray | None:
            return None if x is None else x[rows]

        return Log(
            states=self.states[rows],
            actions=self.actions[rows],
            rewards=self.rewards[rows],
            next_states=self.next_states[rows],
            terminal=self.terminal[rows],
            offsets=offsets,
            behaviour=take(self.behaviour),
            rows=take(self.rows),
            names=[self.name(int(i)) for i in chosen],
        )

    def first_steps(self, horizon: int) -> Log:
        """The first `horizon` steps of each episode; what is cut off counts as ended, because nothing after it is asked for."""
        if int(self.lengths.max()) <= horizon:
            return self
        times = self.times
        keep = times < horizon
        terminal = self.terminal | (times == horizon - 1)
        return replace(
            self,
            states=self.states[keep],
            actions=self.actions[keep],
            rewards=self.rewards[keep],
            next_states=self.next_states[keep],
            terminal=terminal[keep],
            offsets=np.concatenate([[0], np.cumsum(np.minimum(self.lengths, horizon))]),
            behaviour=None if self.behaviour is None else self.behaviour[keep],
            rows=None if self.rows is None else self.rows[keep],
        )

    @staticmethod
    def from_episodes(episodes: Sequence[dict[str, Any]]) -> Log:
        """Builds a log from episodes given one by one.

        Args:
            episodes: each a dict with `states` (N or N+1 of them), `actions` [N], `rewards` [N], `terminal`
                (did the last step end the episode?) and, if known, `behaviour` [N].

        Raises:
            ValueError: naming the episode and step where the data are broken.
        """
        builder = EpisodeBuilder()
        for i, episode in enumerate(episodes):
            n = len(episode["rewards"])
            terminal = np.zeros(n, dtype=bool)
            if n:
                terminal[-1] = bool(episode["terminal"])
            builder.add(
                i,
                np.asarray(episode["states"]),
                np.asarray(episode["actions"]),
                np.asarray(episode["rewards"], dtype=np.float64),
                terminal,
                behaviour=episode.get("behaviour"),
            )
        log = builder.build()
        if log is None:
            raise ValueError(NO_SUCCESSORS)
        return log

    @staticmethod
    def from_trajectories(batch: Any) -> Log:
        """Builds a log from a `marginax.trajectories.Trajectory`, one sequence [T] or a batch [B, T].

        Each sequence is cut into episodes where a step ended (`discounts` 0) or was `truncated`; the end of
        a sequence that did neither is a truncation. Steps that are not `valid` are dropped.
        """
        fields = ("states", "actions", "rewards", "discounts", "next_states", "truncated", "valid")
        columns = {k: np.atleast_2d(np.asarray(getattr(batch, k))) for k in fields}
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
            behaviour = np.atleast_2d(np.asarray(batch.behaviour))[valid].astype(np.float64)
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
        if len(self) == 0:
            raise ValueError(EMPTY)
        check_steps(
            self.states,
            self.actions,
            self.rewards,
            self.next_states,
            self.terminal,
            self.offsets,
            behaviour=self.behaviour,
            names=self.names,
        )
        return self

    def where(self, row: int) -> str:
        """`episode E, step T` of a row, for messages."""
        return step_name(row, self.offsets, self.names)


class EpisodeBuilder:
    """Collects episodes one by one and lays them end to end; `dropped` is what `assemble` set aside."""

    def __init__(self) -> None:
        self._parts: list[dict[str, Any]] = []
        self._names: list[Any] = []
        self.steps = 0
        self.dropped = 0

    def add(
        self,
        name: Any,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminal: np.ndarray,
        *,
        truncated: np.ndarray | None = None,
        behaviour: Any = None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Adds an episode of n transitions with n or n + 1 states."""
        n = len(rewards)
        part: dict[str, Any] = {
            "actions": np.asarray(actions),
            "rewards": np.asarray(rewards, dtype=np.float64),
            "terminal": np.asarray(terminal, dtype=bool),
            "truncated": truncated,
            "behaviour": None if behaviour is None else np.asarray(behaviour, dtype=np.float64),
            "rows": rows,
        }
        check_lengths(name, states, n, **part)
        if len(states) == n + 1:  # a last row without an action
            part = {k: None if v is None else np.concatenate([v, v[:1]]) for k, v in part.items()}
        self._parts.append(part | {"states": np.asarray(states), "extra": len(states) == n + 1})
        self._names.append(name)
        self.steps += n

    def build(self) -> Log | None:
        """The checked log of all episodes added so far; None if nothing is left of them."""
        if not self._parts:
            raise ValueError(EMPTY)
        known = [part["behaviour"] is not None for part in self._parts]
        if any(known) and not all(known):
            name = self._names[known.index(False)]
            raise ValueError(f"episode {name}: behaviour probabilities are missing here but not elsewhere")
        shapes = {np.shape(part["states"])[1:] for part in self._parts}
        if len(shapes) > 1:
            raise ValueError(f"observations have different shapes in different episodes: {sorted(shapes)}")

        def joined(key: str) -> Any:
            parts = [part[key] for part in self._parts]
            return None if parts[0] is None else np.concatenate(parts)

        lengths = np.array([len(part["states"]) for part in self._parts])
        extra = np.zeros(int(lengths.sum()), dtype=bool)
        extra[np.cumsum(lengths) - 1] = [part["extra"] for part in self._parts]
        log, dropped = assemble(
            lengths,
            self._names,
            states=as_indices_or_floats(joined("states")),
            actions=as_indices_or_floats(joined("actions")),
            rewards=joined("rewards"),
            terminal=joined("terminal"),
            truncated=joined("truncated"),
            behaviour=joined("behaviour"),
            rows=joined("rows"),
            extra=extra,
        )
        self.dropped += dropped
        return log


def assemble(
    lengths: np.ndarray,
    names: Sequence[Any] | np.ndarray,
    *,
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    terminal: np.ndarray,
    truncated: np.ndarray | None = None,
    next_states: np.ndarray | None = None,
    behaviour: np.ndarray | None = None,
    rows: np.ndarray | None = None,
    extra: np.ndarray | None = None,
) -> tuple[Log | None, int]:
    """The checked log of rows [n] laid end to end, and the number of steps that were set aside.

    This is the one place that knows the contract of an episode: N steps with N + 1 states (its last row is `extra`, a state
    without an action), or N steps with `next_states`, or N steps alone. In the last case the successor of a step is the state
    of the next row; the last step of a truncated episode then has none and is set aside.

    Args:
        lengths: [E] rows of each episode.
        names: [E] their names, for messages.
        extra: [n] rows that hold a final state and nothing else.
        states, actions, rewards, terminal, truncated, next_states, behaviour, rows: [n], as in `Log`.

    Raises:
        ValueError: naming the episode and step of the first broken row.
    """
    n = len(rewards)
    place = Place(lengths, names)
    last = np.cumsum(lengths) - 1
    extra = np.zeros(n, dtype=bool) if extra is None else extra
    place.refuse(extra & (place.step == 0), "the episode has an observation and no steps")
    ends = np.zeros(n, dtype=bool)
    ends[last - extra[last]] = True  # the last transition of each episode
    terminal = terminal & ~extra
    following, known = np.concatenate([states[1:], states[:1]]), np.ones(n, dtype=bool)
    if next_states is not None:
        inner = np.ones(n, dtype=bool)
        inner[last] = False
        differs = next_states != following
        differs = differs if differs.ndim == 1 else differs.any(axis=1)
        place.refuse(
            inner & differs & ~terminal,
            "next_state is not the state of the next row: are the columns shifted by one step?",
        )
        following = next_states
    else:
        known[last] = False
    place.refuse(terminal & ~ends, "the step is terminal, yet more steps of the episode follow")
    if truncated is not None:
        truncated = truncated & ~extra
        place.refuse(truncated & ~ends, "the step is truncated, yet more steps of the episode follow")
        place.refuse(ends & ~terminal & ~truncated, "the last step is neither terminal nor truncated")
        place.refuse(terminal & truncated, "the step is both terminal and truncated: it can only be one")
    lost = ends & ~terminal & ~known
    keep = ~extra & ~lost
    if not keep.any():
        return None, int(lost.sum())
    size = np.bincount(place.index[keep], minlength=len(lengths))
    kept_names = (
        np.asarray(names)[size > 0]
        if isinstance(names, np.ndarray)
        else [name for name, some in zip(names, size > 0, strict=True) if some]
    )
    log = Log(
        states=states[keep],
        actions=actions[keep],
        rewards=rewards[keep],
        next_states=following[keep],
        terminal=terminal[keep],
        offsets=np.concatenate([[0], np.cumsum(size[size > 0])]),
        behaviour=None if behaviour is None else behaviour[keep],
        rows=None if rows is None else rows[keep],
        names=kept_names,
    )
    return log.checked(), int(lost.sum())


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
