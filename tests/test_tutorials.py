"""Every tutorial runs from top to bottom."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("marimo")
TUTORIALS = sorted((Path(__file__).parents[1] / "examples" / "tutorials").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorial_runs(path):
    app = runpy.run_path(str(path))["app"]
    _, names = app.run()
    assert names
