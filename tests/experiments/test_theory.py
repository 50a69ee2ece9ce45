"""The experiment on contraction rates: what its labels mean, and verdicts that rounding does not change."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.experiments.theory import ESTIMATORS, PROBLEMS, TRACES, Theory


@pytest.mark.slow
def test_estimated_weights_are_those_of_the_other_experiments():
    """Monte Carlo per pair, μ from frequencies where it is not said to be true."""
    theory = Theory(seeds=1, trajectories=30)
    found = theory.estimated()["found"][0, :, 0, -1]
    mdp, pi, mu = mx.problems.chain(10, 5)
    c = mx.traces.retrace(pi, mu)
    batch = mx.trajectories.sample(mdp, mu, jax.random.fold_in(jax.random.key(0), 0), episodes=30, horizon=10)
    counts = np.zeros(pi.shape)
    np.add.at(counts, (np.asarray(batch.states), np.asarray(batch.actions)), 1)
    expected = (
        mx.weights.monte_carlo(batch, c, factored=False),
        mx.weights.certainty_equivalence(batch, c, mu=counts / counts.sum(axis=1, keepdims=True)),
        mx.weights.certainty_equivalence(batch, c, mu=mu),
    )
    rates = [mx.marginalized(mdp, pi, mu, w).contraction_rate() for w in expected]
    np.testing.assert_allclose(found, rates, atol=1e-5)
    assert len({round(rate, 4) for rate in rates}) == len(ESTIMATORS)


@pytest.mark.slow
def test_rounding_does_not_decide_proposition_1(tmp_path):
    """With γ = 0.5 the errors of forty steps end at what rounding leaves of them."""
    theory = Theory(seeds=2, discount=0.5, trajectories=10)
    shape = (2, len(ESTIMATORS), 2, theory.counts.size)
    data = {
        "rates": {
            "by_clip": np.ones((len(PROBLEMS), theory.clips.size)),
            "by_decay": np.ones((len(PROBLEMS), len(TRACES), theory.decays.size)),
        },
        "convergence": theory.convergence(),
        "estimated": {"found": np.ones(shape), "exact": np.ones(2)},
    }
    proposition, same, *estimated = theory.section(tmp_path, data).claims
    assert (proposition.verdict, same.verdict) == ("reproduced", "reproduced")
    assert {claim.verdict for claim in estimated} == {"not reproduced"}  # a rate of 1 is no contraction
    # The paper says it of the weights that it estimates; certainty equivalence is ours.
    assert ["beyond the paper" in claim.text for claim in estimated] == [False, True, True]
