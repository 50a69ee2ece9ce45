"""Which data do Retrace and the weights of paths learn from? `python benchmarks/credit_by_age.py`

TD3 with the weights of paths is trained, then sequences are drawn from each part of its replay buffer. For each part, the
mean credit of the steps after the first is printed: of Retrace, the product of the traces; of the weights of paths, u c. A
replay buffer holds the data of many behaviour policies, and traces are longest in the newest data. The table shows whether u,
which does not see the age of the data, tells them apart by their states.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from marginax.deep import Population, PopulationConfig, TD3Config, replay, td3

PARTS = ((0.0, 0.02), (0.02, 0.1), (0.1, 0.3), (0.3, 1.0))
"""Ages, as shares of the run."""


def credit(config: TD3Config, state: td3.TD3State, sequences: replay.Sequences) -> np.ndarray:
    """Credit of every step of every sequence, `[T, batch]`; NaN where a sequence has no such step."""
    batches = jax.tree.map(lambda x: x[None], sequences)
    found, *_ = td3.targets(config, state, batches, jax.random.split(jax.random.key(0), 1), train=False)
    return np.asarray(jnp.where(found.valid, found.credit, jnp.nan)[0])


def main(
    task: str = "mujoco/cheetah-run",
    steps: int = 100_000,
    clip: float = 1.0,
    discount: float = 0.99,
    weight_learning_rate: float = 1e-4,
    seed: int = 0,
    batch: int = 20_000,
) -> None:
    """Train one agent with the defaults but for what is given, and print a table."""
    agent = TD3Config(
        operator="marginalized",
        weights="paths",
        clip=clip,
        discount=discount,
        weight_learning_rate=weight_learning_rate,
        random_steps=10_000,
    )
    config = PopulationConfig(
        simulator=task,
        groups={"paths": agent},
        seeds=(seed,),
        steps=steps,
        evaluate_every=steps,
        overlap=True,
    )
    with Population(config) as population:
        population.run()
        learner = population.learners[0]
        print(f"{task}, {steps:,} steps, clip {clip:g}: return {population.lines[-1]['return']:.0f}")
    state = td3.join(*jax.tree.map(lambda x: x[0], (learner.state.agents, learner.state.own[0])))
    rows = learner.state.rows[0][0]
    retrace = dataclasses.replace(agent, operator="retrace")
    print("age, steps       | weights | " + " | ".join(f"step {t}" for t in range(1, agent.length)))
    for newest, oldest in PARTS:
        first, last = int((1 - oldest) * steps), int((1 - newest) * steps)
        part = replay.Replay(rows[first:last], jnp.asarray(last - first), learner.plan.observation_size)
        sequences = replay.sample(part, jax.random.key(seed), batch=batch, length=agent.length)
        for name, found in (
            ("Retrace", credit(retrace, dataclasses.replace(state, estimator=None), sequences)),
            ("paths", credit(agent, state, sequences)),
        ):
            cells = " | ".join(f"{x:.4f}" for x in np.nanmean(found, axis=1)[1:])
            print(f"{steps - last:>7,}-{steps - first:<7,} | {name:7} | {cells}")


if __name__ == "__main__":
    tyro.cli(main)
