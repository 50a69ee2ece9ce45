"""Frames and updates per second of purejaxql's PQN and of our Q-learning on games of gymnax, in turn.

PQN pins jax ≤ 0.4.38 and lives in an environment of its own, whose Python is given; a second one may have a newer jax:

    uv venv -p 3.11 .venv-pqn
    uv pip install --python .venv-pqn git+https://github.com/mttga/purejaxql gymnax==0.0.6 six
    uv venv -p 3.11 .venv-pqn-new
    uv pip install --python .venv-pqn-new jax==0.10.2 gymnax==0.0.9 flax optax chex wandb hydra-core safetensors six
    uv pip install --python .venv-pqn-new --no-deps git+https://github.com/mttga/purejaxql
    python benchmarks/pqn.py --peers .venv-pqn/bin/python .venv-pqn-new/bin/python

The peer is purejaxql's own program (`make_train`) with its published settings, without tests on the way. Ours has as many
environments and hidden units (but no layer norm) and, after every rollout, as many updates with batches of the same size.
PQN has no replay and no target network, and computes the λ-returns of a rollout once. Ours draws every batch from replay and
computes its targets anew, so an update costs more. Everyone compiles, then plays when it is asked; the fastest round counts.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

GAMES = {  # environments, steps of a rollout, hidden layers, frames that are timed
    "CartPole-v1": (32, 64, (256, 256), 50 * 2048),
    "Breakout-MinAtar": (128, 32, (128,), 10 * 4096),
}
UPDATES, BATCH = 64, 128  # after every rollout, in both games
OURS = {"marginax, one-step": "one-step", "marginax, Peng's Q(λ), sequences of 8": "peng"}


def pqn(game: str) -> Callable[[], int]:
    """purejaxql's program, compiled; a call trains from the start and returns its frames."""
    import jax
    from purejaxql import pqn_gymnax, pqn_minatar

    environments, steps, hidden, frames = GAMES[game]
    minatar = game.endswith("MinAtar")
    config = {
        "ENV_NAME": game, "NUM_ENVS": environments, "NUM_STEPS": steps, "TOTAL_TIMESTEPS": frames,
        "TOTAL_TIMESTEPS_DECAY": 1e7 if minatar else 5e5, "EPS_START": 1.0, "EPS_FINISH": 0.05 if minatar else 0.2,
        "EPS_DECAY": 0.1 if minatar else 0.2, "NUM_MINIBATCHES": environments * steps // BATCH,
        "NUM_EPOCHS": UPDATES * BATCH // (environments * steps), "NORM_TYPE": "layer_norm", "MAX_GRAD_NORM": 10,
        "HIDDEN_SIZE": hidden[0], "NUM_LAYERS": len(hidden), "LR": 5e-4 if minatar else 1e-4,
        "LR_LINEAR_DECAY": True, "REW_SCALE": 1 if minatar else 0.1, "GAMMA": 0.99, "LAMBDA": 0.65 if minatar else 0.95,
        "TEST_DURING_TRAINING": False, "WANDB_MODE": "disabled",
    }  # fmt: skip
    key = jax.random.PRNGKey(0)
    module = pqn_minatar if minatar else pqn_gymnax
    program = jax.jit(module.make_train(config)).lower(key).compile()
    return lambda: int(jax.block_until_ready(program(key))["metrics"]["env_step"][-1])


def ours(game: str, operator: str) -> Callable[[], int]:
    """A population that is learning already; a call trains on and returns its frames."""
    from marginax.deep import Population, PopulationConfig, QConfig

    environments, steps, hidden, frames = GAMES[game]
    block = environments * steps
    agent = QConfig(
        operator=operator, double=False, hidden=hidden, environments=environments, update_every=block,
        block_updates=UPDATES, batch_size=BATCH, update_after=block, replay_size=12 * block, target_every=UPDATES,
    )  # fmt: skip
    # Never so far that the policy is evaluated.
    config = PopulationConfig(simulator=f"gymnax/{game}", groups={"q": agent}, steps=10_000 * block)
    population = Population(config)

    def play(frames: int) -> int:
        first = population.step
        population.run(stop=lambda: population.step >= first + frames)
        return population.step - first

    play(4 * block)
    return lambda: play(frames)


def contestant(game: str, name: str) -> None:
    """Say `ready` and jax's version; for every line that comes, play and print frames per second of clock and processors."""
    import jax

    play = pqn(game) if name == "pqn" else ours(game, name)
    print("ready", jax.__version__, flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        frames = play()
        print(frames / (time.perf_counter() - start), frames / (time.process_time() - cpu), flush=True)


def measure(game: str, commands: list[list[str]], rounds: int) -> list[tuple[str, float, float]]:
    """Of every contestant on a game jax's version and frames per second of clock and processors; they play in turn."""
    pipe = subprocess.PIPE
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen([*command, game], env=variables, stdin=pipe, stdout=pipe, text=True)
        for command in commands
    ]
    versions: list[str] = []
    for child in children:
        words = [""]
        while words[0] != "ready":
            if not (line := child.stdout.readline()):
                raise RuntimeError(f"{' '.join(child.args)} ended before it was ready.")
            words = line.split() or [""]
        versions.append(words[1])
    found: list[list[tuple[float, ...]]] = [[] for _ in children]
    for _ in range(rounds):
        for child, mine in zip(children, found, strict=True):
            print("go", file=child.stdin, flush=True)
            mine.append(tuple(float(word) for word in child.stdout.readline().split()))
    for child in children:
        child.communicate()
    best = [tuple(map(max, zip(*mine, strict=True))) for mine in found]
    return [(version, *figures) for version, figures in zip(versions, best, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", nargs="*", default=[], help="Pythons of environments with purejaxql")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", nargs=2, help="only for the processes that this script starts")
    options = parser.parse_args()
    if options.contestant:
        name, game = options.contestant
        contestant(game, name)
        return
    names = ["purejaxql's PQN"] * len(options.peers) + list(OURS)
    contestants = [(python, "pqn") for python in options.peers]
    contestants += [(sys.executable, operator) for operator in OURS.values()]
    commands = [[python, __file__, "--contestant", word] for python, word in contestants]
    print(
        "| game | | jax | frames/s | updates/s | frames per second of processor time |\n|---|---|---|---:|---:|---:|"
    )
    for game, (environments, steps, *_) in GAMES.items():
        for name, (version, wall, cpu) in zip(names, measure(game, commands, options.rounds), strict=True):
            updates = wall * UPDATES / (environments * steps)
            print(f"| {game} | {name} | {version} | {wall:,.0f} | {updates:,.0f} | {cpu:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
