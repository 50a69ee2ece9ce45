"""Small versions of the two scripts that kill training and damage its files."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *words: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPTS / script), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_killed_training_ends_as_if_nothing_had_happened():
    table = run("kill_training.py", "--kills", "4", "--simulators", "Pendulum-v1")
    assert table.count("| equal | nothing |") == 2


@pytest.mark.long
def test_damaged_files_are_harmless_or_named():
    table = run("damage_run.py", "--flips", "0", "--steps", "200")
    assert "metrics.jsonl" in table
    assert "DIFFERENT" not in table
