"""The problems are those of the paper and of Gymnasium."""

from types import SimpleNamespace

import numpy as np
import pytest

from marginax import problems


def test_chain_is_the_papers():
    mdp, pi, mu = problems.chain(n=10, actions=5, beta=0.3, noise=0.5, discount=0.9)
    assert mdp.r.shape == (10, 5)
    for x in range(9):
        assert (mdp.p[x, :, x + 1] == 1).all()
    assert (mdp.termination[9] == 1).all() and not mdp.termination[:9].any()
    assert mdp.r[9, 0] == 1 and mdp.r.sum() == 1
    assert (mdp.reward_std[9] == 0.5).all() and not mdp.reward_std[:9].any()
    assert mdp.initial[0] == 1
    assert (pi[:, 0] == 1).all()
    np.testing.assert_allclose(mu, np.tile([0.3 + 0.7 / 5, *[0.7 / 5] * 4], (10, 1)))
    np.testing.assert_allclose(mdp.v_values(pi), 0.9 ** np.arange(9, -1, -1))


def test_chain_defaults_are_the_first_column_of_table_1():
    mdp, _, mu = problems.chain()
    assert mdp.r.shape == (10, 5) and mdp.reward_std[-1, 0] == 0.1 and mdp.discount == 0.99
    np.testing.assert_allclose(mu, 0.2)


@pytest.mark.parametrize("sparse", [True, False])
def test_open_world_is_the_papers(sparse):
    mdp, pi, mu = problems.open_world(n=4, sparse=sparse)
    p = mdp.dense_p()
    moves = {0: (0, -1), 1: (-1, 0), 2: (0, 1), 3: (1, 0)}
    for row in range(4):
        for column in range(4):
            x = 4 * row + column
            for a, (down, right) in moves.items():
                y = 4 * min(max(row + down, 0), 3) + min(max(column + right, 0), 3)
                if x == 15:
                    assert not p[x, a].any() and mdp.r[x, a] == 0
                elif y == 15:
                    assert mdp.r[x, a] == 1 and not p[x, a].any()
                else:
                    assert mdp.r[x, a] == 0 and p[x, a, y] == 1
    assert mdp.initial[0] == 1
    np.testing.assert_allclose(pi, np.tile([0, 0, 0.5, 0.5], (16, 1)))
    np.testing.assert_allclose(mu, 0.25)
    # From the start every path of π has at least 2(n-1) = 6 moves; the shortest value is γ^5 when none is lost at a wall.
    assert 0.9 < mdp.v_values(pi)[0] < 0.99**5


def test_garnet_has_the_asked_branching_and_is_repeatable():
    one = problems.garnet(states=8, actions=3, branching=2, seed=5, termination=0.25)
    two = problems.garnet(states=8, actions=3, branching=2, seed=5, termination=0.25, sparse=True)
    np.testing.assert_array_equal(one.mdp.p, two.mdp.dense_p())
    np.testing.assert_array_equal((one.mdp.p > 0).sum(axis=2), 2)
    np.testing.assert_allclose(one.mdp.termination, 0.25)
    assert not np.array_equal(one.pi, problems.garnet(states=8, actions=3, branching=2, seed=6).pi)
    with pytest.raises(ValueError, match="branching must be at most the number of states 3, got 4"):
        problems.garnet(states=3, branching=4)


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Taxi-v4"])
def test_gymnasium_tables_have_the_environments_returns(name):
    gymnasium = pytest.importorskip("gymnasium")
    mdp = problems.from_gymnasium(name, discount=0.9)
    environment = gymnasium.make(name, max_episode_steps=10**6)
    generator = np.random.default_rng(0)
    policy = generator.dirichlet(np.ones(mdp.num_actions), size=mdp.num_states)
    returns = []
    state, _ = environment.reset(seed=0)
    for _ in range(300):
        state, _ = environment.reset()
        total, scale, ended = 0.0, 1.0, False
        while not ended and scale > 1e-3:
            state, reward, ended, _, _ = environment.step(
                int(generator.choice(mdp.num_actions, p=policy[state]))
            )
            total += scale * float(reward)
            scale *= 0.9
        returns.append(total)
    value = mdp.initial @ mdp.v_values(policy)
    error = np.std(returns) / np.sqrt(len(returns))
    assert abs(np.mean(returns) - value) < 4 * error + 0.02


def test_frozen_lake_can_be_solved():
    mdp = problems.from_gymnasium("FrozenLake-v1", is_slippery=False)
    assert mdp.initial @ mdp.optimal_values().max(axis=1) == pytest.approx(0.99**5)


def test_an_environment_without_a_table_is_refused():
    with pytest.raises(ValueError, match="environment must have a transition table P"):
        problems.from_gymnasium("CartPole-v1")


@pytest.mark.parametrize(
    ("rewards", "deviation"),
    [([100.0] * 3, 0.0), ([1e6] * 7, 0.0), ([0.0, 2e-7], 1e-7), ([1e9, 1e9 + 2], 1.0)],
)
def test_reward_noise_of_a_table_is_that_of_its_rewards_at_any_scale(rewards, deviation):
    """Equal rewards have none, and rounding makes none; small ones have theirs."""
    pytest.importorskip("gymnasium")
    steps = [(1 / len(rewards), 0, reward, False) for reward in rewards]
    environment = SimpleNamespace(P={0: {0: steps}}, initial_state_distrib=np.ones(1))
    np.testing.assert_allclose(problems.from_gymnasium(environment).reward_std, [[deviation]], rtol=1e-9)


STAYS = [(1.0, 0, 0.0, False)]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        ({0: {0: STAYS}}, {"is_slippery": False}, "got is_slippery with one that is made already"),
        ({}, {}, "must have a transition table P"),
        ({0: {}}, {}, r"at least one state and one action, got shape \(1, 0\)"),
        ({1: {0: STAYS}}, {}, r"there is no P\[0\]\[0\]"),
        ({0: {0: STAYS}, 1: {0: STAYS, 1: STAYS}}, {}, r"there is no P\[0\]\[1\]"),
        ({0: {0: [(0.5, 0, 1.0, True)]}}, {}, r"chances in P\[0\]\[0\] must sum to 1, but sum to 0.5"),
        ({0: {0: [(1.0, 1, 0.0, False)]}}, {}, r"successors in P\[0\]\[0\] must lie in range\(1\), got 1"),
        (
            {0: {0: [(1.0, 0, 0.0)]}},
            {},
            r"P\[0\]\[0\] must hold tuples \(chance, successor, reward, terminated\)",
        ),
    ],
)
def test_a_table_that_says_too_little_is_refused(table, options, message):
    pytest.importorskip("gymnasium")
    environment = SimpleNamespace(P=table, initial_state_distrib=np.eye(max(1, len(table)))[0])
    with pytest.raises(ValueError, match=message):
        problems.from_gymnasium(environment, **options)


def test_a_table_without_a_start_distribution_is_refused():
    pytest.importorskip("gymnasium")
    environment = SimpleNamespace(P={0: {0: [(1.0, 0, 0.0, True)]}})
    with pytest.raises(ValueError, match="environment must have a start distribution initial_state_distrib"):
        problems.from_gymnasium(environment)


@pytest.mark.parametrize(
    "call",
    [
        lambda: problems.chain(n=0),
        lambda: problems.chain(beta=-0.1),
        lambda: problems.chain(noise=-1),
        lambda: problems.open_world(n=1),
        lambda: problems.chain(discount=1),
        lambda: problems.garnet(seed=-1),
    ],
)
def test_impossible_settings_are_refused(call):
    with pytest.raises(ValueError, match="must"):
        call()
