"""Environment steps per second of Q-learning on CartPole, beside cleanrl's `dqn_jax` loop, at its settings, in one process.

cleanrl is not a package: the loop here follows its `dqn_jax.py` step by step (a vector environment of one with episode
statistics, a jitted product for the action at every step, a buffer of NumPy arrays, one jitted update of batch 128 every
10 steps, a copy of the target network every 500), with logging left out. marginax runs CartPole-v1 step by step in this
process, and gymnax/CartPole-v1 inside the compiled program with one seed and with ten. Compilation is not counted. All are
measured in turn, and the fastest round of each counts. A random action costs `dqn_jax` nothing, so it matters where in a run
it is measured: ε is 0.29 here, the mean over its 500,000 steps; `--epsilon 1` is how a run begins.

    python benchmarks/q_learning.py --steps 10000 --rounds 3

With `--game`, the seconds of a game of MinAtar on an accelerator instead, compilation included: ten seeds with a million frames
each, at the settings of `marginax reproduce discrete`.

    python benchmarks/q_learning.py --game gymnax/Breakout-MinAtar --operators one-step
"""

import argparse
import dataclasses
import time
from functools import partial

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

from marginax.deep import Population, PopulationConfig
from marginax.deep.discrete_config import QConfig
from marginax.deep.networks import MLP
from marginax.experiments.discrete import Discrete

START = 1_000  # both learn from here on, so that few steps measure learning


def cleanrl(steps: int, epsilon: float) -> tuple[float, float]:
    """Steps per second of the clock and of the processors, after the first `START` steps and a first update."""
    environments = gymnasium.vector.SyncVectorEnv(
        [lambda: gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make("CartPole-v1"))]
    )
    network = MLP(4, 2, (120, 84), key=jax.random.key(0))
    target, adam = network, optax.adam(2.5e-4)
    optimiser = adam.init(network)
    apply = jax.jit(lambda network, x: network(x))

    @jax.jit
    def update(network, target, optimiser, x, a, following, r, done):
        goal = r + (1 - done) * 0.99 * jnp.max(target(following), axis=-1)

        def loss(network):
            return jnp.mean((network(x)[jnp.arange(len(a)), a] - goal) ** 2)

        error, gradient = jax.value_and_grad(loss)(network)
        moves, optimiser = adam.update(gradient, optimiser)
        return error, optax.apply_updates(network, moves), optimiser

    size = 10_000
    x_, following_ = np.zeros((2, size, 1, 4), np.float32)
    a_, r_, done_ = (
        np.zeros((size, 1), np.int64),
        np.zeros((size, 1), np.float32),
        np.zeros((size, 1), np.float32),
    )
    x, _ = environments.reset(seed=0)
    clock, cpu, generator = 0.0, 0.0, np.random.default_rng(0)
    for step in range(START + steps):
        if step == START + 100:  # compiled by now
            clock, cpu = time.perf_counter(), time.process_time()
        if generator.random() < epsilon:
            a = np.array([environments.single_action_space.sample()])
        else:
            a = jax.device_get(apply(network, x).argmax(axis=-1))
        following, r, terminated, _, _ = environments.step(a)
        i = step % size
        x_[i], a_[i], r_[i], done_[i], following_[i] = x, a, r, terminated, following
        x = following
        if step > START and step % 10 == 0:
            k = generator.integers(min(step, size), size=128)
            batch = (x_[k, 0], a_[k, 0], following_[k, 0], r_[k, 0], done_[k, 0])
            _, network, optimiser = update(network, target, optimiser, *batch)
            if step % 500 == 0:
                target = network
    jax.block_until_ready(network.weights[0])
    count = steps - 100
    return count / (time.perf_counter() - clock), count / (time.process_time() - cpu)


def ours(simulator: str, steps: int, seeds: int, epsilon: float) -> tuple[float, float]:
    """The same of a population, added up over its seeds."""
    agent = QConfig(double=False, update_after=START, epsilon=epsilon, epsilon_steps=0)
    config = PopulationConfig(
        simulator=simulator, groups={"q": agent}, seeds=tuple(range(seeds)), steps=START + 1000 + steps,
        evaluate_every=START + 1000 + steps, episodes=1,
    )  # fmt: skip
    marks = []

    def report(population: Population, lines: list) -> None:
        if population.step > START + 500:
            marks.append((population.step, time.perf_counter(), time.process_time()))

    with Population(config) as population:
        population.run(report=report)
    (a, t, cpu), (b, t_end, cpu_end) = marks[0], marks[-2]
    return seeds * (b - a) / (t_end - t), seeds * (b - a) / (cpu_end - cpu)


def game_seconds(game: str, operators: list[str], frames: int, seeds: int) -> None:
    """Print how long it takes to train and evaluate all seeds of a game in one program."""
    experiment = dataclasses.replace(Discrete(), seeds=seeds)
    config = experiment.population(game, {name: {"operator": name} for name in operators}, frames)
    begun = time.perf_counter()
    with Population(config) as population:
        population.run()
    seconds = time.perf_counter() - begun
    print(
        f"{game}, {', '.join(operators)}, {seeds} seeds, {frames:,} frames each: {seconds:.0f} s, of which "
        f"{population.timing.compiling:.0f} s compilation; {len(config.agents) * frames / seconds:,.0f} frames/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epsilon", type=float, default=0.29)
    parser.add_argument("--game", default="")
    parser.add_argument("--operators", nargs="+", default=["one-step"])
    parser.add_argument("--frames", type=int, default=1_024_000)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    if options.game:
        game_seconds(options.game, options.operators, options.frames, options.seeds)
        return
    steps, epsilon = options.steps, options.epsilon
    rows = {
        "cleanrl's `dqn_jax` loop": partial(cleanrl, steps, epsilon),
        "marginax, CartPole-v1": partial(ours, "CartPole-v1", steps, 1, epsilon),
        "marginax, gymnax/CartPole-v1": partial(ours, "gymnax/CartPole-v1", 10 * steps, 1, epsilon),
        "marginax, gymnax/CartPole-v1, 10 seeds": partial(ours, "gymnax/CartPole-v1", 2 * steps, 10, epsilon),
    }
    rounds = [{name: measure() for name, measure in rows.items()} for _ in range(options.rounds)]
    found = {name: tuple(map(max, zip(*(each[name] for each in rounds), strict=True))) for name in rows}
    peer = found["cleanrl's `dqn_jax` loop"]
    print("| | steps/s | ratio | steps per second of processor time | ratio |\n|---|---|---|---|---|")
    for name, (wall, cpu) in found.items():
        print(f"| {name} | {wall:,.0f} | {wall / peer[0]:.1f} | {cpu:,.0f} | {cpu / peer[1]:.1f} |")


if __name__ == "__main__":
    main()
