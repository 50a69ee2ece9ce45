"""Write the tables and figures of the pages on trained agents from the metrics in `docs/data`, or check them.

    python benchmarks/agent_tables.py            # write them
    python benchmarks/agent_tables.py --check    # exit with 1 if a page says something else

The pages are `docs/control.md`, `docs/figure-3.md`, `docs/baseline.md`, `docs/baseline-trials.md` and `docs/games.md`. Each table stands between `<!-- table NAME -->`
and `<!-- end -->`. Metrics come from `marginax reproduce control` and `marginax reproduce discrete`, with the commands that
the pages name; columns are those of their `metrics.jsonl` and `returns.csv`.
"""

import csv
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np
import tyro

from marginax import report
from marginax.deep.curves import Curve, curves_of, draw, interval
from marginax.experiments.control_report import (
    claims,
    draw_finals,
    failures,
    gain,
    same_clip,
    variance_ratio,
)
from marginax.experiments.discrete import difference, draw_returns
from marginax.statistics import bootstrap, interquartile_mean

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DATA = DOCS / "data"
Rows = list[tuple[str, ...]]
GAMES = {"four-rooms": "Four Rooms", "noisy-catch": "noisy Catch"}


@cache
def read(file: str) -> list[dict[str, str]]:
    """The lines of a file."""
    with (DATA / file).open(newline="") as lines:
        return list(csv.DictReader(lines))


@cache
def curves(name: str) -> dict[str, Curve]:
    """The curves of one file, by operator."""
    rows = read(f"control-{name}.csv")
    return curves_of(
        name, [{k: v if k == "operator" else float(v or "nan") for k, v in row.items()} for row in rows]
    )


def returns_of(simulator: str, rows: Iterable[tuple[str, dict[str, str]]]) -> dict[str, Curve]:
    """The curves of returns alone, from lines with a label each."""
    lines = [
        {"operator": label, **{k: float(row[k]) for k in ("seed", "step", "return")}} for label, row in rows
    ]
    return curves_of(simulator, lines)


@cache
def baseline(run: str) -> dict[str, Curve]:
    """The curves of a run of `baseline.csv`, by settings (and by operator where it is another than one-step)."""
    rows = (row for row in read("baseline.csv") if row["run"] == run)

    def label(row: dict[str, str]) -> str:
        return row["settings"] + ("" if row["operator"] == "one-step" else f", {row['operator']}")

    return returns_of(run, ((label(row), row) for row in rows))


@cache
def games(part: str = "operators") -> dict[str, dict[str, Curve]]:
    """The curves of a part of `discrete.csv`, by game and variant."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for row in read("discrete.csv"):
        if row["part"] == part:
            name = row["game"].partition("/")[2].removesuffix("-MinAtar")
            found.setdefault(GAMES.get(name, name), []).append((row["variant"], row))
    return {game: returns_of(game, rows) for game, rows in found.items()}


def until(curve: Curve, steps: int) -> Curve:
    """The beginning of a curve."""
    kept = curve.steps <= steps
    grids = {name: grid[:, kept] for name, grid in curve.diagnostics.items()}
    return curve._replace(steps=curve.steps[kept], returns=curve.returns[:, kept], diagnostics=grids)


def returns(values: np.ndarray) -> str:
    middle, band = interval(values, 1000)
    return f"{float(middle):,.0f} [{band.low:,.0f}, {band.high:,.0f}]"


def against(one: Curve, other: Curve, what: str = "final") -> str:
    pair = (getattr(one.beside(other), what), getattr(other.beside(one), what))
    band = bootstrap(pair, gain)
    return f"{gain(*pair):+.0%} [{band.low:+.0%}, {band.high:+.0%}]"


def variance(curve: Curve) -> str:
    """The variance of target minus Q over Retrace's on the same batches."""
    if "marginalized" not in curve.label:
        return ""
    ratio = variance_ratio(curve, "retrace")
    band = bootstrap(ratio)
    return f"{np.exp(ratio.mean()):.2f} [{np.exp(band.low):.2f}, {np.exp(band.high):.2f}]"


def results() -> Rows:
    rows: Rows = [
        ("task", "operator", "seeds", "final return", "area under the curve", "failures", "variance")
    ]
    for task, name in (("cheetah-run", "cheetah-run-1M"), ("walker-run", "walker-run-1M")):
        found = curves(name)
        failed = failures(found)
        for label in sorted(found, key=_order):
            curve = found[label]
            cells = (returns(curve.final), returns(curve.area), str(failed[label]), variance(curve))
            rows.append((task, label, str(len(curve.seeds)), *cells))
            task = ""
    return rows


def comparisons() -> Rows:
    rows: Rows = [
        ("run", "seeds", "marginalized against one-step", "against Retrace", "Retrace against one-step")
    ]
    marginalized, one, retrace = "marginalized-regression", "one-step", "retrace"
    runs = {
        "in the table above": "cheetah-run-1M",
        "an earlier one": "cheetah-run-1M-earlier",
        "in TF32, below": "cheetah-run-tf32",
        "new seeds": "cheetah-run-seeds-10-29",
    }
    for words, name in runs.items():
        found = {label: until(curve, 700_000) for label, curve in curves(name).items()}
        seeds = found[one].seeds
        cells = [
            against(found[a], found[b], "area") if b in found and a in found else ""
            for a, b in ((marginalized, one), (marginalized, retrace), (retrace, one))
        ]
        rows.append((f"{words} ([data](data/control-{name}.csv))", f"{seeds[0]} to {seeds[-1]}", *cells))
    return rows


def precision() -> Rows:
    """TF32 against full precision, up to the steps that both have."""
    pairs = {
        ("cheetah-run, spinning-up", label): tuple(
            curves(f"cheetah-run-{k}")[label] for k in ("tf32", "float32")
        )
        for label in ("one-step", "marginalized-regression")
    }
    halfcheetah = baseline("HalfCheetah")
    pairs["HalfCheetah, default", "one-step"] = tuple(
        halfcheetah[f"default{full}, γ = 0.98"] for full in ("", ", full precision")
    )
    columns = ("area, TF32", "area, full precision", "TF32 against full precision")
    rows: Rows = [("run", "operator", "steps", *columns)]
    for names, pair in pairs.items():
        last = min(int(curve.steps[-1]) for curve in pair)
        half, full = (until(curve, last) for curve in pair)
        cells = (returns(half.area), returns(full.area), against(half, full, "area"))
        rows.append((*names, f"{last:,}", *cells))
    return rows


def ablation() -> Rows:
    found = curves("ablation")
    failed = failures(found)
    rows: Rows = [("operator", "final return", "area", "failures", "against Retrace, final", "variance")]
    for label in sorted(found, key=_order):
        curve = found[label]
        other = "" if label == "retrace" else against(curve, found["retrace"])
        cells = (returns(curve.final), returns(curve.area), str(failed[label]), other)
        rows.append((label, *cells, variance(curve)))
    return rows


def sooner(found: dict[str, Curve]) -> Rows:
    """How soon each operator learns, against one-step and Retrace."""
    retrace = next(label for label in found if label.startswith("retrace"))
    rows: Rows = [
        ("operator", "final return", "area", "area against one-step", "against Retrace", "variance")
    ]
    for label in sorted(found, key=_order):
        curve = found[label]
        cells = [
            "" if label == other else against(curve, found[other], "area") for other in ("one-step", retrace)
        ]
        rows.append((label, returns(curve.final), returns(curve.area), *cells, variance(curve)))
    return rows


def default_run(task: str) -> dict[str, Curve]:
    """The curves of all operators with the defaults, up to the steps that all have."""
    found = curves(f"default-{task}")
    last = min(int(curve.steps[-1]) for curve in found.values())
    order = sorted(found, key=lambda label: ("-clip-" in label, _order(label.partition("-clip-")[0])))
    return {label: until(found[label], last) for label in order}


def operators() -> Rows:
    """Every operator on every task with the defaults, and all tasks together against one-step and Retrace."""
    found = {task: default_run(task) for task in TASKS}
    heads = (f"{task}, {int(runs['one-step'].steps[-1]):,} steps" for task, runs in found.items())
    rows: Rows = [("operator", *heads, "area against one-step, all tasks", "area against Retrace, all tasks")]
    for label in found["Ant"]:
        cells = []
        for runs in found.values():
            failed = failures(runs)[label]
            cells.append(returns(runs[label].final) + (f", {failed} failed" if failed else ""))
        (retrace,) = same_clip(label, ("retrace", "retrace-clip-2"))
        others = ("" if label == "one-step" else "one-step", retrace if "marginalized" in label else "")
        pooled = (
            together([(r[label], r[other]) for r in found.values()]) if other else "" for other in others
        )
        rows.append((label, *cells, *pooled))
    return rows


def together(pairs: list[tuple[Curve, Curve]]) -> str:
    """The mean over tasks of the relative difference of areas; an interval without 0 is bold."""

    def mean(*areas: np.ndarray) -> float:
        return float(np.mean([gain(x, y) for x, y in zip(areas[::2], areas[1::2], strict=True)]))

    areas = tuple(curve.area for pair in pairs for curve in pair)
    band = bootstrap(areas, mean)
    mark = "**" if band.low > 0 or band.high < 0 else ""
    return f"{mark}{mean(*areas):+.0%} [{band.low:+.0%}, {band.high:+.0%}]{mark}"


def longer(name: str) -> Rows:
    """The operators of a run of `LONGER_RUNS`, with the seeds that failed."""
    steps = LONGER_RUNS[name]
    found = {label: until(c, steps) for label, c in curves(name).items() if int(c.steps[-1]) >= steps}
    failed = failures(found)
    first, *rest = sooner(found)
    return [(*first, "failures"), *((*row, str(failed[row[0]])) for row in rest)]


def all_tasks() -> Rows:
    """Areas of operators against each other on every task that has both, the mean over tasks, and the traces."""
    found = {task: curves(file) for task, file in SPINNING_UP.items()}
    retrace, regression = "retrace", "marginalized-regression"
    pairs = ((retrace, "one-step"), (regression, "one-step"), (regression, retrace))
    rows: Rows = [("task", *(f"{one} against {other}" for one, other in pairs), "mean trace of retrace")]
    for task, runs in found.items():
        cells = (against(runs[one], runs[other], "area") if one in runs else "" for one, other in pairs)
        rows.append((task, *cells, f"{np.median(runs[retrace].diagnostics['trace_mean']):.3f}"))
    everywhere = found["Ant"]["one-step"]  # cheetah-run has more seeds
    pooled = (
        together(
            [(r[one].beside(everywhere), r[other].beside(everywhere)) for r in found.values() if one in r]
        )
        for one, other in pairs
    )
    return [*rows, ("mean over tasks, seeds 0 to 4", *pooled, "")]


def pybullet() -> Rows:
    tasks = {"HalfCheetah": curves("pybullet-HalfCheetah-1M"), "Ant": curves("pybullet-Ant")}
    rows: Rows = [
        ("operator", *(f"{task}, {what}" for task in tasks for what in ("final return", "mean trace")))
    ]
    for label in ("one-step", "retrace", "marginalized-regression"):
        cells = []
        for found in tasks.values():
            last = found[label].diagnostics["trace_mean"][:, -2:]
            cells += [returns(found[label].final), f"{np.median(last):.3f}" if label != "one-step" else ""]
        rows.append((label, *cells))
    return rows


def options(run: str, steps: int, base_run: str = "") -> Rows:
    """What every option brings by itself; `base_run` has Spinning Up's settings where the run has not."""
    both = {**baseline(run), "spinning-up": baseline(base_run or run)["spinning-up"]}
    found = {label: until(curve, steps) for label, curve in both.items()}
    base = found["spinning-up"]
    rows: Rows = [("changed", "final return", "worst seed", "area", "area against spinning-up")]
    for label, curve in sorted(
        found.items(), key=lambda x: (x[1] is not base, -interquartile_mean(x[1].area))
    ):
        other = "" if curve is base else against(curve, base, "area")
        rows.append((label, returns(curve.final), f"{curve.final.min():,.0f}", returns(curve.area), other))
    return rows


DEFAULTS = ("default", "default, γ = 0.98")
LONGER_RUNS = {
    "default-cheetah-run": 350_000,
    "one-rate-cheetah-run": 650_000,
    "one-rate-HalfCheetah": 650_000,
}
"""Files of a few operators with the defaults of today and of before, and the steps of the runs that count."""
SPINNING_UP = {
    "cheetah-run": "cheetah-run-1M",
    "walker-run": "walker-run-1M",
    "HalfCheetah": "pybullet-HalfCheetah-1M",
    "Ant": "pybullet-Ant",
}
"""Files of Spinning Up's settings, by task."""
TASKS = tuple(SPINNING_UP)
PUBLISHED = {
    "cheetah-run": ("870 (716 to 888)", 870, 1_000_000),
    "walker-run": ("651", 651, 500_000),
    "HalfCheetah": ("2,774 ± 35", 2774, 1_000_000),
    "Ant": ("3,305 ± 43", 3305, 1_000_000),
}
"""What others publish: in their words, as a number, and after how many steps."""


def of_defaults(task: str) -> Curve:
    """The ten seeds of the defaults."""
    return next(curve for label, curve in baseline(task).items() if label in DEFAULTS)


def published() -> Rows:
    """The defaults beside what others publish, at the same number of steps: the last evaluation of every seed."""
    columns = ("task", "steps", "published", "default: mean ± deviation", "median", "worst")
    rows: Rows = [(*columns, "one rate, noise 0.1", "spinning-up")]
    for task, (words, _, steps) in PUBLISHED.items():
        ours = of_defaults(task)
        earlier = baseline(task)[ours.label.replace("default", "one rate, noise 0.1")]
        found = (ours, earlier, curves(SPINNING_UP[task])["one-step"])
        last, *before = (until(curve, steps).returns[:, -1] for curve in found)
        cells = (spread(last), f"{np.median(last):,.0f}", f"{last.min():,.0f}", *map(spread, before))
        rows.append((task, f"{steps:,}", words, *cells))
    return rows


def draw_baseline(folder: Path) -> None:
    """The curves of the defaults and of Spinning Up's settings, with what others publish as a line."""
    colours = {"defaults": "#0072B2", "Spinning Up's settings": "#D55E00"}
    labels = ("thousand environment steps", "return (interquartile mean)")
    with report.panel_each(folder, "baseline", list(TASKS), (3.4, 2.5), *labels) as (figure, axes):
        for axis, task in zip(axes, TASKS, strict=True):
            _, level, steps = PUBLISHED[task]
            found = (of_defaults(task), curves(SPINNING_UP[task])["one-step"])
            for (label, colour), curve in zip(colours.items(), found, strict=True):
                drawn = until(curve, steps)
                middle, band = interval(drawn.returns, 500)
                axis.plot(drawn.steps / 1000, middle, color=colour, label=label)
                axis.fill_between(
                    drawn.steps / 1000, band.low, band.high, color=colour, alpha=0.15, linewidth=0
                )
            axis.axhline(level, color="black", linestyle="--", linewidth=1, label="published")
        report.legend_below(figure, axes)


def spread(values: np.ndarray) -> str:
    """Mean and standard deviation."""
    return f"{values.mean():,.0f} ± {values.std(ddof=1):,.0f}"


def two_cores() -> Rows:
    """Single seeds that two cores had time for, beside the ten seeds of the defaults at the same step."""
    columns = ("task", "settings", "seed", "steps", "return")
    rows: Rows = [(*columns, "default at that step, or 25,000 before: mean (range)")]
    for task in SPINNING_UP:
        mine = [row for row in read("baseline.csv") if row["run"] == f"{task}, two cores"]
        base = of_defaults(task)
        last = {(row["settings"], row["seed"]): row for row in mine}  # lines are in the order of steps
        for (settings, seed), row in last.items():
            then = until(base, int(row["step"])).returns[:, -1]
            cells = (f"{int(row['step']):,}", f"{float(row['return']):,.0f}")
            rows.append(
                (task, settings, seed, *cells, f"{then.mean():,.0f} ({then.min():,.0f} to {then.max():,.0f})")
            )
    return rows


def programs() -> Rows:
    """The same settings in marginax and in Stable-Baselines3: mean and deviation over seeds, and the relative difference of areas."""
    columns = ("simulator", "seeds", "steps", "marginax", "Stable-Baselines3", "area, marginax against it")
    found = baseline("Pendulum-v1, two programs")
    ours, theirs = found["marginax"], found["Stable-Baselines3"]
    cells = (spread(curve.returns[:, -1]) for curve in (ours, theirs))
    counts = (str(len(ours.seeds)), f"{int(ours.steps[-1]):,}")
    return [columns, ("Pendulum-v1", *counts, *cells, against(ours, theirs, "area"))]


def ant() -> Rows:
    """Two seeds of each program with the published settings, and the ten of the defaults, at the evaluations of the latter."""
    programs, base = baseline("Ant, two programs"), baseline("Ant")["default, γ = 0.98"]
    seeds = [(name, curve, row) for name, curve in programs.items() for row in range(len(curve.seeds))]
    rows: Rows = [("steps", *(f"{name}, seed {curve.seeds[row]}" for name, curve, row in seeds))]
    rows[0] += ("defaults: mean (range)",)
    last = max(curve.steps[-1] for curve in programs.values())
    for step, then in zip(base.steps, base.returns.T, strict=True):
        if step <= last:
            own = [curve.returns[row, curve.steps == step] for _, curve, row in seeds]
            cells = (f"{value[0]:,.0f}" if value.size else "" for value in own)
            rows.append((f"{step:,}", *cells, f"{then.mean():,.0f} ({then.min():,.0f} to {then.max():,.0f})"))
    return rows


def wide() -> Rows:
    """Networks of 400 and 300 units beside those of the defaults, at the same evaluations: mean and deviation, and the worst seed."""
    widths = ("256 and 256 units", "worst", "400 and 300 units", "worst")
    rows: Rows = [("task", "steps", *widths, "area against 256")]
    for task in TASKS:
        usual = of_defaults(task)
        larger = baseline(task)[usual.label.replace("default", "default, wide networks")]
        steps = int(larger.steps[-1])
        usual = until(usual, steps)
        cells = []
        for curve in (usual, larger):
            last = curve.returns[:, -1]
            cells += [spread(last), f"{last.min():,.0f}"]
        rows.append((task, f"{steps:,}", *cells, against(larger, usual, "area")))
    return rows


def combinations() -> Rows:
    """Settings together, and beside Spinning Up's at the same evaluations of the same seeds."""
    own = ("task", "settings", "seeds", "steps", "last return", "worst seed")
    rows: Rows = [(*own, "seeds of both", "last return, spinning-up", "area against it")]
    for task, file in SPINNING_UP.items():
        old = curves(file)["one-step"]
        for label, curve in baseline(task).items():
            new, base = curve.beside(old), old.beside(curve)
            last = curve.returns[:, -1]
            cells = (returns(last), f"{last.min():,.0f}", str(len(new.seeds)), returns(base.returns[:, -1]))
            words = (task, label, str(len(curve.seeds)), f"{int(curve.steps[-1]):,}")
            rows.append((*words, *cells, against(new, base, "area")))
    return rows


def score(curve: Curve) -> str:
    """Area under the curve of the greedy return."""
    middle, band = interval(curve.area, 1000)
    digits = 2 if abs(middle) < 2 else 1
    return f"{float(middle):.{digits}f} ({band.low:.{digits}f}–{band.high:.{digits}f})"


OPERATORS = {
    **{"one-step": "one-step", "n-step": "n-step", "peng": "Peng's Q(λ)", "tree-backup": "tree backup"},
    **{"retrace": "Retrace", "marginalized": "marginalized"},
}


def discrete() -> Rows:
    """Every operator in every game."""
    rows: Rows = [("", *games())]
    for label, words in OPERATORS.items():
        rows.append((words, *(score(found[label]) for found in games().values())))
    return rows


def discrete_differences() -> Rows:
    """The marginalized operator against the others, as intervals of differences of the area."""
    rows: Rows = [("marginalized against", *games())]
    for label, words in OPERATORS.items():
        if label == "marginalized":
            continue
        cells = []
        for found in games().values():
            band = bootstrap((found["marginalized"].area, found[label].area), difference)
            digits = "+.2g" if max(abs(band.low), abs(band.high)) < 2 else "+.1f"
            mark = "**" if band.low > 0 or band.high < 0 else ""
            cells.append(f"{mark}{band.low:{digits}} to {band.high:{digits}}{mark}")
        rows.append((words, *cells))
    return rows


def ablation_of_games() -> Rows:
    """Settings of the two corrected operators in Asterix."""
    (found,) = games("ablation").values()
    names = [name.removeprefix("marginalized") for name in found if name.startswith("marginalized")]
    rows: Rows = [("", *(name.removeprefix(", ") or "as above" for name in names))]
    for label in ("retrace", "marginalized"):
        cells = [f"{float(interquartile_mean(found[label + name].area)):.2f}" for name in names]
        rows.append((OPERATORS[label], *cells))
    return rows


def actor_critics() -> Rows:
    """V-trace and its marginalized form with growing shares of replayed data."""
    of = games("actor-critic")
    rows: Rows = [("replay, c̄", *(f"{game}, {form}" for game in of for form in ("V-trace", "marginalized")))]
    names = [name.removeprefix("vtrace, ") for name in next(iter(of.values())) if name.startswith("vtrace")]
    for name in names:
        cells = [
            score(found[f"{form}, {name}"]) if f"{form}, {name}" in found else ""
            for found in of.values()
            for form in ("vtrace", "marginalized")
        ]
        rows.append((name, *cells))
    return rows


def default_claims() -> Rows:
    """What the report says of the operators with the defaults, task by task; of both returns, by the area."""
    marks = {"reproduced": "✓", "not reproduced": "✗", "cannot be decided": "?"}
    cells: dict[tuple[str, str], list[str]] = {}
    for task in TASKS:
        found = default_run(task)
        for claim in claims(task, found):
            if not claim.measure.startswith("final return"):
                named = [label for label in found if label in claim.measure and label != "one-step"]
                operator = max(named, key=lambda label: (label.startswith("marginalized"), len(label)))
                low, high = claim.interval.low, claim.interval.high
                numbers = f"{claim.effect:+.2g} [{low:+.2g}, {high:+.2g}]"
                cells.setdefault((claim.text, operator), []).append(f"{marks[claim.verdict]} {numbers}")
    rows: Rows = [("claim", "operator", *TASKS)]
    for text, operator in sorted(cells, key=lambda key: key[0]):
        shown = "" if any(row[0] == text for row in rows) else text
        rows.append((shown, operator, *cells[text, operator]))
    return rows


def _order(label: str) -> tuple[int, str]:
    first = ("one-step", "n-step", "retrace", "retrace-paper", "retrace-soft", "marginalized-regression")
    return (first.index(label) if label in first else len(first), label)


PAGES: dict[str, dict[str, Callable[[], Rows]]] = {
    "control.md": {
        "operators": operators,
        "claims": default_claims,
        **{name: partial(longer, name) for name in LONGER_RUNS},
        **{
            name: lambda name=name: sooner(curves(name))
            for name in ("pendulum", "clip-2-pendulum", "clip-2-double-pendulum")
        },
    },
    "figure-3.md": {f.__name__: f for f in (results, all_tasks, comparisons, precision, ablation, pybullet)},
    "baseline.md": {
        "cheetah-run": partial(options, "cheetah-run options", 300_000),
        "cheetah-run-180": partial(
            options, "cheetah-run options, 180,000 steps", 180_000, "cheetah-run options"
        ),
        "walker-run": partial(options, "walker-run options", 190_000),
        **{f.__name__: f for f in (published, programs, ant)},
    },
    "baseline-trials.md": {f.__name__: f for f in (combinations, wide, two_cores)},
    "games.md": {
        "games": discrete,
        "differences": discrete_differences,
        "ablation": ablation_of_games,
        "actor-critics": actor_critics,
    },
}


def write(page: str, text: str) -> str:
    """A page with its tables as the data have them."""
    for name, rows in ((name, make()) for name, make in PAGES[page].items()):
        start, end = f"<!-- table {name} -->\n", "<!-- end -->"
        if start not in text:
            raise ValueError(f"{page} has no place for the table {name!r}.")
        before, _, rest = text.partition(start)
        lines = [f"| {' | '.join(row)} |" for row in rows]
        lines.insert(1, "|" + "---|" * len(rows[0]))
        text = before + start + "\n" + "\n".join(lines) + "\n\n" + end + rest.partition(end)[2]
    return text


def figures() -> None:
    """Draw the learning curves of each section, and the final returns of the ablation."""
    tasks = {
        "control": {"mujoco/cheetah-run": "cheetah-run-1M", "mujoco/walker-run": "walker-run-1M"},
        "control-pendulum": {"Pendulum-v1": "pendulum"},
        "control-pybullet": {
            "pybullet/HalfCheetah": "pybullet-HalfCheetah-1M",
            "pybullet/Ant": "pybullet-Ant",
        },
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for name, files in tasks.items():
            found = [
                curves(file)[label]._replace(simulator=task)
                for task, file in files.items()
                for label in sorted(curves(file), key=_order)
            ]
            draw(found, folder, name)
        for clip in ("", "-clip-2"):
            drawn = [
                found[label]._replace(simulator=task, label=label.removesuffix(clip))
                for task, found in ((task, default_run(task)) for task in TASKS)
                for label in dict.fromkeys(["one-step", *same_clip(clip, list(found))])
            ]
            draw(drawn, folder, f"control-default{clip}")
        draw_baseline(folder)
        ablated = {label: curves("ablation")[label] for label in sorted(curves("ablation"), key=_order)}
        draw_finals({"mujoco/cheetah-run": ablated}, folder, "control-ablation")
        draw_returns(
            {
                name: (found["one-step"].steps, {k: found[k].returns for k in OPERATORS})
                for name, found in games().items()
            },
            folder,
            "discrete",
        )
        for picture in folder.glob("*.png"):
            shutil.copy(picture, ROOT / "docs" / "img")


def main(check: bool = False) -> None:
    """Write the tables and figures, or only check the tables."""
    for page in PAGES:
        old = (DOCS / page).read_text()
        new = write(page, old)
        if check and old != new:
            sys.exit(f"{page} does not say what docs/data say: run benchmarks/agent_tables.py")
        if not check:
            (DOCS / page).write_text(new)
    if not check:
        figures()


if __name__ == "__main__":
    tyro.cli(main)
