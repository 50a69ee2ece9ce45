"""Many TD3 agents learning in one program on the accelerator.

Agents come in groups, one for each operator, and a group's agents differ only in their seed. What depends on the
operator (targets, TD weights) is one `vmap` a group, so no agent pays for another group's networks; what does not
(the steps of critics and actors) is one `vmap` over all agents, so that an accelerator has few, large kernels.
All updates of a block are one `lax.scan`. A block of transitions goes in, a block of updates runs, and two small arrays come out: the policies'
parameters and the metrics. Replay buffers stay on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from marginax.deep import replay, td3
from marginax.deep.aims import aim
from marginax.deep.config import Operator, TD3Config
from marginax.deep.networks import MLP, value
from marginax.deep.replay import Replay, Sequences
from marginax.deep.state import TD3State, init, with_estimator
from marginax.deep.td3 import Metrics
from marginax.deep.weight_network import Estimator
from marginax.simulators.rollout import row_width

# Settings of the half of an update that all agents take together, and of the schedule.
_SHARED = ("update_every", "update_after", "hidden", "policy_delay", "batch_size", "learning_rate", "polyak")
# What an update says of itself, and what `error_variance` were on the same batch with another operator's targets.
RIVALS: tuple[Operator, ...] = ("one-step", "retrace")
METRICS = (*(field.name for field in fields(Metrics)), *(f"error_variance_{name}" for name in RIVALS))


class LearnerState(NamedTuple):
    """Everything that learning changes.

    Attributes:
        agents: All agents without their TD weights, every leaf with a leading axis `[agents]`, group by group.
        estimators: TD weights of each group, leaves `[seeds, …]`; None where the operator has none.
        rows: Replay rows of each group, `[seeds, capacity, width]`.
        added: Transitions added to each buffer so far; all agents advance together.

    >>> config = TD3Config(hidden=(8,))
    >>> plan = Plan((config,), seeds=2, observation_size=3, action_size=1, capacity=100)
    >>> plan.initial(jax.random.split(jax.random.key(0), 2)).rows[0].shape
    (2, 100, 11)
    """

    agents: TD3State
    estimators: tuple[Estimator | None, ...]
    rows: tuple[Array, ...]
    added: Array


def actor_vector(actor: MLP) -> Float[Array, " n"]:
    """The policy as one vector: layer by layer the weight in row order, then the bias.

    >>> actor_vector(MLP(3, 1, (4,), key=jax.random.key(0))).shape
    (21,)
    """
    layers = zip(actor.weights, actor.biases, strict=True)
    return jnp.concatenate([jnp.ravel(x) for layer in layers for x in layer])


@dataclass(frozen=True)
class Plan:
    """What a learner's program is compiled for; two learners with the same plan share it.

    Attributes:
        configs: Settings of each group; those that do not belong to the operator must agree.
        seeds: Agents in each group.
        observation_size: Length of an observation.
        action_size: Length of an action.
        capacity: Transitions each replay buffer holds, a multiple of the block.

    >>> Plan((TD3Config(),), seeds=5, observation_size=17, action_size=6, capacity=1000).width
    44
    """

    configs: tuple[TD3Config, ...]
    seeds: int
    observation_size: int
    action_size: int
    capacity: int

    def __post_init__(self) -> None:
        first = self.configs[0]
        for config in self.configs:
            for name in _SHARED:
                if getattr(config, name) != getattr(first, name):
                    raise ValueError(f"{name} must be the same in all groups, got {getattr(config, name)}")
        if self.block % first.policy_delay:
            raise ValueError(f"policy_delay must divide update_every {self.block}, got {first.policy_delay}")
        if self.capacity % self.block or self.capacity < self.block:
            raise ValueError(f"capacity must be a multiple of update_every {self.block}, got {self.capacity}")

    @property
    def block(self) -> int:
        """Steps, and updates, of a block."""
        return self.configs[0].update_every

    @property
    def delay(self) -> int:
        """Updates in a round: one delayed and the others plain."""
        return self.configs[0].policy_delay

    @property
    def width(self) -> int:
        """Numbers in one transition."""
        return row_width(self.observation_size, self.action_size)

    @property
    def agents(self) -> int:
        """Number of agents in all groups."""
        return len(self.configs) * self.seeds

    def initial(self, keys: Array) -> LearnerState:
        """Fresh agents with empty buffers; agents of one key start alike in every group."""

        def fresh(config: TD3Config) -> TD3State:
            sizes = {"observation_size": self.observation_size, "action_size": self.action_size}
            return jax.vmap(lambda key: init(config, key=key, **sizes))(keys)

        groups = [fresh(config) for config in self.configs]
        bare = [with_estimator(group, None) for group in groups]
        shape = (self.seeds, self.capacity, self.width)
        rows = tuple(jnp.zeros(shape, jnp.float32) for _ in self.configs)
        agents = jax.tree.map(lambda *x: jnp.concatenate(x), *bare)
        return LearnerState(agents, tuple(g.estimator for g in groups), rows, jnp.zeros((), jnp.int32))

    def insert(self, state: LearnerState, rows: Array) -> tuple[LearnerState, Array, Array]:
        """Add a block `[agents, block, width]` without learning from it; metrics are NaN."""
        state = self._with_rows(state, rows)
        return state, policies(state.agents), jnp.full((self.agents, len(METRICS)), jnp.nan)

    def learn(
        self, state: LearnerState, keys: Array, rows: Array, index: Array
    ) -> tuple[LearnerState, Array, Array]:
        """Add a block and run its updates; also the policies and the metrics after them."""
        state = self._with_rows(state, rows)
        block_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        material = tuple(
            self._material(config, buffer, state.added, block_keys)
            for config, buffer in zip(self.configs, state.rows, strict=True)
        )
        carry, _ = jax.lax.scan(lambda c, m: (self._round(*c, m), None), state[:2], material)
        last = [self._last_batch(*part) for part in material]
        table = [self._metrics(g, *carry, *last[g]) for g in range(len(self.configs))]
        return LearnerState(*carry, state.rows, state.added), policies(carry[0]), jnp.concatenate(table)

    def _with_rows(self, state: LearnerState, rows: Array) -> LearnerState:
        # The block divides the capacity, so a block never wraps around: one slice is written in place.
        parts = jnp.split(rows, len(self.configs))
        place = (0, state.added % self.capacity, 0)
        written = tuple(
            jax.lax.dynamic_update_slice(buffer, part, place)
            for buffer, part in zip(state.rows, parts, strict=True)
        )
        return LearnerState(state.agents, state.estimators, written, state.added + self.block)

    def _material(self, config: TD3Config, buffer: Array, added: Array, keys: Array) -> tuple[Any, Array]:
        """Batches and noise keys of a whole block, `[rounds, seeds, …]`, drawn before the loop starts.

        Those of a round lie side by side, as `aims.aim` takes them.
        """

        def one(rows: Array, key: Array) -> tuple[Any, Array]:
            # The keys of td3.update_block: its updates and these are the same.
            pairs = jax.vmap(jax.random.split)(jax.random.split(key, self.block))
            sample_keys, noise_keys = (pairs[:, i].reshape(-1, self.delay) for i in range(2))
            source = Replay(rows, added, self.observation_size)
            draw = {"batch": config.batch_size, "length": config.length}
            return jax.vmap(lambda k: replay.sample(source, k, **draw))(sample_keys), noise_keys

        return jax.vmap(one, out_axes=1)(buffer, keys)

    def _last_batch(self, batch: Any, keys: Array) -> tuple[Any, Array]:
        size = self.configs[0].batch_size
        return jax.tree.map(lambda x: x[-1, :, :, -size:], batch), keys[-1, :, -1]

    def _group(self, g: int, agents: TD3State, estimator: Estimator | None) -> TD3State:
        mine = slice(g * self.seeds, (g + 1) * self.seeds)
        return with_estimator(jax.tree.map(lambda x: x[mine], agents), estimator)

    def _round(
        self, agents: TD3State, estimators: tuple[Estimator | None, ...], material: tuple[Any, ...]
    ) -> tuple[TD3State, tuple[Estimator | None, ...]]:
        """`policy_delay` updates of every agent, the last of them a delayed one."""
        parts, trained, size = [], [], self.configs[0].batch_size
        for g, config in enumerate(self.configs):
            group = self._group(g, agents, estimators[g])
            batch, keys = material[g]
            aimed = jax.vmap(partial(aim, config, train=True))(group, batch, keys)
            parts.append((aimed.pairs, aimed.target, batch.observations[:, 0]))
            trained.append(aimed.estimator)
        everything = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        for i in range(self.delay):
            mine = jax.tree.map(lambda x, i=i: x[:, i * size : (i + 1) * size], everything)
            step = partial(td3.learn, self.configs[0], delayed=i == self.delay - 1)
            agents, *_ = jax.vmap(step)(agents, *mine)
        return agents, tuple(trained)

    def _metrics(
        self, g: int, agents: TD3State, estimators: tuple[Estimator | None, ...], batch: Any, keys: Array
    ) -> Array:
        """What the next update on the block's last batch would say of itself; nothing is updated."""
        config, group = self.configs[g], self._group(g, agents, estimators[g])
        _, metrics = jax.vmap(partial(td3.update, config, delayed=True))(group, batch, keys)
        own = [getattr(metrics, field.name) for field in fields(Metrics)]
        rivals = [jax.vmap(partial(_error_variance, config, name))(group, batch, keys) for name in RIVALS]
        return jnp.stack([*own, *rivals], axis=1)


def _error_variance(
    config: TD3Config, operator: Operator, state: TD3State, batch: Sequences, key: Array
) -> Array:
    """Variance over a batch of target minus Q for another operator; NaN where the sequences are too short for it."""
    if operator != "one-step" and config.length == 1:
        return jnp.full((), jnp.nan)
    rival = dataclasses.replace(config, operator=operator)
    batch = jax.tree.map(lambda x: x[: rival.length], batch)
    aimed = aim(rival, with_estimator(state, None), batch, key, train=False)
    return jnp.var(aimed.target - value(state.critic, aimed.pairs)[0])


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

    >>> config = TD3Config(hidden=(8,), batch_size=4, update_every=2, update_after=2, replay_size=8)
    >>> learner = Learner(Plan((config,), seeds=2, observation_size=1, action_size=1, capacity=8), seeds=(0, 1))
    >>> vectors, metrics = learner.advance(0, np.zeros((2, 2, 7), np.float32))
    >>> vectors.shape, metrics.shape == (2, len(METRICS))
    ((2, 25), True)
    """

    def __init__(self, plan: Plan, seeds: Sequence[int]) -> None:
        if len(seeds) != plan.seeds:
            raise ValueError(f"seeds must be {plan.seeds} as the plan says, got {list(seeds)}")
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
            Policies `[agents, parameters]` and metrics `[agents, len(METRICS)]` on the block's last batch (NaN
            before the first update), as device arrays that may still be in work.
        """
        if (index + 1) * self.plan.block < self.plan.configs[0].update_after:
            self.state, vectors, metrics = _insert(self.plan)(self.state, rows)
        else:
            self.state, vectors, metrics = _learn(self.plan)(self.state, self._keys, rows, np.int32(index))
        return vectors, metrics


def policies(agents: TD3State) -> Float[Array, "agents n"]:
    """Parameters of all agents' policies.

    >>> make = lambda key: init(TD3Config(hidden=(4,)), observation_size=3, action_size=1, key=key)
    >>> policies(jax.vmap(make)(jax.random.split(jax.random.key(0), 5))).shape
    (5, 21)
    """
    return jax.vmap(actor_vector)(agents.actor)
