"""Sampling tabular MDPs against stepping the same MDP in Gymnasium's own toy-text environment.

    python benchmarks/sampling.py [--quick]

Both sides follow the uniform policy, begin again where an episode ends, and count transitions a second. Gymnasium's is
the plain loop `env.step(action)` on the bare environment (no wrappers), with the actions drawn beforehand, the best of three; ours
is `trajectories.sample(..., reset=True)`, compiled before the clock starts. Frequencies of terminations and mean rewards of long
sequences agree (checked).
"""

import argparse
import time

import gymnasium
import jax
import numpy as np

import marginax as mx


def step_gymnasium(name: str, steps: int) -> tuple[float, float, float]:
    """Transitions a second, the share that terminates, the mean reward."""
    env = gymnasium.make(name).unwrapped
    actions = np.random.default_rng(0).integers(env.action_space.n, size=steps).tolist()
    env.reset(seed=0)
    ended, total = 0, 0.0
    start = time.perf_counter()
    for action in actions:
        _, reward, terminated, _, _ = env.step(action)
        total += reward
        if terminated:
            ended += 1
            env.reset()
    seconds = time.perf_counter() - start
    return steps / seconds, ended / steps, total / steps


def sample_ours(name: str, episodes: int, horizon: int, repeats: int) -> tuple[float, float, float]:
    """The same of our sampler, at its best of several calls."""
    mdp = mx.problems.from_gymnasium(name)
    tables = mx.trajectories.sampling_tables(mdp)
    policy = mx.policies.uniform(mdp.num_states, mdp.num_actions)
    best = float("inf")
    for key in jax.random.split(jax.random.key(0), repeats + 1):
        start = time.perf_counter()
        batch = mx.trajectories.sample(tables, policy, key, episodes=episodes, horizon=horizon, reset=True)
        jax.block_until_ready(batch)
        best = min(best, time.perf_counter() - start)
    return episodes * horizon / best, float((batch.discounts == 0).mean()), float(batch.rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer transitions")
    options = parser.parse_args()
    steps, repeats = (20_000, 3) if options.quick else (200_000, 10)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, Gymnasium {gymnasium.__version__}\n")
    print("| environment | Gymnasium, steps/s | sequences × steps | ours, steps/s | times faster |")
    print("|---|--:|--:|--:|--:|")
    for name in ("FrozenLake-v1", "Taxi-v4"):
        theirs, their_ends, their_reward = max(step_gymnasium(name, steps) for _ in range(3))
        for episodes, horizon in [(64, 1000), (1024, 200), (8192, 100)]:
            ours, our_ends, our_reward = sample_ours(name, episodes, horizon, repeats)
            if horizon >= 1000:  # long enough for the starts not to count
                assert abs(our_ends - their_ends) < 0.01 + 0.1 * their_ends
                assert abs(our_reward - their_reward) < 0.01 + 0.1 * abs(their_reward)
            print(
                f"| {name} | {theirs:,.0f} | {episodes} × {horizon} | {ours:,.0f} | {ours / theirs:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
