"""Ctrl-C: what it does to a command, to its threads and to its processes.

- **The main thread.** Python raises `KeyboardInterrupt` there, between two of its own instructions. A compilation may keep it from
  the next one for minutes, and a callback of the garbage collector swallows the exception. So a command that does not end by
  itself is ended after a moment (`end_soon`).
- **Other threads** cannot be stopped inside a compiled program, and would be torn down with the interpreter. So the process
  ends without waiting for them (`leave`).
- **Worker processes** ignore Ctrl-C, and end when the process that started them ends (`engine.processes`).

Files are written whole or not at all, so ending at any moment leaves them in order.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

STATUS = 130
_PATIENCE = 1.5  # seconds after Ctrl-C that a command has to end by itself
_leaving = threading.Lock()
_kept: list[socket.socket] = []


def end_soon() -> None:
    """From now on Ctrl-C ends this process within seconds, even while compiled code holds the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return
    ours, signals = socket.socketpair()
    signals.setblocking(False)
    signal.set_wakeup_fd(signals.fileno())
    _kept.append(signals)

    def watch() -> None:
        while signal.SIGINT not in ours.recv(64):
            pass
        time.sleep(_PATIENCE)
        leave("marginax: interrupted")

    def unraisable(event: Any) -> None:
        if not issubclass(event.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(event)

    threading.Thread(target=watch, daemon=True).start()
    sys.unraisablehook = unraisable


def ignore() -> None:
    """From now on Ctrl-C changes nothing: the work is over, and the interpreter ends."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave(sentence: str = "") -> NoReturn:
    """End the process without waiting for threads; the sentence is printed once, whichever thread comes first."""
    with _leaving:
        with contextlib.suppress(Exception):
            if sentence:
                if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
                    sys.stderr.write("\x1b[?25h\n")  # shows the cursor that a progress bar hid
                print(sentence, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(STATUS)
