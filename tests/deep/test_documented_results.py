"""The tables of the pages on deep control and on the baseline say what the metrics in docs/data say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_pages_agree_with_the_data():
    place = ROOT / "benchmarks" / "agent_tables.py"
    spec = importlib.util.spec_from_file_location("agent_tables", place)
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    for page in tables.PAGES:
        text = (tables.DOCS / page).read_text()
        assert tables.write(page, text) == text, "run python benchmarks/agent_tables.py"
