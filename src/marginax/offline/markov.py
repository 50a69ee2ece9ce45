"""Are the states Markov? Whether the past predicts what follows a pair, given the pair.

Where the states hold all that matters, the errors δ_t = r_t + γV(x_{t+1}) - Q(x_t,a_t) of the model have mean zero given the pair
(x_t,a_t) and anything before it. Certainty equivalence makes their mean zero for each pair. The test asks whether they still are
once visits of a pair are told apart by the pair before and by the sign of the error there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import chi2, norm

from marginax.offline.certainty_equivalence import Model
from marginax.offline.features import Features, Pairs
from marginax.offline.log import Accumulator, Log, divided

FAILS = 3.5  # standard deviations above what chance gives
LEAST = 10  # visits of a cell
MOST = 1_000_000  # transitions that are enough for the test


@dataclass(frozen=True)
class MarkovTest:
    """The sum of squares that the past explains: how far beyond chance it is, in standard deviations of a normal variable.

    Attributes:
        score: standard deviations.
        degrees: degrees of freedom; 0 where the log has too little to compare.
        fails: whether the states leave out something that matters.
    """

    score: float
    degrees: int

    @property
    def fails(self) -> bool:
        """Whether chance hardly explains it."""
        return self.degrees > 0 and self.score > FAILS


class MarkovSums(Accumulator):
    """δ by pair and past, chunk by chunk: a χ² test of equal means within each pair.

    Args:
        model: gives δ.
        steps: of the whole log; of one that is longer than `MOST`, every second, third, … episode is taken.
    """

    added = ("cells", "delta")

    def __init__(self, model: Model, steps: int) -> None:
        self.model, self.every = model, -(-steps // MOST)
        self.cells = [np.empty(0, np.int64)]  # the past times the number of pairs, plus the pair
        self.delta = [np.empty(0)]

    def update(self, log: Log, first: int = 0) -> None:
        """Adds a chunk."""
        if self.every > 1:
            taken = np.flatnonzero(log.numbers(first) % self.every == 0)
            if not len(taken):
                return
            log = log.select(taken)
        delta = self.model.errors(log)
        pairs = log.pairs(self.model.weights.shape[1])
        here = np.flatnonzero(log.times > 0)
        past = 2 * pairs[here - 1] + (delta[here - 1] > 0)
        self.cells.append(past * self.model.weights.size + pairs[here])
        self.delta.append(delta[here])

    def result(self) -> MarkovTest:
        """The test on all chunks."""
        m, delta = self.model.weights.size, np.concatenate(self.delta)
        if not len(delta):
            return MarkovTest(0.0, 0)
        cells = np.concatenate(self.cells)
        square = np.bincount(cells % m, delta**2, minlength=m)
        order = np.argsort(cells)  # three times as fast as `np.unique` with its inverse
        cells = cells[order]
        first = np.flatnonzero(np.diff(cells, prepend=-1))
        n, pair = np.diff(first, append=len(cells)), cells[first] % m
        total = np.add.reduceat(delta[order], first)
        visits = np.bincount(pair, n, minlength=m)
        spread = divided(square, visits)
        typical = float(square.sum() / max(visits.sum(), 1.0))
        kept = (n >= LEAST) & (spread[pair] > 1e-9 * max(typical, 1e-300))
        n, pair, total = n[kept], pair[kept], total[kept]
        if not len(n):
            return MarkovTest(0.0, 0)
        size = np.bincount(pair, n, minlength=m)
        sums = np.bincount(pair, total, minlength=m)
        number = np.bincount(pair, minlength=m)
        between = np.bincount(pair, total**2 / n, minlength=m)
        between -= divided(sums**2, size)
        used = number > 1
        degrees = int((number[used] - 1).sum())
        if not degrees:
            return MarkovTest(0.0, 0)
        return _scored(float((between[used] / spread[used]).sum()), degrees)


def markov_of_observations(pairs: Pairs, delta: np.ndarray, seed: int) -> MarkovTest:
    """The same for observations: whether what came before predicts δ, beyond random features of the present pair.

    Regressors are the previous observation, action, reward and error, less what features of the present predict of them. Under
    chance their products with δ, summed by episode, have mean zero.
    """
    log = pairs.log
    here = np.flatnonzero(log.times > 0)
    if len(here) < 100 or log.num_episodes < 30:
        return MarkovTest(0.0, 0)
    before = here - 1
    past = np.concatenate(
        [pairs.observations[before], pairs.actions[before], log.rewards[before, None], delta[before, None]],
        axis=1,
    ).astype(np.float64)
    features = Features(pairs.observations.shape[1], pairs.actions.shape[1], pairs.discrete, seed, 100)
    gram = np.zeros((features.size, features.size))
    cross = np.zeros((features.size, past.shape[1] + 1))
    blocks = np.array_split(np.arange(len(here)), max(1, len(here) // 20_000))
    outcome = np.concatenate([past, delta[here, None]], axis=1)
    for block in blocks:
        phi = features.of_pairs(pairs.observations[here[block]], pairs.actions[here[block]])
        gram += phi.T @ phi
        cross += phi.T @ outcome[block]
    gram += 1e-8 * np.trace(gram) / len(gram) * np.eye(len(gram))
    fit = np.linalg.solve(gram, cross)
    for block in blocks:
        phi = features.of_pairs(pairs.observations[here[block]], pairs.actions[here[block]])
        outcome[block] -= phi @ fit
    rest = outcome[:, :-1]
    scale = rest.std(axis=0)
    moving = scale > 1e-6 * np.maximum(np.abs(past).max(axis=0), 1e-12)
    products = rest[:, moving] / scale[moving] * outcome[:, -1:]
    episode = log.episode[here]
    by_episode: Any = np.stack(
        [np.bincount(episode, column, minlength=log.num_episodes) for column in products.T], axis=1
    )
    covariance = by_episode.T @ by_episode
    values, vectors = np.linalg.eigh(covariance)
    good = values > 1e-8 * values.max(initial=0.0)
    degrees = int(good.sum())
    if not degrees:
        return MarkovTest(0.0, 0)
    total = vectors[:, good].T @ by_episode.sum(axis=0)
    return _scored(float((total**2 / values[good]).sum()), degrees)


def _scored(statistic: float, degrees: int) -> MarkovTest:
    """A χ² statistic as standard deviations of a normal variable that is as rarely exceeded."""
    return MarkovTest(float(-norm.ppf(max(chi2.sf(statistic, degrees), 1e-300))), degrees)
