"""Where passes over a log are made: here, chunk by chunk, or on the machines of a cluster, each with files of its own.

Whatever a pass gathers is an accumulator (`log.Accumulator`), so that any partition of the log gives the same sums, up to rounding.

An episode must not be divided between machines. A first look at the column of episodes finds out: files that an episode runs
across are kept together, and a log whose episodes are scattered is sorted by episode and step first, by Ray.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from marginax.engine import Crew, Engine
from marginax.offline.certainty_equivalence import Counts
from marginax.offline.columns import PARQUET
from marginax.offline.fitted_q import Backup, Fit
from marginax.offline.results import Influence
from marginax.offline.sources import Source
from marginax.offline.tabular_files import TableSource, open_parquet

Gathered = TypeVar("Gathered", bound=Any)
Progress = Callable[[str, Iterable[Any]], Iterator[Any]]


class Passes:
    """Passes over a log on this machine.

    Args:
        source: the log.
        progress: called as `progress(name, parts)`; yields the parts.
    """

    def __init__(self, source: Source, progress: Progress) -> None:
        self.source, self.progress = source, progress
        self.notes: list[str] = []

    def count(self, counts: Counts) -> Counts:
        """The first pass."""
        return self.gather("counting", counts)

    def gather(self, name: str, empty: Gathered) -> Gathered:
        """Shows the whole log to an accumulator."""
        first = 0
        for log in self.progress(name, self.source.chunks()):
            empty.update(log, first)
            first += log.num_episodes
        return empty

    def backup(self, backup: Backup) -> Backup:
        """A backup whose sums are made where the log is read."""
        return backup

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to clean up."""


def passes_over(source: Source, progress: Progress, engine: Engine) -> Passes:
    """Passes over a log where the engine is."""
    return SpreadPasses(source, progress, engine) if engine.remote else Passes(source, progress)


class SpreadPasses(Passes):
    """Passes over a log that lies in files, on the machines of an engine.

    The driver holds, for each episode, 8 bytes while episodes are numbered, and what the accumulators keep; nothing else that grows
    with the log.
    """

    def __init__(self, source: Source, progress: Progress, engine: Engine) -> None:
        super().__init__(source, progress)
        if not isinstance(source, TableSource) or any(part.path is None for part in source.parts):
            raise ValueError(
                f"{source.name}: the engine 'ray' evaluates logs in Parquet or CSV files; use the engine 'local' for others"
            )
        self.scratch: tuple[Any, str] | None = None  # file system and folder of a sorted copy
        ids = self._look(engine, source)
        if _scattered(ids):
            self.crew.close()
            source = self._sorted(source)
            ids = self._look(engine, source)
        self.source = source
        rows = [part.total or 0 for part in source.parts]
        groups = _groups(ids, rows, len(self.crew))  # fewer if episodes run across files
        self.shares = [Share(files, sum(rows[: files[0]])) for files in groups]

    def _look(self, engine: Engine, source: TableSource) -> list[np.ndarray]:
        """Makes the crew. For each file the episodes of its rows where they change; notes how many rows it has."""
        groups = np.array_split(range(len(source.parts)), min(engine.places, len(source.parts)))
        whole = source.share(range(len(source.parts)))
        self.crew: Crew = engine.crew(Shard, [{"whole": whole}] * len(groups))
        looks = self.crew.call("episodes", each=[Share(group.tolist(), 0) for group in groups])
        found = [look for looked in looks for look in looked]
        for part, (rows, _) in zip(source.parts, found, strict=True):
            part.total = rows
        return [episodes for _, episodes in found]

    def _sorted(self, source: TableSource) -> TableSource:
        """The log sorted by episode and step, beside the log itself as long as it is needed."""
        import ray.data
        from pyarrow.fs import LocalFileSystem

        parts = source.share(range(len(source.parts))).parts
        files = [part.path for part in parts if part.path is not None]
        if "step" not in source.columns or any(file.suffix not in PARQUET for file in files):
            raise ValueError(
                f"{source.name}: an episode appears again after other episodes; to be sorted the log must be Parquet, with a step "
                "column"
            )
        system, folder = self.scratch = (
            parts[0].system or LocalFileSystem(),
            str(files[0].parent / ".sorted-by-episode"),
        )
        self._remove_sorted()
        keys = [source.columns["episode"][0], source.columns["step"][0]]
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.default_hash_shuffle_parallelism = len(files)  # files of the copy; Ray's default is 200
        context.use_datasource_v2 = False  # it would start up to 32 processes that only read footers
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        names = [str(file) for file in files]
        rows = ray.data.read_parquet(names, filesystem=system, override_num_blocks=len(files))
        rows.sort(keys).write_parquet(folder, filesystem=system)
        self.notes.append(
            "episodes lay in several places of the log: it was sorted by episode and step first"
        )
        found = open_parquet(system, folder, source.encoding)
        found.name, found.unsaid = source.name, source.unsaid
        return found

    def __exit__(self, *_: object) -> None:
        self.crew.close()
        if self.scratch is not None:
            self._remove_sorted()

    def _remove_sorted(self) -> None:
        assert self.scratch is not None
        with contextlib.suppress(FileNotFoundError):
            self.scratch[0].delete_dir(self.scratch[1])

    def count(self, counts: Counts) -> Counts:
        """The first two passes: episodes must have their numbers before they are counted by folds."""
        for _ in self.progress("numbering", [f"{len(self.shares)} shares"]):
            sizes: list[Sizes] = list(self.crew.call("sizes", each=self.shares))
        firsts = [0, *np.cumsum([size.episodes for size in sizes])[:-1].tolist()]
        self.shares = [
            share._replace(episode=first) for share, first in zip(self.shares, firsts, strict=True)
        ]
        assert isinstance(self.source, TableSource)
        self.source.set_aside(sum(size.set_aside for size in sizes))
        return self.gather("counting", counts)

    def gather(self, name: str, empty: Gathered) -> Gathered:
        for _ in self.progress(name, [f"{len(self.shares)} shares"]):
            found = self.crew.reduce("gather", self.crew.share(empty), each=self.shares)
        return found

    def backup(self, backup: Backup) -> Backup:
        return SpreadBackup(backup, self)


class Share(NamedTuple):
    """Files of a log that follow one another, with whole episodes."""

    files: list[int]
    row: int  # the number of their first row
    episode: int = 0  # and of their first episode


class Sizes(NamedTuple):
    """What there is of a share."""

    episodes: int
    steps: int
    set_aside: int  # episodes that lost their last step


class Shard:
    """Reads a share of a log, which every call names: an object that was lost and made again knows it at once."""

    def __init__(self, whole: TableSource) -> None:
        self.whole = whole
        self._files: list[int] | None = None

    def _take(self, share: Share) -> None:
        if share.files != self._files:
            self._files, self.source = share.files, self.whole.share(share.files)
            self.source.first_row = share.row
            self._sizes: Sizes | None = None
            self._backups: dict[str, Backup] = {}

    def episodes(self, share: Share) -> list[tuple[int, np.ndarray]]:
        """For each file, its number of rows and the episodes of its rows where they change."""
        return [self.whole.episodes(k) for k in share.files]

    def sizes(self, share: Share) -> Sizes:
        """How much the share holds."""
        self._take(share)
        if self._sizes is None:
            episodes = steps = 0
            for log in self.source.chunks():
                episodes, steps = episodes + log.num_episodes, steps + len(log)
            self._sizes = Sizes(episodes, steps, self.source.dropped)
        return self._sizes

    def gather(self, empty: Callable[[], Gathered], share: Share) -> Gathered:
        """An accumulator that has seen this share."""
        self._take(share)
        mine, first = copy.deepcopy(empty()), share.episode
        for log in self.source.chunks():
            mine.update(log, first)
            first += log.num_episodes
        return mine

    def total(self, key: str, shared: Callable[[], Backup], method: str, x: np.ndarray, share: Share) -> Any:
        """A sum of a backup over this share."""
        return getattr(self._backup(key, shared, share), method)(x)

    def influence(
        self, key: str, shared: Callable[[], Backup], fitted: Fit, lam: np.ndarray, value: float, share: Share
    ) -> Influence:
        """The influence of this share's episodes."""
        return self._backup(key, shared, share).influence(fitted, lam, value, share.episode)

    def _backup(self, key: str, shared: Callable[[], Backup], share: Share) -> Backup:
        """A backup on this share, whose rows stay in memory if they are few enough."""
        steps = self.sizes(share).steps
        if key not in self._backups:
            mine = copy.copy(shared())
            mine.source, mine.steps = self.source, steps
            self._backups = {key: mine}
        return self._backups[key]


class SpreadBackup(Backup):
    """A backup whose sums over the log are made on the shares."""

    def __init__(self, backup: Backup, passes: SpreadPasses) -> None:
        self.__dict__.update(backup.__dict__)
        sent: Any = copy.copy(backup)
        sent.source = None
        self._crew, self._shares = passes.crew, passes.shares
        self._shared, self._key = passes.crew.share(sent), f"{id(self)}"

    def total(self, q: np.ndarray) -> np.ndarray:
        return self._sum("total", q)

    def transposed_total(self, y: np.ndarray) -> np.ndarray:
        return self._sum("transposed_total", y)

    def _sum(self, method: str, x: np.ndarray) -> np.ndarray:
        return sum(self._crew.call("total", self._key, self._shared, method, x, each=self._shares))

    def influence(self, fitted: Fit, lam: np.ndarray, value: float, first: int = 0) -> Influence:
        given = (self._key, self._shared, fitted, lam, value)
        return self._crew.reduce("influence", *given, each=self._shares)


def _scattered(ids: Sequence[np.ndarray]) -> bool:
    """Whether an episode appears again after others, in a file or in a later one."""
    joined = [
        part[1:] if k and len(part) and len(ids[k - 1]) and part[0] == ids[k - 1][-1] else part
        for k, part in enumerate(ids)
    ]
    every = np.concatenate(joined) if joined else np.empty(0)
    return len(np.unique(every)) < len(every)


def _groups(ids: Sequence[np.ndarray], rows: Sequence[int], count: int) -> list[list[int]]:
    """Runs of files with about as many rows each, at most `count`, cut only where an episode ends."""
    goal = sum(rows) / max(count, 1)
    groups: list[list[int]] = [[]]
    taken = 0
    for k, part in enumerate(ids):
        whole = k > 0 and len(part) > 0 and len(ids[k - 1]) > 0 and part[0] != ids[k - 1][-1]
        if groups[-1] and whole and taken >= goal * len(groups):
            groups.append([])
        groups[-1].append(k)
        taken += rows[k]
    return groups
