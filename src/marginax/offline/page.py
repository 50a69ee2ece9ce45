"""Step 7, page: JSON, figures and one self-contained page of an evaluation, or of a ranking of several."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from marginax import report
from marginax._files import atomic_write, check_writable, write_csv
from marginax.offline.diagnostics import STOPPED
from marginax.offline.importance import HEAVY
from marginax.offline.markov import FAILS
from marginax.offline.ranking import Ranking
from marginax.offline.results import Answer, Evaluation, effective, plain, share

_COLOURS = {
    "importance sampling": ("#D55E00", "o"),
    "doubly robust": ("#CC79A7", "s"),
    "marginalized": ("#0072B2", "^"),
    "fitted Q": ("#009E73", "D"),
    "average return": ("#000000", "x"),
}
_HEADLINE = {
    "trust": "The data can tell.",
    "caution": "With caution.",
    "cannot tell": "The data cannot tell.",
}
_OWN = "(the log's own return)"
_COLUMNS = ("estimator", "value", "low", "high", "family", "truncation", "ess", "ess of")


def write_report(
    result: Evaluation | Ranking, folder: str | Path, *, command: str = "", seconds: float = 0.0
) -> Path:
    """Writes `evaluation.json`, the figures and their data, and `evaluation.html` into `folder`.

    Args:
        result: what `evaluate` returned.
        folder: is made if it does not exist.
        command: the command that made the result, shown on the page.
        seconds: how long that took.

    Returns:
        The path of the page.

    Raises:
        OSError: if the folder cannot be written.

    >>> import tempfile, marginax as mx
    >>> log = mx.offline.Log.from_episodes(
    ...     [dict(states=[0, 0], actions=[a], rewards=[float(a)], terminal=True) for a in [0, 1] * 20])
    >>> write_report(mx.offline.evaluate(log, [[0.25, 0.75]]), tempfile.mkdtemp()).name
    'evaluation.html'
    """
    folder = Path(folder)
    check_writable(folder)
    text = json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
    atomic_write(folder / "evaluation.json", lambda file: file.write(text.encode("utf-8")))
    if isinstance(result, Ranking):
        title, lead = "Which policy?", [report.literal(sentence) for sentence in result.text]
        sections = [_ranking_section(result, folder)]
        for name, prefix in _prefixes(result.order).items():
            one = result.policies[name]
            parts = _sections(one, folder, prefix)
            first = replace(parts[0], text=(*_lead(one), *parts[0].text))
            sections += [replace(s, title=f"{name}: {s.title.lower()}") for s in (first, *parts[1:])]
    else:
        title, lead = f"What is {result.settings['policy']} worth?", _lead(result)
        sections = _sections(result, folder, "")
    sections[0] = replace(sections[0], command=command, seconds=seconds, versions=report.versions())
    page = folder / "evaluation.html"
    report.write_page(
        page, title, [(folder, section) for section in sections], lead=lead, versions=report.versions()
    )
    return page


def _lead(evaluation: Evaluation) -> list[str]:
    """The settings and the log, the recommended estimate, and the verdict."""
    d, settings, verdict = evaluation.diagnostics, evaluation.settings, evaluation.verdict
    steps = "all steps" if settings["horizon"] is None else f"the first {settings['horizon']:,} steps"
    lead = [
        f"γ = {settings['discount']:g}, {steps}; {d['episodes']:,} episodes and {d['transitions']:,} transitions of "
        f"{report.literal(settings['data'])}."
    ]
    if verdict.estimator is not None:
        chosen = evaluation.answers[verdict.estimator]
        until = " until its episodes were truncated" if d["tail_behaviour"] > STOPPED else ""
        lead.append(
            f"Value of the policy: *{chosen.value:.4g}*, {100 * settings['level']:g}% interval {chosen.interval.low:.4g} to "
            f"{chosen.interval.high:.4g} ({verdict.estimator}). The log itself earned {evaluation.behaviour.value:.4g}{until}."
        )
    return [*lead, f"*{_HEADLINE[verdict.status]}* {' '.join(verdict.text)}"]


def _row(a: Answer) -> tuple[Any, ...]:
    ess = (a.ess, None if a.ess is None else a.ess_of)
    return (a.name, a.value, a.interval.low, a.interval.high, a.kind, a.truncation, *ess)


def _prefixes(names: Iterable[str]) -> dict[str, str]:
    """The first part of the names of each policy's files and sections. They differ even if case does not count."""
    found: dict[str, str] = {}
    for name in names:
        prefix = (re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "policy") + "-"
        while prefix.lower() in {taken.lower() for taken in found.values()}:
            prefix += "2-"
        found[name] = prefix
    return found


def _sections(evaluation: Evaluation, folder: Path, prefix: str) -> list[report.Section]:
    sections = [_estimates(evaluation, folder, prefix), _weights(evaluation, folder, prefix)]
    sections.append(_overlap(evaluation, folder, prefix))
    if evaluation.diagnostics["returns"]["behaviour"] is not None:
        sections.append(_returns(evaluation, folder, prefix))
    return sections


def _estimates(evaluation: Evaluation, folder: Path, prefix: str) -> report.Section:
    settings, level = evaluation.settings, f"{100 * evaluation.settings['level']:g}%"
    answers = (*evaluation.answers.values(), evaluation.behaviour)
    write_csv(folder / f"{prefix}estimates.csv", _COLUMNS, [_row(a) for a in answers])
    report.save_figure(draw_estimates(evaluation), folder, f"{prefix}estimates")
    shown = []
    for a in answers:
        name, value, low, high, *rest, ess, of = _row(a)
        if name == evaluation.verdict.estimator:
            name = f"*▸ {name}*"
        elif name == "behaviour":
            name = _OWN
        cells = (f"{value:.4g}", f"{low:.4g}", f"{high:.4g}", *rest)
        shown.append((name, *cells, None if ess is None else f"{ess:,.0f}", of))
    text = [
        "Value from the log's starts; ▸ is the recommended estimate. Estimators that *stop* count nothing after a truncated step; "
        "those that *bootstrap* fill in what follows. Intervals are over whole episodes (studentised bootstrap)."
    ]
    bound = next((a.bound for a in evaluation.answers.values() if a.bound is not None), None)
    if bound is not None:
        least, largest = settings["reward_range"]
        text.append(
            f"A bound that holds for any number of episodes (clipped empirical Bernstein, on per-decision importance "
            f"sampling; rewards from {least:.4g} to {largest:.4g}): {bound.low:.4g} to {bound.high:.4g}."
        )
    caption = (
        f"Estimates with {level} intervals; the dashed line is the log's own return. An arrow stands for an interval, or an "
        "estimate, that goes on outside the picture."
    )
    return report.Section(
        f"{prefix}estimates",
        "Estimates",
        text=tuple(text),
        figures=(report.Figure(f"{prefix}estimates", caption),),
        tables=(report.Table("All estimators", _COLUMNS, tuple(shown)),),
        data=(f"{prefix}estimates.csv",),
        settings={k: str(v) for k, v in plain(settings).items()},
    )


def _weights(evaluation: Evaluation, folder: Path, prefix: str) -> report.Section:
    d, tables = evaluation.diagnostics, []
    if d["largest_weights"]:
        known = d["largest_weights"]
        columns: tuple[str, ...] = ("weight", "episode", "at step", "state", "action")
        columns = columns if any(entry["state"] is not None for entry in known) else columns[:3]
        largest = tuple(_literals(entry.values())[: len(columns)] for entry in known)
        title = "Largest weights of episodes, and the step where each was largest"
        tables.append(report.Table(title, columns, largest))
    if d["largest_ratios"]:
        title = "Largest marginalized ratios: visits of the policy to visits of the log"
        rows = tuple(_literals(entry.values()) for entry in d["largest_ratios"])
        tables.append(report.Table(title, tuple(d["largest_ratios"][0]), rows))
    if not d["weighed"]:
        text = "Importance sampling does not apply to this policy: episodes have no weights. The notes below say why."
        return report.Section(f"{prefix}weights", "Weights", text=(text,), tables=tuple(tables))
    report.save_figure(draw_weights(evaluation), folder, f"{prefix}weights")
    tail = (
        ", so heavy that what was drawn says little of what was not: the intervals of importance sampling and doubly "
        "robust leave room for that."
        if d["tail_index"] > HEAVY
        else "; from 0.5 up they would have no variance."
    )
    text = (
        f"Importance sampling has {effective(d['ess'])} of {d['episodes']:,}. Weights of whole episodes average "
        f"{d['mean_weight']:.3g} ± {d['mean_weight_error']:.2g}; they should average 1. The index of their tail is "
        f"{d['tail_index']:.2f}{tail}"
    )
    caption = "Left: weights of whole episodes. Right: effective episodes by step."
    return report.Section(
        f"{prefix}weights",
        "Weights",
        text=(text,),
        figures=(report.Figure(f"{prefix}weights", caption),),
        tables=tuple(tables),
    )


def _overlap(evaluation: Evaluation, folder: Path, prefix: str) -> report.Section:
    d = evaluation.diagnostics
    report.save_figure(draw_overlap(evaluation), folder, f"{prefix}overlap")
    pairs = tuple(_literals(entry.values()) for entry in d["unsupported_pairs"])
    title = "Where the policy leaves the log"
    tables = (report.Table(title, ("state", "action", "mass"), pairs),) if pairs else ()
    left = "Discounted probability that the policy leaves what the log has seen"
    if d.get("unsupported_steps"):
        left = "Share of the policy's discounted steps whose actions are outside what the log has seen"
    error = d["behaviour_error"]
    frequencies = "" if error is None else f" They differ from frequencies by {error:.3f} on average."
    under_target = f" and {d['tail_target']:.2%} under this one" if d["weighed"] else ""
    markov = "The Markov assumption was not tested: the log, or what is known of the policy, does not suffice for that."
    if d["markov_degrees"]:
        score = f"its score is {d['markov_score']:.1f} standard deviations above chance"
        markov = f"The Markov test found nothing: {score}, below the limit of {FAILS:g}."
        if d["markov_fails"]:
            markov = f"The Markov test fails: what came before a step predicts what follows it, given state and action; {score}."
    caption = (
        "Left: share of the log against share of the policy's occupancy, a point for each pair of state and action (or for each "
        "twentieth of the log, in the order of its ratios). "
        "Right: behaviour probabilities against observed frequencies."
    )
    return report.Section(
        f"{prefix}overlap",
        "Overlap, behaviour and states",
        text=(
            f"{left}: {share(d['unsupported'])}. Behaviour probabilities: {d['behaviour']}.{frequencies}",
            markov,
            f"{d['truncated']} of {d['episodes']} episodes were truncated; what follows them carries "
            f"{d['tail_behaviour']:.2%} of the discount under the log's policy{under_target}.",
            *(report.literal(note[0].upper() + note[1:]) + "." for note in evaluation.notes),
        ),
        figures=(report.Figure(f"{prefix}overlap", caption),),
        tables=tables,
    )


def _returns(evaluation: Evaluation, folder: Path, prefix: str) -> report.Section:
    found = evaluation.diagnostics["returns"]
    report.save_figure(draw_returns(evaluation), folder, f"{prefix}returns")
    rows = []
    for who, one in (("policy", found["target"]), ("log", found["behaviour"])):
        for kind, title in (("quantiles", "quantile"), ("cvar", "CVaR")):
            for entry in (one or {}).get(kind, ()):
                cells = (f"{entry[k]:.4g}" for k in ("value", "low", "high"))
                rows.append((who, f"{title} {entry['share']:.0%}", *cells))
    text = "The return of one episode: how often it is at most so much. CVaR is the mean of the worst part."
    if found["reason"]:
        text += f" Not known for the policy: {found['reason']}."
    return report.Section(
        f"{prefix}returns",
        "Distribution of returns",
        text=(text,),
        figures=(report.Figure(f"{prefix}returns", "Distribution functions of the return of an episode."),),
        tables=(report.Table("Quantiles and CVaR", ("of", "what", "value", "low", "high"), tuple(rows)),),
    )


def _ranking_section(ranking: Ranking, folder: Path) -> report.Section:
    report.save_figure(draw_ranking(ranking), folder, "ranking")
    rows = []
    for name in ranking.order:
        one = ranking.policies[name]
        a = one.answers.get(one.verdict.estimator or "")
        cells: tuple[str | None, ...] = (None,) * 4
        if a is not None:
            cells = (f"{a.value:.4g}", f"{a.interval.low:.4g}", f"{a.interval.high:.4g}", a.name)
        shown = report.literal(name)
        shown = f"*▸ {shown}*" if name == ranking.best else shown
        rows.append((shown, *cells, one.verdict.status, one.verdict.better))
    pairs = tuple(
        (
            report.literal(f"{d.first} less {d.second}"),
            f"{d.value:.4g}",
            f"{d.interval.low:.4g}",
            f"{d.interval.high:.4g}",
            "yes" if d.real else "no",
        )
        for d in ranking.differences
    )
    columns = ("policy", "value", "low", "high", "estimator", "verdict", "than the log's policy")
    return report.Section(
        "ranking",
        "Ranking",
        text=(
            "Policies by the lower end of the recommended interval. Differences are paired: both policies are evaluated on the same "
            "episodes. Their intervals hold for all pairs together.",
        ),
        figures=(
            report.Figure(
                "ranking", "The recommended estimate of each policy; dashed, the log's own return."
            ),
        ),
        tables=(
            report.Table("Policies", columns, tuple(rows)),
            report.Table("Differences", ("difference", "value", "low", "high", "real"), pairs),
        ),
    )


def draw_estimates(evaluation: Evaluation) -> Figure:
    """Estimates with intervals, a row for each estimator; arrows where something lies outside the picture."""
    answers = [*evaluation.answers.values(), evaluation.behaviour]
    names = [a.name for a in answers[:-1]] + [_OWN]
    chosen = evaluation.verdict.estimator
    mark = names.index(chosen) if chosen is not None else None
    return _draw_rows(answers, names, mark, evaluation.behaviour.value)


def draw_ranking(ranking: Ranking) -> Figure:
    """The recommended estimate of each policy, in their order."""
    told = [name for name in ranking.order if ranking.policies[name].verdict.estimator is not None]
    ones = [ranking.policies[name] for name in told]
    answers = [one.answers[str(one.verdict.estimator)] for one in ones]
    logged = next(iter(ranking.policies.values())).behaviour
    names = [fill(name if len(name) <= 90 else f"{name[:44]}…{name[-45:]}", 45) for name in told]
    return _draw_rows([*answers, logged], [*names, _OWN], 0 if told else None, logged.value)


def _draw_rows(answers: list[Answer], names: list[str], mark: int | None, dashed: float) -> Figure:
    low, high = _limits(answers, mark)
    with report.plot_style():
        figure = Figure(figsize=(6.4, 0.6 + 0.26 * len(answers)))
        axes = figure.subplots()
        for i, a in enumerate(answers):
            colour, marker = _COLOURS[a.kind]
            y = len(answers) - i
            if i == mark:
                axes.axhspan(y - 0.45, y + 0.45, color="#F0E442", alpha=0.35, lw=0)
            ends = np.clip([a.interval.low, a.interval.high], low, high)
            axes.plot(ends, [y, y], color=colour, lw=2.6 if i == mark else 1.6, solid_capstyle="butt")
            for end, arrow, outside in (
                (low, "<", a.interval.low < low),
                (high, ">", a.interval.high > high),
            ):
                if outside:
                    axes.plot([end], [y], arrow, color=colour, ms=4, clip_on=False)
            if not low <= a.value <= high:
                marker = "<" if a.value < low else ">"
            axes.plot(np.clip([a.value], low, high), [y], marker, color=colour, ms=5, clip_on=False)
        axes.axvline(dashed, color="#777777", lw=0.8, ls="--")
        labels = [name.replace("$", r"\$") for name in names]  # else Matplotlib reads mathematics
        axes.set_yticks(range(len(answers), 0, -1), labels)
        axes.set_ylim(0.5, len(answers) + 0.5)
        if mark is not None:
            axes.get_yticklabels()[mark].set_fontweight("bold")
        axes.set_xlabel("value")
        axes.set_xlim(low, high)
    return figure


def _limits(answers: list[Answer], mark: int | None) -> tuple[float, float]:
    """What the picture shows: the intervals of the narrower half of the rows and of the marked one, and some room."""
    narrow = sorted(answers, key=lambda a: a.interval.width)[: (len(answers) + 1) // 2]
    narrow += [answers[-1]] + ([answers[mark]] if mark is not None else [])
    ends = [x for a in narrow for x in (a.interval.low, a.value, a.interval.high)]
    finite = [x for x in ends if np.isfinite(x)] or [0.0]
    room = 0.3 * (max(finite) - min(finite)) or 1.0
    return min(finite) - room, max(finite) + room


def draw_weights(evaluation: Evaluation) -> Figure:
    """The distribution of episode weights and the effective sample size by step."""
    curves = evaluation.curves
    with report.plot_style():
        figure = Figure(figsize=(6.4, 2.4))
        left, right = figure.subplots(1, 2)
        histogram = curves["weight_histogram"]
        edges, heights = np.asarray(histogram["edges"]), np.asarray(histogram["heights"])
        left.bar(edges[:-1], heights, width=np.diff(edges), align="edge", color="#D55E00")
        left.axvline(0.0, color="#000000", lw=0.8, ls="--")
        left.set_xlabel("log₁₀ weight of an episode")
        left.set_ylabel(f"episodes ({histogram['zeros']} have weight 0)")
        ess, episodes = np.maximum(curves["ess_by_time"], 1e-3), evaluation.diagnostics["episodes"]
        right.plot(np.arange(len(ess)), ess, color="#D55E00")
        right.axhline(episodes, color="#777777", lw=0.8, ls="--")
        right.set_ylim(ess.min() / 3, episodes * 3)
        right.set_yscale("log")
        right.set_xlabel("step")
        right.set_ylabel("effective episodes")
    return figure


def draw_returns(evaluation: Evaluation) -> Figure:
    """Distribution functions of the return, of the log and, where weights allow, of the policy."""
    found = evaluation.diagnostics["returns"]
    with report.plot_style():
        figure = Figure(figsize=(6.4, 2.4))
        axes = figure.subplots()
        for who, label, colour in (("behaviour", "log", "#777777"), ("target", "policy", "#0072B2")):
            if found[who] is not None:
                curve = found[who]["curve"]
                axes.step(curve["returns"], curve["share"], where="post", color=colour, label=label)
        axes.set_xlabel("return of an episode")
        axes.set_ylabel("share of episodes below")
        axes.legend()
    return figure


def draw_overlap(evaluation: Evaluation) -> Figure:
    """Where the log went against where the policy goes, and the calibration of the behaviour policy."""
    curves = evaluation.curves
    with report.plot_style():
        figure = Figure(figsize=(6.4, 2.8))
        left, right = figure.subplots(1, 2)
        left.set(xlabel="share of the log", ylabel="share of the policy")
        overlap = curves["overlap"]
        if overlap is None:
            left.text(0.5, 0.5, "not known", ha="center")
        else:
            x, y = np.asarray(overlap["behaviour"]), np.asarray(overlap["target"])
            both = (x > 0) | (y > 0)
            x, y = x[both], y[both]
            if len(x) > 5000:
                keep = np.argsort(np.maximum(x, y))[-5000:]
                x, y = x[keep], y[keep]
            floor = max(min(x[x > 0].min(initial=1.0), y[y > 0].min(initial=1.0)), 1e-8)
            left.scatter(np.maximum(x, floor), np.maximum(y, floor), s=8, color="#0072B2", alpha=0.6, lw=0)
            top = max(x.max(), y.max())
            left.plot([floor, top], [floor, top], color="#777777", lw=0.8, ls="--")
            left.set(xscale="log", yscale="log", xlim=(floor / 3, top * 3), ylim=(floor / 3, top * 3))
        right.plot([0, 1], [0, 1], color="#777777", lw=0.8, ls="--")
        check = curves["calibration"]
        if check is not None:
            right.plot(check["predicted"], check["observed"], "o-", color="#009E73")
            right.set(xlabel="behaviour probability, predicted", ylabel="observed")
        else:
            estimated = evaluation.diagnostics["behaviour"] == "estimated"
            right.text(0.7, 0.2, "estimated by counts" if estimated else "not compared", ha="center")
            right.set_xlabel("behaviour probability")
    return figure


def _literals(values: Iterable[Any]) -> tuple[Any, ...]:
    """Cells of a table; labels of the log are no markup."""
    return tuple(report.literal(value) if isinstance(value, str) else value for value in values)
