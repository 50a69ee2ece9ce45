"""The recursion as a loop on a CPU, `y[t] = b[t] + a[t] y[t+1]` and targets `values + y`, for a batch in either layout.

What costs on a CPU are the turns of XLA's loop and the passes over whole arrays beside it. Hence:

- Nothing is transposed: a step reads a row where time comes first, and a column where it comes last.
- XLA makes one kernel of a loop, some 17 ns a step, if a step touches less than 1 kB; otherwise each step takes a round of
  its runtime, 150 ns and more. So a batch is taken in narrow blocks of sequences, one block after another.
- With time first, a step is a whole row if rows are wide, which makes up for the rounds, and beyond the cache, where narrow
  blocks would jump about in memory.
- The terms of a step can be formed in the loop, from arrays as they are, and nothing is written but targets. Or they are
  formed in one pass before it, on all cores: better if the arrays are still to be computed, which XLA does in the same
  pass, or if each step reads columns of arrays that fill the cache. For large arrays with time first, something between: the
  pass forms what takes most arrays, where the targets will be, and the loop forms the coefficients.
- Columns of pairs are taken four steps at a time, or two: there are fewer turns, and targets are written side by side. The
  next turn reads what it needs of them where they were written; if it were handed over, XLA would compute it twice.
- What is tiny is computed by one pass and one loop, with as little around them as can be.

The numbers below come from `benchmarks/targets.py` on two cores. They decide on speed only.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike

IN_CACHE = 2**16  # entries of an array, where some five of them are about what one core's cache holds
IN_PAIRS = 2**15  # entries beyond which columns are read as pairs of level and coefficient
ENDLESS = 16  # with time last, steps from which on `_next_in_memory` shifts existing rows
LARGE = 2**20  # entries of an array, from which on levels formed on all cores are better with time first, too
TILES = {4: 8, 2: 16}  # where pairs are read with time last: steps of a turn, and of how many sequences
STEP_BYTES = 768  # what the step of a narrow block may touch: XLA's limit is 1024, with bookkeeping
TINY = 1024  # entries up to which levels and coefficients are formed before a loop that takes the whole batch at once
SMALL = 10_000  # the same where a row is wide
ONE_BLOCK = 128  # bytes of a row up to which such a loop is one kernel
WIDE_ROW = 256  # sequences from which on a row is worth a round of the runtime in the cache, too
MANY_STEPS = 128  # but not with so many steps, unless the cache is full
LEAST_ROW = 64  # sequences up to which a row is not worth a round of the runtime
SHORT_ROW = 2048  # bytes up to which rows are taken two at a time, and read from their end, see `_in_blocks`
ALIKE = 1024  # columns of arrays whose rows lie a multiple of so many bytes apart compete for the same cache lines

# From what the arrays hold at a step to its value, increment and coefficient.
Terms = Callable[..., tuple[Array, Array, Array]]


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


def targets_by_loop(
    terms: Terms, arrays: Sequence[Array], axis: int, dtype: DTypeLike, in_loop: bool
) -> Array:
    """The targets of a batch.

    Args:
        terms: value, increment and coefficient of steps, entry by entry from what the arrays hold.
        arrays: of one shape, in which time is the given axis and all others are the batch; or scalars.
        dtype: the type of what `terms` returns, single or double precision.
        in_loop: whether the loop forms the terms. It does not where a pass before it is better in any case.
    """
    shape = max((x.shape for x in arrays), key=len)
    length, before, after = shape[axis], shape[:axis], shape[axis + 1 :]
    if 0 in shape:
        return jnp.zeros(shape, dtype)
    if before and after:  # time lies between two axes of the batch: bring it to the front
        arrays = [x if x.ndim == 0 else jnp.moveaxis(x, axis, 0) for x in arrays]
        return jnp.moveaxis(targets_by_loop(terms, arrays, 0, dtype, in_loop), 0, axis)
    batch, axis = (math.prod(after), 0) if after else (math.prod(before), 1)
    arrays = [x if x.ndim == 0 else x.reshape(_placed(axis, length, batch)) for x in arrays]
    size, rows = length * batch, axis == 0 and batch > LEAST_ROW
    row = batch * jnp.dtype(dtype).itemsize
    wide = axis == 0 and batch >= WIDE_ROW
    steps, levels = 1, None
    if not in_loop or (axis == 1 and size > IN_PAIRS):
        endless = axis == 1 and in_loop and length >= ENDLESS
        terms, arrays = _packed(terms, arrays, axis, endless)
        steps = math.gcd(length, max(TILES)) if axis == 1 else 1
    elif batch > _narrow(arrays, axis, length, 1, dtype) and (
        size <= (SMALL if wide else TINY) or (axis == 0 and row <= ONE_BLOCK and size > IN_CACHE)
    ):
        levels, coefficient = _levels(terms, arrays, axis)
        return _in_blocks(_given, [coefficient], axis, (1, batch), False, dtype, levels).reshape(shape)
    elif size <= IN_CACHE and (not wide or (length >= MANY_STEPS and size < IN_CACHE)):
        rows = False
    elif rows and size >= LARGE:
        levels = _levels(terms, arrays, axis)[0]
    short = rows and row <= SHORT_ROW
    if rows:
        tile = math.gcd(length, 2) if short else 1, batch
    else:
        tile = steps, min(batch, _narrow(arrays, axis, length, steps, dtype))
    return _in_blocks(terms, arrays, axis, tile, short, dtype, levels).reshape(shape)


def _given(coefficient: Array) -> tuple[Array, Array, Array]:
    """Terms of a loop on levels, where coefficients are formed before it, too."""
    nothing = jnp.zeros((), coefficient.dtype)
    return nothing, nothing, coefficient


def _placed(axis, time, sequence):
    """Something of time and something of the batch, in the order of the axes."""
    return (time, sequence) if axis == 0 else (sequence, time)


def _levels(terms: Terms, arrays: Sequence[Array], axis: int, endless: bool = False) -> tuple[Array, Array]:
    """Level and coefficient, for a loop on the targets themselves: `z[t] = level[t] + a[t] z[t+1]`, `y = z - values`."""
    value, increment, coefficient = jnp.broadcast_arrays(*terms(*arrays))
    if endless:
        not_last = np.arange(value.shape[1]) < value.shape[1] - 1
        later, factor = _next_in_memory(value), coefficient * not_last.astype(value.dtype)
    else:
        later, factor = shifted(value, axis), coefficient
    return value + increment - factor * zero_where(factor == 0, later), coefficient


def _next_in_memory(rows: Array) -> Array:
    """`shifted` along rows, but at its end each holds what the next one begins with (the last one, a zero).

    An end within the rows would leave the processor some single numbers in each, beside its vectors. Rows of fewer than 16
    numbers are unrolled by the compiler, and no vectors are made of them: there it does not pay.
    """
    length = rows.shape[1]
    body = rows.reshape(-1)[1 : rows.size - length + 1].reshape(-1, length)
    return jnp.concatenate([body, shifted(rows[-1:], 1)])


def _packed(terms: Terms, arrays: Sequence[Array], axis: int, endless: bool) -> tuple[Terms, list[Array]]:
    """One number a step for both its level and its coefficient.

    In single precision that is an integer of 64 bits, which a processor reads at once. A complex number, as in double
    precision, is read one part after the other.
    """
    level, coefficient = _levels(terms, arrays, axis, endless)
    single = level.dtype == jnp.float32
    pairs = _joined(level, coefficient) if single else jax.lax.complex(level, coefficient)

    def terms_of_pairs(pair: Array) -> tuple[Array, Array, Array]:
        increment, coefficient = _halves(pair) if single else (pair.real, pair.imag)
        return jnp.zeros((), level.dtype), increment, coefficient

    return terms_of_pairs, [pairs]


def _joined(low: Array, high: Array) -> Array:
    """Two numbers of 32 bits as one of 64, which JAX would not make unless it is told to."""
    with jax.enable_x64(True):
        low, high = (jax.lax.bitcast_convert_type(x, jnp.uint32).astype(jnp.uint64) for x in (low, high))
        return low | high << jnp.uint64(32)


def _halves(pair: Array) -> tuple[Array, Array]:
    """What was `_joined`."""
    with jax.enable_x64(True):
        low, high = (x.astype(jnp.uint32) for x in (pair, pair >> jnp.uint64(32)))
    return jax.lax.bitcast_convert_type(low, jnp.float32), jax.lax.bitcast_convert_type(high, jnp.float32)


def _narrow(arrays: Sequence[Array], axis: int, length: int, steps: int, dtype: DTypeLike) -> int:
    """How many sequences a narrow block has, so that XLA makes one kernel of its loop."""
    if steps > 1:
        return TILES[steps] * 4 // jnp.dtype(dtype).itemsize
    sizes = [x.dtype.itemsize for x in arrays if x.ndim]
    # Beside the arrays, the carry is read and written; then it is read, and targets are written.
    touched = sum(sizes) + 4 * jnp.dtype(dtype).itemsize
    most = 32 if axis == 0 else 8 if length * max(sizes) % ALIKE == 0 else 16
    return next((width for width in (32, 16, 8, 4, 2) if width <= most and width * touched <= STEP_BYTES), 1)


def _side_by_side(columns: list[Array]) -> Array:
    """What `jnp.concatenate` makes of columns, in a form that the compiler writes as vectors."""
    number = np.arange(len(columns))
    return reduce(lambda left, i: jnp.where(number < i, left, columns[i]), number[1:], columns[0])


def _in_blocks(
    terms: Terms,
    arrays: Sequence[Array],
    axis: int,
    tile: tuple[int, int],
    downwards: bool,
    dtype: DTypeLike,
    levels: Array | None,
) -> Array:
    """The loop: blocks of sequences one after another, in each the steps from the last to the first.

    A tile is what a turn of the loop takes: so many steps (a divisor of all) of so many sequences. With several steps and
    time last, values must be zero, so that the last target written is what the next turn begins with. Levels, if
    given, are replaced by targets in place, and of the terms nothing but the coefficient is formed; then one block must
    take the whole batch.

    Rows are met from the last to the first. `downwards`, each is read from its end, too, so that memory is read in one
    direction, which processors foresee (1.4 times faster for 4,096 steps by 256 sequences).
    """
    # Made like an array, so as to vary over the same devices under `jax.shard_map`.
    nothing = jnp.zeros_like(max(arrays, key=jnp.ndim), dtype)
    (length, batch), (steps, width) = _placed(axis, *nothing.shape), tile
    start = jax.lax.slice(nothing, (0, 0), _placed(axis, 1, width))
    put = partial(jax.lax.dynamic_update_slice, allow_negative_indices=False)
    turned = partial(jax.lax.rev, dimensions=(1 - axis,)) if downwards else lambda x: x
    # Several rows are best read and written as one, several columns one by one.
    together = axis == 0 or steps == 1

    def block(number: Array, targets: Array) -> Array:
        # Slices are moved back into the arrays: the last block may repeat some sequences of the one before.
        first = number * width

        def take(array: Array, time: Array, steps: int = 1) -> Array:
            here, sizes = _placed(axis, time, first), _placed(axis, steps, width)
            return jax.lax.dynamic_slice(array, here, sizes, allow_negative_indices=False)

        def turn(count: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
            following, targets = state
            time = length - steps - count * steps

            def terms_at(time: Array, steps: int = 1) -> list[Array]:
                entries = (x if x.ndim == 0 else turned(take(x, time, steps)) for x in arrays)
                value, increment, coefficient = jnp.broadcast_arrays(*terms(*entries))
                if levels is not None:
                    value, increment = jnp.zeros_like(value), turned(take(targets, time, steps))
                return [value, increment, coefficient]

            if together:
                value, *others = terms_at(time, steps)
                parts = [[jax.lax.slice_in_dim(x, i, i + 1, axis=axis) for x in others] for i in range(steps)]
            else:
                parts = [terms_at(time + i)[1:] for i in range(steps)]
            totals: list[Array] = []
            for increment, coefficient in reversed(parts):
                following = step(following, increment, coefficient)
                totals.insert(0, following)
            here = _placed(axis, time, first)
            if together:
                return following, put(targets, turned(value + jnp.concatenate(totals, axis)), here)
            targets = put(targets, _side_by_side(totals), here)
            return take(targets, time), targets

        return jax.lax.fori_loop(0, length // steps, turn, (start, targets))[1]

    return jax.lax.fori_loop(0, -(-batch // width), block, nothing if levels is None else levels)
