"""Agents whose target is any operator of this library, and the training around them."""

from typing import TYPE_CHECKING

from marginax._lazy import lazy
from marginax.deep.config import TD3Config
from marginax.deep.discrete_config import ActorCriticConfig, QConfig
from marginax.deep.run_config import PopulationConfig

if TYPE_CHECKING:
    from marginax.deep.population import Population
    from marginax.deep.td3 import TD3State, init, update, update_block

__all__ = [
    "ActorCriticConfig",
    "Population",
    "PopulationConfig",
    "QConfig",
    "TD3Config",
    "TD3State",
    "init",
    "update",
    "update_block",
]

__getattr__ = lazy(
    __name__,
    {"Population": "population", **dict.fromkeys(("TD3State", "init", "update", "update_block"), "td3")},
)
