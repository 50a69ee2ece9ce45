"""Files that are written completely or not at all, with checksums that reveal damage."""

import csv
import hashlib
import io
import json
import numbers
import os
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, SupportsFloat

import numpy as np

_DIGEST = 64  # hexadecimal digits of a SHA-256


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary neighbour, so that `path` holds the old bytes or all of the new ones.

    Args:
        path: where the file goes; its folder must exist.
        write: called with an open binary file.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is then as it was.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # such as a full disk
            error.filename = str(path)
        raise


def check_writable(folder: Path) -> None:
    """Make `folder` (and its parents) and make sure that a file can be written there.

    Raises:
        OSError: with one sentence that names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise OSError(f"cannot write to the folder {str(folder)!r}: {error.strerror or error}") from error


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as CSV; floats keep nine significant digits."""

    def write(file: BinaryIO) -> None:
        text = io.TextIOWrapper(file, "utf-8", newline="", write_through=True)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)
        text.detach()

    atomic_write(path, write)


def _cell(value: object) -> object:
    is_whole = isinstance(value, numbers.Integral)
    return f"{float(value):.9g}" if isinstance(value, SupportsFloat) and not is_whole else value


def save_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an `.npz` file that ends with its own SHA-256.

    The checksum is the archive's comment, so `np.load` and every zip program read the file as well. Arrays are
    written one after another; nothing is copied as a whole.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is then as it was.
        ValueError: an array has elements that are Python objects.
    """

    def write(file: BinaryIO) -> None:
        stream = _Hashing(file)
        with zipfile.ZipFile(stream, "w") as archive:  # type: ignore[call-overload]
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
            archive.comment = b"0" * _DIGEST
        file.seek(-_DIGEST, os.SEEK_END)
        file.write(stream.digest.hexdigest().encode())

    atomic_write(path, write)


class _Hashing:
    """A file that can only be written forwards, and is hashed on the way."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read what `save_arrays` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not what was written: a byte changed, or some are missing.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        left = size - _DIGEST
        file.seek(0)
        digest = hashlib.sha256()
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
        digest.update(b"0" * _DIGEST)
        if left != 0 or file.read() != digest.hexdigest().encode():
            raise ValueError(f"{str(path)!r} is damaged: its checksum does not match its content")
        file.seek(0)
        with np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}


def save_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object with a last entry `sha256`, the checksum of all others."""
    text = json.dumps({**data, "sha256": _json_digest(data)}, indent=1, ensure_ascii=False)
    atomic_write(path, lambda file: file.write(text.encode()))


def load_json(path: Path) -> dict[str, Any]:
    """Read what `save_json` wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not what was written.
    """
    content = path.read_bytes()
    try:
        data = json.loads(content)
        digest = data.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{str(path)!r} is damaged: {error or type(error).__name__}") from None
    if digest != _json_digest(data):
        raise ValueError(f"{str(path)!r} is damaged: its checksum does not match its content")
    return data


def _json_digest(data: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps(data))  # as it will be read back: keys are strings, tuples are lists
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
