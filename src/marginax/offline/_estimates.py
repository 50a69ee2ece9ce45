"""What every estimator hands to its interval: a value, and how much each episode moves it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MAX_GROUPS = 1000  # the bootstrap resamples episodes, or so many groups of them


@dataclass(frozen=True)
class Estimate:
    """An estimate of the value with what its interval needs.

    Attributes:
        value: the estimate.
        influence: [G] to first order the error is the mean of these (independent) entries.
        ess: effective sample size, where weights make one meaningful.
        of: what `ess` counts, `episodes` or `transitions`.
        open: what resampling cannot show, to be added on both sides. Where one episode carries most of a
            self-normalised average, that average hardly varies, and says nothing of what others would give;
            where weights average far less than 1, the episodes that matter were not drawn.
    """

    value: float
    influence: np.ndarray
    ess: float | None = None
    of: str = "episodes"
    open: float = 0.0


class Influence:
    """Sums the influences of episodes, handed over chunk by chunk, into groups.

    >>> influence = Influence(episodes=4)
    >>> influence.add(np.array([1.0, -1.0])), influence.add(np.array([2.0, -2.0]))
    (None, None)
    >>> influence.groups()
    array([ 1., -1.,  2., -2.])
    """

    def __init__(self, episodes: int) -> None:
        self.episodes, self.seen = episodes, 0
        self.total = np.zeros(min(episodes, MAX_GROUPS))

    def add(self, psi: np.ndarray) -> None:
        """Adds the influences [E] of the next episodes."""
        group = (self.seen + np.arange(len(psi))) % len(self.total)
        self.total += np.bincount(group, psi, minlength=len(self.total))
        self.seen += len(psi)

    def groups(self) -> np.ndarray:
        """[G] so scaled that their mean is the mean over episodes."""
        return self.total * (len(self.total) / self.episodes)
