"""Many agents learning in one program.

Agents come in groups, one for each operator, and a group's agents differ only in their seed. What depends on the
operator (targets, TD weights) is one `vmap` per group, so no agent pays for another group's networks; what does not
(the steps of critics and actors) is one `vmap` over all agents, so that an accelerator has few, large kernels.
All updates of a block are one `lax.scan`. A block of transitions goes in, a block of updates runs, and two small
arrays come out: the policies' parameters and the metrics. Replay buffers stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from marginax.deep import actor_critic, q_learning, td3
from marginax.deep.config import AgentConfig, TD3Config
from marginax.deep.discrete_config import ActorCriticConfig, DiscreteConfig, QConfig
from marginax.deep.networks import layer_sizes
from marginax.deep.replay import Replay
from marginax.simulators.rollout import row_width

AGENTS: dict[type, ModuleType] = {TD3Config: td3, QConfig: q_learning, ActorCriticConfig: actor_critic}
"""The module that learns for each type of settings; `td3` says what it must have."""


class LearnerState(NamedTuple):
    """Everything that learning changes.

    Attributes:
        agents: All agents without what belongs to their operator, every leaf `[agents, …]`, group by group.
        own: What belongs to the operator of each group (TD weights), leaves `[seeds, …]`.
        rows: Replay rows of each group, `[seeds, capacity, width]`.
        added: Transitions added to each buffer so far; all agents advance together.
    """

    agents: Any
    own: tuple[Any, ...]
    rows: tuple[Array, ...]
    added: Array


def each(function: Callable[..., Any], count: int, out_axes: int = 0) -> Callable[..., Any]:
    """`vmap` over agents; for a single agent the function itself, since batched products are slower on a CPU."""
    if count > 1:
        return jax.vmap(function, out_axes=out_axes)

    def alone(*arguments: Any) -> Any:
        found = function(*jax.tree.map(lambda x: x[0], arguments))
        return jax.tree.map(lambda x: jnp.expand_dims(x, out_axes), found)

    return alone


@dataclass(frozen=True)
class Plan:
    """What a learner's program is compiled for; two learners with the same plan share it.

    Attributes:
        configs: Settings of each group; those that all operators share must agree.
        seeds: Agents in each group.
        observation_size: Length of an observation.
        action_size: Length of an action.
        capacities: Transitions that the replay buffers of each group hold, multiples of the block.
        num_actions: Number of discrete actions, if they are.
        observation_shape: Shape of an observation before it was made flat; for discrete actions.
    """

    configs: tuple[AgentConfig, ...]
    seeds: int
    observation_size: int
    action_size: int
    capacities: tuple[int, ...]
    num_actions: int | None = None
    observation_shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        first = self.configs[0]
        for config, capacity in zip(self.configs, self.capacities, strict=True):
            for name in self.agent.SHARED:
                if getattr(config, name) != getattr(first, name):
                    raise ValueError(f"{name} must be the same in all groups, got {getattr(config, name)}.")
            if capacity % self.block or capacity < self.block:
                raise ValueError(f"capacity must be a multiple of update_every {self.block}, got {capacity}.")

    @property
    def agent(self) -> Any:
        """The module that learns."""
        return AGENTS[type(self.configs[0])]

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.configs[0].update_every

    @property
    def updates(self) -> int:
        """Updates of a block."""
        return self.configs[0].updates

    @property
    def first_block(self) -> int:
        """The first block that is followed by updates."""
        return max(0, -(-self.configs[0].update_after // self.block) - 1)

    @property
    def width(self) -> int:
        """Numbers in one transition."""
        return row_width(self.observation_size, self.action_size)

    @property
    def layers(self) -> list[int]:
        """Layer sizes of the perceptron that acts."""
        first = self.configs[0]
        if not isinstance(first, DiscreteConfig) or self.num_actions is None:
            return [self.observation_size, *first.hidden, self.action_size]
        return layer_sizes(self.observation_shape, self.num_actions, first.hidden, first.filters)

    @property
    def agents(self) -> int:
        """Number of agents in all groups."""
        return len(self.configs) * self.seeds

    def initial(self, keys: Array) -> LearnerState:
        """Fresh agents with empty buffers; agents of one key start alike in every group."""

        def fresh(config: AgentConfig) -> Any:
            sizes: dict[str, Any] = {
                "observation_size": self.observation_size,
                "action_size": self.action_size,
            }
            if config.discrete:
                sizes = {"observation_shape": self.observation_shape, "num_actions": self.num_actions}
            return jax.vmap(lambda key: self.agent.split(self.agent.init(config, key=key, **sizes)))(keys)

        shared, own = zip(*map(fresh, self.configs), strict=True)
        rows = tuple(jnp.zeros((self.seeds, capacity, self.width)) for capacity in self.capacities)
        agents = jax.tree.map(lambda *x: jnp.concatenate(x), *shared)
        return LearnerState(agents, own, rows, jnp.zeros((), jnp.int32))

    def insert(self, state: LearnerState, rows: Array) -> tuple[LearnerState, Array, Array]:
        """Add a block `[agents, block, width]` without learning from it; metrics are NaN."""
        state = self.with_rows(state, rows)
        metrics = jnp.full((self.agents, len(self.agent.METRICS)), jnp.nan)
        return state, jax.vmap(self.agent.policy)(state.agents), metrics

    def learn(
        self, state: LearnerState, keys: Array, rows: Array, index: Array
    ) -> tuple[LearnerState, Array, Array]:
        """Add a block and run its updates; also the policies and the metrics after them."""
        state, last = self.update(self.with_rows(state, rows), keys, index)
        every = max(1, self.agent.MEASURE_EVERY // self.block)
        if every == 1:
            metrics = self.measure(state, last)
        else:
            empty = jnp.full((self.agents, len(self.agent.METRICS)), jnp.nan)
            metrics = jax.lax.cond((index + 1) % every == 0, self.measure, lambda *_: empty, state, last)
        return state, jax.vmap(self.agent.policy)(state.agents), metrics

    def update(self, state: LearnerState, keys: Array, index: Array) -> tuple[LearnerState, Any]:
        """Run the updates of a block; also the last batch of each group."""
        material = self.material(state, keys, index)
        done = (index - self.first_block) * self.updates
        delayed = self.agent.delayed_rounds(self.configs[0], self.updates, done)
        (agents, own), _ = jax.lax.scan(
            lambda c, m: (self.agent.run_round(self._round, c, *m), None), state[:2], (material, delayed)
        )
        last = jax.tree.map(lambda x: x[-1, :, -1], material)
        return LearnerState(agents, own, state.rows, state.added), last

    def material(self, state: LearnerState, keys: Array, index: Array) -> tuple[Any, ...]:
        """Batches and noise keys of a block's updates, for each group."""
        block_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        return tuple(
            each(partial(self._material, config, state.added), self.seeds, 1)(buffer, block_keys)
            for config, buffer in zip(self.configs, state.rows, strict=True)
        )

    def measure(self, state: LearnerState, last: Any) -> Array:
        """Metrics `[agents, metrics]` on a batch of each group."""
        table = [
            each(partial(self.agent.measure, config), self.seeds)(self._group(g, *state[:2]), *last[g])
            for g, config in enumerate(self.configs)
        ]
        return jnp.concatenate(table)

    def with_rows(self, state: LearnerState, rows: Array) -> LearnerState:
        """Add a block `[agents, block, width]`."""
        # The block divides the capacity, so a block never wraps around: one slice is written in place.
        written = tuple(
            jax.lax.dynamic_update_slice(buffer, part, (0, state.added % capacity, 0))
            for buffer, part, capacity in zip(
                state.rows, jnp.split(rows, len(self.configs)), self.capacities, strict=True
            )
        )
        agents = jax.vmap(self.agent.observe)(state.agents, rows)
        return state._replace(agents=agents, rows=written, added=state.added + self.block)

    def _material(self, config: AgentConfig, added: Array, rows: Array, key: Array) -> tuple[Any, Array]:
        """Batches and noise keys of a whole block of one agent, `[rounds, batches, …]`, drawn before the loop."""
        buffer = Replay(rows, added, self.observation_size)
        draw = partial(self.agent.draw, config, buffer)
        return jax.vmap(draw)(self.agent.rounds(config, key, self.updates))

    def _group(self, g: int, agents: Any, own: tuple[Any, ...]) -> Any:
        mine = slice(g * self.seeds, (g + 1) * self.seeds)
        return self.agent.join(jax.tree.map(lambda x: x[mine], agents), own[g])

    def _round(self, carry: tuple[Any, tuple[Any, ...]], material: Any, *, delayed: bool) -> Any:
        """The updates of a round of every agent; if `delayed`, the last is a delayed one."""
        agents, own = carry
        parts, trained = [], []
        for g, config in enumerate(self.configs):
            targets = each(partial(self.agent.targets, config, train=delayed), self.seeds)
            found, mine, _ = targets(self._group(g, agents, own), *material[g])
            parts.append((found.pairs, found.target))
            trained.append(mine)
        pairs, target = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        for i in range(target.shape[1]):
            final = i == target.shape[1] - 1
            learn = partial(self.agent.learn, self.configs[0], delayed=delayed and final)
            agents, *_ = each(learn, self.agents)(agents, pairs[:, i], target[:, i])
        return agents, tuple(trained)


@cache
def _initial(plan: Plan) -> Any:
    return jax.jit(plan.initial)


@cache
def _insert(plan: Plan) -> Any:
    return jax.jit(plan.insert, donate_argnums=0)


@cache
def _learn(plan: Plan) -> Any:
    """The compiled program of a plan, made from shapes alone."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), plan.seeds))
    state = jax.eval_shape(plan.initial, keys)
    rows = jax.ShapeDtypeStruct((plan.agents, plan.block, plan.width), jnp.float32)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.jit(plan.learn, donate_argnums=0).lower(state, keys, rows, index).compile()


class Learner:
    """Agents, their replay buffers, and the compiled program that advances them by a block.

    Args:
        plan: What is compiled.
        seeds: Seeds of each group's agents, as many as the plan says.
    """

    def __init__(self, plan: Plan, seeds: Sequence[int]) -> None:
        if len(seeds) != plan.seeds:
            raise ValueError(f"seeds must be {plan.seeds} as the plan says, got {list(seeds)}.")
        self.plan = plan
        self._keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        self.state: LearnerState = _initial(plan)(self._keys)

    def compile(self) -> None:
        """Compile the program ahead of its first use."""
        _learn(self.plan)

    def advance(self, index: int, rows: np.ndarray) -> tuple[Array, Array]:
        """Add block number `index` and, once there are enough transitions, run its updates; returns at once.

        Args:
            index: Number of the block, from 0.
            rows: Transitions `[agents, block, width]`, group by group.

        Returns:
            Policies `[agents, parameters]` and metrics `[agents, metrics]` on the block's last batch (NaN
            before the first update), as device arrays that may still be in work.
        """
        if index < self.plan.first_block:
            self.state, vectors, metrics = _insert(self.plan)(self.state, rows)
        else:
            self.state, vectors, metrics = _learn(self.plan)(self.state, self._keys, rows, np.int32(index))
        return vectors, metrics
