"""One seed in a process of its own: `python -m marginax.deep.worker FOLDER SEED`, progress as JSON lines.

A seed is a program by itself, so the seeds of a run cannot influence one another. The lines go to standard output;
when nobody reads them any more (the command that started the process was killed) the process ends.
"""

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from marginax.deep.run import load_run, seed_folder


def environment(folder: Path, processes: int, cores: int) -> dict[str, str]:
    """Environment variables for one of so many processes that share the cores and the run in a folder.

    XLA gives the same bits whatever the number of its threads; NumPy's matrix products need not, so they get
    one. Compiled programs are kept beside the run, for its other seeds and for when it is carried on.

    >>> environment(Path("runs"), processes=2, cores=4)["NPROC"]
    '2'
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    fixed = {
        "NPROC": str(max(1, cores // processes)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONUNBUFFERED": "1",
    }
    return {**wanted, **os.environ, **fixed, **dict.fromkeys(names, "1")}


def spread_threads() -> bool:
    """Give each of XLA's threads a core of its own, if there are as many of them as cores; returns whether it did.

    They wake one another, and Linux likes to run a thread on the core of the one that woke it: then all of them
    may share one core for as long as the process lives. Nothing is done on other systems.

    >>> cores = os.sched_getaffinity(0)
    >>> _ = spread_threads()
    >>> os.sched_getaffinity(0) == cores
    True
    """
    threads = sorted(
        int(path.parent.name)
        for path in Path("/proc/self/task").glob("*/comm")
        if path.read_text().strip() == "tf_XLAEigen"
    )
    if not hasattr(os, "sched_getaffinity") or len(threads) != len(os.sched_getaffinity(0)):
        return False
    for thread, core in zip(threads, sorted(os.sched_getaffinity(0)), strict=True):
        os.sched_setaffinity(thread, {core})
    return True


@contextmanager
def only_one(folder: Path, patience: float = 60.0) -> Iterator[None]:
    """Hold the folder for this process alone; wait for one that is about to end.

    Raises:
        RuntimeError: If another process still holds it after `patience` seconds.

    >>> import tempfile
    >>> with only_one(Path(tempfile.mkdtemp())):
    ...     pass
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"another process is training in {str(folder)!r}.") from None
                time.sleep(0.1)
        yield


def main(arguments: list[str]) -> int:
    """Train one seed of the run in a folder; returns the exit status.

    >>> main([])
    2
    """
    if len(arguments) != 2:
        print("usage: python -m marginax.deep.worker FOLDER SEED", file=sys.stderr)
        return 2
    folder, seed = Path(arguments[0]), int(arguments[1])

    def report(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    try:
        with only_one(seed_folder(folder, seed)):
            from marginax.deep.train import Trainer

            trainer = Trainer(load_run(folder), seed, seed_folder(folder, seed), report)
            spread_threads()
            status = trainer.train()
            report({"seed": seed, **status})
    except BrokenPipeError:
        os._exit(1)  # nobody is listening: leave without touching the streams again
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        report({"seed": seed, "state": "failed", "reason": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
