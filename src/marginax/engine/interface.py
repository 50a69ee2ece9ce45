"""Tasks, what becomes of them, and what an engine is."""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from marginax import _checks as checks


@runtime_checkable
class Sender(Protocol):
    """What a task's function gets as its first argument."""

    def send(self, message: Any) -> None:
        """Send a message to the listener of `Engine.run`, such as progress; JSON data."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A function call that can be made anywhere.

    Attributes:
        name: for people, in progress and errors.
        function: called as `function(sender, **arguments)`; `sender.send(message)` reports progress.
        arguments: JSON data and arrays where the task has a process of its own.
        program: tasks with the same one run the same compiled programs; the first goes ahead alone in a process.
        environment: if given, the task has a process of its own, with these variables set before anything is
            imported. Its function must be one of an importable module.
        resumes: whether calling the function again after its process was killed carries on where it was, so that
            an engine may do so.

    >>> Task("three", lambda sender, n: n + 1, {"n": 2}).arguments
    {'n': 2}
    """

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    program: str = ""
    environment: Mapping[str, str] | None = None
    resumes: bool = True


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a task: a value, or an error.

    Attributes:
        task: the task.
        value: what its function returned.
        error: what it raised, or None.
        seconds: how long the function took.
    """

    task: Task
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


Listener = Callable[[Task, Any], None]


class Crew(abc.ABC):
    """Objects of one kind, each beside its share of the data, such as a part of a log. A call reaches all of them."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @abc.abstractmethod
    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Iterator[Any]:
        """What the method of each returns, in their order; all work at the same time.

        With `each`, the k-th object's method has `each[k]` as a last argument; objects beyond its length rest.
        """

    @abc.abstractmethod
    def reduce(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Any:
        """What `call` yields, merged in order by `a.merge(b)`, which adds `b` to `a`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release the objects."""

    @abc.abstractmethod
    def share(self, value: Any) -> Callable[[], Any]:
        """A function that returns the value where the objects are. The value is sent once, not with every call."""


class Engine(abc.ABC):
    """Runs tasks, and keeps objects. Used in a `with` block, at whose end nothing of it is left running.

    Attributes:
        places: how many objects of a crew work at the same time.
        remote: whether tasks may run on other machines.
        cpus: cores that a task may use, where the engine places tasks on machines.
        gpus: accelerators that a task may use.
    """

    places: int = 1
    remote: bool = False
    cpus: float = 1.0
    gpus: float = 0.0

    @abc.abstractmethod
    def run(self, tasks: Sequence[Task], listen: Listener | None = None) -> Iterator[Outcome]:
        """Run tasks, as many at a time as there is room for, and yield outcomes as they come in.

        Args:
            tasks: started in this order.
            listen: called in this thread with a task and each message of it; the first is `"started"`.
        """

    @abc.abstractmethod
    def crew(self, make: Callable[..., Any], arguments: Sequence[Mapping[str, Any]]) -> Crew:
        """Objects `make(**arguments)`, one for each set of arguments, that stay where they are made."""

    @abc.abstractmethod
    def close(self, interrupted: bool = False) -> None:
        """End what is still running: wait for threads, unless `interrupted`; end processes."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(interrupted=kind is not None and not issubclass(kind, Exception))


def make(
    engine: str = "local",
    *,
    workers: int = 2,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
) -> Engine:
    """An engine by name: `local`, or `ray` (a running cluster at `address`, or one on this machine).

    Args:
        engine: its name.
        workers: tasks at a time on this machine; a cluster counts its own cores.
        address: of a Ray cluster, such as `10.0.0.1:6379`.
        cpus: cores for each task on a cluster.
        gpus: accelerators for each task on a cluster; fractions share one.

    Raises:
        ValueError: an unknown name, or an address or resources for the local engine.
        ImportError: Ray is not installed; says how to get it.

    >>> with make("local", workers=1) as place:
    ...     [outcome.value for outcome in place.run([Task("three", lambda sender: 3)])]
    [3]
    """
    cpus, gpus = checks.number("cpus", cpus), checks.number("gpus", gpus)
    if engine == "local":
        from marginax.engine.local import Local

        if address is not None:
            raise ValueError(f"an address is for the engine 'ray', got {address!r} with the engine 'local'")
        if (cpus, gpus) != (1.0, 0.0):
            raise ValueError(
                f"cores and accelerators per task are for the engine 'ray', got {cpus:g} and {gpus:g} with the engine 'local'"
            )
        return Local(workers)
    if engine == "ray":
        from marginax.engine.ray import Ray

        return Ray(address, workers=workers, cpus=cpus, gpus=gpus)
    raise ValueError(f"engine must be 'local' or 'ray', got {engine!r}")


@contextlib.contextmanager
def using(engine: str | Engine, **options: Any) -> Iterator[Engine]:
    """An engine for a `with` block: one that is made by name with `make`'s options, or a given one, which stays open.

    A given one has its workers already; an address beside it is refused.
    """
    if isinstance(engine, Engine):
        if options.get("address") is not None:
            raise ValueError(
                f"an address is for an engine by name, got {options['address']!r} with an engine that is made already"
            )
        yield engine
        return
    with make(engine, **options) as place:
        yield place
