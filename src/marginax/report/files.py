"""Files that are either whole or not there."""

import csv
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import BinaryIO


def atomic_write(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file through a temporary neighbour, so that `path` holds the old bytes or all of the new ones.

    Args:
        path: where the file goes; its folder must exist.
        write: called with an open binary file.

    Raises:
        OSError: the disk is full or the folder cannot be written; `path` is then as it was.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "a.txt"
    >>> atomic_write(target, lambda f: f.write(b"whole"))
    >>> target.read_text()
    'whole'
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_writable(folder: Path) -> None:
    """Make `folder` (and its parents) and make sure that a file can be written there.

    Raises:
        OSError: with one sentence that names the folder.

    >>> import tempfile
    >>> check_writable(Path(tempfile.mkdtemp()) / "new" / "folder")
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        raise OSError(f"cannot write to the folder {str(folder)!r}: {error.strerror or error}") from error


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a table as CSV; floats keep nine significant digits.

    >>> import tempfile
    >>> target = Path(tempfile.mkdtemp()) / "t.csv"
    >>> write_csv(target, ["n", "error"], [[1, 0.5], [2, 0.25]])
    >>> target.read_text().splitlines()
    ['n,error', '1,0.5', '2,0.25']
    """

    def write(file: BinaryIO) -> None:
        text = _Encoded(file)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(value) for value in row] for row in rows)

    atomic_write(path, write)


class _Encoded:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def write(self, text: str) -> int:
        return self.file.write(text.encode("utf-8"))


def _cell(value: object) -> object:
    return f"{float(value):.9g}" if hasattr(value, "__float__") and not isinstance(value, int) else value
