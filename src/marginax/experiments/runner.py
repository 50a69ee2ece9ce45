"""Runs experiments part by part, keeps what is finished, and shows how long the rest will take.

An experiment is a frozen dataclass of settings. It splits its work into *parts*, each a pure function of some of the
settings, and turns the arrays of all parts into a `Section`. A part's arrays are saved as soon as they are there,
under a name that contains the fingerprint of its settings, so an interrupted run carries on where it was and a
finished part is computed again only when its settings have changed.
"""

import abc
import dataclasses
import hashlib
import json
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import rich.console
import rich.progress
import tyro

import marginax
from marginax import report
from marginax._files import atomic_write, check_writable

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an experiment that is computed and kept as a whole.

    Attributes:
        label: unique within its experiment, and the first half of its file name.
        settings: everything the numbers depend on; must be plain JSON data.
        compute: returns named arrays.
        cost: roughly how many seconds it takes, for the time left.
        program: parts with the same one run the same compiled programs; the first of them goes ahead alone.

    >>> Part("squares", {"n": 3}, lambda: {"x": np.arange(3) ** 2}).compute()["x"]
    array([0, 1, 4])
    """

    label: str
    settings: Mapping[str, Any]
    compute: Callable[[], Arrays]
    cost: float = 1.0
    program: str = ""


@dataclasses.dataclass(frozen=True)
class Experiment(abc.ABC):
    """What every experiment has: a name, settings, parts, and a section made of the parts' arrays.

    A subclass is a frozen dataclass; its own fields become flags of `marginax reproduce <name>`.

    >>> class Nothing(Experiment):
    ...     name = "nothing"
    ...     def parts(self):
    ...         return []
    ...     def section(self, folder, data):
    ...         return report.Section(self.name, "Nothing")
    >>> Nothing(seeds=3).settings()
    {'experiment': 'nothing', 'seeds': 3, 'seed': 0, 'discount': 0.99}
    """

    name: ClassVar[str]

    seeds: Annotated[int, tyro.conf.Suppress] = 100
    seed: Annotated[int, tyro.conf.Suppress] = 0
    discount: Annotated[float, tyro.conf.Suppress] = 0.99

    def quick(self) -> "Experiment":
        """The same experiment at a size for a first look."""
        return dataclasses.replace(self, seeds=min(self.seeds, 10))

    def settings(self) -> dict[str, Any]:
        """All settings as plain data."""
        return {"experiment": self.name, **dataclasses.asdict(self)}

    @property
    def command(self) -> str:
        """The command line that runs this experiment by itself."""
        return f"marginax reproduce {self.name} --seeds {self.seeds}"

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """The work, in the order in which it should be done."""

    @abc.abstractmethod
    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        """Writes figures and CSV files into `folder` and says what they show; `data` maps labels to arrays."""


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that change when a setting or the version of marginax does.

    >>> fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})
    True
    """
    text = json.dumps({"version": marginax.__version__, **settings}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def run(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    workers: int = 2,
    console: rich.console.Console | None = None,
) -> list[report.Section]:
    """Runs experiments, each into the folder `out/<name>`, and returns their sections.

    Args:
        experiments: which, in the order of their sections.
        out: the folder of all results; made if need be.
        workers: parts that are computed side by side.
        console: where progress is shown.

    Raises:
        OSError: the folder cannot be written or the disk is full; what was finished stays.
        ValueError: an earlier result is damaged, or a setting is impossible.

    >>> import tempfile
    >>> run([], Path(tempfile.mkdtemp()))
    []
    """
    check_writable(out)
    console = console or rich.console.Console(stderr=True)
    works = [_Work(experiment, out / experiment.name) for experiment in experiments]
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
        _TimeLeft(),
    )
    with rich.progress.Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(work.cost for work in works))
        executor = ThreadPoolExecutor(workers)
        try:
            for work in works:
                if not work.todo:
                    _finish(work, console)
            waiting = [(work, part) for work in works for part in work.todo]
            running: dict[Future, tuple[_Work, Part]] = {}
            compiled: set[tuple[str, str]] = set()
            while waiting or running:
                _start(executor, workers, waiting, running, compiled)
                progress.update(task, description=_now(running))
                done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                for future in done:
                    work, part = running.pop(future)
                    work.take(part, *future.result())
                    compiled.add((work.experiment.name, part.program))
                    progress.update(task, advance=part.cost)
                    if not work.todo:
                        _finish(work, console)
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return [work.result() for work in works]


class _TimeLeft(rich.progress.ProgressColumn):
    """Time left, at the average speed so far; the parts' costs say how much work is left."""

    def render(self, task: rich.progress.Task) -> str:
        if not task.completed or task.elapsed is None or task.total is None:
            return "time left –"
        left = task.elapsed * (task.total - task.completed) / task.completed
        return f"time left {int(left) // 60}:{int(left) % 60:02d}"


class _Work:
    """One experiment on its way to being finished."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder
        self.key = fingerprint(experiment.settings())
        self.seconds = 0.0
        self.data: dict[str, Arrays] = {}
        check_writable(folder / "parts")
        saved = report.load_section(folder)
        self.saved = saved if saved is not None and saved.key == self.key else None
        self.todo: list[Part] = []
        if self.saved is None:
            self.parts = experiment.parts()
            for part in self.parts:
                path = self.path(part)
                if path.is_file():
                    self.data[part.label], seconds = _load(path)
                    self.seconds += seconds
                else:
                    self.todo.append(part)
        self.cost = sum(part.cost for part in self.todo)

    def path(self, part: Part) -> Path:
        return self.folder / "parts" / f"{part.label}-{fingerprint(part.settings)}.npz"

    def compute(self, part: Part) -> tuple[Arrays, float]:
        start = time.perf_counter()
        arrays: dict[str, Any] = {name: np.asarray(value) for name, value in part.compute().items()}
        seconds = time.perf_counter() - start
        atomic_write(self.path(part), lambda file: np.savez(file, seconds=seconds, **arrays))
        return arrays, seconds

    def take(self, part: Part, arrays: Arrays, seconds: float) -> None:
        self.todo.remove(part)
        self.data[part.label] = arrays
        self.seconds += seconds

    def finish(self) -> None:
        if self.saved is None:
            section = self.experiment.section(self.folder, self.data)
            self.saved = dataclasses.replace(
                section,
                key=self.key,
                seconds=self.seconds,
                settings=self.experiment.settings(),
                command=self.experiment.command,
                versions=report.versions(),
            )
            report.save_section(self.folder, self.saved)

    def result(self) -> report.Section:
        assert self.saved is not None
        return self.saved


def _finish(work: _Work, console: rich.console.Console) -> None:
    earlier = work.saved is not None
    work.finish()
    note = "finished earlier" if earlier else f"finished, {work.seconds:.1f} s of work"
    console.print(f"[green]✓[/] {work.experiment.name}: {note}", highlight=False)


def _start(
    executor: ThreadPoolExecutor,
    workers: int,
    waiting: list[tuple[_Work, Part]],
    running: dict[Future, tuple[_Work, Part]],
    compiled: set[tuple[str, str]],
) -> None:
    """Gives free workers the next parts; of those that share programs, only one while these are compiled."""
    for work, part in list(waiting):
        if len(running) >= workers:
            return
        program = (work.experiment.name, part.program)
        if program in compiled or all((w.experiment.name, p.program) != program for w, p in running.values()):
            waiting.remove((work, part))
            running[executor.submit(work.compute, part)] = (work, part)


def _now(running: Mapping[Future, tuple[_Work, Part]]) -> str:
    return ", ".join(f"{work.experiment.name}: {part.label}" for work, part in running.values())[:60]


def _load(path: Path) -> tuple[Arrays, float]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        return arrays, float(arrays.pop("seconds"))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"the earlier result {str(path)!r} is damaged ({error}); remove it to compute it again"
        ) from None


def sections_on_disk(out: Path, order: Iterable[str]) -> list[tuple[Path, report.Section]]:
    """All finished sections below a folder: those named in `order` first, the others by name.

    >>> import tempfile
    >>> sections_on_disk(Path(tempfile.mkdtemp()), ["chain"])
    []
    """
    names = [*order]
    folders = sorted(path.parent for path in out.glob("*/result.json"))
    folders.sort(key=lambda folder: names.index(folder.name) if folder.name in names else len(names))
    found = [(folder, report.load_section(folder)) for folder in folders]
    return [(folder, section) for folder, section in found if section is not None]
