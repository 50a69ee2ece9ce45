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
"""

import atexit
import collections
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marginax.engine.channel import ERROR, MESSAGE, RETURNED, Channel, SharedMemory, wait

__all__ = [
    "Channel",
    "Child",
    "ProcessDied",
    "ProcessFailed",
    "SharedMemory",
    "cores",
    "start",
    "stop",
    "wait",
]

_GRACE = 1.0  # seconds between SIGTERM and SIGKILL
_living: "weakref.WeakSet[Child]" = weakref.WeakSet()


class ProcessDied(RuntimeError):
    """A child ended without a result and without an exception (killed, out of memory, a crash in C): a new one may succeed."""


class ProcessFailed(RuntimeError):
    """A child's function raised an exception: a new child would raise it again."""


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
        super().__init__(here.detach(), memory)
        self.name = name
        self.result: Any = None
        self._log, self._tail = log, collections.deque[str](maxlen=5)
        self._over = False
        self._reading = threading.Lock()  # held by the thread that reads the channel
        self._ending = threading.Lock()  # held by the thread that signals the process or reaps it
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
        self._forwarding = threading.Thread(target=self._forward, daemon=True)
        self._forwarding.start()
        self.send({"function": address, "arguments": arguments})

    def send(self, message: Any, kind: int = MESSAGE) -> None:
        """Send a message. If the child is gone nothing happens here: the next `receive` says what became of it."""
        with contextlib.suppress(EOFError):
            super().send(message, kind)

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
            with self._reading:
                kind, message = self._receive(timeout)
        except EOFError:
            raise ProcessDied(f"{self.name} {self._end()}") from None
        if kind == MESSAGE:
            return message
        self._over = True
        if kind == ERROR:
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
        self._forwarding.join(_GRACE)
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
        """Wait for the process to end, without reaping it: as long as it is not reaped its group keeps its number.

        Messages are thrown away, unless another thread is receiving them.
        """
        while (left := deadline - time.monotonic()) > 0 and self._reading.acquire(timeout=left):
            try:
                if not self.poll(deadline - time.monotonic()) or not os.read(self.fileno(), 1 << 16):
                    return
            except (OSError, EOFError):
                return
            finally:
                self._reading.release()

    def _terminate(self) -> None:
        with self._ending:
            if self in _living and not self._over:
                os.kill(self.pid, signal.SIGTERM)

    def _kill(self) -> None:
        with self._ending:
            if self not in _living:
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._keeper.kill()
            self._keeper.wait()
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self.hang_up()
            with self._reading:
                self.close()
            _living.discard(self)


def stop(children: Sequence[Child], grace: float = _GRACE) -> None:
    """Stop several children at once: SIGTERM to each now, SIGKILL to what is left after `grace` seconds."""
    running = [child for child in children if child in _living]
    try:
        if grace > 0:
            for child in running:
                child._terminate()
        deadline = time.monotonic() + grace
        for child in running:
            child._gone(deadline)
    finally:  # a second Ctrl-C only shortens the wait
        for child in running:
            child._kill()


def _main() -> None:
    """What a child does: `python -c … NAME SOCKET [MEMORY SIZE]`."""
    _, _, file, *memory = sys.argv
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for handle in (int(file), *map(int, memory[:1])):
        os.set_inheritable(handle, False)
    shared = SharedMemory(int(memory[1]), int(memory[0])) if memory else None
    channel = Channel(int(file), shared)
    try:
        request = channel.receive()
        module, name = request["function"].split(":")
        result = getattr(importlib.import_module(module), name)(channel, **request["arguments"])
        channel.send(result, RETURNED)
    except Exception as error:
        try:
            channel.send(f"{type(error).__name__}: {error}", ERROR)
            traceback.print_exc()
        except (EOFError, OSError):
            os._exit(1)  # nobody is left to tell
        sys.exit(1)


@atexit.register
def _stop_all() -> None:
    stop(list(_living), grace=0)
