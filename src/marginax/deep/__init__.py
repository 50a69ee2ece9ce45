"""A TD3 agent whose critic target is any operator of this library, and the training around it."""

from marginax.deep.config import TD3Config
from marginax.deep.state import TD3State, init
from marginax.deep.td3 import update, update_block

__all__ = ["TD3Config", "TD3State", "init", "update", "update_block"]
