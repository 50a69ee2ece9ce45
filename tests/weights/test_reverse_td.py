"""Reverse TD against sweeps over every start and arrival, and against the exact weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax.weights import (
    CertaintyEquivalence,
    MonteCarlo,
    Regression,
    ReverseTD,
    certainty_equivalence,
    monte_carlo,
    reverse_td,
)
from reference import estimators as reference

MDP, PI, MU, C = reference.random_problem(0)


def batch(seed=0, episodes=12, horizon=8, **kwargs):
    return mx.trajectories.sample(MDP, MU, jax.random.key(seed), episodes=episodes, horizon=horizon, **kwargs)


@pytest.mark.parametrize(
    ("known", "reset"), [(True, True), (False, False)], ids=["mu, packed", "counts, padded"]
)
def test_is_the_fixed_point_of_sweeps_over_starts_and_arrivals(known, reset):
    data = batch(reset=reset)
    mu = MU if known else mx.weights.estimate_behaviour(data, 5, 2)
    mean = (mu * C).sum(axis=1)
    mean = mean if known else np.minimum(mean, 1)
    with jax.enable_x64(True):
        estimator = ReverseTD.init(5, 2, 0.9, mu=MU if known else None).update(data, C)
        u = reference.reverse_td(data, C, 0.9, mean)
        np.testing.assert_allclose(estimator.paths(C).reshape(5, 2, 5), u, atol=1e-9)
        np.testing.assert_allclose(estimator.weights(C), reference.from_paths(u, data, C, 0.9), atol=1e-9)
        states = ReverseTD.init(5, 2, 0.9, mu=MU if known else None, on_states=True).update(data, C)
        np.testing.assert_allclose(
            states.paths(C), reference.reverse_td(data, C, 0.9, mean, on_states=True), atol=1e-9
        )


@pytest.mark.slow
def test_updates_one_by_one_and_side_by_side_equal_the_batch():
    seeds = [batch(seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *fields: jnp.stack(fields), *seeds)

    def run(data):
        first = ReverseTD.init(5, 2, 0.9)
        return jax.lax.scan(lambda estimator, one: (estimator.update(one, C), None), first, data)[0].weights(
            C
        )

    for one, data in zip(jax.jit(jax.vmap(run))(stacked), seeds, strict=True):
        np.testing.assert_allclose(one, reverse_td(data, C), rtol=1e-4, atol=1e-5)


def test_one_row_equals_that_of_the_table():
    data = batch()
    np.testing.assert_allclose(reverse_td(data, C, start=(3, 1)), reverse_td(data, C)[3, 1], atol=1e-5)
    np.testing.assert_allclose(
        reverse_td(data, C, on_states=True, start=2), reverse_td(data, C, on_states=True)[2], atol=1e-5
    )


def test_padding_is_never_read():
    data = batch()
    assert not data.valid.all()
    np.testing.assert_array_equal(reverse_td(reference.poisoned(data), C), reverse_td(data, C))


def test_a_start_without_data_has_zero_weights():
    data = batch(episodes=1, horizon=2, start_states=0, start_actions=0)
    table = np.asarray(reverse_td(data, C))
    seen = {(x, a) for episode in reference.episodes(data) for x, a, _, _ in episode}
    for x, a in np.ndindex(5, 2):
        assert table[x, a].any() == ((x, a) in seen)
    assert np.isfinite(table).all()


@pytest.mark.slow
def test_converges_to_the_exact_weights_with_far_less_data_than_monte_carlo():
    exact, states = mx.weights.exact(MDP, MU, C), mx.weights.exact_states(MDP, MU, C)
    few, many = batch(1, episodes=200, horizon=40), batch(2, episodes=4_000, horizon=40)

    def error(w, truth=exact):
        return np.abs(w - truth).mean() / truth.mean()

    assert error(reverse_td(many, C, mu=MU)) < 0.03
    assert error(reverse_td(many, C, on_states=True, mu=MU), states) < 0.03
    assert error(reverse_td(few, C, mu=MU)) < 0.5 * error(monte_carlo(few, C))
    assert error(reverse_td(few, C, mu=MU)) < 4 * error(certainty_equivalence(few, C, mu=MU))


@pytest.mark.slow
def test_open_world_with_long_traces_needs_few_trajectories():
    mdp, pi, mu = mx.problems.open_world(5)
    c = mx.traces.retrace(pi, mu, clip=2.0)
    exact, visits = mx.weights.exact(mdp, mu, c), mdp.visitation(mu)
    errors = []
    for episodes in (50, 400):
        data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=episodes, horizon=1000)
        w = np.asarray(reverse_td(data, c))
        errors.append((visits[0] * np.abs(w - exact)[0]).sum() / (visits[0] * exact[0]).sum())
    assert errors[0] < 0.25 and errors[1] < 0.1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mu": 2 * MU}, r"mu must sum to 1, but mu\[0\] sums to 2"),
        ({"mu": np.full((5, 2), np.nan)}, r"mu must be finite, but mu\[0, 0\] = nan"),
        ({"mu": MU[:3]}, r"mu must have shape \(5, 2\), got \(3, 2\)"),
    ],
    ids=["sum", "nan", "shape"],
)
def test_refuses(arguments, words):
    with pytest.raises(ValueError, match=words):
        reverse_td(batch(), C, **arguments)


@pytest.mark.parametrize("loop", [np.eye(1), np.eye(2)[::-1]], ids=["loop", "cycle"])
def test_traces_that_diverge_are_refused_and_are_nan_in_the_incremental_form(loop):
    """Deterministic, one action, γ c = 1.08: the sum over time is infinite whatever the data."""
    only = np.ones((len(loop), 1))
    mdp = mx.TabularMDP(loop[:, None], 0 * only, 0.9)
    data = mx.trajectories.sample(mdp, only, jax.random.key(0), episodes=2, horizon=50)
    for options in ({}, {"start": (0, 0)}, {"on_states": True}, {"on_states": True, "start": 0}):
        start = 0 if "on_states" in options else r"\(0, 0\)"
        with pytest.raises(ValueError, match=f"c is too large: .* from start {start}"):
            reverse_td(data, 1.2 * only, mu=only, **options)
    for kind in (ReverseTD, CertaintyEquivalence):
        estimator = kind.init(len(loop), 1, 0.9, mu=only).update(data, 1.2 * only)
        assert np.isnan(estimator.weights(1.2 * only)).all()
        assert np.isfinite(kind.init(len(loop), 1, 0.9).update(data, only).weights(only)).all()
    assert np.isfinite(reverse_td(data, 1.2 * only)).all()  # without mu, mean traces above 1 count as 1


@pytest.mark.parametrize("kind", [CertaintyEquivalence, MonteCarlo, ReverseTD, Regression])
def test_every_incremental_form_checks_its_discount_and_behaviour(kind):
    size = (np.eye(3), 2) if kind is Regression else (3, 2)
    for discount, words in (
        (2.0, r"discount must lie in \[0, 1\), got 2"),
        (np.nan, "discount must be finite"),
    ):
        with pytest.raises(ValueError, match=words):
            kind.init(*size, discount)
    made = jax.vmap(lambda discount: kind.init(*size, discount).discount)(jnp.array([0.5, 0.9]))
    np.testing.assert_allclose(made, [0.5, 0.9])  # traced values are left alone
    if kind in (CertaintyEquivalence, ReverseTD):
        with pytest.raises(ValueError, match=r"mu must have shape \(3, 2\), got \(1, 1\)"):
            kind.init(*size, 0.9, mu=np.ones((1, 1)))


@pytest.mark.parametrize("kind", [CertaintyEquivalence, MonteCarlo, ReverseTD, Regression])
@pytest.mark.parametrize("field", ["states", "actions", "next_states"])
def test_a_step_outside_of_the_tables_leaves_no_weights_that_look_right(kind, field):
    """Under jit nothing can be refused; every pair of the batch is a start of weights that are NaN."""
    states, actions = MU.shape
    estimator = kind.init(np.eye(states) if kind is Regression else states, actions, 0.9)
    data = batch(episodes=100, horizon=20)
    place = tuple(
        np.argwhere(np.asarray(data.discounts) > 0)[50]
    )  # of a step that is read, and so is its successor
    weights = jax.jit(lambda data: estimator.update(data, C).weights(C))
    met = np.asarray(weights(data)) > 0
    assert met.any() and np.isfinite(weights(data)).all()
    for wrong in (-1, 7):
        spoiled = eqx.tree_at(lambda t: getattr(t, field), data, getattr(data, field).at[place].set(wrong))
        assert np.isnan(np.asarray(weights(spoiled))[met]).all()


@pytest.mark.parametrize("kind", [CertaintyEquivalence, MonteCarlo, ReverseTD, Regression])
def test_every_incremental_form_checks_its_traces_and_its_data(kind):
    states, actions = MU.shape
    estimator = kind.init(np.eye(states) if kind is Regression else states, actions, 0.9)
    for wrong in (np.ones((states, actions + 1)), np.ones(actions)):
        with pytest.raises(ValueError, match="c must have shape"):
            estimator.update(batch(), C).weights(wrong)
        if kind is not CertaintyEquivalence:  # whose counts do not depend on traces
            with pytest.raises(ValueError, match="c must have shape"):
                estimator.update(batch(), wrong)
    if kind in (MonteCarlo, Regression):
        with pytest.raises(ValueError, match="c is needed"):
            estimator.update(batch(), C).weights()
    data = eqx.tree_at(lambda t: t.states, batch(), batch().states + 0.7)
    with pytest.raises(ValueError, match=r"trajectories\.states must be whole numbers, got float32"):
        estimator.update(data, C)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_pairs_are_counted_beyond_what_8_bits_hold(dtype):
    mdp, pi, mu = mx.problems.garnet(100, 4, 2, seed=0)
    c = mx.traces.retrace(pi, mu)
    data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=5, horizon=20)
    fields = lambda t: (t.states, t.actions, t.next_states)  # noqa: E731
    few = eqx.tree_at(fields, data, tuple(np.asarray(field).astype(dtype) for field in fields(data)))
    np.testing.assert_array_equal(monte_carlo(few, c, start=(99, 3)), monte_carlo(data, c, start=(99, 3)))


def test_too_large_is_refused_before_work_is_lost():
    with pytest.raises(MemoryError, match="ask for one row"):
        ReverseTD.init(100_000, 4, 0.9)
