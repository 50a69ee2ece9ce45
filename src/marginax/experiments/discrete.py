"""Q-learning with every operator on MinAtar and two noisy grids with sparse rewards, played inside the program that learns."""

import contextlib
import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.deep.metrics import check_slugs, known_number, slug
from marginax.engine import Engine
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part, smaller
from marginax.statistics import bootstrap, interquartile_mean

if TYPE_CHECKING:
    from marginax.deep.config import AgentConfig
    from marginax.deep.run_config import PopulationConfig

MINATAR = tuple(f"gymnax/{name}-MinAtar" for name in ("Breakout", "SpaceInvaders", "Asterix", "Freeway"))
GRIDS = ("grid/four-rooms", "grid/noisy-catch")
OPERATORS = ("one-step", "n-step", "peng", "tree-backup", "retrace", "marginalized")
KEPT = ("error_variance", "error_variance_retrace", "weight_mean", "effective_length", "train_return")
ACTOR_CRITICS: dict[str, dict[str, Any]] = {
    "vtrace, no replay": {"operator": "vtrace", "replay_share": 0.0},
    **{
        f"{operator}, {share:.0%} replay, c̄ = {clip:g}": {
            "operator": operator,
            "replay_share": share,
            "clip": clip,
        }
        for share, clip in ((0.5, 1.0), (0.875, 1.0), (0.875, 2.0))
        for operator in ("vtrace", "marginalized")
    },
}
"""Actor-critics that are compared, by name."""


@dataclasses.dataclass(frozen=True)
class Discrete(Experiment):
    """Beyond the paper: Q-learning with the target of each operator, on games with discrete actions."""

    name: ClassVar[str] = "discrete"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 5}

    seeds: Hidden[int] = 10
    games: tuple[str, ...] = (*MINATAR, *GRIDS)
    """Simulators on the accelerator; MinAtar needs gymnax."""
    operators: tuple[str, ...] = OPERATORS
    """Operators that are compared."""
    frames: int = 1_024_000
    """Environment steps of each agent."""
    evaluations: int = 10
    """Evaluations of the greedy policy on the way."""
    episodes: int = 64
    """Episodes of an evaluation, played side by side."""
    environments: int = 64
    """Copies of the game that an agent plays."""
    updates: int = 4
    """Updates after one step of all copies."""
    batch_size: int = 128
    """Sequences of an update."""
    length: int = 8
    """Steps of a sequence."""
    decay: float = 0.9
    """λ."""
    clip: float = 2.0
    """c̄ of Retrace and the marginalized operator."""
    target_epsilon: float = 0.05
    """Share of uniform actions of the target policy."""
    epsilon: float = 0.2
    """Share of uniform actions of the behaviour policy."""
    hidden: int = 128
    """Units of the layer after the convolution."""
    replay_size: int = 102_400
    """Transitions of a replay buffer."""
    ablation: str = "gymnax/Asterix-MinAtar"
    """The game on which c̄, λ, the length and both policies are varied, for a quarter of the frames; empty: none."""
    actor_critic: tuple[str, ...] = MINATAR[:2]
    """Games on which V-trace and marginalized V-trace are compared, with growing shares of replayed data."""

    def __post_init__(self) -> None:
        if not self.games or not self.operators:
            raise ValueError("games and operators must not be empty")
        for name in ("games", "operators", "actor_critic"):
            check_slugs(name, getattr(self, name))
        for name in ("frames", "evaluations", "environments"):
            checks.count(name, getattr(self, name))
        block = self.environments * self.evaluations * (4 if self.ablation else 1)
        if self.frames % block:
            raise ValueError(
                f"frames must be a multiple of {block}, environments times evaluations (times 4 for an ablation), "
                f"got {self.frames}"
            )

    def quick(self) -> "Discrete":
        """Noisy Catch with small networks, on two cores."""
        return smaller(
            super().quick(),
            type(self)(),
            games=("grid/noisy-catch",),
            operators=("one-step", "retrace", "marginalized"),
            frames=40_960,
            evaluations=8,
            episodes=100,
            environments=16,
            updates=1,
            batch_size=32,
            hidden=32,
            replay_size=8_192,
            ablation="",
            actor_critic=(),
        )

    def prepared(self, folder: Path, workers: int | None, engine: Engine) -> "Discrete":
        """Itself, if every game is known: a mistake in the last one is found before the first is played."""
        from marginax.simulators import make
        from marginax.simulators.registry import check_actions

        with contextlib.suppress(ImportError):  # results can be shown where a simulator is not installed
            for game in dict.fromkeys(config.simulator for config in self.work().values()):
                check_actions(game, make(game, seed=0, allow_import=True), discrete=True)
        return self

    def population(
        self, game: str, variants: Mapping[str, Mapping[str, Any]], frames: int
    ) -> "PopulationConfig":
        """What is trained on a game: each variant of the settings with every seed, in one program."""
        from marginax.deep.discrete_config import QConfig

        common = QConfig(
            weights="paths",
            path_power=2.0,
            weight_learning_rate=3e-4,
            sequence_length=self.length,
            decay=self.decay,
            clip=self.clip,
            discount=self.discount,
            hidden=(self.hidden,),
            batch_size=self.batch_size,
            learning_rate=3e-4,
            environments=self.environments,
            update_every=self.environments,
            block_updates=self.updates,
            update_after=self.environments,
            replay_size=min(self.replay_size, frames // 4),
            target_every=200,
            target_policy="epsilon-greedy",
            target_epsilon=self.target_epsilon,
            epsilon=self.epsilon,
            epsilon_steps=frames // 10,
        )
        return self._population(game, common, variants, frames)

    def _population(
        self, game: str, common: "AgentConfig", variants: Mapping[str, Mapping[str, Any]], frames: int
    ) -> "PopulationConfig":
        from marginax.deep.run_config import PopulationConfig

        return PopulationConfig(
            simulator=game,
            groups={name: dataclasses.replace(common, **changes) for name, changes in variants.items()},
            seeds=tuple(range(self.seed, self.seed + self.seeds)),
            steps=frames,
            evaluate_every=frames // self.evaluations,
            episodes=self.episodes,
        )

    def actor_critics(self, game: str) -> "PopulationConfig":
        """Actor-critics on a game: each share of replayed data with both operators."""
        from marginax.deep.discrete_config import ActorCriticConfig

        copies, length = 32, 16
        common = ActorCriticConfig(
            path_power=2.0,
            weight_learning_rate=3e-4,
            discount=self.discount,
            hidden=(self.hidden,),
            learning_rate=5e-4,
            environments=copies,
            sequence_length=length,
            update_every=copies * length,
            block_updates=8,
            batch_size=32,
            update_after=copies * length,
            replay_size=self.replay_size // 4,
        )
        return self._population(game, common, ACTOR_CRITICS, self.frames)

    def variants(self) -> dict[str, dict[str, Any]]:
        """Settings of the ablation, by name."""
        behaviour: dict[str, dict[str, Any]] = {
            "": {},
            ", ε = 0.5": {"epsilon": 0.5},
            ", softmax π": {"target_policy": "softmax", "temperature": 0.1},
        }
        credit: dict[str, dict[str, Any]] = {", greedy π": {"target_policy": "greedy"}}
        credit |= {f", c̄ = {clip:g}": {"clip": clip} for clip in (1.0, 4.0)}
        credit |= {f", λ = {decay:g}": {"decay": decay} for decay in (0.7, 1.0)}
        credit |= {f", T = {length}": {"sequence_length": length} for length in (4, 16)}
        # What is left of long targets where nothing is corrected, or nothing needs to be.
        plain: dict[str, dict[str, Any]] = {f", T = {n}": {"sequence_length": n} for n in (8, 4, 2)}
        plain[", ε = 0.02"] = {"epsilon": 0.02}
        changed = {
            "one-step": behaviour,
            "retrace": {**behaviour, **credit, ", π = μ": {"target_epsilon": self.epsilon}},
            "marginalized": behaviour | credit,
            "peng": plain,
        }
        return {
            f"{operator}{name}": {"operator": operator, **changes}
            for operator, each in changed.items()
            for name, changes in each.items()
        }

    def work(self) -> "dict[str, PopulationConfig]":
        """What is trained, by the name of the part."""
        operators = {name: {"operator": name} for name in self.operators}
        out = {
            f"{slug(game)}-operators": self.population(game, operators, self.frames) for game in self.games
        }
        if self.ablation:
            quarter = self.population(self.ablation, self.variants(), self.frames // 4)
            out[f"{slug(self.ablation)}-ablation"] = quarter
        return out | {f"{slug(game)}-actor-critic": self.actor_critics(game) for game in self.actor_critic}

    def parts(self) -> list[Part]:
        return [
            Part(
                name,
                config.to_json(),
                partial(train, config),
                cost=config.steps * len(config.agents) / 2e4,
                program=name,
                title=f"{config.simulator}, {len(config.groups)} variants",
                setup=60.0,
            )
            for name, config in self.work().items()
        ]

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        found = {game: data[f"{slug(game)}-operators"] for game in self.games}
        panels = {
            game.partition("/")[2]: (
                arrays["steps"],
                dict(zip(self.operators, arrays["return"], strict=True)),
            )
            for game, arrays in found.items()
        }
        draw_returns(panels, folder, self.name)
        tables = [self._table("Returns", game, arrays, self.operators) for game, arrays in found.items()]
        if self.ablation:
            arrays = data[f"{slug(self.ablation)}-ablation"]
            tables.append(self._table("Ablation", self.ablation, arrays, tuple(self.variants())))
        for game in self.actor_critic:
            arrays = data[f"{slug(game)}-actor-critic"]
            tables.append(self._table("Actor-critic", game, arrays, tuple(ACTOR_CRITICS)))
        columns = ("part", "game", "variant", "seed", "step", "return", *KEPT)
        write_csv(folder / "returns.csv", columns, self._rows(data))
        return report.Section(
            self.name,
            "Discrete actions (beyond the paper)",
            text=(
                "Double Q-learning with the target of each operator: networks, data and seeds are alike, and only the "
                f"target differs. π is ε-greedy with {self.target_epsilon:g}, the behaviour policy with {self.epsilon:g}; "
                f"λ = {self.decay:g}, c̄ = {self.clip:g}, sequences of {self.length} steps, weights of paths.",
            ),
            figures=(
                report.Figure(
                    self.name,
                    f"Return of the greedy policy: mean of {self.seeds} seeds and the middle half of them.",
                    "Learning curves",
                ),
            ),
            tables=tuple(tables),
            claims=tuple(self._claims(found)),
            data=("returns.csv",),
        )

    def _rows(self, data: Mapping[str, Arrays]) -> list[tuple[Any, ...]]:
        """Every evaluation of every agent: part, game, variant, seed, step and numbers."""
        return [
            (
                name.removeprefix(f"{slug(config.simulator)}-"),
                *(config.simulator, variant, seed, int(step)),
                *(known_number(data[name][column][g, i, t]) for column in ("return", *KEPT)),
            )
            for name, config in self.work().items()
            for g, variant in enumerate(config.groups)
            for i, seed in enumerate(config.seeds)
            for t, step in enumerate(data[name]["steps"])
        ]

    def _table(self, title: str, game: str, arrays: Arrays, names: tuple[str, ...]) -> report.Table:
        columns = (
            "operator",
            "final return",
            "area under the curve",
            "variance of target - Q",
            "sum of credits",
        )
        rows = []
        for name, returns, spread, credit in zip(
            names, arrays["return"], arrays["error_variance"], arrays["effective_length"], strict=True
        ):
            cells = []
            for values in (returns[:, -1], returns.mean(1)):
                band = bootstrap(values, interquartile_mean)
                cells.append(f"{float(interquartile_mean(values)):.2f} [{band.low:.2f}, {band.high:.2f}]")
            rows.append((name, *cells, *map(_mean, (spread, credit))))
        note = f"{arrays['return'].shape[1]} seeds, {int(arrays['steps'][-1]):,} steps; interquartile means with 95% intervals."
        return report.Table(f"{title}: {game}", columns, tuple(rows), note)

    def _claims(self, found: Mapping[str, Arrays]) -> list[report.Claim]:
        """Marginalized against each of the others in each game, and the variance of its targets."""
        claims: list[report.Claim] = []
        if "marginalized" not in self.operators:
            return claims
        for game, arrays in found.items():
            returns = dict(zip(self.operators, arrays["return"], strict=True))
            ours = returns.pop("marginalized")
            for other, theirs in returns.items():
                for what, (x, y) in {
                    "final return": (ours[:, -1], theirs[:, -1]),
                    "area under the curve": (ours.mean(1), theirs.mean(1)),
                }.items():
                    claims.append(
                        report.claim(
                            f"marginalized is above {report.operator_style(other).label}",
                            game,
                            f"{what}: marginalized - {other}, interquartile means over seeds",
                            difference,
                            x,
                            y,
                            low=0.0,
                            main=other in ("one-step", "retrace") and what != "final return",
                        )
                    )
            i = self.operators.index("marginalized")
            ratio = np.log(arrays["error_variance"][i] / arrays["error_variance_retrace"][i])
            claims.append(
                report.claim(
                    "marginalized targets vary less than Retrace's on the same batches",
                    game,
                    "log of the ratio of variances of target minus Q",
                    np.mean,
                    np.nanmean(ratio, axis=1),
                    high=0.0,
                    main=True,
                )
            )
        return claims


def draw_returns(
    games: Mapping[str, tuple[np.ndarray, Mapping[str, np.ndarray]]], folder: Path, name: str
) -> None:
    """A panel per game: its title, the steps `[n]`, and returns `[seeds, n]` of every operator."""
    labels = ("thousand steps", "return")
    with report.panel_each(folder, name, list(games), (3.2, 2.7), *labels) as (figure, axes):
        for axis, (steps, curves) in zip(axes, games.values(), strict=True):
            for operator, returns in curves.items():
                report.draw_curves(axis, steps / 1000, returns, operator)
        report.legend_below(figure, axes, columns=3)


def _mean(values: np.ndarray) -> str:
    """The mean of the numbers that are not NaN, as text; empty if there are none."""
    known = values[~np.isnan(values)]
    return f"{float(known.mean()):.3g}" if len(known) else ""


def difference(x: np.ndarray, y: np.ndarray) -> float:
    """The difference of two interquartile means; no ratio, because returns may be 0."""
    return float(interquartile_mean(x)) - float(interquartile_mean(y))


def train(config: "PopulationConfig") -> Arrays:
    """Train a population in this process: the columns of its metrics as `[groups, seeds, evaluations]`, and the steps.

    A column that has no number, or a seed that diverged before it, is NaN; returns of such a seed stay as they were.
    """
    from marginax.deep.population import Population

    with Population(config) as population:
        population.run()
    return as_arrays(config, population.lines)


def as_arrays(config: "PopulationConfig", lines: list[dict[str, Any]]) -> Arrays:
    """Lines of metrics as arrays, at the steps that every agent has reached."""
    steps = sorted({line["step"] for line in lines})
    by = {(line["operator"], line["seed"], line["step"]): line for line in lines}

    def column(name: str) -> np.ndarray:
        values = [[[by[g, s, t].get(name) for t in steps] for s in config.seeds] for g in config.groups]
        return np.array(values, np.float64)  # None becomes NaN

    return {"steps": np.array(steps), **{name: column(name) for name in ("return", *KEPT)}}
