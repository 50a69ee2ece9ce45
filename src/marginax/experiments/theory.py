"""Contraction rates of every operator, and convergence beside what they predict (Sections 2 and 3)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.measures import CERTAINTY, MONTE_CARLO
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part

if TYPE_CHECKING:
    from marginax.problems import Problem
    from marginax.trajectories import Trajectory

PROBLEMS = ("chain", "Open World 5 × 5", "garnet")
TRACES = ("retrace", "tree-backup", "q-lambda", "importance-sampling")
ITERATED = (
    ("one-step", "one-step"),
    ("tree-backup", "tree backup"),
    ("retrace", "Retrace, c̄ = 1"),
    ("retrace", "Retrace, c̄ = 2"),
)
KNOWN = f"{CERTAINTY}-μ"
ESTIMATORS = {
    MONTE_CARLO: "Monte Carlo",
    CERTAINTY: "certainty equivalence",
    KNOWN: "certainty equivalence, true μ",
}
STEPS = 40


@dataclasses.dataclass(frozen=True)
class Theory(Experiment):
    """Contraction rates against c̄ and λ, measured convergence, and rates of estimated operators."""

    name: ClassVar[str] = "theory"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 5, "trajectories": 100}

    seeds: Hidden[int] = 20
    trajectories: int = 300
    """The most trajectories that the rates of estimated operators are shown for."""

    def __post_init__(self) -> None:
        checks.count("--trajectories", self.trajectories, least=10)

    @property
    def clips(self) -> np.ndarray:
        return np.linspace(0.0, 5.0, 26)

    @property
    def decays(self) -> np.ndarray:
        return np.linspace(0.0, 1.0, 21)

    @property
    def counts(self) -> np.ndarray:
        return np.unique(np.geomspace(1, self.trajectories, 6).round().astype(int))

    def problem(self, name: str) -> "Problem":
        if name == "chain":
            return mx.problems.chain(10, 5, discount=self.discount)
        if name == "garnet":
            return mx.problems.garnet(20, 4, 3, seed=self.seed, discount=self.discount)
        return mx.problems.open_world(5, self.discount)

    def parts(self) -> list[Part]:
        return [
            Part(label, self.settings(), compute, cost=cost, program=label, title=title)
            for label, compute, cost, title in (
                ("rates", self.rates, 0.5, "contraction rates"),
                ("convergence", self.convergence, 0.5, "speed of convergence"),
                ("estimated", self.estimated, 10.0, "estimated weights"),
            )
        ]

    def rates(self) -> Arrays:
        """Global rates against the clip `[problems, clips]` and the decay `[problems, traces, decays]`."""
        by_clip = np.zeros((len(PROBLEMS), self.clips.size))
        by_decay = np.zeros((len(PROBLEMS), len(TRACES), self.decays.size))
        for i, name in enumerate(PROBLEMS):
            mdp, pi, mu = self.problem(name)
            for j, clip in enumerate(map(float, self.clips)):
                c = mx.traces.retrace(pi, mu, clip=clip)
                by_clip[i, j] = mx.multi_step(mdp, pi, mu, c).contraction_rate()
            for j, decay in enumerate(map(float, self.decays)):
                shapes = (
                    mx.traces.retrace(pi, mu, decay=decay),
                    mx.traces.tree_backup(pi, mu, decay=decay),
                    mx.traces.q_lambda(pi, mu, decay=decay),
                    decay * mx.traces.importance_sampling(pi, mu),
                )
                for k, c in enumerate(shapes):
                    by_decay[i, k, j] = mx.multi_step(mdp, pi, mu, c).contraction_rate()
        return {"by_clip": by_clip, "by_decay": by_decay}

    def convergence(self) -> Arrays:
        """On random garnets: predicted rates, errors of iterates, and the gap between R^c and M^{w^c}."""
        predicted, errors, gaps = [], [], []
        for seed in range(self.seeds):
            mdp, pi, mu = mx.problems.garnet(20, 4, 3, seed=self.seed + seed, discount=self.discount)
            q_pi = mdp.q_values(pi)
            c = mx.traces.retrace(pi, mu)
            used = (
                mx.one_step(mdp, pi),
                mx.multi_step(mdp, pi, mu, mx.traces.tree_backup(pi, mu)),
                mx.multi_step(mdp, pi, mu, c),
                mx.multi_step(mdp, pi, mu, mx.traces.retrace(pi, mu, clip=2.0)),
            )
            predicted.append([op.contraction_rate() for op in used])
            errors.append([np.abs(op.iterate(0 * q_pi, STEPS) - q_pi).max(axis=(1, 2)) for op in used])
            same = mx.marginalized(mdp, pi, mu, mx.weights.exact(mdp, mu, c))
            gaps.append(np.abs(same(mdp.r) - used[2](mdp.r)).max() / np.abs(q_pi).max())
        return {"predicted": np.array(predicted), "errors": np.array(errors), "gaps": np.array(gaps)}

    def estimated(self) -> Arrays:
        """Rates of M^ŵ `[problems, estimators, seeds, counts]`, and those of the exact weights `[problems]`."""
        import jax

        names = PROBLEMS[:2]
        found = np.zeros((len(names), len(ESTIMATORS), self.seeds, self.counts.size))
        exact = np.zeros(len(names))
        most = int(self.counts[-1])
        for i, name in enumerate(names):
            problem = self.problem(name)
            mdp, pi, mu = problem
            c = mx.traces.retrace(pi, mu)
            exact[i] = mx.multi_step(mdp, pi, mu, c).contraction_rate()
            empty = [
                measures.estimator(MONTE_CARLO, problem, c),
                measures.estimator(CERTAINTY, problem, c),
                mx.weights.CertaintyEquivalence.init(mdp.num_states, mdp.num_actions, mdp.discount, mu=mu),
            ]
            estimate = jax.jit(lambda some, c=c, empty=empty: [e.update(some, c).weights(c) for e in empty])
            for seed in range(self.seeds):
                key = jax.random.fold_in(jax.random.key(self.seed), seed)
                horizon = 10 if name == "chain" else 300
                batch = mx.trajectories.sample(mdp, mu, key, episodes=most, horizon=horizon)
                for j, count in enumerate(map(int, self.counts)):
                    for k, w in enumerate(estimate(_first(batch, count))):
                        operator = mx.marginalized(mdp, pi, mu, w)
                        found[i, k, seed, j] = operator.contraction_rate()
        return {"found": found, "exact": exact}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        rates, convergence, estimated = (data[label] for label in ("rates", "convergence", "estimated"))
        self._figure(folder, rates, convergence, estimated)
        columns = ("problem", "traces", "parameter", "value", "rate")
        write_csv(folder / "rates.csv", columns, self._rows(rates))
        last = dict(zip(ESTIMATORS, estimated["found"][1, :, :, -1], strict=True))
        return report.Section(
            self.name,
            "Contraction rates (Sections 2 and 3)",
            text=(
                "All rates are exact, in the maximum norm. Larger clips and decays contract faster; Q(λ) ignores the "
                r"ratio $\pi/\mu$ and stops contracting where it is off-policy. The rate of an operator with estimated "
                "weights is that of the weights at hand, with nothing sampled left in it. Certainty equivalence takes the "
                "probabilities of μ from action frequencies, as in the other experiments, or is given the true ones. Moves "
                "are deterministic on the chain and the Open World: with the true μ the counted MDP is the true one, once "
                "every pair was met.",
            ),
            figures=(
                report.Figure(
                    "theory",
                    r"Upper left: rate of Retrace against $\bar c$ ($\lambda$ = 1). Upper right: rates on the garnet against "
                    r"$\lambda$; above the dotted line there is no contraction. Lower left: error of iterates on one "
                    "garnet, dashed what the rate predicts at worst. Lower right: rate of the marginalized operator with "
                    "weights from a number of trajectories; dotted with exact weights.",
                    "Contraction rates and measured convergence",
                    f"After {self.counts[-1]} trajectories the marginalized operator on the Open World has rate "
                    f"{last[MONTE_CARLO].mean():.3f} with Monte Carlo weights and {last[CERTAINTY].mean():.3f} with "
                    "certainty-equivalent ones (above 1 it does not contract). Certainty equivalence with the true μ gives "
                    f"{last[KNOWN].mean():.3f}, exact weights {estimated['exact'][1]:.3f}.",
                ),
            ),
            claims=tuple(self._claims(convergence, last)),
            data=("rates.csv",),
        )

    def _rows(self, rates: Arrays) -> list[tuple]:
        """Problem, traces, what is varied, its value and the rate."""
        by_clip = [
            (name, "retrace", "clip", float(clip), float(rate))
            for name, line in zip(PROBLEMS, rates["by_clip"], strict=True)
            for clip, rate in zip(self.clips, line, strict=True)
        ]
        by_decay = [
            (name, kind, "decay", float(decay), float(rate))
            for name, table in zip(PROBLEMS, rates["by_decay"], strict=True)
            for kind, line in zip(TRACES, table, strict=True)
            for decay, rate in zip(self.decays, line, strict=True)
        ]
        return by_clip + by_decay

    def _claims(self, convergence: Arrays, last: Mapping[str, np.ndarray]) -> list[report.Claim]:
        """On successive errors of iterates, on M^w with the weights of c, and on the last rates of estimated operators."""
        errors = convergence["errors"]
        ratios = errors[:, :, 1:] / np.maximum(errors[:, :, :-1], 1e-300)
        # Rounding is some 1e-16 of the values: below 1e-5 of the first error it would show in a ratio.
        measured = np.where(errors[:, :, :-1] > 1e-5 * errors[:, :, :1], ratios, 0).max(axis=2)
        return [
            report.claim(
                "every operator contracts at least as fast as its rate says",
                "Proposition 1",
                "largest ratio of successive errors minus the rate, four operators, random garnets",
                np.max,
                measured - convergence["predicted"],
                high=1e-9,
            ),
            report.claim(
                "$M^w$ with the weights of c is $R^c$",
                "Proposition 2",
                "largest relative difference of the two operators, random garnets",
                np.max,
                convergence["gaps"],
                high=1e-9,
            ),
            *(
                report.claim(
                    f"{'' if kind == MONTE_CARLO else 'beyond the paper: '}the estimated operator contracts ({label})",
                    "Section 5.1",
                    f"mean rate on the Open World after {self.counts[-1]} trajectories",
                    np.mean,
                    last[kind],
                    high=1.0,
                )
                for kind, label in ESTIMATORS.items()
            ),
        ]

    def _figure(self, folder: Path, rates: Arrays, convergence: Arrays, estimated: Arrays) -> None:
        def colour(operator: str) -> str:
            return report.operator_style(operator).colour

        limit = {"color": "#888888", "linewidth": 0.8, "linestyle": ":"}
        beside = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 6.5}
        with report.panels(folder, "theory", (9.5, 5.2), 2, 2) as (_, ((clip, decay), (errors, learned))):
            for name, line, dash in zip(PROBLEMS, rates["by_clip"], ("-", "--", "-."), strict=True):
                clip.plot(self.clips, line, dash, color=colour("retrace"), label=name)
            clip.set(xlabel="clip c̄", ylabel="contraction rate", title="Retrace on three problems")
            for kind, line in zip(TRACES, rates["by_decay"][2], strict=True):
                report.draw_curves(decay, self.decays, line[None], kind, band=False, markevery=4)
            decay.axhline(1.0, label="no contraction above", **limit)
            decay.set(ylim=(0, 2), xlabel="decay λ", ylabel="contraction rate", title="traces on the garnet")
            steps, dashes = np.arange(STEPS + 1), ("-", "-", "-", "-.")
            first = zip(ITERATED, convergence["errors"][0], convergence["predicted"][0], dashes, strict=True)
            for (kind, label), line, rate, dash in first:
                report.draw_curves(
                    errors, steps, line[None], kind, band=False, label=label, linestyle=dash, markevery=5
                )
                errors.plot(steps, line[0] * rate**steps, "--", color=colour(kind), linewidth=0.7)
            errors.plot([], [], "--", color="#444444", linewidth=0.7, label="what the rate promises")
            errors.set(yscale="log", ylim=(0.2 * convergence["errors"][0].min(), None))
            errors.set(xlabel="applications", ylabel="largest error", title="convergence on a garnet")
            for name, table, exact, dash in zip(
                PROBLEMS, estimated["found"], estimated["exact"], ("-", "--"), strict=False
            ):
                for (kind, label), lines in zip(ESTIMATORS.items(), table, strict=True):
                    shown = label if dash == "-" else None
                    report.draw_curves(
                        learned,
                        self.counts,
                        lines,
                        kind,
                        band=False,
                        label=shown,
                        linestyle=dash,
                        markevery=1,
                    )
                learned.axhline(exact, label="exact weights" if dash == "-" else None, **limit)
                learned.plot([], [], dash, color="#444444", label=f"on the {name}")
            learned.set(xscale="log", yscale="log", xlabel="trajectories", ylabel="contraction rate")
            learned.set_title("estimated weights")
            learned.yaxis.set_major_formatter("{x:g}")
            learned.yaxis.set_minor_formatter("{x:g}")
            for axis in (clip, decay, errors, learned):
                axis.legend(**beside)


def _first(batch: "Trajectory", count: int) -> "Trajectory":
    """The first trajectories, the others as padding: one shape, compiled once."""
    return dataclasses.replace(batch, valid=batch.valid & (np.arange(len(batch.valid)) < count)[:, None])
