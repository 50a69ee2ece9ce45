"""A training run on disk: what was asked for, where each seed keeps its files, and how each of them fares."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marginax._files import atomic_write
from marginax.deep.config import TD3Config

SETTINGS, METRICS, STATUS = "run.json", "metrics.jsonl", "status.json"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run does; every seed does the same with keys of its own.

    >>> Run(simulator="Pendulum-v1", steps=100, evaluate_every=50, checkpoint_every=50).agent.operator
    'one-step'
    >>> Run(simulator="Pendulum-v1", steps=70)
    Traceback (most recent call last):
        ...
    ValueError: steps must be a positive multiple of update_every 50, got 70.
    """

    simulator: str
    """Name of the simulator."""
    steps: int = 1_000_000
    """Environment steps of each seed."""
    evaluate_every: int = 10_000
    """Steps between evaluations of the deterministic policy, on simulators of their own."""
    episodes: int = 10
    """Episodes of an evaluation."""
    checkpoint_every: int = 50_000
    """Steps between checkpoints."""
    agent: TD3Config = field(default_factory=TD3Config)
    """Settings of the agent."""

    def __post_init__(self) -> None:
        block = self.agent.update_every
        for name, unit, what in (
            ("steps", block, f"update_every {block}"),
            ("evaluate_every", block, f"update_every {block}"),
            ("checkpoint_every", self.evaluate_every, f"evaluate_every {self.evaluate_every}"),
        ):
            value = getattr(self, name)
            if value < 1 or unit < 1 or value % unit:
                raise ValueError(f"{name} must be a positive multiple of {what}, got {value}.")
        if self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {self.episodes}.")

    def save(self, folder: Path) -> None:
        """Write the settings, or make sure that the folder was made for the same ones.

        A run may be made longer; anything else that differs raises `ValueError`.
        """
        path = folder / SETTINGS
        if path.exists():
            earlier = load_run(folder)
            if earlier.steps > self.steps:
                raise ValueError(f"steps must be at least the {earlier.steps} of {path}, got {self.steps}.")
            for name, old in _flat(earlier).items():
                new = _flat(self)[name]
                if name != "steps" and old != new:
                    raise ValueError(
                        f"{str(folder)!r} holds a run with {name} = {old!r}, not {new!r}: choose another --out."
                    )
        text = json.dumps(self.to_json(), indent=1).encode()
        atomic_write(path, lambda file: file.write(text))

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "agent"]
        return {name: getattr(self, name) for name in names} | {"agent": self.agent.to_json()}


def load_run(folder: Path) -> Run:
    """The settings of the run in a folder.

    Raises:
        ValueError: If there is none, or it cannot be read.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> Run(simulator="Pendulum-v1").save(folder)
    >>> load_run(folder).simulator
    'Pendulum-v1'
    """
    path = folder / SETTINGS
    try:
        data = json.loads(path.read_text())
        return Run(**{**data, "agent": TD3Config.from_json(data["agent"])})
    except FileNotFoundError:
        raise ValueError(f"there is no run in {str(folder)!r}: {SETTINGS} is missing.") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def seed_folder(folder: Path, seed: int) -> Path:
    """Where a seed keeps its files.

    >>> seed_folder(Path("runs"), 3).name
    'seed-3'
    """
    return folder / f"seed-{seed}"


def seeds_in(folder: Path) -> list[int]:
    """The seeds that have a folder in a run, in order.

    >>> seeds_in(Path("nowhere"))
    []
    """
    names = [path.name.removeprefix("seed-") for path in folder.glob("seed-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def read_status(folder: Path) -> dict[str, Any]:
    """How a seed fares: its `state` is `new`, `running`, `finished` or `diverged`.

    >>> read_status(Path("nowhere"))["state"]
    'new'
    """
    try:
        return json.loads((folder / STATUS).read_text())
    except FileNotFoundError:
        return {"state": "new", "step": 0}


def write_status(folder: Path, state: str, step: int, **more: Any) -> None:
    """Say how a seed fares.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_status(folder, "diverged", 300, reason="NaN")
    >>> read_status(folder)
    {'state': 'diverged', 'step': 300, 'reason': 'NaN'}
    """
    text = json.dumps({"state": state, "step": step, **more}).encode()
    atomic_write(folder / STATUS, lambda file: file.write(text))


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a seed's metrics; a last line cut short by a killed process is left out.

    >>> read_metrics(Path("nowhere"))
    []
    """
    path = folder / METRICS
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _flat(run: Run) -> dict[str, Any]:
    data = run.to_json()
    return {**{k: v for k, v in data.items() if k != "agent"}, **data["agent"]}
