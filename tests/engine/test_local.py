"""The engine on this machine: threads, processes of their own, and objects."""

import os
import signal
import sys
import threading
import time

import pytest

from engine import jobs
from marginax import engine
from marginax.engine.ray import _digest, _Resident


def test_values_errors_and_messages():
    tasks = [engine.Task(f"number {n}", jobs.double, {"number": n}) for n in (1, -2, 3)]
    heard = []
    with engine.make("local", workers=2) as place:
        found = {
            o.task.name: o for o in place.run(tasks, lambda task, message: heard.append((task.name, message)))
        }
    assert found["number 1"].value == 2 and found["number 3"].value == 6
    assert isinstance(found["number -2"].error, ValueError)
    assert ("number 1", "started") in heard and ("number 3", {"number": 3}) in heard


def test_the_first_of_a_program_goes_ahead_alone():
    order = []

    def work(sender, name):
        order.append(f"{name} begins")
        for _ in range(100_000):
            pass
        order.append(f"{name} ends")

    tasks = [engine.Task(n, work, {"name": n}, program="same") for n in "abc"]
    with engine.make("local", workers=3) as place:
        assert [outcome.error for outcome in place.run(tasks)] == [None] * 3
    assert order[:2] == ["a begins", "a ends"]


def test_a_task_with_variables_has_a_process_and_is_started_again_when_it_is_killed(tmp_path):
    here = engine.Task("here", jobs.variable, {"name": "MARGINAX_TEST"})
    there = engine.Task("there", jobs.variable, {"name": "MARGINAX_TEST"}, environment={"MARGINAX_TEST": "1"})
    arguments = {"folder": str(tmp_path), "name": "count", "until": 4, "pause": 0.05}
    resumed = engine.Task("counter", jobs.count, arguments, environment={})
    killed = []

    def kill_once(task, message):
        if isinstance(message, dict) and message.get("count") == 2 and not killed:
            killed.append(message["pid"])
            os.kill(message["pid"], 9)

    with engine.make("local", workers=3) as place:
        found = {o.task.name: o.value for o in place.run([here, there, resumed], kill_once)}
    assert found["here"] == (None, os.getpid())
    assert found["there"][0] == "1" and found["there"][1] != os.getpid()
    assert killed and found["counter"][0] == 4 and found["counter"][1] >= 2


def test_closing_ends_processes_that_are_being_listened_to():
    """Each has a thread that receives its messages all the while."""
    heard = set()

    def give_up(task, message):
        if message != "started":
            heard.add(message["pid"])
        if len(heard) == 3:
            raise InterruptedError

    tasks = [engine.Task(f"{k}", jobs.stubborn, environment={}) for k in range(3)]
    before = set(threading.enumerate())
    with pytest.raises(InterruptedError), engine.make("local", workers=3) as place:
        list(place.run(tasks, give_up))
    assert not any(os.path.exists(f"/proc/{pid}") for pid in heard)
    assert set(threading.enumerate()) <= before


def test_closing_does_not_wait_for_a_foreign_process_that_holds_the_channel():
    def give_up(task, message):
        if message != "started":
            heard.append(message["ghost"])
            raise InterruptedError

    heard = []
    begun = time.monotonic()
    with pytest.raises(InterruptedError), engine.make("local", workers=1) as place:
        list(place.run([engine.Task("haunted", jobs.haunted, environment={})], give_up))
    os.kill(heard[0], signal.SIGKILL)
    assert time.monotonic() - begun < 30


def test_a_run_may_follow_one_that_was_given_up(tmp_path):
    given = {"folder": str(tmp_path), "until": 10, "pause": 0.05}
    here = engine.Task("here", jobs.variable, {"name": "MARGINAX_TEST"})
    there = [
        engine.Task(name, jobs.count, {**given, "name": name}, environment={}, resumes=False) for name in "ab"
    ]
    with engine.make("local", workers=4) as place:
        assert next(place.run([here, there[0]])).task is here
        outcomes = list(place.run([here, there[1]]))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert (tmp_path / "b").read_text() == "10"


def test_objects_of_a_crew_are_called_in_order_and_merged():
    with engine.make("local") as place:
        crew = place.crew(jobs.Sum, [{"numbers": [1, 2]}, {"numbers": [3]}, {"numbers": [4]}])
        assert [total.value for total in crew.call("total", 2)] == [6, 6, 8]
        assert crew.reduce("total", 1).value == 10
        assert len(crew) == 3


def test_unknown_engines_and_useless_addresses_are_refused():
    with pytest.raises(ValueError, match="engine must be 'local' or 'ray', got 'spark'"):
        engine.make("spark")
    with pytest.raises(ValueError, match="an address is for the engine 'ray'"):
        engine.make("local", address="auto")
    with (
        engine.make("local", workers=1) as place,
        pytest.raises(ValueError, match="got 'auto' with an engine that is made already"),
        engine.using(place, address="auto"),
    ):
        pass
    with pytest.raises(ValueError, match="workers must be at least 1"):
        engine.make("local", workers=0)


def test_an_address_without_a_cluster_is_said_at_once():
    pytest.importorskip("ray")
    for address in ("127.0.0.1:1", "127.0.0.1"):
        with pytest.raises(ConnectionError, match=f"there is no Ray cluster at '{address}'"):
            engine.make("ray", address=address)


def test_a_node_with_another_marginax_says_so_when_it_is_called():
    """Ray would not report what an actor's constructor raises."""
    pytest.importorskip("ray")
    resident = _Resident("another digest", jobs.Sum, {"numbers": [1]})
    with pytest.raises(RuntimeError, match="has another marginax"):
        resident.call("total", [1])
    assert _Resident(_digest(), jobs.Sum, {"numbers": [1]}).call("total", [2]).value == 2


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="the engine 'ray' needs the package ray: "):
        engine.make("ray")
