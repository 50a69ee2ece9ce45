"""The trainer: agents advance together, block by block, evaluate, log, and leave checkpoints.

Time goes in blocks of `update_every` steps and as many updates. Everything an agent draws follows from its seed and the
number of the block, so neither the number of processes nor an interruption changes what it does. With `overlap`, block
b+1 is simulated with the policies that the updates of block b-1 left, while the updates of block b run: a delay of
one block, the same on every machine. Without, every block is played with the newest policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from marginax.deep import population_files
from marginax.deep.accelerated import DeviceLearner, DevicePool
from marginax.deep.config import AgentConfig, TD3Config
from marginax.deep.discrete_config import ActorCriticConfig, DiscreteConfig
from marginax.deep.learner import AGENTS, Learner, Plan
from marginax.deep.metrics import MetricsLog, known_number
from marginax.deep.monitor import Monitor
from marginax.deep.run_config import PopulationConfig
from marginax.simulators import AgentSpec, Pool, Transitions, make
from marginax.simulators.registry import check_actions, observation_shape


@dataclass
class Timing:
    """Where the time went, in seconds: `wall`, of which the learner was busy for `learning`.

    `simulating` is how long the learner's host waited for blocks of transitions, `waiting` how long it waited for
    the learner: a learner that is never idle has `learning` close to `wall`.
    """

    wall: float = 0.0
    learning: float = 0.0
    simulating: float = 0.0
    waiting: float = 0.0
    compiling: float = 0.0

    @property
    def busy(self) -> float:
        """Share of the time after compilation in which the learner had work."""
        return self.learning / self.wall if self.wall else 0.0


class Population:
    """Agents in training: their learners, simulators and files.

    Args:
        config: What is trained.
        workers: Processes that simulate; 0: this one.
        folder: Where metrics, policies and checkpoints go, and from whose checkpoint training carries on; None: nowhere.

    Attributes:
        step: Steps of each agent so far.
        saved_until: Steps at the last checkpoint.
        seconds: How long they have been trained, over all interruptions.
        lines: Metrics: a line for each agent at each evaluation.
        learners: One for each run of neighbouring groups that may share a program.
        layer_sizes: Layer sizes of the policies.
        action_bounds: Lowest and highest actions.
        names: The metrics of an update.
        pool: What simulates.
        newest: Policies `[agents, parameters]` after the last updates that were taken in.
        acting: Those that play; with `overlap`, of one block before.
        monitor: What was measured since the last lines, and who failed.
        timing: Where the time went since this object was made.

    Raises:
        ValueError: If the folder holds another population, or a file in it is damaged.

    >>> agent = TD3Config(hidden=(8,), batch_size=4, update_after=50)
    >>> config = PopulationConfig(simulator="Pendulum-v1", groups={"td3": agent}, steps=100, episodes=1)
    >>> with Population(config) as population:
    ...     population.run()
    >>> population.finished, [line["step"] for line in population.lines]
    (True, [50, 100])
    """

    def __init__(self, config: PopulationConfig, *, workers: int = 0, folder: Path | None = None) -> None:
        self.config, self.folder, self.step = config, folder, 0
        probe = make(config.played, 0, allow_import=True)
        check_actions(config.played, probe, discrete=config.first.discrete)
        sizes: dict[str, Any] = {"observation_size": probe.observation_size, "action_size": probe.action_size}
        if config.first.discrete:
            sizes |= {"num_actions": probe.num_actions, "observation_shape": observation_shape(probe)}
        self.action_bounds = (probe.action_low, probe.action_high)
        probe.close()
        self.learners: list[Any] = list(_learners(config, sizes))
        plan = self.learners[0].plan
        self.layer_sizes: list[int] = plan.layers
        self.names: tuple[str, ...] = plan.agent.METRICS
        self.pool: Any
        if config.on_device:
            self.pool = DevicePool(self.learners)
        else:
            specs = [_spec(config.played, config.groups[label], seed) for label, seed in config.agents]
            self.pool = Pool(specs, sizes=self.layer_sizes, steps=config.block, workers=workers)
        policies = [jax.vmap(x.plan.agent.policy)(x.state.agents) for x in self.learners]
        self.newest = self.acting = np.concatenate([np.asarray(x) for x in policies])
        self.monitor = Monitor(config, self.names)
        self.lines: list[dict[str, Any]] = []
        self._awaited: dict[tuple[int, int], dict[str, Any]] = {}
        self._in_work: _Block | None = None
        self._fetcher = ThreadPoolExecutor(1)
        self._ahead = 1  # blocks of the next call on an accelerator
        self.timing, self.seconds, self._idle_since = Timing(), 0.0, 0.0
        self.saved_until = 0
        self._log = None if folder is None else MetricsLog(folder)
        if self._log is not None:
            population_files.resume(self, self._log)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or no agent is left to train."""
        return self.step >= self.config.steps or len(self.failures) == len(self.config.agents)

    @property
    def failures(self) -> dict[int, dict[str, Any]]:
        """Step and reason of every agent that failed, by its number."""
        return self.monitor.failures

    @property
    def seconds_to_save(self) -> float:
        """About how long a checkpoint would take now."""
        width = self.learners[0].plan.width
        return 5.0 + len(self.config.agents) * (self.step - self.saved_until) * width * 4 / 300e6

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files."""
        self.pool.close()
        self._fetcher.shutdown()
        if self._log is not None:
            self._log.close()

    def run(
        self,
        *,
        stop: Callable[[], bool] = lambda: False,
        checkpoint_minutes: float = math.inf,
        keep_replay: bool = True,
        report: Callable[[Population, list[dict[str, Any]]], None] = lambda population, lines: None,
    ) -> None:
        """Train until all steps are done or `stop` says so; then leave a checkpoint if there is a folder.

        Args:
            stop: Asked after every block.
            checkpoint_minutes: Minutes between checkpoints on the way.
            keep_replay: Whether the last checkpoint of a finished run has the replay buffers, so that it can go on.
            report: Called after every block with the lines of metrics that came in.
        """
        if self.finished:
            return
        self._compile()
        begun, before, saved = time.perf_counter(), self.seconds, time.monotonic()
        advance = self._advance_on_device if self.config.on_device else self._advance
        self._play()
        while True:
            advance()
            self.seconds = before + time.perf_counter() - begun
            stopping = stop()
            due = time.monotonic() - saved >= 60 * checkpoint_minutes
            if stopping or due or self.finished:
                self._settle()
                if self.finished and not self._is_due(self.step):  # all failed: a last line says so
                    self._evaluate(self.step)
                report(self, self._collect(wait_for_all=True))
                self.save(replay=keep_replay or not self.finished)
                saved = time.monotonic()
            if stopping or self.finished:
                break
            self._play()
            report(self, self._collect())
        self.timing.wall += time.perf_counter() - begun

    def save(self, *, replay: bool = True) -> None:
        """Write the policies and a checkpoint between two blocks; nothing without a folder."""
        if self._log is not None and self.saved_until != self.step:
            population_files.save(self, self._log, replay=replay)
            self.saved_until = self.step

    def _compile(self) -> None:
        begun = time.perf_counter()
        with ThreadPoolExecutor(max(1, len(self.learners))) as threads:
            list(threads.map(lambda learner: learner.compile(), self.learners))
        self.timing.compiling += time.perf_counter() - begun

    def _play(self) -> None:
        """Begin the next block of simulation; on an accelerator it is part of the learners' program."""
        if not self.config.on_device:
            self.pool.start(self.step // self.config.block, self.acting)

    def _advance(self) -> None:
        """Wait for the block that is played, begin its updates, and take in the block before."""
        begun = time.perf_counter()
        transitions = self.pool.finish()
        played = time.perf_counter()
        updates = self._begin_updates(transitions.rows)
        self.step += self.config.block
        previous, self._in_work = self._in_work, _Block(transitions, updates, self.step)
        if previous is not None:
            self._take(previous)
        if not self.config.overlap:
            self._settle()
        self.acting = self.newest  # with overlap, those before the updates that are in work
        self.timing.simulating += played - begun
        self.timing.waiting += time.perf_counter() - played

    def _begin_updates(self, rows: np.ndarray) -> Callable[[], _Updates]:
        """Give every learner its rows of a block; returns at once, with a function that waits for the updates."""
        handles, start = [], 0
        for learner in self.learners:
            stop = start + learner.plan.agents
            handles.append(learner.advance(self.step // self.config.block, rows[start:stop]))
            start = stop
        return self._fetcher.submit(_fetch, handles, time.perf_counter()).result

    def _settle(self) -> None:
        """Wait for the updates that are under way, if any, and take them in."""
        if self._in_work is not None:
            block, self._in_work = self._in_work, None
            self._take(block)

    def _take(self, block: _Block) -> None:
        """Take in a block and its updates: together, so that metrics are the same whenever a checkpoint is written."""
        self.monitor.watch(block.transitions, block.end - self.config.block)
        updates = block.updates()
        self.timing.learning += updates.done - max(updates.begun, self._idle_since)
        self._idle_since = updates.done
        self._receive(updates.policies, updates.metrics, block.end)

    def _advance_on_device(self) -> None:
        """Play and learn for some blocks, about a second's, at most to the next evaluation."""
        begun, block, every = time.perf_counter(), self.config.block, self.config.evaluate_every or 1
        first = self.step // block
        until = min(self.config.steps, (self.step // every + 1) * every) // block
        last = min(until, first + self._ahead)
        for learner in self.learners:
            learner.play(first, last)
        self.step = last * block
        spent = time.perf_counter() - begun
        self.timing.learning += spent
        self._ahead = max(1, int(self._ahead * min(4.0, 1.0 / max(spent, 1e-3))))
        if last == until:
            earned = zip(*(learner.take_earned() for learner in self.learners), strict=True)
            self.monitor.note_earned(*map(np.concatenate, earned))
            found = zip(*(learner.inspect(last - 1) for learner in self.learners), strict=True)
            policies, metrics = map(np.concatenate, found)
            self._receive(policies, metrics, self.step)

    def _receive(self, policies: np.ndarray, metrics: np.ndarray, step: int) -> None:
        """Store the policies and check the metrics after `step` steps; agents that failed keep their last policies."""
        self.monitor.check(policies, metrics, step)
        failed = list(self.failures)
        policies[failed] = self.newest[failed]
        self.newest = policies
        if self._is_due(step):
            self._evaluate(step)

    def _is_due(self, step: int) -> bool:
        """Whether there is an evaluation after `step` steps."""
        return step % (self.config.evaluate_every or step) == 0 or step == self.config.steps

    def _evaluate(self, step: int) -> None:
        """Queue evaluations of the newest policies, and the lines of metrics that wait for them."""
        for agent, line in enumerate(self.monitor.take_lines(step)):
            self._awaited[agent, step] = line
        self.pool.evaluate(step, self.newest, self.config.episodes)

    def _collect(self, *, wait_for_all: bool = False) -> list[dict[str, Any]]:
        """Lines of metrics whose evaluation is complete; they are logged in the order of steps and agents."""
        behind = len(self._awaited) > len(self.config.agents)  # let the workers catch up
        for evaluation in self.pool.evaluations(wait_for_all=wait_for_all or behind):
            line = self._awaited[evaluation.agent, evaluation.number]
            line["return"] = known_number(np.mean(evaluation.returns))
            line["returns"] = [known_number(x) for x in evaluation.returns]
        done = []
        for key in sorted(self._awaited, key=lambda key: key[::-1]):
            if self._awaited[key]["returns"] is None:
                break
            done.append(self._awaited.pop(key))
        self.lines += done
        if self._log is not None:
            self._log.write(done, self.step / max(self.seconds, 1e-9))
        return done


class _Updates(NamedTuple):
    """What a block of updates left, on the host: policies, metrics, and from when to when the learner was at work."""

    policies: np.ndarray
    metrics: np.ndarray
    begun: float
    done: float


class _Block(NamedTuple):
    """A block that was played, the updates that follow it, which may still be in work, and the step at its end."""

    transitions: Transitions
    updates: Callable[[], _Updates]
    end: int


def _fetch(handles: Sequence[tuple], begun: float) -> _Updates:
    """Wait for a block of updates and bring its two small arrays to the host."""
    policies = np.concatenate([np.asarray(vector) for vector, _ in handles])
    done = time.perf_counter()
    metrics = np.concatenate([np.asarray(metric) for _, metric in handles])
    return _Updates(policies, metrics, begun, done)


def _spec(simulator: str, config: AgentConfig, seed: int) -> AgentSpec:
    """How an agent explores."""
    common: dict[str, Any] = {"random_steps": config.random_steps or 0, "allow_import": True}
    if isinstance(config, DiscreteConfig):
        common |= {"epsilons": config.epsilons, "epsilon_steps": config.epsilon_steps or 0}
        common["softmax"] = isinstance(config, ActorCriticConfig)
    elif isinstance(config, TD3Config):
        common["noise"] = config.act_noise
    return AgentSpec(simulator, seed, **common)


def _learners(config: PopulationConfig, sizes: dict[str, Any]) -> Iterator[Learner]:
    """One learner for each run of neighbouring groups that may share a program."""

    def shared(settings: AgentConfig) -> tuple:
        return tuple(getattr(settings, name) for name in AGENTS[type(settings)].SHARED)

    for _, part in groupby(config.groups.values(), shared):
        groups = tuple(part)
        capacities = tuple(
            min(group.replay_size, config.steps) // config.block * config.block for group in groups
        )
        plan = Plan(groups, len(config.seeds), capacities=capacities, **sizes)
        if config.on_device:
            yield DeviceLearner(plan, config.seeds, config.simulator)
        else:
            yield Learner(plan, config.seeds)
