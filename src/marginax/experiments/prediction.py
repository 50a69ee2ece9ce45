"""Policy evaluation with networks: every operator over one grid of λ and c̄, in games that run on the accelerator."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import tyro

from marginax import report
from marginax._files import write_csv
from marginax.experiments.runner import Arrays, Experiment, Part
from marginax.statistics import Interval, bootstrap

if TYPE_CHECKING:
    from marginax.deep.games import Sizes, Truth
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
class Prediction(Experiment):
    """Beyond the paper: a Q-network learns the values of a fixed policy by every operator."""

    name: ClassVar[str] = "prediction"

    seeds: Annotated[int, tyro.conf.Suppress] = 10
    discount: Annotated[float, tyro.conf.Suppress] = 0.97
    games: tuple[str, ...] = tuple(NAMES)
    """Simulators; MinAtar needs gymnax."""
    decays: tuple[float, ...] = (0.8, 0.9, 0.95, 1.0)
    """λ of every operator."""
    clips: tuple[float, ...] = (1.0, 1.25, 2.0)
    """c̄ of Retrace, V-trace and the marginalized operator."""
    decay: float = 1.0
    """λ of the one setting of the marginalized operator that is compared."""
    clip: float = 2.0
    """c̄ of that setting."""
    target_epsilon: float = 0.05
    """Share of uniform actions of the target policy, greedy otherwise."""
    behaviour_epsilon: float = 0.5
    """The same of the behaviour policy."""
    power: float = 1.0
    """Which deviance the weight network minimises: 0 squares, 1 Poisson, 2 gamma."""
    mixture: float = 0.8
    """What it learns from: 1 products of traces, 0 reverse-time TD."""
    average: float = 0.999
    """Share of the old running average of the weight network that each update keeps."""
    phases: int = 12
    """Target networks, each with fresh trajectories."""
    period: int = 1000
    """Updates of a phase."""
    environments: int = 512
    """Copies of the simulator for each seed."""
    batch: int = 128
    """Sequences of an update."""
    length: int = 16
    """Steps of a sequence."""
    filters: int = 16
    units: int = 128
    learning_rate: float = 3e-4
    last_rate: float = 0.1
    """Share of the learning rate that is left at the end."""
    pairs: int = 256
    """Held-out pairs whose true values are found by Monte Carlo."""
    rollouts: int = 512
    """Returns for each of them."""
    improvements: int = 40
    """Phases of half the period in which the policy to be evaluated is trained."""

    def __post_init__(self) -> None:
        if not self.games:
            raise ValueError("games must name at least one simulator, got none")
        for name in ("target_epsilon", "behaviour_epsilon"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must lie in (0, 1], so that every action has a probability, got {getattr(self, name)}"
                )
        if self.decay not in self.decays or self.clip not in self.clips:
            raise ValueError(
                f"decay and clip must be in the grid {self.decays} by {self.clips}, got {self.decay} and {self.clip}"
            )

    def quick(self) -> "Prediction":
        """One game of our own with small networks, for a first look on two cores."""
        return dataclasses.replace(
            self,
            seeds=min(self.seeds, 3),
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
            rollouts=128,
            improvements=10,
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

    def sizes(self) -> "Sizes":
        from marginax.deep.games import Sizes

        names = {field.name for field in dataclasses.fields(Sizes)}
        given = {name: getattr(self, name) for name in names if hasattr(self, name)}
        return Sizes(**given, probes=max(2, self.pairs // 4))

    @property
    def interval(self) -> int:
        """Updates between two errors of a curve."""
        return self.period // self.sizes().reports

    @property
    def command(self) -> str:
        games = "" if self.games == tuple(NAMES) else f" --games {' '.join(self.games)}"
        return f"marginax reproduce {self.name} --seeds {self.seeds}{games}"

    def parts(self) -> list[Part]:
        return [
            Part(
                game.replace("/", "-"),
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

        simulator, sizes, settings = make_accelerated(game), self.sizes(), self.grid()
        loss = PathLoss(self.power, self.mixture, self.average)
        init, phase = prediction.program(simulator, settings, loss, discount=self.discount, sizes=sizes)

        def policies(network: games.Network) -> tuple[games.Policy, games.Policy]:
            make = partial(games.epsilon_greedy, network)
            return make(self.target_epsilon), make(self.behaviour_epsilon)

        def start(network: games.Network, keys: Any) -> prediction.Agents:
            return jax.vmap(lambda key: init(policies(network)[1], key))(keys)

        def learn(network: games.Network, truth: games.Truth, agents: prediction.Agents, keys: Any):
            return jax.vmap(lambda agent, key: phase(*policies(network), truth, agent, key))(agents, keys)

        def train(key: Any) -> games.Network:
            half = dataclasses.replace(sizes, period=max(1, sizes.period // 2), reports=1)
            return prediction.train_policy(
                simulator,
                discount=self.discount,
                sizes=half,
                phases=self.improvements,
                key=key,
                epsilons=(self.target_epsilon, 0.5),
            )

        def find(network: games.Network, key: Any) -> games.Truth:
            return games.truth(simulator, *policies(network), self.discount, sizes, key)

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
        for number in range(sizes.phases):
            each = jax.vmap(lambda key, number=number: jax.random.fold_in(key, number))(keys)
            agents, measured = step(network, truth, agents, each)
            yield truth, measured

    def section(self, folder: Path, data: Mapping[str, Arrays]) -> report.Section:
        games = [NAMES.get(game, game) for game in self.games]
        found = dict(zip(games, (data[game.replace("/", "-")] for game in self.games), strict=True))
        settings = self.grid()
        one = next(
            i
            for i, s in enumerate(settings)
            if (s.operator, s.decay, s.clip) == (MARGINALIZED, self.decay, self.clip)
        )
        others = tuple(dict.fromkeys(s.operator for s in settings if s.operator != MARGINALIZED))
        scores = {game: _scores(arrays["errors"]) for game, arrays in found.items()}
        best = {
            (game, operator, measure): min(
                (i for i, s in enumerate(settings) if s.operator == operator),
                key=lambda i: scores[game][measure][:, i].mean(),
            )
            for game in games
            for operator in (*others, MARGINALIZED)
            for measure in (0, 1)
        }
        self._figure(folder, found, best, one, others)
        self._data(folder, found, settings)
        claims = self._claims(scores, best, one, others, found, settings)
        diverged = sum(int((~np.isfinite(arrays["errors"][:, -1])).sum()) for arrays in found.values())
        total = len(settings) * self.seeds * len(games)
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
            tables=(
                self._table(scores, best, one, others, settings),
                self._spread(found, settings),
            ),
            claims=tuple(claims),
            data=("errors.csv", "settings.csv"),
        )

    def _figure(self, folder: Path, found: dict, best: dict, one: int, others: tuple) -> None:
        columns = min(3, len(found))
        rows = math.ceil(len(found) / columns)
        with report.panels(folder, "errors", (7.2, 2.3 * rows + 0.6), rows, columns) as (figure, axes):
            for axis, (game, arrays) in zip(axes.ravel(), found.items(), strict=False):
                errors = arrays["errors"]
                updates = np.arange(1, errors.shape[1] + 1) * self.interval
                for operator in others:
                    report.draw_curves(axis, updates, errors[..., best[game, operator, 0]], operator)
                report.draw_curves(axis, updates, errors[..., one], MARGINALIZED)
                axis.set(yscale="log", title=game)
                axis.set_ylim(bottom=max(0.01, axis.get_ylim()[0]))
            for axis in axes.ravel()[len(found) :]:
                axis.set_visible(False)
            for axis in axes[-1]:
                axis.set_xlabel("updates")
            for axis in axes[:, 0]:
                axis.set_ylabel("relative error of Q")
            report.legend_below(figure, axes, columns=4)

    def _data(self, folder: Path, found: dict, settings: list) -> None:
        curves, rows = [], []
        for game, arrays in found.items():
            errors = arrays["errors"]
            for i, s in enumerate(settings):
                what = (game, s.operator, s.decay, s.clip)
                points = errors[..., i]
                curves += [
                    (
                        *what,
                        (k + 1) * self.interval,
                        *map(float, (points[:, k].mean(), points[:, k].std(ddof=1))),
                    )
                    for k in range(errors.shape[1])
                ]
                mean, end = _scores(errors)
                spread = arrays["variances"][..., i].mean(), arrays["credits"][..., i].mean()
                values = (
                    mean[:, i].mean(),
                    _half_width(mean[:, i]),
                    end[:, i].mean(),
                    _half_width(end[:, i]),
                )
                rows.append((*what, *map(float, (*values, *spread))))
        what = ("game", "operator", "decay", "clip")
        write_csv(folder / "errors.csv", (*what, "updates", "mean", "standard deviation"), curves)
        measures = ("mean error", "±", "final error", "± ", "variance of targets", "credit")
        write_csv(folder / "settings.csv", (*what, *measures), rows)

    def _table(self, scores: dict, best: dict, one: int, others: tuple, settings: list) -> report.Table:
        def cell(game: str, pair: tuple[int, int]) -> str:
            return " / ".join(f"{scores[game][m][:, pair[m]].mean():.2f}" for m in (0, 1))

        def used(s: Any) -> str:
            return f"{s.decay:g}" + (f", {s.clip:g}" if np.isfinite(s.clip) else "")

        rows: list[tuple] = []
        for operator in others:
            pairs = {game: (best[game, operator, 0], best[game, operator, 1]) for game in scores}
            chosen = "; ".join(dict.fromkeys(used(settings[i]) for pair in pairs.values() for i in pair))
            label = report.operator_style(operator).label
            rows.append(
                (
                    label,
                    *(cell(game, pairs[game]) for game in scores),
                    chosen if operator != "one-step" else "–",
                )
            )
        label = report.operator_style(MARGINALIZED).label
        rows.append((label, *(cell(game, (one, one)) for game in scores), used(settings[one])))
        own = {game: (best[game, MARGINALIZED, 0], best[game, MARGINALIZED, 1]) for game in scores}
        chosen = "; ".join(dict.fromkeys(used(settings[i]) for pair in own.values() for i in pair))
        rows.append((f"{label}, best of each game", *(cell(game, own[game]) for game in scores), chosen))
        note = f"Means of {self.seeds} seeds: the mean over training / the end of it, each at its best setting λ, c̄."
        return report.Table("Errors of Q", ("operator", *scores, "λ, c̄"), tuple(rows), note)

    def _spread(self, found: dict, settings: list) -> report.Table:
        rows = []
        for s in settings:
            if s.decay == self.decay and s.clip in (self.clip, np.inf):
                i = settings.index(s)
                cells = [
                    f"{report.number(float(arrays['variances'][..., i].mean()))} / {arrays['credits'][..., i].mean():.1f}"
                    for arrays in found.values()
                ]
                rows.append((report.operator_style(s.operator).label, *cells))
        note = (
            "Variance of targets given the pair, over the variance of the true values / mean of the discounted sum of "
            f"credits of a sequence. λ = {self.decay:g} and c̄ = {self.clip:g}; means over training and seeds."
        )
        return report.Table("Variance of targets and credit", ("operator", *found), tuple(rows), note)

    def _claims(
        self, scores: dict, best: dict, one: int, others: tuple, found: dict, settings: list
    ) -> list[report.Claim]:
        needed = math.ceil(5 / 6 * len(scores))
        ours = f"λ = {self.decay:g}, c̄ = {self.clip:g} in all games"

        def games_won(operators: tuple, measures: tuple, own: bool) -> tuple[int, Interval]:
            """In how many games all of some errors are lower: by their means, beyond the intervals, and not against them."""
            lower = sure = open_ = 0
            for game, pair in scores.items():
                gaps = [
                    pair[m][:, best[game, operator, m]]
                    - pair[m][:, best[game, MARGINALIZED, m] if own else one]
                    for operator in operators
                    for m in measures
                ]
                intervals = [bootstrap(gap) for gap in gaps]
                lower += all(gap.mean() > 0 for gap in gaps)
                sure += all(interval.low > 0 for interval in intervals)
                open_ += all(interval.high > 0 for interval in intervals)
            return lower, Interval(float(sure), float(open_))

        def won(
            text: str, operators: tuple, measures: tuple, main: bool = False, own: bool = False
        ) -> report.Claim:
            lower, interval = games_won(operators, measures, own)
            measure = (
                f"games of {len(scores)} with a lower error; low: beyond the 95% interval over seeds, high: not beyond it "
                "on the other side"
            )
            where = "each at its best setting" if own else ours
            return report.Claim(
                text, where, measure, float(lower), interval, report.verdict(interval, low=needed), main
            )

        claims = [
            won(
                f"lowest error on average and at the end of training in at least {needed} of {len(scores)} games, against "
                "all others at their best settings",
                others,
                (0, 1),
                main=True,
            )
        ]
        for m, text in enumerate(MEASURES):
            claims.append(
                won(f"lowest error {text} in at least {needed} of {len(scores)} games", others, (m,), True)
            )
        for m, text in enumerate(MEASURES):
            text = f"lowest error {text} in at least {needed} of {len(scores)} games, with a best setting of its own, too"
            claims.append(won(text, others, (m,), own=True))
        for operator in others:
            label = report.operator_style(operator).label
            claims.append(won(f"lower error than {label}, on average and at the end", (operator,), (0, 1)))
        same = next(
            i
            for i, s in enumerate(settings)
            if (s.operator, s.decay, s.clip) == ("retrace", self.decay, self.clip)
        )
        pairs = [arrays["variances"].mean(1)[:, [one, same]] for arrays in found.values()]
        claims.append(
            report.claim(
                "less variance of targets than Retrace at the same λ and c̄",
                ours,
                "geometric mean over games of the ratio of variances",
                lambda *each: float(np.exp(np.mean([np.log(x[:, 1].mean() / x[:, 0].mean()) for x in each]))),
                *pairs,
                low=1.0,
                main=True,
            )
        )
        return claims


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


def _half_width(values: np.ndarray) -> float:
    interval = bootstrap(values)
    return float(interval.width) / 2


def _finding(claims: list[report.Claim]) -> str:
    both, mean, end = claims[:3]
    return (
        f"With one setting for all games, marginalized is lower than every other operator at its best setting in "
        f"{mean.interval.low:.0f} games on average over training, in {end.interval.low:.0f} at the end, and in "
        f"{both.interval.low:.0f} in both, beyond the 95% interval over seeds."
    )
