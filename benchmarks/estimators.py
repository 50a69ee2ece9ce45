"""Error and time of every tabular estimator of TD weights, against the exact weights.

    python benchmarks/estimators.py [--seeds 3] [--trajectories 1 10 100 500 1000] [--states]
    python benchmarks/estimators.py --incremental

The error is the mean of |ŵ - w| over starts and visits as the data have them, relative to the mean of w itself:

    Σ_{x,a} ρ(x,a) Σ_{x',a'} d_{x,a}(x',a') |ŵ - w| / Σ_{x,a} ρ(x,a) Σ_{x',a'} d_{x,a}(x',a') w

with d the discounted visitation of μ from (x,a), and ρ that from the problem's start distribution. All zeros have error 1. Times are
those of one call after compilation. Prints one markdown table a problem. The two saddle points, which must agree with certainty
equivalence, run on the first seed only. With --states: the weights on states, those of V-trace, by the same routes.

With --incremental: the time of one step of an experiment on Open World, 100 seeds side by side, each with one more trajectory.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

import marginax as mx
from marginax import weights
from marginax.trajectories import Trajectory


class Case(NamedTuple):
    """A problem with its traces, and how it is sampled."""

    problem: mx.problems.Problem
    c: np.ndarray
    horizon: int
    features: np.ndarray


def one_hot(index: np.ndarray) -> np.ndarray:
    return np.eye(index.max() + 1)[index]


def additive(*indices: np.ndarray) -> np.ndarray:
    """Features [S, k]: one-hot codes of several coordinates of a state, side by side; the first level of all but one left out."""
    first, *others = (one_hot(i) for i in indices)
    return np.concatenate([first, *(code[..., 1:] for code in others)], axis=-1)


def make(problem: mx.problems.Problem, clip: float, horizon: int, grid: bool = False) -> Case:
    state = np.arange(len(problem.mu))
    side = round(len(state) ** 0.5)
    features = additive(state // side, state % side) if grid else additive(state)
    return Case(problem, mx.traces.retrace(problem.pi, problem.mu, clip=clip), horizon, features)


CASES = {
    "Chain, n = 10, c̄ = 1": lambda: make(mx.problems.chain(n=10), 1.0, 100),
    "Open World 10 × 10, c̄ = 2": lambda: make(mx.problems.open_world(n=10), 2.0, 1000, grid=True),
    "Garnet, 30 states, 4 actions, c̄ = 2": lambda: make(mx.problems.garnet(30, 4, 3, seed=0), 2.0, 2000),
}

SLOW = ("Saddle point", "Fenchel")

Estimator = Callable[[Trajectory], Any]


def unlogged(data: Trajectory) -> Trajectory:
    return eqx.tree_at(lambda t: t.behaviour, data, None)


def estimators(case: Case, on_states: bool) -> dict[str, Estimator]:
    def by(name: str, **settings: Any) -> Estimator:
        return partial(getattr(weights, f"{name}_states" if on_states else name), c=case.c, **settings)

    counted = by("certainty_equivalence")
    found = {
        "Algorithm 2 as printed": by("monte_carlo", as_printed=True),
        "Monte Carlo per pair": by("monte_carlo", factored=False),
        "Monte Carlo, exponential": by("monte_carlo", average="exponential"),
        "Monte Carlo (= regression, tabular)": by("monte_carlo"),
        "Regression, additive features": by("regression", features=case.features),
        "Reverse TD, μ from counts": by("reverse_td"),
        "Reverse TD": by("reverse_td", mu=case.problem.mu),
        "Certainty equivalence, μ from counts": lambda data: counted(unlogged(data)),
        "Certainty equivalence": counted,
        "Saddle point": by("saddle_point"),
        "Fenchel": by("fenchel"),
    }
    if on_states:
        del found["Monte Carlo per pair"]  # nothing to factor
    return found


def truth(case: Case, on_states: bool) -> tuple[np.ndarray, np.ndarray]:
    """The exact weights, and the share of each among starts and visits."""
    mdp, _, mu = case.problem
    d = mdp.visitation(mu)
    if on_states:
        d = np.einsum("xa,xayb->xy", mu, d)
        return weights.exact_states(mdp, mu, case.c), (mdp.initial @ d)[:, None] * d
    return weights.exact(mdp, mu, case.c), np.einsum("x,xa,xayb->yb", mdp.initial, mu, d)[
        :, :, None, None
    ] * d


def measure(
    case: Case, counts: list[int], seeds: int, on_states: bool
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    mdp, _, mu = case.problem
    exact, share = truth(case, on_states)
    scale = (share * exact).sum()
    batches = [
        mx.trajectories.sample(mdp, mu, jax.random.key(seed), episodes=max(counts), horizon=case.horizon)
        for seed in range(seeds)
    ]
    errors, times = {}, {}
    for name, estimate in estimators(case, on_states).items():
        errors[name], times[name] = [], []
        for count in counts:
            found = []
            for seed, batch in enumerate(batches[:1] if name in SLOW else batches):
                data = jax.tree.map(lambda field, count=count: field[:count], batch)
                if seed == 0 and name not in SLOW:
                    jax.block_until_ready(estimate(data))
                began = time.perf_counter()
                w = np.asarray(jax.block_until_ready(estimate(data)))
                elapsed = time.perf_counter() - began
                found.append((share * np.abs(w - exact)).sum() / scale)
            errors[name].append(float(np.mean(found)))
            times[name].append(elapsed)
    return errors, times


def incremental(seeds: int = 100) -> None:
    """Prints the time in which many seeds each take in one trajectory of 1,000 steps and read off all their weights."""
    mdp, pi, mu = mx.problems.open_world(n=10)
    c = jax.numpy.asarray(mx.traces.retrace(pi, mu, clip=2.0), float)
    data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=seeds, horizon=1000)
    counts, sums = (e.init(100, 4, mdp.discount) for e in (weights.CertaintyEquivalence, weights.MonteCarlo))
    steps = {
        "`MonteCarlo.update`": (sums, lambda e, one: e.update(one, c)),
        "`MonteCarlo.weights`": (sums, lambda e, one: e.weights(c)),
        "`CertaintyEquivalence.update`": (counts, lambda e, one: e.update(one)),
        "`CertaintyEquivalence.weights`": (counts, lambda e, one: e.weights(c)),
    }
    print(f"| {seeds} seeds side by side | seconds |\n|---|---:|")
    for name, (first, step) in steps.items():
        step = eqx.filter_jit(eqx.filter_vmap(step))
        state = jax.tree.map(lambda leaf: jax.numpy.broadcast_to(leaf, (seeds, *leaf.shape)), first)
        if "Certainty" in name:
            state = eqx.filter_vmap(lambda e, one: e.update(one))(state, data)
        jax.block_until_ready(step(state, data))
        began = time.perf_counter()
        jax.block_until_ready(step(state, data))
        print(f"| {name} | {time.perf_counter() - began:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[1, 10, 100, 500, 1000])
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--incremental", action="store_true")
    settings = parser.parse_args()
    if settings.incremental:
        return incremental()
    for title, build in CASES.items():
        errors, times = measure(build(), settings.trajectories, settings.seeds, settings.states)
        print(
            f"\n**{title}** (error, mean of {settings.seeds} seeds, the two games on the first; last column: seconds for all of the data)\n"
        )
        heads = [f"{n:,}" for n in settings.trajectories]
        print("| trajectories | " + " | ".join(heads) + " | time |")
        print("|---|" + "---:|" * (len(heads) + 1))
        for name, values in errors.items():
            cells = " | ".join("0" if v < 1e-9 else f"{v:.2g}" for v in values)
            print(f"| {name} | {cells} | {times[name][-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
