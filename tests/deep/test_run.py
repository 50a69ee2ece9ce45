"""Runs: seeds are independent, a run killed at any moment ends as one left alone, and failures stay with their seed."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from marginax.cli import main
from marginax.deep import learner, networks
from marginax.deep.config import TD3Config
from marginax.deep.metrics import METRICS, MetricsLog, read_metrics
from marginax.deep.networks import value
from marginax.deep.population import Population
from marginax.deep.run import load_run, open_run, run_metrics, train, train_elsewhere
from marginax.deep.run_config import PopulationConfig
from marginax.deep.run_part import status, train_part
from marginax.engine import Outcome
from marginax.engine.local import Local

AGENT = TD3Config(
    operator="marginalized",
    hidden=(16, 16),
    batch_size=16,
    random_steps=100,
    update_after=100,
    sequence_length=3,
    replay_size=300,
)
CONFIG = PopulationConfig(
    simulator="Pendulum-v1", groups={"td3": AGENT}, seeds=(1,), steps=800, evaluate_every=100, episodes=1
)
WORDS = ["train", "Pendulum-v1", "--operator", "marginalized", "--hidden", "16", "16", "--batch-size", "16"]
WORDS += ["--random-steps", "100", "--update-after", "100", "--sequence-length", "3", "--replay-size", "300"]
WORDS += ["--steps", "5000", "--evaluate-every", "100", "--episodes", "1", "--first-seed", "1"]


def final(folder: Path) -> tuple[list, dict]:
    (path,) = folder.glob("policy-*.npz")
    with np.load(path) as arrays:
        policy = {name: arrays[name] for name in arrays.files}
    lines = [{**line, "operator": ""} for line in read_metrics(folder)]
    return lines, policy


def assert_same(one: Path, other: Path) -> None:
    (metrics, policy), (others, other_policy) = final(one), final(other)
    assert metrics == others
    for name in policy:
        np.testing.assert_array_equal(policy[name], other_policy[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Seed 1, trained in this process without interruption; the buffer wraps around twice."""
    folder = tmp_path_factory.mktemp("alone")
    with Population(CONFIG, folder=folder) as population:
        population.run()
    return folder


@pytest.mark.long
def test_seed_k_of_a_run_of_many_equals_the_run_of_seed_k(alone, tmp_path):
    run = open_run(tmp_path, dataclasses.replace(CONFIG, seeds=(0, 1)))
    heard = []
    outcome = train(tmp_path, run, workers=2, listen=lambda part, message: heard.append((part, message)))
    assert {part: found["state"] for part, found in outcome.items()} == {
        "seed-0": "finished",
        "seed-1": "finished",
    }
    assert_same(tmp_path / "seed-1", alone)
    assert final(tmp_path / "seed-0")[0] != final(alone)[0]
    steps = [line["step"] for part, m in heard if part == "seed-0" for line in m.get("lines", ())]
    assert steps == list(range(100, 900, 100))
    assert [line["seed"] for line in run_metrics(tmp_path)] == [0] * 8 + [1] * 8


def command(folder: Path, end: str = "") -> tuple[int, str]:
    """Run the command; after its first evaluation end it, or kill its part and let it go on."""
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code += "; from marginax.cli import main; sys.exit(main())"
    words = [*WORDS, "--out", str(folder), "--checkpoint-minutes", "0.0001"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    output, done = "", False
    for line in process.stdout or ():
        output += line
        if "return" in line and not done and end:
            done = True
            part = json.loads((folder / "seed-1" / ".lock").read_text())["pid"]
            number = signal.SIGKILL if end == "part" else signal.Signals[end]
            os.kill(part if end == "part" else process.pid, number)
    return process.wait(), output


@pytest.mark.long
def test_killed_stopped_and_interrupted_it_ends_with_the_same_metrics(tmp_path):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert command(alone)[0] == 0
    assert command(killed, "SIGKILL")[0] == -signal.SIGKILL
    status, output = command(killed, "SIGTERM")
    assert status == 143
    assert "checkpoints were written (seed-1 at" in output
    status, output = command(killed, "SIGINT")
    assert status == 130
    assert "the same command carries on" in output
    status, output = command(killed, "part")
    assert status == 0
    assert "seed-1: started again at step" in output
    assert_same(killed / "seed-1", alone / "seed-1")
    assert not list(tmp_path.rglob(".*"))


def test_two_commands_do_not_share_a_folder(tmp_path):
    from marginax._folders import Lock

    run = open_run(tmp_path, CONFIG)
    with Lock(tmp_path), pytest.raises(RuntimeError, match=f"in use by process {os.getpid()}"):
        train(tmp_path, run)


def test_a_part_that_waited_until_the_time_limit_does_not_begin(tmp_path):
    options = {"workers": 0, "checkpoint_minutes": 1.0, "keep_replay": False, "until": time.time()}
    found = train_part(types.SimpleNamespace(send=print), str(tmp_path), "", CONFIG.to_json(), **options)
    assert found == {"state": "new", "step": 0, "failures": []} and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("cores", "workers"), [(0.5, 0), (1.0, 0), (3.0, 2)])
def test_agents_that_learn_together_on_a_cluster_simulate_on_the_cores_that_are_left(
    cores, workers, tmp_path
):
    class Cluster(Local):
        cpus, gpus = cores, 0.5

        def run(self, tasks, listen=None):
            for task in tasks:
                yield Outcome(task, {"state": "finished", "workers": task.arguments["workers"]})

    runs = {"task": (tmp_path, open_run(tmp_path, CONFIG, together=True))}
    options = {"checkpoint_minutes": 1.0, "keep_replay": False, "seconds": None}
    found = train_elsewhere(Cluster(), runs, listen=lambda part, message: None, **options)
    assert found["task agents"]["workers"] == workers


@pytest.mark.slow
def test_metrics_say_what_the_operator_does(alone):
    lines = read_metrics(alone)
    assert [line["step"] for line in lines] == list(range(100, 900, 100))
    last = lines[-1]
    assert 0 < last["trace_mean"] <= 0.7
    assert last["weight_max"] >= 1.0
    assert 1 <= last["effective_length"] <= 3
    assert last["target_variance"] >= 0
    assert last["return"] == pytest.approx(np.mean(last["returns"]))


def events(folder: Path) -> dict:
    found = {}
    (path,) = (folder / "tensorboard").glob("*/events.*")
    records = path.read_bytes()
    while records:
        size = int.from_bytes(records[:8], "little")  # then a checksum, the event, and another checksum
        event = Event.FromString(records[12 : 12 + size])
        records = records[16 + size :]
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    return found


@pytest.mark.slow
def test_tensorboard_shows_what_the_lines_say_and_is_whole_after_a_kill(alone, tmp_path):
    found = events(alone)
    for line in read_metrics(alone):
        assert found["speed", line["step"]] > 0
        for name in ("return", "critic_loss"):
            assert found[name, line["step"]] == pytest.approx(line[name], rel=1e-5)
    with Population(CONFIG, folder=tmp_path) as population:
        population.run(stop=lambda: population.step >= 300)
    board = next((tmp_path / "tensorboard").glob("*/events.*"))
    board.write_bytes(board.read_bytes()[:-20])  # a record cut short
    with Population(CONFIG, folder=tmp_path) as population:
        population.run(stop=lambda: population.step >= 400)
    assert {step for name, step in events(tmp_path) if name == "return"} == {100, 200, 300, 400}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("every", "steps"), [(100, [100, 200]), (400, [])])
def test_a_seed_that_fails_between_evaluations_leaves_a_line_that_says_so(tmp_path, every, steps, overlap):
    config = dataclasses.replace(CONFIG, evaluate_every=every, overlap=overlap)
    with Population(config, folder=tmp_path) as population:
        play = population.pool._local.actors[0].play

        def poisoned(index, layers, out):
            play(index, layers, out)
            if index == 4:
                out.rewards[8] = np.nan

        population.pool._local.actors[0].play = poisoned
        population.run()
    found = status(tmp_path, config)
    assert found["state"] == "diverged"
    assert found["reason"] == "the simulator returned nan at step 208"
    lines = read_metrics(tmp_path)
    last = 300 if overlap else 250  # with overlap, a failure is seen one block later
    assert [line["step"] for line in lines] == [*steps, *({last} - {*steps})]
    assert [line["failed_at"] for line in lines] == [None] * len(steps) + [208]
    assert np.isfinite(lines[-1]["return"])


def test_values_beyond_any_return_are_divergence(tmp_path):
    agent = dataclasses.replace(AGENT, divergence_factor=1e-6)
    config = dataclasses.replace(CONFIG, groups={"td3": agent})
    with Population(config, folder=tmp_path) as population:
        population.run()
    found = status(tmp_path, config)
    assert found["state"] == "diverged"
    said = re.fullmatch(
        r"the mean of \|Q\| reached (\S+), above (\S+) \(1e-06 times what rewards up to .* allow\), at step 100",
        found["reason"],
    )
    assert float(said[1]) > float(said[2])
    assert population.step == found["step"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("first", ["cpu", "gpu"])
def test_a_run_goes_on_where_the_critics_have_another_layout(first, tmp_path, monkeypatch):
    """On a CPU the twin critics are two networks, on an accelerator one; networks here have the layout that is asked for."""
    config = dataclasses.replace(CONFIG, seeds=(1, 2), steps=400)
    pairs = jax.random.normal(jax.random.key(0), (5, 4))

    def values(population):
        agents = population.learners[0].state.agents
        alone = [jax.tree.map(lambda x, i=i: x[i], agents) for i in range(2)]
        return np.stack([value(critic, pairs) for x in alone for critic in (x.critic, x.target_critic)])

    def population(layout, folder):
        monkeypatch.setattr(networks.jax, "default_backend", lambda: layout)
        for program in (learner._initial, learner._insert, learner._learn):
            program.cache_clear()
        return Population(config, folder=folder)

    with population(first, tmp_path / "moved") as before:
        before.run(stop=lambda: before.step >= 200)
    with population({"cpu": "gpu", "gpu": "cpu"}[first], tmp_path / "moved") as after:
        assert isinstance(before.learners[0].state.agents.critic, tuple) == (first == "cpu")
        assert isinstance(after.learners[0].state.agents.critic, tuple) == (first == "gpu")
        assert np.ptp(values(after)[0], axis=0).min() > 1e-4  # the twins differ
        np.testing.assert_allclose(values(after), values(before), rtol=1e-5, atol=1e-6)
        after.run()
    with population(first, tmp_path / "whole") as whole:
        whole.run()
    np.testing.assert_allclose(values(after), values(whole), rtol=1e-3, atol=1e-3)


@pytest.mark.long
def test_a_part_that_fails_ends_alone(tmp_path):
    run = open_run(tmp_path, dataclasses.replace(CONFIG, seeds=(0, 1), steps=200))
    train(tmp_path, run)
    damaged = next((tmp_path / "seed-0" / "checkpoint").glob("replay-*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run = open_run(tmp_path, dataclasses.replace(CONFIG, seeds=(0, 1), steps=300))
    outcome = train(tmp_path, run)
    assert outcome["seed-0"]["state"] == "failed"
    assert "the checkpoint is damaged" in outcome["seed-0"]["reason"]
    assert outcome["seed-1"]["state"] == "finished"


@pytest.mark.long
def test_a_part_that_fails_is_told_once_with_its_step(tmp_path, capsys):
    words = [*WORDS, "--out", str(tmp_path)]
    words[1] = "simulators.own_environments:Breaking-v0"
    assert main(words) == 2
    said = capsys.readouterr()
    assert "seed-1: failed at step 100\n" in said.out
    assert said.err.endswith(
        "marginax: 1 of 1 did not finish. seed-1 failed at step 100: KeyError: 'a wheel came off'\n"
    )
    assert "wheel" not in said.out


def test_a_run_shorter_than_the_time_between_evaluations_can_be_made_longer(tmp_path):
    short = dataclasses.replace(CONFIG, steps=100, evaluate_every=150)
    for steps in (100, 200):
        config = dataclasses.replace(short, steps=steps)
        open_run(tmp_path, config)
        with Population(config, folder=tmp_path / "seed-1") as population:
            population.run()
    assert [line["step"] for line in read_metrics(tmp_path / "seed-1")] == [100, 150, 200]


def test_settings_of_an_earlier_run_are_not_mixed(tmp_path):
    open_run(tmp_path, CONFIG)
    other = dataclasses.replace(CONFIG, groups={"td3": dataclasses.replace(AGENT, decay=0.5)})
    with pytest.raises(ValueError, match=r"holds a run with decay = 0.7, not 0.5: choose another folder"):
        open_run(tmp_path, other)
    with pytest.raises(ValueError, match="steps must be at least the 800"):
        open_run(tmp_path, dataclasses.replace(CONFIG, steps=400))
    open_run(tmp_path, dataclasses.replace(CONFIG, steps=1600, seeds=(0, 2)))
    assert load_run(tmp_path).config.seeds == (0, 1, 2)


@pytest.mark.slow
def test_a_cut_last_line_of_metrics_is_left_out(alone, tmp_path):
    content = (alone / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(content[:-10])
    assert len(read_metrics(tmp_path)) == 7
    assert json.loads(content.splitlines()[0])["step"] == 100


def test_metrics_that_do_not_fit_on_the_disk_are_named(tmp_path):
    log = MetricsLog(tmp_path)
    log.start(None)
    log.close()
    with (
        Path("/dev/full").open("ab", buffering=0) as log.file,
        pytest.raises(OSError, match=f"No space left on device: {str(tmp_path / METRICS)!r}"),
    ):
        log.write([{"operator": "a", "seed": 0, "step": 1}], 1.0)
    log.close()
