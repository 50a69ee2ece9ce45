"""Where a marginalized learner takes its TD weights from: given, or estimated from the trajectories it learns from.

Each is a pytree with two methods: `update` takes in one more trajectory, `weights` reads the current estimate off.
Traces are passed in each time, because in policy iteration they change with the policy.
"""

from typing import Any, Literal, Protocol, runtime_checkable

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import weights
from marginax.trajectories import Trajectory


@runtime_checkable
class Estimator(Protocol):
    """What learning asks of an estimator of TD weights.

    >>> given([[[[1.0]]]]).weights(jnp.ones((1, 1))).shape
    (1, 1, 1, 1)
    """

    def update(self, trajectory: Trajectory, c: Array) -> Any:
        """The estimator after one more trajectory `[T]`, with traces `c[S, A]`."""

    def weights(self, c: Array) -> Array:
        """The estimate `w[S, A, S, A]` of the TD weights of `c`."""


class _Given(eqx.Module):
    w: Float[Array, "S A S A"]

    def update(self, trajectory: Trajectory, c: Array) -> "_Given":
        return self

    def weights(self, c: Array) -> Array:
        return self.w


class _MonteCarlo(eqx.Module):
    estimate: weights.MonteCarlo

    def update(self, trajectory: Trajectory, c: Array) -> "_MonteCarlo":
        return _MonteCarlo(self.estimate.update(trajectory, c))

    def weights(self, c: Array) -> Array:
        w = self.estimate.weights()
        return w / (1 - self.estimate.discount) if self.estimate.literal else w


class _CertaintyEquivalence(eqx.Module):
    estimate: weights.CertaintyEquivalence
    mu: Float[Array, "S A"] | None

    def update(self, trajectory: Trajectory, c: Array) -> "_CertaintyEquivalence":
        return _CertaintyEquivalence(self.estimate.update(trajectory), self.mu)

    def weights(self, c: Array) -> Array:
        return self.estimate.weights(c, self.mu)


def given(w: ArrayLike) -> Estimator:
    """Weights that are known, such as `weights.exact`: the limit of every consistent estimator.

    Args:
        w: `[S, A, S, A]`.

    >>> given([[[[1.0]]]]).weights(jnp.ones((1, 1))).shape
    (1, 1, 1, 1)
    """
    return _Given(jnp.asarray(w, jnp.result_type(float)))


def monte_carlo(
    num_states: int,
    num_actions: int,
    discount: ArrayLike,
    *,
    average: Literal["running", "exponential"] = "running",
    literal: bool = False,
) -> Estimator:
    """Monte Carlo weights (`weights.MonteCarlo`), trajectory by trajectory.

    Args:
        num_states: S.
        num_actions: A.
        discount: γ.
        average: "running", or "exponential" where the traces change as learning goes on.
        literal: Algorithm 2 as printed. Its weights hold a factor 1-γ, which the factor 1/(1-γ) of the paper's
            target takes away again; here it is taken away at once, since our targets have no such factor.

    >>> monte_carlo(2, 1, 0.9).weights(jnp.ones((2, 1))).shape
    (2, 1, 2, 1)
    """
    return _MonteCarlo(
        weights.MonteCarlo.init(num_states, num_actions, discount, average=average, literal=literal)
    )


def certainty_equivalence(
    num_states: int, num_actions: int, discount: ArrayLike, mu: ArrayLike | None = None
) -> Estimator:
    """Weights of the MDP of transition counts (`weights.CertaintyEquivalence`), trajectory by trajectory.

    Args:
        num_states: S.
        num_actions: A.
        discount: γ.
        mu: the behaviour policy `[S, A]`; action frequencies when omitted.

    >>> certainty_equivalence(2, 1, 0.9).weights(jnp.ones((2, 1))).shape
    (2, 1, 2, 1)
    """
    policy = None if mu is None else jnp.asarray(mu, jnp.result_type(float))
    return _CertaintyEquivalence(weights.CertaintyEquivalence.init(num_states, num_actions, discount), policy)
