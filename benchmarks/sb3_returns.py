r"""Returns of Stable-Baselines3's TD3, to hold beside those of `marginax train` on the same simulators.

It needs torch and lives in an environment of its own:

    uv venv --python 3.11 .venv-peers
    uv pip install --python .venv-peers stable-baselines3 sb3-contrib gymnasium==1.3.0 pybullet==3.2.7 \
        pybullet-envs-gymnasium==0.6.0
    .venv-peers/bin/python benchmarks/sb3_returns.py pybullet/Ant --seed 0 --out ant.csv

`--settings` is one of

- `published`: those of rl-baselines3-zoo when its returns on PyBullet were published (2020). The observation tells the time that is
  left, time limits count as the end, and each episode is followed by as many updates as it had steps;
- `recent`: the zoo's of 2024. No time in the observation, bootstrapping at time limits, one update per step, larger batches;
- `spinning-up`: those of `marginax train --preset spinning-up`, for a comparison of the two programs.

Each line of the file is one evaluation without exploration noise: simulator, settings, seed, steps, mean return.
"""

import argparse
import csv
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from sb3_contrib.common.wrappers import TimeFeatureWrapper
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.noise import NormalActionNoise

ZOO = {"gamma": 0.98, "buffer_size": 200_000, "learning_starts": 10_000}
SETTINGS: dict[str, dict[str, Any]] = {
    "published": {
        **ZOO,
        **{"learning_rate": 1e-3, "batch_size": 100, "train_freq": (1, "episode"), "gradient_steps": -1},
        "replay_buffer_kwargs": {"handle_timeout_termination": False},
    },
    "recent": {**ZOO, "learning_rate": 7e-4, "batch_size": 256, "train_freq": 1, "gradient_steps": 1},
    "spinning-up": {
        **{"gamma": 0.99, "buffer_size": 1_000_000, "learning_starts": 1_000},
        **{"learning_rate": 1e-3, "batch_size": 100, "train_freq": 50, "gradient_steps": 50},
    },
}
"""Noise is 0.1 in all of them."""


class Evaluations(BaseCallback):
    """Evaluates every so many steps and appends a line to a CSV file."""

    def __init__(self, label: tuple, simulator: gym.Env, every: int, episodes: int, path: str) -> None:
        super().__init__()
        self.label, self.simulator, self.path = label, simulator, path
        self.every, self.episodes = every, episodes
        self.started = time.perf_counter()

    def _on_step(self) -> bool:
        if self.num_timesteps % self.every == 0:
            value, _ = evaluate_policy(self.model, self.simulator, self.episodes)
            with open(self.path, "a", newline="") as file:
                csv.writer(file).writerow([*self.label, self.num_timesteps, f"{value:.1f}"])
            minutes = (time.perf_counter() - self.started) / 60
            print(f"{self.num_timesteps} steps, return {value:.0f}, {minutes:.0f} minutes", flush=True)
        return True


def simulator(name: str, *, time_feature: bool) -> gym.Env:
    """A simulator under the name that marginax has for it."""
    if name.startswith("pybullet/"):
        import pybullet_envs_gymnasium  # noqa: F401 (registers the tasks)

        name = f"{name.removeprefix('pybullet/')}BulletEnv-v0"
    made = gym.make(name)
    return Monitor(TimeFeatureWrapper(made) if time_feature else made)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("simulator", help="such as pybullet/Ant or Pendulum-v1")
    parser.add_argument("--settings", choices=SETTINGS, default="published")
    parser.add_argument("--hidden", type=int, nargs="+", default=[400, 300], help="units of each layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--evaluate-every", type=int, default=50_000)
    parser.add_argument("--episodes", type=int, default=5, help="episodes of one evaluation")
    parser.add_argument("--out", required=True, help="CSV file that evaluations are appended to")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    training, evaluation = (
        simulator(flags.simulator, time_feature=flags.settings == "published") for _ in range(2)
    )
    actions = np.ones(training.action_space.shape[0])
    model = TD3(
        "MlpPolicy",
        training,
        seed=flags.seed,
        action_noise=NormalActionNoise(0 * actions, 0.1 * actions),
        policy_kwargs={"net_arch": flags.hidden},
        **SETTINGS[flags.settings],
    )
    label = (flags.simulator, flags.settings, flags.seed)
    model.learn(flags.steps, Evaluations(label, evaluation, flags.evaluate_every, flags.episodes, flags.out))


if __name__ == "__main__":
    main()
