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

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.sparse as sp

from marginax._solve import Resolvent
from marginax.offline.log import Log
from marginax.offline.results import Estimate, Influence
from marginax.weights.empirical import EmpiricalMDP

DENSE_LIMIT = 300  # states up to which a dense solve is the faster one
FOLDS = 2  # episodes are split by their number for cross-fitting: doubly robust never meets its own data


class Counts:
    """What one pass over a tabular log gathers: an empirical MDP for each fold of episodes, and sizes.

    >>> log = Log.from_episodes([dict(states=[0, 1, 0], actions=[0, 1], rewards=[0., 1.], terminal=True)])
    >>> counts = Counts(2, 2)
    >>> counts.update(log)
    >>> counts.whole.visits.tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, num_states: int, num_actions: int) -> None:
        self.folds = [EmpiricalMDP.empty(num_states, num_actions) for _ in range(FOLDS)]
        self.episodes = self.steps = self.truncated = self.longest = 0
        self.reward_min, self.reward_max = np.inf, -np.inf
        self.has_behaviour: bool | None = None

    def update(self, log: Log, first: int | None = None) -> None:
        """Adds a chunk of whole episodes, numbered from `first` (by default after those that were added before).

        Raises:
            ValueError: for a state or action outside the tables, naming episode and step.
        """
        self._check(log)
        number = (self.episodes if first is None else first) + np.arange(log.num_episodes)
        fold = np.repeat(number % FOLDS, log.lengths)
        begins = np.zeros(len(log), dtype=bool)
        begins[log.offsets[:-1]] = True
        for k in range(FOLDS):
            self.folds[k] = self.folds[k].add(
                log.states,
                log.actions,
                log.next_states,
                log.terminal,
                rewards=log.rewards,
                first=begins,
                behaviour=log.behaviour,
                valid=fold == k,
            )
        self.episodes += log.num_episodes
        self.steps += len(log)
        self.truncated += int((~log.terminal[log.last]).sum())
        self.longest = max(self.longest, int(log.lengths.max()))
        self.reward_min = min(self.reward_min, float(log.rewards.min()))
        self.reward_max = max(self.reward_max, float(log.rewards.max()))
        self.has_behaviour = log.behaviour is not None

    def merge(self, other: Counts) -> None:
        """Adds the counts of other chunks of the same log."""
        self.folds = [a.merge(b) for a, b in zip(self.folds, other.folds, strict=True)]
        self.episodes += other.episodes
        self.steps += other.steps
        self.truncated += other.truncated
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
            ("state", log.states, num_states, None),
            ("action", log.actions, num_actions, None),
            ("next state", log.next_states, num_states, log.terminal),
        )
        for name, values, size, ignore in tables:
            bad = values >= size
            if ignore is not None:
                bad &= ~ignore
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(
                    f"{log.where(row)}: {name} {values[row]} is outside the policy's table, "
                    f"which has {size} {name.split()[-1]}s"
                )
        if self.has_behaviour is not None and self.has_behaviour != (log.behaviour is not None):
            raise ValueError("behaviour probabilities are present in one part of the log and not in another")


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
        value_range: the least and largest action value on the support.
        value: Σ starts · v.
        support: [S, A] bool.
        off_support_occupancy: [S, A] discounted visits of π to pairs off the support.
    """

    q: np.ndarray
    v: np.ndarray
    occupancy: np.ndarray
    weights: np.ndarray
    unsupported: float
    default_value: float
    value_range: tuple[float, float]
    value: float
    support: np.ndarray
    off_support_occupancy: np.ndarray
    discount: float
    successor_terms: tuple[np.ndarray, np.ndarray, np.ndarray] | None = field(default=None, repr=False)

    def errors(self, log: Log, times: np.ndarray | int = 0) -> np.ndarray:
        """[N] r + γV(x') - Q(x,a) of each row, at its step where there is a horizon."""
        t = times if len(self.q) > 1 else 0
        after = t + 1 if len(self.q) > 1 else 0
        following = self.v[after, np.where(log.terminal, 0, log.next_states)]
        following = np.where(log.terminal, 0.0, following)
        return log.rewards + self.discount * following - self.q[t, log.states, log.actions]

    def weighted_errors(self, log: Log) -> np.ndarray:
        """[N] Σ_h w_h(x,a) (r + γV_{h+1}(x') - Q_h(x,a)), over the steps h at which π may meet the pair."""
        if self.successor_terms is None:
            return self.weights[log.states, log.actions] * self.errors(log)
        mean_q, keys, mean_next = self.successor_terms
        s, a = self.weights.shape
        place = (log.states * a + log.actions) * s + np.where(log.terminal, 0, log.next_states)
        found = np.minimum(np.searchsorted(keys, place), max(len(keys) - 1, 0))
        ahead = np.where(log.terminal, 0.0, mean_next[found] if len(keys) else 0.0)
        pair = (log.states, log.actions)
        return self.weights[pair] * log.rewards + ahead - mean_q[pair]


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
        ValueError: with γ = 1 and no horizon, if some state never ends under π in the log's counts.

    >>> counts = EmpiricalMDP.empty(1, 2).add([0], [1], [0], [False], rewards=[1.0], first=[True])
    >>> round(certainty_equivalence(counts, np.array([[0., 1.]]), 0.5).value, 6)
    2.0
    """
    n, support = counts.visits, counts.support
    s, a = n.shape
    rewards, p = counts.rewards(), counts.transitions()
    supported = np.where(support, pi, 0.0)
    leave = np.clip(1.0 - supported.sum(axis=1), 0.0, 1.0)
    leave[leave < 1e-12] = 0.0
    average = sp.csr_array(
        (supported.ravel(), np.arange(s * a), np.arange(0, s * a + 1, a)), shape=(s, s * a)
    )
    kernel = sp.csr_array(average @ p)
    starts = counts.starts if starts is None else starts
    episodes = float(starts.sum())
    starts = starts / episodes
    states = n.sum(axis=1)
    mean_reward = (supported * rewards).sum(axis=1)
    per_visit = np.where(support, supported / np.where(support, n, 1.0) * episodes, 0.0)
    outside = np.where(support, 0.0, pi)
    terms = None
    if horizon is None:
        resolvent = Resolvent(kernel.toarray() if s <= DENSE_LIMIT else kernel, discount)
        if discount == 1 and not _ends(kernel, leave):
            raise ValueError(
                "without a discount every state must reach an end under the policy, and in the counts of this log "
                "some never do: give a horizon or a discount below 1"
            )
        v0, out = resolvent(np.stack([mean_reward, leave], axis=1)).T
        d = resolvent.transposed(starts)
        stays = float(states @ (1.0 - out))
        default = float(states @ v0) / stays if stays > 1e-9 * states.sum() else 0.0
        v = v0 + out * default
        q = np.where(support, rewards + discount * (p @ v).reshape(s, a), default)[None]
        v, unsupported = np.stack([v, v]), float(starts @ out)
    else:
        q, v = np.empty((horizon, s, a)), np.zeros((horizon + 1, s))
        stays = float(states @ (1.0 - leave))
        default = 0.0
        for h in reversed(range(horizon)):
            v0 = mean_reward + discount * (kernel @ v[h + 1])
            default = float(states @ v0) / stays if stays > 1e-9 * states.sum() else 0.0
            v[h] = v0 + leave * default
            q[h] = np.where(support, rewards + discount * (p @ v[h + 1]).reshape(s, a), default)
        d, unsupported, terms = _layers(counts, kernel, starts, leave, per_visit, q, v, discount)
    occupancy = d[:, None] * supported
    inside = q[:, support]
    return Model(
        q=q,
        v=v,
        occupancy=occupancy,
        weights=d[:, None] * per_visit,
        unsupported=unsupported,
        default_value=default,
        value_range=(float(inside.min()), float(inside.max())),
        value=float(starts @ v[0]),
        support=support,
        off_support_occupancy=d[:, None] * outside,
        discount=discount,
        successor_terms=terms,
    )


def _ends(kernel: sp.csr_array, leave: np.ndarray) -> bool:
    """Whether every state reaches one from which the episode can end."""
    reached = 1.0 - kernel.sum(axis=1) > 1e-12
    while True:
        more = reached | ((kernel @ reached.astype(float)) > 0)
        if (more == reached).all():
            return bool(reached.all())
        reached = more


def _layers(
    counts: EmpiricalMDP,
    kernel: sp.csr_array,
    starts: np.ndarray,
    leave: np.ndarray,
    per_visit: np.ndarray,
    q: np.ndarray,
    v: np.ndarray,
    discount: float,
) -> tuple[np.ndarray, float, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Occupancy of states summed over steps, mass that leaves the support, and sums over steps for the influence."""
    s, a = per_visit.shape
    successors = sp.csr_array(counts.successors)
    successors.sort_indices()
    pair = np.repeat(np.arange(s * a), np.diff(successors.indptr))
    d, total, unsupported = starts.copy(), np.zeros(s), 0.0
    mean_q, mean_next = np.zeros((s, a)), np.zeros(successors.nnz)
    for h in range(len(q)):
        w = d[:, None] * per_visit
        total += d
        unsupported += float(d @ leave)
        mean_q += w * q[h]
        mean_next += w.ravel()[pair] * discount * v[h + 1][successors.indices]
        d = discount * (kernel.T @ d)
    return total, unsupported, (mean_q, pair * s + successors.indices.astype(np.int64), mean_next)


class ModelInfluence:
    """Influence of Σ starts · V when V solves the Bellman equation of the log's counts.

    ψ_i = V(x_0) - value + Σ_t w(x_t,a_t) (r_t + γ V(x_{t+1}) - Q(x_t,a_t)), with w of `Model.weights`: the delta method on
    the counts, exact to first order, with whole episodes as the independent units.
    """

    def __init__(self, model: Model, episodes: int) -> None:
        self.model, self.influence = model, Influence(episodes)

    def update(self, log: Log, first: int | None = None) -> None:
        """Adds a chunk, its episodes numbered from `first`."""
        start = self.model.v[0, log.states[log.offsets[:-1]]]
        psi = start - self.model.value + log.sums(self.model.weighted_errors(log))
        self.influence.add(psi, first)

    def merge(self, other: ModelInfluence) -> None:
        """Adds the influences of other chunks of the same log."""
        self.influence.merge(other.influence)

    def estimate(self, visits: Any) -> Estimate:
        """The value of certainty equivalence with its influence."""
        ess = effective_transitions(self.model.weights, visits)
        return Estimate(self.model.value, self.influence.groups(), ess, "transitions")


def effective_transitions(weights: np.ndarray, visits: np.ndarray) -> float:
    """(Σ N w)²/Σ N w² over pairs: how many transitions carry a marginalized estimate."""
    square = float((visits * weights**2).sum())
    return float((visits * weights).sum()) ** 2 / square if square > 0 else 0.0
