"""TD weights learned by networks against the exact ones: all three losses on a 5 × 5 Open World.

    python benchmarks/neural_weights.py [--updates 6000] [--discount 0.95] [--length 60]

Networks see one-hot states and actions of the start pair and of the pair itself; every update draws 64 fresh
trajectories of the uniform policy from random start pairs. Errors are weighted by how often the pair is visited
from its start: R² = 1 - Σ d (ŵ - w)² / Σ d (w - mean)².
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import marginax as mx
from marginax import trajectories
from marginax.deep import weight_network
from marginax.deep.config import TD3Config

RATES = {"regression": (3e-3, 3e-3), "fenchel": (3e-3, 1e-3), "saddle-point": (1e-3, 3e-3)}


def learned(kind: str, mdp: mx.TabularMDP, mu, c, *, updates: int, length: int, batch: int, hidden: int):
    """Learned weights `[pairs, pairs]` of all starts."""
    states, actions = mdp.num_states, mdp.num_actions
    tables, behaviour = trajectories.sampling_tables(mdp), jnp.asarray(mu)
    traces = jnp.asarray(c, jnp.float32)
    rate, critic_rate = RATES[kind]
    config = TD3Config(
        weights=kind,
        hidden=(hidden, hidden),
        exact_first_weight=False,
        weight_learning_rate=rate,
        weight_critic_learning_rate=critic_rate,
    )

    def features(x, a):
        return jnp.concatenate([jax.nn.one_hot(x, states), jax.nn.one_hot(a, actions)], -1)

    def draw(key):
        first, second, third = jax.random.split(key, 3)
        starts = {
            "start_states": jax.random.randint(first, (batch,), 0, states),
            "start_actions": jax.random.randint(second, (batch,), 0, actions),
        }
        t = trajectories.sample(tables, behaviour, third, episodes=batch, horizon=length, **starts)
        t = jax.tree.map(lambda x: x.T, t)
        return features(t.states, t.actions), traces[t.states, t.actions], t.discounts, t.truncated

    size = states + actions
    network = weight_network.fit(config, draw, size, key=jax.random.key(0), updates=updates)
    table = features(*jnp.divmod(jnp.arange(states * actions), actions))
    pairs = jnp.stack(
        [
            jnp.broadcast_to(table[None], (len(table), *table.shape)),
            jnp.broadcast_to(table[:, None], (len(table), *table.shape)),
        ],
        2,
    )
    return np.asarray(weight_network.predict(config, network, pairs.reshape(len(table), len(table), -1)))


def compare(w: np.ndarray, exact: np.ndarray, visits: np.ndarray) -> tuple[float, float, float]:
    """R², correlation and root mean square error, weighted by visits."""
    d = visits / visits.sum()
    spread, error = exact - np.sum(d * exact), w - exact
    own = w - np.sum(d * w)
    correlation = np.sum(d * own * spread) / np.sqrt(np.sum(d * own**2) * np.sum(d * spread**2))
    return 1 - np.sum(d * error**2) / np.sum(d * spread**2), correlation, np.sqrt(np.sum(d * error**2))


def main(updates: int = 6000, discount: float = 0.95, length: int = 60, batch: int = 64, hidden: int = 64):
    mdp, pi, mu = mx.problems.open_world(5, discount)
    c = mx.traces.retrace(pi, mu)
    exact = mx.weights.exact(mdp, mu, c).reshape(100, 100)
    visits = mdp.visitation(mu).reshape(100, 100).copy()
    visits[96:] = 0  # nothing starts in the corner, where episodes end
    print("| loss | R² | correlation | RMSE | seconds |\n|---|---|---|---|---|")
    for kind in RATES:
        started = time.perf_counter()
        w = learned(kind, mdp, mu, c, updates=updates, length=length, batch=batch, hidden=hidden)
        r2, correlation, error = compare(w, exact, visits)
        seconds = time.perf_counter() - started
        print(f"| {kind} | {r2:.4f} | {correlation:.4f} | {error:.4f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
