"""Training a population: simulation in worker processes, learning in one program, each busy while the other is.

Time goes in blocks of `update_every` steps. Block b+1 is simulated with the policies that the updates of block b-1
left, while the updates of block b run: a delay of one block, the same on every machine, so a run depends on its
settings and seeds and on nothing else, in particular not on the number of workers.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from marginax.deep import snapshot
from marginax.deep.config import TD3Config
from marginax.deep.learner import METRICS, Learner, LearnerState, Plan, policies
from marginax.simulators import AgentSpec, Pool, Transitions, make

COLUMNS = ("operator", "seed", "step", "return", "train_return", "failed_at", "seconds", *METRICS)


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """What a population is: every group of `groups` is trained with every seed of `seeds`.

    Attributes:
        simulator: Name for [`make`][marginax.simulators.make].
        groups: Label and settings of each group.
        seeds: Seeds; agents of one seed start alike and meet the same noise in every group.
        steps: Environment steps of each agent.
        evaluate_every: Steps between evaluations of the deterministic policy.
        episodes: Episodes of an evaluation.

    >>> PopulationConfig(simulator="Pendulum-v1", groups={"a": TD3Config()}, seeds=(0, 1)).agents
    2
    """

    simulator: str
    groups: dict[str, TD3Config]
    seeds: tuple[int, ...]
    steps: int = 1_000_000
    evaluate_every: int = 10_000
    episodes: int = 5

    def __post_init__(self) -> None:
        if not self.groups or not self.seeds:
            raise ValueError("groups and seeds must not be empty")
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different and not negative, got {list(self.seeds)}")
        block = self.block
        for name in ("steps", "evaluate_every"):
            value = getattr(self, name)
            if value < block or value % block:
                raise ValueError(f"{name} must be a multiple of update_every {block}, got {value}")
        if self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {self.episodes}")
        scales = {(c.act_noise, c.random_steps) for c in self.groups.values()}
        if len(scales) > 1:
            raise ValueError("act_noise and random_steps must be the same in all groups")

    @property
    def block(self) -> int:
        """Steps, and updates, of a block."""
        return next(iter(self.groups.values())).update_every

    @property
    def agents(self) -> int:
        """Number of agents; they are counted group by group."""
        return len(self.groups) * len(self.seeds)

    def names(self) -> list[tuple[str, int]]:
        """Label and seed of every agent."""
        return [(label, seed) for label in self.groups for seed in self.seeds]

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data."""
        plain = {k: v for k, v in dataclasses.asdict(self).items() if k != "groups"}
        groups = {label: config.to_json() for label, config in self.groups.items()}
        return {**plain, "seeds": list(self.seeds), "groups": groups}


@dataclass
class Timing:
    """Where the time went, in seconds: `wall`, of which the learner was busy for `learning`.

    `simulating` is how long the learner's host waited for blocks of transitions, `waiting` how long it waited for
    the learner: a learner that is never idle has `learning` close to `wall`.

    >>> Timing(wall=10.0, learning=9.0).busy
    0.9
    """

    wall: float = 0.0
    learning: float = 0.0
    simulating: float = 0.0
    waiting: float = 0.0
    compiling: float = 0.0
    blocks: int = 0

    @property
    def busy(self) -> float:
        """Share of the time after compilation in which the learner had work."""
        return self.learning / self.wall if self.wall else float("nan")


@dataclass
class Population:
    """A population in training.

    Args:
        config: Who is trained on what.
        workers: Simulation processes; 0 simulates in this one.
        folder: Where checkpoints go; None for none.
        fuse: Whether all groups advance in one program (their small kernels can then overlap on a GPU) or each
            in its own.

    Attributes:
        rows: One row of `COLUMNS` for each evaluation of each agent.
        finished: Whether all steps are done.
        timing: Where the time went, in this process.

    >>> agent = TD3Config(hidden=(8,), batch_size=4, update_every=10, update_after=10, random_steps=20)
    >>> config = PopulationConfig(
    ...     simulator="Pendulum-v1", groups={"one-step": agent}, seeds=(0,), steps=40, evaluate_every=40, episodes=1)
    >>> population = Population(config, workers=0)
    >>> population.run()
    >>> [row[:3] for row in population.rows]
    [('one-step', 0, 40)]
    """

    config: PopulationConfig
    workers: int = 0
    folder: Path | None = None
    fuse: bool = True
    rows: list[tuple] = field(default_factory=list, init=False)
    timing: Timing = field(default_factory=Timing, init=False)
    block: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        config = self.config
        groups = list(config.groups.values())
        probe = make(config.simulator, 0)
        sizes = {"observation_size": probe.observation_size, "action_size": probe.action_size}
        probe.close()
        capacity = min(max(g.replay_size for g in groups), config.steps)
        capacity -= capacity % config.block
        parts = [groups] if self.fuse else [[group] for group in groups]
        plans = [Plan(tuple(part), len(config.seeds), capacity=capacity, **sizes) for part in parts]
        self.learners = [Learner(plan, config.seeds) for plan in plans]
        layers = [sizes["observation_size"], *groups[0].hidden, sizes["action_size"]]
        noise, random = groups[0].act_noise, groups[0].random_steps
        specs = [AgentSpec(config.simulator, seed, noise, random) for _, seed in config.names()]
        self.pool = Pool(specs, sizes=layers, steps=config.block, workers=self.workers)
        vectors = np.concatenate([policies(learner.state.agents) for learner in self.learners])
        self._acting = vectors  # what the next block is simulated with
        self._newest = vectors  # what the last block of updates left
        self._failed_at = np.full(config.agents, -1)
        self._largest_reward = np.zeros(config.agents)
        self._returns = np.zeros(config.agents)
        self._finished_returns: list[list[float]] = [[] for _ in range(config.agents)]
        self._pending: dict[tuple[int, int], tuple] = {}
        self._started = time.perf_counter()
        self._seconds_before = 0.0
        self._resume()

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.block * self.config.block >= self.config.steps

    def close(self) -> None:
        """End the workers."""
        self.pool.close()

    def run(
        self,
        *,
        deadline: float | None = None,
        checkpoint_every: float | None = None,
        report: Callable[[Population], None] | None = None,
    ) -> None:
        """Train until all steps are done or the deadline is near; then leave a checkpoint if there is a folder.

        Args:
            deadline: Time on the `time.monotonic` clock by which the checkpoint should be on the disk.
            checkpoint_every: Seconds between checkpoints on the way.
            report: Called after every evaluation.
        """
        begun = time.perf_counter()
        with ThreadPoolExecutor(max(4, len(self.learners))) as threads:
            list(threads.map(Learner.compile, self.learners))
        self.timing.compiling += time.perf_counter() - begun
        last_checkpoint = time.monotonic()
        with ThreadPoolExecutor(1) as fetcher:
            self._loop(fetcher, deadline, checkpoint_every, last_checkpoint, report)

    def _loop(
        self,
        fetcher: ThreadPoolExecutor,
        deadline: float | None,
        checkpoint_every: float | None,
        last_checkpoint: float,
        report: Callable[[Population], None] | None,
    ) -> None:
        begun, total = time.perf_counter(), self.config.steps // self.config.block
        previous: Future | None = None
        idle_since = begun
        if not self.finished:
            self.pool.start(self.block, self._acting)
        while not self.finished:
            t0 = time.perf_counter()
            block = self.pool.finish()
            t1 = time.perf_counter()
            self._note_returns(block)
            handles = self._dispatch(self.block, block.rows)
            current = fetcher.submit(_fetch, handles, time.perf_counter())
            t2 = time.perf_counter()
            if previous is not None:
                idle_since = self._receive(previous.result(), idle_since, self.block)
            self._acting = self._newest  # of the block before this one, whose updates have only begun
            t3 = time.perf_counter()
            self.timing.simulating += t1 - t0
            self.timing.waiting += t3 - t2
            self.timing.blocks += 1
            self.block += 1
            now = time.monotonic()
            stop = deadline is not None and now + self._time_to_save() >= deadline
            due = checkpoint_every is not None and now - last_checkpoint >= checkpoint_every
            previous = current
            if stop or due or self.block == total:
                idle_since = self._receive(current.result(), idle_since, self.block)
                previous = None
                self._collect(report, wait_for_all=True)
                if self.folder is not None and not self.finished:
                    self.save()
                    last_checkpoint = time.monotonic()
                if stop:
                    break
            if self.block < total:
                self.pool.start(self.block, self._acting)
            self._collect(report)
        self.timing.wall += time.perf_counter() - begun

    def _dispatch(self, index: int, rows: np.ndarray) -> list[tuple[jax.Array, jax.Array]]:
        share = len(rows) // len(self.learners)
        return [
            learner.advance(index, rows[i * share : (i + 1) * share])
            for i, learner in enumerate(self.learners)
        ]

    def _receive(self, result: tuple, idle_since: float, after: int) -> float:
        """Take in the policies and metrics of the updates that end after `after` blocks."""
        vectors, metrics, dispatched, done = result
        self.timing.learning += done - max(dispatched, idle_since)
        step = after * self.config.block
        q_size = metrics[:, METRICS.index("q_size")]
        config = next(iter(self.config.groups.values()))
        limit = config.divergence * np.maximum(self._largest_reward, 1e-3) / (1 - config.discount)
        bad = ~np.isfinite(vectors).all(axis=1) | (q_size > limit)
        self._failed_at[bad & (self._failed_at < 0)] = step
        failed = self._failed_at >= 0
        self._newest = np.where(
            failed[:, None], self._newest, vectors
        )  # a failed agent keeps its last policy
        if step % self.config.evaluate_every == 0:
            self._evaluate(step, metrics)
        return done

    def _evaluate(self, step: int, metrics: np.ndarray) -> None:
        names = self.config.names()
        seconds = self._seconds_before + time.perf_counter() - self._started
        for agent, (label, seed) in enumerate(names):
            recent = self._finished_returns[agent]
            train = float(np.mean(recent)) if recent else float("nan")
            self._finished_returns[agent] = []
            failed = int(self._failed_at[agent])
            values = tuple(float(x) for x in metrics[agent])
            self._pending[agent, step] = (label, seed, step, train, failed, round(seconds, 3), *values)
        self.pool.evaluate(step, self._newest, self.config.episodes)

    def _collect(self, report: Callable[[Population], None] | None, *, wait_for_all: bool = False) -> None:
        # More than one evaluation behind: let the workers catch up.
        behind = len(self._pending) > self.config.agents
        done = self.pool.evaluations(wait_for_all=wait_for_all or behind)
        for evaluation in done:
            label, seed, step, *rest = self._pending.pop((evaluation.agent, evaluation.number))
            self.rows.append((label, seed, step, float(np.mean(evaluation.returns)), *rest))
        if done and report is not None and not self._pending:
            report(self)

    def _note_returns(self, block: Transitions) -> None:
        self._largest_reward = np.maximum(self._largest_reward, np.abs(block.rewards).max(axis=1))
        ends = (block.terminated + block.truncated) > 0
        for agent in range(self.config.agents):
            start = 0
            for end in np.flatnonzero(ends[agent]):
                total = self._returns[agent] + float(block.rewards[agent, start : end + 1].sum())
                self._finished_returns[agent].append(total)
                self._returns[agent], start = 0.0, int(end) + 1
            self._returns[agent] += float(block.rewards[agent, start:].sum())

    def _time_to_save(self) -> float:
        if self.folder is None:
            return 0.0
        filled = min(self.block * self.config.block, self.learners[0].plan.capacity)
        size = self.config.agents * filled * self.learners[0].plan.width * 4
        return 5.0 + size / 300e6

    def save(self) -> Path:
        """Write a checkpoint between two blocks."""
        if self.folder is None:
            raise ValueError("folder must be given to write checkpoints")
        arrays, large = {}, {}
        for i, learner in enumerate(self.learners):
            for j, leaf in enumerate(jax.tree.leaves(learner.state[:2])):
                arrays[f"learner{i}-{j}"] = np.asarray(leaf)
            filled = min(self.block * self.config.block, learner.plan.capacity)
            for j, rows in enumerate(learner.state.rows):
                large[f"replay{i}-{j}"] = np.asarray(rows[:, :filled])
        for name in ("_acting", "_newest", "_failed_at", "_largest_reward", "_returns"):
            arrays[name] = getattr(self, name)
        seconds = self._seconds_before + time.perf_counter() - self._started
        meta = {
            "config": self._fingerprint(),
            "rows": [list(row) for row in self.rows],
            "finished_returns": self._finished_returns,
            "seconds": seconds,
        }
        states = self.pool.get_state()
        return snapshot.save(self.folder, self.block, arrays=arrays, large=large, states=states, meta=meta)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            **self.config.to_json(),
            "steps": None,
            "capacity": self.learners[0].plan.capacity,
            "fuse": self.fuse,
        }

    def _resume(self) -> None:
        found = None if self.folder is None else snapshot.load(self.folder)
        if found is None:
            return
        saved, mine = found["meta"]["config"], self._fingerprint()
        changed = [name for name in mine if saved.get(name) != mine[name]]
        if changed:
            raise ValueError(
                f"the checkpoint in {self.folder} is of another population ({changed[0]} differs): "
                "choose another folder or remove it"
            )
        self.block = found["number"]
        arrays = found["arrays"]
        for i, learner in enumerate(self.learners):
            old, tree = jax.tree.flatten(learner.state[:2])
            leaves = [jnp.asarray(arrays[f"learner{i}-{j}"]) for j in range(len(old))]
            rows = tuple(
                _refill(buffer, found["large"][f"replay{i}-{j}"])
                for j, buffer in enumerate(learner.state.rows)
            )
            added = jnp.asarray(self.block * self.config.block, jnp.int32)
            agents, estimators = jax.tree.unflatten(tree, leaves)
            learner.state = LearnerState(agents, estimators, rows, added)
        for name in ("_acting", "_newest", "_failed_at", "_largest_reward", "_returns"):
            setattr(self, name, arrays[name])
        self.rows = [tuple(row) for row in found["meta"]["rows"]]
        self._finished_returns = found["meta"]["finished_returns"]
        self._seconds_before = found["meta"]["seconds"]
        self.pool.set_state(found["states"])


def _refill(buffer: jax.Array, rows: np.ndarray) -> jax.Array:
    insert = jax.jit(lambda b, r: jax.lax.dynamic_update_slice(b, r, (0, 0, 0)), donate_argnums=0)
    return insert(buffer, np.ascontiguousarray(rows))


def _fetch(handles: Sequence[tuple], dispatched: float) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Wait for a block of updates and bring its two small arrays to the host; also when it was done."""
    vectors = np.concatenate([np.asarray(vector) for vector, _ in handles])
    done = time.perf_counter()
    metrics = np.concatenate([np.asarray(metric) for _, metric in handles])
    return vectors, metrics, dispatched, done
