"""It learns: Pendulum-v1 to an average return of at least -250 within 15,000 steps, with every operator."""

import pytest

from marginax.deep.config import TD3Config
from marginax.deep.run import Run
from marginax.deep.train import Trainer


class Reached(Exception):
    """The agent is good enough; no need to go on."""


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["one-step", "n-step", "retrace", "retrace-paper", "marginalized"])
def test_pendulum_is_learned(operator, tmp_path):
    agent = TD3Config(operator=operator, hidden=(64, 64), random_steps=1000, update_every=100)
    run = Run(
        simulator="Pendulum-v1",
        steps=15_000,
        evaluate_every=2500,
        checkpoint_every=15_000,
        episodes=10,
        agent=agent,
    )

    def report(message):
        if message.get("return", -1e9) >= -250:
            raise Reached

    with pytest.raises(Reached):
        Trainer(run, seed=0, folder=tmp_path, report=report).train()
