"""Ten million logged tabular transitions, evaluated from a Parquet file: time and peak memory.

    python benchmarks/evaluate.py                    # the whole comparison
    python benchmarks/evaluate.py --transitions 1e6  # smaller

The log is made in a child process and so is each measurement, so that peak memory is that of the evaluation.
Importance sampling (four forms) and certainty equivalence, with intervals, from the same file.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STATES, ACTIONS, LENGTH, DISCOUNT = 500, 6, 100, 0.99
NAMES = (
    "trajectory-is",
    "per-decision-is",
    "weighted-is",
    "weighted-per-decision-is",
    "certainty-equivalence",
)


def problem():
    import numpy as np

    rng = np.random.default_rng(0)
    successors = rng.integers(STATES, size=(STATES, ACTIONS, 4))
    rewards = rng.normal(size=(STATES, ACTIONS))
    mu = rng.dirichlet(np.full(ACTIONS, 3.0), size=STATES)
    pi = 0.9 * mu + 0.1 * rng.dirichlet(np.full(ACTIONS, 1.0), size=STATES)
    return successors, rewards, mu, pi


def make(path: Path, transitions: int) -> None:
    """Writes a log of a random MDP with four successors a pair; an episode ends with probability 1/100."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    successors, rewards, mu, pi = problem()
    np.save(path.with_name("pi.npy"), pi)
    cumulative = mu.cumsum(axis=1)
    rng = np.random.default_rng(1)
    batch, episode, writer = 10_000, 0, None
    while transitions > 0:
        length = np.minimum(rng.geometric(1 / LENGTH, size=batch), 5 * LENGTH)
        steps = int(length.max())
        x = rng.integers(STATES, size=batch)
        columns = {k: np.empty((batch, steps), v) for k, v in _TYPES.items()}
        for t in range(steps):
            a = np.minimum((rng.random(batch)[:, None] > cumulative[x]).sum(axis=1), ACTIONS - 1)
            y = successors[x, a, rng.integers(4, size=batch)]
            values = (x, a, rewards[x, a] + rng.normal(size=batch), y, mu[x, a])
            for name, column in zip(
                ("state", "action", "reward", "next_state", "behaviour"), values, strict=True
            ):
                columns[name][:, t] = column
            x = y
        inside = np.arange(steps) < length[:, None]
        flat = {name: column[inside] for name, column in columns.items()}
        flat["episode"] = np.repeat(episode + np.arange(batch), length)
        flat["step"] = np.broadcast_to(np.arange(steps, dtype=np.int32), inside.shape)[inside]
        last = np.arange(steps) == length[:, None] - 1
        flat["terminal"] = last[inside]
        keep = min(len(flat["step"]), transitions)
        ends = np.flatnonzero(flat["terminal"][:keep])
        keep = int(ends[-1]) + 1 if keep < len(flat["step"]) and len(ends) else keep
        table = pa.table({name: column[:keep] for name, column in flat.items()})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        transitions -= keep
        episode += batch
        if keep < len(flat["step"]):
            break
    writer.close()


_TYPES = {"state": "i4", "action": "i4", "reward": "f8", "next_state": "i4", "behaviour": "f8"}


def measure(path: Path) -> None:
    """Evaluates the log and prints time, memory and answers as JSON."""
    begin = time.perf_counter()
    import marginax as mx

    imported = time.perf_counter()
    result = mx.offline.evaluate(
        path, str(path.with_name("pi.npy")), discount=DISCOUNT, estimators=NAMES, behaviour="logged"
    )
    report = {
        "import_s": imported - begin,
        "evaluate_s": time.perf_counter() - imported,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "transitions": result.diagnostics["transitions"],
        "episodes": result.diagnostics["episodes"],
        "answers": {k: (a.value, a.interval.low, a.interval.high) for k, a in result.answers.items()},
    }
    print(json.dumps(report))


def truth() -> float:
    """The exact value of the target policy, episodes ending with probability 1/100 a step."""
    import numpy as np

    successors, rewards, _, pi = problem()
    p = np.zeros((STATES, STATES))
    for k in range(4):
        np.add.at(p, (np.arange(STATES)[:, None], successors[:, :, k]), pi / 4)
    going_on = DISCOUNT * (1 - 1 / LENGTH)
    return float(np.linalg.solve(np.eye(STATES) - going_on * p, (pi * rewards).sum(axis=1)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transitions", type=float, default=1e7)
    parser.add_argument("--make", type=Path)
    parser.add_argument("--measure", type=Path)
    arguments = parser.parse_args()
    if arguments.make:
        return make(arguments.make, int(arguments.transitions))
    if arguments.measure:
        return measure(arguments.measure)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.parquet"
        size = ["--transitions", str(arguments.transitions)]
        subprocess.run([sys.executable, __file__, "--make", str(path), *size], check=True)
        output = subprocess.run(
            [sys.executable, __file__, "--measure", str(path)], check=True, capture_output=True, text=True
        )
        report = json.loads(output.stdout)
        megabytes = path.stat().st_size / 2**20
    print(
        f"{report['transitions']:,} transitions, {report['episodes']:,} episodes, {megabytes:.0f} MB of Parquet"
    )
    print(f"evaluate: {report['evaluate_s']:.1f} s (and {report['import_s']:.1f} s to import), ", end="")
    print(f"peak memory {report['peak_mb']:.0f} MB; exact value {truth():.4f}\n")
    print("| estimator | value | 95% interval |\n|---|---|---|")
    for name, (value, low, high) in report["answers"].items():
        print(f"| {name} | {value:.4f} | {low:.4f} to {high:.4f} |")


if __name__ == "__main__":
    main()
