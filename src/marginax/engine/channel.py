"""Messages and memory between processes of this machine: JSON data with NumPy arrays, and bytes that all of them see."""

import contextlib
import json
import mmap
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from typing import Any

import numpy as np

__all__ = ["Channel", "SharedMemory", "wait"]

MESSAGE, RETURNED, ERROR = 0, 1, 2  # kinds of messages
_ARRAY = "\0array"


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

    def __init__(self, file: int, memory: SharedMemory | None = None) -> None:
        self.memory = memory
        self._connection = connection.Connection(file)
        self._lock = threading.Lock()

    def send(self, message: Any, kind: int = MESSAGE) -> None:
        """Send a message; waits while the other end is too far behind.

        Raises:
            EOFError: the other end is gone.
        """
        arrays: list[np.ndarray] = []
        text = json.dumps([kind, _without_arrays(message, arrays)]).encode()
        try:
            with self._lock:
                self._connection.send_bytes(text)
                for array in arrays:
                    if array.size:
                        self._connection.send_bytes(_bytes(array))
        except OSError as error:  # broken, or closed by `stop`
            raise EOFError("the other process is gone") from error

    def receive(self, timeout: float | None = None) -> Any:
        """The next message.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            EOFError: the other end is gone.
        """
        return self._receive(timeout)[1]

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether a message (or the other end's end) waits to be received."""
        return self._connection.poll(timeout)

    def fileno(self) -> int:
        return self._connection.fileno()

    def hang_up(self) -> None:
        """End the connection: threads that are sending or receiving get an `EOFError`, even if a foreign process holds the other end."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _receive(self, timeout: float | None) -> tuple[int, Any]:
        arrays: list[np.ndarray] = []
        try:
            if self.poll(timeout):
                text = self._connection.recv_bytes()
                kind, message = json.loads(text, object_hook=lambda found: _with_array(found, arrays))
                for array in arrays:
                    if array.size:
                        self._connection.recv_bytes_into(_bytes(array))
                return kind, message
        except OSError as error:  # broken, or closed by `stop`
            raise EOFError("the other process is gone") from error
        raise TimeoutError(f"no message within {timeout} s")


def wait(channels: Sequence[Any], timeout: float | None = None) -> list[Any]:
    """Those channels from which `receive` would return (or raise) at once; waits for the first of them."""
    return connection.wait(channels, timeout)


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _without_arrays(value: Any, arrays: list[np.ndarray]) -> Any:
    """JSON data in which each array is replaced by its type and shape; the arrays are collected in order."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__array__"):
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        if array.dtype.hasobject or np.dtype(array.dtype.str) != array.dtype:
            raise ValueError(f"a message must not have arrays of the type {array.dtype}")
        arrays.append(array)
        return {_ARRAY: [array.dtype.str, list(array.shape)]}
    if isinstance(value, Mapping):
        return {str(key): _without_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_without_arrays(entry, arrays) for entry in value]
    return value


def _with_array(found: dict[str, Any], arrays: list[np.ndarray]) -> Any:
    if _ARRAY not in found:
        return found
    dtype, shape = found[_ARRAY]
    arrays.append(np.empty(shape, dtype))
    return arrays[-1]
