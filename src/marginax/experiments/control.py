"""Figure 3: TD3 with one-step, multi-step and marginalized targets on simulated control tasks."""

import dataclasses
import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from marginax import report
from marginax._checks import choice, last_given
from marginax.deep.config import TD3_PRESETS, TD3Config
from marginax.deep.metrics import check_slugs, slug
from marginax.deep.run_config import PopulationConfig
from marginax.engine import Engine
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part, flag, smaller

if TYPE_CHECKING:
    from marginax.deep.curves import Curve

TASKS = ("mujoco/cheetah-run", "mujoco/walker-run", "pybullet/HalfCheetah", "pybullet/Ant")
"""The four tasks of Figure 3."""
_MARGINALIZED = {
    "operator": "marginalized",
    "weights": "regression",
    "normalisation": "none",
    "start_conditioned": True,
    "weight_critic_penalty": 1.0,
}
_ALL = {**_MARGINALIZED, "target_steps": "all"}
FORMS: dict[str, dict[str, Any]] = {
    "one-step": {"operator": "one-step"},
    "n-step": {"operator": "n-step"},
    "retrace": {"operator": "retrace"},
    "retrace-paper": {"operator": "retrace-paper"},
    "retrace-soft": {"operator": "retrace", "trace_temperature": 0.1},
    "marginalized-regression": _MARGINALIZED,
    "marginalized-paths": {**_MARGINALIZED, "weights": "paths"},
    "marginalized-saddle-point": {**_MARGINALIZED, "weights": "saddle-point"},
    "marginalized-fenchel": {**_MARGINALIZED, "weights": "fenchel"},
    "marginalized-paper": {**_MARGINALIZED, "weights": "saddle-point", "normalisation": "power"},
    "marginalized-all-steps": _ALL,
    "marginalized-length-2": {**_MARGINALIZED, "sequence_length": 2},
    "marginalized-length-10": {**_ALL, "sequence_length": 10},
    "marginalized-decay-0.9": {**_ALL, "decay": 0.9},
    "marginalized-decay-1": {**_ALL, "decay": 1.0},
    "marginalized-any-start": {**_ALL, "start_conditioned": False},
    "marginalized-power": {**_ALL, "normalisation": "power"},
    "marginalized-soft": {**_MARGINALIZED, "trace_temperature": 0.1},
    "marginalized-soft-all-steps": {**_ALL, "trace_temperature": 0.1},
    "marginalized-fenchel-power": {**_MARGINALIZED, "weights": "fenchel", "normalisation": "power"},
    "retrace-clip-2": {"operator": "retrace", "clip": 2.0},
    "marginalized-regression-clip-2": {**_MARGINALIZED, "clip": 2.0},
    "marginalized-paths-clip-2": {**_MARGINALIZED, "weights": "paths", "clip": 2.0},
}
"""Operators by name, each as changes of the agent's settings."""
OPTIONS: dict[str, dict[str, Any]] = {
    "scaled-observations": {"scale_observations": True},
    "late-updates": {"update_after": 10_000},
    "layer-norm": {"layer_norm": True},
    "small-last-layer": {"actor_scale": 0.01},
    "saturation-penalty": {"saturation_penalty": 0.01},
    "late-actor": {"actor_after": 9_000},
    "batch-256": {"batch_size": 256, "learning_rate": 3e-4},
    "slow-actor": {"actor_learning_rate": 3e-4},
    "fast-actor": {"actor_learning_rate": 1e-3},
    "noise-0.1": {"act_noise": 0.1},
    "noise-0.2": {"act_noise": 0.2},
    "noise-0.3": {"act_noise": 0.3},
    "time-feature": {"time_feature": True},
    "time-limits-end": {"time_feature": True, "time_limits_end": True},
    "discount-0.98": {"discount": 0.98},
}
"""Options of one-step TD3 by name, likewise."""
CHANGES = FORMS | OPTIONS
"""What can be compared, by name."""
if TYPE_CHECKING:
    OperatorName = str
else:
    OperatorName = Literal[tuple(CHANGES)]
_HANDLING = ("time_limit", "checkpoint_minutes", "report_only")  # flags that change no result
OPERATORS = ("one-step", "retrace-paper", "retrace", "marginalized-paper", "marginalized-regression")
Work = tuple[str, Path, PopulationConfig]  # a task, the folder of its run, and what is trained on it


@dataclasses.dataclass(frozen=True)
class Control(Experiment):
    """Figure 3: TD3 with the critic target of each operator.

    Every task is a run of operators × seeds. A run that was stopped carries on with the same command, and finished
    tasks are not run again.
    """

    name: ClassVar[str] = "control"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 3}

    seeds: Hidden[int] = 5
    tasks: tuple[str, ...] = TASKS
    """Simulators by name."""
    operators: tuple[OperatorName, ...] = OPERATORS
    """Operators by name (`-paper`: the paper's form of the target), or options of one-step TD3."""
    steps: int = 1_000_000
    """Environment steps of each agent."""
    evaluate_every: int = 10_000
    """Steps between evaluations."""
    episodes: int = 5
    """Episodes of an evaluation."""
    preset: str = "spinning-up"
    """Where the agent's settings start: `spinning-up`, as the paper's agent does, or `default`, marginax's own."""
    agent: TD3Config = TD3Config.preset("spinning-up")  # noqa: RUF009
    """Settings of the agent under all operators; in Python, those of the preset unless given."""
    time_limit: str = ""
    """Such as 9m or 1.5h: stop cleanly, with checkpoints, before this time is over."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints."""
    report_only: bool = False
    """Report on the metrics that are there; train nothing."""
    trained: Hidden[str] = ""
    """Fingerprint of the metrics that were reported on."""

    def __post_init__(self) -> None:
        for name in self.operators:
            if self.operators.count(name) > 1:
                raise ValueError(f"operators must be different, got {name!r} twice.")
            if name not in CHANGES:
                raise ValueError(f"operators must be of {', '.join(CHANGES)}, got {name!r}.")
        if choice("preset", self.preset, TD3_PRESETS) == "paper":
            raise ValueError(
                "preset must be 'spinning-up' or 'default', got 'paper': --operators with -paper have its targets."
            )
        start = TD3Config.preset(self.preset)
        if self.agent is type(self).agent:
            object.__setattr__(self, "agent", start)
        for name in (*_MARGINALIZED, "discount"):
            if (value := getattr(self.agent, name)) != getattr(start, name):
                flag = "--discount" if name == "discount" else "--operators"
                raise ValueError(f"agent.{name} cannot be set here, got {value!r}: use {flag}.")
        seen: dict[TD3Config, str] = {}
        for name in self.operators:
            if (same := seen.setdefault(self._group(name), name)) != name:
                raise ValueError(
                    f"operators must differ, but {same!r} and {name!r} have the same settings at the preset {self.preset!r}."
                )
        if self.seeds < 1 or not self.tasks:
            raise ValueError(f"seeds and tasks must not be empty, got {self.seeds} and {list(self.tasks)}.")
        check_slugs("tasks", self.tasks)
        if not self.checkpoint_minutes > 0:
            raise ValueError(f"checkpoint-minutes must be above 0, got {self.checkpoint_minutes}.")
        if self.time_limit:
            seconds(self.time_limit)

    @classmethod
    def starting(cls, words: Sequence[str]) -> "Control":
        """With the agent of the preset that is asked for."""
        preset = choice("--preset", last_given(words, "--preset", cls.preset), TD3_PRESETS)
        return cls(preset=preset)

    def quick(self) -> "Control":
        """Pendulum with small networks: a few minutes on two cores."""
        start = type(self)(preset=self.preset)
        agent = smaller(self.agent, start.agent, hidden=(64, 64), random_steps=1000)
        first = smaller(super().quick(), start, tasks=("Pendulum-v1",), steps=8000, evaluate_every=1000)
        return dataclasses.replace(first, agent=agent)

    def settings(self) -> dict[str, Any]:
        """All that the numbers depend on, as plain data."""
        left_out = (*_HANDLING, "agent")
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
        lists = {"tasks": list(self.tasks), "operators": list(self.operators)}
        return {"experiment": self.name, **plain, **lists, "agent": self.agent.to_json()}

    @property
    def command(self) -> str:
        words = ["marginax reproduce control", *flag("tasks", self.tasks), *flag("operators", self.operators)]
        words += [*flag("seeds", self.seeds), *flag("steps", self.steps)]
        words += self._changed(("tasks", "operators", "seeds", "steps", "agent", "trained", *_HANDLING))
        start = TD3Config.preset(self.preset).to_json()
        changed = {name: value for name, value in self.agent.to_json().items() if value != start[name]}
        return " ".join(words + [word for name in changed for word in flag(f"agent.{name}", changed[name])])

    def _group(self, name: str) -> TD3Config:
        return dataclasses.replace(self.agent, **{"discount": self.discount, **CHANGES[name]})

    def population(self, task: str) -> PopulationConfig:
        """What is trained on a task."""
        return PopulationConfig(
            simulator=task,
            groups={name: self._group(name) for name in self.operators},
            seeds=tuple(range(self.seed, self.seed + self.seeds)),
            steps=self.steps,
            evaluate_every=self.evaluate_every,
            episodes=self.episodes,
            overlap=True,
        )

    def prepared(self, folder: Path, workers: int | None, engine: Engine) -> "Control":
        """Train all tasks, or as much of them as the time limit allows (then `SystemExit`)."""
        from marginax.deep.run import run_metrics
        from marginax.simulators import make
        from marginax.simulators.registry import check_actions

        end = time.monotonic() + seconds(self.time_limit) if self.time_limit else None
        # Find mistakes before anything is run.
        work = [(task, folder / slug(task), self.population(task)) for task in self.tasks]
        if not self.report_only:
            for task in self.tasks:
                check_actions(task, make(task, seed=0, allow_import=True), discrete=False)
            if engine.remote:
                self._train_elsewhere(work, engine, end)
            else:
                self._train_here(work, workers, end)
        found = [run_metrics(place) for _, place, _ in work]
        return dataclasses.replace(self, trained=hashlib.sha256(repr(found).encode()).hexdigest()[:12])

    def _train_here(self, work: Sequence[Work], workers: int | None, end: float | None) -> None:
        """One task after the other."""
        from marginax.deep.display import Display
        from marginax.deep.run import open_run, train

        for task, place, config in work:
            run = open_run(place, config)
            options = self._options(end)
            with Display(task, self.steps, list(run.parts)) as display:
                outcome = train(place, run, workers=workers, listen=display.listen, **options)
            self._finish(outcome)

    def _train_elsewhere(self, work: Sequence[Work], engine: Engine, end: float | None) -> None:
        """The parts of all tasks side by side, where the engine places them."""
        from marginax.deep.display import Display
        from marginax.deep.run import open_run, train_elsewhere

        together = engine.gpus > 0
        runs = {task: (place, open_run(place, config, together=together)) for task, place, config in work}
        names = [f"{task} {part}" for task, (_, run) in runs.items() for part in run.parts]
        options = self._options(end)
        with Display("control", self.steps, names) as display:
            outcome = train_elsewhere(engine, runs, listen=display.listen, **options)
        self._finish(outcome)

    def _options(self, end: float | None) -> dict[str, Any]:
        """What training is told; `end` is when the time limit is over."""
        left = None if end is None else max(0.0, end - time.monotonic())
        return {"checkpoint_minutes": self.checkpoint_minutes, "keep_replay": False, "seconds": left}

    @staticmethod
    def _finish(outcome: dict[str, dict[str, Any]]) -> None:
        """Say what went wrong, or that there is more to do."""
        from marginax.deep.command import finish

        finish({name: found for name, found in outcome.items() if found["state"] != "diverged"})
        if any(found["state"] in ("new", "stopped") for found in outcome.values()):
            print("stopped at the time limit; the same command carries on", flush=True)
            raise SystemExit(0)

    def parts(self) -> list[Part]:
        return []  # training is not made of parts: see `prepared`

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        from marginax.deep.curves import curves_of
        from marginax.deep.run import run_metrics, run_seconds
        from marginax.experiments import control_report

        tasks: dict[str, dict[str, Curve]] = {}
        spent = 0.0
        for task in self.tasks:
            place = folder / slug(task)
            found = curves_of(task, run_metrics(place))
            tasks[task] = {name: found[name] for name in self.operators if name in found}
            if not tasks[task]:
                raise ValueError(f"there are no metrics of {task} in {str(place)!r}.")
            spent += run_seconds(place)
        return control_report.section(self.name, folder, tasks, spent, self.preset)


def seconds(text: str) -> float:
    """A length of time such as `90s`, `9m` or `1.5h`; a plain number is seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match:
        raise ValueError(f"time-limit must be a number with s, m or h after it, got {text!r}.")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
