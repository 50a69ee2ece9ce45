"""Contraction rates of every operator, and convergence beside what they predict (Sections 2 and 3)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

from marginax import operators, problems, report, traces, weights
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Part
from marginax.trajectories import Trajectory, sample

PROBLEMS = ("chain", "Open World 5 × 5", "garnet")
TRACES = ("retrace", "tree-backup", "q-lambda", "importance-sampling")
STEPS = 40


@dataclasses.dataclass(frozen=True)
class Theory(Experiment):
    """Contraction rates against c̄ and λ, measured convergence, and rates of estimated operators."""

    name: ClassVar[str] = "theory"

    seeds: Annotated[int, tyro.conf.Suppress] = 20
    trajectories: int = 300
    """The most trajectories that the rates of estimated operators are shown for."""

    def __post_init__(self) -> None:
        if self.trajectories < 10:
            raise ValueError(f"trajectories must be at least 10, got {self.trajectories}")

    def quick(self) -> "Theory":
        """The same experiment at a size for a first look.

        >>> Theory().quick().seeds
        5
        """
        return dataclasses.replace(self, seeds=min(self.seeds, 5), trajectories=min(self.trajectories, 100))

    @property
    def clips(self) -> np.ndarray:
        return np.linspace(0.0, 5.0, 26)

    @property
    def decays(self) -> np.ndarray:
        return np.linspace(0.0, 1.0, 21)

    @property
    def counts(self) -> np.ndarray:
        return np.unique(np.geomspace(1, self.trajectories, 6).round().astype(int))

    def problem(self, name: str) -> problems.Problem:
        if name == "chain":
            return problems.chain(10, 5, discount=self.discount)
        if name == "garnet":
            return problems.garnet(20, 4, 3, seed=self.seed, discount=self.discount)
        return problems.open_world(5, self.discount)

    def parts(self) -> list[Part]:
        return [
            Part("rates", self.settings(), self.rates, 1.0, "rates"),
            Part("convergence", self.settings(), self.convergence, 1.0, "convergence"),
            Part("estimated", self.settings(), self.estimated, 6.0, "estimated"),
        ]

    def rates(self) -> Arrays:
        """Global rates against the clip `[problems, clips]` and the decay `[problems, traces, decays]`."""
        by_clip = np.zeros((len(PROBLEMS), self.clips.size))
        by_decay = np.zeros((len(PROBLEMS), len(TRACES), self.decays.size))
        for i, name in enumerate(PROBLEMS):
            mdp, pi, mu = self.problem(name)
            for j, clip in enumerate(self.clips):
                by_clip[i, j] = operators.multi_step(
                    mdp, pi, mu, traces.retrace(pi, mu, clip=float(clip))
                ).contraction_rate()
            for j, decay in enumerate(map(float, self.decays)):
                shapes = (
                    traces.retrace(pi, mu, decay=decay),
                    traces.tree_backup(pi, mu, decay=decay),
                    traces.q_lambda(pi, mu, decay=decay),
                    decay * traces.importance_sampling(pi, mu),
                )
                for k, c in enumerate(shapes):
                    by_decay[i, k, j] = operators.multi_step(mdp, pi, mu, c).contraction_rate()
        return {"by_clip": by_clip, "by_decay": by_decay}

    def convergence(self) -> Arrays:
        """On random garnets: predicted rates, errors of iterates, and the gap between R^c and M^{w^c}."""
        predicted, errors, gaps = [], [], []
        for seed in range(self.seeds):
            mdp, pi, mu = problems.garnet(20, 4, 3, seed=self.seed + seed, discount=self.discount)
            q_pi = mdp.q_values(pi)
            c = traces.retrace(pi, mu)
            used = (
                operators.one_step(mdp, pi),
                operators.multi_step(mdp, pi, mu, traces.tree_backup(pi, mu)),
                operators.multi_step(mdp, pi, mu, c),
                operators.multi_step(mdp, pi, mu, traces.retrace(pi, mu, clip=2.0)),
            )
            predicted.append([op.contraction_rate() for op in used])
            errors.append([np.abs(op.iterate(0 * q_pi, STEPS) - q_pi).max(axis=(1, 2)) for op in used])
            same = operators.marginalized(mdp, pi, mu, weights.exact(mdp, mu, c))
            gaps.append(np.abs(same(mdp.r) - used[2](mdp.r)).max() / np.abs(q_pi).max())
        return {"predicted": np.array(predicted), "errors": np.array(errors), "gaps": np.array(gaps)}

    def estimated(self) -> Arrays:
        """Rates of M^ŵ `[problems, 2 estimators, seeds, counts]`, and those of the exact weights `[problems]`."""
        names = PROBLEMS[:2]
        found = np.zeros((len(names), 2, self.seeds, self.counts.size))
        exact = np.zeros(len(names))
        for i, name in enumerate(names):
            mdp, pi, mu = self.problem(name)
            c = traces.retrace(pi, mu)
            exact[i] = operators.multi_step(mdp, pi, mu, c).contraction_rate()
            for seed in range(self.seeds):
                key = jax.random.fold_in(jax.random.key(self.seed), seed)
                batch = sample(
                    mdp, mu, key, episodes=int(self.counts[-1]), horizon=10 if name == "chain" else 300
                )
                for j, count in enumerate(map(int, self.counts)):
                    some = _first(batch, count)
                    estimates: tuple[Any, ...] = (
                        weights.monte_carlo(some, c),
                        weights.certainty_equivalence(some, c),
                    )
                    for k, w in enumerate(estimates):
                        found[i, k, seed, j] = operators.marginalized(mdp, pi, mu, w).contraction_rate()
        return {"found": found, "exact": exact}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        rates, convergence, estimated = (data[label] for label in ("rates", "convergence", "estimated"))
        self._figure(folder, rates, convergence, estimated)
        rows: list[tuple] = [
            (name, "retrace", "clip", float(clip), float(rate))
            for name, line in zip(PROBLEMS, rates["by_clip"], strict=True)
            for clip, rate in zip(self.clips, line, strict=True)
        ]
        rows += [
            (name, kind, "decay", float(decay), float(rate))
            for name, table in zip(PROBLEMS, rates["by_decay"], strict=True)
            for kind, line in zip(TRACES, table, strict=True)
            for decay, rate in zip(self.decays, line, strict=True)
        ]
        write_csv(folder / "rates.csv", ("problem", "traces", "parameter", "value", "rate"), rows)
        errors, predicted = convergence["errors"], convergence["predicted"]
        steps = errors[:, :, 1:] / np.maximum(errors[:, :, :-1], 1e-300)
        measured = np.where(errors[:, :, :-1] > 1e-9 * errors[:, :, :1], steps, 0).max(axis=2)
        return report.Section(
            self.name,
            "Contraction rates (Sections 2 and 3)",
            text=(
                "All rates are exact, in the maximum norm. Larger clips and decays contract faster; Q(λ) ignores the "
                "ratio π/μ and stops contracting where it is off-policy. The rate of an operator with estimated weights "
                "is that of the weights at hand, with nothing sampled left in it.",
            ),
            figures=(
                report.Figure(
                    "theory",
                    "(a) Rate of Retrace against c̄ (λ = 1). (b) Rates on the garnet against λ; above the dotted line "
                    "there is no contraction. (c) Error of iterates on one garnet, dashed: what the rate predicts at "
                    "worst. (d) Rate of the marginalized operator with weights from a number of trajectories; dotted: "
                    "exact weights.",
                    "Contraction rates and measured convergence",
                ),
            ),
            claims=(
                measures.claim(
                    "every operator contracts at least as fast as its rate says",
                    "Proposition 1",
                    "largest ratio of successive errors minus the rate, four operators, random garnets",
                    lambda x: x.max((1, 2)),
                    [measured - predicted],
                    self.command,
                    high=1e-9,
                ),
                measures.claim(
                    "M^w with the weights of c is R^c",
                    "Proposition 2",
                    "largest relative difference of the two operators, random garnets",
                    lambda x: x.max(1),
                    [convergence["gaps"]],
                    self.command,
                    high=1e-9,
                ),
                measures.claim(
                    "beyond the paper: the estimated operator contracts with certainty equivalence",
                    "Section 5",
                    f"mean rate on the Open World after {self.counts[-1]} trajectories",
                    lambda x: x.mean(1),
                    [estimated["found"][1, 1, :, -1]],
                    self.command,
                    high=1.0,
                ),
                measures.claim(
                    "beyond the paper: and with Monte Carlo weights",
                    "Section 5",
                    f"mean rate on the Open World after {self.counts[-1]} trajectories",
                    lambda x: x.mean(1),
                    [estimated["found"][1, 0, :, -1]],
                    self.command,
                    high=1.0,
                ),
            ),
            data=("rates.csv",),
        )

    def _figure(self, folder: Path, rates: Arrays, convergence: Arrays, estimated: Arrays) -> None:
        with report.plot_style():
            figure = Figure(figsize=(11, 2.7))
            clip, decay, errors, learned = figure.subplots(1, 4)
            for name, line, dash in zip(PROBLEMS, rates["by_clip"], ("-", "--", "-."), strict=True):
                clip.plot(self.clips, line, dash, color=report.operator_style("retrace").colour, label=name)
            clip.set_xlabel("c̄")
            clip.set_ylabel("contraction rate")
            clip.set_title("(a) Retrace")
            clip.legend(loc="lower left", fontsize=6.5)
            for kind, line in zip(TRACES, rates["by_decay"][2], strict=True):
                style = report.operator_style(kind)
                decay.plot(
                    self.decays, line, color=style.colour, marker=style.marker, markevery=4, label=style.label
                )
            decay.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
            decay.set_ylim(0, 2)
            decay.set_xlabel("λ")
            decay.set_title("(b) traces on the garnet")
            decay.legend(fontsize=6)
            shown = ("one-step", "tree-backup", "retrace", "retrace")
            labels = ("one-step", "tree backup", "Retrace, c̄ = 1", "Retrace, c̄ = 2")
            steps = np.arange(STEPS + 1)
            for kind, label, line, rate, dash in zip(
                shown,
                labels,
                convergence["errors"][0],
                convergence["predicted"][0],
                ("-", "-", "-", "-."),
                strict=True,
            ):
                style = report.operator_style(kind)
                errors.plot(steps, line, dash, color=style.colour, label=label)
                errors.plot(steps, line[0] * rate**steps, "--", color=style.colour, linewidth=0.7)
            errors.set_yscale("log")
            errors.set_ylim(bottom=0.2 * convergence["errors"][0].min())
            errors.set_xlabel("applications")
            errors.set_ylabel("largest error")
            errors.set_title("(c) convergence")
            errors.legend(fontsize=6, loc="lower left")
            kinds = ("marginalized-monte-carlo", "marginalized-certainty-equivalence")
            for name, table, exact, dash in zip(
                PROBLEMS, estimated["found"], estimated["exact"], ("-", "--"), strict=False
            ):
                for kind, lines in zip(kinds, table, strict=True):
                    style = report.operator_style(kind)
                    label = f"{style.label.removeprefix('marginalized, ')}, {name}"
                    learned.plot(self.counts, lines.mean(0), dash, color=style.colour, label=label)
                learned.axhline(exact, color="#888888", linewidth=0.8, linestyle=":")
            learned.set_xscale("log")
            learned.set_yscale("log")
            learned.set_xlabel("trajectories")
            learned.set_title("(d) estimated weights")
            learned.set_ylim(top=4 * estimated["found"].mean(2).max())
            learned.legend(fontsize=5.5, loc="upper right")
            report.save_figure(figure, folder, "theory")


def _first(batch: Trajectory, count: int) -> Trajectory:
    """The first trajectories, the others as padding: one shape, compiled once."""
    return dataclasses.replace(batch, valid=batch.valid & (np.arange(len(batch.valid)) < count)[:, None])
