"""The experiment on variances: its claims on estimates whose variances are known."""

import numpy as np
import pytest

from marginax.experiments.variance import Variance


def test_claims_compare_variances_and_say_where_the_corollary_ends():
    """Estimates with mean 3 and variances 1000, 100, 1 and 10: R_τ, M_τ, R and M."""
    experiment = Variance(seeds=20)
    variances = np.array([1000.0, 100.0, 1.0, 10.0])
    wobble = 1 + 0.01 * np.random.default_rng(0).normal(size=(4, 20))
    moments = np.stack([np.full((4, 20), 3.0), variances[:, None] * wobble + 9.0])  # E[X] and E[X²]
    claims = experiment._claims(dict.fromkeys(experiment.cases(), moments))
    assert [claim.effect for claim in claims[:4]] == pytest.approx([-1, -3, -1, 1], abs=0.02)
    verdicts = ["reproduced", "reproduced", "reproduced", "not reproduced"]
    assert [claim.verdict for claim in claims[:4]] == verdicts
    # Corollary 2 is on deterministic rewards; the paper says that with noisy ones nothing is proven.
    for claim in claims:
        if claim.where.startswith("Corollary 2"):
            assert (
                claim.text.startswith("beyond the paper") == ("σ" in claim.text) == ("without" in claim.where)
            )
