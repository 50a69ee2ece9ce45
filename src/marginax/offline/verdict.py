"""Step 6, verdict: which estimate to recommend, and how far to trust it.

The rules choose among three families of estimators with different assumptions:

| family | needs |
|---|---|
| model: certainty equivalence, fitted Q | the states hold all that matters; π stays on pairs that the log has seen |
| states: state ratios, doubly robust or not | the states hold all that matters; right behaviour probabilities |
| episodes: importance sampling, doubly robust | right behaviour probabilities; enough episodes of weight |

1. No estimate is recommended if the log lacks what the policy does (`_require_data`).
2. If the states leave out something that matters, only episodes can be used (`_without_states`).
3. Otherwise the usual family is recommended, or another one whose interval is clearly narrower (`_narrowest`).
4. If the interval of the choice is wider than the range of returns in the log, episodes are recommended, or nothing (`_narrow_enough`).
5. The interval is widened because the narrowest of several was chosen, and to hold an estimate that contradicts it (`judge`).
6. *Trust* needs no reservation (`_reservations`), and another family that agrees (`_agreement`). Episodes do not need another family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from marginax.offline.diagnostics import mean_weight_off
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

LOST = 0.2  # models are not used above this discounted probability of leaving the support
CHOSEN = 0.05  # no estimate is recommended above this share of steps set aside (if the last steps of other episodes were kept)
NARROWER = 0.6  # another family must be narrower than the usual one by this factor: the narrowest of several is often too narrow
SPARSE = 10.0  # effective episodes that suffice if nothing else can be used: intervals are widened where there are few
APART = 1.96  # standard errors of a paired difference from which two estimates disagree
NEAR = 0.25  # two estimates that are nearer, in units of the larger standard error, agree: influences are exact to first order only
EPISODES = ("weighted-doubly-robust", "weighted-per-decision-is", "per-decision-is")
_MODELS = ("marginalized", "fitted Q")  # kinds that rest on the states, if they bootstrap at truncated steps


class Judgement(NamedTuple):
    """A verdict, and how the interval of the recommended estimate is to be widened.

    Attributes:
        verdict: the recommended estimate and the reasons.
        reach: room below and above for having chosen among several families.
        other: an estimator whose interval must lie within the widened one: the two disagree, and either may be right.
    """

    verdict: Verdict
    reach: tuple[float, float] = (0.0, 0.0)
    other: str | None = None


class CannotTell(Exception):
    """Why no estimate can be recommended, in a sentence."""


class Case:
    """What the rules read: diagnostics, and the usable answers of each family.

    Args:
        answers: by estimator.
        estimates: by estimator, for paired tests. Networks have none.
        diagnostics: as in `Evaluation`.
        preferred: estimators of the model family, best first.

    Attributes:
        lost: discounted probability that the policy leaves the support of the log; for continuous actions the share of its steps.
        by_steps: whether `lost` is a share of steps.
        leaves: `lost` in words.
        unreachable: the part of `lost` at actions that the behaviour policy never takes. The log missed the rest by chance.
        aside: share of steps that were set aside, while the last steps of other episodes were kept.
        hidden: share of the discounted future that lies behind truncated steps.
        stops: whether `hidden` is large enough to matter.
        suspicious: whether the behaviour probabilities look wrong.
        effective: the effective number of episodes, in words.
        mean_weight_off: whether the mean weight of episodes differs from 1 beyond chance.
        model: the best answer of the model family; None if the policy leaves the support too often.
        ratios: answers of state ratios with enough effective transitions, best first.
        ran: answers of the episodes family, best first.
        weighted: the best of `ran` that is not biased by truncation; None if behaviour probabilities look wrong.
        fallback: `weighted`, if it has at least `SPARSE` effective episodes.
        episodes: `weighted`, if it has at least `FEW` effective episodes and the mean weight is near 1.
        not_markov: whether the Markov test failed.
        apart: the estimator on states that disagrees with `episodes`, if one does; see `on_states`.
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
        self.lost = float(d["unsupported"] or 0.0)  # None if it is not known
        self.by_steps = bool(d.get("unsupported_steps"))
        often = f"with (discounted) probability {self.lost:.1%}"
        if self.by_steps:
            often = f"in {self.lost:.1%} of its (discounted) steps"
        self.leaves = f"leaves what the log has seen {often}"
        self.unreachable = float(d.get("unreachable", self.lost))
        self.aside = float(d.get("set_aside", 0.0))
        self.hidden = float(d["tail_target" if d["ess"] >= FEW else "tail_behaviour"])
        self.stops = self.hidden > FAINT
        self.suspicious = bool(d.get("behaviour_suspicious"))
        self.not_markov = bool(d.get("markov_fails"))
        self.mean_weight_off = mean_weight_off(d["mean_weight"], d["mean_weight_error"])
        self.effective = effective(d["ess"])

        self.ran = [answers[name] for name in EPISODES if name in answers]
        whole = [a for a in self.ran if a.truncation == "bootstraps" or not self.stops]
        self.weighted = whole[0] if whole and not self.suspicious else None
        self.fallback = self.weighted if d["ess"] >= SPARSE else None
        self.episodes = self.weighted if d["ess"] >= FEW and not self.mean_weight_off else None
        models = [answers[name] for name in preferred if name in answers]
        self.model = models[0] if models and self.lost <= LOST else None
        # The doubly robust form comes first, but it needs a critic, and the critic needs support.
        order = STATE_RATIOS if self.lost <= LOST else STATE_RATIOS[::-1]
        ratios = [answers[name] for name in order if name in answers and not self.suspicious]
        self.ratios = [a for a in ratios if a.ess is not None and a.ess >= FEW]
        # Far from the log ratios of states are known to be off: they contradict nothing there.
        first = self.on_states[0] if self.on_states and self.lost <= LOST else None
        self.apart = first if self.differ(first, self.episodes) else None

    @property
    def on_states(self) -> list[Answer]:
        """The best model and the best state ratio: answers that are right only if the states hold all that matters."""
        return ([] if self.model is None else [self.model]) + self.ratios[:1]

    def too_wide(self, one: Answer) -> bool:
        """Whether an interval is infinite, or wider than the range of returns in the log."""
        return not np.isfinite(one.interval.width) or 0 < self.diagnostics["span"] < one.interval.width

    def differ(self, one: Answer | None, other: Answer | None) -> bool:
        """Whether two answers disagree beyond chance: by a paired test, or by disjoint intervals if one is of networks."""
        if one is None or other is None or abs(one.value - other.value) <= NEAR * max(one.error, other.error):
            return False
        z = difference_score(self.estimates.get(one.name), self.estimates.get(other.name))
        return disjoint(one, other) if z is None else abs(z) > APART

    def witness(self, chosen: Answer) -> Answer | None:
        """An answer that rests on other assumptions than the chosen one, with an interval that says something."""
        others = self.on_states if chosen is self.episodes else [self.episodes]
        return next((a for a in others if a is not None and not self.too_wide(a)), None)

    def why_not_episodes(self) -> str:
        """Why importance sampling and doubly robust cannot be used: the first reason that holds."""
        if not self.ran:
            return f"none of {', '.join(EPISODES)} was run"
        if self.suspicious:
            return "the behaviour probabilities look wrong"
        if self.mean_weight_off:
            cause = ""
            if self.lost > FAINT:
                cause = f"the policy {self.leaves}, and "
            return f"{cause}the weights of episodes average {self.diagnostics['mean_weight']:.2g} and not 1"
        if self.stops and all(one.truncation == "stops" for one in self.ran):
            return "importance sampling counts nothing after truncated steps"
        return f"importance sampling has only {self.effective} ({FEW:.0f} are needed)"


@dataclass(frozen=True)
class _Choice:
    """The answer to recommend.

    Attributes:
        answer: the answer.
        compared: number of families whose widths were compared.
        fallback_reason: why the fallback was chosen, in a sentence; empty for any other choice.
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
    """Recommends an estimate by the rules at the head of this module; for the arguments see `Case`."""
    case = Case(answers, estimates, diagnostics, preferred)
    text: list[str] = []
    if case.suspicious:
        text.append(
            "The behaviour probabilities do not match how often the actions were taken: "
            "importance sampling, doubly robust and state ratios cannot be relied on."
        )
    try:
        _require_data(case)
        if case.on_states and (case.not_markov or case.apart is not None):
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
    other = _contradicting(chosen, case)
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
            f"Truncation hides {case.hidden:.1%} of the discounted future: importance sampling and regression count it as zero, "
            "all others fill it in from the states."
        )
    status = "trust" if agrees and not reservations else "caution"
    reach = _reach(estimate, chosen.interval.level, choice.compared, seed)
    return Judgement(Verdict(status, chosen.name, tuple(text)), reach, None if other is None else other.name)


def _require_data(case: Case) -> None:
    """Raises if the policy leaves the log too often, or if too many ends of episodes are missing."""
    if min(case.lost, case.unreachable) > LOST:
        raise CannotTell(
            f"The policy {case.leaves}, by actions that the log never took there: the data cannot tell what it is worth. Collect "
            "data nearer to this policy."
        )
    if case.aside > CHOSEN:
        raise CannotTell(
            f"{_set_aside(case.aside)} The data cannot tell what that hides. Log the final observation."
        )


def _against_states(case: Case) -> list[str]:
    """The evidence against estimators that rest on the states."""
    text = []
    if case.not_markov:
        text.append(
            "The states leave out something that matters: what came before a step predicts what follows it "
            f"({case.diagnostics['markov_score']:.0f} standard deviations beyond chance)."
        )
    one, episodes = case.apart, case.episodes
    if one is not None and episodes is not None:
        text.append(
            f"{one.name} ({one.value:.4g}) and {episodes.name} ({episodes.value:.4g}) disagree beyond chance on the same episodes."
        )
        if not case.not_markov:
            then = f"only {one.name}" if one is case.model else "neither"
            text.append(
                f"Either the states leave out something that matters (then only {episodes.name} is right), or the behaviour "
                f"probabilities are wrong (then {then} is)."
            )
    return text


def _without_states(case: Case) -> _Choice:
    """The choice if the states leave out something that matters."""
    chosen = case.fallback
    if chosen is not None:
        sentence = f"Take {chosen.name}, which does not need the Markov assumption: it has {case.effective}."
        return _Choice(chosen, fallback_reason=sentence)
    why = case.why_not_episodes() if case.weighted is None else f"{case.effective} are too few for it"
    raise CannotTell(f"Only importance sampling does not need the Markov assumption, and {why}.")


def _narrowest(case: Case) -> _Choice:
    """The usual family, or another one whose interval is clearly narrower."""
    candidates = case.on_states + ([] if case.episodes is None else [case.episodes])
    if not candidates:
        raise CannotTell(_nothing_left(case))
    usual = candidates[0]
    if case.lost > FAINT and case.ratios:
        usual = case.ratios[0]

    def cost(one: Answer) -> tuple[bool, float]:
        return case.too_wide(one), one.interval.width * (1.0 if one is usual else 1 / NARROWER)

    chosen = min(candidates, key=cost)
    if case.lost > LOST and case.fallback is not None:
        # State ratios put the actions that were seen in the place of those that are missing. Weights show that some are missing.
        sentence = f"Take {case.fallback.name}: it has {case.effective}."
        return _Choice(case.fallback, len(candidates), sentence)
    return _Choice(chosen, len(candidates))


def _narrow_enough(choice: _Choice, case: Case) -> _Choice:
    """The choice, or the fallback if the interval of the choice is wider than the range of returns in the log."""
    chosen, fallback = choice.answer, case.fallback
    if not case.too_wide(chosen):
        return choice
    if fallback is None or case.too_wide(fallback):
        needed = "more episodes are needed"
        if not np.isfinite(chosen.interval.width):
            needed = "a horizon or a discount below 1 would bound what rewards permit"
        raise CannotTell(
            f"Even the interval of {chosen.name}, {chosen.interval.low:.4g} to {chosen.interval.high:.4g}, is wider than the range "
            f"of returns in the log: {needed}."
        )
    why = f"the interval of {chosen.name} is wider than the range of returns in the log"
    return _Choice(fallback, choice.compared, f"Take {fallback.name}: {why}.")


def _contradicting(chosen: Answer, case: Case) -> Answer | None:
    """An answer that disagrees with the choice beyond chance, if nothing says which of them is wrong."""
    if case.not_markov:
        return None  # the states are wrong
    others = case.ratios[1:] if case.ratios and chosen is case.ratios[0] else []
    rivals = [case.apart, *others]
    if case.lost <= FAINT:  # else a reservation says what the estimate rests on
        rivals.append(case.witness(chosen))
    return next((one for one in rivals if case.differ(one, chosen)), None)


def _agreement(chosen: Answer, case: Case) -> tuple[bool, str]:
    """Whether the choice may be trusted as far as other families go, and a sentence on what supports it."""
    witness = case.witness(chosen)
    if witness is not None:
        agrees = not case.differ(chosen, witness)
        verb = "agrees" if agrees else "disagrees"
        return agrees, (
            f"Take {chosen.name}: {witness.name}, which rests on other assumptions, {verb} ({witness.value:.4g})."
        )
    if chosen is case.episodes:
        if not case.stops or chosen.truncation == "stops":
            return True, f"Take {chosen.name}: it has {case.effective}."
        return False, (
            f"Take {chosen.name}: it has {case.effective}. What follows truncated steps it takes from the states, and no other family "
            "can check that."
        )
    why = case.why_not_episodes()
    if case.episodes is not None:
        why = f"the interval of {case.episodes.name} is wider than the range of returns in the log"
    tested = case.diagnostics.get("markov_degrees", 0) > 0
    return False, (
        f"Take {chosen.name}, if the states hold all that matters for what happens next"
        + (": a test of that found nothing, but" if tested else ": nothing in the log can check it, because")
        + f" {why}."
    )


def _reservations(chosen: Answer, case: Case) -> list[str]:
    """Why the choice is not to be trusted, although nothing better is there."""
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
            if case.by_steps:
                then = "the interval allows for any reward at these steps, but not for what follows from them"
        elif estimate is not None and estimate.lost:
            then = (
                f"the interval allows for any value where no logged action has weight, and elsewhere {rests}"
            )
        else:
            then = f"there {rests}"
        text.append(f"The policy {case.leaves}; {then}.")
    if case.aside > FAINT:
        text.append(f"{_set_aside(case.aside)} All estimates may be off by about as much.")
    if case.diagnostics.get("behaviour") == "estimated":
        text.append(
            "The behaviour probabilities were estimated from the states: if the behaviour policy acted on anything else that "
            "matters, all estimates are wrong alike, and nothing in the log can show it."
        )
    return text


def _nothing_left(case: Case) -> str:
    """Why no estimate can be recommended, if no family can be used."""
    if not case.answers:
        return "No estimator ran: the notes say why."
    why = case.why_not_episodes()
    if case.lost > LOST:
        return f"The policy {case.leaves}, by actions that the log never took there, so that no model can be used; and {why}."
    return f"No estimate can be recommended: {why}."


def _set_aside(share: float) -> str:
    """What is wrong with a log from which a share of the steps was set aside."""
    return (
        f"{share:.1%} of the steps were set aside, because truncated episodes came without their final observation, while the last "
        "steps of other episodes were kept: ends look more frequent than they are."
    )


def _alike(estimate: Estimate | None, choice: _Choice) -> list[str]:
    """If all episodes are alike, what the interval allows for."""
    if estimate is None or estimate.alike is None:
        return []
    chosen = choice.answer
    chance = estimate.unseen(_jointly(chosen.interval.level, choice.compared))
    return [
        f"No episode differs from another in its return or in what {chosen.name} sees: the interval allows for a kind of episode "
        f"that was not seen, with any return that the rewards permit and a probability of up to {chance:.2%}, which "
        f"{effective(estimate.alike)} cannot rule out."
    ]


def _reach(estimate: Estimate | None, level: float, compared: int, seed: int) -> tuple[float, float]:
    """How much wider an interval becomes, below and above, if `compared` intervals are to hold together (Bonferroni)."""
    if estimate is None or compared < 2:
        return 0.0, 0.0
    together = _jointly(level, compared)
    one, joint = (
        studentised_bootstrap(estimate.value, estimate.influence, level=x, seed=seed)
        for x in (level, together)
    )
    rarer = estimate.unseen(together) - estimate.unseen(level)
    below, above = room_for(rarer, estimate.value, estimate.possible)
    return max(one.low - joint.low, 0.0) + below, max(joint.high - one.high, 0.0) + above


def _jointly(level: float, compared: int) -> float:
    """The level that each of `compared` intervals needs to hold together at `level`."""
    return 1 - (1 - level) / compared


def difference_score(a: Estimate | None, b: Estimate | None) -> float | None:
    """The difference of two estimates in standard errors, less what both leave open; None without influences of the same episodes."""
    if a is None or b is None or len(a.influence) != len(b.influence):
        return None
    psi = a.influence - b.influence
    error = float(psi.std(ddof=1) / np.sqrt(len(psi)))
    gap = a.value - b.value
    left_open = open_difference(a, b)[0 if gap > 0 else 1]
    beyond = float(max(abs(gap) - left_open - 1e-6 * max(1.0, abs(a.value)), 0.0))
    return math.copysign(beyond / max(error, 1e-300), gap) if beyond else 0.0  # infinite without an error


def disjoint(a: Answer, b: Answer) -> bool:
    """Whether two intervals have no value in common."""
    return min(a.interval.high, b.interval.high) < max(a.interval.low, b.interval.low)
