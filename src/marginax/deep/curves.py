"""Learning curves: interquartile means over seeds with bootstrap intervals, operators side by side."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from marginax import report
from marginax._files import write_csv
from marginax.deep.metrics import known_number
from marginax.deep.run import Run, load_run, run_metrics
from marginax.statistics import Interval, bootstrap, interquartile_mean

_PLAIN = ("operator", "seed", "step", "returns", "failed_at", "seconds")  # columns that are no curves


class Curve(NamedTuple):
    """All seeds of one operator on one simulator.

    Attributes:
        simulator: Name of the simulator.
        label: The operator, with the settings that differ from other runs of it.
        seeds: Seeds, in increasing order.
        steps: Steps of the evaluations that every seed has reached, `[n]`.
        returns: Mean evaluation returns, `[seeds, n]`.
        failed: Which seeds diverged, `[seeds]`.
        diagnostics: Other columns of the metrics, each `[seeds, n]`; NaN where they have none.
    """

    simulator: str
    label: str
    seeds: np.ndarray
    steps: np.ndarray
    returns: np.ndarray
    failed: np.ndarray
    diagnostics: Mapping[str, np.ndarray] = {}

    @property
    def final(self) -> np.ndarray:
        """Mean return over the last tenth of the run, for each seed."""
        return self.returns[:, -max(1, self.returns.shape[1] // 10) :].mean(axis=1)

    @property
    def area(self) -> np.ndarray:
        """Mean return over the whole run (area under the curve over its length), for each seed."""
        return self.returns.mean(axis=1)

    def beside(self, other: "Curve") -> "Curve":
        """The part with the seeds and steps that the other has too: runs of other lengths are not compared."""
        rows, columns = np.isin(self.seeds, other.seeds), np.isin(self.steps, other.steps)
        return self._replace(
            seeds=self.seeds[rows],
            steps=self.steps[columns],
            returns=self.returns[rows][:, columns],
            failed=self.failed[rows],
            diagnostics={name: grid[rows][:, columns] for name, grid in self.diagnostics.items()},
        )


def curves_of(simulator: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Curve]:
    """Lines of metrics as curves, by operator in order of appearance.

    A seed that diverged keeps its last values until the end: it counts as the failure it is. If all seeds of an operator
    diverged, the steps are those of the other operators.
    """
    table: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: (line["seed"], line["step"])):
        table.setdefault((line["operator"], int(line["seed"])), []).append(line)
    failed = {agent: any(_failed(line) for line in mine) for agent, mine in table.items()}
    well = {agent: mine for agent, mine in table.items() if not failed[agent]}
    longest = max(table.values(), key=lambda mine: mine[-1]["step"], default=[])
    out = {}
    for operator in dict.fromkeys(line["operator"] for line in lines):
        agents = [agent for agent in table if agent[0] == operator]
        whole = [well[agent] for agent in agents if agent in well] or list(well.values()) or [longest]
        steps = sorted(set.intersection(*({int(line["step"]) for line in mine} for mine in whole)))
        rows = [[_at(table[agent], step) for step in steps] for agent in agents]
        names = [name for name in table[agents[0]][0] if name not in _PLAIN]
        grids = {
            name: np.array([[_number(line.get(name)) for line in row] for row in rows]) for name in names
        }
        out[operator] = Curve(
            simulator,
            operator,
            seeds=np.array([seed for _, seed in agents]),
            steps=np.array(steps),
            returns=grids.pop("return"),
            failed=np.array([failed[agent] for agent in agents]),
            diagnostics=grids,
        )
    return out


def _at(lines: Sequence[Mapping[str, Any]], step: int) -> Mapping[str, Any]:
    """The last of a seed's lines, in the order of steps, that is not after `step`."""
    return next((line for line in reversed(lines) if line["step"] <= step), lines[0])


def _failed(line: Mapping[str, Any]) -> bool:
    at = line.get("failed_at")
    return at is not None and at >= 0


def _number(value: Any) -> float:
    return np.nan if value is None else float(value)


def load_curves(folders: Iterable[Path]) -> list[Curve]:
    """The curves of runs, labelled so that runs on one simulator are told apart.

    Raises:
        ValueError: If a folder holds no run, or a run has no evaluation yet, or its files are damaged.
    """
    places = list(folders)
    runs = [load_run(folder) for folder in places]
    curves = []
    for folder, run in zip(places, runs, strict=True):
        found = curves_of(run.config.simulator, run_metrics(folder))
        if not found:
            raise ValueError(f"the run in {str(folder)!r} has no evaluation yet.")
        for label, curve in found.items():
            if not curve.steps.size:
                raise ValueError(
                    f"the seeds of {label!r} in {str(folder)!r} have no step of evaluation in common yet."
                )
            same = [other for other in runs if other.config.simulator == run.config.simulator]
            rivals = [_settings(other, label) for other in same if label in other.config.groups]
            curves.append(curve._replace(label=label + _difference(_settings(run, label), rivals)))
    return curves


def _settings(run: Run, label: str) -> dict[str, Any]:
    """The settings of a group of a run, and the name of its agent."""
    return {"agent": run.config.kind, **run.config.groups[label].to_json()}


def _difference(own: dict[str, Any], rivals: Sequence[dict[str, Any]]) -> str:
    """The settings that tell a run from others, as the end of a label; agents of another name have other settings."""
    alike = [rival for rival in rivals if rival["agent"] == own["agent"]]
    names = ["agent"] * (len(alike) < len(rivals))
    names += [name for name in own if any(rival[name] != own[name] for rival in alike)]
    return "".join(f", {name} {own[name]}" for name in names)


def interval(values: np.ndarray, replicates: int = 2000) -> tuple[Any, Interval]:
    """The interquartile mean over seeds of `[seeds, …]`, and its 95% interval."""
    return interquartile_mean(values), bootstrap(values, interquartile_mean, replicates=replicates)


def _seeds(curves: Sequence[Curve]) -> str:
    """How many seeds they have, in words: one number or a range."""
    counts = sorted({len(curve.seeds) for curve in curves})
    count = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    return f"{count} seed{'s' * (counts[-1] > 1)}"


def draw(curves: Sequence[Curve], folder: Path, name: str = "curves") -> list[Path]:
    """A figure (PNG and PDF) with a panel per simulator, and the data behind it (CSV)."""
    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.simulator, []).append(curve)
    titles = [f"{simulator} ({_seeds(mine)})" for simulator, mine in panels.items()]
    labels = ("thousand environment steps", "return (interquartile mean)")
    rows: list[list[Any]] = []
    with report.panel_each(folder, name, titles, (3.4, 3.0), *labels) as (figure, axes):
        for axis, (simulator, mine) in zip(axes, panels.items(), strict=True):
            for curve in mine:
                style, thousands = report.operator_style(curve.label), curve.steps / 1000
                middle, band = interval(curve.returns, 500)
                axis.plot(
                    thousands,
                    middle,
                    color=style.colour,
                    marker=style.marker,
                    markevery=max(1, len(middle) // 8),
                    label=style.label,
                )
                if len(curve.seeds) > 1:
                    axis.fill_between(
                        thousands, band.low, band.high, color=style.colour, alpha=0.15, linewidth=0
                    )
                for step, *values in zip(curve.steps.tolist(), middle, band.low, band.high, strict=True):
                    rows.append([simulator, curve.label, step, *map(known_number, values)])
        report.legend_below(figure, axes, columns=2)
    write_csv(folder / f"{name}.csv", ["simulator", "operator", "step", "return", "low", "high"], rows)
    return [folder / f"{name}.{kind}" for kind in ("png", "pdf", "csv")]
