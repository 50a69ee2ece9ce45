"""Figure 3: TD3 with one-step, multi-step and marginalized targets on simulated control tasks.

`marginax reproduce control`, or, where only JAX and a simulator are installed, `python -m
marginax.experiments.control`. Every task is one population (operators × seeds); a run that was stopped carries on
with the same command, and finished tasks are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marginax.experiments.control_settings import OPERATORS, TASKS, Settings, agent_settings, seconds, slug

__all__ = ["control"]


def run_task(
    settings: Settings,
    task: str,
    folder: Path,
    *,
    checkpoints: Path,
    workers: int,
    deadline: float | None,
    fuse: bool = True,
    shard: tuple[int, int] = (0, 1),
    checkpoint_every: float | None = None,
) -> bool:
    """Train a task's population, or the share `shard` of it; returns whether it is finished.

    Leaves `metrics-<k>-of-<n>.csv` and `.json` (settings, timing, whether it is finished) in the folder.
    """
    from marginax.deep.population import COLUMNS, Population

    config = _population(settings, task, shard)
    groups = config.groups
    base = folder / f"metrics-{shard[0]}-of-{shard[1]}"
    if _finished(base, config.to_json()):
        return True
    population = Population(config, workers=workers, folder=checkpoints / base.name, fuse=fuse)
    begun = time.perf_counter()
    started_at = population.block

    def report(p: Population) -> None:
        _write(base, COLUMNS, p, config)
        speed = (p.block - started_at) * config.block * config.agents / (time.perf_counter() - begun)
        step = p.block * config.block
        latest = {name: [r[3] for r in p.rows if r[0] == name and r[2] == p.rows[-1][2]] for name in groups}
        means = ", ".join(f"{name} {sum(x) / len(x):.0f}" for name, x in latest.items() if x)
        left = (config.steps - step) * config.agents / max(speed, 1e-9)
        print(f"{task}: {step:,} steps, {speed:,.0f} steps/s, {left:.0f} s left; {means}", flush=True)

    try:
        population.run(deadline=deadline, checkpoint_every=checkpoint_every, report=report)
    finally:
        population.close()
    _write(base, COLUMNS, population, config)
    if population.finished:
        shutil.rmtree(checkpoints / base.name, ignore_errors=True)
    t = population.timing
    print(
        f"{task}: {t.blocks} blocks in {t.wall:.1f} s (and {t.compiling:.1f} s compiling); learner busy "
        f"{t.busy:.1%}, waited for simulation {t.simulating:.1f} s, for the learner {t.waiting:.1f} s",
        flush=True,
    )
    return population.finished


def _population(settings: Settings, task: str, shard: tuple[int, int] = (0, 1)) -> Any:
    """The population of a task, or the share `shard` of it."""
    from marginax.deep.population import PopulationConfig

    seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
    operators, mine = _share(settings.operators, list(seeds), shard)
    return PopulationConfig(
        simulator=task,
        groups={name: _agent(name, settings.settings) for name in operators},
        seeds=tuple(mine),
        steps=settings.steps,
        evaluate_every=settings.evaluate_every,
        episodes=settings.episodes,
    )


def _agent(operator: str, common: str) -> Any:
    """The agent of an operator, with errors that name it."""
    from marginax.deep.config import TD3Config

    values, known = agent_settings(operator, common), [field.name for field in dataclasses.fields(TD3Config)]
    for name in values:
        if name not in known:
            raise ValueError(f"operators: {operator!r} has no setting {name!r}: choose of {', '.join(known)}")
    try:
        return TD3Config(**values)
    except ValueError as error:
        raise ValueError(f"operators: {operator!r}: {error}") from None


def _check(settings: Settings) -> None:
    """Find what is wrong with the settings before anything is run."""
    from marginax.simulators import make

    if settings.seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {settings.seeds}")
    for name in settings.operators:
        if settings.operators.count(name) > 1:
            raise ValueError(f"operators must be different, got {name!r} twice")
    for task in settings.tasks:
        _population(settings, task)
        make(task, seed=0).close()


def _share(operators: Sequence[str], seeds: list[int], shard: tuple[int, int]) -> tuple[list[str], list[int]]:
    """The operators and seeds of share k of n: seeds are dealt out first, then operators."""
    k, n = shard
    if n <= len(seeds):
        return list(operators), seeds[k::n]
    across = len(range(k % len(seeds), n, len(seeds)))  # shares that this seed is dealt out to
    return list(operators)[k // len(seeds) :: across], [seeds[k % len(seeds)]]


def _finished(base: Path, config: dict[str, Any]) -> bool:
    path = base.with_suffix(".json")
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text())
    except ValueError:
        raise ValueError(f"the earlier result {path} is damaged; remove it to compute it again") from None
    return bool(found.get("finished")) and found.get("config") == json.loads(json.dumps(config))


def _write(base: Path, columns: Sequence[str], population: Any, config: Any) -> None:
    from marginax._files import atomic_write, write_csv

    write_csv(base.with_suffix(".csv"), columns, sorted(population.rows))
    data = {
        "finished": population.finished,
        "config": config.to_json(),
        "timing": {**dataclasses.asdict(population.timing), "busy": population.timing.busy},
        "replaced_workers": population.pool.replaced,
        "platform": _platform(),
    }
    text = json.dumps(data, indent=1)
    atomic_write(base.with_suffix(".json"), lambda file: file.write(text.encode()))


def _platform() -> dict[str, Any]:
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": device.platform,
        "cores": _cores(),
        "jax": jax.__version__,
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def control(
    settings: Settings,
    out: Path,
    *,
    checkpoints: Path | None = None,
    time_limit: str | None = None,
    workers: int | None = None,
    shards: int | None = None,
    fuse: bool = True,
    checkpoint_minutes: float = 10.0,
    report: bool = True,
) -> bool:
    """Run the experiment, or as much of it as the time limit allows; returns whether all of it is finished.

    On an accelerator one process learns and the other cores simulate. On CPU alone, one process a core learns and
    simulates its share of the agents, which is faster than one program on all cores.

    Args:
        settings: What is run.
        out: Results go to `out/control`.
        checkpoints: Where checkpoints go (they hold the replay buffers); by default with the results.
        time_limit: Such as `9m` or `90s`: stop cleanly, with a checkpoint, before so much time is over.
        workers: Simulation processes; by default one for each core but one, or none on CPU alone.
        shards: Processes that learn; by default one, or one for each core on CPU alone.
        fuse: Whether all operators advance in one program.
        checkpoint_minutes: Minutes between checkpoints on the way.
        report: Whether to write figure, table and claims at the end.

    >>> import tempfile
    >>> control(Settings(tasks=()), Path(tempfile.mkdtemp()), report=False)
    True
    """
    deadline = None if time_limit is None else time.monotonic() + seconds(time_limit)
    _check(settings)
    folder = out / "control"
    folder.mkdir(parents=True, exist_ok=True)
    finished = True
    for task in settings.tasks:
        place = folder / slug(task)
        place.mkdir(exist_ok=True)
        saved = (checkpoints or folder) / slug(task)
        count = shards or _default_shards(settings)
        _forget_other_shards(place, count)
        if count == 1:
            done = run_task(
                settings,
                task,
                place,
                checkpoints=saved,
                workers=_default_workers() if workers is None else workers,
                deadline=deadline,
                fuse=fuse,
                checkpoint_every=60 * checkpoint_minutes,
            )
        else:
            done = _run_shards(settings, task, place, saved, count, deadline, checkpoint_minutes)
        finished &= done
        if deadline is not None and not done:
            break
    if finished and report:
        _report(settings, out)
    return finished


def _report(settings: Settings, out: Path) -> None:
    from marginax.experiments.command import write_report
    from marginax.experiments.control_report import write

    write(settings, out / "control")
    print(f"{write_report(out)}", flush=True)


def _default_shards(settings: Settings) -> int:
    import jax

    agents = settings.seeds * len(settings.operators)
    return min(_cores(), agents) if jax.default_backend() == "cpu" else 1


def _default_workers() -> int:
    import jax

    return 0 if jax.default_backend() == "cpu" else max(1, _cores() - 1)


def _forget_other_shards(place: Path, count: int) -> None:
    for path in place.glob("metrics-*-of-*"):
        if not path.stem.endswith(f"-of-{count}"):
            raise ValueError(
                f"{path} was made with another number of shards: remove it or choose another folder"
            )


def _run_shards(
    settings: Settings,
    task: str,
    place: Path,
    saved: Path,
    count: int,
    deadline: float | None,
    checkpoint_minutes: float,
) -> bool:
    """One process for each share, single-threaded, so that they do not fight for the cores."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    left = None if deadline is None else max(1.0, deadline - time.monotonic())
    job = {
        "settings": dataclasses.asdict(settings),
        "task": task,
        "folder": str(place),
        "checkpoints": str(saved),
        "seconds": left,
        "checkpoint_every": 60 * checkpoint_minutes,
    }
    processes = []
    for k in range(count):
        text = json.dumps({**job, "shard": [k, count]})
        code = "import sys; from marginax.experiments.control import _shard_main; _shard_main(sys.argv[1])"
        processes.append(subprocess.Popen([sys.executable, "-c", code, text], env=environment))
    try:
        codes = [process.wait() for process in processes]
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    if bad := [k for k, code in enumerate(codes) if code not in (0, 3)]:
        raise RuntimeError(
            f"share {bad[0]} of {task} ended with exit code {codes[bad[0]]}; its checkpoint is intact"
        )
    return all(code == 0 for code in codes)


def _settings(raw: dict[str, Any]) -> Settings:
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in raw.items()}
    return Settings(**values)


def _shard_main(text: str) -> None:
    job = json.loads(text)
    done = run_task(
        _settings(job["settings"]),
        job["task"],
        Path(job["folder"]),
        checkpoints=Path(job["checkpoints"]),
        workers=0,
        deadline=None if job["seconds"] is None else time.monotonic() + job["seconds"],
        shard=(job["shard"][0], job["shard"][1]),
        checkpoint_every=job["checkpoint_every"],
    )
    sys.exit(0 if done else 3)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line, with nothing but the standard library."""
    parser = argparse.ArgumentParser(prog="marginax reproduce control", description=__doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=list(TASKS), help="simulators by name; default: %(default)s")
    add(
        "--operators",
        nargs="+",
        default=list(OPERATORS),
        help="names, with settings after a colon as in retrace:decay=0.9,sequence_length=10; default: %(default)s",
    )
    add("--seeds", type=int, default=5, help="runs of each operator; default: %(default)s")
    add("--first-seed", type=int, default=0, help="the first of them; default: %(default)s")
    add("--steps", type=int, default=1_000_000, help="environment steps of each run; default: %(default)s")
    add("--evaluate-every", type=int, default=10_000, help="steps between evaluations; default: %(default)s")
    add("--episodes", type=int, default=5, help="episodes of an evaluation; default: %(default)s")
    add("--settings", default="", help="settings of the agent for all operators, name=value,…")
    add("--out", type=Path, default=Path("out"), help="folder of the results; default: %(default)s")
    add("--checkpoints", type=Path, help="folder of the checkpoints; default: beside the results")
    add("--time-limit", help="such as 9m: stop cleanly, with a checkpoint, before so much time is over")
    add("--workers", type=int, help="processes that simulate; default: a core each, but one")
    add("--shards", type=int, help="processes that share the agents on a CPU; default: a core each")
    add("--separate", action="store_true", help="a program for each operator")
    add("--checkpoint-minutes", type=float, default=10.0, help="between checkpoints; default: %(default)s")
    add("--no-report", action="store_true", help="metrics only, no figures, table and claims")
    add("--report-only", action="store_true", help="report on the metrics that are there; train nothing")
    given = parser.parse_args(arguments)
    names = [field.name for field in dataclasses.fields(Settings)]
    values = {name: getattr(given, name) for name in names}
    settings = _settings(values)
    if given.report_only:
        _report(settings, given.out)
        return 0
    finished = control(
        settings,
        given.out,
        checkpoints=given.checkpoints,
        time_limit=given.time_limit,
        workers=given.workers,
        shards=given.shards,
        fuse=not given.separate,
        checkpoint_minutes=given.checkpoint_minutes,
        report=not given.no_report,
    )
    if not finished:
        print("stopped at the time limit; the same command carries on", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
