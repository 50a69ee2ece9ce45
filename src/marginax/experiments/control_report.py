"""What Figure 3's runs show: curves, a table, and claims with verdicts computed from the data."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from marginax import report
from marginax.deep.curves import Curve, draw, interval
from marginax.statistics import interquartile_mean

_SPINNING_UP = 120  # steps/s of Spinning Up's TD3 on cheetah-run
Tasks = Mapping[str, Mapping[str, Curve]]


def section(name: str, folder: Path, tasks: Tasks, seconds: float, preset: str) -> report.Section:
    """Write the figures and data of all tasks into a folder, and say what they show."""
    draw([curve for found in tasks.values() for curve in found.values()], folder, name)
    draw_finals(tasks, folder, f"{name}-final")
    _draw_diagnostics(tasks, folder, f"{name}-variance")
    steps = sum(
        len(curve.seeds) * int(curve.steps[-1]) for found in tasks.values() for curve in found.values()
    )
    names = [name for found in tasks.values() for name in found]
    base = "one-step" if "one-step" in names else names[0]
    columns = (
        *("task", "operator", "seeds", "steps", "final return", "area under the curve", "failures"),
        *("mean trace", "mean weight", "variance of target - Q"),
    )
    return report.Section(
        name,
        "Deep reinforcement learning (Figure 3)",
        text=(
            f"TD3 with the critic target of each operator. Settings start at the preset `{preset}`; the command says what "
            "is changed. Interquartile means over seeds with 95% bootstrap intervals. "
            "The final return is the mean over the last tenth of a run. A seed fails when it diverges, or when it ends "
            f"below a tenth of the median of {base}, if that is positive.",
            f"One seed after another at the {_SPINNING_UP} steps/s of Spinning Up's TD3 these runs take "
            f"{steps / _SPINNING_UP / 3600:.0f} hours; here their processes took {seconds / 60:.1f} minutes, added up.",
        ),
        figures=(
            report.Figure(name, "Evaluation return against environment steps.", "Learning curves"),
            report.Figure(f"{name}-final", "Final return of each operator.", "Final returns with intervals"),
            report.Figure(
                f"{name}-variance",
                "Left: variance over the batch of target minus Q. Right: mean credit of the steps after the first.",
                "Variance of targets and credit against steps",
            ),
        ),
        tables=(report.Table("Results", columns, tuple(r for t, f in tasks.items() for r in table(t, f))),),
        claims=tuple(claim for task, found in tasks.items() for claim in claims(task, found)),
        data=(f"{name}.csv",),
    )


def table(task: str, found: Mapping[str, Curve]) -> list[tuple]:
    """A row for each operator."""
    failed = failures(found)
    rows = []
    for operator, curve in found.items():
        last = {n: x[:, -max(1, x.shape[1] // 10) :] for n, x in curve.diagnostics.items()}
        typical = [float(_median(last[n])) for n in ("trace_mean", "weight_mean", "error_variance")]
        diagnostics = ["" if np.isnan(x) else x for x in typical]
        size = (len(curve.seeds), int(curve.steps[-1]))
        cells = (_cell(curve.final), _cell(curve.area), failed[operator])
        rows.append((task, operator, *size, *cells, *diagnostics))
    return rows


def _median(values: np.ndarray, axis: int | None = None) -> Any:
    """The median of what is known; NaN where nothing is, as for a seed that failed before it learned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.nanmedian(values, axis=axis)


def failures(found: Mapping[str, Curve]) -> dict[str, int]:
    """How many seeds of each operator diverged, or ended below a tenth of one-step's median (the first operator's without it).

    Where that median is not positive, only seeds that diverged are counted.
    """
    base = found.get("one-step", next(iter(found.values())))
    out = {}
    for operator, curve in found.items():
        floor = 0.1 * float(np.median(base.beside(curve).final))
        out[operator] = int(np.sum(curve.failed | ((curve.final < floor) & (floor > 0))))
    return out


def _cell(values: np.ndarray) -> str:
    middle, band = interval(values, 1000)
    return "{} [{}, {}]".format(*(report.number(float(x)) for x in (middle, band.low, band.high)))


def claims(task: str, found: Mapping[str, Curve]) -> list[report.Claim]:
    """The paper's sentences on Figure 3, and ours on the variance of targets."""
    out: list[report.Claim] = []
    multi = [name for name in found if name.startswith("retrace")]
    marginalized = [name for name in found if name.startswith("marginalized")]
    base = ["one-step"] if "one-step" in found else []

    def add(
        text: str, measure: str, statistic: Callable[..., Any], *samples: np.ndarray, **bounds: Any
    ) -> None:
        out.append(report.claim(text, f"Figure 3, {task}", measure, statistic, *samples, **bounds))

    def pair(name: str, other: str, what: str) -> tuple[np.ndarray, np.ndarray]:
        one, two = found[name], found[other]
        return getattr(one.beside(two), what), getattr(two.beside(one), what)

    for what, measure in (("final", "final return"), ("area", "area under the curve")):
        for name in multi if base else ():
            add(
                "Multi-step updates outperform or perform similarly as the one-step update",
                f"{measure}: ({name} - one-step) / one-step; similar: not 10% worse",
                gain,
                *pair(name, "one-step", what),
                low=-0.1,
            )
        for name in marginalized:
            for other in (*same_clip(name, multi), *base):
                vanilla = "the one-step update" if other == "one-step" else "the vanilla multi-step update"
                add(
                    f"Marginalized updates provide further gains over {vanilla}",
                    f"{measure}: ({name} - {other}) / {other}",
                    gain,
                    *pair(name, other, what),
                    low=0.0,
                )
    for name in marginalized:
        for other in same_clip(name, multi):
            add(
                "Variations across seeds are relatively large with learned TD weights",
                f"log of the ratio of the seeds' standard deviations of the final return, {name} over {other}",
                lambda x, y: np.log(max(x.std(), 1e-9) / max(y.std(), 1e-9)),
                *pair(name, other, "final"),
                low=0.0,
            )
        if "error_variance_retrace" in found[name].diagnostics:
            add(
                "Marginalized targets have lower variance than Retrace's",
                f"log of the ratio of the variances of target minus Q on the same batches, {name} over retrace",
                np.mean,
                variance_ratio(found[name], "retrace"),
                high=0.0,
            )
    return out


def same_clip(name: str, others: Sequence[str]) -> Sequence[str]:
    """Those of the other operators that have the clip of the named one; all of them if none has.

    >>> same_clip("marginalized-paths-clip-2", ["retrace", "retrace-clip-2"])
    ['retrace-clip-2']
    """
    clip = name.partition("-clip-")[2]
    return [other for other in others if other.partition("-clip-")[2] == clip] or others


def gain(x: np.ndarray, y: np.ndarray) -> float:
    """How far the interquartile mean of one sample lies above that of another, relative to the latter."""
    reference = float(interquartile_mean(y))
    return (float(interquartile_mean(x)) - reference) / max(abs(reference), 1e-9)


def variance_ratio(curve: Curve, rival: str) -> np.ndarray:
    """Log-ratio of the variance of target minus Q to a rival's on the same batches, second half, for each seed."""

    def typical(name: str) -> np.ndarray:
        values = curve.diagnostics[name]
        return np.log(np.maximum(_median(values[:, values.shape[1] // 2 :], axis=1), 1e-12))

    return typical("error_variance") - typical(f"error_variance_{rival}")


def draw_finals(tasks: Tasks, folder: Path, name: str) -> None:
    """A line for each operator: every seed's final return, the interquartile mean and its interval."""
    rows = max(len(found) for found in tasks.values())
    size = (6.8, len(tasks) * (0.28 * rows + 0.8))
    with report.panels(folder, name, size, rows=len(tasks)) as (_, axes):
        for axis, (task, found) in zip(axes[:, 0], tasks.items(), strict=True):
            labels = [f"{n}, {int(c.steps[-1]) // 1000:,}k ({len(c.seeds)})" for n, c in found.items()]
            for height, (operator, curve) in enumerate(found.items()):
                colour = report.operator_style(operator).colour
                middle, band = interval(curve.final, 1000)
                axis.plot(curve.final, np.full(len(curve.final), height), "|", color=colour, alpha=0.6)
                axis.plot([band.low, band.high], [height, height], color=colour)
                axis.plot([middle], [height], "o", color=colour)
            axis.set_yticks(range(len(labels)), labels)
            axis.invert_yaxis()
            axis.set_title(task)
        axes[-1, 0].set_xlabel("final return: each seed,\ninterquartile mean, 95% interval")


def _draw_diagnostics(tasks: Tasks, folder: Path, name: str) -> None:
    size = (6.8, 2.4 * len(tasks) + 0.8)
    with report.panels(folder, name, size, rows=len(tasks), columns=2) as (figure, axes):
        for (left, right), (task, found) in zip(axes, tasks.items(), strict=True):
            for operator, curve in found.items():
                style = report.operator_style(operator)
                for axis, column in ((left, "error_variance"), (right, "weight_mean")):
                    grid = curve.diagnostics[column]
                    known = ~np.isnan(grid).all(axis=0)  # the first updates may come later
                    typical = np.nanmedian(grid[:, known], axis=0)
                    axis.plot(curve.steps[known] / 1000, typical, color=style.colour, label=style.label)
            left.set_yscale("log")
            left.set_ylabel("variance of target - Q")
            right.set_ylabel("mean credit after the first step")
            for axis in (left, right):
                axis.set_title(task)
                axis.set_xlabel("thousand environment steps")
        report.legend_below(figure, axes[:, :1], columns=2)
