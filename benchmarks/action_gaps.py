"""How much of a long return depends on its first action? `python benchmarks/action_gaps.py` (needs gymnax).

States are visited by the uniformly random policy. From each of them every action is taken many times, and the random policy
goes on. With the policy's exact values after n steps, the n-step return has the mean Q(x, a) for every n: only its noise
depends on n. Printed, as shares of the variance of Q between states:

    gap    the variance of Q(x, a) between the actions of a state, less what Monte Carlo adds to it
    noise  the variance of the n-step return given (x, a)

and gap / noise, what one sampled target says of which action is better. Two rollouts after the same n steps estimate the
value there independently, so their covariance given the pair is the variance of the n-step return with exact values.
"""

import argparse
import time

import jax
import jax.numpy as jnp

from marginax.simulators import make_accelerated

GAMES = tuple(f"gymnax/{name}-MinAtar" for name in ("Breakout", "SpaceInvaders", "Asterix", "Freeway"))


def measure(
    name: str, steps: int, states: int, rollouts: int, horizon: int, discount: float
) -> tuple[float, ...]:
    """Variances between states, between actions, and of the n-step return given the pair."""
    game = make_accelerated(name)
    actions = game.num_actions

    def play(key, state, first, length):
        """Discounted rewards of `length` steps, the state after them, and whether the episode had ended."""

        def step(carry, t):
            state, alive, power, total = carry
            act_key, step_key = jax.random.split(jax.random.fold_in(key, t))
            drawn = jax.random.randint(act_key, (), 0, actions)
            action = jnp.where((t == 0) & (first >= 0), first, drawn)
            state, _, reward, terminated, truncated = game.step(step_key, state, action)
            total = total + jnp.where(alive, power * reward, 0)
            return (state, alive & ~(terminated | truncated), discount * power, total), None

        start = (state, jnp.array(True), jnp.ones(()), jnp.zeros(()))
        (state, alive, power, total), _ = jax.lax.scan(step, start, jnp.arange(length))
        return total, state, alive, power

    def visited(key):
        """A state that the random policy reaches in an episode that has not ended."""
        reset_key, time_key, key = jax.random.split(key, 3)
        state, _ = game.reset(reset_key)
        until = jax.random.randint(time_key, (), 0, 50)

        def step(carry, t):
            state, kept = carry
            act_key, step_key, again = jax.random.split(jax.random.fold_in(key, t), 3)
            following, _, _, terminated, truncated = game.step(
                step_key, state, jax.random.randint(act_key, (), 0, actions)
            )
            fresh, _ = game.reset(again)
            ended = terminated | truncated
            following = jax.tree.map(lambda new, old: jnp.where(ended, new, old), fresh, following)
            kept = jax.tree.map(lambda new, old: jnp.where(t <= until, new, old), following, kept)
            return (following, kept), None

        return jax.lax.scan(step, (state, state), jnp.arange(50))[0][1]

    def pair(key, state, action):
        """Of one rollout: the reward of n steps, and two independent estimates of the value after them."""
        first, second, third = jax.random.split(key, 3)
        reward, after, alive, power = play(first, state, action, steps)
        values = [play(k, after, -1, horizon)[0] for k in (second, third)]
        return reward + jnp.where(alive, power, 0) * jnp.stack(values)

    @jax.jit
    def of_state(key):
        state_key, key = jax.random.split(key)
        state = visited(state_key)
        keys = jax.random.split(key, (actions, rollouts))
        found = jax.vmap(jax.vmap(pair, (0, None, None)), (0, None, 0))(keys, state, jnp.arange(actions))
        # Given the pair, two returns that share only the n steps have the variance of the n-step return as covariance.
        centred = found - found.mean(1, keepdims=True)
        noise = jnp.sum(centred[..., 0] * centred[..., 1], 1) / (rollouts - 1)
        q = found.mean((1, 2))
        error = found.mean(2).var(1, ddof=1) / rollouts
        return q.mean(), q.var(ddof=1) - error.mean(), noise.mean()

    means, gaps, noises = jax.lax.map(of_state, jax.random.split(jax.random.key(0), states))
    return float(means.var(ddof=1)), float(gaps.mean()), float(noises.mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--games", nargs="+", default=GAMES)
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--states", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--horizon", type=int, default=100)
    parser.add_argument("--discount", type=float, default=0.99)
    settings = parser.parse_args()
    print(f"{'game':30} {'n':>3} {'gap':>9} {'noise':>9} {'gap / noise':>11} {'seconds':>8}")
    for name in settings.games:
        for steps in settings.steps:
            begun = time.perf_counter()
            sizes = (settings.states, settings.rollouts, settings.horizon, settings.discount)
            between, gap, noise = measure(name, steps, *sizes)
            row = f"{gap / between:9.4f} {noise / between:9.4f} {gap / noise:11.4f}"
            print(f"{name:30} {steps:3} {row} {time.perf_counter() - begun:8.0f}", flush=True)


if __name__ == "__main__":
    main()
