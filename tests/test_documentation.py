"""Every `>>>` example in the README and the docs runs and prints what it says."""

import doctest
import re
import tomllib
from pathlib import Path

import pytest

import marginax

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"(?m)^```.*$", "", page.read_text())  # a closing fence is no output
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(examples, out=output.append)
    assert not output, "".join(output)


def test_readme_commands_are_the_documented_ones():
    """The two commands of the README stand in the docs word for word."""
    commands = re.findall(r"(?m)^ +(python3 -m venv .venv && .*)$", PAGES[0].read_text())
    assert len(commands) == 2
    started = (ROOT / "docs" / "getting-started.md").read_text()
    assert all(command in started for command in commands)


def test_one_version_everywhere():
    """The package, its metadata and the citation name the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = re.search(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text())
    assert citation is not None
    assert marginax.__version__ == project == citation.group(1)
