"""What targets are made from: lookups in tables of action values, and traces from log-densities."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax import traces
from marginax.targets import expectation, random_times, recursion, select_actions, traces_from_log_ratios

INF = np.inf


@pytest.mark.parametrize("clip", [0.0, 0.5, 1.0, 3.0])
def test_equals_retrace_of_tables(clip):
    rng = np.random.default_rng(0)
    pi, mu = rng.dirichlet(np.ones(4), size=(2, 5))
    pi[0] = [1, 0, 0, 0]
    with np.errstate(divide="ignore"):
        result = traces_from_log_ratios(np.log(pi), np.log(mu), clip=clip, decay=0.7)
    np.testing.assert_allclose(result, traces.retrace(pi, mu, clip=clip, decay=0.7), rtol=1e-5)


@pytest.mark.parametrize(
    ("log_pi", "log_mu", "expected"),
    [
        (-INF, 0.0, 0.0),  # π has no mass there
        (-INF, -INF, 0.0),
        (-INF, INF, 0.0),
        (0.0, -INF, 2.0),  # only μ has none: the clip
        (INF, 0.0, 2.0),
        (INF, INF, 1.0),  # the same point mass
        (0.0, INF, 0.0),
        (3e38, -3e38, 2.0),
        (-3e38, 3e38, 0.0),
        (-1e4, -1e4, 1.0),
        (90.0, 0.0, 2.0),  # e^90 is not a float32
    ],
)
def test_extreme_ratios(log_pi, log_mu, expected):
    def trace(log_pi, log_mu, temperature):
        return traces_from_log_ratios(log_pi, log_mu, clip=2.0, temperature=temperature)

    arguments = jnp.float32(log_pi), jnp.float32(log_mu), jnp.float32(1.0)
    np.testing.assert_allclose(trace(*arguments), expected)
    gradients = jax.grad(trace, argnums=(0, 1, 2))(*arguments)
    assert np.isfinite(gradients).all()


def test_without_a_clip_the_largest_ratio_is_finite():
    result = traces_from_log_ratios(np.array([1e3, INF, 5.0]), np.zeros(3), clip=INF)
    assert np.isfinite(result).all()
    assert result[0] == result[1] > 1e30
    np.testing.assert_allclose(result[2], np.exp(5.0), rtol=1e-5)


def test_temperature_is_an_exponent():
    ratio = traces_from_log_ratios(np.log([0.2, 4.0]), np.zeros(2), clip=INF, temperature=0.5)
    np.testing.assert_allclose(ratio, np.sqrt([0.2, 4.0]), rtol=1e-5)
    far = traces_from_log_ratios(np.array([300.0]), np.zeros(1), clip=INF, temperature=0.1)
    np.testing.assert_allclose(far, np.exp(30.0), rtol=1e-4)


def test_nan_stays_nan():
    assert np.isnan(traces_from_log_ratios(np.nan, 0.0))


@pytest.mark.parametrize("kind", [float, np.float32, jnp.asarray])
@pytest.mark.parametrize(
    ("name", "value"), [("clip", -1.0), ("clip", INF * 0), ("decay", -0.1), ("temperature", 0.0)]
)
def test_numbers_out_of_range_are_refused(name, value, kind):
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        traces_from_log_ratios(0.0, 0.0, **{name: kind(value)})
    with pytest.raises(ValueError, match=f"{name} must be .*, got {value}"):
        traces_from_log_ratios(
            np.zeros(2), np.zeros(2), **{name: kind([1.0, value]) if kind is jnp.asarray else kind(value)}
        )


@pytest.mark.parametrize("actions", [1, 3, 40])
@pytest.mark.parametrize("lead", [(7,), (2, 5)])
def test_lookups_are_plain_indexing(actions, lead):
    rng = np.random.default_rng(0)
    table, policy = rng.normal(size=(2, *lead, actions))
    chosen = rng.integers(actions, size=lead)
    want = np.take_along_axis(table, chosen[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(select_actions(table, chosen), want, rtol=1e-6)
    np.testing.assert_allclose(expectation(table, policy), (table * policy).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("actions", [1, 3, 16, 17, 40])
def test_actions_out_of_range_are_nan(actions):
    table = np.tile(np.arange(1.0, actions + 1), (4, 1))
    found = select_actions(table, np.array([0, actions - 1, actions, -1]))
    np.testing.assert_array_equal(found, [1, actions, np.nan, np.nan])
    slope = jax.grad(lambda x: jnp.nansum(select_actions(x, jnp.array([0, actions - 1, actions, -1]))))(table)
    assert np.isfinite(slope).all() and slope[:2].sum() == 2 and not slope[2:].any()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.uint16, np.int32])
@pytest.mark.parametrize("actions", [12, 200, 300])
def test_actions_may_come_in_few_bits(actions, dtype):
    chosen = np.arange(min(actions, np.iinfo(dtype).max + 1))
    table = np.random.default_rng(0).normal(size=(chosen.size, actions))
    found = select_actions(table, chosen.astype(dtype))
    np.testing.assert_allclose(found, table[chosen, chosen], rtol=1e-6)


@pytest.mark.parametrize("actions", [3, 40])
def test_actions_that_are_no_integers_are_refused(actions):
    with pytest.raises(ValueError, match="actions must be whole numbers, got float32"):
        select_actions(np.ones((2, actions)), np.array([0.0, 1.5], np.float32))


def test_constants_of_a_compiled_function_are_checked_as_elsewhere():
    found = jax.jit(lambda table: select_actions(table, np.array([1, 0])))(
        jnp.array([[1.0, 2.0], [3.0, 4.0]])
    )
    np.testing.assert_array_equal(found, [2, 3])
    with pytest.raises(ValueError, match=r"clip must be at least 0, got -1\.0"):
        jax.jit(lambda x: traces_from_log_ratios(x, x, clip=-1.0))(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"actions must fit into int32, got 4294967296"):
        jax.jit(lambda table: select_actions(table, np.array([2**32])))(jnp.ones((1, 2)))


@pytest.mark.parametrize("kind", [float, np.float32, jnp.asarray])
@pytest.mark.parametrize("discount", [1.0, -0.5, 2.0])
def test_random_times_need_a_discount_below_one(discount, kind):
    with pytest.raises(ValueError, match=rf"discount must lie in \[0, 1\), got {discount}"):
        random_times(jax.random.key(0), 3, kind(discount))


def test_arguments_of_another_kind_are_refused():
    """Outside pytest, whose run-time type checks would come first."""
    program = """
import jax.numpy as jnp, numpy as np
from marginax.targets import *
one = jnp.ones(3)
for function, values, last, options in [
    (multi_step, one, 1.0, {"backend": "scam"}),
    (marginalized, one, one, {"backend": "scam"}),
    (marginalized, one, jnp.ones((3, 3)), {"backend": "scam"}),
    (multi_step, None, 1.0, {}),
    (marginalized, one, None, {}),
    (multi_step, "one", 1.0, {}),
    (multi_step, np.ones(3, complex), 1.0, {}),
    (multi_step, np.ma.ones(3), 1.0, {}),
    (vtrace, one, [1, 2, "x"], {"rhos": 1}),
    (multi_step, one, 1.0, {"valid": {}}),
    (multi_step, one, 1.0, {"times": 3}),
]:
    try:
        function(values, one, one, 0.9, last, **options)
    except ValueError as error:
        print(error)
for function, given in [
    (recursion, (one, None)),
    (expectation, (np.array([None]), one)),
    (select_actions, (jnp.ones((1, 2)), np.array([2**32]))),
    (traces_from_log_ratios, (one, None)),
]:
    try:
        function(*given)
    except ValueError as error:
        print(error)
"""
    command, variables = (
        [sys.executable, "-c", program],
        {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    said = "backend must be one of auto, scan, associative, got 'scam'; did you mean 'scan'?"
    wanted = "must be an array of real numbers, got"
    assert found.stdout.splitlines() == [
        *[said] * 3,
        f"q {wanted} None",
        f"weights {wanted} None",
        f"q {wanted} str",
        f"q {wanted} ndarray of complex128",
        f"q {wanted} MaskedArray of float64",
        f"traces {wanted} list",
        f"valid {wanted} dict",
        "times must be what random_times returns.",
        f"a {wanted} None",
        f"table {wanted} ndarray of object",
        "actions must fit into int32, got 4294967296",
        f"log_mu {wanted} None",
    ]


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"actions must have shape \(3,\)"):
        select_actions(np.ones((3, 2)), np.ones(4, int))
    with pytest.raises(ValueError, match=r"policy must have table's shape \(3, 2\)"):
        expectation(np.ones((3, 2)), np.ones((3, 1)))
    for lookup in (select_actions, expectation):
        with pytest.raises(ValueError, match=r"table must have shape \[..., A\] with A >= 1, got \(\)"):
            lookup(1.0, 0)
    with pytest.raises(ValueError, match=r"log_mu must fit the shape \(3,\), got \(4,\)"):
        traces_from_log_ratios(np.ones(3), np.ones(4))
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        random_times(jax.random.key(0), 0, 0.9)
    for name, wrong in {"b": [], "a": np.ones(2), "cut": np.zeros(2, bool)}.items():
        arguments = {"b": np.ones(3), "a": np.ones(3), "cut": np.zeros(3, bool)} | {name: wrong}
        with pytest.raises(ValueError, match=f"{name} must have"):
            recursion(**arguments)
