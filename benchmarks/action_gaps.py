"""What does a sampled target of T steps say of which action is better? `python benchmarks/action_gaps.py` (needs gymnax).

In each game a one-step agent is trained. From states that its ε-greedy policy visits, every action is taken many times
and the policy goes on. Targets bootstrap from the agent's own Q, as in training; π is ε-greedy with 0.05, the behaviour
policy with 0.2 and with 0.02. Printed for each target:

    gap     standard deviation of the mean target between the actions of a state
    noise   standard deviation of the target given the simulator's state and the action
    ratio   gap² / noise²
    first   how often the mean of 16 targets ranks the best action first; by chance it is 1 / actions
    won     the advantage over a random action that this choice has, as a share of the best action's
    hidden  share of the variance given observation and action that comes from the simulator's hidden state: by pairs
            of visits with the same observation, in different copies of the game

With `--pairs N` the agent then learns on from N pairs of its own data, with the targets of a fixed Q, one for each pair
or the mean of `--repeats`, and its return shows what the noise of a target does to one round of learning.
"""

import argparse
import dataclasses
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from marginax.deep import Population
from marginax.deep.q_learning import epsilon_greedy
from marginax.experiments.discrete import MINATAR, Discrete
from marginax.simulators import make_accelerated

DISCOUNT, TARGET_EPSILON, EPSILON, BATCH, CHUNK, EPISODES = 0.99, 0.05, 0.2, 16, 4096, 1024
LENGTHS = (1, 2, 4, 8)
TARGETS = (
    *(("peng", 0.9, n) for n in LENGTHS),
    *(("n-step", 1.0, n) for n in LENGTHS[1:]),
    ("retrace", 0.9, 8),
)
"""Operator, λ and steps of the targets."""
FITTED = [i for i, (operator, _, n) in enumerate(TARGETS) if operator == "peng" and n != 4]


def trained(game, frames):
    """The network of a one-step agent and its return."""
    experiment = dataclasses.replace(Discrete(), seeds=1, evaluations=1, ablation="")
    config = experiment.population(game, {"one-step": {"operator": "one-step"}}, frames)
    with Population(config) as population:
        population.run()
        network = jax.tree.map(lambda x: x[0], population.learners[0].state.agents.network)
        return network, population.lines[-1]["return"]


def act(network, observations, epsilon, key):
    """Q and drawn actions of the ε-greedy policy, `[copies]`."""
    q = network(observations.reshape(len(observations), -1))
    return q, jax.random.categorical(key, jnp.log(epsilon_greedy(q, epsilon)))


def visit(game, network, key, copies, steps):
    """States and observations `[steps, copies]` on the way of the behaviour policy, and what it does there."""

    def step(carry, key):
        act_key, step_key, reset_key = jax.random.split(key, 3)
        _, actions = act(network, carry[1], EPSILON, act_key)
        move = jax.vmap(game.step)(jax.random.split(step_key, copies), carry[0], actions)
        state, seen, _, terminated, truncated = move
        again = jax.vmap(game.restart)(
            jax.random.split(reset_key, copies), state, seen, terminated | truncated
        )
        return again, (*carry, actions)

    begin, key = jax.random.split(key)
    start = jax.vmap(game.reset)(jax.random.split(begin, copies))
    return jax.lax.scan(step, start, jax.random.split(key, steps))[1]


def sample(game, network, states, seen, first, key, epsilon):
    """One target of each kind for each pair: `[pairs, targets]`."""
    pairs = len(first)

    def step(carry, inputs):
        state, seen, alive = carry
        t, key = inputs
        act_key, step_key = jax.random.split(key)
        q, drawn = act(network, seen, epsilon, act_key)
        actions = jnp.where(t == 0, first, drawn)
        pi, mu = (epsilon_greedy(q, share) for share in (TARGET_EPSILON, epsilon))
        taken, ours, theirs = (jnp.take_along_axis(x, actions[:, None], 1)[:, 0] for x in (q, pi, mu))
        keys = jax.random.split(step_key, pairs)
        state, after, reward, terminated, _ = jax.vmap(game.step)(keys, state, actions)
        entry = (jnp.sum(pi * q, 1), taken, ours / theirs, jnp.where(alive, reward, 0.0), alive & ~terminated)
        return (state, after, alive & ~terminated), entry

    times = jnp.arange(max(LENGTHS))
    carry, entries = jax.lax.scan(
        step, (states, seen, jnp.ones(pairs, bool)), (times, jax.random.split(key, len(times)))
    )
    value, taken, ratio, reward, alive = entries
    last, _ = act(network, carry[1], epsilon, key)
    final = jnp.sum(epsilon_greedy(last, TARGET_EPSILON) * last, 1)
    following = jnp.where(alive, jnp.concatenate([value[1:], final[None]]), 0.0)

    def target(operator, decay, length):
        total, credit = 0.0, jnp.ones(pairs)
        for t in range(length):
            base = value[t] if operator != "retrace" else taken[t]
            if t:
                credit = credit * alive[t - 1] * decay * DISCOUNT
                credit = credit * jnp.minimum(ratio[t], 2.0) if operator == "retrace" else credit
            total = total + credit * (reward[t] + DISCOUNT * following[t] - (base if t else 0.0))
        return total

    return jnp.stack([target(*each) for each in TARGETS], 1)


@partial(jax.jit, static_argnames="name")
def some(name, network, pairs, key, epsilon):
    """A target of each kind for each of some pairs."""
    return sample(make_accelerated(name), network, *pairs, key, epsilon)


def repeated(name, network, pairs, key, repeats, epsilon=EPSILON):
    """Independent targets `[repeats, pairs, targets]`, by one program for all sizes."""
    count = len(pairs[2])
    rows = np.resize(np.tile(np.arange(count), repeats), -(-count * repeats // CHUNK) * CHUNK)
    keys = jax.random.split(key, len(rows) // CHUNK)
    parts = (jax.tree.map(lambda x, part=part: x[part], pairs) for part in rows.reshape(-1, CHUNK))
    found = [np.asarray(some(name, network, part, k, epsilon)) for part, k in zip(parts, keys, strict=True)]
    return np.concatenate(found)[: count * repeats].reshape(repeats, count, -1).astype(np.float64)


def spread(name, network, visited, key, states, rollouts, epsilon):
    """Gap², noise² and how often the mean of a batch ranks the best action first, `[targets]` each."""
    actions = make_accelerated(name).num_actions
    pick_key, key = jax.random.split(key)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[-x.shape[0] * x.shape[1] // 2 :], visited)
    chosen = jax.random.choice(pick_key, len(flat[2]), (states,), replace=False)
    state, seen = jax.tree.map(lambda x: jnp.repeat(x[chosen], actions, 0), flat[:2])
    found = repeated(
        name, network, (state, seen, jnp.tile(jnp.arange(actions), states)), key, rollouts, epsilon
    )
    found = found.reshape(rollouts, states, actions, -1)
    means, noise = found.mean(0), found.var(0, ddof=1)
    gap = means.var(1, ddof=1) - noise.mean(1) / rollouts
    half = found[: rollouts // 2].mean(0)
    ahead = half - half.mean(1, keepdims=True)
    ranked = found[rollouts // 2 :].reshape(-1, BATCH, states, actions, len(TARGETS)).mean(1).argmax(2)
    gained = np.take_along_axis(ahead[None], ranked[:, :, None], 2)[:, :, 0]
    won = gained.mean((0, 1)) / ahead.max(1).mean(0)
    return np.stack([gap.mean(0), noise.mean((0, 1)), (ranked == ahead.argmax(1)).mean((0, 1)), won])


def hidden(name, network, visited, key, pairs, rollouts):
    """Share of the noise given observation and action that hidden state explains, `[targets]`, and how many pairs."""
    copies = visited[2].shape[1]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), visited)
    seen = np.packbits(np.asarray(flat[1]).reshape(len(flat[2]), -1) > 0, axis=1)
    _, number = np.unique(seen, axis=0, return_inverse=True)
    generator = np.random.default_rng(0)
    order = generator.permutation(len(number))
    order = order[np.argsort(number[order], kind="stable")]
    # Neighbours in this order are random visits of the same observation.
    first, second = order[:-1], order[1:]
    same = (number[first] == number[second]) & (first % copies != second % copies)
    first, second = first[same], second[same]
    kept = generator.permutation(len(first))[:pairs]
    rows = jnp.concatenate([first[kept], second[kept]])
    action = jnp.tile(flat[2][first[kept]], 2)
    state, seen = jax.tree.map(lambda x: x[rows], flat[:2])
    found = repeated(name, network, (state, seen, action), key, rollouts).reshape(rollouts, 2, len(kept), -1)
    noise = found.var(0, ddof=1).mean(0)
    between = found.mean(0).var(0, ddof=1) - noise / rollouts
    return between.mean(0) / np.maximum((between + noise).mean(0), 1e-12), len(kept)


def fit(name, network, visited, key, pairs, repeats, updates):
    """Returns `[2, fitted, episodes]` after the agent has learned one target for each pair, or the mean of many."""
    game = make_accelerated(name)
    pick_key, sample_key, learn_key, play_key = jax.random.split(key, 4)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), visited)
    chosen = jax.random.choice(pick_key, len(flat[2]), (pairs,), replace=False)
    _, seen, action = part = jax.tree.map(lambda x: x[chosen], flat)
    found = repeated(name, network, part, sample_key, repeats)[..., FITTED]
    goals, seen = jnp.float32([found[0], found.mean(0)]), seen.reshape(pairs, -1)
    adam = optax.adam(3e-4)

    @jax.jit
    def of(goal):
        def update(carry, key):
            learned, moments = carry
            rows = jax.random.randint(key, (128,), 0, pairs)

            def loss(learned):
                q = jnp.take_along_axis(learned(seen[rows]), action[rows, None], 1)[:, 0]
                return jnp.mean((q - goal[rows]) ** 2)

            step, moments = adam.update(jax.grad(loss)(learned), moments)
            return (optax.apply_updates(learned, step), moments), None

        start = (network, adam.init(network))
        (learned, _), _ = jax.lax.scan(update, start, jax.random.split(learn_key, updates))
        return earned(game, learned, play_key, EPISODES)

    return np.array([[of(kind[:, i]) for i in range(len(FITTED))] for kind in goals])


def earned(game, network, key, episodes):
    """Returns `[episodes]` of the target policy."""

    def step(carry):
        t, state, seen, alive, total = carry
        act_key, step_key = jax.random.split(jax.random.fold_in(key, t))
        _, actions = act(network, seen, TARGET_EPSILON, act_key)
        keys = jax.random.split(step_key, episodes)
        state, seen, reward, terminated, truncated = jax.vmap(game.step)(keys, state, actions)
        return t + 1, state, seen, alive & ~(terminated | truncated), total + jnp.where(alive, reward, 0.0)

    start = jax.vmap(game.reset)(jax.random.split(key, episodes))
    first = (jnp.int32(0), *start, jnp.ones(episodes, bool), jnp.zeros(episodes))
    limit = game.time_limit
    return jax.lax.while_loop(lambda c: jnp.any(c[3]) & (c[0] < limit), step, first)[-1]


def show(returns):
    """Mean and standard error."""
    return f"{returns.mean():.2f} ± {returns.std() / len(returns) ** 0.5:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", nargs="+", default=MINATAR[:3])
    parser.add_argument("--frames", type=int, default=204_800, help="of the agent's training")
    parser.add_argument("--states", type=int, default=128)
    parser.add_argument("--rollouts", type=int, default=256, help="from each state and action")
    parser.add_argument("--pairs", type=int, default=0, help="from which the agent learns on; 0: not at all")
    parser.add_argument("--repeats", type=int, default=8, help="targets in a mean")
    parser.add_argument("--updates", type=int, default=4_096, help="in which the agent learns on")
    settings = parser.parse_args()
    for name in settings.games:
        begun, keys = time.perf_counter(), jax.random.split(jax.random.key(0), 4)
        network, score = trained(name, settings.frames)
        visited = jax.jit(partial(visit, make_accelerated(name), copies=64, steps=1024))(network, keys[0])
        share, found = hidden(name, network, visited, keys[2], 4 * settings.states, settings.rollouts // 4)
        print(f"{name}: the agent's return is {score:.2f}; hidden state from {found} pairs of visits")
        print(f"{'target':8} {'λ':>4} {'T':>2} {'ε':>4}   gap  noise   ratio  first    won  hidden")
        for epsilon in (EPSILON, 0.02):
            sizes = (settings.states, settings.rollouts, epsilon)
            found = spread(name, network, visited, keys[1], *sizes)
            for (operator, decay, length), (gap, noise, first, won), part in zip(
                TARGETS, found.T, share, strict=True
            ):
                ratio = gap / noise if noise > 1e-6 else np.inf
                row = f"{gap**0.5:6.3f} {noise**0.5:6.3f} {ratio:7.2f} {first:6.2f} {won:6.2f}"
                end = f" {part:7.2f}" if epsilon == EPSILON and noise > 1e-6 else ""
                print(f"{operator:8} {decay:4} {length:2} {epsilon:4} {row}{end}", flush=True)
        if settings.pairs:
            before = np.asarray(earned(make_accelerated(name), network, keys[3], EPISODES))
            print(f"return of the agent's target policy: {show(before)}")
            single, mean = fit(
                name, network, visited, keys[3], settings.pairs, settings.repeats, settings.updates
            )
            for k, one, many in zip(FITTED, single, mean, strict=True):
                print(
                    f"after learning targets of T = {TARGETS[k][2]}: {show(one)}; means of them: {show(many)}"
                )
        print(f"{time.perf_counter() - begun:.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
