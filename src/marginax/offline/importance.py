"""Step 3, weigh: importance sampling in all its forms, doubly robust, and what the weights look like; one pass, by groups.

Notation: ρ_t = Π_{s≤t} π(a_s|x_s)/μ(a_s|x_s), the weight of an episode up to and including step t; T its last step. Terminated
episodes stay in every average with reward zero and their last weight: leaving them out, as is often done, estimates the reward
given survival. Truncated episodes leave the averages over time after their last step; what they would have earned is unknown to
these estimators.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from marginax.offline.log import Accumulator, Log, add_at, divided
from marginax.offline.results import MAX_GROUPS, Estimate, concentration, effective_size, if_alike
from marginax.statistics import Interval

DOMINANT = 0.5  # share of the weight from which a single episode decides a self-normalised average
FEW = 30.0  # effective episodes below which a mean of weights does not show its own error
FAINT = 0.01  # discounted probability of leaving what the log has seen below which it is not worth a word
HEAVY = 0.4  # tail index from which the weights may have no variance: a true 1/2 is estimated so, from 200 episodes
ONE_EPISODE = "the log has a single episode: an interval over episodes needs at least two"
NEGLIGIBLE = 1e-10  # discount below which later steps are not kept apart

# Sums over the episodes of a group: their number, Σ G, Σ ρ_T, Σ ρ_T G, Σ γ^t ρ_t r_t, Σ V(x_0), and V(x_0) + Σ γ^t ρ_t δ_t.
_BY_GROUP = ("size", "returns", "weight", "weighted", "decision", "base", "robust")
# Of each episode: ρ_T, G, and Σ γ^t ρ_t (r_t - least) and Σ γ^t ρ_t (largest - r_t), for the concentration bound.
_BY_EPISODE = ("weights", "earned", "lower", "upper")


class ImportanceSums(Accumulator):
    """Sums over the episodes of a log, by groups of episodes; `estimates` turns them into values with influences.

    Sums of different chunks of a log add up (`merge`), if each was made with the sizes of the whole log.

    Args:
        episodes: number of episodes in the whole log.
        longest: length of the longest.
        discount: γ.
        reward_range: least and largest reward possible, for the concentration bound.
        robust: whether `update` is given a critic's errors, for doubly robust.
        horizon: steps whose rewards count, if they are not all of them; logs are then given up to that step.
        missed: whether π takes pairs that the log never took, so that weights of theirs are missing, too.
    """

    added = ("steps", "truncated", "top")

    def __init__(
        self,
        episodes: int,
        longest: int,
        discount: float,
        reward_range: tuple[float, float],
        robust: bool = False,
        horizon: int | None = None,
        missed: bool = False,
    ) -> None:
        if episodes < 2:
            raise ValueError(ONE_EPISODE)
        self.episodes, self.longest, self.discount = episodes, longest, discount
        self.robust, self.horizon, self.missed = robust, horizon, missed
        self.reward_range = min(reward_range[0], 0.0), max(reward_range[1], 0.0)  # what has ended earns 0
        self.groups = g = min(episodes, MAX_GROUPS)
        if 0 < discount < 1:
            longest = min(longest, int(np.log(NEGLIGIBLE) / np.log(discount)) + 1)
        self.kept = t = max(1, longest)  # steps whose sums are kept apart
        self.steps = self.truncated = 0
        self.sums = {name: np.zeros(g) for name in _BY_GROUP}
        self.sums |= {name: np.zeros(episodes) for name in _BY_EPISODE}
        self.sums |= {
            "reward": np.zeros((g, t)),  # Σ γ^t ρ_t r_t
            "error": np.zeros((g, t)),  # Σ γ^t ρ_t (r_t + γ V(x_{t+1}) - Q(x_t,a_t))
            "mass": np.zeros((g, t)),  # Σ ρ_t over steps taken
            "ended": np.zeros((g, t + 1)),  # Σ ρ_T of episodes terminated before t (cumulated at the end)
            "at_risk": np.zeros(t),  # episodes that take step t
            "square": np.zeros(t),  # Σ ρ_t² over steps taken
            "square_ended": np.zeros(t + 1),  # as "ended": Σ ρ_T²
            "ended_count": np.zeros(t + 1),  # and the number of such episodes
            "ratio": np.zeros(2),  # Σ π/μ and Σ (π/μ)²
            "tail": np.zeros(2),  # share of the discount after a truncated step, of the log and of π
        }
        # Largest single weight by time; largest and (negative) least return and error.
        self.maxima = {"heaviest": np.zeros(t), "heaviest_ended": np.zeros(t + 1)}
        self.maxima |= {"returns": np.full(2, -np.inf), "errors": np.full(2, -np.inf)}
        self.top: list[tuple[float, str, int, int | None, int | None]] = []

    def update(
        self,
        log: Log,
        ratios: np.ndarray,
        critic: tuple[np.ndarray, np.ndarray] | None = None,
        first: int = 0,
    ) -> None:
        """Adds a chunk of whole episodes.

        Args:
            log: the chunk.
            ratios: [N] one-step ratios π/μ.
            critic: for doubly robust, r + γV(x') - Q(x,a) of each row [N] and V(x_0) of each episode [E], by a critic that
                has not seen the episode.
            first: number of the chunk's first episode in the log.
        """
        sums, number, last = self.sums, log.numbers(first), log.last
        group = number % self.groups
        gamma = self.discount ** log.times.astype(np.float64)
        rho = log.products(ratios)
        discounted = gamma * rho
        final, ends = rho[last], log.terminal[last]
        returns, decision = log.sums(gamma * log.rewards), log.sums(discounted * log.rewards)

        def add(name: str, values: np.ndarray) -> None:
            sums[name] += np.bincount(group, values, minlength=self.groups)

        add("size", np.ones(log.num_episodes))
        add("returns", returns)
        add("weight", final)
        add("weighted", final * returns)
        add("decision", decision)
        sums["weights"][number] = final
        sums["earned"][number] = returns
        _widen(self.maxima["returns"], returns)
        terms = {"mass": rho, "reward": discounted * log.rewards}
        if critic is not None:
            delta, base = critic
            terms["error"] = discounted * delta
            add("base", base)
            add("robust", base + log.sums(terms["error"]))
            _widen(self.maxima["errors"], delta)
        self._add_steps(log, group, rho, terms)
        self._add_ended(log, group, final)

        left, share = self._remaining(log.times[last])
        if np.isfinite(left).all():
            least, largest = self.reward_range
            total = log.sums(discounted) + np.where(ends, discounted[last] * left, 0.0)
            sums["lower"][number] = decision - least * total
            sums["upper"][number] = largest * total - decision
        tail = np.where(ends, 0.0, share)
        sums["tail"] += tail.sum(), (tail * final).sum()
        sums["ratio"] += ratios.sum(), (ratios**2).sum()
        self.steps += len(log)
        self.truncated += int((~ends).sum())
        self._remember(log, rho)

    def _add_steps(self, log: Log, group: np.ndarray, rho: np.ndarray, terms: dict[str, np.ndarray]) -> None:
        """Adds terms [N] by group and step, and how the weights of each step are spread."""
        times, kept = log.times, self.kept
        inside: np.ndarray | slice = times < kept if self.longest > kept else slice(None)
        steps, weights = times[inside], rho[inside]
        cell = group[log.episode][inside] * kept + steps
        for name, values in terms.items():
            add_at(self.sums[name], cell, values[inside])
        self.sums["square"] += np.bincount(steps, weights**2, minlength=kept)
        self.sums["at_risk"] += np.bincount(steps, minlength=kept)
        np.maximum.at(self.maxima["heaviest"], steps, weights)

    def _add_ended(self, log: Log, group: np.ndarray, final: np.ndarray) -> None:
        """Adds the last weights of episodes that terminated, at the step after."""
        size = self.kept + 1
        over = log.terminal[log.last] & (log.lengths < size)
        length, weight = log.lengths[over], final[over]
        add_at(self.sums["ended"], group[over] * size + length, weight)
        self.sums["square_ended"] += np.bincount(length, weight**2, minlength=size)
        self.sums["ended_count"] += np.bincount(length, minlength=size)
        np.maximum.at(self.maxima["heaviest_ended"], length, weight)

    def merge(self, other: ImportanceSums) -> None:
        """Adds the sums of other chunks of the same log."""
        super().merge(other)
        for name, values in other.sums.items():
            self.sums[name] += values
        for name, values in other.maxima.items():
            np.maximum(self.maxima[name], values, out=self.maxima[name])
        self.top = sorted(self.top, key=lambda entry: -entry[0])[:10]

    def _remaining(self, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Σ γ^k over the steps that may follow step `last`, and their share of the discount of all steps."""
        gamma, after = self.discount, last + 1.0
        if self.horizon is None:
            if gamma == 1:
                return np.full(len(last), np.inf), np.ones(len(last))
            return np.full(len(last), gamma / (1 - gamma)), gamma**after
        left = np.maximum(self.horizon - after, 0.0)
        if gamma == 1:
            return left, left / self.horizon
        share = np.maximum(gamma**after - gamma**self.horizon, 0.0) / (1 - gamma**self.horizon)
        return gamma * (1 - gamma**left) / (1 - gamma), share

    def _remember(self, log: Log, rho: np.ndarray) -> None:
        """Keeps the ten episodes with the largest final weights and the step where each weight peaked."""
        final = rho[log.last]
        for i in np.argsort(final)[::-1][:10]:
            rows = slice(log.offsets[i], log.offsets[i + 1])
            step = int(np.argmax(rho[rows]))
            row = int(log.offsets[i]) + step
            place = (int(log.states[row]), int(log.actions[row])) if log.tabular else (None, None)
            self.top.append((float(final[i]), log.name(int(i)), step, *place))
        self.top = sorted(self.top, key=lambda entry: -entry[0])[:10]

    def bound(self, level: float) -> Interval | None:
        """The concentration bound on the value; None if nothing bounds it."""
        possible = self.value_range()
        if not np.isfinite(possible).all():
            return None
        return concentration(self.sums["lower"], self.sums["upper"], possible, level=level)

    @property
    def weights(self) -> np.ndarray:
        """[E] ρ_T of each episode."""
        return self.sums["weights"]

    @property
    def return_span(self) -> float:
        """Largest minus least return of an episode in the log."""
        return float(self.maxima["returns"].sum())

    def value_range(self) -> tuple[float, float]:
        """What no value can leave, given the range of rewards: their sum over all steps, or infinite."""
        total = 1.0 + float(self._remaining(np.zeros(1))[0][0])
        least, largest = self.reward_range
        return (least * total if least else 0.0), (largest * total if largest else 0.0)

    def ess(self) -> float:
        """(Σρ_T)²/Σρ_T² over episodes."""
        return effective_size(float(self.weights.sum()), float((self.weights**2).sum()))

    def _mass(self) -> np.ndarray:
        """[G, T] Σ ρ_t of the episodes whose weight at step t is known."""
        return self.sums["mass"] + np.cumsum(self.sums["ended"], axis=1)[:, :-1]

    def ess_by_time(self) -> np.ndarray:
        """[T] (Σρ_t)²/Σρ_t² over the episodes whose weight at step t is known."""
        mass = self._mass().sum(axis=0)
        square = self.sums["square"] + np.cumsum(self.sums["square_ended"])[:-1]
        return divided(mass**2, square)

    def estimates(self, model: Estimate | None = None) -> dict[str, Estimate]:
        """All importance-sampling estimates, and doubly robust ones where critics were given.

        - trajectory-is: mean ρ_T G.  per-decision-is: mean Σ γ^t ρ_t r_t.
        - weighted-is: Σ ρ_T G / Σ ρ_T.  weighted-per-decision-is: Σ_t γ^t Σ ρ_t r_t / Σ ρ_t.
        - doubly-robust: mean [V(x_0) + Σ γ^t ρ_t (r_t + γV(x_{t+1}) - Q(x_t,a_t))], and weighted likewise.
        - magic, slope: between the critic's V(x_0) and weighted-doubly-robust; see `blends`. They need the
          influence of the model that the critics are made of.
        """
        s, ess = self.sums, self.ess()

        def mean(name: str, unseen: float) -> Estimate:
            return Estimate(*self._mean(s[name]), ess, bias_bound=unseen)

        found = {
            "trajectory-is": mean("weighted", self.unseen_returns()),
            "per-decision-is": mean("decision", self.unseen_rewards()),
        }
        weighable = bool(s["weight"].sum() > 0)
        if weighable:
            found["weighted-is"] = self._weighted()
            span, none = float(np.ptp(self.reward_range)), np.zeros(self.groups)
            found["weighted-per-decision-is"] = self._over_time(s["reward"], none, span)
        if self.robust:
            span = float(self.maxima["errors"].sum())
            found["doubly-robust"] = self._with_tail(mean("robust", self.unseen_steps(span)), model)
            if weighable:
                weighted = self._over_time(s["error"], s["base"], span)
                found["weighted-doubly-robust"] = self._with_tail(weighted, model)
                if model is not None:
                    found |= self.blends(model.influence, weighted.bias_bound)
        return found

    def _mean(self, total: np.ndarray) -> tuple[float, np.ndarray]:
        """The mean over episodes of what groups have in total [G], and its influence [G]."""
        mean = float(total.sum() / self.episodes)
        return mean, (total - self.sums["size"] * mean) * (self.groups / self.episodes)

    def _weighted(self) -> Estimate:
        """Σ ρ_T G / Σ ρ_T; what a single episode with most of the weight hides is left open."""
        weight, weighted = self.sums["weight"], self.sums["weighted"]
        total = float(weight.sum())
        value = float(weighted.sum() / total)
        influence = (weighted - value * weight) * self.groups * _without(weight, total)
        hidden = self.return_span if self.weights.max() > DOMINANT * total else 0.0
        unseen = self.unseen_returns() if self.heavy else 0.0
        return Estimate(value, influence, self.ess(), bias_bound=max(hidden, unseen))

    def _with_tail(self, estimate: Estimate, model: Estimate | None) -> Estimate:
        """A doubly robust estimate with the error of its critic, in as far as nothing corrects it: after truncated steps."""
        share = float(np.clip(self.sums["tail"] / self.episodes, 0.0, 1.0).max())
        if model is None or share == 0:
            return estimate
        influence = estimate.influence + share * (model.influence - self._mean(self.sums["base"])[1])
        return replace(estimate, influence=influence, model_share=share)

    def tail_index(self) -> float:
        """ξ of a generalised Pareto tail of the episode weights; from 1/2 up they have no variance.

        Fitted by probability-weighted moments (Hosking and Wallis 1987) to the largest fifth, or 3√n.
        """
        n = len(self.weights)
        tail = int(min(0.2 * n, 3 * np.sqrt(n)))
        if tail < 5:
            return 0.0
        largest = np.sort(self.weights)[-tail - 1 :]
        excess = largest[1:] - largest[0]
        mean = float(excess.mean())
        lower = float(((1 - (np.arange(1, tail + 1) - 0.35) / tail) * excess).mean())
        return 2.0 - mean / (mean - 2 * lower) if mean > 0 else 0.0

    @property
    def heavy(self) -> bool:
        """Whether the log says little of what was not drawn: a heavy tail of the weights, or a policy that leaves what was seen."""
        return self.missed or self.tail_index() > HEAVY

    def unseen_returns(self) -> float:
        """What episodes that a thin or heavy-tailed sample misses may add: (1 - mean ρ_T) times the range of returns."""
        if self.ess() >= FEW and not self.heavy:
            return 0.0
        return max(0.0, 1.0 - float(self.weights.mean())) * self.return_span

    def unseen_rewards(self) -> float:
        """The same step by step, with the range of rewards."""
        return self.unseen_steps(float(np.ptp(self.reward_range)))

    def unseen_steps(self, span: float) -> float:
        """Σ_t γ^t (1 - mean ρ_t) times `span`, the range of what a step may add, over the steps where weights are thin; no more
        than the largest (1 - mean ρ_t) times the range of returns."""
        missing = self._missing()
        by_step = float((self.discount ** np.arange(self.kept)) @ missing)
        return min(span * by_step, float(self.return_span * missing.max()))

    def _missing(self) -> np.ndarray:
        """[T] what the mean weight falls short of 1, at the steps where weights are thin or have a heavy tail."""
        mass = self._mass().sum(axis=0)
        known = self.sums["at_risk"] + np.cumsum(self.sums["ended_count"])[:-1]
        average = np.divide(mass, known, out=np.ones_like(mass), where=known > 0)
        thin = (self.ess_by_time() < FEW) | self.heavy
        return np.where(thin, np.maximum(0.0, 1.0 - average), 0.0)

    def _by_time(
        self, terms: np.ndarray, base: np.ndarray
    ) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
        """Self-normalised averages by time: the mean of `base` [G] and the averages of `terms` at each time [T], with what
        each group changes by being there, [G] and [G, T]."""
        mass = self._mass()
        total = mass.sum(axis=0)
        inverse = divided(1.0, total)
        at_time = terms.sum(axis=0) * inverse
        influence = (terms - mass * at_time) * _without(mass, total) * self.groups
        start, first = self._mean(base)
        return start, at_time, first, influence

    def _over_time(self, terms: np.ndarray, base: np.ndarray, span: float) -> Estimate:
        """Σ_t (Σ_i terms_it / Σ_i ρ_it), plus the mean of `base`.

        `span` is how far a single term may lie from another; it is left open at the steps where one episode has most of the
        weight, and, where weights are heavy, for the episodes that were not drawn.
        """
        start, at_time, first, influence = self._by_time(terms, base)
        total = self._mass().sum(axis=0)
        ended = np.maximum.accumulate(self.maxima["heaviest_ended"])[:-1]
        heaviest = np.maximum(self.maxima["heaviest"], ended)
        alone = (heaviest > DOMINANT * total) & (self.sums["mass"].sum(axis=0) > 0)
        hidden = span * float((self.discount ** np.arange(self.kept))[alone].sum())
        unseen = self.unseen_steps(span) if self.heavy else 0.0
        psi = influence.sum(axis=1) + first
        return Estimate(start + float(at_time.sum()), psi, self.ess(), bias_bound=max(hidden, unseen))

    def blends(self, model: np.ndarray, bias_bound: float) -> dict[str, Estimate]:
        """`magic` and `slope`: estimates g_j that weigh the first j steps and take the critic's value from there on.

        g_0 is the critic's value of the starts, g_T weighted doubly robust; bias falls with j and variance grows.

        - MAGIC (Thomas and Brunskill 2016) mixes them with the weights of least estimated squared error. The bias of g_j is
          estimated as its distance to the central 10% interval of g_T.
        - SLOPE (Su, Srinath and Krishnamurthy 2020) takes the shortest j whose interval meets those of all longer ones.

        The critic's own error is that of the model, `model` [G], times the share of the discounted steps that is left to it.
        """
        start, at_time, first, influence = self._by_time(self.sums["error"], self.sums["base"])
        lengths = np.unique(np.minimum([0, *(2 ** np.arange(20)), self.kept], self.kept))
        taken = self.discount ** np.arange(self.kept) * self.sums["at_risk"]
        left = np.append(np.cumsum(taken[::-1])[::-1], 0.0)[lengths] / max(taken.sum(), 1e-300)
        value = start + np.append(0.0, np.cumsum(at_time))[lengths]
        psi = np.pad(np.cumsum(influence, axis=1), ((0, 0), (1, 0)))[:, lengths]
        psi = psi + first[:, None] + (model - first)[:, None] * left

        covariance = np.atleast_2d(np.cov(psi.T)) / self.groups
        error = np.sqrt(np.diag(covariance))
        bias = np.maximum(np.abs(value - value[-1]) - 0.1257 * error[-1], 0.0)
        share = _least_mixture(covariance + np.outer(bias, bias))

        low, high = value - 2 * 1.96 * error, value + 2 * 1.96 * error
        low, high = np.maximum.accumulate(low[::-1])[::-1], np.minimum.accumulate(high[::-1])[::-1]
        j = int(np.argmax(low <= high))  # the first that meets all longer ones

        ess, hidden = self.ess(), bias_bound * lengths[j] / max(self.kept, 1)
        magic = float(share @ value), psi @ share, ess
        slope = float(value[j]), psi[:, j], ess
        return {
            "magic": Estimate(*magic, bias_bound=float(share @ bias), model_share=float(share @ left)),
            "slope": Estimate(*slope, bias_bound=hidden, model_share=float(left[j])),
        }

    def behaviour(self) -> Estimate:
        """The plain average return of the log."""
        return Estimate(*self._mean(self.sums["returns"]), float(self.episodes))

    @property
    def same(self) -> bool:
        """Whether all episodes have the same return and the same kind of end."""
        average = if_alike(self.behaviour(), self.value_range(), self.episodes)
        return average.alike is not None and self.truncated in (0, self.episodes)

    def mean_ratio(self) -> tuple[float, float]:
        """Mean of π/μ over steps and its standard error; 1 in expectation where μ covers π."""
        mean, square = self.sums["ratio"] / self.steps
        return float(mean), float(np.sqrt(max(square - mean**2, 0.0) / self.steps))


def _without(part: np.ndarray, total: np.ndarray | float) -> np.ndarray:
    """1 / (total - part): the weight of a self-normalised average without one group, zero where nothing is left.

    With it an influence is what leaving the group out changes (the jackknife), and not only a derivative, which understates a
    group that has much of the weight.
    """
    rest = total - part
    return np.divide(1.0, rest, out=np.zeros_like(rest), where=rest > 1e-9 * total)


def _least_mixture(error: np.ndarray) -> np.ndarray:
    """[J] shares of estimates that add up to 1 and have the least squared error, from the matrix [J, J] of its expectations."""
    scale = max(float(np.trace(error)), 1e-300)
    root = np.linalg.cholesky(error / scale + 1e-9 * np.eye(len(error))).T
    ones = np.full((1, len(root)), 1e3)  # the last row makes the sum 1
    share, _ = nnls(np.concatenate([root, ones]), np.r_[np.zeros(len(root)), 1e3])
    return np.asarray(share / share.sum())


def _widen(bounds: np.ndarray, values: np.ndarray) -> None:
    """Largest value, and largest negative value: their sum is the range."""
    np.maximum(bounds, [values.max(), -values.min()], out=bounds)
