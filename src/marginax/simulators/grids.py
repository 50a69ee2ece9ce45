"""Two small games on grids as pure JAX functions: bsuite's Catch, and Four Rooms with slips and noisy rewards."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from marginax.simulators.accelerated import AcceleratedSimulator

if TYPE_CHECKING:
    from jaxtyping import Array

_ROOMS = (
    "#############",
    "#     #     #",
    "#     #     #",
    "#           #",
    "#     #     #",
    "#     #     #",
    "## ####     #",
    "#     ### ###",
    "#     #     #",
    "#     #     #",
    "#           #",
    "#     #     #",
    "#############",
)


def _simulator(
    name: str, shape: tuple[int, ...], actions: int, limit: int, reset, step
) -> AcceleratedSimulator:
    low, high = np.zeros(1, np.float32), np.full(1, actions - 1, np.float32)
    return AcceleratedSimulator(name, shape, actions, low, high, limit, reset, step)


def catch(rows: int = 10, columns: int = 5, slip: float = 0.0, noise: float = 0.0) -> AcceleratedSimulator:
    """bsuite's Catch: a ball falls, a paddle moves below it; at the bottom the reward is 1 if caught, -1 if not.

    With probability `slip` a move of the paddle is a random one, and with `noise` every reward carries Gaussian noise.

    The state is (row of the ball, its column, column of the paddle). The observation has a plane for each of the two.

    >>> import jax
    >>> game = catch()
    >>> state, observation = game.reset(jax.random.key(0))
    >>> state, observation, reward, terminated, truncated = game.step(jax.random.key(1), state, 2)
    >>> observation.shape, float(reward), bool(terminated)
    ((10, 5, 2), 0.0, False)
    """
    import jax
    import jax.numpy as jnp

    def observe(state: "Array") -> "Array":
        ball = jnp.outer(jnp.arange(rows) == state[0], jnp.arange(columns) == state[1])
        paddle = jnp.outer(jnp.arange(rows) == rows - 1, jnp.arange(columns) == state[2])
        return jnp.stack([ball, paddle], -1).astype(jnp.float32)

    def reset(key: "Array") -> tuple["Array", "Array"]:
        state = jnp.stack([jnp.int32(0), jax.random.randint(key, (), 0, columns), jnp.int32(columns // 2)])
        return state, observe(state)

    def step(key: "Array", state: "Array", action: "Array") -> tuple["Array", ...]:
        if slip or noise:
            slips, direction, luck = jax.random.split(key, 3)
            random = jax.random.randint(direction, (), 0, 3)
            action = jnp.where(jax.random.uniform(slips) < slip, random, action)
        paddle = jnp.clip(state[2] + action - 1, 0, columns - 1)
        following = jnp.stack([state[0] + 1, state[1], paddle])
        ended = following[0] == rows - 1
        reward = jnp.where(ended, jnp.where(paddle == state[1], 1.0, -1.0), 0.0)
        if slip or noise:
            reward = reward + noise * jax.random.normal(luck)
        return following, observe(following), reward, ended, jnp.zeros((), bool)

    name = "grid/noisy-catch" if slip or noise else "grid/catch"
    return _simulator(name, (rows, columns, 2), 3, rows, reset, step)


def four_rooms(slip: float = 0.25, noise: float = 0.1, limit: int = 500) -> AcceleratedSimulator:
    """Four Rooms (Sutton, Precup and Singh, 1999): a reward of 1 at the goal, which ends the episode.

    With probability `slip` a move goes in a random direction, and every reward carries Gaussian noise of standard
    deviation `noise`. Episodes start in a random cell. The observation is one plane, 1 where the agent is.

    >>> four_rooms().observation_shape
    (13, 13, 1)
    """
    import jax
    import jax.numpy as jnp

    free = np.array([[cell == " " for cell in row] for row in _ROOMS])
    goal = np.array([8, 9])
    cells = np.argwhere(free)
    starts = jnp.asarray(cells[(cells != goal).any(1)])
    open_, moves = jnp.asarray(free), jnp.array([[-1, 0], [0, 1], [1, 0], [0, -1]])

    def observe(place: "Array") -> "Array":
        plane = jnp.outer(jnp.arange(13) == place[0], jnp.arange(13) == place[1])
        return plane[..., None].astype(jnp.float32)

    def reset(key: "Array") -> tuple[tuple["Array", "Array"], "Array"]:
        place = starts[jax.random.randint(key, (), 0, len(starts))]
        return (place, jnp.int32(0)), observe(place)

    def step(key: "Array", state: tuple["Array", "Array"], action: "Array") -> tuple:
        place, time = state
        slips, direction, luck = jax.random.split(key, 3)
        action = jnp.where(jax.random.uniform(slips) < slip, jax.random.randint(direction, (), 0, 4), action)
        ahead = place + moves[action]
        place = jnp.where(open_[ahead[0], ahead[1]], ahead, place)
        ended = jnp.all(place == goal)
        reward = ended + noise * jax.random.normal(luck)
        return (place, time + 1), observe(place), reward, ended, (time + 1 >= limit) & ~ended

    return _simulator("grid/four-rooms", (13, 13, 1), 4, limit, reset, step)


GRIDS: dict[str, Callable[[], AcceleratedSimulator]] = {
    "catch": catch,
    "noisy-catch": partial(catch, slip=0.25, noise=0.5),
    "four-rooms": four_rooms,
}
