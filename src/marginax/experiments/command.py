"""`marginax reproduce` and `marginax show`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.console
import rich.table
import tyro

from marginax import operators, policies, problems, report, traces
from marginax._files import write_csv
from marginax.experiments import runner
from marginax.experiments.chain import Chain
from marginax.experiments.open_world import OpenWorld
from marginax.experiments.policy_iteration import PolicyIteration
from marginax.experiments.runner import Experiment
from marginax.experiments.theory import Theory
from marginax.experiments.variance import Variance
from marginax.experiments.weights import Weights

TABULAR: tuple[type[Experiment], ...] = (Chain, OpenWorld, Weights, PolicyIteration, Variance, Theory)
ORDER = (*(experiment.name for experiment in TABULAR), "control")


@dataclasses.dataclass(frozen=True)
class All:
    """All tabular experiments (the default)."""


Choice = Annotated[
    Annotated[All, tyro.conf.subcommand("all", prefix_name=False)]
    | Annotated[Chain, tyro.conf.subcommand("chain", prefix_name=False)]
    | Annotated[OpenWorld, tyro.conf.subcommand("open-world", prefix_name=False)]
    | Annotated[Weights, tyro.conf.subcommand("weights", prefix_name=False)]
    | Annotated[PolicyIteration, tyro.conf.subcommand("policy-iteration", prefix_name=False)]
    | Annotated[Variance, tyro.conf.subcommand("variance", prefix_name=False)]
    | Annotated[Theory, tyro.conf.subcommand("theory", prefix_name=False)],
    tyro.conf.arg(name=""),
]


@tyro.conf.configure(tyro.conf.CascadeSubcommandArgs)
def reproduce(
    experiment: Choice = All(),  # noqa: B008
    *,
    seeds: int | None = None,
    out: Path = Path("out"),
    quick: bool = False,
    discount: float = 0.99,
    seed: int = 0,
    workers: int = 2,
) -> None:
    """Runs the paper's experiments and writes figures, data and a report.

    Results go to one folder an experiment, and report.html shows all that are there. What is finished is kept: the
    same command carries on after an interruption, and computes again only what its settings have changed. Figure 3
    is `marginax reproduce control`, which has flags of its own.

    Args:
        experiment: which; all tabular ones when omitted.
        seeds: number of seeds; when omitted that of the paper (100, and 50 for policy iteration).
        out: folder for the results.
        quick: a first look in less than a minute: few seeds, short curves.
        discount: γ.
        seed: first of the seeds.
        workers: parts computed side by side.
    """
    if seeds is not None and seeds < 2:
        raise ValueError(f"--seeds must be at least 2 for intervals over seeds, got {seeds}")
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    if not 0 < discount < 1:
        raise ValueError(f"--discount must lie between 0 and 1, got {discount}")
    chosen = [kind() for kind in TABULAR] if isinstance(experiment, All) else [experiment]
    if quick:
        chosen = [each.quick() for each in chosen]
    changes: dict[str, Any] = {"discount": discount, "seed": seed}
    if seeds is not None:
        changes["seeds"] = seeds
    chosen = [dataclasses.replace(each, **changes) for each in chosen]
    console = rich.console.Console(stderr=True)
    try:
        runner.run(chosen, out, workers=workers, console=console)
    except KeyboardInterrupt:
        console.print("stopped; what is finished is kept, and the same command carries on")
        raise
    path = write_report(out)
    console.print(f"[green]✓[/] {path}", highlight=False)


def write_report(out: Path) -> Path:
    """Writes `report.html` from all finished results below a folder, and returns its path."""
    sections = runner.sections_on_disk(out, ORDER)
    claims = [claim for _, section in sections for claim in section.claims]
    columns = ("claim", "where", "measured", "effect", "low", "high", "verdict", "command")
    rows = [
        (c.text, c.where, c.measure, c.interval.effect, c.interval.low, c.interval.high, c.verdict, c.command)
        for c in claims
    ]
    write_csv(out / "claims.csv", columns, rows)
    report.write_page(
        out / "report.html",
        "Marginalized operators: the paper's experiments",
        sections,
        lead=(
            "Every experiment of *Marginalized Operators for Off-policy Reinforcement Learning* (Tang, Rowland, Munos "
            "and Valko, AISTATS 2022) that is here, with what its authors claim and what was measured.",
        ),
    )
    return out / "report.html"


def show(
    problem: Annotated[Literal["chain", "open-world", "garnet"], tyro.conf.Positional],
    *,
    n: int = 10,
    actions: int = 5,
    off_policy: float = 0.0,
    noise: float = 0.1,
    discount: float = 0.99,
    clip: tuple[float, ...] = (1.0, 2.0, 5.0),
    decay: float = 1.0,
    seed: int = 0,
) -> None:
    """Prints contraction rates of every operator on a problem, and the values of its two policies.

    Args:
        problem: which.
        n: length of the chain, side of the Open World, or states of the garnet.
        actions: actions of the chain or the garnet.
        off_policy: β of the chain's behaviour policy βπ + (1-β) uniform.
        noise: standard deviation of the chain's last reward.
        discount: γ.
        clip: clips c̄ of Retrace.
        decay: λ of all traces.
        seed: of the garnet.
    """
    if problem == "chain":
        mdp, pi, mu = problems.chain(n, actions, off_policy, noise, discount)
    elif problem == "open-world":
        mdp, pi, mu = problems.open_world(n, discount)
    else:
        mdp, pi, mu = problems.garnet(n, actions, min(3, n), seed=seed, discount=discount)
    console = rich.console.Console()
    console.print(f"{mdp!r}", highlight=False)
    used = {
        "one-step": traces.one_step(pi, mu),
        "tree backup": traces.tree_backup(pi, mu, decay=decay),
        "Q(λ)": traces.q_lambda(pi, mu, decay=decay),
        **{f"Retrace, c̄ = {c:g}": traces.retrace(pi, mu, clip=c, decay=decay) for c in clip},
        "importance sampling": decay * traces.importance_sampling(pi, mu),
    }
    table = rich.table.Table(title=f"Contraction rates (λ = {decay:g})", title_justify="left")
    for column in ("traces", "rate", "at the start", "largest trace", "contracts"):
        table.add_column(column, justify="left" if column == "traces" else "right")
    for name, c in used.items():
        operator = operators.multi_step(mdp, pi, mu, c)
        rates = operator.contraction_rates()
        start = float(mdp.initial @ (mu * rates).sum(axis=1))
        contracts = "yes" if operator.is_contractive() else "no"
        table.add_row(name, f"{rates.max():.6f}", f"{start:.6f}", f"{c.max():g}", contracts)
    console.print(table)
    values = rich.table.Table(title="Expected return from the start", title_justify="left")
    for column in ("policy", "value"):
        values.add_column(column, justify="left" if column == "policy" else "right")
    best = policies.greedy(mdp.optimal_values())
    for name, policy in (("target π", pi), ("behaviour μ", mu), ("best", best)):
        values.add_row(name, f"{float(mdp.initial @ mdp.v_values(policy)):.6f}")
    console.print(values)
    if mdp.num_states <= 30:
        q_pi = mdp.q_values(pi)
        each = rich.table.Table(title="Q^π, state by state", title_justify="left")
        for column in ("state", *(f"a{a}" for a in range(min(mdp.num_actions, 10)))):
            each.add_column(column, justify="right")
        for state, row in enumerate(q_pi):
            each.add_row(str(state), *(f"{value:.4f}" for value in row[:10]))
        console.print(each)
