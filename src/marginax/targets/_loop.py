"""The recursion as a loop on a CPU, `y[t] = b[t] + a[t] y[t+1]` and targets `values + y`, for a batch in either layout.

What costs on a CPU are the turns of XLA's loop and every pass over whole arrays beside it. Hence:

- The terms of a step are formed in the loop, from the arrays as they came, and nothing is written but the targets.
- XLA makes a loop one kernel, some 15 ns a step, if a step touches less than 1 kB; otherwise each step takes a round of
  its runtime, 150 ns and more. So batches are taken in narrow blocks of sequences, one block after another.
- With time first and more than the cache holds, narrow blocks would jump about in memory: there a step is a whole row.
- With time last a step reads a column, slowly, of each of its arrays. Nothing is transposed for that; where there is work
  for all cores, one pass first makes one array of all (`_packed`).

The numbers below come from `benchmarks/targets.py` on two cores. They decide on speed only.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike

IN_CACHE = 2**16  # entries of an array: with some five arrays of as many numbers, about one core's cache
STEP_BYTES = 768  # what the step of a narrow block may touch: XLA's limit is 1024, with bookkeeping
LEAST_ROW = 64  # sequences below which a row is not worth a round of the runtime

Terms = Callable[
    ..., tuple[Array, Array, Array]
]  # from what a step's arrays hold to value, increment, coefficient


def zero_where(mask: Array, array: Array) -> Array:
    """`array` with zeros where `mask` is true.

    The zeros are made of the mask: beside a constant, `jax.vmap` would move the batch to the front, and arrays with
    time first would be transposed there and back.
    """
    return jnp.where(mask, (mask * 0).astype(array.dtype), array)


def step(following: Array, increment: Array, coefficient: Array) -> Array:
    """`y[t]` from `y[t+1]`, of which nothing is read where the coefficient is zero."""
    return increment + coefficient * zero_where(coefficient == 0, following)


def shifted(array: Array, axis: int = 0) -> Array:
    """What `array` holds one step later (its first entry is dropped; the last step gets a zero)."""
    later = jax.lax.slice_in_dim(array, 1, None, axis=axis)
    ends = [(0, int(i == axis), 0) for i in range(array.ndim)]
    return jax.lax.pad(later, jnp.zeros((), array.dtype), ends)


def targets_by_loop(terms: Terms, arrays: Sequence[Array], axis: int, dtype: DTypeLike) -> Array:
    """The targets of a batch; time is the given axis of all arrays but scalars, and the other axes are the batch's."""
    shape = max((x.shape for x in arrays), key=len)
    before, after = shape[:axis], shape[axis + 1 :]
    if before and after:  # time between two axes of the batch: bring it to the front
        moved = [x if x.ndim == 0 else jnp.moveaxis(x, axis, 0) for x in arrays]
        return jnp.moveaxis(targets_by_loop(terms, moved, 0, dtype), 0, axis)
    flat = (shape[axis], -1) if after else (-1, shape[axis])
    arrays = [x if x.ndim == 0 else x.reshape(flat) for x in arrays]
    by_layout = _time_first if after else _time_last
    return by_layout(terms, arrays, dtype).reshape(shape)


def _time_first(terms: Terms, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    length, batch = max((x.shape for x in arrays), key=len)
    if batch <= LEAST_ROW or length * batch <= IN_CACHE:
        return _in_blocks(terms, arrays, 0, _narrow(arrays, dtype, 16), dtype)
    return _in_blocks(terms, arrays, 0, batch, dtype, downwards=True)


def _time_last(terms: Terms, arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    batch, length = max((x.shape for x in arrays), key=len)
    if length * batch > IN_CACHE and dtype in (jnp.float32, jnp.float64):
        terms, arrays = _packed(terms, arrays)
    return _in_blocks(terms, arrays, 1, _narrow(arrays, dtype, 8), dtype)


def _packed(terms: Terms, arrays: Sequence[Array]) -> tuple[Terms, list[Array]]:
    """One complex number a step, for a loop on the targets themselves: `z[t] = level[t] + a[t] z[t+1]`, where `y = z - values`."""
    value, increment, coefficient = jnp.broadcast_arrays(*terms(*arrays))
    level = value + increment - coefficient * zero_where(coefficient == 0, shifted(value, axis=1))
    pairs = jax.lax.complex(level, coefficient)
    return lambda pair: (jnp.zeros_like(pair.real), pair.real, pair.imag), [pairs]


def _narrow(arrays: Sequence[Array], dtype: DTypeLike, most: int) -> int:
    """How many sequences a narrow block has, so that XLA makes one kernel of its loop."""
    bytes_each = sum(x.dtype.itemsize for x in arrays if x.ndim) + 5 * jnp.dtype(dtype).itemsize
    fitting = (width for width in (16, 8, 4, 2) if width <= most and width * bytes_each <= STEP_BYTES)
    return next(fitting, 1)


def _in_blocks(
    terms: Terms, arrays: Sequence[Array], axis: int, width: int, dtype: DTypeLike, downwards: bool = False
) -> Array:
    """The loop: blocks of `width` sequences one after another, in each the steps from the last to the first.

    Rows are met from the last to the first; `downwards`, each is read so, too, and memory in one direction only, which is
    what processors foresee (1.4 times faster for 4,096 steps by 256 sequences).
    """
    shape = max((x.shape for x in arrays), key=len)
    length, batch = shape[axis], shape[1 - axis]
    width = min(width, batch)
    turned = partial(jax.lax.rev, dimensions=(0, 1)) if downwards else lambda x: x

    take = partial(jax.lax.dynamic_slice, allow_negative_indices=False)
    put = partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)

    def place(time, sequence):
        return (time, sequence) if axis == 0 else (sequence, time)

    def block(number: Array, targets: Array) -> Array:
        first = jnp.minimum(
            number * width, batch - width
        )  # the last block may repeat sequences of the one before

        def turn(count: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            following, targets = state
            here = place(length - 1 - count, first)
            sizes = place(1, width)
            read = [x if x.ndim == 0 else turned(take(x, here, sizes)) for x in arrays]
            value, increment, coefficient = terms(*read)
            total = step(following, increment, coefficient)
            return total, put(targets, turned(value + total), here)

        return jax.lax.fori_loop(0, length, turn, (jnp.zeros(place(1, width), dtype), targets))[1]

    return jax.lax.fori_loop(0, -(-batch // width), block, jnp.zeros(shape, dtype))
