"""The one way to start processes on this machine.

    def count(channel, start):                      # in an importable module
        for k in range(start, start + 3):
            channel.send({"k": k})
        return "done"

    with processes.start(count, {"start": 5}, name="counter") as child:
        for message in child.messages():            # {'k': 5}, {'k': 6}, {'k': 7}
            ...
    child.result                                    # 'done'

- **Messages** travel on a channel of their own, never on standard output: whatever a library prints goes to a log
  file, or to the parent's standard error with the child's name in front.
- **Data only.** Arguments, messages and results are JSON data, with NumPy arrays anywhere in them (tuples arrive as
  lists, keys as strings). Nothing is pickled. Large arrays that many processes read and write live in `SharedMemory`.
- **Children end with their parent**, whatever happens to it, SIGKILL included, and so does everything that they
  started: each child leads a process group of its own, and a small shell (`marginax-keeper`) kills the group when
  the parent's end of a pipe closes. It needs no help from the child, so a hung or stopped child ends as well.
- **Ctrl-C** reaches only the parent. Leaving a `with` block, or the interpreter, stops the children: SIGTERM, and
  SIGKILL to the group after a second.
- **Locks** (`Lock`) name the process that holds a folder. The kernel releases them when the holder ends.
"""

import atexit
import collections
import contextlib
import datetime
import importlib
import json
import mmap
import os
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "Channel",
    "Child",
    "Lock",
    "ProcessDied",
    "ProcessFailed",
    "SharedMemory",
    "cores",
    "start",
    "stop",
    "wait",
]

_MESSAGE, _RETURNED, _ERROR = 0, 1, 2
_HEAD = struct.Struct("<BII")  # kind, bytes of JSON, number of arrays
_ARRAY = "\0array"
_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_living: "weakref.WeakSet[Child]" = weakref.WeakSet()


class ProcessDied(RuntimeError):
    """A child ended without a word (killed, out of memory, a crash in C): a fresh one may succeed."""


class ProcessFailed(RuntimeError):
    """A child's function raised an exception: a fresh one would raise it again."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def start(
    function: Callable[..., Any] | str,
    arguments: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
    memory: "SharedMemory | None" = None,
) -> "Child":
    """Start a Python process that calls `function(channel, **arguments)`.

    Args:
        function: of an importable module, itself or as `"module:function"`. Its first argument is the `Channel` to
            the parent. It may return JSON data.
        arguments: its other arguments: JSON data and arrays.
        name: shown in front of what the child prints, in errors, and in `ps`.
        environment: variables that are added to this process's own, such as `OMP_NUM_THREADS`.
        log: file to which everything that the child prints is appended; by default it goes to standard error here,
            each line after the child's name.
        memory: given to the child as `channel.memory`.

    Raises:
        ValueError: the function cannot be found by name in another process.

    >>> with start("math:fsum", name="sum") as child:  # no argument but the channel, which is no number
    ...     child.wait()
    Traceback (most recent call last):
    marginax.engine.processes.ProcessFailed: sum failed: TypeError: 'Channel' object is not iterable
    """
    address = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    if address.startswith("__main__:") or "<" in address or address.count(":") != 1:
        raise ValueError(f"function must be a named function of an importable module, got {address!r}")
    return Child(address, dict(arguments or {}), name or address, dict(environment or {}), log, memory)


class SharedMemory:
    """Bytes that this process and its children see alike; the kernel frees them when the last of them ends.

    >>> memory = SharedMemory(12)
    >>> memory.array(np.float32)[:] = 1
    >>> memory.array(np.float32)
    array([1., 1., 1.], dtype=float32)
    """

    def __init__(self, size: int, _file: int | None = None) -> None:
        if _file is not None:
            self.file = _file
        elif hasattr(os, "memfd_create"):
            self.file = os.memfd_create("marginax", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:  # has no name any more
                self.file = os.dup(file.fileno())
        if _file is None:
            os.ftruncate(self.file, max(1, size))
        self.size = size
        self.buffer = mmap.mmap(self.file, max(1, size))
        weakref.finalize(self, os.close, self.file)

    def array(self, dtype: Any = np.uint8) -> np.ndarray:
        """All of it as a flat array."""
        return np.frombuffer(self.buffer, dtype, self.size // np.dtype(dtype).itemsize)


class Channel:
    """One end of a two-way connection for messages: JSON data with NumPy arrays anywhere in it.

    A child's function gets one; `Child` has the same methods for the parent's end. `send` may be called from
    several threads, `receive` from one.
    """

    def __init__(self, connection: socket.socket, memory: SharedMemory | None = None) -> None:
        self.memory = memory
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        """Send a message; waits while the other end is too far behind.

        Raises:
            EOFError: the other end is gone.
        """
        self._send(_MESSAGE, message)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            EOFError: the other end is gone.
        """
        return self._receive(timeout)[1]

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a message (or the other end's end) waits to be received."""
        return bool(wait([self], timeout))

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def _send(self, kind: int, message: Any) -> None:
        arrays: list[np.ndarray] = []
        text = json.dumps(_without_arrays(message, arrays)).encode()
        pieces: list[bytes | memoryview] = [_HEAD.pack(kind, len(text), len(arrays)), text]
        pieces += [array.reshape(-1).view(np.uint8).data for array in arrays if array.size]
        try:
            with self._lock:
                for piece in pieces:
                    self._connection.sendall(piece)
        except OSError as error:  # broken, or closed by `stop`
            raise EOFError("the other process is gone") from error

    def _receive(self, timeout: float | None) -> tuple[int, Any]:
        if not self.poll(timeout):
            raise TimeoutError(f"no message within {timeout} s")
        kind, size, count = _HEAD.unpack(self._read(_HEAD.size))
        arrays: list[np.ndarray] = []
        message = json.loads(self._read(size), object_hook=lambda found: _with_array(found, arrays))
        assert len(arrays) == count
        for array in arrays:
            if array.size:
                self._read_into(array.reshape(-1).view(np.uint8).data)
        return kind, message

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        self._read_into(memoryview(content))
        return content

    def _read_into(self, view: memoryview) -> None:
        while view:
            try:
                count = self._connection.recv_into(view)
            except ConnectionResetError:
                count = 0
            if count == 0:
                raise EOFError("the other process is gone")
            view = view[count:]


def _without_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON data in which each array is replaced by its type and shape; the arrays are collected in order."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype.hasobject:
            raise ValueError("a message must not have arrays of Python objects")
        arrays.append(array)
        return {_ARRAY: [array.dtype.str, list(array.shape)]}
    if isinstance(value, Mapping):
        return {str(key): _without_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_arrays(entry, arrays) for entry in value]
    return value


def _with_array(found: dict[str, Any], arrays: list[np.ndarray]) -> Any:
    if _ARRAY not in found:
        return found
    dtype, shape = found[_ARRAY]
    arrays.append(np.empty(shape, dtype))
    return arrays[-1]


class Child(Channel):
    """A process that `start` started, and the parent's end of the channel to it.

    Attributes:
        name: of the child.
        result: what its function returned, once `receive` has said that it is over.
        pid: of the process, and of the group of everything that it starts.
    """

    def __init__(
        self,
        address: str,
        arguments: dict[str, Any],
        name: str,
        environment: dict[str, str],
        log: Path | None,
        memory: SharedMemory | None,
    ) -> None:
        here, there = socket.socketpair()
        super().__init__(here, memory)
        self.name = name
        self.result: Any = None
        self._log, self._tail = log, collections.deque[str](maxlen=5)
        self._over = False
        files = [there.fileno()] + ([memory.file] if memory else [])
        given = [name, *map(str, files), *([str(memory.size)] if memory else [])]
        code = "from marginax.engine.processes import _main; _main()"
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        with there, contextlib.ExitStack() as stack:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, *given],
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(log.open("ab")) if log else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment},
                pass_fds=files,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "marginax-keeper", str(self.pid)],
            stdin=subprocess.PIPE,  # the other end closes with this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _living.add(self)
        if log is None:
            threading.Thread(target=self._forward, daemon=True).start()
        self.send({"function": address, "arguments": arguments})

    def send(self, message: Any) -> None:
        """Send a message. If the child is gone nothing happens here: the next `receive` says what became of it."""
        with contextlib.suppress(EOFError):
            self._send(_MESSAGE, message)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            EOFError: the function has returned; its value is `result`.
            ProcessFailed: the function raised an exception.
            ProcessDied: the process ended in another way.
        """
        if self._over:
            raise EOFError(f"{self.name} is over")
        try:
            kind, message = self._receive(timeout)
        except EOFError:
            raise ProcessDied(f"{self.name} {self._end()}") from None
        if kind == _MESSAGE:
            return message
        self._over = True
        if kind == _ERROR:
            self.stop()
            raise ProcessFailed(f"{self.name} failed: {message}")
        self.result = message
        raise EOFError(f"{self.name} is over")

    def messages(self) -> Iterator[Any]:
        """All messages until the function returns; raises `ProcessFailed` and `ProcessDied` as `receive` does."""
        while True:
            try:
                message = self.receive()
            except EOFError:
                return
            yield message

    def wait(self) -> Any:
        """Wait for the function's value; messages that were not received are lost."""
        for _ in self.messages():
            pass
        self.stop()
        return self.result

    def stop(self, grace: float = _GRACE) -> None:
        """End the process and all that it started: SIGTERM now, SIGKILL after `grace` seconds."""
        stop([self], grace)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _end(self) -> str:
        """Stop, and say how the process ended."""
        self._over = True
        self.stop()
        status = self._process.returncode
        how = f"ended with status {status}" if status >= 0 else f"was killed ({signal.Signals(-status).name})"
        if self._log is not None:
            self._tail.extend(self._log.read_text(errors="replace").strip().splitlines()[-1:])
        return f"{how}: {self._tail[-1]}" if self._tail else how

    def _forward(self) -> None:
        for raw in self._process.stdout or ():
            line = raw.decode(errors="replace").rstrip("\n")
            self._tail.append(line)
            print(f"[{self.name}] {line}", file=sys.stderr, flush=True)

    def _gone(self, deadline: float) -> None:
        """Wait for the process to end, without reaping it: as long as it is not reaped its group keeps its number."""
        with contextlib.suppress(OSError, EOFError, ValueError):
            while (left := deadline - time.monotonic()) > 0 and self.poll(left):
                if not self._connection.recv(1 << 16):
                    return

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._keeper.kill()
        self._keeper.wait()
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self.close()
        _living.discard(self)


def stop(children: Sequence[Child], grace: float = _GRACE) -> None:
    """Stop several children at once: SIGTERM to each now, SIGKILL to what is left after `grace` seconds."""
    running = [child for child in children if child in _living]
    try:
        for child in running:
            if grace > 0 and not child._over:
                os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        for child in running:
            child._gone(deadline)
    finally:  # a second Ctrl-C only shortens the wait
        for child in running:
            child._kill()


def wait(channels: Sequence[Channel], timeout: float | None = None) -> list[Any]:
    """Those channels from which `receive` would return (or raise) at once; waits for the first of them."""
    with selectors.DefaultSelector() as selector:
        for channel in channels:
            selector.register(channel, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout)]


def _main() -> None:
    """What a child does: `python -c … NAME SOCKET [MEMORY SIZE]`."""
    _, _, file, *memory = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=int(file))
    for handle in (int(file), *map(int, memory[:1])):
        os.set_inheritable(handle, False)
    shared = SharedMemory(int(memory[1]), int(memory[0])) if memory else None
    channel = Channel(connection, shared)
    try:
        request = channel.receive()
        module, name = request["function"].split(":")
        result = getattr(importlib.import_module(module), name)(channel, **request["arguments"])
        channel._send(_RETURNED, result)
    except Exception as error:
        try:
            channel._send(_ERROR, f"{type(error).__name__}: {error}")
            traceback.print_exc()
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to tell
        sys.exit(1)


class Lock:
    """Holds a folder for this process alone, as long as the `with` block lasts.

    The file `.lock` in the folder names the holder. The kernel releases the lock when its holder ends, however it
    ends, so a file that was left behind never stands in the way.

    Raises:
        RuntimeError: at once, with one sentence that names the process that holds the folder.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with Lock(folder), Lock(folder):
    ...     pass
    Traceback (most recent call last):
    RuntimeError: '...' is in use by process ... (...) on ... since ...: wait until it has ended, or choose another folder
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


def _stop_all() -> None:
    stop(list(_living), grace=0)


atexit.register(_stop_all)
