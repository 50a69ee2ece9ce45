"""What the children of `test_processes` do."""

import os
import subprocess
import sys
import time

import numpy as np

from marginax.engine import processes


def echo(channel, times, extra=None):
    print("printed by a library")
    os.write(1, b"argv[0]=\n")
    for _ in range(times):
        channel.send(channel.receive())
    return {"extra": extra, "pid": os.getpid()}


def fill(channel, value):
    array = channel.memory.array(np.float32)
    array[:] = value
    channel.send("filled")
    channel.receive()
    return float(array.sum())


def fail(channel):
    raise ValueError("no such task")


def eof(channel):
    raise EOFError("an empty file")


def crash(channel):
    print("out of luck")
    os._exit(3)


def hang(channel, grandchildren=0):
    """Hangs in C with a stopped signal, having started another of our children and a foreign process."""
    child = processes.start(hang, {}, name="grandchild") if grandchildren else None
    foreign = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    channel.send([os.getpid(), foreign.pid, *(child.receive() if child else [])])
    time.sleep(600)


def parent(channel):
    hang(channel, grandchildren=1)
