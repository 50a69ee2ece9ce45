"""Targets against rlax (`retrace` and `vtrace`, jitted and vmapped), or against a plain scan where there is no rlax.

    python benchmarks/targets.py [--quick] [--sizes 128x256 4096x2048] [--layouts batch time]

Both sides get the same arrays: Retrace starts from the action values and policies of T + 1 states, V-trace from values and
ratios. Each returns what it is made to return, rlax the errors and this library the targets; that targets minus values are the errors is
checked. They are timed in turns, and the median of each counts. `batch` is [B, T] with `jax.vmap(...)`; `time` is [T, B] with
`in_axes=1`, which spares both sides a transposition.

A call from Python takes some 8 µs, and more if threads have to be woken. So on a CPU there is a second comparison, `inside`: the
function many times within one program, each time with rewards made of the last result, as in a training step that is compiled as a whole.

On an accelerator, rlax's functions are loops over time; where rlax is not installed the loop is this library's own
recursion with `backend="scan"`. The share of the memory bandwidth (accelerators only) counts every input read once and
every target written once, against a copy of a large array timed in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from marginax import targets

try:
    import rlax
except ImportError:
    rlax = None

ACTIONS = 4
DECAY = 0.9
ON_CPU = jax.default_backend() == "cpu"


def make_inputs(length: int, batch: int, layout: str) -> tuple[tuple, tuple]:
    """For Retrace, sequences of T + 1 states with their action values and policies; for V-trace, values and ratios."""
    keys = iter(jax.random.split(jax.random.key(0), 10))

    def shape(steps: int) -> tuple[int, int]:
        return (batch, steps) if layout == "batch" else (steps, batch)

    states, steps = shape(length + 1), shape(length)
    q, logits = (jax.random.normal(next(keys), (*states, ACTIONS)) for _ in range(2))
    actions = jax.random.randint(next(keys), states, 0, ACTIONS)
    mu = jax.random.uniform(next(keys), states, minval=0.2)
    rewards = jax.random.normal(next(keys), steps)
    discounts = jnp.where(jax.random.uniform(next(keys), steps) < 0.01, 0.0, 0.99)
    v, v_next, log_ratios = (jax.random.normal(next(keys), steps) for _ in range(3))
    retrace = (q, jax.nn.softmax(logits), actions, mu, rewards, discounts)
    return jax.block_until_ready((retrace, (v, v_next, rewards, discounts, jnp.exp(log_ratios))))


def our_retrace(q, pi, actions, mu, rewards, discounts, backend="auto"):
    """The targets of which `rlax.retrace` returns the errors."""
    q_taken = targets.taken(q, actions)[:-1]
    traces = DECAY * jnp.minimum(1.0, targets.taken(pi, actions) / (mu + 1e-8))
    v_next = targets.expected(q, pi)[1:]
    return targets.multi_step(q_taken, v_next, rewards, discounts, traces[:-1], backend=backend)


def our_vtrace(v, v_next, rewards, discounts, ratios, backend="auto"):
    """The targets of which `rlax.vtrace` returns the errors."""
    clips = {"clip": 1.0, "rho_clip": 1.0, "decay": DECAY}
    return targets.vtrace(v, v_next, rewards, discounts, ratios, ratios, **clips, backend=backend)


def their_retrace(q, pi, actions, mu, rewards, discounts):
    return rlax.retrace(q[:-1], q[1:], actions[:-1], actions[1:], rewards, discounts, pi[1:], mu[1:], DECAY)


def their_vtrace(v, v_next, rewards, discounts, ratios):
    return rlax.vtrace(v, v_next, rewards, discounts, ratios, DECAY)


def peers() -> dict[str, tuple[Callable, Callable, Callable]]:
    """For each target and one sequence: the peer, ours, and what ours exceeds the peer by."""
    if rlax is None:
        return {
            "Retrace": (partial(our_retrace, backend="scan"), our_retrace, lambda *arrays: 0.0 * arrays[4]),
            "V-trace": (partial(our_vtrace, backend="scan"), our_vtrace, lambda *arrays: 0.0 * arrays[2]),
        }
    return {
        "Retrace": (their_retrace, our_retrace, lambda q, pi, actions, *_: targets.taken(q, actions)[:-1]),
        "V-trace": (their_vtrace, our_vtrace, lambda v, *_: v),
    }


def median_times(functions: list[Callable], arrays: tuple, seconds: float) -> list[float]:
    """The median time of each function: in turns of five calls until the time is up, at least three turns each."""
    for function in functions:
        jax.block_until_ready(function(*arrays))
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < 15 or time.perf_counter() - start < seconds:
        for function, record in zip(functions, times, strict=True):
            for _ in range(5):
                begin = time.perf_counter()
                jax.block_until_ready(function(*arrays))
                record.append(time.perf_counter() - begin)
    return [statistics.median(record) for record in times]


def repeated(function: Callable, rewards: int, times: int) -> Callable:
    """The function so many times within one program; `rewards` is the position of the rewards among its arrays."""

    def once(_, state, arrays):
        # Behind the barrier, XLA cannot move what the same arrays give each time out of the loop.
        state, arrays = jax.lax.optimization_barrier((state, arrays))
        varied = (*arrays[:rewards], state, *arrays[rewards + 1 :])
        return 0.3 * function(*varied) + arrays[rewards]

    def program(*arrays):
        return jax.lax.fori_loop(0, times, partial(once, arrays=arrays), arrays[rewards])

    return jax.jit(program)


def bandwidth() -> float:
    """Bytes a second of copying a large array: one read and one write."""
    array = jnp.ones(2**28, jnp.float32)
    seconds = median_times([jax.jit(lambda x: x + 1)], (array,), 0.3)[0]
    return 2 * array.nbytes / seconds


def sizes(quick: bool) -> list[tuple[int, int]]:
    """T and B, as long as the arrays stay within reason."""
    lengths = [8, 128] if quick else [8, 32, 128, 512, 1024, 4096]
    batches = [32, 256] if quick else [32, 256, 2048, 16384, 65536]
    largest = 2**21 if ON_CPU else 2**24
    return [(length, batch) for length in lengths for batch in batches if length * batch <= largest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four small sizes")
    parser.add_argument("--sizes", nargs="+", metavar="TxB", help="these sizes instead, such as 4096x2048")
    parser.add_argument("--layouts", nargs="+", choices=["batch", "time"], default=["batch", "time"])
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each comparison")
    options = parser.parse_args()
    chosen = [tuple(map(int, size.split("x"))) for size in options.sizes or []] or sizes(options.quick)
    copy = None if ON_CPU else bandwidth()
    device = jax.devices()[0].device_kind
    peer = "plain scan" if rlax is None else f"rlax {rlax.__version__}"
    moves = "" if copy is None else f"; a copy moves {copy / 1e9:.0f} GB/s"
    print(f"{device}, jax {jax.__version__}, against {peer}{moves}.\n")
    last = "inside, times faster" if ON_CPU else "share of bandwidth"
    print(f"| target | layout | T | B | peer, ms | ours, ms | times faster | {last} |")
    print("|---|---|--:|--:|--:|--:|--:|--:|")
    for length, batch in chosen:
        for layout in options.layouts:
            retrace, vtrace = make_inputs(length, batch, layout)
            axis = 0 if layout == "batch" else 1
            for name, arrays, rewards in [("Retrace", retrace, 4), ("V-trace", vtrace, 2)]:
                *pair, excess = [jax.jit(jax.vmap(f, in_axes=axis, out_axes=axis)) for f in peers()[name]]
                theirs, ours = (np.asarray(function(*arrays)) for function in pair)
                np.testing.assert_allclose(ours, theirs + excess(*arrays), rtol=1e-2, atol=1e-2)
                peer_time, our_time = median_times(pair, arrays, options.seconds)
                if copy is None:
                    times = min(max(2**20 // (length * batch), 4), 200)
                    programs = [repeated(function, rewards, times) for function in pair]
                    inside = median_times(programs, arrays, options.seconds)
                    last = f"{inside[0] / inside[1]:.2f}"
                else:
                    moved = sum(array.nbytes for array in arrays) + ours.nbytes
                    last = f"{moved / our_time / copy:.0%}"
                print(
                    f"| {name} | {layout} | {length} | {batch} | {1e3 * peer_time:.3f} | {1e3 * our_time:.3f} "
                    f"| {peer_time / our_time:.2f} | {last} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
