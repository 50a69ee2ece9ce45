"""TD weights learned by networks, against exact ones and the definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax import trajectories
from marginax.deep import weight_network
from marginax.deep.config import TD3Config
from marginax.weights import losses

SETTINGS = {
    "regression": {"weight_learning_rate": 3e-3},
    "fenchel": {"weight_learning_rate": 3e-3, "weight_critic_learning_rate": 1e-3},
}
saddle_point, fenchel, regression, penalty = map(
    jax.jit, (losses.saddle_point, losses.fenchel, losses.regression, losses.penalty)
)


def one_hot(states, actions):
    return jnp.concatenate([jax.nn.one_hot(states, 25), jax.nn.one_hot(actions, 4)], -1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "updates"), [("regression", 2500), ("fenchel", 3500)])
def test_networks_reach_the_exact_weights_of_an_open_world(kind, updates):
    """All starts of a 5 × 5 Open World, R² weighted by visitation."""
    mdp, pi, mu = mx.problems.open_world(5, discount=0.95)
    c = mx.traces.retrace(pi, mu)
    exact = mx.weights.exact(mdp, mu, c).reshape(100, 100)[:96]
    visits = mdp.visitation(mu).reshape(100, 100)[:96]
    config = TD3Config(weights=kind, hidden=(64, 64), exact_first_weight=False, **SETTINGS[kind])
    tables, traces = trajectories.sampling_tables(mdp), jnp.asarray(c, jnp.float32)

    def draw(key):
        first, second, third = jax.random.split(key, 3)
        starts = {
            "start_states": jax.random.randint(first, (32,), 0, 24),
            "start_actions": jax.random.randint(second, (32,), 0, 4),
        }
        t = trajectories.sample(tables, jnp.asarray(mu), third, episodes=32, horizon=40, **starts)
        t = jax.tree.map(lambda x: x.T, t)
        return one_hot(t.states, t.actions), traces[t.states, t.actions], t.discounts, t.truncated

    network = weight_network.fit(config, draw, 29, key=jax.random.key(0), updates=updates)
    table = one_hot(*jnp.divmod(jnp.arange(100), 4))
    pairs = jnp.stack(
        [jnp.concatenate([table, jnp.broadcast_to(start, (100, 29))], -1) for start in table[:96]]
    )
    learned = np.asarray(weight_network.predict(config, network, pairs))
    mean = np.sum(visits * exact) / np.sum(visits)
    r_squared = 1 - np.sum(visits * (learned - exact) ** 2) / np.sum(visits * (exact - mean) ** 2)
    assert r_squared >= 0.95


def balance(w, q, traces, discounts, cut) -> float:
    """The saddle point's sum, one step at a time."""
    total, power = q[0], 1.0
    for t in range(len(w)):
        following = discounts[t] * traces[t + 1] * q[t + 1] if t + 1 < len(w) and not cut[t] else 0.0
        total += power * w[t] * (following - q[t])
        if cut[t]:
            break
        power *= discounts[t]
    return float(total)


@pytest.mark.parametrize("ending", ["none", "terminal", "truncated"])
def test_losses_equal_their_definitions_and_read_nothing_beyond_the_end(ending):
    random = np.random.default_rng(0)
    w, q, traces = random.uniform(0, 2, 6), random.normal(size=6), random.uniform(0, 1, 6)
    discounts, truncated = np.full(6, 0.9), np.zeros(6, bool)
    if ending == "terminal":
        discounts[3] = 0.0
    if ending == "truncated":
        truncated[3] = True
    cut = truncated | (discounts == 0)
    traces[0] = np.nan
    if ending != "none":
        for array in (w, q, traces):
            array[4:] = np.nan
    arrays = [jnp.asarray(x, jnp.float32) for x in (w, q, traces, discounts)]
    flags = jnp.asarray(truncated)
    last = 6 if ending == "none" else 4
    powers = 0.9 ** np.arange(last)
    assert saddle_point(*arrays, flags) == pytest.approx(balance(w, q, traces, discounts, cut), rel=1e-5)
    quadratic = np.sum(powers * w[:last] ** 2) / 2
    expected = -balance(w, q, traces, discounts, cut) - quadratic
    assert fenchel(*arrays, flags) == pytest.approx(expected, rel=1e-5)
    products = np.cumprod(np.append(1.0, traces[1:last]))
    squares = np.sum(powers * (w[:last] - products) ** 2)
    assert regression(arrays[0], *arrays[2:], flags) == pytest.approx(squares, rel=1e-5)
    half = np.sum(powers * q[:last] ** 2) / 2
    assert penalty(arrays[1], arrays[3], flags) == pytest.approx(half, rel=1e-5)


def test_cumulative_traces_balance_every_critic():
    """With w_t = C_t the loss is zero for any critic, so the solution is C's conditional mean."""
    traces = jax.random.uniform(jax.random.key(0), (7,))
    products, _ = losses.cumulative(traces)
    for seed in range(5):
        critic = jax.random.normal(jax.random.key(seed), (7,))
        loss = saddle_point(products, critic, traces, jnp.full(7, 0.9))
        assert loss == pytest.approx(0.0, abs=1e-5)


def test_an_adversary_moves_against_the_weights():
    """One step of Adam lowers the saddle point's loss through the weights and raises it through the critic."""
    config = TD3Config(weights="saddle-point", hidden=(16,), weight_critic_penalty=0.0)
    old = jax.jit(partial(weight_network.init, config, 3))(jax.random.key(0))
    pairs = weight_network.inputs(config, jax.random.normal(jax.random.key(1), (5, 32, 3)))
    sequence = (jnp.full((5, 32), 0.5), jnp.full((5, 32), 0.9), jnp.zeros((5, 32), bool))
    new, before, _ = jax.jit(partial(weight_network.update, config))(old, pairs, *sequence)
    loss = jax.jit(partial(weight_network.loss, config))

    def value(network, critic):
        return float(loss((network, critic), pairs, *sequence)[0])

    assert value(new.weights, old.critic) < float(before) < value(old.weights, new.critic)


def test_power_normalisation_has_mean_one_over_what_is_valid():
    w = jnp.array([[0.5, 2.0], [4.0, jnp.nan]])
    valid = jnp.array([[True, True], [True, False]])
    out = np.asarray(losses.normalise(w, valid, power=0.1))
    raised = np.array([0.5, 2.0, 4.0]) ** 0.1
    np.testing.assert_allclose(out[valid], raised / raised.mean(), rtol=1e-5)
    assert out[1, 1] == 0
