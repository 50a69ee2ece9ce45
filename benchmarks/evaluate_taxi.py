"""Liu's taxi: is the verdict of use where the policy often leaves what the log has seen?

    python benchmarks/evaluate_taxi.py             # 20 logs

A taxi on a grid of 5 × 5 cells, where passengers wait at the corners, come and go: 2,000 states that never end (the environment of Liu et al., "Breaking
the curse of horizon", 2018, written anew). Policies are snapshots of Q-learning: the nineteenth makes logs of 200 episodes of 400 steps, the twentieth is
evaluated from them. Prints the relative error and the coverage of each estimator, and what the verdict says of each log.
"""

import argparse

import numpy as np
import scipy.sparse as sp

import marginax as mx

SIDE, DISCOUNT = 5, 0.99
CORNERS = [(0, 0), (0, 4), (4, 0), (4, 4)]
# The chance that a passenger appears at a corner, and that one leaves it.
COME, GO = (0.3, 0.05, 0.1, 0.2), (0.05, 0.1, 0.1, 0.05)
MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))
NAMES = (
    "certainty-equivalence",
    "state-ratio",
    "doubly-robust-state-ratio",
    "weighted-per-decision-is",
    "weighted-doubly-robust",
)


class Taxi:
    """The transition table [6 S, S], rewards [S, 6], and a way to draw from them."""

    def __init__(self) -> None:
        waiting = np.ones((16, 16))
        for before in range(16):
            for after in range(16):
                for k in range(4):
                    leaves, stays = (GO[k], 1 - GO[k]) if before >> k & 1 else (1 - COME[k], COME[k])
                    waiting[before, after] *= stays if after >> k & 1 else leaves
        self.states = SIDE * SIDE * 16 * 5
        self.rewards = np.full((self.states, 6), -1.0)
        rows, columns, chances = [], [], []
        for state in range(self.states):
            for action in range(6):
                place, queue, ends = self._effect(state, action)
                for after in range(16):
                    for goal, chance in ends:
                        rows.append(state * 6 + action)
                        columns.append((place * 16 + after) * 5 + goal)
                        chances.append(chance * waiting[queue, after])
        self.p = sp.csr_array((chances, (rows, columns)), shape=(self.states * 6, self.states))
        starts = self.p.indptr[:-1]
        total = np.cumsum(self.p.data)
        self.cumulative = total - np.repeat(total[starts] - self.p.data[starts], np.diff(self.p.indptr))

    def _effect(self, state: int, action: int):
        """The cell, who waits at the corners, and the goals (4: nobody in the taxi) with their chances, after an action."""
        rest, goal = divmod(state, 5)
        place, queue = divmod(rest, 16)
        x, y = divmod(place, SIDE)
        if action < 4:
            dx, dy = MOVES[action]
            x, y = min(max(x + dx, 0), SIDE - 1), min(max(y + dy, 0), SIDE - 1)
        elif (x, y) in CORNERS:
            corner = CORNERS.index((x, y))
            if action == 4 and goal == 4 and queue >> corner & 1:
                return place, queue ^ (1 << corner), [(k, 1 / 3) for k in range(4) if k != corner]
            if action == 5 and goal == corner:
                self.rewards[state, action] = 20.0
                goal = 4
        return x * SIDE + y, queue, [(goal, 1.0)]

    def step(self, rng, states, actions):
        row = states * 6 + actions
        first, end = self.p.indptr[row], self.p.indptr[row + 1]
        index = np.minimum(first[:, None] + np.arange(int((end - first).max())), end[:, None] - 1)
        drawn = rng.random(len(row))[:, None] * self.cumulative[end - 1][:, None]
        return self.p.indices[np.minimum(first + (self.cumulative[index] < drawn).sum(axis=1), end - 1)]

    def value(self, pi: np.ndarray) -> float:
        """From a state drawn uniformly."""
        average = sp.csr_array(
            (pi.ravel(), np.arange(pi.size), np.arange(0, pi.size + 1, 6)), shape=(self.states, pi.size)
        )
        kernel, rewards, v = average @ self.p, (pi * self.rewards).sum(axis=1), np.zeros(self.states)
        for _ in range(3000):
            v = rewards + DISCOUNT * (kernel @ v)
        return float(v.mean())


def softmax(q: np.ndarray) -> np.ndarray:
    z = np.exp((q - q.max(axis=1, keepdims=True)) / 2.0)
    return z / z.sum(axis=1, keepdims=True)


def draw(rng, probabilities: np.ndarray) -> np.ndarray:
    return np.minimum((rng.random(len(probabilities))[:, None] > probabilities.cumsum(axis=1)).sum(axis=1), 5)


def snapshots(taxi: Taxi) -> list[np.ndarray]:
    """Softmax policies after every 600 steps of Q-learning with fifty taxis."""
    rng, q, found = np.random.default_rng(0), np.zeros((taxi.states, 6)), []
    x = rng.integers(taxi.states, size=50)
    for _ in range(20):
        for _ in range(600):
            a = draw(rng, softmax(q[x]))
            y = taxi.step(rng, x, a)
            np.add.at(q, (x, a), 0.1 * (taxi.rewards[x, a] + DISCOUNT * q[y].max(axis=1) - q[x, a]))
            x = y
        found.append(softmax(q))
    return found


def log_of(taxi: Taxi, mu: np.ndarray, seed: int) -> mx.offline.Log:
    rng = np.random.default_rng(seed)
    states, actions = [rng.integers(taxi.states, size=200)], []
    for _ in range(400):
        actions.append(draw(rng, mu[states[-1]]))
        states.append(taxi.step(rng, states[-1], actions[-1]))
    episodes = []
    for x, a in zip(np.array(states).T, np.array(actions).T, strict=True):
        steps = {"states": x, "actions": a, "rewards": taxi.rewards[x[:-1], a], "behaviour": mu[x[:-1], a]}
        episodes.append({**steps, "terminal": False})
    return mx.offline.Log.from_episodes(episodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--logs", type=int, default=20)
    arguments = parser.parse_args()
    taxi = Taxi()
    mu, pi = snapshots(taxi)[-2:]
    truth = taxi.value(pi)
    print(f"value of the target {truth:.3f}, of the behaviour policy {taxi.value(mu):.3f}")
    errors: dict[str, list[tuple[float, bool]]] = {name: [] for name in NAMES}
    for k in range(arguments.logs):
        log = log_of(taxi, mu, 100 + k)
        result = mx.offline.evaluate(log, pi, discount=DISCOUNT, estimators=NAMES, policy_kind="table")
        for name, answer in result.answers.items():
            errors[name].append((answer.value / truth - 1, truth in answer.interval))
        verdict, lost = result.verdict, result.diagnostics["unsupported"]
        held = verdict.estimator is None or truth in result.answers[verdict.estimator].interval
        print(
            f"log {k}: {verdict.status}, {verdict.estimator}, leaves the log with {lost:.0%}, interval holds: {held}"
        )
    print("\n| estimator | relative error, root mean square | median | coverage |\n|---|---|---|---|")
    for name, found in errors.items():
        relative, covered = np.array(found, dtype=float).T
        size = f"{np.sqrt((relative**2).mean()):.3f} | {np.median(abs(relative)):.3f}"
        print(f"| {name} | {size} | {covered.mean():.0%} |")


if __name__ == "__main__":
    main()
