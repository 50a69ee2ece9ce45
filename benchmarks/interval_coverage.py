"""Do the intervals hold? Coverage, error and width of every tabular estimator over repeated logs.

    python benchmarks/interval_coverage.py                                  # all problems, 200 repetitions
    python benchmarks/interval_coverage.py --problems chain --episodes 100 400

A log is drawn from the behaviour policy, the target policy is evaluated from it, and the 95% interval either
holds the exact value or does not. With 200 repetitions a true rate of 95% is measured as 92% to 98%.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import numpy as np

import marginax as mx


def chain():
    mdp, pi, mu = mx.problems.chain(n=6, actions=2, noise=0.2, discount=0.95)
    return mdp, 0.6 * pi + 0.4 * mu, mu, 100


def noisy(mdp):
    """The same MDP with rewards of standard deviation 0.2: without noise a deterministic problem is learned exactly."""
    spread = np.full(mdp.r.shape, 0.2)
    return mx.TabularMDP(mdp.p, mdp.r, mdp.discount, initial=mdp.initial, reward_std=spread)


def open_world():
    mdp, pi, mu = mx.problems.open_world(n=5, discount=0.95)
    mdp = noisy(mdp)
    return mdp, 0.3 * pi + 0.7 * mu, mu, 400


def garnet():
    mdp, pi, mu = mx.problems.garnet(20, 3, 4, seed=3, discount=0.9)
    return mdp, 0.3 * pi + 0.7 * mu, mu, 200


def frozen_lake():
    mdp = mx.problems.from_gymnasium("FrozenLake-v1", discount=0.97)
    q = mdp.optimal_values()
    return mdp, mx.policies.epsilon_greedy(q, 0.2), mx.policies.epsilon_greedy(q, 0.4), 300


def taxi():
    mdp = mx.problems.from_gymnasium("Taxi-v4", discount=0.97)
    q = mdp.optimal_values()
    return mdp, mx.policies.epsilon_greedy(q, 0.15), mx.policies.epsilon_greedy(q, 0.3), 300


PROBLEMS = {f.__name__: f for f in (chain, open_world, garnet, frozen_lake, taxi)}
EPISODES = {"chain": 200, "open_world": 200, "garnet": 200, "frozen_lake": 200, "taxi": 1000}


def measure(name: str, episodes: int, repetitions: int, estimators: list[str] | None) -> dict:
    mdp, pi, mu, horizon = PROBLEMS[name]()
    truth = float(mdp.initial @ mdp.v_values(pi))
    rows: dict[str, list[tuple[float, bool, float]]] = {}
    for k in range(repetitions):
        batch = mx.trajectories.sample(mdp, mu, jax.random.key(k), episodes=episodes, horizon=horizon)
        result = mx.offline.evaluate(batch, pi, discount=mdp.discount, estimators=estimators, seed=k)
        for answer in result.answers.values():
            row = (answer.value - truth, truth in answer.interval, answer.interval.width)
            rows.setdefault(answer.name, []).append(row)
            if answer.bound is not None:
                rows.setdefault("concentration bound", []).append(
                    (0.0, truth in answer.bound, answer.bound.width)
                )
        if result.verdict.estimator is not None:
            row = next(rows[n][-1] for n in rows if n == result.verdict.estimator)
            rows.setdefault("(the verdict's choice)", []).append(row)
    table = {}
    for estimator, values in rows.items():
        error, covered, width = np.array(values, dtype=float).T
        table[estimator] = {
            "rmse": float(np.sqrt((error**2).mean())),
            "bias": float(error.mean()),
            "coverage": float(covered.mean()),
            "width": float(np.median(width)),
            "answers": len(values),
        }
    return {"problem": name, "episodes": episodes, "truth": truth, "estimators": table}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument(
        "--episodes", nargs="+", type=int, help="sizes of the logs; one for each problem if omitted"
    )
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--estimators", nargs="+")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line for each table")
    arguments = parser.parse_args()
    for name in arguments.problems:
        for episodes in arguments.episodes or [EPISODES[name]]:
            begin = time.perf_counter()
            found = measure(name, episodes, arguments.repetitions, arguments.estimators)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            seconds = time.perf_counter() - begin
            print(f"\n{name}: {episodes} episodes, {arguments.repetitions} repetitions, ", end="")
            print(f"exact value {found['truth']:.4f} ({seconds:.0f} s)\n")
            print("| estimator | coverage | RMSE | bias | median width |\n|---|---|---|---|---|")
            for estimator, row in found["estimators"].items():
                print(f"| {estimator} | {row['coverage']:.1%} | {row['rmse']:.4f} ", end="")
                print(f"| {row['bias']:+.4f} | {row['width']:.4f} |")


if __name__ == "__main__":
    main()
