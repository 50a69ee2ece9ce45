"""Logs of small random MDPs for the tests of off-policy evaluation."""

import jax
import numpy as np

import marginax as mx
from marginax.offline import Log

GAMMA = 0.9


def garnet_log(seed, episodes=60, horizon=12, states=5, actions=3):
    """A small log with terminated and truncated episodes, and policies that share support."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(states), size=(states, actions)) * 0.85
    mdp = mx.TabularMDP(
        p, rng.normal(size=(states, actions)), GAMMA, reward_std=np.full((states, actions), 0.3)
    )
    mu = rng.dirichlet(2 * np.ones(actions), size=states)
    pi = 0.5 * mu + 0.5 * rng.dirichlet(np.ones(actions), size=states)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(seed), episodes=episodes, horizon=horizon)
    return mdp, pi, mu, Log.from_trajectories(batch)
