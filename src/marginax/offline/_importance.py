"""Importance sampling in all its forms, doubly robust, and what the weights look like: one pass, by groups.

Notation: ρ_t = Π_{s≤t} π(a_s|x_s)/μ(a_s|x_s), the weight of an episode up to and including step t;
T its last step. Terminated episodes stay in every average with reward zero and their last weight: leaving
them out, as is often done, estimates the reward given survival. Truncated episodes leave the averages over
time after their last step; what they would have earned is unknown to these estimators.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from marginax.offline._estimates import MAX_GROUPS, Estimate
from marginax.offline._log import Log

DOMINANT = 0.5  # share of the weight from which a single episode decides a self-normalised average
FEW = 30.0  # effective episodes below which a mean of weights does not show its own error
HEAVY = (
    0.4  # tail index from which the weights may well have no variance: 1/2 is estimated so, from 200 episodes
)
_NEGLIGIBLE = 1e-10


@dataclass
class Weighted:
    """Group sums of one pass; `estimates` turns them into values with influences.

    Args:
        episodes: number of episodes in the whole log.
        longest: length of the longest.
        discount: γ.
        reward_range: least and largest reward possible, for the concentration bound.
        robust: whether `update` is given a critic's errors, for doubly robust.
    """

    episodes: int
    longest: int
    discount: float
    reward_range: tuple[float, float]
    robust: bool = False
    seen: int = 0
    top: list[tuple[float, str, int, int | None, int | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.groups = min(self.episodes, MAX_GROUPS)
        horizon = self.longest
        if self.discount > 0:
            horizon = min(horizon, int(np.log(_NEGLIGIBLE) / np.log(self.discount)) + 1)
        self.horizon = max(1, horizon)
        g, t = self.groups, self.horizon
        names = ("size", "returns", "weight", "weighted", "decision", "robust", "base")
        self.sums = {k: np.zeros(g) for k in names}
        self.reward = np.zeros((g, t))  # Σ γ^t ρ_t r_t
        self.error = np.zeros((g, t))  # Σ γ^t ρ_t (r_t + γ V(x_{t+1}) - Q(x_t,a_t))
        self.mass = np.zeros((g, t))  # Σ ρ_t over steps taken
        self.ended = np.zeros((g, t + 1))  # Σ ρ_T of episodes terminated before t (cumulated at the end)
        self.at_risk = np.zeros(t + 1)  # episodes that take step t
        self.square = np.zeros(t)
        self.square_ended, self.ended_count = np.zeros(t + 1), np.zeros(t + 1)
        self.lower, self.upper = np.zeros(self.episodes), np.zeros(self.episodes)
        self.weights = np.zeros(self.episodes)
        self.ratio_sum = self.ratio_square = 0.0
        self.steps = self.truncated = 0
        self.tail_behaviour = self.tail_target = 0.0
        self.heaviest, self.heaviest_ended = np.zeros(t), np.zeros(t + 1)  # largest single weight by time
        self.return_range, self.error_range = [np.inf, -np.inf], [np.inf, -np.inf]

    def update(
        self, log: Log, ratios: np.ndarray, critic: tuple[np.ndarray, np.ndarray] | None = None
    ) -> None:
        """Adds a chunk of whole episodes.

        Args:
            log: the chunk.
            ratios: [N] one-step ratios π/μ.
            critic: for doubly robust, r + γV(x') - Q(x,a) of each row [N] and V(x_0) of each episode [E], by
                a critic that has not seen the episode.
        """
        e = log.num_episodes
        number = self.seen + np.arange(e)
        group = number % self.groups
        row_group = np.repeat(group, log.lengths)
        times = log.times
        rho = log.products(ratios)
        gamma = self.discount ** times.astype(np.float64)
        discounted = gamma * rho
        last = log.last
        final, ends = rho[last], log.terminal[last]

        def add(name: str, values: np.ndarray) -> None:
            self.sums[name] += np.bincount(group, values, minlength=self.groups)

        returns = log.sums(gamma * log.rewards)
        decision = log.sums(discounted * log.rewards)
        add("size", np.ones(e))
        add("returns", returns)
        add("weight", final)
        add("weighted", final * returns)
        add("decision", decision)
        self.weights[number] = final

        inside: np.ndarray | slice = slice(None)
        if self.longest > self.horizon:
            inside = times < self.horizon
        key_steps = row_group[inside] * self.horizon + times[inside]
        self._bin(self.reward, key_steps, (discounted * log.rewards)[inside])
        self._bin(self.mass, key_steps, rho[inside])
        self.square += np.bincount(times[inside], rho[inside] ** 2, minlength=self.horizon)
        self.at_risk[:-1] += np.bincount(times[inside], minlength=self.horizon)
        np.maximum.at(self.heaviest, times[inside], rho[inside])
        over = ends & (log.lengths <= self.horizon)
        key = group[over] * (self.horizon + 1) + log.lengths[over]
        self._bin(self.ended, key, final[over])
        self.square_ended += np.bincount(log.lengths[over], final[over] ** 2, minlength=self.horizon + 1)
        self.ended_count += np.bincount(log.lengths[over], minlength=self.horizon + 1)
        np.maximum.at(self.heaviest_ended, log.lengths[over], final[over])
        _widen(self.return_range, returns)
        if critic is not None:
            delta, base = critic
            _widen(self.error_range, delta)
            add("base", base)
            add("robust", base + log.sums(discounted * delta))
            self._bin(self.error, key_steps, (discounted * delta)[inside])

        least, largest = self.reward_range
        beyond = np.where(ends, self.discount * discounted[last] / (1 - self.discount), 0.0)
        self.lower[number] = decision - least * (log.sums(discounted) + beyond)
        self.upper[number] = largest * (log.sums(discounted) + beyond) - decision
        self.ratio_sum += float(ratios.sum())
        self.ratio_square += float((ratios**2).sum())
        self.steps += len(log)
        self.truncated += int((~ends).sum())
        tail = np.where(ends, 0.0, self.discount * gamma[last])
        self.tail_behaviour += float(tail.sum())
        self.tail_target += float((tail * final).sum())
        self._remember(log, rho)
        self.seen += e

    def _bin(self, table: np.ndarray, key: np.ndarray, values: np.ndarray) -> None:
        table += np.bincount(key, values, minlength=table.size).reshape(table.shape)

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

    def ess(self) -> float:
        """(Σρ_T)²/Σρ_T² over episodes."""
        square = float((self.weights**2).sum())
        return float(self.weights.sum()) ** 2 / square if square > 0 else 0.0

    def ess_by_time(self) -> np.ndarray:
        """[T] (Σρ_t)²/Σρ_t² over the episodes whose weight at step t is known."""
        mass = (self.mass + np.cumsum(self.ended, axis=1)[:, :-1]).sum(axis=0)
        square = self.square + np.cumsum(self.square_ended)[:-1]
        return np.divide(mass**2, square, out=np.zeros_like(mass), where=square > 0)

    def estimates(self) -> dict[str, Estimate]:
        """All importance-sampling estimates, and doubly robust ones where critics were given.

        - trajectory-is: mean ρ_T G.  per-decision-is: mean Σ γ^t ρ_t r_t.
        - weighted-is: Σ ρ_T G / Σ ρ_T.  weighted-per-decision-is: Σ_t γ^t Σ ρ_t r_t / Σ ρ_t.
        - doubly-robust: mean [V(x_0) + Σ γ^t ρ_t (r_t + γV(x_{t+1}) - Q(x_t,a_t))], and weighted likewise.
        """
        n, s = float(self.episodes), self.sums
        scale = self.groups / n

        def mean(total: np.ndarray, unseen: float = 0.0) -> Estimate:
            value = float(total.sum() / n)
            return Estimate(value, scale * (total - s["size"] * value), self.ess(), open=unseen)

        found = {
            "trajectory-is": mean(s["weighted"], self.unseen_returns()),
            "per-decision-is": mean(s["decision"], self.unseen_rewards()),
        }
        weight = float(s["weight"].sum())
        if weight > 0:
            value = float(s["weighted"].sum() / weight)
            influence = (s["weighted"] - value * s["weight"]) * self.groups * _without(s["weight"], weight)
            alone = self.weights.max() > DOMINANT * weight
            span = self.return_range[1] - self.return_range[0] if alone else 0.0
            unseen = self.unseen_returns() if self.heavy else 0.0
            found["weighted-is"] = Estimate(value, influence, self.ess(), open=max(span, unseen))
            span = self.reward_range[1] - self.reward_range[0]
            over_time = self._over_time(self.reward, np.zeros(self.groups), span)
            unseen = self.unseen_rewards() if self.heavy else 0.0
            found["weighted-per-decision-is"] = replace(over_time, open=max(over_time.open, unseen))
        if self.robust:
            found["doubly-robust"] = mean(s["robust"])
            if weight > 0:
                found["weighted-doubly-robust"] = self._over_time(
                    self.error, s["base"], self.error_range[1] - self.error_range[0]
                )
        return found

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
        """Whether the weights' tail is so heavy that what was drawn says little of what was not."""
        return self.tail_index() > HEAVY

    def unseen_returns(self) -> float:
        """What episodes that a thin or heavy-tailed sample misses may add: (1 - mean ρ_T) times the range of returns."""
        if self.ess() >= FEW and not self.heavy:
            return 0.0
        missing = max(0.0, 1.0 - float(self.weights.mean()))
        return missing * (self.return_range[1] - self.return_range[0])

    def unseen_rewards(self) -> float:
        """The same step by step: Σ_t γ^t (1 - mean ρ_t) times the range of rewards, over the steps where weights are
        thin, and no more than the largest (1 - mean ρ_t) times the range of returns."""
        mass = (self.mass + np.cumsum(self.ended, axis=1)[:, :-1]).sum(axis=0)
        known = (self.at_risk + np.cumsum(self.ended_count))[:-1]
        average = np.divide(mass, known, out=np.ones_like(mass), where=known > 0)
        thin = (self.ess_by_time() < FEW) | self.heavy
        missing = np.where(thin, np.maximum(0.0, 1.0 - average), 0.0)
        by_step = float((self.discount ** np.arange(self.horizon)) @ missing)
        rewards, returns = np.ptp(self.reward_range), np.ptp(self.return_range)
        return min(float(rewards) * by_step, float(returns * missing.max()))

    def _over_time(self, terms: np.ndarray, base: np.ndarray, span: float) -> Estimate:
        """Σ_t (Σ_i terms_it / Σ_i ρ_it), plus the mean of `base`, with what each group changes by being there.

        `span` is how far a single term may lie from another; it is left open at the steps where one episode
        has most of the weight.
        """
        mass = self.mass + np.cumsum(self.ended, axis=1)[:, :-1]
        total = mass.sum(axis=0)
        inverse = np.divide(1.0, total, out=np.zeros_like(total), where=total > 0)
        at_time = terms.sum(axis=0) * inverse
        start = float(base.sum() / self.episodes)
        influence = ((terms - mass * at_time) * _without(mass, total)).sum(axis=1) * self.groups
        influence += (base - self.sums["size"] * start) * (self.groups / self.episodes)
        heaviest = np.maximum(self.heaviest, np.maximum.accumulate(self.heaviest_ended)[:-1])
        alone = (heaviest > DOMINANT * total) & (self.mass.sum(axis=0) > 0)
        unknown = span * float((self.discount ** np.arange(self.horizon))[alone].sum())
        return Estimate(start + float(at_time.sum()), influence, self.ess(), open=unknown)

    def behaviour(self) -> Estimate:
        """The plain average return of the log."""
        value = float(self.sums["returns"].sum() / self.episodes)
        centred = self.sums["returns"] - self.sums["size"] * value
        return Estimate(value, centred * (self.groups / self.episodes), float(self.episodes))

    def mean_ratio(self) -> tuple[float, float]:
        """Mean of π/μ over steps and its standard error; 1 in expectation where μ covers π."""
        mean = self.ratio_sum / self.steps
        variance = max(self.ratio_square / self.steps - mean**2, 0.0)
        return mean, float(np.sqrt(variance / self.steps))


def _without(part: np.ndarray, total: np.ndarray | float) -> np.ndarray:
    """1 / (total - part): the weight of a self-normalised average without one group, zero where nothing is left.

    With it an influence is what leaving the group out changes (the jackknife), and not only a derivative,
    which understates a group that has much of the weight.
    """
    rest = total - part
    return np.divide(1.0, rest, out=np.zeros_like(rest), where=rest > 1e-9 * total)


def _widen(bounds: list[float], values: np.ndarray) -> None:
    bounds[0], bounds[1] = min(bounds[0], float(values.min())), max(bounds[1], float(values.max()))
