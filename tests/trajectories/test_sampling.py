"""The sampler: frequencies against the MDP's own numbers, ends told apart, starts as given, traceable."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import scipy.sparse as sp

import marginax as mx
from marginax.trajectories import sample, sampling_tables

STATES, ACTIONS = 5, 3


@pytest.fixture(scope="module")
def problem():
    """Zeros in the transitions, the policy and the starts; pairs that always, sometimes and never end the episode."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(STATES), size=(STATES, ACTIONS)) * (rng.random((STATES, ACTIONS, STATES)) > 0.3)
    p[1] = p[1] / p[1].sum(axis=1, keepdims=True)
    p[0, 0] = 0
    mu = rng.dirichlet(np.ones(ACTIONS), size=STATES)
    mu[2], mu[3] = [0.5, 0.5, 0], [0, 0.4, 0.6]
    r = rng.normal(size=(STATES, ACTIONS))
    std = np.where(r > 0, 0.5, 0)
    return mx.TabularMDP(p, r, 0.9, initial=[0.5, 0.2, 0.3, 0, 0], reward_std=std), mu


def assert_frequencies(counts, chances):
    """Counts along the last axis are binomial with the given chances, to 4.5 standard errors; zeros are exact."""
    total = counts.sum(axis=-1, keepdims=True)
    error = np.sqrt(np.maximum(total * chances * (1 - chances), 1e-12))
    deviation = np.abs(counts - total * chances)
    assert (deviation <= 4.5 * error + 1e-6 * total + 1).all()
    assert (counts[chances == 0] == 0).all()


@pytest.fixture(scope="module")
def batch(problem):
    return jax.tree.map(np.asarray, sample(*problem, jax.random.key(1), episodes=20_000, horizon=12))


def test_frequencies_are_the_mdps(problem, batch):
    mdp, mu = problem
    steps = jax.tree.map(lambda field: field[batch.valid], batch)
    ended = steps.discounts == 0
    taken = np.zeros((STATES, ACTIONS))
    np.add.at(taken, (steps.states, steps.actions), 1)
    assert_frequencies(taken, mu)
    # Successors, with the end of the episode as one more.
    arrived = np.zeros((STATES, ACTIONS, STATES + 1))
    np.add.at(arrived, (steps.states, steps.actions, np.where(ended, STATES, steps.next_states)), 1)
    assert_frequencies(arrived, np.concatenate([mdp.p, mdp.termination[..., None]], axis=-1))
    begun = np.bincount(batch.states[:, 0], minlength=STATES)
    assert_frequencies(begun, mdp.initial)
    np.testing.assert_allclose(steps.behaviour, mu[steps.states, steps.actions], rtol=1e-6)
    np.testing.assert_allclose(steps.discounts[~ended], 0.9, rtol=1e-6)
    surprise = steps.rewards - mdp.r[steps.states, steps.actions]
    spread = mdp.reward_std[steps.states, steps.actions]
    np.testing.assert_allclose(surprise[spread == 0], 0, atol=1e-6)
    noise = surprise[spread > 0] / 0.5
    assert abs(noise.mean()) < 4.5 / np.sqrt(noise.size)
    assert abs((noise**2).mean() - 1) < 4.5 * np.sqrt(2 / noise.size)


def test_episodes_hang_together(batch):
    goes_on = batch.valid[:, :-1] & (batch.discounts[:, :-1] > 0)
    np.testing.assert_array_equal(batch.valid[:, 1:], goes_on)
    np.testing.assert_array_equal(batch.states[:, 1:][goes_on], batch.next_states[:, :-1][goes_on])
    alive = batch.valid[:, -1] & (batch.discounts[:, -1] > 0)
    np.testing.assert_array_equal(batch.truncated[:, -1], alive)
    assert not batch.truncated[:, :-1].any()
    assert 0 < alive.mean() < 1
    padding = ~batch.valid
    assert not batch.rewards[padding].any()
    assert not batch.discounts[padding].any()
    for field, size in [(batch.states, STATES), (batch.actions, ACTIONS), (batch.next_states, STATES)]:
        assert ((field >= 0) & (field < size)).all()


@pytest.mark.slow
def test_given_starts(problem):
    mdp, mu = problem
    x, a = np.repeat(np.indices((STATES, ACTIONS)).reshape(2, -1), 50, axis=1)
    batch = sample(mdp, mu, jax.random.key(3), episodes=len(x), horizon=4, start_states=x, start_actions=a)
    np.testing.assert_array_equal(batch.states[:, 0], x)
    np.testing.assert_array_equal(batch.actions[:, 0], a)  # whether or not the policy would ever take them
    assert (batch.behaviour[:, 0] == np.float32(mu)[x, a]).all()
    later = np.asarray(batch.valid[:, 1])
    assert (mu[np.asarray(batch.states)[later, 1], np.asarray(batch.actions)[later, 1]] > 0).all()
    single = sample(mdp, mu, jax.random.key(3), episodes=7, horizon=4, start_states=3)
    assert set(single.states[:, 0].tolist()) == {3}


def test_reset_fills_the_sequence_with_episodes(problem):
    mdp, mu = problem
    batch = sample(mdp, mu, jax.random.key(4), episodes=4000, horizon=15, reset=True)
    batch = jax.tree.map(np.asarray, batch)
    assert batch.valid.all()
    ended = batch.discounts[:, :-1] == 0
    np.testing.assert_array_equal(batch.states[:, 1:][~ended], batch.next_states[:, :-1][~ended])
    assert_frequencies(np.bincount(batch.states[:, 1:][ended], minlength=STATES), mdp.initial)


def test_sparse_and_dense_draw_the_same(problem):
    mdp, mu = problem
    p = sp.csr_array(mdp.p.reshape(-1, STATES))
    sparse = mx.TabularMDP(p, mdp.r, mdp.discount, mdp.initial, mdp.reward_std)
    one, other = (sample(m, mu, jax.random.key(5), episodes=50, horizon=8) for m in (mdp, sparse))
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.slow
def test_keys_policies_and_starts_may_be_traced(problem):
    mdp, mu = problem
    tables = sampling_tables(mdp)
    keys = jax.random.split(jax.random.key(6), 3)
    policies = jnp.stack([jnp.asarray(mu), jnp.asarray(mu[::-1]), jnp.full(mu.shape, 1 / ACTIONS)])

    def draw(key, policy, start):
        return sample(tables, policy, key, episodes=10, horizon=6, start_states=start)

    starts = jnp.arange(3)
    together = jax.jit(jax.vmap(draw))(keys, policies, starts)
    for i in range(3):
        alone = draw(keys[i], policies[i], starts[i])
        jax.tree.map(lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-6), together, alone)
    assert not np.array_equal(together.actions[0], together.actions[2])


def test_an_mdp_that_ends_at_once():
    mdp = mx.TabularMDP(np.zeros((1, 1, 1)), [[2.0]], 0.5)
    batch = sample(mdp, [[1.0]], jax.random.key(0), episodes=2, horizon=3)
    np.testing.assert_array_equal(batch.valid, [[True, False, False]] * 2)
    np.testing.assert_array_equal(batch.rewards[:, 0], 2)
    assert not batch.truncated.any()


def test_long_lists_of_successors_and_large_state_spaces():
    """One pair with 3,000 successors among 40,000 states, the rest with one; memory is that of the entries."""
    states, width = 40_000, 3000
    rng = np.random.default_rng(0)
    chances = rng.dirichlet(np.ones(width))
    targets = rng.choice(states, width, replace=False)
    rows = np.append(np.zeros(width, int), np.arange(1, states))
    entries = np.append(chances, np.ones(states - 1))
    p = sp.csr_array((entries, (rows, np.append(targets, np.arange(1, states)))), shape=(states, states))
    mdp = mx.TabularMDP(p, np.zeros((states, 1)), 0.9)
    tables = sampling_tables(mdp)
    assert tables.successors.size == p.nnz + 1
    draws = 200_000
    batch = sample(tables, np.ones((states, 1)), jax.random.key(0), episodes=draws, horizon=1, start_states=0)
    counts = np.bincount(np.asarray(batch.next_states)[:, 0], minlength=states)[targets]
    assert counts.sum() == draws
    error = np.sqrt(draws * chances * (1 - chances))
    assert (np.abs(counts - draws * chances) < 5.5 * error + 2).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": np.ones((STATES, ACTIONS))}, r"policy must sum to 1 .* policy\[0\] sums to 3"),
        ({"policy": np.full((STATES, 2), 0.5)}, r"policy must have shape \(5, 3\)"),
        ({"policy": np.full((STATES, ACTIONS), np.nan)}, r"policy must be finite, but policy\[0, 0\] = nan"),
        ({"policy": np.array([[2, -1, 0.0]] * STATES)}, r"not be negative, but policy\[0, 1\] = -1"),
        ({"episodes": 0}, "episodes must be at least 1, got 0"),
        ({"start_states": np.array([0, 5])}, r"start_states must lie in \[0, 5\), but start_states\[1\] = 5"),
        ({"start_states": np.array([0.5, 1])}, "start_states must be integers"),
        ({"start_states": np.arange(3)}, r"start_states must be one number or have shape \(2,\)"),
        ({"start_actions": -1}, r"start_actions must lie in \[0, 3\), but start_actions = -1"),
    ],
)
def test_bad_input_is_refused(problem, change, message):
    mdp, mu = problem
    arguments = {"policy": mu, "key": jax.random.key(0), "episodes": 2, "horizon": 3} | change
    with pytest.raises(ValueError, match=message):
        sample(mdp, **arguments)


def test_what_a_problem_returns_is_no_mdp(monkeypatch):
    """Problems come with two policies."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its run-time checks would come first
    problem = mx.problems.chain(n=3, actions=2)
    with pytest.raises(ValueError, match="mdp must be a TabularMDP or its sampling_tables, got "):
        sample(problem, problem[1], jax.random.key(0), episodes=1, horizon=2)


def test_a_single_precision_policy_is_one(problem):
    mdp, _ = problem
    policy = jax.nn.softmax(jax.random.normal(jax.random.key(0), (STATES, ACTIONS)) * 3)
    assert sample(mdp, policy, jax.random.key(0), episodes=2, horizon=3).states.shape == (2, 3)


def test_a_traced_start_outside_of_the_tables_earns_nan():
    mdp, _, mu = mx.problems.chain(n=4, actions=2)

    @jax.jit
    def draw(state, action):
        return sample(
            mdp, mu, jax.random.key(0), episodes=1, horizon=2, start_states=state, start_actions=action
        )

    for start in ((4, 0), (-1, 0), (0, 2)):
        first = jax.tree.map(lambda field: field[0, 0], draw(*start))
        assert np.isnan(first.rewards) and np.isnan(first.behaviour), start
    assert np.isfinite(draw(3, 1).rewards).all()
