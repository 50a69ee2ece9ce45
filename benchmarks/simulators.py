"""Steps per second of every simulator on one core: MuJoCo alone beside dm_control, PyBullet alone beside Gymnasium.

python benchmarks/simulators.py
"""

import argparse
import time

import numpy as np

from marginax.simulators import Simulator, make
from marginax.simulators.gymnasium import GymnasiumSimulator, pybullet_id

PAIRS = [("dm_control/cheetah-run", "mujoco/cheetah-run"), ("dm_control/walker-run", "mujoco/walker-run")]
PYBULLET = ["HalfCheetah", "Ant", "Hopper", "Walker2D"]
OTHERS = ["HalfCheetah-v5", "Pendulum-v1"]


def rate(simulator: Simulator, steps: int, repeats: int = 3) -> float:
    """The best of some runs: steps per second of CPU time under random actions, resets included."""
    simulator.reset()
    draw = np.random.default_rng(0).uniform
    actions = draw(simulator.action_low, simulator.action_high, (steps, simulator.action_size)).astype(
        np.float32
    )
    best = 0.0
    for _ in range(repeats):
        begun = time.process_time()
        for action in actions:
            *_, terminated, truncated = simulator.step(action)
            if terminated or truncated:
                simulator.reset()
        best = max(best, steps / (time.process_time() - begun))
    simulator.close()
    return best


def bare_rate(task: str, steps: int, repeats: int = 3) -> float:
    """What a PyBullet task would reach if nothing but `stepSimulation` took time, on the same states."""
    best = 0.0
    for _ in range(repeats):
        simulator, spent = make(f"pybullet/{task}", 0), 0.0
        simulate = simulator._simulate

        def timed(simulate=simulate) -> None:
            nonlocal spent
            begun = time.process_time()
            simulate()
            spent += time.process_time() - begun

        simulator._simulate = timed
        rate(simulator, steps, repeats=1)
        best = max(best, steps / spent)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print("| simulator | steps/s | against dm_control |\n|---|---|---|")
    for theirs, ours in PAIRS:
        base, bare = rate(make(theirs, 0), steps), rate(make(ours, 0), steps)
        print(f"| `{theirs}` | {base:,.0f} | 1 |\n| `{ours}` | {bare:,.0f} | {bare / base:.1f} |", flush=True)
    for name in OTHERS:
        print(f"| `{name}` | {rate(make(name, 0), steps):,.0f} | |", flush=True)
    print(
        "\n| simulator | Gymnasium's, steps/s | ours | ratio | `stepSimulation` alone |\n|---|---|---|---|---|"
    )
    for task in PYBULLET:
        theirs = rate(GymnasiumSimulator(pybullet_id(task), 0), steps)
        ours, bare = rate(make(f"pybullet/{task}", 0), steps), bare_rate(task, steps)
        print(
            f"| `pybullet/{task}` | {theirs:,.0f} | {ours:,.0f} | {ours / theirs:.1f} | {bare:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
