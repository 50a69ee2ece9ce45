"""The command `marginax evaluate`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from marginax._checks import count
from marginax._files import check_writable
from marginax._folders import opened


def evaluate(
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    policy: tuple[str, ...],
    discount: float = 0.99,
    horizon: int | None = None,
    policy_kind: Literal["table", "rows"] | None = None,
    out: str | None = None,
    behaviour: str = "auto",
    encoding: str | None = None,
    estimators: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: all)")] = (),
    reward_range: tuple[float, float] | None = None,
    level: float = 0.95,
    network_steps: int = 1500,
    seed: int = 0,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> int:
    """Say what a policy is worth, from episodes that another policy logged.

    Args:
        data: a .parquet, .csv, .csv.gz or .npz file with one row per transition, a folder of such files, a Minari folder, or the id of a Minari dataset.
        policy: a .npy, .csv or .parquet table [states, actions]; such a file with probabilities for each row of the data; a folder written by `marginax train`; or module:function. Several are ranked.
        discount: discount factor in [0, 1].
        horizon: number of steps whose rewards count; all if omitted.
        policy_kind: whether a policy file is a table or has a row for each row of the data; needed if its shape fits both.
        out: folder for evaluation.html, evaluation.json and the figures: a path, or an address such as s3://bucket/folder.
        behaviour: where behaviour probabilities come from: auto, logged, estimated, or a file with a table.
        encoding: the order of the labels, if states or actions are words: a JSON file such as encoding.json of an earlier evaluation, or sorted.
        estimators: names of estimators to run, of those that apply.
        reward_range: least and largest possible reward; the log's own if omitted.
        level: level of the intervals.
        network_steps: gradient steps of each network, for data with observations.
        seed: seed of the bootstrap and of fitted networks.
        engine: where the work runs: this machine, or a Ray cluster for tabular logs in many Parquet or CSV files.
        address: address of the Ray cluster, such as 10.0.0.1:6379; by default a cluster that runs already, or a new one here.
    """
    from marginax.offline.behaviour import BEHAVIOURS
    from marginax.offline.networks import Training
    from marginax.offline.page import write_report
    from marginax.offline.pipeline import evaluate as evaluate_log
    from marginax.offline.policies import TABLES, TablePolicy, load_policy
    from marginax.offline.ranking import Ranking

    begin = time.monotonic()
    if out is not None:
        with opened(out, without="*") as folder:
            check_writable(folder)
    source = _open(data, encoding)
    table: Any = behaviour
    if behaviour not in BEHAVIOURS:
        if Path(behaviour).suffix.lower() not in TABLES:
            raise ValueError(f"behaviour must be auto, logged, estimated or a table, got {behaviour!r}")
        given = load_policy(behaviour, kind="table")
        assert isinstance(given, TablePolicy)
        table = given.table
    with _progress(source.total) as progress:
        result = evaluate_log(
            source,
            policy[0] if len(policy) == 1 else _named(policy),
            behaviour=table,
            progress=progress,
            training=Training(steps=count("network_steps", network_steps)),
            discount=discount,
            horizon=horizon,
            policy_kind=policy_kind,
            estimators=estimators or None,
            reward_range=reward_range,
            level=level,
            seed=seed,
            engine=engine,
            address=address,
        )
    if isinstance(result, Ranking):
        _show_ranking(result)
    else:
        _show(result)
    if out is not None:
        with opened(out, without="*") as folder:
            if source.encoding is not None:
                text = json.dumps(source.encoding, indent=1, ensure_ascii=False)
                (folder / "encoding.json").write_text(text, encoding="utf-8")
            command = shlex.join(["marginax", *sys.argv[1:]])
            page = write_report(result, folder, command=command, seconds=time.monotonic() - begin)
        print(f"Report: {out.rstrip('/')}/{page.name}")
    return 0


def _open(data: str, encoding: str | None) -> Any:
    from marginax.offline.sources import check_encoding, open_data

    if encoding is None:
        return open_data(data)
    if encoding == "sorted":
        return open_data(data, "sorted")
    path = Path(encoding)
    if not path.is_file():
        raise FileNotFoundError(f"there is no encoding file {encoding!r} (and it is not 'sorted')")
    try:
        labels = json.loads(path.read_text(encoding="utf-8-sig"))
        check_encoding(labels)
    except ValueError as error:
        raise ValueError(f"{encoding} is not an encoding: {error}") from None
    return open_data(data, labels)


def _named(policies: tuple[str, ...]) -> dict[str, str]:
    """Policies by the last part of their path where that tells them apart, else by their whole path."""
    short = [Path(p).name if ":" not in p else p for p in policies]
    names = short if len(set(short)) == len(short) else list(policies)
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"the policy {name!r} is given twice")
    return dict(zip(names, policies, strict=True))


@contextmanager
def _progress(total: int | None) -> Iterator[Any]:
    """A bar on the terminal for each pass over the log and each list of things to do."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=Console(stderr=True), transient=True) as bar:

        def progress(name: str, parts: Iterable[Any]) -> Iterator[Any]:
            listed = isinstance(parts, Sized)  # a list of things to do; else the chunks of the log
            task = bar.add_task(name, total=len(parts) if isinstance(parts, Sized) else total)
            for part in parts:
                yield part
                bar.advance(task, 1 if listed else len(part))
            bar.remove_task(task)

        yield progress


def _table(title: str, columns: tuple[str, ...]) -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(
            name,
            justify="right" if i else "left",
            no_wrap=name in ("value", "estimator") or "interval" in name,
            overflow="fold" if name == "policy" else "ellipsis",  # names that begin alike stay apart
        )
    return table


def _show(result: Any) -> None:
    """Prints the answers, the diagnostics that matter and the verdict."""
    from rich.console import Console
    from rich.text import Text

    from marginax.offline.results import share

    console, d, settings = Console(), result.diagnostics, result.settings
    interval = f"{100 * settings['level']:g}% interval"
    title = f"Value of {settings['policy']} on {settings['data']}"
    table = _table(title, ("estimator", "value", interval, "effective"))
    for answer in result.answers.values():
        table.add_row(
            *_cells(answer), style="bold green" if answer.name == result.verdict.estimator else None
        )
    table.add_section()
    table.add_row(*_cells(result.behaviour))
    console.print(table)
    shown = [*result.answers.values(), result.behaviour]
    if any(answer.truncation == "stops" for answer in shown):
        console.print("† counts nothing after a truncated step", markup=False)
    horizon = settings["horizon"]
    steps = "all steps" if horizon is None else f"the first {horizon:,} steps"
    steps = "the first step" if horizon == 1 else steps
    console.print(
        f"γ = {settings['discount']:g}, {steps}; {d['episodes']:,} episodes, {d['transitions']:,} transitions, "
        f"{d['truncated']:,} truncated; behaviour probabilities {d['behaviour']}; probability of leaving the log's support: "
        f"{share(d['unsupported'])}.",
        markup=False,
        highlight=False,
    )
    for note in result.notes:
        console.print(f"Note: {note}.", highlight=False, markup=False)
    colour = {"trust": "green", "caution": "yellow", "cannot tell": "red"}[result.verdict.status]
    verdict = Text(f"{result.verdict.status.capitalize()}.", style=f"bold {colour}")
    console.print(verdict.append(" " + " ".join(result.verdict.text), style="not bold default"))


def _show_ranking(ranking: Any) -> None:
    """Prints the policies in their order, with the estimate that each verdict recommends."""
    from rich.console import Console

    console = Console()
    first = next(iter(ranking.policies.values())).settings
    table = _table(
        f"{len(ranking.policies)} policies on {first['data']}",
        ("policy", "value", f"{100 * first['level']:g}% interval", "estimator", "verdict", "than the log's"),
    )
    for name in ranking.order:
        one = ranking.policies[name]
        cells: tuple[str, ...] = ("", "", "")
        if one.verdict.estimator is not None:
            a = one.answers[one.verdict.estimator]
            cells = (f"{a.value:.4g}", f"{a.interval.low:.4g} … {a.interval.high:.4g}", a.name)
        table.add_row(
            name,
            *cells,
            one.verdict.status,
            one.verdict.better,
            style="bold green" if name == ranking.best else None,
        )
    console.print(table)
    for sentence in ranking.text:
        console.print(sentence, markup=False)


def _cells(a: Any) -> tuple[str, ...]:
    name = "(the log's own return)" if a.name == "behaviour" else a.name
    name += " †" if a.truncation == "stops" else ""
    unit = "step" if a.ess_of == "transitions" else "episode"
    effective = "" if a.ess is None else f"{a.ess:,.0f} {unit}{'' if round(a.ess) == 1 else 's'}"
    return name, f"{a.value:.4g}", f"{a.interval.low:.4g} … {a.interval.high:.4g}", effective
