"""Do the intervals hold? Coverage, error and width of every tabular estimator over repeated logs.

    python benchmarks/interval_coverage.py                                  # all problems, 200 repetitions
    python benchmarks/interval_coverage.py --problems chain --episodes 100 400
    python benchmarks/interval_coverage.py --networks                       # estimators for observations
    python benchmarks/interval_coverage.py --verdict --write --first 30000  # the table of the documentation

A log is drawn from the behaviour policy, the target policy is evaluated from it, and the 95% interval either
holds the exact value or does not. With 200 repetitions a true rate of 95% is measured as 92% to 98%; the binomial
interval of each measured rate is printed.

Beside estimators it says how the verdict fares: how often it says *trust*, how often that is wrong, and how often it says *cannot
tell* although some estimate is within 10% of the truth. `aliased` and `hidden_context` have states that leave something out.

Rules were developed on logs with seeds from 0 and 10,000; --first gives the seed of the first log, so that fresh ones are measured. With
--verdict only the estimators are computed that the verdict may recommend.

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
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import scipy.sparse as sp
from scipy.stats import binomtest

import marginax as mx


@dataclasses.dataclass
class Problem:
    """A problem with tables, and how it is logged.

    `observe` maps states to what the log shows of them; policies depend on that only. `settings` are those of the evaluation.
    """

    mdp: Any
    pi: np.ndarray
    mu: np.ndarray
    steps: int
    episodes: int = 200
    observe: np.ndarray | None = None
    settings: dict = dataclasses.field(default_factory=dict)


def chain():
    mdp, pi, mu = mx.problems.chain(n=6, actions=2, noise=0.2, discount=0.95)
    return Problem(mdp, 0.6 * pi + 0.4 * mu, mu, 100)


def noisy(mdp):
    """The same MDP with rewards of standard deviation 0.2: without noise a deterministic problem is learned exactly."""
    spread = np.full(mdp.r.shape, 0.2)
    return mx.TabularMDP(mdp.p, mdp.r, mdp.discount, initial=mdp.initial, reward_std=spread)


def open_world():
    mdp, pi, mu = mx.problems.open_world(n=5, discount=0.95)
    return Problem(noisy(mdp), 0.3 * pi + 0.7 * mu, mu, 400)


def garnet():
    mdp, pi, mu = mx.problems.garnet(20, 3, 4, seed=3, discount=0.9)
    return Problem(mdp, 0.3 * pi + 0.7 * mu, mu, 200)


def frozen_lake():
    mdp = mx.problems.from_gymnasium("FrozenLake-v1", discount=0.97)
    q = mdp.optimal_values()
    return Problem(mdp, mx.policies.epsilon_greedy(q, 0.2), mx.policies.epsilon_greedy(q, 0.4), 300)


def taxi():
    mdp = mx.problems.from_gymnasium("Taxi-v4", discount=0.97)
    q = mdp.optimal_values()
    return Problem(mdp, mx.policies.epsilon_greedy(q, 0.15), mx.policies.epsilon_greedy(q, 0.3), 300, 1000)


def aliased():
    """Two rows of eight cells; the action chooses the next row (with probability 3/4), the row decides the reward, and the log
    shows the column only."""
    length, p, r = 8, np.zeros((16, 2, 16)), np.zeros((16, 2))
    for x in range(16):
        column, row = divmod(x, 2)
        r[x] = 1.0 if row == 0 else -1.0
        for a in range(2):
            for other in range(2):
                if column + 1 < length:
                    p[x, a, 2 * (column + 1) + other] = 0.75 if other == a else 0.25
    start = np.zeros(16)
    start[:2] = 0.5
    mdp = mx.TabularMDP(p, r, 0.98, initial=start, reward_std=np.full((16, 2), 0.3))
    pi, mu = np.tile([0.3, 0.7], (16, 1)), np.tile([0.6, 0.4], (16, 1))
    return Problem(mdp, pi, mu, 20, 300, observe=np.arange(16) // 2)


def hidden_context():
    """A coin that the log never shows decides which of two actions pays, for the whole episode of six steps; only the behaviour
    policy's average of both is seen."""
    p, r = np.zeros((12, 2, 12)), np.zeros((12, 2))
    for x in range(12):
        step, coin = divmod(x, 2)
        r[x] = [1.0, 0.0] if coin == 0 else [0.2, 0.4]
        for a in range(2):
            if step < 5:
                stay = 0.95 if a == coin else 0.6  # the wrong action may end the episode
                p[x, a, 2 * (step + 1) + coin] = stay
    start = np.zeros(12)
    start[:2] = 0.5
    mdp = mx.TabularMDP(p, r, 0.98, initial=start, reward_std=np.full((12, 2), 0.1))
    pi, mu = np.tile([0.8, 0.2], (12, 1)), np.tile([0.5, 0.5], (12, 1))
    return Problem(mdp, pi, mu, 10, 400, observe=np.arange(12) // 2)


def heavy_tails():
    """Ten steps, and a reward for each in a row of right answers: few episodes of the log carry most of the weight."""
    n, p, r = 11, np.zeros((11, 2, 11)), np.zeros((11, 2))
    for x in range(n - 1):
        p[x, 0, x + 1], p[x, 1, 0] = 0.95, 0.3
        r[x, 0] = 0.1 * x
    start = np.zeros(n)
    start[0] = 1.0
    mdp = mx.TabularMDP(p, r, 0.97, initial=start, reward_std=np.full((n, 2), 0.2))
    pi, mu = np.tile([0.85, 0.15], (n, 1)), np.tile([0.5, 0.5], (n, 1))
    return Problem(mdp, pi, mu, 60)


def unsupported():
    """The behaviour policy never takes the third action, which leads to a corner where every step costs 1; the target takes it
    with 3%."""
    n, p, r = 6, np.zeros((6, 3, 6)), np.zeros((6, 3))
    for x in range(5):
        p[x, 0, (x + 1) % 5], p[x, 1, x] = 0.95, 0.95
        p[x, 2, 5] = 1.0
        r[x, 0], r[x, 1] = 0.2 * x - 0.2, -1.0 if x == 0 else 0.3
    p[5, :, 5], r[5] = 0.95, -1.0
    start = np.zeros(n)
    start[0] = 1.0
    mdp = mx.TabularMDP(p, r, 0.9, initial=start, reward_std=np.full((n, 3), 0.2))
    pi, mu = np.tile([0.67, 0.3, 0.03], (n, 1)), np.tile([0.5, 0.5, 0.0], (n, 1))
    return Problem(mdp, pi, mu, 60)


def truncated():
    mdp, pi, mu = mx.problems.garnet(20, 3, 4, seed=5, discount=0.97)
    return Problem(noisy(mdp), 0.15 * pi + 0.85 * mu, mu, 20, 300)


def undiscounted():
    """A walk of twelve cells that ends at both sides, paid by the step and at the right end; no discount."""
    n, p, r = 12, np.zeros((12, 2, 12)), np.full((12, 2), -0.05)
    for x in range(n):
        for a, step in ((0, 1), (1, -1)):
            for chance, move in ((0.8, step), (0.2, -step)):
                if 0 <= x + move < n:
                    p[x, a, x + move] += chance
                elif x + move == n:
                    r[x, a] += chance
    start = np.zeros(n)
    start[5] = 1.0
    mdp = mx.TabularMDP(p, r, 0.99, initial=start, reward_std=np.full((n, 2), 0.1))
    pi, mu = np.tile([0.6, 0.4], (n, 1)), np.tile([0.5, 0.5], (n, 1))
    return Problem(mdp, pi, mu, 2000, settings={"discount": 1.0})


def first_steps():
    """The garnet's first twelve steps without a discount, from a log of eight."""
    mdp, pi, mu = mx.problems.garnet(10, 2, 3, seed=7, discount=0.97)
    settings = {"discount": 1.0, "horizon": 12}
    return Problem(noisy(mdp), 0.3 * pi + 0.7 * mu, mu, 8, 300, settings=settings)


PROBLEMS = {
    f.__name__: f
    for f in (
        chain,
        open_world,
        garnet,
        frozen_lake,
        taxi,
        aliased,
        hidden_context,
        heavy_tails,
        unsupported,
        truncated,
        undiscounted,
        first_steps,
    )
}


class Tabular:
    """A problem with tables: draws logs of indices, and knows the exact value."""

    def __init__(self, name: str) -> None:
        problem = PROBLEMS[name]()
        self.mdp, self.mu, self.horizon = problem.mdp, problem.mu, problem.steps
        self.episodes, self.observe = problem.episodes, problem.observe
        self.settings = {"discount": self.mdp.discount, **problem.settings}
        self.policy = problem.pi
        if self.observe is not None:
            self.policy = problem.pi[np.unique(self.observe, return_index=True)[1]]
        self.truth = exact_value(problem.mdp, problem.pi, **self.settings)

    def draw(self, seed: int, episodes: int):
        key = jax.random.key(seed)
        batch = mx.trajectories.sample(self.mdp, self.mu, key, episodes=episodes, horizon=self.horizon)
        log = mx.offline.Log.from_trajectories(batch)
        if self.observe is None:
            return log
        return dataclasses.replace(
            log, states=self.observe[log.states], next_states=self.observe[log.next_states]
        )


def exact_value(mdp, pi: np.ndarray, discount: float, horizon: int | None = None) -> float:
    """ρ₀ · V of a policy, by the definition: V = Σ_t γ^t P^t r, over the horizon or until nothing is left."""
    p = np.asarray(mdp.p.toarray()).reshape(*mdp.r.shape, -1) if sp.issparse(mdp.p) else np.asarray(mdp.p)
    kernel, rewards = np.einsum("xa,xay->xy", pi, p), (pi * mdp.r).sum(axis=1)
    if horizon is None:
        return float(mdp.initial @ np.linalg.solve(np.eye(len(rewards)) - discount * kernel, rewards))
    v = np.zeros(len(rewards))
    for _ in range(horizon):
        v = rewards + discount * kernel @ v
    return float(mdp.initial @ v)


class Grid(Tabular):
    """The Open World with one-hot observations of its cells."""

    def __init__(self) -> None:
        super().__init__("open_world")
        self.horizon = 30  # longer episodes are truncated
        self.episodes = 100
        table, self.policy = self.policy, lambda x: x @ table

    def draw(self, seed: int, episodes: int):
        log = super().draw(seed, episodes)
        eye = np.eye(self.mdp.num_states, dtype=np.float32)
        return dataclasses.replace(log, states=eye[log.states], next_states=eye[log.next_states])


class Linear:
    """x' = Bx + push + noise, paid for being near the origin; 20 steps, then truncated."""

    settings: ClassVar = {"discount": 0.9}
    episodes = 100

    def __init__(self) -> None:
        returns = self.roll(self.policy, 200_000, 120, 10**6)[2] @ 0.9 ** np.arange(120)
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


VERDICT = [
    "per-decision-is",
    "weighted-per-decision-is",
    "weighted-doubly-robust",
    "state-ratio",
    "doubly-robust-state-ratio",
    "certainty-equivalence",
]
PAGE = Path(__file__).parents[1] / "docs" / "evaluate-methods.md"
MARKS = "<!-- coverage: written by benchmarks/interval_coverage.py -->\n", "<!-- coverage: end -->"


def measure(
    name: str, problem, episodes: int, repetitions: int, estimators: list[str] | None, first: int = 0
) -> dict:
    observed = name in OBSERVED
    truth, pi = problem.truth, problem.policy
    rows: dict[str, list[tuple[float, bool, float]]] = {}
    verdicts = []
    training = mx.offline.Training(steps=800, hidden=(32, 32)) if observed else None
    if observed:  # what stops at a truncated step estimates something else
        estimators = estimators or [n for n, (_, end) in mx.offline.ESTIMATORS.items() if end == "bootstraps"]
    for k in range(first, first + repetitions):
        try:
            log = problem.draw(k, episodes)
            result = mx.offline.evaluate(
                log,
                pi,
                estimators=estimators,
                policy_kind=None if observed else "table",
                seed=k,
                training=training,
                **problem.settings,
            )
        except KeyboardInterrupt:  # the table of what is done so far
            break
        if observed:
            print(f"{name}: {k - first + 1} of {repetitions}", file=sys.stderr)
            jax.clear_caches()  # each evaluation leaves programs in memory; on disk they are kept
        for answer in result.answers.values():
            row = (answer.value - truth, truth in answer.interval, answer.interval.width)
            rows.setdefault(answer.name, []).append(row)
            if answer.bound is not None:
                rows.setdefault("concentration bound", []).append(
                    (0.0, truth in answer.bound, answer.bound.width)
                )
        chosen, status = result.verdict.estimator, result.verdict.status
        best = min(abs(a.value - truth) for a in result.answers.values()) <= 0.1 * abs(truth)
        covered = chosen is None or truth in result.answers[chosen].interval
        verdicts.append((status, covered, best, chosen))
        if chosen is not None:
            rows.setdefault("(the verdict's choice)", []).append(rows[chosen][-1])
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
    trusted = [covered for status, covered, *_ in verdicts if status == "trust"]
    told = [status != "cannot tell" for status, _, best, _ in verdicts if best]
    summary = {
        "trust": len(trusted) / max(len(verdicts), 1),
        "trust wrong": (1 - np.mean(trusted)) if trusted else 0.0,
        "cannot tell, with an estimate within 10%": (1 - np.mean(told)) if told else 0.0,
        "logs": len(verdicts),
        "choices": dict(Counter(str(chosen) for *_, chosen in verdicts)),
    }
    return {"problem": name, "episodes": episodes, "truth": truth, "estimators": table, "verdict": summary}


def binomial(row: dict) -> str:
    """The Wilson interval of a measured coverage."""
    low, high = binomtest(round(row["coverage"] * row["answers"]), row["answers"]).proportion_ci(
        method="wilson"
    )
    return f"{low:.0%} to {high:.0%}"


def summary_table(tables: list[dict], first: int) -> str:
    """The table of the documentation: a row for each problem."""
    lines = [
        "| problem | episodes | logs | coverage of the recommended interval (binomial) | RMSE | *trust* | of which wrong "
        "| *cannot tell* with an estimate within 10% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for found in tables:
        row, verdict = found["estimators"]["(the verdict's choice)"], found["verdict"]
        lines.append(
            f"| {found['problem'].replace('_', ' ')} | {found['episodes']} | {verdict['logs']} | {row['coverage']:.1%} ({binomial(row)}) "
            f"| {row['rmse']:.4f} | {verdict['trust']:.1%} | {verdict['trust wrong']:.1%} "
            f"| {verdict['cannot tell, with an estimate within 10%']:.1%} |"
        )
    last = first + max(found["verdict"]["logs"] for found in tables) - 1
    return "\n".join(lines) + f"\n\nSeeds of the logs: {first:,} to {last:,}.\n"


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
    parser.add_argument("--verdict", action="store_true", help="only what the verdict may recommend")
    parser.add_argument("--first", type=int, default=0, help="seed of the first log")
    parser.add_argument(
        "--write", action="store_true", help="write the table of verdicts into the documentation"
    )
    parser.add_argument("--json", type=Path, help="append the figures to this file, a line for each table")
    arguments = parser.parse_args()
    if arguments.networks:  # the same programs for every log: compile them once
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    tables = []
    for name in arguments.problems or (OBSERVED if arguments.networks else PROBLEMS):
        repetitions = arguments.repetitions or (40 if name in OBSERVED else 200)
        problem = OBSERVED[name]() if name in OBSERVED else Tabular(name)
        for episodes in arguments.episodes or [problem.episodes]:
            begin = time.perf_counter()
            chosen = VERDICT if arguments.verdict else arguments.estimators
            found = measure(name, problem, episodes, repetitions, chosen, arguments.first)
            tables.append(found)
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
                print(f"| {estimator} | {row['coverage']:.1%} | {binomial(row)} | {row['rmse']:.4f} ", end="")
                print(f"| {row['bias']:+.4f} | {row['width']:.4f} |")
            verdict = found["verdict"]
            print(
                f"\nverdict: trust in {verdict['trust']:.1%} of logs, of which wrong {verdict['trust wrong']:.1%}; ",
                end="",
            )
            print(
                f"cannot tell in {verdict['cannot tell, with an estimate within 10%']:.1%} of those with an estimate within 10%"
            )
            print(f"choices: {verdict['choices']}", flush=True)
    table = summary_table(tables, arguments.first)
    print(f"\n{table}")
    if arguments.write:
        before, rest = PAGE.read_text().split(MARKS[0])
        PAGE.write_text(before + MARKS[0] + table + MARKS[1] + rest.split(MARKS[1])[1])


if __name__ == "__main__":
    main()
