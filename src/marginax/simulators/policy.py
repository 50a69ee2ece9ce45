"""A policy network in plain NumPy, for processes that act and never learn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Layers = list[tuple[np.ndarray, np.ndarray]]


def parameter_count(sizes: Sequence[int]) -> int:
    """Number of weights and biases of a network with these layer sizes."""
    return sum(n * m + m for n, m in pairwise(sizes))


def unpack(vector: np.ndarray, sizes: Sequence[int]) -> Layers:
    """Cut a flat vector into layers of (weight `[in, out]`, bias `[out]`), copied.

    The vector holds, layer by layer, the weight in row order and then the bias.
    """
    if vector.shape != (parameter_count(sizes),):
        raise ValueError(
            f"vector must have {parameter_count(sizes)} entries for sizes {list(sizes)}, got {vector.shape}"
        )
    layers, start = [], 0
    for n, m in pairwise(sizes):
        weight = vector[start : start + n * m].reshape(n, m).copy()
        bias = vector[start + n * m : start + n * m + m].copy()
        layers.append((weight, bias))
        start += n * m + m
    return layers


def outputs(layers: Layers, observation: np.ndarray) -> np.ndarray:
    """The outputs of a network of ReLU layers for an observation `[n]`, or for many, `[batch, n]`.

    For discrete actions these are the actions' values, and the best action is the first of the largest.

    >>> outputs(unpack(np.ones(21, np.float32), [3, 4, 1]), np.ones(3, np.float32))
    array([17.], dtype=float32)
    """
    hidden = observation
    for weight, bias in layers[:-1]:
        hidden = np.maximum(hidden @ weight + bias, np.float32(0))
    weight, bias = layers[-1]
    return hidden @ weight + bias


def act(layers: Layers, observation: np.ndarray) -> np.ndarray:
    """The deterministic action, in [-1, 1], of a network of ReLU layers with a tanh at the end.

    >>> layers = unpack(np.zeros(21, np.float32), [3, 4, 1])
    >>> act(layers, np.ones(3, np.float32))
    array([0.], dtype=float32)
    """
    return np.tanh(outputs(layers, observation))


def to_bounds(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Clip to [-1, 1] and scale to the simulator's bounds, which rounding must not exceed."""
    clipped = np.minimum(np.maximum(action, np.float32(-1)), np.float32(1))
    half = np.float32(0.5)
    scaled = half * (low + high) + clipped * (half * (high - low))
    return np.minimum(np.maximum(scaled, low), high)
