"""Writes the numbers of a run into README and docs: `python docs/_build/results.py out`.

The results in the folder `out` go to `docs/data/results.json` and their figures to `docs/img`. Then every block

    <!-- results: KIND NAME … -->
    <!-- results: end -->

in README.md and docs/*.md is written anew. Without a folder the blocks are written from the results that are stored; with
`--check` nothing is written, and the exit status is 1 if a page says something else. The kinds are `findings` (a sentence
per experiment), `figures`, `table`, `claims` (each of some experiments), and `main` (the claims that matter most).
"""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from marginax import report
from marginax.statistics import Interval

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "data" / "results.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- results: (?!end)(.*?) -->\n).*?(<!-- results: end -->)", re.S)


def store(out: Path) -> None:
    """Takes the finished sections of a folder into the stored results, and their figures into the docs."""
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for folder in sorted(path.parent for path in out.glob("*/result.json")):
        section = report.load_section(folder)
        if section is None:
            continue
        for figure in section.figures:
            name = section.name if len(section.figures) == 1 else f"{section.name}-{figure.file}"
            shutil.copy(folder / f"{figure.file}.png", ROOT / "docs" / "img" / f"{name}.png")
        kept = ("title", "command", "figures", "tables", "claims")
        stored[section.name] = {k: v for k, v in dataclasses.asdict(section).items() if k in kept}
    STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n")


def rewritten(text: str, results: dict[str, Any], images: str) -> str:
    """A page with its blocks written from the results; `images` is the way from the page to docs/img."""

    def block(match: re.Match[str]) -> str:
        kind, *names = match[2].split()
        return f"{match[1]}{KINDS[kind](results, names, images)}\n{match[3]}"

    return BLOCK.sub(block, text)


def findings(results: dict[str, Any], names: list[str], images: str) -> str:
    """A list of what the first figure of each experiment shows."""
    return "\n".join(f"- {results[name]['figures'][0]['finding']}" for name in names)


def figures(results: dict[str, Any], names: list[str], images: str) -> str:
    """The figures of experiments (or one of them, as `experiment/file`), each below its finding."""
    lines = []
    for name in names:
        name, _, only = name.partition("/")
        made = results[name]["figures"]
        for figure in made:
            if only in ("", figure["file"]):
                file = name if len(made) == 1 else f"{name}-{figure['file']}"
                image = f"![{report.plain(figure['alt'])}]({images}/{file}.png)"
                caption = f"{figure['caption']} `{results[name]['command']}`"
                lines += [f"**{figure['finding']}**", "", image, "", caption, ""]
    return "\n".join(lines[:-1])


def table(results: dict[str, Any], names: list[str], images: str) -> str:
    """The tables of experiments."""
    lines = []
    for name in names:
        for each in results[name]["tables"]:
            cells = [[report.number(c) if isinstance(c, float) else str(c) for c in row] for row in each["rows"]]
            lines += [f"{each['title']} (`{results[name]['command']}`). {each['note']}", ""]
            lines += [*_markdown(each["columns"], cells), ""]
    return "\n".join(lines[:-1])


def claims(results: dict[str, Any], names: list[str], images: str) -> str:
    """All claims of experiments, a table each."""
    lines = []
    for name in names:
        made = _claims(results, name)
        lines += [f"## {results[name]['title']}", "", f"`{results[name]['command']}`: {report.count_verdicts(made)}.", ""]
        lines += [*_claims_table(made), ""]
    return "\n".join(lines[:-1])


def main_claims(results: dict[str, Any], names: list[str], images: str) -> str:
    """How many claims of experiments have which verdict, and those that matter most."""
    made = [claim for name in names for claim in _claims(results, name)]
    count = f"Of {len(made)} claims, {report.count_verdicts(made)}. Those that matter most:"
    return "\n".join([count, "", *_claims_table([claim for claim in made if claim.main])])


KINDS = {"findings": findings, "figures": figures, "table": table, "claims": claims, "main": main_claims}


def _claims(results: dict[str, Any], name: str) -> list[report.Claim]:
    return [report.Claim(**{**c, "interval": Interval(**c["interval"])}) for c in results[name]["claims"]]


def _claims_table(made: list[report.Claim]) -> list[str]:
    rows = [
        [
            c.text[0].upper() + c.text[1:],
            c.where,
            c.measure,
            c.numbers,
            c.verdict if c.verdict == "reproduced" else f"**{c.verdict}**",
        ]
        for c in made
    ]
    return _markdown(["Claim", "Where", "Measured", "Effect [95% interval]", "Verdict"], rows)


def _markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in [columns, ["---"] * len(columns), *rows]]


def main(words: list[str]) -> int:
    """Stores and writes, or checks."""
    check = "--check" in words
    for word in words:
        if word != "--check":
            store(Path(word))
    results = json.loads(STORED.read_text())
    wrong = []
    for page in PAGES:
        text = page.read_text()
        new = rewritten(text, results, "docs/img" if page.parent == ROOT else "img")
        if new != text:
            wrong.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(new)
    if wrong:
        verb = "says something else than docs/data/results.json:" if check else "written:"
        print(verb, ", ".join(wrong))
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
