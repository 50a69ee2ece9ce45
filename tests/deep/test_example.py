"""The agent in one file trains, with every operator."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "examples" / "q_learning.py"


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["one-step", "retrace", "marginalized"])
def test_the_whole_agent_in_one_file(operator, capsys):
    assert len(PATH.read_text().splitlines()) <= 250
    spec = importlib.util.spec_from_file_location("q_learning_example", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = [
        "--steps",
        "300",
        "--learning-starts",
        "100",
        "--batch",
        "8",
        "--hidden",
        "8",
        "--operator",
        operator,
    ]
    returns = module.main(words)
    assert len(returns) > 5
    assert np.all(np.array(returns) >= 8)  # no CartPole falls sooner
    assert "over the last episodes" in capsys.readouterr().out
