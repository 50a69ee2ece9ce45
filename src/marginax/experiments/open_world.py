"""The Open World of Section 6.2: values learned by each operator (Figure 2), and how far they are from the truth."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.measures import (
    CERTAINTY,
    EXACT,
    MONTE_CARLO,
    ONE,
    PATHS,
    RETRACE,
    REVERSE,
    log_ratio,
)
from marginax.experiments.runner import Arrays, Experiment, Part

if TYPE_CHECKING:
    from marginax.problems import Problem

CHUNK = 20
REVERSE_SEEDS = 10
"""Seeds of reverse TD, whose weights take a second to solve for."""


@dataclasses.dataclass(frozen=True)
class OpenWorld(Experiment):
    """Figure 2: value maps and errors of one-step, Retrace and marginalized operators on the Open World."""

    name: ClassVar[str] = "open-world"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 6, "iterations": 80, "family": False}

    iterations: int = 200
    """Trajectories to learn from, one per iteration."""
    size: int = 10
    """Cells along one side."""
    horizon: int = 1000
    """Steps after which an episode is cut off."""
    step_size: float = 0.1
    """α of the update of Q."""
    clip: tuple[float, ...] = (1.0, 2.0)
    """Clips c̄ of the traces, a small and a large one."""
    visits: Literal["each", "mean"] = "each"
    """Whether a pair met k times in a trajectory moves k times, or once towards the mean of its targets."""
    family: bool = True
    """Whether to look for the fastest member of the whole family, too."""

    def __post_init__(self) -> None:
        checks.count("--iterations", self.iterations, least=10)
        checks.count("--size", self.size, least=2)
        checks.count("--horizon", self.horizon)
        checks.step_size(self.step_size, "--step-size")
        if len(self.clip) != 2 or not 0 < self.clip[0] < self.clip[1]:
            raise ValueError(f"--clip must be two increasing positive numbers, got {self.clip}")

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The iterations whose values are drawn."""
        return tuple(max(1, round(self.iterations * part)) for part in (0.05, 0.15, 0.3, 0.5, 1.0))

    def runs(self) -> list[tuple[str, float]]:
        """Operator and clip of every run."""
        kinds = (RETRACE, MONTE_CARLO, CERTAINTY, EXACT, PATHS)
        return [(ONE, 0.0), *((kind, clip) for clip in self.clip for kind in kinds)]

    def members(self, pi: np.ndarray, mu: np.ndarray) -> dict[str, np.ndarray]:
        """Traces of other members of the family."""
        between, high = (self.clip[0] + self.clip[1]) / 2, self.clip[1]
        return {
            rf"Retrace, $\bar c$ = {between:g}": mx.traces.retrace(pi, mu, clip=between),
            "tree backup": mx.traces.tree_backup(pi, mu),
            rf"Retrace, $\bar c$ = {high:g}, $\lambda$ = 0.9": mx.traces.retrace(
                pi, mu, clip=high, decay=0.9
            ),
        }

    def problem(self) -> "Problem":
        return mx.problems.open_world(self.size, self.discount)

    def parts(self) -> list[Part]:
        parts = measures.parts_by_seeds(
            self, CHUNK, self.compute, without=("family",), cost=0.003 * self.iterations, setup=8.0
        )
        if self.family:
            for label, few, compute, cost, title in (
                ("family", CHUNK, self.compute_family, 0.0017, "other members of the family"),
                ("reverse-td", REVERSE_SEEDS, self.compute_reverse, 0.02, "reverse TD"),
            ):
                seeds = range(min(few, self.seeds))
                settings = {**self.settings(), "seeds": None, "last": seeds.stop}
                cost *= len(seeds) * self.iterations
                parts.append(Part(label, settings, partial(compute, seeds), cost=cost, title=title))
        return parts

    def learn(self, stream: Any, operator: str, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Q after every iteration `[seeds, iterations, S, A]`, and its error at the start."""
        problem = self.problem()
        found = mx.learning.evaluate(
            stream,
            problem.pi,
            c,
            measures.estimator(operator, problem, c),
            step_size=self.step_size,
            refresh_growth={CERTAINTY: 1.1, REVERSE: 1.3}.get(operator, 1.0),
            visits=self.visits,
        )
        q, q_pi = np.asarray(found), problem.mdp.q_values(problem.pi)
        return q, measures.relative_error(q, q_pi) / q_pi.shape[1]

    def compute(self, seeds: range) -> Arrays:
        """Errors `[runs, seeds, iterations]` and values `[runs, seeds, snapshots, S]`."""
        problem = self.problem()
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        errors, values = [], []
        for operator, clip in self.runs():
            q, error = self.learn(stream, operator, mx.traces.retrace(problem.pi, problem.mu, clip=clip))
            errors.append(error)
            values.append((q[:, np.asarray(self.snapshots) - 1] * problem.pi).sum(-1))
        return {
            "errors": np.stack(errors).astype(np.float32),
            "values": np.stack(values).astype(np.float32),
            "lengths": np.asarray(stream.valid.sum(-1)),
        }

    def compute_family(self, seeds: range) -> Arrays:
        """Errors `[members, multi-step and certainty equivalence, seeds, iterations]`."""
        problem = self.problem()
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        errors = [
            [self.learn(stream, operator, c)[1] for operator in (RETRACE, CERTAINTY)]
            for c in self.members(problem.pi, problem.mu).values()
        ]
        return {"errors": np.asarray(errors, np.float32)}

    def compute_reverse(self, seeds: range) -> Arrays:
        """Errors `[clips, seeds, iterations]` of reverse TD."""
        problem = self.problem()
        stream = measures.streams(problem, seeds, self.iterations, self.horizon, self.seed)
        clips = [mx.traces.retrace(problem.pi, problem.mu, clip=clip) for clip in self.clip]
        return {"errors": np.asarray([self.learn(stream, REVERSE, c)[1] for c in clips], np.float32)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        chunks = [arrays for label, arrays in data.items() if label.startswith("seeds-")]
        errors = np.concatenate([arrays["errors"] for arrays in chunks], axis=1)
        values = np.concatenate([arrays["values"] for arrays in chunks], axis=1)
        lengths = np.concatenate([arrays["lengths"] for arrays in chunks])
        self._maps(folder, values)
        reverse = data["reverse-td"]["errors"] if "reverse-td" in data else np.empty((0, 0, 0))
        self._curves(folder, errors, reverse)
        self._write(folder, errors, values)
        moves = "k times, in the order of time" if self.visits == "each" else "once, towards the mean"
        low, high = self.clip
        runs, steps = self.runs(), np.arange(1, self.iterations + 1)
        times = {run: measures.reached(curve, 0.1, steps) for run, curve in zip(runs, errors, strict=True)}
        starts = {run: float(value) for run, value in zip(runs, values[:, :, -2, 0].mean(1), strict=True)}
        mdp, pi, _ = self.problem()
        return report.Section(
            self.name,
            "Open World (Figure 2)",
            text=(
                f"A {self.size} × {self.size} grid, a reward of 1 on entering the lower right corner, μ uniform, π right "
                f"or down. An episode lasts {lengths.mean():.0f} steps on average, and "
                f"{100 * (lengths == self.horizon).mean():.0f}% are cut off after {self.horizon}. A pair met k times "
                f"in a trajectory moves {moves}.",
                r"The largest ratio $\pi/\mu$ is 2 here: $\bar c = 2$ is full importance sampling, and its exact "
                "weights are the marginalized importance ratios, whose operator contracts at once.",
            ),
            figures=(
                report.Figure(
                    "errors",
                    f"Relative error at the start, averaged over actions: mean of {self.seeds} runs and the middle half "
                    f"of them{f'; reverse TD of the first {reverse.shape[1]}' if len(reverse) else ''}.",
                    "Error curves on the Open World",
                    "On the Open World the marginalized operator with certainty-equivalent weights at clip "
                    f"{high:g} is within 10% after {times[CERTAINTY, high]} trajectories; Retrace needs "
                    f"{times[RETRACE, low]} at clip {low:g} and {times[RETRACE, high]} at clip {high:g}.",
                ),
                report.Figure(
                    "maps",
                    f"Mean value of every cell over {self.seeds} runs. The scale is that of the true values: what lies "
                    "outside is cut. Episodes end in the grey corner.",
                    "Heat maps of learned values",
                    f"After {self.snapshots[-2]} trajectories at clip {high:g} the mean value of the start is "
                    f"{report.number(starts[RETRACE, high])} with Retrace and "
                    f"{report.number(starts[CERTAINTY, high])} with certainty-equivalent weights; the truth is "
                    f"{report.number(float(mdp.v_values(pi)[0]))}.",
                ),
            ),
            tables=(self._table(errors, reverse, data.get("family")),),
            claims=tuple(self._claims(errors, values)),
            data=("errors.csv", "values.csv"),
        )

    def _write(self, folder: Path, errors: np.ndarray, values: np.ndarray) -> None:
        rows = [
            (kind, clip, i + 1, float(curve[:, i].mean()), float(np.median(curve[:, i])))
            for (kind, clip), curve in zip(self.runs(), errors, strict=True)
            for i in range(self.iterations)
        ]
        write_csv(folder / "errors.csv", ("operator", "clip", "iteration", "mean", "median"), rows)
        maps = [
            (kind, clip, snapshot, state, float(value))
            for (kind, clip), each in zip(self.runs(), values.mean(1), strict=True)
            for snapshot, state_values in zip(self.snapshots, each, strict=True)
            for state, value in enumerate(state_values)
        ]
        write_csv(folder / "values.csv", ("operator", "clip", "iteration", "state", "mean value"), maps)

    def _maps(self, folder: Path, values: np.ndarray) -> None:
        mdp, pi, _ = self.problem()
        means, truth = values.mean(axis=1), mdp.v_values(pi)
        truth[-1] = means[..., -1] = np.nan  # the corner is where episodes end
        rows = [run for run in self.runs() if run[0] not in (EXACT, PATHS)]
        titles = [*(f"iteration {i}" for i in self.snapshots), "true values"]
        size = (7.2, 1.05 * len(rows) + 0.4)
        with report.panels(folder, "maps", size, len(rows), len(titles)) as (figure, axes):
            for line, run in zip(axes, rows, strict=True):
                for axis, each in zip(line, [*means[self.runs().index(run)], truth], strict=True):
                    drawn = report.draw_map(axis, each.reshape(self.size, self.size), vmin=0, vmax=1)
                    axis.spines[:].set_visible(False)
                label = report.operator_style(run[0]).label.replace(", ", ",\n")
                name = label + (f"\nc̄ = {run[1]:g}" if run[1] else "")
                line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7)
            for axis, title in zip(axes[0], titles, strict=True):
                axis.set_title(title, fontsize=7.5)
            figure.colorbar(drawn, ax=axes, shrink=0.5, aspect=40, pad=0.01, label="value of the cell")

    def _curves(self, folder: Path, errors: np.ndarray, reverse: np.ndarray) -> None:
        with report.panels(folder, "errors", (7.2, 3.4), 1, 2, sharey=True) as (figure, axes):
            steps = np.arange(1, self.iterations + 1)
            for axis, clip in zip(axes[0], self.clip, strict=True):
                for (kind, used), curve in zip(self.runs(), errors, strict=True):
                    if used in (0.0, clip):
                        report.draw_curves(axis, steps, curve, kind)
                for used, curve in zip(self.clip, reverse, strict=False):
                    if used == clip:
                        report.draw_curves(axis, steps, curve, REVERSE)
                axis.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":", label="error of Q = 0")
                axis.set(yscale="log", ylim=(1e-3, 100), xlabel="iteration", title=f"clip c̄ = {clip:g}")
            axes[0, 0].set_ylabel("relative error at the start")
            report.legend_below(figure, axes, columns=3)

    def _table(self, errors: np.ndarray, reverse: np.ndarray, family: Arrays | None) -> report.Table:
        few = min(CHUNK, self.seeds)
        lines = [
            (kind, rf"Retrace, $\bar c$ = {clip:g}" if clip else "zero", curve[:few])
            for (kind, clip), curve in zip(self.runs(), errors, strict=True)
        ]
        for clip, curve in zip(self.clip, reverse, strict=False):
            lines.append((REVERSE, rf"Retrace, $\bar c$ = {clip:g}", curve))
        if family is not None:
            _, pi, mu = self.problem()
            for name, curves in zip(self.members(pi, mu), family["errors"], strict=True):
                lines += [(RETRACE, name, curves[0]), (CERTAINTY, name, curves[1])]
        steps, half = np.arange(1, self.iterations + 1), self.iterations // 2
        lines.sort(key=lambda line: (measures.time_to(line[2], 0.1), line[2][:, half - 1].mean()))
        rows = [
            (
                "multi-step" if kind == RETRACE else report.operator_style(kind).label,
                name,
                measures.reached(curve, 0.1, steps),
                float(curve[:, half - 1].mean()),
                measures.final(curve),
            )
            for kind, name, curve in lines
        ]
        return report.Table(
            "The family, the fastest first",
            ("operator", "traces", "iterations to 10% error", f"error at iteration {half}", "final error"),
            tuple(rows),
            f"Means over the first {few} seeds{f', reverse TD over {reverse.shape[1]}' if len(reverse) else ''}.",
        )

    def _claims(self, errors: np.ndarray, values: np.ndarray) -> list[report.Claim]:
        runs = self.runs()

        def of(kind: str, clip: float) -> np.ndarray:
            return errors[runs.index((kind, clip))]

        def start(kind: str, clip: float) -> np.ndarray:
            return values[runs.index((kind, clip)), :, -2, 0]

        def variance(x: np.ndarray, y: np.ndarray) -> float:
            return float(np.log10(x.var() / y.var()))

        low, high = self.clip
        half = self.iterations // 2
        error = "log10 ratio of mean error over all iterations"
        spread = (
            f"log10 ratio of the variance over runs of V at the start, iteration {self.snapshots[-2]}, "
            rf"$\bar c$ = {high:g}, to Retrace's"
        )

        def claim(
            text: str, measure: str, statistic: Any, *samples: np.ndarray, **bounds: Any
        ) -> report.Claim:
            return report.claim(text, "Figure 2", measure, statistic, *samples, **bounds)

        # fmt: off
        return [
            claim(
                "the one-step operator propagates information slowly compared to Retrace",
                rf"{error}, one-step against Retrace at $\bar c$ = {low:g}", log_ratio,
                of(ONE, 0.0), of(RETRACE, low), low=0.0),
            claim(
                rf"at $\bar c$ = {low:g} Retrace and its marginalized counterpart perform alike",
                f"{error}, marginalized (Monte Carlo) against Retrace; alike means within ±0.05", log_ratio,
                of(MONTE_CARLO, low), of(RETRACE, low), low=-0.05, high=0.05),
            claim(
                rf"at $\bar c$ = {high:g} Retrace becomes unstable",
                "log10 of mean error over the first half of the iterations; above 0 it is worse than knowing nothing",
                lambda x: np.log10(x.mean()), of(RETRACE, high)[:, :half], low=0.0),
            claim(
                rf"at $\bar c$ = {high:g} the marginalized operator is much more stable (Monte Carlo)",
                f"{error} to Retrace's", log_ratio, of(MONTE_CARLO, high), of(RETRACE, high), high=0.0, main=True),
            claim(
                rf"beyond the paper: at $\bar c$ = {high:g} the marginalized operator is much more stable (certainty equivalence)",
                f"{error} to Retrace's", log_ratio, of(CERTAINTY, high), of(RETRACE, high), high=0.0),
            claim(
                "beyond the paper: learning only the path makes Monte Carlo weights better",
                rf"{error}, Monte Carlo of the path against Monte Carlo per pair at $\bar c$ = {high:g}", log_ratio,
                of(PATHS, high), of(MONTE_CARLO, high), high=0.0),
            claim(
                "the marginalized operator reduces variance (Monte Carlo)", spread, variance,
                start(MONTE_CARLO, high), start(RETRACE, high), high=0.0),
            claim(
                "beyond the paper: the marginalized operator reduces variance (certainty equivalence)", spread, variance,
                start(CERTAINTY, high), start(RETRACE, high), high=0.0),
            claim(
                "beyond the paper: certainty equivalence at the large clip learns faster than Retrace at the small one",
                error, log_ratio, of(CERTAINTY, high), of(RETRACE, low), high=0.0, main=True),
        ]
        # fmt: on
