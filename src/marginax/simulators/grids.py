"""Simulators with discrete actions that run inside a compiled program, on whatever device the program runs on.

Catch and Four Rooms are ours; classic control, MinAtar and bsuite come from gymnax (`pip install marginax[accelerator]`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

State = Any


class Game(NamedTuple):
    """A simulator as three pure functions, for one copy of it; `jax.vmap` makes many.

    There are no time limits and no automatic resets: `step` says whether the episode ended, `restart` begins anew.

    Attributes:
        name: As `make` takes it.
        num_actions: Actions are 0, …, num_actions - 1.
        observation_shape: Shape of what `observe` returns.
        reset: Key → first state of an episode.
        step: Key, state, action → next state, reward, whether the episode ended.
        observe: State → observation, in float32.

    >>> game = make("catch")
    >>> state = game.reset(jax.random.key(0))
    >>> state, reward, ended = game.step(jax.random.key(1), state, 2)
    >>> game.observe(state).shape, float(reward), bool(ended)
    ((10, 5, 2), 0.0, False)
    """

    name: str
    num_actions: int
    observation_shape: tuple[int, ...]
    reset: Callable[[Array], State]
    step: Callable[[Array, State, Array], tuple[State, Array, Array]]
    observe: Callable[[State], Array]


def restart(game: Game, key: Array, state: State, ended: Array) -> State:
    """The state itself, or a first one where the episode ended.

    >>> game = make("catch")
    >>> bool(restart(game, jax.random.key(0), jnp.array([7, 1, 3]), jnp.array(True))[0] == 0)
    True
    """
    return jax.tree.map(lambda new, old: jnp.where(ended, new, old), game.reset(key), state)


def make(name: str) -> Game:
    """A simulator by name: "catch", "four-rooms", or "gymnax/NAME".

    Raises:
        ValueError: The name is unknown, or actions are not discrete.
        ImportError: gymnax is not installed.

    >>> make("four-rooms").num_actions
    4
    """
    if name == "catch":
        return catch()
    if name == "four-rooms":
        return four_rooms()
    if name.startswith("gymnax/"):
        return _gymnax(name)
    raise ValueError(f"name must be 'catch', 'four-rooms' or 'gymnax/NAME', got {name!r}")


def catch(rows: int = 10, columns: int = 5) -> Game:
    """bsuite's Catch: a ball falls, a paddle moves below it; at the bottom the reward is 1 if caught, -1 if not.

    The state is (row of the ball, its column, column of the paddle); the observation has one plane for each of the two.

    >>> catch(rows=4).observation_shape
    (4, 5, 2)
    """

    def reset(key: Array) -> Array:
        return jnp.stack([jnp.int32(0), jax.random.randint(key, (), 0, columns), jnp.int32(columns // 2)])

    def step(key: Array, state: Array, action: Array) -> tuple[Array, Array, Array]:
        paddle = jnp.clip(state[2] + action - 1, 0, columns - 1)
        row = state[0] + 1
        ended = row == rows - 1
        reward = jnp.where(ended, jnp.where(paddle == state[1], 1.0, -1.0), 0.0)
        return jnp.stack([row, state[1], paddle]), reward, ended

    def observe(state: Array) -> Array:
        ball = jnp.outer(jnp.arange(rows) == state[0], jnp.arange(columns) == state[1])
        paddle = jnp.outer(jnp.arange(rows) == rows - 1, jnp.arange(columns) == state[2])
        return jnp.stack([ball, paddle], -1).astype(jnp.float32)

    return Game("catch", 3, (rows, columns, 2), reset, step, observe)


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


def four_rooms(slip: float = 0.25, noise: float = 0.1) -> Game:
    """Four Rooms (Sutton, Precup and Singh, 1999): a reward of 1 at the goal, which ends the episode.

    With probability `slip` a move goes in a random direction, and every reward carries Gaussian noise of standard
    deviation `noise`. Episodes start in a random cell. The observation is one plane, 1 where the agent is.

    >>> four_rooms().observation_shape
    (13, 13, 1)
    """
    free = np.array([[cell == " " for cell in row] for row in _ROOMS])
    cells, goal = jnp.asarray(np.argwhere(free)), jnp.array([8, 9])
    starts = cells[np.flatnonzero((np.asarray(cells) != np.asarray(goal)).any(1))]
    open_, moves = jnp.asarray(free), jnp.array([[-1, 0], [0, 1], [1, 0], [0, -1]])

    def reset(key: Array) -> Array:
        return starts[jax.random.randint(key, (), 0, len(starts))]

    def step(key: Array, state: Array, action: Array) -> tuple[Array, Array, Array]:
        slips, direction, reward = jax.random.split(key, 3)
        action = jnp.where(jax.random.uniform(slips) < slip, jax.random.randint(direction, (), 0, 4), action)
        ahead = state + moves[action]
        place = jnp.where(open_[ahead[0], ahead[1]], ahead, state)
        ended = jnp.all(place == goal)
        return place, ended + noise * jax.random.normal(reward), ended

    def observe(state: Array) -> Array:
        return jnp.outer(jnp.arange(13) == state[0], jnp.arange(13) == state[1])[..., None].astype(
            jnp.float32
        )

    return Game("four-rooms", 4, (13, 13, 1), reset, step, observe)


def _gymnax(name: str) -> Game:
    try:
        import gymnax
    except ImportError as error:
        raise ImportError(f"{name!r} needs gymnax ({error}): pip install 'marginax[accelerator]'") from error
    short = name.removeprefix("gymnax/")
    if short not in gymnax.registered_envs:
        known = ", ".join(sorted(gymnax.registered_envs))
        raise ValueError(f"name {name!r} is not one of gymnax's simulators: {known}")
    simulator, params = gymnax.make(short)
    if not hasattr(simulator.action_space(params), "n"):
        raise ValueError(f"name {name!r} has continuous actions; simulators here have discrete ones")

    def reset(key: Array) -> State:
        state = simulator.reset_env(key, params)[1]
        return jax.tree.map(jnp.asarray, state)

    def step(key: Array, state: State, action: Array) -> tuple[State, Array, Array]:
        _, following, reward, ended, _ = simulator.step_env(key, state, action, params)
        # Where gymnax mixes Python numbers and arrays, the types of the state stay those of the reset.
        following = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), following, state)
        return following, jnp.asarray(reward, jnp.float32), jnp.asarray(ended, bool)

    def observe(state: State) -> Array:
        return jnp.asarray(simulator.get_obs(state, params), jnp.float32)

    shape = jax.eval_shape(lambda key: observe(reset(key)), jax.random.key(0)).shape
    return Game(name, int(simulator.action_space(params).n), shape, reset, step, observe)
