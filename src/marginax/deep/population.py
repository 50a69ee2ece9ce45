"""The trainer: agents advance together, block by block, evaluate, log, and leave checkpoints.

Time goes in blocks of `update_every` steps and as many updates. Everything an agent draws follows from its seed and the
number of the block, so neither the number of processes nor an interruption changes what it does. With `overlap`, block
b+1 is simulated with the policies that the updates of block b-1 left, while the updates of block b run: a delay of
one block, the same on every machine. Without, every block is played with the newest policy.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import numpy as np

from marginax.deep import checkpoint, learner_files
from marginax.deep.accelerated import DeviceLearner, DevicePool
from marginax.deep.config import AgentConfig, TD3Config
from marginax.deep.discrete_config import ActorCriticConfig, DiscreteConfig
from marginax.deep.learner import AGENTS, Learner, Plan
from marginax.deep.metrics import MetricsLog, known_number
from marginax.deep.policy import Policy, policy_name
from marginax.deep.run_config import PopulationConfig
from marginax.simulators import AgentSpec, Pool, Transitions, make
from marginax.simulators.policy import unpack
from marginax.simulators.registry import check_actions, observation_shape

CHECKPOINT = "checkpoint"


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
        self._bounds = (probe.action_low, probe.action_high)
        probe.close()
        self.learners: list[Any] = list(_learners(config, sizes))
        specs = [
            _spec(config.played, group, seed) for group in config.groups.values() for seed in config.seeds
        ]
        self._layers: list[int] = self.learners[0].plan.layers
        self.pool: Any = (
            DevicePool(self.learners)
            if config.on_device
            else Pool(specs, sizes=self._layers, steps=config.block, workers=workers)
        )
        count = len(specs)
        policies = [jax.vmap(x.plan.agent.policy)(x.state.agents) for x in self.learners]
        self._newest = np.concatenate([np.asarray(x) for x in policies])
        self._acting = self._newest
        settings = [config.groups[label] for label, _ in config.agents]
        self._bound = np.array([each.divergence_factor / (1 - each.discount) for each in settings])
        self._largest_reward = np.zeros(count)
        self._returns = np.zeros((count, config.first.copies))
        self.names: tuple[str, ...] = self.learners[0].plan.agent.METRICS
        self._learned: list[list[list[float]]] = [[] for _ in specs]
        self._finished_returns: list[list[float]] = [[] for _ in specs]
        self.failures: dict[int, dict[str, Any]] = {}
        self.lines: list[dict[str, Any]] = []
        self._pending: dict[tuple[int, int], dict[str, Any]] = {}
        self.timing, self.seconds, self._idle_since = Timing(), 0.0, 0.0
        self._saved_until = 0
        self._log = None if folder is None else MetricsLog(folder)
        self._resume()

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or no agent is left to train."""
        return self.step >= self.config.steps or len(self.failures) == len(self.config.agents)

    def __enter__(self) -> Population:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers and close the files."""
        self.pool.close()
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
        begun = time.perf_counter()
        with ThreadPoolExecutor(max(1, len(self.learners))) as threads:
            list(threads.map(lambda learner: learner.compile(), self.learners))
        self.timing.compiling += time.perf_counter() - begun
        begun, before, saved = time.perf_counter(), self.seconds, time.monotonic()
        if self.config.on_device:
            ahead = 1
            while not self.finished:
                ahead = self._play_on_device(ahead)
                self.seconds = before + time.perf_counter() - begun
                report(self, self._collect())
                stopping = stop()
                if stopping or self.finished or time.monotonic() - saved >= 60 * checkpoint_minutes:
                    self.save(replay=keep_replay or not self.finished)
                    saved = time.monotonic()
                if stopping:
                    break
            self.timing.wall += time.perf_counter() - begun
            return
        previous: tuple[Transitions, Callable[[], tuple]] | None = None
        with ThreadPoolExecutor(1) as fetcher:
            self.pool.start(self.step // self.config.block, self._acting)
            while not self.finished:
                t0 = time.perf_counter()
                transitions = self.pool.finish()
                t1 = time.perf_counter()
                fetch = partial(_fetch, self._dispatch(transitions.rows), time.perf_counter())
                self.step += self.config.block
                if self.config.overlap:
                    current = (transitions, fetcher.submit(fetch).result)
                    if previous is not None:
                        self._take(*previous, self.step - self.config.block)
                    previous = current
                else:
                    self._take(transitions, fetch, self.step)
                # With overlap: those before this block's updates, which have only begun.
                self._acting = self._newest
                self.timing.simulating += t1 - t0
                self.timing.waiting += time.perf_counter() - t1
                self.seconds = before + time.perf_counter() - begun
                stopping = stop()
                due = time.monotonic() - saved >= 60 * checkpoint_minutes
                if stopping or due or self.finished:
                    if previous is not None:
                        self._take(*previous, self.step)
                        previous = None
                    if self.finished and not self._is_due(self.step):  # all failed: a last line says so
                        self._evaluate(self.step)
                    report(self, self._collect(wait_for_all=True))
                    self.save(replay=keep_replay or not self.finished)
                    saved = time.monotonic()
                    if stopping:
                        break
                if not self.finished:
                    self.pool.start(self.step // self.config.block, self._acting)
                    report(self, self._collect())
        self.timing.wall += time.perf_counter() - begun

    def _play_on_device(self, ahead: int) -> int:
        """Some blocks, at most to the next evaluation; returns how many the next call should play, for about a second."""
        begun, block, every = time.perf_counter(), self.config.block, self.config.evaluate_every or 1
        first = self.step // block
        until = min(self.config.steps, (self.step // every + 1) * every) // block
        last = min(until, first + ahead)
        for learner in self.learners:
            learner.play(first, last)
        self.step = last * block
        spent = time.perf_counter() - begun
        self.timing.learning += spent
        if last == until:
            parts = zip(*(learner.take_earned() for learner in self.learners), strict=True)
            earned, self._largest_reward = (np.concatenate(part) for part in parts)
            self._finished_returns = [[] if np.isnan(x) else [float(x)] for x in earned]
            found = zip(*(learner.inspect(last - 1) for learner in self.learners), strict=True)
            now = time.perf_counter()
            self._receive((*(np.concatenate(x) for x in found), now, now), self.step)
        return max(1, int(ahead * min(4.0, 1.0 / max(spent, 1e-3))))

    def _dispatch(self, rows: np.ndarray) -> list[tuple[jax.Array, jax.Array]]:
        handles, start = [], 0
        for learner in self.learners:
            stop = start + learner.plan.agents
            handles.append(learner.advance(self.step // self.config.block, rows[start:stop]))
            start = stop
        return handles

    def _take(self, transitions: Transitions, updates: Callable[[], tuple], step: int) -> None:
        """Take in a block that ends after `step` steps, and its updates: together, whenever a checkpoint may be due."""
        self._watch(transitions, step - self.config.block)
        self._receive(updates(), step)

    def _watch(self, transitions: Transitions, start: int) -> None:
        """Episode returns, the largest reward, and nothing that is not a number."""
        for agent, row, column in np.argwhere(~np.isfinite(transitions.rows)):
            reason = f"the simulator returned {transitions.rows[agent, row, column]}"
            self._fail(int(agent), start + int(row), reason)
        self._largest_reward = np.fmax(self._largest_reward, np.abs(transitions.rewards).max(axis=1))
        ends = (transitions.terminated + transitions.truncated) > 0
        for agent, rewards in enumerate(transitions.rewards):
            for t, (reward, ended) in enumerate(zip(rewards.tolist(), ends[agent].tolist(), strict=True)):
                place = (agent, t % self._returns.shape[1])
                self._returns[place] += reward
                if ended:
                    self._finished_returns[agent].append(float(self._returns[place]))
                    self._returns[place] = 0.0

    def _fail(self, agent: int, step: int, reason: str) -> None:
        if agent not in self.failures:
            self.failures[agent] = {"step": step, "reason": f"{reason} at step {step}"}

    def _receive(self, result: tuple, step: int) -> None:
        """Take in the policies and metrics of the updates that end after `step` steps."""
        vectors, metrics, dispatched, done = result
        self.timing.learning += done - max(dispatched, self._idle_since)
        self._idle_since = done
        limit = self._bound * np.maximum(self._largest_reward, 1e-3)
        size = metrics[:, self.names.index("q_size")]
        for agent in np.flatnonzero(~np.isfinite(vectors).all(axis=1)):
            self._fail(int(agent), step, "the policy's parameters were no longer finite")
        for agent in np.flatnonzero(size > limit):
            factor = self.config.groups[self.config.agents[agent][0]].divergence_factor
            allowed = f"{factor:g} times what rewards up to {self._largest_reward[agent]:.3g} allow"
            reason = f"the mean of |Q| reached {size[agent]:.3g}, above {limit[agent]:.3g} ({allowed}),"
            self._fail(int(agent), step, reason)
        failed = list(self.failures)  # they keep their last policies
        vectors[failed] = self._newest[failed]
        self._newest = vectors
        for learned, row in zip(self._learned, metrics.tolist(), strict=True):
            learned.append(row)
        if self._is_due(step):
            self._evaluate(step)

    def _is_due(self, step: int) -> bool:
        """Whether there is an evaluation after `step` steps."""
        return step % (self.config.evaluate_every or step) == 0 or step == self.config.steps

    def _evaluate(self, step: int) -> None:
        """Queue evaluations of the newest policies, and note what was learned since the last ones."""
        for agent, (label, seed) in enumerate(self.config.agents):
            recent, learned = self._finished_returns[agent], np.array(self._learned[agent])
            line = {"operator": label, "seed": seed, "step": step, "return": None, "returns": None}
            line["train_return"] = known_number(np.mean(recent)) if recent else None
            line["failed_at"] = self.failures[agent]["step"] if agent in self.failures else None
            for name, values in zip(self.names, learned.T, strict=True):
                known = values[np.isfinite(values)]
                summary = np.max if name == "weight_max" else np.mean
                line[name] = float(summary(known)) if known.size else None
            self._finished_returns[agent], self._learned[agent] = [], []
            self._pending[agent, step] = line
        self.pool.evaluate(step, self._newest, self.config.episodes)

    def _collect(self, *, wait_for_all: bool = False) -> list[dict[str, Any]]:
        """Lines of metrics whose evaluation is complete; they are logged in the order of steps and agents."""
        behind = len(self._pending) > len(self.config.agents)  # let the workers catch up
        for evaluation in self.pool.evaluations(wait_for_all=wait_for_all or behind):
            line = self._pending[evaluation.agent, evaluation.number]
            line["return"] = known_number(np.mean(evaluation.returns))
            line["returns"] = [known_number(x) for x in evaluation.returns]
        done = []
        for key in sorted(self._pending, key=lambda key: key[::-1]):
            if self._pending[key]["returns"] is None:
                break
            done.append(self._pending.pop(key))
        self.lines += done
        if self._log is not None:
            self._log.write(done, self.step / max(self.seconds, 1e-9))
        return done

    @property
    def seconds_to_save(self) -> float:
        """About how long a checkpoint would take now."""
        width = self.learners[0].plan.width
        return 5.0 + len(self.config.agents) * (self.step - self._saved_until) * width * 4 / 300e6

    def save(self, *, replay: bool = True) -> None:
        """Write the policies and a checkpoint between two blocks; nothing without a folder."""
        if self.folder is None or self._log is None or self._saved_until == self.step:
            return
        for vector, (label, seed) in zip(self._newest, self.config.agents, strict=True):
            scale = getattr(self.config.groups[label], "act_noise", 0.0)
            policy = Policy(unpack(vector, self._layers), *self._bounds, scale, self.config.played)
            policy.save(self.folder / policy_name(label, seed))
        known = checkpoint.manifest(self.folder / CHECKPOINT) or {"files": []}
        files: dict[str, dict[str, Any]] = {}
        keep: list[str] = []
        for i, learner in enumerate(self.learners):
            new, kept = learner_files.to_files(
                i,
                learner,
                step=self.step,
                saved_until=self._saved_until,
                known=known["files"],
                replay=replay,
            )
            files |= new
            keep += kept
        files[f"population-{self.step}"] = {name: getattr(self, name) for name in _ARRAYS}
        files[f"simulators-{self.step}"] = {
            f"{agent}/{name}": value
            for agent, state in enumerate(self.pool.get_state())
            for name, value in state.items()
        }
        meta = {
            "config": self.config.to_json(),
            "step": self.step,
            "seconds": self.seconds,
            "replay": replay,
            "metrics": self._log.known(),
            "failures": {str(agent): failure for agent, failure in self.failures.items()},
            "learned": self._learned,
            "finished_returns": self._finished_returns,
            "timing": {**dataclasses.asdict(self.timing), "busy": self.timing.busy},
            "replaced_workers": self.pool.replaced,
            "platform": checkpoint.platform(),
        }
        checkpoint.save(self.folder / CHECKPOINT, meta, files, keep)
        self._saved_until = self.step

    def _resume(self) -> None:
        """Continue from the last checkpoint, and forget what was logged after it."""
        if self.folder is None or self._log is None:
            return
        place = self.folder / CHECKPOINT
        found = checkpoint.load(place)
        if found is None:
            self._log.start(None)
            checkpoint.save(place, {"config": self.config.to_json(), "step": 0, "failures": {}}, {})
            return
        meta, files = found
        self.config.require_same(meta["config"], self.folder)
        self.lines = self._log.start(meta.get("metrics", {"bytes": 0}))
        self.step, self.seconds = meta["step"], meta.get("seconds", 0.0)
        self.failures = {int(agent): failure for agent, failure in meta["failures"].items()}
        if self.finished or self.step == 0:
            return
        if not meta["replay"]:
            raise ValueError(
                f"the run in {str(self.folder)!r} ended at step {self.step} without its replay buffers and "
                "cannot go on: choose another folder."
            )
        there, here = meta["platform"]["backend"], jax.default_backend()
        if (there == "cpu") != (here == "cpu") and not self.config.first.discrete:  # see `networks.twins`
            raise ValueError(
                f"the run in {str(self.folder)!r} was trained on {there!r} and cannot go on on {here!r}, where the critics "
                "are stored in another form: choose another folder."
            )
        self._learned, self._finished_returns = meta["learned"], meta["finished_returns"]
        self._saved_until = self.step
        for name in _ARRAYS:
            setattr(self, name, files[f"population-{self.step}"][name])
        for i, learner in enumerate(self.learners):
            learner.state = learner_files.from_files(i, learner, files, self.step)
        states: list[dict[str, Any]] = [{} for _ in self.config.agents]
        for name, value in files[f"simulators-{self.step}"].items():
            agent, _, key = name.partition("/")
            states[int(agent)][key] = value
        self.pool.set_state(states)


_ARRAYS = ("_acting", "_newest", "_largest_reward", "_returns")


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


def _fetch(handles: Sequence[tuple], dispatched: float) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Wait for a block of updates and bring its two small arrays to the host; also when it was done."""
    vectors = np.concatenate([np.asarray(vector) for vector, _ in handles])
    done = time.perf_counter()
    metrics = np.concatenate([np.asarray(metric) for _, metric in handles])
    return vectors, metrics, dispatched, done
