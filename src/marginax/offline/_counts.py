"""One pass over a tabular log: the counts that every tabular estimator of values and ratios needs."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import scipy.sparse as sp

from marginax.offline._log import Log

FOLDS = 2  # episodes are split by their number for cross-fitting: doubly robust never meets its own data


class Counts:
    """Sufficient statistics of a tabular log, gathered chunk by chunk.

    For fold k (episode number modulo 2): `visits[k, x, a]`, `reward_sums[k, x, a]`, `starts[k, x]`, and the
    successor counts behind `transitions(k)`. Terminal steps have a visit and no successor, so that what is
    missing from a row of `transitions / visits` is the chance that the episode ends.

    >>> log = Log.from_episodes([dict(states=[0, 1, 0], actions=[0, 1], rewards=[0., 1.], terminal=True)])
    >>> counts = Counts(num_states=2, num_actions=2)
    >>> counts.update(log)
    >>> counts.visits.sum(axis=0).tolist(), counts.transitions().toarray().sum()
    ([[1.0, 0.0], [0.0, 1.0]], np.float64(1.0))
    """

    def __init__(self, num_states: int, num_actions: int) -> None:
        self.num_states, self.num_actions = num_states, num_actions
        pairs = num_states * num_actions
        self.visits = np.zeros((FOLDS, num_states, num_actions))
        self.reward_sums = np.zeros((FOLDS, num_states, num_actions))
        self.starts = np.zeros((FOLDS, num_states))
        self.behaviour_sums = np.zeros((num_states, num_actions))  # Σ of the logged μ(a|x), where logged
        self._successors: list[sp.csr_array] = [sp.csr_array((pairs, num_states)) for _ in range(FOLDS)]
        self.episodes = 0
        self.steps = 0
        self.truncated = 0
        self.longest = 0
        self.reward_min, self.reward_max = np.inf, -np.inf
        self.has_behaviour: bool | None = None

    def update(self, log: Log) -> None:
        """Adds a chunk of whole episodes.

        Raises:
            ValueError: for a state or action outside the tables, naming episode and step.
        """
        self._check(log)
        s, a = self.num_states, self.num_actions
        pairs = log.states * a + log.actions
        fold = np.repeat((self.episodes + np.arange(log.num_episodes)) % FOLDS, log.lengths)
        size = FOLDS * s * a
        key = fold * (s * a) + pairs
        self.visits += np.bincount(key, minlength=size).reshape(FOLDS, s, a)
        self.reward_sums += np.bincount(key, log.rewards, minlength=size).reshape(FOLDS, s, a)
        first = log.offsets[:-1]
        self.starts += np.bincount(fold[first] * s + log.states[first], minlength=FOLDS * s).reshape(FOLDS, s)
        goes_on = ~log.terminal
        for k in range(FOLDS):
            rows = goes_on & (fold == k)
            index = (pairs[rows], log.next_states[rows])
            found = sp.coo_array((np.ones(len(index[0])), index), shape=(s * a, s))
            self._successors[k] = self._successors[k] + found.tocsr()
        self.episodes += log.num_episodes
        self.steps += len(log)
        self.truncated += int((~log.terminal[log.last]).sum())
        self.longest = max(self.longest, int(log.lengths.max()))
        self.reward_min = min(self.reward_min, float(log.rewards.min()))
        self.reward_max = max(self.reward_max, float(log.rewards.max()))
        self.has_behaviour = log.behaviour is not None
        if log.behaviour is not None:
            self.behaviour_sums += np.bincount(pairs, log.behaviour, minlength=s * a).reshape(s, a)

    def _check(self, log: Log) -> None:
        if not log.tabular:
            raise ValueError("counts need states and actions that are indices; this log has observations")
        tables = (
            ("state", log.states, self.num_states, None),
            ("action", log.actions, self.num_actions, None),
            ("next state", log.next_states, self.num_states, log.terminal),
        )
        for name, values, size, ignore in tables:
            bad = values >= size
            if ignore is not None:
                bad &= ~ignore
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(
                    f"{log.where(row)}: {name} {values[row]} is outside the policy's table, "
                    f"which has {size} {name.split()[-1]}s"
                )
        if self.has_behaviour is not None and self.has_behaviour != (log.behaviour is not None):
            raise ValueError("behaviour probabilities are present in one part of the log and not in another")

    def transitions(self, fold: int | None = None) -> sp.csr_array:
        """[S*A, S] successor counts of one fold, or of all."""
        if fold is not None:
            return self._successors[fold]
        total = self._successors[0]
        for part in self._successors[1:]:
            total = total + part
        return total

    def behaviour(self) -> np.ndarray:
        """[S, A] behaviour policy by counts, N(x,a)/N(x); uniform where a state was never left."""
        n = self.visits.sum(axis=0)
        total = n.sum(axis=1, keepdims=True)
        return np.where(total > 0, n / np.maximum(total, 1), 1.0 / self.num_actions)


def count(chunks: Iterable[Log], num_states: int, num_actions: int) -> Counts:
    """The counts of a whole log, in one pass over its chunks."""
    counts = Counts(num_states, num_actions)
    for chunk in chunks:
        counts.update(chunk)
    if counts.steps == 0:
        raise ValueError("the log is empty: there is no transition in it")
    return counts
