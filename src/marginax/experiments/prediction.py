"""Policy evaluation with networks: every operator over one grid of λ and c̄, in games that run on the accelerator."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from marginax import _checks as checks
from marginax import report
from marginax._files import write_csv
from marginax.deep.metrics import check_slugs, slug
from marginax.deep.run_config import Sizes
from marginax.engine import Engine
from marginax.experiments.runner import Arrays, Experiment, Hidden, Part, smaller
from marginax.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from marginax.deep.games import Truth
    from marginax.deep.prediction import Evaluation, Setting

MARGINALIZED = "marginalized"
NAMES = {
    "gymnax/Breakout-MinAtar": "Breakout",
    "gymnax/SpaceInvaders-MinAtar": "SpaceInvaders",
    "gymnax/Asterix-MinAtar": "Asterix",
    "gymnax/Freeway-MinAtar": "Freeway",
    "grid/catch": "Catch",
    "grid/four-rooms": "Four Rooms",
}
DIVERGED = 1e6  # the error of a run whose numbers stopped being finite
MEASURES = ("on average over training", "at the end of training")


@dataclasses.dataclass(frozen=True)
class Prediction(Sizes, Experiment):
    """Beyond the paper: a Q-network learns the values of a fixed policy by every operator."""

    name: ClassVar[str] = "prediction"
    small: ClassVar[Mapping[str, Any]] = {"seeds": 3}

    seeds: Hidden[int] = 10
    discount: Hidden[float] = 0.97
    games: tuple[str, ...] = tuple(NAMES)
    """Simulators; MinAtar needs gymnax."""
    decays: tuple[float, ...] = (0.8, 0.9, 0.95, 1.0)
    """λ of every operator."""
    clips: tuple[float, ...] = (1.0, 1.25, 2.0)
    """c̄ of Retrace, V-trace and the marginalized operator."""
    decay: float = 1.0
    """λ of the one setting of the marginalized operator that is compared."""
    clip: float = 2.0
    """c̄ of the one setting of the marginalized operator that is compared."""
    target_epsilon: float = 0.05
    """Share of uniform actions of the target policy, greedy otherwise."""
    behaviour_epsilon: float = 0.5
    """Share of uniform actions of the behaviour policy, greedy otherwise."""
    power: float = 1.0
    """Which deviance the weight network minimises: 0 squares, 1 Poisson, 2 gamma."""
    mixture: float = 0.8
    """What it learns from: 1 products of traces, 0 reverse-time TD."""
    average: float = 0.999
    """Share of the old running average of the weight network that each update keeps."""
    last_rate: float = 0.1
    """Share of the learning rate that is left at the end."""
    improvements: int = 40
    """Phases of half the period in which the policy to be evaluated is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.games:
            raise ValueError("games must name at least one simulator, got none")
        check_slugs("games", self.games)
        for name in ("target_epsilon", "behaviour_epsilon"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must lie in (0, 1], so that every action has a probability, got {getattr(self, name)}"
                )
        for decay in self.decays:
            checks.fraction("decays", decay)
        for clip in self.clips:
            checks.positive("clips", clip, infinite=True)
        for name in ("mixture", "average", "last_rate"):
            checks.fraction(name, getattr(self, name))
        if not 0 <= self.power <= 2:
            raise ValueError(f"power must lie in [0, 2], got {self.power}")
        checks.positive("learning_rate", self.learning_rate)
        checks.count("improvements", self.improvements, least=0)
        if self.decay not in self.decays or self.clip not in self.clips:
            raise ValueError(
                f"decay and clip must be in the grid {self.decays} by {self.clips}, got {self.decay} and {self.clip}"
            )

    def quick(self) -> "Prediction":
        """One game of our own with small networks, for a first look on two cores."""
        return smaller(
            super().quick(),
            type(self)(),
            games=("grid/four-rooms",),
            decays=(0.9, 1.0),
            clips=(1.0, 2.0),
            phases=6,
            period=300,
            environments=64,
            batch=64,
            filters=4,
            units=32,
            learning_rate=1e-3,
            pairs=64,
            probes=16,
            rollouts=64,
            improvements=8,
        )

    def grid(self) -> "list[Setting]":
        """All operators with their settings: one-step has none, and c̄ is that of traces made of ratios."""
        from marginax.deep.prediction import Setting

        clipped = [
            Setting(operator, decay, clip)
            for operator in ("retrace", "vtrace", MARGINALIZED)
            for clip in self.clips
            for decay in self.decays
        ]
        free = [Setting(name, decay) for name in ("tree-backup", "q-lambda", "peng") for decay in self.decays]
        return [Setting("one-step"), *free, *clipped]

    def prepared(self, folder: Path, workers: int | None, engine: Engine) -> "Prediction":
        """Itself, if every game is known: a mistake in the last one is found before the first is played."""
        from marginax.simulators import make_accelerated

        with contextlib.suppress(ImportError):  # results can be shown where a simulator is not installed
            for game in self.games:
                if make_accelerated(game).num_actions is None:
                    raise ValueError(f"games must have discrete actions, got {game!r}")
        return self

    @property
    def interval(self) -> int:
        """Updates between two errors of a curve."""
        return self.period // self.reports

    def parts(self) -> list[Part]:
        return [
            Part(
                slug(game),
                {**self.settings(), "games": None, "decay": None, "clip": None, "game": game},
                partial(self.compute, game),
                cost=40.0,
                title=NAMES.get(game, game),
                setup=60.0,
            )
            for game in self.games
        ]

    def compute(self, game: str) -> Arrays:
        """What `deep.prediction.Evaluation` has, with seeds first, and the truth of one game."""
        return collect(list(self.run(game)))

    def run(self, game: str) -> "Iterator[tuple[Truth, Evaluation]]":
        """Trains the policy, finds the truth, and yields it with what is measured in each phase."""
        import jax
        import jax.numpy as jnp

        from marginax.deep import games, prediction
        from marginax.deep.path_network import PathLoss
        from marginax.simulators import make_accelerated

        simulator, settings = make_accelerated(game), self.grid()
        loss = PathLoss(self.power, self.mixture, self.average)
        init, phase = prediction.program(simulator, settings, loss, discount=self.discount, sizes=self)

        def policies(network: games.Network) -> tuple[games.Policy, games.Policy]:
            make = partial(games.epsilon_greedy, network)
            return make(self.target_epsilon), make(self.behaviour_epsilon)

        def start(network: games.Network, keys: Any) -> prediction.Agents:
            return jax.vmap(lambda key: init(policies(network)[1], key))(keys)

        def learn(network: games.Network, truth: games.Truth, agents: prediction.Agents, keys: Any):
            return jax.vmap(lambda agent, key: phase(*policies(network), truth, agent, key))(agents, keys)

        def train(key: Any) -> games.Network:
            half = dataclasses.replace(self, period=max(1, self.period // 2), reports=1)
            return prediction.train_policy(
                simulator,
                discount=self.discount,
                sizes=half,
                phases=self.improvements,
                key=key,
                epsilons=(self.target_epsilon, 0.5),
            )

        def find(network: games.Network, key: Any) -> games.Truth:
            return games.truth(simulator, *policies(network), self.discount, self, key)

        policy_key, truth_key, check_key, seed_key = jax.random.split(jax.random.key(self.seed), 4)
        keys = jax.vmap(lambda k: jax.random.fold_in(seed_key, k))(jnp.arange(self.seeds))
        shape = jax.eval_shape(train, policy_key)
        arguments = (shape, jax.eval_shape(find, shape, truth_key), jax.eval_shape(start, shape, keys), keys)
        with ThreadPoolExecutor(1) as thread:  # compiles while the policy is trained
            compiled = thread.submit(lambda: jax.jit(learn, donate_argnums=2).lower(*arguments).compile())
            network = jax.jit(train)(policy_key)
            games.check_policies(simulator, *policies(network), check_key)
            truth = jax.jit(find)(network, truth_key)
            agents = jax.jit(start)(network, keys)
            step = compiled.result()
        for number in range(self.phases):
            each = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(keys)
            agents, measured = step(network, truth, agents, each)
            yield truth, measured

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        found = {NAMES.get(game, game): data[slug(game)] for game in self.games}
        results = _Results(self, found)
        results.draw(folder)
        results.write(folder)
        claims = results.claims()
        diverged = sum(int((~np.isfinite(arrays["errors"][:, -1])).sum()) for arrays in found.values())
        total = len(results.settings) * self.seeds * len(found)
        return report.Section(
            self.name,
            "Policy evaluation with networks",
            text=(
                f"A Q-network learns the values of a fixed policy π from replayed sequences of {self.length} steps of a fixed "
                f"μ. Both are greedy for the same trained network, but for a share of {self.target_epsilon:g} and "
                f"{self.behaviour_epsilon:g} uniform actions. All operators of a seed see the same sequences, "
                f"{self.batch} in each of {self.phases * self.period:,} updates, with a new target network every "
                f"{self.period:,}. Errors are those on {self.pairs} held-out pairs, over the standard deviation of their true "
                "values, which are means of Monte Carlo returns: an error of 1 is that of the best constant.",
                f"The marginalized operator has one setting for all games, λ = {self.decay:g} and c̄ = {self.clip:g}; "
                "each of the others has, in each game and for each of the two measures, the best setting of the grid: "
                f"λ in {', '.join(f'{x:g}' for x in self.decays)} and, where there is a clip, c̄ in "
                f"{', '.join(f'{x:g}' for x in self.clips)}. {diverged} of {total:,} runs diverged.",
            ),
            figures=(
                report.Figure(
                    "errors",
                    f"Error of Q against updates: means of {self.seeds} seeds and the middle half of them. Every other "
                    "operator has its own best setting of the game, by its mean error.",
                    "Error curves of all operators in all games",
                    _finding(claims),
                ),
            ),
            tables=(results.table(), results.spread()),
            claims=tuple(claims),
            data=("errors.csv", "settings.csv"),
        )


def collect(phases: "list[tuple[Truth, Evaluation]]") -> Arrays:
    """What was measured phase by phase as arrays, with seeds first: errors `[seeds, points, settings]`."""
    truth = phases[-1][0]
    fields = {name: [np.asarray(getattr(each, name)) for _, each in phases] for name in phases[0][1]._fields}
    arrays = {name: np.stack(values, 1) for name, values in fields.items()}
    errors = arrays["errors"]
    arrays["errors"] = errors.reshape(errors.shape[0], -1, errors.shape[-1])
    return {**arrays, "truth": np.asarray(truth.values), "truth_errors": np.asarray(truth.errors)}


def _scores(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Errors `[seeds, settings]` on average over training and at the end; `DIVERGED` for a seed that diverged."""
    with np.errstate(invalid="ignore"):
        mean, end = errors.mean(1), errors[:, -1]
    return np.where(np.isfinite(mean), mean, DIVERGED), np.where(np.isfinite(end), end, DIVERGED)


def _finding(claims: list[report.Claim]) -> str:
    both, mean, end = claims[:3]
    return (
        f"With one setting for all games, marginalized is lower than every other operator at its best setting in "
        f"{mean.interval.low:.0f} games on average over training, in {end.interval.low:.0f} at the end, and in "
        f"{both.interval.low:.0f} in both, beyond the 95% interval over seeds."
    )


class _Results:
    """What the parts found: the scores of every setting, and which of them is best where.

    Attributes:
        found: Arrays of each game.
        settings: The grid.
        scores: Errors `[seeds, settings]` of each game, on average over training and at the end.
        best: The setting of an operator with the lowest of the two errors in a game, by game, operator and 0 or 1.
        one: The setting of the marginalized operator that is compared.
        others: The other operators.
    """

    def __init__(self, experiment: Prediction, found: dict[str, Arrays]) -> None:
        self.experiment, self.found, self.settings = experiment, found, experiment.grid()
        self.one = self.place(MARGINALIZED)
        self.others = tuple(dict.fromkeys(s.operator for s in self.settings if s.operator != MARGINALIZED))
        self.scores = {game: _scores(arrays["errors"]) for game, arrays in found.items()}
        self.best = {
            (game, operator, m): min(
                (i for i, s in enumerate(self.settings) if s.operator == operator),
                key=lambda i: self.scores[game][m][:, i].mean(),
            )
            for game in found
            for operator in (*self.others, MARGINALIZED)
            for m in (0, 1)
        }

    def place(self, operator: str) -> int:
        """The number of an operator's setting with the λ and c̄ that are compared."""
        wanted = (operator, self.experiment.decay, self.experiment.clip)
        return next(i for i, s in enumerate(self.settings) if (s.operator, s.decay, s.clip) == wanted)

    def draw(self, folder: Path) -> None:
        labels = ("updates", "relative error of Q")
        with report.panel_each(folder, "errors", list(self.found), (2.4, 2.3), *labels) as (figure, axes):
            for axis, (game, arrays) in zip(axes, self.found.items(), strict=True):
                errors = arrays["errors"]
                updates = np.arange(1, errors.shape[1] + 1) * self.experiment.interval
                for operator in self.others:
                    report.draw_curves(axis, updates, errors[..., self.best[game, operator, 0]], operator)
                report.draw_curves(axis, updates, errors[..., self.one], MARGINALIZED)
                axis.set_yscale("log")
                axis.set_ylim(bottom=max(0.01, axis.get_ylim()[0]))
            report.legend_below(figure, axes, columns=4)

    def write(self, folder: Path) -> None:
        curves, rows = [], []
        for game, arrays in self.found.items():
            for i, s in enumerate(self.settings):
                what, points = (game, s.operator, s.decay, s.clip), arrays["errors"][..., i]
                for k, column in enumerate(points.T):
                    updates = (k + 1) * self.experiment.interval
                    curves.append((*what, updates, float(column.mean()), float(column.std(ddof=1))))
                errors = [
                    x for m in self.scores[game] for x in (m[:, i].mean(), bootstrap(m[:, i]).width / 2)
                ]
                spread = (arrays[name][..., i].mean() for name in ("variances", "credits"))
                rows.append((*what, *map(float, (*errors, *spread))))
        names = ("game", "operator", "decay", "clip")
        write_csv(folder / "errors.csv", (*names, "updates", "mean", "standard deviation"), curves)
        measures = ("mean error", "±", "final error", "± ", "variance of targets", "credit")
        write_csv(folder / "settings.csv", (*names, *measures), rows)

    def table(self) -> report.Table:
        def used(s: "Setting") -> str:
            if s.operator == "one-step":
                return "–"
            return f"{s.decay:g}" + (f", {s.clip:g}" if np.isfinite(s.clip) else "")

        def row(label: str, pairs: dict[str, tuple[int, int]]) -> tuple[str, ...]:
            cells = (
                " / ".join(f"{self.scores[game][m][:, pair[m]].mean():.2f}" for m in (0, 1))
                for game, pair in pairs.items()
            )
            chosen = dict.fromkeys(used(self.settings[i]) for pair in pairs.values() for i in pair)
            return label, *cells, "; ".join(chosen)

        def own(operator: str) -> dict[str, tuple[int, int]]:
            return {game: (self.best[game, operator, 0], self.best[game, operator, 1]) for game in self.found}

        rows = [row(report.operator_style(operator).label, own(operator)) for operator in self.others]
        label = report.operator_style(MARGINALIZED).label
        rows.append(row(label, dict.fromkeys(self.found, (self.one, self.one))))
        rows.append(row(f"{label}, best of each game", own(MARGINALIZED)))
        seeds = self.experiment.seeds
        note = (
            f"Means of {seeds} seeds: the mean over training / the end of it, each at its best setting λ, c̄."
        )
        return report.Table("Errors of Q", ("operator", *self.found, "λ, c̄"), tuple(rows), note)

    def spread(self) -> report.Table:
        decay, clip = self.experiment.decay, self.experiment.clip
        rows = [
            (
                report.operator_style(s.operator).label,
                *(
                    f"{report.number(float(arrays['variances'][..., i].mean()))} / {arrays['credits'][..., i].mean():.1f}"
                    for arrays in self.found.values()
                ),
            )
            for i, s in enumerate(self.settings)
            if s.operator == "one-step" or (s.decay == decay and s.clip in (clip, np.inf))
        ]
        note = (
            "Variance of targets given the pair, over the variance of the true values / mean of the discounted sum of "
            f"credits of a sequence. λ = {decay:g} and c̄ = {clip:g}; means over training and seeds."
        )
        return report.Table("Variance of targets and credit", ("operator", *self.found), tuple(rows), note)

    def games_won(self, operators: tuple, measures: tuple, own: bool) -> tuple[int, Interval]:
        """In how many games all of some errors are lower: by their means, beyond the intervals, and not against them."""
        lower = sure = open_ = 0
        for game, pair in self.scores.items():
            gaps = [
                pair[m][:, self.best[game, operator, m]]
                - pair[m][:, self.best[game, MARGINALIZED, m] if own else self.one]
                for operator in operators
                for m in measures
            ]
            intervals = [bootstrap(gap) for gap in gaps]
            lower += all(gap.mean() > 0 for gap in gaps)
            sure += all(interval.low > 0 for interval in intervals)
            open_ += all(interval.high > 0 for interval in intervals)
        return lower, Interval(float(sure), float(open_))

    def claims(self) -> list[report.Claim]:
        """The claim of all games on both errors first, then those on each of them."""
        games = len(self.scores)
        needed = math.ceil(5 / 6 * games)
        ours = f"λ = {self.experiment.decay:g}, c̄ = {self.experiment.clip:g} in all games"
        measure = (
            f"games of {games} with a lower error; low: beyond the 95% interval over seeds, high: not beyond it "
            "on the other side"
        )

        def won(text: str, operators: tuple, measures: tuple, main: bool = False, own: bool = False) -> None:
            lower, interval = self.games_won(operators, measures, own)
            where = "each at its best setting" if own else ours
            verdict = report.verdict(interval, low=needed - 0.5)  # of whole games
            claims.append(report.Claim(text, where, measure, float(lower), interval, verdict, main))

        claims: list[report.Claim] = []
        many = f"in at least {needed} of {games} games"
        won(
            f"lowest error on average and at the end of training {many}, against all others at their best settings",
            self.others,
            (0, 1),
            main=True,
        )
        for m, text in enumerate(MEASURES):
            won(f"lowest error {text} {many}", self.others, (m,), main=True)
        for m, text in enumerate(MEASURES):
            won(
                f"lowest error {text} {many}, with a best setting of its own, too",
                self.others,
                (m,),
                own=True,
            )
        for operator in self.others:
            label = report.operator_style(operator).label
            won(f"lower error than {label}, on average and at the end", (operator,), (0, 1))
        same = self.place("retrace")
        claims.append(
            report.claim(
                "less variance of targets than Retrace at the same λ and c̄",
                ours,
                "geometric mean over games of the ratio of variances",
                lambda *each: float(np.exp(np.mean([np.log(x[:, 1].mean() / x[:, 0].mean()) for x in each]))),
                *(arrays["variances"].mean(1)[:, [self.one, same]] for arrays in self.found.values()),
                low=1.0,
                main=True,
            )
        )
        return claims
