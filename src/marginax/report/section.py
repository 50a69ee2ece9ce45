"""A section of a report, and how it lies on disk.

A section is a folder with `result.json` and the files it names: for each figure `<file>.png` and
`<file>.pdf`, and the data behind it as CSV. `result.json` is written last and in one piece, so a folder that
has it is finished.
"""

import importlib.metadata
import json
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from marginax._files import atomic_write
from marginax.report.claims import Claim, Interval

FILE = "result.json"
FORMAT = 1


@dataclass(frozen=True)
class Figure:
    """A figure: `<file>.png` and `<file>.pdf` in the section's folder, its caption, a text for the blind.

    >>> Figure("chain", "Relative error against iterations.").file
    'chain'
    """

    file: str
    caption: str
    alt: str = ""


@dataclass(frozen=True)
class Table:
    """A small table shown in the page; cells are shown as they are, floats with three significant digits.

    >>> Table("Rates", ("clip", "rate"), ((1.0, 0.5), (2.0, 0.25))).columns
    ('clip', 'rate')
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """What one experiment has to show.

    Attributes:
        name: a short name, also that of the folder.
        title: the heading.
        text: paragraphs; `code` in backticks is set as code.
        figures: shown in this order.
        tables: shown after the figures.
        claims: lines for the claims table.
        data: names of CSV files in the folder with the data behind the figures.
        settings: everything the numbers depend on, shown in the page.
        command: the command that makes this section.
        seconds: how long it took to compute.
        key: fingerprint of the settings; a saved section with the same key need not be computed again.
        versions: packages and platform that computed it.

    >>> Section("chain", "The chain").claims
    ()
    """

    name: str
    title: str
    text: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    data: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    seconds: float = 0.0
    key: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on.

    >>> sorted(versions())[:2]
    ['jax', 'jaxlib']
    """
    packages = ("marginax", "jax", "jaxlib", "numpy", "scipy")
    found = {name: importlib.metadata.version(name) for name in packages}
    return {**found, "python": platform.python_version(), "platform": platform.platform(terse=True)}


def save_section(folder: Path, section: Section) -> None:
    """Write `result.json`, last and in one piece; the files it names must be there.

    Raises:
        FileNotFoundError: a figure or data file that the section names is missing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> save_section(folder, Section("chain", "The chain"))
    >>> load_section(folder).title
    'The chain'
    """
    for name in _files(section):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"section {section.name!r} names {name!r}, which is not in {str(folder)!r}"
            )
    text = json.dumps({"format": FORMAT, **asdict(section)}, indent=1, ensure_ascii=False)
    atomic_write(folder / FILE, lambda file: file.write(text.encode("utf-8")))


def load_section(folder: Path) -> Section | None:
    """Read a section back, or None where the folder has no finished one.

    Raises:
        ValueError: `result.json` is damaged or a file that it names is missing.

    >>> import tempfile
    >>> load_section(Path(tempfile.mkdtemp())) is None
    True
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        raw = json.loads(path.read_text("utf-8"))
        if raw.pop("format") != FORMAT:
            raise ValueError("unknown format")
        claims = tuple(Claim(**{**c, "interval": Interval(**c["interval"])}) for c in raw.pop("claims"))
        tables = tuple(
            Table(t["title"], tuple(t["columns"]), tuple(tuple(row) for row in t["rows"]), t["note"])
            for t in raw.pop("tables")
        )
        figures = tuple(Figure(**f) for f in raw.pop("figures"))
        raw["text"], raw["data"] = tuple(raw["text"]), tuple(raw["data"])
        section = Section(figures=figures, tables=tables, claims=claims, **raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from None
    missing = [name for name in _files(section) if not (folder / name).is_file()]
    if missing:
        raise _damaged(path, f"{missing[0]!r} is missing")
    return section


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(
        f"the earlier result {str(path)!r} is damaged ({reason}); remove it to compute it again"
    )


def _files(section: Section) -> list[str]:
    pictures = [f"{figure.file}.{kind}" for figure in section.figures for kind in ("png", "pdf")]
    return [*pictures, *section.data]
