"""Policy iteration on the Open World with each operator (appendix, Figure 5)."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.measures import CERTAINTY, MONTE_CARLO, ONE, RETRACE
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part

METHODS = (ONE, RETRACE, MONTE_CARLO, CERTAINTY)
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class PolicyIteration(Experiment):
    """Figure 5: soft and hard policy iteration on the Open World, driven by each operator."""

    name: ClassVar[str] = "policy-iteration"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 4, "iterations": 30}

    seeds: Hidden[int] = 50
    iterations: int = 120
    """Trajectories, one per iteration."""
    size: int = 10
    """Cells along one side."""
    horizon: int = 1000
    """Steps after which an episode is cut off."""
    step_size: float = 0.1
    """Step size of Q."""
    soft: float = 0.1
    """α of soft policy iteration."""
    hard: float = 1.0
    """α of hard policy iteration."""
    clip: float = 1.0
    """Clip c̄ of the traces."""
    refresh_every: int = 1
    """Iterations between two solutions for certainty-equivalent weights; stale weights need not contract."""
    visits: Literal["each", "mean"] = "each"
    """Whether a pair met k times in a trajectory moves k times, or once towards the mean of its targets."""

    def __post_init__(self) -> None:
        checks.count("--iterations", self.iterations, least=10)
        checks.count("--size", self.size, least=2)
        checks.count("--horizon", self.horizon)
        checks.count("--refresh-every", self.refresh_every)
        for flag, value in (("--step-size", self.step_size), ("--soft", self.soft), ("--hard", self.hard)):
            checks.step_size(value, flag)
        checks.at_least("--clip", self.clip, 0.0, infinite=True)

    @property
    def evaluated(self) -> np.ndarray:
        """The iterations whose policy is evaluated."""
        return np.arange(0, self.iterations, max(1, self.iterations // 50))

    def parts(self) -> list[Part]:
        return measures.parts_by_seeds(self, CHUNK, self.compute, cost=0.0056 * self.iterations, setup=20.0)

    def compute(self, seeds: range) -> Arrays:
        """Returns `[soft and hard, methods, seeds, evaluated]`."""
        problem = mx.problems.open_world(self.size, self.discount)
        mdp, _, mu = problem
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        size = (*mdp.r.shape, self.discount)
        estimators: dict[str, Any] = {
            MONTE_CARLO: mx.weights.MonteCarlo.init(*size, average="exponential", factored=False),
            CERTAINTY: mx.weights.CertaintyEquivalence.init(*size),
        }
        returns = np.empty((2, len(METHODS), len(seeds), len(self.evaluated)))
        for i, policy_step_size in enumerate((self.soft, self.hard)):
            for j, method in enumerate(METHODS):
                found = mx.learning.improve(
                    stream,
                    mu,
                    mx.learning.retrace(mu, clip=0.0 if method == ONE else self.clip),
                    estimators.get(method),
                    step_size=self.step_size,
                    policy_step_size=policy_step_size,
                    refresh_every=self.refresh_every if method == CERTAINTY else 1,
                    visits=self.visits,
                )
                policies = found.policies[:, self.evaluated]
                returns[i, j] = mx.learning.average_return(mdp, policies)
        return {"returns": returns}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        returns = np.concatenate([arrays["returns"] for arrays in data.values()], axis=2)
        mdp, _, mu = mx.problems.open_world(self.size, self.discount)
        best = float(mx.learning.average_return(mdp, mdp.greedy_policy(mdp.optimal_values())))
        first = float(mx.learning.average_return(mdp, mu))
        curves = {
            (kind, method): curve
            for kind, each in zip(("soft", "hard"), returns, strict=True)
            for method, curve in zip(METHODS, each, strict=True)
        }
        self._figure(folder, curves, best)
        rows = [
            (*run, int(i) + 1, float(curve[:, k].mean()), float(curve[:, k].std()))
            for run, curve in curves.items()
            for k, i in enumerate(self.evaluated)
        ]
        columns = ("policy iteration", "operator", "iteration", "mean return", "standard deviation")
        write_csv(folder / "returns.csv", columns, rows)
        table = tuple(
            (
                kind,
                report.operator_style(method).label,
                *map(float, (curve.mean(), curve[:, -1].mean(), curve[:, -1].min())),
            )
            for (kind, method), curve in curves.items()
        )
        means = {run: report.number(float(curve.mean())) for run, curve in curves.items()}
        return report.Section(
            self.name,
            "Policy iteration (Figure 5)",
            text=(
                "The behaviour policy stays uniform; after each trajectory the target policy moves towards the greedy "
                rf"one by $\alpha$ = {self.soft:g} (soft) or {self.hard:g} (hard). Ties share the mass. Shown is the "
                "expected discounted return from a uniformly drawn cell, computed exactly where the paper samples it. "
                f"It is {first:.3f} for the uniform policy and {best:.3f} at best.",
                "Moves and rewards are deterministic here: one-step targets have no variance at all, while a multi-step "
                "target has more of it the longer its traces are. Weights must belong to the current policy: Monte "
                "Carlo averages lag behind it, which soft policy iteration forgives and hard does not.",
            ),
            figures=(
                report.Figure(
                    "returns",
                    f"Mean return and the middle half of {self.seeds} runs.",
                    "Return against iterations for soft and hard policy iteration",
                    f"The mean return over soft policy iteration is {means['soft', ONE]} with one-step, "
                    f"{means['soft', RETRACE]} with Retrace and {means['soft', MONTE_CARLO]} with the marginalized "
                    f"operator (Monte Carlo); over hard policy iteration {means['hard', ONE]}, "
                    f"{means['hard', RETRACE]} and {means['hard', MONTE_CARLO]}.",
                ),
            ),
            tables=(
                report.Table(
                    "Returns",
                    (
                        "policy iteration",
                        "operator",
                        "mean over iterations",
                        "at the end",
                        "worst run at the end",
                    ),
                    table,
                ),
            ),
            claims=tuple(self._claims(curves)),
            data=("returns.csv",),
        )

    def _figure(self, folder: Path, curves: Mapping[tuple[str, str], np.ndarray], best: float) -> None:
        with report.panels(folder, "returns", (7.2, 3.1), 1, 2, sharey=True) as (figure, axes):
            for axis, kind, step in zip(axes[0], ("soft", "hard"), (self.soft, self.hard), strict=True):
                for method in METHODS:
                    report.draw_curves(axis, self.evaluated + 1, curves[kind, method], method)
                axis.axhline(best, color="#888888", linewidth=0.8, linestyle=":", label="best policy")
                axis.set(title=f"{kind} policy iteration, α = {step:g}", xlabel="iteration")
            axes[0, 0].set_ylabel("return from a random cell")
            report.legend_below(figure, axes)

    def _claims(self, curves: Mapping[tuple[str, str], np.ndarray]) -> list[report.Claim]:
        def gain(x: np.ndarray, y: np.ndarray) -> float:
            return float(x.mean() - y.mean())

        def claim(text: str, kind: str, against: str, *samples: np.ndarray, **bounds: Any) -> report.Claim:
            where = {"soft": "Figure 5(a)", "hard": "Figure 5(b)"}[kind]
            measure = f"difference of mean return over the iterations, {against}"
            return report.claim(text, where, measure, gain, *samples, **bounds)

        claims = [
            claim(
                f"{prefix}gains of the marginalized operator carry over to {kind} policy iteration "
                f"({report.operator_style(method).label})",
                kind,
                "marginalized against one-step",
                curves[kind, method],
                curves[kind, ONE],
                low=0.0,
                main=kind == "soft" and method == MONTE_CARLO,
            )
            for kind in ("soft", "hard")
            for method, prefix in ((MONTE_CARLO, ""), (CERTAINTY, "beyond the paper: "))
        ]
        early = max(1, len(self.evaluated) // 10)
        soft, hard = ({method: curves[kind, method] for method in METHODS} for kind in ("soft", "hard"))
        # fmt: off
        return [
            *claims,
            claim("beyond the paper: in the first tenth of soft policy iteration the gain is there (Monte Carlo)",
                  "soft", "marginalized against one-step, first tenth of the iterations",
                  soft[MONTE_CARLO][:, :early], soft[ONE][:, :early], low=0.0),
            claim("in soft policy iteration Retrace performs like the one-step operator",
                  "soft", "Retrace against one-step; alike means within ±0.02",
                  soft[RETRACE], soft[ONE], low=-0.02, high=0.02),
            claim("in hard policy iteration Retrace retains no advantage over the one-step operator",
                  "hard", "Retrace against one-step; no advantage means at most 0.02",
                  hard[RETRACE], hard[ONE], high=0.02),
            claim("in hard policy iteration Retrace slows down the optimization",
                  "hard", "Retrace against one-step", hard[RETRACE], hard[ONE], high=0.0),
        ]
        # fmt: on
