"""The conformance kit on the targets for tensors, and on torchrl."""

import numpy as np
import pytest

from marginax.testing import check_targets

torch = pytest.importorskip("torch", reason="PyTorch is no dependency of marginax")

from marginax.torch import targets  # noqa: E402


def tensors(*arrays):
    return [torch.from_numpy(x) if isinstance(x, np.ndarray) else x for x in arrays]


def retrace(q, v_next, rewards, discounts, ratios, truncated):
    return targets.multi_step(*tensors(q, v_next, rewards, discounts, np.minimum(1, ratios), truncated))


def vtrace(v, v_next, rewards, discounts, ratios, truncated):
    rho = np.minimum(1, ratios)
    return targets.vtrace(*tensors(v, v_next, rewards, discounts, rho, rho, truncated))


def n_step(v_next, rewards, discounts, steps, truncated):
    return targets.n_step(*tensors(v_next, rewards, discounts, steps, truncated))


def peng(v_next, rewards, discounts, decay, truncated):
    return targets.peng(*tensors(v_next, rewards, discounts, decay, truncated))


def marginalized(q, v_next, rewards, discounts, weights, truncated):
    return targets.marginalized(*tensors(q, v_next, rewards, discounts, weights, truncated))


@pytest.mark.parametrize(
    ("fn", "name"),
    [
        (retrace, "retrace"),
        (vtrace, "vtrace"),
        (n_step, "n-step"),
        (peng, "peng"),
        (marginalized, "marginalized"),
    ],
)
def test_our_targets_keep_every_rule(fn, name):
    report = check_targets(fn, name)
    assert all(row.status == "kept" for row in report.rows), str(report)


def torchrl_vtrace(v, v_next, rewards, discounts, ratios, truncated):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    column = [torch.from_numpy(x)[None, :, None] for x in (np.log(ratios), v, v_next, rewards, truncated)]
    log_ratios, value, next_value, reward, cut = column
    ended = torch.from_numpy(discounts == 0)[None, :, None]
    return functional.vtrace_advantage_estimate(
        0.9, log_ratios, torch.zeros_like(log_ratios), value, next_value, reward, cut | ended, ended
    )[1][0, :, 0]


def torchrl_lambda(v_next, rewards, discounts, decay, truncated):
    functional = pytest.importorskip("torchrl.objectives.value.functional")
    column = [torch.from_numpy(x)[None, :, None] for x in (v_next, rewards, truncated, discounts == 0)]
    next_value, reward, cut, ended = column
    return functional.td_lambda_return_estimate(0.9, decay, next_value, reward, cut | ended, ended)[0, :, 0]


@pytest.mark.filterwarnings("ignore:divide by zero")  # the logarithm of a ratio of 0
@pytest.mark.parametrize(("fn", "name"), [(torchrl_vtrace, "vtrace"), (torchrl_lambda, "peng")])
def test_torchrl_keeps_the_rules_but_reads_what_follows_an_end(fn, name):
    report = check_targets(fn, name)
    assert report.broken == ("NaN in v_next after an end is not read",), str(report)
