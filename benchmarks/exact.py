"""Exact quantities on Open World: time and memory from 30 × 30 to 1,000 × 1,000 cells, beside QuantEcon and SciPy.

    uv run --all-extras --group bench python benchmarks/exact.py [--sizes 30 100 300 1000]

The first table times marginax: ``q_values`` of π, Retrace applied once, all contraction rates, one row of exact TD weights; peak
memory of the process that did it. The second evaluates policies with marginax, QuantEcon's ``DiscreteDP.evaluate_policy`` and a
plain ``scipy.sparse.linalg.spsolve`` (its default ordering and the natural one) on the same MDPs in the same run: a deterministic
policy (right, then down), π (right or down, each 1/2) and the uniform μ. QuantEcon evaluates deterministic policies only. Every
method gets the transition matrix of the policy's pairs ready made and is timed from there to the state values; the largest
difference to marginax's values is shown beside it. A method that would need more than a minute is left out and marked.
"""

import argparse
import functools
import multiprocessing
import resource
import time
from collections.abc import Callable

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as spla

import marginax as mx
from marginax.weights import exact

REPEATS = 3


def timed(call: Callable[[], np.ndarray], repeats: int = REPEATS) -> tuple[float, np.ndarray]:
    """The shortest of a few runs, and the result."""
    best, result = np.inf, np.empty(0)
    for _ in range(repeats):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def ours(n: int) -> str:
    """One row of the first table."""
    mdp, pi, mu = mx.problems.open_world(n, sparse=True)
    c = mx.traces.retrace(pi, mu)
    zero = np.zeros(mdp.r.shape)
    values, _ = timed(lambda: mdp.q_values(pi))
    applied, _ = timed(lambda: mx.multi_step(mdp, pi, mu, c)(zero))
    rates, _ = timed(lambda: mx.multi_step(mdp, pi, mu, c).contraction_rates())
    row, _ = timed(lambda: exact(mdp, mu, c, start=(0, 2)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return f"| {n} | {mdp.r.size:,} | {values:.3f} | {applied:.3f} | {rates:.3f} | {row:.3f} | {peak:.2f} |"


def kernel(mdp: mx.TabularMDP, policy: np.ndarray) -> sp.csr_array:
    """P^π on states, by a plain sparse product."""
    states, actions = policy.shape
    rows = np.repeat(np.arange(states), actions)
    chooser = sp.csr_array(
        (policy.ravel(), (rows, np.arange(states * actions))), shape=(states, states * actions)
    )
    result = (chooser @ mdp.p).tocsr()
    result.eliminate_zeros()
    return result


def peers(n: int) -> list[str]:
    """Rows of the second table."""
    mdp, pi, mu = mx.problems.open_world(n, sparse=True)
    cell = np.arange(n * n)
    actions = np.where(cell % n < n - 1, 2, 3)
    policies = {
        "deterministic": mx.policies.deterministic(actions, 4),
        "π: right or down": pi,
        "μ: uniform": mu,
    }
    rows = []
    for name, policy in policies.items():
        own, values = timed(functools.partial(mdp.v_values, policy))
        cells = [f"{own:.3f}"]
        matrix, reward = kernel(mdp, policy), (policy * mdp.r).sum(axis=1)
        system = (sp.eye_array(n * n) - mdp.discount * matrix).tocsc()
        # The fill-in of a general two-dimensional grid makes a direct solve of the uniform walk hopeless at a million states.
        direct = name != "μ: uniform" or n <= 300
        for ordering in ("COLAMD", "NATURAL"):
            if not direct or (name == "μ: uniform" and ordering == "NATURAL" and n > 100):
                cells.append("—")
                continue
            solve = functools.partial(spla.spsolve, system, reward, permc_spec=ordering)
            seconds, other = timed(solve, repeats=1 if n > 300 else REPEATS)
            cells.append(f"{seconds:.3f} ({np.abs(other - values).max():.0e})")
        cells.append(quantecon(mdp, actions, values) if name == "deterministic" else "—")
        rows.append(f"| {n} | {name} | " + " | ".join(cells) + " |")
    return rows


def quantecon(mdp: mx.TabularMDP, actions: np.ndarray, values: np.ndarray) -> str:
    """QuantEcon's policy evaluation; it wants rows that sum to 1, so the missing mass goes to a state of its own."""
    try:
        from quantecon.markov import DiscreteDP
    except ImportError:
        return "not installed"
    states = mdp.num_states
    pairs = mdp.r.size
    ends = sp.csr_array(mdp.termination.reshape(pairs, 1))
    stay = sp.csr_array(([1.0], ([0], [states])), shape=(1, states + 1))
    q = sp.vstack([sp.hstack([mdp.p, ends]), stay]).tocsr()
    r = np.append(mdp.r.ravel(), 0.0)
    s_indices = np.append(np.repeat(np.arange(states), mdp.num_actions), states)
    a_indices = np.append(np.tile(np.arange(mdp.num_actions), states), 0)
    model = DiscreteDP(r, sp.csr_matrix(q), mdp.discount, s_indices, a_indices)
    sigma = np.append(actions, 0)
    seconds, other = timed(lambda: model.evaluate_policy(sigma))
    return f"{seconds:.3f} ({np.abs(other[:states] - values).max():.0e})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[30, 100, 300, 1000])
    sizes = parser.parse_args().sizes
    # A process for each size, so that peak memory is that of the size.
    context = multiprocessing.get_context("spawn")
    print(
        "| n | pairs | q_values (s) | Retrace once (s) | all rates (s) | a row of weights (s) | peak memory (GiB) |"
    )
    print("|---|---|---|---|---|---|---|")
    for n in sizes:
        with context.Pool(1) as pool:
            print(pool.apply(ours, (n,)), flush=True)
    print()
    print("Seconds for the state values (largest difference to marginax):\n")
    print("| n | policy | marginax | spsolve | spsolve, natural order | QuantEcon |")
    print("|---|---|---|---|---|---|")
    for n in sizes:
        with context.Pool(1) as pool:
            print("\n".join(pool.apply(peers, (n,))), flush=True)


if __name__ == "__main__":
    main()
