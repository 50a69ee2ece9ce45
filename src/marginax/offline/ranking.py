"""Several policies on one log: paired differences, and which to pick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marginax.offline.results import Evaluation, difference, plain
from marginax.statistics import Interval


@dataclass(frozen=True)
class Difference:
    """The value of one policy less that of another, from the same episodes.

    Attributes:
        first, second: names of the policies, the better one first.
        value: the difference.
        interval: with room for all pairs of policies together (Bonferroni).
        real: whether the interval leaves out zero.
    """

    first: str
    second: str
    value: float
    interval: Interval
    real: bool


@dataclass(frozen=True)
class Ranking:
    """Evaluations of several policies on one log, ranked.

    Attributes:
        policies: the evaluation of each, by name.
        order: names by the lower end of the recommended interval, largest first; those that nothing can be said of are last.
        best: the one to pick, or None.
        differences: of all pairs that have a recommended estimate.
        text: the ranking in words, one sentence in each entry.

    >>> import marginax as mx
    >>> log = mx.offline.Log.from_episodes(
    ...     [dict(states=[0, 0], actions=[a], rewards=[float(a)], terminal=True, behaviour=[0.5])
    ...      for a in [0, 1] * 50])
    >>> mx.offline.evaluate(log, {"bold": [[0.25, 0.75]], "shy": [[0.75, 0.25]]}).order
    ('bold', 'shy')
    """

    policies: dict[str, Evaluation]
    order: tuple[str, ...]
    best: str | None
    differences: tuple[Difference, ...]
    text: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """A dict of plain numbers, strings and lists: the evaluation of each policy under `policies`, beside the ranking."""
        differences = [
            {
                "first": d.first,
                "second": d.second,
                "value": d.value,
                "low": d.interval.low,
                "high": d.interval.high,
                "real": d.real,
            }
            for d in self.differences
        ]
        return {
            "policies": {name: one.to_dict() for name, one in self.policies.items()},
            "ranking": plain(
                {"order": self.order, "best": self.best, "differences": differences, "text": self.text}
            ),
        }


def rank(policies: Mapping[str, Evaluation], level: float, seed: int) -> Ranking:
    """Ranks policies by the lower ends of their recommended intervals, with paired differences between all of them."""
    told = {
        name: one.answers[one.verdict.estimator]
        for name, one in policies.items()
        if one.verdict.estimator is not None
    }
    order = sorted(told, key=lambda name: -told[name].interval.low)
    rest = [name for name in policies if name not in told]
    paired = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]
    each = 1 - (1 - level) / max(len(paired), 1)
    differences = [found for a, b in paired if (found := _difference(policies, a, b, each, seed)) is not None]
    text = []
    best = order[0] if order else None
    if best is None:
        text.append("The log cannot tell what any of the policies is worth.")
    else:
        low = told[best].interval.low
        text.append(f"Pick {best}: its interval has the largest lower end, {low:.4g} ({told[best].name}).")
        worse = [d.second for d in differences if d.first == best and d.interval.low > 0]
        open_ = [name for name in order[1:] if name not in worse]
        if worse:
            text.append(f"It is better than {', '.join(worse)} beyond chance.")
        if open_:
            text.append(f"The log does not show whether it is better or worse than {', '.join(open_)}.")
    if rest:
        text.append(f"The log cannot tell what {' or '.join(rest)} is worth.")
    return Ranking(dict(policies), (*order, *rest), best, tuple(differences), tuple(text))


def _difference(
    policies: Mapping[str, Evaluation], first: str, second: str, level: float, seed: int
) -> Difference | None:
    names = [str(policies[name].verdict.estimator) for name in (first, second)]
    found = [policies[name].estimates.get(used) for name, used in zip((first, second), names, strict=True)]
    if found[0] is None or found[1] is None:
        return None
    value = found[0].value - found[1].value
    interval = difference(found[0], found[1], level=level, seed=seed)
    return Difference(first, second, value, interval, 0.0 not in interval)
