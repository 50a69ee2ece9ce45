"""Tabular learning against a plain loop in the paper's notation, and against exact values."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax import learning
from marginax.learning import _steps
from marginax.weights import CertaintyEquivalence, MonteCarlo
from reference import algorithm2


def stream(problem, seed, iterations, horizon, seeds=None):
    key = jax.random.key(seed)
    count = iterations * (seeds or 1)
    batch = mx.trajectories.sample(problem.mdp, problem.mu, key, episodes=count, horizon=horizon)
    shape = (iterations, horizon) if seeds is None else (seeds, iterations, horizon)
    return jax.tree.map(lambda field: field.reshape(shape), batch)


def episodes(batch):
    """The valid steps of each episode, as lists."""
    keep = [np.asarray(row) for row in batch.valid]
    return [
        [np.asarray(field)[i][keep[i]] for i in range(len(keep))]
        for field in (batch.states, batch.actions, batch.rewards)
    ]


CHAIN = mx.problems.chain(n=4, actions=2, noise=0.3)
WORLD = mx.problems.open_world(n=3, discount=0.9)  # pairs are met many times in one trajectory


@pytest.mark.parametrize(("problem", "horizon"), [(CHAIN, 4), (WORLD, 300)], ids=["chain", "open world"])
@pytest.mark.parametrize("kind", ["multi-step", "monte-carlo", "literal", "given"])
def test_evaluate_equals_the_plain_loop(problem, horizon, kind):
    mdp, pi, mu = problem
    c = mx.traces.retrace(pi, mu, clip=1.5)
    batch = stream(problem, 1, 12, horizon)
    assert bool((~batch.truncated).all()), "the plain loop knows terminated episodes only"
    w = mx.weights.exact(mdp, mu, c)
    shape = mdp.r.shape
    estimator = {
        "multi-step": None,
        "monte-carlo": MonteCarlo.init(*shape, mdp.discount, factored=False),
        "literal": MonteCarlo.init(*shape, mdp.discount, as_printed=True),
        "given": w,
    }[kind]
    ours = learning.evaluate(batch, pi, c, estimator)
    theirs = algorithm2.evaluate(*episodes(batch), pi, c, mdp.discount, kind=kind, w=w)
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.slow
def test_long_sequences_take_the_sum_by_pairs_and_get_the_same_targets():
    mdp, pi, mu = WORLD
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(3), episodes=6, horizon=40)
    assert bool(batch.truncated.any()), "some episodes should be cut off"
    assert bool((~batch.valid).any()), "some episodes should be padded"
    w = jax.random.uniform(jax.random.key(4), (9, 4, 9, 4))
    q = jax.random.normal(jax.random.key(5), (9, 4))
    for i in range(6):
        one = jax.tree.map(lambda field, i=i: field[i], batch)
        by_pairs = _steps.marginalized_targets(one, q, jnp.asarray(pi, jnp.float32), w)
        here, v_next = mx.trajectories.gather(one, q, pi)
        by_steps = mx.targets.marginalized(
            here,
            v_next,
            one.rewards,
            one.discounts,
            mx.trajectories.gather_weights(one, w),
            one.truncated,
            valid=one.valid,
        )
        np.testing.assert_allclose(by_pairs, by_steps, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("visits", ["each", "mean"])
@pytest.mark.parametrize("weights", [None, np.ones((50, 4, 50, 4))])
def test_indices_of_few_bits_learn_the_same(weights, visits):
    """There are more pairs than 8 bits count."""
    rng = np.random.default_rng(0)
    pi = rng.dirichlet(np.ones(4), size=50)
    rewards = rng.normal(size=(3, 8)).astype(np.float32)
    walk, actions = rng.integers(50, size=(3, 9)), rng.integers(4, size=(3, 8))

    def learned(dtype):
        states, following, taken = (x.astype(dtype) for x in (walk[:, :-1], walk[:, 1:], actions))
        flags = rewards < 9
        stream = mx.trajectories.Trajectory(
            states, taken, rewards, np.full_like(rewards, 0.9), following, ~flags, None, flags
        )
        return learning.evaluate(stream, pi, pi, weights, visits=visits)

    np.testing.assert_array_equal(learned(np.int8), learned(np.int32))


def test_many_seeds_equal_one_after_another():
    mdp, pi, mu = WORLD
    c = mx.traces.retrace(pi, mu)
    batch = stream(WORLD, 2, 10, 60, seeds=3)
    estimator = CertaintyEquivalence.init(*mdp.r.shape, mdp.discount)
    together = learning.evaluate(batch, pi, c, estimator, refresh_growth=1.5)
    for seed in range(3):
        alone = learning.evaluate(
            jax.tree.map(lambda field, seed=seed: field[seed], batch), pi, c, estimator, refresh_growth=1.5
        )
        np.testing.assert_allclose(together[seed], alone, atol=1e-5)


def test_certainty_equivalence_learns_from_weights_of_the_counts():
    """One iteration by hand: weights from all data so far, targets, sequential updates."""
    mdp, pi, mu = WORLD
    c = mx.traces.retrace(pi, mu)
    batch = stream(WORLD, 5, 1, 100)
    q = learning.evaluate(batch, pi, c, CertaintyEquivalence.init(*mdp.r.shape, mdp.discount))[0]
    counted = mx.weights.certainty_equivalence(
        batch, c, mu=mx.weights.estimate_behaviour(batch, *mdp.r.shape)
    )
    by_hand = learning.evaluate(batch, pi, c, counted)[0]
    np.testing.assert_allclose(q, by_hand, atol=1e-4)


@pytest.mark.slow
def test_every_operator_converges_to_the_values_of_the_policy():
    problem = mx.problems.chain(n=4, actions=2, beta=0.3, noise=0.0, discount=0.9)
    mdp, pi, mu = problem
    c = mx.traces.retrace(pi, mu)
    batch = stream(problem, 7, 1500, 4)
    for traces, estimator in [
        (np.zeros_like(c), None),
        (c, None),
        (c, MonteCarlo.init(4, 2, 0.9)),
        (c, CertaintyEquivalence.init(4, 2, 0.9)),
    ]:
        growth = 1.0 if estimator is None else 1.2
        q = learning.evaluate(batch, pi, traces, estimator, refresh_growth=growth)[-1]
        np.testing.assert_allclose(q, mdp.q_values(pi), atol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("policy_step_size", [0.1, 1.0])
@pytest.mark.parametrize("kind", ["one-step", "retrace", "certainty equivalence"])
def test_policy_iteration_finds_the_shortest_way(kind, policy_step_size):
    mdp, _, mu = WORLD
    batch = stream(WORLD, 3, 150, 80, seeds=2)
    estimator = CertaintyEquivalence.init(9, 4, 0.9) if kind == "certainty equivalence" else None
    found = learning.improve(
        batch,
        mu,
        learning.retrace(mu, clip=0.0 if kind == "one-step" else 1.0),
        estimator,
        policy_step_size=policy_step_size,
        refresh_every=1 if estimator is None else 5,
    )
    best = learning.average_return(mdp, mdp.greedy_policy(mdp.optimal_values()))
    reached = learning.average_return(mdp, found.policies[:, -1])
    assert (reached > 0.98 * best).all()
    assert learning.average_return(mdp, mu) < 0.6 * best


def test_policy_iteration_takes_the_steps_it_says():
    mu = WORLD.mu
    batch = stream(WORLD, 3, 4, 80)
    found = learning.improve(batch, mu, learning.retrace(mu), policy_step_size=0.25)
    pi, q = np.asarray(mu), np.zeros_like(mu)
    for i in range(4):
        one = jax.tree.map(lambda field, i=i: field[i : i + 1], batch)
        q = learning.evaluate(one, pi, mx.traces.retrace(pi, mu), initial=q)[0]
        best = q == q.max(1, keepdims=True)
        pi = 0.75 * pi + 0.25 * best / best.sum(1, keepdims=True)
        np.testing.assert_allclose(found.q[i], q, atol=1e-6)
        np.testing.assert_allclose(found.policies[i], pi, atol=1e-6)
        pi = np.asarray(found.policies[i], float)
        pi /= pi.sum(1, keepdims=True)


def test_average_return_is_the_mean_of_sampled_returns():
    mdp, _, mu = WORLD
    starts = np.repeat(np.arange(8), 500)  # all but the corner, where nothing happens
    batch = mx.trajectories.sample(
        mdp, mu, jax.random.key(9), episodes=4000, horizon=200, start_states=starts
    )
    returns = (batch.rewards * 0.9 ** np.arange(200)).sum(1)
    error = float(returns.std() / np.sqrt(4000))
    assert abs(float(returns.mean()) - learning.average_return(mdp, mu)) < 4 * error


def test_refresh_schedule_of_one_is_every_iteration():
    assert learning.refresh_schedule(7, 1.0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_size": 0.0}, "step_size must lie in"),
        ({"refresh_growth": 0.5}, "refresh_growth must be at least 1"),
        ({"initial": np.zeros((2, 2))}, r"initial must have shape \(4, 2\), got \(2, 2\)"),
        ({"initial": np.full((4, 2), np.inf)}, r"initial must be finite, but initial\[0, 0\] = inf"),
        ({"pi": 2 * CHAIN.pi}, r"pi must sum to 1, but pi\[0\] sums to 2"),
        ({"c": np.full((4, 2), np.nan)}, r"c must be finite, but c\[0, 0\] = nan"),
        ({"c": np.zeros((3, 2))}, r"c must have shape \(4, 2\), got \(3, 2\)"),
        ({"pi": CHAIN.pi[:2], "c": np.zeros((2, 2))}, r"states must lie in range\(2\), but .*\[0, 2\] = 2"),
        ({"states": [99]}, r"states must lie in range\(4\), but states\[0\] = 99"),
        ({"weights": np.ones((4, 2))}, r"weights must have shape \(4, 2, 4, 2\), got \(4, 2\)"),
        ({"weights": np.full((4, 2, 4, 2), np.nan)}, "weights must be finite"),
        ({"weights": MonteCarlo.init(4, 2, 0.99, start=(0, 0))}, r"weights must have shape .*, got \(4, 2\)"),
        (
            {"weights": MonteCarlo.init(4, 2, 0.99, on_states=True)},
            r"weights must have shape .*, got \(4, 4\)",
        ),
        ({"weights": CertaintyEquivalence.init(5, 2, 0.99)}, "an estimator for 4 states and 2 actions"),
        ({"weights": MonteCarlo.init(4, 2, 0.9)}, r"for the discount 0.9, but .*discounts\[0, 0\] = 0.99"),
        ({"weights": MonteCarlo}, r"MonteCarlo.init\(S, A, discount\), got the class MonteCarlo"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_evaluate_refuses(change, message):
    arguments = {"pi": CHAIN.pi, "c": np.zeros_like(CHAIN.pi)} | change
    with pytest.raises(ValueError, match=message):
        learning.evaluate(stream(CHAIN, 1, 2, 4), **arguments)


def test_under_vmap_shapes_are_still_checked_and_numbers_are_not():
    batch, c = stream(CHAIN, 1, 2, 4), np.zeros_like(CHAIN.pi)
    starts = jnp.ones((3, 4, 2))
    found = jax.vmap(lambda initial: learning.evaluate(batch, CHAIN.pi, c, initial=initial))(starts)
    np.testing.assert_allclose(found[1], learning.evaluate(batch, CHAIN.pi, c, initial=np.ones((4, 2))))
    with pytest.raises(ValueError, match=r"initial must have shape \(4, 2\), got \(4, 1\)"):
        jax.vmap(lambda initial: learning.evaluate(batch, CHAIN.pi, c, initial=initial))(starts[..., :1])


@pytest.mark.parametrize("field", ["rewards", "discounts"])
def test_what_is_not_finite_is_refused_unless_it_is_padding(field):
    batch, c = stream(CHAIN, 1, 2, 4), np.zeros_like(CHAIN.pi)

    def run(place, valid):
        values = jnp.asarray(getattr(batch, field)).at[place].set(jnp.nan)
        changed = dataclasses.replace(batch, **{field: values, "valid": batch.valid.at[place].set(valid)})
        found = learning.improve(changed, CHAIN.mu, learning.retrace(CHAIN.mu))
        return learning.evaluate(changed, CHAIN.pi, c), found.q

    with pytest.raises(ValueError, match=rf"trajectories.{field}\[1, 2\] = nan"):
        run((1, 2), valid=True)
    assert all(np.isfinite(q).all() for q in run((1, 3), valid=False))


def test_one_trajectory_is_not_a_stream():
    unchecked = inspect.unwrap(learning.evaluate)  # the tests' own check of types stands before ours
    with pytest.raises(ValueError, match="trajectories must be a Trajectory"):
        unchecked(np.zeros((2, 4)), CHAIN.pi, np.zeros_like(CHAIN.pi))
    one = jax.tree.map(lambda field: field[0], stream(CHAIN, 1, 2, 4))
    with pytest.raises(ValueError, match="got 1 axes"):
        learning.evaluate(one, CHAIN.pi, np.zeros_like(CHAIN.pi))
    with pytest.raises(ValueError, match="got 1 axes"):
        learning.improve(one, CHAIN.mu, learning.retrace(CHAIN.mu))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy_step_size": 2.0}, "policy_step_size"),
        ({"refresh_every": 0}, "refresh"),
        ({"initial": 2 * CHAIN.mu}, r"initial must sum to 1, but initial\[0\] sums to 2"),
        ({"initial": CHAIN.mu[:2]}, r"trajectories.states must lie in range\(2\)"),
        ({"traces": learning.retrace(CHAIN.mu[:3])}, r"the shape of mu, \(3, 2\), got \(4, 2\)"),
        ({"traces": lambda pi: pi[0]}, r"traces\(pi\) must have shape \(4, 2\), got \(2,\)"),
        ({"weights": MonteCarlo.init(4, 2, 0.99, start=(0, 0))}, "weights must have shape"),
        ({"weights": MonteCarlo}, "got the class MonteCarlo"),
        ({"traces": type(learning.retrace(CHAIN.mu))}, "traces must be a function of the policy"),
        ({"traces": learning.retrace}, r"traces\(pi\) must have shape \(4, 2\), got \(\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_improve_refuses(change, message):
    arguments = {"initial": CHAIN.mu, "traces": learning.retrace(CHAIN.mu)} | change
    with pytest.raises(ValueError, match=message):
        learning.improve(stream(CHAIN, 1, 2, 4), **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: learning.retrace(2 * CHAIN.mu), r"mu must sum to 1, but mu\[0\] sums to 2"),
        (lambda: learning.retrace(CHAIN.pi), r"mu must be positive, .* but mu\[0, 1\] = 0"),
        (lambda: learning.retrace(CHAIN.mu, clip=-1), "clip must be at least 0, got -1"),
        (lambda: learning.retrace(CHAIN.mu, decay=2), r"decay must lie in \[0, 1\], got 2"),
        (lambda: learning.average_return(CHAIN.mdp, 2 * CHAIN.pi), r"policies must sum to 1"),
        (lambda: learning.average_return(CHAIN.mdp, CHAIN.pi[:2]), r"policies must have shape \(4, 2\)"),
        (lambda: learning.average_return(CHAIN.mdp, CHAIN.pi, [4]), r"states\[0\] = 4"),
        (lambda: learning.average_return(CHAIN.mdp, CHAIN.pi, []), "states must name at least one state"),
        (lambda: learning.average_return(mx.TabularMDP([[[0]]], [[0]], 0.9), [[1]]), "at least one state"),
        (lambda: learning.refresh_schedule(5, np.nan), "refresh_growth must be finite"),
    ],
)
def test_what_goes_with_them_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_average_return_takes_policies_of_any_shape():
    mdp, pi, mu = WORLD
    several = np.stack([[pi, mu], [mu, mu]])
    each = [[mdp.v_values(one)[:8].mean() for one in row] for row in several]
    np.testing.assert_allclose(learning.average_return(mdp, several), each)
    np.testing.assert_allclose(learning.average_return(mdp, jnp.asarray(several)), each, rtol=1e-5)
    assert learning.average_return(mdp, mu, states=[0]) == pytest.approx(mdp.v_values(mu)[0])


def test_mean_of_visits_moves_each_pair_once():
    mdp, pi, mu = WORLD
    c = mx.traces.retrace(pi, mu)
    batch = stream(WORLD, 8, 1, 60)
    start = np.random.default_rng(0).normal(size=mdp.r.shape)
    moved = learning.evaluate(batch, pi, c, initial=start, visits="mean")[0]
    one = jax.tree.map(lambda field: field[0], batch)
    here, v_next = mx.trajectories.gather(one, start, pi)
    goals = mx.targets.multi_step(
        here,
        v_next,
        one.rewards,
        one.discounts,
        mx.trajectories.gather_pairs(one, c),
        one.truncated,
        valid=one.valid,
    )
    for x in range(9):
        for a in range(4):
            met = np.asarray((one.states == x) & (one.actions == a) & one.valid)
            goal = goals[met].mean() if met.any() else start[x, a]
            assert abs(moved[x, a] - (0.9 * start[x, a] + 0.1 * goal)) < 1e-4
