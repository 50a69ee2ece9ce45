"""Logs with one row per transition: Parquet, CSV, NumPy archives, folders of them, and frames in memory; streamed."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marginax._folders import elsewhere, filesystem
from marginax.offline.columns import (
    LARGEST_WHOLE,
    SUFFIXES,
    Batch,
    Columns,
    columns_in_memory,
    floats,
    has_words,
    missing,
    open_columns,
    parquet_files,
    whole,
    words,
)
from marginax.offline.log import Log, Place, assemble
from marginax.offline.sources import CHUNK, Encoding, Source

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
        *(word + end for end in ("", "_probability", "_density") for word in ("behaviour", "behavior")),
        "propensity",
        "pscore",
    ),
}
_VECTORS = ("state", "next_state", "action")
_LABELLED = {"state": "state", "next_state": "state", "action": "action"}  # whose labels a column uses


class TableSource(Source):
    """Files or columns with a row for each transition, episodes one after another.

    Columns (other names are ignored; `NAMES` lists the accepted spellings):
        episode, step: which episode, and the step within it, counted from 0 or 1 (`step` may be missing).
        state: an index or a label; or observation columns `obs_0`, `obs_1`, …; in Parquet also a list column.
        action: an index or a label; or `action_0`, …; or a list column.
        reward, terminal, and optionally truncated, behaviour, next_state (or `next_obs_0`, …).

    An episode may end with one row that has a state and no action (see `marginax.offline.log.assemble`). Without a
    `truncated` column, an episode whose last row is not terminal counts as truncated. Labels of states and actions are
    numbered in sorted order, or as the given `encoding` says.
    """

    def __init__(
        self,
        parts: list[Columns],
        name: str,
        chunk: int = CHUNK,
        encoding: Encoding = None,
    ) -> None:
        super().__init__()
        self.parts, self.name, self.chunk = parts, name, chunk
        sizes = [part.total for part in parts]
        self.total = sum(n for n in sizes if n is not None) if None not in sizes else None
        self.columns = _assign(parts[0])
        for part in parts:
            _check(part, parts[0], self.columns)
            part.ids = frozenset(self.columns["episode"])
            part.reals = frozenset(
                name for role, names in self.columns.items() for name in names if _is_real(role, name)
            )
        self.first_row = 0
        self._find_labels(encoding)

    def share(self, numbers: Sequence[int]) -> TableSource:
        """Some of the files, that follow one another, as a source of their own that can be sent to another machine."""
        found = copy.copy(self)
        found.parts = [copy.copy(self.parts[k]) for k in numbers]
        for part in found.parts:
            part.path = part.path and (part.path if part.system else part.path.resolve())
        found.first_row = sum(part.total or 0 for part in self.parts[: numbers[0]])
        return found

    def episodes(self, number: int) -> tuple[int, np.ndarray]:
        """Rows of a file, and its episodes where they change, read from the column of episodes alone."""
        rows, found = 0, [np.empty(0)]
        for batch in self.share([number])._batches(("episode",)):
            column = batch["episode"]
            rows += len(column)
            changes = column[np.flatnonzero(np.append(True, column[1:] != column[:-1]))]
            found.append(changes[1:] if len(found) > 1 and changes[0] == found[-1][-1] else changes)
        return rows, np.concatenate(found[1:]) if rows else found[0]

    def rows(self) -> int | None:
        """Number of rows of all files, counted if need be."""
        if self.total is None:
            self.total = sum(len(batch["episode"]) for batch in self._batches(("episode",)))
        return self.total

    def _batches(self, roles: tuple[str, ...] | None = None) -> Iterator[Batch]:
        columns = {role: self.columns[role] for role in roles or self.columns}
        needed = [name for group in columns.values() for name in group]
        row, before, last = self.first_row, "", None
        for part in self.parts:
            for batch in part.batches(needed, self.chunk // 2):
                block = {}
                for role, names in columns.items():
                    block[role] = batch[names[0]]
                    shape = block[role].shape[1:]
                    if len(shape) > (role in _VECTORS):
                        raise ValueError(
                            f"{part.name}: column {names[0]!r} has an array of shape {shape} in each row, not a "
                            + ("vector" if role in _VECTORS else "single value")
                        )
                    if _is_entry(role, names[0]):
                        block[role] = np.stack([floats(batch[name], name, row) for name in names], axis=1)
                if "episode" in block:
                    episode = block["episode"]
                    if before and before != part.name and episode[0] == last and "step" not in self.columns:
                        raise ValueError(
                            f"{part.name} begins with episode {episode[0]}, with which {before} ends: without a step column "
                            "each file must hold whole episodes, with names that no other file has"
                        )
                    row, before, last = row + len(episode), part.name, episode[-1]
                yield block

    def _find_labels(self, given: Encoding) -> None:
        """The labels of columns that hold words, in one pass over those columns."""
        first = next(self._batches(), None)
        if first is None:
            return
        roles = tuple(r for r in _LABELLED if r in first and has_words(first[r]))
        if not roles:
            return
        labels: dict[str, set[str]] = {}
        for block in self._batches(roles):
            for role in roles:
                labels.setdefault(_LABELLED[role], set()).update(np.unique(words(block[role])).tolist())
        self.encoding = {kind: sorted(found - {""}) for kind, found in labels.items()}
        orders = {} if given is None or isinstance(given, str) else given
        if given != "sorted":
            self.unsaid = tuple(kind for kind in self.encoding if kind not in orders)
        for kind, known in orders.items():
            unknown = set(self.encoding.get(kind, ())) - set(known)
            if unknown:
                raise ValueError(
                    f"the encoding has no {kind} {sorted(unknown)[0]!r}, which {self.name} holds"
                )
            self.encoding[kind] = list(known)
        if set(self.encoding) == {"state", "action"}:
            self.sizes = len(self.encoding["state"]), len(self.encoding["action"])

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes.

        Raises:
            ValueError: naming the episode and step where the file is broken.
        """
        reader = _Reader(self.columns, self.encoding, self.first_row)
        pending: list[Batch] = []
        rows = 0
        for batch in self._batches():
            pending.append(batch)
            rows += len(batch["episode"])
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
        self.set_aside(reader.dropped)


def open_tables(data: Any, encoding: Encoding = None) -> TableSource | None:
    """A source for a file, a folder of files, a frame, a table or a dict of columns; None for anything else."""
    held = columns_in_memory(data)
    if held is not None:
        return TableSource([held], held.name, encoding=encoding)
    if not isinstance(data, str | Path):
        return None
    if elsewhere(data):
        return open_parquet(*filesystem(str(data)), encoding=encoding)
    path = Path(data)
    if path.is_dir() and not _is_minari(path):
        visible = (file for file in path.iterdir() if not file.name.startswith("."))
        files = sorted(file for file in visible if file.name.lower().endswith(SUFFIXES))
        if not files:
            raise FileNotFoundError(
                f"the folder {str(path)!r} holds no {', '.join(SUFFIXES)} file and no Minari dataset"
            )
        return TableSource([open_columns(file) for file in files], path.name, encoding=encoding)
    if not path.name.lower().endswith(SUFFIXES):
        return None
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    return TableSource([open_columns(path)], path.name, encoding=encoding)


def open_parquet(system: Any, path: str, encoding: Encoding = None) -> TableSource:
    """A source for a Parquet file, or a folder of them, on one of pyarrow's file systems."""
    return TableSource(parquet_files(system, path), Path(path).name, encoding=encoding)


def _is_minari(folder: Path) -> bool:
    return any((place / "metadata.json").is_file() for place in (folder, folder / "data"))


class _Reader:
    """Turns blocks of rows into logs. It remembers what must be the same in the whole file.

    Args:
        columns: by role.
        encoding: labels of states and actions in the order of their indices, where the columns hold labels.
        row: number of the first row.
    """

    def __init__(
        self, columns: dict[str, list[str]], encoding: dict[str, list[str]] | None, row: int
    ) -> None:
        self.columns, self.row = columns, row  # the first row of the next block
        self.labels = {
            kind: (np.array(sorted(labels)), np.argsort(np.array(labels)))
            for kind, labels in (encoding or {}).items()
        }
        self.base: int | None = None
        self.dropped = 0
        self.discrete: dict[str, bool] = {}
        self.seen: set[Any] = set()

    def logs(self, block: Batch) -> Iterator[Log]:
        """The log of a block, if any of its steps can be used."""
        place = self._place(block)
        n, last = len(place.index), place.offsets[1:] - 1
        no_action, extra = missing(block["action"]), np.zeros(n, dtype=bool)
        extra[last] = no_action[last]  # a final observation, and nothing else
        place.refuse(no_action & ~extra, "the action is missing, and more steps of the episode follow")
        terminal = self._flags("terminal", block, place, extra)
        late = extra & terminal
        late[1:] &= ~terminal[:-1]
        place.refuse(
            late, "terminal belongs on the last step that has an action, and not on the final observation"
        )
        truncated = self._flags("truncated", block, place, extra) if "truncated" in block else None
        states = self._indices("state", block["state"], place)
        following = None
        if "next_state" in block:
            following = self._indices("next_state", block["next_state"], place, extra | terminal)
            if following.shape != states.shape:
                names = ", ".join(self.columns["next_state"])
                raise ValueError(
                    f"the next state ({names}) has shape {following.shape[1:]}, and the state {states.shape[1:]}"
                )
        found = {
            "states": states,
            "actions": self._indices("action", block["action"], place, extra),
            "rewards": self._numbers("reward", block),
            "terminal": terminal,
            "truncated": truncated,
            "next_states": following,
            "behaviour": self._numbers("behaviour", block) if "behaviour" in block else None,
            "rows": self.row + np.arange(n),
        }
        log, dropped = assemble(np.diff(place.offsets), place.names, found, extra)
        self.dropped += dropped
        self.row += n
        if log is not None:
            yield log

    def _place(self, block: Batch) -> Place:
        """The rows of a block by episode and step, after checks of both."""
        episode = whole(block["episode"])
        unnamed = missing(episode)
        if unnamed.any():
            row = self.row + int(np.argmax(unnamed))
            raise ValueError(f"column {self.columns['episode'][0]!r}: row {row} (from 0) has no episode")
        starts = np.concatenate([[0], np.flatnonzero(episode[1:] != episode[:-1]) + 1])
        place = Place(np.diff(np.append(starts, len(episode))), episode[starts])
        self._check_names(episode[starts])
        if "step" in block:
            self._check_steps(self._numbers("step", block), place)
        return place

    def _check_names(self, names: np.ndarray) -> None:
        fresh = set(names.tolist())
        again = self.seen & fresh
        if not again and len(fresh) < len(names):
            unique, times = np.unique(names, return_counts=True)
            again = set(unique[times > 1].tolist())
        if again:
            raise ValueError(
                f"episode {next(iter(again))} appears again after other episodes: sort the rows by episode and step "
                "(the files of a folder are read in the order of their names)"
            )
        self.seen |= fresh

    def _numbers(self, role: str, block: Batch) -> np.ndarray:
        return floats(block[role], self.columns[role][0], self.row)

    def _flags(self, role: str, block: Batch, place: Place, ignore: np.ndarray) -> np.ndarray:
        values = block[role]
        if values.dtype == bool:
            return values
        if values.dtype == object or values.dtype.kind == "U":
            words = {"true": 1.0, "false": 0.0, "": np.nan, "none": np.nan}
            values = np.array([words.get(str(v).lower(), v) for v in values.tolist()], dtype=object)
        column = self.columns[role][0]
        numbers = floats(values, column, self.row, "true or false")
        bad = ~np.isin(numbers, (0.0, 1.0)) & ~ignore
        place.refuse(bad, column + " is {}, not true or false", numbers)
        return numbers == 1.0

    def _check_steps(self, steps: np.ndarray, place: Place) -> None:
        if self.base is None:
            self.base = int(steps[0]) if steps[0] in (0.0, 1.0) else 0
        bad = steps != place.step + self.base
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(
                f"episode {place.name(row)}: step {steps[row]:g} where {place.step[row] + self.base} was "
                "expected; steps must count up by one from the first row of each episode"
            )

    def _indices(
        self, role: str, values: np.ndarray, place: Place, ignore: np.ndarray | None = None
    ) -> np.ndarray:
        kind = _LABELLED[role]
        if kind in self.labels:
            return self._coded(role, values, place, ignore)
        if values.ndim == 2:
            return values if values.dtype == np.float64 else values.astype(np.float32)
        if np.can_cast(values.dtype, np.int64):
            self.discrete.setdefault(kind, True)
            if self.discrete[kind]:
                return values.astype(np.int64)
        numbers = floats(values, self.columns[role][0], self.row)
        fine = (np.abs(numbers) < LARGEST_WHOLE) & (numbers == np.floor(numbers))
        unread = np.zeros(len(numbers), bool) if ignore is None else ignore
        fine |= unread
        named_state = self.columns["state"][0] == "state"  # indices are meant: a table of states and actions
        self.discrete.setdefault(kind, bool(fine.all()) or named_state)
        if not self.discrete[kind]:
            return numbers[:, None]
        better = "obs_0, obs_1, …" if kind == "state" else "action_0 (and observations obs_0, …)"
        place.refuse(np.isnan(numbers) & ~unread, f"the {role.replace('_', ' ')} is missing")
        place.refuse(~fine, f"{role} {{}} is not an index; name columns of real numbers {better}", numbers)
        return np.where(np.abs(numbers) < LARGEST_WHOLE, numbers, 0.0).astype(np.int64)

    def _coded(self, role: str, values: np.ndarray, place: Place, ignore: np.ndarray | None) -> np.ndarray:
        ordered, index = self.labels[_LABELLED[role]]
        given = words(values)
        found = np.minimum(np.searchsorted(ordered, given), len(ordered) - 1)
        unknown = ordered[found] != given
        if ignore is not None:
            unknown &= ~ignore
        place.refuse(unknown, f"{role} '{{}}' is missing or unknown", given)
        return index[found].astype(np.int64)


def _is_entry(role: str, name: str) -> bool:
    """Whether a column is one of those of a vector, such as obs_0: real numbers, and never indices."""
    return name.lower() not in NAMES[role]


def _is_real(role: str, name: str) -> bool:
    return role in ("reward", "behaviour") or _is_entry(role, name)


def _assign(part: Columns) -> dict[str, list[str]]:
    """Finds the columns for each role, vectors in the order of their numbers."""
    found: dict[str, list[str]] = {}
    names = part.names
    lower = {name.lower(): name for name in names}
    for role, spellings in NAMES.items():
        single = [lower[s] for s in spellings if s in lower]
        stems = "|".join(map(re.escape, spellings)) if role in _VECTORS else "(?!)"  # matches nothing
        matches = [(re.fullmatch(rf"(?:{stems})[_\[]?(\d+)\]?", key), name) for key, name in lower.items()]
        vector = sorted((int(match.group(1)), name) for match, name in matches if match)
        for (number, name), (same, other) in itertools.pairwise(vector):
            if number == same:
                raise ValueError(
                    f"{part.name}: columns {name!r} and {other!r} both give number {number} of the {role}"
                )
        given = [*single, *(name for _, name in vector[:1])]
        if len(given) > 1:
            raise ValueError(
                f"{part.name}: columns {given[0]!r} and {given[1]!r} both give the {role}; keep one"
            )
        if given:
            found[role] = single or [name for _, name in vector]
    if "terminal" not in found and "done" in lower:
        raise ValueError(
            f"{part.name}: the column 'done' does not say whether an episode terminated or was cut off: "
            "give 'terminal' and 'truncated'"
        )
    for role in ("episode", "state", "action", "reward", "terminal"):
        if role not in found:
            columns = f"its columns are {', '.join(map(repr, names))}" if names else "it has none at all"
            looked = ", ".join(NAMES[role])
            raise ValueError(f"{part.name} has no column for the {role} (looked for {looked}); {columns}")
    return found


def _check(part: Columns, first: Columns, columns: dict[str, list[str]]) -> None:
    """Refuses a file that has one of the columns twice, as names are read: without regard to case; or not those of the first file."""
    roles = {name: role for role, names in columns.items() for name in names}
    for name, role in roles.items():
        same = [other for other in part.names if other.lower() == name.lower()]
        if len(same) > 1:
            given = " and ".join(map(repr, same))
            raise ValueError(f"{part.name}: the columns {given} both give the {role}; keep one")
        if name not in part.names:
            raise ValueError(f"{part.name} has no column {name!r}, which {first.name} has")
    for name in (name for names in _assign(part).values() for name in names):
        if name not in roles:
            raise ValueError(f"{part.name} has a column {name!r}, which {first.name} has not")


def _concatenate(blocks: list[Batch]) -> Batch:
    if len(blocks) == 1:
        return blocks[0]
    return {role: np.concatenate([block[role] for block in blocks]) for role in blocks[0]}
