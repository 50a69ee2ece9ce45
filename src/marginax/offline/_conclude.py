"""From estimates to an evaluation: what logs of indices and logs of observations have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from marginax.offline._answers import ESTIMATORS, Answer, Evaluation, answer
from marginax.offline._behaviour import Calibration
from marginax.offline._estimates import Estimate
from marginax.offline._importance import Weighted
from marginax.offline._intervals import Interval, bootstrap, concentration
from marginax.offline._networks import Training
from marginax.offline._verdict import agreement, compare, judge

ROBUST = ("doubly-robust", "weighted-doubly-robust")


@dataclass(frozen=True)
class Request:
    """What was asked of `marginax.offline.evaluate`; see there."""

    discount: float
    estimators: tuple[str, ...]
    behaviour: Any
    reward_range: tuple[float, float] | None
    level: float
    seed: int
    progress: Callable[[str, Iterable[Any]], Iterator[Any]]
    training: Training

    def wants(self, *names: str) -> list[str]:
        """Those of `names` that were asked for."""
        return [name for name in names if name in self.estimators]

    def rewards(self, least: float, largest: float) -> tuple[float, float]:
        """The range of rewards: as given, if it holds those of the log, else the log's own."""
        given = self.reward_range or (least, largest)
        if not given[0] <= least <= largest <= given[1]:
            raise ValueError(
                f"reward_range {given} does not contain the log's rewards, "
                f"which go from {least:g} to {largest:g}"
            )
        return given


def with_zero(rewards: tuple[float, float]) -> tuple[float, float]:
    """The range of rewards with 0 in it, which is what ended episodes earn."""
    return min(rewards[0], 0.0), max(rewards[1], 0.0)


def answers_of(
    estimates: dict[str, Estimate], weighted: Weighted, request: Request, how: str, opened: Interval
) -> dict[str, Answer]:
    """Intervals of all estimates, `opened` for those that rest on a model, and the bound where it applies."""
    bound = None
    if how == "logged":
        least, largest = (reward / (1 - request.discount) for reward in weighted.reward_range)
        bound = concentration(weighted.lower, weighted.upper, (least, largest), level=request.level)
    answers = {}
    for name, estimate in estimates.items():
        model_based = ESTIMATORS[name][1] == "bootstraps" and name not in ROBUST
        answers[name] = answer(
            name,
            estimate,
            level=request.level,
            seed=request.seed,
            open_below=-opened.low if model_based else 0.0,
            open_above=opened.high if model_based else 0.0,
            bound=bound if name == "per-decision-is" else None,
        )
    return answers


def conclude(
    answers: dict[str, Answer],
    estimates: dict[str, Estimate],
    weighted: Weighted,
    diagnostics: dict[str, Any],
    request: Request,
    *,
    preferred: tuple[str, ...],
    opened: Interval,
    settings: dict[str, Any],
    notes: Iterable[str],
    curves: dict[str, Any],
) -> Evaluation:
    """The verdict on the answers, the difference to the log's own policy, and all of it together."""
    level, seed = request.level, request.seed
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    logged = weighted.behaviour()
    diagnostics["disagreeing"] = agreement(answers)
    verdict = judge(answers, diagnostics, preferred)
    advantage = None
    comparable = diagnostics["tail_behaviour"] <= 0.01  # else the log's own average stops at truncation
    if verdict.estimator in estimates and comparable:
        chosen = estimates[verdict.estimator]
        difference = chosen.influence - logged.influence
        advantage = bootstrap(chosen.value - logged.value, difference, level=level, seed=seed)
        if verdict.estimator in preferred:
            advantage = Interval(advantage.low + opened.low, advantage.high + opened.high, level)
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", logged, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage),
        diagnostics=diagnostics,
        settings={**settings, "discount": request.discount, "level": level, "seed": seed},
        notes=tuple(notes),
        curves=curves,
    )


def diagnostics_of(weighted: Weighted, how: str, check: Calibration | None) -> dict[str, Any]:
    """What the weights of episodes and the behaviour probabilities look like."""
    weights, n = weighted.weights, weighted.episodes
    ratio, ratio_error = weighted.mean_ratio()
    return {
        "episodes": n,
        "transitions": weighted.steps,
        "longest": weighted.longest,
        "truncated": weighted.truncated,
        "tail_behaviour": weighted.tail_behaviour / n,
        "tail_target": weighted.tail_target / n,
        "ess": weighted.ess(),
        "tail_index": weighted.tail_index(),
        "mean_weight": float(weights.mean()),
        "mean_weight_error": float(weights.std(ddof=1) / np.sqrt(n)),
        "mean_ratio": ratio,
        "mean_ratio_error": ratio_error,
        "largest_weights": [
            {"weight": w, "episode": name, "step": step, "state": state, "action": action}
            for w, name, step, state, action in weighted.top
        ],
        "behaviour": how,
        "behaviour_deviation": None if check is None else check.deviation,
        "behaviour_error": None if check is None else check.error,
        "behaviour_suspicious": check is not None and check.suspicious,
        "span": weighted.return_range[1] - weighted.return_range[0],
    }


def curves_of(
    weighted: Weighted, seen: np.ndarray, target: np.ndarray, check: Calibration | None
) -> dict[str, Any]:
    """Data behind the plots of the page: weights, and the shares of the log and of π in each pair."""
    positive = weighted.weights[weighted.weights > 0]
    logs = np.log10(np.maximum(positive, 1e-12)) if len(positive) else np.zeros(1)
    heights, edges = np.histogram(logs, bins=40, range=(logs.min() - 0.05, logs.max() + 0.05))
    zeros = int((weighted.weights == 0).sum())
    return {
        "ess_by_time": weighted.ess_by_time(),
        "weight_histogram": {"edges": edges, "heights": heights, "zeros": zeros},
        "overlap": {"behaviour": seen, "target": target},
        "calibration": None
        if check is None
        else {"said": check.said, "seen": check.seen, "weight": check.weight},
    }
