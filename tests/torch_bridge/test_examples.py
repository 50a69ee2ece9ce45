"""The examples for PyTorch run, for a few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is no dependency of marginax")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "needs", "options"),
    [
        ("torch_vtrace_torchrl.py", "torchrl", ["--batches", "2", "--steps", "64"]),
        ("torch_retrace_cleanrl.py", "gymnasium", ["--total-timesteps", "2000", "--learning-starts", "1900"]),
    ],
)
def test_an_example_runs(name, needs, options):
    pytest.importorskip(needs)
    assert len((EXAMPLES / name).read_text().splitlines()) < 150
    done = subprocess.run([sys.executable, EXAMPLES / name, *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "batch    1" in done.stdout or "step   2000" in done.stdout
