"""All relaxed programs of one iteration, and the fastest weights, against a loop of SciPy's linprog on the same sparse data.

    python benchmarks/linear_programs.py [--sizes 5 10 15 20] [--large 50 100] [--rate 0.5] [--sample 40]

Open World, γ = 0.99, q drawn from N(0, 1). linprog(method="highs") gets the sparse constraint matrix ready-made, in the better of two forms
(pairs by pairs, or with the flow into each state as further unknowns), and only its right-hand side differs from
call to call. It runs over all start pairs where there are at most 400 of them; above that over a sample, evenly
spaced, and the time for all is the sample's mean times their number (marked ~). marginax's time is for everything that ``relaxed`` and
``fastest`` return: values, occupancies and weights of all pairs, building the model included; the best of three runs.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.sparse as sp
from scipy.optimize import linprog

import marginax as mx
from marginax.linear_programs._balance import balance_matrix


def best_of(repeats: int, function: Callable, *arguments, **options) -> tuple[float, Any]:
    """Shortest time of some runs, and what the function returned."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = function(*arguments, **options)
        times.append(time.perf_counter() - begin)
    return min(times), result


def loop_relaxed(
    problem, q: np.ndarray, rate: float, starts: np.ndarray, factored: bool
) -> tuple[float, np.ndarray]:
    """Seconds a program and the optimal values, by linprog."""
    mdp, pi, _ = problem
    pairs = mdp.r.size
    states = mdp.num_states if factored else 0
    if factored:
        matrix = balance_matrix(mdp, pi)
        identity = sp.vstack([sp.csc_array((states, pairs)), sp.eye_array(pairs)])
    else:
        p = sp.csr_array(mdp.dense_p().reshape(pairs, -1))
        policy = sp.csr_array(sp.block_diag(list(pi[:, None, :])))
        matrix, identity = sp.eye_array(pairs) - mdp.discount * (p @ policy).T, sp.eye_array(pairs)
    equations = sp.csc_array(sp.hstack([matrix, identity, -identity]))
    budget = sp.csr_array(np.concatenate([np.zeros(states + pairs), np.ones(2 * pairs)])[None])
    error = (mdp.r + mdp.discount * mdp.expect_next((pi * q).sum(axis=1)) - q).ravel()
    cost = np.concatenate([error, np.zeros(states + 2 * pairs)])
    bounds = np.full((cost.size, 2), [0.0, np.inf])
    bounds[: states + pairs, 0] = -np.inf
    values = np.empty(starts.size)
    begin = time.perf_counter()
    for i, start in enumerate(starts):
        delta = np.zeros(states + pairs)
        delta[states + start] = 1.0
        result = linprog(
            cost, A_eq=equations, b_eq=delta, A_ub=budget, b_ub=[rate], bounds=bounds, method="highs"
        )
        values[i] = q.ravel()[start] + result.fun
    return (time.perf_counter() - begin) / starts.size, values


def loop_fastest(problem, cap: float, starts: np.ndarray) -> tuple[float, np.ndarray]:
    """Seconds a program and the optimal rates, by linprog."""
    mdp, pi, mu = problem
    pairs, states = mdp.r.size, mdp.num_states
    identity = sp.vstack([sp.csc_array((states, pairs)), sp.eye_array(pairs)])
    equations = sp.csc_array(sp.hstack([balance_matrix(mdp, pi), identity, -identity]))
    cost = np.concatenate([np.zeros(states + pairs), np.ones(2 * pairs)])
    visits = mdp.credit(mu).reshape(pairs, pairs)
    bounds = np.full((cost.size, 2), [0.0, np.inf])
    bounds[pairs : pairs + states, 0] = -np.inf
    rates = np.empty(starts.size)
    begin = time.perf_counter()
    for i, start in enumerate(starts):
        delta = np.zeros(states + pairs)
        delta[states + start] = 1.0
        bounds[:pairs, 1] = cap * visits[start]
        rates[i] = linprog(cost, A_eq=equations, b_eq=delta, bounds=bounds, method="highs").fun
    return (time.perf_counter() - begin) / starts.size, rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[5, 10, 15, 20])
    parser.add_argument("--large", type=int, nargs="*", default=[50, 100])
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--cap", type=float, default=2.0)
    parser.add_argument("--sample", type=int, default=40)
    arguments = parser.parse_args()

    mx.linear_programs.evaluate(mx.TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]])  # imports HiGHS
    relaxed_rows, fastest_rows = [], []
    for size in arguments.sizes:
        problem = mx.problems.open_world(size)
        pairs = problem.mdp.r.size
        q = np.random.default_rng(0).normal(size=problem.mdp.r.shape)
        every = pairs <= 400
        starts = np.arange(pairs) if every else np.linspace(0, pairs - 1, arguments.sample).astype(int)
        sign = "" if every else "~"

        few = starts[:: max(1, starts.size // 10)]
        times = [loop_relaxed(problem, q, arguments.rate, few, factored)[0] for factored in (False, True)]
        factored = times[1] < times[0]
        per_program, values = loop_relaxed(problem, q, arguments.rate, starts, factored)
        seconds, result = best_of(3, mx.linear_programs.relaxed, *problem, q, arguments.rate)
        difference = np.abs(result.values.ravel()[starts] - values).max()
        relaxed_rows.append(
            f"| {size} × {size} | {pairs} | {sign}{pairs * per_program:.2f} s | {1e3 * per_program:.1f} ms "
            f"| {seconds:.3f} s | {1e6 * seconds / pairs:.0f} µs | {pairs * per_program / seconds:.0f}× | {difference:.0e} |"
        )

        per_program, rates = loop_fastest(problem, arguments.cap, starts)
        one, _ = best_of(1, mx.linear_programs.fastest, *problem, arguments.cap, threads=1)
        two, weights = best_of(1, mx.linear_programs.fastest, *problem, arguments.cap, threads=2)
        ours = mx.marginalized(*problem, weights).contraction_rates().ravel()[starts]
        fastest_rows.append(
            f"| {size} × {size} | {pairs} | {sign}{pairs * per_program:.2f} s | {one:.2f} s | {two:.2f} s "
            f"| {pairs * per_program / min(one, two):.0f}× | {np.abs(ours - rates).max():.0e} |"
        )

    print(f"All relaxed programs of one iteration, η = {arguments.rate:g}\n")
    print("| grid | pairs | linprog loop | a program | marginax | a program | faster | largest difference |")
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(relaxed_rows))
    print(f"\nFastest weights under the cap {arguments.cap:g}\n")
    print("| grid | pairs | linprog loop | marginax, 1 thread | 2 threads | faster | largest difference |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(fastest_rows))

    print("\nValues only, on larger grids\n")
    print("| grid | pairs | evaluate | iterate, 10 steps | largest error of evaluate |")
    print("|---|---|---|---|---|")
    for size in arguments.large:
        mdp, pi, mu = mx.problems.open_world(size, sparse=True)
        q = np.random.default_rng(0).normal(size=mdp.r.shape)
        once, values = best_of(3, mx.linear_programs.evaluate, mdp, pi)
        ten, _ = best_of(1, mx.linear_programs.iterate, mdp, pi, mu, q, arguments.rate, 10)
        error = np.abs(values - mdp.q_values(pi)).max()
        print(f"| {size} × {size} | {mdp.r.size:,} | {once:.2f} s | {ten:.2f} s | {error:.0e} |")


if __name__ == "__main__":
    main()
