"""Writes the numbers of a run into README and docs: `python docs/_build/results.py out`.

The results in the folder `out` go to `docs/data/results.json` and their figures to `docs/img`. Then every block

    <!-- results: KIND NAME … -->
    <!-- results: end -->

in README.md and docs/*.md is written anew. Without a folder the blocks are written from the results that are stored; with
`--check` nothing is written, and the exit status is 1 if a page says something else. The kinds are `findings` (a sentence
per experiment), `figures`, `table`, `claims` (each of some experiments), `main` (the claims that matter most), and
`networks` (`sentence` or `table`: policy evaluation with networks, from docs/data/prediction.csv).
"""

import csv
import dataclasses
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from marginax import report
from marginax.statistics import Interval

ROOT = Path(__file__).parents[2]
STORED = ROOT / "docs" / "data" / "results.json"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- results: (?!end)(.*?) -->\n).*?(<!-- results: end -->)", re.S)


def store(out: Path) -> None:
    """Takes the finished sections of a folder into the stored results, and their figures into the docs."""
    folders = sorted(path.parent for path in out.glob("*/result.json"))
    if not folders:
        sys.exit(f"{out} has no finished results: it must be the folder of a `marginax reproduce --out`")
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for folder in folders:
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
            cells = [
                [report.number(c) if isinstance(c, float) else str(c) for c in row] for row in each["rows"]
            ]
            lines += [f"{each['title']} (`{results[name]['command']}`). {each['note']}", ""]
            lines += [*_markdown(each["columns"], cells), ""]
    return "\n".join(lines[:-1])


def claims(results: dict[str, Any], names: list[str], images: str) -> str:
    """All claims of experiments, a table each."""
    lines = []
    for name in names:
        made = _claims(results, name)
        lines += [
            f"## {results[name]['title']}",
            "",
            f"`{results[name]['command']}`: {report.count_verdicts(made)}.",
            "",
        ]
        lines += [*_claims_table(made), ""]
    return "\n".join(lines[:-1])


def main_claims(results: dict[str, Any], names: list[str], images: str) -> str:
    """How many claims of experiments have which verdict, and those that matter most."""
    made = [claim for name in names for claim in _claims(results, name)]
    count = f"Of {len(made)} claims, {report.count_verdicts(made)}. Those that matter most:"
    return "\n".join([count, "", *_claims_table([claim for claim in made if claim.main])])


class Networks(NamedTuple):
    """Errors of policy evaluation with networks: operators by games, `[averaged over training, at the end]` in each cell."""

    games: list[str]
    others: dict[str, list[tuple[float, ...]]]
    """Each at its own best setting of the grid for each game and number."""
    ours: list[tuple[float, ...]]
    """Marginalized at λ = 1 and c̄ = 2 in all games."""
    tuned: list[tuple[float, ...]]
    """Marginalized at its own best settings."""
    variance: float
    """Retrace's variance of targets over marginalized's at λ = 1 and c̄ = 2, geometric mean over games."""


def read_networks() -> Networks:
    with (ROOT / "docs" / "data" / "prediction.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    games = list(dict.fromkeys(row["game"] for row in rows))
    measures = ("mean error", "final error")

    def best(operator: str, game: str, setting: tuple[str, str] | None = None) -> tuple[float, ...]:
        found = [row for row in rows if (row["game"], row["operator"]) == (game, operator)]
        if setting:
            found = [row for row in found if (row["decay"], row["clip"]) == setting]
        return tuple(min(float(row[measure]) for row in found) for measure in measures)

    def variance(operator: str, game: str) -> float:
        wanted = (game, operator, "1", "2")
        found = [
            row for row in rows if tuple(row[k] for k in ("game", "operator", "decay", "clip")) == wanted
        ]
        return float(found[0]["variance of targets"])

    names = [name for name in dict.fromkeys(row["operator"] for row in rows) if name != "marginalized"]
    ratios = [variance("retrace", game) / variance("marginalized", game) for game in games]
    return Networks(
        games,
        {name: [best(name, game) for game in games] for name in names},
        [best("marginalized", game, ("1", "2")) for game in games],
        [best("marginalized", game) for game in games],
        math.exp(sum(map(math.log, ratios)) / len(ratios)),
    )


def networks(results: dict[str, Any], names: list[str], images: str) -> str:
    """Policy evaluation with networks: a sentence, or the table of errors."""
    found = read_networks()
    if names == ["table"]:
        rows = {report.operator_style(name).label: cells for name, cells in found.others.items()}
        rows["**marginalized, λ = 1, c̄ = 2**"] = found.ours
        lowest = [
            [f"{min(each[m] for each in column):.2f}" for m in (0, 1)]
            for column in zip(*rows.values(), strict=True)
        ]
        lines = []
        for label, cells in (*rows.items(), ("marginalized, best of each game", found.tuned)):
            texts = [[f"{error:.2f}" for error in cell] for cell in cells]
            if label in rows:
                texts = [
                    [f"**{text}**" if text == least else text for text, least in zip(cell, low, strict=True)]
                    for cell, low in zip(texts, lowest, strict=True)
                ]
            lines.append([label, *(" / ".join(cell) for cell in texts)])
        return "\n".join(["", *_markdown(["", *found.games], lines), ""])

    def won(ours: list[tuple[float, ...]], m: int) -> int:
        rivals = zip(*found.others.values(), strict=True)
        return sum(
            cell[m] < min(each[m] for each in column) for cell, column in zip(ours, rivals, strict=True)
        )

    games = len(found.games)
    return (
        "With networks, marginalizing the path makes full importance sampling affordable. At λ = 1 and c̄ = 2 Retrace's targets have "
        f"{found.variance:.0f} times the variance. With that one setting marginalized has the lowest mean error averaged over "
        f"training in {won(found.ours, 0)} of {games} games, against {len(found.others)} other operators, each at its own best setting. "
        f"At the end of training it is lowest in {won(found.ours, 1)} of {games}, and in {won(found.tuned, 1)} when tuned like the others."
    )


KINDS = {
    "findings": findings,
    "figures": figures,
    "table": table,
    "claims": claims,
    "main": main_claims,
    "networks": networks,
}


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
    folders = [Path(word) for word in words if word != "--check"]
    if check and folders:
        sys.exit(f"--check compares pages with the stored results and takes no folder, got {folders[0]}")
    for folder in folders:
        store(folder)
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
        verb = "says something else than docs/data:" if check else "written:"
        print(verb, ", ".join(wrong))
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
