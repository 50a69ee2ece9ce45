"""Replay and targets of the agent, naively: lists of transitions, and sums written out step by step."""

import jax
import numpy as np

from marginax.deep import replay

sample = jax.jit(replay.sample, static_argnames=("batch", "length"))


def transitions(seed: int, count: int, observation_size: int = 2, action_size: int = 1) -> list[dict]:
    """A stream of episodes of random lengths, each ended by a terminal step or a time limit; states never repeat."""
    random = np.random.default_rng(seed)
    stream: list[dict] = []
    state = random.normal(size=observation_size)
    for _ in range(count):
        ending = random.random()
        following = random.normal(size=observation_size)
        stream.append(
            {
                "observation": state.astype(np.float32),
                "action": random.normal(size=action_size).astype(np.float32),
                "reward": np.float32(random.normal()),
                "terminal": ending < 0.15,
                "limit": 0.15 <= ending < 0.3,
                "log_behaviour": np.float32(random.normal()),
                "next_observation": following.astype(np.float32),
            }
        )
        state = random.normal(size=observation_size) if ending < 0.3 else following
    return stream


def sequence(stream: list[dict], start: int, length: int) -> list[dict]:
    """The transitions from `start` on: up to `length`, within the episode, within what has been added."""
    steps = []
    for step in stream[start : start + length]:
        steps.append(step)
        if step["terminal"] or step["limit"]:
            break
    return steps


def target(q, v_next, rewards, discounts, credit) -> float:
    """Q(x_0, a_0) plus the sum of γ^t · credit_t · (r_t + γ V_{t+1} - Q_t), one term at a time."""
    total, power = float(q[0]), 1.0
    for t in range(len(rewards)):
        bootstrap = discounts[t] * v_next[t] if discounts[t] else 0.0
        total += power * credit[t] * (rewards[t] + bootstrap - q[t])
        power *= discounts[t]
    return total


def rows_of(stream: list[dict]) -> np.ndarray:
    names = (
        "observation",
        "action",
        "reward",
        "terminal",
        "limit",
        "log_behaviour",
        "next_observation",
    )
    return replay.pack(*([step[name] for step in stream] for name in names))


_add = jax.jit(replay.add)


def filled(stream: list[dict], capacity: int, block: int = 5) -> replay.Replay:
    buffer = replay.empty(capacity, 2, 1)
    for i in range(0, len(stream), block):
        buffer = _add(buffer, rows_of(stream[i : i + block]))
    return buffer
