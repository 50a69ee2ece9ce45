"""A batch of targets is its sequences one by one, wherever its axes lie and whichever way a CPU computes it."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from marginax import targets
from reference import targets as naive

CLIPS = {"clip": 1.2, "rho_clip": 1.5, "decay": 0.9}
# T and B: less than one block of sequences, a tiny batch, whole blocks, a rest; rows in the cache; beyond it long rows,
# blocks, short rows and one block; turns of two and of four steps; large arrays
SIZES = [(1, 1), (1, 9), (5, 3), (5, 32), (8, 41), (40, 32), (35, 41), (36, 41), (38, 41)]
SIZES += [(20, 300), (21, 300), (130, 300), (3, 22001), (8, 8301), (1030, 64), (160, 430), (2100, 32)]
SIZES += [(36, 1901), (38, 1901), (2100, 500), (2101, 500)]
seeds = st.integers(0, 2**32 - 1)


def batch(seed, *shape, dtype=np.float32):
    """What `vtrace` takes, [..., T]: episodes that end or are cut, ratios on both sides of the clips and some of them 0."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=shape) for _ in range(3)]
    discounts = np.where(rng.random(shape) < 0.2, 0.0, rng.choice([0.5, 0.9, 1.0], size=shape))
    ratios = [np.exp(rng.normal(scale=0.7, size=shape)) * (rng.random(shape) > 0.1) for _ in range(2)]
    return [x.astype(dtype) for x in (*values, discounts, *ratios)] + [rng.random(shape) < 0.2]


def clipped(arrays):
    """The arrays with the traces and ρ that `CLIPS` make of them."""
    *common, traces, rhos, truncated = arrays
    return [*common, traces.dtype.type(0.9) * np.minimum(1.2, traces), np.minimum(1.5, rhos), truncated]


def expected(arrays):
    return naive.vtrace(*(x if x.dtype == bool else x.astype(float) for x in arrays))


BATCHED = {
    (axis, inside): jax.jit(
        jax.vmap(partial(targets.vtrace, **(CLIPS if inside else {})), in_axes=axis, out_axes=axis)
    )
    for axis, inside in product([0, 1], [False, True])
}


@settings(max_examples=40)
@given(seed=seeds, size=st.sampled_from(SIZES), inside=st.booleans(), axis=st.sampled_from([0, 1]))
def test_a_batch_is_its_sequences_one_by_one(seed, size, inside, axis):
    """`axis` is the batch's, and `inside` says whether the ratios are clipped on the way, which makes another loop."""
    length, count = size
    arrays = batch(seed, count, length)
    given_arrays = arrays if inside else clipped(arrays)
    result = BATCHED[axis, inside](*(np.moveaxis(x, 0, axis).copy() for x in given_arrays))
    result = np.moveaxis(np.asarray(result), axis, 0)
    assert result.shape == (count, length)
    for i in {0, 15 % count, 16 % count, count // 2, count - 1, seed % count}:
        by_hand = expected([x[i] for x in clipped(arrays)])
        np.testing.assert_allclose(result[i], by_hand, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, CLIPS])
@pytest.mark.parametrize("size", [(5, 40), (36, 41), (20, 300), (44, 1601), (4200, 16), (2100, 500)])
def test_double_precision(axis, options, size):
    """Blocks are half as wide, and pairs are complex numbers."""
    length, count = size
    arrays = batch(4, count, length, dtype=np.float64)
    with jax.enable_x64(True):
        function = jax.jit(jax.vmap(partial(targets.vtrace, **options), in_axes=axis, out_axes=axis))
        result = np.moveaxis(np.asarray(function(*(np.moveaxis(x, 0, axis) for x in arrays))), axis, 0)
    assert result.dtype == np.float64
    arrays = clipped(arrays) if options else arrays
    for i in {0, 9 % count, count - 1}:
        np.testing.assert_allclose(result[i], expected([x[i] for x in arrays]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("estimate", [targets.multi_step, targets.marginalized])
@pytest.mark.parametrize("size", [(5, 41), (35, 41), (36, 41), (38, 41), (20, 300), (3, 22001), (160, 430)])
def test_other_targets_agree_with_the_associative_scan(estimate, size):
    length, count = size
    arrays = batch(7, count, length)
    arrays = [*arrays[:4], arrays[4], arrays[6]]
    by_scan = jax.vmap(partial(estimate, backend="associative"))(*arrays)
    np.testing.assert_allclose(jax.vmap(estimate)(*arrays), by_scan, rtol=1e-4, atol=1e-4)
    last = jax.vmap(estimate, in_axes=1, out_axes=1)(*(x.T for x in arrays))
    np.testing.assert_allclose(last.T, by_scan, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outer", [0, 1, 2])
@pytest.mark.parametrize("inner", [0, 1])
@pytest.mark.parametrize("options", [{}, CLIPS])
def test_batches_of_batches(outer, inner, options):
    """Time comes last, first, or between the two axes of the batch."""
    arrays = batch(3, 4, 3, 7)
    function = partial(targets.vtrace, **options)
    one_by_one = np.array([[function(*(x[i, j] for x in arrays)) for j in range(3)] for i in range(4)])
    laid_out = [np.moveaxis(np.moveaxis(x, 1, inner + 1), 0, outer) for x in arrays]
    nested = jax.vmap(jax.vmap(function, in_axes=inner, out_axes=inner), in_axes=outer, out_axes=outer)(
        *laid_out
    )
    result = np.moveaxis(np.moveaxis(nested, outer, 0), inner + 1, 1)
    np.testing.assert_allclose(result, one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shared", range(7))
def test_arrays_that_all_sequences_share(shared, axis):
    """One array belongs to every sequence, then all but one do."""
    arrays = batch(5, 3, 6)
    for common in ({shared}, set(range(7)) - {shared}):
        given_arrays = [x[0] if i in common else np.moveaxis(x, 0, axis) for i, x in enumerate(arrays)]
        axes = tuple(None if i in common else axis for i in range(7))
        result = jax.vmap(partial(targets.vtrace, **CLIPS), in_axes=axes)(*given_arrays)
        one_by_one = [
            targets.vtrace(*(x[0] if j in common else x[i] for j, x in enumerate(arrays)), **CLIPS)
            for i in range(3)
        ]
        np.testing.assert_allclose(result, np.stack(one_by_one), rtol=1e-5, atol=1e-6)


def test_numbers_that_differ_from_sequence_to_sequence():
    v, v_next, rewards, discounts, ratios, _, truncated = batch(6, 5)
    common = (v, v_next, rewards, discounts)

    def target(trace, clip):
        one_number = targets.multi_step(*common, trace, truncated)
        return one_number + targets.vtrace(*common, ratios, ratios, truncated, clip=clip, rho_clip=clip)

    numbers = jnp.array([0.3, 0.5, 2.0]), jnp.array([0.5, 1.0, 2.0])
    one_by_one = np.stack([target(*pair) for pair in zip(*numbers, strict=True)])
    np.testing.assert_allclose(jax.vmap(target)(*numbers), one_by_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, CLIPS])
@pytest.mark.parametrize("count", [3, 40, 300, 22000, 2**18])
def test_nan_is_never_read_in_a_batch(axis, options, count):
    arrays = batch(8, count, 4)
    arrays[3][:, 1], arrays[6][:, 2] = 0, True  # the second step ends an episode, the third is cut
    poisoned = [x.copy() for x in arrays]
    poisoned[1][:, 1] = np.nan
    poisoned[4][:, 1:3] = np.nan
    for array in poisoned[:6]:
        array[:, 3] = np.nan
    function = jax.jit(jax.vmap(partial(targets.vtrace, **options), in_axes=axis, out_axes=axis))
    result, clean = (function(*(np.moveaxis(x, 0, axis) for x in xs)) for xs in (poisoned, arrays))
    steps = np.moveaxis(np.asarray([result, clean]), axis + 1, 1)[:, :, :3]
    np.testing.assert_array_equal(*steps)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, CLIPS])
@pytest.mark.parametrize("size", [(5, 8), (5, 40), (50, 40), (20, 300), (44, 1601), (300, 301)])
def test_no_sequence_reads_another(axis, options, size):
    length, count = size
    arrays = batch(9, count, length)
    poisoned = [x.copy() for x in arrays]
    for array in poisoned[:6]:
        array[1::2] = np.nan
    function = jax.jit(jax.vmap(partial(targets.vtrace, **options), in_axes=axis, out_axes=axis))
    result, clean = (
        np.moveaxis(np.asarray(function(*(np.moveaxis(x, 0, axis) for x in xs))), axis, 0)
        for xs in (poisoned, arrays)
    )
    np.testing.assert_array_equal(result[::2], clean[::2])


@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_of_a_batch(axis):
    """The gradient of the batch is the batch of gradients, and that of clipping beforehand."""
    arrays = [jnp.moveaxis(x, 0, axis) for x in batch(9, 3, 6)]
    floats, truncated = arrays[:6], arrays[6]

    def loss(options, *arrays):
        return jnp.sum(targets.vtrace(*arrays, **options, stop_gradient=False) ** 2)

    def total(options, floats):
        return jax.vmap(partial(loss, options), in_axes=axis)(*floats, truncated).sum()

    def clipped_before(floats):
        *common, traces, rhos = floats
        return total({}, [*common, 0.9 * jnp.minimum(1.2, traces), jnp.minimum(1.5, rhos)])

    of_batch = jax.grad(partial(total, CLIPS))(floats)
    before = jax.grad(clipped_before)(floats)
    each = jax.vmap(jax.grad(partial(loss, CLIPS), argnums=range(6)), in_axes=axis, out_axes=axis)(*arrays)
    for gradient, one_by_one, outside in zip(of_batch, each, before, strict=True):
        np.testing.assert_allclose(gradient, one_by_one, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gradient, outside, rtol=1e-5, atol=1e-5)


@settings(max_examples=10)
@given(seed=seeds)
def test_clips_make_retrace_like_traces_of_ratios(seed):
    """The same ratios for both, as numbers and as an array, and each of the three options by itself."""
    *common, ratios, _, truncated = batch(seed, 7)
    options = {"clip": 1.2, "rho_clip": 1.5, "decay": 0.9}
    for used in [{"clip"}, {"rho_clip"}, {"decay"}, set(options)]:
        traces = np.minimum(ratios, options["clip"] if "clip" in used else np.inf)
        traces = traces * np.float32(options["decay"] if "decay" in used else 1)
        rhos = np.minimum(ratios, options["rho_clip"] if "rho_clip" in used else np.inf)
        some = {name: options[name] for name in used}
        result = targets.vtrace(*common, ratios, ratios, truncated, **some)
        np.testing.assert_allclose(result, expected([*common, traces, rhos, truncated]), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_clips_keep_half_precision(dtype):
    arrays = batch(2, 3, 6)
    half = [x if x.dtype == bool else jnp.asarray(x, dtype) for x in arrays]
    result = jax.vmap(partial(targets.vtrace, **CLIPS))(*half)
    assert result.dtype == dtype
    by_hand = [expected([x[i] for x in clipped(arrays)]) for i in range(3)]
    np.testing.assert_allclose(result.astype(np.float32), by_hand, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["clip", "rho_clip", "decay"])
def test_a_clip_is_a_number(name):
    with pytest.raises(ValueError, match=f"{name} must be a number"):
        targets.vtrace(*batch(0, 5), **{name: np.ones(5)})


@pytest.mark.parametrize("length", [40, 42, 43])  # turns of four steps, of two, and of one
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_narrow_blocks_are_one_kernel(axis, x64, length):
    """XLA must not step through the loop by its runtime, ten times slower; this is its choice, and may need a smaller block."""
    with jax.enable_x64(x64):
        arrays = batch(0, 40, length, dtype=np.float64 if x64 else np.float32)
        assert_one_kernel(axis, arrays)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_tiny_batch_is_one_kernel(axis):
    assert_one_kernel(axis, batch(0, 32, 8))


def assert_one_kernel(axis, arrays):
    for options in ({}, CLIPS):
        function = jax.vmap(partial(targets.vtrace, **options), in_axes=axis, out_axes=axis)
        program = jax.jit(function).lower(*(np.moveaxis(x, 0, axis) for x in arrays)).compile()
        assert 'xla_cpu_small_call="true"' in program.as_text()


def test_on_several_devices_and_without_a_compiler():
    arrays = batch(1, 4, 5)
    function = jax.vmap(partial(targets.vtrace, **CLIPS))
    mesh, parts = Mesh(np.array(jax.devices("cpu")[:1]), "batch"), PartitionSpec("batch")
    on_devices = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts))
    np.testing.assert_allclose(on_devices(*arrays), function(*arrays), rtol=1e-6)
    with jax.disable_jit():  # which also shows what accelerators compute
        np.testing.assert_allclose(function(*arrays), on_devices(*arrays), rtol=1e-5, atol=1e-6)
        for backend in ("auto", "scan"):
            time_first = jax.vmap(partial(targets.vtrace, **CLIPS, backend=backend), in_axes=1, out_axes=1)
            result = time_first(*(x.T for x in arrays))
            np.testing.assert_allclose(result.T, on_devices(*arrays), rtol=1e-5, atol=1e-6)
    assert function(*(x[:0] for x in arrays)).shape == (0, 5)
