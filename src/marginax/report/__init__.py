"""Figures, tables, claims and the self-contained HTML page that shows them.

Nothing here knows what an experiment is. Whoever has results to show builds a `Section`, saves it into a
folder with `save_section`, and `write_page` turns any list of sections into one page.
"""

from marginax.report.claims import Claim, claim, count_verdicts, number, verdict
from marginax.report.figures import (
    OPERATORS,
    OperatorStyle,
    draw_curves,
    draw_map,
    legend_below,
    operator_style,
    panel_each,
    panels,
    plot_style,
    save_figure,
)
from marginax.report.page import literal, plain, write_page
from marginax.report.section import Figure, Section, Table, load_section, save_section, versions

__all__ = [
    "OPERATORS",
    "Claim",
    "Figure",
    "OperatorStyle",
    "Section",
    "Table",
    "claim",
    "count_verdicts",
    "draw_curves",
    "draw_map",
    "legend_below",
    "literal",
    "load_section",
    "number",
    "operator_style",
    "panel_each",
    "panels",
    "plain",
    "plot_style",
    "save_figure",
    "save_section",
    "verdict",
    "versions",
    "write_page",
]
