"""The exact quantities by brute force, from their definitions: paths walked one step at a time, no linear solves."""

import itertools

import numpy as np
from hypothesis import strategies as st

from marginax import TabularMDP

STEPS = 400
"""Steps after which what is left of a discounted sum (γ ≤ 0.9) is below 1e-18."""


@st.composite
def problems(draw, support=True):
    """A small random MDP with ends of episodes, sub-stochastic rows and policies with zeros: ``(mdp, pi, mu)``."""
    states, actions = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 2), (4, 3)]))
    discount = draw(st.sampled_from([0.0, 0.5, 0.9]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    p = generator.dirichlet(np.full(states, 0.5), size=(states, actions))
    p *= generator.choice([0.0, 0.3, 1.0, 1.0], size=(states, actions, 1))
    p[:, :, generator.integers(states)] *= generator.choice([0.0, 1.0])
    mdp = TabularMDP(p, generator.normal(size=(states, actions)), discount)
    mu = _policy(generator, states, actions)
    pi = _policy(generator, states, actions)
    if support:
        pi = np.where(mu > 0, pi, 0.0)
        pi = np.where(pi.sum(axis=1, keepdims=True) > 0, pi, mu)
        pi /= pi.sum(axis=1, keepdims=True)
    return mdp, pi, mu


def _policy(generator, states, actions):
    policy = generator.dirichlet(np.full(actions, 0.7), size=states) * generator.choice(
        [0.0, 1.0, 1.0], size=(states, actions)
    )
    empty = policy.sum(axis=1) == 0
    policy[empty, 0] = 1.0
    return policy / policy.sum(axis=1, keepdims=True)


def walk(mdp, mu, start, steps=STEPS):
    """Yields ``(t, x, a, chance)`` summed over paths: the chance of being at (x,a) at time t, from the start pair under mu."""
    p = mdp.dense_p()
    chance = {start: 1.0}
    for t in range(steps):
        following = {}
        for (x, a), mass in chance.items():
            yield t, x, a, mass
            for y in range(mdp.num_states):
                for b in range(mdp.num_actions):
                    step = mass * p[x, a, y] * mu[y, b]
                    if step > 0:
                        following[y, b] = following.get((y, b), 0.0) + step
        chance = following


def discounted_sum(mdp, mu, start, weigh, steps=STEPS):
    """``E_μ[Σ_t γ^t C_t 1{x_t=x', a_t=a'}]`` where each step to (y,b) at time t multiplies C by ``weigh(t, y, b)``; ``[S, A]``."""
    p = mdp.dense_p()
    total = np.zeros(mdp.r.shape)
    current = np.zeros(mdp.r.shape)
    current[start] = 1.0
    for t in range(steps):
        total += mdp.discount**t * current
        following = np.zeros(mdp.r.shape)
        for x, a in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
            if current[x, a] == 0.0:
                continue
            for y, b in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
                following[y, b] += current[x, a] * p[x, a, y] * mu[y, b] * weigh(t + 1, y, b)
        current = following
        if not current.any():
            break
    return total


def paths(mdp, mu, start, steps):
    """All paths of ``steps`` steps (or ended earlier) from a start pair under mu: ``(chance, [(x_0,a_0), (x_1,a_1), …])``."""
    p = mdp.dense_p()
    found = [(1.0, [start])]
    finished = []
    for _ in range(steps):
        longer = []
        for chance, path in found:
            x, a = path[-1]
            ends = 1.0 - p[x, a].sum()
            if ends > 1e-12:
                finished.append((chance * ends, path))
            for y, b in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
                step = chance * p[x, a, y] * mu[y, b]
                if step > 0:
                    longer.append((step, [*path, (y, b)]))
        found = longer
    return finished + found


def bellman_errors(mdp, pi, q):
    """``Δ(x,a) = r + γ Σ_x' p(x'|x,a) Σ_a' π(a'|x') Q(x',a') - Q(x,a)``, by loops."""
    p = mdp.dense_p()
    result = np.zeros(mdp.r.shape)
    for x, a in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
        ahead = sum(
            p[x, a, y] * sum(pi[y, b] * q[y, b] for b in range(mdp.num_actions))
            for y in range(mdp.num_states)
        )
        result[x, a] = mdp.r[x, a] + mdp.discount * ahead - q[x, a]
    return result


def multi_step(mdp, pi, mu, weigh, q):
    """``R^c Q(x,a) = Q(x,a) + E_μ[Σ_t γ^t c_1…c_t Δ_t]`` (Equation 1)."""
    errors = bellman_errors(mdp, pi, q)
    result = q.copy()
    for start in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
        result[start] += (discounted_sum(mdp, mu, start, weigh) * errors).sum()
    return result


def marginalized(mdp, pi, mu, w, q):
    """``M^w Q(x,a) = Q(x,a) + (1-γ)^{-1} E_{d^μ}[w Δ]`` (Equation 3)."""
    errors = bellman_errors(mdp, pi, q)
    result = q.copy()
    for start in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
        result[start] += (discounted_sum(mdp, mu, start, lambda t, y, b: 1.0) * w[start] * errors).sum()
    return result


def vtrace(mdp, mu, c, rho, v):
    """``R^{c,ρ} V(x) = V(x) + E_μ[Σ_t γ^t c_0…c_{t-1} ρ_t Δ_t]`` (Appendix on V-trace)."""
    p = mdp.dense_p()
    result = v.copy()
    for x in range(mdp.num_states):
        current = np.zeros(mdp.num_states)
        current[x] = 1.0
        for t in range(STEPS):
            following = np.zeros(mdp.num_states)
            for y, b in itertools.product(range(mdp.num_states), range(mdp.num_actions)):
                mass = current[y] * mu[y, b]
                error = (
                    mdp.r[y, b] + mdp.discount * sum(p[y, b, z] * v[z] for z in range(mdp.num_states)) - v[y]
                )
                result[x] += mdp.discount**t * mass * rho[y, b] * error
                following += mass * c[y, b] * p[y, b]
            current = following
            if not current.any():
                break
    return result
