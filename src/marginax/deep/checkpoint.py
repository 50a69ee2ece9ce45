"""Checkpoints that are whole or not there, checked before they are trusted, and free of anything to execute.

A checkpoint is a folder of `.npz` files and a `manifest.json` that names them; each carries its own SHA-256. Files
are written under temporary names, flushed to the disk and renamed; the manifest goes last, so it only ever names
complete files, and a process killed at any moment leaves the previous checkpoint or the new one. Files that a new
checkpoint shares with the previous one (old pieces of a replay buffer) are not written again. The first checkpoint
of a run has no files, so files without a manifest mean that the manifest was lost.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from marginax._files import load_arrays, load_json, save_arrays, save_json
from marginax.engine.processes import cores

CHECKPOINT, MANIFEST = "checkpoint", "manifest.json"
_FORMAT = 2
Tree = TypeVar("Tree")


class Checkpoint(NamedTuple):
    """What was read back: plain data, and arrays by file and name."""

    meta: dict[str, Any]
    files: dict[str, dict[str, np.ndarray]]


def save(
    folder: Path, meta: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]], keep: Iterable[str] = ()
) -> None:
    """Write a checkpoint; the previous one stays until the new one is complete.

    Args:
        folder: Made if it is not there.
        meta: Plain data (JSON).
        files: Arrays to write, by file and name; a file's name must not be one of the previous checkpoint's.
        keep: Files of the previous checkpoint that belong to this one as well.

    Raises:
        OSError: If the disk is full or cannot be written; the previous checkpoint is then untouched.
        ValueError: If a file to keep is not in the previous checkpoint, or one to write is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    previous = (manifest(folder) or {"files": []})["files"]
    names = [*keep, *files]
    if missing := [name for name in keep if name not in previous]:
        raise ValueError(f"keep names {missing[0]!r}, which the previous checkpoint does not have.")
    if repeated := [name for name in files if name in previous]:
        raise ValueError(f"files names {repeated[0]!r}, which the previous checkpoint has.")
    try:
        for name, arrays in files.items():
            save_arrays(folder / f"{name}.npz", arrays)
        save_json(folder / MANIFEST, {"format": _FORMAT, "meta": dict(meta), "files": names})
    except OSError as error:
        for name in files:
            with contextlib.suppress(OSError):
                (folder / f"{name}.npz").unlink(missing_ok=True)
        reason = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
        kept = "; the last good checkpoint is kept" if previous else ""
        raise OSError(f"cannot write a checkpoint to {str(folder)!r}: {reason}{kept}") from error
    with contextlib.suppress(OSError):  # make the renames durable, where a folder can be opened
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    tidy(folder, names)


def tidy(folder: Path, names: Iterable[str]) -> None:
    """Remove all but the manifest and the named files: older ones, and temporary ones of a killed process."""
    kept = {MANIFEST, *(f"{name}.npz" for name in names)}
    for path in folder.glob("*") if folder.is_dir() else ():
        if path.name not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def load(folder: Path) -> Checkpoint | None:
    """Read a checkpoint back, or None if the folder has none.

    Raises:
        ValueError: If a file is missing or differs from what was written.
    """
    found = manifest(folder)
    if found is None:
        return None
    files = {}
    for name in found["files"]:
        path = folder / f"{name}.npz"
        try:
            files[name] = load_arrays(path)
        except OSError as error:
            raise ValueError(
                f"the checkpoint is damaged: {path} cannot be read ({error.strerror})."
            ) from error
        except ValueError as error:
            raise ValueError(f"the checkpoint is damaged: {error}.") from error
    return Checkpoint(found["meta"], files)


def manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of the checkpoint in a folder (`meta` and the names of its `files`); None if there is none.

    Raises:
        ValueError: If it is damaged, or a file without a manifest lies there.
    """
    path = folder / MANIFEST
    try:
        found = load_json(path)
    except FileNotFoundError:
        if any(folder.glob("*.npz")):
            raise ValueError(f"the checkpoint is damaged: {path} is missing.") from None
        return None
    except ValueError as error:
        raise ValueError(f"the checkpoint is damaged: {error}.") from error
    if found.get("format") != _FORMAT:
        raise ValueError(f"{path} is not a checkpoint of this version.")
    return found


def to_arrays(tree: Any) -> dict[str, np.ndarray]:
    """The leaves of a pytree by their place in it."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def from_arrays(template: Tree, arrays: Mapping[str, np.ndarray]) -> Tree:
    """A pytree of the template's structure from what `to_arrays` returned.

    Raises:
        ValueError: If a leaf is missing, or has another shape or type than in the template.
    """
    import jax

    leaves, structure = jax.tree_util.tree_flatten_with_path(template)
    found = []
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        array = arrays.get(name)
        if array is None or array.shape != leaf.shape or array.dtype != leaf.dtype:
            what = "is missing" if array is None else f"is {array.dtype}{list(array.shape)}"
            raise ValueError(f"{name} must be {leaf.dtype}{list(leaf.shape)} in the checkpoint, but {what}.")
        found.append(array)
    return jax.tree_util.tree_unflatten(structure, found)


def platform() -> dict[str, Any]:
    """The machine, as a checkpoint records it."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": device.platform,
        "cores": cores(),
        "jax": jax.__version__,
    }
