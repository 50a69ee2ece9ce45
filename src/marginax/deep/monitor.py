"""What is measured of agents in training: the returns of their episodes, the metrics of their updates, and who failed."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from marginax.deep.metrics import known_number
from marginax.deep.run_config import PopulationConfig
from marginax.simulators import Transitions


class Monitor:
    """Takes in blocks of transitions and of updates, and turns them into a line of metrics for each agent.

    Args:
        config: What is trained.
        names: The metrics of an update.

    Attributes:
        failures: Step and reason of every agent that failed, by its number.
        largest_reward: Largest |reward| that each agent has met.
        returns: Rewards so far of the episodes under way, `[agents, copies]`.
        finished_returns: Returns of the training episodes of each agent that ended since its last line.
        learned: Metrics of each agent's blocks of updates since its last line.
    """

    def __init__(self, config: PopulationConfig, names: Sequence[str]) -> None:
        self.config, self.names = config, names
        self.failures: dict[int, dict[str, Any]] = {}
        count = len(config.agents)
        self.largest_reward = np.zeros(count)
        self.returns = np.zeros((count, config.first.copies))
        self.finished_returns: list[list[float]] = [[] for _ in range(count)]
        self.learned: list[list[list[float]]] = [[] for _ in range(count)]
        settings = [config.groups[label] for label, _ in config.agents]
        self._factors = np.array([each.divergence_factor for each in settings])
        # Of |Q|, for rewards up to 1.
        self._q_bounds = self._factors / np.array([1 - each.discount for each in settings])

    def watch(self, transitions: Transitions, start: int) -> None:
        """Take in a block that begins after `start` steps; an agent whose simulator returns NaN or infinity fails."""
        for agent, row, column in np.argwhere(~np.isfinite(transitions.rows)):
            reason = f"the simulator returned {transitions.rows[agent, row, column]}"
            self._fail(int(agent), start + int(row), reason)
        self.largest_reward = np.fmax(self.largest_reward, np.abs(transitions.rewards).max(axis=1))
        ends = (transitions.terminated + transitions.truncated) > 0
        for agent, rewards in enumerate(transitions.rewards):
            for t, (reward, ended) in enumerate(zip(rewards.tolist(), ends[agent].tolist(), strict=True)):
                place = (agent, t % self.returns.shape[1])
                self.returns[place] += reward
                if ended:
                    self.finished_returns[agent].append(float(self.returns[place]))
                    self.returns[place] = 0.0

    def note_earned(self, mean_returns: np.ndarray, largest_reward: np.ndarray) -> None:
        """In place of `watch` where blocks stay on the accelerator: the mean return of episodes that ended, or NaN; the largest |reward|."""
        self.finished_returns = [[] if np.isnan(x) else [float(x)] for x in mean_returns]
        self.largest_reward = largest_reward

    def check(self, policies: np.ndarray, metrics: np.ndarray, step: int) -> None:
        """Take in the updates that end after `step` steps; an agent whose numbers grow beyond all bounds fails."""
        for agent in np.flatnonzero(~np.isfinite(policies).all(axis=1)):
            self._fail(int(agent), step, "the policy's parameters were no longer finite")
        size = metrics[:, self.names.index("q_size")]
        limit = self._q_bounds * np.maximum(self.largest_reward, 1e-3)
        for agent in np.flatnonzero(size > limit):
            allowed = (
                f"{self._factors[agent]:g} times what rewards up to {self.largest_reward[agent]:.3g} allow"
            )
            reason = f"the mean of |Q| reached {size[agent]:.3g}, above {limit[agent]:.3g} ({allowed}),"
            self._fail(int(agent), step, reason)
        for learned, row in zip(self.learned, metrics.tolist(), strict=True):
            learned.append(row)

    def take_lines(self, step: int) -> list[dict[str, Any]]:
        """A line of metrics for each agent on what came in since the last one; its evaluation is yet to come."""
        lines = []
        for agent, (label, seed) in enumerate(self.config.agents):
            recent, learned = self.finished_returns[agent], np.array(self.learned[agent])
            line = {"operator": label, "seed": seed, "step": step, "return": None, "returns": None}
            line["train_return"] = known_number(np.mean(recent)) if recent else None
            line["failed_at"] = self.failures[agent]["step"] if agent in self.failures else None
            for name, values in zip(self.names, learned.T, strict=True):
                known = values[np.isfinite(values)]
                summary = np.max if name == "weight_max" else np.mean
                line[name] = float(summary(known)) if known.size else None
            self.finished_returns[agent], self.learned[agent] = [], []
            lines.append(line)
        return lines

    def _fail(self, agent: int, step: int, reason: str) -> None:
        """Note why an agent failed; the first reason counts."""
        if agent not in self.failures:
            self.failures[agent] = {"step": step, "reason": f"{reason} at step {step}"}
