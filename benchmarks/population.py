"""Population training: update time for growing numbers of agents, where the time goes, how far the limit is.

    python benchmarks/population.py
    python benchmarks/population.py --operators retrace marginalized-fenchel --seeds 2 10
    python benchmarks/population.py --train mujoco/cheetah-run --steps 20000

The first table times blocks of updates alone, on random transitions: by default of 1, 5, 15 and 60 agents, with other
operators or numbers of seeds of those. The second trains for a while and shows the shares of simulating,
learning and waiting.
"""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import tyro

from marginax.deep import td3
from marginax.deep.config import TD3Config
from marginax.deep.learner import Learner, Plan
from marginax.deep.population import Population
from marginax.deep.replay import Replay, sample
from marginax.deep.run_config import PopulationConfig
from marginax.engine.processes import cores
from marginax.experiments.control import CHANGES
from marginax.simulators.rollout import row_width

THREE = ("one-step", "retrace", "marginalized-regression")
POPULATIONS = [(THREE[:1], 1), (THREE[:1], 5), (THREE, 5), (THREE, 20)]
"""Operators, and seeds of each: 1, 5, 15 and 60 agents."""


def products(jaxpr: Any) -> float:
    """Operations of the matrix products in a program, 2 n m k each; what lies in loops counts once."""
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2.0 * math.prod(out) * math.prod(left[axis] for axis in summed)
        total += sum(products(inner) for inner in jax.extend.core.jaxprs_in_params(equation.params))
    return total


def arithmetic(config: TD3Config, observation_size: int, action_size: int) -> float:
    """Operations of one update's matrix products, averaged over delayed and plain updates."""
    state = td3.init(
        config, observation_size=observation_size, action_size=action_size, key=jax.random.key(0)
    )
    rows = jnp.ones((1000, row_width(observation_size, action_size)))
    source = Replay(rows, jnp.asarray(1000, jnp.int32), observation_size)
    batch = sample(source, jax.random.key(0), batch=config.batch_size, length=config.length)

    def count(delayed: bool) -> float:
        made = jax.make_jaxpr(lambda s, b, k: td3.update(config, s, b, k, delayed=delayed))
        return products(made(state, batch, jax.random.key(1)).jaxpr)

    return (count(True) + (config.policy_delay - 1) * count(False)) / config.policy_delay


def matrix_rate() -> float:
    """Operations per second of a large float32 matrix product, at the precision JAX takes by default."""
    n = 8192 if jax.default_backend() != "cpu" else 1024
    a = jax.random.normal(jax.random.key(0), (n, n))
    product = jax.jit(lambda x: x @ x / n)
    jax.block_until_ready(product(a))
    begun = time.perf_counter()
    for _ in range(20):
        a = product(a)
    jax.block_until_ready(a)
    return 20 * 2 * n**3 / (time.perf_counter() - begun)


def time_updates(operators: tuple[str, ...], seeds: int, blocks: int) -> tuple[float, float, float]:
    """Seconds to compile, seconds of one update of all agents, and their operations."""
    configs = tuple(TD3Config.preset("spinning-up", **CHANGES[name]) for name in operators)
    sizes = {"observation_size": 17, "action_size": 6, "capacities": (20_000,) * len(configs)}
    plan = Plan(configs, seeds, **sizes)
    learner = Learner(plan, range(seeds))
    begun = time.perf_counter()
    learner.compile()
    compiling = time.perf_counter() - begun
    generator = np.random.default_rng(0)
    rows = generator.normal(0, 1, (plan.agents, plan.block, plan.width)).astype(np.float32)
    rows[..., 17 + 6 + 1 : 17 + 6 + 3] = 0  # no episode ends
    for index in range(22):  # the first 19 blocks only fill the buffer
        jax.block_until_ready(learner.advance(index, rows))
    begun = time.perf_counter()
    for index in range(22, 22 + blocks):
        out = learner.advance(index, rows)
    jax.block_until_ready(out)
    each = (time.perf_counter() - begun) / (blocks * plan.block)
    return compiling, each, seeds * sum(arithmetic(config, 17, 6) for config in configs)


@dataclasses.dataclass(frozen=True)
class Options:
    """What is timed."""

    operators: tuple[str, ...] = THREE
    seeds: tuple[int, ...] = ()
    """Seeds of each operator; by default 1, 5, 15 and 60 agents are timed."""
    blocks: int = 20
    train: str = ""
    """A simulator: train on it instead, and show where the time goes."""
    steps: int = 20_000
    workers: int = max(1, cores() - 1)


def table(given: Options) -> None:
    """Times of growing populations, beside what a large matrix product reaches."""
    rate = matrix_rate()
    device = jax.devices()[0].device_kind
    print(f"{device}; large float32 matrix product {rate / 1e12:.1f} TFLOP/s; {cores()} cores\n", flush=True)
    print("| operators | agents | compile s | update of all, ms | agent-updates/s | share of that rate |")
    print("|---|---|---|---|---|---|", flush=True)
    asked = [(given.operators, seeds) for seeds in given.seeds or (5,)]
    for operators, seeds in POPULATIONS if given.operators == THREE and not given.seeds else asked:
        compiling, each, flops = time_updates(operators, seeds, given.blocks)
        agents = seeds * len(operators)
        print(
            f"| {', '.join(operators)} | {agents} | {compiling:.1f} | {1e3 * each:.3f} | {agents / each:,.0f} "
            f"| {flops / each / rate:.1%} |",
            flush=True,
        )


def train(given: Options) -> None:
    """Where the time of training goes."""
    config = PopulationConfig(
        simulator=given.train,
        groups={name: TD3Config.preset("spinning-up", **CHANGES[name]) for name in given.operators},
        seeds=tuple(range(given.seeds[-1] if given.seeds else 5)),
        steps=given.steps,
        overlap=True,
    )
    with Population(config, workers=given.workers) as population:
        population.run()
    t, agents = population.timing, len(config.agents)
    print(f"{given.train}, {agents} agents × {given.steps:,} steps, {given.workers} workers\n")
    print("| wall s | steps/s of all | learner busy | host waits for simulation | host waits for learner |")
    print("|---|---|---|---|---|")
    print(
        f"| {t.wall:.1f} | {agents * given.steps / t.wall:,.0f} | {t.busy:.1%} "
        f"| {t.simulating / t.wall:.1%} | {t.waiting / t.wall:.1%} |"
    )


def main(given: tyro.conf.OmitArgPrefixes[Options]) -> None:
    """Time updates, or training."""
    if given.train:
        train(given)
    else:
        table(given)


if __name__ == "__main__":
    tyro.cli(main)
