"""A training run on disk, and the processes that train it.

A run's folder holds `run.json` (its settings, derived ones included) and one folder for each of its *parts*.
On an accelerator a run has one part: all agents in one program. On CPU every agent is a part, trained by a process of
its own, so that seed k of a run of many equals the run of seed k alone, whatever the number of processes. Each part
keeps its metrics, policies and checkpoint (`run_part`). A part whose process dies is started again and carries on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginax._files import load_json, save_json
from marginax._folders import Lock, fetch, push, whereabouts
from marginax.deep.checkpoint import CHECKPOINT, manifest
from marginax.deep.metrics import agent_name, read_metrics
from marginax.deep.run_config import PopulationConfig
from marginax.deep.run_machine import on_accelerator, part_environment
from marginax.deep.run_part import Sigterm, is_over, remove_temporary, status, tidy_part, train_part
from marginax.engine import Engine, Task, processes
from marginax.engine.processes import Child, cores

SETTINGS = "run.json"
_UNFINISHED = ("new", "stopped")  # states of parts that are yet to be trained
_DEATHS = 5  # in a row, without a checkpoint in between
Listener = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Run:
    """What a run is: its population, and whether all agents learn together in one program."""

    config: PopulationConfig
    together: bool

    @property
    def parts(self) -> dict[str, PopulationConfig]:
        """The populations that are trained apart, by the name of their folder."""
        if self.together:
            return {"agents": self.config}
        alone = len(self.config.groups) == 1
        return {
            f"seed-{seed}" if alone else agent_name(label, seed): self.config.part(label, seed)
            for label, seed in self.config.agents
        }


def open_run(folder: Path, config: PopulationConfig, *, together: bool | None = None) -> Run:
    """The run in a folder, made if there is none; an earlier one may become longer, or get more seeds.

    Args:
        folder: Of the run.
        config: What is trained.
        together: Whether all agents learn in one program; None: on an accelerator.

    Raises:
        ValueError: If the folder holds a run with other settings.
        RuntimeError: If another process works in the folder.
    """
    with Lock(folder):
        return _open_run(folder, config, together)


def _open_run(folder: Path, config: PopulationConfig, together: bool | None) -> Run:
    if (folder / SETTINGS).exists():
        earlier = load_run(folder)
        if earlier.together:
            config.require_same(earlier.config.to_json(), folder)
        else:
            config.require_same({**earlier.config.to_json(), "seeds": list(config.seeds)}, folder)
        together, seeds = earlier.together, {*earlier.config.seeds, *config.seeds}
    else:
        seeds = {*config.seeds}
        if together is None:
            together = config.on_device or on_accelerator()
    stored = dataclasses.replace(config, seeds=tuple(sorted(seeds)))
    remove_temporary(folder)
    save_json(folder / SETTINGS, {"config": stored.to_json(), "together": together})
    return Run(config, together)


def load_run(folder: Path) -> Run:
    """The run in a folder.

    Raises:
        ValueError: If there is none, or it cannot be read.
    """
    path = folder / SETTINGS
    try:
        data = load_json(path)
        return Run(PopulationConfig.from_json(data["config"]), bool(data["together"]))
    except FileNotFoundError:
        raise ValueError(f"there is no run in {str(folder)!r}: {SETTINGS} is missing.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def run_metrics(folder: Path) -> list[dict[str, Any]]:
    """All lines of metrics of a run, part by part.

    Raises:
        ValueError: If there is no run, or a file of it is damaged.
    """
    lines = []
    for name in load_run(folder).parts:
        found = manifest(folder / name / CHECKPOINT)
        lines += read_metrics(folder / name, found and found["meta"].get("metrics"))
    return lines


def run_seconds(folder: Path) -> float:
    """How long the parts of a run have been trained, added up."""
    found = [manifest(folder / name / CHECKPOINT) for name in load_run(folder).parts]
    return sum(each["meta"].get("seconds", 0.0) for each in found if each is not None)


def train(
    folder: Path,
    run: Run,
    *,
    workers: int | None = None,
    checkpoint_minutes: float = 2.0,
    keep_replay: bool = True,
    seconds: float | None = None,
    listen: Listener = lambda part, message: None,
) -> dict[str, dict[str, Any]]:
    """Train all parts of a run, from their checkpoints if there are any.

    SIGTERM ends it with a checkpoint of every part and `SystemExit(143)`; Ctrl-C at once, with the last checkpoints.

    Args:
        folder: Of the run; no other process may work in it.
        run: What `open_run` returned.
        workers: Processes side by side: parts on CPU, simulation if agents learn together. None: the cores.
        checkpoint_minutes: Minutes between checkpoints.
        keep_replay: Whether checkpoints of finished parts keep the replay buffers, so that they can be made longer.
        seconds: Time after which everything stops, with checkpoints.
        listen: Called with the name of a part and its message: `step`, `speed` and new `lines` of metrics, or its `state`.

    Returns:
        The status of every part; a part that failed in another way than by diverging is `failed`, with its reason.
    """
    orders = _orders(checkpoint_minutes, keep_replay, seconds)
    with Lock(folder), Sigterm() as sigterm:
        parts = _Parts(folder, run, workers, orders, listen)
        try:
            while parts.waiting or parts.running:
                if not (sigterm.seen or is_over(orders["until"])):
                    parts.begin_waiting()
                if not parts.running:
                    break
                sigterm.forward(parts.running.values())
                parts.hear(timeout=0.2, ending=sigterm.seen)
        finally:
            processes.stop(list(parts.running.values()), grace=0)
        fetch(folder)
        if sigterm.seen:
            raise SystemExit(143)
    return parts.outcome


class _Parts:
    """The parts of a run on this machine: those that wait, the processes of those that train, and the status of each."""

    def __init__(
        self, folder: Path, run: Run, workers: int | None, orders: dict[str, Any], listen: Listener
    ) -> None:
        self.folder, self.configs, self.orders, self.listen = folder, run.parts, orders, listen
        self.outcome = {name: status(folder / name, config) for name, config in self.configs.items()}
        self.waiting = [name for name, found in self.outcome.items() if found["state"] in _UNFINISHED]
        self.running: dict[str, Child] = {}
        self._deaths: dict[str, tuple[int, int]] = {}  # at which step a part died, and how often
        for name, found in self.outcome.items():
            if name not in self.waiting:
                listen(name, found)
                tidy_part(folder / name)
        if run.together:
            self.side_by_side, self.threads = 1, None
            self.simulating = max(1, cores() - 1) if workers is None else workers
        else:
            self.side_by_side = max(1, min(workers or cores(), len(self.waiting)))
            self.threads, self.simulating = cores() // self.side_by_side, 0

    def begin_waiting(self) -> None:
        """Start waiting parts while fewer than `side_by_side` run."""
        while self.waiting and len(self.running) < self.side_by_side:
            self._begin(self.waiting.pop(0))

    def hear(self, timeout: float, *, ending: bool) -> None:
        """Receive a message from every process that has sent one; a dead process is started again, unless all are `ending`."""
        ready = processes.wait(list(self.running.values()), timeout=timeout)
        for name, child in [(n, c) for n, c in self.running.items() if c in ready]:
            try:
                message = child.receive()
                self.outcome[name]["step"] = message["step"]
                self.listen(name, message)
            except EOFError:
                self._end(name, child.result)
            except processes.ProcessFailed as error:
                self._end(name, _failed(name, self.outcome[name], error))
            except processes.ProcessDied as error:
                self._begin_again(name, error, ending)

    def _begin(self, name: str) -> None:
        place = self.folder / name
        place.mkdir(exist_ok=True)
        self.running[name] = processes.start(
            train_part,
            _arguments(place, self.configs[name], self.simulating, self.orders),
            name=name,
            environment=part_environment(self.threads),
            log=place / "worker.log",
        )

    def _end(self, name: str, found: dict[str, Any]) -> None:
        self.running.pop(name).stop()
        self.outcome[name] = found
        self.listen(name, found)

    def _begin_again(self, name: str, error: processes.ProcessDied, ending: bool) -> None:
        """Begin a part again whose process has died, unless it keeps dying before its next checkpoint."""
        fetch(self.folder / name)
        step = status(self.folder / name, self.configs[name])["step"]
        before, count = self._deaths.get(name, (step, 0))
        count = count + 1 if step == before else 1
        self._deaths[name] = (step, count)
        if count > _DEATHS or ending:
            self._end(name, _failed(name, {**self.outcome[name], "step": step}, error))
            return
        self.running.pop(name)
        self.listen(name, {"state": "started again", "step": step, "reason": str(error)})
        self._begin(name)


def _orders(checkpoint_minutes: float, keep_replay: bool, seconds: float | None) -> dict[str, Any]:
    """The arguments of `train_part` that are the same for every part."""
    until = None if seconds is None else time.time() + seconds
    return {"checkpoint_minutes": checkpoint_minutes, "keep_replay": keep_replay, "until": until}


def _arguments(
    folder: Path, config: PopulationConfig, workers: int, orders: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of `train_part` for a part with this folder."""
    return {**whereabouts(folder), "config": config.to_json(), "workers": workers, **orders}


def _failed(name: str, found: dict[str, Any], error: Exception) -> dict[str, Any]:
    """The status of a part whose process raised an error, which begins with the part's name."""
    return {**found, "state": "failed", "reason": str(error).removeprefix(f"{name} failed: ")}


def train_elsewhere(
    engine: Engine,
    runs: Mapping[str, tuple[Path, Run]],
    *,
    checkpoint_minutes: float,
    keep_replay: bool,
    seconds: float | None,
    listen: Listener,
) -> dict[str, dict[str, Any]]:
    """Train all parts of several runs, by name, where an engine places them; see `train`.

    The folders must be reachable under the same paths from every machine, or be copies of some on another file system.
    A part whose machine is lost is placed again and carries on from its checkpoint.
    """
    outcome: dict[str, dict[str, Any]] = {}
    tasks = []
    orders = _orders(checkpoint_minutes, keep_replay, seconds)
    with contextlib.ExitStack() as locks:
        for title, (folder, run) in runs.items():
            locks.enter_context(Lock(folder))
            given = int(engine.cpus)
            simulating, threads = (max(0, given - 1), None) if run.together else (0, given)
            for part, config in run.parts.items():
                name, place = f"{title} {part}", folder / part
                outcome[name] = status(place, config)
                if outcome[name]["state"] not in _UNFINISHED:
                    listen(name, outcome[name])
                    continue
                place.mkdir(exist_ok=True)
                arguments = _arguments(place, config, simulating, orders)
                tasks.append(Task(name, train_part, arguments, environment=part_environment(threads)))
            push(folder)

        def hear(task: Task, message: Any) -> None:
            if message == "started":
                message = {"state": "training"}
            outcome[task.name]["step"] = message.get("step", outcome[task.name]["step"])
            listen(task.name, message)

        for found in engine.run(tasks, hear):
            name = found.task.name
            error = found.error
            outcome[name] = found.value if error is None else _failed(name, outcome[name], error)
            listen(name, outcome[name])
        for folder, _ in runs.values():
            fetch(folder)
    return outcome
