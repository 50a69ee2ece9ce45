"""The experiment's verdicts on made-up errors; the program itself is tested in tests/deep/test_prediction.py."""

import dataclasses

import numpy as np
import pytest

from marginax import engine
from marginax.experiments.discrete import Discrete
from marginax.experiments.prediction import MARGINALIZED, Prediction


def section(tmp_path, factor, diverged=False, decay=1.0):
    """A section from errors of which those of `marginalized` are the others' times a factor in each of six games."""
    experiment = dataclasses.replace(Prediction(seeds=6), decays=(0.9, 1.0), clips=(2.0,), decay=decay)
    settings = experiment.grid()
    ours = np.array([s.operator == MARGINALIZED for s in settings])
    rng = np.random.default_rng(0)
    data = {}
    for k, part in enumerate(experiment.parts()):
        errors = np.exp(0.05 * rng.normal(size=(6, 48, len(settings))))
        errors[..., ours] *= factor[k]
        if diverged:
            errors[0, 5:, ~ours] = np.nan
        spread = np.where(ours, 1.0, 2.0) * np.ones((6, 12, len(settings)))
        data[part.label] = {"errors": errors, "variances": spread, "credits": spread}
    return experiment.section(tmp_path, data)


@pytest.mark.slow
def test_verdicts_follow_the_errors(tmp_path):
    better = section(tmp_path, [0.5] * 6)
    assert {claim.verdict for claim in better.claims} == {"reproduced"}
    assert (tmp_path / "errors.png").is_file() and (tmp_path / "settings.csv").is_file()
    enough = section(tmp_path, [0.5] * 5 + [2.0])
    assert enough.claims[0].effect == 5 and enough.claims[0].verdict == "reproduced"  # at least 5 of 6
    mixed = section(tmp_path, [0.5] * 4 + [2.0] * 2)
    assert mixed.claims[0].effect == 4 and mixed.claims[0].verdict == "not reproduced"


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_every_operator_has_a_row_of_variances_at_any_decay(decay, tmp_path):
    """One-step has no decay, so no decay leaves it out."""
    errors, variances = section(tmp_path, [0.5] * 6, decay=decay).tables
    assert {row[0] for row in variances.rows} == {row[0] for row in errors.rows[:-1]}
    assert len(variances.rows) == 7


@pytest.mark.slow
def test_diverged_seeds_are_counted_and_never_best(tmp_path):
    found = section(tmp_path, [0.5] * 6, diverged=True)
    assert "66 of 468 runs diverged" in found.text[1]  # one seed of eleven settings in six games
    assert found.claims[0].verdict == "reproduced"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"behaviour_epsilon": 0.0}, "behaviour_epsilon must lie in"),
        ({"decay": 0.5}, "decay and clip must be in the grid"),
        ({"games": ()}, "games must name at least one"),
        ({"games": ("grid/catch", "grid/catch")}, "games must differ in names of files"),
        ({"decays": (1.0, -3.0)}, r"decays must lie in \[0, 1\], got -3.0"),
        ({"clips": (2.0, 0.0)}, "clips must be positive, got 0.0"),
        ({"mixture": 3.0}, r"mixture must lie in \[0, 1\], got 3.0"),
        ({"average": float("nan")}, "average must be finite, got nan"),
        ({"last_rate": -1.0}, r"last_rate must lie in \[0, 1\], got -1.0"),
        ({"power": float("nan")}, r"power must lie in \[0, 2\], got nan"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, got 0.0"),
        ({"improvements": -1}, "improvements must be at least 0, got -1"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Prediction(**given)


@pytest.mark.parametrize("experiment", [Prediction, Discrete])
@pytest.mark.parametrize("name", ["grid/nothing", "nothing"])
def test_a_game_that_is_not_known_is_named_before_the_others_are_played(experiment, name, tmp_path):
    with pytest.raises(ValueError, match=f"got '{name}'"):
        experiment(games=("grid/catch", name)).prepared(tmp_path, None, engine.make("local"))


def test_a_game_without_discrete_actions_is_refused(tmp_path):
    pytest.importorskip("gymnax")
    with pytest.raises(ValueError, match="games must have discrete actions, got 'gymnax/Pendulum-v1'"):
        Prediction(games=("gymnax/Pendulum-v1",)).prepared(tmp_path, None, engine.make("local"))
