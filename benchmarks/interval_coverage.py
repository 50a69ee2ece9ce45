"""Do the intervals hold? Coverage, error and width of every tabular estimator over repeated logs.

    python benchmarks/interval_coverage.py                                  # all problems, 200 repetitions
    python benchmarks/interval_coverage.py --problems chain --episodes 100 400
    python benchmarks/interval_coverage.py --networks                       # estimators for observations

A log is drawn from the behaviour policy, the target policy is evaluated from it, and the 95% interval either
holds the exact value or does not. With 200 repetitions a true rate of 95% is measured as 92% to 98%; the binomial
interval of each measured rate is printed.

With --networks the problems have observations: `linear`, a noisy linear process in the plane with three pushes, whose
value is that of 200,000 simulated episodes; and `grid`, the Open World, its cells given as one-hot observations, whose
value is exact.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from scipy.stats import binomtest

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
EPISODES = {
    "chain": 200,
    "open_world": 200,
    "garnet": 200,
    "frozen_lake": 200,
    "taxi": 1000,
    "linear": 100,
    "grid": 100,
}


class Tabular:
    """A problem with tables: draws logs of indices, and knows the exact value."""

    def __init__(self, name: str) -> None:
        self.mdp, self.policy, self.mu, self.horizon = PROBLEMS[name]()
        self.discount = self.mdp.discount
        self.truth = float(self.mdp.initial @ self.mdp.v_values(self.policy))

    def draw(self, seed: int, episodes: int):
        key = jax.random.key(seed)
        return mx.trajectories.sample(self.mdp, self.mu, key, episodes=episodes, horizon=self.horizon)


class Grid(Tabular):
    """The Open World with one-hot observations of its cells."""

    def __init__(self) -> None:
        super().__init__("open_world")
        self.horizon = 30  # longer episodes are truncated
        table, self.policy = self.policy, lambda x: x @ table

    def draw(self, seed: int, episodes: int):
        log = mx.offline.Log.from_trajectories(super().draw(seed, episodes))
        eye = np.eye(self.mdp.num_states, dtype=np.float32)
        return dataclasses.replace(log, states=eye[log.states], next_states=eye[log.next_states])


class Linear:
    """x' = Bx + push + noise, paid for being near the origin; 20 steps, then truncated."""

    discount = 0.9

    def __init__(self) -> None:
        returns = self.roll(self.policy, 200_000, 120, 10**6)[2] @ self.discount ** np.arange(120)
        self.truth = float(returns.mean())

    @staticmethod
    def softmax(x: np.ndarray, slope: float) -> np.ndarray:
        z = np.exp(slope * x[:, :1] * np.array([1.0, 0.0, -1.0]))
        return z / z.sum(axis=1, keepdims=True)

    def policy(self, x: np.ndarray) -> np.ndarray:
        return self.softmax(x, 0.8)

    def roll(self, policy, episodes: int, steps: int, seed: int):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(episodes, 2))
        states, actions, rewards, chances = [x], [], [], []
        for _ in range(steps):
            p = policy(x)
            a = np.minimum((rng.random(episodes)[:, None] > p.cumsum(axis=1)).sum(axis=1), 2)
            rewards.append(1 - np.minimum((x**2).sum(axis=1), 4) / 4)
            x = np.stack([0.9 * x[:, 0] + 0.5 * (a - 1), 0.8 * x[:, 1] + 0.3 * x[:, 0]], axis=1)
            x = x + 0.2 * rng.normal(size=x.shape)
            states.append(x)
            actions.append(a)
            chances.append(p[np.arange(episodes), a])
        return tuple(np.stack(part, axis=1) for part in (states, actions, rewards, chances))

    def draw(self, seed: int, episodes: int):
        parts = self.roll(lambda x: self.softmax(x, 0.3), episodes, 20, seed)
        names = ("states", "actions", "rewards", "behaviour")
        return mx.offline.Log.from_episodes(
            [dict(zip(names, one, strict=True), terminal=False) for one in zip(*parts, strict=True)]
        )


OBSERVED = {"linear": Linear, "grid": Grid}


def measure(name: str, episodes: int, repetitions: int, estimators: list[str] | None) -> dict:
    observed = name in OBSERVED
    problem = OBSERVED[name]() if observed else Tabular(name)
    truth, pi = problem.truth, problem.policy
    rows: dict[str, list[tuple[float, bool, float]]] = {}
    training = mx.offline.Training(steps=800, hidden=(32, 32)) if observed else None
    if observed:  # what stops at a truncated step estimates something else
        estimators = estimators or [n for n, (_, end) in mx.offline.ESTIMATORS.items() if end == "bootstraps"]
    for k in range(repetitions):
        try:
            result = mx.offline.evaluate(
                problem.draw(k, episodes),
                pi,
                discount=problem.discount,
                estimators=estimators,
                seed=k,
                training=training,
            )
        except KeyboardInterrupt:  # the table of what is done so far
            break
        if observed:
            print(f"{name}: {k + 1} of {repetitions}", file=sys.stderr)
            jax.clear_caches()  # each evaluation leaves programs in memory; on disk they are kept
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
    parser.add_argument("--problems", nargs="+", choices=[*PROBLEMS, *OBSERVED])
    parser.add_argument("--networks", action="store_true", help="the problems with observations")
    parser.add_argument(
        "--episodes", nargs="+", type=int, help="sizes of the logs; one for each problem if omitted"
    )
    parser.add_argument("--repetitions", type=int, help="200; 40 for problems with observations")
    parser.add_argument("--estimators", nargs="+")
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line for each table")
    arguments = parser.parse_args()
    if arguments.networks:  # the same programs for every log: compile them once
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    for name in arguments.problems or (OBSERVED if arguments.networks else PROBLEMS):
        repetitions = arguments.repetitions or (40 if name in OBSERVED else 200)
        for episodes in arguments.episodes or [EPISODES[name]]:
            begin = time.perf_counter()
            found = measure(name, episodes, repetitions, arguments.estimators)
            if arguments.json:
                with arguments.json.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            seconds = time.perf_counter() - begin
            done = max(row["answers"] for row in found["estimators"].values())
            print(f"\n{name}: {episodes} episodes, {done} repetitions, ", end="")
            print(f"exact value {found['truth']:.4f} ({seconds:.0f} s)\n")
            print(
                "| estimator | coverage | binomial | RMSE | bias | median width |\n|---|---|---|---|---|---|"
            )
            for estimator, row in found["estimators"].items():
                n, inside = row["answers"], round(row["coverage"] * row["answers"])
                low, high = binomtest(inside, n).proportion_ci(method="wilson")
                print(
                    f"| {estimator} | {row['coverage']:.1%} | {low:.0%} to {high:.0%} | {row['rmse']:.4f} ",
                    end="",
                )
                print(f"| {row['bias']:+.4f} | {row['width']:.4f} |")


if __name__ == "__main__":
    main()
