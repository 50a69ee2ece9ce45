import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

import marginax as mx
from marginax import linear_programs as programs
from marginax.linear_programs._highs import Program
from marginax.linear_programs.relaxed import _StartPrograms
from reference.linear_programs import (
    backup_values,
    bellman_error,
    pair_kernel,
    power_visitation,
    random_case,
    residual,
    solve_dual,
    solve_relaxed,
)

SEEDS = st.integers(0, 10_000)
RATES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999])
repeat = settings(max_examples=25, deadline=None)


class TestEvaluate:
    @repeat
    @given(SEEDS, st.sampled_from([0.0, 0.5, 0.99]), st.booleans())
    def test_returns_the_exact_values(self, seed, discount, sparse):
        mdp, pi, _, _ = random_case(seed, discount=discount, sparse=sparse)
        np.testing.assert_allclose(programs.evaluate(mdp, pi), backup_values(mdp, pi), atol=1e-8, rtol=0)

    @pytest.mark.parametrize("seed", range(3))
    def test_agrees_with_the_dual_program_of_every_pair_by_another_solver(self, seed):
        mdp, pi, _, _ = random_case(seed)
        other = [solve_dual(mdp, pi, start) for start in range(mdp.r.size)]
        np.testing.assert_allclose(programs.evaluate(mdp, pi).ravel(), other, atol=1e-8)

    @pytest.mark.parametrize(
        "problem", [mx.problems.chain(), mx.problems.open_world(10)], ids=["chain", "grid"]
    )
    def test_on_the_problems_of_the_paper(self, problem):
        np.testing.assert_allclose(
            programs.evaluate(problem.mdp, problem.pi), problem.mdp.q_values(problem.pi), atol=1e-8
        )

    def test_ten_thousand_pairs(self):
        mdp, pi, _ = mx.problems.open_world(50, sparse=True)
        np.testing.assert_allclose(programs.evaluate(mdp, pi), mdp.q_values(pi), atol=1e-8)

    @pytest.mark.parametrize("scale", [1e-9, 1e9])
    def test_rewards_of_any_size(self, scale):
        mdp, pi, _, _ = random_case(0)
        scaled = mx.TabularMDP(mdp.p, scale * mdp.r, mdp.discount)
        np.testing.assert_allclose(programs.evaluate(scaled, pi), scale * mdp.q_values(pi), rtol=1e-9)

    def test_small_probabilities_are_not_dropped(self):
        p = [[[1 - 1e-10, 1e-10]], [[0.0, 1.0]]]
        mdp = mx.TabularMDP(p, [[0.0], [1e10]], 0.5)
        np.testing.assert_allclose(programs.evaluate(mdp, [[1.0], [1.0]])[0, 0], 2.0, rtol=1e-8)


class TestRelaxed:
    @pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
    @pytest.mark.parametrize("seed", range(3))
    def test_agrees_with_the_programs_of_the_paper_by_another_solver(self, seed, rate):
        mdp, pi, mu, q = random_case(seed)
        other = [solve_relaxed(mdp, pi, q, rate, start) for start in range(mdp.r.size)]
        np.testing.assert_allclose(programs.relaxed(mdp, pi, mu, q, rate).values.ravel(), other, atol=1e-7)

    @repeat
    @given(SEEDS, RATES, st.sampled_from([0.0, 0.5, 0.99]), st.booleans())
    def test_has_its_value_in_closed_form(self, seed, rate, discount, sparse):
        mdp, pi, mu, q = random_case(seed, discount=discount, sparse=sparse)
        exact = backup_values(mdp, pi)
        closed = exact - rate * np.abs(q - exact).max()
        np.testing.assert_allclose(programs.relaxed(mdp, pi, mu, q, rate).values, closed, atol=1e-8)

    @repeat
    @given(SEEDS, RATES)
    def test_occupancy_is_feasible_and_attains_the_value(self, seed, rate):
        mdp, pi, mu, q = random_case(seed)
        result = programs.relaxed(mdp, pi, mu, q, rate)
        violation = np.abs(residual(mdp, pi, result.occupancy)).sum(axis=1)
        assert violation.max() <= (1 - mdp.discount) * rate + 1e-10
        d = result.occupancy.reshape(mdp.r.size, mdp.r.size)
        attained = q.ravel() + d @ bellman_error(mdp, pi, q) / (1 - mdp.discount)
        np.testing.assert_allclose(attained, result.values.ravel(), atol=1e-9)

    @repeat
    @given(SEEDS, RATES)
    def test_contracts(self, seed, rate):
        mdp, pi, mu, q = random_case(seed)
        exact = mdp.q_values(pi)
        after = programs.relaxed(mdp, pi, mu, q, rate).values
        assert np.abs(after - exact).max() <= rate * np.abs(q - exact).max() + 1e-9

    @repeat
    @given(SEEDS, RATES)
    def test_is_the_marginalized_operator_of_its_weights(self, seed, rate):
        """Corollary equivalence, through the exact operators; episodes go on, μ visits everything."""
        mdp, pi, mu, q = random_case(seed, zeros=False, ending=False)
        result = programs.relaxed(mdp, pi, mu, q, rate)
        operator = mx.marginalized(mdp, pi, mu, result.weights)
        np.testing.assert_array_equal(result.lost_mass, 0.0)
        np.testing.assert_allclose(operator(q), result.values, atol=1e-9)
        assert operator.contraction_rates().max() <= rate + 1e-9

    @repeat
    @given(SEEDS)
    def test_where_behaviour_never_goes_weights_are_zero_and_the_mass_is_reported(self, seed):
        mdp, pi, mu, q = random_case(seed)
        result = programs.relaxed(mdp, pi, mu, q, 0.5)
        visits = power_visitation(mdp, mu).reshape(result.weights.shape)
        unseen = visits == 0.0
        assert unseen.any()
        np.testing.assert_array_equal(result.weights[unseen], 0.0)
        np.testing.assert_allclose((result.weights * visits)[~unseen], result.occupancy[~unseen], atol=1e-12)
        lost = np.where(unseen, result.occupancy, 0.0)
        np.testing.assert_allclose(result.lost_mass, np.abs(lost).sum(axis=(2, 3)), atol=1e-15)
        # What the operator misses is exactly what was lost.
        missing = lost.reshape(q.size, q.size) @ bellman_error(mdp, pi, q) / (1 - mdp.discount)
        operator = mx.marginalized(mdp, pi, mu, result.weights)
        np.testing.assert_allclose(operator(q) + missing.reshape(q.shape), result.values, atol=1e-9)
        kept = result.lost_mass == 0.0
        assert np.all(operator.contraction_rates()[kept] <= 0.5 + 1e-9)

    def test_some_mass_is_lost_on_the_chain(self):
        mdp, pi, mu = mx.problems.chain()
        assert programs.relaxed(mdp, pi, mu, np.zeros(mdp.r.shape), 0.5).lost_mass.max() > 0.0

    @repeat
    @given(SEEDS, RATES)
    def test_any_feasible_occupancy_contracts(self, seed, rate):
        """Not only the optimum: d with any violation e, ‖e‖₁ ≤ η, of either sign."""
        mdp, pi, mu, q = random_case(seed, zeros=False, ending=False)
        rng = np.random.default_rng(seed)
        violation = rng.normal(size=(q.size, q.size)) * rng.choice(
            [0.0, 1.0], size=(q.size, q.size), p=[0.7, 0.3]
        )
        violation *= (
            rate * rng.random((q.size, 1)) / np.maximum(np.abs(violation).sum(axis=1, keepdims=True), 1e-12)
        )
        balance = np.eye(q.size) - mdp.discount * pair_kernel(mdp, pi)
        d = (1 - mdp.discount) * np.linalg.solve(balance.T, (np.eye(q.size) - violation).T).T
        weights = (d / power_visitation(mdp, mu)).reshape(*q.shape, *q.shape)
        exact = mdp.q_values(pi)
        after = mx.marginalized(mdp, pi, mu, weights)(q)
        assert np.abs(after - exact).max() <= rate * np.abs(q - exact).max() + 1e-9

    def test_rate_zero_is_exact_with_the_occupancy_of_pi(self):
        mdp, pi, mu, q = random_case(7)
        values, occupancy, _ = programs.relaxed(mdp, pi, mu, q, 0.0)
        np.testing.assert_allclose(values, backup_values(mdp, pi), atol=1e-10)
        np.testing.assert_allclose(occupancy.reshape(q.size, -1), power_visitation(mdp, pi), atol=1e-10)

    def test_at_the_fixed_point_nothing_is_left_to_win(self):
        mdp, pi, mu, _ = random_case(3)
        exact = backup_values(mdp, pi)
        np.testing.assert_allclose(programs.relaxed(mdp, pi, mu, exact, 0.5).values, exact, atol=1e-9)

    @pytest.mark.parametrize("shift", [-1.0, 1.0])
    def test_an_error_that_is_the_same_everywhere_makes_every_violation_optimal(self, shift):
        mdp, pi, mu, _ = random_case(3)
        exact = backup_values(mdp, pi)
        result = programs.relaxed(mdp, pi, mu, exact + shift, 0.5)
        np.testing.assert_allclose(result.values, exact - 0.5, atol=1e-9)
        violation = np.abs(residual(mdp, pi, result.occupancy)).sum(axis=1)
        assert violation.max() <= (1 - mdp.discount) * 0.5 + 1e-10

    def test_a_shared_basis_gives_what_each_program_gives_alone(self, monkeypatch):
        mdp, pi, mu, q = random_case(11)
        shared = programs.relaxed(mdp, pi, mu, q, 0.4)
        monkeypatch.setattr(_StartPrograms, "_feasible", lambda self, pairs: np.zeros(pairs.size, dtype=bool))
        alone = programs.relaxed(mdp, pi, mu, q, 0.4)
        np.testing.assert_allclose(shared.values, alone.values, atol=1e-10)
        np.testing.assert_allclose(shared.occupancy, alone.occupancy, atol=1e-10)

    def test_a_basis_that_does_not_fit_a_pair_is_not_used_for_it(self):
        """With a violation basic in place of another pair's credit, that pair's violation would be above the budget."""
        mdp, pi, _, _ = random_case(0)
        starts = _StartPrograms(mdp, pi, 0.4, None)
        pairs, free = mdp.r.size, mdp.r.size + mdp.num_states
        columns = np.arange(3 * pairs + mdp.num_states) < free
        columns[2], columns[free + 2] = False, True  # the credit of pair 2 out, its violation in
        starts.program.start_from(starts.program.basis(columns, np.arange(free + 1) >= free))
        starts.set_cost(np.zeros(pairs))
        covered = next(starts.optimal_bases())
        assert 0 in covered
        assert 2 not in covered

    def test_open_world(self):
        mdp, pi, mu = mx.problems.open_world(10)
        q = np.random.default_rng(0).normal(size=mdp.r.shape)
        exact = mdp.q_values(pi)
        result = programs.relaxed(mdp, pi, mu, q, 0.5)
        np.testing.assert_allclose(result.values, exact - 0.5 * np.abs(q - exact).max(), atol=1e-9)
        operator = mx.marginalized(mdp, pi, mu, result.weights)
        kept = result.lost_mass == 0.0
        assert kept.mean() > 0.5
        np.testing.assert_allclose(operator(q)[kept], result.values[kept], atol=1e-9)
        assert operator.contraction_rates()[kept].max() <= 0.5 + 1e-9


class TestIterate:
    @repeat
    @given(SEEDS, RATES)
    def test_every_step_contracts(self, seed, rate):
        mdp, pi, mu, q = random_case(seed)
        result = programs.iterate(mdp, pi, mu, q, rate, steps=6)
        exact = backup_values(mdp, pi)
        np.testing.assert_allclose(result.errors, np.abs(result.values - exact).max(axis=(1, 2)), atol=1e-9)
        assert np.all(result.errors[1:] <= rate * result.errors[:-1] + 1e-9)

    def test_every_step_is_the_relaxed_program_of_the_one_before(self):
        mdp, pi, mu, q = random_case(5)
        result = programs.iterate(mdp, pi, mu, q, 0.7, steps=5)
        np.testing.assert_array_equal(result.values[0], q)
        for t in range(5):
            np.testing.assert_allclose(result.step(t).values, result.values[t + 1], atol=1e-9)

    def test_every_step_is_the_marginalized_operator_of_its_weights(self):
        mdp, pi, mu, q = random_case(5, zeros=False, ending=False)
        result = programs.iterate(mdp, pi, mu, q, 0.7, steps=5)
        for t in range(5):
            operator = mx.marginalized(mdp, pi, mu, result.step(t).weights)
            np.testing.assert_allclose(operator(result.values[t]), result.values[t + 1], atol=1e-9)
            assert operator.contraction_rate() <= 0.7 + 1e-9

    def test_converges_to_machine_precision(self):
        mdp, pi, mu = mx.problems.open_world(5)
        assert programs.iterate(mdp, pi, mu, np.ones(mdp.r.shape), 0.5, steps=60).errors[-1] < 1e-12

    def test_no_steps(self):
        mdp, pi, mu, q = random_case(0)
        assert programs.iterate(mdp, pi, mu, q, 0.5, steps=0).values.shape == (1, *q.shape)


class TestInput:
    def test_inputs_are_not_modified(self):
        case = random_case(0)
        copies = [np.array(value) for value in (case.mdp.p, case.mdp.r, *case[1:])]
        programs.evaluate(case.mdp, case.pi)
        programs.relaxed(*case, 0.5)
        programs.iterate(*case, 0.5, 3)
        for before, after in zip(copies, (case.mdp.p, case.mdp.r, *case[1:]), strict=True):
            np.testing.assert_array_equal(before, after)

    def test_lists_integers_and_jax_arrays_are_taken(self):
        mdp, pi, mu, _ = random_case(0)
        q = np.arange(mdp.r.size).reshape(mdp.r.shape)
        values = programs.relaxed(mdp, pi, mu, q.astype(float), 0.5).values
        np.testing.assert_array_equal(programs.relaxed(mdp, pi.tolist(), mu, q, 0.5).values, values)
        np.testing.assert_array_equal(
            programs.relaxed(mdp, np.asfortranarray(pi), mu, jnp.asarray(q), 0.5).values, values
        )

    @pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0, np.nan, np.inf])
    def test_rate_outside_its_range(self, rate):
        mdp, pi, mu, q = random_case(0)
        with pytest.raises(ValueError, match="rate"):
            programs.relaxed(mdp, pi, mu, q, rate)
        with pytest.raises(ValueError, match="rate"):
            programs.iterate(mdp, pi, mu, q, rate, 2)

    @pytest.mark.parametrize("name", ["pi", "mu"])
    def test_what_is_no_policy(self, name):
        mdp, pi, mu, q = random_case(0)
        policies = {"pi": pi, "mu": mu}
        policies[name] = 2 * policies[name]
        for function in (programs.relaxed, programs.iterate):
            extra = () if function is programs.relaxed else (3,)
            with pytest.raises(ValueError, match=f"{name}.*sums to 2"):
                function(mdp, policies["pi"], policies["mu"], q, 0.5, *extra)
        with pytest.raises(ValueError, match=r"pi.*sums to 2"):
            programs.evaluate(mdp, 2 * pi)

    def test_q_of_the_wrong_shape_or_not_finite(self):
        mdp, pi, mu, q = random_case(0)
        with pytest.raises(ValueError, match="q must have shape"):
            programs.relaxed(mdp, pi, mu, q.T, 0.5)
        q = q.copy()
        q[2, 1] = np.nan
        with pytest.raises(ValueError, match=r"q\[2, 1\] = nan"):
            programs.iterate(mdp, pi, mu, q, 0.5, 2)

    def test_a_negative_number_of_steps(self):
        mdp, pi, mu, q = random_case(0)
        with pytest.raises(ValueError, match="steps must be at least 0, got -1"):
            programs.iterate(mdp, pi, mu, q, 0.5, -1)

    def test_a_step_that_was_not_taken(self):
        mdp, pi, mu, q = random_case(0)
        with pytest.raises(ValueError, match="t must lie in range"):
            programs.iterate(mdp, pi, mu, q, 0.5, 2).step(2)


class TestWhatHighsReports:
    """Anything but an optimum is an error that names the pair and carries HiGHS's own words."""

    def test_unfinished(self):
        mdp, pi, mu, q = random_case(0)
        with pytest.raises(programs.ProgramError, match=r"\(x, a\) = \(0, 0\).*Time limit reached"):
            programs.relaxed(mdp, pi, mu, q, 0.5, time_limit=0.0)
        with pytest.raises(programs.ProgramError, match=r"\(x, a\) = \(0, 0\).*Time limit reached"):
            programs.iterate(mdp, pi, mu, q, 0.5, 2, time_limit=0.0)

    def test_infeasible(self):
        mdp, pi, _, _ = random_case(0)
        starts = _StartPrograms(mdp, pi, 0.5, None)
        starts.set_cost(np.zeros(mdp.r.size))
        starts.program.set_bounds(0, np.zeros(mdp.r.size), np.zeros(mdp.r.size))
        with pytest.raises(programs.ProgramError, match=r"\(x, a\) = \(0, 0\).*Infeasible"):
            next(starts.optimal_bases())

    def test_unbounded(self):
        program = Program(
            sp.csc_array(np.ones((1, 2))),
            -np.ones(2),
            np.zeros(2),
            np.full(2, np.inf),
            np.ones(1),
            np.full(1, np.inf),
            strategy="dual",
        )
        with pytest.raises(programs.ProgramError, match=r"the pair .* 'Unbounded'"):
            program.solve("the pair (x, a) = (1, 2)")

    def test_costs_and_options_that_highs_cannot_take_are_refused(self):
        program = Program(
            sp.csc_array(np.ones((1, 2))),
            np.ones(2),
            np.zeros(2),
            np.ones(2),
            np.ones(1),
            np.ones(1),
            strategy="dual",
        )
        with pytest.raises(programs.ProgramError, match=r"cost 1 .* not finite"):
            program.set_cost(0, np.array([0.0, np.nan]))
        with pytest.raises(programs.ProgramError, match="HiGHS refused option time_limit = -1"):
            program._option("time_limit", -1.0)

    @pytest.mark.parametrize("limit", [-1.0, np.nan])
    def test_an_impossible_time_limit_is_refused(self, limit):
        with pytest.raises(ValueError, match="time_limit must be"):
            programs.evaluate(mx.TabularMDP([[[1.0]]], [[1.0]], 0.5), [[1.0]], time_limit=limit)


def test_progress_is_shown_only_when_asked(capsys):
    case = random_case(0)
    programs.relaxed(*case, 0.5)
    programs.iterate(*case, 0.5, 2)
    assert capsys.readouterr().out == ""
    programs.relaxed(*case, 0.5, progress=True)
    assert "12/12" in capsys.readouterr().out
    programs.iterate(*case, 0.5, 2, progress=True)
    assert "2/2" in capsys.readouterr().out
