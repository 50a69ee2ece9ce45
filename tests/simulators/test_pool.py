"""The pool of workers: the same blocks whatever the number of workers, also when one of them dies."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import scipy.stats

from marginax.simulators import AgentSpec, Pool, WorkerDied, make
from marginax.simulators.policy import act, parameter_count, unpack

SIZES = [17, 16, 6]


def specs(n=3, random_steps=30):
    return [AgentSpec("mujoco/cheetah-run", seed=s, noise=0.1, random_steps=random_steps) for s in range(n)]


def parameters(n, block):
    return np.random.default_rng(block).normal(0, 0.3, (n, parameter_count(SIZES))).astype(np.float32)


def blocks(pool, first, last, disturb=lambda b: None):
    out = []
    for b in range(first, last):
        pool.start(b, parameters(len(pool.specs), b))
        disturb(b)
        out.append(pool.finish())
    return out


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)


@pytest.fixture(scope="module")
def plain():
    """Four blocks of 20 steps, played in this process."""
    with Pool(specs(), sizes=SIZES, steps=20, workers=0) as pool:
        return blocks(pool, 0, 4)


@pytest.mark.parametrize("workers", [1, 2])
def test_number_of_workers_changes_nothing(plain, workers):
    with Pool(specs(), sizes=SIZES, steps=20, workers=workers) as pool:
        assert_same(plain, blocks(pool, 0, 4))


def test_block_is_what_the_simulator_and_the_policy_say(plain):
    """Replay every recorded action on a plain simulator; check densities and noise against the policy's means."""
    noise = []
    for agent, spec in enumerate(specs()):
        seed = np.random.SeedSequence((spec.seed, 2)).generate_state(1)[0]
        simulator = make(spec.simulator, int(seed))
        observation = simulator.reset()
        for b, block in enumerate(plain):
            layers = unpack(parameters(3, b)[agent], SIZES)
            for t in range(20):
                np.testing.assert_array_equal(block.observations[agent, t], observation)
                drawn = block.actions[agent, t].astype(float)
                observation, reward, _, _ = simulator.step(np.clip(block.actions[agent, t], -1, 1))
                np.testing.assert_array_equal(block.next_observations[agent, t], observation)
                assert block.rewards[agent, t] == np.float32(reward)
                if 20 * b + t < spec.random_steps:
                    expected = -6 * np.log(2)
                    assert np.abs(drawn).max() <= 1
                else:
                    mean = act(layers, block.observations[agent, t]).astype(float)
                    expected = scipy.stats.norm(mean, 0.1).logpdf(drawn).sum()
                    noise.append(drawn - mean)
                np.testing.assert_allclose(block.log_behaviour[agent, t], expected, rtol=1e-4)
    assert 0.09 < np.std(noise) < 0.11


def test_episode_ends_are_kept():
    """Pendulum is cut off at 200 steps: flagged there alone, and the successor is not the next start."""
    with Pool([AgentSpec("Pendulum-v1", 0)], sizes=[3, 4, 1], steps=150, workers=0) as pool:
        zero = np.zeros((1, pool.parameter_count), np.float32)
        first, second = (pool.start(0, zero), pool.finish())[1], (pool.start(1, zero), pool.finish())[1]
    assert not first.truncated.any()
    assert np.flatnonzero(second.truncated[0]).tolist() == [49]
    assert not second.terminated.any()
    assert not np.array_equal(second.next_observations[0, 49], second.observations[0, 50])
    np.testing.assert_array_equal(second.next_observations[0, 50], second.observations[0, 51])


def test_dead_worker_is_replaced_and_its_block_repeated(plain):
    with Pool(specs(), sizes=SIZES, steps=20, workers=2) as pool:

        def disturb(block):
            if block == 2:
                os.kill(pool._workers[0].child.pid, signal.SIGKILL)

        pool.evaluate(0, parameters(3, 0), episodes=1)
        assert_same(plain, blocks(pool, 0, 4, disturb))
        assert pool.replaced == 1
        done = pool.evaluations(wait_for_all=True)
        assert [(e.agent, e.number) for e in done] == [(0, 0), (1, 0), (2, 0)]


def test_worker_that_dies_again_and_again_stops_the_run():
    broken = [AgentSpec("mujoco/cheetah-run", seed=0, noise=0.1, random_steps=0)]
    with Pool(broken, sizes=SIZES, steps=5, workers=1) as pool:
        pool.start(0, np.full((1, pool.parameter_count), np.nan, np.float32))
        with pytest.raises(WorkerDied, match=r"agents \[0\]: .*RuntimeError: action must be finite"):
            pool.finish()


def test_state_continues_in_another_pool(plain):
    with Pool(specs(), sizes=SIZES, steps=20, workers=0) as pool:
        blocks(pool, 0, 2)
        state = pool.get_state()
    with Pool(specs(), sizes=SIZES, steps=20, workers=2) as pool:
        pool.set_state(state)
        assert_same(plain[2:], blocks(pool, 2, 4))


def test_evaluation_depends_on_policy_and_seed_alone():
    results = []
    for workers in (0, 1):
        with Pool(specs(2), sizes=SIZES, steps=20, workers=workers) as pool:
            pool.evaluate(3, parameters(2, 9), episodes=2)
            pool.evaluate(4, parameters(2, 9), episodes=2, agents=[1])
            results.append(pool.evaluations(wait_for_all=True))
    for a, b in zip(*results, strict=True):
        assert (a.agent, a.number) == (b.agent, b.number)
        np.testing.assert_array_equal(a.returns, b.returns)
    layers = unpack(parameters(2, 9)[1], SIZES)
    simulator = make("mujoco/cheetah-run", int(np.random.SeedSequence((1, 1, 4)).generate_state(2)[1]))
    observation, total, over = simulator.reset(), 0.0, False
    while not over:
        action = act(layers, np.stack([observation, observation]))[1]
        observation, reward, _, over = simulator.step(action)
        total += reward
    np.testing.assert_allclose(results[0][2].returns[1], total, rtol=0.05, atol=0.5)


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least one agent"):
        Pool([], sizes=SIZES, steps=5, workers=0)
    with pytest.raises(ValueError, match="must begin with 17 and end with 6"):
        Pool(specs(), sizes=[3, 6], steps=5, workers=0)
    with Pool(specs(), sizes=SIZES, steps=5, workers=0) as pool:
        with pytest.raises(RuntimeError, match="no block was started"):
            pool.finish()
        with pytest.raises(ValueError, match="each of 3 agents, got 1"):
            pool.set_state([{}])


OWN = "simulators.own_environments:"


@pytest.mark.parametrize("name", [f"{OWN}Printing-v0", "pybullet/HalfCheetah", f"{OWN}Normalised-v0"])
def test_what_environments_print_disturbs_nothing(name, tmp_path):
    """Python and C level, stdout and stderr; and a worker that dies in between."""
    if name.startswith("pybullet"):
        pytest.importorskip("pybullet_envs_gymnasium", reason="PyBullet has no wheels for this Python")
    spec = [AgentSpec(name, seed=s, random_steps=10, allow_import=True) for s in range(2)]
    probe = make(name, 0, allow_import=True)
    sizes = [probe.observation_size, 4, probe.action_size]
    vectors = np.random.default_rng(0).normal(0, 0.3, (2, parameter_count(sizes))).astype(np.float32)
    records = []
    for workers in (0, 1):
        log = tmp_path / "log"
        with Pool(spec, sizes=sizes, steps=25, workers=workers, log=log) as pool:
            for b in range(3):
                pool.start(b, vectors)
                if workers and b == 1:
                    os.kill(pool._workers[0].child.pid, signal.SIGKILL)
                records.append(pool.finish().rows)
            assert pool.replaced == workers
    np.testing.assert_array_equal(records[:3], records[3:])
    if name.endswith("Printing-v0"):
        assert b"from C, to stdout" in log.read_bytes() and b"and to stderr" in log.read_bytes()


def test_discrete_actions_have_their_probabilities():
    """ε falls from 1 to 0.2 over 60 steps; probabilities are checked against the network's values."""
    sizes, count = [4, 8, 2], 2
    spec = [AgentSpec("CartPole-v1", s, random_steps=5, epsilons=(0.2,), epsilon_steps=60) for s in range(2)]
    vectors = np.random.default_rng(0).normal(0, 1, (2, parameter_count(sizes))).astype(np.float32)
    blocks = []
    for workers in (0, 2):
        with Pool(spec, sizes=sizes, steps=50, workers=workers) as pool:
            played = [(pool.start(b, vectors), pool.finish())[1] for b in range(3)]
            pool.evaluate(1, vectors, episodes=2)
            blocks.append((played, pool.evaluations(wait_for_all=True)))
    for one, other in zip(blocks[0][0], blocks[1][0], strict=True):
        np.testing.assert_array_equal(one.rows, other.rows)
    for one, other in zip(blocks[0][1], blocks[1][1], strict=True):
        np.testing.assert_array_equal(one.returns, other.returns)
    explored = 0
    for agent in range(2):
        (w0, b0), (w1, b1) = unpack(vectors[agent], sizes)
        for number, block in enumerate(blocks[0][0]):
            x = block.observations[agent]
            greedy = np.argmax(np.maximum(x @ w0 + b0, 0) @ w1 + b1, axis=-1)
            action = block.actions[agent, :, 0]
            assert set(action) <= {0.0, 1.0}
            for t in range(50):
                step = 50 * number + t
                epsilon = 1.0 if step < 5 else max(0.2, 1 - 0.8 * step / 60)
                expected = epsilon / count + (1 - epsilon) * (action[t] == greedy[t])
                assert np.exp(block.log_behaviour[agent, t]) == pytest.approx(expected, rel=1e-5)
            explored += (action != greedy).sum()
    assert 40 < explored < 110  # half of the mean ε of 0.48 times 300 steps is 72


def test_a_policy_for_a_box_is_refused_for_discrete_actions():
    with pytest.raises(ValueError, match="end with 2 for CartPole-v1"):
        Pool([AgentSpec("CartPole-v1", 0)], sizes=[4, 1], steps=5, workers=0)


PROGRAM = """
import signal, sys
import numpy as np
from marginax.simulators import AgentSpec, Pool, pool as module
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
module.warn_if_resume_differs = lambda *_: None  # it would try a few steps
specs = [AgentSpec("simulators.own_environments:Slow-v0", s, allow_import=True) for s in range(2)]
pool = Pool(specs, sizes=[2, 1], steps=5, workers=2)
pool.start(0, np.zeros((2, pool.parameter_count), np.float32))
print(*(worker.child.pid for worker in pool._workers), flush=True)
pool.finish()
"""


def running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc"), reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_parent(how):
    """Busy workers, whose environment never answers, end when their parent is killed."""
    path = os.pathsep.join(sys.path)
    shared = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(running, workers))
    parent.send_signal(how)
    parent.wait(timeout=20)
    deadline = time.monotonic() + 20
    while any(map(running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(running, workers))
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if "marginax" in name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": 0.0}, "noise must be positive, got 0.0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"random_steps": -1}, "random_steps must be at least 0, got -1"),
        ({"epsilons": (0.1, 1.5)}, r"epsilons\[1\] must lie in \[0, 1\], got 1.5"),
        ({"epsilons": ()}, "epsilons must not be empty"),
    ],
)
def test_an_agent_that_cannot_play_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        AgentSpec(**{"simulator": "CartPole-v1", "seed": 0, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
        ({"sizes": []}, r"sizes must begin with 3 and end with 1 for Pendulum-v1, got \[\]"),
        (
            {"specs": [AgentSpec(name, 0) for name in ("Pendulum-v1", "MountainCarContinuous-v0")]},
            r"specs must have simulators with equal sizes and kinds of actions, got .*\(2, 1, None\)",
        ),
    ],
)
def test_a_pool_that_cannot_play_is_refused(change, message):
    usual = {"specs": [AgentSpec("Pendulum-v1", 0)], "sizes": [3, 1], "steps": 4, "workers": 0}
    with pytest.raises(ValueError, match=message):
        Pool(**{**usual, **change})


def test_parameters_of_another_shape_and_agents_that_are_not_there_are_refused():
    with Pool([AgentSpec("Pendulum-v1", 0)], sizes=[3, 1], steps=4, workers=0) as pool:
        with pytest.raises(ValueError, match=r"parameters must have shape \(1, 4\), got \(4,\)"):
            pool.start(0, np.zeros(4, np.float32))
        parameters = np.zeros((1, 4), np.float32)
        with pytest.raises(ValueError, match=r"agents must lie in range\(1\), got 1"):
            pool.evaluate(0, parameters, 1, agents=[1])
        with pytest.raises(ValueError, match="episodes must be at least 1, got 0"):
            pool.evaluate(0, parameters, 0)
