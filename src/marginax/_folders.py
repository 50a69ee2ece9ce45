"""Folders that one process holds, and folders on other file systems.

An output folder may be any address that pyarrow or fsspec knows, such as `s3://bucket/runs`. Work is then done in a copy on this
machine's disk: `opened` fetches what is there, `push` sends what has changed, file by file, each whole or not at all. Files that
describe others (`.json`) go last, so that whoever fetches one finds what it describes.
"""

import contextlib
import datetime
import io
import json
import os
import shlex
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from marginax._checks import missing_package


def elsewhere(address: str | Path) -> bool:
    """Whether an address is one of another file system.

    >>> elsewhere("s3://bucket/runs"), elsewhere("out/runs")
    (True, False)
    """
    return "://" in str(address)


def filesystem(address: str) -> tuple[Any, str]:
    """The file system of an address, as one of pyarrow's, and the path in it.

    Raises:
        ImportError: pyarrow, fsspec or what they need for this address is not installed.
        ValueError: neither knows such an address.
    """
    try:
        import fsspec
        import pyarrow.fs as arrow
    except ImportError as error:
        raise missing_package(f"the address {address!r}", str(error.name), "ray") from error
    with contextlib.suppress(ValueError):
        return arrow.FileSystem.from_uri(address)
    try:
        found, path = fsspec.core.url_to_fs(address)
    except ValueError as error:
        raise ValueError(f"{address!r} is on no file system that pyarrow or fsspec knows: {error}") from None
    return arrow.PyFileSystem(arrow.FSSpecHandler(found)), path


@contextlib.contextmanager
def opened(address: str, below: str = "", without: str = "") -> Iterator[Path]:
    """A folder to work in: the one at the address, or a copy of it here if it is on another file system.

    A copy is fetched first, pushed at the end unless something was raised, and then removed.

    Args:
        address: a path, or an address of another file system.
        below: a folder in it, to be opened in its place.
        without: files that are not fetched, such as `checkpoint/*.npz`.

    Raises:
        OSError: it cannot be written.
        ValueError: the address is an empty string, as that of a shell's variable that was never set.
    """
    if not address:
        raise ValueError("the folder must be a path or an address, got ''")
    if not elsewhere(address):
        yield Path(address, below)
        return
    with tempfile.TemporaryDirectory(prefix="marginax-") as name:
        copy = _Copy(address, below, Path(name).resolve(), without)
        copy.check_writable()
        copy.fetch("")
        _copies.append(copy)
        try:
            yield copy.here
            copy.push()
        finally:
            _copies.remove(copy)


def whereabouts(folder: Path) -> dict[str, str]:
    """What `opened` needs on another machine to open a folder of this process, or what it is a copy of."""
    folder = folder.resolve()
    for copy in _copies_around(folder):
        inside = folder.relative_to(copy.here).as_posix()
        return {"address": copy.address, "below": f"{copy.below}/{inside}".strip("/")}
    return {"address": str(folder), "below": ""}


def push(folder: Path) -> None:
    """If a folder is in a copy, sends what has changed in the copy, and removes there what was removed here."""
    for copy in _copies_around(folder.resolve()):
        copy.push()


def fetch(folder: Path) -> None:
    """If a folder is in a copy, fetches what others have written there."""
    for copy in _copies_around(folder.resolve()):
        copy.fetch(folder.resolve().relative_to(copy.here).as_posix())


class _Copy:
    """A copy, at `here`, of a folder on another file system."""

    def __init__(self, address: str, below: str, here: Path, without: str) -> None:
        self.address, self.below, self.here, self.without = address, below, here, without
        self.system, root = filesystem(address)
        self.root = f"{root.rstrip('/')}/{below}".rstrip("/")
        self.equal: dict[str, tuple[int, int]] = {}  # files that are the same there, by time and size

    def check_writable(self) -> None:
        try:
            self._send(".writable", io.BytesIO(b"x"))
            self.system.delete_file(f"{self.root}/.writable")
        except OSError as error:
            raise OSError(f"cannot write to the folder {self.address!r}: {error}") from error

    def fetch(self, inside: str) -> None:
        from pyarrow.fs import FileSelector, FileType

        place = f"{self.root}/{inside}" if inside not in ("", ".") else self.root
        for info in self.system.get_file_info(FileSelector(place, allow_not_found=True, recursive=True)):
            path = self.here / Path(info.path.lstrip("/")).relative_to(self.root.lstrip("/"))
            unwanted = path.name.startswith(".") or (self.without and path.match(self.without))
            if info.type == FileType.File and not unwanted:
                path.parent.mkdir(parents=True, exist_ok=True)
                with self.system.open_input_stream(info.path) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK)
                self.equal[path.relative_to(self.here).as_posix()] = _state(path)

    def push(self) -> None:
        found = {
            path.relative_to(self.here).as_posix(): _state(path)
            for path in self.here.rglob("[!.]*")
            if path.is_file() and path.stat().st_size  # the first push of metrics is one with lines
        }
        changed = [name for name, state in found.items() if self.equal.get(name) != state]
        for name in sorted(changed, key=lambda name: (name.endswith(".json"), found[name])):
            with (self.here / name).open("rb") as file:
                self._send(name, file)
        for name in self.equal.keys() - found.keys():
            self.system.delete_file(f"{self.root}/{name}")
        self.equal = found

    def _send(self, name: str, file: io.BufferedIOBase) -> None:
        folder, _, last = f"{self.root}/{name}".rpartition("/")
        self.system.create_dir(folder, recursive=True)
        with self.system.open_output_stream(f"{folder}/.{last}.part") as target:
            shutil.copyfileobj(file, target, _BLOCK)
        self.system.move(f"{folder}/.{last}.part", f"{folder}/{last}")


_BLOCK = 1 << 20  # bytes that are copied at a time
_copies: list[_Copy] = []  # of this process


def _copies_around(folder: Path) -> list[_Copy]:
    return [copy for copy in _copies if folder.is_relative_to(copy.here)]


def _state(path: Path) -> tuple[int, int]:
    return path.stat().st_mtime_ns, path.stat().st_size


class Lock:
    """Holds a folder for this process alone, as long as the `with` block lasts.

    The file `.lock` in the folder names the holder. The kernel releases the lock when its holder ends, however it
    ends, so a file that was left behind never stands in the way.

    Raises:
        RuntimeError: at once, with one sentence that names the process that holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / ".lock"

    def __enter__(self) -> "Lock":
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.exists(self.path) and os.path.samestat(os.fstat(file), os.stat(self.path)):
                    break  # else its last holder has just removed it
                os.close(file)
            except BlockingIOError:
                holder = _holder(file)
                os.close(file)
                raise RuntimeError(
                    f"{str(self.folder)!r} is in use by {holder}: wait until it has ended, or choose another folder"
                ) from None
        now = datetime.datetime.now().isoformat(" ", "seconds")
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": now,
            "command": shlex.join(_command()),
        }
        with contextlib.suppress(OSError):  # the disk is full: the lock holds without a name
            os.truncate(file, 0)
            os.pwrite(file, json.dumps(who).encode(), 0)
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def _holder(file: int) -> str:
    try:
        who = json.loads(os.pread(file, 1 << 16, 0))
        return f"process {who['pid']} ({who['command']}) on {who['host']} since {who['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"  # it has the lock and has not yet written its name


def _command() -> list[str]:
    """The command line as a reader would type it."""
    return [Path(sys.argv[0]).name or "python", *sys.argv[1:]]
