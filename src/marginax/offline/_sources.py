"""Where logs come from: anything that can hand out its episodes in chunks, again and again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from marginax.offline._log import Log

CHUNK = 500_000  # transitions held at a time


class Source:
    """A log that is read in chunks of whole episodes; each call of `chunks` starts a new pass.

    Attributes:
        name: shown in reports.
        total: number of transitions if known before reading, for progress.
        notes: what was done to the data on the way in, in words.
        sizes: (S, A) where the source knows them beforehand (Minari's spaces), else None.
    """

    name = "log"
    total: int | None = None
    sizes: tuple[int, int] | None = None

    def __init__(self) -> None:
        self.notes: list[str] = []

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes."""
        raise NotImplementedError

    def table_sizes(self) -> tuple[int, int]:
        """(S, A): as declared by the source, or one more than the largest index in the log."""
        if self.sizes is not None:
            return self.sizes
        states = actions = 0
        for log in self.chunks():
            going = log.next_states[~log.terminal]
            states = max(states, int(log.states.max()) + 1, int(going.max()) + 1 if len(going) else 0)
            actions = max(actions, int(log.actions.max()) + 1)
        self.sizes = (states, actions)
        return self.sizes

    def read(self) -> Log:
        """The whole log at once, for methods that need it in memory."""
        return join(list(self.chunks()))


class MemorySource(Source):
    """A log that is already in memory."""

    def __init__(self, log: Log, name: str = "log") -> None:
        super().__init__()
        self.log, self.name, self.total = log.checked(), name, len(log)

    def chunks(self) -> Iterator[Log]:
        """Yields the log, once."""
        yield self.log

    def read(self) -> Log:
        """The log."""
        return self.log


def join(logs: list[Log]) -> Log:
    """One log of the episodes of several."""
    if len(logs) == 1:
        return logs[0]
    if not logs:
        raise ValueError("the log is empty: there is no transition in it")
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


def open_data(data: Any) -> Source:
    """A source for `data`: a `Log`, a `Trajectory`, a Source, a Parquet or CSV file, or a Minari dataset.

    Args:
        data: an object of one of those types; or a string: the path of a `.parquet` or `.csv` file, of a
            Minari folder (with its `data` inside), or the id of a Minari dataset.

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
    if not isinstance(data, str | Path):
        raise ValueError(
            f"data must be a Log, a Trajectory, a file or a Minari dataset, not {type(data).__name__}"
        )
    path = Path(data)
    if path.suffix.lower() in (".parquet", ".pq", ".csv"):
        from marginax.offline._tables import TableSource

        if not path.is_file():
            raise FileNotFoundError(f"there is no file {str(path)!r}")
        return TableSource(path)
    from marginax.offline._minari import MinariSource

    return MinariSource(str(data))
