"""Lookups along a trajectory, against loops."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax import trajectories


@pytest.fixture(scope="module")
def drawn():
    problem = mx.problems.garnet(6, 2, 3, seed=1, discount=0.9, termination=0.1)
    batch = trajectories.sample(problem.mdp, problem.mu, jax.random.key(0), episodes=3, horizon=5)
    return problem, batch, np.random.default_rng(0)


def steps(batch):
    for e, t in np.ndindex(*batch.states.shape):
        yield (e, t), int(batch.states[e, t]), int(batch.actions[e, t]), int(batch.next_states[e, t])


def test_gather(drawn):
    problem, batch, rng = drawn
    q = rng.normal(size=(6, 2))
    here, following = trajectories.gather(batch, q, problem.pi)
    for place, x, a, y in steps(batch):
        np.testing.assert_allclose(here[place], q[x, a], rtol=1e-5)
        np.testing.assert_allclose(following[place], problem.pi[y] @ q[y], rtol=1e-5)


def test_gather_states(drawn):
    _, batch, rng = drawn
    v = rng.normal(size=6)
    here, following = trajectories.gather_states(batch, v)
    for place, x, _, y in steps(batch):
        np.testing.assert_allclose([here[place], following[place]], [v[x], v[y]], rtol=1e-6)


def test_gather_pairs(drawn):
    _, batch, rng = drawn
    c, timed = rng.random((6, 2)), rng.random((3, 6, 2))
    constant, varying = (trajectories.gather_pairs(batch, table) for table in (c, timed))
    for (e, t), x, a, _ in steps(batch):
        np.testing.assert_allclose(constant[e, t], c[x, a], rtol=1e-6)
        if t >= 1:
            np.testing.assert_allclose(varying[e, t], timed[t - 1, x, a] if t <= 3 else 0, rtol=1e-6)


def test_gather_weights(drawn):
    _, batch, rng = drawn
    w, w_states = rng.random((6, 2, 6, 2)), rng.random((6, 6))
    between, between_states = (trajectories.gather_weights(batch, table) for table in (w, w_states))
    assert between.shape == (3, 5, 5)
    for (e, t), x, a, _ in steps(batch):
        for s in range(5):
            y, b = int(batch.states[e, s]), int(batch.actions[e, s])
            np.testing.assert_allclose(between[e, t, s], w[x, a, y, b], rtol=1e-6)
            np.testing.assert_allclose(between_states[e, t, s], w_states[x, y], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
@pytest.mark.parametrize("size", [100, 200, 300])
def test_lookups_take_indices_of_few_bits(size, dtype):
    """Tables of more rows than the indices can count."""
    states = np.arange(min(size, np.iinfo(dtype).max + 1)).astype(dtype)
    v = np.random.default_rng(0).normal(size=size)
    steps = walk(states, np.zeros_like(states), states)
    np.testing.assert_allclose(trajectories.gather_states(steps, v)[0], v[: states.size], rtol=1e-6)
    np.testing.assert_allclose(trajectories.gather_pairs(steps, v[:, None]), v[: states.size], rtol=1e-6)


def walk(states, actions, next_states):
    one = np.ones(len(states), np.float32)
    return trajectories.Trajectory(states, actions, one, 0.9 * one, next_states, one < 0, one, one > 0)


def test_what_lies_outside_of_the_tables_is_nan():
    steps = walk(np.array([0, -1, 6, 5]), np.array([0, 0, 1, 2]), np.array([5, 6, -1, 0]))
    table = np.ones((6, 2))
    found = [
        *trajectories.gather(steps, table, table / 2),
        *trajectories.gather_states(steps, table[:, 0]),
        trajectories.gather_pairs(steps, table),
        trajectories.gather_pairs(steps, np.ones((4, 6, 2))),
    ]
    in_pairs, in_states, following = [1, 0, 0, 0], [1, 0, 0, 1], [1, 0, 0, 1]
    for array, inside in zip(
        found, [in_pairs, following, in_states, following, in_pairs, in_pairs], strict=True
    ):
        np.testing.assert_array_equal(array, np.where(inside, 1, np.nan))
    for weights, inside in ((np.ones((6, 2, 6, 2)), in_pairs), (np.ones((6, 6)), in_states)):
        between = trajectories.gather_weights(steps, weights)
        np.testing.assert_array_equal(between, np.where(np.outer(inside, inside), 1, np.nan))


def test_tables_of_another_shape_are_refused(drawn):
    _, batch, _ = drawn
    for call, said in (
        (
            lambda: trajectories.gather(batch, np.ones(6), np.ones(6)),
            r"q must have shape \[S, A\], got \(6,\)",
        ),
        (
            lambda: trajectories.gather(batch, np.ones((6, 2)), np.ones(2)),
            r"pi must have the shape \(6, 2\) of q",
        ),
        (
            lambda: trajectories.gather_weights(batch, np.ones((6, 2))),
            r"weights must have shape \[S, A, S, A\] or \[S, S\], got \(6, 2\)",
        ),
        (
            lambda: trajectories.gather_pairs(batch, np.ones((0, 6, 2))),
            r"table must have shape \[S, A\] or \[H, S, A\], got \(0, 6, 2\)",
        ),
        (
            lambda: trajectories.gather_states(batch, np.ones((6, 2))),
            r"v must have shape \[S\], got \(6, 2\)",
        ),
        (
            lambda: trajectories.gather_pairs(batch, np.ones(6)),
            r"table must have shape \[S, A\] or \[H, S, A\]",
        ),
        (
            lambda: trajectories.gather_weights(batch, np.ones(6)),
            r"weights must have shape \[S, A, S, A\] or",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            call()


def test_time_dependent_traces_estimate_their_operator():
    """Truncated importance sampling: traces for two steps, none thereafter."""
    mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=3, discount=0.8)
    c = np.stack([pi / mu, np.minimum(1, pi / mu)])
    q = np.random.default_rng(0).normal(size=(4, 2))
    episodes = 20_000
    batch = trajectories.sample(
        mdp, mu, jax.random.key(0), episodes=episodes, horizon=4, start_states=0, start_actions=1
    )
    q_t, v_next = trajectories.gather(batch, q, pi)
    traces = trajectories.gather_pairs(batch, c)
    result = jax.vmap(mx.targets.multi_step)(
        q_t, v_next, batch.rewards, batch.discounts, traces, batch.truncated
    )
    sampled = np.asarray(result[:, 0], float)
    error = sampled.std() / np.sqrt(episodes)
    assert abs(sampled.mean() - mx.multi_step(mdp, pi, mu, c)(q)[0, 1]) < 4.5 * error
