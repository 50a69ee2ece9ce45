"""Plain constructors for tabular policies ``[S, A]``."""

import numpy as np
from numpy.typing import ArrayLike

from marginax import _checks as checks
from marginax._checks import FloatArray

__all__ = ["deterministic", "epsilon_greedy", "greedy", "mixture", "softmax", "uniform"]


def uniform(num_states: int, num_actions: int) -> FloatArray:
    """The policy that takes every action alike, ``π(a|x) = 1/A``.

    Args:
        num_states: S.
        num_actions: A.

    Returns:
        π ``[S, A]``.

    Example:
        >>> uniform(1, 4)
        array([[0.25, 0.25, 0.25, 0.25]])
    """
    states, actions = checks.count("num_states", num_states), checks.count("num_actions", num_actions)
    return np.full((states, actions), 1.0 / actions)


def deterministic(actions: ArrayLike, num_actions: int) -> FloatArray:
    """The policy that takes ``actions[x]`` in state ``x``, ``π(a|x) = 1{a = actions[x]}``.

    Args:
        actions: one action for every state, ``[S]`` integers in ``range(A)``.
        num_actions: A.

    Returns:
        π ``[S, A]``.

    Example:
        >>> deterministic([1, 0], 2)
        array([[0., 1.],
               [1., 0.]])
    """
    size = checks.count("num_actions", num_actions)
    chosen = checks.array("actions", actions, (None,))
    bad = (chosen != np.round(chosen)) | (chosen < 0) | (chosen >= size)
    if bad.any():
        place = int(np.argmax(bad))
        raise ValueError(
            f"actions must be integers in range({size}), but actions[{place}] = {chosen[place]:g}"
        )
    return np.eye(size)[chosen.astype(np.int64)]


def mixture(pi: ArrayLike, other: ArrayLike, beta: float) -> FloatArray:
    """The mixture ``β π + (1-β) other`` (the chain's behaviour policy, Section 6.1).

    Args:
        pi: ``[S, A]``.
        other: ``[S, A]``.
        beta: weight of ``pi``, in [0, 1].

    Returns:
        ``[S, A]``.

    Example:
        >>> mixture([[1.0, 0.0]], [[0.5, 0.5]], beta=0.5)
        array([[0.75, 0.25]])
    """
    weight = checks.fraction("beta", beta)
    first = checks.distribution("pi", pi, (None, None))
    second = checks.distribution("other", other, first.shape)
    return weight * first + (1.0 - weight) * second


def greedy(q: ArrayLike) -> FloatArray:
    """The policy that takes the first best action, ``π(a|x) = 1{a = argmax Q(x, ·)}``.

    Args:
        q: ``[S, A]``.

    Returns:
        π ``[S, A]``.

    Example:
        >>> greedy([[0.0, 2.0, 1.0]])
        array([[0., 1., 0.]])
    """
    values = _values(q)
    return np.eye(values.shape[1])[values.argmax(axis=1)]


def epsilon_greedy(q: ArrayLike, epsilon: float) -> FloatArray:
    """The greedy policy with probability ``1-ε``, a uniform action otherwise.

    Args:
        q: ``[S, A]``.
        epsilon: in [0, 1].

    Returns:
        π ``[S, A]``.

    Example:
        >>> epsilon_greedy([[0.0, 1.0]], epsilon=0.5)
        array([[0.25, 0.75]])
    """
    best = greedy(q)
    return mixture(uniform(*best.shape), best, checks.fraction("epsilon", epsilon))


def softmax(q: ArrayLike, temperature: float = 1.0) -> FloatArray:
    """The Boltzmann policy, ``π(a|x) ∝ exp(Q(x,a) / temperature)``.

    Args:
        q: ``[S, A]``.
        temperature: positive.

    Returns:
        π ``[S, A]``.

    Example:
        >>> softmax([[0.0, 0.0]])
        array([[0.5, 0.5]])
    """
    values = _values(q)
    scale = checks.positive("temperature", temperature)
    with np.errstate(under="ignore", over="ignore"):  # a difference of -inf has probability 0
        weights = np.exp((values - values.max(axis=1, keepdims=True)) / scale)
    return weights / weights.sum(axis=1, keepdims=True)


def _values(q: ArrayLike) -> FloatArray:
    values = checks.array("q", q, (None, None))
    if not values.shape[1]:
        raise ValueError(f"q must have at least one action, got shape {values.shape}")
    return values
