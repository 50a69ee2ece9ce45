"""The verdict: rules that read the diagnostics, in the order a careful person would."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from marginax.offline.importance import FEW
from marginax.offline.results import Answer, Verdict
from marginax.statistics import Interval

LOST = 0.2  # discounted probability of leaving the support above which nothing is said
_MODELS = ("marginalized", "fitted Q")  # kinds that rest on the states alone, once truncation is bootstrapped
FAINT = 0.01  # the same, below which it is not worth a word


def judge(
    answers: dict[str, Answer],
    diagnostics: dict[str, Any],
    preferred: tuple[str, ...],
) -> Verdict:
    """Which estimate to trust, from answers and diagnostics.

    Args:
        answers: by estimator.
        diagnostics: `unsupported`, `ess`, `mean_weight`, `mean_weight_error`, `tail_target`,
            `tail_behaviour`, `behaviour_suspicious`, `span` (range of the returns in the log).
        preferred: bootstrapping estimators to recommend, best first.
    """
    text: list[str] = []
    lost = float(diagnostics["unsupported"])
    if diagnostics.get("behaviour_suspicious"):
        text.append(
            "The behaviour probabilities do not match how often the actions were taken: "
            "importance sampling and doubly robust cannot be relied on."
        )
    weights_fine = (
        diagnostics["ess"] >= FEW
        and abs(diagnostics["mean_weight"] - 1) <= 4 * diagnostics["mean_weight_error"] + 0.02
        and not diagnostics.get("behaviour_suspicious")
    )
    if lost > LOST:
        text.append(
            f"With (discounted) probability {lost:.0%} the policy takes actions that the log never took in those "
            "states: the data cannot tell what it is worth. Collect data nearer to this policy."
        )
        return Verdict("cannot tell", None, tuple(text))
    model = next((answers[name] for name in preferred if name in answers), None)
    robust = next(
        (
            answers[name]
            for name in ("weighted-doubly-robust", "weighted-per-decision-is", "per-decision-is")
            if name in answers
        ),
        None,
    )
    hidden = float(diagnostics["tail_target" if diagnostics["ess"] >= FEW else "tail_behaviour"])
    stops = hidden > FAINT
    checkable = robust if robust is not None and (robust.truncation == "bootstraps" or not stops) else None
    chosen = model if model is not None else (checkable if weights_fine else None)
    if model is not None and checkable is not None and weights_fine:
        chosen = min(model, checkable, key=lambda a: a.interval.width)
    if chosen is None:
        text.append(
            f"The weights leave {diagnostics['ess']:.0f} effective episodes, too few for importance sampling alone."
        )
        return Verdict("cannot tell", None, tuple(text))
    status = "trust"
    span = float(diagnostics["span"])
    if span > 0 and chosen.interval.width > span:
        text.append(
            f"Even the best interval, {chosen.interval.low:.4g} to {chosen.interval.high:.4g}, is wider than the range "
            "of returns in the log: more episodes are needed."
        )
        return Verdict("cannot tell", None, tuple(text))
    if model is not None and checkable is not None and weights_fine:
        if _apart(model, checkable):
            text.append(
                f"{model.name} ({model.value:.4g}) and {checkable.name} ({checkable.value:.4g}) disagree beyond "
                "chance. Either the states leave out something that matters (then only importance sampling is "
                "right), or the behaviour probabilities are wrong (then only the former is)."
            )
            return Verdict("cannot tell", None, tuple(text))
        other = checkable if chosen is model else model
        text.append(
            f"Take {chosen.name}: it has the narrower interval, and {other.name}, which rests on other assumptions, "
            f"agrees ({other.value:.4g})."
        )
    elif model is not None:
        status = "caution"
        why = (
            f"only {diagnostics['ess']:.0f} effective episodes carry importance sampling"
            if not diagnostics.get("behaviour_suspicious")
            else "the behaviour probabilities look wrong"
        )
        text.append(
            f"Take {model.name}, if the states hold all that matters for what happens next: nothing in the log can "
            f"check it, because {why}."
        )
    else:
        text.append(f"Take {chosen.name}: {diagnostics['ess']:.0f} effective episodes stand behind it.")
    apart = [
        a.name
        for a in answers.values()
        if a.kind in _MODELS and a.truncation == "bootstraps" and chosen is model and _apart(a, chosen)
    ]
    if apart:
        status = "caution"
        text.append(
            f"{', '.join(apart)} should meet {chosen.name} and {'do' if len(apart) > 1 else 'does'} not: what was fitted "
            "to the log is off by more than the intervals say."
        )
    if lost > FAINT:
        status = "caution"
        text.append(
            f"The policy leaves what the log has seen with (discounted) probability {lost:.1%}; "
            + (
                "the interval allows for any value seen elsewhere."
                if chosen is model
                else "there this estimate rests on the behaviour probabilities being right."
            )
        )
    if stops:
        text.append(
            f"Truncated episodes hide a share {hidden:.1%} of the discounted future; estimators marked † in the table "
            "('stops') leave it out."
        )
    return Verdict(status, chosen.name, tuple(text))


def compare(verdict: Verdict, advantage: Interval | None) -> Verdict:
    """The verdict with a sentence on π against μ, from the interval of the difference of their values."""
    if advantage is None:
        return verdict
    better, words = "cannot tell", "not told apart from"
    if advantage.low > 0:
        better, words = "better", "better than"
    elif advantage.high < 0:
        better, words = "worse", "worse than"
    sentence = f"The policy is {words} the one that made the log (difference {advantage.low:.4g} to {advantage.high:.4g})."
    return replace(verdict, text=(*verdict.text, sentence), better=better)


def _apart(a: Answer, b: Answer) -> bool:
    overlap = min(a.interval.high, b.interval.high) - max(a.interval.low, b.interval.low)
    return overlap < 0


def agreement(answers: dict[str, Answer]) -> list[tuple[str, str]]:
    """Pairs of estimators whose intervals do not meet."""
    names = list(answers)
    return [
        (first, second)
        for i, first in enumerate(names)
        for second in names[i + 1 :]
        if _apart(answers[first], answers[second])
    ]
