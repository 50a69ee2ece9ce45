"""The command line as a stranger meets it."""

import subprocess
import sys

import pytest

from marginax import __version__
from marginax.cli import COMMANDS, main


def test_version_and_help_work_as_a_process():
    version = subprocess.run(
        [sys.executable, "-m", "marginax", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout.strip() == f"marginax {__version__}"
    help_text = subprocess.run(
        [sys.executable, "-m", "marginax", "--help"], capture_output=True, text=True, check=True
    )
    for command in COMMANDS:
        assert command in help_text.stdout


def test_no_words_print_the_help(capsys):
    assert main([]) == 0
    assert "usage: marginax COMMAND" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_and_status_2(capsys):
    assert main(["reprodcue"]) == 2
    assert capsys.readouterr().err.startswith(
        "marginax: unknown command 'reprodcue': choose one of reproduce"
    )


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"marginax {command}" in capsys.readouterr().out
