"""It learns: Pendulum-v1 to an average return of at least -250 within 15,000 steps, with every operator."""

import pytest

from marginax.deep.config import TD3Config
from marginax.deep.population import Population
from marginax.deep.run_config import PopulationConfig


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["one-step", "n-step", "retrace", "retrace-paper", "marginalized"])
def test_pendulum_is_learned(operator):
    agent = TD3Config(operator=operator, hidden=(64, 64), random_steps=1000, update_every=100)
    config = PopulationConfig(
        simulator="Pendulum-v1", groups={operator: agent}, steps=15_000, evaluate_every=2500, episodes=10
    )
    with Population(config) as population:
        population.run(stop=lambda: any(line["return"] >= -250 for line in population.lines[-1:]))
    assert max(line["return"] for line in population.lines) >= -250
