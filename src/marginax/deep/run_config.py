"""What a run is: a population of agents, or policy evaluation with networks."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marginax._checks import count
from marginax.deep.config import AgentConfig, TD3Config, as_plain
from marginax.deep.discrete_config import ActorCriticConfig, QConfig
from marginax.deep.metrics import check_slugs

CONFIGS: dict[str, type[AgentConfig]] = {each.kind: each for each in (TD3Config, QConfig, ActorCriticConfig)}
"""The settings of every agent, by its name."""


@dataclass(frozen=True, kw_only=True)
class PopulationConfig:
    """What is trained: every group of `groups` with every seed of `seeds`. Derived settings are filled in.

    Attributes:
        simulator: Name for [`make`][marginax.simulators.make].
        groups: Label and settings of each group.
        seeds: Seeds; agents of one seed start alike and meet the same noise in every group.
        steps: Environment steps of each agent.
        evaluate_every: Steps between evaluations of the deterministic policy, with one at the end; None: about twenty in the run.
        episodes: Episodes of an evaluation.
        overlap: Whether a block is simulated while the updates of the one before run.

    >>> config = PopulationConfig(simulator="Pendulum-v1", groups={"a": TD3Config()}, seeds=(0, 1), steps=8_000)
    >>> config.evaluate_every, config.groups["a"].random_steps
    (400, 800)
    """

    simulator: str
    groups: Mapping[str, AgentConfig]
    seeds: tuple[int, ...] = (0,)
    steps: int = 1_000_000
    evaluate_every: int | None = None
    episodes: int = 10
    overlap: bool = False

    def __post_init__(self) -> None:
        as_plain(self)
        if not isinstance(self.simulator, str):
            raise ValueError(f"simulator must be a name, got {self.simulator!r}.")
        if not self.groups or not self.seeds:
            raise ValueError("groups and seeds must not be empty.")
        if not isinstance(self.groups, Mapping):
            raise ValueError(f"groups must map labels to settings of agents, got {self.groups!r}.")
        for label, settings in self.groups.items():
            if not isinstance(label, str) or not isinstance(settings, AgentConfig):
                raise ValueError(
                    f"groups must map labels to settings of agents, got {label!r}: {settings!r}."
                )
        check_slugs("groups", self.groups)
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be different and not negative, got {list(self.seeds)}.")
        if self.episodes < 1:
            raise ValueError(f"episodes must be at least 1, got {self.episodes}.")
        for name in ("kind", "update_every", "hidden", "filters", "copies", "time_feature"):
            found = {label: getattr(config, name, None) for label, config in self.groups.items()}
            if len(set(found.values())) > 1:
                raise ValueError(f"{name} must be the same in all groups, got {found}.")
        self._multiple("steps", self.steps)
        every = self.evaluate_every
        if every is None:
            every = max(1, round(self.steps / 20 / self.block)) * self.block
        self._multiple("evaluate_every", every)
        object.__setattr__(self, "evaluate_every", every)
        groups = {label: config.derived(self.steps) for label, config in self.groups.items()}
        object.__setattr__(self, "groups", groups)

    def _multiple(self, name: str, value: int) -> None:
        if value < 1 or value % self.block:
            raise ValueError(f"{name} must be a positive multiple of update_every {self.block}, got {value}.")

    @property
    def first(self) -> AgentConfig:
        """The settings of the first group; what all groups share is read there."""
        return next(iter(self.groups.values()))

    @property
    def kind(self) -> str:
        """The agent's name."""
        return self.first.kind

    @property
    def block(self) -> int:
        """Steps of a block."""
        return self.first.update_every

    @property
    def agents(self) -> list[tuple[str, int]]:
        """Label and seed of every agent, group by group."""
        return [(label, seed) for label in self.groups for seed in self.seeds]

    @property
    def on_device(self) -> bool:
        """Whether simulation and learning are one program: see `marginax.deep.accelerated`."""
        compiled = self.simulator.startswith(("gymnax/", "grid/")) and not self.simulator.endswith("+time")
        return self.first.discrete and compiled

    @property
    def played(self) -> str:
        """The name of what is played: the simulator, with the time in its observations if the agents ask for it."""
        timed = getattr(self.first, "time_feature", False) and not self.simulator.endswith("+time")
        return f"{self.simulator}+time" if timed else self.simulator

    def part(self, label: str, seed: int) -> "PopulationConfig":
        """The population of one agent alone."""
        return dataclasses.replace(self, groups={label: self.groups[label]}, seeds=(seed,))

    def require_same(self, earlier: dict[str, Any], folder: Path) -> None:
        """Raise `ValueError` if settings differ from those of an earlier run in a folder; it may become longer."""
        if earlier["steps"] > self.steps:
            raise ValueError(
                f"steps must be at least the {earlier['steps']} of the run in {str(folder)!r}, got {self.steps}."
            )
        # What an earlier version did not know has its default.
        old, new = (_flat(data) for data in (self.from_json(earlier).to_json(), self.to_json()))
        for name in {**old, **new}:
            if name != "steps" and old.get(name) != new.get(name):
                raise ValueError(
                    f"{str(folder)!r} holds a run with {name} = {old.get(name)!r}, not {new.get(name)!r}: "
                    "choose another folder."
                )

    def to_json(self) -> dict[str, Any]:
        """The settings as plain data; `from_json` reads them back."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        groups = {label: config.to_json() for label, config in self.groups.items()}
        return {"agent": self.kind, **plain, "seeds": list(self.seeds), "groups": groups}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PopulationConfig":
        """Settings from plain data."""
        plain = {name: value for name, value in data.items() if name != "agent"}
        kind = CONFIGS[data.get("agent", TD3Config.kind)]
        groups = {label: kind.from_json(config) for label, config in data["groups"].items()}
        return cls(**{**plain, "seeds": tuple(data["seeds"]), "groups": groups})


def _flat(data: dict[str, Any]) -> dict[str, Any]:
    """The settings of a population by name; those of the agents with their group's label if there are several."""
    out = {name: value for name, value in data.items() if name != "groups"}
    for label, settings in data["groups"].items():
        lead = f"{label}: " if len(data["groups"]) > 1 else ""
        out |= {f"{lead}{name}": value for name, value in settings.items()}
    return {**out, "groups": list(data["groups"])}


@dataclass(frozen=True)
class Sizes:
    """Sizes of policy evaluation with networks: everything about its program but the operators."""

    phases: int = 12
    """Target networks, each with trajectories of its own."""
    period: int = 1000
    """Updates of a phase."""
    reports: int = 4
    """Errors measured in each phase."""
    environments: int = 512
    """Copies of the simulator."""
    steps: int = 128
    """Steps of each copy in a phase."""
    length: int = 16
    """Steps of a replayed sequence."""
    batch: int = 128
    """Sequences of an update."""
    filters: int = 16
    units: int = 128
    learning_rate: float = 3e-4
    """Of Adam, for Q, at first."""
    last_rate: float = 1.0
    """Share of it that is left at the end, after a linear decay."""
    burn_in: int = 256
    """Steps of the behaviour policy before the first that is kept."""
    pairs: int = 256
    """Held-out pairs."""
    rollouts: int = 512
    """Monte Carlo returns for each of them."""
    horizon: int = 256
    """Steps of a Monte Carlo return."""
    probes: int = 64
    """Held-out pairs from which the variance of targets is measured."""
    repeats: int = 16
    """Sequences from each of those."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(Sizes):
            if field.type is int:  # standard errors and variances need two of what they are over
                least = {"burn_in": 0, "pairs": 2, "rollouts": 2, "repeats": 2}.get(field.name, 1)
                count(field.name, getattr(self, field.name), least)

    @property
    def updates(self) -> int:
        return self.phases * self.period
