"""What tasks and objects of the engine tests do."""

import os
import signal
import threading
import time
from pathlib import Path


def double(sender, number):
    sender.send({"number": number})
    if number < 0:
        raise ValueError(f"{number} is negative")
    return 2 * number


def count(sender, folder, name, until, pause):
    """Counts in a file, as a training run does with its checkpoint; returns the count and where it began here."""
    path = Path(folder) / name
    begun = int(path.read_text()) if path.exists() else 0
    for k in range(begun + 1, until + 1):
        path.with_suffix(".new").write_text(str(k))
        path.with_suffix(".new").replace(path)
        sender.send({"count": k, "pid": os.getpid()})
        time.sleep(pause)
    return until, begun


def die(sender):
    os.kill(os.getpid(), signal.SIGKILL)


def stubborn(sender):
    """Sends messages for ever, SIGTERM or not."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        sender.send({"pid": os.getpid(), "padding": "x" * 3000})


def haunted(sender):
    """Leaves a process that is in no group of ours, and holds the channel open."""
    ghost = os.fork()
    if not ghost:
        os.setsid()
        time.sleep(600)
    sender.send({"ghost": ghost})
    time.sleep(600)


def variable(sender, name):
    return os.environ.get(name), os.getpid()


class Refusal(Exception):
    """Cannot be unpickled: `Refusal(message)` lacks an argument."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


class Locked(Exception):
    """Cannot be pickled."""

    def __init__(self, message):
        super().__init__(message)
        self.lock = threading.Lock()


def refuse(sender):
    raise Refusal("the log", "it is damaged")


def lock(sender):
    raise Locked("the log is locked")


class Refused:
    """An object that cannot be made."""

    def __init__(self):
        refuse(None)


class Sum:
    """A mergeable sum of a share of numbers."""

    def __init__(self, numbers):
        self.numbers = numbers

    def total(self, factor, pause=0.0):
        time.sleep(pause)
        return Total(factor * sum(self.numbers))

    def pid(self):
        return os.getpid()

    def die_once(self, folder):
        flag = Path(folder) / f"{min(self.numbers)}"
        if not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return sum(self.numbers)


class Total:
    def __init__(self, value):
        self.value = value

    def merge(self, other):
        self.value += other.value
