"""The command line: ``marginax COMMAND …``. Each command lives in its room and is loaded only when asked for."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import marginax

__all__ = ["main"]

COMMANDS = {
    "reproduce": (
        "marginax.experiments.command:reproduce",
        "run the paper's experiments and write the report",
    ),
    "show": ("marginax.experiments.command:show", "print rates and values of a tabular problem"),
    "train": ("marginax.deep.command:train", "train a TD3 agent with any operator as its target"),
    "plot": ("marginax.deep.command:plot", "draw the learning curves of finished runs"),
    "play": ("marginax.deep.command:play", "evaluate a saved policy on its simulator"),
    "evaluate": ("marginax.offline.command:evaluate", "say what a policy is worth, from logged data"),
    "explore": ("marginax.explorer.command:explore", "see weights, rates and noise move, in the browser"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status: 0, 2 for a mistake in what was asked, 130 when interrupted.

    Args:
        arguments: the words after ``marginax``; those of the process when omitted.

    Returns:
        The exit status.

    Example:
        >>> main(["--version"])
        marginax 0.1.0
        0
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"marginax {marginax.__version__}")
        return 0
    if words[0] not in COMMANDS:
        return _fail(f"unknown command {words[0]!r}: choose one of {', '.join(COMMANDS)}")
    try:
        return _run(words[0], words[1:])
    except KeyboardInterrupt:
        return _fail("interrupted", status=130)
    except (ValueError, OSError, RuntimeError, ImportError, MemoryError) as error:
        return _fail(str(error) or type(error).__name__)


def _run(command: str, words: list[str]) -> int:
    if command == "reproduce" and words[:1] == ["control"]:  # long training runs, with settings of their own
        return _load("marginax.experiments.control:main")(words[1:])
    import tyro

    function = _load(COMMANDS[command][0])
    try:
        status = tyro.cli(function, prog=f"marginax {command}", args=words)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2 if stop.code else 0
    return status if isinstance(status, int) else 0


def _load(address: str) -> Callable[..., Any]:
    module, name = address.split(":")
    return getattr(importlib.import_module(module), name)


def _fail(sentence: str, status: int = 2) -> int:
    print(f"marginax: {sentence}", file=sys.stderr)
    return status


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
