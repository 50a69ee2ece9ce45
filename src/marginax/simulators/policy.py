"""A policy network in plain NumPy, for processes that act and never learn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Layers = list[tuple[np.ndarray, np.ndarray]]


def parameter_count(sizes: Sequence[int]) -> int:
    """Number of weights and biases of a network with these layer sizes.

    >>> parameter_count([3, 4, 1])
    21
    """
    return sum(n * m + m for n, m in pairwise(sizes))


def unpack(vector: np.ndarray, sizes: Sequence[int]) -> Layers:
    """Cut a flat vector into layers of (weight `[out, in]`, bias `[out]`), copied.

    The vector holds, layer by layer, the weight in row order and then the bias.

    >>> layers = unpack(np.arange(21, dtype=np.float32), [3, 4, 1])
    >>> [weight.shape for weight, _ in layers], layers[1][1]
    ([(4, 3), (1, 4)], array([20.], dtype=float32))
    """
    if vector.shape != (parameter_count(sizes),):
        raise ValueError(
            f"vector must have {parameter_count(sizes)} entries for sizes {list(sizes)}, got {vector.shape}"
        )
    layers, start = [], 0
    for n, m in pairwise(sizes):
        weight = vector[start : start + n * m].reshape(m, n).copy()
        bias = vector[start + n * m : start + n * m + m].copy()
        layers.append((weight, bias))
        start += n * m + m
    return layers


def act(layers: Layers, observation: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The deterministic action of a network of ReLU layers with a tanh at the end, scaled to the bounds.

    `low + (tanh(f(x)) + 1) (high - low) / 2`; the observation is `[n]`, or `[batch, n]` for many at once.

    >>> layers = unpack(np.zeros(21, np.float32), [3, 4, 1])
    >>> act(layers, np.ones(3, np.float32), np.float32([-2]), np.float32([2]))
    array([0.], dtype=float32)
    """
    hidden = observation
    for weight, bias in layers[:-1]:
        hidden = np.maximum(hidden @ weight.T + bias, np.float32(0))
    weight, bias = layers[-1]
    return low + (np.tanh(hidden @ weight.T + bias) + np.float32(1)) * (np.float32(0.5) * (high - low))
