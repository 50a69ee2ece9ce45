"""Examples in the README and the docs run, commands parse, and numbers are those of the stored results."""

import doctest
import importlib.util
import re
import shlex
import tomllib
from pathlib import Path

import pytest

import marginax
from marginax import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            id=str(page.relative_to(ROOT)),
            marks=[pytest.mark.slow]
            if page.stem in ("deep", "estimators", "settings", "trajectories")
            else [],
        )
        for page in PAGES
    ],
)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = re.sub(r"(?m)^```.*$", "", page.read_text())  # a closing fence is no output
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    examples = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=flags).run(examples, out=output.append)
    assert not output, "".join(output)


@pytest.mark.slow
def test_the_first_log_gives_what_the_page_says(tmp_path, monkeypatch, capsys):
    """The script of the page writes a log; the command prints the verdict, the values and the interval of the page."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "evaluate.md").read_text()
    script = next(code for code in re.findall(r"(?ms)^```python\n(.*?)^```", page) if ">>>" not in code)
    exec(script, {})
    command = re.search(r"`marginax (evaluate log\.csv [^`]+)`", page)[1]
    assert cli.main(shlex.split(command)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (verdict,) = re.findall(r"(?ms)^```text\n(.*?)^```", page)
    assert " ".join(verdict.split()) in shown
    said = re.search(r"Certainty equivalence says (\S+), with an interval from (\S+) to (\S+)\. ", page)
    assert "certainty-equivalence {} {} … {} ".format(*said.groups()) in shown
    goes_on = 0.9 * 0.8  # γ times the probability of another step
    rewarded = 0.8 * 0.8 + 0.2 * 0.3  # π's probability of state 1, from either state
    assert f"The exact value is {goes_on * 0.8 * rewarded / (1 - goes_on):.3f}." in page
    own = re.search(r"The log's own policy earned (\S+)\.\n", page)[1]
    assert f"(the log's own return) † {own} " in shown


def test_readme_commands_are_the_documented_ones():
    """The two commands of the README stand in the docs word for word."""
    commands = re.findall(r"(?m)^ +(python3 -m venv .venv && .*)$", PAGES[0].read_text())
    assert len(commands) == 2
    started = (ROOT / "docs" / "getting-started.md").read_text()
    assert all(command in started for command in commands)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_are_short(page):
    """A page has at most about 1,500 words, without tables and blocks of code."""
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    words = [word for line in text.splitlines() if not line.startswith("|") for word in line.split()]
    assert len(words) <= 1600


def test_one_version_everywhere():
    """The package, its metadata and the citation name the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    citation = re.search(r"(?m)^version: (\S+)$", (ROOT / "CITATION.cff").read_text())
    assert citation is not None
    assert marginax.__version__ == project == citation.group(1)


def commands(page: Path) -> list[str]:
    """The `marginax …` command lines on a page, in code spans and code blocks, without placeholders."""
    text = re.sub(r"\\\n\s*", "", page.read_text())  # lines that go on
    spans = re.findall(r"`((?:[^`\n]*\s)?marginax [^`\n]+)`", text)
    lines = re.findall(r"(?m)^(?: {4}|\$ )((?:\S.*\s)?marginax [a-z].*)$", text)
    for block in re.findall(r"(?ms)^```bash\n(.*?)^```", text):
        lines += re.findall(r"(?m)^ *(marginax [a-z].*)$", block)
    found = [re.sub(r"^.*?\bmarginax ", "", each).split("  #")[0] for each in (*spans, *lines)]
    return sorted(
        {
            each.strip()
            for each in found
            if each[:1].islower() and not re.search(r"…|\b[A-Z]{3,}\b|my_tasks", each)
        }
    )


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_commands_parse(page, capsys):
    """Every command line parses; nothing is run."""
    for line in commands(page):
        command, *words = shlex.split(line)
        if not words and command != "reproduce":
            assert command in cli.COMMANDS  # the name of the command alone
            continue
        status = None
        try:
            call = cli.parse(command, words)
        except SystemExit as stop:
            call, status = None, stop.code
        asked_for_help = "--help" in words and status in (0, None)
        assert callable(call) or asked_for_help, f"marginax {line}: {capsys.readouterr().err}"


def results():
    """The script that writes results into the pages."""
    spec = importlib.util.spec_from_file_location("results", ROOT / "docs" / "_build" / "results.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_numbers_on_the_pages_are_those_of_the_stored_results(capsys):
    assert results().main(["--check"]) == 0, capsys.readouterr().out


def test_a_number_that_was_changed_by_hand_is_noticed():
    module = results()
    stored = {"a": {"figures": [{"finding": "It takes 50."}]}}
    page = "<!-- results: findings a -->\n- It takes 50.\n<!-- results: end -->"
    assert module.rewritten(page, stored, "img") == page
    assert module.rewritten(page.replace("50", "51"), stored, "img") == page


def test_a_folder_without_results_is_named(tmp_path):
    with pytest.raises(SystemExit, match="has no finished results"):
        results().main([str(tmp_path / "mistyped")])
