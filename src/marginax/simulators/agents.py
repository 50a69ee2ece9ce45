"""One agent's share of simulation: blocks of steps with exploration, and evaluation episodes.

Everything an agent draws comes from its own seed and the number of the block, so a block can be repeated and
does not depend on which process plays it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from marginax.simulators.interface import make
from marginax.simulators.policy import Layers, act

_NOISE, _EVALUATION, _TRAINING = 0, 1, 2  # streams drawn from one seed


@dataclass(frozen=True)
class AgentSpec:
    """What a process must know to act for one agent.

    Attributes:
        simulator: Name for [`make`][marginax.simulators.make].
        seed: Seed of the simulator and of the exploration noise.
        noise: Standard deviation of the exploration noise, as a fraction of half the action range.
        random_steps: First steps, drawn uniformly from the action box.
    """

    simulator: str
    seed: int
    noise: float = 0.1
    random_steps: int = 10_000


class Block(NamedTuple):
    """Consecutive transitions of one agent `[steps, …]` or of many `[agents, steps, …]`, all float32.

    `draws` is the action before it was clipped to the bounds, `means` the mean of the Gaussian it was drawn
    from and `log_densities` its log-density under that Gaussian (under the uniform law for the random first
    steps, whose mean is the middle of the box). `next_observations` is the true successor, also where an
    episode ends.
    """

    observations: np.ndarray
    actions: np.ndarray
    draws: np.ndarray
    means: np.ndarray
    log_densities: np.ndarray
    rewards: np.ndarray
    next_observations: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


def block_shapes(observation_size: int, action_size: int) -> list[tuple[int, ...]]:
    """Shape of one step of each field of a `Block`."""
    o, a = (observation_size,), (action_size,)
    return [o, a, a, a, (), (), o, (), ()]


def gaussian_log_density(draws: np.ndarray, means: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Log-density of a Gaussian with independent entries, summed over the last axis.

    >>> gaussian_log_density(np.zeros((1, 2)), np.zeros(2), np.ones(2)).round(4)
    array([-1.8379])
    """
    terms = 0.5 * ((draws - means) / scale) ** 2 + np.log(scale * np.sqrt(2 * np.pi))
    return np.asarray(-np.sum(terms, axis=-1))


class Actor:
    """Plays one agent's training episodes, block after block."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        seed = np.random.SeedSequence((spec.seed, _TRAINING)).generate_state(1)[0]
        self.simulator = make(spec.simulator, int(seed))
        self.low, self.high = self.simulator.action_low, self.simulator.action_high
        self.scale = (np.float32(spec.noise) * (self.high - self.low) / 2).astype(np.float32)
        self._observation: np.ndarray | None = None

    def play(self, index: int, layers: Layers, out: Block) -> None:
        """Play block number `index` with the given policy and write it to `out` (fields `[steps, …]`)."""
        steps = out.rewards.shape[0]
        simulator = self.simulator
        generator = np.random.default_rng((self.spec.seed, _NOISE, index))
        noise = generator.standard_normal((steps, simulator.action_size), np.float32) * self.scale
        uniform = generator.uniform(self.low, self.high, (steps, simulator.action_size)).astype(np.float32)
        random = max(0, min(steps, self.spec.random_steps - index * steps))
        observation = simulator.reset() if self._observation is None else self._observation
        for t in range(steps):
            out.observations[t] = observation
            if t < random:
                out.means[t] = (self.low + self.high) / 2
                draw = action = uniform[t]
            else:
                mean = act(layers, observation, self.low, self.high)
                out.means[t] = mean
                draw = mean + noise[t]
                action = np.minimum(np.maximum(draw, self.low), self.high)
            out.draws[t] = draw
            out.actions[t] = action
            observation, out.rewards[t], terminated, truncated = simulator.step(action)
            out.next_observations[t] = observation
            out.terminated[t] = terminated
            out.truncated[t] = truncated and not terminated
            if terminated or truncated:
                observation = simulator.reset()
        self._observation = observation
        out.log_densities[:random] = -np.sum(np.log(self.high - self.low))
        out.log_densities[random:] = gaussian_log_density(out.draws[random:], out.means[random:], self.scale)

    def get_state(self) -> dict[str, Any]:
        """The simulator's state and the observation the next action answers to."""
        if self._observation is None:
            return {}
        return {**self.simulator.get_state(), "observation": self._observation}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from what `get_state` returned (an empty state: from the very beginning)."""
        if not state:
            raise ValueError("state must not be empty: make a new Actor instead")
        self._observation = np.asarray(state["observation"], np.float32)
        self.simulator.set_state({k: v for k, v in state.items() if k != "observation"})


def evaluate(
    spec: AgentSpec, layers: Layers, index: int, episodes: int, slice_steps: int = 50
) -> Iterator[np.ndarray | None]:
    """Returns of the deterministic policy over whole episodes side by side, on simulators of their own.

    Yields None after every `slice_steps` steps, so that the caller may do something more urgent, and the
    returns `[episodes]`, float64, at the end. They depend on the agent's seed, `index` and the policy alone.
    """
    seeds = np.random.SeedSequence((spec.seed, _EVALUATION, index)).generate_state(episodes)
    simulators = [make(spec.simulator, int(seed)) for seed in seeds]
    low, high = simulators[0].action_low, simulators[0].action_high
    observations = np.stack([simulator.reset() for simulator in simulators])
    returns, alive = np.zeros(episodes), np.ones(episodes, bool)
    for step in range(simulators[0].time_limit):
        actions = act(layers, observations, low, high)
        for i in np.flatnonzero(alive):
            observations[i], reward, terminated, truncated = simulators[i].step(actions[i])
            returns[i] += reward
            alive[i] = not (terminated or truncated)
        if not alive.any():
            break
        if step % slice_steps == slice_steps - 1:
            yield None
    for simulator in simulators:
        simulator.close()
    yield returns
