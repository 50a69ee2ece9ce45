"""Retrace in a cleanrl-style loop: Q-learning on CartPole from replayed sequences, in one file.

    pip install torch gymnasium
    python examples/torch_retrace_cleanrl.py [--total-timesteps 40000]

The behaviour policy μ is ε-greedy, and its probability of every action taken is stored. The target policy π is a softmax of
the target network. Sequences of the replay buffer hold several episodes: `terminated` gives a discount of 0, and
`truncated` still bootstraps but lets no credit through. Tensors are [B, T], which `marginax.torch.targets` takes as they are.
"""

import argparse
import copy
import random
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from marginax.torch import targets


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=40_000)
    parser.add_argument("--buffer-size", type=int, default=20_000)
    parser.add_argument("--learning-starts", type=int, default=1_000)
    parser.add_argument("--train-frequency", type=int, default=4)
    parser.add_argument("--target-frequency", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--sequence-length", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--retrace-lambda", type=float, default=0.95)
    parser.add_argument("--temperature", type=float, default=0.1, help="of the target policy's softmax")
    parser.add_argument("--end-epsilon", type=float, default=0.05)
    return parser.parse_args()


class Replay:
    """A ring of steps in the order in which they were taken, of one environment."""

    def __init__(self, size: int, observation: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.observations = np.zeros((size, observation), np.float32)
        self.next_observations = np.zeros((size, observation), np.float32)
        self.actions = np.zeros(size, np.int64)
        self.rewards, self.log_mu = np.zeros((2, size), np.float32)
        self.terminated, self.truncated = np.zeros((2, size), bool)
        self.size, self.added = size, 0

    def add(self, **step) -> None:
        for name, value in step.items():
            getattr(self, name)[self.added % self.size] = value
        self.added += 1

    def sample(self, batch: int, length: int) -> dict[str, torch.Tensor]:
        """Sequences [B, T] that do not run over the place where the ring is being written."""
        filled = min(self.added, self.size)
        oldest = self.added - filled
        index = oldest + self.rng.integers(filled - length + 1, size=(batch, 1)) + np.arange(length)
        arrays = {name: array for name, array in vars(self).items() if isinstance(array, np.ndarray)}
        return {name: torch.from_numpy(array[index % self.size]) for name, array in arrays.items()}


def main() -> None:
    args = parse()
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(args.env_id))
    actions = int(env.action_space.n)
    inputs = env.observation_space.shape[0]
    q_network = nn.Sequential(
        nn.Linear(inputs, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, actions)
    )
    target_network = copy.deepcopy(q_network)
    optimiser = torch.optim.Adam(q_network.parameters(), lr=args.learning_rate)
    replay = Replay(args.buffer_size, inputs, args.seed)

    observation, _ = env.reset(seed=args.seed)
    returns, start = [], time.time()
    for step in range(args.total_timesteps):
        # Act ε-greedily, and remember how likely that was.
        epsilon = max(args.end_epsilon, 1 - step / (0.5 * args.total_timesteps))
        with torch.no_grad():
            greedy = int(q_network(torch.from_numpy(observation)).argmax())
        action = random.randrange(actions) if random.random() < epsilon else greedy
        probability = epsilon / actions + (1 - epsilon) * (action == greedy)
        following, reward, terminated, truncated, info = env.step(action)
        replay.add(
            observations=observation,
            next_observations=following,
            actions=action,
            rewards=reward,
            log_mu=np.log(probability),
            terminated=terminated,
            truncated=truncated,
        )
        observation = following
        if terminated or truncated:
            returns.append(float(info["episode"]["r"]))
            observation, _ = env.reset()

        if step >= args.learning_starts and step % args.train_frequency == 0:
            data = replay.sample(args.batch_size, args.sequence_length)
            with torch.no_grad():
                q = target_network(data["observations"])
                next_q = target_network(data["next_observations"])
                log_pi = (q / args.temperature).log_softmax(-1)
                target = targets.multi_step(
                    targets.select_actions(q, data["actions"]),
                    targets.expectation(next_q, (next_q / args.temperature).softmax(-1)),
                    data["rewards"],
                    args.gamma * (~data["terminated"]).float(),
                    targets.traces_from_log_ratios(
                        targets.select_actions(log_pi, data["actions"]),
                        data["log_mu"],
                        decay=args.retrace_lambda,
                    ),
                    data["truncated"],
                )
            value = targets.select_actions(q_network(data["observations"]), data["actions"])
            loss = nn.functional.mse_loss(value, target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        if step % args.target_frequency == 0:
            target_network.load_state_dict(q_network.state_dict())
        if (step + 1) % 2_000 == 0 and returns:
            rate = (step + 1) / (time.time() - start)
            print(
                f"step {step + 1:6d}  return {np.mean(returns[-20:]):6.1f}  {rate:5.0f} steps/s", flush=True
            )


if __name__ == "__main__":
    main()
