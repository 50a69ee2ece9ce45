"""The chain of Section 6.1: Figure 1 with its five panels (Table 1), and beyond it every estimator of TD weights."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from marginax import learning, problems, report, traces, weights
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Part

METHODS = (
    "one-step",
    "retrace",
    "marginalized-monte-carlo",
    "marginalized-certainty-equivalence",
    "marginalized-exact",
    "marginalized-literal",
)
PAPER = METHODS[:3]
OURS = ("marginalized-exact", "marginalized-monte-carlo", "marginalized-certainty-equivalence", METHODS[5])
DASHES = ("-", "--", "-.")


@dataclasses.dataclass(frozen=True)
class Chain(Experiment):
    """Figure 1: relative error on the chain, one parameter varied in each panel."""

    name: ClassVar[str] = "chain"

    iterations: int = 5000
    """Trajectories to learn from, one an iteration."""
    step_size: float = 0.1
    """α of the update of Q."""
    actions: tuple[int, ...] = (5, 10, 20)
    """Numbers of actions; the first of each tuple is the default of the other panels."""
    horizon: tuple[int, ...] = (10, 20, 30)
    """Lengths of the chain."""
    off_policy: tuple[float, ...] = (0.0, 0.3, 0.7)
    """β of the behaviour policy βπ + (1-β) uniform."""
    noise: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Standard deviation of the last reward."""
    truncation: tuple[float, ...] = (1.0, 2.0, 5.0)
    """Clips c̄ of the traces."""

    def __post_init__(self) -> None:
        for name in ("actions", "horizon", "off_policy", "noise", "truncation"):
            if not 1 <= len(getattr(self, name)) <= len(DASHES):
                raise ValueError(f"{name} must have one to three values, got {getattr(self, name)}")
        if self.iterations < 10:
            raise ValueError(f"iterations must be at least 10, got {self.iterations}")

    def quick(self) -> "Chain":
        """The same experiment at a size for a first look.

        >>> Chain().quick().seeds
        10
        """
        return dataclasses.replace(
            self,
            seeds=min(self.seeds, 10),
            iterations=min(self.iterations, 1000),
            actions=self.actions[:1],  # each shape takes its time to compile
            horizon=self.horizon[:1],
        )

    @property
    def shown(self) -> np.ndarray:
        """The iterations whose errors are kept, some 250 of them."""
        stride = max(1, self.iterations // 250)
        return np.arange(stride, self.iterations + 1, stride)

    def panels(self) -> dict[str, list[dict[str, Any]]]:
        """For each panel, the settings of its curves."""
        default = {name: getattr(self, name)[0] for name in PANELS}
        return {name: [{**default, name: value} for value in getattr(self, name)] for name in PANELS}

    def parts(self) -> list[Part]:
        unique = {self.label(each): each for panel in self.panels().values() for each in panel}
        return [
            Part(label, self.part_settings(each), partial(self.compute, each), 4.0, self.shape(each))
            for label, each in unique.items()
        ]

    def part_settings(self, setting: dict[str, Any]) -> dict[str, Any]:
        shared = {key: getattr(self, key) for key in ("seeds", "seed", "discount", "iterations", "step_size")}
        return {"experiment": self.name, **shared, **setting}

    @staticmethod
    def label(setting: dict[str, Any]) -> str:
        return "-".join(f"{name[0]}{value:g}" for name, value in setting.items())

    @staticmethod
    def shape(setting: dict[str, Any]) -> str:
        return f"{setting['horizon']} by {setting['actions']}"

    def compute(self, setting: dict[str, Any]) -> Arrays:
        """Relative errors `[methods, seeds, shown]` at one setting."""
        n, num_actions = setting["horizon"], setting["actions"]
        problem = problems.chain(n, num_actions, setting["off_policy"], setting["noise"], self.discount)
        mdp, pi, mu = problem
        stream = measures.streams(problem, range(self.seeds), self.iterations, n, self.seed)
        c = traces.retrace(pi, mu, clip=setting["truncation"])
        size = (n, num_actions, self.discount)
        runs: dict[str, tuple[Any, Any, float]] = {
            "one-step": (np.zeros_like(c), None, 1.0),
            "retrace": (c, None, 1.0),
            "marginalized-monte-carlo": (c, learning.monte_carlo(*size), 1.0),
            "marginalized-certainty-equivalence": (c, learning.certainty_equivalence(*size), 1.05),
            "marginalized-exact": (c, learning.given(weights.exact(mdp, mu, c)), 1.0),
            "marginalized-literal": (c, learning.monte_carlo(*size, literal=True), 1.0),
        }
        q_pi = mdp.q_values(pi)
        default = self.panels()["truncation"][0]
        if {**setting, "truncation": None} != {**default, "truncation": None}:
            del runs["marginalized-literal"]  # slow, and it is there to be seen once: in the last panel
        errors = {
            method: measures.relative_error(
                learning.evaluate(
                    stream, pi, used, estimator, step_size=self.step_size, growth=growth, states=[0]
                ),
                q_pi,
            )[:, self.shown - 1]
            for method, (used, estimator, growth) in runs.items()
        }
        absent = np.full((self.seeds, self.shown.size), np.nan)
        return {"errors": np.stack([errors.get(method, absent) for method in METHODS]).astype(np.float32)}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        errors = {
            (name, each[name]): data[self.label(each)]["errors"]
            for name, panel in self.panels().items()
            for each in panel
        }
        self._figure(folder, errors)
        rows = [
            (name, value, method, int(self.shown[i]), float(mean[i]), float(low[i]), float(high[i]))
            for (name, value), curves in errors.items()
            for method, mean, low, high in zip(
                METHODS, curves.mean(1), *np.quantile(curves, [0.25, 0.75], axis=1), strict=True
            )
            for i in range(self.shown.size)
            if np.isfinite(mean[i])
        ]
        columns = ("panel", "value", "operator", "iteration", "mean", "lower quartile", "upper quartile")
        write_csv(folder / "chain.csv", columns, rows)
        return report.Section(
            self.name,
            "Chain (Figure 1)",
            text=(
                "One trajectory an iteration; every pair along it moves towards its target with α = "
                f"{self.step_size:g}. Marginalized operators learn their TD weights from the same stream. Shown is the "
                "mean over seeds of Σ_a |Q - Q^π| / Q^π at the first state.",
                "With consistent weights the marginalized operator and Retrace are the same operator on average, so "
                "that their curves can differ by variance alone. Upper row: the paper's three operators. Lower row: the "
                "same marginalized operator with its weights from different estimators.",
            ),
            figures=(
                report.Figure(
                    "chain",
                    f"Relative error against iterations, mean of {self.seeds} seeds. Solid, dashed and dash-dotted "
                    "lines are the values of Table 1 in this order.",
                    "Five panels of learning curves on the chain",
                ),
            ),
            tables=(self._table(errors),),
            claims=tuple(self._claims(errors)),
            data=("chain.csv",),
        )

    def _figure(self, folder: Path, errors: Mapping[tuple[str, Any], np.ndarray]) -> None:
        with report.plot_style():
            figure = Figure(figsize=(11, 4.8))
            axes = figure.subplots(2, 5, sharey=True, sharex=True)
            for column, name in enumerate(PANELS):
                for axis, methods in zip(axes[:, column], (PAPER, OURS), strict=True):
                    for value, dash in zip(getattr(self, name), DASHES, strict=False):
                        for method in methods:
                            style = report.operator_style(method)
                            curve = errors[name, value][METHODS.index(method)].mean(0)
                            # Curves that coincide: the lower one is drawn wide.
                            wide = 2.4 if method in ("retrace", "marginalized-exact") else 1.0
                            axis.plot(self.shown, curve, dash, color=style.colour, linewidth=wide)
                    axis.set_yscale("log")
                values = ", ".join(f"{value:g}" for value in getattr(self, name))
                axes[0, column].set_title(f"({'abcde'[column]}) {PANELS[name]} = {values}")
                axes[1, column].set_xlabel("iteration")
            start = float(max(curves[0, :, 0].mean() for curves in errors.values()))
            axes[0, 0].set_ylim(1e-2, 4 * start)
            for axis in axes[:, 0]:
                axis.set_ylabel("relative error")
            styles = [report.operator_style(method) for method in METHODS]
            handles = [Line2D([], [], color=style.colour, label=style.label) for style in styles]
            figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7)
            report.save_figure(figure, folder, "chain")

    def _table(self, errors: Mapping[tuple[str, Any], np.ndarray]) -> report.Table:
        rows = []
        for (name, value), curves in errors.items():
            if name in ("actions", "truncation"):
                for method, curve in zip(METHODS, curves, strict=True):
                    if np.isnan(curve).any():
                        continue
                    level = 0.1 * float(curve[:, 0].mean())
                    step = int(measures.time_to(curve, level))
                    reached = int(self.shown[step - 1]) if step <= self.shown.size else "not reached"
                    rows.append(
                        (
                            f"{PANELS[name]} = {value:g}",
                            report.operator_style(method).label,
                            reached,
                            float(measures.final(curve)),
                        )
                    )
        return report.Table(
            "Speed and final error",
            ("setting", "operator", "iterations to 10% of the first error", "final error"),
            tuple(rows),
            "Final error: mean over seeds and the last fifth of the iterations.",
        )

    def _claims(self, errors: Mapping[tuple[str, Any], np.ndarray]) -> list[report.Claim]:
        def of(name: str, place: int, method: str) -> np.ndarray:
            return errors[name, getattr(self, name)[place]][METHODS.index(method)]

        def add(text: str, where: str, measure: str, statistic: Any, samples: list, **bounds: float) -> None:
            claims.append(measures.claim(text, where, measure, statistic, samples, self.command, **bounds))

        def slower(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            """log2 of the ratio of the times to a tenth of the first error."""
            return np.log2(measures.time_to(x, 0.1 * first) / measures.time_to(y, 0.1 * first))

        def log_ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
            return np.log10(measures.final(x) / measures.final(y))

        claims: list[report.Claim] = []
        one, retrace, marginalized, certainty = METHODS[:4]
        for name, words, where in (
            ("actions", "more actions make evaluation harder", "Figure 1(a)"),
            ("horizon", "longer horizons make evaluation harder", "Figure 1(b)"),
        ):
            for method in PAPER:
                # Errors add up over actions: compare averages over actions.
                scale = [self.actions[i] if name == "actions" else self.actions[0] for i in (-1, 0)]
                easy, hard = of(name, 0, method) / scale[1], of(name, -1, method) / scale[0]
                add(
                    f"{words} ({report.operator_style(method).label})",
                    where,
                    f"log10 ratio of mean error over all iterations, {getattr(self, name)[-1]} against "
                    f"{getattr(self, name)[0]}",
                    lambda x, y: np.log10(x.mean((1, 2)) / y.mean((1, 2))),
                    [hard, easy],
                    low=0.0,
                )
        first = float(of("actions", 0, one)[:, 0].mean())
        speed = "log2 ratio of iterations to a tenth of the first error, default setting"
        add(
            "the marginalized operator converges faster than Retrace (Monte Carlo weights)",
            "Figure 1(a), (b)",
            speed + ": Retrace against marginalized",
            slower,
            [of("actions", 0, retrace), of("actions", 0, marginalized)],
            low=0.05,
        )
        add(
            "beyond the paper: with certainty equivalence it converges faster than Retrace",
            "Figure 1(a), (b)",
            speed + ": Retrace against marginalized",
            slower,
            [of("actions", 0, retrace), of("actions", 0, certainty)],
            low=0.05,
        )
        add(
            "Retrace outperforms the one-step operator",
            "Figure 1(a), (b)",
            speed + ": one-step against Retrace",
            slower,
            [of("actions", 0, one), of("actions", 0, retrace)],
            low=0.05,
        )
        for method in PAPER:
            add(
                f"nearer to on-policy all operators do better ({report.operator_style(method).label})",
                "Figure 1(c)",
                f"log10 ratio of mean error over all iterations, β = {self.off_policy[0]:g} against "
                f"{self.off_policy[-1]:g}",
                lambda x, y: np.log10(x.mean((1, 2)) / y.mean((1, 2))),
                [of("off_policy", 0, method), of("off_policy", -1, method)],
                low=0.0,
            )
        for method in (retrace, marginalized):
            label = report.operator_style(method).label
            add(
                f"with a noisy reward, a higher final error than one-step ({label})",
                "Figure 1(d)",
                f"log10 ratio of final errors to one-step's, σ = {self.noise[-1]:g}",
                log_ratio,
                [of("noise", -1, method), of("noise", -1, one)],
                low=0.0,
            )
            add(
                f"at the default noise, too, a higher final error than one-step ({label})",
                "Figure 1(a)-(c)",
                f"log10 ratio of final errors to one-step's, σ = {self.noise[0]:g}",
                log_ratio,
                [of("noise", 0, method), of("noise", 0, one)],
                low=0.0,
            )
        high, low = self.truncation[-1], self.truncation[0]
        add(
            "Retrace is unstable when c̄ is large",
            "Figure 1(e)",
            f"log10 ratio of mean error over all iterations, c̄ = {high:g} against {low:g}",
            lambda x, y: np.log10(x.mean((1, 2)) / y.mean((1, 2))),
            [of("truncation", -1, retrace), of("truncation", 0, retrace)],
            low=0.0,
        )
        for method, words in (
            (marginalized, "the marginalized operator converges more stably than Retrace"),
            (certainty, "beyond the paper: so it does with certainty equivalence"),
        ):
            add(
                words,
                "Figure 1(e)",
                f"log10 ratio of mean error over all iterations to Retrace's, c̄ = {high:g}",
                lambda x, y: np.log10(x.mean((1, 2)) / y.mean((1, 2))),
                [of("truncation", -1, method), of("truncation", -1, retrace)],
                high=0.0,
            )
        if len(self.truncation) > 1:
            middle = self.truncation[1]
            add(
                f"beyond the paper: certainty equivalence at c̄ = {middle:g} converges faster than Retrace at {low:g}",
                "Figure 1(e)",
                "log2 ratio of iterations to a tenth of the first error, Retrace against marginalized",
                slower,
                [of("truncation", 0, retrace), of("truncation", 1, certainty)],
                low=0.05,
            )
        add(
            "the marginalized operator's final error still increases with c̄",
            "Figure 1(e)",
            f"log10 ratio of final errors, c̄ = {high:g} against {low:g}",
            log_ratio,
            [of("truncation", -1, marginalized), of("truncation", 0, marginalized)],
            low=0.0,
        )
        return claims


PANELS = {"actions": "|A|", "horizon": "T", "off_policy": "β", "noise": "σ", "truncation": "c̄"}
