"""The targets on tensors against those in JAX: batches, packed episodes, padding, NaN where nothing may be read, gradients.

python -m venv torch-env && torch-env/bin/pip install -e . --group test torch==2.13.0 torchrl==0.14.1
torch-env/bin/pytest tests/torch_bridge src/marginax/torch
"""

import functools
import inspect
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax import targets as ours

torch = pytest.importorskip("torch", reason="PyTorch is no dependency of marginax")

from marginax.torch import targets  # noqa: E402
from marginax.torch._recursion import _doubling, _loop  # noqa: E402

NAMES = {
    "multi_step": ["q", "v_next", "rewards", "discounts", "traces"],
    "marginalized": ["q", "v_next", "rewards", "discounts", "weights"],
    "marginalized for every start": ["q", "v_next", "rewards", "discounts", "matrix"],
    "vtrace": ["q", "v_next", "rewards", "discounts", "traces", "rhos"],
    "marginalized_vtrace": ["q", "v_next", "rewards", "discounts", "matrix", "rhos"],
    "peng": ["v_next", "rewards", "discounts", "traces"],
}
BATCH, LENGTH = 6, 11


def functions(name):
    """The function of a case, here and in JAX for a batch."""
    function = name.split()[0]
    return getattr(targets, function), getattr(ours, function)


def batch(seed=0, dtype=np.float64):
    """Packed episodes that end or are cut off, ratios on both sides of 1 and some of them 0, padding at the end."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, LENGTH)
    arrays = {name: rng.normal(size=shape) for name in ("q", "v_next", "rewards")}
    arrays["discounts"] = np.where(rng.random(shape) < 0.2, 0.0, rng.choice([0.5, 0.9, 1.0], size=shape))
    for name in ("traces", "rhos"):
        arrays[name] = np.exp(rng.normal(scale=0.7, size=shape)) * (rng.random(shape) > 0.1)
    arrays["weights"] = rng.exponential(size=shape)
    arrays["matrix"] = rng.exponential(size=(*shape, LENGTH))
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    arrays["truncated"] = rng.random(shape) < 0.2
    arrays["valid"] = np.arange(LENGTH) < rng.integers(4, LENGTH + 1, size=(BATCH, 1))
    return arrays


def poisoned(arrays):
    """NaN in the padding, in what follows the end of an episode, and in weights that no start reaches."""
    arrays = {name: array.copy() for name, array in arrays.items()}
    padding, ended = ~arrays["valid"], arrays["discounts"] == 0
    for name in ("q", "v_next", "rewards", "discounts", "traces", "rhos", "weights"):
        arrays[name][padding] = np.nan
    arrays["v_next"][ended] = np.nan
    arrays["matrix"][:, *np.tril_indices(LENGTH, -1)] = np.nan
    return arrays


def by_jax(name, arrays, masked=True):
    with jax.enable_x64(True):
        names = NAMES[name]
        flags = [arrays["truncated"], arrays["valid"]]

        def one(values, truncated, valid):
            return functions(name)[1](*values, truncated, valid=valid if masked else None)

        return np.asarray(jax.jit(jax.vmap(one))([arrays[n] for n in names], *flags))


def tensors(arrays, names, gradient=False):
    found = [torch.from_numpy(arrays[name].copy()) for name in names]
    return [x.requires_grad_() if gradient else x for x in found]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", NAMES)
def test_equals_jax(name, dtype):
    arrays = batch(1, dtype)
    result = functions(name)[0](*tensors(arrays, NAMES[name]), torch.from_numpy(arrays["truncated"]))
    expected = by_jax(
        name, {k: v if v.dtype == bool else v.astype(float) for k, v in arrays.items()}, masked=False
    )
    assert result.dtype == (torch.float64 if dtype is np.float64 else torch.float32)
    tolerance = 1e-12 if dtype is np.float64 else 1e-4
    np.testing.assert_allclose(result.numpy(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NAMES)
def test_nan_is_never_read_and_padding_is_zero(name):
    arrays = batch(2)
    expected = by_jax(name, arrays)
    poison = poisoned(arrays)
    flags = [torch.from_numpy(arrays[n]) for n in ("truncated", "valid")]
    result = functions(name)[0](*tensors(poison, NAMES[name]), flags[0], valid=flags[1])
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert (result.numpy()[~arrays["valid"]] == 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_jax(name):
    """Zero traces and NaN included."""
    arrays = batch(3)
    poison, names = poisoned(arrays), NAMES[name]
    projection = np.random.default_rng(0).normal(size=(BATCH, LENGTH))
    inputs = tensors(poison, names, gradient=True)
    flags = [torch.from_numpy(arrays[n]) for n in ("truncated", "valid")]
    result = functions(name)[0](*inputs, flags[0], valid=flags[1], stop_gradient=False)
    (result * torch.from_numpy(projection)).sum().backward()
    with jax.enable_x64(True):

        def loss(values):
            def one(values, truncated, valid):
                return functions(name)[1](*values, truncated, valid=valid, stop_gradient=False)

            return (jax.vmap(one)(values, arrays["truncated"], arrays["valid"]) * projection).sum()

        expected = jax.jit(jax.grad(loss))([poison[n] for n in names])
    for argument, tensor, want in zip(names, inputs, expected, strict=True):
        np.testing.assert_allclose(tensor.grad.numpy(), want, rtol=1e-10, atol=1e-10, err_msg=argument)


def test_gradients_of_gradients():
    """Against differences of the recursion, along both of its ways."""
    b, a = (torch.rand(2, 5, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(targets.recursion, (b, a))
    assert torch.autograd.gradgradcheck(targets.recursion, (b, a))


def test_targets_are_detached_unless_asked():
    q = torch.ones(3, requires_grad=True)
    assert not targets.multi_step(q, q, 1.0, 0.9, 1.0).requires_grad


@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_doubling_equals_the_loop(length):
    """What CUDA computes is what the CPU computes; with NaN beyond zeros."""
    generator = torch.Generator().manual_seed(length)
    b, a = torch.rand(2, 3, length, dtype=torch.float64, generator=generator)
    a = a * (torch.rand(3, length, generator=generator) > 0.2)
    if length > 2:
        a[:, 1], b[:, 2] = 0, math.nan
    for x, y, dim in [(b, a, -1), (b.T, a.T, 0), (b[..., None], a[..., None], -2)]:
        torch.testing.assert_close(
            _doubling(x, y, dim), _loop(x, y, dim), equal_nan=True, rtol=1e-12, atol=1e-12
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda(name):
    arrays = batch(4)
    inputs = tensors(arrays, [*NAMES[name], "truncated"])
    on_device = functions(name)[0](*(x.cuda() for x in inputs))
    torch.testing.assert_close(on_device.cpu(), functions(name)[0](*inputs))


@pytest.mark.parametrize("name", NAMES)
def test_layouts(name):
    """[T, B], [B, T, 1], more dimensions of batch, and one sequence are the same numbers."""
    function = functions(name)[0]
    inputs = tensors(batch(5), [*NAMES[name], "truncated"])
    expected = function(*inputs)
    first = function(*(x.transpose(0, 1) for x in inputs), dim=0)
    torch.testing.assert_close(first.T, expected)
    trailing = [x.unsqueeze(2) for x in inputs]
    torch.testing.assert_close(function(*trailing, dim=-2)[..., 0], expected)
    nested = function(*(x.reshape(2, 3, *x.shape[1:]) for x in inputs))
    torch.testing.assert_close(nested.reshape(BATCH, LENGTH), expected)
    torch.testing.assert_close(function(*(x[0] for x in inputs)), expected[0])


@pytest.mark.parametrize("n", [1, 3, 20])
def test_n_step_equals_jax(n):
    arrays = poisoned(batch(6))
    names = ["v_next", "rewards", "discounts"]
    valid = torch.from_numpy(arrays["valid"])
    result = targets.n_step(*tensors(arrays, names), n, torch.from_numpy(arrays["truncated"]), valid=valid)
    with jax.enable_x64(True):
        expected = jax.vmap(lambda *a: ours.n_step(*a[:3], n, a[3], valid=a[4]))(
            *(arrays[name] for name in [*names, "truncated", "valid"])
        )
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "peng"])
@pytest.mark.parametrize("gamma", [0.0, 0.7])
def test_random_times_equal_jax(name, gamma):
    arrays = batch(7)
    arrays["discounts"] = np.where(arrays["discounts"] == 0, 0, gamma)
    times = targets.random_times(torch.Generator().manual_seed(0), (BATCH, LENGTH), gamma)
    result = functions(name)[0](*tensors(arrays, [*NAMES[name], "truncated"]), times=times)
    with jax.enable_x64(True):

        def one(values, truncated, stop):
            return functions(name)[1](*values, truncated, times=ours.RandomTimes(stop, jnp.asarray(gamma)))

        given = [arrays[n] for n in NAMES[name]], arrays["truncated"], times.stop.numpy()
        expected = jax.jit(jax.vmap(one))(*given)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_random_times_need_a_discount_below_one():
    with pytest.raises(ValueError, match=r"discount must lie in \[0, 1\), got 1.0"):
        targets.random_times(None, 3, 1.0)


def test_random_times_have_the_geometric_law():
    stop = targets.random_times(torch.Generator().manual_seed(1), (20_000, 30), 0.8).stop.numpy()
    waits = np.where(stop.any(axis=1), stop.argmax(axis=1), 30)
    for n in range(5):
        chance = 0.2 * 0.8**n
        assert abs(np.mean(waits == n) - chance) < 4 * np.sqrt(chance * (1 - chance) / 20_000)


@pytest.mark.parametrize("clip", [0.0, 2.0, math.inf])
def test_log_ratios_equal_jax(clip):
    values = [0.0, -math.inf, math.inf, 3e38, -3e38, -1e4, 90.0, 0.3, math.nan]
    log_pi, log_mu = (x.ravel().astype(np.float32) for x in np.meshgrid(values, values))
    pi, mu = (torch.from_numpy(x).requires_grad_() for x in (log_pi, log_mu))
    result = targets.traces_from_log_ratios(pi, mu, clip=clip, decay=0.7, temperature=0.5)
    expected = ours.traces_from_log_ratios(log_pi, log_mu, clip=clip, decay=0.7, temperature=0.5)
    np.testing.assert_allclose(result.detach().numpy(), expected, rtol=1e-5)
    result[~result.isnan()].sum().backward()
    given = ~(np.isnan(log_pi) | np.isnan(log_mu))
    assert np.isfinite(pi.grad.numpy()[given]).all() and np.isfinite(mu.grad.numpy()[given]).all()


def test_lookups_equal_jax():
    rng = np.random.default_rng(0)
    table, policy = rng.normal(size=(2, 4, 5, 3)).astype(np.float32)
    actions = rng.integers(3, size=(4, 5))
    chosen = targets.select_actions(torch.from_numpy(table), torch.from_numpy(actions))
    np.testing.assert_array_equal(chosen, ours.select_actions(table, actions))
    mean = targets.expectation(torch.from_numpy(table), torch.from_numpy(policy))
    np.testing.assert_allclose(mean, ours.expectation(table, policy), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64])
def test_actions_of_8_bits_are_found_and_those_out_of_range_are_nan(dtype):
    table = torch.arange(600.0).reshape(2, 300)
    found = targets.select_actions(table, torch.tensor([127, 5], dtype=dtype))
    np.testing.assert_array_equal(found, [127, 305])
    np.testing.assert_array_equal(targets.select_actions(table, torch.tensor([-1, 300])), [np.nan, np.nan])
    with pytest.raises(ValueError, match=r"actions must be whole numbers, got torch\.float32"):
        targets.select_actions(table, torch.tensor([1.5, 0.0]))


def test_the_same_names_and_arguments():
    assert targets.__all__ == ours.__all__
    for name in targets.__all__:
        here, there = (inspect.signature(getattr(m, name)).parameters for m in (targets, ours))
        if name not in (
            "random_times",
            "RandomTimes",
        ):  # a generator and a shape instead of a key and a length
            assert [p for p in here if p != "dim"] == [p for p in there if p != "backend"], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.tensor(1.0)}, "q must have at least one step along dim=-1"),
        ({"q": torch.zeros(2, 0)}, "q must have at least one step along dim=-1"),
        ({"rewards": None}, "rewards must be a tensor of real numbers, got None"),
        ({"rewards": "abc"}, "rewards must be a tensor of real numbers, got str"),
        (
            {"rewards": torch.zeros(2, 3) * 1j},
            r"rewards must be a tensor of real numbers, got torch\.complex64",
        ),
        ({"truncated": {}}, "truncated must be a tensor of real numbers, got dict"),
        ({"dim": 2}, r"q must have at least one step along dim=2, but has shape \(2, 3\)"),
        ({"v_next": torch.zeros(4)}, r"v_next must be a number or have shape \(2, 3\)"),
        ({"weights": torch.zeros(2, 3, 2)}, r"weights must have shape \(2, 3\) or \(2, 3, 3\)"),
        (
            {"truncated": torch.zeros(3, dtype=torch.bool)},
            r"truncated must be a number or have shape \(2, 3\)",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    arguments = dict.fromkeys(["q", "v_next", "rewards", "discounts", "weights"], torch.ones(2, 3)) | change
    with pytest.raises(ValueError, match=message):
        targets.marginalized(**arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: targets.recursion(x, torch.ones(4)), r"a must have the shape \(2, 3\) of b"),
        (lambda x: targets.recursion(x, torch.ones(2, 1)), r"a must have the shape \(2, 3\) of b"),
        (lambda x: targets.recursion(x, x, torch.ones(3) < 0), r"cut must have the shape \(2, 3\) of b"),
        (lambda x: targets.recursion(x, None), "a must be a tensor of real numbers, got None"),
        (lambda x: targets.recursion(x[:, :0], x[:, :0]), "b must have at least one step along dim=-1"),
        (
            lambda x: targets.select_actions(1.0, 0),
            r"table must have shape \[\.\.\., A\] with A >= 1, got \(\)",
        ),
        (lambda x: targets.select_actions(x, "up"), "actions must be a tensor of real numbers, got str"),
        (
            lambda x: targets.expectation(x, torch.ones(3)),
            r"policy must have table's shape \(2, 3\), got \(3,\)",
        ),
        (lambda x: targets.expectation("x", x), "table must be a tensor of real numbers, got str"),
        (
            lambda x: targets.traces_from_log_ratios(x, torch.ones(4)),
            r"log_mu must fit the shape \(2, 3\), got \(4,\)",
        ),
        (lambda x: targets.random_times(None, (2, -1), 0.5), "shape must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 3))


def test_lists_are_tensors():
    assert targets.select_actions([[1.0, 2.0]], [1]).tolist() == [2.0]
    assert targets.expectation([1.0, 3.0], [0.5, 0.5]).item() == 2.0
    assert targets.recursion([1.0, 2.0], [0.5, 0.5]).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", NAMES)
def test_function_transforms(name):
    """`torch.func` goes over batches and differentiates as autograd does."""
    function = functools.partial(functions(name)[0], stop_gradient=False)
    inputs = tensors(batch(8), [*NAMES[name], "truncated"])
    torch.testing.assert_close(torch.vmap(function)(*inputs), function(*inputs))
    first = inputs[0].clone().requires_grad_()
    function(first, *inputs[1:]).square().sum().backward()
    by_transform = torch.vmap(torch.func.grad(lambda *x: function(*x).square().sum()))(*inputs)
    torch.testing.assert_close(by_transform, first.grad)


@pytest.mark.parametrize("name", ["clip", "decay", "temperature"])
def test_a_number_out_of_range_is_named(name):
    with pytest.raises(ValueError, match=f"{name} must be .* got -1"):
        targets.traces_from_log_ratios(torch.zeros(2), torch.zeros(2), **{name: -1.0})


def test_neither_import_nor_use_needs_jax():
    script = """
import sys
sys.modules["jax"] = None  # importing it fails
import marginax as mx
assert "torch" not in sys.modules
mx.torch.targets
assert "torch" not in sys.modules
import torch
assert mx.torch.targets.vtrace(torch.ones(3), torch.ones(3), 1.0, 0.5, 1.0, 1.0).shape == (3,)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
