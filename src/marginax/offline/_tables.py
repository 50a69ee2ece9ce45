"""Parquet and CSV logs with one row a transition, streamed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from marginax.offline._log import Log
from marginax.offline._sources import CHUNK, Source

NAMES = {
    "episode": ("episode", "episode_id"),
    "step": ("step", "t", "time", "timestep"),
    "state": ("state", "observation", "obs"),
    "next_state": ("next_state", "next_observation", "next_obs"),
    "action": ("action",),
    "reward": ("reward",),
    "terminal": ("terminal", "terminated", "termination"),
    "truncated": ("truncated", "truncation", "timeout"),
    "behaviour": (
        "behaviour",
        "behavior",
        "behaviour_probability",
        "behavior_probability",
        "behaviour_density",
        "behavior_density",
        "propensity",
        "pscore",
    ),
}
_VECTORS = ("state", "next_state", "action")


class TableSource(Source):
    """A `.parquet` or `.csv` file with a row for each transition, episodes one after another.

    Columns (other names are ignored; `NAMES` lists the accepted spellings):
        episode, step: which episode, and the step within it, counted from 0 or 1 (`step` may be missing).
        state: an index; or observation columns `obs_0`, `obs_1`, …; in Parquet also a list column.
        action: an index; or `action_0`, …; or a list column.
        reward, terminal, and optionally truncated, behaviour, next_state (or `next_obs_0`, …).

    An episode may end with one row that has a state and no action (N + 1 observations for N steps). Without
    it and without `next_state`, the successor is the state of the next row; the last step of a truncated
    episode then has none and is set aside. Without a `truncated` column, an episode whose last row is not
    terminal counts as truncated.
    """

    def __init__(self, path: str | Path, chunk: int = CHUNK) -> None:
        super().__init__()
        self.path, self.chunk = Path(path), chunk
        self.name = self.path.name
        self.is_csv = self.path.suffix.lower() == ".csv"
        _pyarrow()
        if not self.is_csv:
            import pyarrow.parquet as pq

            with pq.ParquetFile(self.path) as file:
                self.total = file.metadata.num_rows
        self.columns = _assign(self._schema())

    def _schema(self) -> list[str]:
        _pyarrow()
        if self.is_csv:
            import pyarrow.csv as csv

            with csv.open_csv(self.path) as reader:
                return list(reader.schema.names)
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            return list(file.schema_arrow.names)

    def _batches(self) -> Iterator[Any]:
        needed = [name for group in self.columns.values() for name in group]
        if self.is_csv:
            import pyarrow.csv as csv

            options = csv.ConvertOptions(include_columns=needed)
            with csv.open_csv(
                self.path, read_options=csv.ReadOptions(block_size=1 << 24), convert_options=options
            ) as reader:
                yield from reader
            return
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path) as file:
            yield from file.iter_batches(batch_size=self.chunk // 2, columns=needed)

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes.

        Raises:
            ValueError: naming the episode and step where the file is broken.
        """
        reader = _Reader(self.columns)
        pending: list[dict[str, np.ndarray]] = []
        rows = 0
        for batch in self._batches():
            pending.append(reader.convert(batch))
            rows += batch.num_rows
            if rows >= self.chunk:
                block = _concatenate(pending)
                episode = block["episode"]
                changes = np.flatnonzero(episode[1:] != episode[:-1])
                if len(changes):
                    cut = int(changes[-1]) + 1
                    yield from reader.logs({k: v[:cut] for k, v in block.items()})
                    block = {k: v[cut:] for k, v in block.items()}
                pending, rows = [block], len(block["episode"])
        if rows == 0:
            raise ValueError(f"{self.name} is empty: it has no rows")
        yield from reader.logs(_concatenate(pending))
        if reader.dropped:
            self.notes = [
                f"{reader.dropped} truncated episodes came without their final observation: "
                "their last step was set aside"
            ]


class _Reader:
    """Turns blocks of rows into logs; remembers what must be the same in the whole file."""

    def __init__(self, columns: dict[str, list[str]]) -> None:
        self.columns = columns
        self.row = 0
        self.base: int | None = None
        self.dropped = 0
        self.discrete: dict[str, bool] = {}
        self.seen: set[Any] = set()

    def convert(self, batch: Any) -> dict[str, np.ndarray]:
        block = {}
        for role, names in self.columns.items():
            parts = [_array(batch.column(name), name) for name in names]
            if len(parts) > 1:
                block[role] = np.stack([part.astype(np.float64) for part in parts], axis=1)
            else:
                block[role] = parts[0]
        return block

    def logs(self, block: dict[str, np.ndarray]) -> Iterator[Log]:
        episode = block["episode"]
        n = len(episode)
        rows = self.row + np.arange(n)
        self.row += n
        starts = np.concatenate([[0], np.flatnonzero(episode[1:] != episode[:-1]) + 1])
        lengths = np.diff(np.append(starts, n))
        names = episode[starts]
        self._check_names(names)
        place = _Place(episode, starts, lengths)
        step = place.step
        if "step" in block:
            self._check_steps(block["step"], place)

        last = starts + lengths - 1
        actions = block["action"]
        missing = _missing(actions)
        extra = np.zeros(n, dtype=bool)
        extra[last] = missing[last]
        place.refuse(missing & ~extra, "the action is missing, and more steps of the episode follow")
        place.refuse(extra & (step == 0), "the episode has an observation and no steps")

        states = self._indices("state", block["state"], place)
        final = last - extra[last]  # row of the last transition of each episode
        terminal = _flags(block["terminal"], "terminal", place, extra)
        following = np.concatenate([states[1:], states[:1]])
        known = np.ones(n, dtype=bool)
        if "next_state" in block:
            given = self._indices("next_state", block["next_state"], place, extra | terminal)
            inner = np.ones(n, dtype=bool)
            inner[last] = False
            differs = (given != following) if given.ndim == 1 else (given != following).any(axis=1)
            place.refuse(
                inner & differs & ~terminal,
                "next_state is not the state of the next row: are the columns shifted by one step?",
            )
            following = given
        else:
            known[last] = False
        ends = np.zeros(n, dtype=bool)
        ends[final] = True
        place.refuse(terminal & ~ends, "the step is terminal, yet more steps of the episode follow")
        if "truncated" in block:
            truncated = _flags(block["truncated"], "truncated", place, extra)
            place.refuse(truncated & ~ends, "the step is truncated, yet more steps of the episode follow")
            place.refuse(ends & ~terminal & ~truncated, "the last step is neither terminal nor truncated")

        keep = ~extra
        lost = ends & ~terminal & ~known & ~np.roll(extra, -1)
        if lost.any():
            keep &= ~lost
            self.dropped += int(lost.sum())
        index = np.repeat(np.arange(len(starts)), lengths)[keep]
        size = np.bincount(index, minlength=len(starts))
        if not keep.any():
            return
        yield Log(
            states=states[keep],
            actions=self._indices("action", actions[keep], place),
            rewards=_floats(block["reward"][keep], "reward"),
            next_states=following[keep],
            terminal=terminal[keep],
            offsets=np.concatenate([[0], np.cumsum(size[size > 0])]),
            behaviour=_floats(block["behaviour"][keep], "behaviour") if "behaviour" in block else None,
            rows=rows[keep],
            names=names[size > 0],
        ).checked()

    def _check_names(self, names: np.ndarray) -> None:
        fresh = set(names.tolist())
        again = self.seen & fresh
        if not again and len(fresh) < len(names):
            unique, times = np.unique(names, return_counts=True)
            again = set(unique[times > 1].tolist())
        if again:
            raise ValueError(
                f"episode {next(iter(again))} appears again after other episodes: sort the rows by episode and step"
            )
        self.seen |= fresh

    def _check_steps(self, given: np.ndarray, place: _Place) -> None:
        steps = _floats(given, "step")
        if self.base is None:
            self.base = int(steps[0]) if steps[0] in (0.0, 1.0) else 0
        bad = steps != place.step + self.base
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"episode {place.episode[row]}: step {steps[row]:g} where {place.step[row] + self.base} was "
                "expected; steps must count up by one from the first row of each episode"
            )

    def _indices(
        self, role: str, values: np.ndarray, place: _Place, ignore: np.ndarray | None = None
    ) -> np.ndarray:
        kind = "state" if role == "next_state" else role
        if values.ndim == 2:
            return values if values.dtype == np.float64 else values.astype(np.float32)
        if values.dtype.kind in "iub":
            self.discrete.setdefault(kind, True)
            if self.discrete[kind]:
                return values.astype(np.int64)
        floats = _floats(values, role)
        whole = np.isfinite(floats) & (floats == np.floor(floats))
        if ignore is not None:
            whole |= ignore
        self.discrete.setdefault(kind, bool(whole.all()) or self.columns[role][0] == "state")
        if not self.discrete[kind]:
            return floats[:, None]
        if len(whole) == len(place.episode):
            place.refuse(
                ~whole, role + " {} is not an index; name observation columns obs_0, obs_1, …", floats
            )
        elif not whole.all():
            raise ValueError(f"{role} {floats[np.argmin(whole)]} is not an index")
        return np.where(np.isfinite(floats), floats, 0.0).astype(np.int64)


class _Place:
    """Names rows by episode and step in messages."""

    def __init__(self, episode: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> None:
        self.episode = episode
        self.step = np.arange(len(episode)) - np.repeat(starts, lengths)

    def refuse(self, bad: np.ndarray, message: str, values: np.ndarray | None = None) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            text = message if values is None else message.format(values[row])
            raise ValueError(f"episode {self.episode[row]}, step {self.step[row]}: {text}")


def _assign(names: list[str]) -> dict[str, list[str]]:
    """Finds the columns for each role, vectors in the order of their numbers."""
    found: dict[str, list[str]] = {}
    lower = {name.lower(): name for name in names}
    for role, spellings in NAMES.items():
        single = [lower[s] for s in spellings if s in lower]
        if len(single) > 1:
            raise ValueError(f"columns {single[0]!r} and {single[1]!r} both give the {role}; keep one")
        if single:
            found[role] = single
        elif role in _VECTORS:
            stems = "|".join(map(re.escape, spellings))
            matches = [
                (re.fullmatch(rf"(?:{stems})[_\[]?(\d+)\]?", key), name) for key, name in lower.items()
            ]
            vector = sorted((int(match.group(1)), name) for match, name in matches if match)
            if vector:
                found[role] = [name for _, name in vector]
    if "terminal" not in found and "done" in lower:
        raise ValueError(
            "the column 'done' does not say whether an episode terminated or was cut off: "
            "give 'terminal' and 'truncated'"
        )
    for role in ("episode", "state", "action", "reward", "terminal"):
        if role not in found:
            raise ValueError(f"there is no column for the {role} (looked for {', '.join(NAMES[role])})")
    return found


def _array(column: Any, name: str) -> np.ndarray:
    import pyarrow as pa

    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = column.to_pylist()
        width = max((len(row) for row in rows if row is not None), default=0)
        for i, row in enumerate(rows):
            if row is not None and len(row) != width:
                raise ValueError(f"column {name!r}: row {i} has {len(row)} entries where others have {width}")
        return np.array([[np.nan] * width if row is None else row for row in rows], dtype=np.float64)
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    return column.to_numpy(zero_copy_only=False)


def _concatenate(blocks: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    if len(blocks) == 1:
        return blocks[0]
    return {role: np.concatenate([block[role] for block in blocks]) for role in blocks[0]}


def _missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        return np.isnan(values) if values.ndim == 1 else np.isnan(values).all(axis=1)
    if values.dtype == object:
        return np.array([value is None for value in values])
    return np.zeros(len(values), dtype=bool)


def _floats(values: np.ndarray, name: str) -> np.ndarray:
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r} holds something that is not a number") from error


def _flags(values: np.ndarray, name: str, place: _Place, ignore: np.ndarray) -> np.ndarray:
    if values.dtype == bool:
        return values & ~ignore
    if values.dtype == object:
        values = np.array([np.nan if value is None else value for value in values], dtype=object)
    floats = _floats(values, name)
    bad = ~np.isin(floats, (0.0, 1.0)) & ~ignore
    place.refuse(bad, name + " is {}, not true or false", floats)
    return (floats == 1.0) & ~ignore


def _pyarrow() -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError('Parquet and CSV logs need `pip install "marginax[offline]"`') from error
