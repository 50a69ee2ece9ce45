r"""Steps 2 and 4: count the log, and solve the Bellman and balance equations of its counts.

Every operator of this library is Q -> Q + D (r + γ P^π Q - Q). With the full traces c = π/μ one application gives Q^π, so that
the value from a start distribution ρ₀ is *one row of D*: J = ρ₀ D r = Σ d(x,a) r(x,a), where the row d solves the balance
equation of Section 5 with the start distribution in place of a start pair,

    d(x',a') = π(a'|x') (ρ₀(x') + γ Σ_{x,a} d(x,a) p(x'|x,a)).

Certainty equivalence solves it with the log's frequencies p̂, r̂. Dividing d by the log's visits gives the weights of
marginalized importance sampling. The two saddle points of Section 5 and fitted Q with one-step targets have the same solution
when their functions are tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax import _checks as checks
from marginax._solve import Resolvent
from marginax.offline.log import FOLDS, HALF_LOGGED, Accumulator, Log, divided
from marginax.offline.results import Estimate, Influence, effective_size
from marginax.weights.empirical import EmpiricalMDP

DENSE_LIMIT = 300  # states up to which a dense solve is the faster one
ENDLESS = (
    "without a discount every state must reach an end under the policy, and in the counts of this log some never do: give a "
    "horizon or a discount below 1"
)
MANY = 1000.0  # visits of a pair from which a single episode hardly changes its mean


class Endless(ValueError):
    """Without a discount and a horizon, a process that never ends has no value."""


class Counts(Accumulator):
    """What one pass over a tabular log gathers: an empirical MDP for each fold of episodes, and sizes.

    >>> log = Log.from_episodes([dict(states=[0, 1, 0], actions=[0, 1], rewards=[0., 1.], terminal=True)])
    >>> counts = Counts(2, 2)
    >>> counts.update(log)
    >>> counts.whole.visits.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    added = ("episodes", "steps", "truncated")

    def __init__(self, num_states: int, num_actions: int) -> None:
        self.folds = [EmpiricalMDP.empty(num_states, num_actions) for _ in range(FOLDS)]
        self.episodes = self.steps = self.truncated = self.longest = 0
        self.reward_min, self.reward_max = np.inf, -np.inf
        self.has_behaviour: bool | None = None

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk of whole episodes, numbered from `first`.

        Raises:
            ValueError: for a state or action outside the tables, naming episode and step.
        """
        self._check(log)
        fold = log.folds(first)[log.episode]
        steps = (log.states, log.actions, log.next_states, log.terminal)
        others: Any = {"rewards": log.rewards, "first": log.times == 0, "behaviour": log.behaviour}
        for k in range(FOLDS):
            self.folds[k] = self.folds[k].add(*steps, **others, valid=fold == k)
        self.episodes += log.num_episodes
        self.steps += len(log)
        self.truncated += int((~log.terminal[log.last]).sum())
        self.longest = max(self.longest, int(log.lengths.max()))
        self.reward_min = min(self.reward_min, float(log.rewards.min()))
        self.reward_max = max(self.reward_max, float(log.rewards.max()))
        self.has_behaviour = log.behaviour is not None

    def merge(self, other: Counts) -> None:
        """Adds the counts of other chunks of the same log."""
        super().merge(other)
        self.folds = [a.merge(b) for a, b in zip(self.folds, other.folds, strict=True)]
        self.longest = max(self.longest, other.longest)
        self.reward_min = min(self.reward_min, other.reward_min)
        self.reward_max = max(self.reward_max, other.reward_max)
        self.has_behaviour = other.has_behaviour if self.has_behaviour is None else self.has_behaviour

    @property
    def whole(self) -> EmpiricalMDP:
        """The counts of all episodes."""
        return self.folds[0].merge(self.folds[1])

    def _check(self, log: Log) -> None:
        if not log.tabular:
            raise ValueError("counts need states and actions that are indices; this log has observations")
        num_states, num_actions = self.folds[0].visits.shape
        tables = (
            ("state", log.states, num_states),
            ("action", log.actions, num_actions),
            ("next state", log.following, num_states),
        )
        for name, values, size in tables:
            bad = values >= size
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(
                    f"{log.where(row)}: {name} {values[row]} is outside the policy's table, "
                    f"which has {size} {name.split()[-1]}s"
                )
        if self.has_behaviour is not None and self.has_behaviour != (log.behaviour is not None):
            raise ValueError(HALF_LOGGED)


class Layers:
    """Values V_h and discounted visits d_h of a process on states, one layer for each step h, or one for all steps.

    Args:
        kernel: [S, S] CSR; rows sum to at most 1. What is missing has ended, or has left (`leave`).
        rewards: [S] mean reward.
        leave: [S] probability of leaving what the log has seen; it earns the default value, the mean over `visits`.
        starts: [S] distribution of the first state.
        visits: [S] visits of the log.
        discount: γ.
        horizon: number of steps whose rewards count; None for all.

    Attributes:
        v: [H + 1, S]; without a horizon both entries are the same.
        d: [H, S]; the only entry is the sum over all steps if there is no horizon.
        default: [H] value of what was never seen.
        unsupported: discounted probability of leaving.
    """

    def __init__(
        self,
        kernel: sp.csr_array,
        rewards: np.ndarray,
        leave: np.ndarray,
        starts: np.ndarray,
        visits: np.ndarray,
        discount: float,
        horizon: int | None = None,
    ) -> None:
        size = len(rewards)
        if horizon is None:
            if discount == 1 and not _ends(kernel):
                raise Endless(ENDLESS)
            resolvent = Resolvent(kernel.toarray() if size <= DENSE_LIMIT else kernel, discount)
            v0, out = resolvent(np.stack([rewards, leave], axis=1)).T
            default = _default(v0, out, visits)
            v = v0 + out * default
            self.v, self.default = np.stack([v, v]), np.array([default])
            self.d = resolvent.transposed(starts)[None]
            self.unsupported = float(starts @ out)
        else:
            self.v, self.default = np.zeros((horizon + 1, size)), np.zeros(horizon)
            for h in reversed(range(horizon)):
                v0 = rewards + discount * (kernel @ self.v[h + 1])
                self.default[h] = _default(v0, leave, visits)
                self.v[h] = v0 + leave * self.default[h]
            transposed, d = sp.csr_array(kernel.T), starts
            self.d = np.empty((horizon, size))
            for h in range(horizon):
                self.d[h] = d
                d = discount * (transposed @ d)
            self.unsupported = float((self.d @ leave).sum())


def _default(v0: np.ndarray, out: np.ndarray, visits: np.ndarray) -> float:
    """The number y that is the mean of v0 + out·y over visits; 0 where nothing stays in what the log has seen."""
    stays = float(visits @ (1.0 - out))
    return float(visits @ v0) / stays if stays > 1e-9 * float(visits.sum()) else 0.0


class WeightedErrors:
    """Σ_h w_h(c) (r + γV_{h+1}(x') - U_h(c)) of transitions from cells c (pairs or states) of a log.

    With one layer it is w (r + γV(x') - U). With several, the sums over h are tables of cells and of the successors that the log
    has seen, made once.

    Args:
        weights: [H, C] w.
        here: [H, C] U.
        v: [H + 1, S] V.
        successors: [C, S] CSR, positive where the log has such a transition.
        discount: γ.
    """

    def __init__(
        self, weights: np.ndarray, here: np.ndarray, v: np.ndarray, successors: Any, discount: float
    ) -> None:
        self.weights, self.discount, self.layers = weights.sum(axis=0), discount, len(weights)
        self.here, self.v = here[0], v[1]
        if self.layers > 1:
            table = sp.csr_array(successors)
            table.sort_indices()
            cell = np.repeat(np.arange(table.shape[0]), np.diff(table.indptr))
            self.keys = cell * table.shape[1] + table.indices.astype(np.int64)
            self.ahead = np.zeros(table.nnz)
            for w, after in zip(weights, v[1:], strict=True):
                self.ahead += discount * w[cell] * after[table.indices]
            self.here = (weights * here).sum(axis=0)

    def __call__(self, log: Log, cells: np.ndarray) -> np.ndarray:
        """[N] for each row of a log."""
        if self.layers == 1:
            ahead = self.discount * np.where(log.terminal, 0.0, self.v[log.following])
            return self.weights[cells] * (log.rewards + ahead - self.here[cells])
        found = np.searchsorted(self.keys, cells * len(self.v) + log.following)
        found = np.minimum(found, max(len(self.keys) - 1, 0))
        ahead = np.where(log.terminal, 0.0, self.ahead[found] if len(self.ahead) else 0.0)
        return self.weights[cells] * log.rewards + ahead - self.here[cells]


@dataclass(frozen=True)
class Model:
    """Values and occupancies of π in the empirical MDP of a log.

    With S⁺ the pairs that the log holds, and mass that leaves S⁺ set apart:

        V(x)  = Σ_{a: (x,a) ∈ S⁺} π(a|x) (r̂(x,a) + γ Σ_x' p̂(x'|x,a) V(x')) + leave(x) · default_value
        d(x') = starts(x') + γ Σ_{x,a} d(x) π(a|x) p̂(x'|x,a)

    so that the value is Σ starts · V = Σ d(x) π(a|x) r̂(x,a) + unsupported · default_value.

    With a horizon of H steps there is one layer of values for each step, and the occupancy is the sum over the steps. Without
    one there is a single layer.

    Attributes:
        q: [H, S, A] action values; the default value on pairs the log never took.
        v: [H + 1, S] values of π; without a horizon both entries are the same.
        occupancy: [S, A] discounted visits of π per episode, within the support (not multiplied by 1-γ).
        weights: [S, A] occupancy over the log's (undiscounted) visits per episode; zero off support.
        unsupported: discounted probability E[γ^τ] that π at time τ first takes a pair the log never took.
        default_value: value given to what was never seen: the mean value over the states of the log.
        value: Σ starts · v.
        visits: [S, A] of the log.
        off_support_occupancy: [S, A] discounted visits of π to pairs off the support.
        weighted_errors: for the influence.
    """

    q: np.ndarray
    v: np.ndarray
    occupancy: np.ndarray
    weights: np.ndarray
    unsupported: float
    default_value: float
    value: float
    visits: np.ndarray
    off_support_occupancy: np.ndarray
    discount: float
    weighted_errors: WeightedErrors

    def errors(self, log: Log) -> np.ndarray:
        """[N] r + γV(x') - Q(x,a) of each row, with the values of its step where there is a horizon."""
        t = np.minimum(log.times, len(self.q) - 1) if len(self.q) > 1 else 0
        ahead = np.where(log.terminal, 0.0, self.v[t + 1, log.following])
        return log.rewards + self.discount * ahead - self.q[t, log.states, log.actions]


def certainty_equivalence(
    counts: EmpiricalMDP,
    pi: np.ndarray,
    discount: float,
    *,
    starts: Any = None,
    horizon: int | None = None,
) -> Model:
    """Values, occupancies and ratios of π by certainty equivalence.

    Args:
        counts: of the log, or of a fold of its episodes.
        pi: [S, A] target policy.
        discount: γ.
        starts: [S] how many episodes begin in each state; those of `counts` when omitted.
        horizon: number of steps whose rewards count; all when omitted.

    Raises:
        ValueError: with γ = 1 and no horizon, if some state never ends under π in the log's counts; if values of every step
            up to the horizon do not fit into memory.

    >>> counts = EmpiricalMDP.empty(1, 2).add([0], [1], [0], [False], rewards=[1.0], first=[True])
    >>> round(certainty_equivalence(counts, np.array([[0., 1.]]), 0.5).value, 6)
    2.0
    """
    support, (s, a) = counts.support, counts.visits.shape
    if horizon is not None:
        steps = f"the values of {horizon:,} steps for {s * a:,} pairs"
        checks.fits_in_memory(steps, horizon * s * a, instead="take a shorter horizon")
    rewards, p = counts.rewards(), counts.transitions()
    supported = np.where(support, pi, 0.0)
    leave = np.clip(1.0 - supported.sum(axis=1), 0.0, 1.0)
    leave[leave < 1e-12] = 0.0
    # π as a matrix [S, S·A] that averages over the actions of each state.
    begins = np.arange(0, s * a + 1, a)
    average = sp.csr_array((supported.ravel(), np.arange(s * a), begins), shape=(s, s * a))
    starts = counts.starts if starts is None else starts
    episodes = float(starts.sum())
    starts = starts / episodes
    layers = Layers(
        sp.csr_array(average @ p),
        (supported * rewards).sum(axis=1),
        leave,
        starts,
        np.asarray(counts.visits).sum(axis=1),
        discount,
        horizon,
    )
    after = discount * (p @ layers.v[1:].T).T.reshape(-1, s, a)
    q = np.where(support, rewards + after, layers.default[:, None, None])
    per_visit = divided(supported, counts.visits) * episodes
    d = layers.d.sum(axis=0)[:, None]
    weights = (layers.d[:, :, None] * per_visit).reshape(-1, s * a)
    return Model(
        q=q,
        v=layers.v,
        occupancy=d * supported,
        weights=d * per_visit,
        unsupported=layers.unsupported,
        default_value=float(layers.default[0]),
        value=float(starts @ layers.v[0]),
        visits=np.asarray(counts.visits),
        off_support_occupancy=d * np.where(support, 0.0, pi),
        discount=discount,
        weighted_errors=WeightedErrors(weights, q.reshape(-1, s * a), layers.v, counts.successors, discount),
    )


def _ends(kernel: sp.csr_array) -> bool:
    """Whether every state reaches one from which the process can end."""
    reached = 1.0 - kernel.sum(axis=1) > 1e-12
    while True:
        more = reached | ((kernel @ reached.astype(float)) > 0)
        if (more == reached).all():
            return bool(reached.all())
        reached = more


class ModelInfluence(Accumulator):
    """Influence of Σ starts · V when V solves the Bellman equation of the log's counts.

    ψ_i = V(x_0) - value + Σ_t w(x_t,a_t) (r_t + γ V(x_{t+1}) - Q(x_t,a_t)), with w of `Model.weights`: the delta method on
    the counts, with whole episodes as the independent units. Errors of a model at its own data are too small, as residuals of
    a regression are; so a term counts as what leaving the episode out changes (`left_out`). A pair that a single episode has
    visited has no error at all: without that episode it would have the default value.
    """

    added = ("influence",)

    def __init__(self, model: Model, episodes: int) -> None:
        self.model, self.influence = model, Influence(episodes)

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        model = self.model
        start = model.v[0, log.states[log.offsets[:-1]]]
        pairs = log.pairs(model.weights.shape[1])
        factor = left_out(log, pairs, model.visits.ravel())
        alone = np.isinf(factor)
        terms = model.weighted_errors(log, pairs) * np.where(alone, 1.0, factor)
        rows = pairs[alone]
        terms[alone] += model.weights.ravel()[rows] * (model.q[0].ravel()[rows] - model.default_value)
        self.influence.add(start - model.value + log.sums(terms), first)

    def estimate(self, visits: Any) -> Estimate:
        """The value of certainty equivalence with its influence."""
        ess = effective_transitions(self.model.weights, visits)
        return Estimate(self.model.value, self.influence.groups(), ess, "transitions", model_share=1.0)


def left_out(
    log: Log, cells: np.ndarray, totals: np.ndarray, weights: np.ndarray | None = None
) -> np.ndarray:
    """[N] T/(T - own) of each row: T is the total weight of its cell (pair or state) in the whole log, `own` what its episode has of
    it; infinite where that is all. It turns the derivative of a mean by an episode into what leaving the episode out changes
    (the jackknife). Cells of large totals hardly change and have 1."""
    found = np.ones(len(log))
    rows = np.flatnonzero(totals[cells] <= MANY)
    cell, total = cells[rows], totals[cells[rows]]
    _, place = np.unique(log.episode[rows] * len(totals) + cell, return_inverse=True)
    own = np.bincount(place, None if weights is None else weights[rows])[place]
    rest = total - own
    known = rest > 1e-9 * own
    found[rows] = np.where(known, total / np.where(known, rest, 1.0), np.inf)
    return found


def effective_transitions(weights: np.ndarray, visits: np.ndarray) -> float:
    """(Σ N w)²/Σ N w² over pairs: how many transitions carry a marginalized estimate."""
    return effective_size(float((visits * weights).sum()), float((visits * weights**2).sum()))
