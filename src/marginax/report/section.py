"""A section of a report, and how it lies on disk.

A section is a folder with `result.json` and the files it names: for each figure `<file>.png` and
`<file>.pdf`, and the data behind it as CSV. `result.json` is written last and in one piece, so a folder that
has it is finished.
"""

import importlib.metadata
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import marginax
from marginax._files import load_json, save_json
from marginax.report.claims import Claim
from marginax.statistics import Interval

FILE = "result.json"
FORMAT = 2


@dataclass(frozen=True)
class Figure:
    """A figure: `<file>.png` and `<file>.pdf` in the section's folder.

    Attributes:
        file: the name of both files without the ending.
        caption: what is drawn.
        alt: the same in few words, for those who cannot see it.
        finding: the one sentence that it shows, set above it.
    """

    file: str
    caption: str
    alt: str = ""
    finding: str = ""


@dataclass(frozen=True)
class Table:
    """A small table shown in the page; cells are shown as they are, floats with three significant digits."""

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
        text: paragraphs; `code` in backticks is set as code, LaTeX between dollar signs as mathematics.
        figures: shown first, in this order.
        tables: shown after the text.
        claims: lines of the section's table of claims.
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
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy", "scipy")}
    # Ours is not asked for by name: a clone may be run without being installed.
    return {
        "marginax": marginax.__version__,
        **found,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
    }


def save_section(folder: Path, section: Section) -> None:
    """Writes `result.json`, last and in one piece; the files it names must be there.

    Raises:
        FileNotFoundError: a figure or data file that the section names is missing.
    """
    if missing := _missing(folder, section):
        raise FileNotFoundError(
            f"section {section.name!r} names {missing!r}, which is not in {str(folder)!r}"
        )
    save_json(folder / FILE, {"format": FORMAT, **asdict(section)})


def load_section(folder: Path) -> Section | None:
    """Reads a section back, or None where the folder has no finished one of this format.

    Raises:
        ValueError: `result.json` is damaged or a file that it names is missing.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> load_section(folder) is None
    True
    >>> save_section(folder, Section("chain", "The chain"))
    >>> load_section(folder).title
    'The chain'
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        raw = load_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; remove it to compute it again") from None
    if raw.pop("format", None) != FORMAT:
        return None
    tables = [
        (t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"])), t["note"]) for t in raw["tables"]
    ]
    section = Section(
        **{
            **raw,
            "text": tuple(raw["text"]),
            "figures": tuple(Figure(**figure) for figure in raw["figures"]),
            "tables": tuple(Table(*table) for table in tables),
            "claims": tuple(Claim(**{**c, "interval": Interval(**c["interval"])}) for c in raw["claims"]),
            "data": tuple(raw["data"]),
        }
    )
    if missing := _missing(folder, section):
        raise ValueError(
            f"the earlier result {str(path)!r} is damaged ({missing!r} is missing); remove it to compute it again"
        )
    return section


def _missing(folder: Path, section: Section) -> str | None:
    """The first file that a section names and that is not there."""
    pictures = [f"{figure.file}.{kind}" for figure in section.figures for kind in ("png", "pdf")]
    return next((name for name in (*pictures, *section.data) if not (folder / name).is_file()), None)
