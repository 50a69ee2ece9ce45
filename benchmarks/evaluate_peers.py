"""The same logs evaluated by scope-rl and by d3rlpy: values side by side, error and time.

    uv venv peers && VIRTUAL_ENV=peers uv pip install scope-rl
    python benchmarks/evaluate_peers.py --peer peers/bin/python --repetitions 20  # d3rlpy takes a minute a log, for ten logs or fewer

scope-rl needs episodes of one length, so the logs are those of the chain (6 steps) and of a continuing random MDP
(50 steps, truncated). Its doubly robust estimator is given our critic. d3rlpy (which comes with scope-rl) has fitted
Q evaluation for its own agents only: a DQN agent that always takes action 0 stands for the chain's target policy.
Both run in an environment of their own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PAIRS = {
    "trajectory-is": "TrajectoryWiseImportanceSampling",
    "per-decision-is": "PerDecisionImportanceSampling",
    "weighted-is": "SelfNormalizedTIS",
    "weighted-per-decision-is": "SelfNormalizedPDIS",
    "doubly-robust": "DoublyRobust",
    "weighted-doubly-robust": "SelfNormalizedDR",
}


def peer(path: Path) -> None:
    """Runs inside the peer's environment: values of every log, then time for values with intervals."""
    import scope_rl.ope.discrete as estimators

    data = np.load(path)
    result = {"values": {}, "seconds": 0.0}
    for name, peer_name in PAIRS.items():
        estimator = getattr(estimators, peer_name)()
        values = []
        for k in range(len(data["actions"])):
            values.append(float(estimator.estimate_policy_value(**arguments(data, k))))
        result["values"][name] = values
    begin = time.perf_counter()
    for name in list(PAIRS)[:4]:
        getattr(estimators, PAIRS[name])().estimate_interval(
            **arguments(data, "large"), n_bootstrap_samples=1000, random_state=0
        )
    result["seconds"] = time.perf_counter() - begin
    begin = time.perf_counter()
    result["fitted"] = [fitted(data, k) for k in range(len(data["fixed_states"]))]
    result["fitted_seconds"] = time.perf_counter() - begin
    print(json.dumps(result))


def fitted(data, k) -> float:
    """d3rlpy's fitted Q evaluation of "always action 0" on one-hot states, 2,000 steps of batches of 100."""
    import d3rlpy
    import torch

    eye = np.eye(6, dtype=np.float32)
    dataset = d3rlpy.dataset.MDPDataset(
        eye[data["fixed_states"][k]],
        data["fixed_actions"][k][:, None],
        data["fixed_rewards"][k][:, None].astype(np.float32),
        data["fixed_terminal"][k].astype(np.float32),
        action_space=d3rlpy.ActionSpace.DISCRETE,
        action_size=2,
    )
    agent = d3rlpy.algos.DQNConfig().create()
    agent.build_with_dataset(dataset)
    agent.impl.inner_predict_best_action = lambda x: torch.zeros(len(x), dtype=torch.int64)
    settings = d3rlpy.ope.FQEConfig(
        learning_rate=1e-3, gamma=0.95, batch_size=100, target_update_interval=100
    )
    evaluation = d3rlpy.ope.DiscreteFQE(algo=agent, config=settings)
    evaluation.fit(
        dataset,
        n_steps=2000,
        n_steps_per_epoch=2000,
        show_progress=False,
        save_interval=10**9,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )
    return float(evaluation.predict_value(eye[:1], np.zeros((1, 1)))[0])


def arguments(data, k) -> dict:
    prefix = "large_" if k == "large" else ""
    take = (lambda name: data[prefix + name]) if prefix else (lambda name: data[name][k])
    return {
        "step_per_trajectory": int(data[prefix + "steps"]),
        "action": take("actions").ravel(),
        "reward": take("rewards").ravel(),
        "pscore": take("chances").ravel(),
        "evaluation_policy_action_dist": take("target").reshape(-1, take("target").shape[-1]),
        "state_action_value_prediction": take("q").reshape(-1, take("q").shape[-1]),
        "gamma": float(data[prefix + "discount"]),
    }


def draw(mdp, mu, pi, key, episodes, steps):
    import jax

    import marginax as mx
    from marginax.offline.certainty_equivalence import certainty_equivalence

    batch = mx.trajectories.sample(mdp, mu, jax.random.key(key), episodes=episodes, horizon=steps)
    log = mx.offline.Log.from_trajectories(batch)
    counts = mx.weights.EmpiricalMDP.empty(*pi.shape).update(batch)
    model = certainty_equivalence(counts, pi, mdp.discount)
    shape = (episodes, steps)
    columns = {
        "actions": log.actions.reshape(shape),
        "rewards": log.rewards.reshape(shape),
        "chances": log.behaviour.reshape(shape),
        "target": pi[log.states].reshape(*shape, -1),
        "q": model.q[0][log.states].reshape(*shape, -1),
    }
    return log, columns


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="the Python of an environment with scope-rl")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--transitions", type=int, default=1_000_000)
    parsed = parser.parse_args()
    if parsed.inside:
        return peer(parsed.inside)
    import marginax as mx

    mdp, pi, mu = mx.problems.chain(n=6, actions=2, noise=0.2, discount=0.95)
    pi = 0.6 * pi + 0.4 * mu
    truth = float(mdp.initial @ mdp.v_values(pi))
    names = [*PAIRS, "certainty-equivalence", "fqe-retrace"]
    values, stacked = {name: [] for name in names}, {}
    for k in range(parsed.repetitions):
        log, columns = draw(mdp, mu, pi, k, 200, 6)
        answers = mx.offline.evaluate(log, pi, discount=0.95, estimators=names).answers
        for name in names:
            values[name].append(answers[name].value)
        for name, column in columns.items():
            stacked.setdefault(name, []).append(column)
    always, uniform = mx.problems.chain(n=6, actions=2, noise=0.2, discount=0.95)[1:]
    fixed_names = ["certainty-equivalence", "fqe-retrace", "fqe-marginalized"]
    fixed_values, fixed = {name: [] for name in fixed_names}, {}
    for k in range(min(10, parsed.repetitions)):
        log, _ = draw(mdp, uniform, always, k, 200, 6)
        answers = mx.offline.evaluate(log, always, discount=0.95, estimators=fixed_names).answers
        for name in fixed_names:
            fixed_values[name].append(answers[name].value)
        for name in ("states", "actions", "rewards", "terminal"):
            fixed.setdefault(f"fixed_{name}", []).append(getattr(log, name))
    large_mdp, large_pi, large_mu = mx.problems.garnet(50, 4, 5, seed=1, discount=0.95)
    large_pi = 0.2 * large_pi + 0.8 * large_mu
    log, columns = draw(large_mdp, large_mu, large_pi, 0, parsed.transitions // 50, 50)
    begin = time.perf_counter()
    mx.offline.evaluate(log, large_pi, discount=0.95, estimators=list(PAIRS)[:4])
    ours = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "logs.npz"
        large = {f"large_{name}": column for name, column in columns.items()}
        arrays = {name: np.stack(column) for name, column in {**stacked, **fixed}.items()}
        np.savez(path, steps=6, discount=0.95, large_steps=50, large_discount=0.95, **arrays, **large)
        command = [str(parsed.peer or sys.executable), __file__, "--inside", str(path)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    theirs = json.loads(output.strip().splitlines()[-1])
    print(f"chain, {parsed.repetitions} logs of 200 episodes, exact value {truth:.4f}\n")
    print("| estimator | RMSE, marginax | RMSE, scope-rl | largest difference |\n|---|---|---|---|")
    for name in names:
        a = np.array(values[name])
        rmse = np.sqrt(((a - truth) ** 2).mean())
        if name in theirs["values"]:
            b = np.array(theirs["values"][name])
            other = f"{np.sqrt(((b - truth) ** 2).mean()):.4f} | {np.abs(a - b).max():.1e}"
        else:
            other = "– | –"
        print(f"| {name} | {rmse:.4f} | {other} |")
    print(
        f"\n{parsed.transitions:,} transitions in memory, four forms of importance sampling with intervals ",
        end="",
    )
    print(f"(1,000 resamples): marginax {ours:.1f} s, scope-rl {theirs['seconds']:.1f} s")
    truth = float(mdp.initial @ mdp.v_values(always))
    print(
        f"\nchain, {len(theirs['fitted'])} logs of 200 episodes by the uniform policy, target always action 0, exact value {truth:.4f}\n"
    )
    print("| estimator | RMSE |\n|---|---|")
    fixed_values["d3rlpy FQE"] = theirs["fitted"]
    for name, found in fixed_values.items():
        print(f"| {name} | {np.sqrt(((np.array(found) - truth) ** 2).mean()):.4f} |")
    print(f"\nd3rlpy took {theirs['fitted_seconds'] / len(theirs['fitted']):.1f} s a log")


if __name__ == "__main__":
    main()
