"""Minari datasets, by id or by folder, read episode by episode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.offline.log import Log, lay
from marginax.offline.sources import CHUNK, FILES, Source

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

    def __init__(self, dataset: Any, chunk: int = CHUNK) -> None:
        super().__init__()
        self.dataset, self.name, self.chunk = dataset, str(dataset.id), chunk
        self.total = int(dataset.total_steps)
        spaces = dataset.observation_space, dataset.action_space
        states, actions = (_size(space) for space in spaces)
        self.sizes = (states, actions) if states and actions else None
        self._offset = [int(getattr(space, "start", 0)) for space in spaces]

    def chunks(self) -> Iterator[Log]:
        """Yields logs of whole episodes."""
        dropped = 0
        for episodes in self._batches():
            log, lost = lay(episodes)
            dropped += lost
            if log is not None:
                yield log
        self.set_aside(dropped)

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """Yields episodes with about `chunk` steps in all, as `lay` takes them."""
        episodes: list[dict[str, Any]] = []
        row = begin = 0
        for episode in self.dataset.iterate_episodes():
            n = len(episode.rewards)
            episodes.append(
                {
                    "name": episode.id,
                    "states": _flat(episode.observations, self._offset[0]),
                    "actions": _flat(episode.actions, self._offset[1]),
                    "rewards": episode.rewards,
                    "terminal": episode.terminations,
                    "truncated": np.asarray(episode.truncations, dtype=bool),
                    "behaviour": _behaviour(episode, n),
                    "rows": row + np.arange(n),
                }
            )
            row += n
            if row - begin >= self.chunk:
                yield episodes
                episodes, begin = [], row
        if episodes or row == 0:
            yield episodes


def open_minari(data: str | Path) -> MinariSource:
    """A source for a Minari folder or the id of a dataset on this machine."""
    folder = Path(data)
    try:
        import minari
    except ImportError as error:
        if folder.is_dir() or not folder.suffix:
            raise checks.missing_package("a Minari dataset", "minari", "offline") from error
        raise FileNotFoundError(f"{str(data)!r} is neither {FILES}") from None
    for candidate in (folder / "data", folder):
        if (candidate / "metadata.json").is_file():
            return MinariSource(minari.MinariDataset(candidate))
    try:
        return MinariSource(minari.load_dataset(str(data)))
    except (FileNotFoundError, ValueError, TypeError):
        root = os.environ.get("MINARI_DATASETS_PATH", "~/.minari/datasets")
        raise FileNotFoundError(
            f"{str(data)!r} is neither {FILES}, nor the id of a dataset in {root}"
        ) from None


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
