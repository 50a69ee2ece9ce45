"""The engine on Ray: a cluster of three nodes on this machine, from which nodes and workers are taken away."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import rich.console

from engine import jobs
from marginax import engine
from marginax._files import load_arrays
from marginax.deep.config import TD3Config
from marginax.deep.metrics import slug
from marginax.deep.run import open_run, run_metrics, train_elsewhere
from marginax.engine import processes
from marginax.experiments import runner
from marginax.experiments.chain import Chain
from marginax.experiments.control import Control
from marginax.offline import evaluate
from reference.log_files import same_answers, write_log
from reference.offline_logs import GAMMA, garnet_log

pytestmark = pytest.mark.long
pytest.importorskip("ray", reason="Ray is not installed")


@pytest.fixture(scope="module")
def cluster():
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # nodes inherit it
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    yield found
    found.shutdown()


NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@pytest.fixture
def place(cluster):
    for _ in range(
        8
    ):  # two at first, then those that a test took away; a busy machine may need longer than Ray waits
        if len(cluster.worker_nodes) < 2:
            with contextlib.suppress(Exception):
                cluster.add_node(**NODE)
    assert len(cluster.worker_nodes) >= 2
    with engine.make("ray", address=cluster.address) as found:
        yield found


def remove_a_node(cluster):
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)


SMALL = Chain(
    seeds=3,
    iterations=60,
    actions=(2, 3),
    horizon=(3,),
    off_policy=(0.0,),
    noise=(0.1,),
    clip=(1.0, 2.0),
)


def reproduce(out, place=None, experiment=SMALL):
    runner.run([experiment], out, console=rich.console.Console(file=io.StringIO()), engine=place or "local")
    parts = sorted((out / experiment.name / "parts").glob("*.npz"))
    return {path.name: {k: v for k, v in load_arrays(path).items() if k != "seconds"} for path in parts}


def same(one, other):
    assert one.keys() == other.keys() and one
    for name, arrays in one.items():
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, other[name][key], err_msg=f"{name} {key}")


def test_an_experiment_gives_the_same_bits(place, tmp_path):
    same(reproduce(tmp_path / "local"), reproduce(tmp_path / "ray", place))
    first, second = (tmp_path / kind / "chain" / "chain.csv" for kind in ("local", "ray"))
    assert first.read_bytes() == second.read_bytes()


TRAINED = Control(
    seeds=3,
    tasks=("Pendulum-v1",),
    operators=("retrace",),
    steps=600,
    evaluate_every=200,
    episodes=1,
    checkpoint_minutes=0.001,
    agent=TD3Config(hidden=(16, 16), random_steps=200, batch_size=16),
)


def train(out, place, lose=lambda name, message: None):
    """Metrics of the run, without how long things took."""
    runs = {
        task: (out / slug(task), open_run(out / slug(task), TRAINED.population(task)))
        for task in TRAINED.tasks
    }
    options = {"checkpoint_minutes": TRAINED.checkpoint_minutes, "keep_replay": False, "seconds": None}
    outcome = train_elsewhere(place, runs, listen=lose, **options)
    assert {found["state"] for found in outcome.values()} == {"finished"}
    lines = run_metrics(out / slug("Pendulum-v1"))
    return [
        {k: v for k, v in line.items() if k not in ("seconds", "steps_per_second", "time")} for line in lines
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with engine.make("local", workers=2) as place:
        return train(tmp_path_factory.mktemp("local"), place)


@pytest.mark.parametrize("loss", ["none", "worker", "node"])
def test_a_population_gives_the_same_metrics_whatever_is_lost(cluster, place, trained, tmp_path, loss):
    lost = []

    def lose(name, message):
        if message.get("step", 0) > 250 and not lost:
            lost.append(name)
            if loss == "node":
                remove_a_node(cluster)
            elif loss == "worker":
                training = [pid for pid, text in ray_processes().items() if text.startswith("ray::Pendulum")]
                os.kill(training[0], signal.SIGKILL)

    assert train(tmp_path, place, lose) == trained
    assert lost


def test_values_errors_messages_and_resources(place):
    tasks = [engine.Task(f"number {n}", jobs.double, {"number": n}) for n in (1, -2, 3)]
    tasks.append(
        engine.Task("other", jobs.variable, {"name": "MARGINAX_TEST"}, environment={"MARGINAX_TEST": "1"})
    )
    heard = []
    found = {
        o.task.name: o for o in place.run(tasks, lambda task, message: heard.append((task.name, message)))
    }
    assert found["number 1"].value == 2 and found["number 3"].value == 6
    assert (
        isinstance(found["number -2"].error, ValueError) and str(found["number -2"].error) == "-2 is negative"
    )
    assert found["other"].value[0] == "1"
    assert ("number 1", "started") in heard
    with pytest.raises(ValueError, match="no node of the Ray cluster has 1 CPUs and 2 GPUs"):
        engine.make("ray", gpus=2)


@pytest.mark.parametrize("loss", ["worker", "node"])
def test_tasks_that_are_lost_carry_on_elsewhere(cluster, place, tmp_path, loss):
    tasks = [
        engine.Task(name, jobs.count, {"folder": str(tmp_path), "name": name, "until": 20, "pause": 0.2})
        for name in "abc"
    ]
    lost = []

    def lose(task, message):
        if isinstance(message, dict) and message["count"] >= 5 and not lost:
            lost.append(message["pid"])
            if loss == "worker":
                os.kill(message["pid"], signal.SIGKILL)
            else:
                remove_a_node(cluster)

    found = {o.task.name: (o.value, o.error) for o in place.run(tasks, lose)}
    assert lost
    assert all(error is None and value[0] == 20 for value, error in found.values())
    assert [value[1] > 0 for value, _ in found.values()].count(True) == 1  # one of them began in the middle


def test_a_task_whose_worker_always_dies_is_named(place):
    outcome = next(place.run([engine.Task("bad", os.kill, {"pid": 0}, resumes=False)]))
    assert isinstance(outcome.error, TypeError)
    outcome = next(place.run([engine.Task("gone", suicide, resumes=False)]))
    assert isinstance(outcome.error, processes.ProcessDied) and str(outcome.error).startswith("gone: ")


def suicide(sender):
    os.kill(os.getpid(), signal.SIGKILL)


def test_objects_are_merged_and_made_again_when_they_are_lost(cluster, place, tmp_path):
    shares = [{"numbers": list(range(k, 100, 6))} for k in range(6)]
    crew = place.crew(jobs.Sum, shares)
    assert crew.reduce("total", 2).value == 2 * sum(range(100))
    assert sum(crew.call("die_once", str(tmp_path))) == sum(range(100))
    calls = crew.call("total", 1, 0.5)
    first = next(calls)
    remove_a_node(cluster)
    assert first.value + sum(total.value for total in calls) == sum(range(100))
    assert crew.reduce("total", 1).value == sum(range(100))


@pytest.mark.parametrize("loss", ["none", "worker", "node"])
def test_a_log_of_20_parts_gives_the_same_answers_whatever_is_lost(cluster, place, tmp_path, loss):
    _, pi, _, rows = garnet_log(3, episodes=400)
    write_log(tmp_path / "log", rows, parts=20)
    wanted = ["weighted-is", "certainty-equivalence", "regression", "fqe-retrace", "weighted-doubly-robust"]
    given = {"discount": GAMMA, "estimators": wanted}
    alone = evaluate(tmp_path / "log", pi, **given)
    lost = []

    def lose(name, parts):
        if name == ("fitted Q" if loss == "worker" else "weighting") and not lost:
            lost.append(name)
            if loss == "node":
                remove_a_node(cluster)
            elif loss == "worker":
                shares = [pid for pid, text in ray_processes().items() if text.startswith("ray::_Resident")]
                os.kill(shares[0], signal.SIGKILL)
        return iter(parts)

    same_answers(evaluate(tmp_path / "log", pi, engine=place, progress=lose, **given), alone)
    assert lost


def test_a_scattered_log_is_sorted_first_and_says_so(place, tmp_path):
    _, pi, _, rows = garnet_log(4, episodes=60)
    write_log(tmp_path / "sorted", rows, parts=1)
    write_log(tmp_path / "log", rows, parts=4, order=np.random.default_rng(0).permutation(len(rows)))
    given = {"discount": GAMMA, "estimators": ["weighted-is", "certainty-equivalence"]}
    alone = evaluate(tmp_path / "sorted", pi, **given)
    with pytest.raises(ValueError, match="appears again after other episodes"):
        evaluate(tmp_path / "log", pi, **given)
    found = evaluate(tmp_path / "log", pi, engine=place, **given)
    same_answers(found, alone)
    assert any("sorted by episode and step" in note for note in found.notes)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == [f"{k:03}.parquet" for k in range(4)]


def ray_processes():
    """Processes of Ray, by number."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "raylet" in text or "gcs_server" in text or text.startswith("ray::"):
            found[int(path.parent.name)] = text
    return found


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
def test_an_interrupted_driver_leaves_no_process(end):
    script = """
    import signal, sys, tempfile
    from engine import jobs
from reference.log_files import same_answers, write_log
from reference.offline_logs import GAMMA, garnet_log
    from marginax import engine
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments = {"folder": tempfile.mkdtemp(), "until": 10_000, "pause": 0.1}
    with engine.make("ray") as place:
        tasks = [engine.Task(n, jobs.count, {**arguments, "name": n}) for n in "ab"]
        for _ in place.run(tasks, lambda task, message: print(message, flush=True)):
            pass
    """
    before = ray_processes()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "RAY_ADDRESS": ""},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    assert ray_processes().keys() - before.keys()
    process.send_signal(getattr(signal, end))
    process.wait(timeout=60)
    for _ in range(300):
        if not ray_processes().keys() - before.keys():
            return
        time.sleep(0.1)
    raise AssertionError(ray_processes().keys() - before.keys())
