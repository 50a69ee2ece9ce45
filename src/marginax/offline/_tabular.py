"""Evaluation of a tabular log: two or three streaming passes, whatever its size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from marginax.offline import _duality, _fitted_q
from marginax.offline._answers import Evaluation
from marginax.offline._behaviour import calibration
from marginax.offline._conclude import (
    ROBUST,
    Request,
    answers_of,
    conclude,
    curves_of,
    diagnostics_of,
    with_zero,
)
from marginax.offline._counts import Counts, count
from marginax.offline._estimates import Estimate
from marginax.offline._importance import Weighted
from marginax.offline._intervals import Interval
from marginax.offline._log import Log
from marginax.offline._model import Marginalized, Model, certainty_equivalence, effective_transitions
from marginax.offline._policies import FunctionPolicy, Policy, RowPolicy, TablePolicy, probabilities
from marginax.offline._regression import Regression
from marginax.offline._sources import Source
from marginax.traces import clip_ratios

PREFERRED = ("certainty-equivalence", "fqe-retrace", "fqe-one-step", "fenchel", "saddle-point")
_BY_COUNTS = ("certainty-equivalence", "saddle-point", "fenchel", "fqe-one-step")  # one value, one influence


def evaluate_tabular(source: Source, policy: Policy, request: Request) -> Evaluation:
    """The answers of all estimators for a log of indices; see `marginax.offline.evaluate`."""
    discount = request.discount
    pi, notes = target_table(policy, source)
    counts = count(request.progress("counting", source.chunks()), pi.shape[0], pi.shape[1])
    if counts.episodes < 2:
        raise ValueError("the log has a single episode: an interval over episodes needs at least two")
    mu, how = behaviour_table(request.behaviour, counts)
    model = certainty_equivalence(counts, pi, discount)
    critics = None
    if request.wants(*ROBUST):
        folds = [certainty_equivalence(counts, pi, discount, fold=k) for k in (1, 0)]
        critics = (np.stack([fold.q for fold in folds]), np.stack([fold.v for fold in folds]))
    rewards = request.rewards(counts.reward_min, counts.reward_max)
    weighted = Weighted(counts.episodes, counts.longest, discount, with_zero(rewards), critics is not None)
    regression = Regression(pi.shape[0], pi.shape[1], discount) if request.wants("regression") else None
    marginal = Marginalized(model, counts.episodes, discount)
    for log in request.progress("weighting", source.chunks()):
        ratios = _ratios(policy, pi, mu, log)
        errors = None if critics is None else critic_errors(log, critics, weighted.seen, discount)
        weighted.update(log, ratios, errors)
        marginal.update(log)
        if regression is not None:
            regression.update(log, ratios)

    visits = counts.visits.sum(axis=0)
    estimates = weighted.estimates()
    if regression is not None:
        passes = request.progress("regression", source.chunks())
        chunks = ((log, _ratios(policy, pi, mu, log)) for log in passes)
        estimates["regression"] = regression.estimate(chunks, counts.episodes, weighted.unseen_rewards())
    if request.wants(*_BY_COUNTS):
        by_counts = marginal.estimate(effective_transitions(model.weights, visits))
        estimates["certainty-equivalence"] = by_counts
        estimates["fqe-one-step"] = replace(by_counts, ess=None)  # the same fixed point
        estimates |= _dual_estimates(counts, model, pi, by_counts, request, notes)
    estimates |= _fitted(source, counts, model, pi, mu, request, notes)
    estimates = {name: estimates[name] for name in request.estimators if name in estimates}

    check = calibration(counts, mu) if how != "estimated" else None
    opened = _left_open(model)
    target = model.occupancy.ravel()
    return conclude(
        answers_of(estimates, weighted, request, how, opened),
        estimates,
        weighted,
        diagnostics_of(weighted, how, check) | _pairs(counts, model),
        request,
        preferred=PREFERRED,
        opened=opened,
        settings={"data": source.name, "policy": policy.name, "behaviour": how, "reward_range": rewards},
        notes=(*notes, *source.notes),
        curves=curves_of(
            weighted, visits.ravel() / visits.sum(), target / max(float(target.sum()), 1e-300), check
        ),
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
    counts: Counts, model: Model, pi: np.ndarray, by_counts: Estimate, request: Request, notes: list[str]
) -> dict[str, Estimate]:
    """Saddle point and Fenchel: their own weights, the influence that they share with certainty equivalence."""
    wanted = request.wants("saddle-point", "fenchel")
    if wanted and int(model.support.sum()) > _duality.PAIR_LIMIT:
        notes.append(
            f"{' and '.join(wanted)} left out above {_duality.PAIR_LIMIT:,} pairs: with tables they meet "
            "certainty-equivalence"
        )
        return {}
    found: dict[str, Estimate] = {}
    rewards, visits = counts.reward_sums.sum(axis=0), counts.visits.sum(axis=0)
    for name in wanted:
        weights, error = _duality.solve_weights(counts, model, pi, request.discount, name)
        value = float((weights * rewards).sum() / counts.episodes) + model.unsupported * model.fill
        ess = effective_transitions(np.maximum(weights, 0.0), visits)
        found[name] = replace(by_counts, value=value, ess=ess, open=error)
    return found


def _fitted(
    source: Source,
    counts: Counts,
    model: Model,
    pi: np.ndarray,
    mu: np.ndarray | None,
    request: Request,
    notes: list[str],
) -> dict[str, Estimate]:
    """Fitted Q evaluation with multi-step and marginalized backups; the one-step one is certainty equivalence."""
    wanted = request.wants("fqe-retrace", "fqe-marginalized")
    if "fqe-marginalized" in wanted and pi.size > _fitted_q.PAIR_LIMIT:
        notes.append(f"fqe-marginalized left out above {_fitted_q.PAIR_LIMIT:,} pairs")
        wanted.remove("fqe-marginalized")
    n = counts.visits.sum(axis=0)
    if mu is None:
        mu = np.divide(counts.behaviour_sums, n, out=np.zeros_like(n), where=n > 0)
    retrace = clip_ratios(np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0))
    found = {}
    for name in request.progress("fitted Q", wanted):
        weights = None
        if name == "fqe-marginalized":
            weights = _fitted_q.td_weights(counts, retrace, request.discount)
        backup = _fitted_q.Backup(source, counts, model, pi, retrace, request.discount, weights)
        found[name] = _fitted_q.estimate(backup.solve(), backup)
    return found


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
    total, n = np.zeros((s, a)), np.zeros((s, a))
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


def _left_open(model: Model) -> Interval:
    """How much lower and higher the value may be if what was never seen has any value seen elsewhere."""
    low, high = model.fill_range
    return Interval(
        -model.unsupported * max(model.fill - low, 0.0), model.unsupported * max(high - model.fill, 0.0)
    )


def _pairs(counts: Counts, model: Model) -> dict[str, Any]:
    """Diagnostics of pairs: where π leaves the log, and where its ratios are large."""
    a = counts.num_actions
    left, ratios, visits = model.left.ravel(), model.weights.ravel(), counts.visits.sum(axis=0).ravel()
    worst, most = np.argsort(left)[::-1][:10], np.argsort(ratios)[::-1][:10]
    return {
        "ess_transitions": effective_transitions(model.weights.ravel(), visits),
        "unsupported": model.unsupported,
        "unsupported_pairs": [
            {"state": int(i // a), "action": int(i % a), "mass": float(left[i])} for i in worst if left[i] > 0
        ],
        "largest_ratios": [
            {"state": int(i // a), "action": int(i % a), "ratio": float(ratios[i]), "visits": int(visits[i])}
            for i in most
            if ratios[i] > 0
        ],
    }
