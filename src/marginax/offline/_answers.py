"""What an evaluation answers, in plain dataclasses that turn into JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from marginax.offline._estimates import Estimate
from marginax.offline._intervals import Interval, bootstrap

ESTIMATORS = {
    "trajectory-is": ("importance sampling", "stops"),
    "per-decision-is": ("importance sampling", "stops"),
    "weighted-is": ("importance sampling", "stops"),
    "weighted-per-decision-is": ("importance sampling", "stops"),
    "doubly-robust": ("doubly robust", "bootstraps"),
    "weighted-doubly-robust": ("doubly robust", "bootstraps"),
    "certainty-equivalence": ("marginalized", "bootstraps"),
    "saddle-point": ("marginalized", "bootstraps"),
    "fenchel": ("marginalized", "bootstraps"),
    "regression": ("marginalized", "stops"),
    "fqe-one-step": ("fitted Q", "bootstraps"),
    "fqe-retrace": ("fitted Q", "bootstraps"),
    "fqe-marginalized": ("fitted Q", "bootstraps"),
}
"""The estimators by name: their kind, and what each does at a truncated step."""


@dataclass(frozen=True)
class Answer:
    """One estimator's answer.

    Attributes:
        name: see `ESTIMATORS`.
        value: the estimate of π's discounted value from the log's starts.
        interval: 95% interval over episodes, widened by what support leaves open.
        kind: family of the estimator.
        truncation: `stops` (rewards after a truncated step count as zero) or `bootstraps`.
        ess: effective sample size, in units of `ess_of`.
        bound: an interval with guaranteed coverage, where one applies.
        error: standard error.

    >>> answer("per-decision-is", Estimate(1.0, np.array([-1.0, 0.0, 1.0]))).kind
    'importance sampling'
    """

    name: str
    value: float
    interval: Interval
    kind: str
    truncation: str
    ess: float | None = None
    ess_of: str = "episodes"
    bound: Interval | None = None
    error: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Which estimate to trust and why, or that the data cannot tell.

    Attributes:
        status: `trust`, `caution` or `cannot tell`.
        estimator: the estimate recommended, or None.
        text: the verdict in words, a sentence an entry.
        better: `better`, `worse` or `cannot tell`: π against the policy that made the log.

    >>> Verdict("cannot tell", None, ("No overlap.",)).estimator is None
    True
    """

    status: str
    estimator: str | None
    text: tuple[str, ...]
    better: str = "cannot tell"


@dataclass(frozen=True)
class Evaluation:
    """Everything `evaluate` found out.

    Attributes:
        answers: one for each estimator, by name.
        behaviour: the plain average return of the log, with its interval.
        advantage: interval of the value of π minus that of μ, by the recommended estimator.
        verdict: in words.
        diagnostics: overlap, weights, support, truncation, calibration (numbers and short lists).
        settings: what was asked.
        notes: what was done to the data and what was left out.

    >>> import marginax as mx
    >>> log = mx.offline.Log.from_episodes(
    ...     [dict(states=[0, 0], actions=[a], rewards=[float(a)], terminal=True, behaviour=[0.5])
    ...      for a in [0, 1] * 20])
    >>> result = mx.offline.evaluate(log, [[0.25, 0.75]], discount=0.9)
    >>> round(result.answers["per-decision-is"].value, 3), round(result.behaviour.value, 3)
    (0.75, 0.5)
    """

    answers: dict[str, Answer]
    behaviour: Answer
    advantage: Interval | None
    verdict: Verdict
    diagnostics: dict[str, Any]
    settings: dict[str, Any]
    notes: tuple[str, ...] = ()
    curves: dict[str, Any] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain numbers, strings and lists, ready for JSON (infinities become null)."""
        return plain(asdict(self))


def plain(value: Any) -> Any:
    """Plain Python numbers, lists and dicts; what is not finite becomes None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def answer(
    name: str,
    estimate: Estimate,
    *,
    level: float = 0.95,
    seed: int = 0,
    open_below: float = 0.0,
    open_above: float = 0.0,
    bound: Interval | None = None,
) -> Answer:
    """An estimate with its interval, widened by what is not identified below and above."""
    kind, truncation = ESTIMATORS.get(name, ("average return", "stops"))
    interval = bootstrap(estimate.value, estimate.influence, level=level, seed=seed)
    n = len(estimate.influence)
    error = float(estimate.influence.std(ddof=1) / np.sqrt(n)) if n > 1 else float("inf")
    return Answer(
        name=name,
        value=estimate.value,
        interval=Interval(
            interval.low - open_below - estimate.open, interval.high + open_above + estimate.open, level
        ),
        kind=kind,
        truncation=truncation,
        ess=estimate.ess,
        ess_of=estimate.of,
        bound=bound,
        error=error,
    )
