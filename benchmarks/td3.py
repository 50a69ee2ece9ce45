"""Environment steps a second of TD3 on HalfCheetah-v5: one update a step, networks 2×256, batch 100.

    python benchmarks/td3.py [--peers PYTHON] [--seconds 15] [--processes 2]

The peers need torch and live in an environment of their own, whose Python is given:

    uv venv .venv-peers && uv pip install --python .venv-peers stable-baselines3 sbx-rl "gymnasium[mujoco]"
    python benchmarks/td3.py --peers .venv-peers/bin/python

Every contestant is measured alone with all cores, and as several processes at once with their share of the cores each (all of
them start counting at the same moment; the figure is their sum). The last column counts steps by processor time, which other
work on the machine disturbs little. Compilation and the first steps are left out.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import tyro

from marginax.deep.run_machine import part_environment, spread_threads
from marginax.engine.processes import cores

OURS = {
    "marginax one-step": ["one-step"],
    "marginax retrace": ["retrace"],
    "marginax marginalized": ["marginalized", "--target-steps", "one"],
    "marginax marginalized, all later steps": ["marginalized", "--target-steps", "all"],
}
PEERS = {"stable-baselines3": "sb3", "SBX": "sbx", "cleanrl JAX (its loop)": "cleanrl"}


def measure(operator: str, target_steps: str, seconds: float) -> None:
    """One of our own processes: train, say `ready`, wait for a line, print steps a second of clock and processor."""
    from marginax.deep.config import TD3Config
    from marginax.deep.population import Population
    from marginax.deep.run_config import PopulationConfig

    settings = {"operator": operator, "target_steps": target_steps, "random_steps": 1000}
    agent = TD3Config.preset("spinning-up", **settings)  # as the peers have them
    config = PopulationConfig(
        simulator="HalfCheetah-v5",
        groups={"td3": agent},
        seeds=(os.getpid() % 1000,),
        evaluate_every=1_000_000,
    )
    with Population(config) as population:
        spread_threads()
        population.run(stop=lambda: population.step >= 1500)
        print("ready", flush=True)
        sys.stdin.readline()
        first, started, cpu = population.step, time.perf_counter(), time.process_time()
        population.run(stop=lambda: time.perf_counter() - started >= seconds)
        steps = population.step - first
    print(steps / (time.perf_counter() - started), steps / (time.process_time() - cpu), flush=True)


def variables(command: list[str], processes: int) -> dict[str, str]:
    """Environment variables of one of so many processes: a share of the cores each, ours as `marginax train` has them."""
    share = max(1, cores() // processes)
    if command[1] == __file__:
        own = {**os.environ, **part_environment(share)}
    else:
        threads = ("NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        own = {**os.environ, **dict.fromkeys(threads, str(share))}
    return {**own, "JAX_PLATFORMS": "cpu", "MUJOCO_GL": "disabled"}


def race(command: list[str], processes: int) -> tuple[float, float]:
    """Steps a second of so many processes together, and of each in a second of processor time."""
    own = variables(command, processes)
    runners = [
        subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for runner in runners:
        while (line := runner.stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"{' '.join(command)} ended before it was ready.")
    for runner in runners:
        runner.stdin.write("go\n")
        runner.stdin.flush()
    figures = [[float(word) for word in runner.communicate()[0].split()[-2:]] for runner in runners]
    return sum(f[0] for f in figures), sum(f[1] for f in figures) / processes


def main(
    peers: Path | None = None,
    seconds: float = 15.0,
    processes: int = 2,
    operator: str | None = None,
    target_steps: str = "all",
) -> None:
    """Measure all contestants one after the other and print a table.

    Args:
        peers: Python of the environment with the peers; ours alone when omitted.
        seconds: Time each is measured for.
        processes: Processes at once in the second column.
        operator: Only for the processes that this script starts: which one to measure.
        target_steps: Likewise.
    """
    if operator is not None:
        measure(operator, target_steps, seconds)
        return
    commands = {
        name: [sys.executable, __file__, "--seconds", str(seconds), "--operator", *words]
        for name, words in OURS.items()
    }
    if peers is not None:
        script = str(Path(__file__).with_name("td3_peers.py"))
        commands |= {name: [str(peers), script, word, str(seconds)] for name, word in PEERS.items()}
    print(f"| steps/s | alone, all cores | {processes} processes, in total | a second of one core |")
    print("|---|---|---|---|")
    for name, command in commands.items():
        (alone, _), (total, single) = race(command, 1), race(command, processes)
        print(f"| {name} | {alone:.0f} | {total:.0f} | {single:.0f} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
