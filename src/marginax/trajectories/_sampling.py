"""The sampler: thousands of episodes of a tabular MDP side by side, in one jitted program."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from jaxtyping import Array, Float, Int
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax.mdp import TabularMDP

from ._trajectory import Trajectory, look_up


class SamplingTables(eqx.Module):
    r"""The tables from which a `TabularMDP` is sampled; a pytree that `sample` takes in place of the MDP.

    Successors are kept as lists, one per pair, with cumulated probabilities: memory is that of the non-zero
    entries of `p`, and a draw is a binary search. Probabilities are resolved to $2^{-23}$ in single
    precision.

    Attributes:
        first: where the list of pair `x*A + a` begins, `[S*A + 1]`.
        successors: the lists, one after another.
        cumulative: the probability of each successor and those before it in its list. A list that adds
            up to less than 1 ends the episode with the rest.
        rewards: mean rewards, `[S*A]`.
        reward_std: standard deviations `[S*A]`, or None where all are zero.
        starts: the states in which an episode may begin.
        start_cumulative: their cumulated probabilities, or None where all are equally likely.
        discount: γ.
        num_states: S.
        num_actions: A.
        searches: halvings that the longest list needs.

    >>> import marginax as mx
    >>> sampling_tables(mx.problems.chain(n=4, actions=2).mdp).num_states
    4
    """

    first: Int[Array, "pairs_and_one"]
    successors: Int[Array, "entries"]
    cumulative: Float[Array, "entries"]
    rewards: Float[Array, "pairs"]
    reward_std: Float[Array, "pairs"] | None
    starts: Int[Array, "starts"]
    start_cumulative: Float[Array, "starts"] | None
    discount: Float[Array, ""]
    num_states: int = eqx.field(static=True)
    num_actions: int = eqx.field(static=True)
    searches: int = eqx.field(static=True)


def sampling_tables(mdp: TabularMDP) -> SamplingTables:
    """Builds the sampling tables of an MDP, once for many calls of `sample`.

    Args:
        mdp: dense or sparse.

    Returns:
        What `sample` takes in place of the MDP.

    >>> import marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> tables = sampling_tables(mdp)
    >>> sample(tables, mu, jax.random.key(0), episodes=2, horizon=3).states.shape
    (2, 3)
    """
    if not isinstance(mdp, TabularMDP):
        raise ValueError(f"mdp must be a TabularMDP or its sampling_tables, got {type(mdp).__name__}")
    pairs = mdp.num_states * mdp.num_actions
    p = sp.csr_array(mdp.p if mdp.is_sparse else mdp.p.reshape(pairs, mdp.num_states), copy=True)
    p.eliminate_zeros()
    lengths = np.diff(p.indptr)
    filled = np.flatnonzero(lengths)
    total = np.concatenate([[0.0], np.cumsum(p.data)])
    cumulative = total[1:] - np.repeat(total[p.indptr[:-1]], lengths)
    # The end of a list is set from the row itself, free of what rounding the long sum has left.
    ends = p.indptr[filled + 1] - 1
    cumulative[ends] = 1.0 - mdp.termination.reshape(-1)[filled]
    starts = np.flatnonzero(mdp.initial)
    chances = mdp.initial[starts]
    even = np.ptp(chances) <= 1e-9 * chances[0]
    return SamplingTables(
        first=jnp.asarray(p.indptr, jnp.int32),
        successors=jnp.asarray(np.append(p.indices, 0), jnp.int32),
        cumulative=jnp.asarray(np.append(cumulative, 2.0)),
        rewards=jnp.asarray(mdp.r.reshape(-1)),
        reward_std=jnp.asarray(mdp.reward_std.reshape(-1)) if mdp.reward_std.any() else None,
        starts=jnp.asarray(starts, jnp.int32),
        start_cumulative=None if even else jnp.asarray(_closed(np.cumsum(chances))),
        discount=jnp.asarray(mdp.discount),
        num_states=mdp.num_states,
        num_actions=mdp.num_actions,
        searches=int(lengths.max(initial=1)).bit_length(),
    )


def _closed(cumulative: np.ndarray) -> np.ndarray:
    cumulative[-1] = 2.0
    return cumulative


def sample(
    mdp: TabularMDP | SamplingTables,
    policy: ArrayLike,
    key: Array,
    *,
    episodes: int,
    horizon: int,
    start_states: ArrayLike | None = None,
    start_actions: ArrayLike | None = None,
    reset: bool = False,
) -> Trajectory:
    r"""Draws episodes $x_0, a_0, r_0, x_1, \dots$ with $a_t \sim \mu(\cdot|x_t)$ and $x_{t+1} \sim p$.

    An episode ends with probability $1 - \sum_{x'} p(x'|x_t,a_t)$ at each step (discount 0 there); one that
    is still alive at the horizon is truncated there. Rewards have Gaussian noise of standard deviation
    `mdp.reward_std`. May be called under `jit` and `vmap` with a traced `policy`, `key` and starts.

    Args:
        mdp: the MDP, or its `sampling_tables` where many calls use the same one.
        policy: the behaviour policy `μ[S, A]`.
        key: a JAX random key.
        episodes: how many, side by side.
        horizon: the length `T` of every sequence.
        start_states: first states, one or `[episodes]`; drawn from `mdp.initial` when omitted.
        start_actions: first actions, one or `[episodes]`; drawn from the policy when omitted.
        reset: whether to begin another episode (from `mdp.initial`) in the same sequence where one ends;
            otherwise the rest of the sequence is padding.

    Returns:
        A `Trajectory` with fields `[episodes, horizon]`.

    Raises:
        ValueError: if the policy is none, or a start or a size is out of range. A traced start cannot be refused; its reward and
            behaviour are NaN.

    >>> import marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=4, actions=2)
    >>> trajectory = sample(mdp, mu, jax.random.key(0), episodes=1000, horizon=20, start_states=2)
    >>> trajectory.states.shape, set(trajectory.states[:, 0].tolist())
    ((1000, 20), {2})
    """
    tables = mdp if isinstance(mdp, SamplingTables) else sampling_tables(mdp)
    episodes, horizon = checks.count("episodes", episodes), checks.count("horizon", horizon)
    mu = _policy(policy, tables)
    states = _starts("start_states", start_states, episodes, tables.num_states)
    actions = _starts("start_actions", start_actions, episodes, tables.num_actions)
    return _simulate(tables, mu, key, states, actions, episodes=episodes, horizon=horizon, reset=reset)


def _policy(policy: ArrayLike, tables: SamplingTables) -> Array:
    shape = (tables.num_states, tables.num_actions)
    if isinstance(policy, jax.core.Tracer):
        if policy.shape != shape:
            raise ValueError(f"policy must have shape {shape}, got {policy.shape}")
        return policy.astype(tables.cumulative.dtype)
    values = checks.array("policy", policy, shape)
    checks.non_negative("policy", values)
    off = np.abs(values.sum(axis=1) - 1)
    if off.max() > 1e-5:  # policies that JAX made in single precision are welcome
        state = int(off.argmax())
        raise ValueError(
            f"policy must sum to 1 in every state, but policy[{state}] sums to {values[state].sum()}"
        )
    return jnp.asarray(values, tables.cumulative.dtype)


def _starts(name: str, value: ArrayLike | None, episodes: int, size: int) -> Array | None:
    if value is None:
        return None
    if not isinstance(value, jax.core.Tracer):
        given = np.asarray(value)
        if not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"{name} must be integers, got {given.dtype}")
        bad = (given < 0) | (given >= size)
        if bad.any():
            place = tuple(np.argwhere(bad)[0])
            raise ValueError(
                f"{name} must lie in [0, {size}), but {name}{checks.where(place)} = {given[place]}"
            )
    array = jnp.asarray(value, jnp.int32)
    if array.shape not in [(), (episodes,)]:
        raise ValueError(f"{name} must be one number or have shape ({episodes},), got {array.shape}")
    return jnp.broadcast_to(array, (episodes,))


def _draw_starts(tables: SamplingTables, key: Array, shape: tuple[int, ...]) -> Array:
    count = tables.starts.shape[0]
    if count == 1:
        return jnp.broadcast_to(tables.starts, shape)
    if tables.start_cumulative is None:
        return tables.starts[jax.random.bits(key, shape, jnp.uint32) % jnp.uint32(count)]
    u = jax.random.uniform(key, shape, tables.start_cumulative.dtype)
    return tables.starts[jnp.searchsorted(tables.start_cumulative, u, side="right")]


def _draw_successor(tables: SamplingTables, pair: Array, u: Array) -> tuple[Array, Array]:
    """The successor at which the cumulated probability first exceeds `u`, and whether there is none."""
    low, end = tables.first[pair], tables.first[pair + 1]
    high = end
    for _ in range(tables.searches):
        middle = (low + high) // 2
        beyond = (low < high) & (u >= tables.cumulative[middle])
        low, high = jnp.where(beyond, middle + 1, low), jnp.where(beyond, high, middle)
    return tables.successors[low], low == end


def _cumulative(policy: Array) -> Array:
    """Cumulated action probabilities, with 2 from the last action that can be drawn on."""
    later = jnp.flip(jnp.cumsum(jnp.flip(policy, 1), 1), 1) - policy
    return jnp.where(later > 0, jnp.cumsum(policy, axis=1), 2)


@partial(jax.jit, static_argnames=("episodes", "horizon", "reset"))
def _simulate(
    tables: SamplingTables,
    policy: Array,
    key: Array,
    start_states: Array | None,
    start_actions: Array | None,
    *,
    episodes: int,
    horizon: int,
    reset: bool,
) -> Trajectory:
    cumulative = _cumulative(policy)
    draw_key, noise_key, start_key, reset_key = jax.random.split(key, 4)
    # All numbers at once: a few large draws cost less than many small ones.
    uniforms = jax.random.uniform(draw_key, (horizon, 2, episodes), cumulative.dtype)
    starts = _draw_starts(tables, reset_key, (horizon, episodes)) if reset else None
    states = _draw_starts(tables, start_key, (episodes,)) if start_states is None else start_states

    def step(carry: tuple[Array, Array], now: tuple) -> tuple[tuple[Array, Array], tuple]:
        state, alive = carry
        time, (u_action, u_successor), start = now
        action = (u_action[:, None] >= cumulative[state]).sum(axis=1, dtype=jnp.int32)
        if start_actions is not None:
            action = jnp.where(time == 0, start_actions, action)
        successor, ended = _draw_successor(tables, state * tables.num_actions + action, u_successor)
        next_state = jnp.where(ended | ~alive, state, successor)
        taken = state, action, next_state, ended, alive
        if reset:
            return (jnp.where(ended, start, next_state), alive), taken
        return (next_state, alive & ~ended), taken

    times = jnp.arange(horizon), uniforms, starts
    _, taken = jax.lax.scan(step, (states, jnp.ones(episodes, bool)), times)
    state, action, next_state, ended, alive = (field.T for field in taken)
    pair = state * tables.num_actions + action
    # A start that is traced may lie outside of the tables: then its reward is NaN.
    reward = look_up(tables.rewards.reshape(policy.shape), state, action)
    if tables.reward_std is not None:
        noise = jax.random.normal(noise_key, reward.shape, reward.dtype)
        reward = reward + tables.reward_std[pair] * noise
    lives_on = alive & ~ended
    return Trajectory(
        states=state,
        actions=action,
        rewards=jnp.where(alive, reward, 0),
        discounts=jnp.where(lives_on, tables.discount, 0),
        next_states=next_state,
        truncated=lives_on & (jnp.arange(horizon) == horizon - 1),
        behaviour=look_up(policy, state, action),
        valid=alive,
    )
