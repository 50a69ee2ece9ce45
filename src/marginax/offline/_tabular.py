"""Evaluation of a tabular log: two or three streaming passes, whatever its size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from marginax.mdp import TabularMDP
from marginax.offline import _duality, _fitted_q
from marginax.offline._answers import ESTIMATORS, Answer, Evaluation, answer
from marginax.offline._behaviour import calibration
from marginax.offline._counts import Counts, count
from marginax.offline._importance import Estimate, Marginalized, Weighted, effective_transitions
from marginax.offline._intervals import Interval, bootstrap, concentration
from marginax.offline._log import Log
from marginax.offline._model import Model, certainty_equivalence
from marginax.offline._policies import FunctionPolicy, Policy, RowPolicy, TablePolicy
from marginax.offline._regression import Regression
from marginax.offline._sources import Source
from marginax.offline._verdict import agreement, compare, judge
from marginax.weights import exact

Progress = Callable[[str, Iterable[Any]], Iterator[Any]]
IMPORTANCE = ("trajectory-is", "per-decision-is", "weighted-is", "weighted-per-decision-is")
ROBUST = ("doubly-robust", "weighted-doubly-robust")
PREFERRED = ("certainty-equivalence", "fqe-retrace", "fqe-one-step", "fenchel", "saddle-point")


def evaluate_tabular(
    source: Source,
    policy: Policy,
    *,
    discount: float,
    estimators: tuple[str, ...],
    behaviour: Any,
    reward_range: tuple[float, float] | None,
    level: float,
    seed: int,
    progress: Progress,
) -> Evaluation:
    """The answers of all `estimators` for a log of indices; see `marginax.offline.evaluate`."""
    pi, notes = target_table(policy, source)
    counts = count(progress("counting", source.chunks()), pi.shape[0], pi.shape[1])
    if counts.episodes < 2:
        raise ValueError("the log has a single episode: an interval over episodes needs at least two")
    mu, how = behaviour_table(behaviour, counts)
    model = certainty_equivalence(counts, pi, discount)
    critics = None
    if set(ROBUST) & set(estimators):
        folds = [certainty_equivalence(counts, pi, discount, fold=k) for k in (1, 0)]
        critics = (np.stack([fold.q for fold in folds]), np.stack([fold.v for fold in folds]))
    rewards = reward_range or (counts.reward_min, counts.reward_max)
    _check_range(rewards, counts)
    with_zero = (min(rewards[0], 0.0), max(rewards[1], 0.0))
    weighted = Weighted(counts.episodes, counts.longest, discount, with_zero, critics is not None)
    regression = (
        Regression(counts.num_states, counts.num_actions, discount) if "regression" in estimators else None
    )
    marginal = Marginalized(model, counts.episodes, discount)
    for log in progress("weighting", source.chunks()):
        ratios = _ratios(policy, pi, mu, log)
        weighted.update(
            log, ratios, None if critics is None else critic_errors(log, critics, weighted.seen, discount)
        )
        marginal.update(log)
        if regression is not None:
            regression.update(log, ratios)

    estimates = {name: e for name, e in weighted.estimates().items() if name in estimators}
    visits = counts.visits.sum(axis=0)
    if {"certainty-equivalence", "saddle-point", "fenchel"} & set(estimators):
        estimates["certainty-equivalence"] = marginal.estimate(effective_transitions(model.weights, visits))
    if regression is not None:
        chunks = ((log, _ratios(policy, pi, mu, log)) for log in progress("regression", source.chunks()))
        estimates["regression"] = regression.estimate(chunks, counts.episodes, weighted.unseen_rewards())

    estimates.update(_dual_estimates(source, counts, model, pi, discount, estimators, estimates, notes))
    estimates.update(_fitted(source, counts, model, pi, mu, discount, estimators, notes, progress))
    below, above = _left_open(model)
    values = (with_zero[0] / (1 - discount), with_zero[1] / (1 - discount))
    bound = concentration(weighted.lower, weighted.upper, values, level=level) if how == "logged" else None
    answers: dict[str, Answer] = {}
    for name in ESTIMATORS:
        if name in estimates and name in estimators:
            model_based = ESTIMATORS[name][1] == "bootstraps" and name not in ROBUST
            answers[name] = answer(
                name,
                estimates[name],
                level=level,
                seed=seed,
                open_below=below if model_based else 0.0,
                open_above=above if model_based else 0.0,
                bound=bound if name == "per-decision-is" else None,
            )
    logged = weighted.behaviour()
    diagnostics = _diagnose(counts, model, weighted, mu, how, behaviour)
    diagnostics["disagreeing"] = agreement(answers)
    verdict = judge(answers, diagnostics, PREFERRED)
    advantage = None
    comparable = diagnostics["tail_behaviour"] <= 0.01  # else the log's own average stops at truncation
    if verdict.estimator in estimates and comparable:
        chosen = estimates[verdict.estimator]
        difference = chosen.influence - logged.influence
        advantage = bootstrap(chosen.value - logged.value, difference, level=level, seed=seed)
        if verdict.estimator in PREFERRED:
            advantage = Interval(advantage.low - below, advantage.high + above, level)
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", logged, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage),
        diagnostics=diagnostics,
        settings={
            "data": source.name,
            "policy": policy.name,
            "discount": discount,
            "behaviour": how,
            "level": level,
            "seed": seed,
            "reward_range": rewards,
        },
        notes=(*notes, *source.notes),
        curves=_curves(weighted, model, visits, calibration(counts, mu) if how != "estimated" else None),
    )


def critic_errors(
    log: Log, critics: tuple[np.ndarray, np.ndarray], first: int, discount: float
) -> tuple[np.ndarray, np.ndarray]:
    """[N] r + γV(x') - Q(x,a) and [E] V(x_0), for episodes numbered from `first`.

    Args:
        log: a chunk.
        critics: Q [K, S, A] and V [K, S]; episode i uses those numbered i modulo K, fitted on the others.
        first: number of the first episode of the chunk.
        discount: γ.
    """
    q, v = critics
    fold = (first + np.arange(log.num_episodes)) % len(q)
    rows = np.repeat(fold, log.lengths)
    following = np.where(log.terminal, 0.0, v[rows, np.where(log.terminal, 0, log.next_states)])
    delta = log.rewards + discount * following - q[rows, log.states, log.actions]
    return delta, v[fold, log.states[log.offsets[:-1]]]


def _dual_estimates(
    source: Source,
    counts: Counts,
    model: Model,
    pi: np.ndarray,
    discount: float,
    estimators: tuple[str, ...],
    known: dict[str, Estimate],
    notes: list[str],
) -> dict[str, Estimate]:
    """Saddle point and Fenchel: their own weights, the influence that they share with certainty equivalence."""
    wanted = [name for name in ("saddle-point", "fenchel") if name in estimators]
    if wanted and int(model.support.sum()) > _duality.PAIR_LIMIT:
        notes.append(
            f"{' and '.join(wanted)} left out above {_duality.PAIR_LIMIT:,} pairs: with tables they meet "
            "certainty-equivalence"
        )
        return {}
    found: dict[str, Estimate] = {}
    rewards, visits = counts.reward_sums.sum(axis=0), counts.visits.sum(axis=0)
    for name in wanted:
        weights, error = _duality.solve_weights(counts, model, pi, discount, name)
        value = float((weights * rewards).sum() / counts.episodes) + model.unsupported * model.fill
        ess = effective_transitions(np.maximum(weights, 0.0), visits)
        found[name] = replace(known["certainty-equivalence"], value=value, ess=ess, open=error)
    return found


def _fitted(
    source: Source,
    counts: Counts,
    model: Model,
    pi: np.ndarray,
    mu: np.ndarray | None,
    discount: float,
    estimators: tuple[str, ...],
    notes: list[str],
    progress: Progress,
) -> dict[str, Estimate]:
    """Fitted Q evaluation with each backup asked for, where the log fits into memory."""
    wanted = [name for name in ESTIMATORS if name.startswith("fqe-") and name in estimators]
    if not wanted:
        return {}
    if _fitted_q.padded_steps(counts) > _fitted_q.STEP_LIMIT:
        notes.append(f"fitted Q evaluation left out: it holds the log in memory ({counts.steps:,} steps)")
        return {}
    log = source.read()
    n = counts.visits.sum(axis=0)
    if mu is None:
        mu = np.divide(counts.behaviour_sums, n, out=np.zeros_like(n), where=n > 0)
    retrace = np.minimum(1.0, np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0))
    found = {}
    for name in progress("fitted Q", wanted):
        weights = None
        if name == "fqe-marginalized":
            if pi.size > _fitted_q.PAIR_LIMIT:
                notes.append(f"{name} left out above {_fitted_q.PAIR_LIMIT} pairs")
                continue
            weights = _td_weights(counts, retrace, discount)
        traces = np.zeros_like(pi) if name == "fqe-one-step" else retrace
        fit = _fitted_q.fit(log, model, pi, traces, discount, weights)
        found[name] = _fitted_q.estimate(fit, log, counts, model, pi, traces, discount)
    return found


def _td_weights(counts: Counts, traces: np.ndarray, discount: float) -> np.ndarray:
    """[S, A, S, A] TD weights of the traces in the MDP of the log's counts."""
    n = counts.visits.sum(axis=0)
    s, a = n.shape
    p = counts.transitions().toarray().reshape(s, a, s) / np.maximum(n, 1.0)[..., None]
    empirical = TabularMDP(p, np.zeros((s, a)), discount)
    return exact(empirical, counts.behaviour(), traces)


def target_table(policy: Policy, source: Source) -> tuple[np.ndarray, list[str]]:
    """π as a table [S, A]; rows may sum to less than 1 where the policy is only known on the log's pairs."""
    if isinstance(policy, TablePolicy):
        declared = source.sizes
        if declared is not None and declared != policy.table.shape:
            raise ValueError(
                f"the policy is a table {policy.table.shape}, and the log has {declared[0]} states and "
                f"{declared[1]} actions"
            )
        return policy.table, []
    s, a = source.table_sizes()
    if isinstance(policy, FunctionPolicy):
        table = policy(np.arange(s))
        if isinstance(table, tuple) or table.shape[1] < a:
            raise ValueError(f"the policy {policy.name} must return probabilities of all {a} actions")
        return table, []
    width = policy.probabilities.shape[1] if policy.probabilities.ndim == 2 else a
    if width < a:
        raise ValueError(f"the policy {policy.name} gives {width} actions, and the log has {a}")
    return _table_of_rows(policy, source, s, width)


def _table_of_rows(policy: RowPolicy, source: Source, s: int, a: int) -> tuple[np.ndarray, list[str]]:
    total, n, visits = np.zeros((s, a)), np.zeros((s, a)), np.zeros(s)
    for log in source.chunks():
        if policy.probabilities.ndim == 2:
            for k in range(a):
                weight = policy.probabilities[log.rows, k]
                total[:, k] += np.bincount(log.states, weight, minlength=s)
            n += np.bincount(log.states, minlength=s)[:, None]
        else:
            pairs = log.states * a + log.actions
            total += np.bincount(pairs, policy.at(log), minlength=s * a).reshape(s, a)
            n += np.bincount(pairs, minlength=s * a).reshape(s, a)
        visits += np.bincount(log.states, minlength=s)
    table = np.divide(total, n, out=np.zeros_like(total), where=n > 0)
    sums = table.sum(axis=1)
    notes = ["the policy is known on the log's rows only; elsewhere it counts as unsupported"]
    if (sums > 1 + 1e-3).any():
        x = int(np.argmax(sums))
        notes.append(
            f"the policy's probabilities in state {x} add up to {sums[x]:.3f}: it depends on more than the state"
        )
        table /= np.maximum(sums, 1)[:, None]
    return table, notes


def behaviour_table(behaviour: Any, counts: Counts) -> tuple[np.ndarray | None, str]:
    """The table to take μ from (None: the log's own column), and in a word where it comes from."""
    if isinstance(behaviour, str):
        if behaviour not in ("auto", "logged", "estimated"):
            raise ValueError(f"behaviour must be auto, logged, estimated or a table, got {behaviour!r}")
        if behaviour == "logged" and not counts.has_behaviour:
            raise ValueError("behaviour is to be taken from the log, which has no behaviour probabilities")
        if behaviour != "estimated" and counts.has_behaviour:
            return None, "logged"
        return counts.behaviour(), "estimated"
    from marginax.offline._policies import probabilities

    table = np.asarray(behaviour, dtype=np.float64)
    if table.shape != (counts.num_states, counts.num_actions):
        raise ValueError(
            f"behaviour must have shape {(counts.num_states, counts.num_actions)}, got {table.shape}"
        )
    return probabilities("behaviour", table), "given"


def _ratios(policy: Policy, pi: np.ndarray, mu: np.ndarray | None, log: Log) -> np.ndarray:
    target = policy.at(log) if isinstance(policy, RowPolicy) else pi[log.states, log.actions]
    chance = log.behaviour if mu is None else mu[log.states, log.actions]
    assert chance is not None
    if (chance == 0).any():
        row = int(np.argmax(chance == 0))
        raise ValueError(
            f"{log.where(row)}: the behaviour table gives probability 0 to an action that was taken"
        )
    return target / chance


def _check_range(rewards: tuple[float, float], counts: Counts) -> None:
    if not rewards[0] <= counts.reward_min <= counts.reward_max <= rewards[1]:
        raise ValueError(
            f"reward_range {rewards} does not contain the log's rewards, "
            f"which go from {counts.reward_min:g} to {counts.reward_max:g}"
        )


def _left_open(model: Model) -> tuple[float, float]:
    """How much lower and higher the value may be if what was never seen has any value seen elsewhere."""
    low, high = model.fill_range
    return model.unsupported * max(model.fill - low, 0.0), model.unsupported * max(high - model.fill, 0.0)


def _diagnose(
    counts: Counts, model: Model, weighted: Weighted, mu: np.ndarray | None, how: str, behaviour: Any
) -> dict[str, Any]:
    ratio, ratio_error = weighted.mean_ratio()
    weights = weighted.weights
    mean = float(weights.mean())
    left = model.left
    worst = np.argsort(left.ravel())[::-1][:10]
    most = np.argsort(model.weights.ravel())[::-1][:10]
    a = counts.num_actions
    check = calibration(counts, mu) if how != "estimated" else None
    visits = counts.visits.sum(axis=0)
    return {
        "episodes": counts.episodes,
        "transitions": counts.steps,
        "longest": counts.longest,
        "truncated": counts.truncated,
        "tail_behaviour": weighted.tail_behaviour / counts.episodes,
        "tail_target": weighted.tail_target / counts.episodes,
        "ess": weighted.ess(),
        "tail_index": weighted.tail_index(),
        "ess_transitions": effective_transitions(model.weights, visits),
        "mean_weight": mean,
        "mean_weight_error": float(weights.std(ddof=1) / np.sqrt(len(weights))),
        "mean_ratio": ratio,
        "mean_ratio_error": ratio_error,
        "unsupported": model.unsupported,
        "unsupported_pairs": [
            {"state": int(i // a), "action": int(i % a), "mass": float(left.ravel()[i])}
            for i in worst
            if left.ravel()[i] > 0
        ],
        "largest_weights": [
            {"weight": w, "episode": name, "step": step, "state": state, "action": action}
            for w, name, step, state, action in weighted.top
        ],
        "largest_ratios": [
            {
                "state": int(i // a),
                "action": int(i % a),
                "ratio": float(model.weights.ravel()[i]),
                "visits": int(visits.ravel()[i]),
            }
            for i in most
            if model.weights.ravel()[i] > 0
        ],
        "behaviour": how,
        "behaviour_deviation": None if check is None else check.deviation,
        "behaviour_error": None if check is None else check.error,
        "behaviour_suspicious": check is not None and check.suspicious,
        "span": weighted.return_range[1] - weighted.return_range[0],
    }


def _curves(weighted: Weighted, model: Model, visits: np.ndarray, check: Any) -> dict[str, Any]:
    """Data behind the plots of the page."""
    positive = weighted.weights[weighted.weights > 0]
    logs = np.log10(np.maximum(positive, 1e-12)) if len(positive) else np.zeros(1)
    heights, edges = np.histogram(logs, bins=40, range=(logs.min() - 0.05, logs.max() + 0.05))
    seen = visits.ravel() / visits.sum()
    total = float(model.occupancy.sum())
    return {
        "ess_by_time": weighted.ess_by_time(),
        "weight_histogram": {
            "edges": edges,
            "heights": heights,
            "zeros": int((weighted.weights == 0).sum()),
        },
        "overlap": {
            "behaviour": seen,
            "target": model.occupancy.ravel() / total if total > 0 else seen * 0,
        },
        "calibration": None
        if check is None
        else {"said": check.said, "seen": check.seen, "weight": check.weight},
    }
