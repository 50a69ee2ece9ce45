"""Processes: messages on their own channel, no process outlives its parent, locks that name their holder."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import jax.numpy as jnp
import numpy as np
import pytest

from engine import children
from marginax.engine import processes


def test_messages_and_results_whatever_is_printed(capfd):
    sent = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::2],
        "b": [np.array(True), {"c": np.zeros((0, 2))}, None, "text", 1.5, float("nan")],
        "big": np.arange(300_000),
    }
    with processes.start(children.echo, {"times": 2, "extra": np.float64(3)}, name="echo") as child:
        child.send(sent)
        found = child.receive(timeout=60)
        child.send("next")
        assert list(child.messages()) == ["next"]
    assert child.result["extra"] == 3.0 and child.result["pid"] == child.pid != os.getpid()
    np.testing.assert_array_equal(found["a"], sent["a"])
    assert found["a"].dtype == np.float32
    np.testing.assert_array_equal(found["big"], sent["big"])
    assert found["b"][0].shape == () and found["b"][1]["c"].shape == (0, 2)
    assert found["b"][2:5] == [None, "text", 1.5] and np.isnan(found["b"][5])
    assert "[echo] printed by a library\n[echo] argv[0]=\n" in capfd.readouterr().err


def test_a_log_takes_what_is_printed(tmp_path, capfd):
    with processes.start(children.echo, {"times": 0}, log=tmp_path / "log") as child:
        child.wait()
    assert (tmp_path / "log").read_text() == "printed by a library\nargv[0]=\n"
    assert capfd.readouterr().err == ""


def test_shared_memory_is_seen_on_both_sides():
    memory = processes.SharedMemory(40)
    with processes.start(children.fill, {"value": 2}, memory=memory) as child:
        child.receive(timeout=60)
        assert memory.array(np.float32).tolist() == [2.0] * 10
        memory.array(np.float32)[0] = 7
        child.send("go on")
        assert child.wait() == 25.0


def test_what_raises_fails_and_what_is_killed_dies():
    for function, sentence in (
        (children.fail, "ValueError: no such task"),
        (children.eof, "EOFError: an empty file"),
    ):
        with processes.start(function, name="worker 3") as child:
            with pytest.raises(processes.ProcessFailed, match=f"worker 3 failed: {sentence}"):
                child.receive()
            child.send("ignored")
    with processes.start(children.hang, name="worker 4") as child:
        child.receive(timeout=60)
        with pytest.raises(TimeoutError):
            child.receive(timeout=0.01)
        os.kill(child.pid, signal.SIGKILL)
        assert processes.wait([child], timeout=60) == [child]
        with pytest.raises(processes.ProcessDied, match=r"worker 4 was killed \(SIGKILL\)"):
            child.receive()


def test_the_last_words_of_a_process_are_told():
    child = processes.start(children.crash, name="worker 5")
    with pytest.raises(processes.ProcessDied, match="worker 5 ended with status 3: out of luck"):
        child.receive()


@pytest.mark.parametrize(
    "wrong", [b"bytes", {"a": [b"bytes"]}, np.ones(2, "f4,i4"), jnp.ones(2, jnp.bfloat16)]
)
def test_what_would_arrive_as_something_else_is_not_sent(wrong):
    with processes.start(children.echo, {"times": 1}) as child:
        with pytest.raises(
            (TypeError, ValueError), match=r"bytes is not JSON|must not have arrays of the type"
        ):
            child.send(wrong)
        child.send("whole")
        assert child.receive(timeout=60) == "whole"


def test_only_functions_that_have_a_name_can_be_started():
    with pytest.raises(ValueError, match="named function of an importable module"):
        processes.start(lambda channel: None)


def gone(pid):
    """Whether a process ends within some seconds (a zombie has ended)."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_stop_ends_the_whole_group():
    with processes.start(children.parent) as child:
        pids = child.receive(timeout=60)
        assert len(pids) == 4
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "SIGINT", "exit", "stopped"])
def test_children_end_with_their_parent(end):
    script = """
    import os, signal, sys, time
    from engine import children
    from marginax.engine import processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = processes.start(children.parent)
    pids = child.receive()
    if sys.argv[1] == "stopped":
        os.kill(child.pid, signal.SIGSTOP)  # a child that cannot do anything itself
    print(*pids, flush=True)
    if sys.argv[1] != "exit":
        time.sleep(600)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    pids = process.stdout.readline().split()
    assert len(pids) == 4
    if end != "exit":
        process.send_signal(signal.SIGKILL if end == "stopped" else getattr(signal, end))
    process.wait(timeout=60)
    assert all(gone(int(pid)) for pid in pids)
