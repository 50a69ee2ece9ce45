"""Learning curves: interquartile means over seeds with bootstrap intervals, operators side by side."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from marginax.deep.run import load_run, read_metrics, read_status, seed_folder, seeds_in

__all__ = ["Curve", "Summary", "bootstrap", "draw", "interquartile_mean", "load_curves", "summarise"]


class Curve(NamedTuple):
    """The returns of all seeds of one run.

    Attributes:
        simulator: Name of the simulator.
        label: The operator, with the settings that differ from other runs of it.
        steps: Steps of the evaluations that every seed has reached, `[n]`.
        returns: Mean evaluation returns, `[seeds, n]`.
        failures: Seeds that diverged.

    >>> Curve("Pendulum-v1", "retrace", np.array([100]), np.zeros((5, 1)), 0).returns.shape
    (5, 1)
    """

    simulator: str
    label: str
    steps: np.ndarray
    returns: np.ndarray
    failures: int


class Summary(NamedTuple):
    """One line of the table.

    Attributes:
        final: Interquartile mean of the last evaluations (a tenth of the run), with a 95% interval.
        area: The same for the mean of the whole curve.

    >>> summarise(Curve("a", "b", np.arange(10), np.ones((3, 10)), 0)).final
    (1.0, 1.0, 1.0)
    """

    final: tuple[float, float, float]
    area: tuple[float, float, float]


def interquartile_mean(values: Float[np.ndarray, "seeds *rest"]) -> np.ndarray:
    """The mean of the middle half over the first axis, entries at the edges counted in part.

    >>> interquartile_mean(np.array([0.0, 1.0, 2.0, 100.0]))
    array(1.5)
    """
    ordered = np.sort(values, axis=0)
    count = len(ordered)
    edges = np.arange(count + 1)
    share = np.clip(np.minimum(edges[1:], 0.75 * count) - np.maximum(edges[:-1], 0.25 * count), 0, None)
    return np.asarray(np.tensordot(share, ordered, 1) / (count / 2))


def bootstrap(
    values: Float[np.ndarray, "seeds *rest"], resamples: int = 2000, level: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile interval of the interquartile mean, seeds drawn with replacement (always with the same draws).

    >>> low, high = bootstrap(np.ones((5, 3)))
    >>> low
    array([1., 1., 1.])
    """
    random = np.random.default_rng(0)
    draws = random.integers(0, len(values), (resamples, len(values)))
    means = np.stack([interquartile_mean(values[draw]) for draw in draws])
    tail = 50 * (1 - level)
    low, high = np.percentile(means, [tail, 100 - tail], axis=0)
    return np.asarray(low), np.asarray(high)


def load_curves(folders: Iterable[Path]) -> list[Curve]:
    """The curves of runs, labelled so that runs on one simulator are told apart.

    A seed that diverged keeps its last return until the end: it counts as the failure it is.

    Raises:
        ValueError: If a folder holds no run, or a run has no evaluation yet.

    >>> load_curves([])
    []
    """
    runs = [(folder, load_run(folder)) for folder in folders]
    curves = []
    for folder, run in runs:
        rivals = [other for _, other in runs if other.simulator == run.simulator]
        label = run.agent.label + _differences(run.agent, [r.agent for r in rivals])
        lines, failures = [], 0
        for seed in seeds_in(folder):
            metrics = read_metrics(seed_folder(folder, seed))
            diverged = read_status(seed_folder(folder, seed))["state"] == "diverged"
            failures += diverged
            if metrics or diverged:
                lines.append((metrics, diverged))
        whole = [[line["step"] for line in metrics] for metrics, diverged in lines if not diverged]
        steps = min(whole, key=len, default=[]) or max(
            ([line["step"] for line in metrics] for metrics, _ in lines), key=len, default=[]
        )
        if not steps:
            raise ValueError(f"the run in {str(folder)!r} has no evaluation yet.")
        returns = np.array([_padded([line["return"] for line in m], len(steps)) for m, _ in lines if m])
        curves.append(Curve(run.simulator, label, np.array(steps), returns, failures))
    return curves


def summarise(curve: Curve) -> Summary:
    """The final and the mean performance of a curve.

    >>> summarise(Curve("a", "b", np.arange(10), np.ones((3, 10)), 0)).area
    (1.0, 1.0, 1.0)
    """
    last = max(1, curve.returns.shape[1] // 10)
    final, area = curve.returns[:, -last:].mean(axis=1), curve.returns.mean(axis=1)
    return Summary(_interval(final), _interval(area))


def draw(curves: Sequence[Curve], folder: Path) -> list[Path]:
    """Figures (PNG and PDF) and the data behind them (CSV), one of each for all simulators together.

    >>> import tempfile
    >>> curve = Curve("a", "retrace", np.array([10, 20]), np.zeros((3, 2)), 0)
    >>> [path.name for path in draw([curve], Path(tempfile.mkdtemp()))]
    ['curves.png', 'curves.pdf', 'curves.csv']
    """
    from matplotlib.figure import Figure

    from marginax._files import write_csv
    from marginax.report import operator_style, plot_style, save_figure

    simulators = list(dict.fromkeys(curve.simulator for curve in curves))
    rows: list[list[Any]] = []
    with plot_style():
        figure = Figure(figsize=(3.6 * len(simulators), 2.8))
        axes = figure.subplots(1, len(simulators), squeeze=False)[0]
        for axis, simulator in zip(axes, simulators, strict=True):
            for curve in (c for c in curves if c.simulator == simulator):
                style = operator_style(curve.label)
                middle = interquartile_mean(curve.returns)
                low, high = bootstrap(curve.returns, 500)
                axis.plot(
                    curve.steps,
                    middle,
                    color=style.colour,
                    marker=style.marker,
                    markevery=max(1, len(middle) // 8),
                    label=f"{style.label} ({len(curve.returns)})",
                )
                axis.fill_between(curve.steps, low, high, color=style.colour, alpha=0.15, linewidth=0)
                rows += [
                    [simulator, curve.label, *values]
                    for values in zip(curve.steps.tolist(), middle, low, high, strict=True)
                ]
            axis.set_title(simulator)
            axis.set_xlabel("environment steps")
            axis.legend()
        axes[0].set_ylabel("return (interquartile mean)")
        save_figure(figure, folder, "curves")
    columns = ["simulator", "operator", "step", "return", "low", "high"]
    write_csv(folder / "curves.csv", columns, rows)
    return [folder / f"curves.{kind}" for kind in ("png", "pdf", "csv")]


def _padded(values: list[float], length: int) -> list[float]:
    return (values + [values[-1]] * length)[:length]


def _differences(agent: Any, rivals: Sequence[Any]) -> str:
    """The settings by which runs of one operator differ."""
    alike = [rival.to_json() for rival in rivals if rival.label == agent.label]
    own = agent.to_json()
    names = [name for name in own if any(rival[name] != own[name] for rival in alike)]
    return "".join(f", {name} {own[name]}" for name in names)


def _interval(values: np.ndarray) -> tuple[float, float, float]:
    low, high = bootstrap(values)
    return float(interquartile_mean(values)), float(low), float(high)
