"""Figures, tables, claims and the self-contained HTML page that shows them.

Nothing here knows what an experiment is. Whoever has results to show builds a `Section`, saves it into a
folder with `save_section`, and `write_page` turns any list of sections into one page.
"""

from marginax.report.claims import Claim, Interval, bootstrap, number, verdict
from marginax.report.page import write_page
from marginax.report.section import Figure, Section, Table, load_section, save_section, versions
from marginax.report.style import OPERATORS, OperatorStyle, operator_style, plot_style, save_figure

__all__ = [
    "OPERATORS",
    "Claim",
    "Figure",
    "Interval",
    "OperatorStyle",
    "Section",
    "Table",
    "bootstrap",
    "load_section",
    "number",
    "operator_style",
    "plot_style",
    "save_figure",
    "save_section",
    "verdict",
    "versions",
    "write_page",
]
