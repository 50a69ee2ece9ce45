"""The pool of workers: the same blocks whatever the number of workers, also when one of them dies."""

import os
import signal

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
                os.kill(pool._workers[0].process.pid, signal.SIGKILL)

        pool.evaluate(0, parameters(3, 0), episodes=1)
        assert_same(plain, blocks(pool, 0, 4, disturb))
        assert pool.replaced == 1
        done = pool.evaluations(wait_for_all=True)
        assert [(e.agent, e.number) for e in done] == [(0, 0), (1, 0), (2, 0)]


def test_worker_that_dies_again_and_again_stops_the_run():
    broken = [AgentSpec("mujoco/cheetah-run", seed=0, noise=0.1, random_steps=0)]
    with Pool(broken, sizes=SIZES, steps=5, workers=1) as pool:
        pool.start(0, np.full((1, pool.parameter_count), np.nan, np.float32))
        with pytest.raises(WorkerDied, match="agents \\[0\\]: RuntimeError: action must be finite"):
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
