"""Step 6, verdict: rules that read the answers and diagnostics, in the order a careful person would.

Estimators rest on different assumptions, and the rules choose among three families:

| family | needs |
|---|---|
| model: certainty equivalence, fitted Q | the states hold all that matters; π stays on pairs that the log has seen |
| states: state ratios, doubly robust or not | the states hold all that matters; right behaviour probabilities |
| episodes: importance sampling, doubly robust | right behaviour probabilities; enough episodes of weight |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from marginax.offline.diagnostics import STOPPED
from marginax.offline.importance import FAINT, FEW, ImportanceSums
from marginax.offline.results import (
    ESTIMATORS,
    STATE_RATIOS,
    Answer,
    Estimate,
    Evaluation,
    Verdict,
    answer,
    within,
)
from marginax.statistics import Interval, studentised_bootstrap

LOST = 0.2  # discounted probability of leaving the support above which nothing is said
NARROWER = 0.6  # a width relative to the usual choice's from which another is taken: the narrowest of several is often too narrow
SPARSE = (
    10.0  # effective episodes that will do if the states leave something out: the interval has room for few
)
APART = 1.96  # standard errors of the difference of two estimates on the same episodes
EPISODES = ("weighted-doubly-robust", "weighted-per-decision-is", "per-decision-is")
_MODELS = ("marginalized", "fitted Q")  # kinds that rest on the states, once truncation is bootstrapped


def judge(
    answers: Mapping[str, Answer],
    estimates: Mapping[str, Estimate],
    diagnostics: Mapping[str, Any],
    preferred: tuple[str, ...],
    room: float = 0.0,
    seed: int = 0,
) -> tuple[Verdict, tuple[float, float]]:
    """Which estimate to trust, from answers and diagnostics, and how far its interval is to be widened below and above.

    It is widened to the level at which the intervals of all families that it was chosen from hold together, so that the choice costs
    no coverage; and where two families contradict each other and nothing says which is wrong, so that it holds both intervals.

    Args:
        answers: by estimator.
        estimates: values with influences, for paired tests.
        diagnostics: as `marginax.offline.evaluate` returns them.
        preferred: estimators of the model family, best first.
        room: what support leaves open in the model family's values.
        seed: of the bootstrap.
    """
    d, text = diagnostics, []
    lost, unreachable = float(d["unsupported"]), float(d.get("unreachable", d["unsupported"]))
    suspicious, not_markov = bool(d.get("behaviour_suspicious")), bool(d.get("markov_fails"))
    if suspicious:
        text.append(
            "The behaviour probabilities do not match how often the actions were taken: "
            "importance sampling and doubly robust cannot be relied on."
        )
    weights_fine = (
        d["ess"] >= FEW and abs(d["mean_weight"] - 1) <= 4 * d["mean_weight_error"] + 0.02 and not suspicious
    )
    if min(lost, unreachable) > LOST:
        text.append(
            f"With (discounted) probability {lost:.0%} the policy takes actions that the log never took in those "
            "states: the data cannot tell what it is worth. Collect data nearer to this policy."
        )
        return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0)
    hidden = float(d["tail_target" if d["ess"] >= FEW else "tail_behaviour"])
    stops = hidden > FAINT
    possible = [answers[n] for n in EPISODES if n in answers]
    possible = [a for a in possible if a.truncation == "bootstraps" or not stops]
    episodes = possible[0] if possible and weights_fine else None
    spare = (
        possible[0] if possible and not suspicious and d["ess"] >= SPARSE else None
    )  # if nothing else is left
    model = next((answers[n] for n in preferred if n in answers), None) if lost <= LOST else None
    states = [answers[n] for n in STATE_RATIOS if n in answers and not suspicious]
    both = [a for a in states if a.ess is not None and a.ess >= FEW]
    if lost > LOST:  # the doubly robust form needs a critic, and the critic needs support
        both.reverse()
    states = both[:1]
    resting = [a for a in (model, *states) if a is not None]  # on the states

    apart = None
    if model is not None and episodes is not None:
        z = difference_score(estimates.get(model.name), estimates.get(episodes.name), room)
        apart = z is not None and abs(z) > APART
        if z is None:
            apart = _disjoint(model, episodes)
    status, compared = "trust", 1
    if (not_markov or apart) and resting:
        if not_markov:
            text.append(
                "The states leave out something that matters: what came before a step predicts what follows it "
                f"({d['markov_score']:.0f} standard deviations beyond chance)."
            )
        if apart and model is not None and episodes is not None:
            text.append(
                f"{model.name} ({model.value:.4g}) and {episodes.name} ({episodes.value:.4g}) disagree beyond chance on the "
                "same episodes."
            )
            if not not_markov:
                text.append(
                    "Either the states leave out something that matters (then only importance sampling is right), or the "
                    "behaviour probabilities are wrong (then only the former is)."
                )
        if spare is None:
            text.append(
                "Only importance sampling does without that, and "
                + (
                    "its probabilities look wrong."
                    if suspicious
                    else f"{d['ess']:.0f} effective episodes are too few for it."
                )
            )
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0)
        status, chosen = "caution", spare
        text.append(
            f"Take {spare.name}, which does not rest on the states: {d['ess']:.0f} effective episodes."
        )
    else:
        candidates = [*resting, *([episodes] if episodes is not None else [])]
        if not candidates:
            text.append(
                f"The weights leave {d['ess']:.0f} effective episodes, too few for importance sampling alone."
            )
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0)
        usual = model if model is not None and lost <= FAINT else (*states, *candidates)[0]
        chosen = min(candidates, key=lambda a: a.interval.width * (1.0 if a is usual else 1 / NARROWER))
        compared = len(candidates)
        if lost > LOST and spare is not None:
            # ratios of states let what they have seen stand for the actions that are missing; weights show what is missing
            status, chosen = "caution", spare
            text.append(f"Take {spare.name}: {d['ess']:.0f} effective episodes stand behind it.")
    span, other = float(d["span"]), None
    if span > 0 and chosen.interval.width > span:
        if spare is None or spare.interval.width > span:
            text.append(
                f"Even the best interval, {chosen.interval.low:.4g} to {chosen.interval.high:.4g}, is wider than the range "
                "of returns in the log: more episodes are needed."
            )
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0)
        text.append(
            f"Take {spare.name}: the interval of {chosen.name} is wider than the range of returns in the log."
        )
        status, chosen = "caution", spare
    if apart and not not_markov and chosen is spare:
        other = model
    elif states and chosen is states[0] and len(both) > 1:
        z = difference_score(estimates.get(chosen.name), estimates.get(both[1].name))
        other = both[1] if z is not None and abs(z) > APART else None
    reach = _for_all(estimates.get(chosen.name), chosen.interval.level, compared, seed)
    if other is not None:
        own, wide = chosen.interval, other.interval
        reach = max(own.low - wide.low, reach[0]), max(wide.high - own.high, reach[1])
        text.append(
            f"The interval of {chosen.name} is widened to hold that of {other.name}, which differs beyond chance and may be "
            "the right one."
        )
    if status == "trust":
        status = _agreeing(text, chosen, model, states, episodes, d)
    off = [
        a.name
        for a in answers.values()
        if a.kind in _MODELS and a.truncation == "bootstraps" and chosen is model and _disjoint(a, chosen)
    ]
    if off:
        status = "caution"
        text.append(
            f"{', '.join(off)} should meet {chosen.name} and {'do' if len(off) > 1 else 'does'} not: what was fitted to the log "
            "is off by more than the intervals say."
        )
    if lost > FAINT:
        status = "caution"
        text.append(
            f"The policy leaves what the log has seen with (discounted) probability {lost:.1%}; "
            + (
                "the interval allows for any value that the rewards permit there."
                if chosen is model
                else "there this estimate rests on the behaviour probabilities being right."
            )
        )
    if stops:
        text.append(
            f"Truncated episodes hide a share {hidden:.1%} of the discounted future; estimators marked † in the table "
            "('stops') leave it out."
        )
    return Verdict(status, chosen.name, tuple(text)), reach


def _for_all(estimate: Estimate | None, level: float, many: int, seed: int) -> tuple[float, float]:
    """How much wider below and above an interval is at the level at which `many` of its kind hold together (Bonferroni)."""
    if estimate is None or many < 2:
        return 0.0, 0.0
    one, every = (
        studentised_bootstrap(estimate.value, estimate.influence, level=x, seed=seed)
        for x in (level, 1 - (1 - level) / many)
    )
    return max(one.low - every.low, 0.0), max(every.high - one.high, 0.0)


def _agreeing(
    text: list[str],
    chosen: Answer,
    model: Answer | None,
    states: list[Answer],
    episodes: Answer | None,
    d: Mapping[str, Any],
) -> str:
    """Says what stands behind the choice when nothing speaks against it; `trust` if estimates of two families agree."""
    if chosen is episodes:
        others = [a for a in (model, *states) if a is not None]
    else:
        others = [a for a in (episodes,) if a is not None]
    if others:
        text.append(
            f"Take {chosen.name}: {others[0].name}, which rests on other assumptions, agrees ({others[0].value:.4g})."
        )
        return "trust"
    if chosen is episodes:
        text.append(f"Take {chosen.name}: {d['ess']:.0f} effective episodes stand behind it.")
        return "trust"
    why = (
        "the behaviour probabilities look wrong"
        if d.get("behaviour_suspicious")
        else f"only {d['ess']:.0f} effective episodes carry importance sampling"
    )
    tested = d.get("markov_degrees", 0) > 0
    text.append(
        f"Take {chosen.name}, if the states hold all that matters for what happens next"
        + (": a test of that found nothing, but" if tested else ": nothing in the log can check it, because")
        + f" {why}."
    )
    return "caution"


def compare(verdict: Verdict, advantage: Interval | None, reason: str = "") -> Verdict:
    """The verdict with a sentence on π against μ: from the interval of the difference of their values, or why there is none."""
    if advantage is None:
        sentence = f"Whether it is better than the policy that made the log cannot be said: {reason}."
        return replace(verdict, text=(*verdict.text, sentence)) if reason else verdict
    better, words = "cannot tell", "not told apart from"
    if advantage.low > 0:
        better, words = "better", "better than"
    elif advantage.high < 0:
        better, words = "worse", "worse than"
    sentence = f"The policy is {words} the one that made the log (difference {advantage.low:.4g} to {advantage.high:.4g})."
    return replace(verdict, text=(*verdict.text, sentence), better=better)


def difference_score(a: Estimate | None, b: Estimate | None, room: float = 0.0) -> float | None:
    """How many standard errors two estimates on the same episodes lie apart, beyond what both leave open; signed."""
    if a is None or b is None or len(a.influence) != len(b.influence):
        return None
    psi = a.influence - b.influence
    error = float(psi.std(ddof=1) / np.sqrt(len(psi)))
    gap = a.value - b.value
    beyond = max(abs(gap) - room - a.bias_bound - b.bias_bound - 1e-6 * max(1.0, abs(a.value)), 0.0)
    return float(np.copysign(beyond / max(error, 1e-300), gap)) if beyond else 0.0


def disagreeing(answers: Mapping[str, Answer], estimates: Mapping[str, Estimate]) -> list[tuple[str, str]]:
    """Pairs of estimators that differ beyond chance: by a paired test where there are influences, else by their intervals."""
    names = list(answers)
    found = []
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            z = difference_score(estimates.get(first), estimates.get(second))
            if _disjoint(answers[first], answers[second]) or (z is not None and abs(z) > 2 * APART):
                found.append((first, second))
    return found


def _disjoint(a: Answer, b: Answer) -> bool:
    return min(a.interval.high, b.interval.high) < max(a.interval.low, b.interval.low)


def conclude(
    answers: dict[str, Answer],
    estimates: dict[str, Estimate],
    sums: ImportanceSums,
    diagnostics: dict[str, Any],
    settings: dict[str, Any],
    *,
    preferred: tuple[str, ...],
    room: tuple[float, float] = (0.0, 0.0),
    logged: Estimate | None = None,
    notes: Iterable[str],
    curves: dict[str, Any],
) -> Evaluation:
    """The verdict on the answers, the difference to the log's own policy (`logged`, where the plain average is not its value),
    and all of it together."""
    level, seed = settings["level"], settings["seed"]
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    own = average = sums.behaviour()
    diagnostics |= {"disagreeing": disagreeing(answers, estimates), "room": room}
    verdict, reach = judge(answers, estimates, diagnostics, preferred, max(room), seed)
    reason, advantage = "", None
    if verdict.estimator is not None:
        found = answers[verdict.estimator]
        wider = replace(found, interval=found.interval.widened(*reach))
        answers[found.name] = replace(found, interval=within(wider, sums.value_range()).interval)
    if diagnostics["tail_behaviour"] > STOPPED:  # the plain average stops at truncation
        own = logged or average
        if logged is None:
            reason = "the log is truncated, and its own value past that point is not known"
        elif diagnostics["markov_fails"]:
            reason = "the log is truncated, and its states do not tell what follows"
    diagnostics["behaviour_value"] = None if reason else own.value
    chosen = estimates.get(verdict.estimator or "")
    if verdict.estimator is None:
        reason = ""
    elif chosen is None:
        reason = f"{verdict.estimator} has no influence of single episodes"
    elif not reason:
        gap, psi = chosen.value - own.value, chosen.influence - own.influence
        advantage = studentised_bootstrap(gap, psi, level=level, seed=seed).widened(*reach)
        if verdict.estimator in preferred:
            advantage = advantage.widened(*room)
    notes = list(notes)
    if beyond := [a.name for a in answers.values() if a.beyond]:
        (least, largest), (low, high) = settings["reward_range"], sums.value_range()
        notes.append(
            f"{', '.join(beyond)} went beyond what rewards from {least:.4g} to {largest:.4g} permit and "
            f"{'were' if len(beyond) > 1 else 'was'} cut to {low:.4g} to {high:.4g}"
        )
    return Evaluation(
        answers=answers,
        behaviour=answer("behaviour", average, level=level, seed=seed),
        advantage=advantage,
        verdict=compare(verdict, advantage, reason),
        diagnostics=diagnostics,
        settings=settings,
        notes=tuple(notes),
        curves=curves,
        estimates=estimates,
    )
