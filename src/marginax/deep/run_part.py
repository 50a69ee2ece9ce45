"""A part of a run: its state on disk, and the function of the process that trains it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from marginax._folders import Lock, opened, push
from marginax.deep.checkpoint import CHECKPOINT, MANIFEST, manifest, tidy
from marginax.deep.run_config import PopulationConfig
from marginax.deep.run_machine import spread_threads
from marginax.engine.interface import Sender
from marginax.engine.processes import Child


def status(folder: Path, config: PopulationConfig) -> dict[str, Any]:
    """The state of a part, from its checkpoint: `new`, `stopped`, `finished` or `diverged`, with its step and failures."""
    found = manifest(folder / CHECKPOINT)
    meta: dict[str, Any] = {"step": 0, "failures": {}} if found is None else found["meta"]
    failures = list(meta["failures"].values())
    state = "finished" if meta["step"] >= config.steps else "stopped" if meta["step"] else "new"
    out = {"state": state, "step": meta["step"], "failures": failures}
    if failures and len(failures) == len(config.agents):
        out |= {"state": "diverged", "reason": failures[0]["reason"]}
    return out


def train_part(
    channel: Sender,
    address: str,
    below: str,
    config: dict[str, Any],
    workers: int,
    checkpoint_minutes: float,
    keep_replay: bool,
    until: float | None,
) -> dict[str, Any]:
    """The function of a part's process: train its population to the last step, or until a time of day, and report progress."""
    settings = PopulationConfig.from_json(config)
    with Sigterm() as sigterm, opened(address, below) as place, _patient_lock(place):
        if is_over(until):  # it has waited for a free machine
            return status(place, settings)
        tidy_part(place)
        from marginax.deep.population import Population

        with Population(settings, workers=workers, folder=place) as population:
            push(place)
            spread_threads()
            marks: list[tuple[float, int]] = []
            said, saved = 0.0, _saved(place)

            def stop() -> bool:
                late = until is not None and time.time() + population.seconds_to_save >= until
                return sigterm.seen or late

            def report(population: Population, lines: list[dict[str, Any]]) -> None:
                nonlocal said, saved
                if _saved(place) != saved:
                    saved = _saved(place)
                    push(place)
                now = time.monotonic()
                if lines or now - said >= 0.2:
                    said = now
                    marks.append((now, population.step))
                    del marks[:-40]
                    speed = (marks[-1][1] - marks[0][1]) / max(marks[-1][0] - marks[0][0], 1e-9)
                    channel.send({"step": population.step, "speed": speed, "lines": lines})

            options: dict[str, Any] = {"checkpoint_minutes": checkpoint_minutes, "keep_replay": keep_replay}
            try:
                population.run(stop=stop, report=report, **options)
            finally:  # where it failed, if it did
                channel.send({"step": population.step})
        return status(place, settings)


def _saved(folder: Path) -> int:
    """When the last checkpoint was written."""
    return (folder / CHECKPOINT / MANIFEST).stat().st_mtime_ns


@contextlib.contextmanager
def _patient_lock(folder: Path) -> Iterator[None]:
    """Hold a folder; wait a moment for the process of a killed command to end."""
    for attempt in range(100):
        lock = Lock(folder)
        try:
            lock.__enter__()
            break
        except RuntimeError:
            if attempt == 99:
                raise
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.__exit__(None, None, None)


class Sigterm:
    """Notes a SIGTERM instead of ending the process, and passes it on once."""

    def __init__(self) -> None:
        self.seen, self._sent = False, set[int]()

    def __enter__(self) -> Sigterm:
        def note(number: int, frame: FrameType | None) -> None:
            self.seen = True

        self._before: Any = None
        with contextlib.suppress(ValueError):  # signals belong to the main thread
            self._before = signal.signal(signal.SIGTERM, note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)

    def forward(self, children: Iterable[Child]) -> None:
        """Pass it on to processes, if it has come."""
        for child in children if self.seen else ():
            if child.pid not in self._sent:
                self._sent.add(child.pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGTERM)


def is_over(until: float | None) -> bool:
    """Whether a time of day has come."""
    return until is not None and time.time() >= until


def remove_temporary(folder: Path) -> None:
    """Remove what a killed process was writing; the caller holds the folder."""
    for path in folder.glob(".?*.*.*"):  # .NAME.ENDING.RANDOM
        path.unlink(missing_ok=True)


def tidy_part(folder: Path) -> None:
    """Remove what a killed process left in a part's folder."""
    remove_temporary(folder)
    found = manifest(folder / CHECKPOINT)
    if found is not None:
        tidy(folder / CHECKPOINT, found["files"])
