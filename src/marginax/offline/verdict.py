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
    difference,
    effective,
    if_alike,
    open_difference,
    room_for,
    within,
)
from marginax.statistics import Interval, studentised_bootstrap

LOST = 0.2  # discounted probability of leaving the support above which nothing is said
CHOSEN = 0.05  # share of steps that were set aside, others of which were kept, above which nothing is said
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
    seed: int = 0,
) -> tuple[Verdict, tuple[float, float], str | None]:
    """Which estimate to trust, from answers and diagnostics; how far its interval is to be widened below and above; and another
    estimate that its interval has to hold as well.

    It is widened to the level at which the intervals of all families that it was chosen from hold together, so that the choice costs
    no coverage. It holds another where two contradict each other and nothing says which is wrong.

    Args:
        answers: by estimator.
        estimates: values with influences and what they leave open, for paired tests.
        diagnostics: as `marginax.offline.evaluate` returns them.
        preferred: estimators of the model family, best first.
        seed: of the bootstrap.
    """
    d, text = diagnostics, []
    lost = float(d["unsupported"] or 0.0)  # None: not known
    unreachable = float(d.get("unreachable", lost))
    suspicious, not_markov = bool(d.get("behaviour_suspicious")), bool(d.get("markov_fails"))
    if suspicious:
        text.append(
            "The behaviour probabilities do not match how often the actions were taken: "
            "importance sampling and doubly robust cannot be relied on."
        )
    weights_fine = d["ess"] >= FEW and not _off_one(d) and not suspicious
    if min(lost, unreachable) > LOST:
        text.append(
            f"With (discounted) probability {lost:.0%} the policy takes actions that the log never took in those "
            "states: the data cannot tell what it is worth. Collect data nearer to this policy."
        )
        return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0), None
    aside = float(d.get("set_aside", 0.0))
    if aside > CHOSEN:
        text.append(f"{_set_aside(aside)} The data cannot tell what that hides. Log the final observation.")
        return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0), None
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
        z = difference_score(estimates.get(model.name), estimates.get(episodes.name))
        apart = z is not None and abs(z) > APART
        if z is None:
            apart = _disjoint(model, episodes)
    status, compared, take = "trust", 1, ""
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
            few = bool(possible) and not suspicious
            why = f"{effective(d['ess'])} are too few for it" if few else _why_not(answers, d, stops)
            text.append(f"Only importance sampling does not need this assumption, and {why}.")
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0), None
        status, chosen = "caution", spare
        take = f"Take {spare.name}, which does not rest on the states: {effective(d['ess'])}."
    else:
        candidates = [*resting, *([episodes] if episodes is not None else [])]
        if not candidates:
            text.append(_nothing_left(answers, d, stops))
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0), None
        usual = model if model is not None and lost <= FAINT else (*states, *candidates)[0]
        chosen = min(candidates, key=lambda a: a.interval.width * (1.0 if a is usual else 1 / NARROWER))
        compared = len(candidates)
        if lost > LOST and spare is not None:
            # ratios of states let what they have seen stand for the actions that are missing; weights show what is missing
            status, chosen = "caution", spare
            take = f"Take {spare.name}: it has {effective(d['ess'])}."
    span, other = float(d["span"]), None
    if _too_wide(chosen, span):
        if spare is None or _too_wide(spare, span):
            needed = "more episodes are needed"
            if not np.isfinite(chosen.interval.width):
                needed = "a horizon or a discount below 1 would bound what rewards permit"
            text.append(
                f"Even the best interval, {chosen.interval.low:.4g} to {chosen.interval.high:.4g}, is wider than the range "
                f"of returns in the log: {needed}."
            )
            return Verdict("cannot tell", None, tuple(text)), (0.0, 0.0), None
        take = (
            f"Take {spare.name}: the interval of {chosen.name} is wider than the range of returns in the log."
        )
        status, chosen = "caution", spare
    if take:
        text.append(take)
    if apart and not not_markov and chosen is spare:
        other = model
    elif states and chosen is states[0] and len(both) > 1:
        z = difference_score(estimates.get(chosen.name), estimates.get(both[1].name))
        other = both[1] if z is not None and abs(z) > APART else None
    reach = _for_all(estimates.get(chosen.name), chosen.interval.level, compared, seed)
    if other is not None:
        text.append(
            f"The interval of {chosen.name} is widened to hold that of {other.name}, which differs beyond chance and may be "
            "the right one."
        )
    if status == "trust":
        why = _why_not(answers, d, stops) if episodes is None else ""
        status = _agreeing(text, chosen, model, states, episodes, d, why)
    text += _alike(estimates.get(chosen.name), chosen, compared)
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
                else "the interval allows for any value where no logged action has weight, and elsewhere this estimate rests on "
                "the behaviour probabilities being right."
                if chosen.name in estimates and estimates[chosen.name].lost
                else "there this estimate rests on the behaviour probabilities being right."
            )
        )
    if aside > FAINT:
        status = "caution"
        text.append(f"{_set_aside(aside)} All estimates may be off by about as much.")
    if stops:
        text.append(
            f"Truncation hides {hidden:.1%} of the discounted future; estimators marked † (on the page: 'stops') count it as "
            "zero."
        )
    return Verdict(status, chosen.name, tuple(text)), reach, None if other is None else other.name


def _set_aside(share: float) -> str:
    """Says what is wrong with a log that lacks a share of its steps."""
    return (
        f"{share:.1%} of the steps were set aside, because truncated episodes came without their final observation, while the last "
        "steps of other episodes were kept: ends look more frequent than they are."
    )


def _off_one(d: Mapping[str, Any]) -> bool:
    """Whether the mean weight of episodes lies off 1 beyond chance."""
    return bool(abs(d["mean_weight"] - 1) > 4 * d["mean_weight_error"] + 0.02)


def _why_not(answers: Mapping[str, Answer], d: Mapping[str, Any], stops: bool) -> str:
    """Why importance sampling and doubly robust cannot be used; the first reason that holds."""
    ran = [answers[name] for name in EPISODES if name in answers]
    if not ran:
        return f"none of {', '.join(EPISODES)} was run"
    if d.get("behaviour_suspicious"):
        return "the behaviour probabilities look wrong"
    if _off_one(d):
        left = d["unsupported"] or 0.0
        cause = (
            f"the policy leaves what the log has seen with probability {left:.1%}, and "
            if left > FAINT
            else ""
        )
        return f"{cause}the weights of episodes average {d['mean_weight']:.2g} and not 1"
    if stops and all(one.truncation == "stops" for one in ran):
        return "importance sampling counts nothing after truncated steps"
    return f"importance sampling has only {effective(d['ess'])} ({FEW:.0f} are needed)"


def _nothing_left(answers: Mapping[str, Answer], d: Mapping[str, Any], stops: bool) -> str:
    """Why no estimate can be recommended."""
    if not answers:
        return "No estimator ran: the notes say why."
    why, left = _why_not(answers, d, stops), d["unsupported"] or 0.0
    if left > LOST:
        return (
            f"With (discounted) probability {left:.0%} the policy takes actions that the log never took in those states, so "
            f"that no model can be used; and {why}."
        )
    return f"No estimate can be recommended: {why}."


def _too_wide(one: Answer, span: float) -> bool:
    """Whether an interval is wider than the range of returns in the log, or has no finite width."""
    return not np.isfinite(one.interval.width) or 0 < span < one.interval.width


def _for_all(estimate: Estimate | None, level: float, many: int, seed: int) -> tuple[float, float]:
    """How much wider below and above an interval is at the level at which `many` of its kind hold together (Bonferroni)."""
    if estimate is None or many < 2:
        return 0.0, 0.0
    together = _jointly(level, many)
    one, every = (
        studentised_bootstrap(estimate.value, estimate.influence, level=x, seed=seed)
        for x in (level, together)
    )
    rarer = estimate.unseen(together) - estimate.unseen(level)
    below, above = room_for(rarer, estimate.value, estimate.possible)
    return max(one.low - every.low, 0.0) + below, max(every.high - one.high, 0.0) + above


def _jointly(level: float, many: int) -> float:
    """The level of each of `many` intervals that hold together at `level`."""
    return 1 - (1 - level) / many


def _alike(estimate: Estimate | None, chosen: Answer, compared: int) -> list[str]:
    """Says of an estimate whose episodes are all alike what its interval allows for."""
    if estimate is None or estimate.alike is None:
        return []
    chance = estimate.unseen(_jointly(chosen.interval.level, compared))
    return [
        f"No episode differs from another in its return or in what {chosen.name} sees: the interval allows for a kind of episode "
        f"that was not seen, with any return that the rewards permit and a probability of up to {chance:.2%}, which "
        f"{effective(estimate.alike)} cannot rule out."
    ]


def _agreeing(
    text: list[str],
    chosen: Answer,
    model: Answer | None,
    states: list[Answer],
    episodes: Answer | None,
    d: Mapping[str, Any],
    why: str,
) -> str:
    """Says what stands behind the choice when nothing speaks against it; `trust` if estimates of two families agree.

    `why` says why there are no `episodes` to agree with.
    """
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
        text.append(f"Take {chosen.name}: it has {effective(d['ess'])}.")
        return "trust"
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
    better = "better" if advantage.low > 0 else "worse" if advantage.high < 0 else "cannot tell"
    sentence = f"The policy is {better} than the one that made the log"
    if better == "cannot tell":
        sentence = "The log does not show whether the policy is better or worse than the one that made it"
    sentence += f" (difference {advantage.low:.4g} to {advantage.high:.4g})."
    return replace(verdict, text=(*verdict.text, sentence), better=better)


def difference_score(a: Estimate | None, b: Estimate | None) -> float | None:
    """How many standard errors two estimates on the same episodes lie apart, beyond what both leave open; signed."""
    if a is None or b is None or len(a.influence) != len(b.influence):
        return None
    psi = a.influence - b.influence
    error = float(psi.std(ddof=1) / np.sqrt(len(psi)))
    gap = a.value - b.value
    left_open = open_difference(a, b)[0 if gap > 0 else 1]
    beyond = max(abs(gap) - left_open - 1e-6 * max(1.0, abs(a.value)), 0.0)
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


def _held(estimates: Mapping[str, Estimate], name: str, other: float) -> dict[str, Estimate]:
    """The estimate of that name with room for another value that may be the right one."""
    if name not in estimates:
        return {}
    one = estimates[name]
    gap = other - one.value
    return {name: replace(one, room=(one.room[0] + max(-gap, 0.0), one.room[1] + max(gap, 0.0)))}


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
    """The verdict on the answers, the difference to the log's own policy (`logged`, where the plain average is not its value),
    and all of it together."""
    level, seed = settings["level"], settings["seed"]
    answers = {name: answers[name] for name in ESTIMATORS if name in answers}
    average, possible = sums.behaviour(), sums.value_range()
    own = average = if_alike(average, possible, sums.episodes)
    diagnostics["disagreeing"] = disagreeing(answers, estimates)
    verdict, reach, other = judge(answers, estimates, diagnostics, preferred, seed)
    reason, advantage = "", None
    if verdict.estimator is not None:
        found = answers[verdict.estimator]
        interval = found.interval.widened(*reach)
        if other is not None:
            interval = interval.holding(answers[other].interval)
            estimates = estimates | _held(estimates, found.name, answers[other].value)
        wider = within(replace(found, interval=interval), possible)
        answers[found.name] = replace(found, interval=wider.interval)
    if diagnostics["tail_behaviour"] > STOPPED:  # the plain average stops at truncation
        own = average if logged is None else if_alike(logged, possible, sums.episodes, sums.same)
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
        advantage = difference(chosen, own, level=level, seed=seed).widened(*reach)
    notes = list(notes)
    if beyond := [a.name for a in answers.values() if a.beyond]:
        (least, largest), (low, high) = settings["reward_range"], possible
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
