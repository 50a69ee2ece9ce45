"""What Figure 3's experiment is: its settings, what they are called on the command line, and the metrics it leaves."""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

__all__ = ["OPERATORS", "TASKS", "Settings", "agent_settings", "read_metrics", "seconds", "slug"]

TASKS = ("mujoco/cheetah-run", "mujoco/walker-run", "pybullet/HalfCheetah", "pybullet/Ant")
"""The four tasks of Figure 3."""
OPERATORS = ("one-step", "retrace-paper", "retrace", "marginalized-paper", "marginalized-regression")
"""The operators that are compared by default; `-paper` is the form of the paper's experiments."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is run.

    Attributes:
        tasks: Simulators, by name.
        operators: Operators, each a name and, after a colon, settings of the agent that differ from the
            defaults: `retrace:trace_temperature=0.1,sequence_length=10`.
        seeds: Number of seeds.
        first_seed: The first of them.
        steps: Environment steps of each agent.
        evaluate_every: Steps between evaluations.
        episodes: Episodes of an evaluation.
        settings: Settings of the agent for all operators, as after the colon.

    >>> Settings(tasks=("Pendulum-v1",), seeds=2).steps
    1000000
    """

    tasks: tuple[str, ...] = TASKS
    operators: tuple[str, ...] = OPERATORS
    seeds: int = 5
    first_seed: int = 0
    steps: int = 1_000_000
    evaluate_every: int = 10_000
    episodes: int = 5
    settings: str = ""

    @property
    def command(self) -> str:
        """The command line that makes these results."""
        words = ["marginax reproduce control", "--tasks", *self.tasks, "--operators", *self.operators]
        words += ["--seeds", str(self.seeds), "--steps", str(self.steps)]
        for name in ("first_seed", "evaluate_every", "episodes", "settings"):
            if getattr(self, name) != getattr(Settings, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return " ".join(words)


def agent_settings(operator: str, common: str = "") -> dict[str, Any]:
    """Settings of TD3 for an operator given as `name` or `name:setting=value,…`.

    >>> agent_settings("marginalized-regression:decay=0.9", "hidden=64+64")
    {'operator': 'marginalized', 'weights': 'regression', 'hidden': (64, 64), 'decay': 0.9}
    """
    name, _, own = operator.partition(":")
    out: dict[str, Any] = {"operator": name}
    if name == "marginalized-paper":
        out = {"operator": "marginalized", "weights": "saddle-point", "normalisation": "power"}
    elif name.startswith("marginalized-"):
        out = {"operator": "marginalized", "weights": name.removeprefix("marginalized-")}
    for part in [p for text in (common, own) for p in text.split(",") if p]:
        key, sign, text = part.partition("=")
        if not sign:
            raise ValueError(f"operators must have settings as name=value, got {part!r} in {operator!r}")
        out[key] = tuple(int(n) for n in text.split("+")) if key == "hidden" else _value(text)
    return out


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def slug(task: str) -> str:
    """A task's name as the name of a folder.

    >>> slug("mujoco/cheetah-run")
    'mujoco-cheetah-run'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", task)


def seconds(text: str) -> float:
    """A length of time such as `90s`, `9m` or `1.5h`; a plain number is seconds.

    >>> seconds("9m"), seconds("90")
    (540.0, 90.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match:
        raise ValueError(f"time_limit must be a number with s, m or h after it, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def read_metrics(folder: Path, task: str) -> list[dict[str, Any]]:
    """All rows of a task's metrics, numbers as floats.

    >>> read_metrics(Path("nowhere"), "Pendulum-v1")
    []
    """
    rows = []
    for path in sorted((folder / slug(task)).glob("metrics-*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                rows.append({k: v if k == "operator" else float(v) for k, v in row.items()})
    return rows
