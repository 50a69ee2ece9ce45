"""TD weights of the empirical MDP: the balance equation solved with transition counts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax._checks import FloatArray
from marginax.trajectories import Trajectory
from marginax.weights._data import divide, fixed_behaviour, fixed_discount, read_steps, table_of
from marginax.weights._model import EstimateInfo, model_of
from marginax.weights.empirical import EmpiricalMDP

__all__ = ["CertaintyEquivalence", "certainty_equivalence"]


class CertaintyEquivalence(eqx.Module):
    r"""Transition counts, updated trajectory by trajectory, and the TD weights of the MDP that they make.

    A pytree for `jit`, `vmap` and `scan`. The counts do not depend on the traces: `weights` may be asked for any `c`, also one
    that changes as the target policy does.

    Attributes:
        counts: the counts, in their dense form.
        discount: γ.
        mu: the behaviour policy `[S, A]`, or None for action frequencies.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> estimator = CertaintyEquivalence.init(3, 2, mdp.discount, mu=mu)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=20)
    >>> estimator = estimator.update(batch)
    >>> estimator.weights(mx.traces.retrace(pi, mu))[0, 0].round(2)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """

    counts: EmpiricalMDP
    discount: Float[Array, ""]
    mu: Float[Array, "S A"] | None

    @classmethod
    def init(
        cls,
        num_states: int,
        num_actions: int,
        discount: ArrayLike | float,
        *,
        mu: ArrayLike | None = None,
        prior: ArrayLike | float = 0.0,
    ) -> "CertaintyEquivalence":
        """The estimator before any data.

        Args:
            num_states: S.
            num_actions: A.
            discount: γ.
            mu: the behaviour policy `[S, A]`; action frequencies when omitted.
            prior: pseudo-counts, one number for every `(x, a, x')` or a table `[S, A, S]`. Without, a pair that was never seen
                does what the others do on average, `unseen="average"` of `EmpiricalMDP`.
        """
        counts = EmpiricalMDP.empty(num_states, num_actions, dense=True).with_prior(prior)
        return cls(counts, fixed_discount(discount), fixed_behaviour(mu, *counts.visits.shape))

    def update(self, trajectories: Trajectory, c: ArrayLike | None = None) -> "CertaintyEquivalence":
        """The estimator after more trajectories, fields `[..., T]`; traces are not read."""
        steps = read_steps(trajectories)
        moves = (
            steps.states.ravel(),
            steps.actions.ravel(),
            steps.next_states.ravel(),
            ~steps.arrives.ravel(),
        )
        # Rewards and starts are left out: weights do not need them, and scatters cost time in a loop.
        return eqx.tree_at(lambda e: e.counts, self, self.counts.add(*moves, valid=steps.valid.ravel()))

    def weights(self, c: ArrayLike) -> Float[Array, "S A S A"]:
        """The weights `w[x, a, x', a']` of traces `c[S, A]`, as `certainty_equivalence` gives them; NaN where it refuses c."""
        p, behaviour, traced = self._model(c)
        same = jnp.eye(behaviour.size, dtype=p.dtype).reshape(behaviour.shape * 2)

        def credit(measure: Array) -> Array:
            flow = self.discount * jnp.matmul(p, self._resolvent(p, measure), precision="highest")
            return same + flow[..., None] * measure

        return divide(credit(traced), credit(behaviour))

    def state_weights(self, c: ArrayLike) -> Float[Array, "S S"]:
        """The weights on states for V-trace, as `certainty_equivalence(..., on_states=True)` gives them."""
        p, behaviour, traced = self._model(c)
        return divide(self._resolvent(p, traced), self._resolvent(p, behaviour))

    def _model(self, c: ArrayLike) -> tuple[Array, Array, Array]:
        """Frequencies p, the behaviour policy, and π̃ = cμ."""
        behaviour = self.counts.action_frequencies() if self.mu is None else self.mu
        p = self.counts.transitions("average", behaviour)
        traced = table_of(c, behaviour.shape, p.dtype) * behaviour
        if self.mu is None:
            traced = traced / jnp.maximum(traced.sum(axis=-1, keepdims=True), 1)
        return p, behaviour, traced

    def _resolvent(self, p: Array, measure: Array) -> Array:
        r"""$(I - γP)^{-1} = \prod_k (I + (γP)^{2^k})$ on states: no subtraction, so zeros stay zero and nothing cancels."""
        power = self.discount * jnp.einsum("xay,xa->xy", p, measure, precision="highest")
        tiny = jnp.finfo(p.dtype).eps * 0.01

        def more(carry: tuple[Array, Array, Array]) -> Array:
            doublings, power, _ = carry
            return (power.sum(axis=-1).max() > tiny) & (doublings < 32)

        def double(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            doublings, power, total = carry
            power = jnp.matmul(power, power, precision="highest")
            return doublings + 1, power, total + jnp.matmul(total, power, precision="highest")

        first = (jnp.asarray(0), power, jnp.eye(power.shape[0], dtype=power.dtype) + power)
        _, power, total = jax.lax.while_loop(more, double, first)
        return jnp.where(power.sum(axis=-1).max() <= tiny, total, jnp.nan)


def certainty_equivalence(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    start: tuple[int, int] | int | None = None,
    on_states: bool = False,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights of the empirical MDP, $\hat w = (I - γ\hat P^{cμ})^{-1} / (I - γ\hat P^μ)^{-1}$ entry by entry.

    The numerator solves the balance equation of $d^{w^c}$ with transition frequencies in place of $p$; the closed form of the
    tabular saddle point (Section 5). Solved in float64, on the states that the data hold, sparse where they are. Every
    transition serves every start, which is why this needs far less data than `monte_carlo`. The successor of a truncated step
    counts like any other. `CertaintyEquivalence` is the incremental form.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        start: a pair `(x, a)`, or a state if `on_states`: only its row, without forming the others.
        on_states: whether to return weights between states, for V-trace: kernels $\sum_a m(a|x) \hat p(x'|x,a)$.
        mu: the behaviour policy `[S, A]`; when omitted, the probabilities that the trajectories carry; when they carry none,
            action frequencies. In that last case rows of $cμ$ that exceed one are scaled back to one.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, one number for every `(x, a, x')` or a table `[S, A, S]`. Without, a pair that was never seen does
            what the others do on average, `unseen="average"` of `EmpiricalMDP`; a state without data ends the episode, and
            has the weights of the one-step operator.
        return_info: whether to return an `EstimateInfo` too, which says where μ came from.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`, on states `[S, S]`; `[S, A]` or `[S]` for one start. With `return_info`, that
        and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> w, info = certainty_equivalence(batch, mx.traces.retrace(pi, mu), start=(0, 0), return_info=True)
    >>> w.round(2), info.behaviour
    (array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]]), 'logged')
    """
    model = model_of(trajectories, c, mu, discount, prior, start, on_states)
    traced, visits = model.credit(model.traced), model.credit(model.behaviour)
    weights = model.spread(np.divide(traced, visits, out=np.zeros_like(visits), where=visits > 0))
    return (weights, model.info) if return_info else weights
