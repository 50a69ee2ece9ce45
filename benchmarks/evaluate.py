"""How long an evaluation takes, and how much memory: ten million tabular transitions, or a million observations of CartPole.

    python benchmarks/evaluate.py                    # tabular, from a Parquet file
    python benchmarks/evaluate.py --transitions 1e6  # smaller
    python benchmarks/evaluate.py --cartpole         # observations, by every estimator

The log is made in a child process and so is each measurement, so that peak memory is that of the evaluation. CPU seconds do not depend on
what else the machine does. Tabular: importance sampling (four forms) and certainty equivalence, with intervals.
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


def lean(slope: float):
    """CartPole's softmax policy: push to the side to which the pole falls."""
    import numpy as np

    def policy(x):
        z = slope * (x[:, 2] + 0.5 * x[:, 3] + 0.1 * x[:, 1])
        right = 1 / (1 + np.exp(-z))
        return np.stack([1 - right, right], axis=1)

    return policy


target = lean(6.0)


def make_cartpole(path: Path, transitions: int) -> None:
    """Writes a log of CartPole under a softer policy as a NumPy archive; episodes stop at 200 steps."""
    import numpy as np

    rng, behaviour = np.random.default_rng(0), lean(3.0)
    parts, episode = [], 0
    while transitions > 0:
        x = rng.uniform(-0.05, 0.05, size=(2000, 4))
        alive, block = np.arange(2000), []
        for t in range(200):
            p = behaviour(x)
            a = (rng.random(len(x)) < p[:, 1]).astype(np.int64)
            y = cartpole_step(x, a)
            ended = (np.abs(y[:, 0]) > 2.4) | (np.abs(y[:, 2]) > 12 * 2 * np.pi / 360)
            columns = (episode + alive, np.full(len(x), t), a, np.ones(len(x)), ended, ~ended & (t == 199))
            block.append(np.column_stack([*columns, p[np.arange(len(x)), a], x, y]))
            x, alive = y[~ended], alive[~ended]
            if not len(x):
                break
        rows = np.concatenate(block)
        parts.append(rows[np.lexsort((rows[:, 1], rows[:, 0]))])
        transitions -= len(rows)
        episode += 2000
    rows = np.concatenate(parts)
    names = ("episode", "step", "action", "reward", "terminal", "truncated", "behaviour")
    table = dict(zip(names, rows.T, strict=False)) | {"obs": rows[:, 7:11], "next_obs": rows[:, 11:]}
    np.savez(path, **{k: v.astype("i8") if k in names[:3] else v for k, v in table.items()})


def cartpole_step(x, a):
    """Gymnasium's dynamics of CartPole, for many at once."""
    import numpy as np

    position, speed, angle, turn = x.T
    force, cos, sin = np.where(a == 1, 10.0, -10.0), np.cos(angle), np.sin(angle)
    push = (force + 0.05 * turn**2 * sin) / 1.1
    bend = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    slide = push - 0.05 * bend * cos / 1.1
    return np.column_stack(
        [position + 0.02 * speed, speed + 0.02 * slide, angle + 0.02 * turn, turn + 0.02 * bend]
    )


def measure(path: Path) -> None:
    """Evaluates the log and prints time, memory and answers as JSON."""
    begin = time.perf_counter()
    import marginax as mx

    imported = time.perf_counter()
    if path.suffix == ".npz":
        result = mx.offline.evaluate(path, target, discount=0.95)
    else:
        pi = str(path.with_name("pi.npy"))
        result = mx.offline.evaluate(path, pi, discount=DISCOUNT, estimators=NAMES, behaviour="logged")
    now = resource.getrusage(resource.RUSAGE_SELF)
    report = {
        "import_s": imported - begin,
        "evaluate_s": time.perf_counter() - imported,
        "cpu_s": now.ru_utime,  # with imports, which may come late
        "peak_mb": now.ru_maxrss / 1024,
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
    parser.add_argument("--transitions", type=float)
    parser.add_argument("--cartpole", action="store_true")
    parser.add_argument("--make", type=Path)
    parser.add_argument("--measure", type=Path)
    arguments = parser.parse_args()
    transitions = int(arguments.transitions or (1e6 if arguments.cartpole else 1e7))
    if arguments.make:
        return (make_cartpole if arguments.cartpole else make)(arguments.make, transitions)
    if arguments.measure:
        return measure(arguments.measure)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("log.npz" if arguments.cartpole else "log.parquet")
        size = ["--transitions", str(transitions), *(["--cartpole"] if arguments.cartpole else [])]
        subprocess.run([sys.executable, __file__, "--make", str(path), *size], check=True)
        output = subprocess.run(
            [sys.executable, __file__, "--measure", str(path)], check=True, capture_output=True, text=True
        )
        report = json.loads(output.stdout)
        megabytes = path.stat().st_size / 2**20
    print(
        f"{report['transitions']:,} transitions, {report['episodes']:,} episodes, a file of {megabytes:.0f} MB"
    )
    exact = "" if arguments.cartpole else f"; exact value {truth():.4f}"
    print(f"evaluate: {report['evaluate_s']:.1f} s, {report['cpu_s']:.1f} s of CPU ", end="")
    print(f"(and {report['import_s']:.1f} s to import), peak memory {report['peak_mb']:.0f} MB{exact}\n")
    print("| estimator | value | 95% interval |\n|---|---|---|")
    for name, (value, low, high) in report["answers"].items():
        print(f"| {name} | {value:.4f} | {low:.4f} to {high:.4f} |")


if __name__ == "__main__":
    main()
