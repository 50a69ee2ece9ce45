"""The statements of Sections 2 to 4 and of the appendices on proofs and V-trace, each against its definition."""

import itertools

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given

from marginax import (
    TabularMDP,
    marginalized,
    marginalized_vtrace,
    multi_step,
    one_step,
    policies,
    traces,
    vtrace,
    weights,
)
from marginax import problems as library
from reference import core as naive

TRACES = {
    "one_step": traces.one_step,
    "importance_sampling": traces.importance_sampling,
    "retrace": traces.retrace,
    "retrace at 2, decayed": lambda pi, mu: traces.retrace(pi, mu, clip=2.0, decay=0.9),
    "tree_backup": traces.tree_backup,
    "q_lambda": lambda pi, mu: traces.q_lambda(pi, mu, decay=0.8),
}


def some_q(mdp, seed=0):
    return np.random.default_rng(seed).normal(size=mdp.r.shape)


def pairs(mdp):
    return itertools.product(range(mdp.num_states), range(mdp.num_actions))


@pytest.mark.parametrize("name", TRACES)
@given(problem=naive.problems())
def test_multi_step_operators_are_their_definition(name, problem):
    mdp, pi, mu = problem
    c = TRACES[name](pi, mu)
    q = some_q(mdp)
    expected = naive.multi_step(mdp, pi, mu, lambda t, y, b: c[y, b], q)
    np.testing.assert_allclose(multi_step(mdp, pi, mu, c)(q), expected, atol=1e-9)


@given(problem=naive.problems())
def test_one_step_is_the_bellman_operator(problem):
    mdp, pi, mu = problem
    q = some_q(mdp)
    expected = q + naive.bellman_errors(mdp, pi, q)
    np.testing.assert_allclose(one_step(mdp, pi)(q), expected, atol=1e-12)
    np.testing.assert_allclose(multi_step(mdp, pi, mu, traces.one_step(pi, mu))(q), expected, atol=1e-12)
    np.testing.assert_allclose(
        one_step(mdp, pi).contraction_rates(), mdp.discount * (1 - mdp.termination), atol=1e-12
    )


@given(problem=naive.problems())
def test_proposition_1_fixed_point_residual_and_rate(problem):
    mdp, pi, mu = problem
    generator = np.random.default_rng(1)
    w = generator.uniform(-0.5, 2.0, size=mdp.r.shape * 2)
    op = marginalized(mdp, pi, mu, w)
    q1, q2 = generator.normal(size=(2, *mdp.r.shape))
    np.testing.assert_allclose(op(q1), naive.marginalized(mdp, pi, mu, w, q1), atol=1e-9)
    np.testing.assert_allclose(op(mdp.q_values(pi)), mdp.q_values(pi), atol=1e-10)
    np.testing.assert_allclose(op.fixed_point(), mdp.q_values(pi), atol=1e-10)

    residual, rates = op.residual(), op.contraction_rates()
    transition = np.einsum("xay,yb->xayb", mdp.p, pi)
    for x, a in pairs(mdp):
        d = (1 - mdp.discount) * naive.discounted_sum(mdp, mu, (x, a), lambda t, y, b: 1.0) * w[x, a]
        expected = mdp.discount * np.einsum("xa,xayb->yb", d, transition) - d
        expected[x, a] += 1 - mdp.discount
        np.testing.assert_allclose(residual[x, a], expected, atol=1e-10)
        assert rates[x, a] == pytest.approx(np.abs(expected).sum() / (1 - mdp.discount), abs=1e-9)
        assert abs(op(q1) - op(q2))[x, a] <= rates[x, a] * np.abs(q1 - q2).max() + 1e-9
        # The bound is attained by the signs of the residual.
        worst = np.sign(expected)
        assert (op(worst) - op(np.zeros_like(worst)))[x, a] == pytest.approx(rates[x, a], abs=1e-9)
    assert op.contraction_rate() == pytest.approx(rates.max())
    assert op.is_contractive() == (rates.max() < 1)


@given(problem=naive.problems())
def test_marginalized_importance_sampling_is_instant(problem):
    mdp, pi, mu = problem
    visits_pi, visits_mu = mdp.visitation(pi), mdp.visitation(mu)
    w = np.divide(visits_pi, visits_mu, out=np.zeros_like(visits_mu), where=visits_mu > 0)
    op = marginalized(mdp, pi, mu, w)
    np.testing.assert_allclose(op(some_q(mdp)), mdp.q_values(pi), atol=1e-9)
    assert op.contraction_rate() == pytest.approx(0.0, abs=1e-10)
    np.testing.assert_allclose(weights.exact(mdp, mu, traces.importance_sampling(pi, mu)), w, atol=1e-10)


@pytest.mark.parametrize("name", TRACES)
@given(problem=naive.problems())
def test_proposition_2_marginalized_and_multi_step_operators_are_the_same(name, problem):
    mdp, pi, mu = problem
    c = TRACES[name](pi, mu)
    w = weights.exact(mdp, mu, c)
    q = some_q(mdp)
    np.testing.assert_allclose(
        marginalized(mdp, pi, mu, w)(q), naive.multi_step(mdp, pi, mu, lambda t, y, b: c[y, b], q), atol=1e-9
    )


@given(problem=naive.problems())
def test_proposition_2_for_time_dependent_traces(problem):
    mdp, pi, mu = problem
    c = np.random.default_rng(5).uniform(-1, 2, size=(3, *mdp.r.shape))
    q = some_q(mdp)

    def weigh(t, y, b):
        return c[t - 1, y, b] if t <= 3 else 0.0

    expected = naive.multi_step(mdp, pi, mu, weigh, q)
    op = multi_step(mdp, pi, mu, c)
    np.testing.assert_allclose(op(q), expected, atol=1e-10)
    w = weights.exact(mdp, mu, c)
    np.testing.assert_allclose(marginalized(mdp, pi, mu, w)(q), expected, atol=1e-9)
    np.testing.assert_allclose(weights.exact(mdp, mu, c, start=(0, 0)), w[0, 0], atol=1e-10)
    np.testing.assert_allclose(op.credit(), marginalized(mdp, pi, mu, w).credit(), atol=1e-10)


def test_time_dependent_traces_that_stay_the_same_are_markovian():
    mdp, pi, mu = library.garnet(states=6, actions=3, branching=2, discount=0.5, seed=4)
    c = traces.retrace(pi, mu)
    timed = multi_step(mdp, pi, mu, np.tile(c, (60, 1, 1)))
    fixed = multi_step(mdp, pi, mu, c)
    np.testing.assert_allclose(timed(mdp.r), fixed(mdp.r), atol=1e-12)
    np.testing.assert_allclose(timed.contraction_rates(), fixed.contraction_rates(), atol=1e-12)


@given(problem=naive.problems())
def test_corollary_1_contractive_multi_step_operators_are_contractive_marginalized_ones(problem):
    mdp, pi, mu = problem
    for c in (traces.retrace(pi, mu), traces.tree_backup(pi, mu), traces.importance_sampling(pi, mu)):
        multi = multi_step(mdp, pi, mu, c)
        single = marginalized(mdp, pi, mu, weights.exact(mdp, mu, c))
        assert multi.is_contractive()
        assert single.is_contractive()
        np.testing.assert_allclose(single.contraction_rates(), multi.contraction_rates(), atol=1e-9)
        np.testing.assert_allclose(single.credit(), multi.credit(), atol=1e-9)


@given(problem=naive.problems())
def test_the_residual_of_traces_below_the_ratio_is_non_negative_and_gives_rates_in_one_solve(problem):
    mdp, pi, mu = problem
    gamma = mdp.discount
    for c in (traces.retrace(pi, mu), traces.retrace(pi, mu, clip=3), traces.tree_backup(pi, mu, decay=0.5)):
        if not (mu * c <= pi + 1e-12).all():
            continue
        op = multi_step(mdp, pi, mu, c)
        residual = op.residual()
        assert residual.min() >= -1e-12
        rates = np.abs(residual).sum(axis=(2, 3)) / (1 - gamma)
        np.testing.assert_allclose(op.contraction_rates(), rates, atol=1e-10)
        # Section 3.2 with the factor that it lacks: E = (1-γ) γ Σ_t γ^t (P^{cμ})^t (P^π - P^{cμ}).
        size = mdp.r.size
        target, traced = (np.einsum("xay,yb->xayb", mdp.p, m).reshape(size, size) for m in (pi, mu * c))
        series, term = np.zeros((size, size)), np.eye(size)
        for _ in range(naive.STEPS):
            series += term
            term = gamma * term @ traced
        expected = (1 - gamma) * gamma * series @ (target - traced)
        np.testing.assert_allclose(residual.reshape(size, size), expected, atol=1e-10)


@given(problem=naive.problems())
def test_lemma_2_positive_weights_have_traces(problem):
    mdp, _, mu = problem
    start = (0, 0)
    w = np.random.default_rng(7).uniform(0.1, 2.0, size=mdp.r.shape)
    found = weights.to_traces(mdp, mu, w, start)
    for _, path in naive.paths(mdp, mu, start, 3):
        product = found.initial
        for (y, b), (z, d) in itertools.pairwise(path):
            product *= found.steps[y, b, z, d]
        assert product == pytest.approx(w[path[-1]])


def lemma_3():
    """Five states in a line, the last absorbing; two actions that do the same; π = μ uniform; γ = 0.8."""
    p = np.zeros((5, 2, 5))
    for x in range(5):
        p[x, :, min(x + 1, 4)] = 1.0
    mdp = TabularMDP(p, np.zeros((5, 2)), 0.8)
    uniform = policies.uniform(5, 2)
    visits = mdp.visitation(uniform)
    d = np.zeros((5, 2, 5, 2))
    for x, a in itertools.product(range(5), range(2)):
        d[x, a, x, a] = 0.2
    d[0, 0, 2, 0] = 0.01
    return mdp, uniform, np.divide(d, visits, out=np.zeros_like(d), where=visits > 0)


def test_lemma_3_weights_that_regenerate_contract_but_have_no_traces():
    mdp, uniform, w = lemma_3()
    op = marginalized(mdp, uniform, uniform, w)
    assert op.contraction_rates()[0, 0] == pytest.approx(0.89)
    assert op.contraction_rate() == pytest.approx(0.89)
    assert op.is_contractive()
    with pytest.raises(ValueError, match=r"w\[1, 0\] = 0 leads to w\[2, 0\] = .* stays zero"):
        weights.to_traces(mdp, uniform, w[0, 0], (0, 0))


def test_weights_with_zeros_may_come_from_other_traces_than_those_of_lemma_2():
    mdp, pi, mu = library.chain(n=3, actions=2)
    w = weights.exact(mdp, mu, traces.retrace(pi, mu), start=(0, 0))
    with pytest.raises(ValueError, match=r"no traces of Lemma 2: .* w\[1, 1\] = 0 leads to w\[2, 0\] = 0.5"):
        weights.to_traces(mdp, mu, w, (0, 0))


@pytest.mark.parametrize("pair", [(1.3, 0.6), (0.8, 1.5), (1.0, 0.7)])
def test_lemma_4_on_two_alternating_states_every_weight_has_traces(pair):
    gamma = 0.8
    mdp = TabularMDP([[[0.0, 1.0]], [[1.0, 0.0]]], [[1.0], [2.0]], gamma)
    only = np.ones((2, 1))
    visits = mdp.visitation(only) / (1 - gamma)
    w = np.ones((2, 1, 2, 1))
    w[0, 0] = np.reshape(pair, (2, 1))
    credit_1, credit_2 = (visits * w)[0, 0].ravel()
    if credit_1 == pytest.approx(1.0):
        c = [credit_2 / gamma, 0.0]
    else:
        c = [1.0, (credit_1 - 1) / gamma**2, (credit_2 - gamma) / (gamma * (credit_1 - 1))]
    timed = np.tile(np.reshape(c, (-1, 1, 1)), (1, 2, 1))
    q = np.array([[0.3], [-2.0]])
    expected = marginalized(mdp, only, only, w)(q)[0, 0]
    assert multi_step(mdp, only, only, timed)(q)[0, 0] == pytest.approx(expected)


def test_lemma_4_where_the_start_has_a_credit_of_one():
    gamma = 0.8
    mdp = TabularMDP([[[0.0, 1.0]], [[1.0, 0.0]]], [[1.0], [2.0]], gamma)
    only = np.ones((2, 1))
    visits = mdp.visitation(only) / (1 - gamma)
    w = np.ones((2, 1, 2, 1))
    w[0, 0] = [[1 / visits[0, 0, 0, 0]], [0.9]]
    first = 0.9 * visits[0, 0, 1, 0] / gamma
    q = np.array([[0.3], [-2.0]])
    timed = np.full((1, 2, 1), first)
    assert multi_step(mdp, only, only, timed)(q)[0, 0] == pytest.approx(
        marginalized(mdp, only, only, w)(q)[0, 0]
    )


def test_lemma_2_needs_a_trace_for_the_start_itself():
    """One state that ends at once: w = 1/2 contracts, but every multi-step operator has credit 1 there."""
    mdp = TabularMDP([[[0.0]]], [[1.0]], 0.9)
    half = marginalized(mdp, [[1.0]], [[1.0]], np.full((1, 1, 1, 1), 0.5))
    assert half.contraction_rate() == pytest.approx(0.5)
    for c in (0.0, 0.7, 3.0):
        assert multi_step(mdp, [[1.0]], [[1.0]], [[c]]).credit().item() == 1.0
    assert weights.to_traces(mdp, [[1.0]], [[0.5]], (0, 0)).initial == 0.5


@given(problem=naive.problems())
def test_proposition_4_weights_are_conditional_expectations_of_cumulative_traces(problem):
    mdp, _, mu = problem
    horizon = 3
    c = np.random.default_rng(2).uniform(0, 2, size=(horizon, *mdp.r.shape))
    gamma = mdp.discount
    # τ is geometric and C_t = 0 after the horizon, so longer paths only count in the denominator.
    numerator = np.zeros(mdp.r.shape)
    for t in range(horizon + 1):
        for chance, path in naive.paths(mdp, mu, (0, 0), t):
            if len(path) == t + 1:
                product = np.prod([c[s - 1][path[s]] for s in range(1, t + 1)])
                numerator[path[t]] += (1 - gamma) * gamma**t * chance * product
    chance_of_tau = mdp.visitation(mu)[0, 0]
    expected = np.divide(numerator, chance_of_tau, out=np.zeros_like(numerator), where=chance_of_tau > 0)
    np.testing.assert_allclose(weights.exact(mdp, mu, c)[0, 0], expected, atol=1e-9)


@given(problem=naive.problems())
def test_the_balance_equation_of_traced_visitation(problem):
    mdp, pi, mu = problem
    for c in (traces.retrace(pi, mu), traces.q_lambda(pi, mu, 0.9)):
        d = mdp.visitation(mu) * weights.exact(mdp, mu, c)
        start = np.eye(mdp.r.size).reshape(mdp.r.shape * 2) * (1 - mdp.discount)
        ahead = np.einsum("ijxa,xay,yb->ijyb", d, mdp.p, mu * c)
        np.testing.assert_allclose(d, start + mdp.discount * ahead, atol=1e-10)


@given(problem=naive.problems())
def test_vtrace_is_its_definition_and_has_its_fixed_point(problem):
    mdp, pi, mu = problem
    ratio = traces.importance_sampling(pi, mu)
    for clip_c, clip_rho in ((1.0, 1.0), (0.5, 2.0), (1.0, np.inf)):
        c, rho = np.minimum(clip_c, ratio), np.minimum(clip_rho, ratio)
        op = vtrace(mdp, mu, c, rho)
        v = np.random.default_rng(3).normal(size=mdp.num_states)
        np.testing.assert_allclose(op(v), naive.vtrace(mdp, mu, c, rho, v), atol=1e-9)
        evaluated = mu * rho / (mu * rho).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(op.policy, evaluated, atol=1e-12)
        np.testing.assert_allclose(op.fixed_point(), mdp.v_values(evaluated), atol=1e-10)
        np.testing.assert_allclose(op(op.fixed_point()), op.fixed_point(), atol=1e-9)
        rates = np.abs(op.residual()).sum(axis=1) / (1 - mdp.discount)
        np.testing.assert_allclose(op.contraction_rates(), rates, atol=1e-10)


@given(problem=naive.problems())
def test_marginalized_vtrace_is_vtrace_and_its_balance_equation_holds(problem):
    mdp, pi, mu = problem
    ratio = traces.importance_sampling(pi, mu)
    c, rho = np.minimum(1.0, ratio), np.minimum(1.5, ratio)
    w = weights.exact_states(mdp, mu, c)
    v = np.random.default_rng(3).normal(size=mdp.num_states)
    op = marginalized_vtrace(mdp, mu, w, rho)
    np.testing.assert_allclose(op(v), naive.vtrace(mdp, mu, c, rho, v), atol=1e-9)
    np.testing.assert_allclose(op.contraction_rates(), vtrace(mdp, mu, c, rho).contraction_rates(), atol=1e-9)
    d = (
        w
        * (1 - mdp.discount)
        * np.linalg.inv(np.eye(len(v)) - mdp.discount * np.einsum("xa,xay->xy", mu, mdp.p))
    )
    kernel = np.einsum("xa,xay->xy", mu * c, mdp.p)
    np.testing.assert_allclose(d, (1 - mdp.discount) * np.eye(len(v)) + mdp.discount * d @ kernel, atol=1e-10)
    np.testing.assert_allclose(weights.exact_states(mdp, mu, c, start=0), w[0], atol=1e-12)


@given(problem=naive.problems())
def test_composition_and_iteration(problem):
    mdp, pi, mu = problem
    q = some_q(mdp)
    first = multi_step(mdp, pi, mu, traces.retrace(pi, mu))
    second = marginalized(mdp, pi, mu, np.full(mdp.r.shape * 2, 0.3))
    both = first @ second
    np.testing.assert_allclose(both(q), first(second(q)), atol=1e-10)
    np.testing.assert_allclose(
        both.residual().reshape(mdp.r.size, -1) * (1 - mdp.discount),
        first.residual().reshape(mdp.r.size, -1) @ second.residual().reshape(mdp.r.size, -1),
        atol=1e-10,
    )
    twice = first @ first
    np.testing.assert_allclose(
        twice.contraction_rates(), np.abs(twice.residual()).sum(axis=(2, 3)) / (1 - mdp.discount), atol=1e-9
    )
    sequence = first.iterate(q, 3)
    np.testing.assert_array_equal(sequence[0], q)
    np.testing.assert_allclose(sequence[3], first(first(first(q))), atol=1e-10)
    assert (twice.contraction_rate() <= first.contraction_rate() ** 2 + 1e-12) or mdp.discount == 0


def test_iteration_converges_at_the_stated_rate():
    mdp, pi, mu = library.open_world(n=5, discount=0.9)
    op = multi_step(mdp, pi, mu, traces.retrace(pi, mu))
    errors = np.abs(op.iterate(np.zeros(mdp.r.shape), 30) - mdp.q_values(pi)).max(axis=(1, 2))
    assert (errors[1:] <= op.contraction_rate() * errors[:-1] + 1e-12).all()


def test_composition_of_different_problems_is_refused():
    mdp, pi, mu = library.chain(n=3)
    with pytest.raises(ValueError, match="other must evaluate the same policy"):
        one_step(mdp, pi) @ one_step(mdp, mu)
    # Without rewards, V-trace with ρ and with 2ρ evaluate the same policy with the same b; their A differ.
    free = TabularMDP(mdp.p, np.zeros(mdp.r.shape), mdp.discount)
    rho = traces.importance_sampling(pi, mu)
    with pytest.raises(ValueError, match="the same mu"):
        vtrace(free, mu, 0 * rho, rho) @ vtrace(free, mu, 0 * rho, 2 * rho)


def test_vtrace_composes_where_rho_leaves_a_state_without_a_policy():
    mdp, pi, mu = library.garnet(states=5, actions=3, branching=2, seed=0)
    rho = traces.importance_sampling(pi, mu)
    rho[2] = 0.0
    op = vtrace(mdp, mu, np.minimum(rho, 1), rho)
    v = np.arange(5.0)
    np.testing.assert_allclose((op @ op)(v), op(op(v)), atol=1e-12)


def test_an_operator_that_does_not_contract_says_so():
    mdp, pi, mu = library.garnet(states=5, actions=3, branching=2, seed=0)
    op = multi_step(mdp, pi, mu, traces.q_lambda(pi, mu, decay=1.0))
    assert not op.is_contractive()
    assert "not contractive" in repr(op)
    assert "contractive, rate" in repr(one_step(mdp, pi))


def test_traces_that_sum_to_infinity_are_refused():
    mdp, pi, mu = library.garnet(states=5, actions=3, branching=2, seed=0)
    for call in (
        multi_step,
        lambda *a: weights.exact(a[0], a[2], a[3]),
        lambda m, p, b, c: vtrace(m, b, c, c),
    ):
        with pytest.raises(ValueError, match="c is too large: the sum over time"):
            call(mdp, pi, mu, np.full(mdp.r.shape, 1.2))
    # In an episode of bounded length the same traces are fine.
    short, target, behaviour = library.chain(n=4)
    assert np.isfinite(multi_step(short, target, behaviour, np.full(short.r.shape, 5.0))(short.r)).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    "p", [np.eye(2), np.eye(2)[::-1], np.ones((2, 2)) / 2], ids=["loops", "cycle", "both"]
)
def test_at_the_edge_of_convergence_nothing_warns_before_the_refusal(p, sparse):
    """The discounted traced kernel has a spectral radius of exactly 1."""
    mdp = TabularMDP(sp.csr_array(p) if sparse else p[:, None], np.zeros((2, 1)), 0.5)
    one = np.ones((2, 1))
    with pytest.raises(ValueError, match="c is too large"):
        multi_step(mdp, one, one, 2 * one)


def bad_calls():
    mdp, pi, mu = library.chain(n=3, actions=2)
    c = traces.retrace(pi, mu)
    return {
        "c of a wrong shape": (
            lambda: multi_step(mdp, pi, mu, c[:2]),
            r"c must have shape \(3, 2\), got \(2, 2\)",
        ),
        "c not finite": (
            lambda: multi_step(mdp, pi, mu, c * np.nan),
            r"c must be finite, but c\[0, 0\] = nan",
        ),
        "timed c of a wrong shape": (
            lambda: multi_step(mdp, pi, mu, np.ones((4, 3, 3))),
            r"c must have shape \(any, 3, 2\)",
        ),
        "w of a wrong shape": (
            lambda: marginalized(mdp, pi, mu, np.ones((3, 2))),
            r"w must have shape \(3, 2, 3, 2\)",
        ),
        "q of a wrong shape": (
            lambda: one_step(mdp, pi)(np.ones(3)),
            r"q must have shape \(3, 2\), got \(3,\)",
        ),
        "v of a wrong shape": (lambda: vtrace(mdp, mu, c, c)(c), r"v must have shape \(3,\), got \(3, 2\)"),
        "v of a wrong shape to iterate": (
            lambda: vtrace(mdp, mu, c, c).iterate(c, 1),
            r"v must have shape \(3,\), got \(3, 2\)",
        ),
        "negative rho": (
            lambda: vtrace(mdp, mu, c, c - 1),
            r"rho must not be negative, but rho\[0, 1\] = -1",
        ),
        "no policy left": (
            lambda: vtrace(mdp, mu, c, 0 * c).fixed_point(),
            "rho leaves no policy to evaluate in state 0",
        ),
        "start out of range": (
            lambda: weights.exact(mdp, mu, c, start=(3, 0)),
            r"start\[0\] must lie in range\(3\), got 3",
        ),
        "no support": (
            lambda: traces.retrace(mu, pi),
            r"mu has no support where pi has some: mu\[0, 1\] = 0 while pi\[0, 1\] = 0.5",
        ),
        "clip": (lambda: traces.retrace(pi, mu, clip=-1), "clip must be at least 0, got -1"),
        "decay": (lambda: traces.q_lambda(pi, mu, 1.5), r"decay must lie in \[0, 1\], got 1.5"),
        "steps": (lambda: one_step(mdp, pi).iterate(c, -1), "steps must be at least 0, got -1"),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_input_is_named(name):
    call, sentence = bad_calls()[name]
    with pytest.raises(ValueError, match=sentence):
        call()


def test_traces():
    pi, mu = np.array([[0.9, 0.1, 0.0]]), np.array([[0.3, 0.2, 0.5]])
    np.testing.assert_allclose(traces.importance_sampling(pi, mu), [[3.0, 0.5, 0.0]])
    np.testing.assert_allclose(traces.retrace(pi, mu), [[1.0, 0.5, 0.0]])
    np.testing.assert_allclose(traces.retrace(pi, mu, clip=2, decay=0.5), [[1.0, 0.25, 0.0]])
    np.testing.assert_allclose(traces.retrace(pi, mu, clip=np.inf), [[3.0, 0.5, 0.0]])
    np.testing.assert_allclose(traces.tree_backup(pi, mu, decay=0.5), [[0.45, 0.05, 0.0]])
    np.testing.assert_allclose(traces.q_lambda(pi, mu, decay=0.5), [[0.5, 0.5, 0.5]])
    np.testing.assert_allclose(traces.one_step(pi, mu), [[0, 0, 0]])
    np.testing.assert_allclose(traces.importance_sampling([[1.0, 0.0]], [[1.0, 0.0]]), [[1.0, 0.0]])


def test_a_large_open_world_needs_no_matrix_of_pairs(monkeypatch):
    """The rates of 90,000 pairs and a row of weights, with every dense matrix of pairs forbidden."""
    monkeypatch.setattr("marginax._checks.available_memory", lambda: 2**20)
    mdp, pi, mu = library.open_world(n=150)
    c = traces.retrace(pi, mu)
    op = multi_step(mdp, pi, mu, c)
    rates = op.contraction_rates()
    # Far from the corner the chance of a trace of 1 is 1/2 a step: 1 - (1-γ)/(1-γ/2).
    assert rates[0, 0] == pytest.approx(1 - 0.01 / (1 - 0.495), abs=1e-9)
    q = mdp.q_values(pi)
    np.testing.assert_allclose(op(q), q, atol=1e-12)
    row = weights.exact(mdp, mu, c, start=(0, 2))
    assert row[0, 2] < 1.0 and row[149, 2] > 0.0 and (row[:, :2] == 0).all()
    with pytest.raises(ValueError, match="GiB"):
        op.residual()
    with pytest.raises(MemoryError):
        op.credit()


def test_operators_are_compared_as_objects():
    mdp, pi, mu = library.chain(n=3, actions=2)
    one, other = one_step(mdp, pi), one_step(mdp, pi)
    assert one == one and one != other and other in [one, other] and len({one, other}) == 2
    first, second = (multi_step(mdp, pi, mu, traces.retrace(pi, mu)) for _ in range(2))
    assert first.bellman != second.bellman and first.credit_form != second.credit_form


@pytest.mark.parametrize(
    "other", [np.ones((3, 2)), [[1.0]], 3, None], ids=["array", "list", "number", "None"]
)
def test_an_operator_composes_with_operators_only(other):
    mdp, pi, _ = library.chain(n=3, actions=2)
    with pytest.raises(
        TypeError, match=r"other must be an Operator, got \w+: operator\(q\) applies it to values"
    ):
        one_step(mdp, pi) @ other
    with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for @"):
        other @ one_step(mdp, pi)


def test_what_an_operator_returns_may_be_changed_without_changing_it():
    mdp, pi, mu = library.chain(n=3, actions=2)
    c = traces.retrace(pi, mu)
    for op in (
        one_step(mdp, pi),
        multi_step(mdp, pi, mu, c),
        marginalized(mdp, pi, mu, weights.exact(mdp, mu, c)),
        vtrace(mdp, mu, c, c),
        marginalized_vtrace(mdp, mu, weights.exact_states(mdp, mu, c), c),
    ):
        q = np.ones(op.shape)
        before = op(q)
        for returned in (op.credit(), op.residual(), op.policy, op.fixed_point(), op(q)):
            returned *= 0.5
        np.testing.assert_array_equal(op(q), before)
