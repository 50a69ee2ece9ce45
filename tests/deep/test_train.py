"""Whole runs on a small simulator: repeatable, resumable after SIGKILL, independent by seed, stopped by NaN."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from tensorboardX.proto.event_pb2 import Event

from marginax.deep import td3, train
from marginax.deep.config import TD3Config
from marginax.deep.run import METRICS, Run, read_metrics, read_status, seed_folder
from marginax.deep.seeds import train_seeds
from marginax.deep.train import Trainer

AGENT = TD3Config(
    operator="marginalized",
    hidden=(16, 16),
    batch_size=16,
    random_steps=100,
    update_after=100,
    sequence_length=3,
    replay_size=300,
)
RUN = Run(
    simulator="Pendulum-v1", steps=800, evaluate_every=100, checkpoint_every=200, episodes=1, agent=AGENT
)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """All trainings of this module, in this process or others, share their compiled programs."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def final(folder: Path) -> tuple[bytes, dict]:
    with np.load(folder / "policy.npz") as arrays:
        return (folder / METRICS).read_bytes(), {name: arrays[name] for name in arrays.files}


def assert_same(one: Path, other: Path) -> None:
    (metrics, policy), (others, other_policy) = final(one), final(other)
    assert metrics == others
    for name in policy:
        np.testing.assert_array_equal(policy[name], other_policy[name])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Seed 1, trained in this process without interruption; the buffer wraps around twice."""
    folder = tmp_path_factory.mktemp("alone")
    status = Trainer(RUN, seed=1, folder=folder).train()
    assert status == {"state": "finished", "step": 800}
    return folder


def test_seed_k_of_a_run_of_many_equals_the_run_of_seed_k(alone, tmp_path):
    RUN.save(tmp_path)
    heard = []
    outcome = train_seeds(tmp_path, [0, 1], workers=2, listen=heard.append)
    assert {seed: status["state"] for seed, status in outcome.items()} == {0: "finished", 1: "finished"}
    assert_same(seed_folder(tmp_path, 1), alone)
    assert (seed_folder(tmp_path, 0) / METRICS).read_bytes() != (alone / METRICS).read_bytes()
    assert [m["step"] for m in heard if m["seed"] == 0 and "return" in m] == list(range(100, 900, 100))


def test_a_run_killed_at_any_moment_ends_with_the_same_metrics(alone, tmp_path):
    """SIGKILL after ever more lines of progress, until a process reaches the end by itself."""
    RUN.save(tmp_path)
    command = [sys.executable, "-m", "marginax.deep.worker", str(tmp_path), "1"]
    path = os.pathsep.join([str(Path(train.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    kills = 0
    for patience in (5, 7, 1000):  # lines, 50 steps each: before the second checkpoint, after it, never
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}, text=True
        )
        for number, _ in enumerate(process.stdout):
            if number == patience:
                time.sleep(0.002 * kills)
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
        process.stdout.close()
        process.wait()
    assert kills == 2
    assert read_status(seed_folder(tmp_path, 1))["state"] == "finished"
    assert_same(seed_folder(tmp_path, 1), alone)


def test_a_longer_run_carries_on(alone, tmp_path):
    short = Run(**{**vars(RUN), "steps": 400})
    Trainer(short, seed=1, folder=tmp_path).train()
    Trainer(RUN, seed=1, folder=tmp_path).train()
    assert_same(tmp_path, alone)


def test_metrics_say_what_the_operator_does(alone):
    lines = read_metrics(alone)
    assert [line["step"] for line in lines] == list(range(100, 900, 100))
    last = lines[-1]
    assert 0 < last["trace_mean"] <= 0.7
    assert last["weight_max"] >= 1.0
    assert 1 <= last["effective_length"] <= 3
    assert last["target_variance"] >= 0
    assert last["return"] == pytest.approx(np.mean(last["returns"]))


def test_tensorboard_shows_what_the_lines_say(alone):
    found = {}
    for path in (alone / "tensorboard").iterdir():
        records = path.read_bytes()
        while records:
            size = int.from_bytes(records[:8], "little")  # then a checksum, the event, and another checksum
            event = Event.FromString(records[12 : 12 + size])
            records = records[16 + size :]
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
    for line in read_metrics(alone):
        assert found["speed", line["step"]] > 0
        for name in ("return", "critic_loss"):
            assert found[name, line["step"]] == pytest.approx(line[name], rel=1e-5)


def test_nan_ends_the_seed_and_says_where_it_began(tmp_path, monkeypatch):
    real = td3.update_block

    def poisoned(config, state, buffer, key, *, updates):
        state, metrics = real(config, state, buffer, key, updates=updates)
        late = jnp.arange(updates) >= 7
        loss = jnp.where(late & (buffer.added == 300), jnp.nan, metrics.critic_loss)
        return state, td3.Metrics(**{**vars(metrics), "critic_loss": loss})

    monkeypatch.setattr(td3, "update_block", poisoned)
    status = Trainer(RUN, seed=1, folder=tmp_path).train()
    assert status == {"state": "diverged", "step": 300, "reason": "critic_loss became nan at step 258"}
    # Started again it does not try the same thing twice.
    assert Trainer(RUN, seed=1, folder=tmp_path).train() == status


def test_values_beyond_any_return_are_divergence(tmp_path):
    agent = TD3Config(**{**vars(AGENT), "divergence": 1e-6})
    status = Trainer(Run(**{**vars(RUN), "agent": agent}), seed=0, folder=tmp_path).train()
    assert status["state"] == "diverged"
    assert "the mean of |Q| reached" in status["reason"]


def test_a_seed_that_fails_ends_alone(tmp_path):
    RUN.save(tmp_path)
    folder = seed_folder(tmp_path, 0)
    Trainer(Run(**{**vars(RUN), "steps": 200}), seed=0, folder=folder).train()
    damaged = next((folder / "checkpoint").glob("replay-*.npz"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    outcome = train_seeds(tmp_path, [0, 1], workers=1, listen=lambda message: None)
    assert outcome[0]["state"] == "failed"
    assert "the checkpoint is damaged" in outcome[0]["reason"]
    assert outcome[1]["state"] == "finished"


def test_settings_of_an_earlier_run_are_not_mixed(tmp_path):
    RUN.save(tmp_path)
    other = Run(**{**vars(RUN), "agent": TD3Config(**{**vars(AGENT), "decay": 0.5})})
    with pytest.raises(ValueError, match=r"holds a run with decay = 0.7, not 0.5: choose another --out"):
        other.save(tmp_path)
    with pytest.raises(ValueError, match="steps must be at least the 800"):
        Run(**{**vars(RUN), "steps": 400}).save(tmp_path)


def test_a_cut_last_line_of_metrics_is_left_out(alone, tmp_path):
    content = (alone / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(content[:-10])
    assert len(read_metrics(tmp_path)) == 7
    assert json.loads(content.splitlines()[0])["step"] == 100
