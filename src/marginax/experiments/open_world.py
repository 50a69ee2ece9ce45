"""The Open World of Section 6.2: values learned by each operator (Figure 2), and how far they are from the truth."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from matplotlib.figure import Figure

from marginax import learning, problems, report, traces, weights
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Part

MULTI, MONTE_CARLO, CERTAINTY, EXACT = (
    "retrace",
    "marginalized-monte-carlo",
    "marginalized-certainty-equivalence",
    "marginalized-exact",
)
CHUNK = 20


@dataclasses.dataclass(frozen=True)
class OpenWorld(Experiment):
    """Figure 2: value maps and errors of one-step, Retrace and marginalized operators on the Open World."""

    name: ClassVar[str] = "open-world"

    iterations: int = 200
    """Trajectories to learn from, one an iteration."""
    size: int = 10
    """Cells along one side."""
    horizon: int = 1000
    """Steps after which an episode is cut off."""
    step_size: float = 0.1
    """α of the update of Q."""
    clips: tuple[float, ...] = (1.0, 2.0)
    """Clips c̄ of the traces."""
    visits: Literal["each", "mean"] = "each"
    """Whether a pair met k times in a trajectory moves k times, or once towards the mean of its targets."""
    family: bool = True
    """Whether to look for the fastest member of the whole family, too."""

    def __post_init__(self) -> None:
        if self.iterations < 10 or self.horizon < 1 or self.size < 2:
            raise ValueError(
                "open-world needs at least 10 iterations, a horizon of 1 and a size of 2, got "
                f"{self.iterations}, {self.horizon} and {self.size}"
            )
        if len(self.clips) != 2 or not 0 < self.clips[0] < self.clips[1]:
            raise ValueError(f"clips must be two increasing positive numbers, got {self.clips}")

    def quick(self) -> "OpenWorld":
        """The same experiment at a size for a first look.

        >>> OpenWorld().quick().seeds
        6
        """
        return dataclasses.replace(
            self, seeds=min(self.seeds, 6), iterations=min(self.iterations, 80), family=False
        )

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The iterations whose values are drawn."""
        return tuple(max(1, round(self.iterations * part)) for part in (0.05, 0.15, 0.3, 0.5, 1.0))

    def runs(self) -> list[tuple[str, float]]:
        """Operator and clip of every run."""
        kinds = (MULTI, MONTE_CARLO, CERTAINTY, EXACT)
        return [("one-step", 0.0), *((kind, clip) for clip in self.clips for kind in kinds)]

    def members(self) -> list[tuple[str, float, str]]:
        """Other members of the family: traces, their parameter, and where the weights come from."""
        between = (self.clips[0] + self.clips[1]) / 2
        shapes = [("retrace", between), ("tree-backup", 1.0), ("retrace-0.9", self.clips[1])]
        return [(*shape, kind) for shape in shapes for kind in (MULTI, CERTAINTY)]

    def parts(self) -> list[Part]:
        kept = {key: value for key, value in self.settings().items() if key not in ("seeds", "family")}
        chunks = [range(k, min(k + CHUNK, self.seeds)) for k in range(0, self.seeds, CHUNK)]
        parts = []
        for chunk in chunks:
            settings = {**kept, "first": chunk.start, "last": chunk.stop}
            compute = partial(self.compute, chunk)
            parts.append(
                Part(
                    f"seeds-{chunk.start}-{chunk.stop}", settings, compute, 1.2 * len(chunk), str(len(chunk))
                )
            )
        if self.family:
            few = range(min(CHUNK, self.seeds))
            settings = {**kept, "family": True, "last": few.stop}
            parts.append(Part("family", settings, lambda: self.compute_family(few), cost=0.6 * len(few)))
        return parts

    def problem(self) -> problems.Problem:
        return problems.open_world(self.size, self.discount)

    def estimator(self, kind: str, problem: problems.Problem, c: np.ndarray) -> Any:
        size = (*problem.mdp.r.shape, self.discount)
        if kind == MONTE_CARLO:
            return learning.monte_carlo(*size)
        if kind == CERTAINTY:
            return learning.certainty_equivalence(*size)
        if kind == EXACT:
            return learning.given(weights.exact(problem.mdp, problem.mu, c))
        return None

    def learn(self, stream: Any, kind: str, c: np.ndarray) -> np.ndarray:
        """Q after every iteration `[seeds, iterations, S, A]`."""
        problem = self.problem()
        growth = 1.1 if kind == CERTAINTY else 1.0
        estimator = self.estimator(kind, problem, c)
        options: dict[str, Any] = {"step_size": self.step_size, "growth": growth, "visits": self.visits}
        return np.asarray(learning.evaluate(stream, problem.pi, c, estimator, **options))

    def compute(self, seeds: range) -> Arrays:
        """Errors `[runs, seeds, iterations]` and values `[runs, seeds, snapshots, S]`."""
        problem = self.problem()
        mdp, pi, mu = problem
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        q_pi = mdp.q_values(pi)
        errors, values = [], []
        for kind, clip in self.runs():
            q = self.learn(stream, kind, traces.retrace(pi, mu, clip=clip))
            errors.append(measures.relative_error(q, q_pi) / q_pi.shape[1])
            values.append((q[:, np.asarray(self.snapshots) - 1] * pi).sum(-1))
        lengths = np.asarray(jax.device_get(stream.valid.sum(-1)))
        return {
            "errors": np.stack(errors).astype(np.float32),
            "values": np.stack(values).astype(np.float32),
            "lengths": lengths,
        }

    def compute_family(self, seeds: range) -> Arrays:
        """Errors `[members, seeds, iterations]` of further members of the family."""
        problem = self.problem()
        mdp, pi, mu = problem
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        q_pi = mdp.q_values(pi)
        errors = []
        for shape, parameter, kind in self.members():
            if shape == "tree-backup":
                c = traces.tree_backup(pi, mu, decay=parameter)
            else:
                c = traces.retrace(pi, mu, clip=parameter, decay=0.9 if shape == "retrace-0.9" else 1.0)
            errors.append(measures.relative_error(self.learn(stream, kind, c), q_pi) / q_pi.shape[1])
        return {"errors": np.stack(errors).astype(np.float32)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        chunks = [arrays for label, arrays in data.items() if label.startswith("seeds-")]
        errors = np.concatenate([arrays["errors"] for arrays in chunks], axis=1)
        values = np.concatenate([arrays["values"] for arrays in chunks], axis=1)
        lengths = np.concatenate([arrays["lengths"] for arrays in chunks])
        self._maps(folder, values)
        self._curves(folder, errors)
        rows = [
            (kind, clip, i + 1, float(curve[:, i].mean()), float(np.median(curve[:, i])))
            for (kind, clip), curve in zip(self.runs(), errors, strict=True)
            for i in range(self.iterations)
        ]
        write_csv(folder / "errors.csv", ("operator", "clip", "iteration", "mean", "median"), rows)
        columns = ("operator", "clip", "iteration", "state", "mean value")
        maps = [
            (kind, clip, snapshot, state, float(value))
            for (kind, clip), each in zip(self.runs(), values.mean(1), strict=True)
            for snapshot, state_values in zip(self.snapshots, each, strict=True)
            for state, value in enumerate(state_values)
        ]
        write_csv(folder / "values.csv", columns, maps)
        moves = "k times, in the order of time" if self.visits == "each" else "once, towards the mean"
        return report.Section(
            self.name,
            "Open World (Figure 2)",
            text=(
                f"A {self.size} × {self.size} grid, a reward of 1 on entering the lower right corner, μ uniform, π right "
                f"or down. An episode lasts {lengths.mean():.0f} steps on average, and "
                f"{100 * (lengths == self.horizon).mean():.0f}% are cut off after {self.horizon}. A pair met k times "
                f"in a trajectory moves {moves}.",
                "The largest ratio π/μ is 2 here, so that c̄ = 2 is full importance sampling and its exact weights "
                "are the marginalized importance ratios, whose operator contracts at once.",
            ),
            figures=(
                report.Figure(
                    "maps",
                    f"Mean value of every cell over {self.seeds} runs, darker is lower; iterations grow from left to "
                    "right, and V^π is the last column. The scale is that of V^π: what lies outside is cut.",
                    "Heat maps of learned values",
                ),
                report.Figure(
                    "errors",
                    "Relative error at the start, averaged over actions: mean over runs and the middle half of them.",
                    "Error curves on the Open World",
                ),
            ),
            tables=tuple(self._tables(errors, data.get("family"))),
            claims=tuple(self._claims(errors, values)),
            data=("errors.csv", "values.csv"),
        )

    def _maps(self, folder: Path, values: np.ndarray) -> None:
        mdp, pi, _ = self.problem()
        truth = mdp.v_values(pi)
        truth[-1] = values[..., -1] = np.nan  # the corner is where episodes end
        rows = [run for run in self.runs() if run[0] != EXACT]
        with report.plot_style():
            figure = Figure(figsize=(7.2, 1.05 * len(rows) + 0.4))
            axes = figure.subplots(len(rows), len(self.snapshots) + 1)
            for line, run in zip(axes, rows, strict=True):
                shown = [*values[self.runs().index(run)].mean(0), truth]
                for axis, each in zip(line, shown, strict=True):
                    grid = each.reshape(self.size, self.size)
                    drawn = axis.imshow(grid, cmap="hot", vmin=0, vmax=1, interpolation="nearest")
                    axis.set_xticks([])
                    axis.set_yticks([])
                    axis.spines[:].set_visible(False)
                    axis.grid(False)
                label = report.operator_style(run[0]).label.replace(", ", ",\n")
                name = label + (f"\nc̄ = {run[1]:g}" if run[1] else "")
                line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
            for axis, title in zip(
                axes[0], [*(f"iteration {i}" for i in self.snapshots), "V^π"], strict=True
            ):
                axis.set_title(title, fontsize=7.5)
            figure.colorbar(drawn, ax=axes, shrink=0.5, aspect=40, pad=0.01)
            report.save_figure(figure, folder, "maps")

    def _curves(self, folder: Path, errors: np.ndarray) -> None:
        with report.plot_style():
            figure = Figure(figsize=(7.2, 2.9))
            axes = figure.subplots(1, 2, sharey=True)
            iterations = np.arange(1, self.iterations + 1)
            for axis, clip in zip(axes, self.clips, strict=True):
                for (kind, used), curve in zip(self.runs(), errors, strict=True):
                    if used not in (0.0, clip):
                        continue
                    style = report.operator_style(kind)
                    low, high = np.quantile(curve, [0.25, 0.75], axis=0)
                    axis.fill_between(iterations, low, high, color=style.colour, alpha=0.12, linewidth=0)
                    axis.plot(
                        iterations,
                        curve.mean(0),
                        color=style.colour,
                        marker=style.marker,
                        markevery=max(1, self.iterations // 8),
                        label=style.label,
                    )
                axis.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
                axis.set_yscale("log")
                axis.set_ylim(1e-3, 100)
                axis.set_title(f"c̄ = {clip:g}")
                axis.set_xlabel("iteration")
            axes[0].set_ylabel("relative error at the start")
            axes[0].legend(loc="lower left")
            report.save_figure(figure, folder, "errors")

    def _tables(self, errors: np.ndarray, family: Arrays | None) -> list[report.Table]:
        few = errors[:, : min(CHUNK, self.seeds)]
        lines = [
            (report.operator_style(kind).label, f"Retrace, c̄ = {clip:g}" if clip else "c = 0", curve)
            for (kind, clip), curve in zip(self.runs(), few, strict=True)
        ]
        if family is not None:
            for (shape, parameter, kind), curve in zip(self.members(), family["errors"], strict=True):
                name = {
                    "tree-backup": "tree backup",
                    "retrace-0.9": f"Retrace, c̄ = {parameter:g}, λ = 0.9",
                }.get(shape, f"Retrace, c̄ = {parameter:g}")
                label = "multi-step" if kind == MULTI else report.operator_style(kind).label
                lines.append((label, name, curve))
        rows = []
        for label, trace, curve in lines:
            reached = int(measures.time_to(curve, 0.1))
            rows.append(
                (
                    "multi-step" if label == "Retrace" else label,
                    trace,
                    reached if reached <= self.iterations else "not reached",
                    float(curve[:, self.iterations // 2 - 1].mean()),
                    float(measures.final(curve)),
                )
            )
        rows.sort(key=lambda row: (row[2] if isinstance(row[2], int) else self.iterations + 1, row[3]))
        columns = (
            "operator",
            "traces",
            "iterations to 10% error",
            f"error at iteration {self.iterations // 2}",
            "final error",
        )
        note = f"Means over the first {few.shape[1]} seeds, the fastest first."
        return [report.Table("The family, the fastest first", columns, tuple(rows), note)]

    def _claims(self, errors: np.ndarray, values: np.ndarray) -> list[report.Claim]:
        def of(kind: str, clip: float) -> np.ndarray:
            return errors[self.runs().index((kind, clip))]

        def mean_ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return np.log10(x.mean((1, 2)) / y.mean((1, 2)))

        def add(text: str, measure: str, statistic: Any, samples: list, **bounds: float) -> None:
            claims.append(
                measures.claim(text, "Figure 2", measure, statistic, samples, self.command, **bounds)
            )

        low, high = self.clips
        half = self.iterations // 2
        claims: list[report.Claim] = []
        add(
            "the one-step operator propagates information slowly compared to Retrace",
            f"log10 ratio of mean error over all iterations, one-step against Retrace at c̄ = {low:g}",
            mean_ratio,
            [of("one-step", 0.0), of(MULTI, low)],
            low=0.0,
        )
        add(
            f"at c̄ = {low:g} Retrace and its marginalized counterpart perform alike",
            "log10 ratio of mean error over all iterations, marginalized (Monte Carlo) against Retrace; alike means "
            "within ±0.05",
            mean_ratio,
            [of(MONTE_CARLO, low), of(MULTI, low)],
            low=-0.05,
            high=0.05,
        )
        add(
            f"at c̄ = {high:g} Retrace becomes unstable",
            "log10 of mean error over the first half of the iterations; above 0 it is worse than knowing nothing",
            lambda x: np.log10(x.mean((1, 2))),
            [of(MULTI, high)[:, :half]],
            low=0.0,
        )
        for kind, words in (
            (MONTE_CARLO, f"at c̄ = {high:g} the marginalized operator is much more stable (Monte Carlo)"),
            (CERTAINTY, "beyond the paper: so it is with certainty equivalence"),
        ):
            add(
                words,
                "log10 ratio of mean error over all iterations to Retrace's",
                mean_ratio,
                [of(kind, high), of(MULTI, high)],
                high=0.0,
            )
        start = values[:, :, -2, 0]
        runs = self.runs()
        for kind, words in (
            (MONTE_CARLO, "the marginalized operator reduces variance (Monte Carlo)"),
            (CERTAINTY, "beyond the paper: so it does with certainty equivalence"),
        ):
            add(
                words,
                f"log10 ratio of the variance over runs of V(x0) at iteration {self.snapshots[-2]}, c̄ = {high:g}, "
                "to Retrace's",
                lambda x, y: np.log10(x.var(1) / y.var(1)),
                [start[runs.index((kind, high))], start[runs.index((MULTI, high))]],
                high=0.0,
            )
        add(
            "beyond the paper: certainty equivalence at the large clip learns faster than Retrace at the small one",
            "log10 ratio of mean error over all iterations",
            mean_ratio,
            [of(CERTAINTY, high), of(MULTI, low)],
            high=0.0,
        )
        return claims
