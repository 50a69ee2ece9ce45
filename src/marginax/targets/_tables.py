"""From values of all actions to what targets take: the value of the action taken, and the policy's mean."""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

FEW = 16  # actions up to which a choice or a sum written out beats indexing and reduction, on a CPU by far


def _column(table: Array, action: int) -> Array:
    """`table[..., action]`, as a sum over one action: `jax.vmap` keeps the batch where it is through that, but
    through indexing it moves the batch to the front, and arrays with time first would be transposed."""
    return jax.lax.slice_in_dim(table, action, action + 1, axis=-1).sum(axis=-1, dtype=table.dtype)


def taken(table: ArrayLike, actions: ArrayLike) -> Float[Array, "..."]:
    r"""Looks up `table[t, a_t]`, for example $Q(x_t, a_t)$ or $\pi(a_t|x_t)$.

    Args:
        table: `[..., A]`.
        actions: whole numbers in `[0, A)`, `[...]`.

    Returns:
        `[...]`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> taken(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([1, 0]))
    Array([2., 3.], dtype=float32)
    """
    table, actions = jnp.asarray(table), jnp.asarray(actions)
    if table.shape[:-1] != actions.shape:
        raise ValueError(
            f"actions must have shape {table.shape[:-1]}, that of table's steps, got {actions.shape}"
        )
    count = table.shape[-1]
    if count > FEW:
        return jnp.take_along_axis(table, actions[..., None], axis=-1)[..., 0]
    return reduce(
        lambda found, a: jnp.where(actions == a, _column(table, a), found), range(1, count), _column(table, 0)
    )


def expected(table: ArrayLike, policy: ArrayLike) -> Float[Array, "..."]:
    r"""Averages over a policy's actions, $\sum_a \pi(a|x_t)\, Q(x_t,a)$.

    Args:
        table: `[..., A]`.
        policy: `[..., A]`.

    Returns:
        `[...]`.

    Raises:
        ValueError: if the shapes do not agree.

    >>> expected(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0.5, 0.5], [1.0, 0.0]]))
    Array([1.5, 3. ], dtype=float32)
    """
    table, policy = jnp.asarray(table), jnp.asarray(policy)
    if table.shape != policy.shape:
        raise ValueError(f"policy must have table's shape {table.shape}, got {policy.shape}")
    if table.shape[-1] > FEW:
        return (table * policy).sum(axis=-1)
    return reduce(jnp.add, [_column(table, a) * _column(policy, a) for a in range(table.shape[-1])])
