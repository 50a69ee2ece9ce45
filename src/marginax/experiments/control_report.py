"""What Figure 3's runs show: curves, a table, and claims with verdicts computed from the data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marginax import report
from marginax._files import write_csv
from marginax.experiments.control_settings import Settings, read_metrics
from marginax.statistics import bootstrap, interquartile_mean

__all__ = ["Curves", "curves", "write"]

_SPINNING_UP = 120  # steps/s of Spinning Up's TD3 on cheetah-run
_COLOURS = ("#000000", "#D55E00", "#E69F00", "#0072B2", "#009E73", "#56B4E9", "#CC79A7", "#8C6D31", "#999999")


class Curves(NamedTuple):
    """One operator on one task.

    Attributes:
        seeds: Seeds, in increasing order.
        steps: Steps of the evaluations `[n]` that all seeds have reached.
        returns: Evaluation returns `[seeds, n]`.
        failed: Which seeds diverged `[seeds]`.
        diagnostics: Other columns of the metrics, each `[seeds, n]`.

    >>> Curves(np.arange(5), np.arange(2), np.zeros((5, 2)), np.zeros(5, bool), {}).returns.shape
    (5, 2)
    """

    seeds: np.ndarray
    steps: np.ndarray
    returns: np.ndarray
    failed: np.ndarray
    diagnostics: dict[str, np.ndarray]

    @property
    def final(self) -> np.ndarray:
        """Mean return over the last tenth of the run, for each seed."""
        return self.returns[:, -max(1, self.returns.shape[1] // 10) :].mean(axis=1)

    @property
    def area(self) -> np.ndarray:
        """Mean return over the whole run (area under the curve over its length), for each seed."""
        return self.returns.mean(axis=1)

    def beside(self, other: Curves) -> Curves:
        """The part with the seeds and steps that the other has too: runs of other lengths are not compared.

        >>> one = Curves(np.arange(3), np.array([10, 20]), np.ones((3, 2)), np.zeros(3, bool), {})
        >>> two = Curves(np.arange(5), np.array([10]), np.ones((5, 1)), np.zeros(5, bool), {})
        >>> one.beside(two).returns.shape, two.beside(one).returns.shape
        ((3, 1), (3, 1))
        """
        rows, columns = np.isin(self.seeds, other.seeds), np.isin(self.steps, other.steps)
        grids = {name: grid[rows][:, columns] for name, grid in self.diagnostics.items()}
        returns = self.returns[rows][:, columns]
        return Curves(self.seeds[rows], self.steps[columns], returns, self.failed[rows], grids)


def curves(rows: Sequence[dict[str, Any]]) -> dict[str, Curves]:
    """Metrics of one task as curves, by operator in order of appearance.

    >>> row = {"operator": "one-step", "seed": 0, "step": 10, "return": 1.0, "failed_at": -1, "q_mean": 0.5}
    >>> curves([row, {**row, "seed": 1, "return": 3.0}])["one-step"].final
    array([1., 3.])
    """
    out = {}
    for operator in dict.fromkeys(row["operator"] for row in rows):
        mine = [row for row in rows if row["operator"] == operator]
        seeds = sorted({row["seed"] for row in mine})
        reached = [{row["step"] for row in mine if row["seed"] == seed} for seed in seeds]
        steps = sorted(set.intersection(*reached))
        table = {(row["seed"], row["step"]): row for row in mine}
        names = [
            n for n in mine[0] if n not in ("operator", "seed", "step", "return", "failed_at", "seconds")
        ]
        grids = {n: np.array([[table[s, t][n] for t in steps] for s in seeds]) for n in (*names, "return")}
        failed = np.array([max(table[s, t]["failed_at"] for t in steps) >= 0 for s in seeds])
        out[operator] = Curves(np.array(seeds), np.array(steps), grids.pop("return"), failed, grids)
    return out


def _with_interval(values: np.ndarray) -> str:
    band = bootstrap(values, interquartile_mean)
    return (
        f"{report.number(interquartile_mean(values))} [{report.number(band.low)}, {report.number(band.high)}]"
    )


def write(settings: Settings, folder: Path) -> report.Section:
    """Write figures, data, table and claims of all tasks in the folder, as one section of the report.

    >>> write(Settings(tasks=("Pendulum-v1",)), Path("nowhere"))
    Traceback (most recent call last):
        ...
    ValueError: there are no metrics of Pendulum-v1 in nowhere
    """
    metrics = {task: read_metrics(folder, task) for task in settings.tasks}
    tasks = {task: curves(rows) for task, rows in metrics.items()}
    order = {name: i for i, name in enumerate(settings.operators)}
    for task, found in tasks.items():  # in the order of the command
        tasks[task] = dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
    for task, found in tasks.items():
        if not found:
            raise ValueError(f"there are no metrics of {task} in {folder}")
    looks = {name: i for i, name in enumerate(dict.fromkeys(n for found in tasks.values() for n in found))}
    _figure(tasks, looks, folder)
    _finals(tasks, looks, folder)
    _diagnostics(tasks, looks, folder)
    summary, claims, hours, seconds = [], [], 0.0, 0.0
    for task, found in tasks.items():
        summary += _table(task, found)
        claims += _claims(task, found)
        seconds += max(row["seconds"] for row in metrics[task])  # of all pieces of the run
        agents = sum(len(curve.returns) for curve in found.values())
        hours += agents * int(next(iter(found.values())).steps[-1]) / _SPINNING_UP / 3600
    columns = (
        *("task", "operator", "seeds", "steps", "final return", "area under the curve", "failures"),
        *("mean trace", "mean weight", "variance of target - Q"),
    )
    section = report.Section(
        "control",
        "Deep reinforcement learning (Figure 3)",
        text=(
            "TD3 with the critic target of each operator; interquartile means over seeds with 95% bootstrap intervals. "
            "The final return is the mean over the last tenth of a run. A seed fails when it diverges or ends below "
            "a tenth of one-step's median.",
            f"One seed after another at the {_SPINNING_UP} steps/s of Spinning Up's TD3 these runs take {hours:.0f} "
            f"hours; here they took {seconds / 60:.1f} minutes.",
        ),
        figures=(
            report.Figure("control", "Evaluation return against environment steps.", "Learning curves"),
            report.Figure("control-final", "Final return of each operator.", "Final returns with intervals"),
            report.Figure(
                "control-variance",
                "Left: variance over the batch of target minus Q. Right: mean credit of the steps after the first.",
                "Variance of targets and credit against steps",
            ),
        ),
        tables=(report.Table("Results", columns, tuple(summary)),),
        claims=tuple(claims),
        data=("control.csv",),
        settings={**settings.__dict__, "tasks": list(settings.tasks), "operators": list(settings.operators)},
        command=settings.command,
        seconds=seconds,
        versions=report.versions(),
    )
    report.save_section(folder, section)
    return section


def _table(task: str, found: dict[str, Curves]) -> list[tuple]:
    base = found.get("one-step", next(iter(found.values())))
    rows = []
    for operator, curve in found.items():
        floor = 0.1 * float(np.median(base.beside(curve).final))
        last = {
            name: values[:, -max(1, values.shape[1] // 10) :] for name, values in curve.diagnostics.items()
        }
        failures = int(np.sum(curve.failed | ((curve.final < floor) & (floor > 0))))
        rows.append(
            (
                task,
                operator,
                len(curve.returns),
                int(curve.steps[-1]),
                _with_interval(curve.final),
                _with_interval(curve.area),
                failures,
                *(float(np.nanmedian(last[n])) for n in ("trace_mean", "weight_mean", "error_variance")),
            )
        )
    return rows


def _claims(task: str, found: dict[str, Curves]) -> list[report.Claim]:
    """The paper's sentences on Figure 3, and ours on the variance of targets."""
    out = []
    multi = [name for name in found if name.startswith("retrace")]
    marginalized = [name for name in found if name.startswith("marginalized")]
    rivals = [*multi, *(["one-step"] if "one-step" in found else [])]
    for what in ("final", "area"):
        measure = {"final": "final return", "area": "area under the curve"}[what]
        for name in multi:
            if "one-step" in found:
                effect = _gain(found[name], found["one-step"], what)
                out.append(
                    report.claim(
                        "Multi-step updates outperform or perform similarly as the one-step update",
                        f"Figure 3, {task}",
                        f"{measure}: ({name} - one-step) / one-step; similar: not 10% worse",
                        *effect,
                        low=-0.1,
                    )
                )
        for name in marginalized:
            for other in rivals:
                effect = _gain(found[name], found[other], what)
                vanilla = "the one-step update" if other == "one-step" else "the vanilla multi-step update"
                out.append(
                    report.claim(
                        f"Marginalized updates provide further gains over {vanilla}",
                        f"Figure 3, {task}",
                        f"{measure}: ({name} - {other}) / {other}",
                        *effect,
                        low=0.0,
                    )
                )
    for name in marginalized:
        for other in multi:
            effect = _spread_ratio(found[name], found[other])
            out.append(
                report.claim(
                    "Variations across seeds are relatively large with learned TD weights",
                    f"Figure 3, {task}",
                    f"log of the ratio of the seeds' standard deviations of the final return, {name} over {other}",
                    *effect,
                    low=0.0,
                )
            )
        if "error_variance_retrace" in found[name].diagnostics:
            effect = _variance_ratio(found[name], "retrace")
            out.append(
                report.claim(
                    "Marginalized targets have lower variance than Retrace's",
                    f"Section 4, {task}",
                    f"log of the ratio of the variances of target minus Q on the same batches, {name} over retrace",
                    *effect,
                    high=0.0,
                )
            )
    return out


def _gain(curve: Curves, base: Curves, what: str) -> tuple:
    def statistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        reference = interquartile_mean(y)
        return (interquartile_mean(x) - reference) / np.maximum(np.abs(reference), 1e-9)

    return statistic, getattr(curve.beside(base), what), getattr(base.beside(curve), what)


def _spread_ratio(curve: Curves, base: Curves) -> tuple:
    def statistic(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.log(np.maximum(x.std(), 1e-9) / np.maximum(y.std(), 1e-9))

    return statistic, curve.beside(base).final, base.beside(curve).final


def _variance_ratio(curve: Curves, rival: str) -> tuple:
    """Log-ratio of the variance of target minus Q to a rival's on the same batches and networks, second half."""

    def typical(name: str) -> np.ndarray:
        values = curve.diagnostics[name]
        return np.log(np.maximum(np.nanmedian(values[:, values.shape[1] // 2 :], axis=1), 1e-12))

    ratio = typical("error_variance") - typical(f"error_variance_{rival}")
    return np.mean, ratio


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _count(found: dict[str, Curves]) -> str:
    counts = sorted({len(curve.seeds) for curve in found.values()})
    return " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))


def _legend(figure: Any, axes: np.ndarray) -> None:
    """One legend for all operators of all panels."""
    handles: dict[str, Any] = {}
    for axis in axes:
        found, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2)


def _figure(tasks: dict[str, dict[str, Curves]], looks: dict[str, int], folder: Path) -> None:
    from matplotlib.figure import Figure

    rows: list[list[Any]] = []
    with report.plot_style():
        figure = Figure(figsize=(max(4.6, 3.4 * len(tasks)), 3.6))
        axes = figure.subplots(1, len(tasks), squeeze=False)[0]
        for axis, (task, found) in zip(axes, tasks.items(), strict=True):
            for operator, curve in found.items():
                index, thousands = looks[operator], curve.steps / 1000
                middle = interquartile_mean(curve.returns)
                band = bootstrap(curve.returns, interquartile_mean, replicates=300)
                low, high = band.low, band.high
                colour = _colour(index)
                marker = "so^vDPX*x"[index % 9]
                every = max(1, len(middle) // 8)
                axis.plot(thousands, middle, color=colour, label=operator, marker=marker, markevery=every)
                axis.fill_between(thousands, low, high, color=colour, alpha=0.15, linewidth=0)
                columns = (curve.steps.tolist(), middle, low, high)
                rows += [[task, operator, *values] for values in zip(*columns, strict=True)]
            axis.set_title(f"{task} ({_count(found)} seeds)")
            axis.set_xlabel("thousand environment steps")
        axes[0].set_ylabel("return (interquartile mean)")
        _legend(figure, axes)
        report.save_figure(figure, folder, "control")
    write_csv(folder / "control.csv", ["task", "operator", "step", "return", "low", "high"], rows)


def _finals(tasks: dict[str, dict[str, Curves]], looks: dict[str, int], folder: Path) -> None:
    """A line for each operator: every seed's final return, the interquartile mean and its interval."""
    from matplotlib.figure import Figure

    rows = [max(len(found) for found in tasks.values())] * len(tasks)
    with report.plot_style():
        figure = Figure(figsize=(6.8, len(tasks) * (0.28 * rows[0] + 0.8)))
        axes = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
        for axis, (task, found) in zip(axes, tasks.items(), strict=True):
            labels = [f"{name}, {int(c.steps[-1]) // 1000:,}k ({len(c.seeds)})" for name, c in found.items()]
            for height, (operator, curve) in enumerate(found.items()):
                colour, middle = _colour(looks[operator]), bootstrap(curve.final, interquartile_mean)
                axis.plot(curve.final, np.full(len(curve.final), height), "|", color=colour, alpha=0.6)
                axis.plot([middle.low, middle.high], [height, height], color=colour)
                axis.plot([interquartile_mean(curve.final)], [height], "o", color=colour)
            axis.set_yticks(range(len(labels)), labels)
            axis.invert_yaxis()
            axis.set_title(task)
        axes[-1].set_xlabel("final return: each seed,\ninterquartile mean, 95% interval")
        report.save_figure(figure, folder, "control-final")


def _diagnostics(tasks: dict[str, dict[str, Curves]], looks: dict[str, int], folder: Path) -> None:
    from matplotlib.figure import Figure

    with report.plot_style():
        figure = Figure(figsize=(6.8, 2.4 * len(tasks) + 0.8))
        grid = figure.subplots(len(tasks), 2, squeeze=False)
        for (left, right), (task, found) in zip(grid, tasks.items(), strict=True):
            for operator, curve in found.items():
                for axis, name in ((left, "error_variance"), (right, "weight_mean")):
                    typical = np.nanmedian(curve.diagnostics[name], axis=0)
                    axis.plot(curve.steps / 1000, typical, color=_colour(looks[operator]), label=operator)
            left.set_yscale("log")
            left.set_ylabel("variance of target - Q")
            right.set_ylabel("mean credit after the first step")
            for axis in (left, right):
                axis.set_title(task)
                axis.set_xlabel("thousand environment steps")
        _legend(figure, grid[:, 0])
        report.save_figure(figure, folder, "control-variance")
