"""The commands `marginax train`, `marginax plot` and `marginax play`."""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from marginax._files import check_writable
from marginax.deep.config import TD3Config
from marginax.deep.curves import draw, load_curves, summarise
from marginax.deep.policy import load_policy
from marginax.deep.run import Run
from marginax.deep.seeds import default_workers, train_seeds

_DEFAULTS = TD3Config()


def train(
    simulator: tyro.conf.Positional[str],
    *,
    out: Path,
    seeds: int = 1,
    first_seed: int = 0,
    steps: int = 1_000_000,
    evaluate_every: int = 10_000,
    episodes: int = 10,
    checkpoint_every: int = 50_000,
    workers: int | None = None,
    agent: Annotated[TD3Config, tyro.conf.arg(name="")] = _DEFAULTS,
) -> None:
    """Train TD3 agents whose critic target is any operator of this library.

    Stopped at any moment, the same command carries on from the last checkpoint and ends with the same metrics. Each
    seed is a process of its own and equals the run of that seed alone.

    Args:
        simulator: dm_control/cheetah-run, mujoco/walker-run, pybullet/HalfCheetah, Pendulum-v1, HalfCheetah-v5, ...
        out: Folder for settings, metrics, checkpoints and policies.
        seeds: Number of seeds.
        first_seed: The first of them.
        steps: Environment steps of each seed.
        evaluate_every: Steps between evaluations of the deterministic policy, on simulators of their own.
        episodes: Episodes of an evaluation.
        checkpoint_every: Steps between checkpoints.
        workers: Processes at a time; one a core when omitted.
        agent: Settings of the agent.
    """
    from marginax.simulators import make

    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}.")
    if first_seed < 0:
        raise ValueError(f"first-seed must be at least 0, got {first_seed}.")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    every = min(evaluate_every, steps)
    run = Run(
        simulator=simulator,
        steps=steps,
        evaluate_every=every,
        episodes=episodes,
        checkpoint_every=max(every, min(checkpoint_every, steps) // every * every),
        agent=agent,
    )
    make(simulator, seed=0).close()
    check_writable(out)
    run.save(out)
    numbers = list(range(first_seed, first_seed + seeds))
    try:
        with _Display(run, numbers) as display:
            outcome = train_seeds(out, numbers, workers or default_workers(seeds), display.listen)
    except KeyboardInterrupt:
        print("The same command carries on from each seed's last checkpoint.")
        raise
    bad = {seed: status for seed, status in outcome.items() if status["state"] != "finished"}
    if bad:
        reasons = "; ".join(f"seed {seed} {s['state']}: {s.get('reason')}" for seed, s in bad.items())
        raise RuntimeError(f"{len(bad)} of {seeds} seeds did not finish. {reasons}")
    print(f"Next: marginax plot {out}, marginax play {out}")


def plot(runs: tyro.conf.Positional[tuple[Path, ...]], *, out: Path = Path(".")) -> None:
    """Draw the learning curves of runs: interquartile means over seeds with bootstrap intervals.

    Args:
        runs: Folders that `marginax train` wrote.
        out: Folder for curves.png, curves.pdf and curves.csv.
    """
    from rich.console import Console
    from rich.table import Table

    if not runs:
        raise ValueError("runs must name at least one folder of a run.")
    curves = load_curves(runs)
    check_writable(out)
    table = Table(box=None, header_style="bold")
    for name in (
        "simulator",
        "operator",
        "steps",
        "seeds",
        "failed",
        "final IQM [95%]",
        "mean of curve [95%]",
    ):
        table.add_column(name)
    for curve in curves:
        cells = ["{:.1f} [{:.1f}, {:.1f}]".format(*interval) for interval in summarise(curve)]
        counts = (f"{curve.steps[-1]:,}", str(len(curve.returns)), str(curve.failures))
        table.add_row(curve.simulator, curve.label, *counts, *cells)
    console = Console()
    console.print(table)
    for path in draw(curves, out):
        console.print(f"wrote {path}")


def play(run: tyro.conf.Positional[Path], *, episodes: int = 10, seed: int = 0) -> None:
    """Evaluate a saved policy on its simulator, without exploration.

    Args:
        run: A policy file, or the folder of a run or of one of its seeds.
        episodes: Number of episodes.
        seed: Seed of the episodes.
    """
    import numpy as np

    from marginax.simulators.rollout import AgentSpec, evaluate

    if episodes < 1:
        raise ValueError(f"episodes must be at least 1, got {episodes}.")
    policy = load_policy(run)
    spec = AgentSpec(policy.simulator, seed)
    returns = [x for x in evaluate(spec, policy.layers, 0, episodes) if x is not None][-1]
    print(f"{policy.simulator}: {episodes} episodes")
    print(
        f"return {np.mean(returns):.2f} ± {np.std(returns):.2f}, {returns.min():.2f} to {returns.max():.2f}"
    )


@dataclass
class _Seed:
    step: int = 0
    speed: float = 0.0
    returned: float | None = None
    state: str = "waiting"


@dataclass
class _Display:
    """A live table where there is a terminal; a line an evaluation where there is none."""

    run: Run
    seeds: list[int]
    rows: dict[int, _Seed] = field(init=False)

    def __post_init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self.rows = {seed: _Seed() for seed in self.seeds}
        self.console = Console(file=sys.stdout)
        self.live = Live(console=self.console, refresh_per_second=2) if self.console.is_terminal else None
        self.drawn = 0.0

    def __enter__(self) -> "_Display":
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self.live is not None:
            self.live.update(self._table())
            self.live.__exit__(*details)

    def listen(self, message: dict[str, Any]) -> None:
        row = self.rows[message["seed"]]
        row.step = message.get("step", row.step)
        row.speed = message.get("speed", row.speed)
        row.returned = message.get("return", row.returned)
        row.state = message.get("state", "training")
        if self.live is not None:
            if time.monotonic() - self.drawn > 0.4:
                self.drawn = time.monotonic()
                self.live.update(self._table())
        elif "return" in message:
            print(
                f"seed {message['seed']}: step {row.step:,}, return {row.returned:.2f}, {row.speed:.0f} steps/s",
                flush=True,
            )
        if self.live is None and "state" in message:
            reason = f": {message['reason']}" if "reason" in message else ""
            print(f"seed {message['seed']}: {row.state}{reason}", flush=True)

    def _table(self) -> Any:
        from rich.table import Table

        agent = self.run.agent
        table = Table(title=f"{self.run.simulator}, {agent.label}", box=None, header_style="bold")
        for name in ("seed", "step", "", "steps/s", "return", "time left", "state"):
            table.add_column(name, justify="right")
        for seed, row in self.rows.items():
            left = (self.run.steps - row.step) / row.speed if row.speed and row.state == "training" else None
            table.add_row(
                str(seed),
                f"{row.step:,}",
                f"{row.step / self.run.steps:.0%}",
                f"{row.speed:.0f}" if row.speed else "",
                "" if row.returned is None else f"{row.returned:.1f}",
                "" if left is None else time.strftime("%H:%M:%S", time.gmtime(left)),
                row.state,
            )
        return table
