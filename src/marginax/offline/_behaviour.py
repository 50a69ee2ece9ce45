"""The behaviour policy: logged with each action, given as a table, or estimated by counts; and is it right?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from marginax.offline._counts import Counts


@dataclass(frozen=True)
class Calibration:
    """Said probabilities against frequencies, in bins of what was said.

    Attributes:
        said: [B] mean probability in each bin.
        seen: [B] frequency of the actions concerned.
        weight: [B] number of decisions behind each bin.
        deviation: how far, in standard errors, all frequencies together lie from what was said.
        error: mean |said - seen| over decisions.
    """

    said: np.ndarray
    seen: np.ndarray
    weight: np.ndarray
    deviation: float
    error: float

    @property
    def suspicious(self) -> bool:
        """Whether chance hardly explains the difference (six standard errors)."""
        return self.deviation > 6.0


def calibration(counts: Counts, table: np.ndarray | None = None) -> Calibration:
    """Compares logged (or given) behaviour probabilities with how often each action was taken.

    Under the logged policy, Σ_n (1{a_n=a} - μ(a|x)) over the N(x) decisions in x has variance
    N(x) μ(1-μ); the sum of squares in those units over all pairs is compared with its expectation.
    """
    n = counts.visits.sum(axis=0)
    total = n.sum(axis=1, keepdims=True)
    seen_pairs = n > 0
    frequency = np.divide(n, total, out=np.zeros_like(n), where=total > 0)
    if table is None:
        said = np.divide(counts.behaviour_sums, n, out=np.zeros_like(n), where=seen_pairs)
        usable = seen_pairs
    else:
        said, usable = table, np.broadcast_to(total > 0, n.shape)
    spread = said * (1 - said)
    terms = usable & (spread > 1e-9) & (total * np.minimum(said, 1 - said) >= 5)
    squares = (np.broadcast_to(total, n.shape) * (frequency - said) ** 2)[terms] / spread[terms]
    impossible = usable & (said < 1e-12) & seen_pairs
    deviation = float((squares.sum() - len(squares)) / np.sqrt(2 * len(squares))) if len(squares) else 0.0
    edges = np.linspace(0, 1, 11)
    index = np.clip(np.digitize(said[usable], edges) - 1, 0, 9)
    weight = np.broadcast_to(total, n.shape)[usable]

    def binned(x: np.ndarray) -> np.ndarray:
        return np.bincount(index, x * weight, minlength=10) / np.maximum(
            np.bincount(index, weight, minlength=10), 1e-300
        )

    filled = np.bincount(index, weight, minlength=10) > 0
    return Calibration(
        said=binned(said[usable])[filled],
        seen=binned(frequency[usable])[filled],
        weight=np.bincount(index, weight, minlength=10)[filled],
        deviation=np.inf if impossible.any() else deviation,
        error=float((n * np.abs(said - frequency))[usable].sum() / n.sum()),
    )
