"""Steps per second of every simulator on one core, and of the bare MuJoCo loop beside dm_control.

python benchmarks/simulators.py
"""

import argparse
import time

import numpy as np

from marginax.simulators import make

PAIRS = [("dm_control/cheetah-run", "mujoco/cheetah-run"), ("dm_control/walker-run", "mujoco/walker-run")]
OTHERS = ["HalfCheetah-v5", "pybullet/HalfCheetah", "pybullet/Ant", "Pendulum-v1"]


def rate(name: str, steps: int, repeats: int = 3) -> float:
    """The best of some runs: steps per second under random actions, resets included."""
    simulator = make(name, 0)
    simulator.reset()
    draw = np.random.default_rng(0).uniform
    actions = draw(simulator.action_low, simulator.action_high, (steps, simulator.action_size)).astype(
        np.float32
    )
    best = 0.0
    for _ in range(repeats):
        begun = time.perf_counter()
        for action in actions:
            *_, terminated, truncated = simulator.step(action)
            if terminated or truncated:
                simulator.reset()
        best = max(best, steps / (time.perf_counter() - begun))
    simulator.close()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    steps = parser.parse_args().steps
    print("| simulator | steps/s | against dm_control |\n|---|---|---|")
    for theirs, ours in PAIRS:
        base, bare = rate(theirs, steps), rate(ours, steps)
        print(f"| `{theirs}` | {base:,.0f} | 1 |\n| `{ours}` | {bare:,.0f} | {bare / base:.1f} |", flush=True)
    for name in OTHERS:
        print(f"| `{name}` | {rate(name, steps):,.0f} | |", flush=True)


if __name__ == "__main__":
    main()
