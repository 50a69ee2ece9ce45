"""The commands `marginax train`, `marginax plot` and `marginax play`. Nothing heavy is imported before it is needed."""

import contextlib
import dataclasses
import io
import math
import sys
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro

from marginax._checks import choice, last_given
from marginax._files import check_writable
from marginax.deep.config import TD3_PRESETS, AgentConfig, TD3Config
from marginax.deep.display import Display
from marginax.deep.metrics import METRICS
from marginax.deep.run_config import CONFIGS, PopulationConfig


def train(words: list[str]) -> tuple[str, Callable[..., None], list[str]]:
    """What `cli` parses for `marginax train TASK …`: a program name, a function whose flags are the agent's settings, and the words.

    The agent is the one that `--agent` names. Without it, the actions of the task decide: see `default_agent`.
    """
    named = last_given(words, "--agent", "")
    if named:
        kind = choice("--agent", named, list(CONFIGS))
    else:
        task = task_in(words)
        kind = default_agent(task) if task else "td3"
    if last_given(words, "--out", ".") == "":
        raise ValueError("--out must be a folder, got ''")
    settings = CONFIGS[kind]
    start = choice("--preset", last_given(words, "--preset", "default"), TD3_PRESETS)
    if start != "default" and kind != TD3Config.kind:
        raise ValueError(f"--preset must be 'default' for the agent {kind!r}, got {start!r}")
    default = settings() if start == "default" else TD3Config.preset(start)

    def train(
        task: tyro.conf.Positional[str],
        *,
        out: Path,
        seeds: int = 1,
        first_seed: int = 0,
        steps: int = 1_000_000,
        evaluate_every: int | None = None,
        episodes: int = 10,
        checkpoint_minutes: float = 2.0,
        workers: int | None = None,
        overlap: bool = False,
        track: bool = False,
        agent: Annotated[str, tyro.conf.arg(name="agent", metavar="|".join(CONFIGS))] = kind,
        preset: Annotated[str, tyro.conf.arg(metavar="|".join(TD3_PRESETS))] = start,
        settings: Annotated[settings, tyro.conf.arg(name="")] = default,  # type: ignore[valid-type]
    ) -> None:
        """Train agents whose critic target is any operator of this library.

        The agent is TD3 for actions in a box and Q-learning for discrete ones, unless --agent says otherwise; `marginax
        train TASK --help` and `marginax train --agent NAME --help` show its settings. Stopped at any moment, the same
        command carries on from the last checkpoint and ends with the same metrics. With more steps, a finished run goes on.

        Args:
            task: mujoco/walker-run, Pendulum-v1, CartPole-v1, gymnax/Breakout-MinAtar, grid/catch, module:Id, ...
            out: Folder for settings, metrics, checkpoints and policies.
            seeds: Number of seeds.
            first_seed: The first seed; the others follow it.
            steps: Environment steps of each seed.
            evaluate_every: Steps between evaluations of the deterministic policy; by default about twenty in the run.
            episodes: Episodes of an evaluation, on simulators of their own.
            checkpoint_minutes: Minutes between checkpoints.
            workers: Processes at a time, by default one per core. On a CPU each trains a seed; on an accelerator they simulate.
            overlap: Simulate while learning, with policies that are one block old; without effect on gymnax/ and grid/ simulators.
            track: Send the metrics to Weights & Biases as well, one run for each agent (`pip install wandb`).
            agent: Which agent is trained.
            preset: Settings of TD3 that the flags below change: its defaults, Spinning Up's, or the paper's.
            settings: Settings of the agent.
        """
        options = {"checkpoint_minutes": checkpoint_minutes, "workers": workers}
        _train(
            settings,
            out,
            options,
            track=track,
            simulator=task,
            seeds=range(first_seed, first_seed + seeds),
            steps=steps,
            evaluate_every=evaluate_every,
            episodes=episodes,
            overlap=overlap,
        )

    return "marginax train", train, words


def task_in(words: list[str]) -> str | None:
    """The task in a command line that is yet to be parsed: the first word that is neither a flag nor a value of one.

    >>> task_in(["--overlap", "--hidden", "64", "64", "--out=r", "CartPole-v1", "--steps", "300"])
    'CartPole-v1'
    """
    kinds = {field.name: field.type for each in CONFIGS.values() for field in dataclasses.fields(each)}
    switches = {"help", "overlap", "track", *(name for name, kind in kinds.items() if kind is bool)}
    values: float = 0  # of the last flag that may still come
    for word in words:
        if word[:2] == "--":
            name, equals, _ = word[2:].replace("-", "_").partition("=")
            alone = equals or name.removeprefix("no_") in switches
            values = 0 if alone else math.inf if typing.get_origin(kinds.get(name)) is tuple else 1
        elif values:
            values -= 1
        elif word[:1] != "-":
            return word
    return None


def default_agent(task: str) -> str:
    """The name of the agent that fits a task: TD3 for actions in a box, Q-learning for discrete ones."""
    from marginax.simulators import make

    simulator = make(task, seed=0, allow_import=True)
    simulator.close()
    return "td3" if simulator.num_actions is None else "q-learning"


def _train(
    agent: AgentConfig, out: Path, options: dict[str, Any], *, track: bool, seeds: range, **population: Any
) -> None:
    from marginax.deep.run import open_run
    from marginax.deep.run import train as train_run
    from marginax.simulators import make
    from marginax.simulators.registry import check_actions

    for name, value, least in (
        ("seeds", len(seeds), 1),
        ("first-seed", seeds.start, 0),
        ("workers", options["workers"], 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}.")
    if not (minutes := options["checkpoint_minutes"]) > 0:
        raise ValueError(f"checkpoint-minutes must be above 0, got {minutes}.")
    agent, evaluate_every = _as_derived_before(out, agent, population.pop("evaluate_every"))
    groups = {agent.label: agent}
    config = PopulationConfig(groups=groups, seeds=tuple(seeds), evaluate_every=evaluate_every, **population)
    task = config.simulator
    hint = f"marginax train {task} --agent {'td3' if agent.discrete else 'q-learning'}"
    simulator = make(task, seed=0, allow_import=True)
    check_actions(task, simulator, discrete=agent.discrete, command=hint)
    simulator.close()
    _warn(config)
    check_writable(out)
    run = open_run(out, config)
    title = f"{task}, {agent.label}"
    display = Display(title, config.steps, list(run.parts), told_later=("failed", "diverged"))
    with display, tracker(track, task, config) as log:

        def listen(part: str, message: dict[str, Any]) -> None:
            display.listen(part, message)
            log(message.get("lines", []))

        outcome = train_run(out, run, listen=listen, **options)
    finish(outcome)
    curves = [str(out / part / METRICS) for part in run.parts]
    shown = ", ".join(curves if len(curves) <= 2 else [*curves[:2], "…"])
    print(f"Curves: {shown}; tensorboard --logdir {out}")
    print(f"Next: marginax plot {out}, marginax play {out}")


def _warn(config: PopulationConfig) -> None:
    """Say on standard error what a user may not expect of a run."""
    from marginax.simulators.registry import warn_if_resume_differs

    quiet = contextlib.redirect_stdout(io.StringIO())  # environments may print
    with warnings.catch_warnings(record=True) as caught, quiet:
        warnings.simplefilter("always")
        warn_if_resume_differs(config.simulator, allow_import=True)
    said = [str(each.message) for each in caught]
    if config.steps < config.first.update_after:
        said.append(
            f"nothing is learned in {config.steps:,} steps, because the first update comes after "
            f"update_after = {config.first.update_after:,}"
        )
    for sentence in said:
        print(f"marginax: {sentence}", file=sys.stderr)


def _as_derived_before(
    out: Path, agent: AgentConfig, evaluate_every: int | None
) -> tuple[AgentConfig, int | None]:
    """The agent's settings and `evaluate_every`; where they are None, those of an earlier run in the folder, which may be shorter."""
    from marginax.deep.run import SETTINGS, load_run

    if not (out / SETTINGS).exists():
        return agent, evaluate_every
    earlier = load_run(out).config
    if len(earlier.groups) == 1 and earlier.kind == agent.kind:
        unset = [name for name in ("random_steps", "epsilon_steps") if getattr(agent, name, 0) is None]
        agent = dataclasses.replace(agent, **{name: getattr(earlier.first, name) for name in unset})
    return agent, earlier.evaluate_every if evaluate_every is None else evaluate_every


@contextlib.contextmanager
def tracker(
    track: bool, task: str, config: PopulationConfig
) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """A function that sends lines of metrics to Weights & Biases, or does nothing unless `track`."""
    if not track:
        yield lambda lines: None
        return
    try:
        import wandb
    except ImportError as error:
        raise ImportError("--track needs the package wandb: pip install wandb") from error
    runs: dict[tuple[str, int], Any] = {}

    def log(lines: list[dict[str, Any]]) -> None:
        for line in lines:
            key = (line["operator"], line["seed"])
            if key not in runs:
                settings = {"task": task, "seed": key[1], **config.groups[key[0]].to_json()}
                name = f"{task}, {key[0]}, seed {key[1]}"
                runs[key] = wandb.init(
                    project="marginax", group=task, name=name, config=settings, reinit="create_new"
                )
            numbers = {name: value for name, value in line.items() if isinstance(value, float)}
            runs[key].log(numbers, step=line["step"])

    try:
        yield log
    finally:
        for run in runs.values():
            run.finish()


def finish(outcome: dict[str, dict[str, Any]]) -> None:
    """Raise `RuntimeError` with one line for all parts that did not finish."""
    bad = {name: found for name, found in outcome.items() if found["state"] in ("failed", "diverged")}
    if bad:
        reasons = []
        for name, found in bad.items():
            # The reason of a divergence names its step.
            place = f" at step {found['step']:,}" if found["state"] == "failed" else ""
            reasons.append(f"{name} {found['state']}{place}: {found['reason']}")
        raise RuntimeError(f"{len(bad)} of {len(outcome)} did not finish. {'; '.join(reasons)}")


def plot(
    runs: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(help_behavior_hint="(one or more)")
    ],
    *,
    out: Path = Path("."),
) -> None:
    """Draw the learning curves of runs: interquartile means over seeds with bootstrap intervals.

    Args:
        runs: Folders that `marginax train` wrote, or those of a task of `marginax reproduce control`.
        out: Folder for curves.png, curves.pdf and curves.csv.
    """
    from rich.console import Console
    from rich.table import Table

    from marginax.deep.curves import draw, interval, load_curves

    if not runs:
        raise ValueError("runs must name at least one folder of a run.")
    curves = load_curves(runs)
    check_writable(out)
    table = Table(box=None, header_style="bold")
    for name in ("simulator", "operator", "steps", "seeds", "failed", "final return", "mean of curve"):
        table.add_column(name, overflow="fold")
    for curve in curves:
        cells = []
        for values in (curve.final, curve.area):
            middle, band = interval(values)
            between = f" [{band.low:.1f}, {band.high:.1f}]" if len(values) > 1 else ""
            cells.append(f"{float(middle):.1f}{between}")
        counts = (f"{curve.steps[-1]:,}", str(len(curve.seeds)), str(curve.failed.sum()))
        table.add_row(curve.simulator, curve.label, *counts, *cells)
    console = Console()
    console.print(table)
    if any(len(curve.seeds) > 1 for curve in curves):
        console.print("Interquartile means over seeds, with 95% bootstrap intervals.")
    for path in draw(curves, out):
        print(f"wrote {path}")


def play(
    run: tyro.conf.Positional[Path],
    *,
    episodes: int = 10,
    seed: int = 0,
    simulator: str | None = None,
    video: Path | None = None,
    render: bool = False,
) -> None:
    """Evaluate a saved policy on its simulator, without exploration.

    Args:
        run: A policy file, the folder of a seed, or that of a run, whose first seed then plays.
        episodes: Number of episodes.
        seed: Seed of the episodes.
        simulator: Another simulator; needed where the policy's own is in a module that would have to be imported.
        video: Film the first episode, by the simulator's own renderer, into this .mp4 or .gif (extra `video`).
        render: Show the first episode in a window.
    """
    import numpy as np

    from marginax.deep.policy import find_policy, load_policy
    from marginax.simulators.rollout import AgentSpec, evaluate, evaluation_seeds

    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}.")
    file = find_policy(run)
    policy = load_policy(file)
    name = simulator or policy.simulator
    if simulator is None and ":" in name:
        raise ValueError(
            f"the policy was trained on {name!r}, and a file's word is not enough to import the module "
            f"{name.partition(':')[0]!r}: if you trust it, give --simulator {name}"
        )
    if video is not None or render:
        from marginax.deep.policy import film

        first = int(evaluation_seeds(seed, 0, 1)[0])
        frames = film(policy, name, first, video=video, show=render, allow_import=simulator is not None)
        print(f"{frames} frames" + (f" in {video}" if video else ""))
    spec = AgentSpec(name, seed, allow_import=simulator is not None)
    world = spec.make(seed)
    world.close()
    policy.check_fits(name, world)
    returns = next(x for x in evaluate(spec, policy.layers, 0, episodes) if x is not None)
    print(f"{name}: {episodes} episode{'s' * (episodes > 1)} of {file}")
    print(
        f"return {np.mean(returns):.2f} ± {np.std(returns):.2f}, {returns.min():.2f} to {returns.max():.2f}"
    )
