"""Training in one program: the simulators, replay and updates of all agents of a task in one compiled loop.

For simulators that are JAX programs themselves (`gymnax/NAME`, `grid/NAME`) and agents with discrete actions. Every agent
plays `environments` copies of the simulator; a block is a few steps of each, then its updates, and a call runs as many
blocks as it is asked for. What is drawn follows from the seed and the number of the block, so neither an interruption nor
the number of blocks in a call changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from marginax.deep import checkpoint
from marginax.deep.discrete_config import DiscreteConfig
from marginax.deep.learner import Learner, LearnerState, Plan
from marginax.simulators.accelerated import make_accelerated
from marginax.simulators.pool import Evaluation

_PLAY, _EVALUATE = 2**32 - 1, 2**32 - 2  # streams of keys beside those of the blocks


class Copies(NamedTuple):
    """The simulators of all agents, every leaf `[agents, …]`, and what was earned in them.

    Attributes:
        states: Of each copy.
        observations: Of each copy.
        returns: Rewards of each copy's episode so far.
        earned: Sum of the returns of episodes that ended since the last evaluation.
        episodes: Their number.
        largest: Largest |reward|.
    """

    states: Any
    observations: Array
    returns: Array
    earned: Array
    episodes: Array
    largest: Array


class _Programs:
    """The compiled functions of a plan on a simulator."""

    def __init__(self, plan: Plan, simulator: str) -> None:
        self.plan, self.game = plan, make_accelerated(simulator)
        self.start = jax.jit(self._start)
        self.play = jax.jit(partial(self._advance, learning=False), donate_argnums=(0, 1))
        self.learn = jax.jit(partial(self._advance, learning=True), donate_argnums=(0, 1))
        self.inspect = jax.jit(self._inspect)
        self.evaluate = jax.jit(self._evaluate, static_argnames="episodes")
        schedule = []  # of every agent: the last ε of its copies, the steps it falls over, and the random first steps
        for config in plan.configs:
            assert isinstance(config, DiscreteConfig)
            steps = (np.float32(config.epsilon_steps or 0), np.float32(config.random_steps or 0))
            schedule += [(np.array(config.epsilons, np.float32), *steps)] * plan.seeds
        self.schedule = tuple(np.stack(x) for x in zip(*schedule, strict=True))

    def _start(self, keys: Array) -> Copies:
        count = self.plan.configs[0].copies

        def one(key: Array) -> Copies:
            states, observations = jax.vmap(self.game.reset)(
                jax.random.split(jax.random.fold_in(key, _PLAY), count)
            )
            zero = jnp.zeros(())
            return Copies(states, observations, jnp.zeros(count), zero, zero, zero)

        return self._of_all(jax.vmap(one)(keys))

    def _of_all(self, of_seeds: Any) -> Any:
        """Repeat what belongs to the seeds for every group: agents of one seed meet the same noise."""
        groups = len(self.plan.configs)
        return jax.tree.map(lambda x: jnp.concatenate([x] * groups) if groups > 1 else x, of_seeds)

    def _advance(
        self, state: LearnerState, copies: Copies, keys: Array, first: Array, last: Array, *, learning: bool
    ) -> tuple[LearnerState, Copies]:
        """Play the blocks from `first` to before `last`, each followed by its updates if `learning`."""
        play_keys = self._of_all(jax.vmap(jax.random.fold_in, (0, None))(keys, _PLAY))

        def block(index: Array, carry: tuple[LearnerState, Copies]) -> tuple[LearnerState, Copies]:
            state, copies = carry
            own = jax.vmap(jax.random.fold_in, (0, None))(play_keys, index)
            play = jax.vmap(partial(self._play, index))
            copies, rows = play(state.agents, copies, own, self.schedule)
            state = self.plan.with_rows(state, rows)
            return (self.plan.update(state, keys, index)[0] if learning else state), copies

        return jax.lax.fori_loop(first, last, block, (state, copies))

    def _play(
        self, index: Array, agent: Any, copies: Copies, key: Array, schedule: Any
    ) -> tuple[Copies, Array]:
        """One agent's block: rows `[block, width]`, copy after copy in every step."""
        plan, game = self.plan, self.game
        count = plan.configs[0].copies

        def step(copies: Copies, t: Array) -> tuple[Copies, Array]:
            act_key, step_key, reset_key = jax.random.split(jax.random.fold_in(key, t), 3)
            number = index * plan.block + t * count + jnp.arange(count)
            epsilon = _exploration(schedule, number)
            logits = jnp.log(plan.agent.behaviour(agent, copies.observations, epsilon))
            actions = jax.random.categorical(act_key, logits)
            taken = jnp.take_along_axis(logits, actions[:, None], 1)
            move = jax.vmap(game.step)(jax.random.split(step_key, count), copies.states, actions)
            states, following, rewards, terminated, truncated = move
            ended = terminated | truncated
            columns = (actions[:, None], rewards[:, None], terminated[:, None], truncated[:, None], taken)
            seen, after = (x.reshape(count, -1) for x in (copies.observations, following))
            row = jnp.concatenate([seen, *(x.astype(jnp.float32) for x in columns), after], 1)
            restart = jax.vmap(game.restart)(jax.random.split(reset_key, count), states, following, ended)
            returns = copies.returns + rewards
            return Copies(
                *restart,
                returns=jnp.where(ended, 0, returns),
                earned=copies.earned + jnp.sum(jnp.where(ended, returns, 0)),
                episodes=copies.episodes + jnp.sum(ended),
                largest=jnp.maximum(copies.largest, jnp.max(jnp.abs(rewards))),
            ), row

        copies, rows = jax.lax.scan(step, copies, jnp.arange(plan.block // count))
        return copies, rows.reshape(plan.block, -1)

    def _inspect(self, state: LearnerState, keys: Array, index: Array) -> tuple[Array, Array]:
        """Policies and metrics of all agents."""
        last = jax.tree.map(lambda x: x[-1, :, -1], self.plan.material(state, keys, index))
        return jax.vmap(self.plan.agent.policy)(state.agents), self.plan.measure(state, last)

    def _evaluate(self, agents: Any, keys: Array, number: Array, *, episodes: int) -> Array:
        """Returns `[agents, episodes]` of the best actions, episodes side by side."""
        game = self.game

        def one(agent: Any, key: Array) -> Array:
            key = jax.random.fold_in(jax.random.fold_in(key, _EVALUATE), number)
            states, observations = jax.vmap(game.reset)(jax.random.split(key, episodes))

            def step(carry: Any) -> Any:
                t, states, observations, alive, returns = carry
                best = jnp.argmax(plan.agent.behaviour(agent, observations, jnp.zeros(episodes)), -1)
                own = jax.random.split(jax.random.fold_in(key, t + episodes), episodes)
                states, observations, rewards, terminated, truncated = jax.vmap(game.step)(own, states, best)
                returns = returns + jnp.where(alive, rewards, 0)
                return t + 1, states, observations, alive & ~(terminated | truncated), returns

            alive = jnp.ones(episodes, bool)
            first = (jnp.int32(0), states, observations, alive, jnp.zeros(episodes))
            return jax.lax.while_loop(lambda c: jnp.any(c[3]) & (c[0] < game.time_limit), step, first)[-1]

        plan = self.plan
        return jax.vmap(one)(agents, self._of_all(keys))


def _exploration(schedule: tuple[Array, Array, Array], number: Array) -> Array:
    """Share of uniform actions in each copy at these steps of the run: 1 at first, then falling to the last ones."""
    epsilons, falling, random = schedule
    share = jnp.where(number < falling, 1 - (1 - epsilons) * number / jnp.maximum(falling, 1), epsilons)
    return jnp.where(number < random, 1.0, share)


@cache
def _programs(plan: Plan, simulator: str) -> _Programs:
    return _Programs(plan, simulator)


class DeviceLearner(Learner):
    """Agents, their replay buffers and their simulators, and the compiled program that advances them by many blocks."""

    def __init__(self, plan: Plan, seeds: Sequence[int], simulator: str) -> None:
        super().__init__(plan, seeds)
        self._programs = _programs(plan, simulator)
        self.copies: Copies = self._programs.start(self._keys)

    def compile(self) -> None:
        """Compile the program by asking for no blocks."""
        zero = np.int32(0)
        self.state, self.copies = self._programs.learn(self.state, self.copies, self._keys, zero, zero)
        jax.block_until_ready(self.state.added)

    def play(self, first: int, last: int) -> None:
        """Play blocks `first` to before `last`, with updates once there are enough transitions."""
        begin = min(max(self.plan.first_block, first), last)
        for program, a, b in ((self._programs.play, first, begin), (self._programs.learn, begin, last)):
            if a < b:
                found = program(self.state, self.copies, self._keys, np.int32(a), np.int32(b))
                self.state, self.copies = found
        jax.block_until_ready(self.state.added)

    def inspect(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Policies and metrics after block `index`; NaN before the first update."""
        policies, metrics = self._programs.inspect(self.state, self._keys, np.int32(index))
        return np.array(policies), np.where(index < self.plan.first_block, np.nan, metrics)

    def take_earned(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean return of the episodes that ended since the last call (NaN if none), and the largest |reward|."""
        earned, episodes, largest = (np.asarray(x, np.float64) for x in self.copies[3:])
        self.copies = self.copies._replace(earned=jnp.zeros(len(earned)), episodes=jnp.zeros(len(earned)))
        with np.errstate(invalid="ignore"):
            return earned / episodes, largest

    def evaluate(self, number: int, episodes: int) -> np.ndarray:
        """Returns `[agents, episodes]` of the agents' best actions."""
        found = self._programs.evaluate(self.state.agents, self._keys, np.uint32(number), episodes=episodes)
        return np.asarray(found, np.float64)


class DevicePool:
    """What a population asks of `simulators.Pool`, for simulators that live in the learners' programs."""

    replaced = 0

    def __init__(self, learners: Sequence[DeviceLearner]) -> None:
        self.learners = learners
        self._evaluations: list[Evaluation] = []

    def evaluate(self, index: int, parameters: np.ndarray, episodes: int) -> None:
        """Evaluate all agents as they are now."""
        returns = np.concatenate([learner.evaluate(index, episodes) for learner in self.learners])
        self._evaluations += [Evaluation(agent, index, row) for agent, row in enumerate(returns)]

    def evaluations(self, *, wait_for_all: bool = False) -> list[Evaluation]:
        """Evaluations since the last call."""
        done, self._evaluations = self._evaluations, []
        return done

    def get_state(self) -> list[dict[str, Any]]:
        """State of every agent's simulators."""
        states = []
        for learner in self.learners:
            arrays = checkpoint.to_arrays(learner.copies)
            states += [{name: x[i] for name, x in arrays.items()} for i in range(learner.plan.agents)]
        return states

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from what `get_state` returned."""
        start = 0
        for learner in self.learners:
            mine = states[start : start + learner.plan.agents]
            arrays = {name: np.stack([np.asarray(each[name]) for each in mine]) for name in mine[0]}
            learner.copies = jax.device_put(checkpoint.from_arrays(learner.copies, arrays))
            start += learner.plan.agents

    def close(self) -> None:
        """Nothing to free."""
