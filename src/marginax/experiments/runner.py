"""Runs experiments part by part, keeps what is finished, and shows how long the rest will take.

An experiment is a frozen dataclass of settings. It splits its work into *parts*, each a pure function of some of the
settings, and turns the arrays of all parts into a `Section`. A part's arrays are saved as soon as they are there,
under a name that contains fingerprints of its settings and of the code that computes it. So an interrupted run
carries on where it was, and a finished part is computed again only when its settings or its code have changed.
"""

import abc
import ast
import contextlib
import dataclasses
import functools
import hashlib
import json
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import numpy as np
import rich.console
import rich.progress
import tyro

import marginax
from marginax import report
from marginax._files import check_writable, load_arrays, save_arrays
from marginax._folders import Lock, push
from marginax.engine import Engine, Outcome, Task, using

Arrays = dict[str, np.ndarray]
S = TypeVar("S")
E = TypeVar("E", bound="Experiment")
Hidden = Annotated[S, tyro.conf.Suppress]
"""A setting that is no flag of its experiment. `command.Options` has the flags that all experiments share."""
# No number of a part depends on these.
PRESENTATION = ("_files", "_folders", "engine", "report", "experiments/runner")


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an experiment that is computed and kept as a whole.

    Attributes:
        label: unique within its experiment, and the beginning of its file name.
        settings: everything the numbers depend on; must be plain JSON data.
        compute: returns named arrays.
        cost: roughly how many seconds it takes on a core, once its programs are compiled.
        program: parts with the same one run the same compiled programs; the first of them goes ahead alone.
        title: what it is, in a reader's words.
        setup: roughly how many seconds it takes to compile its program.
    """

    label: str
    settings: Mapping[str, Any]
    compute: Callable[[], Arrays]
    cost: float = 1.0
    program: str = ""
    title: str = ""
    setup: float = 0.0


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
    small: ClassVar[Mapping[str, Any]] = {"seeds": 10}
    """The largest values of a first look; a switch that is False is off."""

    seeds: Hidden[int] = 100
    seed: Hidden[int] = 0
    discount: Hidden[float] = 0.99

    @classmethod
    def starting(cls, words: Sequence[str]) -> "Experiment":
        """The experiment before the flags among the words of a command are applied."""
        return cls()

    def quick(self: E) -> E:
        """The same experiment at a size for a first look."""
        sizes = {name: min(getattr(self, name), most) for name, most in self.small.items()}
        return dataclasses.replace(self, **sizes)

    def settings(self) -> dict[str, Any]:
        """All settings as plain data."""
        return {"experiment": self.name, **dataclasses.asdict(self)}

    @property
    def command(self) -> str:
        """The command line that runs this experiment by itself: its seeds, and whatever differs from the defaults."""
        return " ".join(
            [f"marginax reproduce {self.name}", *flag("seeds", self.seeds), *self._changed(("seeds",))]
        )

    def _changed(self, without: Sequence[str]) -> list[str]:
        """Flags of the settings that differ from the defaults."""
        fields = (field for field in dataclasses.fields(self) if field.name not in without)
        given = ((field, getattr(self, field.name)) for field in fields)
        return [word for field, value in given if value != field.default for word in flag(field.name, value)]

    def prepared(self, folder: Path, workers: int | None, engine: Engine) -> "Experiment":
        """Does the work that is not made of parts, such as training, and returns the experiment to report on."""
        return self

    @abc.abstractmethod
    def parts(self) -> list[Part]:
        """The work, in the order in which it should be done."""

    @abc.abstractmethod
    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        """Writes figures and CSV files into `folder` and says what they show; `data` maps labels to arrays."""


def smaller(settings: S, start: S, **small: Any) -> S:
    """Settings with the small values of a first look. A setting that differs from `start` was asked for, and stays.

    >>> from marginax.deep.config import TD3Config
    >>> found = smaller(TD3Config(hidden=(32,)), TD3Config(), hidden=(64, 64), batch_size=32)
    >>> found.hidden, found.batch_size
    ((32,), 32)
    """
    kept = {name: value for name, value in small.items() if getattr(settings, name) == getattr(start, name)}
    return dataclasses.replace(settings, **kept)  # type: ignore[type-var]


def flag(name: str, value: Any) -> list[str]:
    """A setting as words of a command.

    >>> flag("act_noise", 0.3), flag("family", False), flag("games", ("a", "b"))
    (['--act-noise', '0.3'], ['--no-family'], ['--games', 'a', 'b'])
    """
    group, dot, last = name.replace("_", "-").rpartition(".")
    if value is False:
        return [f"--{group}{dot}no-{last}"]
    values = () if value is True else value if isinstance(value, list | tuple) else (value,)
    return [f"--{group}{dot}{last}", *(shlex.quote(str(each)) for each in values)]


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits that change when a setting does."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def code_fingerprint(module: str, without: Iterable[str] = ()) -> str:
    """Twelve hexadecimal digits that change with the source of a module, or of anything of marginax that it imports.

    Imports are found in the source text and followed through the whole package; for an experiment that is some fifty
    files and takes about 0.2 s. Rooms and modules named in `without` are left out.
    """
    root = Path(marginax.__file__).parent
    left_out = {root / name for name in without} | {root / f"{name}.py" for name in without}
    digest, seen, waiting = hashlib.sha256(), set[Path](), _sources(module)
    while waiting:
        path = waiting.pop()
        if path in seen or left_out.intersection((path, *path.parents)):
            continue
        seen.add(path)
        waiting += [source for name in _imports(path, path.stat().st_mtime_ns) for source in _sources(name)]
    for path in sorted(seen):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _sources(name: str) -> list[Path]:
    """The files of `marginax.a.b` and of the packages around it; none for the package itself or another's module."""
    first, *rest = name.split(".")
    if first != "marginax":
        return []
    place, found = Path(marginax.__file__).parent, list[Path]()
    for word in rest:
        place /= word
        if place.with_suffix(".py").is_file():
            return [*found, place.with_suffix(".py")]
        if not (place / "__init__.py").is_file():
            break  # a name in a module
        found.append(place / "__init__.py")
    return found


@functools.cache
def _imports(path: Path, changed: int) -> tuple[str, ...]:
    """The dotted names of what a source file imports; `changed` is when it was, so that it is read again then."""
    root, names = Path(marginax.__file__).parents[1], list[str]()
    nodes = list(ast.walk(ast.parse(path.read_bytes())))
    aliases = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    package = {alias.asname or alias.name for alias in aliases if alias.name == "marginax"}
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = path.relative_to(root).with_suffix("").parts[: -node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            names += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in package:
            # mx.traces, or mx.multi_step
            names.append(f"marginax.{marginax._FROM.get(node.attr, node.attr)}")
    return tuple(names)


def run(
    experiments: Sequence[Experiment],
    out: Path,
    *,
    workers: int = 2,
    console: rich.console.Console | None = None,
    engine: "str | Engine" = "local",
) -> list[report.Section]:
    """Runs experiments, each into the folder `out/<name>`, and returns their sections.

    A part that raises an exception does not keep the others from being computed and kept.

    Args:
        experiments: which, in the order of their sections.
        out: the folder of all results; made if need be.
        workers: parts that are computed side by side on this machine.
        console: where progress is shown: a bar on a terminal (that is not dumb), else a line for each part.
        engine: what runs the parts: `local`, `ray`, or an engine.

    Raises:
        OSError: the folder cannot be written or the disk is full; what was finished stays.
        ValueError: an earlier result is damaged, or a setting is impossible.
        RuntimeError: another process is at work in a folder, or a part failed.
    """
    check_writable(out)
    console = console or rich.console.Console(stderr=True)
    with contextlib.ExitStack() as stack:
        for experiment in experiments:
            stack.enter_context(Lock(out / experiment.name))
        works = [_Work(experiment, out / experiment.name) for experiment in experiments]
        for work in works:
            if not work.todo:
                work.finish(console)
        tasks = {(work.experiment.name, part.label): (work, part) for work in works for part in work.todo}
        progress = stack.enter_context(_Progress(list(tasks.values()), workers, console))
        place = stack.enter_context(using(engine, workers=workers))
        failed = []
        for outcome in place.run([_task(*task) for task in tasks.values()], progress.listen):
            work, part = tasks[outcome.task.arguments["experiment"].name, outcome.task.arguments["label"]]
            progress.finished(outcome, part)
            if outcome.error is not None:
                failed.append(f"{outcome.task.name}: {type(outcome.error).__name__}: {outcome.error}")
                continue
            work.keep(part, outcome.value, outcome.seconds)
            if not work.todo:
                work.finish(console)
    if failed:
        others = f" (and {len(failed) - 1} more parts)" if len(failed) > 1 else ""
        raise RuntimeError(
            f"{failed[0]}{others}; finished parts are kept; run the same command to try the failed ones again"
        )
    return [work.result() for work in works]


def _task(work: "_Work", part: Part) -> Task:
    return Task(
        f"{work.experiment.name}: {part.title or part.label}",
        _compute,
        {"experiment": work.experiment, "label": part.label},
        program=f"{work.experiment.name} {part.program}",
    )


def _compute(_: object, experiment: Experiment, label: str) -> Arrays:
    part = next(part for part in experiment.parts() if part.label == label)
    return {name: np.asarray(value) for name, value in part.compute().items()}


class _Work:
    """One experiment on its way to being finished."""

    def __init__(self, experiment: Experiment, folder: Path) -> None:
        self.experiment, self.folder = experiment, folder
        module = type(experiment).__module__
        self.code = code_fingerprint(module, without=PRESENTATION)
        self.key = fingerprint({"settings": experiment.settings(), "code": code_fingerprint(module)})
        self.seconds = 0.0
        self.data: dict[str, Arrays] = {}
        check_writable(folder / "parts")
        for path in (folder / "parts").glob(".*.npz.*"):
            path.unlink()  # half-written by a process that was killed; the lock says that it is gone
        saved = report.load_section(folder)
        self.saved = saved if saved is not None and saved.key == self.key else None
        self.parts = experiment.parts() if self.saved is None else []
        self.todo: list[Part] = []
        for part in self.parts:
            path = self.path(part)
            if path.is_file():
                self.data[part.label], seconds = _load(path)
                self.seconds += seconds
            else:
                self.todo.append(part)

    def path(self, part: Part) -> Path:
        return self.folder / "parts" / f"{part.label}-{fingerprint(part.settings)}-{self.code}.npz"

    def keep(self, part: Part, arrays: Arrays, seconds: float) -> None:
        """Save a part's arrays, and remove those that older code computed with the same settings."""
        path = self.path(part)
        save_arrays(path, {**arrays, "seconds": seconds})
        for other in path.parent.glob(f"{part.label}-{fingerprint(part.settings)}-*.npz"):
            if other != path:
                other.unlink()
        push(self.folder)
        self.todo.remove(part)
        self.data[part.label] = arrays
        self.seconds += seconds

    def finish(self, console: rich.console.Console) -> None:
        """Make the section, unless it is there already, and say so."""
        note = "finished earlier"
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
            push(self.folder)
            note = f"finished, {self.seconds:.1f} s of work" if self.data else "finished"
        console.print(f"[green]✓[/] {self.experiment.name}: {note}", highlight=False)

    def result(self) -> report.Section:
        assert self.saved is not None
        return self.saved


def _load(path: Path) -> tuple[Arrays, float]:
    try:
        arrays = load_arrays(path)
    except ValueError as error:
        raise ValueError(f"the earlier result {error}; remove it to compute it again") from None
    return arrays, float(arrays.pop("seconds"))


class _Progress:
    """A bar with the time left on a terminal that can redraw a line; anywhere else a line for each part."""

    def __init__(
        self, todo: Sequence[tuple[_Work, Part]], workers: int, console: rich.console.Console
    ) -> None:
        self.console, self.workers, self.count, self.done = console, workers, len(todo), 0
        self.left: dict[str, float] = {}  # seconds that each unfinished part is expected to take
        compiled: set[tuple[str, str]] = set()
        for work, part in todo:
            program = (work.experiment.name, part.program)
            self.left[_task(work, part).name] = part.cost + (0.0 if program in compiled else part.setup)
            compiled.add(program)
        self.total = sum(self.left.values())
        self.taken = 0.0  # seconds that finished parts took
        self.running: dict[str, float] = {}  # when they were started
        self.bar = rich.progress.Progress(
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.TimeElapsedColumn(),
            _TimeLeft(self),
            console=console,
            disable=not console.is_interactive or not todo,
        )
        self.task = self.bar.add_task("", total=self.total)

    def __enter__(self) -> "_Progress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def listen(self, task: Task, message: Any) -> None:
        if message == "started":
            self.running[task.name] = time.monotonic()
            self.bar.update(self.task, description=", ".join(self.running)[:60])

    def finished(self, outcome: Outcome, part: Part) -> None:
        name = outcome.task.name
        self.running.pop(name, None)
        self.left.pop(name)
        self.done += 1
        self.taken += outcome.seconds
        self.bar.update(self.task, completed=self.total - sum(self.left.values()))
        self.bar.update(self.task, description=", ".join(self.running)[:60])
        if not self.console.is_interactive:
            said = "failed after" if outcome.error is not None else "took"
            self.console.print(
                f"{name}: {said} {outcome.seconds:.1f} s ({self.done} of {self.count}{self.time_left(', ')})",
                highlight=False,
                soft_wrap=True,
            )

    def time_left(self, before: str = "") -> str:
        """The expected seconds of the parts that are left, times how much slower than expected the finished ones were.

        So that the first part does not decide alone, a fifth of the total counts as having been as fast as expected.
        """
        if not self.left:
            return ""
        now, expected = time.monotonic(), self.total - sum(self.left.values())
        trust = 0.2 * self.total
        slower = (trust + self.taken) / (trust + expected)
        work = [
            max(0.1 * slower * cost, slower * cost - (now - self.running.get(name, now)))
            for name, cost in self.left.items()
        ]
        seconds = max(sum(work) / self.workers, *work)
        return f"{before}about {int(seconds) // 60}:{int(seconds) % 60:02d} left"


class _TimeLeft(rich.progress.ProgressColumn):
    def __init__(self, progress: _Progress) -> None:
        super().__init__()
        self.progress = progress

    def render(self, task: rich.progress.Task) -> str:
        return self.progress.time_left()


def sections_on_disk(out: Path, order: Iterable[str]) -> list[tuple[Path, report.Section]]:
    """All finished sections below a folder: those named in `order` first, the others by name."""
    names = [*order]
    folders = sorted(path.parent for path in out.glob("*/result.json"))
    folders.sort(key=lambda folder: names.index(folder.name) if folder.name in names else len(names))
    found = [(folder, report.load_section(folder)) for folder in folders]
    return [(folder, section) for folder, section in found if section is not None]
