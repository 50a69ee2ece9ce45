"""The tables of the page on deep control say what the metrics in docs/data say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_page_agrees_with_the_data():
    place = ROOT / "benchmarks" / "control_tables.py"
    spec = importlib.util.spec_from_file_location("control_tables", place)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.PAGE.read_text()
    assert tables.write(text) == text, "run python benchmarks/control_tables.py"
