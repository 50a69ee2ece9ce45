r"""The empirical MDP: transition counts of any data, updated in batches, merged with others, read as probabilities.

Everything that estimates with a model reads this one class: certainty equivalence and the saddle points of this package, the
incremental estimators of tabular learning, and evaluation from logs.

| quantity | estimate | where there are no visits |
|---|---|---|
| p(x'\|x,a) | `successors / visits` | the argument `unseen` decides |
| r(x,a) | `reward_sums / visits` | 0 |
| μ(a\|x) | `action_frequencies()`, or `logged_behaviour()` | see there |
| start distribution | `starts / starts.sum()` | |

A pair is *never seen* when `visits == 0`; `support` is the complement, and nothing else decides. What a pair that was never
seen does is the argument `unseen` of `transitions` and `mdp`:

- `"end"`: it ends the episode. Nothing is assumed about it, and the probability mass that a policy sends there is lost. An
  evaluation of such a policy has to account for that mass, as evaluation from logs does.
- `"average"`: it leads where the actions that were taken in the same state lead on average under μ. TD weights divide traced
  visits by visits of μ. If the mass of μ were lost instead, its visits would be underestimated and the weights too large.

A state that was never left has no actions to average over, and ends the episode in both cases.
"""

import operator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray
from marginax.mdp import TabularMDP
from marginax.trajectories import Trajectory, require_trajectory
from marginax.weights._data import discount_of

__all__ = ["EmpiricalMDP", "estimate_behaviour"]

DENSE_ENTRIES = 10**6
"""Entries of p[S, A, S] up to which `mdp` keeps the transitions dense."""


class EmpiricalMDP(eqx.Module):
    r"""Counts of transitions, and the MDP that they make.

    Two forms with the same methods:

    - `EmpiricalMDP.empty(S, A)` lives on the host: NumPy arrays in double precision and a sparse table of successors, for logs of
      any length and for many states.
    - `EmpiricalMDP.empty(S, A, dense=True)` is a pytree of JAX arrays for `jit`, `vmap` and `scan`, as tabular learning uses it.

    Objects are immutable: `update`, `add`, `merge` and `with_prior` return a new one. The counts of two parts of a log add up to
    those of the whole, so that cross-fitting needs one object per fold, and `first.merge(second)`.

    A terminal step has a visit and no successor: what is missing from a row of `successors / visits` is the chance that the
    episode ends. The successor of a truncated step counts.

    Attributes:
        visits: how often action `a` was taken in `x`, `[S, A]`.
        successors: how often `x'` followed, `[S, A, S]`; on the host a CSR array `(S*A, S)` with row `x*A + a`.
        reward_sums: sum of the rewards, `[S, A]`.
        starts: how many episodes began in `x`, `[S]`.
        behaviour_sums: sum of the logged probabilities μ(a|x), `[S, A]`; zero if none were logged.

    >>> counts = EmpiricalMDP.empty(2, 1).add([0, 0, 1], [0, 0, 0], [0, 1, 0], ended=[False, False, True])
    >>> counts.transitions().toarray()
    array([[0.5, 0.5],
           [0. , 0. ]])
    """

    visits: Float[Array, "S A"] | Float[np.ndarray, "S A"]
    successors: Any
    reward_sums: Float[Array, "S A"] | Float[np.ndarray, "S A"]
    starts: Float[Array, "S"] | Float[np.ndarray, "S"]
    behaviour_sums: Float[Array, "S A"] | Float[np.ndarray, "S A"]

    @classmethod
    def empty(cls, num_states: int, num_actions: int, *, dense: bool = False) -> "EmpiricalMDP":
        """No data yet.

        Args:
            num_states: S.
            num_actions: A.
            dense: JAX arrays with successors `[S, A, S]`; otherwise NumPy arrays with sparse successors.

        >>> EmpiricalMDP.empty(3, 2).support.any()
        np.False_
        """
        s, a = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
        zeros: Any = jnp.zeros if dense else np.zeros
        successors = zeros((s, a, s)) if dense else sp.csr_array((s * a, s))
        return cls(zeros((s, a)), successors, zeros((s, a)), zeros(s), zeros((s, a)))

    @property
    def dense(self) -> bool:
        """Whether this is the JAX form."""
        return not sp.issparse(self.successors)

    @property
    def support(self) -> Any:
        """`[S, A]` bool: the pairs that were seen."""
        return self.visits > 0

    @property
    def has_behaviour(self) -> bool:
        """Whether behaviour probabilities were logged (host form only)."""
        return bool(self.behaviour_sums.any())

    def update(self, trajectories: Trajectory) -> "EmpiricalMDP":
        """The counts with more trajectories, fields `[..., T]`; padding is not read.

        An episode begins with the first step of a sequence and with the step after an end.

        >>> import jax, marginax as mx
        >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
        >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=5, horizon=4)
        >>> EmpiricalMDP.empty(3, 2).update(batch).starts
        array([5., 0., 0.])
        """
        require_trajectory(trajectories)
        if not self.dense:
            trajectories = jax.tree.map(np.asarray, trajectories)
        valid = trajectories.valid.reshape(-1, trajectories.valid.shape[-1])
        goes_on = (valid & ~trajectories.ends.reshape(valid.shape))[:, :-1]
        array = jnp if self.dense else np
        first = array.concatenate([array.ones_like(valid[:, :1]), ~goes_on], axis=1)
        behaviour = trajectories.behaviour
        return self.add(
            trajectories.states.ravel(),
            trajectories.actions.ravel(),
            trajectories.next_states.ravel(),
            (trajectories.discounts == 0).ravel(),
            rewards=trajectories.rewards.ravel(),
            first=first.ravel(),
            behaviour=None if behaviour is None else behaviour.ravel(),
            valid=valid.ravel(),
        )

    def add(
        self,
        states: ArrayLike,
        actions: ArrayLike,
        next_states: ArrayLike,
        ended: ArrayLike,
        *,
        rewards: ArrayLike | None = None,
        first: ArrayLike | None = None,
        behaviour: ArrayLike | None = None,
        valid: ArrayLike | None = None,
    ) -> "EmpiricalMDP":
        """The counts with more transitions, given as flat arrays `[N]`.

        Args:
            states: x.
            actions: a.
            next_states: x', not read where the step ended the episode.
            ended: whether the step ended its episode (terminal, not truncated).
            rewards: zero when omitted.
            first: which steps begin an episode; none when omitted.
            behaviour: the logged μ(a|x) of the action taken; not logged when omitted.
            valid: which transitions count, for padding and for folds; all when omitted.

        Raises:
            ValueError: for arrays of different shapes, and for indices that are no integers; on the host, for an index outside the
                tables, and if only a part of the data has behaviour probabilities. In the dense form, an index outside the tables
                makes the frequencies NaN for all pairs that the call counts.
        """
        indices = {"states": states, "actions": actions, "next_states": next_states}
        others = {"ended": ended, "rewards": rewards, "first": first, "behaviour": behaviour, "valid": valid}
        _check_columns(indices, others)
        add = self._add_dense if self.dense else self._add_on_host
        return add(states, actions, next_states, ended, rewards, first, behaviour, valid)

    def _add_on_host(
        self, x: Any, a: Any, y: Any, ended: Any, rewards: Any, first: Any, behaviour: Any, valid: Any
    ) -> "EmpiricalMDP":
        if np.ndim(x) != 1:
            raise ValueError(f"states must be a flat array [N], got shape {np.shape(x)}")
        x, a, y = (np.asarray(indices, np.int64) for indices in (x, a, y))
        mask = None if valid is None else np.asarray(valid, bool)
        goes_on = ~np.asarray(ended, bool) & (True if mask is None else mask)
        s, k = self.visits.shape
        checks.indices("states", x, s, mask)
        checks.indices("actions", a, k, mask)
        checks.indices("next_states", y, s, goes_on)
        counted = slice(None) if mask is None else mask
        x, a, y, goes_on = x[counted], a[counted], y[counted], goes_on[counted]
        if x.size:
            self._check_logged(behaviour is not None)
        pair = x * k + a

        def added(table: Any, values: Any) -> Any:
            if values is None:
                return table
            return table + np.bincount(pair, np.asarray(values)[counted], minlength=s * k).reshape(s, k)

        entries = (np.ones(np.count_nonzero(goes_on)), (pair[goes_on], y[goes_on]))
        begins = None if first is None else x[np.asarray(first, bool)[counted]]
        return EmpiricalMDP(
            self.visits + np.bincount(pair, minlength=s * k).reshape(s, k),
            self.successors + sp.coo_array(entries, shape=(s * k, s)).tocsr(),
            added(self.reward_sums, rewards),
            self.starts if begins is None else self.starts + np.bincount(begins, minlength=s),
            added(self.behaviour_sums, behaviour),
        )

    def _add_dense(
        self, x: Any, a: Any, y: Any, ended: Any, rewards: Any, first: Any, behaviour: Any, valid: Any
    ) -> "EmpiricalMDP":
        dtype = self.visits.dtype
        x, a, y, ended = jnp.asarray(x), jnp.asarray(a), jnp.asarray(y), jnp.asarray(ended, bool)
        counted = jnp.ones(x.shape, bool) if valid is None else jnp.asarray(valid, bool)
        goes_on = counted & ~ended
        indices = [
            jnp.where(kept, i.astype(jnp.int32), 0) for i, kept in ((x, counted), (a, counted), (y, goes_on))
        ]
        x, a, y = (jnp.clip(i, 0, n - 1) for i, n in zip(indices, self.successors.shape, strict=True))
        # What lies outside of the tables cannot be refused under `jit`: then nothing is known about any pair of this batch.
        outside = jnp.stack([i != place for i, place in zip(indices, (x, a, y), strict=True)]).any()
        known = jnp.where(outside, jnp.nan, jnp.ones((), dtype))

        def added(table: Any, values: Any) -> Array:
            if values is None:
                return table
            return table.at[x, a].add(jnp.where(counted, jnp.asarray(values, dtype), 0))

        begins: Any = self.starts
        if first is not None:
            begins = begins.at[x].add((counted & jnp.asarray(first, bool)).astype(dtype))
        return EmpiricalMDP(
            added(self.visits, jnp.ones(x.shape)),
            self.successors.at[x, a, y].add(goes_on * known),
            added(self.reward_sums, rewards),
            begins,
            added(self.behaviour_sums, behaviour),
        )

    def _check_logged(self, logged: bool) -> None:
        """Raises if behaviour probabilities were logged here and not in more data, or the other way round."""
        if self.visits.any() and self.has_behaviour != logged:
            raise ValueError("behaviour probabilities are present in one part of the data and not in another")

    def merge(self, other: "EmpiricalMDP") -> "EmpiricalMDP":
        """The counts of both together.

        Raises:
            ValueError: for tables of different sizes or forms; on the host, if only one part has behaviour probabilities.

        >>> one = EmpiricalMDP.empty(1, 1).add([0], [0], [0], ended=[False])
        >>> one.merge(one).visits
        array([[2.]])
        """
        if not isinstance(other, EmpiricalMDP):
            raise ValueError(f"other must be an EmpiricalMDP, got {type(other).__name__}")
        if self.visits.shape != other.visits.shape or self.dense != other.dense:
            raise ValueError(
                f"counts of shape {other.visits.shape} cannot be merged with counts of shape {self.visits.shape}, "
                "or one is dense and the other is not"
            )
        if not self.dense and other.visits.any():
            self._check_logged(other.has_behaviour)
        return jax.tree.map(operator.add, self, other)

    def with_prior(self, prior: ArrayLike | float) -> "EmpiricalMDP":
        """The counts with pseudo-counts: one number for every `(x, a, x')`, or a table `[S, A, S]`."""
        s, a = self.visits.shape
        pseudo = checks.array("prior", prior)
        if pseudo.ndim:
            checks.shaped("prior", pseudo.shape, (s, a, s))
        checks.non_negative("prior", pseudo)
        if not pseudo.any():
            return self  # a table [S, A, S] may be larger than the memory
        checks.fits_in_memory("pseudo-counts of all transitions", s * a * s, instead="use prior=0")
        pseudo = np.broadcast_to(pseudo, (s, a, s))
        more: Any = (
            jnp.asarray(pseudo, self.visits.dtype) if self.dense else sp.csr_array(pseudo.reshape(s * a, s))
        )
        visits, successors = self.visits + pseudo.sum(axis=-1), self.successors + more
        return eqx.tree_at(lambda counts: (counts.visits, counts.successors), self, (visits, successors))

    def transitions(self, unseen: str = "end", mu: Any = None) -> Any:
        """p̂(x'|x,a): frequencies of successors.

        Args:
            unseen: what a pair does that was never seen, `"end"` or `"average"`; see the head of this module.
            mu: the behaviour policy `[S, A]`, needed by `"average"`; action frequencies when omitted.

        Returns:
            `[S, A, S]` for the dense form, a CSR array `(S*A, S)` on the host.
        """
        if unseen not in ("end", "average"):
            raise ValueError(f"unseen must be 'end' or 'average', got {unseen!r}")
        if self.dense:
            p = _ratio(self.successors, self.visits[..., None])
        else:
            p = sp.csr_array(sp.diags_array(_ratio(1.0, self.visits).ravel()) @ self.successors)
        if unseen == "end":
            return p
        share = self._shares(self.action_frequencies() if mu is None else mu)
        if self.dense:
            usual = jnp.einsum("xa,xay->xy", share, p, precision="highest")
            return jnp.where(self.support[..., None], p, usual[:, None])
        x, a = np.nonzero(~self.support & (share.sum(axis=1, keepdims=True) > 0))
        k = share.shape[1]
        columns = (x[:, None] * k + np.arange(k)).ravel()
        mixing = sp.csr_array(
            (share[x].ravel(), (np.repeat(x * k + a, k), columns)), shape=(share.size, share.size)
        )
        return sp.csr_array(p + mixing @ p)

    def _shares(self, mu: Any) -> Any:
        """μ among the actions that were taken, `[S, A]`; zero in states that were never left."""
        if not isinstance(mu, jax.core.Tracer):
            mu = checks.array("mu", mu, self.visits.shape)
            checks.non_negative("mu", mu)
        seen: Any = (jnp if self.dense else np).where(self.support, mu, 0)
        return _ratio(seen, seen.sum(axis=1, keepdims=True))

    def rewards(self) -> Any:
        """r̂(x,a) `[S, A]`: mean rewards, zero for pairs that were never seen."""
        return _ratio(self.reward_sums, self.visits)

    def action_frequencies(self) -> Any:
        r"""μ̂(a|x) `[S, A]` $= n(x,a) / n(x)$, uniform in states that were never left."""
        total = self.visits.sum(axis=1, keepdims=True)
        array = jnp if self.dense else np
        return array.where(total > 0, _ratio(self.visits, total), 1.0 / self.visits.shape[1])

    def logged_behaviour(self) -> Any:
        """μ(a|x) `[S, A]`: the mean logged probability of each pair.

        The logged values of a pair may differ where several policies gathered the data. What they leave of 1 in a state is shared
        by the actions that were never taken there; sums above 1 are scaled down to 1.
        """
        array = jnp if self.dense else np
        mean, unseen = _ratio(self.behaviour_sums, self.visits), ~self.support
        rest = array.maximum(1.0 - mean.sum(axis=1, keepdims=True), 0.0)
        number = array.maximum(unseen.sum(axis=1, keepdims=True), 1)
        mean = mean + array.where(unseen, rest / number, 0.0)
        return mean / array.maximum(mean.sum(axis=1, keepdims=True), 1.0)

    def mdp(self, discount: float, *, unseen: str = "end", mu: Any = None) -> TabularMDP:
        """The empirical MDP with exact values, on the host and in double precision: p̂, r̂ and the frequencies of starts.

        Starts are uniform if none were counted.

        Args:
            discount: γ.
            unseen: as for `transitions`.
            mu: as for `transitions`.

        >>> counts = EmpiricalMDP.empty(1, 1).add([0, 0], [0, 0], [0, 0], ended=[False, True], rewards=[1.0, 1.0])
        >>> counts.mdp(0.5).v_values([[1.0]])
        array([1.33333333])
        """
        counts = self._on_host() if self.dense else self
        s, a = counts.visits.shape
        p = counts.transitions(unseen, mu)
        if self.dense or s * a * s <= DENSE_ENTRIES or p.nnz > 0.1 * s * a * s:
            p = p.toarray().reshape(s, a, s)
        initial = counts.starts / counts.starts.sum() if counts.starts.any() else None
        return TabularMDP(p, counts.rewards(), discount, initial)

    def _on_host(self) -> "EmpiricalMDP":
        """The dense form as the other one. In single precision pseudo-counts are rounded, but visits that ended are whole."""
        visits, successors, *others = (np.asarray(field, np.float64) for field in jax.tree.leaves(self))
        went_on = successors.sum(axis=-1)
        table = sp.csr_array(successors.reshape(visits.size, -1))
        return EmpiricalMDP(went_on + np.round(visits - went_on), table, *others)


def estimate_behaviour(
    trajectories: Trajectory, num_states: int, num_actions: int, *, prior: float = 0.0
) -> FloatArray:
    r"""The behaviour policy as action frequencies, $\hat\mu(a|x) = (n(x,a) + k) / \sum_b (n(x,b) + k)$.

    For data whose behaviour probabilities were not logged: traces such as Retrace need them. Uniform in states without data.

    Args:
        trajectories: fields `[..., T]`.
        num_states: S.
        num_actions: A.
        prior: the pseudo-count `k` of every pair. With 0, an action that was never taken has probability 0, and ratios with a
            policy that takes it are refused.

    Returns:
        `mu[S, A]`.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=3, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=1000, horizon=10)
    >>> bool(abs(estimate_behaviour(batch, 3, 2) - mu).max() < 0.05)
    True
    """
    empty = EmpiricalMDP.empty(num_states, num_actions)
    discount_of(trajectories, None, num_states, num_actions)
    counts = empty.update(trajectories)
    k = checks.at_least("prior", prior, 0.0)
    return eqx.tree_at(lambda c: c.visits, counts, counts.visits + k).action_frequencies()


def _check_columns(indices: dict[str, Any], others: dict[str, Any]) -> None:
    """Raises for columns of another shape than that of the states, and for indices that are no integers."""
    shape = np.shape(indices["states"])
    for name, values in (indices | others).items():
        if (name == "ended" or values is not None) and np.shape(values) != shape:
            raise ValueError(f"{name} must have the shape of states, {shape}, got {np.shape(values)}")
    for name, values in indices.items():
        array: Any = values if isinstance(values, jax.Array) else np.asarray(values)
        if array.size and array.dtype.kind not in "biu":
            raise ValueError(f"{name} must be whole numbers, got {array.dtype}")


def _ratio(numerator: Any, denominator: Any) -> Any:
    """Entry by entry; zero where the denominator is."""
    if isinstance(denominator, jax.Array):
        met = denominator > 0
        return jnp.where(met, numerator / jnp.where(met, denominator, 1), 0)
    shape = np.broadcast_shapes(np.shape(numerator), denominator.shape)
    return np.divide(numerator, denominator, out=np.zeros(shape), where=denominator > 0)
