"""V-trace targets in a torchrl loss: an actor-critic that reuses each batch for several updates.

    pip install torch torchrl gymnasium
    python examples/torch_vtrace_torchrl.py [--batches 100]

After the first update the data is off-policy: it comes from the policy before. V-trace corrects for that. The targets and
advantages are computed by `marginax.torch.targets` and handed to torchrl's `A2CLoss` as `value_target` and `advantage`.
torchrl keeps tensors as [T, 1], so time is the dimension -2. Steps that a time limit cut off bootstrap, those that ended do not.
"""

import argparse

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import ExplorationType, GymEnv, StepCounter, TransformedEnv, set_exploration_type
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import A2CLoss

from marginax.torch import targets

DISCOUNT = 0.99


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


@torch.no_grad()
def add_vtrace(data, actor, critic) -> None:
    """Writes `value_target` and `advantage` into a rollout with the behaviour's `action_log_prob`."""
    step = data["next"]
    value, next_value = (critic(x.select("observation"))["state_value"] for x in (data, step))
    log_pi = actor.get_dist(data).log_prob(data["action"])
    # The clip of ρ and c is 1, as in IMPALA.
    ratios = targets.traces_from_log_ratios(log_pi, data["action_log_prob"])[..., None]
    discounts = DISCOUNT * (~step["terminated"]).float()
    common = next_value, step["reward"], discounts
    target = targets.vtrace(value, *common, ratios, ratios, step["done"], dim=-2)
    # The policy gradient's advantage bootstraps from the next step's target, within the episode.
    following = torch.cat([target[1:], next_value[-1:]])
    following = torch.where(step["done"], next_value, following)
    data["value_target"] = target
    data["advantage"] = ratios * (step["reward"] + discounts * following - value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--steps", type=int, default=512, help="steps of each batch")
    parser.add_argument("--updates", type=int, default=4, help="updates on each batch")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    env = TransformedEnv(GymEnv("CartPole-v1"), StepCounter())
    env.set_seed(options.seed)
    observations, actions = env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1]
    logits = TensorDictModule(network(observations, actions), ["observation"], ["logits"])
    actor = ProbabilisticActor(
        logits, in_keys=["logits"], distribution_class=OneHotCategorical, return_log_prob=True
    )
    critic = ValueOperator(network(observations, 1), in_keys=["observation"])
    loss = A2CLoss(actor, critic, entropy_coeff=0.01, critic_coeff=0.5)
    optimiser = torch.optim.Adam(loss.parameters(), lr=1e-3)

    for batch in range(options.batches):
        with torch.no_grad(), set_exploration_type(ExplorationType.RANDOM):
            data = env.rollout(options.steps, actor, break_when_any_done=False)
        ended = data["next", "step_count"][data["next", "done"]]
        for _ in range(options.updates):
            add_vtrace(data, actor, critic)
            advantage = data["advantage"]
            data["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
            terms = loss(data)
            optimiser.zero_grad()
            sum(value for name, value in terms.items() if name.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), 1.0)
            optimiser.step()
        if batch % 10 == 0 or batch == options.batches - 1:
            length = ended.float().mean().item() if ended.numel() else float(options.steps)
            print(f"batch {batch:4d}  mean length of the episodes that ended {length:6.1f}", flush=True)


if __name__ == "__main__":
    main()
