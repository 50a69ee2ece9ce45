"""The machine, for the processes of a run: its accelerator, environment variables, and a core for each thread."""

import importlib.util
import os
import platform
import sys
from pathlib import Path

from marginax.engine import processes
from marginax.engine.processes import Channel


def on_accelerator() -> bool:
    """Whether JAX would use an accelerator; asked in another process, so that this one does not take its memory."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu" or not importlib.util.find_spec("jax_plugins"):
        return False
    with processes.start(_backend, name="backend") as child:
        return child.wait() != "cpu"


def _backend(_: Channel) -> str:
    import jax

    return jax.default_backend()


def part_environment(threads: int | None) -> dict[str, str]:
    """Environment variables of a part's process, which on CPU has a number of threads.

    XLA gives the same bits whatever the number of its threads; NumPy's matrix products need not, so they get one.
    Compiled programs are kept in the user's cache, for other parts and for when a run is carried on: never in the
    run's own folder, which may have come from somebody else.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(cache / "marginax" / f"compiled-{platform.node()}"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    out = {name: os.environ.get(name, value) for name, value in wanted.items()}
    out |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    if threads is not None:
        out |= {"NPROC": str(max(1, threads)), "JAX_PLATFORMS": "cpu"}
    return out


def spread_threads() -> bool:
    """Give each of XLA's threads a core of its own, if there are as many of them as cores; returns whether it did.

    They wake one another, and Linux likes to run a thread on the core of the one that woke it: then all of them
    may share one core for as long as the process lives. Nothing is done on other systems.
    """
    if sys.platform != "linux":
        return False
    threads = sorted(
        int(path.parent.name)
        for path in Path("/proc/self/task").glob("*/comm")
        if path.read_text().strip() == "tf_XLAEigen"
    )
    places = sorted(os.sched_getaffinity(0))
    if len(threads) != len(places):
        return False
    for thread, core in zip(threads, places, strict=True):
        os.sched_setaffinity(thread, {core})
    return True
