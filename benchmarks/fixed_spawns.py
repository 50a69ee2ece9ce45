"""Q-learning in an Asterix that draws nothing: what appears follows from the step of the episode. Needs gymnax.

    python benchmarks/fixed_spawns.py                       # the game as it is
    python benchmarks/fixed_spawns.py --fixed               # without its own noise

If long targets lose in Asterix because of what appears at random, they should not lose where nothing is drawn. Settings and
schedule are those of the ablation of `marginax reproduce discrete`, which is stopped at `--frames`. Prints the return of
the greedy policy, seed by seed. About ten minutes on two cores for three seeds of one-step and Peng's Q(λ) with four steps.
"""

import argparse
import dataclasses

import jax
from gymnax.environments.minatar.asterix import MinAsterix

from marginax.deep import Population
from marginax.experiments.discrete import Discrete

plain_step = MinAsterix.step_env


def step_without_draws(self, key, state, action, params):
    """A step of the game with a key that is the same at this time of every episode."""
    return plain_step(self, jax.random.fold_in(jax.random.key(0), state.time), state, action, params)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixed", action="store_true", help="let what appears follow from the time")
    parser.add_argument("--variants", nargs="+", default=["one-step", "peng, T = 4"], help="of the ablation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=153_600)
    options = parser.parse_args()
    if options.fixed:
        MinAsterix.step_env = step_without_draws
    experiment = dataclasses.replace(Discrete(), seeds=options.seeds)
    config = experiment.work()["gymnax-Asterix-MinAtar-ablation"]
    groups = {name: config.groups[name] for name in options.variants}
    config = dataclasses.replace(config, groups=groups, steps=options.frames)
    with Population(config) as population:
        population.run()
    for name in groups:
        for step in sorted({line["step"] for line in population.lines}):
            mine = [
                line["return"]
                for line in population.lines
                if (line["operator"], line["step"]) == (name, step)
            ]
            print(f"{name:12} {step:8,}  " + "  ".join(f"{x:6.2f}" for x in mine))


if __name__ == "__main__":
    main()
