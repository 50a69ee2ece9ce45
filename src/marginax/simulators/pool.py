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

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marginax import _checks as checks
from marginax.engine import processes
from marginax.simulators.policy import parameter_count, unpack
from marginax.simulators.registry import warn_if_resume_differs
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, evaluate, row_width

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
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
        sizes: Layer sizes of the policy network, from the observation to the action, or to the values of discrete
            actions.
        steps: Steps an agent plays in one block.
        workers: Number of processes; more than there are agents is the same as one each.
        log: File to which everything is appended that environments print; by default it goes to standard error.

    >>> pool = Pool([AgentSpec("Pendulum-v1", seed=0)], sizes=[3, 8, 1], steps=4, workers=0)
    >>> pool.start(0, np.zeros((1, pool.parameter_count), np.float32))
    >>> pool.finish().observations.shape
    (1, 4, 3)
    >>> pool.close()
    """

    def __init__(
        self,
        specs: Sequence[AgentSpec],
        *,
        sizes: Sequence[int],
        steps: int,
        workers: int,
        log: Path | None = None,
    ) -> None:
        if not specs:
            raise ValueError("specs must name at least one agent")
        self.specs, self.sizes, self.steps = list(specs), list(sizes), checks.count("steps", steps)
        workers = checks.count("workers", workers, 0)
        found = {}
        for spec in {spec.simulator: spec for spec in self.specs}.values():
            probe = spec.make(0)
            found[spec.simulator] = probe.observation_size, probe.action_size, probe.num_actions
            probe.close()
            warn_if_resume_differs(spec.simulator, spec.allow_import)
        if len(set(found.values())) > 1:
            raise ValueError(f"specs must have simulators with equal sizes and kinds of actions, got {found}")
        self.observation_size, self.action_size, actions = found[specs[0].simulator]
        outputs = actions or self.action_size
        if [*self.sizes[:1], *self.sizes[-1:]] != [self.observation_size, outputs]:
            raise ValueError(
                f"sizes must begin with {self.observation_size} and end with {outputs} "
                f"for {specs[0].simulator}, got {self.sizes}"
            )
        self.parameter_count = parameter_count(sizes)
        self.replaced = 0
        width = row_width(self.observation_size, self.action_size)
        self._shape = (len(specs), self.parameter_count, self.steps, width)
        self._memory = processes.SharedMemory(_Shared.size(*self._shape))
        self._shared = _Shared(self._memory, *self._shape)
        self._log = log
        self._states: list[dict[str, Any]] = [{} for _ in specs]
        self._running: int | None = None
        self._outstanding: dict[tuple[int, int], int] = {}
        self._evaluations: list[Evaluation] = []
        count = min(workers, len(specs))
        owned = [list(range(w, len(specs), count)) for w in range(count)]
        self._local = _Local(self.specs, self.sizes, range(len(specs)), self._shared) if count == 0 else None
        self._workers = [self._spawn(agents) for agents in owned]

    def _spawn(self, agents: list[int]) -> _Worker:
        arguments = {
            "specs": [dataclasses.asdict(spec) for spec in self.specs],
            "sizes": self.sizes,
            "shape": self._shape,
            "agents": agents,
        }
        child = processes.start(
            _worker_main,
            arguments,
            name=f"simulator {agents[0]}",
            environment=_ONE_THREAD,
            log=self._log,
            memory=self._memory,
        )
        child.send({"do": "state", "states": {agent: self._states[agent] for agent in agents}})
        return _Worker(child, agents)

    def start(self, index: int, parameters: np.ndarray) -> None:
        """Begin block number `index` with `parameters[agents, parameter_count]`; returns at once."""
        if self._running is not None:
            raise RuntimeError(f"block {self._running} is not finished yet")
        self._shared.parameters[:] = self._checked(parameters)
        self._running = index
        if self._local is None:
            for worker in self._workers:
                worker.busy = True
                worker.child.send({"do": "block", "index": index})

    def _checked(self, parameters: np.ndarray) -> np.ndarray:
        checks.shaped("parameters", np.shape(parameters), (len(self.specs), self.parameter_count))
        return parameters

    def finish(self) -> Transitions:
        """Wait for the block in work; its rows are `[agents, steps, width]`, copied."""
        if self._running is None:
            raise RuntimeError("no block was started")
        if self._local is not None:
            self._local.block(self._running)
        while any(worker.busy for worker in self._workers):
            self._receive(block=True)
        self._running = None
        return Transitions(self._shared.rows.copy(), self.observation_size)

    def evaluate(
        self, index: int, parameters: np.ndarray, episodes: int, agents: Sequence[int] | None = None
    ) -> None:
        """Queue evaluation number `index` for every agent, to be played when workers are idle.

        Waits for evaluations that are still queued: there is room for one set of parameters.
        """
        checks.count("episodes", episodes)
        chosen = [checks.index("agents", agent, len(self.specs)) for agent in agents or ()]
        while self._outstanding:
            self._receive(block=True)
        self._shared.evaluated[:] = self._checked(parameters)
        for agent in range(len(self.specs)) if agents is None else chosen:
            vector = self._shared.evaluated[agent]
            if self._local is not None:
                self._evaluations.append(
                    Evaluation(agent, index, self._local.evaluate(agent, index, vector, episodes))
                )
                continue
            self._outstanding[agent, index] = episodes
            worker = next(w for w in self._workers if agent in w.agents)
            worker.child.send({"do": "evaluate", "agent": agent, "index": index, "episodes": episodes})

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
        if self._local is not None:
            return [self._local.actors[i].get_state() for i in range(len(self.specs))]
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
            worker.child.send(
                {"do": "state", "states": {agent: self._states[agent] for agent in worker.agents}}
            )

    def close(self) -> None:
        """End all workers."""
        processes.stop([worker.child for worker in self._workers])
        self._workers = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, *, block: bool) -> None:
        ready = processes.wait([worker.child for worker in self._workers], 60.0 if block else 0.0)
        for worker in [worker for worker in self._workers if worker.child in ready]:
            try:
                message = worker.child.receive()
            except processes.ProcessDied as error:
                self._replace(worker, error)
                continue
            except processes.ProcessFailed as error:
                raise WorkerDied(f"simulation failed for agents {worker.agents}: {error}") from None
            if "states" in message:
                for agent, state in message["states"].items():
                    self._states[int(agent)] = state
                worker.busy = False
            elif self._outstanding.pop((message["agent"], message["index"]), None) is not None:
                self._evaluations.append(Evaluation(message["agent"], message["index"], message["returns"]))

    def _replace(self, worker: _Worker, error: processes.ProcessDied) -> None:
        """Put a fresh process in a dead one's place, and repeat what it had not finished."""
        self.replaced += 1
        if self.replaced > _MAX_REPLACEMENTS * len(self._workers):
            raise WorkerDied(f"workers died {self.replaced} times, giving up: {error}")
        fresh = self._spawn(worker.agents)
        fresh.busy = worker.busy
        self._workers[self._workers.index(worker)] = fresh
        if fresh.busy:
            fresh.child.send({"do": "block", "index": self._running})
        for (agent, index), episodes in self._outstanding.items():
            if agent in fresh.agents:
                fresh.child.send({"do": "evaluate", "agent": agent, "index": index, "episodes": episodes})


@dataclasses.dataclass
class _Worker:
    """A process, the agents it acts for, and whether it owes a block."""

    child: processes.Child
    agents: list[int]
    busy: bool = False


class _Shared:
    """Parameters to act with and to evaluate, `[agents, n]`, and rows `[agents, steps, width]`, in shared memory."""

    def __init__(
        self, memory: processes.SharedMemory, agents: int, parameters: int, steps: int, width: int
    ) -> None:
        words = memory.array(np.float32)
        both = words[: 2 * agents * parameters].reshape(2, agents, parameters)
        self.parameters, self.evaluated = both
        self.rows = words[2 * agents * parameters :].reshape(agents, steps, width)

    @staticmethod
    def size(agents: int, parameters: int, steps: int, width: int) -> int:
        return 4 * agents * (2 * parameters + steps * width)


class _Local:
    """The work of one worker process, or with `workers=0` of this process."""

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
    channel: processes.Channel,
    specs: list[dict[str, Any]],
    sizes: list[int],
    shape: list[int],
    agents: list[int],
) -> None:
    """A worker's whole life: blocks first, evaluations in slices whenever no message waits."""
    assert channel.memory is not None
    local = _Local([AgentSpec(**spec) for spec in specs], sizes, agents, _Shared(channel.memory, *shape))
    jobs: list[tuple[int, int, Any]] = []
    while True:
        if jobs and not channel.poll():
            agent, index, job = jobs[0]
            returns = next(job)
            if returns is not None:
                jobs.pop(0)
                channel.send({"agent": agent, "index": index, "returns": returns})
            continue
        try:
            message = channel.receive()
        except EOFError:
            return
        if message["do"] == "block":
            local.block(message["index"])
            channel.send({"states": {agent: local.actors[agent].get_state() for agent in agents}})
        elif message["do"] == "state":
            local.set_states({int(agent): state for agent, state in message["states"].items()})
        else:
            agent, index = message["agent"], message["index"]
            layers = unpack(local.shared.evaluated[agent], sizes)
            jobs.append((agent, index, evaluate(local.specs[agent], layers, index, message["episodes"])))
