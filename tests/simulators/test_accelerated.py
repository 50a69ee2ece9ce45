"""Simulators inside compiled programs: successors, ends of episodes, and gymnax against Gymnasium itself."""

import numpy as np
import pytest

from marginax.simulators import make, make_accelerated

gymnax = pytest.importorskip("gymnax")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

NAMES = ["FrozenLake-misc"]


def actions_of(simulator, key, shape=()):
    if simulator.num_actions is not None:
        return jax.random.randint(key, shape, 0, simulator.num_actions)
    low, high = simulator.action_low, simulator.action_high
    return jax.random.uniform(key, (*shape, len(low)), minval=low, maxval=high)


def rollout(simulator, seed, steps):
    """A compiled loop with restarts, as a trainer would write it."""

    def one(carry, key):
        state, observation = carry
        act, move, again = jax.random.split(key, 3)
        action = actions_of(simulator, act)
        state, successor, reward, terminated, truncated = simulator.step(move, state, action)
        record = (observation, action, reward, terminated, truncated, successor)
        return simulator.restart(again, state, successor, terminated | truncated), record

    first, rest = jax.random.split(jax.random.key(seed))
    return jax.lax.scan(one, simulator.reset(first), jax.random.split(rest, steps))[1]


@pytest.mark.parametrize(
    "name",
    [
        n if n in NAMES else pytest.param(n, marks=pytest.mark.slow)
        for n in gymnax.registered_envs
        if n != "MNISTBandit-bsuite"  # wants to download its images
    ],
)
def test_every_simulator_runs_in_a_vectorised_loop(name):
    simulator = make_accelerated(f"gymnax/{name}")
    play = jax.jit(jax.vmap(lambda seed: rollout(simulator, seed, 120)))
    observation, _, reward, terminated, truncated, successor = map(np.asarray, play(jnp.arange(3)))
    assert observation.shape == (3, 120, *simulator.observation_shape)
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (np.float32, bool, bool)
    assert not (terminated & truncated).any()
    ended = terminated | truncated
    following = observation[:, 1:][~ended[:, :-1]]  # equal but for the compiler's order of operations
    np.testing.assert_allclose(successor[:, :-1][~ended[:, :-1]], following, rtol=1e-4, atol=1e-6)


def test_ends_are_told_apart():
    """Pendulum never terminates and is cut off at 200; random CartPole falls long before its limit."""
    *_, terminated, truncated, _ = rollout(make_accelerated("gymnax/Pendulum-v1"), 0, 450)
    assert not terminated.any()
    assert np.flatnonzero(truncated).tolist() == [199, 399]
    *_, terminated, truncated, successor = rollout(make_accelerated("gymnax/CartPole-v1"), 0, 200)
    assert terminated.any() and not truncated.any()
    assert (np.abs(np.asarray(successor)[np.asarray(terminated)][:, [0, 2]]) > [2.4, 0.2094]).any(1).all()


def test_cartpole_equals_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    simulator = make_accelerated("gymnax/CartPole-v1")
    state, observation = simulator.reset(jax.random.key(0))
    theirs = gymnasium.make("CartPole-v1").unwrapped
    theirs.reset(seed=0)
    theirs.state = np.array(observation, np.float64)
    for t in range(60):
        state, observation, reward, terminated, _ = simulator.step(jax.random.key(t), state, t % 2)
        expected = theirs.step(t % 2)
        np.testing.assert_allclose(observation, expected[0], rtol=1e-4, atol=1e-5)
        assert (float(reward), bool(terminated)) == (expected[1], expected[2])
        if terminated:
            break


@pytest.mark.parametrize("name", ["gymnax/CartPole-v1", "gymnax/Breakout-MinAtar"])
def test_on_the_host_like_any_other(name):
    first, second = make(name, 1), make(name, 2)
    generator = np.random.default_rng(0)

    def play(simulator, steps, seed):
        generator = np.random.default_rng(seed)
        out = []
        for _ in range(steps):
            if simulator.num_actions:
                action = generator.integers(simulator.num_actions, size=1)
            else:
                action = generator.uniform(simulator.action_low, simulator.action_high)
            observation, reward, terminated, truncated = simulator.step(action)
            out.append(np.concatenate([observation, [reward, terminated, truncated]]))
            if terminated or truncated:
                out.append(np.concatenate([simulator.reset(), [0, 0, 0]]))
        return np.array(out)

    assert first.reset().shape == (first.observation_size,)
    play(first, 30, generator.integers(9))
    second.set_state(first.get_state())
    np.testing.assert_array_equal(play(first, 60, 1), play(second, 60, 1))


def test_pictures_of_grid_games():
    simulator = make("gymnax/Breakout-MinAtar", 0)
    simulator.reset()
    image = simulator.render()
    assert (image.shape, image.dtype) == ((160, 160, 3), np.uint8) and image.any()
    with pytest.raises(RuntimeError, match="no picture"):
        make("gymnax/CartPole-v1", 0).render()


@pytest.mark.parametrize("action", [3, -1])
def test_an_action_out_of_range_is_refused(action):
    simulator = make("grid/catch", 0)
    simulator.reset()
    with pytest.raises(ValueError, match=f"action must be an index below 3, got {action}"):
        simulator.step(action)
