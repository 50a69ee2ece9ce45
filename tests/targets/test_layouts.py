"""A batch of targets is its sequences one by one, wherever its axes lie."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from marginax import targets
from reference import targets as naive


def batch(seed, *shape, dtype=np.float32):
    """What `vtrace` takes, [..., T]: episodes that end or are cut, ratios on both sides of 1 and some of them 0."""
    rng = np.random.default_rng(seed)
    values = [rng.normal(size=shape) for _ in range(3)]
    discounts = np.where(rng.random(shape) < 0.2, 0.0, rng.choice([0.5, 0.9, 1.0], size=shape))
    ratios = [np.exp(rng.normal(scale=0.7, size=shape)) * (rng.random(shape) > 0.1) for _ in range(2)]
    return [x.astype(dtype) for x in (*values, discounts, *ratios)] + [rng.random(shape) < 0.2]


def expected(arrays):
    return naive.vtrace(*(x if x.dtype == bool else x.astype(float) for x in arrays))


BATCHED = [jax.jit(jax.vmap(targets.vtrace, in_axes=axis, out_axes=axis)) for axis in (0, 1)]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("size", [(1, 1), (1, 9), (5, 3), (36, 41)])
def test_a_batch_is_its_sequences_one_by_one(size, axis):
    """`axis` is the batch's."""
    length, count = size
    arrays = batch(length, count, length)
    result = np.moveaxis(BATCHED[axis](*(np.moveaxis(x, 0, axis) for x in arrays)), axis, 0)
    by_hand = [expected([x[i] for x in arrays]) for i in range(count)]
    np.testing.assert_allclose(result, by_hand, rtol=2e-4, atol=2e-4)


def test_double_precision():
    arrays = batch(4, 5, 16, dtype=np.float64)
    with jax.enable_x64(True):
        result = jax.vmap(targets.vtrace)(*arrays)
    assert result.dtype == np.float64
    by_hand = [expected([x[i] for x in arrays]) for i in range(5)]
    np.testing.assert_allclose(result, by_hand, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("outer", [0, 1, 2])
@pytest.mark.parametrize("inner", [0, 1])
def test_batches_of_batches(outer, inner):
    """Time comes last, first, or between the two axes of the batch."""
    arrays = batch(3, 4, 3, 7)
    one_by_one = [[expected([x[i, j] for x in arrays]) for j in range(3)] for i in range(4)]
    laid_out = [np.moveaxis(np.moveaxis(x, 1, inner + 1), 0, outer) for x in arrays]
    inside = jax.vmap(targets.vtrace, in_axes=inner, out_axes=inner)
    nested = jax.jit(jax.vmap(inside, in_axes=outer, out_axes=outer))(*laid_out)
    result = np.moveaxis(np.moveaxis(nested, outer, 0), inner + 1, 1)
    np.testing.assert_allclose(result, one_by_one, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("common", [{0}, {3}, {4}, {6}, set(range(7)) - {2}, set(range(7)) - {4}])
def test_arrays_that_all_sequences_share(common, axis):
    arrays = batch(5, 3, 6)
    given = [x[0] if i in common else np.moveaxis(x, 0, axis) for i, x in enumerate(arrays)]
    axes = tuple(None if i in common else axis for i in range(7))
    result = jax.jit(jax.vmap(targets.vtrace, in_axes=axes))(*given)
    by_hand = [expected([x[0] if j in common else x[i] for j, x in enumerate(arrays)]) for i in range(3)]
    np.testing.assert_allclose(result, by_hand, rtol=2e-4, atol=2e-4)


def test_numbers_that_differ_from_sequence_to_sequence():
    *common, _, _, truncated = batch(6, 5)
    traces = np.array([0.3, 0.5, 2.0])
    result = jax.vmap(lambda trace: targets.multi_step(*common, trace, truncated))(traces)
    by_hand = [naive.multi_step(*common, np.full(5, trace), truncated) for trace in traces]
    np.testing.assert_allclose(result, by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_is_never_read_in_a_batch(axis):
    arrays = batch(8, 3, 4)
    arrays[3][:, 1], arrays[6][:, 2] = 0, True  # the second step ends an episode, the third is cut
    poisoned = [x.copy() for x in arrays]
    poisoned[1][:, 1] = np.nan
    poisoned[4][:, 1:3] = np.nan
    for array in poisoned[:6]:
        array[:, 3] = np.nan
    result, clean = (BATCHED[axis](*(np.moveaxis(x, 0, axis) for x in xs)) for xs in (poisoned, arrays))
    steps = np.moveaxis(np.asarray([result, clean]), axis + 1, 1)[:, :, :3]
    np.testing.assert_array_equal(*steps)


@pytest.mark.parametrize("axis", [0, 1])
def test_no_sequence_reads_another(axis):
    arrays = batch(9, 41, 36)
    poisoned = [x.copy() for x in arrays]
    for array in poisoned[:6]:
        array[1::2] = np.nan
    result, clean = (
        np.moveaxis(np.asarray(BATCHED[axis](*(np.moveaxis(x, 0, axis) for x in xs))), axis, 0)
        for xs in (poisoned, arrays)
    )
    np.testing.assert_array_equal(result[::2], clean[::2])


@pytest.mark.parametrize("axis", [0, 1])
def test_the_gradient_of_a_batch_is_the_batch_of_gradients(axis):
    arrays = [jnp.moveaxis(x, 0, axis) for x in batch(9, 3, 6)]
    floats, truncated = arrays[:6], arrays[6]

    def loss(*arrays):
        return jnp.sum(targets.vtrace(*arrays, stop_gradient=False) ** 2)

    @jax.jit
    @jax.grad
    def of_batch(floats):
        return jax.vmap(loss, in_axes=axis)(*floats, truncated).sum()

    each = jax.jit(jax.vmap(jax.grad(loss, argnums=range(6)), in_axes=axis, out_axes=axis))(*arrays)
    for gradient, one_by_one in zip(of_batch(floats), each, strict=True):
        np.testing.assert_allclose(gradient, one_by_one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimate", [targets.multi_step, targets.vtrace])
def test_a_batch_with_time_first_is_not_transposed(estimate):
    """All the way from tables; a transposition costs more than the target."""

    def program(q, pi, actions, mu, rewards, discounts):
        traces = jnp.minimum(1, targets.select_actions(pi, actions) / mu)
        values = targets.select_actions(q, actions)
        rhos = () if estimate is targets.multi_step else (traces,)
        return estimate(values, targets.expectation(q, pi), rewards, discounts, traces, *rhos)

    table, steps = jnp.ones((6, 5, 3)), jnp.ones((6, 5))
    batched = jax.jit(jax.vmap(program, in_axes=1, out_axes=1))
    lowered = batched.lower(table, table, steps.astype(int), steps, steps, steps).as_text()
    assert "stablehlo.while" in lowered and "stablehlo.transpose" not in lowered


@pytest.mark.slow
def test_on_several_devices_and_without_a_compiler():
    arrays = batch(1, 2, 3)
    function = jax.vmap(targets.vtrace)
    mesh, parts = Mesh(np.array(jax.devices("cpu")[:1]), "batch"), PartitionSpec("batch")
    on_devices = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=parts, out_specs=parts))
    np.testing.assert_allclose(on_devices(*arrays), function(*arrays), rtol=1e-6)
    with jax.disable_jit():
        np.testing.assert_allclose(function(*arrays), on_devices(*arrays), rtol=1e-5, atol=1e-6)
    assert function(*(x[:0] for x in arrays)).shape == (0, 3)
