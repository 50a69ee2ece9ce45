"""A learner in the files of a checkpoint: its networks, and its replay buffers in segments.

A segment holds the transitions that were added between two checkpoints, so each transition is written once. A segment is kept
until all of it has been overwritten in the ring.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from marginax.deep import checkpoint
from marginax.deep.learner import Learner, LearnerState
from marginax.deep.networks import with_separate_twins, with_twins_as_in

Arrays = dict[str, Any]


def to_files(
    number: int, learner: Learner, *, step: int, saved_until: int, known: Collection[str], replay: bool
) -> tuple[dict[str, Arrays], list[str]]:
    """The files to write for learner `number` after `step` steps, and the names of those that are kept.

    Args:
        number: Which learner of the population it is.
        learner: Between two blocks.
        step: Steps so far.
        saved_until: Steps of the last checkpoint.
        known: Names of that checkpoint's files.
        replay: Whether the replay buffers are saved.
    """
    agents = with_separate_twins(learner.state[:2])
    files, keep = {f"learner-{number}-{step}": checkpoint.to_arrays(agents)}, []
    for group, capacity in enumerate(learner.plan.capacities if replay else ()):
        name, oldest = f"replay-{number}-{group}", max(0, step - capacity)
        keep += [file for file in known if _segment(file, name)[1] > oldest]
        first = max(saved_until, oldest)
        where = np.arange(first, step) % capacity
        files[f"{name}-{first}-{step}"] = {"rows": np.asarray(learner.state.rows[group][:, where])}
    return files, keep


def from_files(number: int, learner: Learner, files: Mapping[str, Arrays], step: int) -> LearnerState:
    """The state that `to_files` saved."""
    here = learner.state[:2]
    agents = checkpoint.from_arrays(with_separate_twins(here), files[f"learner-{number}-{step}"])
    rows = []
    for group, buffer in enumerate(learner.state.rows):
        name, ring = f"replay-{number}-{group}", np.zeros(buffer.shape, np.float32)
        for file in sorted(files, key=lambda file: _segment(file, name)):
            first, last = _segment(file, name)
            if last > 0:
                ring[:, np.arange(first, last) % ring.shape[1]] = files[file]["rows"]
        rows.append(ring)
    return LearnerState(*jax.device_put((*with_twins_as_in(here, agents), tuple(rows), np.int32(step))))


def _segment(file: str, name: str) -> tuple[int, int]:
    """First and last transition of a segment of the replay buffer `name`; zeros for other files."""
    match = re.fullmatch(rf"{name}-(\d+)-(\d+)", file)
    return (int(match[1]), int(match[2])) if match else (0, 0)
