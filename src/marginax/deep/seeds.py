"""All seeds of a run, each in a process of its own, so many at a time, and what they say."""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from marginax.deep.run import read_status, seed_folder
from marginax.deep.worker import environment

__all__ = ["default_workers", "train_seeds"]


def default_workers(seeds: int) -> int:
    """Processes at a time: one a core, but no more than there are seeds.

    >>> default_workers(1)
    1
    """
    return max(1, min(seeds, len(os.sched_getaffinity(0))))


def train_seeds(
    folder: Path, seeds: Sequence[int], workers: int, listen: Callable[[dict[str, Any]], None]
) -> dict[int, dict[str, Any]]:
    """Train the seeds of the run in a folder, `workers` at a time.

    Args:
        folder: A folder with a saved `Run`.
        seeds: Their numbers.
        workers: Processes at a time.
        listen: Called with every message of every seed, in this thread.

    Returns:
        The last status of every seed; a process that ended without one is `failed`, with its reason.

    >>> import tempfile
    >>> train_seeds(Path(tempfile.mkdtemp()), [], 1, print)
    {}
    """
    waiting = list(seeds)
    running: dict[int, subprocess.Popen] = {}
    messages: queue.Queue[dict[str, Any]] = queue.Queue()
    outcome: dict[int, dict[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                seed = waiting.pop(0)
                running[seed] = _start(folder, seed, workers, messages)
            message = messages.get()
            seed = message["seed"]
            if "exit" in message:
                running.pop(seed).wait()
                if outcome.get(seed, {}).get("state") not in ("finished", "diverged", "failed"):
                    outcome[seed] = _lost(folder, seed, message["exit"])
                    listen({"seed": seed, **outcome[seed]})
                continue
            if "state" in message:
                outcome[seed] = {k: v for k, v in message.items() if k != "seed"}
            listen(message)
    finally:
        for process in running.values():
            process.kill()
        for process in running.values():
            process.wait()
    return outcome


def _start(folder: Path, seed: int, workers: int, messages: queue.Queue) -> subprocess.Popen:
    place = seed_folder(folder, seed)
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "marginax.deep.worker", str(folder), str(seed)]
    variables = environment(folder, workers, len(os.sched_getaffinity(0)))
    variables["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    )
    with (place / "worker.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=variables, text=True)

    def forward() -> None:
        for line in process.stdout or ():
            messages.put(json.loads(line))
        messages.put({"seed": seed, "exit": process.wait()})

    threading.Thread(target=forward, daemon=True).start()
    return process


def _lost(folder: Path, seed: int, status: int) -> dict[str, Any]:
    """What is known about a process that ended without a word."""
    log = (seed_folder(folder, seed) / "worker.log").read_text().strip().splitlines()
    reason = f"its process ended with status {status}" + (f": {log[-1]}" if log else "")
    step = read_status(seed_folder(folder, seed))["step"]
    return {"state": "failed", "step": step, "reason": reason}
