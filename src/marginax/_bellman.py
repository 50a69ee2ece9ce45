"""The linear equation ``A q = b`` behind an operator, on pairs and on states."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from marginax._checks import FloatArray
from marginax.mdp import TabularMDP


class Bellman(ABC):
    """The linear equation that an operator solves, ``A q = b``; its error ``b - A q`` is the Bellman error."""

    mdp: TabularMDP

    @abstractmethod
    def evaluated_policy(self) -> FloatArray:
        """The policy whose values solve it, ``[S, A]``."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """``(S, A)`` or ``(S,)``."""

    @property
    @abstractmethod
    def measure(self) -> FloatArray:
        """The measure over actions ``[S, A]`` that A and b are made of."""

    @property
    @abstractmethod
    def reward(self) -> FloatArray:
        """b."""

    @abstractmethod
    def times(self, q: FloatArray) -> FloatArray:
        """``A q``, where q may have one more axis at the end."""

    def error(self, q: FloatArray) -> FloatArray:
        """``b - A q``."""
        return self.reward - self.times(q)

    @abstractmethod
    def after(self, credit: FloatArray) -> FloatArray:
        """``D A`` for a dense D ``[n, n]``."""

    @abstractmethod
    def solution(self) -> FloatArray:
        """The q with ``A q = b``."""


@dataclass(frozen=True, eq=False)
class PairBellman(Bellman):
    """``A = I - γ P^π`` on pairs, ``b = r``."""

    mdp: TabularMDP
    pi: FloatArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.mdp.r.shape

    @property
    def measure(self) -> FloatArray:
        return self.pi

    @property
    def reward(self) -> FloatArray:
        return self.mdp.r

    def times(self, q: FloatArray) -> FloatArray:
        values = np.einsum("xa,xa...->x...", self.pi, q)
        return q - self.mdp.discount * self.mdp.expect_next(values)

    def after(self, credit: FloatArray) -> FloatArray:
        p = self.mdp.p if self.mdp.is_sparse else self.mdp.p.reshape(self.mdp.r.size, -1)
        ahead = self.mdp.discount * (credit @ p)
        return credit - (ahead[:, :, None] * self.pi).reshape(credit.shape)

    def evaluated_policy(self) -> FloatArray:
        return self.pi

    def solution(self) -> FloatArray:
        return self.mdp.q_values(self.pi)


@dataclass(frozen=True, eq=False)
class StateBellman(Bellman):
    """``A = diag(ρ̄) - γ P^{ρμ}`` on states with ``ρ̄(x) = Σ_a μ ρ``, and ``b = Σ_a μ ρ r``."""

    mdp: TabularMDP
    mu: FloatArray
    rho: FloatArray

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.mdp.num_states,)

    @cached_property
    def measure(self) -> FloatArray:
        """ρμ ``[S, A]``."""
        return self.mu * self.rho

    @cached_property
    def scale(self) -> FloatArray:
        """ρ̄ ``[S]``."""
        return self.measure.sum(axis=1)

    @cached_property
    def kernel(self) -> Any:
        """P^{ρμ} ``[S, S]``."""
        return self.mdp.state_kernel(self.measure)

    @property
    def reward(self) -> FloatArray:
        return (self.measure * self.mdp.r).sum(axis=1)

    def evaluated_policy(self) -> FloatArray:
        """π_ρ ``[S, A]``."""
        if self.scale.min() <= 0.0:
            place = int(np.argmin(self.scale))
            raise ValueError(
                f"rho leaves no policy to evaluate in state {place}: sum over a of mu[{place}, a] rho[{place}, a] is 0"
            )
        return self.measure / self.scale[:, None]

    def times(self, q: FloatArray) -> FloatArray:
        scale = self.scale if q.ndim == 1 else self.scale[:, None]
        return scale * q - self.mdp.discount * (self.kernel @ q)

    def after(self, credit: FloatArray) -> FloatArray:
        return credit * self.scale - self.mdp.discount * (credit @ self.kernel)

    def solution(self) -> FloatArray:
        return self.mdp.v_values(self.evaluated_policy())
