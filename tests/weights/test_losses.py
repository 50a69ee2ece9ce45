"""Losses of weight networks: least at the mean, zero products included, and exact u recovered on the Open World."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest

import marginax as mx
from marginax.weights import losses

GAMMA, STEPS, START = 0.7, 20, (0, 2)  # the upper left corner, to the right

SLOWER = ((1.0, 1.0, 1.0, 0.08), (2.0, 0.0, 1.0, 0.3), (4.0, 1.5, 0.8, 0.3))


@pytest.mark.parametrize(
    ("power", "shift"), [(0, 0), (0.5, 0), (1, 0), (1.5, 0), (1.5, 0.01), (2, 0.01), (2, 0.5)]
)
def test_deviance_is_least_at_the_mean(power, shift):
    products, chances = jnp.array([0.0, 0.5, 8.0]), jnp.array([0.6, 0.3, 0.1])
    scores = jnp.linspace(-6, 4, 20_001)
    each = losses.deviance(jnp.tile(scores, (3, 1)), jnp.tile(products[:, None], 20_001), power, shift)
    average = chances @ each
    assert np.exp(scores[jnp.argmin(average)]) == pytest.approx(float(chances @ products), rel=1e-2)


def test_gamma_deviance_of_zero_is_bounded_by_the_shift_alone():
    low, zero = jnp.array([-10.0, -20.0]), jnp.zeros(2)
    assert losses.deviance(low, zero, 2)[1] == pytest.approx(-20)
    np.testing.assert_allclose(losses.deviance(low, zero, 2, 0.01), np.log(0.01) + 1, atol=0.1)


@pytest.fixture(scope="module")
def open_world():
    """Trajectories of μ from one pair: states, actions and ends `[N, T]`."""
    mdp, pi, mu = mx.problems.open_world(5, GAMMA)
    p = np.asarray(mdp.p).reshape(25, 4, 25)
    following = np.where(p.sum(-1) > 0, p.argmax(-1), 24)
    rng = np.random.default_rng(0)
    actions = rng.integers(4, size=(4000, STEPS))
    actions[:, 0] = START[1]
    states = np.zeros((4000, STEPS), int)
    for t in range(1, STEPS):
        states[:, t] = following[states[:, t - 1], actions[:, t - 1]]
    ended = following[states, actions] == 24
    return mdp, pi, mu, states, actions, ended


def later_u(mdp, mu, c):
    """Exact u at times t ≥ 2: at t = 1 it is 1 and is not learned. The start is followed by the state to its right."""
    first = GAMMA * np.eye(25)[1]
    moves = np.einsum("xa,xay->xy", mu, np.asarray(mdp.p).reshape(25, 4, 25))
    visits = np.linalg.solve(np.eye(25) - GAMMA * moves.T, first)
    total = visits * mx.weights.paths(mdp, mu, c)[START]
    return np.divide(total - first, visits - first, where=visits - first > 1e-12, out=np.zeros(25))


@pytest.mark.parametrize(
    ("clip", "power", "mixture", "tolerance"),
    [
        (2.0, 2.0, 1.0, 0.3),
        (2.0, 1.0, 0.0, 0.15),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOWER),
    ],
)
def test_exact_u_is_recovered(open_world, clip, power, mixture, tolerance):
    mdp, pi, mu, states, actions, ended = open_world
    c = mx.traces.retrace(pi, mu, clip=clip)
    exact = later_u(mdp, mu, c)
    arrays = (jnp.asarray(c[states, actions], jnp.float32), jnp.where(ended, 0.0, GAMMA))
    optimiser = optax.adam(optax.exponential_decay(0.2, 50, 0.5))

    def loss(f, states, c, discounts):
        each = jax.vmap(lambda f, c, d: losses.path_deviance(f, c, d, power=power, mixture=mixture))
        return jnp.mean(each(f[states], c, discounts))

    @jax.jit
    def fit(*arrays):
        def step(carry, _):
            f, state = carry
            moves, state = optimiser.update(jax.grad(loss)(f, *arrays), state)
            return (f + moves, state), None

        f = jnp.zeros(25)
        return jax.lax.scan(step, (f, optimiser.init(f)), None, 300)[0][0]

    f = np.asarray(fit(states, *arrays), float)
    shares = GAMMA ** np.arange(STEPS) * (np.cumsum(ended, 1) - ended == 0) * (np.arange(STEPS) >= 2)
    seen = np.bincount(states.ravel(), shares.ravel(), minlength=25)

    def error(expected):
        return np.sqrt(seen @ (np.exp(f) - expected) ** 2 / (seen @ expected**2))

    if (
        mixture == 1
    ):  # every power is least at the mean of the products met, which is exact u but for sampling
        products = np.ones_like(shares)
        products[:, 2:] = np.cumprod(c[states, actions][:, 1:-1], axis=1)
        sums = np.bincount(states.ravel(), (shares * products).ravel(), minlength=25)
        assert error(np.divide(sums, seen, where=seen > 0, out=np.zeros(25))) < 0.05
    assert error(exact) < tolerance


def test_nothing_is_read_after_an_end():
    f, traces = jnp.array([0.0, 0.0, 0.3, 0.1, jnp.nan]), jnp.array([jnp.nan, 0.5, 2.0, jnp.nan, jnp.nan])
    discounts = jnp.array([0.9, 0.9, 0.9, 0.0, 0.9])
    for mixture in (0.0, 1.0):
        value, slope = jax.value_and_grad(losses.path_deviance)(f, traces, discounts, mixture=mixture)
        assert np.isfinite(value) and np.isfinite(slope).all() and slope[4] == 0
    truncated = jnp.array([False, False, True, False, False])
    slope = jax.grad(losses.path_deviance)(f, traces, discounts, truncated)
    assert slope[2] != 0 and (slope[3:] == 0).all()


def test_bootstraps_come_from_the_target_network_if_there_is_one():
    f, traces, discounts = jnp.zeros(4), jnp.array([9.0, 2.0, 2.0, 9.0]), jnp.ones(4)
    own, given = (
        jax.grad(
            lambda f, b=b: losses.path_deviance(f, traces, discounts, mixture=0.0, shift=0.0, bootstrap=b)
        )(f)
        for b in (None, jnp.array([1.0, 1.0, 3.0, 1.0]))
    )
    np.testing.assert_allclose(own, [0, 0, 1 - 2, 1 - 2], atol=1e-6)
    np.testing.assert_allclose(given, [0, 0, 1 - 2, 1 - 6], atol=1e-6)


TERMS = ("weights", "critic", "scores", "traces", "discounts", "truncated", "bootstrap")


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (losses.regression, ("weights", "traces", "discounts", "truncated")),
        (losses.path_deviance, ("scores", "traces", "discounts", "truncated", "bootstrap")),
        (losses.saddle_point, ("weights", "critic", "traces", "discounts", "truncated")),
        (losses.penalty, ("scores", "discounts", "truncated")),
        (losses.fenchel, ("weights", "critic", "traces", "discounts", "truncated")),
    ],
)
def test_numpy_and_lists_are_read_like_jax_arrays(loss, names):
    rng = np.random.default_rng(0)
    given = {name: rng.uniform(0.2, 1.5, 7).astype(np.float32) for name in TERMS}
    given |= {"discounts": np.float32([0.9] * 5 + [0, 0.9]), "truncated": np.arange(7) == 3}
    given = {name: given[name] for name in names}
    expected = loss(**{name: jnp.asarray(array) for name, array in given.items()})
    for form in (np.asarray, list, lambda array: (array * 1).tolist()):  # flags as 0 and 1
        np.testing.assert_allclose(
            loss(**{name: form(array) for name, array in given.items()}), expected, rtol=1e-6
        )
    beyond = {name: np.where(np.arange(7) > 3, np.nan, array) for name, array in given.items()}
    np.testing.assert_allclose(loss(**beyond | {"truncated": given["truncated"]}), expected, rtol=1e-6)
    batch = {name: np.stack([array] * 7) for name, array in given.items()}
    with pytest.raises(ValueError, match=rf"{names[0]} must have shape \[T\] with T >= 1, got \(7, 7\)"):
        loss(**batch)
    with pytest.raises(
        ValueError, match=rf"discounts must have shape \(7,\), that of {names[0]}, got \(1,\)"
    ):
        loss(**given | {"discounts": np.ones(1)})
    with pytest.raises(ValueError, match=r"truncated must have shape \(7,\), one entry per step, got \(1,\)"):
        loss(**given | {"truncated": [False]})


def test_products_deviances_and_normalised_weights_take_lists():
    np.testing.assert_allclose(losses.cumulative([9, 2, 3, 5], [0, 0, 1, 0])[0], [1, 2, 6, 0])
    np.testing.assert_allclose(losses.deviance([0.0, 1.0], [2, 3], power=1), [1, np.e - 3], rtol=1e-6)
    np.testing.assert_allclose(losses.normalise([1, 3, 9], [1, 1, 0]), [0.5, 1.5, 0])


def test_weights_are_normalised_over_the_entries_that_count():
    given = np.array([[1.0, 3.0], [9.0, 2.0]], np.float32)
    with pytest.raises(ValueError, match=r"valid must have shape \(2, 2\), one entry per step, got \(1,\)"):
        losses.normalise(given, [True])
    np.testing.assert_array_equal(losses.normalise(given, np.zeros((2, 2), bool)), 0)
    valid = np.array([[True, False], [True, True]])
    expected = np.where(valid, np.sqrt(given), 0) / np.sqrt([1, 9, 2]).mean()
    np.testing.assert_allclose(losses.normalise(given, valid, power=0.5), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"mixture": 2.0}, r"mixture must lie in \[0, 1\], got 2.0"),
        ({"shift": -1.0}, "shift must be at least 0, got -1.0"),
        ({"power": float("nan")}, "power must be finite, got nan"),
    ],
)
def test_settings_that_give_no_loss_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        losses.path_deviance([0.0] * 4, [1.0] * 4, [0.9] * 4, **setting)


@pytest.mark.parametrize("value", ["abc", None, {}, [1j, 1j]])
def test_what_is_no_sequence_of_numbers_is_named(value, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match="traces must be an array of real numbers, got"):
        losses.regression([1.0, 1.0], value, [0.9, 0.9])
