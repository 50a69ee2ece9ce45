"""The four estimates of an operator and how their variances are ordered (Section 4.2 and Figure 4)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure

from marginax import problems, report, targets, traces, weights
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Part
from marginax.trajectories import SamplingTables, Trajectory, gather, gather_pairs, sample, sampling_tables

NODES = ("R_τ", "M_τ", "R", "M")
# From, to, colour: blue averages over the random time, red over the pair met at that time.
ARROWS = ((0, 1, "#C0392B"), (0, 2, "#1F5FA8"), (1, 3, "#1F5FA8"))
PLACES = ((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0))


@dataclasses.dataclass(frozen=True)
class Variance(Experiment):
    """Figure 4: measured variances of the trajectory-based and random-time estimates of both operators."""

    name: ClassVar[str] = "variance"

    trajectories: int = 400
    """Trajectories for each seed."""
    noisy: bool = True
    """Whether to show a chain with noisy rewards, too."""

    def __post_init__(self) -> None:
        if self.trajectories < 10:
            raise ValueError(f"trajectories must be at least 10, got {self.trajectories}")

    def quick(self) -> "Variance":
        """The same experiment at a size for a first look.

        >>> Variance().quick().seeds
        40
        """
        return dataclasses.replace(
            self, seeds=min(self.seeds, 40), trajectories=min(self.trajectories, 200), noisy=False
        )

    def cases(self) -> dict[str, dict[str, Any]]:
        """Problem and clip. Products of ratios reach 5⁴ on a chain of 5, which a sample still shows; 5⁹ it would not."""
        cases: dict[str, dict[str, Any]] = {
            "chain-1": {"title": "chain of 5, c̄ = 1", "clip": 1.0, "noise": 0.0},
            "chain-5": {"title": "chain of 5, c̄ = 5", "clip": 5.0, "noise": 0.0},
            "chain-noisy": {"title": "chain of 5, c̄ = 5, σ = 1", "clip": 5.0, "noise": 1.0},
            "open-1": {"title": "Open World 5 × 5, c̄ = 1", "clip": 1.0},
            "open-2": {"title": "Open World 5 × 5, c̄ = 2", "clip": 2.0},
        }
        return {label: case for label, case in cases.items() if self.noisy or label != "chain-noisy"}

    def parts(self) -> list[Part]:
        return [
            Part(label, {**self.settings(), **case}, partial(self.compute, case), 2.0, label.split("-")[0])
            for label, case in self.cases().items()
        ]

    def compute(self, case: dict[str, Any]) -> Arrays:
        """First and second moments `[2, 4 estimates, seeds]` of the estimates at the start pair."""
        if "noise" in case:
            mdp, pi, mu = problems.chain(5, 5, 0.0, case["noise"], self.discount)
            horizon, start = 5, (0, 0)
        else:
            mdp, pi, mu = problems.open_world(5, self.discount)
            horizon, start = 400, (0, 2)
        c = traces.retrace(pi, mu, clip=case["clip"])
        w = weights.exact(mdp, mu, c, start=start)
        q = jax.random.normal(jax.random.key(self.seed + 1), pi.shape)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), 4), self.seeds)
        tables = tuple(jnp.asarray(table, jnp.float32) for table in (pi, mu, c, w, q))
        found = _moments(sampling_tables(mdp), tables, jnp.asarray(start), keys, self.trajectories, horizon)
        return {"moments": np.moveaxis(np.asarray(found, dtype=float), 0, -1)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        moments = {label: data[label]["moments"] for label in self.cases()}
        variances = {label: m[1].mean(-1) - m[0].mean(-1) ** 2 for label, m in moments.items()}
        self._figure(folder, variances)
        rows = [
            (case["title"], node, float(moments[label][0, i].mean()), float(variances[label][i]))
            for label, case in self.cases().items()
            for i, node in enumerate(NODES)
        ]
        write_csv(folder / "variance.csv", ("problem", "estimate", "mean", "variance"), rows)
        total = self.seeds * self.trajectories
        return report.Section(
            self.name,
            "Variance of the estimates (Figure 4)",
            text=(
                f"Four unbiased estimates of the same operator at the start pair, {total} trajectories, exact TD weights, "
                "Q drawn from N(0, 1). An arrow points to the estimate that is a conditional expectation of the other: "
                "blue over the random time τ, red over the path given the pair met at time τ. The red arrow is only sure "
                "to reduce variance when transitions and rewards are deterministic, and between R and M nothing is sure.",
            ),
            figures=(
                report.Figure(
                    "variance",
                    "Variance of each estimate; the number on an arrow is the factor by which it changes.",
                    "Diagrams of four estimates with their variances",
                ),
            ),
            tables=(
                report.Table(
                    "Means and variances",
                    ("problem", "estimate", "mean", "variance"),
                    tuple(rows),
                    "Means agree within sampling error: all four are unbiased.",
                ),
            ),
            claims=tuple(self._claims(moments)),
            data=("variance.csv",),
        )

    def _figure(self, folder: Path, variances: Mapping[str, np.ndarray]) -> None:
        cases = self.cases()
        with report.plot_style():
            figure = Figure(figsize=(11, 2.6))
            axes = figure.subplots(1, len(cases))
            for axis, (label, case) in zip(axes, cases.items(), strict=True):
                axis.set_title(case["title"])
                axis.set_xlim(-0.6, 1.6)
                axis.set_ylim(-0.35, 1.35)
                axis.axis("off")
                values = variances[label]
                for start, end, colour in ARROWS:
                    self._arrow(axis, start, end, colour, values[end] / values[start], "-|>", "-")
                self._arrow(axis, 2, 3, "#777777", values[3] / values[2], "-", ":")
                for (x, y), node, value in zip(PLACES, NODES, values, strict=True):
                    box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#333333"}
                    axis.text(
                        x, y, f"{node}\n{_short(value)}", ha="center", va="center", fontsize=7.5, bbox=box
                    )
            report.save_figure(figure, folder, "variance")

    @staticmethod
    def _arrow(axis: Any, start: int, end: int, colour: str, ratio: float, style: str, line: str) -> None:
        (x0, y0), (x1, y1) = PLACES[start], PLACES[end]
        shrink = {"shrinkA": 19, "shrinkB": 19} if y0 == y1 else {"shrinkA": 15, "shrinkB": 15}
        properties = {"arrowstyle": style, "color": colour, "linestyle": line, "linewidth": 1.3, **shrink}
        axis.annotate("", (x1, y1), (x0, y0), arrowprops=properties)
        x, y = (x0 + x1) / 2, (y0 + y1) / 2
        offset = (0.0, 0.13) if y0 == y1 else (0.3 if x0 else -0.3, 0.0)
        axis.text(
            x + offset[0],
            y + offset[1],
            f"×{_short(ratio)}",
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
        )

    def _claims(self, moments: Mapping[str, np.ndarray]) -> list[report.Claim]:
        def log_ratio(a: int, b: int) -> Any:
            def statistic(x: np.ndarray) -> np.ndarray:  # [B, seeds, 2, 4]
                mean = x.mean(1)
                variance = mean[:, 1] - mean[:, 0] ** 2
                return np.log10(variance[:, a] / variance[:, b])

            return statistic

        claims = []
        for label, case in self.cases().items():
            samples = [np.moveaxis(moments[label], -1, 0)]
            for text, where, a, b in (
                (
                    "the random-time estimate of the marginalized operator has the smaller variance",
                    "Cor. 2",
                    1,
                    0,
                ),
                (
                    "the trajectory-based estimate of R^c has less variance than the random-time one",
                    "Fig. 4",
                    2,
                    0,
                ),
                (
                    "the trajectory-based estimate of M^w has less variance than the random-time one",
                    "Fig. 4",
                    3,
                    1,
                ),
                ("in practice the marginalized operator reduces variance (trajectories)", "Sec. 4.2", 3, 2),
            ):
                claims.append(
                    measures.claim(
                        f"{text}: {case['title']}",
                        where,
                        f"log10 ratio of variances, {NODES[a]} against {NODES[b]}",
                        log_ratio(a, b),
                        samples,
                        self.command,
                        high=0.0,
                    )
                )
        return claims


def _short(value: float) -> str:
    """Two or three digits, without an exponent where there is a readable way."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


@partial(jax.jit, static_argnums=(4, 5))
def _moments(
    simulator: SamplingTables,
    tables: tuple[Array, ...],
    start: Array,
    keys: Array,
    trajectories: int,
    horizon: int,
) -> Array:
    """First and second moments `[seeds, 2, 4]` of the four estimates."""
    pi, mu, c, w, q = tables

    def estimates(one: Trajectory, key: Array) -> Array:
        here, v_next = gather(one, q, pi)
        arguments = (here, v_next, one.rewards, one.discounts)
        times = targets.random_times(key, horizon, simulator.discount)
        options: dict[str, Any] = {"truncated": one.truncated, "valid": one.valid, "backend": "scan"}
        along, pairs = gather_pairs(one, c), gather_pairs(one, w)
        return jnp.stack(
            [
                targets.multi_step(*arguments, along, times=times, **options)[0],
                targets.marginalized(*arguments, pairs, times=times, **options)[0],
                targets.multi_step(*arguments, along, **options)[0],
                targets.marginalized(*arguments, pairs, **options)[0],
            ]
        )

    def moments(key: Array) -> Array:
        draw, clock = jax.random.split(key)
        x, a = start
        batch = sample(
            simulator, mu, draw, episodes=trajectories, horizon=horizon, start_states=x, start_actions=a
        )
        values = jax.vmap(estimates)(batch, jax.random.split(clock, trajectories))
        return jnp.stack([values.mean(0), (values**2).mean(0)])

    return jax.vmap(moments)(keys)
