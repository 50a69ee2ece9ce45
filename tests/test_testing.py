"""The conformance kit: our own targets and rlax's, and small copies of known mistakes."""

import jaxtyping
import numpy as np
import pytest
import rlax

from marginax import targets
from marginax.testing import ARGUMENTS, check_targets
from marginax.traces import clip_ratios

END = "NaN in v_next after an end is not read"
INSIDE = "truncated inside: bootstrap, no credit passes"


def our_retrace(q, v_next, rewards, discounts, ratios, truncated):
    return targets.multi_step(q, v_next, rewards, discounts, clip_ratios(ratios, 1.0, 0.9), truncated)


def our_vtrace(v, v_next, rewards, discounts, ratios, truncated):
    traces, rhos = clip_ratios(ratios, 1.0, 0.9), clip_ratios(ratios, 1.5)
    return targets.vtrace(v, v_next, rewards, discounts, traces, rhos, truncated)


def our_peng(v_next, rewards, discounts, decay, truncated):
    return targets.peng(v_next, rewards, discounts, decay, truncated)


OURS = {
    "retrace": (our_retrace, {"decay": 0.9}),
    "vtrace": (our_vtrace, {"decay": 0.9, "rho_clip": 1.5}),
    "n-step": (targets.n_step, {"steps": 2}),
    "peng": (our_peng, {}),
    "marginalized": (targets.marginalized, {}),
}


@pytest.mark.parametrize("algorithm", ARGUMENTS)
def test_our_targets_keep_every_rule(algorithm):
    fn, options = OURS[algorithm]
    report = check_targets(fn, algorithm, **options)
    assert report.passed and all(row.status == "kept" for row in report.rows), str(report)


def rlax_retrace(q, v_next, rewards, discounts, ratios):
    traces = np.minimum(1, ratios)
    return rlax.general_off_policy_returns_from_q_and_v(q[1:], v_next, rewards, discounts, traces[1:])


def rlax_vtrace(v, v_next, rewards, discounts, ratios):
    return v + rlax.vtrace(v, v_next, rewards, discounts, ratios)


def rlax_n_step(v_next, rewards, discounts, steps):
    return rlax.n_step_bootstrapped_returns(rewards, discounts, v_next, steps)


def rlax_peng(v_next, rewards, discounts, decay):
    return rlax.lambda_returns(rewards, discounts, v_next, decay)


@pytest.mark.parametrize(
    ("fn", "algorithm"),
    [(rlax_retrace, "retrace"), (rlax_vtrace, "vtrace"), (rlax_n_step, "n-step"), (rlax_peng, "peng")],
)
def test_rlax_keeps_the_rules_but_reads_what_follows_an_end(fn, algorithm):
    """It multiplies by the discount of 0, which NaN survives, and knows no truncation."""
    report = check_targets(fn, algorithm)
    assert END in report.broken and all(rule.startswith("NaN") for rule in report.broken), str(report)
    assert {row.note for row in report.rows if row.status == "not tested"} == {"takes no `truncated`"}


# Small copies of known mistakes


def retrace(q, v_next, rewards, discounts, ratios, truncated, *, mistake=""):
    """Backwards, one step after another: y[t] = Δ[t] + γ c[t+1] y[t+1]."""
    if mistake == "the second-to-last step bootstraps from the wrong state" and len(q) > 1:
        v_next = np.append(v_next[:-2], v_next[[-1, -1]])
    c = np.minimum(np.inf if mistake == "ratios are not clipped" else 1, ratios)
    y, found = 0.0, []
    for t in reversed(range(len(q))):
        cut = discounts[t] == 0 or (truncated[t] and mistake != "credit passes a truncation")
        ended = discounts[t] == 0 or (truncated[t] and mistake == "a truncated step does not bootstrap")
        following = min(t + (mistake != "ratios of the step before"), len(q) - 1)
        carry = 0.0 if cut else discounts[t] * c[following]
        y = rewards[t] + (0 if ended else discounts[t] * v_next[t]) - q[t] + (carry * y if carry else 0)
        found.append(q[t] + y)
    return found[::-1]


def test_the_same_without_a_mistake():
    assert check_targets(retrace, "retrace").passed


@pytest.mark.parametrize(
    ("mistake", "rule", "step"),
    [
        (
            "the second-to-last step bootstraps from the wrong state",
            "the array ends before the episode: bootstrap",
            4,
        ),
        ("credit passes a truncation", INSIDE, 3),
        ("a truncated step does not bootstrap", INSIDE, 3),
        ("ratios are not clipped", "ratios above 1", 4),
        ("ratios of the step before", "ratios below 1", 4),
    ],
)
def test_a_known_mistake_is_found_at_its_step_and_named(mistake, rule, step):
    def fn(q, v_next, rewards, discounts, ratios, truncated):
        return retrace(q, v_next, rewards, discounts, ratios, truncated, mistake=mistake)

    report = check_targets(fn, "retrace")
    row = next(row for row in report.rows if row.rule == rule)
    assert not report.passed
    assert (row.status, row.step, row.note) == ("broken", step, mistake), str(report)
    assert mistake in str(report)


def test_an_error_and_a_wrong_shape_are_rows_of_the_report():
    report = check_targets(lambda **arrays: arrays["rewards"][:-1], "peng")
    assert report.rows[1].note == "returned shape (5,) instead of (6,)"
    report = check_targets(lambda v_next: 0, "peng")
    assert "TypeError" in report.rows[0].note and not report.passed


def test_another_name_is_refused():
    with pytest.raises(ValueError, match="algorithm must be one of retrace, vtrace"):
        check_targets(our_retrace, "sarsa")


def test_values_of_another_type_are_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # its run-time checks would come first
    with pytest.raises(ValueError, match="fn must be a function that returns targets, got NoneType"):
        check_targets(None, "retrace")
    with pytest.raises(ValueError, match=r"algorithm must be one of retrace, .* got None"):
        check_targets(our_retrace, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("clip", -1.0), ("rho_clip", np.nan), ("decay", 2), ("steps", 0)),
        *(("discount", 0.0), ("discount", 2), ("tolerance", 0.0)),
    ],
)
def test_settings_that_make_no_target_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} must"):
        check_targets(lambda **arrays: arrays["rewards"], "retrace", **{name: value})
