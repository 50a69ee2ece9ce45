"""Networks of u: the agent's weights of paths against a sum written out, bounds and padding, and exact u of tables."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax import trajectories
from marginax.deep import critic_targets, path_network, td3
from marginax.deep.config import TD3Config
from marginax.deep.path_network import PathLoss, PathNetwork
from reference.episodes import filled, sample, transitions

CONFIG = TD3Config(
    operator="marginalized",
    weights="paths",
    hidden=(8,),
    sequence_length=4,
    clip=2.0,
    decay=0.9,
    act_noise=0.5,
    weight_learning_rate=1e-2,
)


SIZES = {"observation_size": 2, "action_size": 1}
init = jax.jit(td3.init, static_argnames=("config", *SIZES))
targets = jax.jit(td3.targets, static_argnames=("config", "train"))


@pytest.fixture(scope="module")
def batch():
    return sample(filled(transitions(5, 40), 31), jax.random.key(2), batch=64, length=4)


def agent(config, scale=1.0):
    """An agent whose network of u is far from 1."""
    state = init(config, **SIZES, key=jax.random.key(0))
    last = state.estimator.network.head.weights[-1]
    last = last + scale * jnp.linspace(-1, 1.5, last.size)[:, None]
    return eqx.tree_at(
        lambda s: [n.head.weights[-1] for n in (s.estimator.network, s.estimator.average)],
        state,
        [last, last],
    )


def weights_of(config, state, batch):
    one = jax.tree.map(lambda x: x[None], batch)
    found, *_ = targets(config, state, one, jax.random.key(3)[None], train=False)
    return np.asarray(found.credit[0])


@pytest.mark.parametrize("conditioned", [True, False])
def test_weights_are_the_decay_times_u_times_the_actions_own_trace(batch, conditioned):
    config = dataclasses.replace(CONFIG, start_conditioned=conditioned)
    state = agent(config)
    means = np.tanh(np.asarray(state.target_actor(batch.observations.reshape(-1, 2)))).reshape(4, 64, 1)
    z = (np.asarray(batch.actions) - means) / 0.5
    log_pi = (-0.5 * z**2 - np.log(0.5) - 0.5 * np.log(2 * np.pi))[..., 0]
    ratios = np.minimum(2.0, np.exp(log_pi - np.asarray(batch.log_behaviour)))
    head = state.estimator.network.head
    start = np.concatenate([batch.observations[0], np.clip(batch.actions[0], -1, 1)], -1)
    found = weights_of(config, state, batch)
    for t in range(4):
        seen = np.concatenate([batch.observations[t], start], -1) if conditioned else batch.observations[t]
        hidden = np.maximum(seen @ np.asarray(head.weights[0]) + np.asarray(head.biases[0]), 0)
        u = np.exp(hidden @ np.asarray(head.weights[1]) + np.asarray(head.biases[1]))[:, 0]
        u = np.minimum(u, 2.0 ** (t - 1)) if t > 1 else 1.0
        expected = np.where(batch.valid[t], 0.9**t * u * ratios[t] if t else 1.0, 0)
        np.testing.assert_allclose(found[t], expected, rtol=1e-4, atol=1e-6)


def test_weights_are_bounded_by_the_clip_alone(batch):
    """However wild the network, u is at most c̄ for each trace on the way; and without decay there is no credit."""
    wild = weights_of(CONFIG, agent(CONFIG, 1e3), batch)
    assert (wild <= 1.8 ** np.arange(4)[:, None] + 1e-4).all() and wild.max() > 1.8
    none = dataclasses.replace(CONFIG, decay=0.0)
    np.testing.assert_array_equal(weights_of(none, agent(none), batch)[1:], 0)


@pytest.mark.slow
def test_training_reads_no_padding_and_moves_the_estimator_alone(batch):
    state = agent(CONFIG)
    valid = batch.valid

    def poison(x):
        mask = valid.reshape(valid.shape + (1,) * (x.ndim - 2))
        return jnp.where(mask, x, 1e3) if x.dtype == jnp.float32 else x

    def train(batch):
        return targets(
            CONFIG, state, jax.tree.map(lambda x: x[None], batch), jax.random.key(3)[None], train=True
        )

    (clean, moved, loss), (spoilt, *others) = train(batch), train(jax.tree.map(poison, batch))
    for a, b in zip(
        jax.tree.leaves((clean.target, moved, loss)), jax.tree.leaves((spoilt.target, others)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert np.isfinite(loss) and not np.array_equal(
        moved.network.head.weights[0], state.estimator.network.head.weights[0]
    )
    assert critic_targets.path_loss(CONFIG) == PathLoss(1.0, 0.8, 0.999, 1e-2)


@pytest.mark.slow
@pytest.mark.parametrize(("power", "mixture", "tolerance"), [(1.0, 0.8, 0.15), (2.0, 1.0, 0.25)])
def test_the_network_reaches_exact_u_of_an_open_world(power, mixture, tolerance):
    """All starts of a 5 × 5 Open World at c̄ = 2: mean over arrivals at times t ≥ 2, weighted by how often they come."""
    gamma = 0.8
    mdp, pi, mu = mx.problems.open_world(5, discount=gamma)
    c = mx.traces.retrace(pi, mu, clip=2.0)
    p = np.asarray(mdp.p).reshape(25, 4, 25)
    first = gamma * p.reshape(100, 25)[:96]

    def later(measure):
        kernel = np.einsum("xa,xay->xy", measure, p)
        return first @ np.linalg.inv(np.eye(25) - gamma * kernel) - first

    arrivals = later(mu)
    exact = np.divide(later(mu * c), arrivals, where=arrivals > 1e-9, out=np.zeros((96, 25)))
    loss = PathLoss(power, mixture, 0.995, 3e-3)
    paths = path_network.init(loss, PathNetwork(25, 29, (64, 64), key=jax.random.key(0)))
    tables, traces = trajectories.sampling_tables(mdp), jnp.asarray(c, jnp.float32)

    def pair(states, actions):
        return jnp.concatenate([jax.nn.one_hot(states, 25), jax.nn.one_hot(actions, 4)], -1)

    def step(paths, key):
        keys = jax.random.split(key, 3)
        starts = {
            "start_states": jax.random.randint(keys[0], (64,), 0, 24),
            "start_actions": jax.random.randint(keys[1], (64,), 0, 4),
        }
        t = trajectories.sample(tables, jnp.asarray(mu), keys[2], episodes=64, horizon=20, **starts)
        start = pair(t.states[:, :1], t.actions[:, :1])
        scores = lambda network: network(jax.nn.one_hot(t.states, 25), start)  # noqa: E731
        arrays = (traces[t.states, t.actions], t.discounts, t.truncated)
        return path_network.update(loss, paths, scores, *arrays, clip=2.0)[0], None

    keys = jax.random.split(jax.random.key(1), 2500)
    paths, _ = jax.jit(lambda paths: jax.lax.scan(step, paths, keys))(paths)
    starts = pair(*jnp.divmod(jnp.arange(96), 4))[:, None]
    learned = np.exp(paths.average(jnp.tile(jnp.eye(25), (96, 1, 1)), starts))
    error = np.sqrt(np.sum(arrivals * (learned - exact) ** 2) / np.sum(arrivals * exact**2))
    assert error < tolerance


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"power": float("inf")}, "power must be finite, got inf"),
        ({"mixture": 1.5}, r"mixture must lie in \[0, 1\], got 1.5"),
        ({"average": -0.1}, r"average must lie in \[0, 1\], got -0.1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
    ],
)
def test_losses_that_cannot_be_learned_from_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        PathLoss(**setting)
