"""The command line: ``marginax COMMAND …``. Each command lives in its room and is loaded only when asked for."""

import codecs
import contextlib
import difflib
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import marginax
from marginax import _interrupts

__all__ = ["main", "parse"]

COMMANDS = {
    "reproduce": (
        "marginax.experiments.command:reproduce",
        "run the paper's experiments and write the report",
    ),
    "show": ("marginax.experiments.command:show", "print rates and values of a tabular problem"),
    "train": ("marginax.deep.command:train", "train an agent with any operator as its target"),
    "plot": ("marginax.deep.command:plot", "draw the learning curves of finished runs"),
    "play": ("marginax.deep.command:play", "evaluate a saved policy on its simulator"),
    "evaluate": ("marginax.offline.command:evaluate", "say what a policy is worth, from logged data"),
    "explore": ("marginax.explorer.command:explore", "see weights, rates and noise move, in the browser"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 2 for a mistake in what was asked, 130 when interrupted.

    Args:
        arguments: the words after ``marginax``; those of the process when omitted.

    >>> main(["--version"])
    marginax 0.1.0
    0
    """
    if arguments is None:
        _print_on_any_terminal()
        _interrupts.end_soon()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _run(*words) if words else _run("--help")
        if arguments is None:
            print(end="", flush=True)
            _interrupts.ignore()
        return status
    except KeyboardInterrupt:
        if arguments is None:
            _interrupts.leave("marginax: interrupted")
        _fail("interrupted")
        return _interrupts.STATUS
    except BrokenPipeError:  # the reader has seen enough: `marginax reproduce --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)


def _run(command: str, *words: str) -> int:
    if command in ("-h", "--help"):
        print(_help())
        return 0
    if command in ("-V", "--version"):
        print(f"marginax {marginax.__version__}")
        return 0
    try:
        status = parse(command, list(words))()
    except SystemExit as stop:  # of the parser, or of a command that was asked to end
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    return status if isinstance(status, int) else 0


def parse(command: str, words: list[str]) -> Callable[[], Any]:
    """The call that a command line asks for; nothing is run, and only what parsing needs is imported.

    Raises:
        ValueError: there is no such command or experiment.
        SystemExit: help was asked for, or a flag is wrong; what tyro has to say of it is printed.
    """
    if command not in COMMANDS:
        near = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(COMMANDS)}"
        raise ValueError(f"unknown command {command!r}; {hint}")
    module, name = COMMANDS[command][0].split(":")
    function = getattr(importlib.import_module(module), name)
    if command in ("reproduce", "train"):  # flags depend on the experiment, or on the agent
        return _parse(*function(words))
    return _parse(f"marginax {command}", function, words)


def _parse(program: str, function: Callable[..., Any], words: list[str]) -> Callable[[], Any]:
    import tyro

    @functools.wraps(function)
    def later(*arguments: Any, **options: Any) -> Callable[[], Any]:
        return functools.partial(function, *arguments, **options)

    mistakes = io.StringIO()
    try:
        with contextlib.redirect_stderr(mistakes):
            return tyro.cli(
                later, prog=program, args=words, config=(tyro.conf.PositionalMetavarFromFieldName,)
            )
    finally:
        text = mistakes.getvalue()
        sys.stderr.write(text)
        if near := _nearest_choice(text):
            _fail(f"did you mean {near!r}?")


def _nearest_choice(text: str) -> str | None:
    """The choice nearest to the one that tyro refused, if its message names one."""
    flat = " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())
    found = re.search(r"invalid choice '(.*?)' for argument .* Expected one of \((.*?)\)", flat)
    if found is None:
        return None
    return next(iter(difflib.get_close_matches(found[1], re.findall(r"'(.*?)'", found[2]), n=1)), None)


# What must not become the same sign.
_ASCII = {"✓": "+", "✗": "-", "…": "...", "±": "+-", "†": "*", "\u0304": ""}


def _print_on_any_terminal() -> None:
    """Has characters that the terminal's encoding lacks replaced, by `?` where nothing is nearer."""

    def nearest(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        missing = error.object[error.start : error.end]
        return "".join(_ASCII.get(letter, "?") for letter in missing), error.end

    codecs.register_error("marginax.nearest", nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="marginax.nearest")


def _fail(sentence: str) -> int:
    print(f"marginax: {sentence}", file=sys.stderr)
    return 2


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: marginax COMMAND [--help] …",
            "",
            "Off-policy evaluation operators for reinforcement learning.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  --version  print the version",
            "  --help     print this, or the options of a command: marginax COMMAND --help",
        ]
    )
