"""Every tutorial runs from top to bottom."""

import runpy
from pathlib import Path

import pytest

Html = pytest.importorskip("marimo").Html
TUTORIALS = sorted((Path(__file__).parents[1] / "examples" / "tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path):
    app = runpy.run_path(str(path))["app"]
    outputs, names = app.run()
    assert names
    shown = " ".join(output.text for output in outputs if isinstance(output, Html))
    assert "</" in shown and "('" not in shown  # a tuple of sentences is no sentence


def test_the_page_and_the_notebooks_name_the_same_command():
    page = (TUTORIALS[0].parents[2] / "docs" / "tutorials.md").read_text("utf-8")
    first = ".venv/bin/uv run --no-active --group tutorials marimo edit examples/tutorials/"
    assert f"    {first}one_idea.py" in page
    for path in TUTORIALS:
        assert f"`{first}{path.name}`" in path.read_text("utf-8").splitlines()[0]
        assert f"| `examples/tutorials/{path.name}` |" in page
