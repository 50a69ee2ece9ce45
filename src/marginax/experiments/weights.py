"""TD weights of the Open World seen from its corners (Figure 6)."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import marginax as mx
from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.experiments import measures
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part

if TYPE_CHECKING:
    from jaxtyping import Array

    from marginax.trajectories import Trajectory

ESTIMATES = {
    "Monte Carlo": measures.MONTE_CARLO,
    "certainty equivalence": measures.CERTAINTY,
    "Monte Carlo of the path": measures.PATHS,
    "reverse TD": measures.REVERSE,
}
ROWS = ("exact", *ESTIMATES)
CORNERS = ("top left", "top right", "bottom left", "bottom right")


@dataclasses.dataclass(frozen=True)
class Weights(Experiment):
    """Figure 6: TD weights from the four corners of the Open World, exact and estimated."""

    name: ClassVar[str] = "weights"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 4}

    seeds: Hidden[int] = 20
    trajectories: int = 200
    """How many trajectories the estimates of a run see."""
    size: int = 10
    """Cells along one side."""
    horizon: int = 1000
    """Steps after which an episode is cut off."""
    clip: float = 1.0
    """Clip c̄ of the traces."""

    def __post_init__(self) -> None:
        checks.count("--size", self.size, least=3)
        checks.count("--trajectories", self.trajectories)
        checks.count("--horizon", self.horizon)
        checks.at_least("--clip", self.clip, 0.0, infinite=True)

    def parts(self) -> list[Part]:
        return [Part("maps", self.settings(), self.compute, cost=0.5 * self.seeds, title="maps of weights")]

    def corners(self) -> np.ndarray:
        """The four start states; the last is the cell diagonally before the corner where episodes end."""
        n = self.size
        return np.array([0, n - 1, n * (n - 1), n * n - n - 2])

    def compute(self) -> Arrays:
        """Maps `[corners, S]` of the exact weights, `[seeds, corners, S]` of estimates; visits `[corners, S]`."""
        import jax
        import jax.numpy as jnp

        problem = mx.problems.open_world(self.size, self.discount)
        mdp, pi, mu = problem
        c = mx.traces.retrace(pi, mu, clip=self.clip)
        stream = measures.streams(problem, range(self.seeds), self.trajectories, self.horizon, self.seed)

        def maps(w: "Array") -> "Array":
            return w[self.corners()].mean(axis=(1, 3))  # over actions of the start and of the cell

        def estimate(operator: str) -> "Array":
            empty = measures.estimator(operator, problem, c)

            def one_seed(batch: "Trajectory") -> "Array":
                return maps(empty.update(batch, c).weights(c))

            if (
                operator == measures.REVERSE
            ):  # keeps a matrix of states for every start: one seed after the other
                return jax.jit(partial(jax.lax.map, one_seed))(stream)
            return jax.jit(jax.vmap(one_seed))(stream)

        visits = np.stack([mdp.credit_row(mu, (int(x), 0)).sum(axis=1) for x in self.corners()])
        return {
            "exact": np.asarray(maps(jnp.asarray(mx.weights.exact(mdp, mu, c)))),
            **{row: np.asarray(estimate(operator)) for row, operator in ESTIMATES.items()},
            "visits": visits / visits.sum(axis=1, keepdims=True),
        }

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        found = data["maps"]
        one_run = {kind: found[kind] if kind == "exact" else found[kind][0] for kind in ROWS}
        self._figure(folder, one_run)
        rows = [
            (kind, corner, state, float(value))
            for kind, maps in one_run.items()
            for corner, each in zip(CORNERS, maps, strict=True)
            for state, value in enumerate(each)
        ]
        write_csv(folder / "weights.csv", ("weights", "start", "state", "weight"), rows)
        errors = {
            kind: (np.abs(found[kind] - found["exact"]) * found["visits"]).sum(-1).mean(0)
            for kind in ESTIMATES
        }
        n = self.size
        row, column = np.divmod(np.arange(n * n), n)
        near = (n - 1 - row) + (n - 1 - column) <= n // 2
        return report.Section(
            self.name,
            "TD weights from the corners (Figure 6)",
            text=(
                "The weight of a cell is the average over its actions (and those of the start) of the TD weights of "
                rf"Retrace with $\bar c$ = {self.clip:g}. π never moves left or up, so a path that did has a cumulative "
                "trace of zero: weights are a cone to the right and below the start that fades with distance.",
            ),
            figures=(
                report.Figure(
                    "weights",
                    f"Exact weights, and those of the first run estimated from {self.trajectories} trajectories; a "
                    "cross marks the start.",
                    "Heat maps of TD weights from four starts",
                    f"After {self.trajectories} trajectories a cell's weight seen from the top left is off by "
                    f"{report.number(errors['Monte Carlo'][0])} on average with Monte Carlo and by "
                    f"{report.number(errors['certainty equivalence'][0])} with certainty equivalence.",
                ),
            ),
            tables=(
                report.Table(
                    f"Error of the estimates after {self.trajectories} trajectories",
                    ("weights", *CORNERS),
                    tuple((kind, *map(float, each)) for kind, each in errors.items()),
                    f"Mean absolute error of a cell's weight, weighted by the visits of μ; {self.seeds} runs.",
                ),
            ),
            claims=(
                report.claim(
                    "from near the terminal state, most weights are low except near the bottom right",
                    "Figure 6(d)",
                    f"share of all weight that lies within {n // 2} steps of the corner ({near.mean():.0%} of the "
                    "cells); low elsewhere means at least 0.9",
                    lambda x: (x[:, near].sum(-1) / x.sum(-1)).mean(),
                    found["Monte Carlo"][:, -1],
                    low=0.9,
                ),
            ),
            data=("weights.csv",),
        )

    def _figure(self, folder: Path, maps: Mapping[str, np.ndarray]) -> None:
        from matplotlib.colors import PowerNorm

        with report.panels(folder, "weights", (7.2, 1.6 * len(ROWS)), len(ROWS), len(CORNERS)) as (
            figure,
            axes,
        ):
            scale = PowerNorm(
                0.4, vmin=0, vmax=float(maps["exact"].max())
            )  # small weights should be seen, too
            for line, (kind, each) in zip(axes, maps.items(), strict=True):
                for axis, weights, start in zip(line, each, self.corners(), strict=True):
                    drawn = report.draw_map(axis, weights.reshape(self.size, self.size), norm=scale)
                    axis.plot(start % self.size, start // self.size, "x", color="#0072B2", markersize=5)
                    axis.spines[:].set_visible(True)
                line[0].set_ylabel(kind.replace(" ", "\n"), rotation=0, ha="right", va="center")
            for axis, corner in zip(axes[0], CORNERS, strict=True):
                axis.set_title(f"from the {corner}", fontsize=8)
            figure.colorbar(
                drawn, ax=axes, shrink=0.6, aspect=30, pad=0.01, label="TD weight (scale: power 0.4)"
            )
