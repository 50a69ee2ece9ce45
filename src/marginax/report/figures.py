"""One look for every figure: an operator has the same colour, marker and name everywhere, and reads in grey."""

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from marginax._files import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class OperatorStyle:
    """How an operator is drawn: its name in legends, a colour, and a marker that tells it apart in grey."""

    label: str
    colour: str
    marker: str


OPERATORS = {
    "one-step": OperatorStyle("one-step", "#000000", "s"),
    "n-step": OperatorStyle("n-step", "#B15928", "4"),
    "retrace": OperatorStyle("Retrace", "#D55E00", "o"),
    "retrace-paper": OperatorStyle("Retrace of the paper's agent", "#8C2D04", "8"),
    "tree-backup": OperatorStyle("tree backup", "#999999", "P"),
    "importance-sampling": OperatorStyle("importance sampling", "#C8B400", "X"),
    "q-lambda": OperatorStyle("Q(λ)", "#8C6D31", "*"),
    "peng": OperatorStyle("Peng's Q(λ)", "#CC79A7", "v"),
    "vtrace": OperatorStyle("V-trace", "#E69F00", "p"),
    "marginalized": OperatorStyle("marginalized", "#1B4F9C", "H"),
    "marginalized-monte-carlo": OperatorStyle("marginalized, Monte Carlo", "#0072B2", "^"),
    "marginalized-certainty-equivalence": OperatorStyle(
        "marginalized, certainty equivalence", "#009E73", "D"
    ),
    "marginalized-exact": OperatorStyle("marginalized, exact weights", "#56B4E9", "x"),
    "marginalized-monte-carlo-paths": OperatorStyle("marginalized, Monte Carlo of the path", "#117733", "+"),
    "marginalized-paths": OperatorStyle("marginalized, network of paths", "#999933", "3"),
    "marginalized-reverse-td": OperatorStyle("marginalized, reverse TD", "#661100", "1"),
    "marginalized-as-printed": OperatorStyle("marginalized, Algorithm 2 as printed", "#EE99AA", "2"),
    "marginalized-regression": OperatorStyle("marginalized, regression", "#332288", "<"),
    "marginalized-saddle-point": OperatorStyle("marginalized, saddle point", "#882255", ">"),
    "marginalized-fenchel": OperatorStyle("marginalized, Fenchel", "#44AA99", "h"),
    "marginalized-paper": OperatorStyle("marginalized, the paper's agent", "#AA4499", "d"),
}
"""Styles by operator: the colours of Okabe and Ito where they suffice, told apart by the colour-blind."""


_OTHERS = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#777777")


def operator_style(name: str) -> OperatorStyle:
    """The style of an operator by name. A variation of one keeps its colour; its initials are the marker.

    Any other name has a colour of its own, the same in every figure.

    >>> operator_style("retrace").label, operator_style("retrace-decay-0.9").marker
    ('Retrace', '$d0.9$')
    """
    if name in OPERATORS:
        return OPERATORS[name]
    base = max((known for known in OPERATORS if name.startswith(known)), key=len, default="")
    words = re.findall(r"[a-zA-Z]+|[\d.]+", name.removeprefix(base))
    marker = "".join(word[0] if word.isalpha() else word for word in words)
    colour = OPERATORS[base].colour if base else _OTHERS[zlib.crc32(name.encode()) % len(_OTHERS)]
    return OperatorStyle(name, colour, f"${marker}$" if marker else ".")


@contextmanager
def plot_style() -> Iterator[None]:
    """Matplotlib settings of a paper's figure: small sans text, thin lines, no frame on top and right."""
    import matplotlib

    settings: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8.5,
        "axes.labelsize": 8,
        "legend.fontsize": 7.5,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.linewidth": 0.7,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#E4E4E4",
        "grid.linewidth": 0.6,
        "lines.linewidth": 1.4,
        "lines.markersize": 4,
        "legend.frameon": False,
        "figure.constrained_layout.use": True,
        "pdf.fonttype": 42,
        "savefig.facecolor": "white",
    }
    with matplotlib.rc_context(settings):
        yield


def save_figure(figure: "Figure", folder: Path, name: str) -> None:
    """Saves a figure as `<name>.png` and `<name>.pdf`, each whole or not at all."""
    atomic_write(folder / f"{name}.pdf", lambda file: figure.savefig(file, format="pdf"))
    atomic_write(folder / f"{name}.png", lambda file: figure.savefig(file, format="png", dpi=160))


@contextmanager
def panels(
    folder: Path, name: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[tuple["Figure", np.ndarray]]:
    """A figure and its axes `[rows, columns]` to draw on; saved under `name` in the end.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with panels(folder, "empty", (1, 1)) as (figure, axes):
    ...     axes[0, 0].set_xlabel("x")
    Text(...)
    >>> sorted(path.name for path in folder.iterdir())
    ['empty.pdf', 'empty.png']
    """
    from matplotlib.figure import Figure

    with plot_style():
        figure = Figure(figsize=size)
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)
        save_figure(figure, folder, name)


@contextmanager
def panel_each(
    folder: Path, name: str, titles: Sequence[str], size: tuple[float, float], x: str, y: str
) -> Iterator[tuple["Figure", list[Any]]]:
    """A figure with a panel per title, of the given size and at most three in a row, and their axes.

    `x` and `y` are the labels of the axes at the lower and the left edge. The figure is saved under `name` in the end.
    """
    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = -(-len(titles) // columns)
    whole = (max(4.6, size[0] * columns), size[1] * rows + 0.6)
    with panels(folder, name, whole, rows, columns) as (figure, axes):
        for axis in axes.ravel()[len(titles) :]:
            axis.set_visible(False)
        for axis in axes[:, 0]:
            axis.set_ylabel(y)
        used = axes.ravel()[: len(titles)].tolist()
        for axis in used[-columns:]:
            axis.set_xlabel(x)
        for axis, title in zip(used, titles, strict=True):
            axis.set_title(title)
        yield figure, used


def draw_curves(
    axis: Any, x: np.ndarray, values: np.ndarray, operator: str, *, band: bool = True, **options: Any
) -> None:
    """Draws the mean over runs of `values[runs, n]` in the operator's style, and the middle half of the runs."""
    style = operator_style(operator)
    if band:
        low, high = np.quantile(values, [0.25, 0.75], axis=0)
        axis.fill_between(x, low, high, color=style.colour, alpha=0.12, linewidth=0)
    options = {"label": style.label, "marker": style.marker, "markevery": max(1, len(x) // 8), **options}
    axis.plot(x, values.mean(axis=0), color=style.colour, **options)


def draw_map(axis: Any, grid: np.ndarray, **options: Any) -> Any:
    """Draws a heat map without ticks and returns it for a colour bar."""
    axis.set(xticks=[], yticks=[], facecolor="#BBBBBB")  # where the grid has no number
    axis.grid(False)
    return axis.imshow(grid, **{"cmap": "hot", "interpolation": "nearest", **options})


def legend_below(figure: "Figure", axes: np.ndarray | Sequence[Any], columns: int | None = None) -> None:
    """One legend below all panels, with each label once."""
    handles: dict[str, Any] = {}
    for axis in np.ravel(np.asarray(axes, dtype=object)):
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=columns or len(handles)
    )
