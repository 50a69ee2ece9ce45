"""A log of episodes as flat arrays: what every estimator of this room reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

_LARGEST_LOG = 300.0  # products of ratios are cut at e^300, so that their squares stay finite


@dataclass(frozen=True)
class Log:
    """Whole episodes laid end to end; row n is the transition (x_n, a_n, r_n, x'_n).

    Episode i occupies rows `offsets[i]` to `offsets[i+1] - 1`. The last row of each episode is either
    terminal (the process ended: nothing follows) or truncated (it went on, the log does not).

    Args:
        states: [N] integers, or [N, D] observations.
        actions: [N] integers, or [N, K] continuous actions.
        rewards: [N].
        next_states: like `states`; not read where `terminal`.
        terminal: [N] bool.
        offsets: [E + 1] first row of each episode, then N.
        behaviour: [N] probability (or density) μ(a_n|x_n) with which the action was drawn, or None.
        rows: [N] row of the file each transition came from, for policies given as a file of probabilities.
        names: episode names for error messages; None counts from 0.

    >>> log = Log.from_episodes([dict(states=[0, 1, 0], actions=[0, 1], rewards=[0., 1.], terminal=False)])
    >>> log.num_episodes, len(log), log.next_states.tolist(), log.truncated.tolist()
    (1, 2, [1, 0], [False, True])
    """

    states: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    next_states: np.ndarray
    terminal: np.ndarray
    offsets: np.ndarray
    behaviour: np.ndarray | None = None
    rows: np.ndarray | None = None
    names: Sequence[Any] | np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def num_episodes(self) -> int:
        """Number of episodes."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[E] number of transitions in each episode."""
        return np.diff(self.offsets)

    @property
    def last(self) -> np.ndarray:
        """[E] row of the last transition of each episode."""
        return self.offsets[1:] - 1

    @property
    def truncated(self) -> np.ndarray:
        """[N] bool: the last row of an episode that did not terminate."""
        flags = np.zeros(len(self), dtype=bool)
        flags[self.last] = ~self.terminal[self.last]
        return flags

    @property
    def times(self) -> np.ndarray:
        """[N] step t of each row within its episode, from 0."""
        return np.arange(len(self)) - np.repeat(self.offsets[:-1], self.lengths)

    @property
    def tabular(self) -> bool:
        """Whether states and actions are indices."""
        return self.states.ndim == 1 and self.actions.ndim == 1 and self.states.dtype.kind in "iu"

    @property
    def discrete_actions(self) -> bool:
        """Whether actions are indices."""
        return self.actions.ndim == 1 and self.actions.dtype.kind in "iu"

    def name(self, episode: int) -> str:
        """The name of an episode, as error messages give it."""
        return str(episode if self.names is None else self.names[episode])

    def sums(self, x: np.ndarray) -> np.ndarray:
        """[E] sum of `x` [N] over each episode."""
        return np.add.reduceat(x, self.offsets[:-1])

    def products(self, ratios: np.ndarray) -> np.ndarray:
        """[N] running product of `ratios` within each episode, up to and including each row."""
        zero = ratios == 0
        logs = np.log(np.where(zero, 1.0, ratios))
        total = np.cumsum(logs)
        before = np.repeat(total[self.offsets[:-1]] - logs[self.offsets[:-1]], self.lengths)
        products = np.exp(np.minimum(total - before, _LARGEST_LOG))
        if zero.any():
            seen = np.cumsum(zero)
            first = np.repeat(seen[self.offsets[:-1]] - zero[self.offsets[:-1]], self.lengths)
            products[seen > first] = 0.0
        return products

    def select(self, episodes: ArrayLike) -> Log:
        """The log of the given episodes, in the given order (repeats allowed)."""
        chosen = np.asarray(episodes, dtype=np.int64)
        lengths = self.lengths[chosen]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        rows = np.arange(offsets[-1]) + np.repeat(self.offsets[chosen] - offsets[:-1], lengths)

        def take(x: np.ndarray | None) -> np.ndarray | None:
            return None if x is None else x[rows]

        return Log(
            states=self.states[rows],
            actions=self.actions[rows],
            rewards=self.rewards[rows],
            next_states=self.next_states[rows],
            terminal=self.terminal[rows],
            offsets=offsets,
            behaviour=take(self.behaviour),
            rows=take(self.rows),
            names=[self.name(int(i)) for i in chosen],
        )

    @staticmethod
    def from_episodes(episodes: Sequence[dict[str, Any]]) -> Log:
        """Builds a log from episodes given one by one.

        Args:
            episodes: each a dict with `states` (N or N+1 of them), `actions` [N], `rewards` [N], `terminal`
                (did the last step end the episode?) and, if known, `behaviour` [N].

        Raises:
            ValueError: naming the episode and step where the data are broken.
        """
        builder = Builder()
        for i, episode in enumerate(episodes):
            n = len(episode["rewards"])
            terminal = np.zeros(n, dtype=bool)
            if n:
                terminal[-1] = bool(episode["terminal"])
            builder.add(
                i,
                np.asarray(episode["states"]),
                np.asarray(episode["actions"]),
                np.asarray(episode["rewards"], dtype=np.float64),
                terminal,
                behaviour=episode.get("behaviour"),
            )
        return builder.build()

    @staticmethod
    def from_trajectories(batch: Any) -> Log:
        """Builds a log from a `marginax.trajectories.Trajectory`, one sequence [T] or a batch [B, T].

        Each sequence is cut into episodes where a step ended (`discounts` 0) or was `truncated`; the end of
        a sequence that did neither is a truncation. Steps that are not `valid` are dropped.
        """
        fields = ("states", "actions", "rewards", "discounts", "next_states", "truncated", "valid")
        columns = {k: np.atleast_2d(np.asarray(getattr(batch, k))) for k in fields}
        valid = columns.pop("valid").astype(bool)
        last = np.zeros_like(valid)
        ends = valid.shape[1] - 1 - np.argmax(valid[:, ::-1], axis=1)
        last[np.arange(len(valid)), ends] = True
        flat = {k: v[valid] for k, v in columns.items()}
        if not valid.any():
            raise ValueError("the trajectories hold no valid step")
        done = (flat["discounts"] == 0) | flat["truncated"].astype(bool) | last[valid]
        behaviour = None
        if getattr(batch, "behaviour", None) is not None:
            behaviour = np.atleast_2d(np.asarray(batch.behaviour))[valid].astype(np.float64)
        return Log(
            states=flat["states"].astype(np.int64),
            actions=flat["actions"].astype(np.int64),
            rewards=flat["rewards"].astype(np.float64),
            next_states=flat["next_states"].astype(np.int64),
            terminal=flat["discounts"] == 0,
            offsets=np.concatenate([[0], np.flatnonzero(done) + 1]),
            behaviour=behaviour,
        ).checked()

    def checked(self) -> Log:
        """This log, after the checks that every source shares.

        Raises:
            ValueError: naming the episode and step of the first broken entry.
        """
        if len(self) == 0:
            raise ValueError("the log is empty: there is no transition in it")
        self._refuse(~np.isfinite(self.rewards), "reward {} is not a finite number", self.rewards)
        for name, values in (("state", self.states), ("action", self.actions)):
            if values.ndim == 1 and values.dtype.kind in "iu":
                self._refuse(values < 0, name + " {} is negative", values)
            else:
                bad = ~np.isfinite(values).reshape(len(self), -1).all(axis=1)
                self._refuse(bad, name + " {} is not finite", values)
        if self.next_states.ndim == 1:
            self._refuse(
                (self.next_states < 0) & ~self.terminal, "next state {} is negative", self.next_states
            )
        else:
            bad = ~np.isfinite(self.next_states).all(axis=1) & ~self.terminal
            self._refuse(bad, "next observation {} is not finite", self.next_states)
        early = self.terminal.copy()
        early[self.last] = False
        self._refuse(early, "the step is terminal, yet more steps of the episode follow", self.terminal)
        if self.behaviour is not None:
            mu = self.behaviour
            self._refuse(np.isnan(mu), "behaviour probability is missing (NaN)", mu)
            self._refuse(mu < 0, "behaviour probability {} is negative; is it a log-probability?", mu)
            self._refuse(mu == 0, "behaviour probability is 0 for an action that was taken", mu)
            if self.discrete_actions:
                self._refuse(mu > 1 + 1e-6, "behaviour probability {} is above 1", mu)
            self._refuse(~np.isfinite(mu), "behaviour density {} is not finite", mu)
        return self

    def _refuse(self, bad: np.ndarray, message: str, values: np.ndarray) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f"{self.where(row)}: {message.format(values[row])}")

    def where(self, row: int) -> str:
        """`episode E, step T` of a row, for messages."""
        episode = int(np.searchsorted(self.offsets, row, side="right")) - 1
        return f"episode {self.name(episode)}, step {row - int(self.offsets[episode])}"


class Builder:
    """Collects episodes one by one, checks their lengths, and lays them end to end.

    `dropped` counts the last steps set aside because a truncated episode came without its final
    observation: where it went is unknown, so the step cannot be used by any method that bootstraps.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[Any, ...]] = []
        self._names: list[Any] = []
        self.steps = 0
        self.dropped = 0

    def add(
        self,
        name: Any,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        terminal: np.ndarray,
        *,
        behaviour: Any = None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Adds an episode of n transitions with n or n + 1 states."""
        n = len(rewards)
        if n == 0:
            raise ValueError(f"episode {name}: it has no steps")
        if len(actions) != n:
            raise ValueError(f"episode {name}: {len(actions)} actions for {n} rewards")
        if len(states) not in (n, n + 1):
            raise ValueError(
                f"episode {name}: {len(states)} observations for {n} steps; expected {n} or {n + 1}"
            )
        mu = None if behaviour is None else np.asarray(behaviour, dtype=np.float64)
        if mu is not None and mu.shape != (n,):
            raise ValueError(f"episode {name}: behaviour has shape {mu.shape} for {n} steps")
        following = states[1:]
        if len(states) == n:
            if terminal[-1]:
                following = np.concatenate([following, states[-1:]])
            else:
                self.dropped += 1
                n -= 1
                if n == 0:
                    return
        self._parts.append(
            (
                states[:n],
                actions[:n],
                rewards[:n],
                following[:n],
                terminal[:n],
                None if mu is None else mu[:n],
                None if rows is None else rows[:n],
            )
        )
        self._names.append(name)
        self.steps += n

    def build(self) -> Log:
        """The checked log of all episodes added so far."""
        if not self._parts:
            raise ValueError("the log is empty: there is no transition in it")
        states, actions, rewards, following, terminal, behaviour, rows = zip(*self._parts, strict=True)
        known = [m is not None for m in behaviour]
        if any(known) and not all(known):
            name = self._names[known.index(False)]
            raise ValueError(f"episode {name}: behaviour probabilities are missing here but not elsewhere")
        shapes = {np.shape(x)[1:] for x in states}
        if len(shapes) > 1:
            raise ValueError(f"observations have different shapes in different episodes: {sorted(shapes)}")
        return Log(
            states=as_indices_or_floats(np.concatenate(states)),
            actions=as_indices_or_floats(np.concatenate(actions)),
            rewards=np.concatenate(rewards).astype(np.float64),
            next_states=as_indices_or_floats(np.concatenate(following)),
            terminal=np.concatenate(terminal).astype(bool),
            offsets=np.concatenate([[0], np.cumsum([len(r) for r in rewards])]),
            behaviour=np.concatenate(behaviour) if all(known) else None,
            rows=None if rows[0] is None else np.concatenate(rows),
            names=self._names,
        ).checked()


def as_indices_or_floats(x: np.ndarray) -> np.ndarray:
    """Indices as int64 [N]; anything else as float32 [N, D] (float64 is kept)."""
    x = np.asarray(x)
    if x.dtype.kind in "iub" and (x.ndim == 1 or (x.ndim == 2 and x.shape[1] == 1)):
        return x.reshape(len(x)).astype(np.int64)
    floats = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    return floats.reshape(len(x), -1)
