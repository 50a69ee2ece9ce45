"""TD weights of the empirical MDP: the balance equation solved with transition counts."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.trajectories import Trajectory
from marginax.weights._data import read_steps
from marginax.weights._model import EstimateInfo, empirical_model, prior_counts

__all__ = ["CertaintyEquivalence", "certainty_equivalence", "certainty_equivalence_states"]


class CertaintyEquivalence(eqx.Module):
    r"""Transition counts, updated trajectory by trajectory, and the TD weights of the MDP that they make.

    A pytree for `jit`, `vmap` and `scan`. The counts do not depend on the traces: `weights` may be asked for any `c`, also one
    that changes as the target policy does.

    Attributes:
        counts: how often `x'` followed `(x, a)`, `[S, A, S]`.
        ended: how often the episode ended at `(x, a)`, `[S, A]`.
        discount: γ.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> estimator = CertaintyEquivalence.init(3, 2, mdp.discount)
    >>> for key in jax.random.split(jax.random.key(0), 50):
    ...     estimator = estimator.update(mx.trajectories.sample(mdp, mu, key, episodes=1, horizon=20))
    >>> estimator.weights(mx.traces.retrace(pi, mu), mu)[0, 0].round(2)
    Array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]], dtype=float32)
    """

    counts: Float[Array, "S A S"]
    ended: Float[Array, "S A"]
    discount: Float[Array, ""]

    @classmethod
    def init(
        cls, num_states: int, num_actions: int, discount: ArrayLike | float, *, prior: ArrayLike | float = 0.0
    ) -> "CertaintyEquivalence":
        """The estimator before any data.

        Args:
            num_states: S.
            num_actions: A.
            discount: γ.
            prior: pseudo-counts, one number for every `(x, a, x')` or a table `[S, A, S]`. Without, an action that was never taken
                in a state is thought to lead where those that were lead on average, and a state without data to end the
                episode (the one-step operator's weights).

        >>> CertaintyEquivalence.init(2, 1, 0.9, prior=1.0).counts.sum().item()
        4.0
        """
        states, actions = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
        return cls(
            counts=jnp.asarray(prior_counts(prior, states, actions), jnp.result_type(float)),
            ended=jnp.zeros((states, actions)),
            discount=jnp.asarray(discount, jnp.result_type(float)),
        )

    def update(self, trajectories: Trajectory) -> "CertaintyEquivalence":
        """The estimator after more trajectories, fields `[..., T]`. The successor of a truncated step counts.

        >>> import jax, marginax as mx
        >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
        >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=5, horizon=4)
        >>> after = CertaintyEquivalence.init(3, 2, mdp.discount).update(batch)
        >>> bool(after.counts.sum() + after.ended.sum() == batch.valid.sum())
        True
        """
        steps = read_steps(trajectories)
        goes_on = (steps.valid & ~steps.ended).astype(self.counts.dtype)
        ends = steps.ended.astype(self.ended.dtype)
        return CertaintyEquivalence(
            self.counts.at[steps.states, steps.actions, steps.next_states].add(goes_on),
            self.ended.at[steps.states, steps.actions].add(ends),
            self.discount,
        )

    def weights(self, c: ArrayLike, mu: ArrayLike | None = None) -> Float[Array, "S A S A"]:
        """The weights of the empirical MDP, as `certainty_equivalence`.

        Args:
            c: traces `[S, A]`.
            mu: the behaviour policy `[S, A]`; action frequencies when omitted.

        Returns:
            `w[x, a, x', a']`.

        >>> CertaintyEquivalence.init(2, 1, 0.9).weights(jnp.ones((2, 1))).reshape(2, 2)
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
        """
        p, behaviour, traced = self._model(c, mu)
        size = behaviour.size
        same = jnp.eye(size, dtype=p.dtype).reshape(behaviour.shape * 2)

        def credit(measure: Array) -> Array:
            flow = self.discount * jnp.matmul(p, self._resolvent(p, measure), precision="highest")
            return same + flow[..., None] * measure

        return _divide(credit(traced), credit(behaviour))

    def state_weights(self, c: ArrayLike, mu: ArrayLike | None = None) -> Float[Array, "S S"]:
        """The weights on states for V-trace, as `certainty_equivalence_states`; arguments as `weights`.

        >>> CertaintyEquivalence.init(2, 1, 0.9).state_weights(jnp.ones((2, 1)))
        Array([[1., 0.],
               [0., 1.]], dtype=float32)
        """
        p, behaviour, traced = self._model(c, mu)
        return _divide(self._resolvent(p, traced), self._resolvent(p, behaviour))

    def _model(self, c: ArrayLike, mu: ArrayLike | None) -> tuple[Array, Array, Array]:
        """Frequencies p, the behaviour policy, and π̃ = cμ."""
        visits = self.counts.sum(axis=-1) + self.ended
        p = self.counts / jnp.maximum(visits, jnp.finfo(visits.dtype).tiny)[..., None]
        frequencies = _divide(visits, visits.sum(axis=-1, keepdims=True))
        behaviour = frequencies if mu is None else jnp.asarray(mu, p.dtype)
        seen = jnp.where(visits > 0, behaviour, 0)
        usual = jnp.einsum(
            "xa,xay->xy", _divide(seen, seen.sum(axis=-1, keepdims=True)), p, precision="highest"
        )
        p = jnp.where((visits > 0)[..., None], p, usual[:, None])
        traced = jnp.asarray(c, p.dtype) * behaviour
        if mu is None:
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
        return jax.lax.while_loop(more, double, first)[2]


def certainty_equivalence(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    start: tuple[int, int] | None = None,
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
        mu: the behaviour policy `[S, A]`; when omitted, the probabilities that the trajectories carry; when they carry none,
            action frequencies. In that last case rows of $cμ$ that exceed one are scaled back to one.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts, one number for every `(x, a, x')` or a table `[S, A, S]`. Without, an action that was never taken
                in a state is thought to lead where those that were lead on average, and a state without data to end the
                episode (the one-step operator's weights).
        start: a pair `(x, a)`: only its row, without forming the others.
        return_info: whether to return an `EstimateInfo` too, which says where μ came from.

    Returns:
        `w[x, a, x', a']` of shape `[S, A, S, A]`, or `[S, A]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> w, info = certainty_equivalence(batch, mx.traces.retrace(pi, mu), start=(0, 0), return_info=True)
    >>> w.round(2), info.behaviour
    (array([[1. , 0. ],
           [1. , 0. ],
           [0.5, 0. ]]), 'logged')
    """
    return _run(trajectories, c, mu, discount, prior, start, False, return_info)


def certainty_equivalence_states(
    trajectories: Trajectory,
    c: ArrayLike,
    *,
    mu: ArrayLike | None = None,
    discount: float | None = None,
    prior: ArrayLike | float = 0.0,
    start: int | None = None,
    return_info: bool = False,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    r"""TD weights on states for V-trace: as `certainty_equivalence`, with kernels $\hat P(x,x') = \sum_a m(a|x) \hat p(x'|x,a)$.

    Args:
        trajectories: fields `[..., T]`.
        c: traces `[S, A]`.
        mu: the behaviour policy; logged or from counts when omitted.
        discount: γ; read from the trajectories when omitted.
        prior: pseudo-counts.
        start: a state: only its row.
        return_info: whether to return an `EstimateInfo` too.

    Returns:
        `w[x, x']` of shape `[S, S]`, or `[S]` for one start; with `return_info`, that and the info.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=50, horizon=50)
    >>> certainty_equivalence_states(batch, mx.traces.retrace(pi, mu), start=0).round(2)
    array([1.  , 0.5 , 0.25])
    """
    return _run(trajectories, c, mu, discount, prior, start, True, return_info)


def _run(
    trajectories: Trajectory,
    c: ArrayLike,
    mu: ArrayLike | None,
    discount: float | None,
    prior: ArrayLike | float,
    start: tuple[int, int] | int | None,
    on_states: bool,
    return_info: bool,
) -> FloatArray | tuple[FloatArray, EstimateInfo]:
    model = empirical_model(trajectories, c, mu, discount, prior, start, on_states)
    traced, visits = model.credit(model.traced), model.credit(model.behaviour)
    weights = model.spread(np.divide(traced, visits, out=np.zeros_like(visits), where=visits > 0))
    return (weights, model.info) if return_info else weights


def _divide(numerator: Array, denominator: Array) -> Array:
    met = denominator > 0
    return jnp.where(met, numerator / jnp.where(met, denominator, 1), 0)
