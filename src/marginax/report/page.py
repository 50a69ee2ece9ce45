"""The HTML page: one file, nothing loaded from anywhere else."""

import base64
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from marginax._files import atomic_write
from marginax.report.claims import number
from marginax.report.section import Section


def write_page(
    path: Path,
    title: str,
    sections: Sequence[tuple[Path, Section]],
    *,
    lead: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> None:
    """Write one self-contained page: the claims of all sections, then each with its figures and tables.

    Args:
        path: the HTML file.
        title: heading of the page.
        sections: pairs of the folder that holds the figures and the section itself.
        lead: paragraphs below the heading.
        versions: shown at the foot; by default those of the first section.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "report.html"
    >>> write_page(path, "A report", [(path.parent, Section("chain", "The chain"))])
    >>> "<h2>The chain</h2>" in path.read_text("utf-8")
    True
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("marginax.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(prose=_prose, cell=_cell, slug=_slug)
    pictures = {
        (section.name, figure.file): _data_uri(folder / f"{figure.file}.png")
        for folder, section in sections
        for figure in section.figures
    }
    shown = [section for _, section in sections]
    text = environment.get_template("page.html").render(
        title=title,
        lead=lead,
        sections=shown,
        claims=[(section, claim) for section in shown for claim in section.claims],
        pictures=pictures,
        versions=versions if versions is not None else (shown[0].versions if shown else {}),
    )
    atomic_write(path, lambda file: file.write(text.encode("utf-8")))


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _prose(text: str) -> Markup:
    """Plain text with `code` in backticks and *stress* in stars."""
    safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return Markup(re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", safe))


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
