"""Targets against the paper's sums, peers, and themselves: jitted, batched, packed, differentiated, with NaN around."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marginax import targets
from reference import targets as naive

BACKENDS = ["auto", "associative"]  # on a CPU, auto is the scan


def sequence(seed, length, dtype=np.float32):
    """A random sequence: several episodes, terminal and truncated steps, ratios on both sides of 1, some of them 0."""
    rng = np.random.default_rng(seed)
    values = {name: rng.normal(size=length) for name in ("q", "v_next", "rewards")}
    discounts = np.where(rng.random(length) < 0.2, 0.0, rng.choice([0.5, 0.9, 1.0], size=length))
    ratios = np.exp(rng.normal(scale=0.7, size=(2, length))) * (rng.random((2, length)) > 0.1)
    arrays = {
        **values,
        "discounts": discounts,
        "traces": ratios[0],
        "rhos": ratios[1],
        "weights": rng.exponential(size=(length, length)),
        "truncated": rng.random(length) < 0.2,
    }
    return {name: array.astype(dtype) if array.dtype != bool else array for name, array in arrays.items()}


def take(s, *names):
    return [s[name] for name in names]


CASES = {
    "multi_step": (targets.multi_step, naive.multi_step, ["q", "v_next", "rewards", "discounts", "traces"]),
    "marginalized": (
        targets.marginalized,
        naive.marginalized,
        ["q", "v_next", "rewards", "discounts", "weights"],
    ),
    "vtrace": (targets.vtrace, naive.vtrace, ["q", "v_next", "rewards", "discounts", "traces", "rhos"]),
    "marginalized_vtrace": (
        targets.marginalized_vtrace,
        naive.marginalized_vtrace,
        ["q", "v_next", "rewards", "discounts", "weights", "rhos"],
    ),
    "peng": (targets.peng, naive.peng, ["v_next", "rewards", "discounts", "traces"]),
}
JITTED = {
    (name, backend): jax.jit(partial(case[0], backend=backend))
    for name, case in CASES.items()
    for backend in BACKENDS
}

# Both ways for the recursion of numbers and of vectors; the other targets share them.
WAYS = [(name, "auto") for name in CASES] + [("multi_step", "associative"), ("marginalized", "associative")]

lengths = st.sampled_from([1, 16])  # few, and the same throughout: each compiles anew
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
@examples
@given(seed=seeds, length=lengths)
def test_targets_are_the_papers_sums(name, backend, seed, length):
    _, reference, names = CASES[name]
    s = sequence(seed, length)
    result = JITTED[name, backend](*take(s, *names), s["truncated"])
    expected = reference(*(a.astype(float) for a in take(s, *names)), s["truncated"])
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-4)


@examples
@given(seed=seeds, length=lengths)
def test_weights_of_one_dimension_stand_for_every_start(seed, length):
    s = sequence(seed, length)
    weights = s["weights"][0]
    result = JITTED["marginalized", "auto"](
        *take(s, "q", "v_next", "rewards", "discounts"), weights, s["truncated"]
    )
    alike = np.broadcast_to(weights, (length, length))
    expected = naive.marginalized(*take(s, "q", "v_next", "rewards", "discounts"), alike, s["truncated"])
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-4)


@examples
@given(seed=seeds, length=lengths, n=st.sampled_from([1, 2, 3, 20]))
def test_n_step_is_its_sum(seed, length, n):
    s = sequence(seed, length)
    result = targets.n_step(*take(s, "v_next", "rewards", "discounts"), n, s["truncated"])
    expected = naive.n_step(*take(s, "v_next", "rewards", "discounts"), n, s["truncated"])
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


def draw(seed, length, gamma):
    """Random times, and discounts that are γ or 0 as the law of the times takes for granted."""
    s = sequence(seed, length)
    s["discounts"] = np.where(s["discounts"] == 0, 0, gamma).astype(np.float32)
    return s, targets.random_times(jax.random.key(seed), length, gamma)


@examples
@given(seed=seeds, length=lengths, gamma=st.sampled_from([0.0, 0.5, 0.9]))
def test_random_time_estimates_are_one_term(seed, length, gamma):
    s, times = draw(seed, length, gamma)
    common = take(s, "q", "v_next", "rewards", "discounts")
    law = (s["truncated"], np.asarray(times.stop), gamma)
    result = targets.multi_step(*common, s["traces"], s["truncated"], times=times)
    expected = naive.multi_step_at_random_time(*common, s["traces"], *law)
    np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-4)
    for weights in (s["weights"], s["weights"][0]):
        result = targets.marginalized(*common, weights, s["truncated"], times=times)
        alike = np.broadcast_to(weights, (length, length))
        expected = naive.marginalized_at_random_time(*common, alike, *law)
        np.testing.assert_allclose(result, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("estimate", ["multi_step", "marginalized", "vtrace", "marginalized_vtrace"])
def test_the_mean_over_random_times_is_the_trajectory_based_target(estimate):
    """The blue arrows of the appendix's diagram: E[R_τ | trajectory] = R, by the exact law of the coins."""
    length, gamma = 6, 0.7
    s, _ = draw(3, length, gamma)
    function, _, names = CASES[estimate]
    coins = np.array(list(np.ndindex(*[2] * length)), bool)
    chances = np.where(coins, 1 - gamma, gamma).prod(axis=1)
    arrays = take(s, *names)

    def given_coins(stop):
        times = targets.RandomTimes(stop, jnp.asarray(gamma))
        return function(*arrays, s["truncated"], times=times)

    mean = chances @ np.asarray(jax.vmap(given_coins)(jnp.asarray(coins)), float)
    np.testing.assert_allclose(mean, function(*arrays, s["truncated"]), rtol=1e-4, atol=1e-4)


def test_random_times_have_the_geometric_law():
    gamma, length, draws = 0.8, 40, 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    stop = np.asarray(jax.vmap(lambda key: targets.random_times(key, length, gamma).stop)(keys))
    for start in (0, 13):
        waits = np.where(stop[:, start:].any(axis=1), stop[:, start:].argmax(axis=1), length)
        for n in range(6):
            chance = (1 - gamma) * gamma**n
            deviation = (np.mean(waits == n) - chance) / np.sqrt(chance * (1 - chance) / draws)
            assert abs(deviation) < 4


# What must never be read


def poisoned(length=16):
    """A sequence with NaN wherever nothing may read; the targets of its first five steps must be finite.

    Steps 0-1 are an episode that terminates, 2-4 one that is truncated; what follows is padding.
    """
    s = sequence(11, length)
    s["discounts"] = np.array([0.9, 0, 0.9, 0.9, 0.9] + [np.nan] * (length - 5), np.float32)
    s["truncated"] = np.arange(length) == 4
    s["v_next"][1] = np.nan  # after the terminal step
    for name in ("q", "v_next", "rewards", "traces", "rhos"):
        s[name][5:] = np.nan
    unreachable = np.ones((length, length), bool)
    for start, stop in [(0, 2), (2, 5)]:
        unreachable[start:stop, start:stop] = np.tri(stop - start, k=-1, dtype=bool)
    s["weights"] = np.where(unreachable, np.nan, s["weights"])
    return s


def clean(s):
    """The same sequence with numbers in place of NaN."""
    return {name: np.where(np.isnan(a), 7, a) if a.dtype != bool else a for name, a in s.items()}


def poison_traces(s, name):
    s["traces"][[1, 4] if name == "vtrace" else [0, 2]] = np.nan
    return s


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(("name", "backend"), WAYS)
def test_nan_is_never_read(name, mask, backend):
    names = CASES[name][2]
    s = poison_traces(poisoned(), name)
    valid = np.arange(16) < 5 if mask else None
    result = JITTED[name, backend](*take(s, *names), s["truncated"], valid=valid)
    expected = JITTED[name, backend](*take(clean(s), *names), s["truncated"])
    np.testing.assert_allclose(result[:5], expected[:5], rtol=1e-5)
    if mask:
        np.testing.assert_array_equal(result[5:], 0)


@pytest.mark.parametrize(("name", "backend"), WAYS)
def test_nan_does_not_reach_gradients(name, backend):
    function, _, names = CASES[name]
    s = poison_traces(poisoned(7), name)
    valid = jnp.arange(7) < 5

    def loss(arrays):
        result = function(*arrays, s["truncated"], valid=valid, backend=backend, stop_gradient=False)
        return jnp.sum(result**2)

    gradient_of = jax.jit(jax.grad(loss))
    gradients, expected = gradient_of(take(s, *names)), gradient_of(take(clean(s), *names))
    for name, gradient, want in zip(names, gradients, expected, strict=True):
        np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-5, err_msg=name)


def test_n_step_reads_no_nan():
    s = poisoned()
    result = targets.n_step(*take(s, "v_next", "rewards", "discounts"), 3, s["truncated"])
    assert np.isfinite(result[:5]).all()


def test_a_step_before_padding_is_cut_even_if_nothing_else_says_so():
    s = sequence(5, 6)
    s["discounts"][:] = 0.9
    names = ["q", "v_next", "rewards", "discounts", "traces"]
    result = targets.multi_step(*take(s, *names), valid=np.arange(6) < 4)
    expected = targets.multi_step(*(a[:4] for a in take(s, *names)))
    np.testing.assert_allclose(result[:4], expected, rtol=1e-6)


# Transformations


@pytest.mark.parametrize("name", CASES)
def test_plain_jitted_and_batched_agree(name):
    function, _, names = CASES[name]
    names = [*names, "truncated"]
    batch = [sequence(seed, 7) for seed in range(3)]
    one_by_one = np.stack([function(*take(s, *names)) for s in batch])
    stacked = [np.stack([s[n] for s in batch]) for n in names]
    np.testing.assert_allclose(jax.vmap(function)(*stacked), one_by_one, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(function))(*stacked), one_by_one, rtol=1e-5, atol=1e-6)
    last = [np.moveaxis(a, 0, -1) for a in stacked]
    batched = jax.jit(jax.vmap(function, in_axes=-1, out_axes=-1))(*last)
    np.testing.assert_allclose(batched, one_by_one.T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_and_mixed_precision_are_welcome(dtype, backend):
    arrays = take(sequence(2, 7), "q", "v_next", "rewards", "discounts", "traces")
    expected = targets.multi_step(*arrays)
    half = targets.multi_step(*(jnp.asarray(array, dtype) for array in arrays), backend=backend)
    assert half.dtype == dtype
    np.testing.assert_allclose(half.astype(np.float32), expected, rtol=0.1, atol=0.1)
    for place in (0, 4):
        mixed = [jnp.asarray(array, dtype if i == place else None) for i, array in enumerate(arrays)]
        result = targets.multi_step(*mixed, backend=backend)
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_unless_asked(name):
    function, _, names = CASES[name]
    s = sequence(1, 7)
    gradients = jax.grad(lambda arrays: function(*arrays, s["truncated"]).sum())(take(s, *names))
    assert all((np.asarray(g) == 0).all() for g in gradients)


@pytest.mark.parametrize(("name", "backend"), WAYS)
def test_gradients_are_those_of_the_sum(name, backend):
    """Forward and reverse, zero traces included, against differences of the naive sum in float64."""
    function, reference, names = CASES[name]
    with jax.enable_x64(True):
        s = sequence(4, 7, np.float64)
        assert (s["traces"] == 0).any() or name.startswith("marginalized")
        arrays = take(s, *names)
        projection = np.random.default_rng(0).normal(size=7)

        def loss(arrays):
            result = function(*arrays, s["truncated"], backend=backend, stop_gradient=False)
            return result @ projection

        gradients = jax.jit(jax.grad(loss))(arrays)
        derivative = jax.jit(lambda arrays, shift: jax.jvp(loss, (arrays,), (shift,))[1])
        for i, argument in enumerate(names):
            if argument == "discounts":  # a discount of zero is a fact about the episode, not a number
                continue
            direction = np.random.default_rng(i).normal(size=arrays[i].shape)
            shift = [np.zeros_like(a) for a in arrays]
            shift[i] = direction
            forward = derivative(arrays, shift)
            ends = [
                np.dot(
                    reference(*(a + h * d for a, d in zip(arrays, shift, strict=True)), s["truncated"]),
                    projection,
                )
                for h in (-1e-4, 1e-4)
            ]
            expected = (ends[1] - ends[0]) / 2e-4
            np.testing.assert_allclose(np.vdot(gradients[i], direction), expected, rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(forward, expected, rtol=1e-6, atol=1e-7)


@examples
@given(seed=seeds)
def test_a_packed_sequence_is_its_episodes_one_by_one(seed):
    s = sequence(seed, 16)
    ends = np.flatnonzero((s["discounts"] == 0) | s["truncated"]) + 1
    for name, (_, reference, names) in CASES.items():
        packed = JITTED[name, "auto"](*take(s, *names), s["truncated"])
        for start, stop in zip([0, *ends], [*ends, 16], strict=True):
            if start == stop:
                continue
            inside = slice(start, stop)
            alone = [a[inside, inside] if a.ndim == 2 else a[inside] for a in take(s, *names)]
            expected = reference(*alone, s["truncated"][inside])
            np.testing.assert_allclose(packed[inside], expected, rtol=2e-4, atol=2e-4, err_msg=name)


def test_long_products_neither_overflow_nor_lose_what_counts():
    """Importance sampling over 1,024 steps: products of ratios fall to 1e-200 in theory."""
    rng = np.random.default_rng(0)
    length = 1024
    traces = np.exp(rng.normal(-0.5, 1.0, size=length)).astype(np.float32)
    arrays = [rng.normal(size=length).astype(np.float32) for _ in range(3)]
    discounts = np.full(length, 0.99, np.float32)
    scan, associative = (
        targets.multi_step(*arrays, discounts, traces, backend=b) for b in ("scan", "associative")
    )
    expected = naive.multi_step(
        *(a[-200:].astype(float) for a in (*arrays, discounts, traces)), [False] * 200
    )
    np.testing.assert_allclose(scan[-200:], expected, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(scan, associative, rtol=1e-3, atol=1e-3)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((2, 3))}, r"q must be a sequence \[T\]"),
        ({"q": np.zeros(0)}, r"q must be a sequence \[T\]"),
        ({"v_next": np.zeros(4)}, r"v_next must have shape \(3,\)"),
        ({"rewards": np.zeros((3, 1))}, r"rewards must have shape \(3,\)"),
        ({"discounts": np.zeros(2)}, r"discounts must have shape \(3,\)"),
        ({"weights": np.zeros((3, 2))}, r"weights must have shape \(3,\) or \(3, 3\)"),
        ({"weights": np.zeros(2)}, r"weights must have shape \(3,\)"),
        ({"truncated": np.zeros(2, bool)}, r"truncated must have shape \(3,\)"),
        ({"valid": np.zeros(2, bool)}, r"valid must have shape \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    arguments = dict.fromkeys(["q", "v_next", "rewards", "discounts", "weights"], np.ones(3)) | change
    with pytest.raises(ValueError, match=message):
        targets.marginalized(**arguments)


def test_n_step_needs_a_step():
    with pytest.raises(ValueError, match="steps must be at least 1"):
        targets.n_step(np.ones(3), np.ones(3), np.ones(3), 0)


def test_whole_numbers_and_numbers_for_all_steps_are_welcome():
    result = targets.multi_step([1, 2], np.array([2, 9]), jnp.array([1, 1]), 0.5, 1)
    np.testing.assert_allclose(result, [2 + 0.5 * 3.5, 5.5])


def test_a_list_is_one_argument_of_the_compiled_program():
    """Not one for each of its entries, which takes a second to compile for a thousand of them."""
    program = jax.make_jaxpr(lambda x: targets.multi_step([1.0] * 50, x, [0.0] * 50, 0.9, 1.0))(jnp.ones(50))
    inner = next(equation for equation in program.eqns if equation.primitive.name == "jit")
    assert len(inner.invars) == 5
