"""`marginax reproduce` and `marginax show`. Nothing heavy is imported before the words are parsed."""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import rich.text
import tyro

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax._folders import opened
from marginax.engine import Engine, make
from marginax.experiments import runner
from marginax.experiments.runner import Experiment

EXPERIMENTS = {
    "chain": ("chain:Chain", "Figure 1: errors on the chain"),
    "open-world": ("open_world:OpenWorld", "Figure 2: values and errors on the Open World"),
    "weights": ("weights:Weights", "Figure 6: TD weights from four corners"),
    "policy-iteration": ("policy_iteration:PolicyIteration", "Figure 5: soft and hard policy iteration"),
    "variance": ("variance:Variance", "Figure 4: variances of four estimates"),
    "theory": ("theory:Theory", "Sections 2 and 3: contraction rates"),
    "control": ("control:Control", "Figure 3: deep reinforcement learning on control tasks"),
    "discrete": ("discrete:Discrete", "beyond the paper: Q-learning with discrete actions"),
    "prediction": ("prediction:Prediction", "beyond the paper: policy evaluation with networks"),
}
"""Every experiment: a class in this room (loaded when chosen) and what it is. It runs with `all` if it is in TABULAR."""
TABULAR = ("chain", "open-world", "weights", "policy-iteration", "variance", "theory")
MARKS = {"reproduced": "[green]✓[/]", "not reproduced": "[red]✗[/]", "cannot be decided": "[yellow]?[/]"}

SETTINGS: dict[str, dict[str, Any]] = {
    "chain": {"actions": 5, "off_policy": 0.0, "noise": 0.1},
    "open-world": {},
    "garnet": {"actions": 5, "seed": 0},
}
"""What can be set of the problems that `show` knows, beside their size and discount."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Flags of every experiment. Without a flag, the experiment has its own value."""

    seeds: int | None = None
    """Number of seeds; by default the experiment's own (the paper's, where it names one)."""
    out: str = "out"
    """Folder for the results: a path, or an address such as s3://bucket/folder."""
    quick: bool = False
    """A first look: few seeds, short curves."""
    discount: float | None = None
    """γ; by default 0.99."""
    seed: int | None = None
    """Seed of all random numbers; by default 0."""
    workers: int | None = None
    """Parts that are computed side by side: by default 2, and for training the cores."""
    engine: Literal["local", "ray"] = "local"
    """Where parts run: this machine, or a Ray cluster."""
    address: str | None = None
    """Address of the Ray cluster, such as 10.0.0.1:6379; by default one that runs already, or one that is started here."""
    cpus_per_shard: float = 1.0
    """Cores for each part on a Ray cluster."""
    gpus_per_shard: float = 0.0
    """Accelerators for each part on a Ray cluster; fractions share one."""

    def __post_init__(self) -> None:
        if self.seed is not None and checks.count("--seed", self.seed, least=0) >= 2**32:
            raise ValueError(f"--seed must be below 2**32, got {self.seed}")  # JAX drops the bits above
        if self.seeds is not None and self.seeds < 2:
            raise ValueError(f"--seeds must be at least 2 for intervals over seeds, got {self.seeds}")
        if self.workers is not None:
            checks.count("--workers", self.workers)
        if self.discount is not None and not 0 < self.discount < 1:
            raise ValueError(f"--discount must lie between 0 and 1, got {self.discount}")

    def place(self) -> Engine:
        """The engine that was asked for."""
        resources = {"cpus": self.cpus_per_shard, "gpus": self.gpus_per_shard}
        return make(self.engine, workers=self.workers or 2, address=self.address, **resources)

    def applied(self, experiment: Experiment) -> Experiment:
        """The experiment with the flags that were given."""
        if self.quick:
            experiment = experiment.quick()
        given = {name: getattr(self, name) for name in ("seeds", "discount", "seed")}
        return dataclasses.replace(experiment, **{k: v for k, v in given.items() if v is not None})


def reproduce(words: list[str]) -> tuple[str, Callable[..., None], list[str]]:
    """Program name, function and remaining words of `marginax reproduce [EXPERIMENT] …`, for `cli` to parse."""
    known = ["all", *EXPERIMENTS]
    place = None
    for i, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        # A first word that is no flag was meant as an experiment, even if there is none of that name.
        if (word in known and before != "--out") or (i == 0 and word[:1] != "-"):
            place = i
            break
    name = "all" if place is None else checks.choice("EXPERIMENT", words[place], known)
    rest = [word for i, word in enumerate(words) if i != place]
    if name == "all":
        return "marginax reproduce [EXPERIMENT]", _reproduce_all, rest
    kind = load(name)
    default = kind.starting(rest)

    def one(
        experiment: Annotated[kind, tyro.conf.arg(name="")] = default,  # type: ignore[valid-type]
        options: Annotated[Options, tyro.conf.arg(name="")] = Options(),
    ) -> None:
        _reproduce([options.applied(experiment)], options)

    one.__doc__ = kind.__doc__
    return f"marginax reproduce {name}", one, rest


def _reproduce_all(options: Annotated[Options, tyro.conf.arg(name="")] = Options()) -> None:
    _reproduce([options.applied(load(name)()) for name in TABULAR], options)


_reproduce_all.__doc__ = "\n".join(
    [
        "Runs the paper's experiments and writes figures, data and a report.",
        "",
        "Results go to one folder per experiment, and report.html shows all that are there. What is finished is kept: the "
        "same command carries on after an interruption, and computes again only what has changed.",
        "",
        "EXPERIMENT is one of these, or all tabular ones when omitted; each has more flags (marginax reproduce chain "
        "--help):",
        "",
        *(f"  {name}: {summary}" for name, (_, summary) in EXPERIMENTS.items()),
    ]
)


def load(name: str) -> type[Experiment]:
    """The class of an experiment."""
    module, kind = EXPERIMENTS[name][0].split(":")
    return getattr(importlib.import_module(f"marginax.experiments.{module}"), kind)


def _reproduce(experiments: list[Experiment], options: Options) -> None:
    console = rich.console.Console(stderr=True)
    try:
        with opened(options.out, without="checkpoint/*.npz") as out:
            with options.place() as place:
                ready = [each.prepared(out / each.name, options.workers, place) for each in experiments]
                workers = options.workers or 2
                sections = runner.run(ready, out, workers=workers, console=console, engine=place)
            path = write_report(out)
    except KeyboardInterrupt:
        console.print("stopped; what is finished is kept, and the same command carries on")
        raise
    print_claims([claim for section in sections for claim in section.claims])
    written = rich.text.Text(f"{options.out.rstrip('/')}/{path.name}")  # a path is no markup
    console.print("[green]✓[/]", written, soft_wrap=True)


def print_claims(claims: list[report.Claim], lines: int = 5) -> None:
    """Prints how many claims hold, and those that matter most, what failed included."""
    console = rich.console.Console()
    failed = [claim for claim in claims if claim.verdict != "reproduced"]
    shown = list(dict.fromkeys([*(claim for claim in claims if claim.main), *failed, *claims]))[:lines]
    if claims:
        number = "1 claim" if len(claims) == 1 else f"{len(claims)} claims"
        console.print(f"{number}: {report.count_verdicts(claims)}", highlight=False)
    for claim in shown:
        text = rich.text.Text(f"{report.plain(claim.text)}: {claim.numbers}")
        console.print(MARKS[claim.verdict], text, soft_wrap=True)


def write_report(out: Path) -> Path:
    """Writes `report.html` and `claims.csv` from all finished results below a folder, and returns the page's path."""
    sections = runner.sections_on_disk(out, EXPERIMENTS)
    columns = ("claim", "where", "measured", "effect", "low", "high", "verdict", "command")
    rows = [
        (
            *(report.plain(text) for text in (c.text, c.where, c.measure)),
            *(c.effect, c.interval.low, c.interval.high, c.verdict, section.command),
        )
        for _, section in sections
        for c in section.claims
    ]
    write_csv(out / "claims.csv", columns, rows)
    report.write_page(
        out / "report.html",
        "Marginalized operators: the paper's experiments",
        sections,
        lead=(
            "Experiments of *Marginalized Operators for Off-policy Reinforcement Learning* (Tang, Rowland, Munos and "
            "Valko, AISTATS 2022), with what its authors claim and what was measured.",
        ),
    )
    return out / "report.html"


def show(
    problem: Annotated[Literal["chain", "open-world", "garnet"], tyro.conf.Positional],
    *,
    n: int = 10,
    actions: int | None = None,
    off_policy: float | None = None,
    noise: float | None = None,
    discount: float = 0.99,
    clip: tuple[float, ...] = (1.0, 2.0, 5.0),
    decay: float = 1.0,
    seed: int | None = None,
) -> None:
    """Prints contraction rates of every operator on a problem, and the expected returns of pi, mu and the best policy.

    The rate at the start is the mean of local rates over first pairs: start states by their probability, actions by μ.

    Args:
        problem: chain, open-world or garnet.
        n: length of the chain, side of the Open World, or states of the garnet.
        actions: actions of the chain or the garnet; by default 5.
        off_policy: β of the chain's behaviour policy βπ + (1-β) uniform; by default 0.
        noise: standard deviation of the chain's last reward; by default 0.1.
        discount: γ.
        clip: clips c̄ of Retrace.
        decay: λ of all traces.
        seed: seed of the garnet; by default 0.
    """
    given = {"actions": actions, "off_policy": off_policy, "noise": noise, "seed": seed}
    mdp, pi, mu = _problem(problem, n, discount, {k: v for k, v in given.items() if v is not None})
    rich.console.Console().print(f"{mdp!r}", highlight=False)
    traces = {
        "one-step": mx.traces.one_step(pi, mu),
        "tree backup": mx.traces.tree_backup(pi, mu, decay=decay),
        "Q(λ)": mx.traces.q_lambda(pi, mu, decay=decay),
        **{f"Retrace, c̄ = {c:g}": mx.traces.retrace(pi, mu, clip=c, decay=decay) for c in clip},
        "importance sampling": decay * mx.traces.importance_sampling(pi, mu),
    }
    rows = []
    for name, c in traces.items():
        operator = mx.multi_step(mdp, pi, mu, c)
        rates = operator.contraction_rates()
        start = float(mdp.initial @ (mu * rates).sum(axis=1))
        contracts = "yes" if operator.is_contractive() else "no"
        rows.append((name, f"{rates.max():.6f}", f"{start:.6f}", f"{c.max():g}", contracts))
    _print_table(
        f"Contraction rates (λ = {decay:g})",
        ("traces", "rate", "rate at start", "largest trace", "contracts"),
        rows,
    )
    best = mx.policies.greedy(mdp.optimal_values())
    values = (("target π", pi), ("behaviour μ", mu), ("best", best))
    _print_table(
        "Expected return from the start",
        ("policy", "value"),
        [(name, f"{float(mdp.initial @ mdp.v_values(policy)):.6f}") for name, policy in values],
    )
    if mdp.num_states <= 30:
        _print_table(
            "Q^π, state by state",
            ("state", *(f"a{a}" for a in range(mdp.num_actions))),
            [(str(state), *(f"{value:.4f}" for value in row)) for state, row in enumerate(mdp.q_values(pi))],
        )


def _problem(name: str, n: int, discount: float, given: dict[str, Any]) -> "mx.problems.Problem":
    """A problem of `show` by its name, its size, and what was given of its own settings."""
    for setting, value in given.items():
        if setting not in SETTINGS[name]:
            raise ValueError(
                f"--{setting.replace('_', '-')} is no setting of the problem {name}, got {value}"
            )
    used = SETTINGS[name] | given
    if name == "chain":
        return mx.problems.chain(n, used["actions"], used["off_policy"], used["noise"], discount)
    if name == "open-world":
        return mx.problems.open_world(n, discount)
    return mx.problems.garnet(n, branching=min(3, n), discount=discount, **used)


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; columns that the terminal is too narrow for go into further tables, after the first column."""
    import rich.cells
    import rich.table

    width = rich.console.Console().width
    widths = [3 + max(map(rich.cells.cell_len, column)) for column in zip(columns, *rows, strict=True)]
    first = 1
    while first < len(columns):
        last, needed = first + 1, 1 + widths[0] + widths[first]
        while last < len(columns) and needed + widths[last] <= width:
            needed += widths[last]
            last += 1
        table = rich.table.Table()
        for i in (0, *range(first, last)):
            table.add_column(columns[i], justify="right" if i else "left", no_wrap=True)
        for row in rows:
            table.add_row(row[0], *row[first:last])
        console = rich.console.Console(width=max(width, needed))
        if first == 1:
            console.print(title, style="italic", highlight=False)
        console.print(table)
        first = last
