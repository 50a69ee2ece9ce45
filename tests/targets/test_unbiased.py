"""Sampled targets against the exact operators: their means, and the variances of Section 4.2."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import marginax as mx
from marginax import targets, trajectories

STATES, ACTIONS, GAMMA, HORIZON = 4, 2, 0.7, 40  # beyond the horizon lies a share of 0.7^40 < 1e-6


def problem(seed, deterministic=False):
    """A random MDP with rows of full and of missing mass, noise (unless deterministic), and policies apart."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(STATES, 0.5), size=(STATES, ACTIONS))
    if deterministic:
        p = np.eye(STATES)[rng.integers(STATES, size=(STATES, ACTIONS))]
        p[0, 0] = 0  # ends the episode
    else:
        p[::2] *= rng.uniform(0.7, 1, size=(2, ACTIONS, 1))
        p[1, 0] = 0
    r = rng.normal(size=(STATES, ACTIONS))
    mdp = mx.TabularMDP(p, r, GAMMA, reward_std=0.0 if deterministic else 0.3)
    pi, mu = (rng.uniform(0.25, 1, size=(STATES, ACTIONS)) for _ in range(2))
    pi, mu = pi / pi.sum(1, keepdims=True), mu / mu.sum(1, keepdims=True)
    return mdp, pi, mu, rng.normal(size=(STATES, ACTIONS))


def pairs(episodes):
    """Every pair as a start, `episodes` times over."""
    return np.repeat(np.array(list(np.ndindex(STATES, ACTIONS))), episodes, axis=0).T


@partial(jax.jit, static_argnames="kind")
def estimates(kind, trajectory, v, v_next, traces, weights, rhos, key):
    """The target at each sequence's first step."""
    common = (v, v_next, trajectory.rewards, trajectory.discounts)
    rest = (trajectory.truncated, trajectory.valid, jax.random.split(key, v.shape[0]))

    def one(common, traces, weights, rhos, truncated, valid, key):
        times = targets.random_times(key, HORIZON, GAMMA) if kind.endswith("random") else None
        options = {"truncated": truncated, "valid": valid, "times": times}
        if kind.startswith("multi_step"):
            return targets.multi_step(*common, traces, **options)[0]
        if kind.startswith("marginalized_vtrace"):
            return targets.marginalized_vtrace(*common, weights, rhos, **options)[0]
        if kind.startswith("marginalized"):
            return targets.marginalized(*common, weights, **options)[0]
        return targets.vtrace(*common, traces, rhos, **options)[0]

    return jax.vmap(one)(common, traces, weights, rhos, *rest)


def draws(kind, mdp, pi, mu, c, q, episodes, seed):
    """Independent estimates `[S, A, episodes]`, or for the operators on states `[S, episodes]`."""
    starts, first = pairs(episodes)
    on_states = "vtrace" in kind
    trajectory = trajectories.sample(
        mdp,
        mu,
        jax.random.key(seed),
        episodes=len(starts),
        horizon=HORIZON,
        start_states=starts,
        start_actions=None if on_states else first,
    )
    if on_states:
        v, v_next = trajectories.gather_states(trajectory, q[:, 0])
        w = jnp.asarray(mx.weights.exact_states(mdp, mu, c))
        weights = w[trajectory.states[:, :1], trajectory.states]
    else:
        v, v_next = trajectories.gather(trajectory, q, pi)
        w = jnp.asarray(mx.weights.exact(mdp, mu, c))
        weights = w[starts[:, None], first[:, None], trajectory.states, trajectory.actions]
    traces, rhos = (trajectories.gather_pairs(trajectory, table) for table in (c, np.minimum(1.2, pi / mu)))
    result = estimates(kind, trajectory, v, v_next, traces, weights, rhos, jax.random.key(seed + 1))
    shape = (STATES, ACTIONS * episodes) if on_states else (STATES, ACTIONS, episodes)
    return np.asarray(result, float).reshape(shape)


def exact(kind, mdp, pi, mu, c, q):
    if "vtrace" in kind:
        rho = np.minimum(1.2, pi / mu)
        if kind.startswith("marginalized"):
            return mx.marginalized_vtrace(mdp, mu, mx.weights.exact_states(mdp, mu, c), rho)(q[:, 0])
        return mx.vtrace(mdp, mu, c, rho)(q[:, 0])
    if kind.startswith("marginalized"):
        return mx.marginalized(mdp, pi, mu, mx.weights.exact(mdp, mu, c))(q)
    return mx.multi_step(mdp, pi, mu, c)(q)


KINDS = ["multi_step", "marginalized", "vtrace", "marginalized_vtrace"]


RANDOM = [pytest.param(f"{kind}_random", marks=pytest.mark.slow) for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS + RANDOM)
def test_the_mean_is_the_exact_operator(kind):
    """Within 4.5 standard errors at every start of six random MDPs, with a resolution that tells operators apart."""
    told_apart = False
    for seed in range(6):
        mdp, pi, mu, q = problem(seed)
        make = [mx.traces.retrace, mx.traces.importance_sampling, partial(mx.traces.retrace, clip=1.5)][
            seed % 3
        ]
        c = make(pi, mu)
        sampled = draws(kind, mdp, pi, mu, c, q, episodes=2000, seed=seed)
        error = sampled.std(axis=-1, ddof=1) / np.sqrt(sampled.shape[-1])
        want = exact(kind, mdp, pi, mu, c, q)
        assert (np.abs(sampled.mean(axis=-1) - want) < 4.5 * error + 1e-5).all()
        told_apart |= bool((np.abs(exact(kind, mdp, pi, mu, 0 * c, q) - want) > 9 * error).any())
    assert told_apart


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [True, False])
def test_variances_are_ordered_as_in_the_diagram(deterministic):
    """The arrows of the appendix's diagram; the red one (Corollary 2) where transitions and rewards are certain."""
    for seed in range(3):
        mdp, pi, mu, q = problem(seed, deterministic)
        c = mx.traces.retrace(pi, mu, clip=1.5)
        variance, slack = {}, {}
        for kind in ("multi_step", "marginalized", "multi_step_random", "marginalized_random"):
            sampled = draws(kind, mdp, pi, mu, c, q, episodes=2000, seed=7 * seed)
            variance[kind] = sampled.var(axis=-1)
            centred = (sampled - sampled.mean(axis=-1, keepdims=True)) ** 2
            slack[kind] = 4 * centred.std(axis=-1) / np.sqrt(2000)

        def below(low, high, variance=variance, slack=slack):
            return (variance[low] <= variance[high] + slack[low] + slack[high] + 1e-6).all()

        assert below("multi_step", "multi_step_random")
        assert below("marginalized", "marginalized_random")
        if deterministic:
            assert below("marginalized_random", "multi_step_random")
            assert variance["multi_step"].sum() < variance["multi_step_random"].sum()
            assert variance["marginalized"].sum() < variance["marginalized_random"].sum()


def bellman_errors(mdp, pi, q):
    return mdp.r + GAMMA * mdp.p @ (pi * q).sum(axis=1) - q


def pair_kernel(mdp, measure):
    n = STATES * ACTIONS
    return (mdp.p[..., None] * measure).reshape(n, n)


def exact_variances(mdp, pi, mu, c, q):
    """Of the two random-time estimates and the trajectory-based multi-step one, for a deterministic MDP, `[S, A]`.

    Second moments: Σ_t (1-γ) γ^t E[C_t² Δ_t²] / (1-γ)² and Σ_t (1-γ) γ^t E[w² Δ_t²] / (1-γ)²; and for the
    trajectory-based Y = Δ + γ c(x',a') Y' the recursion E[Y²] = Δ² + 2 γ Δ E[c Y'] + γ² E[c² Y'²].
    """
    n = STATES * ACTIONS
    delta = bellman_errors(mdp, pi, q).reshape(n)
    mean = (mx.multi_step(mdp, pi, mu, c)(q) - q).reshape(n)
    squared = np.linalg.solve(np.eye(n) - GAMMA * pair_kernel(mdp, mu * c**2), delta**2) / (1 - GAMMA)
    visits = np.linalg.inv(np.eye(n) - GAMMA * pair_kernel(mdp, mu))
    weights = mx.weights.exact(mdp, mu, c).reshape(n, n)
    marginal = (visits * weights**2) @ delta**2 / (1 - GAMMA)
    ahead = pair_kernel(mdp, mu * c) @ mean
    second = np.linalg.solve(
        np.eye(n) - GAMMA**2 * pair_kernel(mdp, mu * c**2), delta**2 + 2 * GAMMA * delta * ahead
    )
    return {
        "multi_step_random": (squared - mean**2).reshape(STATES, ACTIONS),
        "marginalized_random": (marginal - mean**2).reshape(STATES, ACTIONS),
        "multi_step": (second - mean**2).reshape(STATES, ACTIONS),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multi_step", "multi_step_random", "marginalized_random"])
def test_sampled_variances_are_the_exact_ones(kind):
    mdp, pi, mu, q = problem(1, deterministic=True)
    c = mx.traces.retrace(pi, mu, clip=1.5)
    sampled = draws(kind, mdp, pi, mu, c, q, episodes=10_000, seed=5)
    centred = (sampled - sampled.mean(axis=-1, keepdims=True)) ** 2
    error = centred.std(axis=-1) / np.sqrt(10_000)
    want = exact_variances(mdp, pi, mu, c, q)[kind]
    assert (np.abs(centred.mean(axis=-1) - want) < 5 * error + 1e-4).all()


@pytest.mark.parametrize("seed", range(40))
def test_corollary_2_in_exact_variances(seed):
    """V[M_τ] ≤ V[R_τ] and V[R] ≤ V[R_τ], without sampling, on random deterministic MDPs and traces of any size."""
    mdp, pi, mu, q = problem(seed, deterministic=True)
    c = np.random.default_rng(seed).uniform(0, 1, size=mu.shape) if seed % 2 else mx.traces.retrace(pi, mu)
    variance = exact_variances(mdp, pi, mu, c, q)
    assert (variance["marginalized_random"] <= variance["multi_step_random"] + 1e-10).all()
    assert (variance["multi_step"] <= variance["multi_step_random"] + 1e-10).all()


def test_all_four_exact_variances_by_enumeration():
    """Every action sequence of a small deterministic MDP that ends within four steps, and every random time."""
    steps, actions, gamma = 4, 2, 0.8
    rng = np.random.default_rng(2)
    # A state a layer and a branch; action 1 switches the branch; the last layer ends the episode.
    index = np.arange(2 * steps).reshape(steps, 2)
    p = np.zeros((2 * steps, actions, 2 * steps))
    for layer, branch, action in itertools.product(range(steps - 1), range(2), range(actions)):
        p[index[layer, branch], action, index[layer + 1, branch ^ action]] = 1
    mdp = mx.TabularMDP(p, rng.normal(size=(2 * steps, actions)), gamma)
    pi, mu = rng.dirichlet(np.ones(actions), size=(2, 2 * steps))
    q = rng.normal(size=pi.shape)
    c = mx.traces.importance_sampling(pi, mu)
    w = mx.weights.exact(mdp, mu, c)

    outcomes = {
        kind: [] for kind in ("multi_step", "marginalized", "multi_step_random", "marginalized_random")
    }
    for later in itertools.product(range(actions), repeat=steps - 1):
        taken = np.array([0, *later])
        branches = np.cumsum([0, *taken[:-1]]) % 2
        states = index[np.arange(steps), branches]
        chance = mu[states[1:], taken[1:]].prod()
        common = [
            q[states, taken],
            np.append((pi * q).sum(1)[states[1:]], np.nan),
            mdp.r[states, taken],
            np.append(np.full(steps - 1, gamma), 0),
        ]
        weights = w[states[:, None], taken[:, None], states, taken]
        for name, factor in [("multi_step", c[states, taken]), ("marginalized", weights)]:
            function = getattr(targets, name)
            outcomes[name].append((chance, float(function(*common, factor)[0])))
            for n in range(steps + 1):  # τ = n, or beyond the end
                times = targets.RandomTimes(jnp.arange(steps) >= n, jnp.asarray(gamma))
                law = (1 - gamma) * gamma**n if n < steps else gamma**steps
                value = float(function(*common, factor, times=times)[0])
                outcomes[f"{name}_random"].append((chance * law, value))

    moments = {}
    for kind, table in outcomes.items():
        chances, values = np.array(table).T
        np.testing.assert_allclose(chances.sum(), 1)
        mean = chances @ values
        np.testing.assert_allclose(mean, mx.multi_step(mdp, pi, mu, c)(q)[0, 0], rtol=1e-5)
        moments[kind] = chances @ (values - mean) ** 2
    assert moments["marginalized"] <= moments["marginalized_random"] <= moments["multi_step_random"]
    assert moments["multi_step"] <= moments["multi_step_random"]
    assert moments["marginalized_random"] < moments["multi_step_random"] - 0.05  # and not by equality
