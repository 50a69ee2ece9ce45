"""The command `marginax evaluate`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from marginax._checks import count
from marginax.offline.networks import Training
from marginax.offline.page import write_report
from marginax.offline.pipeline import evaluate as evaluate_log
from marginax.offline.results import Answer, Evaluation
from marginax.offline.sources import open_data


def evaluate(
    data: Annotated[str, tyro.conf.Positional],
    policy: str,
    discount: float = 0.99,
    out: Path | None = None,
    behaviour: Literal["auto", "logged", "estimated"] = "auto",
    estimators: tuple[str, ...] = (),
    reward_range: tuple[float, float] | None = None,
    network_steps: int = 1500,
    seed: int = 0,
) -> int:
    """Say what a policy is worth, from episodes that another policy logged.

    Args:
        data: a Parquet or CSV file with one row a transition, a Minari folder, or the id of a Minari dataset.
        policy: a .npy or .csv table [states, actions]; a file of probabilities aligned with the rows of the data;
            a folder written by `marginax train`; or module:function.
        discount: discount factor in [0, 1).
        out: folder for evaluation.html, evaluation.json and the figures.
        behaviour: where behaviour probabilities come from.
        estimators: names of estimators to run; all that apply if omitted.
        reward_range: least and largest possible reward, for the concentration bound; the log's own if omitted.
        network_steps: gradient steps of each network, for data with observations.
        seed: seed of the bootstrap and of fitted networks.
    """
    console = Console()
    begin = time.monotonic()
    source = open_data(data)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:

        def progress(name: str, parts: Iterable[Any]) -> Iterator[Any]:
            listed = isinstance(parts, Sized)  # a list of things to do; else the chunks of the log
            task = bar.add_task(name, total=len(parts) if isinstance(parts, Sized) else source.total)
            for part in parts:
                yield part
                bar.advance(task, 1 if listed else len(part))
            bar.remove_task(task)

        result = evaluate_log(
            source,
            policy,
            discount=discount,
            estimators=estimators or None,
            behaviour=behaviour,
            reward_range=reward_range,
            seed=seed,
            progress=progress,
            training=Training(steps=count("network_steps", network_steps)),
        )
    show(result, console)
    if out is not None:
        command = shlex.join(["marginax", *sys.argv[1:]])
        page = write_report(result, out, command=command, seconds=time.monotonic() - begin)
        console.print(f"Report: {page}")
    return 0


def show(result: Evaluation, console: Console) -> None:
    """Prints the answers, the diagnostics that matter and the verdict."""
    d = result.diagnostics
    table = Table(
        title=f"Value of {result.settings['policy']} on {result.settings['data']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name, justify in (
        ("estimator", "left"),
        ("value", "right"),
        ("95% interval", "right"),
        ("effective", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for answer in result.answers.values():
        style = "bold green" if answer.name == result.verdict.estimator else None
        table.add_row(*_cells(answer), style=style)
    table.add_section()
    table.add_row(*_cells(result.behaviour))
    console.print(table)
    if d["truncated"]:
        console.print("† counts nothing after a truncated step")
    console.print(
        f"{d['episodes']:,} episodes, {d['transitions']:,} transitions, {d['truncated']:,} truncated; behaviour "
        f"probabilities {d['behaviour']}; leaves the log's support with probability {d['unsupported']:.2%}."
    )
    for note in result.notes:
        console.print(f"Note: {note}.", highlight=False)
    colour = {"trust": "green", "caution": "yellow", "cannot tell": "red"}[result.verdict.status]
    console.print(f"[bold {colour}]{result.verdict.status.capitalize()}.[/] {' '.join(result.verdict.text)}")


def _cells(a: Answer) -> tuple[str, ...]:
    name = "(the log's own return)" if a.name == "behaviour" else a.name
    name += " †" if a.truncation == "stops" else ""
    effective = "" if a.ess is None else f"{a.ess:,.0f} {'steps' if a.ess_of == 'transitions' else a.ess_of}"
    return name, f"{a.value:.4g}", f"{a.interval.low:.4g} … {a.interval.high:.4g}", effective
