"""Beyond one machine: what a log and a sweep cost on 1 to 100 nodes, estimated from rates that are measured here.

    python benchmarks/scale_out.py                  # measure rates, print the tables
    python benchmarks/scale_out.py --compare        # the same log and experiment on this machine and through Ray

The model, for a log of n transitions on m cores:

    seconds = start + n · (CPU seconds per transition) / m + n · (bytes per transition) / (nodes · bandwidth)
              + (bytes of the sums) · ⌈log₈ m⌉ / bandwidth + driver

`driver` (solving the model, intervals, the verdict) and the merging of sums are the share that cannot be spread. Rates are
differences between two sizes, in CPU time, so that neither a busy machine nor what is done once disturbs them.
"""

import argparse
import io
import math
import pickle
import tempfile
import time
from pathlib import Path

import numpy as np
import rich.console

from evaluate import DISCOUNT, NAMES, make
from marginax.engine import Task
from marginax.engine import make as make_engine
from marginax.engine.local import Local
from marginax.experiments import runner
from marginax.experiments.chain import Chain
from marginax.offline import evaluate

START = 20.0  # seconds until the workers of a running cluster have imported JAX
BANDWIDTH = 1e9  # bytes per second and node, from storage and between nodes


class Weighed(Local):
    """Counts the bytes that a driver would receive."""

    remote, places, received = True, 1, 0

    def crew(self, make, arguments):
        crew = super().crew(make, arguments)
        reduce, call = crew.reduce, crew.call

        def counted_reduce(*given, **named):
            before = self.received  # here it calls all objects itself
            found = reduce(*given, **named)
            self.received = before + len(pickle.dumps(found))
            return found

        def counted_call(*given, **named):
            found = list(call(*given, **named))
            self.received += len(pickle.dumps(found))
            return iter(found)

        crew.reduce, crew.call = counted_reduce, counted_call
        return crew


def parts(folder: Path, transitions: int, files: int) -> Path:
    """A log in several files."""
    import pyarrow.parquet as pq

    folder.mkdir()
    make(folder.parent / "one.parquet", transitions)
    table = pq.read_table(folder.parent / "one.parquet")
    episodes = table["episode"].to_numpy()
    ends = np.append(np.flatnonzero(np.diff(episodes)) + 1, len(episodes))
    cuts = [0, *ends[np.searchsorted(ends, np.linspace(0, len(episodes), files + 1)[1:])]]
    for k in range(files):
        pq.write_table(table.slice(cuts[k], cuts[k + 1] - cuts[k]), folder / f"{k:03}.parquet")
    return folder


def cpu_seconds(folder: Path, engine) -> float:
    begun = time.process_time()
    policy = folder.parent / "pi.npy"
    evaluate(folder, policy, discount=DISCOUNT, estimators=NAMES, engine=engine)
    return time.process_time() - begun


def measure(scratch: Path, transitions: int) -> dict[str, float]:
    """Rates of a log: CPU seconds and bytes for each transition, bytes to the driver, seconds that cannot be spread."""
    sizes, seconds, received, stored = (transitions // 4, transitions), [], [], 0
    for size in sizes:
        folder = parts(scratch / f"log-{size}", size, files=4)
        cpu_seconds(folder, "local")  # compile, and fill the cache of files
        weighed = Weighed(1)
        seconds.append(cpu_seconds(folder, weighed))
        received.append(weighed.received)
        stored = sum(path.stat().st_size for path in folder.iterdir())
    rate = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    grows = (received[1] - received[0]) / (sizes[1] - sizes[0])
    return {
        "seconds": rate,
        "driver": max(0.0, seconds[0] - rate * sizes[0]),
        "bytes": stored / transitions,
        "sums": received[0] - grows * sizes[0],
        "received": grows,
    }


def table_of_logs(rates: dict[str, float], cores: int, price: float) -> None:
    print(f"| transitions | nodes ({cores} cores) | minutes | not spread | bytes to the driver | cost |")
    print("|---:|---:|---:|---:|---:|---:|")
    for n in (1e9, 1e10, 1e11):
        for nodes in (1, 10, 100):
            spread = n * rates["seconds"] / (nodes * cores) + n * rates["bytes"] / (nodes * BANDWIDTH)
            sent = rates["sums"] + n * rates["received"]
            levels = math.ceil(math.log(max(nodes * cores, 2), 8))
            alone = START + rates["driver"] + sent * levels / BANDWIDTH
            total = spread + alone
            print(
                f"| {n:.0e} | {nodes} | {total / 60:.1f} | {alone / total:.0%} | {sent / 1e6:,.0f} MB "
                f"| {total / 3600 * nodes * price:.2f} |"
            )


def table_of_sweeps(rate: float, cores: int, price: float) -> None:
    print(f"| runs of 1M steps | nodes ({cores} cores) | hours | cost |")
    print("|---:|---:|---:|---:|")
    for runs in (100, 1000, 10_000):
        for nodes in (1, 10, 100):
            rounds = math.ceil(runs / (nodes * cores))
            hours = (START + rounds * 1e6 / rate) / 3600
            print(f"| {runs} | {nodes} | {hours:.1f} | {hours * nodes * price:,.0f} |")


def compare(scratch: Path, transitions: int, seeds: int) -> None:
    """A log and a tabular experiment on this machine and through Ray: seconds beyond start-up, on a machine that does nothing else.

    Of the log, what one with a tenth of the transitions takes counts as start-up: for each log Ray starts processes that import JAX.
    """
    logs = [parts(scratch / f"compared-{n}", n, files=20) for n in (transitions // 10, transitions)]

    def log(place) -> float:
        taken = []
        for folder in (logs[0], *logs):  # the first warms up
            begun = time.perf_counter()
            evaluate(folder, scratch / "pi.npy", discount=DISCOUNT, estimators=NAMES, engine=place)
            taken.append(time.perf_counter() - begun)
        return taken[2] - taken[1]

    def table(place) -> float:
        list(place.run([Task(f"{k}", _import) for k in range(4)]))
        begun = time.perf_counter()
        quiet = rich.console.Console(file=io.StringIO())
        runner.run([Chain(seeds=seeds)], Path(tempfile.mkdtemp(dir=scratch)), engine=place, console=quiet)
        return time.perf_counter() - begun

    print("| job, beyond start-up | local, s | Ray, s | ratio |")
    print("|---|---:|---:|---:|")
    for name, job in (
        (f"log of {transitions:,} transitions", log),
        (f"`reproduce chain`, {seeds} seeds", table),
    ):
        seconds = []
        for engine in ("local", "ray"):
            with make_engine(engine, workers=2) as place:
                seconds.append(job(place))
        print(f"| {name} | {seconds[0]:.1f} | {seconds[1]:.1f} | {seconds[1] / seconds[0]:.2f} |", flush=True)


def _import(sender) -> None:
    """Start-up: what the experiment imports."""
    import jax

    jax.devices()
    Chain().parts()
    time.sleep(1.0)  # so that every worker gets one


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--transitions", type=float, default=1e7, help="size of the larger log that is measured"
    )
    parser.add_argument(
        "--steps-per-second", type=float, default=60.0, help="of one agent on a core (td3.py)"
    )
    parser.add_argument("--cores", type=int, default=16, help="of a node")
    parser.add_argument("--price", type=float, default=0.8, help="of a node for an hour")
    parser.add_argument(
        "--compare", action="store_true", help="run one log and one experiment here and through Ray"
    )
    parser.add_argument("--seeds", type=int, default=20, help="of the experiment that --compare runs")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.compare:
            compare(Path(folder), int(given.transitions), given.seeds)
            return
        rates = measure(Path(folder), int(given.transitions))
        print(
            f"{1e6 * rates['seconds']:.2f} CPU seconds per million transitions, {rates['bytes']:.1f} bytes read per "
            f"transition, {rates['sums'] / 1e6:.0f} MB of sums and {rates['received']:.2f} bytes per transition sent to the "
            f"driver, {rates['driver']:.1f} s that cannot be spread\n"
        )
        table_of_logs(rates, given.cores, given.price)
        print()
        table_of_sweeps(given.steps_per_second, given.cores, given.price)


if __name__ == "__main__":
    main()
