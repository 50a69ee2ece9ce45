"""This machine: tasks in threads, or in processes of their own where they need other variables."""

import atexit
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from marginax import _checks as checks
from marginax import _interrupts
from marginax.engine import processes
from marginax.engine.interface import Crew, Engine, Listener, Outcome, Task

_abandoned: list[threading.Thread] = []


class _Event(NamedTuple):
    number: int  # of the task
    message: Any
    over: bool  # the message is the outcome, or an interruption


class Local(Engine):
    """Runs tasks on this machine, `workers` at a time.

    Tasks without an environment share this process, and with it what JAX has compiled; they cannot be interrupted.
    After Ctrl-C the interpreter ends without waiting for them (`marginax._interrupts`).
    """

    def __init__(self, workers: int = 2) -> None:
        self.workers = checks.count("workers", workers)
        self._threads: list[threading.Thread] = []
        self._children: set[processes.Child] = set()
        self._closing = False

    def run(self, tasks: Sequence[Task], listen: Listener | None = None) -> Iterator[Outcome]:
        waiting = list(range(len(tasks)))
        running: set[int] = set()
        compiled: set[str] = set()
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        while waiting or running:
            for number in list(waiting):
                program = tasks[number].program
                alone = tasks[number].environment is None and program not in compiled
                if len(running) < self.workers and not (
                    alone and any(tasks[other].program == program for other in running)
                ):
                    waiting.remove(number)
                    running.add(number)
                    self._start(number, tasks[number], events)
                    if listen:
                        listen(tasks[number], "started")
            event = events.get()
            if not event.over:
                if listen:
                    listen(tasks[event.number], event.message)
                continue
            running.remove(event.number)
            compiled.add(tasks[event.number].program)
            if isinstance(event.message, BaseException):
                raise event.message  # KeyboardInterrupt in a thread
            yield event.message

    def crew(self, make: Callable[..., Any], arguments: Sequence[Mapping[str, Any]]) -> "LocalCrew":
        """Objects in this process."""
        return LocalCrew([make(**given) for given in arguments])

    def close(self, interrupted: bool = False) -> None:
        self._closing = True
        processes.stop(list(self._children))
        if interrupted:
            _abandoned.extend(self._threads)
            return
        for thread in self._threads:
            thread.join()

    def _start(self, number: int, task: Task, events: "queue.SimpleQueue[_Event]") -> None:
        def work() -> None:
            begun = time.perf_counter()
            outcome: Outcome | BaseException
            try:
                if task.environment is None:
                    value = task.function(_Here(number, events), **task.arguments)
                else:
                    value = self._in_process(number, task, events)
                outcome = Outcome(task, value, None, time.perf_counter() - begun)
            except Exception as error:
                outcome = Outcome(task, None, error, time.perf_counter() - begun)
            except BaseException as error:
                outcome = error
            events.put(_Event(number, outcome, over=True))

        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, name=task.name, daemon=True))
        self._threads[-1].start()

    def _in_process(self, number: int, task: Task, events: "queue.SimpleQueue[_Event]") -> Any:
        """The task's value from a process of its own; one that was killed is started again, twice."""
        for attempt in range(3):
            child = processes.start(
                task.function, task.arguments, name=task.name, environment=task.environment
            )
            self._children.add(child)
            if self._closing:  # perhaps `close` has not seen this child
                child.stop()
            try:
                with child:
                    for message in child.messages():
                        events.put(_Event(number, message, over=False))
                return child.result
            except processes.ProcessDied as died:
                if self._closing or not task.resumes or attempt == 2:
                    raise
                events.put(_Event(number, {"state": "restarted", "reason": str(died)}, over=False))
            finally:
                self._children.discard(child)


class LocalCrew(Crew):
    """Objects in this process, called one after another."""

    def __init__(self, members: Sequence[Any]) -> None:
        self.members = members

    def __len__(self) -> int:
        return len(self.members)

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Iterator[Any]:
        last = [()] * len(self) if each is None else [(value,) for value in each]
        return (
            getattr(member, method)(*arguments, *more)
            for member, more in zip(self.members, last, strict=False)
        )

    def reduce(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Any:
        first, *others = self.call(method, *arguments, each=each)
        for other in others:
            first.merge(other)
        return first

    def close(self) -> None:
        self.members = []

    def share(self, value: Any) -> Callable[[], Any]:
        return lambda: value


class _Here:
    """Sends the messages of a task in a thread."""

    def __init__(self, number: int, events: "queue.SimpleQueue[_Event]") -> None:
        self.number, self.events = number, events

    def send(self, message: Any) -> None:
        self.events.put(_Event(self.number, message, over=False))


@atexit.register
def _leave_abandoned_threads() -> None:
    if any(thread.is_alive() for thread in _abandoned):
        _interrupts.leave()
