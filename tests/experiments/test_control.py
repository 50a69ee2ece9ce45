"""Figure 3's command at toy size: resuming, what is written, and verdicts that follow from the data."""

import json

import numpy as np
import pytest
import tyro

from marginax.cli import main
from marginax.deep.config import TD3Config
from marginax.deep.curves import Curve, curves_of
from marginax.experiments.command import reproduce
from marginax.experiments.control import CHANGES, Control, seconds
from marginax.experiments.control_report import claims, failures, section, table

TOY = ["reproduce", "control", "--tasks", "Pendulum-v1", "--operators", "one-step", "marginalized-length-2"]
TOY += ["--seeds", "2", "--steps", "80", "--evaluate-every", "20", "--episodes", "1", "--agent.hidden", "4"]
TOY += ["--agent.batch-size", "4", "--agent.update-every", "10", "--agent.update-after", "20"]


@pytest.mark.long
def test_runs_writes_and_does_not_run_again(tmp_path, capsys):
    words = [*TOY, "--out", str(tmp_path)]
    assert main(words) == 0
    parts = sorted(path.name for path in (tmp_path / "control" / "Pendulum-v1").glob("*-seed-*"))
    assert parts == [f"{name}-seed-{k}" for name in ("marginalized-length-2", "one-step") for k in (0, 1)]
    said = capsys.readouterr()
    assert "return one-step" in said.out
    assert main(words) == 0  # nothing is trained
    assert "return one-step" not in capsys.readouterr().out
    result = json.loads((tmp_path / "control" / "result.json").read_text())
    assert [row[1] for row in result["tables"][0]["rows"]] == ["one-step", "marginalized-length-2"]
    assert "Figure 3" in (tmp_path / "report.html").read_text()
    for name in ("control.png", "control.pdf", "control-final.png", "control-variance.png", "control.csv"):
        assert (tmp_path / "control" / name).stat().st_size > 0
    assert main(["plot", str(tmp_path / "control" / "Pendulum-v1"), "--out", str(tmp_path)]) == 0


@pytest.mark.long
def test_stopped_at_its_time_limit_it_carries_on(tmp_path, capsys):
    words = [*TOY, "--out", str(tmp_path)]
    assert main([*words, "--time-limit", "1s"]) == 0
    assert "stopped at the time limit; the same command carries on" in capsys.readouterr().out
    assert not (tmp_path / "report.html").exists()
    assert main(words) == 0
    assert (tmp_path / "report.html").exists()


def test_every_name_is_an_agent():
    for name, settings in CHANGES.items():
        assert TD3Config(**settings).length in (1, 2, 5, 10), name
    paper = Control(operators=("marginalized-paper",)).population("Pendulum-v1").groups["marginalized-paper"]
    assert (paper.weights, paper.normalisation, paper.samples_a_step) == ("saddle-point", "power", False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "mujoco/foo"], "mujoco/foo"),
        (["--operators", "retrase"], "did you mean 'retrace'?"),
        (["--operators", "retrace", "retrace"], "operators must be different, got 'retrace' twice"),
        (
            ["--tasks", "my:Walk-v0", "my-Walk-v0"],
            "tasks must differ in names of files, but 'my:Walk-v0' and",
        ),
        (["--agent.operator", "n-step"], "use --operators"),
        (["--agent.decay", "2"], "decay must lie in [0, 1]"),
        (["--steps", "70"], "steps must be a positive multiple of update_every 50, got 70"),
        (["--time-limit", "soon"], "time-limit must be a number"),
        (["--checkpoint-minutes", "0"], "checkpoint-minutes must be above 0"),
    ],
)
def test_mistakes_are_found_before_anything_is_run(words, message, tmp_path, capsys):
    given = ["reproduce", "control", "--tasks", "Pendulum-v1", "--steps", "100", *words]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list((tmp_path / "out").glob("control/*/*"))


def test_lengths_of_time():
    assert seconds("1.5h") == 5400


def made_up(level, seeds=10, noise=1.0, variance=1.0):
    generator = np.random.default_rng(0)
    returns = level + noise * generator.normal(size=(seeds, 20))
    values = {
        "error_variance": np.full((seeds, 20), variance),
        "error_variance_retrace": np.ones((seeds, 20)),
    }
    return Curve("task", "", np.arange(seeds), np.arange(20), returns, np.zeros(seeds, bool), values)


def test_verdicts_follow_from_the_data():
    found = {
        "one-step": made_up(100),
        "retrace": made_up(120),
        "marginalized-regression": made_up(80, noise=5.0, variance=0.5),
    }
    made = claims("task", found)
    verdicts = {(c.text.split()[0], c.measure.split(":")[0]): c.verdict for c in made}
    assert verdicts["Multi-step", "final return"] == "reproduced"
    assert verdicts["Marginalized", "area under the curve"] == "not reproduced"
    assert verdicts["Variations", next(k[1] for k in verdicts if k[0] == "Variations")] == "reproduced"
    lower = [c for c in made if "lower variance" in c.text]
    np.testing.assert_allclose(lower[0].effect, np.log(0.5))
    assert lower[0].verdict == "reproduced"


@pytest.mark.slow
@pytest.mark.parametrize("names", [("retrace", "n-step"), ("retrace", "one-step")])
def test_the_report_names_the_operator_that_failures_are_measured_by(names, tmp_path):
    """The second operator's seeds end at 5, below a tenth of 100; a tenth of 5 is below both."""
    found = {name: made_up(level, noise=0.01) for name, level in zip(names, (100, 5), strict=True)}
    for curve in found.values():
        curve.diagnostics.update({name: np.ones((10, 20)) for name in ("trace_mean", "weight_mean")})
    base = "one-step" if "one-step" in names else "retrace"
    text, *_ = section("control", tmp_path, {"task": found}, 1.0, "default").text
    assert f"below a tenth of the median of {base}, if that is positive" in text
    assert failures(found) == {"retrace": 0, names[1]: 10 if base == "retrace" else 0}


def test_operators_are_compared_at_the_same_clip():
    names = ("one-step", "retrace", "retrace-clip-2", "marginalized-paths", "marginalized-paths-clip-2")
    made = claims("task", {name: made_up(100) for name in names})
    gains = [c.measure for c in made if "vanilla" in c.text and c.measure.startswith("area")]
    assert gains == [
        f"area under the curve: (marginalized-paths{clip} - retrace{clip}) / retrace{clip}"
        for clip in ("", "-clip-2")
    ]


def test_runs_of_other_lengths_and_seeds_are_compared_where_they_overlap():
    row = {"operator": "one-step", "seed": 0, "step": 10, "return": 100.0, "failed_at": None}
    long = [{**row, "seed": s, "step": t} for s in range(4) for t in (10, 20)]
    short = [{**row, "operator": "retrace", "seed": s, "return": 150.0, "step": 10} for s in range(1, 4)]
    long = [{**r, "return": 1000.0} if r["seed"] == 0 or r["step"] == 20 else r for r in long]
    made = claims("task", curves_of("task", [*long, *short]))
    np.testing.assert_allclose([c.effect for c in made], 0.5)


def test_a_seed_that_failed_before_it_learned_leaves_the_claim_on_variances_open():
    measured = {"error_variance": 1.0, "error_variance_retrace": 2.0}
    row = {"operator": "marginalized-regression", "step": 10, "return": 1.0, "failed_at": None, **measured}
    failed = {**row, "return": 0.5, "failed_at": 5, **dict.fromkeys(measured)}
    lines = [{**row, "seed": 0}, {**row, "seed": 1}, {**failed, "seed": 2}]
    lines += [{**row, "operator": "retrace", "seed": seed} for seed in range(3)]
    found = curves_of("task", lines)
    made = {c.text: c.verdict for c in claims("task", found)}
    assert made["Marginalized targets have lower variance than Retrace's"] == "cannot be decided"
    assert (
        made["Marginalized updates provide further gains over the vanilla multi-step update"]
        == "not reproduced"
    )
    found["retrace"].diagnostics["error_variance"][:] = np.nan
    plain = {name: np.ones((3, 1)) for name in ("trace_mean", "weight_mean")}
    for curve in found.values():
        curve.diagnostics.update(plain)
    assert [row[-3:] for row in table("task", found)] == [(1.0, 1.0, 1.0), (1.0, 1.0, "")]


def test_a_preset_is_where_the_settings_start():
    ours = Control.starting(["--preset", "default", "--steps", "100"])
    assert (ours.preset, ours.agent) == ("default", TD3Config())
    assert Control(preset="default") == ours != Control()
    assert Control.starting([]) == Control()
    assert Control().agent == TD3Config.preset("spinning-up")
    for bad, message in (("none", "--preset must be one of"), ("paper", "preset must be 'spinning-up' or")):
        with pytest.raises(ValueError, match=message):
            Control.starting([f"--preset={bad}"])


def test_the_command_of_a_report_gives_the_same_settings():
    changes = {"act_noise": 0.3, "scale_observations": False, "layer_norm": True, "hidden": (8, 4)}
    agent = TD3Config(**changes)
    plain: dict = {"tasks": ("Pendulum-v1",), "seeds": 3, "seed": 7, "discount": 0.98, "episodes": 2}
    control = Control(preset="default", agent=agent, **plain)
    words = control.command.split()
    program, function, rest = reproduce(words[2:])  # without marginax reproduce
    assert program == "marginax reproduce control"
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "marginax.experiments.command._reproduce", lambda experiments, _: seen.extend(experiments)
        )
        tyro.cli(function, args=rest)
    assert seen == [control]


def test_options_that_change_nothing_are_refused():
    assert Control(operators=("one-step", "scaled-observations"))
    with pytest.raises(
        ValueError, match="'one-step' and 'scaled-observations' have the same settings at the"
    ):
        Control(preset="default", operators=("one-step", "scaled-observations"))


@pytest.mark.parametrize("preset", ["default", "spinning-up"])
def test_an_operator_means_the_same_in_every_preset(preset):
    control = Control(preset=preset, operators=("marginalized-regression", "marginalized-paper"))
    groups = control.population("Pendulum-v1").groups
    forms = [(group.weights, group.normalisation, group.start_conditioned) for group in groups.values()]
    assert forms == [("regression", "none", True), ("saddle-point", "power", True)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"start_conditioned": False},
            "agent.start_conditioned cannot be set here, got False: use --operators",
        ),
        ({"discount": 0.9}, "agent.discount cannot be set here, got 0.9: use --discount"),
    ],
)
def test_settings_that_would_be_overwritten_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Control(agent=TD3Config.preset("spinning-up", **changes))
