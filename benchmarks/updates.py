"""Cost of an update by operator: time on one core, and operations of its matrix products.

    NPROC=1 python benchmarks/updates.py

Blocks of 50 updates on random transitions (17 observations, 6 actions, networks 2×256, batches of 100), the settings in turn and
several times round; the least processor time counts. Operations are counted in the program itself.
"""

import time
from collections.abc import Callable
from functools import partial

import jax
import numpy as np
import tyro

from marginax.deep import TD3Config, init, replay, update_block
from population import arithmetic

SIZES = {"observation_size": 17, "action_size": 6}
MARGINALIZED = {"operator": "marginalized"}
SETTINGS = {
    "one-step": {},
    "n-step, 5": {"operator": "n-step"},
    "Retrace, 5": {"operator": "retrace"},
    "marginalized, one later step, 2": {**MARGINALIZED, "sequence_length": 2},
    "marginalized, one later step, 5": MARGINALIZED,
    "marginalized, one later step, 10": {**MARGINALIZED, "sequence_length": 10},
    "marginalized, all later steps, 3": {**MARGINALIZED, "sequence_length": 3, "target_steps": "all"},
    "marginalized, all later steps, 5": {**MARGINALIZED, "target_steps": "all"},
    "marginalized, saddle point, 5": {**MARGINALIZED, "weights": "saddle-point"},
}


def prepare(config: TD3Config) -> Callable[[int], float]:
    """A function that runs one block and returns its processor time for an update, in milliseconds."""
    state = init(config, **SIZES, key=jax.random.key(0))
    rows = np.random.default_rng(0).normal(size=(5000, 44)).astype(np.float32)
    rows[:, 24:26] = 0  # no episode ends
    buffer = replay.add(replay.empty(5000, *SIZES.values()), rows)
    block = jax.jit(partial(update_block, config, updates=50), donate_argnums=0)

    def run(number: int) -> float:
        nonlocal state
        begun = time.process_time()
        state, _ = block(state, buffer, jax.random.key(number))
        jax.block_until_ready(state)
        return (time.process_time() - begun) / 50 * 1e3

    run(0)
    return run


def main(rounds: int = 8) -> None:
    """Time an update with each operator and print a table; the least of so many rounds counts."""
    configs = {name: TD3Config.preset("spinning-up", **settings) for name, settings in SETTINGS.items()}
    blocks = {name: prepare(config) for name, config in configs.items()}
    seen = [{name: block(i) for name, block in blocks.items()} for i in range(1, rounds + 1)]
    times = {name: min(each[name] for each in seen) for name in configs}
    work = {name: arithmetic(config, **SIZES) / 1e6 for name, config in configs.items()}
    print(
        "| operator, sequence length | matrix products, MFLOP | ratio | time, ms | ratio |\n|---|---|---|---|---|"
    )
    for name in configs:
        ratios = work[name] / work["one-step"], times[name] / times["one-step"]
        print(f"| {name} | {work[name]:.0f} | {ratios[0]:.2f} | {times[name]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    tyro.cli(main)
