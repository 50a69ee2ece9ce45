"""A TD3 agent whose critic target is any operator of this library, and the training around it."""

from typing import TYPE_CHECKING, Any

from marginax.deep.config import PopulationConfig, TD3Config

if TYPE_CHECKING:
    from marginax.deep.population import Population
    from marginax.deep.td3 import TD3State, init, update, update_block

__all__ = ["Population", "PopulationConfig", "TD3Config", "TD3State", "init", "update", "update_block"]


def __getattr__(name: str) -> Any:
    """What needs JAX is imported when it is used."""
    import importlib

    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "population" if name == "Population" else "td3"
    return getattr(importlib.import_module(f"marginax.deep.{module}"), name)
