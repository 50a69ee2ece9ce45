"""Values and visitation against sums over time, and what happens with bad input."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given

from marginax import TabularMDP, policies
from marginax import problems as library
from marginax._solve import Resolvent
from reference.core import problems, walk


def pairs(mdp):
    return itertools.product(range(mdp.num_states), range(mdp.num_actions))


@given(problems(support=False))
def test_values_are_the_expected_discounted_sum_of_rewards(problem):
    mdp, pi, _ = problem
    q = mdp.q_values(pi)
    for start in pairs(mdp):
        expected = sum(mdp.discount**t * chance * mdp.r[x, a] for t, x, a, chance in walk(mdp, pi, start))
        assert q[start] == pytest.approx(expected, abs=1e-10)
    np.testing.assert_allclose(mdp.v_values(pi), (pi * q).sum(axis=1), atol=1e-12)


@given(problems(support=False))
def test_visitation_is_the_discounted_chance_of_being_there(problem):
    mdp, _, mu = problem
    visits = mdp.visitation(mu)
    for start in pairs(mdp):
        expected = np.zeros(mdp.r.shape)
        for t, x, a, chance in walk(mdp, mu, start):
            expected[x, a] += (1 - mdp.discount) * mdp.discount**t * chance
        np.testing.assert_allclose(visits[start], expected, atol=1e-12)
        np.testing.assert_array_equal(visits[start] == 0, expected == 0)
        np.testing.assert_allclose(mdp.credit_row(mu, start) * (1 - mdp.discount), expected, atol=1e-12)


@given(problems())
def test_sparse_and_dense_agree(problem):
    mdp, pi, mu = problem
    twin = TabularMDP(sp.coo_array(mdp.p.reshape(mdp.r.size, -1)), mdp.r, mdp.discount)
    assert twin.is_sparse
    np.testing.assert_allclose(twin.q_values(pi), mdp.q_values(pi), atol=1e-12)
    np.testing.assert_allclose(twin.visitation(mu), mdp.visitation(mu), atol=1e-12)
    np.testing.assert_array_equal(twin.dense_p(), mdp.p)
    np.testing.assert_allclose(twin.credit_row(mu, (0, 0)), mdp.credit_row(mu, (0, 0)), atol=1e-12)


def test_small_visits_are_as_accurate_as_large_ones():
    mdp, _, mu = library.open_world(n=10, discount=0.5)
    far = mdp.visitation(mu)[0, 2]
    # Along a line of shortest paths the chance is a sum of non-negative terms, here by powers.
    p = np.einsum("xay,yb->xayb", mdp.p, mu).reshape(400, 400)
    total, current = np.zeros(400), np.eye(400)[2]
    for t in range(2000):
        total += 0.5 * 0.5**t * current
        current = current @ p
    reached = total > 1e-290
    np.testing.assert_allclose(far.ravel()[reached], total[reached], rtol=1e-12)


@pytest.mark.parametrize("kind", ["acyclic forward", "acyclic shuffled", "map", "general", "iterative"])
def test_every_way_of_solving_agrees_with_dense(kind, monkeypatch):
    generator = np.random.default_rng(3)
    size = 60
    if kind.startswith("acyclic"):
        kernel = np.triu(generator.random((size, size)) * (generator.random((size, size)) < 0.1))
    elif kind == "map":
        kernel = np.zeros((size, size))
        kernel[np.arange(size), generator.integers(size, size=size)] = generator.random(size)
        kernel[7] = 0.0
    else:
        kernel = generator.random((size, size)) * (generator.random((size, size)) < 0.1)
    kernel /= np.maximum(kernel.sum(axis=1, keepdims=True), 1.0)
    if kind == "acyclic shuffled":
        order = generator.permutation(size)
        kernel = kernel[order][:, order]
    if kind == "iterative":
        monkeypatch.setattr("marginax._solve.DIRECT_LIMIT", 0)
    resolvent = Resolvent(sp.csr_array(kernel), 0.97)
    inverse = np.linalg.inv(np.eye(size) - 0.97 * kernel)
    for b in (generator.normal(size=size), generator.normal(size=(size, 2)), np.eye(size)[3]):
        np.testing.assert_allclose(resolvent(b), inverse @ b, atol=1e-9)
        np.testing.assert_allclose(resolvent.transposed(b), inverse.T @ b, atol=1e-9)


def test_iteration_survives_a_breakdown_of_bicgstab(monkeypatch):
    generator = np.random.default_rng(0)
    kernel = sp.csr_array(generator.dirichlet(np.ones(30), size=30))
    monkeypatch.setattr("marginax._solve.DIRECT_LIMIT", 0)
    monkeypatch.setattr("marginax._solve.spla.bicgstab", lambda a, b, **k: (np.full_like(b, np.nan), -10))
    b = generator.normal(size=30)
    expected = np.linalg.solve(np.eye(30) - 0.9 * kernel.toarray(), b)
    np.testing.assert_allclose(Resolvent(kernel, 0.9)(b), expected, atol=1e-9)


@pytest.mark.parametrize("discount", [0.99999, 0.9999999])
def test_iteration_ends_where_rounding_hides_the_bound(discount, monkeypatch):
    """For γ near 1 the residual that the bound asks for is smaller than the rounding of one sweep."""
    monkeypatch.setattr("marginax._solve.DIRECT_LIMIT", 0)
    mdp, pi, _ = library.garnet(300, 2, 2, seed=0, discount=discount, sparse=True)
    paths = Resolvent(mdp.state_kernel(pi), discount)
    system = np.eye(300) - discount * paths.kernel.toarray()
    b = (pi * mdp.r).sum(axis=1)
    for found, expected in (
        (paths(b), np.linalg.solve(system, b)),
        (paths.transposed(b), np.linalg.solve(system.T, b)),
    ):
        np.testing.assert_allclose(found, expected, atol=1e-14 / (1 - discount) * np.abs(expected).max())


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e12])
def test_optimal_values_do_not_depend_on_the_unit_of_rewards(scale):
    """A large reward so far away that value iteration stops before it is seen from the other end of a line."""
    size, discount = 2600, 0.9999
    state, action = np.divmod(np.arange(2 * size), 2)
    after = np.clip(state + 2 * action - 1, 0, size - 1)
    p = sp.csr_array((np.ones(2 * size), (np.arange(2 * size), after)), shape=(2 * size, size))
    r = np.zeros((size, 2))
    r[0, 0], r[-1, 1] = 1e-3 * scale, scale
    q = TabularMDP(p, r, discount).optimal_values()
    always_right = discount ** np.arange(size - 1, -1, -1) * scale / (1 - discount)
    np.testing.assert_allclose(q.max(axis=1), always_right, rtol=1e-9)


def test_policy_iteration_ends_where_rounding_is_all_that_tells_actions_apart():
    """All actions of a state do the same, rewards are large, and the value of state 0 is nearly zero."""
    generator = np.random.default_rng(45)
    p = generator.dirichlet(np.full(12, 0.3), (12, 1)).repeat(6, axis=1)
    p *= 1 + 1e-16 * generator.normal(size=p.shape)
    r = np.repeat(generator.normal(size=(12, 1)) * 1e12, 6, axis=1)
    r *= 1 + 1e-16 * generator.normal(size=r.shape)
    uniform = policies.uniform(12, 6)
    r -= (1 - 0.999) * TabularMDP(p, r, 0.999).v_values(uniform)[0]
    mdp = TabularMDP(p, r, 0.999)
    np.testing.assert_allclose(
        mdp.optimal_values(), mdp.q_values(uniform), atol=1e-10 * np.abs(r).max() * 1000
    )


@given(problems(support=False))
def test_optimal_values_solve_the_optimality_equation(problem):
    mdp, pi, _ = problem
    q = mdp.optimal_values()
    np.testing.assert_allclose(q, mdp.r + mdp.discount * mdp.p @ q.max(axis=1), atol=1e-8)
    assert (q >= mdp.q_values(pi) - 1e-8).all()
    np.testing.assert_allclose(mdp.q_values(mdp.greedy_policy(q)), q, atol=1e-8)


P = [[[0.5, 0.5], [0.0, 1.0]], [[0.2, 0.3], [0.0, 0.0]]]
R = [[1, 2], [3, 4]]


def changed(values, place, value):
    values = np.array(values, dtype=float)
    values[place] = value
    return values


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"p": np.zeros((2, 2))}, r"p must have shape \(2, 2, 2\), got \(2, 2\)"),
        ({"p": changed(P, (0, 1, 0), np.nan)}, r"p must be finite, but p\[0, 1, 0\] = nan"),
        ({"p": changed(P, (1, 0, 1), -0.25)}, r"p must not be negative, but p\[1, 0, 1\] = -0.25"),
        ({"p": changed(P, (0, 0, 0), 0.75)}, r"rows of p must sum to at most 1, but p\[0, 0\] sums to 1.25"),
        ({"p": sp.csr_array(np.eye(3))}, r"p must have shape \(4, 2\) when sparse, got \(3, 3\)"),
        (
            {"p": sp.csr_array(changed(P, (1, 0, 1), -1).reshape(4, 2))},
            r"p must not be negative, but p\[1, 0, 1\] = -1",
        ),
        (
            {"p": sp.csr_array(changed(P, (1, 1, 0), np.inf).reshape(4, 2))},
            r"p must be finite, but p\[1, 1, 0\] = inf",
        ),
        ({"p": "words"}, "p must be an array of real numbers, got str"),
        ({"r": [[1, np.inf], [3, 4]]}, r"r must be finite, but r\[0, 1\] = inf"),
        ({"r": [1, 2]}, r"r must have shape \(any, any\), got \(2,\)"),
        ({"r": np.zeros((0, 2))}, r"r must have at least one state and one action, got shape \(0, 2\)"),
        ({"discount": 1.0}, r"discount must lie in \[0, 1\), got 1.0"),
        ({"discount": -0.1}, r"discount must lie in \[0, 1\), got -0.1"),
        ({"discount": np.nan}, "discount must be finite, got nan"),
        ({"initial": [0.5, 0.4]}, "initial must sum to 1, but initial sums to 0.9"),
        ({"initial": [1.5, -0.5]}, r"initial must not be negative, but initial\[1\] = -0.5"),
        ({"reward_std": [[0, 0], [-1, 0]]}, r"reward_std must not be negative, but reward_std\[1, 0\] = -1"),
    ],
)
def test_bad_input_is_named(arguments, sentence):
    given_ = {"p": P, "r": R, "discount": 0.9} | arguments
    with pytest.raises(ValueError, match=sentence):
        TabularMDP(**given_)


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        ([[1.0, 0.0]], r"pi must have shape \(2, 2\), got \(1, 2\)"),
        ([[0.5, 0.5], [0.5, 0.4]], r"pi must sum to 1, but pi\[1\] sums to 0.9"),
        ([[1.5, -0.5], [0.5, 0.5]], r"pi must not be negative, but pi\[0, 1\] = -0.5"),
        ([[1.0, 0.0], [np.nan, 1.0]], r"pi must be finite, but pi\[1, 0\] = nan"),
    ],
)
def test_bad_policies_are_named(policy, sentence):
    with pytest.raises(ValueError, match=sentence):
        TabularMDP(P, R, 0.9).q_values(policy)


@pytest.mark.parametrize("start", [(2, 0), (0, 2), (0, -1)])
def test_bad_starts_are_named(start):
    with pytest.raises(ValueError, match="start"):
        TabularMDP(P, R, 0.9).credit_row(np.ones((2, 2)), start)


@pytest.mark.parametrize("method", ["state_kernel", "credit", "credit_row"])
def test_bad_measures_are_named(method):
    call = getattr(TabularMDP(P, R, 0.9), method)
    start = ((0, 0),) if method == "credit_row" else ()
    for measure, sentence in (
        (np.ones((1, 2)), r"measure must have shape \(2, 2\), got \(1, 2\)"),
        (np.full((2, 2), np.nan), r"measure must be finite, but measure\[0, 0\] = nan"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call(measure, *start)
    if start or method == "credit":
        with pytest.raises(ValueError, match="measure is too large: its sum over time does not converge"):
            call(np.full((2, 2), 5.0), *start)


def test_an_expectation_over_successors_takes_values_of_states():
    for p in (P, sp.csr_array(np.reshape(P, (4, 2)))):
        for v in (np.ones(3), np.ones((1, 2)), np.ones((2, 2, 2))):
            with pytest.raises(ValueError, match=r"v must have shape \(2,\) or \(2, k\), got"):
                TabularMDP(p, R, 0.9).expect_next(v)


def read_only(values):
    values.setflags(write=False)
    return values


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p.tolist(),
        np.asfortranarray,
        lambda p: np.repeat(p, 2, axis=2)[:, :, ::2],
        lambda p: read_only(p.copy()),
        lambda p: jnp.asarray(p),
        lambda p: p.astype(np.float32),
        lambda p: sp.csc_matrix(p.reshape(4, 2)),
    ],
    ids=["list", "fortran", "strided", "read-only", "jax", "float32", "csc"],
)
def test_every_kind_of_array_is_accepted_and_left_alone(form):
    p = np.array([[[0.5, 0.5], [0.0, 1.0]], [[0.25, 0.25], [0.0, 0.0]]])
    source = form(p)
    before = source.toarray().copy() if sp.issparse(source) else np.array(source)
    mdp = TabularMDP(source, np.array(R), 0.9)
    np.testing.assert_allclose(
        mdp.q_values([[1, 0], [0, 1]]), TabularMDP(p, R, 0.9).q_values([[1, 0], [0, 1]])
    )
    after = source.toarray() if sp.issparse(source) else np.array(source)
    np.testing.assert_array_equal(before, after)
    with pytest.raises(ValueError, match="read-only"):
        mdp.r[0, 0] = 5.0


def test_policies_and_transitions_in_single_precision_are_accepted():
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(7), size=(7, 3))
    pi = generator.dirichlet(np.ones(3), size=7)
    exact = TabularMDP(p, np.ones((7, 3)), 0.9).q_values(pi)
    single = TabularMDP(jnp.asarray(p, jnp.float32), jnp.ones((7, 3)), 0.9)
    assert not single.termination.any()
    np.testing.assert_allclose(single.q_values(jnp.asarray(pi, jnp.float32)), exact, rtol=1e-4)
    with pytest.raises(ValueError, match="pi must sum to 1"):
        single.q_values(jnp.asarray(pi, jnp.float32) * 1.001)


@pytest.mark.parametrize(
    "form",
    [
        lambda p: p.astype(np.float32),
        lambda p: [[jnp.asarray(row, jnp.float32) for row in rows] for rows in p],
        lambda p: sp.csr_array(p.reshape(-1, 7).astype(np.float32)),
        lambda p: p * (1 + 5e-9),
    ],
    ids=["float32", "list", "sparse", "off by a little"],
)
def test_rows_that_sum_to_1_up_to_rounding_lose_and_gain_nothing(form):
    """A reward of 1 for ever is worth 1 / (1-γ); an error of 1e-7 in every row would miss 1e-4 of it."""
    generator = np.random.default_rng(0)
    p, pi = generator.dirichlet(np.ones(7), size=(7, 3)), np.tile([0.0, 0.3, 0.7], (7, 1))
    p[:, 0] *= 0.5  # action 0 may end the episode
    mdp = TabularMDP(form(p), np.ones((7, 3)), 0.999)
    np.testing.assert_allclose(mdp.v_values(pi.astype(np.float32)), 1000, rtol=1e-11)
    np.testing.assert_allclose(mdp.v_values(pi * (1 + 5e-9)), 1000, rtol=1e-11)
    np.testing.assert_allclose(mdp.termination, np.repeat([[0.5, 0, 0]], 7, axis=0), atol=1e-6)


class Tensor:
    """An array of another library, such as PyTorch, whose types NumPy does not know."""

    dtype = "torch.float32"

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, np.float32)


def test_tensors_of_other_libraries_are_read_in_their_precision():
    third = [[1 / 3, 1 / 3, 1 / 3]]
    p = np.full((1, 3, 1), 0.5)
    expected = TabularMDP(p, [[1.0, 2.0, 6.0]], 0.5).v_values(third)
    found = TabularMDP(Tensor(p), Tensor([[1.0, 2.0, 6.0]]), 0.5, initial=Tensor([1.0])).v_values(
        Tensor(third)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_inputs_are_copied():
    r = np.array(R, dtype=float)
    mdp = TabularMDP(P, r, 0.9)
    r[0, 0] = 100.0
    assert mdp.r[0, 0] == 1.0


def test_integer_arrays_are_promoted():
    mdp = TabularMDP(np.array([[[1]]]), np.array([[1]]), 0.5)
    assert mdp.q_values(np.array([[1]])).item() == pytest.approx(2.0)


def test_a_matrix_of_pairs_that_does_not_fit_is_refused_before_it_is_made(monkeypatch):
    mdp, _, mu = library.open_world(n=20)
    monkeypatch.setattr("marginax._checks.available_memory", lambda: 2**20)
    with pytest.raises(ValueError, match="1600 by 1600 pairs needs about"):
        mdp.visitation(mu)


def test_defaults():
    mdp = TabularMDP(P, R, 0.9)
    np.testing.assert_allclose(mdp.initial, [0.5, 0.5])
    assert not mdp.reward_std.any()
    np.testing.assert_allclose(mdp.termination, [[0, 0], [0.5, 1.0]])
    assert repr(mdp) == "TabularMDP(2 states, 2 actions, discount 0.9, dense)"


def test_policies():
    q = np.array([[1.0, 3.0, 3.0], [0.0, -1.0, -2.0]])
    np.testing.assert_array_equal(policies.greedy(q), [[0, 1, 0], [1, 0, 0]])
    np.testing.assert_allclose(policies.epsilon_greedy(q, 0.3), [[0.1, 0.8, 0.1], [0.8, 0.1, 0.1]])
    expected = np.exp(q / 2) / np.exp(q / 2).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(policies.softmax(q, 2.0), expected)
    np.testing.assert_allclose(policies.softmax([[1000.0, 0.0]], 0.01), [[1.0, 0.0]])
    np.testing.assert_allclose(policies.softmax([[1e308, -1e308]]), [[1.0, 0.0]])
    for call in (policies.greedy, policies.softmax):
        with pytest.raises(ValueError, match=r"q must have at least one action, got shape \(2, 0\)"):
            call(np.zeros((2, 0)))
    for bad in (
        lambda: policies.softmax(q, 0.0),
        lambda: policies.deterministic([3], 3),
        lambda: policies.deterministic([0.5], 3),
    ):
        with pytest.raises(ValueError, match=r"temperature|actions"):
            bad()
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\], got 2"):
        policies.mixture([[1.0]], [[1.0]], 2)
