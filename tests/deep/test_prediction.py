"""Policy evaluation with networks: targets against `marginax.targets`, truth against tables, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import marginax as mx
from marginax.deep import games, prediction
from marginax.deep.path_network import PathLoss
from marginax.deep.prediction import Setting
from marginax.deep.run_config import Sizes
from marginax.simulators import make_accelerated

SMALL = Sizes(
    phases=2,
    period=4,
    reports=2,
    environments=4,
    steps=12,
    length=5,
    batch=4,
    filters=2,
    units=4,
    burn_in=4,
    pairs=8,
    rollouts=4,
    horizon=8,
    probes=2,
    repeats=3,
)


def uniform(observations):
    return jnp.full((len(observations), 3), 1 / 3)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("one-step"),
        Setting("retrace", 0.9, 1.2),
        Setting("tree-backup", 0.9),
        Setting("q-lambda", 0.8),
        Setting("peng", 0.8),
        Setting("vtrace", 0.9, 1.2),
        Setting("marginalized", 0.9, 1.2),
    ],
)
def test_targets_are_those_of_the_library(setting):
    rng = np.random.default_rng(0)
    pi, mu, u, q, rewards = (jnp.asarray(rng.uniform(0.2, 1, 6), jnp.float32) for _ in range(5))
    v = jnp.asarray(rng.normal(size=7), jnp.float32)
    discounts = jnp.array([0.9, 0.9, 0.9, 0.9, 0.0, 0.9])
    one = jax.tree.map(lambda x: jnp.asarray(x)[0], prediction.coefficients([setting]))
    credits = prediction.credit(one, pi, mu, u)
    target = prediction.first_target(one, credits, q, v, rewards, discounts)
    ratio = np.minimum(setting.clip, pi / mu)
    decay = setting.decay
    traces = {
        "one-step": 0 * pi,
        "tree-backup": decay * pi,
        "q-lambda": decay + 0 * pi,
        "peng": decay + 0 * pi,
    }
    traces = traces.get(setting.operator, decay * ratio)
    steps = (v[1:], rewards, discounts)
    if setting.operator == "peng":
        expected = mx.targets.peng(*steps, traces)[0]
    elif setting.operator == "vtrace":  # the state value from x_1 on, one step later
        later = mx.targets.vtrace(v[1:-1], *(x[1:] for x in steps), traces[1:], ratio[1:])
        expected = rewards[0] + discounts[0] * later[0]
    elif setting.operator == "marginalized":
        weights = (decay ** jnp.arange(6) * u * ratio).at[0].set(1.0)
        expected = mx.targets.marginalized(q, *steps, jnp.tile(weights, (6, 1)))[0]
    else:
        expected = mx.targets.multi_step(q, *steps, traces)[0]
    assert target == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.long
def test_monte_carlo_truth_is_that_of_the_table():
    """Four Rooms under the uniform policy: every action is the same move, and values solve a linear system."""
    game = make_accelerated("grid/four-rooms")

    def policy(observations):
        return jnp.full((len(observations), 4), 1 / 4)

    sizes = Sizes(pairs=30, rollouts=400, horizon=300, burn_in=8, probes=2, repeats=2, length=3)
    true = jax.jit(lambda key: games.truth(game, policy, policy, 0.9, sizes, key))(jax.random.key(0))
    walls = np.ones((13, 13), bool)
    key = jax.random.split(jax.random.key(1), 3000)
    starts = np.asarray(jax.vmap(game.reset)(key)[0][0])
    walls[starts[:, 0], starts[:, 1]] = walls[8, 9] = False
    cells = {tuple(cell): k for k, cell in enumerate(np.argwhere(~walls))}
    assert len(cells) == 104
    p, r = np.zeros((104, 4, 104)), np.zeros((104, 4))
    for cell, k in cells.items():
        for a, move in enumerate([(-1, 0), (0, 1), (1, 0), (0, -1)]):
            for b, way in enumerate([(-1, 0), (0, 1), (1, 0), (0, -1)]):
                chance = 0.25 / 4 + 0.75 * (a == b)
                there = (cell[0] + way[0], cell[1] + way[1])
                there = cell if walls[there] else there
                if there == (8, 9):
                    r[k, a] += chance
                else:
                    p[k, a, cells[there]] += chance
            assert move is not None
    p[cells[8, 9]] = r[cells[8, 9]] = 0
    q = mx.TabularMDP(p, r, 0.9).q_values(np.full((104, 4), 1 / 4))
    places = np.argwhere(np.asarray(true.observations)[..., 0] == 1)[:, 1:]
    exact = np.array([q[cells[tuple(x)], a] for x, a in zip(places, np.asarray(true.actions), strict=True)])
    errors = (np.asarray(true.values) - exact) / np.asarray(true.errors)
    assert np.abs(errors).max() < 4.5 and 0.6 < errors.std() < 1.5


@pytest.fixture(scope="module")
def catch():
    game = make_accelerated("grid/catch")
    true = jax.jit(lambda key: games.truth(game, uniform, uniform, 0.9, SMALL, key))(jax.random.key(0))
    return game, true


def learn(game, true, settings, spoil=None):
    init, phase = prediction.program(game, settings, PathLoss(), discount=0.9, sizes=SMALL)
    agents = init(uniform, jax.random.key(1))
    if spoil is not None:
        agents = agents._replace(q=jax.tree.map(lambda x: x.at[spoil].set(jnp.nan), agents.q))
    step = jax.jit(lambda agents, key: phase(uniform, uniform, true, agents, key))
    return step(agents, jax.random.key(2))


@pytest.mark.long
def test_settings_share_the_data_and_nothing_else(catch):
    pair = [Setting("retrace", 0.9, 1.0), Setting("marginalized", 1.0, 2.0)]
    _, both = learn(*catch, pair)
    _, alone = learn(*catch, pair[1:])
    np.testing.assert_allclose(both.errors[:, 1], alone.errors[:, 0], rtol=1e-4)
    np.testing.assert_allclose(both.credits[1], alone.credits[0], rtol=1e-4)
    _, spoilt = learn(*catch, pair, spoil=0)
    assert np.isnan(spoilt.errors[:, 0]).all()
    np.testing.assert_array_equal(spoilt.errors[:, 1], both.errors[:, 1])
    assert (np.asarray(both.credits) >= 1).all() and both.errors.shape == (2, 2)


@pytest.mark.parametrize(
    ("settings", "sizes", "message"),
    [
        ([Setting("sarsa")], {}, r"settings\[0\].operator must be one of"),
        ([Setting("retrace", 1.5, 1.0)], {}, r"settings\[0\].decay must lie in \[0, 1\], got 1.5"),
        ([], {}, "settings must not be empty"),
        ([Setting("peng", 0.9)], {"learning_rate": -1.0}, "sizes.learning_rate must be positive, got -1.0"),
        ([Setting("peng", 0.9)], {"last_rate": float("nan")}, "sizes.last_rate must be finite, got nan"),
        ([Setting("peng", 0.9)], {"length": 200}, "length must lie between 3 and the 128 steps"),
        ([Setting("marginalized", 1.0, 1e3)], {}, "overflow single precision"),
        ([Setting("peng", 0.9)], {"period": 10}, "multiple of sizes.reports"),
        ([Setting("peng", 0.9)], {"rollouts": 1}, "rollouts must be at least 2, got 1"),
        ([Setting("peng", 0.9)], {"phases": 0}, "phases must be at least 1, got 0"),
        ([Setting("peng", 0.9)], {"pairs": 10}, "probes must lie between 1 and the 10 held-out pairs"),
    ],
)
def test_what_cannot_run_is_refused(settings, sizes, message):
    with pytest.raises(ValueError, match=message):
        prediction.check(settings, Sizes(**sizes))


def test_what_is_no_setting_is_refused(monkeypatch):
    """Without the run-time type check of the tests, which refuses what users may pass."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"settings\[0\].clip must be a number, got 'x'"):
        prediction.check([Setting("retrace", 0.9, "x")], SMALL)
    with pytest.raises(ValueError, match=r"settings\[1\] must be a Setting, got 'retrace'"):
        prediction.check([Setting("peng"), "retrace"], SMALL)


def test_simulators_need_no_steps_before_the_first_that_is_kept(catch):
    sizes = dataclasses.replace(SMALL, burn_in=0)
    init, _ = prediction.program(catch[0], [Setting("peng")], PathLoss(), discount=0.9, sizes=sizes)
    agents = init(uniform, jax.random.key(1))
    assert len(jax.tree.leaves(agents.states)[0]) == sizes.environments


def test_policies_that_do_not_fit_are_refused(catch):
    def refused(pi, mu, message):
        with pytest.raises(ValueError, match=message):
            games.check_policies(catch[0], pi, mu, jax.random.key(0), steps=4)

    refused(lambda x: jnp.ones((len(x), 4)) / 4, uniform, "pi must give 3 probabilities")
    refused(uniform, lambda x: 0.9 * uniform(x), "mu must be a distribution over 3 actions")
    refused(lambda x: jnp.nan * uniform(x), uniform, "pi must be a distribution")
