"""Certainty equivalence: solve the Bellman and balance equations with the log's own counts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from marginax._solve import Resolvent
from marginax.offline._counts import Counts
from marginax.offline._estimates import Estimate, Influence
from marginax.offline._log import Log

DENSE_LIMIT = 300  # states up to which a dense solve is the faster one


@dataclass(frozen=True)
class Model:
    """Values and occupancies of π in the empirical MDP of a log.

    With p̂, r̂ the frequencies of the log, S⁺ the pairs it holds, and mass that leaves S⁺ set apart:

        V(x)  = Σ_{a: (x,a) ∈ S⁺} π(a|x) (r̂(x,a) + γ Σ_x' p̂(x'|x,a) V(x')) + leave(x) · fill
        d(x') = starts(x') + γ Σ_{x,a} d(x) π(a|x) p̂(x'|x,a)

    so the value is Σ starts · V = Σ d(x) π(a|x) r̂(x,a) + unsupported · fill, and d(x)π(a|x) over the log's
    visits per episode is the ratio that marginalized importance sampling needs (balance equation of
    Section 5 with c = π/μ and the start distribution in place of a start pair).

    Attributes:
        q: [S, A] action values; `fill` on pairs the log never took.
        v: [S] values of π.
        occupancy: [S, A] discounted visits of π per episode, within the support (not multiplied by 1-γ).
        weights: [S, A] occupancy over the log's (undiscounted) visits per episode; zero off support.
        unsupported: discounted probability E[γ^τ] that π at time τ first takes a pair the log never took.
        fill: value given to what was never seen: the mean value over the states of the log.
        fill_range: the least and largest action value on the support.
        value: Σ starts · v.
    """

    q: np.ndarray
    v: np.ndarray
    occupancy: np.ndarray
    weights: np.ndarray
    unsupported: float
    fill: float
    fill_range: tuple[float, float]
    value: float
    support: np.ndarray
    left: np.ndarray


def certainty_equivalence(
    counts: Counts, pi: np.ndarray, discount: float, *, fold: int | None = None
) -> Model:
    """Values, occupancies and ratios of π by certainty equivalence.

    Args:
        counts: the log's counts.
        pi: [S, A] target policy.
        discount: γ in [0, 1).
        fold: use the counts of this fold only (starts are always those of the whole log).

    >>> from marginax.offline._counts import count
    >>> log = Log.from_episodes([dict(states=[0, 0], actions=[1], rewards=[1.], terminal=False)])
    >>> round(certainty_equivalence(count([log], 1, 2), np.array([[0., 1.]]), 0.5).value, 6)
    2.0
    """
    s, a = counts.num_states, counts.num_actions
    n = counts.visits.sum(axis=0) if fold is None else counts.visits[fold]
    total = counts.reward_sums.sum(axis=0) if fold is None else counts.reward_sums[fold]
    support = n > 0
    safe = np.where(support, n, 1.0)
    rewards = total / safe
    supported = np.where(support, pi, 0.0)
    leave = np.clip(1.0 - supported.sum(axis=1), 0.0, 1.0)
    leave[leave < 1e-12] = 0.0
    p = sp.diags_array(1.0 / safe.ravel()) @ counts.transitions(fold)  # [S*A, S]
    average = sp.csr_array(
        (supported.ravel(), np.arange(s * a), np.arange(0, s * a + 1, a)), shape=(s, s * a)
    )
    kernel = average @ p
    resolvent = Resolvent(kernel.toarray() if s <= DENSE_LIMIT else kernel, discount)
    v0, out = resolvent(np.stack([(supported * rewards).sum(axis=1), leave], axis=1)).T
    starts = counts.starts.sum(axis=0)
    starts = starts / starts.sum()
    d = resolvent.transposed(starts)

    states = n.sum(axis=1)
    stays = float(states @ (1.0 - out))
    fill = float(states @ v0) / stays if stays > 1e-9 * states.sum() else 0.0
    v = v0 + out * fill
    q = np.where(support, rewards + discount * (p @ v).reshape(s, a), fill)
    occupancy = d[:, None] * supported
    inside = q[support]
    return Model(
        q=q,
        v=v,
        occupancy=occupancy,
        weights=np.where(support, occupancy / safe * counts.episodes, 0.0),
        unsupported=float(starts @ out),
        fill=fill,
        fill_range=(float(inside.min()), float(inside.max())),
        value=float(starts @ v),
        support=support,
        left=d[:, None] * np.where(support, 0.0, pi),
    )


class Marginalized:
    """Influence of Σ starts · V when V solves the Bellman equation of the log's counts.

    ψ_i = V(x_0) - value + Σ_t w(x_t,a_t) (r_t + γ V(x_{t+1}) - Q(x_t,a_t)), with w of `Model.weights`:
    the delta method on the counts, exact to first order, with whole episodes as the independent units.
    """

    def __init__(self, model: Model, episodes: int, discount: float) -> None:
        self.model, self.discount, self.influence = model, discount, Influence(episodes)

    def update(self, log: Log) -> None:
        """Adds a chunk."""
        q, v, w = self.model.q, self.model.v, self.model.weights
        following = np.where(log.terminal, 0.0, v[np.where(log.terminal, 0, log.next_states)])
        delta = log.rewards + self.discount * following - q[log.states, log.actions]
        start = v[log.states[log.offsets[:-1]]]
        self.influence.add(start - self.model.value + log.sums(w[log.states, log.actions] * delta))

    def estimate(self, ess: float) -> Estimate:
        """The value of certainty equivalence with its influence."""
        return Estimate(self.model.value, self.influence.groups(), ess, "transitions")


def effective_transitions(weights: np.ndarray, visits: np.ndarray) -> float:
    """(Σ N w)²/Σ N w² over pairs: how many transitions carry a marginalized estimate."""
    square = float((visits * weights**2).sum())
    return float((visits * weights).sum()) ** 2 / square if square > 0 else 0.0
