"""Diagnostics of weights, behaviour probabilities, support and returns: numbers for the verdict, and curves for the page."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from marginax.offline.behaviour import Calibration, mean_logged
from marginax.offline.certainty_equivalence import Model, effective_transitions
from marginax.offline.importance import FEW, ImportanceSums
from marginax.offline.markov import MarkovTest
from marginax.offline.results import Estimate, Influence, effective, if_alike, room_for
from marginax.statistics import studentised_bootstrap
from marginax.weights.empirical import EmpiricalMDP

STOPPED = 0.01  # with a larger share of the discount after truncated steps, the log's average return is not its policy's value


def diagnostics_of(
    sums: ImportanceSums,
    how: str,
    check: Calibration | None,
    markov: MarkovTest,
    level: float,
    *,
    weighed: bool = True,
) -> dict[str, Any]:
    """Diagnostics of the weights of episodes, the behaviour probabilities, the states and the returns.

    Without ratios (`weighed` is False) the weights in `sums` are all 0 and mean nothing.
    """
    weights, n = sums.weights, sums.episodes
    ratio, ratio_error = sums.mean_ratio()
    tail_behaviour, tail_target = np.minimum(sums.sums["tail"] / n, 1.0)  # mean weights may exceed 1
    return {
        "episodes": n,
        "transitions": sums.steps,
        "longest": sums.longest,
        "truncated": sums.truncated,
        "tail_behaviour": float(tail_behaviour),
        "tail_target": float(tail_target),
        "weighed": weighed,
        "ess": sums.ess(),
        "tail_index": sums.tail_index(),
        "mean_weight": float(weights.mean()),
        "mean_weight_error": float(weights.std(ddof=1) / np.sqrt(n)),
        "mean_ratio": ratio,
        "mean_ratio_error": ratio_error,
        "largest_weights": [
            {"weight": w, "episode": name, "step": step, "state": state, "action": action}
            for w, name, step, state, action in sums.top
            if w > 0
        ],
        "behaviour": how,
        "behaviour_deviation": None if check is None else check.deviation,
        "behaviour_error": None if check is None else check.error,
        "behaviour_suspicious": check is not None and check.suspicious,
        "markov_score": markov.score,
        "markov_degrees": markov.degrees,
        "markov_fails": markov.fails,
        "returns": returns_of(sums, level, weighed),
        "span": sums.return_span,
    }


def returns_of(sums: ImportanceSums, level: float, weighed: bool) -> dict[str, Any]:
    """Distributions of returns: of the log and, as far as weights tell, of π. None if truncation hides a part of returns."""
    if sums.sums["tail"][0] > STOPPED * sums.episodes:
        reason = "truncated episodes hide a part of their returns"
        return {"target": None, "behaviour": None, "reason": reason}
    returns, possible = sums.sums["earned"], sums.value_range()
    logged = distribution(returns, np.ones_like(returns), level, possible)
    reason = ""
    mean = float(sums.weights.mean())
    if not weighed:
        reason = "importance sampling does not apply"
    elif sums.ess() < FEW:
        reason = f"{effective(sums.ess())} are too few ({FEW:.0f} are needed)"
    elif mean_weight_off(mean, float(sums.weights.std(ddof=1)) / np.sqrt(sums.episodes)):
        reason = f"the weights of episodes average {mean:.2g} and not 1"
    target = None if reason else distribution(returns, sums.weights, level, possible)
    return {"target": target, "behaviour": logged, "reason": reason or None}


def mean_weight_off(mean: float, error: float) -> bool:
    """Whether the mean weight of episodes differs from 1 beyond chance: then the weights are not those of π."""
    return bool(abs(mean - 1) > 4 * error + 0.02)


def distribution(
    returns: np.ndarray, weights: np.ndarray, level: float, possible: tuple[float, float]
) -> dict[str, Any]:
    """Quantiles of the return of an episode and means of the worst returns (CVaR), with intervals; weights are self-normalised.

    The interval of a quantile inverts that of the distribution function. Beyond the returns in the log it reaches to what is
    `possible`. The interval of a CVaR is a studentised bootstrap. If the worst returns do not vary, it has room for a worse
    return that was not seen, with the probability of Clopper and Pearson's bound.
    """
    order, n = np.argsort(returns), len(returns)
    returns, w = returns[order], weights[order] / weights.sum()
    cumulative = np.cumsum(w)
    z = NormalDist().inv_cdf((1 + level) / 2)

    def at(share: float) -> float:
        return float(returns[min(int(np.searchsorted(cumulative, share)), n - 1)])

    def quantile(share: float) -> dict[str, float]:
        value = at(share)
        below = returns <= value
        # If many returns are equal or one weight is large, a larger share than `share` lies below the value, or even all. At the
        # share itself the variance is at least that of a binomial of the effective episodes.
        variance = max((w**2 * (below - w[below].sum()) ** 2).sum(), share * (1 - share) * (w**2).sum())
        half = z * float(np.sqrt(variance))
        low = at(share - half) if share > half else possible[0]
        high = at(share + half) if share + half < 1 else possible[1]
        return {"share": share, "value": value, "low": low, "high": high}

    def cvar(share: float) -> dict[str, float]:
        short = np.maximum(at(share) - returns, 0.0)
        mean = float(w @ short)
        psi = np.empty(n)
        psi[order] = n * w * (mean - short) / share
        influence = Influence(n)
        influence.add(psi)
        worst = Estimate(at(share) - mean / share, influence.groups(), 1 / float((w**2).sum()))
        interval = studentised_bootstrap(worst.value, worst.influence, level=level)
        unseen = min(if_alike(worst, possible, n).unseen(level) / share, 1.0)
        worse, _ = room_for(unseen, worst.value, possible)
        low, high = np.clip([interval.low - worse, interval.high], *possible)
        return {"share": share, "value": worst.value, "low": float(low), "high": float(high)}

    keep = np.unique(np.linspace(0, n - 1, 200).astype(int))
    return {
        "quantiles": [quantile(share) for share in (0.05, 0.25, 0.5, 0.75, 0.95)],
        "cvar": [cvar(share) for share in (0.05, 0.25)],
        "curve": {"returns": returns[keep], "share": cumulative[keep]},
    }


def pairs_of(visits: np.ndarray, model: Model) -> dict[str, Any]:
    """Diagnostics of pairs: those where π leaves the log, and those with the largest ratios."""
    a = visits.shape[1]
    left, ratios, visits = model.off_support_occupancy.ravel(), model.weights.ravel(), visits.ravel()
    worst, most = np.argsort(left)[::-1][:10], np.argsort(ratios)[::-1][:10]
    return {
        "ess_transitions": effective_transitions(ratios, visits),
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


def labelled(diagnostics: dict[str, Any], encoding: Mapping[str, list[str]] | None) -> dict[str, Any]:
    """The diagnostics with the log's own labels in the lists of states and actions."""
    for name in ("largest_weights", "unsupported_pairs", "largest_ratios"):
        for entry in diagnostics[name]:
            entry |= {kind: labels[entry[kind]] for kind, labels in (encoding or {}).items()}
    return diagnostics


def curves_of(
    sums: ImportanceSums, overlap: tuple[np.ndarray, np.ndarray] | None, check: Calibration | None
) -> dict[str, Any]:
    """Data of the figures. `overlap` has the shares of the log and of π in each pair, if they are known."""
    positive = sums.weights[sums.weights > 0]
    logs = np.log10(np.maximum(positive, 1e-12))
    ends = (logs.min() - 0.05, logs.max() + 0.05) if len(logs) else (-1.0, 1.0)
    heights, edges = np.histogram(logs, bins=40, range=ends)
    return {
        "ess_by_time": sums.ess_by_time(),
        "weight_histogram": {"edges": edges, "heights": heights, "zeros": int((sums.weights == 0).sum())},
        "overlap": None if overlap is None else {"behaviour": overlap[0], "target": overlap[1]},
        "calibration": None
        if check is None
        else {"predicted": check.predicted, "observed": check.observed, "weight": check.weight},
    }


def unreachable(counts: EmpiricalMDP, mu: np.ndarray | None, model: Model, how: str) -> float:
    """Discounted visits of π to pairs that the behaviour policy never takes, as far as its probabilities tell.

    If the logged probabilities of the actions taken in a state do not sum to 1, the log missed the others by chance. Estimated
    probabilities always sum to 1: pairs outside the log count as never taken.
    """
    if how == "estimated":
        return model.unsupported
    if mu is None:
        mean = mean_logged(counts)
        never = np.broadcast_to(1.0 - mean.sum(axis=1, keepdims=True) < 1e-3, mean.shape)
    else:
        never = mu <= 0
    return float(min((model.off_support_occupancy * never).sum(), model.unsupported))
