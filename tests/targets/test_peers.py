"""The same numbers as rlax, where both have a name for them."""

import jax
import numpy as np
import pytest
import rlax

from marginax import targets


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    shape = (4, 12)
    arrays = {name: rng.normal(size=shape) for name in ("q", "v_next", "rewards")}
    arrays["discounts"] = np.where(rng.random(shape) < 0.2, 0, 0.95)
    arrays["ratios"] = np.exp(rng.normal(size=shape))
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def test_retrace(batch):
    q, v_next, rewards, discounts, ratios = batch.values()
    traces = 0.9 * np.minimum(1, ratios)
    ours = jax.vmap(targets.multi_step)(q, v_next, rewards, discounts, traces)
    theirs = jax.vmap(rlax.general_off_policy_returns_from_q_and_v)(
        q[:, 1:], v_next, rewards, discounts, traces[:, 1:]
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_retrace_from_tables():
    """All the way from action values and policies, as `rlax.retrace` takes them."""
    rng = np.random.default_rng(1)
    length, actions = 10, 3
    q = rng.normal(size=(length + 1, actions)).astype(np.float32)
    pi = rng.dirichlet(np.ones(actions), size=length + 1).astype(np.float32)
    taken = rng.integers(actions, size=length + 1)
    mu = rng.uniform(0.2, 1, size=length + 1).astype(np.float32)
    rewards = rng.normal(size=length).astype(np.float32)
    discounts = np.where(rng.random(length) < 0.2, 0, 0.95).astype(np.float32)
    theirs = rlax.retrace(
        q[:-1], q[1:], taken[:-1], taken[1:], rewards, discounts, pi[1:], mu[1:], 0.9, eps=0.0
    )
    steps = np.arange(length + 1)
    q_taken = q[steps, taken]
    traces = targets.traces_from_log_ratios(np.log(pi[steps, taken]), np.log(mu), decay=0.9)
    ours = targets.multi_step(q_taken[:-1], (pi * q).sum(1)[1:], rewards, discounts, traces[:-1])
    np.testing.assert_allclose(ours - q_taken[:-1], theirs, rtol=1e-4, atol=1e-5)


def test_vtrace(batch):
    v, v_next, rewards, discounts, ratios = batch.values()
    ours = jax.vmap(targets.vtrace)(
        v, v_next, rewards, discounts, 0.9 * np.minimum(1, ratios), np.minimum(1.5, ratios)
    )
    theirs = jax.vmap(lambda *a: rlax.vtrace(*a, lambda_=0.9, clip_rho_threshold=1.5))(
        v, v_next, rewards, discounts, ratios
    )
    np.testing.assert_allclose(ours - v, theirs, rtol=1e-4, atol=1e-5)


def test_peng(batch):
    _, v_next, rewards, discounts, _ = batch.values()
    ours = jax.vmap(lambda *a: targets.peng(*a, 0.8))(v_next, rewards, discounts)
    theirs = jax.vmap(lambda r, d, v: rlax.lambda_returns(r, d, v, 0.8))(rewards, discounts, v_next)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_n_step(batch):
    _, v_next, rewards, discounts, _ = batch.values()
    ours = jax.vmap(lambda *a: targets.n_step(*a, 4))(v_next, rewards, discounts)
    theirs = jax.vmap(lambda r, d, v: rlax.n_step_bootstrapped_returns(r, d, v, 4))(
        rewards, discounts, v_next
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
