"""One agent's share of simulation: blocks of steps with exploration, and evaluation episodes.

Everything an agent draws comes from its own seed and the number of the block, so a block can be repeated and
does not depend on which process plays it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.simulators.policy import Layers, act, outputs, to_bounds
from marginax.simulators.protocol import Simulator
from marginax.simulators.registry import make

_Choose = Callable[[int, np.ndarray], Any]  # step of the block, observation -> action
_NOISE, _EVALUATION, _TRAINING = 0, 1, 2  # streams drawn from one seed


@dataclass(frozen=True)
class AgentSpec:
    """What a process must know to act for one agent.

    Attributes:
        simulator: Name for [`make`][marginax.simulators.make].
        seed: Seed of the simulator and of the exploration noise.
        noise: Standard deviation of the exploration noise, for actions scaled to [-1, 1].
        random_steps: First steps, drawn uniformly from the action box or the discrete actions.
        epsilons: For discrete actions: probability with which exploration draws an action uniformly, in each of the
            simulators that are played in turn.
        epsilon_steps: For discrete actions: steps over which that probability falls from 1.
        softmax: For discrete actions: whether the outputs of the network are the logits of a policy that explores by
            itself, instead of values whose best is taken.
        allow_import: Accept a simulator `module:Id`, as [`make`][marginax.simulators.make] does.

    >>> AgentSpec("Pendulum-v1", seed=0).noise
    0.1
    """

    simulator: str
    seed: int
    noise: float = 0.1
    random_steps: int = 10_000
    epsilons: Sequence[float] = (0.05,)
    epsilon_steps: int = 0
    softmax: bool = False
    allow_import: bool = False

    def __post_init__(self) -> None:
        for name in ("seed", "random_steps", "epsilon_steps"):
            checks.count(name, getattr(self, name), 0)
        checks.positive("noise", self.noise)
        if not len(self.epsilons):
            raise ValueError("epsilons must not be empty")
        for i, epsilon in enumerate(self.epsilons):
            checks.fraction(f"epsilons[{i}]", epsilon)

    def make(self, seed: int) -> Simulator:
        """A simulator of this agent's kind."""
        return make(self.simulator, seed, allow_import=self.allow_import)


class Transitions:
    """Consecutive transitions as packed float32 rows `[…, steps, width]`, and their columns as views.

    A row holds the observation, the action, the reward, whether the step ended the episode, whether the time
    limit cut it off, the action's log-density (or log-probability) under the behaviour policy, and the true successor.

    Actions are scaled to [-1, 1] and kept as they were drawn, before clipping; so is their density: that of
    the Gaussian around the policy's output, or of the uniform law in the random first steps. A discrete action is
    one number, its index, and has the probability that the ε-greedy policy gave it.

    >>> block = Transitions(np.zeros((50, row_width(3, 1)), np.float32), 3)
    >>> block.observations.shape, block.actions.shape, block.rewards.shape
    ((50, 3), (50, 1), (50,))
    """

    def __init__(self, rows: Any, observation_size: int) -> None:
        n, m = observation_size, rows.shape[-1] - 2 * observation_size - 4
        self.rows = rows
        self.observations = rows[..., :n]
        self.actions = rows[..., n : n + m]
        self.rewards = rows[..., n + m]
        self.terminated = rows[..., n + m + 1]
        self.truncated = rows[..., n + m + 2]
        self.log_behaviour = rows[..., n + m + 3]
        self.next_observations = rows[..., n + m + 4 :]


def row_width(observation_size: int, action_size: int) -> int:
    """Numbers in one row of a `Transitions`."""
    return 2 * observation_size + action_size + 4


class Actor:
    """Plays one agent's training episodes, block after block.

    >>> from marginax.simulators.policy import unpack
    >>> actor = Actor(AgentSpec("Pendulum-v1", seed=0, random_steps=0))
    >>> block = Transitions(np.zeros((5, row_width(3, 1)), np.float32), 3)
    >>> actor.play(0, unpack(np.zeros(4, np.float32), [3, 1]), block)
    >>> bool(np.all(block.next_observations[:-1] == block.observations[1:]))
    True
    """

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        seeds = np.random.SeedSequence((spec.seed, _TRAINING)).generate_state(len(spec.epsilons))
        self.simulators = [spec.make(int(seed)) for seed in seeds]
        self.simulator = self.simulators[0]
        self._observations: list[np.ndarray] = []

    def play(self, index: int, layers: Layers, out: Transitions) -> None:
        """Play block number `index` with the given policy and write it to `out` (rows `[steps, width]`).

        Several simulators take steps in turn: row t belongs to simulator t modulo their number.
        """
        steps, count = len(out.rows), len(self.simulators)
        if steps % count:
            raise ValueError(f"a block's {steps} steps must be a multiple of the {count} simulators")
        explore = self._gaussian if self.simulator.num_actions is None else self._epsilon_greedy
        choose = explore(index, steps, layers, out)
        observations = self._observations or [simulator.reset() for simulator in self.simulators]
        for t in range(steps):
            i = t % count
            simulator, observation = self.simulators[i], observations[i]
            out.observations[t] = observation
            observation, out.rewards[t], terminated, truncated = simulator.step(choose(t, observation))
            out.next_observations[t] = observation
            out.terminated[t] = terminated
            out.truncated[t] = truncated and not terminated
            observations[i] = simulator.reset() if terminated or truncated else observation
        self._observations = observations

    def _gaussian(self, index: int, steps: int, layers: Layers, out: Transitions) -> _Choose:
        """The policy with Gaussian noise, uniform at first; actions in the simulator's bounds."""
        simulator, size = self.simulator, self.simulator.action_size
        low, high = simulator.action_low, simulator.action_high
        random = max(0, min(steps, self.spec.random_steps - index * steps))
        generator = np.random.default_rng((self.spec.seed, _NOISE, index))
        normal = generator.standard_normal((steps, size), np.float32)
        uniform = (2 * generator.random((steps, size), np.float32) - 1).astype(np.float32)
        noise = np.float32(self.spec.noise) * normal
        constant = size * math.log(self.spec.noise * math.sqrt(2 * math.pi))
        out.log_behaviour[:random] = -size * math.log(2)
        out.log_behaviour[random:] = -0.5 * np.sum(normal[random:] ** 2, axis=-1) - constant

        def choose(t: int, observation: np.ndarray) -> np.ndarray:
            action = uniform[t] if t < random else act(layers, observation) + noise[t]
            out.actions[t] = action
            return to_bounds(action, low, high)

        return choose

    def _epsilon_greedy(self, index: int, steps: int, layers: Layers, out: Transitions) -> _Choose:
        """The best action by the network's values (or one drawn from its softmax), or with probability ε any."""
        spec, count = self.spec, self.simulator.num_actions
        assert count is not None
        if len(layers[-1][1]) != count:
            raise ValueError(
                f"{spec.simulator} has {count} discrete actions, but the policy has {len(layers[-1][1])} outputs: "
                "an agent for discrete actions is needed"
            )
        generator = np.random.default_rng((spec.seed, _NOISE, index))
        uniform, drawn = generator.random(steps), generator.integers(count, size=steps)
        number = index * steps + np.arange(steps)
        last = np.resize(spec.epsilons, steps)
        falling = 1 - (1 - last) * number / max(spec.epsilon_steps, 1)
        epsilon = np.where(number < spec.epsilon_steps, falling, last)
        epsilon[number < spec.random_steps] = 1.0
        one_hot = np.eye(count)

        def choose(t: int, observation: np.ndarray) -> int:
            found = outputs(layers, observation)
            if spec.softmax:
                mass = np.exp(found - found.max())
                pi = mass / mass.sum()
                within = (uniform[t] - epsilon[t]) / (1 - epsilon[t]) if epsilon[t] < 1 else 0.0
                chosen = min(int(np.searchsorted(np.cumsum(pi), within, side="right")), count - 1)
            else:
                chosen = int(found.argmax())
                pi = one_hot[chosen]
            action = int(drawn[t]) if uniform[t] < epsilon[t] else chosen
            out.actions[t] = action
            out.log_behaviour[t] = math.log(epsilon[t] / count + (1 - epsilon[t]) * pi[action])
            return action

        return choose

    def get_state(self) -> dict[str, Any]:
        """The simulators' states and the observations that the next actions answer to."""
        out: dict[str, Any] = {}
        for i, observation in enumerate(self._observations):
            state = {**self.simulators[i].get_state(), "observation": observation}
            out |= {f"{_lead(i)}{name}": value for name, value in state.items()}
        return out

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned (an empty state: from the very beginning)."""
        if not state:
            raise ValueError("state must not be empty: make a new Actor instead")
        parts: list[dict[str, Any]] = [{} for _ in self.simulators]
        for name, value in state.items():
            number, mark, rest = name.rpartition("@")
            parts[int(number) if mark else 0][rest] = value
        self._observations = [np.asarray(part.pop("observation"), np.float32) for part in parts]
        for simulator, part in zip(self.simulators, parts, strict=True):
            simulator.set_state(part)


def _lead(i: int) -> str:
    """What names in the state of simulator i begin with: nothing for the first."""
    return f"{i}@" if i else ""


def evaluation_seeds(seed: int, index: int, episodes: int) -> np.ndarray:
    """Seeds of the simulators of evaluation number `index`, the same first ones however many there are.

    >>> bool(evaluation_seeds(0, 7, 3)[0] == evaluation_seeds(0, 7, 1)[0])
    True
    """
    return np.random.SeedSequence((seed, _EVALUATION, index)).generate_state(episodes)


def evaluate(spec: AgentSpec, layers: Layers, index: int, episodes: int) -> Iterator[np.ndarray | None]:
    """Returns of the deterministic policy over whole episodes side by side, on simulators of their own.

    Yields None after every ten steps, so that the caller may do something more urgent, and the
    returns `[episodes]`, float64, at the end. They depend on the agent's seed, `index` and the policy alone.

    >>> from marginax.simulators.policy import unpack
    >>> policy = unpack(np.zeros(4, np.float32), [3, 1])
    >>> outcomes = list(evaluate(AgentSpec("Pendulum-v1", seed=0), policy, index=0, episodes=2))
    >>> len(outcomes), outcomes[-1].shape
    (22, (2,))
    """
    simulators, starts = [], []
    for seed in evaluation_seeds(spec.seed, index, episodes):
        simulators.append(spec.make(int(seed)))
        starts.append(simulators[-1].reset())
        yield None
    low, high = simulators[0].action_low, simulators[0].action_high
    observations = np.stack(starts)
    returns, alive = np.zeros(episodes), np.ones(episodes, bool)
    for step in range(simulators[0].time_limit):
        if simulators[0].num_actions is None:
            actions = to_bounds(act(layers, observations), low, high)
        else:
            actions = np.argmax(outputs(layers, observations), axis=-1)
        for i in np.flatnonzero(alive):
            observations[i], reward, terminated, truncated = simulators[i].step(actions[i])
            returns[i] += reward
            alive[i] = not (terminated or truncated)
        if not alive.any():
            break
        if step % 10 == 9:
            yield None
    for simulator in simulators:
        simulator.close()
    yield returns
