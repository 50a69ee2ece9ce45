"""The chain of Section 6.1: Figure 1 with its five panels (Table 1), and beyond it every estimator of TD weights."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.measures import (
    AS_PRINTED,
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

METHODS = (ONE, RETRACE, MONTE_CARLO, CERTAINTY, EXACT, AS_PRINTED, PATHS, REVERSE)
PAPER, OURS = METHODS[:3], (EXACT, MONTE_CARLO, CERTAINTY, AS_PRINTED, PATHS, REVERSE)
DASHES = ("-", "--", "-.")
PANELS = {
    "actions": ("number of actions", "|A|"),
    "horizon": ("length of the chain", "T"),
    "off_policy": ("share of π in μ", "β"),
    "noise": ("noise of the reward", "σ"),
    "clip": ("clip of the traces", "c̄"),
}


@dataclasses.dataclass(frozen=True)
class Chain(Experiment):
    """Figure 1: relative error on the chain, one parameter varied in each panel."""

    name: ClassVar[str] = "chain"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 10, "iterations": 1000}

    iterations: int = 5000
    """Trajectories to learn from, one per iteration."""
    step_size: float = 0.1
    """α of the update of Q."""
    actions: tuple[int, ...] = (5, 10, 20)
    """Numbers of actions. The other panels use the first value, here and of every list below."""
    horizon: tuple[int, ...] = (10, 20, 30)
    """Lengths of the chain."""
    off_policy: tuple[float, ...] = (0.0, 0.3, 0.7)
    """β of the behaviour policy βπ + (1-β) uniform."""
    noise: tuple[float, ...] = (0.1, 0.5, 1.0)
    """Standard deviation of the last reward."""
    clip: tuple[float, ...] = (1.0, 2.0, 5.0)
    """Clips c̄ of the traces."""

    def __post_init__(self) -> None:
        checks.count("--iterations", self.iterations, least=10)
        checks.step_size(self.step_size, "--step-size")
        rules: dict[str, Callable[[str, Any], object]] = {
            "actions": checks.count,
            "horizon": partial(checks.count, least=2),
            "off_policy": checks.fraction,
            "noise": partial(checks.at_least, least=0.0),
            "clip": partial(checks.at_least, least=0.0, infinite=True),
        }
        for name, check in rules.items():
            flag, values = f"--{name.replace('_', '-')}", getattr(self, name)
            if not 1 <= len(values) <= len(DASHES):
                raise ValueError(f"{flag} must have one to three values, got {values}")
            for value in values:
                check(flag, value)

    def quick(self) -> "Chain":
        """The same experiment at a size for a first look."""
        # Each shape takes its time to compile.
        return dataclasses.replace(super().quick(), actions=self.actions[:1], horizon=self.horizon[:1])

    @property
    def shown(self) -> np.ndarray:
        """The iterations whose errors are kept, some 250 of them."""
        stride = max(1, self.iterations // 250)
        return np.arange(stride, self.iterations + 1, stride)

    def curves(self) -> dict[tuple[str, Any], dict[str, Any]]:
        """The setting of every curve, by panel and value."""
        default = {name: getattr(self, name)[0] for name in PANELS}
        return {(name, value): {**default, name: value} for name in PANELS for value in getattr(self, name)}

    def label(self, setting: dict[str, Any]) -> str:
        """Names a setting by what differs from the default."""
        changed = [name for name in PANELS if setting[name] != getattr(self, name)[0]]
        return "-".join(f"{name.replace('_', '-')}-{setting[name]:g}" for name in changed) or "default"

    def parts(self) -> list[Part]:
        shared = {key: getattr(self, key) for key in ("seeds", "seed", "discount", "iterations", "step_size")}
        return [
            Part(
                label,
                {"experiment": self.name, **shared, **setting},
                partial(self.compute, setting),
                cost=3.5 * self.seeds / 100 * self.iterations / 5000 * setting["horizon"] / 10,
                program=f"{setting['horizon']} by {setting['actions']}",
                title=label.replace("-", " "),
                setup=12.0,
            )
            for label, setting in {self.label(each): each for each in self.curves().values()}.items()
        ]

    def compute(self, setting: dict[str, Any]) -> Arrays:
        """Relative errors `[methods, seeds, shown]` at one setting."""
        n = setting["horizon"]
        problem = mx.problems.chain(
            n, setting["actions"], setting["off_policy"], setting["noise"], self.discount
        )
        mdp, pi, mu = problem
        stream = measures.streams(problem, range(self.seeds), self.iterations, n, self.seed)
        c = mx.traces.retrace(pi, mu, clip=setting["clip"])
        q_pi = mdp.q_values(pi)
        errors = np.full((len(METHODS), self.seeds, self.shown.size), np.nan, np.float32)
        for i, method in enumerate(METHODS):
            if method in (AS_PRINTED, PATHS, REVERSE) and not self.label(setting).startswith(
                ("default", "clip")
            ):
                continue  # slow, and they are there to be seen once: in the last panel
            q = mx.learning.evaluate(
                stream,
                pi,
                np.zeros_like(c) if method == ONE else c,
                measures.estimator(method, problem, c),
                step_size=self.step_size,
                refresh_growth=measures.REFRESH.get(method, 1.0),
                states=[0],
            )
            errors[i] = measures.relative_error(q, q_pi)[:, self.shown - 1]
        return {"errors": errors}

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        errors = {curve: data[self.label(setting)]["errors"] for curve, setting in self.curves().items()}
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
        times = {
            (method, clip): self._time(errors["clip", clip][i])
            for clip in self.clip
            for i, method in enumerate(METHODS)
        }
        low, high = self.clip[0], self.clip[min(1, len(self.clip) - 1)]
        return report.Section(
            self.name,
            "Chain (Figure 1)",
            text=(
                "One trajectory per iteration; every pair along it moves towards its target with step size "
                f"{self.step_size:g}. Marginalized operators learn their TD weights from the same stream. The error is "
                r"$\sum_a |Q - Q^\pi| / Q^\pi$ at the first state.",
                "With consistent weights the marginalized operator and Retrace are the same operator on average: their "
                "curves can differ by variance alone.",
            ),
            figures=(
                report.Figure(
                    "chain",
                    f"Relative error against iterations, mean of {self.seeds} seeds. Upper row: the paper's three "
                    "operators. Lower row: the marginalized operator with its weights from six sources.",
                    "Five panels of learning curves on the chain",
                    "On the chain the marginalized operator reaches a tenth of the first error after "
                    f"{times[MONTE_CARLO, low]} trajectories at clip {low:g}, Retrace after {times[RETRACE, low]}, "
                    f"one-step after {times[ONE, low]}; with certainty-equivalent weights at clip {high:g} it takes "
                    f"{times[CERTAINTY, high]}.",
                ),
            ),
            tables=(self._table(errors),),
            claims=tuple(self._claims(errors)),
            data=("chain.csv",),
        )

    def _figure(self, folder: Path, errors: Mapping[tuple[str, Any], np.ndarray]) -> None:
        from matplotlib.lines import Line2D

        with report.panels(folder, "chain", (11, 5.4), 2, 5, sharex=True, sharey=True) as (figure, axes):
            for (top, bottom), (name, (title, symbol)) in zip(axes.T, PANELS.items(), strict=True):
                values = getattr(self, name)
                for axis, methods in ((top, PAPER), (bottom, OURS)):
                    for k, (value, dash) in enumerate(zip(values, DASHES, strict=False)):
                        for method in methods:
                            # Curves that coincide: the lower one is drawn wide.
                            wide = 2.4 if method in (RETRACE, EXACT) else 1.0
                            every = (10 + 8 * k, max(1, self.shown.size // 4))
                            report.draw_curves(
                                axis,
                                self.shown,
                                errors[name, value][METHODS.index(method)],
                                method,
                                band=False,
                                linestyle=dash,
                                linewidth=wide,
                                markevery=every,
                            )
                    axis.set_yscale("log")
                lines = [Line2D([], [], color="#444444", ls=dash, linewidth=1) for dash in DASHES]
                words = [f"{symbol} = {value:g}" for value in values]
                top.legend(
                    lines[: len(words)],
                    words,
                    title=title,
                    ncols=len(words),
                    fontsize=6.5,
                    handlelength=1.5,
                    handletextpad=0.3,
                    columnspacing=0.6,
                    loc="lower center",
                    bbox_to_anchor=(0.5, 1.0),
                    title_fontsize=8.5,
                )
                bottom.set_xlabel("iteration")
            axes[0, 0].set_ylim(1e-2, 4 * float(max(curves[0, :, 0].mean() for curves in errors.values())))
            for axis in axes[:, 0]:
                axis.set_ylabel("relative error")
            report.legend_below(figure, axes, columns=3)

    def _time(self, curve: np.ndarray) -> str:
        """The iteration at which a tenth of the first error is reached."""
        return measures.reached(curve, 0.1 * float(curve[:, 0].mean()), self.shown)

    def _table(self, errors: Mapping[tuple[str, Any], np.ndarray]) -> report.Table:
        rows = [
            (
                f"{PANELS[name][1]} = {value:g}",
                _label(method),
                self._time(curve),
                measures.final(curve),
            )
            for (name, value), curves in errors.items()
            if name == "clip"
            for method, curve in zip(METHODS, curves, strict=True)
        ]
        return report.Table(
            "Speed and final error",
            ("setting", "operator", "iterations to 10% of the first error", "final error"),
            tuple(rows),
            "Final error: mean over seeds and the last fifth of the iterations.",
        )

    def _claims(self, errors: Mapping[tuple[str, Any], np.ndarray]) -> list[report.Claim]:
        return _Figure1(self, errors).claims()


class _Figure1:
    """The paper's sentences on Figure 1, panel by panel, and ours; a panel with one value compares nothing.

    Attributes:
        errors: Errors `[methods, seeds, shown]` by panel and value.
        ends: Smallest and largest value of each panel.
        varied: The panels with several values.
        levels: Values of β, the smallest first.
        clips: The clips, the smallest first.
        default: Errors of each method at the default setting.
        first: One-step's first error there: times are those to a tenth of it.
    """

    error = "log10 ratio of mean error over all iterations"
    speed = "log2 ratio of iterations to a tenth of the first error"

    def __init__(self, chain: Chain, errors: Mapping[tuple[str, Any], np.ndarray]) -> None:
        self.errors = errors
        self.ends = {name: (min(getattr(chain, name)), max(getattr(chain, name))) for name in PANELS}
        self.varied = {name for name, (low, high) in self.ends.items() if low < high}
        self.levels, self.clips = sorted(set(chain.off_policy)), sorted(set(chain.clip))
        self.default = {method: self.of("actions", chain.actions[0], method) for method in METHODS}
        self.first = float(self.default[ONE][:, 0].mean())

    def of(self, name: str, value: Any, method: str) -> np.ndarray:
        """Errors `[seeds, shown]` of a method."""
        return self.errors[name, value][METHODS.index(method)]

    def slower(self, x: np.ndarray, *others: np.ndarray) -> float:
        """log2 of the ratio of the times to a tenth of the first error, to the fastest of the others; NaN if none gets there."""
        time, *times = (measures.time_to(each, 0.1 * self.first) for each in (x, *others))
        never = x.shape[1] + 1
        return float(np.log2(time / min(times))) if min(time, *times) < never else np.nan

    @staticmethod
    def final_ratio(x: np.ndarray, y: np.ndarray) -> float:
        """log10 of the ratio of two final errors."""
        return float(np.log10(measures.final(x)) - np.log10(measures.final(y)))

    def claims(self) -> list[report.Claim]:
        """All of them, in the order of the panels."""
        return [
            *self.harder("actions", "more actions make evaluation harder", "Figure 1(a)"),
            *self.harder("horizon", "longer horizons make evaluation harder", "Figure 1(b)"),
            *self.faster(),
            *self.off_policy(),
            *self.noise(),
            *self.clip(),
        ]

    # fmt: off
    def harder(self, name: str, text: str, where: str) -> list[report.Claim]:
        """Panels (a) and (b): errors at the largest value against those at the smallest."""
        few, many = self.ends[name]
        summed = name == "actions"  # errors are sums over actions: compare averages
        measure = self.error.replace("error", "error per action") if summed else self.error
        return [
            report.claim(
                f"{text} ({_label(method)})", where, f"{measure}, {many} against {few}", log_ratio,
                *(self.of(name, value, method) / (value if summed else 1) for value in (many, few)), low=0.0)
            for method in PAPER if name in self.varied
        ]

    def faster(self) -> list[report.Claim]:
        """Panels (a) and (b): the operators at the default setting."""
        default, setting = self.default, f"{self.speed}, default setting"
        return [
            report.claim(
                "the marginalized operator converges faster than Retrace (Monte Carlo or certainty-equivalent weights)",
                "Figure 1(a), (b)", f"{setting}: Retrace against the faster of the two", self.slower,
                *(default[method] for method in (RETRACE, MONTE_CARLO, CERTAINTY)), low=0.05, main=True),
            report.claim(
                "Retrace outperforms the one-step operator",
                "Figure 1(a), (b)", f"{setting}: one-step against Retrace", self.slower,
                default[ONE], default[RETRACE], low=0.05),
        ]

    def off_policy(self) -> list[report.Claim]:
        """Panel (c): errors furthest from on-policy against those nearest to it, and marginalized against Retrace at each level."""
        off, on = self.ends["off_policy"]
        return [
            *(report.claim(
                f"nearer to on-policy all operators do better ({_label(method)})", "Figure 1(c)",
                rf"{self.error}, $\beta$ = {off:g} against {on:g}", log_ratio,
                self.of("off_policy", off, method), self.of("off_policy", on, method), low=0.0)
            for method in PAPER if "off_policy" in self.varied),
            *(report.claim(
                rf"the marginalized operator has an advantage over Retrace (Monte Carlo), $\beta$ = {level:g}", "Figure 1(c)",
                f"{self.error} to Retrace's; an advantage means at least 3.5%, as for speed", log_ratio,
                self.of("off_policy", level, MONTE_CARLO), self.of("off_policy", level, RETRACE), high=-0.015)
            for level in self.levels),
        ]

    def noise(self) -> list[report.Claim]:
        """Panel (d): final errors against one-step's at the largest noise."""
        noise = self.ends["noise"][1]
        return [
            report.claim(
                f"with a noisy reward, a higher final error than one-step ({_label(method)})", "Figure 1(a) to (d)",
                rf"log10 ratio of final errors to one-step's, $\sigma$ = {noise:g}; final errors are proportional "
                "to the noise, so the ratio is the same at every level", self.final_ratio,
                self.of("noise", noise, method), self.of("noise", noise, ONE), low=0.0)
            for method in (RETRACE, MONTE_CARLO) if noise > 0
        ]

    def clip(self) -> list[report.Claim]:
        """Panel (e): errors at the largest clip against those at the smallest, and against Retrace's."""
        where, low, high = "Figure 1(e)", self.clips[0], self.clips[-1]
        clips, stable = rf"$\bar c$ = {high:g} against {low:g}", "converges more stably than Retrace"
        against_retrace = [
            report.claim(
                text, where, rf"{self.error} to Retrace's, $\bar c$ = {high:g}", log_ratio,
                self.of("clip", high, method), self.of("clip", high, RETRACE), high=0.0)
            for method, text in (
                (MONTE_CARLO, f"the marginalized operator {stable}"),
                (CERTAINTY, f"beyond the paper: the marginalized operator with certainty equivalence {stable}"),
            )
        ]
        if "clip" not in self.varied:
            return against_retrace
        larger = self.clips[1]
        return [
            report.claim(
                r"Retrace is unstable when $\bar c$ is large", where, f"{self.error}, {clips}", log_ratio,
                self.of("clip", high, RETRACE), self.of("clip", low, RETRACE), low=0.0),
            *against_retrace,
            report.claim(
                rf"beyond the paper: certainty equivalence at $\bar c$ = {larger:g} converges faster than Retrace "
                f"at {low:g}", where, f"{self.speed}, Retrace against marginalized", self.slower,
                self.of("clip", low, RETRACE), self.of("clip", larger, CERTAINTY), low=0.05),
            report.claim(
                r"the marginalized operator's final error still increases with $\bar c$", where,
                f"log10 ratio of final errors, {clips}", self.final_ratio,
                self.of("clip", high, MONTE_CARLO), self.of("clip", low, MONTE_CARLO), low=0.0),
        ]
    # fmt: on


def _label(method: str) -> str:
    return report.operator_style(method).label
