"""The chain experiment against a plain NumPy loop written straight from Algorithm 2: same trajectories, same results.

python benchmarks/tabular.py [--seeds 100] [--iterations 500]
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np

from marginax import learning, problems, traces, weights
from marginax.experiments import measures

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from reference import algorithm2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=500)
    options = parser.parse_args()
    problem = problems.chain(n=10, actions=5)
    mdp, pi, mu = problem
    stream = jax.block_until_ready(measures.streams(problem, range(options.seeds), options.iterations, 10))
    states, actions, rewards = (np.asarray(f) for f in (stream.states, stream.actions, stream.rewards))
    rewards = rewards.astype(float)
    retrace = traces.retrace(pi, mu)
    operators = {
        "one-step": (np.zeros_like(retrace), "multi-step", None),
        "Retrace": (retrace, "multi-step", None),
        "marginalized, Monte Carlo": (
            retrace,
            "monte-carlo",
            weights.MonteCarlo.init(10, 5, mdp.discount, factored=False),
        ),
    }
    print(f"chain of 10 states and 5 actions, {options.seeds} seeds, {options.iterations} iterations\n")
    print(
        "| operator | NumPy loop, s | marginax, s | with compilation, s | times faster | largest difference |"
    )
    print("|---|---|---|---|---|---|")
    totals = np.zeros(3)
    for name, (c, kind, estimator) in operators.items():
        start = time.perf_counter()
        theirs = [
            algorithm2.evaluate(*episodes, pi, c, mdp.discount, kind=kind)
            for episodes in zip(states, actions, rewards, strict=True)
        ]
        loop = time.perf_counter() - start
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            ours = np.asarray(learning.evaluate(stream, pi, c, estimator))
            seconds.append(time.perf_counter() - start)
        first, again = seconds
        difference = float(np.abs(ours - np.stack(theirs)).max())
        totals += loop, again, first
        print(f"| {name} | {loop:.1f} | {again:.2f} | {first:.2f} | {loop / again:.0f} | {difference:.1e} |")
    loop, again, first = totals
    print(
        f"| all | {loop:.1f} | {again:.2f} | {first:.2f} | {loop / again:.0f} ({loop / first:.0f} with compilation) | |"
    )


if __name__ == "__main__":
    main()
