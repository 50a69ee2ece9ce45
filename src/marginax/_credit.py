"""The credit D of an operator, in the forms in which it can be applied without being written out."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._bellman import Bellman
from marginax._checks import FloatArray
from marginax._solve import Resolvent
from marginax.mdp import TabularMDP


class Credit(ABC):
    """A matrix D over pairs (or states)."""

    @abstractmethod
    def times(self, error: FloatArray) -> FloatArray:
        """``D e`` for e of the operator's shape, or with one more axis at the end."""

    @abstractmethod
    def matrix(self) -> FloatArray:
        """D written out, ``[n, n]``."""


@dataclass(frozen=True, eq=False)
class Identity(Credit):
    """``D = I``: the one-step operator."""

    size: int

    def times(self, error: FloatArray) -> FloatArray:
        return error

    def matrix(self) -> FloatArray:
        checks.fits_in_memory(
            f"a matrix of {self.size} by {self.size}", self.size**2, copies=2, instead="apply the operator"
        )
        return np.eye(self.size)


@dataclass(frozen=True, eq=False)
class Dense(Credit):
    """``D`` given as an array: the marginalized operators."""

    values: FloatArray

    def times(self, error: FloatArray) -> FloatArray:
        size = len(self.values)
        return (self.values @ error.reshape(size, -1)).reshape(error.shape)

    def matrix(self) -> FloatArray:
        return self.values.copy()


@dataclass(frozen=True, eq=False)
class Traced(Credit):
    """``D = (I - γ P^m)^{-1}`` on pairs, for a measure ``m = μ c`` over actions: Markovian traces.

    With ``u(x) = Σ_a m(x,a) y(x,a)``, the system ``y = e + γ P^m y`` is ``u = u_e + γ P_states u`` and one product with p.
    """

    mdp: TabularMDP
    measure: FloatArray

    @cached_property
    def paths(self) -> Resolvent:
        """The resolvent on states."""
        return Resolvent(self.mdp.state_kernel(self.measure), self.mdp.discount)

    def times(self, error: FloatArray) -> FloatArray:
        start = np.einsum("xa,xa...->x...", self.measure, error)
        return error + self.mdp.discount * self.mdp.expect_next(self.paths(start))

    def matrix(self) -> FloatArray:
        size = self.measure.size
        return self.mdp.credit(self.measure).reshape(size, size)


@dataclass(frozen=True, eq=False)
class Timed(Credit):
    """``D = Σ_{t=0}^H γ^t P^{m_1} … P^{m_t}`` on pairs, for measures ``m_t = μ c_t``: time-dependent traces."""

    mdp: TabularMDP
    measures: FloatArray

    def times(self, error: FloatArray) -> FloatArray:
        result = error
        for measure in self.measures[::-1]:
            ahead = np.einsum("xa,xa...->x...", measure, result)
            result = error + self.mdp.discount * self.mdp.expect_next(ahead)
        return result

    def matrix(self) -> FloatArray:
        states, actions = self.measures.shape[1:]
        size = states * actions
        checks.fits_in_memory(
            f"a matrix of {size} by {size}", size**2, copies=4, instead="apply the operator"
        )
        return self.times(np.eye(size).reshape(states, actions, size)).reshape(size, size)


@dataclass(frozen=True, eq=False)
class StateTraced(Credit):
    """``D = (I - γ P^m_states)^{-1}`` on states: V-trace."""

    paths: Resolvent

    def times(self, error: FloatArray) -> FloatArray:
        return self.paths(error)

    def matrix(self) -> FloatArray:
        size = self.paths.kernel.shape[0]
        checks.fits_in_memory(
            f"a matrix of {size} by {size}", size**2, copies=3, instead="apply the operator"
        )
        return self.paths.matrix()


@dataclass(frozen=True, eq=False)
class Composed(Credit):
    """``D = D_1 + D_2 - D_1 A D_2``: the second operator applied, then the first."""

    first: Credit
    second: Credit
    bellman: Bellman

    def times(self, error: FloatArray) -> FloatArray:
        inner = self.second.times(error)
        return inner + self.first.times(error - self.bellman.times(inner))

    def matrix(self) -> FloatArray:
        first, second = self.first.matrix(), self.second.matrix()
        return first + second - self.bellman.after(first) @ second


def trace_array(mdp: TabularMDP, c: ArrayLike) -> FloatArray:
    """Checks traces: finite, ``[S, A]`` or ``[H, S, A]``."""
    if np.ndim(c) == 3:
        return checks.array("c", c, (None, *mdp.r.shape))
    return checks.array("c", c, mdp.r.shape)


def converging(mdp: TabularMDP, measure: FloatArray, states: np.ndarray | None = None) -> Traced:
    """The credit of Markovian traces, refused where its sum over time diverges; ``states`` are what errors call those of the MDP."""
    credit = Traced(mdp, measure)
    if not credit.paths.converges:
        expected = np.abs(measure).sum(axis=1)
        largest = int(np.argmax(expected))
        raise ValueError(
            "c is too large: the sum over time of its traces does not converge (condition C.1); the largest expected trace, "
            f"sum over a of mu |c|, is {expected[largest]:.6g} in state {largest if states is None else states[largest]}"
        )
    return credit
