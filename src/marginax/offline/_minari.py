"""Minari datasets, by id or by folder, read episode by episode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from marginax.offline._log import Builder, Log
from marginax.offline._sources import CHUNK, Source

BEHAVIOUR_KEYS = (
    "behaviour",
    "behavior",
    "behaviour_probability",
    "behavior_probability",
    "action_probability",
)


class MinariSource(Source):
    """A Minari dataset as a log.

    Discrete spaces give indices, boxes give vectors. Behaviour probabilities are taken from the step infos,
    under one of the names in `BEHAVIOUR_KEYS`, if they are there. Minari keeps N + 1 observations for N
    steps; N are accepted, and the last step of a truncated episode is then set aside.
    """

    def __init__(self, data: str, chunk: int = CHUNK) -> None:
        super().__init__()
        self.dataset = _open(data)
        self.name, self.chunk = str(self.dataset.id), chunk
        self.total = int(self.dataset.total_steps)
        states = _size(self.dataset.observation_space)
        actions = _size(self.dataset.action_space)
        self.sizes = (states, actions) if states and actions else None
        self._offset = (
            int(getattr(self.dataset.observation_space, "start", 0)),
            int(getattr(self.dataset.action_space, "start", 0)),
        )

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes."""
        builder, dropped, row = Builder(), 0, 0
        for episode in self.dataset.iterate_episodes():
            self._add(builder, episode, row)
            row += len(episode.rewards)
            if builder.steps >= self.chunk:
                yield builder.build()
                dropped += builder.dropped
                builder = Builder()
        dropped += builder.dropped
        if builder.steps or row == 0:
            yield builder.build()
        if dropped:
            self.notes = [
                f"{dropped} truncated episodes came without their final observation: their last step was set aside"
            ]

    def _add(self, builder: Builder, episode: Any, row: int) -> None:
        rewards = np.asarray(episode.rewards, dtype=np.float64)
        terminal = np.asarray(episode.terminations, dtype=bool)
        truncated = np.asarray(episode.truncations, dtype=bool)
        n = len(rewards)
        for name, flags in (("terminations", terminal), ("truncations", truncated)):
            if len(flags) != n:
                raise ValueError(f"episode {episode.id}: {len(flags)} {name} for {n} rewards")
        if truncated[:-1].any():
            step = int(np.argmax(truncated))
            raise ValueError(
                f"episode {episode.id}, step {step}: the step is truncated, yet more steps follow"
            )
        if n and not terminal[-1] and not truncated[-1]:
            raise ValueError(
                f"episode {episode.id}, step {n - 1}: the last step is neither terminal nor truncated"
            )
        builder.add(
            episode.id,
            _flat(episode.observations, self._offset[0]),
            _flat(episode.actions, self._offset[1]),
            rewards,
            terminal,
            behaviour=_behaviour(episode, n),
            rows=row + np.arange(n),
        )


def _open(data: str) -> Any:
    try:
        import minari
    except ImportError as error:
        raise ImportError('Minari datasets need `pip install "marginax[offline]"`') from error
    folder = Path(data)
    for candidate in (folder / "data", folder):
        if (candidate / "metadata.json").is_file():
            return minari.MinariDataset(candidate)
    try:
        return minari.load_dataset(data)
    except (FileNotFoundError, ValueError, TypeError) as error:
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        raise FileNotFoundError(
            f"{data!r} is neither a .parquet or .csv file, nor a Minari folder, nor the id of a dataset in {root}"
        ) from error


def _size(space: Any) -> int | None:
    return int(space.n) if hasattr(space, "n") and getattr(space, "shape", None) == () else None


def _flat(values: Any, offset: int) -> np.ndarray:
    if isinstance(values, dict | tuple):
        raise ValueError("dict and tuple spaces are not supported: flatten observations and actions first")
    array = np.asarray(values)
    return array - offset if offset else array


def _behaviour(episode: Any, n: int) -> np.ndarray | None:
    infos = episode.infos or {}
    for key in BEHAVIOUR_KEYS:
        if key in infos:
            values = np.asarray(infos[key], dtype=np.float64).reshape(-1)
            if len(values) == n + 1:  # infos start with that of the reset
                return values[1:]
            if len(values) == n:
                return values
            raise ValueError(f"episode {episode.id}: {len(values)} entries of {key!r} for {n} steps")
    return None
