"""A Ray cluster: tasks and resident objects are placed by Ray, and placed again when a node dies."""

import copy
import functools
import hashlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import marginax
from marginax import _checks as checks
from marginax.engine.interface import Crew, Engine, Listener, Outcome, Task
from marginax.engine.processes import ProcessDied

RETRIES = 5  # how often a task or an object whose worker or node died is placed again
KEEP_IDLE = {"idle_worker_killing_time_threshold_ms": 600_000}  # a new process would import JAX again
MERGED = 8  # results that are merged at a time, where they are


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # workers use this environment, as it is
    try:
        import ray
    except ImportError as error:
        raise checks.missing_package("the engine 'ray'", "ray", "ray") from error
    return ray


class Ray(Engine):
    """Runs tasks on a Ray cluster: the one at `address`, one that runs already, or one that is started here.

    Every node needs the same marginax, and the packages that it uses; a task that finds another one says so.

    Args:
        address: such as `10.0.0.1:6379`; by default that of `RAY_ADDRESS`, or of the cluster that `ray start` started here.
        workers: cores of a cluster that is started here.
        cpus: cores for each task.
        gpus: accelerators for each task; fractions share one.

    Raises:
        ConnectionError: there is no cluster at the address.
        ValueError: no node has so many cores and accelerators, or they are negative.
    """

    remote = True

    def __init__(
        self, address: str | None = None, *, workers: int = 2, cpus: float = 1.0, gpus: float = 0.0
    ) -> None:
        if cpus <= 0 or gpus < 0:
            raise ValueError(f"a task needs more than 0 CPUs and at least 0 GPUs, got {cpus:g} and {gpus:g}")
        self.cpus, self.gpus = cpus, gpus
        workers = checks.count("workers", workers)
        ray = self._ray = _ray()
        self._connected_here = not ray.is_initialized()
        if self._connected_here:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
            new: dict[str, Any] = {
                "num_cpus": workers,
                "include_dashboard": False,
                "_system_config": KEEP_IDLE,
            }
            if address is not None:
                _check_address(address)
                new = {"address": address}
            try:
                try:
                    ray.init(**new, **quiet)
                except ValueError:  # there is one, whose cores are not for us to say
                    ray.init(address=address, **quiet)
            except ConnectionError as error:  # Ray's token authentication, for one
                reason = str(error.__cause__ or error).strip().splitlines()[0]
                raise ConnectionError(f"cannot connect to the Ray cluster: {reason}") from None
        self._pending: dict[Any, Task] = {}
        self._actors: list[Any] = []
        self._board: Any = None
        self._started = 0
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            self.close()
            raise ValueError(f"no node of the Ray cluster has {cpus:g} CPUs and {gpus:g} GPUs")
        self.places = max(1, int(ray.cluster_resources().get("CPU", 1)))

    def run(self, tasks: Sequence[Task], listen: Listener | None = None) -> Iterator[Outcome]:
        self._cancel()  # what is left of a run that was given up
        ray, pending = self._ray, self._pending
        if self._board is None:
            self._board = self._actor(_Board, num_cpus=0, scheduling_strategy=self._this_node())
        call, numbered = ray.remote(_call), dict(enumerate(tasks, self._started))
        self._started += len(tasks)
        for number, task in numbered.items():
            options: dict[str, Any] = {"env_vars": dict(task.environment)} if task.environment else {}
            reference = call.options(
                name=task.name,
                num_cpus=self.cpus,
                num_gpus=self.gpus,
                max_retries=RETRIES if task.resumes else 0,
                runtime_env=options,
            ).remote(_digest(), task.function, dict(task.arguments), _Sender(self._board, number))
            pending[reference] = task
        while pending:
            ready, _ = ray.wait(list(pending), timeout=0.2)
            for number, message in ray.get(self._board.take.remote()):
                if listen and number in numbered:
                    listen(numbered[number], message)
            for reference in ready:
                task = pending.pop(reference)
                try:
                    value, seconds = self._get(reference, task.name)
                    yield Outcome(task, value, None, seconds)
                except Exception as error:
                    yield Outcome(task, None, error)

    def crew(self, make: Callable[..., Any], arguments: Sequence[Mapping[str, Any]]) -> "RayCrew":
        """One object for each set of arguments, made and kept on the cluster's nodes in turn."""
        options = {
            "max_restarts": RETRIES,
            "max_task_retries": -1,  # as often as it is made again
            "scheduling_strategy": "SPREAD",
        }
        members = [self._actor(_Resident, _digest(), make, dict(given), **options) for given in arguments]
        return RayCrew(self, members)

    def close(self, interrupted: bool = False) -> None:
        self._cancel()
        self._dismiss(list(self._actors))
        if self._connected_here:
            self._ray.shutdown()

    def _cancel(self) -> None:
        for reference in self._pending:
            self._ray.cancel(reference, force=True)
        self._pending = {}

    def _actor(self, kind: type, *arguments: Any, **options: Any) -> Any:
        self._actors.append(self._ray.remote(kind).options(**options).remote(*arguments))
        return self._actors[-1]

    def _dismiss(self, actors: Sequence[Any]) -> None:
        for actor in actors:
            self._actors.remove(actor)
            self._ray.kill(actor)

    def _this_node(self) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)

    def _get(self, reference: Any, name: str) -> Any:
        """A result, or the exception that the function raised, or `ProcessDied`."""
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except errors.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except errors.RayError as error:
            raise ProcessDied(f"{name}: {str(error).strip().splitlines()[0]}") from None


class RayCrew(Crew):
    """Objects that live in actors of a cluster."""

    def __init__(self, engine: Ray, members: list[Any]) -> None:
        self._engine, self._members = engine, members

    def __len__(self) -> int:
        return len(self._members)

    def call(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Iterator[Any]:
        for reference in self._ask(method, arguments, each):
            yield self._engine._get(reference, method)

    def reduce(self, method: str, *arguments: Any, each: Sequence[Any] | None = None) -> Any:
        references, members = self._ask(method, arguments, each), self._members
        while len(references) > 1:
            starts = range(0, len(references), MERGED)
            references = [members[k].merge.remote(*references[k : k + MERGED]) for k in starts]
            members = members[::MERGED]
        return self._engine._get(references[0], method)

    def close(self) -> None:
        self._engine._dismiss(self._members)
        self._members = []

    def share(self, value: Any) -> Callable[[], Any]:
        return functools.partial(self._engine._ray.get, self._engine._ray.put(value))

    def _ask(self, method: str, arguments: Sequence[Any], each: Sequence[Any] | None) -> list[Any]:
        shared = self._engine._ray.put(arguments)
        last = [()] * len(self) if each is None else [(value,) for value in each]
        return [
            member.call.remote(method, shared, *more)
            for member, more in zip(self._members, last, strict=False)
        ]


class _Board:
    """Keeps the messages of tasks until they are taken."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Any]] = []

    def put(self, number: int, message: Any) -> None:
        self.messages.append((number, message))

    def take(self) -> list[tuple[int, Any]]:
        taken, self.messages = self.messages, []
        return taken


class _Sender:
    """A task's end of the board."""

    def __init__(self, board: Any, number: int) -> None:
        self.board, self.number = board, number

    def send(self, message: Any) -> None:
        import ray

        ray.get(self.board.put.remote(self.number, message))  # it is there before the task's result


def _sending_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces an exception that cannot be pickled or unpickled, which Ray would report as a lost process."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        from ray import cloudpickle

        try:
            return function(*arguments)
        except Exception as error:
            try:
                cloudpickle.loads(cloudpickle.dumps(error))
            except Exception:
                raise RuntimeError(f"{type(error).__name__}: {error}") from None
            raise

    return call


class _Resident:
    """An object in a process of its own. It is made by the first call, which can report an error; an actor's constructor cannot."""

    def __init__(self, code: str, make: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.code, self.make, self.arguments = code, make, arguments

    @functools.cached_property
    def it(self) -> Any:
        _check_code(self.code)
        return self.make(**self.arguments)

    @_sending_errors
    def call(self, method: str, shared: Sequence[Any], *last: Any) -> Any:
        return getattr(self.it, method)(*shared, *last)

    @_sending_errors
    def merge(self, first: Any, *others: Any) -> Any:
        found = copy.deepcopy(first)  # arrays that have travelled cannot be changed
        for other in others:
            found.merge(other)
        return found


@_sending_errors
def _call(code: str, function: Callable[..., Any], arguments: Mapping[str, Any], sender: _Sender) -> Any:
    _check_code(code)
    sender.send("started")
    begun = time.perf_counter()
    value = function(sender, **arguments)
    return value, time.perf_counter() - begun


def _check_address(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError):
        raise ConnectionError(f"there is no Ray cluster at {address!r} (HOST:PORT)") from None


@functools.cache
def _digest() -> str:
    """Changes with any source file of the package."""
    root, digest = Path(marginax.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _check_code(code: str) -> None:
    if code != _digest():
        raise RuntimeError(
            f"the node {socket.gethostname()!r} has another marginax ({marginax.__version__} in "
            f"{str(Path(marginax.__file__).parent)!r}) than the machine that started this: install the same on every node"
        )
