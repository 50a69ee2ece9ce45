"""The experiment with discrete actions: what it trains, and what it says of made-up returns."""

import csv
import dataclasses

import numpy as np
import pytest

from marginax.experiments.discrete import KEPT, Discrete, as_arrays

QUICK = dataclasses.replace(
    Discrete().quick(), games=("grid/catch", "grid/noisy-catch"), ablation="grid/catch"
)


def made_up(groups: int, seeds: int, better: float) -> dict[str, np.ndarray]:
    """Returns of 1 for all groups but the last, whose are higher, and half the variance in its targets."""
    shape = (groups, seeds, 4)
    arrays = {name: np.full(shape, 2.0) for name in ("return", *KEPT)}
    arrays["return"] = 1 + 0.01 * np.random.default_rng(0).normal(size=shape)
    arrays["return"][-1] += better
    arrays["error_variance"][-1] = 1.0
    return {**arrays, "steps": np.arange(1, 5) * 10}


def test_all_operators_of_a_game_are_one_program_and_only_the_operator_differs():
    parts = Discrete().parts()
    assert len(parts) == 9  # six games, the ablation, and actor-critics on two games
    config = Discrete(games=("grid/catch",)).work()["grid-catch-operators"]
    assert config.on_device
    settings = [{**group.to_json(), "operator": ""} for group in config.groups.values()]
    assert all(each == settings[0] for each in settings)
    assert {group.copies for group in config.groups.values()} == {64}


def test_claims_follow_the_returns(tmp_path):
    data = {
        "grid-catch-operators": made_up(3, 5, 0.5),
        "grid-noisy-catch-operators": made_up(3, 5, -0.5),
        "grid-catch-ablation": made_up(len(QUICK.variants()), 5, 0.0),
    }
    data["grid-catch-operators"]["error_variance_retrace"][0] = np.nan  # one-step has short sequences
    section = QUICK.section(tmp_path, data)
    verdicts = {(claim.where, claim.text): claim.verdict for claim in section.claims}
    assert verdicts["grid/catch", "marginalized is above Retrace"] == "reproduced"
    assert "the middle half of them" in section.figures[0].caption  # what `draw_curves` shades
    assert verdicts["grid/noisy-catch", "marginalized is above Retrace"] == "not reproduced"
    less = "marginalized targets vary less than Retrace's on the same batches"
    assert verdicts["grid/catch", less] == "reproduced"
    effect = next(claim.effect for claim in section.claims if claim.text == less)
    assert effect == pytest.approx(-np.log(2))
    assert len(section.tables) == 3
    with (tmp_path / "returns.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    variants = 2 * 3 + len(QUICK.variants())
    assert len(lines) == variants * 5 * 4  # seeds, evaluations
    assert [line["error_variance_retrace"] for line in lines[::20]][:3] == ["", "2", "2"]
    last = [line for line in lines if line["part"] == "operators"][-1]
    named = [last[name] for name in ("game", "variant", "seed", "step")]
    assert named == ["grid/noisy-catch", "marginalized", "4", "40"]
    expected = data["grid-noisy-catch-operators"]["return"][-1, -1, -1]
    assert float(last["return"]) == pytest.approx(expected)
    assert lines[-1]["part"] == "ablation"
    assert (tmp_path / "discrete.png").exists()


def test_metrics_become_arrays():
    config = QUICK.population("grid/catch", {"a": {}, "b": {"operator": "retrace"}}, 40_960)
    line = {"return": 1.0, **dict.fromkeys(KEPT, 0.5), "error_variance_retrace": None}
    lines = [
        {**line, "operator": g, "seed": s, "step": t, "return": 100.0 * (g == "b") + 10 * s + t}
        for g in "ab"
        for s in config.seeds
        for t in (1, 2)
    ]
    arrays = as_arrays(config, lines)
    assert arrays["return"][1, 2].tolist() == [121.0, 122.0]
    assert np.isnan(arrays["error_variance_retrace"]).all()


def test_frames_that_do_not_divide_are_refused():
    with pytest.raises(
        ValueError, match=r"frames must be a multiple of 2560, environments times evaluations .*, got 1000"
    ):
        Discrete(frames=1000)


def test_operators_given_twice_are_refused():
    with pytest.raises(
        ValueError, match="operators must differ in names of files, but 'retrace' and 'retrace'"
    ):
        Discrete(operators=("retrace", "retrace"))


@pytest.mark.parametrize("name", ["frames", "evaluations", "environments"])
def test_none_of_something_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Discrete(**{name: 0})
