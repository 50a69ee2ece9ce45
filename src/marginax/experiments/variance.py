"""The four estimates of an operator and how their variances are ordered (Section 4.2 and Figure 4)."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments.runner import Arrays, Experiment, Part

if TYPE_CHECKING:
    from jaxtyping import Array

    from marginax.trajectories import Trajectory

NODES = (r"$R_\tau$", r"$M_\tau$", "$R$", "$M$")
BLUE, RED, GREY = "#1F5FA8", "#C0392B", "#777777"
# From, to, colour, arrow head, line: an arrow points to a conditional expectation.
ARROWS = ((0, 1, RED, "-|>", "-"), (0, 2, BLUE, "-|>", "-"), (1, 3, BLUE, "-|>", "-"), (2, 3, GREY, "-", ":"))
PLACES = ((0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0))


@dataclasses.dataclass(frozen=True)
class Variance(Experiment):
    """Figure 4: measured variances of the trajectory-based and random-time estimates of both operators."""

    name: ClassVar[str] = "variance"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 40, "trajectories": 200, "noisy": False}

    trajectories: int = 400
    """Trajectories for each seed."""
    noisy: bool = True
    """Whether to show a chain with noisy rewards, too."""

    def __post_init__(self) -> None:
        checks.count("--trajectories", self.trajectories, least=10)

    def cases(self) -> dict[str, dict[str, Any]]:
        """Title and clip of each problem, and the noise of a chain.

        With 5 states products of ratios reach 5⁴, which a sample still shows. With 10 states it would miss 5⁹.
        """
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
            Part(
                label,
                {**self.settings(), **case},
                partial(self.compute, case),
                program=label.split("-")[0],
                title=case["title"],
                setup=4.0,
            )
            for label, case in self.cases().items()
        ]

    def compute(self, case: dict[str, Any]) -> Arrays:
        """First and second moments `[2, 4 estimates, seeds]` of the estimates at the start pair."""
        import jax
        import jax.numpy as jnp

        if "noise" in case:
            mdp, pi, mu = mx.problems.chain(5, 5, 0.0, case["noise"], self.discount)
            horizon, start = 5, (0, 0)
        else:
            mdp, pi, mu = mx.problems.open_world(5, self.discount)
            horizon, start = 400, (0, 2)
        c = mx.traces.retrace(pi, mu, clip=case["clip"])
        w = mx.weights.exact(mdp, mu, c, start=start)
        q = jax.random.normal(jax.random.key(self.seed + 1), pi.shape)
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), 4), self.seeds)
        tables = tuple(jnp.asarray(table, jnp.float32) for table in (pi, mu, c, w, q))
        moments = _moments(self.trajectories, horizon)
        found = moments(mx.trajectories.sampling_tables(mdp), tables, jnp.asarray(start), keys)
        return {"moments": np.moveaxis(np.asarray(found, dtype=float), 0, -1)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        moments = {label: data[label]["moments"] for label in self.cases()}
        variances = {label: m[1].mean(-1) - m[0].mean(-1) ** 2 for label, m in moments.items()}
        self._figure(folder, variances)
        rows = [
            (
                case["title"],
                report.plain(node),
                float(moments[label][0, i].mean()),
                float(variances[label][i]),
            )
            for label, case in self.cases().items()
            for i, node in enumerate(NODES)
        ]
        write_csv(folder / "variance.csv", ("problem", "estimate", "mean", "variance"), rows)
        total = self.seeds * self.trajectories
        ratios = {
            case["title"]: _short(variances[label][3] / variances[label][2])
            for label, case in self.cases().items()
        }
        return report.Section(
            self.name,
            "Variance of the estimates (Figure 4)",
            text=(
                f"Four unbiased estimates of the same operator at the start pair, {total:,} trajectories, exact TD "
                "weights, Q drawn from N(0, 1). An arrow points to the estimate that is a conditional expectation of the "
                r"other. Averaging over the path given the pair met at time $\tau$ is only sure to reduce variance when "
                "transitions and rewards are deterministic, and between R and M nothing is sure.",
            ),
            figures=(
                report.Figure(
                    "variance",
                    "Variance of each estimate; the number on an arrow is the factor by which it changes. Above: one "
                    "term at a random time. Below: the sum over the trajectory. Left: the multi-step operator. Right: "
                    "the marginalized one.",
                    "Diagrams of four estimates with their variances",
                    "Marginalizing the estimate from whole trajectories multiplies its variance by "
                    + ", ".join(f"{ratio} ({title})" for title, ratio in ratios.items())
                    + ".",
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
        from matplotlib.lines import Line2D

        cases = self.cases()
        box = {"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#333333"}
        middle: dict[str, Any] = {"ha": "center", "va": "center"}
        with report.panels(folder, "variance", (11, 2.8), 1, len(cases)) as (figure, axes):
            for axis, (label, case) in zip(axes[0], cases.items(), strict=True):
                axis.set(title=case["title"], xlim=(-0.6, 1.6), ylim=(-0.35, 1.35))
                axis.axis("off")
                values = variances[label]
                for start, end, colour, head, line in ARROWS:
                    (x0, y0), (x1, y1) = PLACES[start], PLACES[end]
                    room = 19 if y0 == y1 else 15
                    arrow = {"arrowstyle": head, "color": colour, "linestyle": line, "linewidth": 1.3}
                    axis.annotate(
                        "", (x1, y1), (x0, y0), arrowprops={**arrow, "shrinkA": room, "shrinkB": room}
                    )
                    aside = (0.0, 0.13) if y0 == y1 else (0.3 if x0 else -0.3, 0.0)
                    x, y = (x0 + x1) / 2 + aside[0], (y0 + y1) / 2 + aside[1]
                    axis.text(
                        x, y, f"×{_short(values[end] / values[start])}", fontsize=7, color=colour, **middle
                    )
                for (x, y), node, value in zip(PLACES, NODES, values, strict=True):
                    axis.text(x, y, f"{node}\n{_short(value)}", fontsize=7.5, bbox=box, **middle)
            legend = {
                "average over the random time": (BLUE, "-"),
                "average over the path to the pair": (RED, "-"),
                "no order known": (GREY, ":"),
            }
            lines = [Line2D([], [], color=colour, ls=line) for colour, line in legend.values()]
            figure.legend(lines, list(legend), loc="outside lower center", ncols=3)

    def _claims(self, moments: Mapping[str, np.ndarray]) -> list[report.Claim]:
        def log_ratio(a: int, b: int) -> Callable[[np.ndarray], float]:
            def statistic(x: np.ndarray) -> float:  # [seeds, 2, 4]
                first, second = x.mean(0)
                variance = second - first**2
                return float(np.log10(variance[a] / variance[b]))

            return statistic

        # fmt: off
        kinds = (
            ("the random-time estimate of the marginalized operator has the smaller variance", "Corollary 2", 1, 0),
            ("the trajectory-based estimate of $R^c$ has less variance than the random-time one", "Figure 4", 2, 0),
            ("the trajectory-based estimate of $M^w$ has less variance than the random-time one", "Figure 4", 3, 1),
            ("in practice the marginalized operator reduces variance (trajectories)", "Section 4.2", 3, 2),
        )
        # fmt: on
        claims = []
        for label, case in self.cases().items():
            for text, where, a, b in kinds:
                uncovered = (
                    where == "Corollary 2" and case.get("noise", 0.0) > 0
                )  # it wants deterministic rewards
                claims.append(
                    report.claim(
                        f"{'beyond the paper: ' if uncovered else ''}{text}: {case['title']}",
                        f"{where}, without its assumption" if uncovered else where,
                        f"log10 ratio of variances, {NODES[a]} against {NODES[b]}",
                        log_ratio(a, b),
                        np.moveaxis(moments[label], -1, 0),
                        high=0.0,
                        main=label == "chain-1" and (a, b) == (3, 2),
                    )
                )
        return claims


def _short(value: float) -> str:
    """Two or three digits, without an exponent where there is a readable way."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 1 else f"{value:.3g}"


@cache
def _moments(trajectories: int, horizon: int) -> "Callable[..., Array]":
    """The program that returns first and second moments `[seeds, 2, 4]` of the four estimates."""
    import jax
    import jax.numpy as jnp

    multi_step, marginalized = mx.targets.multi_step, mx.targets.marginalized
    gather_pairs = mx.trajectories.gather_pairs

    @jax.jit
    def program(simulator: Any, tables: "tuple[Array, ...]", start: "Array", keys: "Array") -> "Array":
        pi, mu, c, w, q = tables

        def estimates(one: "Trajectory", key: "Array") -> "Array":
            arguments = (*mx.trajectories.gather(one, q, pi), one.rewards, one.discounts)
            times = mx.targets.random_times(key, horizon, simulator.discount)
            options: dict[str, Any] = {"truncated": one.truncated, "valid": one.valid, "backend": "scan"}
            along, pairs = gather_pairs(one, c), gather_pairs(one, w)
            return jnp.stack(
                [
                    multi_step(*arguments, along, times=times, **options)[0],
                    marginalized(*arguments, pairs, times=times, **options)[0],
                    multi_step(*arguments, along, **options)[0],
                    marginalized(*arguments, pairs, **options)[0],
                ]
            )

        def moments(key: "Array") -> "Array":
            draw, clock = jax.random.split(key)
            x, a = start
            batch = mx.trajectories.sample(
                simulator, mu, draw, episodes=trajectories, horizon=horizon, start_states=x, start_actions=a
            )
            values = jax.vmap(estimates)(batch, jax.random.split(clock, trajectories))
            return jnp.stack([values.mean(0), (values**2).mean(0)])

        return jax.vmap(moments)(keys)

    return program
