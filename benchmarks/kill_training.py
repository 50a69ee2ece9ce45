"""Kill training at random moments, and see whether it ends as if nothing had happened.

    python benchmarks/kill_training.py --kills 50

Two kinds of runs, on four simulators: `train` (every seed a process) and a population (two operators in one program,
simulated by two worker processes). Each run is trained once without interruption, and once with kills at random
moments: SIGKILL of the command, of a part's process or of a simulation worker, SIGTERM and Ctrl-C of the command. A run
whose command ended is started again. In the end its metrics, policies and networks must equal the uninterrupted ones bit
by bit, and no process, lock, temporary file or shared memory may be left. Linux only (it reads /proc).
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import numpy as np
import tyro

SIMULATORS = ("Pendulum-v1", "mujoco/cheetah-run", "dm_control/reacher-easy", "HalfCheetah-v5")
MARK = "MARGINAX_KILL_TRAINING"
VICTIMS = ("command", "part", "worker", "SIGTERM", "SIGINT")


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is killed."""

    kills: int = 50
    """Kills in all, shared by the runs."""
    simulators: tuple[str, ...] = SIMULATORS
    kinds: tuple[str, ...] = ("train", "population")
    steps: int = 1000
    """Steps of every agent."""
    seed: int = 0
    """Of the moments and the victims."""
    child: str = ""
    """For the processes that this script starts: what to train."""


def train(simulator: str, kind: str, steps: int, folder: str) -> None:
    """The command that is killed."""
    from marginax.deep.config import TD3Config
    from marginax.deep.display import Display
    from marginax.deep.run import open_run
    from marginax.deep.run import train as train_run
    from marginax.deep.run_config import PopulationConfig

    small = {
        "hidden": (16, 16),
        "batch_size": 16,
        "random_steps": 100,
        "update_after": 100,
        "replay_size": 600,
    }
    groups = {"marginalized": TD3Config(operator="marginalized", **small)}
    if kind == "population":
        groups["retrace"] = TD3Config(operator="retrace", **small)
    config = PopulationConfig(
        simulator=simulator,
        groups=groups,
        seeds=(0, 1),
        steps=steps,
        evaluate_every=steps // 20,
        episodes=1,
        overlap=kind == "population",
    )
    run = open_run(Path(folder), config, together=kind == "population")
    with Display(simulator, steps, list(run.parts)) as display:
        try:
            outcome = train_run(Path(folder), run, workers=2, checkpoint_minutes=0.005, listen=display.listen)
        except KeyboardInterrupt:
            sys.exit(130)
    sys.exit(0 if all(found["state"] == "finished" for found in outcome.values()) else 1)


def command(simulator: str, kind: str, steps: int, folder: Path, mark: str) -> subprocess.Popen:
    """Start the command in a session of its own, with a mark that its whole family inherits."""
    job = json.dumps({"simulator": simulator, "kind": kind, "steps": steps, "folder": str(folder)})
    words = [sys.executable, __file__, "--child", job]
    return subprocess.Popen(
        words,
        env={**os.environ, MARK: mark, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        text=True,
    )


def family(mark: str) -> list[int]:
    """All living processes with the mark."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            ended = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if not ended and f"{MARK}={mark}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
        except OSError:
            continue
    return found


def generation(pid: int, top: int) -> int:
    """How far a process is below the command; -1 if it is not."""
    for depth in range(5):
        if pid == top:
            return depth
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return -1
    return -1


def strike(victim: str, top: int, mark: str, rng: random.Random) -> bool:
    """Kill a victim if there is one; returns whether there was."""
    if victim in ("SIGTERM", "SIGINT", "command"):
        os.kill(top, signal.SIGKILL if victim == "command" else signal.Signals[victim])
        return True
    depth = {"part": 1, "worker": 2}[victim]
    found = [p for p in family(mark) if generation(p, top) == depth and _is_python(p)]
    if not found:
        return False
    try:
        os.kill(rng.choice(found), signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def _is_python(pid: int) -> bool:
    try:
        return b"marginax.engine.processes" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def content(folder: Path) -> dict[str, object]:
    """All that must be equal in the end: metrics, policies, networks, replay buffers and simulators."""
    out: dict[str, object] = {}
    for path in sorted(folder.rglob("metrics.jsonl")):
        out[str(path.relative_to(folder))] = path.read_bytes()
    for path in [*folder.rglob("policy-*.npz"), *folder.rglob("checkpoint/*.npz")]:
        if path.name.startswith("replay"):
            continue  # cut into pieces wherever a checkpoint was
        with np.load(path) as arrays:
            for name in arrays.files:
                out[f"{path.relative_to(folder)}:{name}"] = (arrays[name].dtype.str, arrays[name].tobytes())
    for place in sorted(folder.rglob("checkpoint")):
        pieces: dict[str, dict[int, bytes]] = {}
        for path in place.glob("replay-*.npz"):
            stem, first, _ = path.stem.rsplit("-", 2)
            rows = np.load(path)["rows"]
            for i in range(rows.shape[1]):
                pieces.setdefault(stem, {})[int(first) + i] = rows[:, i].tobytes()
        for stem, rows in pieces.items():
            newest = max(rows)
            out[f"{place.relative_to(folder)}:{stem}"] = [rows[i] for i in range(newest - 599, newest + 1)]
    return out


def leftovers(folder: Path, mark: str, memory: set[str]) -> list[str]:
    """What should be gone: processes, locks and temporary files, shared memory."""
    deadline = time.monotonic() + 5
    while (alive := family(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {pid}" for pid in alive]
    found += [str(path) for path in folder.rglob(".*")]
    return found + sorted(_shared_memory() - memory)


def _shared_memory() -> set[str]:
    place = Path("/dev/shm")
    return {path.name for path in place.iterdir()} if place.is_dir() else set()


class Output:
    """Counts the lines that a command prints, and keeps the last."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process, self.lines, self.last = process, 0, ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines, self.last = self.lines + 1, line.strip()

    def wait_for(self, lines: int, seconds: float) -> bool:
        """Wait for a number of lines, and a moment more; returns whether the command still runs."""
        while self.process.poll() is None and self.lines < lines:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=seconds)
        return self.process.poll() is None


def torture(
    given: Options, simulator: str, kind: str, kills: int, rng: random.Random, work: Path
) -> list[str]:
    """Train without kills, and with kills until there were enough; a row of the table."""
    name = f"{kind}-{simulator.replace('/', '-')}"
    plain, killed = work / f"{name}-plain", work / f"{name}-killed"
    process = command(simulator, kind, given.steps, plain, "plain")
    output = Output(process)
    if process.wait():
        return [kind, simulator, "", "", f"cannot be trained: {output.last}", ""]
    expected, memory, mark = content(plain), _shared_memory(), uuid.uuid4().hex
    done, starts, runs = dict.fromkeys(VICTIMS, 0), 0, 0
    problems: list[str] = []
    left: list[str] = []
    victims = [v for v in VICTIMS if kind == "population" or v != "worker"]
    while sum(done.values()) < kills and not problems:
        shutil.rmtree(killed, ignore_errors=True)
        runs += 1
        finished = False
        while not finished and not problems:
            starts += 1
            process = command(simulator, kind, given.steps, killed, mark)
            output = Output(process)
            while sum(done.values()) < kills:
                lines = output.lines + rng.randrange(0, 6)
                if not output.wait_for(lines, rng.uniform(0.0, 3.0 if lines == 0 else 0.2)):
                    break
                victim = rng.choice(victims)
                if strike(victim, process.pid, mark, rng):
                    done[victim] += 1
                    if victim in ("command", "SIGTERM", "SIGINT"):
                        break
            try:
                status = process.wait(timeout=1200)
            except subprocess.TimeoutExpired:
                process.kill()
                problems.append("did not end")
                continue
            finished = status == 0
            if status not in (0, -signal.SIGKILL, 130, 143, -signal.SIGINT, -signal.SIGTERM):
                problems.append(f"ended with {status}: {output.last}")
        if not problems and content(killed) != expected:
            problems.append("DIFFERENT")
        left += leftovers(killed, mark, memory)
    counts = ", ".join(f"{n} {victim}" for victim, n in done.items() if n)
    verdict, rest = "; ".join(problems) or "equal", ", ".join(left) or "nothing"
    return [kind, simulator, counts, f"{runs} ({starts})", verdict, rest]


def main(given: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Print a row for each run; ends with status 1 if any of them is not as it should be."""
    if given.child:
        train(**json.loads(given.child))
        return
    rng, bad = random.Random(given.seed), False
    runs = [(kind, simulator) for kind in given.kinds for simulator in given.simulators]
    work = Path(tempfile.mkdtemp(prefix="kill-training-"))
    print(
        "| run | simulator | killed | runs (starts) | result | left behind |\n|---|---|---|---|---|---|",
        flush=True,
    )
    for i, (kind, simulator) in enumerate(runs):
        kills = given.kills // len(runs) + (i < given.kills % len(runs))
        row = torture(given, simulator, kind, kills, rng, work)
        print(f"| {' | '.join(row)} |", flush=True)
        bad |= row[4:] != ["equal", "nothing"]
    if not bad:
        shutil.rmtree(work)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    tyro.cli(main)
