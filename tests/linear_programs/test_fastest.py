import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import marginax as mx
from marginax.linear_programs import ProgramError, critic_loss, fastest, frontier, worst_critic
from marginax.weights import exact
from reference.linear_programs import (
    capped_flow,
    pair_kernel,
    power_visitation,
    random_case,
    residual,
    solve_fastest,
)

SEEDS = st.integers(0, 10_000)
CAPS = st.sampled_from([0.3, 1.0, 1.5, 4.0, np.inf])
repeat = settings(max_examples=25, deadline=None)


def rates_of(case, w):
    return mx.marginalized(case.mdp, case.pi, case.mu, w).contraction_rates()


class TestFastest:
    @pytest.mark.parametrize("cap", [0.5, 1.0, 3.0])
    @pytest.mark.parametrize("seed", range(3))
    def test_agrees_with_another_solver(self, seed, cap):
        case = random_case(seed)
        other = [solve_fastest(case.mdp, case.pi, case.mu, cap, start) for start in range(case.q.size)]
        w = fastest(case.mdp, case.pi, case.mu, cap)
        np.testing.assert_allclose(rates_of(case, w).ravel(), other, atol=1e-8)

    @repeat
    @given(SEEDS, CAPS, st.booleans())
    def test_is_the_flow_of_pi_cut_off_at_the_cap(self, seed, cap, sparse):
        case = random_case(seed, sparse=sparse)
        w = fastest(case.mdp, case.pi, case.mu, cap)
        visits = power_visitation(case.mdp, case.mu).reshape(w.shape)
        flow = capped_flow(case.mdp, case.pi, case.mu, min(cap, 1e6))
        np.testing.assert_allclose(w * visits, flow, atol=1e-10)

    @repeat
    @given(SEEDS, CAPS)
    def test_weights_respect_the_cap_and_the_support(self, seed, cap):
        case = random_case(seed)
        w = fastest(case.mdp, case.pi, case.mu, cap)
        unseen = power_visitation(case.mdp, case.mu).reshape(w.shape) == 0.0
        assert unseen.any()
        np.testing.assert_array_equal(w[unseen], 0.0)
        assert w.min() >= 0.0
        assert w.max() <= cap

    @repeat
    @given(SEEDS, CAPS)
    def test_never_gives_a_pair_more_than_arrives(self, seed, cap):
        """The residual is non-negative, as it is for traces 0 ≤ c ≤ π/μ."""
        case = random_case(seed)
        w = fastest(case.mdp, case.pi, case.mu, cap)
        visits = power_visitation(case.mdp, case.mu).reshape(w.shape)
        assert residual(case.mdp, case.pi, w * visits).min() >= -1e-10

    @repeat
    @given(SEEDS, st.sampled_from([0.5, 1.0, 2.0, 5.0, np.inf]), st.sampled_from([0.3, 1.0]))
    def test_is_never_slower_than_retrace_under_the_same_cap(self, seed, clip, decay):
        case = random_case(seed, zeros=False)
        c = decay * np.minimum(case.pi / case.mu, clip)
        w = exact(case.mdp, case.mu, c)
        best = fastest(case.mdp, case.pi, case.mu, float(w.max()))
        assert np.all(rates_of(case, best) <= rates_of(case, w) + 1e-9)

    @repeat
    @given(SEEDS)
    def test_is_never_slower_than_tree_backup_or_random_weights_under_the_same_cap(self, seed):
        case = random_case(seed)
        tree = exact(case.mdp, case.mu, mx.traces.tree_backup(case.pi, case.mu))
        noise = np.random.default_rng(seed).random(tree.shape)
        for w in (tree, noise):
            best = fastest(case.mdp, case.pi, case.mu, float(w.max()))
            assert np.all(rates_of(case, best) <= rates_of(case, w) + 1e-9)

    @repeat
    @given(SEEDS)
    def test_reaches_rate_zero_when_the_cap_admits_the_ratios(self, seed):
        case = random_case(seed, zeros=False)
        ratios = exact(case.mdp, case.mu, mx.traces.importance_sampling(case.pi, case.mu))
        best = fastest(case.mdp, case.pi, case.mu, ratios.max() * (1 + 1e-9))
        np.testing.assert_allclose(rates_of(case, best), 0.0, atol=1e-9)
        np.testing.assert_allclose(best, ratios, rtol=1e-6)
        short = rates_of(case, fastest(case.mdp, case.pi, case.mu, 0.9 * ratios.max()))
        assert short.max() > 1e-6

    def test_one_start_is_a_row_of_all(self):
        mdp, pi, mu = mx.problems.open_world(4)
        every = fastest(mdp, pi, mu, 1.5)
        for start in [(0, 0), (7, 2), (15, 3)]:
            np.testing.assert_allclose(fastest(mdp, pi, mu, 1.5, start=start), every[start], atol=1e-12)

    def test_results_do_not_depend_on_threads(self):
        mdp, pi, mu = mx.problems.open_world(6)  # 144 pairs, several blocks
        one = fastest(mdp, pi, mu, 1.5, threads=1)
        for threads in (2, 5):
            np.testing.assert_array_equal(fastest(mdp, pi, mu, 1.5, threads=threads), one)

    def test_same_policies_need_no_more_than_ones(self):
        mdp, _, mu = mx.problems.garnet(5, 2, 2, seed=0)
        w = fastest(mdp, mu, mu, 7.0)
        visits = mdp.visitation(mu)
        np.testing.assert_allclose(w[visits > 0], 1.0, atol=1e-9)

    @pytest.mark.parametrize("cap", [0.0, -1.0, np.nan, -np.inf])
    def test_a_cap_that_is_not_positive(self, cap):
        mdp, pi, mu = mx.problems.chain(4)
        with pytest.raises(ValueError, match="max_weight"):
            fastest(mdp, pi, mu, cap)
        with pytest.raises(ValueError, match=r"max_weights\[1\]"):
            frontier(mdp, pi, mu, [1.0, cap])

    def test_bad_start_and_bad_threads(self):
        mdp, pi, mu = mx.problems.chain(4)
        with pytest.raises(ValueError, match=r"start\[0\]"):
            fastest(mdp, pi, mu, 1.0, start=(4, 0))
        with pytest.raises(ValueError, match="threads"):
            fastest(mdp, pi, mu, 1.0, threads=0)

    @pytest.mark.parametrize("threads", [1, 3])
    def test_an_unfinished_program_names_its_pair(self, threads):
        mdp, pi, mu = mx.problems.open_world(6)
        with pytest.raises(ProgramError, match=r"\(x, a\) = \(\d+, \d\).*Time limit reached"):
            fastest(mdp, pi, mu, 1.0, time_limit=0.0, threads=threads)

    def test_inputs_are_not_modified(self):
        case = random_case(0)
        copies = [np.array(value) for value in (case.mdp.p, case.pi, case.mu)]
        fastest(case.mdp, case.pi, case.mu, 2.0)
        for before, after in zip(copies, (case.mdp.p, case.pi, case.mu), strict=True):
            np.testing.assert_array_equal(before, after)

    def test_progress_is_shown_only_when_asked(self, capsys):
        mdp, pi, mu = mx.problems.chain(4)
        fastest(mdp, pi, mu, 1.0)
        assert capsys.readouterr().out == ""
        fastest(mdp, pi, mu, 1.0, progress=True)
        assert "20/20" in capsys.readouterr().out


class TestFrontier:
    @repeat
    @given(SEEDS)
    def test_holds_the_rates_of_the_fastest_weights(self, seed):
        case = random_case(seed)
        curve = frontier(case.mdp, case.pi, case.mu, [2.0, 0.5, 1.0])
        np.testing.assert_array_equal(curve.max_weights, [0.5, 1.0, 2.0])
        for cap, rates in zip(*curve, strict=True):
            best = fastest(case.mdp, case.pi, case.mu, float(cap))
            np.testing.assert_allclose(rates, rates_of(case, best), atol=1e-9)

    @repeat
    @given(SEEDS)
    def test_falls_from_one_and_is_convex(self, seed):
        case = random_case(seed)
        _, rates = frontier(case.mdp, case.pi, case.mu, np.linspace(0.01, 6.0, 12))
        assert rates[0].max() < 1.0
        assert np.all(np.diff(rates, axis=0) <= 1e-10)
        assert np.all(np.diff(rates, n=2, axis=0) >= -1e-9)

    def test_on_the_chain_in_closed_form(self):
        """μ takes the one good action with chance 1/5: of the flow γ into the second cell w̄/5 passes, and is never cut again."""
        mdp, pi, mu = mx.problems.chain(n=10, actions=5)
        caps = np.array([0.5, 2.0, 4.0, 5.0])
        curve = frontier(mdp, pi, mu, caps)
        np.testing.assert_allclose(curve.rates[1:, 0, 0], mdp.discount * (1 - caps[1:] / 5), atol=1e-12)
        np.testing.assert_allclose(curve.rates[0, 0, 0], 0.5 + 0.5 * mdp.discount * (1 - 1 / 5), atol=1e-12)

    def test_refuses_an_empty_list(self):
        mdp, pi, mu = mx.problems.chain(4)
        with pytest.raises(ValueError, match="max_weights must be a list of at least one cap"):
            frontier(mdp, pi, mu, [])


class TestWorstCritic:
    @repeat
    @given(SEEDS)
    def test_loss_is_the_local_rate_times_one_minus_discount(self, seed):
        case = random_case(seed)
        w = np.random.default_rng(seed).exponential(size=(*case.q.shape, *case.q.shape))
        loss = worst_critic(case.mdp, case.pi, case.mu, w).loss
        np.testing.assert_allclose(loss, (1 - case.mdp.discount) * rates_of(case, w), atol=1e-12)

    def test_no_corner_of_the_hypercube_is_worse(self):
        """All 2^4 corners; L is linear in q, so its maximum is at one of them."""
        case = random_case(1, states=2, actions=2)
        w = np.random.default_rng(1).exponential(size=(2, 2, 2, 2))
        corners = [np.reshape(c, (2, 2)) for c in itertools.product([-1.0, 1.0], repeat=4)]
        losses = np.array([literal_loss(case, w, corner) for corner in corners])
        np.testing.assert_allclose(
            worst_critic(case.mdp, case.pi, case.mu, w).loss, losses.max(axis=0), atol=1e-12
        )

    def test_critic_stays_in_the_hypercube_and_attains_its_loss(self):
        case = random_case(2)
        w = np.random.default_rng(2).exponential(size=(*case.q.shape, *case.q.shape))
        critic, loss = worst_critic(case.mdp, case.pi, case.mu, w)
        assert np.abs(critic).max() <= 1.0
        for x, a in np.ndindex(case.q.shape):
            np.testing.assert_allclose(literal_loss(case, w, critic[x, a])[x, a], loss[x, a], atol=1e-12)

    @repeat
    @given(SEEDS, st.booleans())
    def test_critic_loss_is_the_expectation_of_the_paper(self, seed, sparse):
        case = random_case(seed, sparse=sparse)
        rng = np.random.default_rng(seed)
        w, q = rng.normal(size=(*case.q.shape, *case.q.shape)), rng.normal(size=case.q.shape)
        np.testing.assert_allclose(
            critic_loss(case.mdp, case.pi, case.mu, w, q), literal_loss(case, w, q), atol=1e-12
        )

    def test_the_game_has_a_value(self):
        """min_w max_q L = (1-γ) times the frontier: no critic does better against the fastest weights."""
        case = random_case(3)
        w = fastest(case.mdp, case.pi, case.mu, 1.3)
        loss = worst_critic(case.mdp, case.pi, case.mu, w).loss
        curve = frontier(case.mdp, case.pi, case.mu, [1.3])
        np.testing.assert_allclose(loss, (1 - case.mdp.discount) * curve.rates[0], atol=1e-10)

    @repeat
    @given(SEEDS, st.sampled_from([0.3, 1.0, 2.5]))
    def test_the_critic_that_waits_for_the_cap_certifies_the_fastest_weights(self, seed, cap):
        """Duality: q = E^π[γ^T] of the time until a cut leaves no weights below the cap a smaller loss."""
        case = random_case(seed)
        w = fastest(case.mdp, case.pi, case.mu, cap)
        visits = power_visitation(case.mdp, case.mu)
        cut = residual(case.mdp, case.pi, w.reshape(visits.shape) * visits) > 1e-12
        kernel = case.mdp.discount * pair_kernel(case.mdp, case.pi)
        rates = rates_of(case, w).ravel()
        for start in range(case.q.size):
            waits = np.where(cut[start][:, None], 0.0, kernel)
            q = np.linalg.solve(np.eye(case.q.size) - waits, cut[start].astype(float))
            gain = cap * visits[start] @ np.maximum(q - kernel @ q, 0.0)
            np.testing.assert_allclose(
                (1 - case.mdp.discount) * q[start] - gain, (1 - case.mdp.discount) * rates[start], atol=1e-10
            )

    def test_wrong_shapes(self):
        case = random_case(0)
        w = np.ones((*case.q.shape, *case.q.shape))
        with pytest.raises(ValueError, match="w must have shape"):
            worst_critic(case.mdp, case.pi, case.mu, w[0])
        with pytest.raises(ValueError, match="critic must have shape"):
            critic_loss(case.mdp, case.pi, case.mu, w, case.q.T)


def literal_loss(case, w, q):
    """Eq. (td-estimate) for π̃ = π, one sum after the other."""
    mdp, p = case.mdp, case.mdp.dense_p()
    visits = power_visitation(mdp, case.mu).reshape(w.shape)
    loss = np.zeros(q.shape)
    for x, a in np.ndindex(q.shape):
        loss[x, a] = (1 - mdp.discount) * q[x, a]
        for y, b in np.ndindex(q.shape):
            following = sum(p[y, b, z] * case.pi[z, c] * q[z, c] for z, c in np.ndindex(q.shape))
            loss[x, a] += visits[x, a, y, b] * w[x, a, y, b] * (mdp.discount * following - q[y, b])
    return loss
