"""Policy iteration on the Open World with each operator (appendix, Figure 5)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import tyro
from matplotlib.figure import Figure

from marginax import learning, problems, report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Part

ONE, RETRACE, MONTE_CARLO, CERTAINTY = (
    "one-step",
    "retrace",
    "marginalized-monte-carlo",
    "marginalized-certainty-equivalence",
)
METHODS = (ONE, RETRACE, MONTE_CARLO, CERTAINTY)
CHUNK = 25


@dataclasses.dataclass(frozen=True)
class PolicyIteration(Experiment):
    """Figure 5: soft and hard policy iteration on the Open World, driven by each operator."""

    name: ClassVar[str] = "policy-iteration"

    seeds: Annotated[int, tyro.conf.Suppress] = 50
    iterations: int = 120
    """Trajectories, one an iteration."""
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
        if self.iterations < 10 or self.size < 2 or self.horizon < 1:
            raise ValueError(
                "policy-iteration needs at least 10 iterations, a size of 2 and a horizon of 1, got "
                f"{self.iterations}, {self.size} and {self.horizon}"
            )

    def quick(self) -> "PolicyIteration":
        """The same experiment at a size for a first look.

        >>> PolicyIteration().quick().seeds
        4
        """
        return dataclasses.replace(self, seeds=min(self.seeds, 4), iterations=min(self.iterations, 30))

    @property
    def evaluated(self) -> np.ndarray:
        """The iterations whose policy is evaluated."""
        return np.arange(0, self.iterations, max(1, self.iterations // 50))

    def parts(self) -> list[Part]:
        kept = {key: value for key, value in self.settings().items() if key != "seeds"}
        parts = []
        for first in range(0, self.seeds, CHUNK):
            chunk = range(first, min(first + CHUNK, self.seeds))
            settings = {**kept, "first": chunk.start, "last": chunk.stop}
            compute = partial(self.compute, chunk)
            parts.append(
                Part(
                    f"seeds-{chunk.start}-{chunk.stop}", settings, compute, 1.2 * len(chunk), str(len(chunk))
                )
            )
        return parts

    def compute(self, seeds: range) -> Arrays:
        """Returns `[soft and hard, methods, seeds, evaluated]`."""
        problem = problems.open_world(self.size, self.discount)
        mdp, _, mu = problem
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        size = (*mdp.r.shape, self.discount)
        results = []
        for policy_step_size in (self.soft, self.hard):
            for method in METHODS:
                estimator: Any = {
                    MONTE_CARLO: learning.monte_carlo(*size, average="exponential"),
                    CERTAINTY: learning.certainty_equivalence(*size),
                }.get(method)
                found = learning.improve(
                    stream,
                    mu,
                    learning.retrace(mu, clip=0.0 if method == ONE else self.clip),
                    estimator,
                    step_size=self.step_size,
                    policy_step_size=policy_step_size,
                    refresh_every=self.refresh_every if method == CERTAINTY else 1,
                    visits=self.visits,
                )
                policies = np.asarray(found.policies, dtype=float)[:, self.evaluated]
                results.append(learning.average_return(mdp, policies))
        shape = (2, len(METHODS), len(seeds), len(self.evaluated))
        return {"returns": np.stack(results).reshape(shape)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        returns = np.concatenate([arrays["returns"] for arrays in data.values()], axis=2)
        mdp, _, mu = problems.open_world(self.size, self.discount)
        best = float(learning.average_return(mdp, mdp.greedy_policy(mdp.optimal_values())))
        first = float(learning.average_return(mdp, mu))
        self._figure(folder, returns, best)
        rows = [
            (kind, method, int(i) + 1, float(curve[:, k].mean()), float(curve[:, k].std()))
            for kind, each in zip(("soft", "hard"), returns, strict=True)
            for method, curve in zip(METHODS, each, strict=True)
            for k, i in enumerate(self.evaluated)
        ]
        columns = ("policy iteration", "operator", "iteration", "mean return", "standard deviation")
        write_csv(folder / "returns.csv", columns, rows)
        lines = [
            (
                kind,
                report.operator_style(method).label,
                float(curve.mean()),
                float(curve[:, -1].mean()),
                float(curve[:, -1].min()),
            )
            for kind, each in zip(("soft", "hard"), returns, strict=True)
            for method, curve in zip(METHODS, each, strict=True)
        ]
        return report.Section(
            self.name,
            "Policy iteration (Figure 5)",
            text=(
                "The behaviour policy stays uniform; after each trajectory the target policy moves towards the greedy "
                f"one by α = {self.soft:g} (soft) or {self.hard:g} (hard). Ties share the mass. Shown is the expected "
                "discounted return from a uniformly drawn cell, computed exactly where the paper samples it. It is "
                f"{first:.3f} for the uniform policy and {best:.3f} at best.",
                "Moves and rewards are deterministic here, so that one-step targets have no variance at all, while a "
                "multi-step target has the more of it the longer its traces. Weights must belong to the policy of the day: "
                "Monte Carlo averages lag behind it, which soft policy iteration forgives and hard does not.",
            ),
            figures=(
                report.Figure(
                    "returns",
                    f"Mean return and the middle half of {self.seeds} runs; the dotted line is the best policy's.",
                    "Return against iterations for soft and hard policy iteration",
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
                    tuple(lines),
                ),
            ),
            claims=tuple(self._claims(returns)),
            data=("returns.csv",),
        )

    def _figure(self, folder: Path, returns: np.ndarray, best: float) -> None:
        with report.plot_style():
            figure = Figure(figsize=(7.2, 2.8))
            axes = figure.subplots(1, 2, sharey=True)
            titles = (f"soft, α = {self.soft:g}", f"hard, α = {self.hard:g}")
            for axis, each, title in zip(axes, returns, titles, strict=True):
                for method, curve in zip(METHODS, each, strict=True):
                    style = report.operator_style(method)
                    low, high = np.quantile(curve, [0.25, 0.75], axis=0)
                    x = self.evaluated + 1
                    axis.fill_between(x, low, high, color=style.colour, alpha=0.12, linewidth=0)
                    axis.plot(
                        x,
                        curve.mean(0),
                        color=style.colour,
                        marker=style.marker,
                        markevery=6,
                        label=style.label,
                    )
                axis.axhline(best, color="#888888", linewidth=0.8, linestyle=":")
                axis.set_title(title)
                axis.set_xlabel("iteration")
            axes[0].set_ylabel("return from a random cell")
            handles, labels = axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), fontsize=7)
            report.save_figure(figure, folder, "returns")

    def _claims(self, returns: np.ndarray) -> list[report.Claim]:
        def gain(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return x.mean((1, 2)) - y.mean((1, 2))

        soft, hard = (dict(zip(METHODS, each, strict=True)) for each in returns)
        measure = "difference of mean return over the iterations"
        where = ("Figure 5(a)", "Figure 5(b)")

        def add(text: str, place: str, against: str, samples: list, **bounds: float) -> report.Claim:
            return measures.claim(text, place, f"{measure}, {against}", gain, samples, self.command, **bounds)

        claims = []
        for kind, place, each in (("soft", where[0], soft), ("hard", where[1], hard)):
            for method in (MONTE_CARLO, CERTAINTY):
                prefix = "beyond the paper: " if method == CERTAINTY else ""
                label = report.operator_style(method).label
                claims.append(
                    add(
                        f"{prefix}gains of the marginalized operator carry over to {kind} policy iteration ({label})",
                        place,
                        "marginalized against one-step",
                        [each[method], each[ONE]],
                        low=0.0,
                    )
                )
        early = max(1, len(self.evaluated) // 10)
        claims.append(
            add(
                "beyond the paper: in the first tenth of soft policy iteration the gain is there (Monte Carlo)",
                where[0],
                "marginalized against one-step, first tenth of the iterations",
                [soft[MONTE_CARLO][:, :early], soft[ONE][:, :early]],
                low=0.0,
            )
        )
        claims.append(
            add(
                "in soft policy iteration Retrace performs like the one-step operator",
                where[0],
                "Retrace against one-step; alike means within ±0.02",
                [soft[RETRACE], soft[ONE]],
                low=-0.02,
                high=0.02,
            )
        )
        claims.append(
            add(
                "in hard policy iteration Retrace retains no advantage over the one-step operator",
                where[1],
                "Retrace against one-step; no advantage means at most 0.02",
                [hard[RETRACE], hard[ONE]],
                high=0.02,
            )
        )
        return claims
