"""Step 6, conclusion: the verdict, the difference to the policy that made the log, and the `Evaluation` that holds everything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from marginax.offline.diagnostics import STOPPED
from marginax.offline.importance import ImportanceSums
from marginax.offline.results import (
    ESTIMATORS,
    Answer,
    Estimate,
    Evaluation,
    Verdict,
    answer,
    difference,
    if_alike,
    within,
)
from marginax.offline.verdict import APART, Judgement, difference_score, disjoint, judge
from marginax.statistics import Interval


def conclude(
    answers: dict[str, Answer],
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    diagnostics: dict[str, Any],
    settings: dict[str, Any],
    *,
    preferred: tuple[str, ...],
    logged: Estimate | None = None,
    notes: Iterable[str],
    curves: dict[str, Any],
) -> Evaluation:
    """Judges the answers, compares the recommended one with the log's own policy, and collects everything in an `Evaluation`.

    Args:
        answers: by estimator.
        estimates: by estimator; networks have none.
        sums: of importance sampling; they have the returns of the log.
        diagnostics: of weights, support and states; what is found here is added.
        settings: the arguments of `evaluate`.
        preferred: estimators of the model family, best first.
        logged: value of the log's own policy, if the log is truncated and the value past truncation is known.
        notes: what was done to the data, and what was left out.
        curves: data of the figures.
    """
    level, seed = settings["level"], settings["seed"]
    possible = sums.value_range()
    average = if_alike(sums.behaviour(), possible, sums.episodes)
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    diagnostics["disagreeing"] = disagreeing(answers, estimates)
    judgement = judge(answers, estimates, diagnostics, preferred, seed)
    verdict = judgement.verdict
    if verdict.estimator is not None:
        answers, estimates = _widened(verdict.estimator, answers, estimates, judgement, possible)

    own, reason = average, ""
    if diagnostics["tail_behaviour"] > STOPPED:  # the average return stops at truncation
        if logged is None:
            reason = "the log is truncated, and its own value past that point is not known"
        else:
            own = if_alike(logged, possible, sums.episodes, sums.same)
            if diagnostics["markov_fails"]:
                reason = (
                    "the log is truncated, and its states leave out something that matters for what follows"
                )
    diagnostics["behaviour_value"] = None if reason else own.value

    advantage = None
    if verdict.estimator is not None:
        if verdict.estimator not in estimates:
            reason = f"{verdict.estimator} does not show how much single episodes contribute"
        if not reason:
            advantage = difference(estimates[verdict.estimator], own, level=level, seed=seed)
        verdict = compare(verdict, advantage, reason)
    return Evaluation(
        answers=answers,
        behaviour=within(answer("behaviour", average, level=level, seed=seed), possible),
        advantage=advantage,
        verdict=verdict,
        diagnostics=diagnostics,
        settings=settings,
        notes=(*notes, *_cut(answers, settings["reward_range"], possible)),
        curves=curves,
        estimates=estimates,
    )


def compare(verdict: Verdict, advantage: Interval | None, reason: str = "") -> Verdict:
    """The verdict with a sentence on whether π is better than μ. `advantage` is the interval of the difference of their values."""
    if advantage is None:
        sentence = f"Whether the policy is better than the one that made the log cannot be said: {reason}."
        return replace(verdict, text=(*verdict.text, sentence))
    better = "better" if advantage.low > 0 else "worse" if advantage.high < 0 else "cannot tell"
    sentence = f"The policy is {better} than the one that made the log"
    if better == "cannot tell":
        sentence = "The log does not show whether the policy is better or worse than the one that made it"
    sentence += f" (difference {advantage.low:.4g} to {advantage.high:.4g})."
    return replace(verdict, text=(*verdict.text, sentence), better=better)


def disagreeing(answers: Mapping[str, Answer], estimates: Mapping[str, Estimate]) -> list[tuple[str, str]]:
    """Pairs of estimators that disagree beyond chance: in a paired test of their influences, or because their intervals are disjoint."""
    names = list(answers)
    found = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            z = difference_score(estimates.get(first), estimates.get(second))
            if disjoint(answers[first], answers[second]) or (z is not None and abs(z) > 2 * APART):
                found.append((first, second))
    return found


def _widened(
    name: str,
    answers: Mapping[str, Answer],
    estimates: Mapping[str, Estimate],
    judgement: Judgement,
    possible: tuple[float, float],
) -> tuple[dict[str, Answer], dict[str, Estimate]]:
    """Answers and estimates, the recommended ones widened as the verdict says.

    The estimate gets the same room as the answer. So differences to the log's own policy and to other policies have it as well.
    """
    answers, estimates = dict(answers), dict(estimates)
    found, other = answers[name], judgement.other
    (below, above), interval = judgement.reach, found.interval.widened(*judgement.reach)
    if other is not None:
        interval = interval.holding(answers[other].interval)
    answers[name] = replace(found, interval=within(replace(found, interval=interval), possible).interval)
    if name in estimates:
        one = estimates[name]
        gap = 0.0 if other is None else answers[other].value - one.value
        room = one.room[0] + below + max(-gap, 0.0), one.room[1] + above + max(gap, 0.0)
        estimates[name] = replace(one, room=room)
    return answers, estimates


def _cut(
    answers: Mapping[str, Answer], rewards: tuple[float, float], possible: tuple[float, float]
) -> list[str]:
    """A note on estimates that went beyond what the rewards permit."""
    beyond = [a.name for a in answers.values() if a.beyond]
    if not beyond:
        return []
    return [
        f"{', '.join(beyond)} went beyond what rewards from {rewards[0]:.4g} to {rewards[1]:.4g} permit and "
        f"{'were' if len(beyond) > 1 else 'was'} cut to {possible[0]:.4g} to {possible[1]:.4g}"
    ]
