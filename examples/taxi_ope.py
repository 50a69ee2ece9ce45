"""Which of two policies should drive the taxi? Decide from a log, without driving.

An ε-greedy agent is logged on Gymnasium's Taxi into a Minari dataset (on this machine, nothing is downloaded).
Two candidate policies are then evaluated from the log alone, and compared. Because Taxi has a transition table,
the exact values can be printed beside the estimates.

    python examples/taxi_ope.py            # under a minute
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path

import numpy as np

import marginax as mx

DISCOUNT = 0.97


def candidates(mdp):
    """The agent that is logged, and two policies that might replace it."""
    q = mdp.optimal_values()
    behaviour = mx.policies.epsilon_greedy(q, 0.3)
    careful = mx.policies.epsilon_greedy(q, 0.1)
    # The hasty one picks passengers up and sets them down a little too eagerly (actions 4 and 5).
    eager = np.zeros_like(q)
    eager[:, 4:] = 0.5
    hasty = 0.93 * careful + 0.07 * eager
    return behaviour, {"careful": careful, "hasty": hasty}


def log_agent(folder: Path, policy, episodes: int, seed: int) -> str:
    """Drives the taxi with `policy` and writes what happened as the Minari dataset `taxi/epsilon-greedy-v0`."""
    import gymnasium
    from minari import create_dataset_from_buffers
    from minari.data_collector import EpisodeBuffer

    os.environ["MINARI_DATASETS_PATH"] = str(folder)
    env = gymnasium.make("Taxi-v4")
    rng = np.random.default_rng(seed)
    cumulative = policy.cumsum(axis=1)
    buffers = []
    for i in range(episodes):
        state, _ = env.reset(seed=seed if i == 0 else None)
        states, actions, rewards, chances = [state], [], [], [1.0]
        terminated = truncated = False
        while not (terminated or truncated):
            action = min(int((rng.random() > cumulative[state]).sum()), policy.shape[1] - 1)
            chances.append(policy[state, action])
            state, reward, terminated, truncated, _ = env.step(action)
            states.append(state)
            actions.append(action)
            rewards.append(float(reward))
        quiet = [False] * (len(actions) - 1)
        buffers.append(
            EpisodeBuffer(
                id=i,
                observations=np.array(states),
                actions=np.array(actions),
                rewards=rewards,
                terminations=[*quiet, terminated],
                truncations=[*quiet, truncated and not terminated],
                infos={"behaviour": np.array(chances)},
            )
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Minari asks for authors and a link to the code
        create_dataset_from_buffers(
            "taxi/epsilon-greedy-v0",
            buffers,
            env=env,
            observation_space=env.observation_space,
            action_space=env.action_space,
        )
    return "taxi/epsilon-greedy-v0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the report; none is written if omitted")
    arguments = parser.parse_args()
    mdp = mx.problems.from_gymnasium("Taxi-v4", discount=DISCOUNT)
    behaviour, policies = candidates(mdp)
    with tempfile.TemporaryDirectory() as folder:
        dataset = log_agent(Path(folder), behaviour, arguments.episodes, arguments.seed)
        ranking = mx.offline.evaluate(dataset, policies, discount=DISCOUNT)
        for name, result in ranking.policies.items():
            exact = float(mdp.initial @ mdp.v_values(policies[name]))
            print(f"\n{name}: exact value {exact:.3f}")
            print(f"  {'estimator':<26} {'value':>8}   95% interval")
            for answer in result.answers.values():
                low, high = answer.interval.low, answer.interval.high
                print(f"  {answer.name:<26} {answer.value:8.3f}   {low:8.3f} to {high:8.3f}")
            print("  " + " ".join(result.verdict.text))
        if arguments.out is not None:
            print(f"report: {mx.offline.write_report(ranking, arguments.out)}")
    logged = next(iter(ranking.policies.values())).behaviour
    print(
        f"\nThe logged agent earned {logged.value:.3f} (exact {float(mdp.initial @ mdp.v_values(behaviour)):.3f})."
    )
    print(" ".join(ranking.text))


if __name__ == "__main__":
    main()
