"""The report of an evaluation: JSON, figures and one self-contained page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from marginax import report
from marginax._files import atomic_write, check_writable, write_csv
from marginax.offline.importance import HEAVY
from marginax.offline.results import Answer, Evaluation, plain

_COLOURS = {
    "importance sampling": ("#D55E00", "o"),
    "doubly robust": ("#CC79A7", "s"),
    "marginalized": ("#0072B2", "^"),
    "fitted Q": ("#009E73", "D"),
    "average return": ("#000000", "x"),
}


def write_report(
    evaluation: Evaluation, folder: str | Path, *, command: str = "", seconds: float = 0.0
) -> Path:
    """Writes `evaluation.json`, the figures, and `evaluation.html` into `folder`.

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
    text = json.dumps(evaluation.to_dict(), indent=1, ensure_ascii=False)
    atomic_write(folder / "evaluation.json", lambda file: file.write(text.encode("utf-8")))
    rows = [_row(a) for a in (*evaluation.answers.values(), evaluation.behaviour)]
    write_csv(folder / "estimates.csv", _COLUMNS, rows)
    sections = _sections(evaluation, folder, rows, command, seconds)
    page = folder / "evaluation.html"
    verdict = evaluation.verdict
    lead = [f"*{_HEADLINE[verdict.status]}* {' '.join(verdict.text)}"]
    if verdict.estimator is not None:
        chosen = evaluation.answers[verdict.estimator]
        lead.insert(
            0,
            f"Value of the policy: *{chosen.value:.4g}*, 95% interval {chosen.interval.low:.4g} to "
            f"{chosen.interval.high:.4g} ({verdict.estimator}). The log itself earned {evaluation.behaviour.value:.4g}.",
        )
    report.write_page(
        page,
        f"What is {evaluation.settings['policy']} worth?",
        [(folder, section) for section in sections],
        lead=lead,
        versions=report.versions(),
    )
    return page


_HEADLINE = {
    "trust": "The data can tell.",
    "caution": "With caution.",
    "cannot tell": "The data cannot tell.",
}
_COLUMNS = ("estimator", "family", "value", "low", "high", "truncation", "ess", "ess of")


def _row(a: Any) -> tuple[Any, ...]:
    return (
        a.name,
        a.kind,
        a.value,
        a.interval.low,
        a.interval.high,
        a.truncation,
        a.ess,
        a.ess_of if a.ess is not None else None,
    )


def _sections(
    evaluation: Evaluation, folder: Path, rows: list[Any], command: str, seconds: float
) -> list[report.Section]:
    d = evaluation.diagnostics
    settings = {k: str(v) for k, v in plain(evaluation.settings).items()}
    made: list[report.Section] = []
    report.save_figure(draw_estimates(evaluation), folder, "estimates")
    shown = tuple(
        (
            *(f"{v:.4g}" if isinstance(v, float) else v for v in row[:6]),
            None if row[6] is None else f"{row[6]:,.0f}",
            row[7],
        )
        for row in rows
    )
    bound = next((a.bound for a in evaluation.answers.values() if a.bound is not None), None)
    text = [
        "Discounted value from the log's starts. Estimators that *stop* count nothing after a truncated step; those "
        "that *bootstrap* fill in what follows. Intervals are over whole episodes (studentised bootstrap)."
    ]
    if bound is not None:
        least, largest = evaluation.settings["reward_range"]
        text.append(
            f"A bound that holds for any number of episodes (clipped empirical Bernstein, on per-decision importance "
            f"sampling; rewards from {least:.4g} to {largest:.4g}): {bound.low:.4g} to {bound.high:.4g}."
        )
    made.append(
        report.Section(
            "estimates",
            "Estimates",
            text=tuple(text),
            figures=(
                report.Figure(
                    "estimates",
                    "Estimates with 95% intervals; the dashed line is the log's own return. An arrow stands for an estimate "
                    "that lies outside the picture.",
                ),
            ),
            tables=(report.Table("All estimators", _COLUMNS, shown),),
            data=("estimates.csv",),
            command=command,
            seconds=seconds,
            settings=settings,
            versions=report.versions(),
        )
    )
    report.save_figure(draw_weights(evaluation), folder, "weights")
    known = [entry for entry in d["largest_weights"] if entry["weight"] > 0]
    tabular = any(entry["state"] is not None for entry in known)
    largest = tuple(tuple(entry.values())[: 5 if tabular else 3] for entry in known)
    ratios = tuple(tuple(entry.values()) for entry in d.get("largest_ratios", ()))
    tables = [
        report.Table(
            "Largest weights of episodes, and the step where each was largest",
            ("weight", "episode", "at step", "state", "action")[: 5 if tabular else 3],
            largest,
        )
    ]
    if ratios:
        columns = tuple(d["largest_ratios"][0])
        tables.append(
            report.Table(
                "Largest marginalized ratios: visits of the policy to visits of the log", columns, ratios
            )
        )
    made.append(
        report.Section(
            "weights",
            "Weights",
            text=(
                f"{d['ess']:.1f} effective episodes of {d['episodes']} stand behind importance sampling. Weights of whole "
                f"episodes average {d['mean_weight']:.3g} ± {d['mean_weight_error']:.2g}; they should average 1. The index of their "
                f"tail is {d['tail_index']:.2f}"
                + (
                    ", so heavy that what was drawn says little of what was not: the intervals of importance sampling "
                    "leave room for that."
                    if d["tail_index"] > HEAVY
                    else "; from 0.5 up they would have no variance."
                ),
            ),
            figures=(
                report.Figure(
                    "weights", "Left: weights of whole episodes. Right: effective episodes by step."
                ),
            ),
            tables=tuple(tables),
        )
    )
    report.save_figure(draw_overlap(evaluation), folder, "overlap")
    pairs = tuple(tuple(entry.values()) for entry in d.get("unsupported_pairs", ()))
    tables = (
        [report.Table("Where the policy leaves the log", ("state", "action", "mass"), pairs)] if pairs else []
    )
    made.append(
        report.Section(
            "overlap",
            "Overlap and behaviour",
            text=(
                f"Discounted probability that the policy leaves what the log has seen: {d['unsupported']:.2%}. "
                f"Behaviour probabilities: {d['behaviour']}."
                + (
                    ""
                    if d.get("behaviour_error") is None
                    else f" They differ from frequencies by {d['behaviour_error']:.3f} on average."
                ),
                f"{d['truncated']} of {d['episodes']} episodes were truncated; what follows them carries "
                f"{d['tail_behaviour']:.2%} of the discount under the log's policy and {d['tail_target']:.2%} under this one.",
                *evaluation.notes,
            ),
            figures=(report.Figure("overlap", _OVERLAP),),
            tables=tuple(tables),
        )
    )
    return made


_OVERLAP = (
    "Left: share of the log against share of the policy's occupancy, a point for each pair (or decile of ratios). "
    "Right: behaviour probabilities against observed frequencies."
)


def draw_estimates(evaluation: Evaluation) -> Figure:
    """Estimates with intervals, a row for each estimator; an arrow where the estimate lies outside the picture."""
    answers = [*evaluation.answers.values(), evaluation.behaviour]
    low, high = _limits(answers)
    with report.plot_style():
        figure = Figure(figsize=(6.4, 0.6 + 0.26 * len(answers)))
        axes = figure.subplots()
        for i, a in enumerate(answers):
            colour, marker = _COLOURS[a.kind]
            y = len(answers) - i
            ends = np.clip([a.interval.low, a.interval.high], low, high)
            axes.plot(ends, [y, y], color=colour, lw=1.6, solid_capstyle="butt")
            if not low <= a.value <= high:
                marker = "<" if a.value < low else ">"
            axes.plot(np.clip([a.value], low, high), [y], marker, color=colour, ms=5, clip_on=False)
        axes.axvline(evaluation.behaviour.value, color="#777777", lw=0.8, ls="--")
        names = [a.name for a in answers[:-1]] + ["(the log's own return)"]
        axes.set_yticks(range(len(answers), 0, -1), names)
        axes.set_xlabel("value")
        axes.set_xlim(low, high)
    return figure


def _limits(answers: list[Answer]) -> tuple[float, float]:
    """What the picture shows: the intervals of the narrower half of the estimators, and some room."""
    narrow = sorted(answers, key=lambda a: a.interval.width)[: (len(answers) + 1) // 2]
    ends = [x for a in (*narrow, answers[-1]) for x in (a.interval.low, a.value, a.interval.high)]
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
        ess = np.asarray(curves["ess_by_time"])
        right.plot(np.arange(len(ess)), np.maximum(ess, 1e-3), color="#D55E00")
        right.axhline(evaluation.diagnostics["episodes"], color="#777777", lw=0.8, ls="--")
        right.set_yscale("log")
        right.set_xlabel("step")
        right.set_ylabel("effective episodes")
    return figure


def draw_overlap(evaluation: Evaluation) -> Figure:
    """Where the log went against where the policy goes, and the calibration of the behaviour policy."""
    curves = evaluation.curves
    with report.plot_style():
        figure = Figure(figsize=(6.4, 2.8))
        left, right = figure.subplots(1, 2)
        overlap = curves["overlap"]
        x, y = np.asarray(overlap["behaviour"]), np.asarray(overlap["target"])
        both = (x > 0) | (y > 0)
        x, y = x[both], y[both]
        if len(x) > 5000:
            keep = np.argsort(np.maximum(x, y))[-5000:]
            x, y = x[keep], y[keep]
        floor = max(min(x[x > 0].min(initial=1.0), y[y > 0].min(initial=1.0)), 1e-8)
        left.scatter(np.maximum(x, floor), np.maximum(y, floor), s=8, color="#0072B2", alpha=0.6, lw=0)
        top = max(x.max(initial=floor), y.max(initial=floor))
        left.plot([floor, top], [floor, top], color="#777777", lw=0.8, ls="--")
        left.set_xscale("log")
        left.set_yscale("log")
        left.set_xlabel("share of the log")
        left.set_ylabel("share of the policy")
        right.plot([0, 1], [0, 1], color="#777777", lw=0.8, ls="--")
        check = curves.get("calibration")
        if check is not None:
            right.plot(check["predicted"], check["observed"], "o-", color="#009E73")
            right.set_xlabel("behaviour probability, predicted")
            right.set_ylabel("observed")
        else:
            right.text(0.5, 0.3, "estimated by counts", ha="center")
            right.set_xlabel("behaviour probability")
    return figure
