"""Targets against rlax (`retrace` and `vtrace`, jitted and vmapped), or against a plain loop where there is no rlax.

    python benchmarks/targets.py [--sizes 128x256 4096x2048] [--layouts batch time] [--against rlax loop]

Both sides get the same arrays: Retrace starts from the action values and policies of T + 1 states, V-trace from values and
ratios. They are timed in turns, and the median of each counts. `batch` is [B, T] with `jax.vmap(...)`; `time` is [T, B]
with `in_axes=1`. rlax returns errors and this library targets; that they agree is checked. The loop is this library's own
recursion with `backend="scan"`, which is of interest on an accelerator: there the targets are an associative scan.
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
from marginax.traces import clip_ratios

try:
    import rlax
except ImportError:
    rlax = None

ACTIONS = 4
DECAY = 0.9


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
    traces = clip_ratios(targets.select_actions(pi, actions) / (mu + 1e-8), 1.0, DECAY)
    q_taken, v_next = targets.select_actions(q, actions)[:-1], targets.expectation(q, pi)[1:]
    return targets.multi_step(q_taken, v_next, rewards, discounts, traces[:-1], backend=backend)


def our_vtrace(v, v_next, rewards, discounts, ratios, backend="auto"):
    traces, rhos = clip_ratios(ratios, 1.0, DECAY), clip_ratios(ratios)
    return targets.vtrace(v, v_next, rewards, discounts, traces, rhos, backend=backend)


def their_retrace(q, pi, actions, mu, rewards, discounts):
    return rlax.retrace(q[:-1], q[1:], actions[:-1], actions[1:], rewards, discounts, pi[1:], mu[1:], DECAY)


def their_vtrace(v, v_next, rewards, discounts, ratios):
    return rlax.vtrace(v, v_next, rewards, discounts, ratios, DECAY)


LOOPS = {"Retrace": partial(our_retrace, backend="scan"), "V-trace": partial(our_vtrace, backend="scan")}
OURS = {"Retrace": our_retrace, "V-trace": our_vtrace}
RLAX = {"Retrace": their_retrace, "V-trace": their_vtrace}
# What our targets exceed rlax's errors by.
VALUES = {
    "Retrace": lambda q, pi, actions, *_: targets.select_actions(q, actions)[:-1],
    "V-trace": lambda v, *_: v,
}


def median_times(functions: list[Callable], arrays: tuple, seconds: float) -> list[float]:
    """The median time of each function: in turns of five calls until the time is up, at least three turns each."""
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < 15 or time.perf_counter() - start < seconds:
        for function, record in zip(functions, times, strict=True):
            for _ in range(5):
                begin = time.perf_counter()
                jax.block_until_ready(function(*arrays))
                record.append(time.perf_counter() - begin)
    return [statistics.median(record) for record in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", metavar="TxB", help="T steps by B sequences, such as 4096x2048")
    parser.add_argument("--layouts", nargs="+", choices=["batch", "time"], default=["batch", "time"])
    parser.add_argument("--against", choices=["rlax", "loop"], default="loop" if rlax is None else "rlax")
    parser.add_argument("--seconds", type=float, default=0.5, help="time for each comparison")
    options = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    sizes = options.sizes or ("32x256 128x256 128x2048 1024x1024" if on_cpu else "128x256 4096x2048").split()
    peers = RLAX if options.against == "rlax" else LOOPS
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, against {options.against}.\n")
    print("| T × B | layout | target | peer, ms | ours, ms | times faster |\n|---|---|---|--:|--:|--:|")
    for length, batch in (tuple(map(int, size.split("x"))) for size in sizes):
        for layout in options.layouts:
            axis = 0 if layout == "batch" else 1
            for name, arrays in zip(OURS, make_inputs(length, batch, layout), strict=True):
                functions = [peers[name], OURS[name], VALUES[name]]
                peer, ours, values = (jax.jit(jax.vmap(f, in_axes=axis, out_axes=axis)) for f in functions)
                offset = values(*arrays) if options.against == "rlax" else 0
                np.testing.assert_allclose(ours(*arrays), peer(*arrays) + offset, rtol=1e-2, atol=1e-2)
                theirs, own = median_times([peer, ours], arrays, options.seconds)
                row = f"{1e3 * theirs:.3f} | {1e3 * own:.3f} | {theirs / own:.2f}"
                print(f"| {length:,} × {batch:,} | {layout} | {name} | {row} |", flush=True)


if __name__ == "__main__":
    main()
