"""Step 6, verdict: rules that read the answers and diagnostics, in the order a careful person would.

Estimators rest on different assumptions, and the rules choose among three families:

| family | needs |
|---|---|
| model: certainty equivalence, fitted Q | the states hold all that matters; π stays on pairs that the log has seen |
| states: state ratios, doubly robust or not | the states hold all that matters; right behaviour probabilities |
| episodes: importance sampling, doubly robust | right behaviour probabilities; enough episodes of weight |

1. Where the log lacks what the policy does, nothing is said (`_require_data`).
2. Where the states leave out something that matters, only the episodes are left (`_without_states`).
3. Otherwise the family is taken that is usual, or another whose interval is clearly narrower (`_narrowest`).
4. An interval wider than all returns of the log gives way to that of the episodes, or nothing is said (`_narrow_enough`).
5. What contradicts the choice is held by its interval, and the choice itself widens it (`judge`).
6. Trust needs a second family that agrees, with an interval that says something, or enough effective episodes where there is no
   other such family (`_agreement`), and no reservation (`_reservations`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from marginax.offline.importance import FAINT, FEW
from marginax.offline.results import (
    STATE_RATIOS,
    Answer,
    Estimate,
    Verdict,
    effective,
    open_difference,
    room_for,
)
from marginax.statistics import studentised_bootstrap

LOST = 0.2  # discounted probability of leaving the support above which nothing is said
CHOSEN = 0.05  # share of steps that were set aside, others of which were kept, above which nothing is said
NARROWER = 0.6  # a width relative to the usual choice's from which another is taken: the narrowest of several is often too narrow
SPARSE = 10.0  # effective episodes that will do if nothing else is left: the interval has room for few
APART = 1.96  # standard errors of the difference of two estimates on the same episodes
EPISODES = ("weighted-doubly-robust", "weighted-per-decision-is", "per-decision-is")
_MODELS = ("marginalized", "fitted Q")  # kinds that rest on the states, once truncation is bootstrapped


class Judgement(NamedTuple):
    """A verdict and what it does to the interval of the estimate that it recommends.

    Attributes:
        verdict: what to take and why.
        reach: how far the interval is to be widened below and above, so that the choice among families costs no coverage.
        other: another estimator whose interval it has to hold as well, because the two contradict each other and nothing says
            which is wrong.
    """

    verdict: Verdict
    reach: tuple[float, float] = (0.0, 0.0)
    other: str | None = None


class CannotTell(Exception):
    """Why nothing can be recommended, in a sentence."""


class Case:
    """What the rules read: the diagnostics, and the answer of each family that may be used.

    Args:
        answers: by estimator.
        estimates: values with influences and what they leave open, for paired tests.
        diagnostics: as `marginax.offline.evaluate` returns them.
        preferred: estimators of the model family, best first.

    Attributes:
        lost: discounted probability of leaving the support of the log.
        unreachable: the part of it where the behaviour policy never takes the action; the rest was missed by chance.
        aside: share of the steps that were set aside, while others of their kind were kept.
        hidden: share of the discounted future behind truncated steps.
        stops: whether it is large enough to count.
        suspicious: whether the behaviour probabilities look wrong.
        effective: the effective number of episodes, in words.
        mean_weight_off: whether the mean weight of episodes lies off 1 beyond chance.
        model: the best answer of the model family, if there is one and the support permits it.
        ratios: answers of state ratios with enough effective episodes, the first choice first.
        ran: all answers of the third family, best first.
        weighted: the best of them that may be used, however few effective episodes it has.
        fallback: the same, with enough of them to do if nothing else is left.
        episodes: the same, with enough of them to choose it, and with sound weights.
        not_markov: whether a test says that the states leave something out.
        apart: whether `model` and `episodes` differ beyond chance.
    """

    def __init__(
        self,
        answers: Mapping[str, Answer],
        estimates: Mapping[str, Estimate],
        diagnostics: Mapping[str, Any],
        preferred: tuple[str, ...],
    ) -> None:
        self.answers, self.estimates = answers, estimates
        self.diagnostics = d = diagnostics
        self.lost = float(d["unsupported"] or 0.0)  # None: not known
        self.unreachable = float(d.get("unreachable", self.lost))
        self.aside = float(d.get("set_aside", 0.0))
        self.hidden = float(d["tail_target" if d["ess"] >= FEW else "tail_behaviour"])
        self.stops = self.hidden > FAINT
        self.suspicious = bool(d.get("behaviour_suspicious"))
        self.not_markov = bool(d.get("markov_fails"))
        self.mean_weight_off = abs(d["mean_weight"] - 1) > 4 * d["mean_weight_error"] + 0.02
        self.effective = effective(d["ess"])

        self.ran = [answers[name] for name in EPISODES if name in answers]
        whole = [a for a in self.ran if a.truncation == "bootstraps" or not self.stops]
        self.weighted = whole[0] if whole and not self.suspicious else None
        self.fallback = self.weighted if d["ess"] >= SPARSE else None
        self.episodes = self.weighted if d["ess"] >= FEW and not self.mean_weight_off else None
        known = [answers[name] for name in preferred if name in answers]
        self.model = known[0] if known and self.lost <= LOST else None
        # The doubly robust form comes first, but it needs a critic, and the critic needs support.
        order = STATE_RATIOS if self.lost <= LOST else STATE_RATIOS[::-1]
        ratios = [answers[name] for name in order if name in answers and not self.suspicious]
        self.ratios = [a for a in ratios if a.ess is not None and a.ess >= FEW]
        self.apart = self._differ(self.model, self.episodes)

    @property
    def on_states(self) -> list[Answer]:
        """The answers that are right only if the states hold all that matters, one of each family."""
        return ([] if self.model is None else [self.model]) + self.ratios[:1]

    def too_wide(self, one: Answer) -> bool:
        """Whether an interval is wider than the range of returns in the log, or has no finite width."""
        return not np.isfinite(one.interval.width) or 0 < self.diagnostics["span"] < one.interval.width

    def score(self, one: Answer, other: Answer) -> float | None:
        """See `difference_score`."""
        return difference_score(self.estimates.get(one.name), self.estimates.get(other.name))

    def _differ(self, one: Answer | None, other: Answer | None) -> bool:
        if one is None or other is None:
            return False
        z = self.score(one, other)
        return disjoint(one, other) if z is None else abs(z) > APART

    def why_not_episodes(self) -> str:
        """Why importance sampling and doubly robust cannot be used; the first reason that holds."""
        if not self.ran:
            return f"none of {', '.join(EPISODES)} was run"
        if self.suspicious:
            return "the behaviour probabilities look wrong"
        if self.mean_weight_off:
            cause = ""
            if self.lost > FAINT:
                cause = f"the policy leaves what the log has seen with probability {self.lost:.1%}, and "
            return f"{cause}the weights of episodes average {self.diagnostics['mean_weight']:.2g} and not 1"
        if self.stops and all(one.truncation == "stops" for one in self.ran):
            return "importance sampling counts nothing after truncated steps"
        return f"importance sampling has only {self.effective} ({FEW:.0f} are needed)"


@dataclass(frozen=True)
class _Choice:
    """An answer that was chosen.

    Attributes:
        answer: the answer.
        compared: number of families it was chosen from.
        fallback_reason: why the fallback was taken, in a sentence; empty for any other choice.
    """

    answer: Answer
    compared: int = 1
    fallback_reason: str = ""


def judge(
    answers: Mapping[str, Answer],
    estimates: Mapping[str, Estimate],
    diagnostics: Mapping[str, Any],
    preferred: tuple[str, ...],
    seed: int = 0,
) -> Judgement:
    """Which estimate to trust, by the rules at the head of this module.

    Args:
        answers, estimates, diagnostics, preferred: see `Case`.
        seed: of the bootstrap.
    """
    case = Case(answers, estimates, diagnostics, preferred)
    text: list[str] = []
    if case.suspicious:
        text.append(
            "The behaviour probabilities do not match how often the actions were taken: "
            "importance sampling and doubly robust cannot be relied on."
        )
    try:
        _require_data(case)
        if (case.not_markov or case.apart) and case.on_states:
            text += _against_states(case)
            choice = _without_states(case)
        else:
            choice = _narrowest(case)
        choice = _narrow_enough(choice, case)
    except CannotTell as reason:
        return Judgement(Verdict("cannot tell", None, (*text, str(reason))))

    chosen, estimate = choice.answer, estimates.get(choice.answer.name)
    agrees, sentence = (False, choice.fallback_reason) if choice.fallback_reason else _agreement(chosen, case)
    text.append(sentence)
    other = _contradicting(choice, case)
    if other is not None:
        text.append(
            f"The interval of {chosen.name} is widened to hold that of {other.name}, which differs beyond chance and may be "
            "the right one."
        )
    text += _alike(estimate, choice)
    reservations = _reservations(chosen, case)
    text += reservations
    if case.stops:
        text.append(
            f"Truncation hides {case.hidden:.1%} of the discounted future; estimators marked † (on the page: 'stops') count it as "
            "zero."
        )
    status = "trust" if agrees and not reservations else "caution"
    reach = _for_all(estimate, chosen.interval.level, choice.compared, seed)
    return Judgement(Verdict(status, chosen.name, tuple(text)), reach, None if other is None else other.name)


def _require_data(case: Case) -> None:
    """Nothing is said where the policy leaves the log, or where the log lacks the ends of episodes."""
    if min(case.lost, case.unreachable) > LOST:
        raise CannotTell(
            f"With (discounted) probability {case.lost:.0%} the policy takes actions that the log never took in those "
            "states: the data cannot tell what it is worth. Collect data nearer to this policy."
        )
    if case.aside > CHOSEN:
        raise CannotTell(
            f"{_set_aside(case.aside)} The data cannot tell what that hides. Log the final observation."
        )


def _against_states(case: Case) -> list[str]:
    """What speaks against all that rests on the states."""
    text = []
    if case.not_markov:
        text.append(
            "The states leave out something that matters: what came before a step predicts what follows it "
            f"({case.diagnostics['markov_score']:.0f} standard deviations beyond chance)."
        )
    model, episodes = case.model, case.episodes
    if case.apart and model is not None and episodes is not None:
        text.append(
            f"{model.name} ({model.value:.4g}) and {episodes.name} ({episodes.value:.4g}) disagree beyond chance on the "
            "same episodes."
        )
        if not case.not_markov:
            text.append(
                "Either the states leave out something that matters (then only importance sampling is right), or the "
                "behaviour probabilities are wrong (then only the former is)."
            )
    return text


def _without_states(case: Case) -> _Choice:
    """The choice where the states leave out something that matters."""
    chosen = case.fallback
    if chosen is not None:
        sentence = f"Take {chosen.name}, which does not rest on the states: {case.effective}."
        return _Choice(chosen, fallback_reason=sentence)
    few = f"{case.effective} are too few for it"
    why = case.why_not_episodes() if case.weighted is None else few
    raise CannotTell(f"Only importance sampling does not need this assumption, and {why}.")


def _narrowest(case: Case) -> _Choice:
    """The usual family, or another whose interval is clearly narrower."""
    candidates = case.on_states + ([] if case.episodes is None else [case.episodes])
    if not candidates:
        raise CannotTell(_nothing_left(case))
    usual = candidates[0]
    if case.lost > FAINT and case.ratios:
        usual = case.ratios[0]
    chosen = min(candidates, key=lambda a: a.interval.width * (1.0 if a is usual else 1 / NARROWER))
    if case.lost > LOST and case.fallback is not None:
        # Ratios of states let what they have seen stand for the actions that are missing; weights show what is missing.
        sentence = f"Take {case.fallback.name}: it has {case.effective}."
        return _Choice(case.fallback, len(candidates), sentence)
    return _Choice(chosen, len(candidates))


def _narrow_enough(choice: _Choice, case: Case) -> _Choice:
    """The choice, or the fallback where the interval of the choice is wider than the range of returns in the log."""
    chosen, fallback = choice.answer, case.fallback
    if not case.too_wide(chosen):
        return choice
    if fallback is None or case.too_wide(fallback):
        needed = "more episodes are needed"
        if not np.isfinite(chosen.interval.width):
            needed = "a horizon or a discount below 1 would bound what rewards permit"
        raise CannotTell(
            f"Even the best interval, {chosen.interval.low:.4g} to {chosen.interval.high:.4g}, is wider than the range "
            f"of returns in the log: {needed}."
        )
    why = f"the interval of {chosen.name} is wider than the range of returns in the log"
    return _Choice(fallback, choice.compared, f"Take {fallback.name}: {why}.")


def _contradicting(choice: _Choice, case: Case) -> Answer | None:
    """Another answer that may be the right one: it differs from the choice beyond chance, and nothing says which is wrong."""
    if case.apart and not case.not_markov:
        return case.model
    if len(case.ratios) < 2 or choice.answer is not case.ratios[0]:
        return None
    first, second = case.ratios
    z = case.score(first, second)
    return second if z is not None and abs(z) > APART else None


def _agreement(chosen: Answer, case: Case) -> tuple[bool, str]:
    """Whether an estimate that rests on other assumptions agrees, or none is needed; and what stands behind the choice."""
    by_weights = chosen is case.episodes
    others = case.on_states if by_weights else [a for a in [case.episodes] if a is not None]
    telling = [a for a in others if not case.too_wide(a)]
    if telling:
        agrees = f"{telling[0].name}, which rests on other assumptions, agrees ({telling[0].value:.4g})"
        return True, f"Take {chosen.name}: {agrees}."
    if by_weights:
        return True, f"Take {chosen.name}: it has {case.effective}."
    why = case.why_not_episodes()
    if others:
        why = f"the interval of {others[0].name} is wider than the range of returns in the log"
    tested = case.diagnostics.get("markov_degrees", 0) > 0
    return False, (
        f"Take {chosen.name}, if the states hold all that matters for what happens next"
        + (": a test of that found nothing, but" if tested else ": nothing in the log can check it, because")
        + f" {why}."
    )


def _reservations(chosen: Answer, case: Case) -> list[str]:
    """What forbids to trust the choice, although nothing better is there."""
    text = []
    by_model = chosen is case.model
    off = [
        a.name
        for a in case.answers.values()
        if by_model and a.kind in _MODELS and a.truncation == "bootstraps" and disjoint(a, chosen)
    ]
    if off:
        text.append(
            f"{', '.join(off)} should meet {chosen.name} and {'do' if len(off) > 1 else 'does'} not: what was fitted to the log "
            "is off by more than the intervals say."
        )
    if case.lost > FAINT:
        estimate = case.estimates.get(chosen.name)
        rests = "this estimate rests on the behaviour probabilities being right"
        if by_model:
            then = "the interval allows for any value that the rewards permit there"
        elif estimate is not None and estimate.lost:
            then = (
                f"the interval allows for any value where no logged action has weight, and elsewhere {rests}"
            )
        else:
            then = f"there {rests}"
        text.append(
            f"The policy leaves what the log has seen with (discounted) probability {case.lost:.1%}; {then}."
        )
    if case.aside > FAINT:
        text.append(f"{_set_aside(case.aside)} All estimates may be off by about as much.")
    return text


def _nothing_left(case: Case) -> str:
    """Why no estimate can be recommended."""
    if not case.answers:
        return "No estimator ran: the notes say why."
    why = case.why_not_episodes()
    if case.lost > LOST:
        return (
            f"With (discounted) probability {case.lost:.0%} the policy takes actions that the log never took in those states, so "
            f"that no model can be used; and {why}."
        )
    return f"No estimate can be recommended: {why}."


def _set_aside(share: float) -> str:
    """Says what is wrong with a log that lacks a share of its steps."""
    return (
        f"{share:.1%} of the steps were set aside, because truncated episodes came without their final observation, while the last "
        "steps of other episodes were kept: ends look more frequent than they are."
    )


def _alike(estimate: Estimate | None, choice: _Choice) -> list[str]:
    """Says of an estimate whose episodes are all alike what its interval allows for."""
    if estimate is None or estimate.alike is None:
        return []
    chosen = choice.answer
    chance = estimate.unseen(_jointly(chosen.interval.level, choice.compared))
    return [
        f"No episode differs from another in its return or in what {chosen.name} sees: the interval allows for a kind of episode "
        f"that was not seen, with any return that the rewards permit and a probability of up to {chance:.2%}, which "
        f"{effective(estimate.alike)} cannot rule out."
    ]


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


def disjoint(a: Answer, b: Answer) -> bool:
    """Whether two intervals have no value in common."""
    return min(a.interval.high, b.interval.high) < max(a.interval.low, b.interval.low)
