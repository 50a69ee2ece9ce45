"""Step 1, open: anything that can hand out its episodes in chunks, again and again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from marginax.offline.log import NO_SUCCESSORS, Log, join

LARGEST = 100_000_000  # index for which a table is still made
CHUNK = 500_000  # transitions held at a time
Encoding = Mapping[str, list[str]] | Literal["sorted"] | None
"""The order of labels of `state` and `action`; `sorted` is that of the alphabet."""
FILES = "a .parquet, .csv, .csv.gz or .npz file, nor a folder of them, nor a Minari folder"


class Source:
    """A log that is read in chunks of whole episodes; each call of `chunks` starts a new pass.

    Attributes:
        name: shown in reports.
        total: number of rows if known before reading, for progress.
        notes: what was done to the data while it was read, in words.
        sizes: (S, A) where the source knows them beforehand (Minari's spaces), else None.
        encoding: labels of states and of actions in the order of their indices, where the data have names for them.
        unsaid: `state` or `action`, where labels were given without an order; they are sorted.
        dropped: how many steps were set aside, known after a pass.
    """

    name = "log"
    total: int | None = None
    sizes: tuple[int, int] | None = None
    encoding: dict[str, list[str]] | None = None
    unsaid: tuple[str, ...] = ()
    dropped = 0
    _found: tuple[int, int] | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes."""
        raise NotImplementedError

    def rows(self) -> int | None:
        """Number of rows that a policy given by rows must have."""
        return self.total

    def first(self) -> Log:
        """The first chunk.

        Raises:
            ValueError: if there is none.
        """
        for log in self.chunks():
            return log
        raise ValueError(NO_SUCCESSORS)

    def table_sizes(self) -> tuple[int, int]:
        """(S, A): as declared by the source, or as many as there are labels, or one more than the largest index in the log."""
        known = self.sizes or self._found
        if known is not None:
            return known
        states, actions = (len((self.encoding or {}).get(kind, ())) for kind in ("state", "action"))
        for log in self.chunks():
            following = log.following
            for name, values in (("state", log.states), ("next state", following), ("action", log.actions)):
                if int(values.max()) > LARGEST:
                    row = int(np.argmax(values > LARGEST))
                    raise ValueError(f"{log.where(row)}: {name} {values[row]} is too large for an index")
            states = max(states, int(log.states.max()) + 1, int(following.max()) + 1)
            actions = max(actions, int(log.actions.max()) + 1)
        self._found = (states, actions)
        return self._found

    def set_aside(self, episodes: int) -> None:
        """Notes how many episodes lost their last step."""
        self.dropped = episodes
        if episodes:
            self.notes = [
                f"{episodes:,} truncated episode{'s' if episodes > 1 else ''} came without the final observation: the last step was "
                "set aside; episodes of one step were dropped"
            ]

    def share_set_aside(self, steps: int, episodes: int, truncated: int) -> float:
        """The share of steps that were set aside while other episodes kept their last one, from the counts of what is left.

        Where every episode lost its last step, each is just one step shorter, and the share is 0. Else what a step led to decided
        whether it was kept: those that ended an episode were.
        """
        same = truncated == episodes and truncated <= self.dropped
        return 0.0 if same else self.dropped / (steps + self.dropped)

    def read(self) -> Log:
        """The whole log at once, for methods that need it in memory."""
        return join(list(self.chunks()))


class MemorySource(Source):
    """A log that is already in memory."""

    def __init__(self, log: Log, name: str = "log") -> None:
        super().__init__()
        rows = np.arange(len(log)) if log.rows is None else log.rows
        self.log, self.name, self.total = replace(log.checked(), rows=rows), name, len(log)
        self.set_aside(log.set_aside)

    def chunks(self) -> Iterator[Log]:
        """Yields the log, once."""
        yield self.log


def open_data(data: Any, encoding: Encoding = None) -> Source:
    """A source for `data`.

    Args:
        data: a `Log`, a `Trajectory`, a pandas or polars frame, a pyarrow table, a dict of columns; or a string or path: a
            `.parquet`, `.csv`, `.csv.gz` or `.npz` file with one row per transition, a folder of such files, a Minari folder,
            the id of a Minari dataset, or an address such as `s3://bucket/folder` of Parquet files.
        encoding: the labels of `state` and `action` in the order of their indices, for tables that hold labels; or `sorted`.
            Policies that have an order of states or actions of their own are refused without it.

    Raises:
        ValueError: if it is none of these.
        FileNotFoundError: if a path or id does not exist.

    >>> log = Log.from_episodes([dict(states=[0, 1], actions=[0], rewards=[1.], terminal=True)])
    >>> len(open_data(log).read())
    1
    """
    from marginax.offline.minari_files import open_minari
    from marginax.offline.tabular_files import open_tables

    check_encoding(encoding)
    if isinstance(data, Source):
        return data
    if isinstance(data, Log):
        return MemorySource(data)
    if hasattr(data, "discounts") and hasattr(data, "next_states"):
        return MemorySource(Log.from_trajectories(data), "trajectories")
    table = open_tables(data, encoding)
    if table is not None:
        return table
    if encoding is not None:
        raise ValueError("an encoding needs a .parquet, .csv or .npz file, or a folder of them")
    if not isinstance(data, str | Path):
        raise ValueError(
            f"data must be a Log, a Trajectory, a frame, a file or a Minari dataset, not {type(data).__name__}"
        )
    return open_minari(data)


def check_encoding(encoding: Any) -> None:
    """Refuses what is not an order of labels.

    Raises:
        ValueError: if it is neither None, `sorted`, nor a mapping of `state` and `action` to lists of different words.

    >>> check_encoding({"state": ["home", "home"]})
    Traceback (most recent call last):
    ValueError: encoding: the state 'home' is given twice
    """
    if encoding is None or encoding == "sorted":
        return
    if not isinstance(encoding, Mapping):
        raise ValueError(
            f"encoding must be 'sorted' or a mapping of state and action to lists, got {encoding!r}"
        )
    for kind, labels in encoding.items():
        if kind not in ("state", "action"):
            raise ValueError(f"encoding has the key {kind!r}; its keys are 'state' and 'action'")
        if not isinstance(labels, list | tuple) or not all(isinstance(label, str) for label in labels):
            raise ValueError(f"encoding: {kind} must be a list of strings, got {labels!r}")
        again = [label for label, times in Counter(labels).items() if times > 1]
        if again:
            raise ValueError(f"encoding: the {kind} {again[0]!r} is given twice")
