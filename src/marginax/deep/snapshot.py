"""Checkpoints of a whole population: folders of plain NumPy files, whole or not there at all.

A checkpoint is the folder `block-<number>`. It is written under another name and renamed when everything is on the
disk, and only then are older ones removed, so a half-written one is never taken for whole. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_PREFIX = "block-"


def save(
    folder: Path,
    number: int,
    *,
    arrays: dict[str, np.ndarray],
    large: dict[str, np.ndarray],
    states: Sequence[dict[str, Any]],
    meta: dict[str, Any],
) -> Path:
    """Write a checkpoint and remove older ones.

    Args:
        folder: Where checkpoints lie; made if need be.
        number: Number of the block the population stands after.
        arrays: Small arrays, kept in one file.
        large: Large arrays, each a file of its own.
        states: One dictionary of arrays and integers for each simulator.
        meta: Plain data, kept as JSON.

    Raises:
        OSError: When the disk is full or not writable; what was there before stays.

    >>> import tempfile
    >>> place = Path(tempfile.mkdtemp())
    >>> _ = save(place, 7, arrays={"a": np.ones(2)}, large={}, states=[{"steps": 3}], meta={"x": 1})
    >>> found = load(place)
    >>> found["arrays"]["a"], found["states"], found["meta"]
    (array([1., 1.]), [{'steps': array(3)}], {'x': 1})
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = folder / f".writing-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        flat = {f"{i}/{name}": np.asarray(v) for i, state in enumerate(states) for name, v in state.items()}
        _write(work / "arrays.npz", lambda f: np.savez(f, **_npz(arrays)))
        _write(work / "states.npz", lambda f: np.savez(f, **_npz(flat)))
        for name, array in large.items():
            _write(work / f"{name}.npy", lambda f, a=array: np.save(f, a, allow_pickle=False))
        text = json.dumps({"meta": meta, "states": len(states), "large": sorted(large)})
        _write(work / "meta.json", lambda f: f.write(text.encode()))
        target = folder / f"{_PREFIX}{number:09d}"
        shutil.rmtree(target, ignore_errors=True)
        os.replace(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    for other in folder.iterdir():
        if other != target and other.name.startswith((_PREFIX, ".writing-")):
            shutil.rmtree(other, ignore_errors=True)
    return target


def load(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint: `number`, `arrays`, `large`, `states` and `meta`; None where there is none.

    Raises:
        ValueError: When the newest checkpoint is damaged.

    >>> load(Path("nowhere")) is None
    True
    """
    found = sorted(folder.glob(f"{_PREFIX}*")) if folder.is_dir() else []
    if not found:
        return None
    path = found[-1]
    try:
        head = json.loads((path / "meta.json").read_text())
        with np.load(path / "arrays.npz", allow_pickle=False) as file:
            arrays = {name[1:]: file[name] for name in file.files}
        states: list[dict[str, Any]] = [{} for _ in range(head["states"])]
        with np.load(path / "states.npz", allow_pickle=False) as file:
            for name in file.files:
                agent, _, key = name[1:].partition("/")
                states[int(agent)][key] = file[name]
        large = {n: np.load(path / f"{n}.npy", allow_pickle=False, mmap_mode="r") for n in head["large"]}
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ValueError(f"the checkpoint {path} is damaged ({error}); remove it to start again") from error
    number = int(path.name.removeprefix(_PREFIX))
    return {"number": number, "arrays": arrays, "large": large, "states": states, "meta": head["meta"]}


def _npz(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    # A leading underscore keeps names such as "file" apart from savez's own arguments.
    return {f"_{name}": array for name, array in arrays.items()}


def _write(path: Path, write: Any) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
