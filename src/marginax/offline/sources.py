"""Step 1, open: anything that can hand out its episodes in chunks, again and again.

A reader of files registers itself with `reads`; `open_data` asks the readers in turn. Readers import this module, and this
module imports readers by name, when data are opened.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from marginax.offline.log import EMPTY, NO_SUCCESSORS, Log

CHUNK = 500_000  # transitions held at a time
READERS = ("marginax.offline.tabular_files", "marginax.offline.minari_files")  # asked in this order
Reader = TypeVar("Reader", bound=Callable[..., Any])
_registry: dict[str, Callable[[Any], Source | None]] = {}


class Source:
    """A log that is read in chunks of whole episodes; each call of `chunks` starts a new pass.

    Attributes:
        name: shown in reports.
        total: number of rows if known before reading, for progress.
        notes: what was done to the data on the way in, in words.
        sizes: (S, A) where the source knows them beforehand (Minari's spaces), else None.
        encoding: labels of states and of actions in the order of their indices, where the data have names for them.
    """

    name = "log"
    total: int | None = None
    sizes: tuple[int, int] | None = None
    encoding: dict[str, list[str]] | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []

    _found: tuple[int, int] | None = None

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
        """(S, A): as declared by the source, or one more than the largest index in the log."""
        if self.sizes is not None:
            return self.sizes
        if self._found is not None:
            return self._found
        states = actions = 0
        for log in self.chunks():
            going = log.next_states[~log.terminal]
            states = max(states, int(log.states.max()) + 1, int(going.max()) + 1 if len(going) else 0)
            actions = max(actions, int(log.actions.max()) + 1)
        self._found = (states, actions)
        return self._found

    def read(self) -> Log:
        """The whole log at once, for methods that need it in memory."""
        return join(list(self.chunks()))


class MemorySource(Source):
    """A log that is already in memory."""

    def __init__(self, log: Log, name: str = "log") -> None:
        super().__init__()
        rows = np.arange(len(log)) if log.rows is None else log.rows
        self.log, self.name, self.total = replace(log.checked(), rows=rows), name, len(log)

    def chunks(self) -> Iterator[Log]:
        """Yields the log, once."""
        yield self.log

    def read(self) -> Log:
        """The log."""
        return self.log


def reads(reader: Reader) -> Reader:
    """Registers a reader: a function of data that returns a source, or None for data that are not its own."""
    _registry[reader.__module__] = reader
    return reader


def open_data(data: Any) -> Source:
    """A source for `data`.

    Args:
        data: a `Log`, a `Trajectory`, a pandas or polars frame, a dict of columns; or a string or path: a `.parquet`, `.csv`,
            `.csv.gz` or `.npz` file with one row per transition, a folder of such files, a Minari folder, or the id of a
            Minari dataset.

    Raises:
        ValueError: if it is none of these.
        FileNotFoundError: if a path or id does not exist.

    >>> log = Log.from_episodes([dict(states=[0, 1], actions=[0], rewards=[1.], terminal=True)])
    >>> len(open_data(log).read())
    1
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Log):
        return MemorySource(data)
    if hasattr(data, "discounts") and hasattr(data, "next_states"):
        return MemorySource(Log.from_trajectories(data), "trajectories")
    for module in READERS:
        importlib.import_module(module)
        source = _registry[module](data)
        if source is not None:
            return source
    if not isinstance(data, str | Path):
        raise ValueError(
            f"data must be a Log, a Trajectory, a frame, a file or a Minari dataset, not {type(data).__name__}"
        )
    raise FileNotFoundError(
        f"{str(data)!r} is neither a .parquet, .csv, .csv.gz or .npz file, nor a folder of them, nor a Minari folder, "
        "nor the id of a Minari dataset"
    )


def join(logs: list[Log]) -> Log:
    """One log of the episodes of several."""
    if len(logs) == 1:
        return logs[0]
    if not logs:
        raise ValueError(EMPTY)
    starts = np.cumsum([0] + [len(log) for log in logs])
    offsets = [log.offsets[:-1] + start for log, start in zip(logs, starts, strict=False)]

    def stack(name: str) -> Any:
        parts = [getattr(log, name) for log in logs]
        return None if any(part is None for part in parts) else np.concatenate(parts)

    return Log(
        states=stack("states"),
        actions=stack("actions"),
        rewards=stack("rewards"),
        next_states=stack("next_states"),
        terminal=stack("terminal"),
        offsets=np.concatenate([*offsets, starts[-1:]]),
        behaviour=stack("behaviour"),
        rows=stack("rows"),
        names=[log.name(i) for log in logs for i in range(log.num_episodes)],
    )
