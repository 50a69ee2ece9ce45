"""The engine on Ray: a cluster of three nodes on this machine, from which nodes and workers are taken away.

Every job loses a worker and a node while it is at work, and must give what it gives on this machine.
"""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console

from engine import jobs
from engine.squares import Squares
from marginax import engine
from marginax._files import load_arrays
from marginax._folders import opened
from marginax.deep.config import TD3Config
from marginax.deep.metrics import slug
from marginax.deep.run import open_run, run_metrics, train_elsewhere
from marginax.engine import processes
from marginax.engine.ray import KEEP_IDLE
from marginax.experiments import runner
from marginax.experiments.control import Control
from marginax.experiments.theory import Theory
from marginax.offline import evaluate
from reference.log_files import same_answers, write_log
from reference.offline_logs import GAMMA, garnet_log

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is not installed")

NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
QUICK_TO_NOTICE = {"health_check_period_ms": 500, "health_check_initial_delay_ms": 0}  # that a node is gone


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    inherited = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("compiled")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    os.environ.update(inherited)
    from ray.cluster_utils import Cluster

    head = {**NODE, "include_dashboard": False, "_system_config": {**QUICK_TO_NOTICE, **KEEP_IDLE}}
    for attempt in range(4):  # a busy machine may need longer to start it than Ray waits
        try:
            found = Cluster(initialize_head=True, head_node_args=head)
            break
        except Exception:
            if attempt == 3:
                raise
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def connected(cluster):
    complete(cluster)
    with engine.make("ray", address=cluster.address) as found:
        yield found


@pytest.fixture
def place(cluster, connected):
    complete(cluster)
    return connected


def complete(cluster):
    """Two nodes beside the first."""
    for _ in range(8):
        if len(cluster.worker_nodes) < 2:
            with contextlib.suppress(Exception):
                cluster.add_node(**NODE)
    assert len(cluster.worker_nodes) >= 2


def workers(beginning):
    """Workers of Ray whose title begins so."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(f"ray::{beginning}".encode()):
                found.append(int(path.parent.name))
    return found


class Losses:
    """Takes a worker and a node away, once each, when asked."""

    def __init__(self, cluster):
        self.cluster, self.lost = cluster, []

    def worker(self, beginning):
        if "worker" not in self.lost and (found := workers(beginning)):
            self.lost.append("worker")
            os.kill(min(found), signal.SIGKILL)

    def node(self):
        if "node" not in self.lost:
            self.lost.append("node")
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)


@pytest.fixture
def losses(cluster):
    found = Losses(cluster)
    yield found
    assert set(found.lost) == {"worker", "node"}


class Listening(engine.Engine):
    """An engine whose messages a test hears."""

    def __init__(self, place, hear):
        self.place, self.hear = place, hear

    def run(self, tasks, listen=None):
        def both(task, message):
            self.hear(task, message)
            if listen:
                listen(task, message)

        return self.place.run(tasks, both)

    def crew(self, make, arguments):
        return self.place.crew(make, arguments)

    def close(self, interrupted=False):
        self.place.close(interrupted)


def reproduce(experiment, out, place="local"):
    """Arrays of all parts, without how long they took."""
    runner.run([experiment], out, console=rich.console.Console(file=io.StringIO()), engine=place)
    parts = sorted((out / experiment.name / "parts").glob("*.npz"))
    return {path.name: {k: v for k, v in load_arrays(path).items() if k != "seconds"} for path in parts}


def test_an_experiment_gives_the_same_bits(place, losses, tmp_path):
    experiment, started = Theory(seeds=2, trajectories=10), []

    def hear(task, message):
        started.append(task.name)
        losses.worker(task.name)
        if len(started) > 2:
            losses.node()

    found = reproduce(experiment, tmp_path / "ray", Listening(place, hear))
    alone = reproduce(experiment, tmp_path / "local")
    assert found.keys() == alone.keys() and len(found) == 3
    for name, arrays in alone.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, found[name][key], err_msg=f"{name} {key}")
    first, second = (tmp_path / kind / "theory" / "rates.csv" for kind in ("local", "ray"))
    assert first.read_bytes() == second.read_bytes()


def test_a_part_that_raises_is_named_and_the_others_are_kept(place, tmp_path):
    with pytest.raises(
        RuntimeError, match="squares: part 2: ValueError: 2 is wrong; finished parts are kept"
    ):
        reproduce(Squares(wrong=2), tmp_path, place)
    assert len(list((tmp_path / "squares" / "parts").glob("*.npz"))) == 3
    assert len(reproduce(Squares(), tmp_path, place)) == 4


TRAINED = Control(
    seeds=2,
    tasks=("Pendulum-v1",),
    operators=("retrace",),
    steps=400,
    evaluate_every=100,
    episodes=1,
    checkpoint_minutes=0.001,
    agent=TD3Config(hidden=(16, 16), random_steps=100, batch_size=16),
)


def train(out, place, listen=lambda name, message: None):
    """Metrics of the run, without how long things took."""
    task = TRAINED.tasks[0]
    runs = {task: (out / slug(task), open_run(out / slug(task), TRAINED.population(task)))}
    options = {"checkpoint_minutes": TRAINED.checkpoint_minutes, "keep_replay": False, "seconds": None}
    outcome = train_elsewhere(place, runs, listen=listen, **options)
    assert {found["state"] for found in outcome.values()} == {"finished"}
    timed = ("seconds", "steps_per_second", "time")
    return [{k: v for k, v in line.items() if k not in timed} for line in run_metrics(out / slug(task))]


def test_a_population_on_another_file_system_gives_the_same_metrics(place, losses, tmp_path):
    resumed = []

    def listen(name, message):
        if message.get("step", 0) > 150:
            losses.worker("Pendulum")
        if message.get("step", 0) > 250:
            losses.node()
        resumed.append((name, message.get("step")))

    with opened(f"dir://out::file://{tmp_path}") as out:
        found = train(out, place, listen)
    with engine.make("local", workers=2) as local:
        assert found == train(tmp_path / "local", local)
    parts = [path for path in (tmp_path / "out" / "Pendulum-v1").iterdir() if path.is_dir()]
    assert len(parts) == 2
    for part in parts:
        assert {path.name for path in part.iterdir()} >= {"metrics.jsonl", "checkpoint"}


def test_values_errors_messages_and_resources(place):
    tasks = [engine.Task(f"number {n}", jobs.double, {"number": n}) for n in (1, -2, 3)]
    variables = {"MARGINAX_TEST": "1"}
    tasks.append(engine.Task("other", jobs.variable, {"name": "MARGINAX_TEST"}, environment=variables))
    tasks.append(engine.Task("gone", jobs.die, resumes=False))
    heard = []
    outcomes = place.run(tasks, lambda task, message: heard.append((task.name, message)))
    found = {outcome.task.name: outcome for outcome in outcomes}
    assert found["number 1"].value == 2 and found["number 3"].value == 6
    error = found["number -2"].error
    assert isinstance(error, ValueError) and str(error) == "-2 is negative"
    assert found["other"].value[0] == "1"
    assert isinstance(found["gone"].error, processes.ProcessDied)
    assert str(found["gone"].error).startswith("gone: ")
    assert ("number 1", "started") in heard
    with pytest.raises(ValueError, match="no node of the Ray cluster has 1 CPUs and 2 GPUs"):
        engine.make("ray", gpus=2)


def test_exceptions_that_cannot_be_pickled_and_objects_that_cannot_be_made_say_why(place):
    tasks = [engine.Task("refuse", jobs.refuse), engine.Task("lock", jobs.lock)]
    errors = {outcome.task.name: outcome.error for outcome in place.run(tasks)}
    assert {name: str(error) for name, error in errors.items()} == {
        "refuse": "Refusal: the log: it is damaged",
        "lock": "Locked: the log is locked",
    }
    assert not any(isinstance(error, processes.ProcessDied) for error in errors.values())
    crew = place.crew(jobs.Refused, [{}, {}])
    with pytest.raises(RuntimeError, match=r"^Refusal: the log: it is damaged$"):
        list(crew.call("total"))
    crew.close()


def test_tasks_that_are_lost_carry_on_elsewhere(place, losses, tmp_path):
    given = {"folder": str(tmp_path), "until": 20, "pause": 0.2}
    tasks = [engine.Task(f"count {name}", jobs.count, {**given, "name": name}) for name in "abc"]

    def lose(task, message):
        if isinstance(message, dict) and message["count"] >= 5:
            losses.worker("count")
        if isinstance(message, dict) and message["count"] >= 8:
            losses.node()

    found = [(outcome.value, outcome.error) for outcome in place.run(tasks, lose)]
    assert all(error is None and value[0] == 20 for value, error in found)
    assert any(value[1] > 0 for value, _ in found)  # began in the middle


def test_objects_are_merged_and_made_again_when_they_are_lost(place, tmp_path):
    crew = place.crew(jobs.Sum, [{"numbers": list(range(k, 100, 3))} for k in range(3)])
    assert crew.reduce("total", 2).value == 2 * sum(range(100))
    assert sum(crew.call("die_once", str(tmp_path))) == sum(range(100))
    assert crew.reduce("total", 1).value == sum(range(100))
    crew.close()


def test_a_log_of_20_parts_gives_the_same_answers(place, losses, tmp_path):
    _, pi, _, rows = garnet_log(3, episodes=400)
    write_log(tmp_path / "log", rows, parts=20)
    given = {"discount": GAMMA, "estimators": ["weighted-is", "certainty-equivalence", "fqe-retrace"]}

    def lose(name, parts):
        if name == "weighting":
            losses.node()
        if name == "fitted Q":
            losses.worker("_Resident")
        return iter(parts)

    found = evaluate(f"dir://log::file://{tmp_path}", pi, engine=place, progress=lose, **given)
    same_answers(found, evaluate(tmp_path / "log", pi, **given))


def test_a_scattered_log_is_sorted_first_and_says_so(place, tmp_path):
    _, pi, _, rows = garnet_log(3, episodes=60)
    write_log(tmp_path / "sorted", rows, parts=1)
    write_log(tmp_path / "log", rows, parts=2, order=np.random.default_rng(0).permutation(len(rows)))
    given = {"discount": GAMMA, "estimators": ["weighted-is", "certainty-equivalence"]}
    with pytest.raises(ValueError, match="appears again after other episodes"):
        evaluate(tmp_path / "log", pi, **given)
    found = evaluate(tmp_path / "log", pi, engine=place, **given)
    same_answers(found, evaluate(tmp_path / "sorted", pi, **given))
    assert any("sorted by episode and step" in note for note in found.notes)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [f"{k:03}.parquet" for k in range(2)]


def test_ctrl_c_leaves_no_process(tmp_path):
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "  # ignored in the background
        "from marginax.cli import main; sys.exit(main())"
    )
    command = ["reproduce", "chain", "--engine", "ray", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RAY_ADDRESS": "local", "MARGINAX_TEST": str(tmp_path)},  # a cluster of its own
    )

    def ours():
        """All that the command has started, directly or not."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"MARGINAX_TEST={tmp_path}".encode() in path.read_bytes():
                    found[int(path.parent.name)] = (path.parent / "cmdline").read_text().replace("\0", " ")
        return found

    assert process.stderr is not None
    while not any(text.startswith("ray::chain") for text in ours().values()):
        assert process.poll() is None
        time.sleep(0.1)
    assert len(ours()) > 3
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.stderr.read()
    assert process.wait(timeout=60) == 130
    for _ in range(300):
        if not ours():
            return
        time.sleep(0.1)
    raise AssertionError(ours())
