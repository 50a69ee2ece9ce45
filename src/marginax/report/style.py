"""One look for every figure: an operator has the same colour, dash and name everywhere, and reads in grey."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from marginax._files import atomic_write


@dataclass(frozen=True)
class OperatorStyle:
    """How an operator is drawn: its name in legends, a colour, and a marker that tells it apart in grey.

    >>> OPERATORS["one-step"].marker
    's'
    """

    label: str
    colour: str
    marker: str


OPERATORS = {
    "one-step": OperatorStyle("one-step", "#000000", "s"),
    "retrace": OperatorStyle("Retrace", "#D55E00", "o"),
    "tree-backup": OperatorStyle("tree backup", "#999999", "P"),
    "importance-sampling": OperatorStyle("importance sampling", "#F0E442", "X"),
    "q-lambda": OperatorStyle("Q(λ)", "#8C6D31", "*"),
    "marginalized": OperatorStyle("marginalized", "#0072B2", "^"),
    "marginalized-monte-carlo": OperatorStyle("marginalized, Monte Carlo", "#0072B2", "^"),
    "marginalized-literal": OperatorStyle("marginalized, Algorithm 2 as printed", "#CC79A7", "v"),
    "marginalized-certainty-equivalence": OperatorStyle(
        "marginalized, certainty equivalence", "#009E73", "D"
    ),
    "marginalized-exact": OperatorStyle("marginalized, exact weights", "#56B4E9", "x"),
}
"""Styles by operator: colours of Okabe and Ito (told apart by the colour-blind), ordered so that their greys differ too."""


def operator_style(name: str) -> OperatorStyle:
    """The style of an operator by name; an unknown one is grey with its own name.

    >>> operator_style("retrace").label
    'Retrace'
    """
    return OPERATORS.get(name, OperatorStyle(name, "#777777", "."))


@contextmanager
def plot_style() -> Iterator[None]:
    """Matplotlib settings of a paper's figure: small sans text, thin lines, no frame on top and right.

    >>> with plot_style():
    ...     matplotlib.rcParams["font.size"]
    8.0
    """
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


def save_figure(figure: Figure, folder: Path, name: str, dpi: int = 160) -> None:
    """Save a figure as `<name>.png` and `<name>.pdf`, each whole or not at all.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_figure(Figure(figsize=(1, 1)), folder, "empty")
    >>> sorted(path.name for path in folder.iterdir())
    ['empty.pdf', 'empty.png']
    """
    atomic_write(folder / f"{name}.pdf", lambda file: figure.savefig(file, format="pdf"))
    atomic_write(folder / f"{name}.png", lambda file: figure.savefig(file, format="png", dpi=dpi))
