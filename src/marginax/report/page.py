"""The HTML page: one file, nothing loaded from anywhere else."""

import base64
import html
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from marginax._files import atomic_write
from marginax.report.claims import VERDICTS, number
from marginax.report.section import Section

_MARKS = {ord(mark): 0xE000 + ord(mark) for mark in "$*`"}  # private characters, which no markup looks for
_UNMARKED = {private: mark for mark, private in _MARKS.items()}
_PLAIN = {
    r"\bar c": "c̄",
    r"\bar ": "",
    **{rf"\{name}": letter for name, letter in zip(
        ("alpha", "beta", "gamma", "lambda", "pi", "mu", "sigma", "tau", "sum", "times", "le", "ge", "pm", "to"),
        "αβγλπμστΣ×≤≥±→",
        strict=True,
    )},
    r"\,": " ",
    "{": "",
    "}": "",
}  # fmt: skip


def write_page(
    path: Path,
    title: str,
    sections: Sequence[tuple[Path, Section]],
    *,
    lead: Sequence[str] = (),
    versions: Mapping[str, str] | None = None,
) -> None:
    """Writes one self-contained page: the main claims, then each section, its figures first and its claims folded.

    Args:
        path: the HTML file.
        title: heading of the page.
        sections: pairs of the folder that holds figures and data, and the section itself.
        lead: paragraphs below the heading.
        versions: shown at the foot; by default those of the first section.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "report.html"
    >>> write_page(path, "A report", [(path.parent, Section("chain", "The chain"))])
    >>> "<h2>The chain</h2>" in path.read_text("utf-8")
    True
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("marginax.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(prose=_prose, plain=plain, cell=_cell, slug=_slug)
    pictures = {
        (section.name, figure.file): _data_uri(folder / f"{figure.file}.png")
        for folder, section in sections
        for figure in section.figures
    }
    files = {
        section.name: [Path(os.path.relpath(folder / name, path.parent)).as_posix() for name in section.data]
        for folder, section in sections
    }
    shown = [section for _, section in sections]
    text = environment.get_template("page.html").render(
        title=title,
        lead=lead,
        sections=shown,
        claims=[claim for section in shown for claim in section.claims],
        verdicts=VERDICTS,
        pictures=pictures,
        files=files,
        versions=versions if versions is not None else (shown[0].versions if shown else {}),
    )
    atomic_write(path, lambda file: file.write(text.encode("utf-8")))


def literal(text: str) -> str:
    """Text whose stars, backticks and dollar signs are no markup, such as a name that a user gave.

    >>> plain(literal("bid $5 or $6") + " at $\\gamma$")
    'bid $5 or $6 at γ'
    """
    return text.translate(_MARKS)


def plain(text: str) -> str:
    r"""Text without markup, for a terminal: LaTeX between dollar signs becomes Unicode.

    >>> plain(r"at $\bar c = 2$ *both* are `Q^pi`, $Q^\pi$")
    'at c̄ = 2 both are Q^pi, Q^π'
    """

    def unicode(match: re.Match[str]) -> str:
        found = match[1]
        for latex, letter in _PLAIN.items():
            found = found.replace(latex, letter)
        return found

    text = re.sub(r"\$([^$]+)\$", unicode, text)
    return re.sub(r"\*([^*\s][^*]*)\*", r"\1", text).replace("`", "").translate(_UNMARKED)


def _prose(text: str) -> Any:
    """Text with `code` in backticks, *stress* in stars and LaTeX between dollar signs, as HTML and MathML."""
    from latex2mathml.converter import convert
    from markupsafe import Markup

    pieces = re.split(r"(\$[^$]+\$)", text)
    for i, piece in enumerate(pieces):
        if i % 2:
            pieces[i] = convert(piece[1:-1])
        else:
            safe = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(piece, quote=False))
            pieces[i] = re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", safe)
    return Markup("".join(pieces).translate(_UNMARKED))


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _cell(value: object) -> Any:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else _prose(str(value))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
