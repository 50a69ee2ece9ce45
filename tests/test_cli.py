"""The command line as a stranger meets it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from marginax import __version__
from marginax.cli import COMMANDS, main


def run(*words, **options):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True, **options)


def test_version_and_help_work_as_a_process():
    assert run("-m", "marginax", "--version").stdout.strip() == f"marginax {__version__}"
    text = run("-m", "marginax", "--help").stdout
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("words", [["--help"], ["show", "--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_who_has_seen_enough_is_no_error(words, unbuffered):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "marginax", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_words_print_the_help(capsys):
    assert main([]) == 0
    assert "usage: marginax COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("reprodcue", "marginax: unknown command 'reprodcue'; did you mean 'reproduce'?"),
        ("xyz", "marginax: unknown command 'xyz'; choose one of reproduce, show"),
        ("reproduce chian", "got 'chian'; did you mean 'chain'?"),
        ("show gernet", "marginax: did you mean 'garnet'?"),
        ("train Pendulum-v1 --out x --operator retrce", "marginax: did you mean 'retrace'?"),
        ("show chain --disount 0.9", "--discount"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_right_one(words, hint, capsys):
    assert main(words.split()) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_explains_itself(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"marginax {command}" in capsys.readouterr().out


def test_a_terminal_that_knows_only_ascii_gets_what_can_be_printed():
    """Words, tables and claims; the marks of claims that hold and of those that fail stay different."""
    script = """
import sys
from marginax.cli import main
for words in (["--help"], ["reproduce", "--help"], ["evaluate", "--help"], ["show", "chain", "--n", "3"]):
    sys.argv[1:] = words
    assert main() == 0
import numpy as np
from marginax import report
from marginax.experiments.command import print_claims
one = np.ones(3)
print_claims([report.claim(f"{low} < 1", "here", "mean", np.mean, one, low=low) for low in (0, 2)])
"""
    text = run("-c", script, env={**os.environ, "PYTHONIOENCODING": "ascii"}).stdout
    assert "usage: marginax COMMAND [--help] ..." in text
    assert "Retrace, c = 2 " in text and "target ? " in text
    assert "\n+ 0 < 1: 1" in text and "\n- 2 < 1: 1" in text


def test_help_imports_nothing_heavy():
    """`--help`, in one process that must end without the packages that take long to import."""
    script = """
import sys
from marginax.cli import COMMANDS, main
for words in [[command] for command in COMMANDS] + [["reproduce", "chain"], ["reproduce", "control"]]:
    assert main([*words, "--help"]) == 0
heavy = ("jax", "equinox", "optax", "scipy", "matplotlib", "jinja2", "gymnasium", "pyarrow")
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded
"""
    run("-c", script)


def test_the_first_interrupt_ends_a_command_with_130():
    """Ctrl-C while the main thread is in compiled code that does not let Python in."""
    script = """
import signal, sys, time
from marginax import cli
from marginax.experiments import command
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
def busy(problem: str) -> None:
    '''Stays away from the interpreter.'''
    print("busy", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        time.sleep(60)
command.show = busy
sys.argv = ["marginax", "show", "--problem", "chain"]
sys.exit(cli.main())
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "busy\n"
    begin = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert time.monotonic() - begin < 20  # two seconds on an idle machine
