"""Worker processes that simulate for a population, each closing the loop with its own copy of the policies.

The caller starts a block with the newest parameters, does something else, and collects the block:

    with Pool(specs, sizes=[17, 256, 256, 6], steps=50, workers=15) as pool:
        pool.start(0, parameters)      # returns at once
        ...                            # the learner is busy with the previous block
        block = pool.finish()          # rows [agents, steps, width]

Whatever the number of workers, the blocks are the same. A worker that dies is replaced and its block
repeated from the state at the block's start.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np

from marginax.simulators.policy import parameter_count, unpack
from marginax.simulators.registry import make
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, evaluate, row_width

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_MAX_REPLACEMENTS = 3


class WorkerDied(RuntimeError):
    """A worker failed in a way that a fresh one repeats, or too often."""


class Evaluation(NamedTuple):
    """Returns `[episodes]` of one agent's deterministic policy; `number` is the caller's.

    >>> Evaluation(agent=0, number=10_000, returns=np.array([1.0, 3.0])).returns.mean()
    np.float64(2.0)
    """

    agent: int
    number: int
    returns: np.ndarray


class Pool:
    """Simulates all agents of a population, in worker processes or, with `workers=0`, in this one.

    Args:
        specs: One for each agent; all simulators must have the same observation and action sizes.
        sizes: Layer sizes of the policy network, from observation to action.
        steps: Steps an agent plays in one block.
        workers: Number of processes; more than there are agents is the same as one each.

    >>> pool = Pool([AgentSpec("Pendulum-v1", seed=0)], sizes=[3, 8, 1], steps=4, workers=0)
    >>> pool.start(0, np.zeros((1, pool.parameter_count), np.float32))
    >>> pool.finish().observations.shape
    (1, 4, 3)
    >>> pool.close()
    """

    def __init__(self, specs: Sequence[AgentSpec], *, sizes: Sequence[int], steps: int, workers: int) -> None:
        if not specs:
            raise ValueError("specs must name at least one agent")
        if steps < 1 or workers < 0:
            raise ValueError(f"steps must be positive and workers not negative, got {steps} and {workers}")
        self.specs, self.sizes, self.steps = list(specs), list(sizes), steps
        probe = make(specs[0].simulator, 0)
        self.observation_size, self.action_size = probe.observation_size, probe.action_size
        probe.close()
        if (sizes[0], sizes[-1]) != (self.observation_size, self.action_size):
            raise ValueError(
                f"sizes must begin with {self.observation_size} and end with {self.action_size} "
                f"for {specs[0].simulator}, got {list(sizes)}"
            )
        self.parameter_count = parameter_count(sizes)
        self.replaced = 0
        self.waited = 0.0  # seconds spent in `finish`
        self._context = multiprocessing.get_context("spawn")
        self._shape = (len(specs), self.parameter_count, steps, sizes[0], sizes[-1])
        self._memory = self._context.RawArray("f", _Shared.words(*self._shape))
        self._shared = _Shared(self._memory, *self._shape)
        self._states: list[dict[str, Any]] = [{} for _ in specs]
        self._running: int | None = None
        self._outstanding: dict[tuple[int, int], int] = {}
        self._evaluations: list[Evaluation] = []
        count = min(workers, len(specs))
        owned = [list(range(w, len(specs), count)) for w in range(count)]
        self._local = _Local(self.specs, self.sizes, range(len(specs)), self._shared) if count == 0 else None
        self._workers = [self._spawn(agents) for agents in owned]

    def _spawn(self, agents: list[int]) -> _Worker:
        before = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(dict.fromkeys(_THREADS, "1"))  # read by NumPy in the new process
        try:
            here, there = self._context.Pipe()
            arguments = (there, self._memory, self._shape, self.specs, self.sizes, agents)
            process = self._context.Process(target=_worker_main, args=arguments, daemon=True)
            process.start()
            there.close()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
        states = {agent: self._states[agent] for agent in agents if self._states[agent]}
        here.send(("state", states))
        return _Worker(process, here, agents)

    def start(self, index: int, parameters: np.ndarray) -> None:
        """Begin block number `index` with `parameters[agents, parameter_count]`; returns at once."""
        if self._running is not None:
            raise RuntimeError(f"block {self._running} is not finished yet")
        self._shared.parameters[:] = parameters
        self._running = index
        if self._local is None:
            for worker in self._workers:
                worker.busy = True
                self._send(worker, ("block", index))

    def finish(self) -> Transitions:
        """Wait for the block in work; its rows are `[agents, steps, width]`, copied."""
        if self._running is None:
            raise RuntimeError("no block was started")
        begun = time.perf_counter()
        if self._local is not None:
            self._local.block(self._running)
            self._states = [self._local.actors[i].get_state() for i in range(len(self.specs))]
        while any(worker.busy for worker in self._workers):
            self._receive(block=True)
        self._running = None
        self.waited += time.perf_counter() - begun
        return Transitions(self._shared.rows.copy(), self.observation_size)

    def evaluate(
        self, index: int, parameters: np.ndarray, episodes: int, agents: Sequence[int] | None = None
    ) -> None:
        """Queue evaluation number `index` for every agent, to be played when workers are idle.

        Waits for evaluations that are still queued: there is room for one set of parameters.
        """
        while self._outstanding:
            self._receive(block=True)
        self._shared.evaluated[:] = parameters
        for agent in range(len(self.specs)) if agents is None else agents:
            vector = self._shared.evaluated[agent]
            if self._local is not None:
                self._evaluations.append(
                    Evaluation(agent, index, self._local.evaluate(agent, index, vector, episodes))
                )
                continue
            self._outstanding[agent, index] = episodes
            worker = next(w for w in self._workers if agent in w.agents)
            self._send(worker, ("evaluate", agent, index, episodes))

    def evaluations(self, *, wait_for_all: bool = False) -> list[Evaluation]:
        """Evaluations that came in since the last call, on request after waiting for all that are queued."""
        while self._outstanding and wait_for_all:
            self._receive(block=True)
        self._receive(block=False)
        done = sorted(self._evaluations, key=lambda e: (e.number, e.agent))
        self._evaluations = []
        return done

    def get_state(self) -> list[dict[str, Any]]:
        """State of every agent's simulation after the last finished block."""
        if self._running is not None:
            raise RuntimeError("a block is in work: finish it first")
        return list(self._states)

    def set_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Continue from what `get_state` returned."""
        if len(states) != len(self.specs):
            raise ValueError(
                f"states must have one entry for each of {len(self.specs)} agents, got {len(states)}"
            )
        self._states = [dict(state) for state in states]
        if self._local is not None:
            self._local.set_states(dict(enumerate(self._states)))
        for worker in self._workers:
            self._send(worker, ("state", {agent: self._states[agent] for agent in worker.agents}))

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, worker: _Worker, message: tuple) -> None:
        try:
            worker.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)

    def _receive(self, *, block: bool) -> None:
        ready = wait([worker.connection for worker in self._workers], timeout=60.0 if block else 0.0)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            rest: list[Any]
            try:
                kind, *rest = worker.connection.recv()
            except (EOFError, ConnectionResetError):
                self._replace(worker)
                continue
            if kind == "block":
                (states,) = rest
                for agent, state in states.items():
                    self._states[agent] = state
                worker.busy = False
            elif kind == "evaluation":
                agent, index, returns = rest
                if self._outstanding.pop((agent, index), None) is not None:
                    self._evaluations.append(Evaluation(agent, index, returns))
            else:
                raise WorkerDied(f"simulation failed for agents {worker.agents}: {rest[0]}")

    def _replace(self, worker: _Worker) -> None:
        """Put a fresh process in a dead one's place, and repeat what it had not finished."""
        self.replaced += 1
        code = worker.process.exitcode
        worker.stop()
        if self.replaced > _MAX_REPLACEMENTS * len(self._workers):
            raise WorkerDied(f"workers died {self.replaced} times, last with exit code {code}: giving up")
        fresh = self._spawn(worker.agents)
        fresh.busy = worker.busy
        self._workers[self._workers.index(worker)] = fresh
        if fresh.busy:
            fresh.connection.send(("block", self._running))
        for (agent, index), episodes in self._outstanding.items():
            if agent in fresh.agents:
                fresh.connection.send(("evaluate", agent, index, episodes))


class _Worker:
    """A process, the pipe to it, and the agents it acts for."""

    def __init__(self, process: Any, connection: Connection, agents: list[int]) -> None:
        self.process, self.connection, self.agents = process, connection, agents
        self.busy = False

    def stop(self) -> None:
        self.connection.close()
        self.process.join(timeout=0.5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


class _Shared:
    """Parameters to act with and to evaluate, `[agents, n]`, and rows `[agents, steps, width]`, in shared memory."""

    def __init__(
        self, memory: Any, agents: int, parameters: int, steps: int, inputs: int, outputs: int
    ) -> None:
        words = np.frombuffer(memory, np.float32)
        both = words[: 2 * agents * parameters].reshape(2, agents, parameters)
        self.parameters, self.evaluated = both
        self.rows = words[2 * agents * parameters :].reshape(agents, steps, row_width(inputs, outputs))

    @staticmethod
    def words(agents: int, parameters: int, steps: int, inputs: int, outputs: int) -> int:
        return agents * (2 * parameters + steps * row_width(inputs, outputs))


class _Local:
    """What a worker does, in whatever process it is."""

    def __init__(
        self, specs: Sequence[AgentSpec], sizes: Sequence[int], agents: Sequence[int], shared: _Shared
    ) -> None:
        self.specs, self.sizes, self.shared = specs, sizes, shared
        self.actors = {agent: Actor(specs[agent]) for agent in agents}

    def set_states(self, states: dict[int, dict[str, Any]]) -> None:
        for agent, state in states.items():
            if state:
                self.actors[agent].set_state(state)
            else:
                self.actors[agent] = Actor(self.specs[agent])

    def block(self, index: int) -> None:
        for agent, actor in self.actors.items():
            layers = unpack(self.shared.parameters[agent], self.sizes)
            actor.play(index, layers, Transitions(self.shared.rows[agent], self.sizes[0]))

    def evaluate(self, agent: int, index: int, vector: np.ndarray, episodes: int) -> np.ndarray:
        slices = evaluate(self.specs[agent], unpack(vector, self.sizes), index, episodes)
        return next(returns for returns in slices if returns is not None)


def _worker_main(
    connection: Connection,
    memory: Any,
    shape: tuple[int, ...],
    specs: Sequence[AgentSpec],
    sizes: Sequence[int],
    agents: Sequence[int],
) -> None:
    """A worker's whole life: blocks first, evaluations in slices whenever no message waits."""
    try:
        local = _Local(specs, sizes, agents, _Shared(memory, *shape))
        jobs: list[tuple[int, int, Any]] = []
        while True:
            if jobs and not connection.poll():
                agent, index, job = jobs[0]
                returns = next(job)
                if returns is not None:
                    jobs.pop(0)
                    connection.send(("evaluation", agent, index, returns))
                continue
            kind, *rest = connection.recv()
            if kind == "block":
                local.block(rest[0])
                connection.send(("block", {agent: local.actors[agent].get_state() for agent in agents}))
            elif kind == "state":
                local.set_states(rest[0])
            else:
                agent, index, episodes = rest
                layers = unpack(local.shared.evaluated[agent], sizes)
                jobs.append((agent, index, evaluate(specs[agent], layers, index, episodes)))
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return
    except Exception as error:
        connection.send(("error", f"{type(error).__name__}: {error}"))
