"""Figure 3's command at toy size: shares, resuming, what is written, and verdicts that follow from the data."""

import csv
import json

import numpy as np
import pytest

from marginax.experiments.control import _share, control, main
from marginax.experiments.control_report import Curves, _claims, curves
from marginax.experiments.control_settings import OPERATORS, Settings, agent_settings, seconds

AGENT = "hidden=4,batch_size=4,update_every=10,update_after=20,random_steps=20"
TOY = ["--tasks", "Pendulum-v1", "--operators", "one-step", "retrace:sequence_length=2", "--seeds", "2"]
TOY += ["--steps", "80", "--evaluate-every", "20", "--episodes", "1", "--settings", AGENT]


def test_runs_writes_and_does_not_run_again(tmp_path, capsys):
    words = [*TOY, "--shards", "1", "--workers", "0", "--out", str(tmp_path)]
    assert main([*words, "--no-report"]) == 0
    place = tmp_path / "control" / "Pendulum-v1"
    with (place / "metrics-0-of-1.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["operator"], r["seed"], r["step"]) for r in rows] == [
        (name, str(seed), str(step))
        for name in ("one-step", "retrace:sequence_length=2")
        for seed in range(2)
        for step in (20, 40, 60, 80)
    ]
    assert all(-2000 < float(r["return"]) < 0 for r in rows)
    assert json.loads((place / "metrics-0-of-1.json").read_text())["finished"]
    capsys.readouterr()
    before = (place / "metrics-0-of-1.csv").stat().st_mtime_ns
    assert main(words) == 0  # only the report is made now
    assert "steps/s" not in capsys.readouterr().out
    assert (place / "metrics-0-of-1.csv").stat().st_mtime_ns == before
    result = json.loads((tmp_path / "control" / "result.json").read_text())
    assert len(result["tables"][0]["rows"]) == 2
    assert {c["verdict"] for c in result["claims"]} <= {"reproduced", "not reproduced", "cannot be decided"}
    assert "Figure 3" in (tmp_path / "report.html").read_text()
    for name in ("control.png", "control.pdf", "control-variance.png", "control.csv"):
        assert (tmp_path / "control" / name).stat().st_size > 0
    with pytest.raises(ValueError, match="another number of shards"):
        main([*TOY, "--shards", "2", "--out", str(tmp_path)])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 15])
def test_shares_cover_every_agent_once(count):
    shares = [_share(OPERATORS[:3], list(range(5)), (k, count)) for k in range(count)]
    agents = sorted(
        (operator, seed) for operators, seeds in shares for operator in operators for seed in seeds
    )
    assert agents == sorted((operator, seed) for operator in OPERATORS[:3] for seed in range(5))


def test_operators_with_settings():
    assert agent_settings("retrace:trace_temperature=0.1,start_conditioned=false", "hidden=8") == {
        "operator": "retrace",
        "hidden": (8,),
        "trace_temperature": 0.1,
        "start_conditioned": False,
    }
    assert agent_settings("marginalized-saddle-point")["weights"] == "saddle-point"
    assert agent_settings("marginalized-fenchel:normalisation=none")["normalisation"] == "none"
    assert agent_settings("marginalized-paper") == {
        "operator": "marginalized",
        "weights": "saddle-point",
        "normalisation": "power",
    }
    with pytest.raises(ValueError, match="settings as name=value, got 'decay'"):
        agent_settings("retrace:decay")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("mujoco/foo",)}, "mujoco/cheetah-run.*got 'mujoco/foo'"),
        (
            {"operators": ("retrace:decay=2",)},
            r"operators: 'retrace:decay=2': decay must lie in \[0, 1\], got 2",
        ),
        ({"operators": ("retrace:dekay=1",)}, "'retrace:dekay=1' has no setting 'dekay': choose of operator"),
        ({"operators": ("retrace", "retrace")}, "operators must be different, got 'retrace' twice"),
        ({"settings": "hidden"}, "settings as name=value, got 'hidden'"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"steps": 70}, "steps must be a multiple of update_every 50, got 70"),
    ],
)
def test_mistakes_are_found_before_anything_is_run(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        control(Settings(**{"tasks": ("Pendulum-v1",), "steps": 100, **settings}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lengths_of_time():
    assert seconds("1.5h") == 5400
    with pytest.raises(ValueError, match="time_limit must be a number"):
        seconds("soon")


def made_up(level, seeds=10, noise=1.0, variance=1.0):
    generator = np.random.default_rng(0)
    returns = level + noise * generator.normal(size=(seeds, 20))
    values = {
        "error_variance": np.full((seeds, 20), variance),
        "error_variance_retrace": np.ones((seeds, 20)),
    }
    return Curves(np.arange(seeds), np.arange(20), returns, np.zeros(seeds, bool), values)


def test_verdicts_follow_from_the_data():
    found = {
        "one-step": made_up(100),
        "retrace": made_up(120),
        "marginalized-regression": made_up(80, noise=5.0, variance=0.5),
    }
    verdicts = {(c.text.split()[0], c.measure.split(":")[0]): c.verdict for c in _claims("task", found)}
    assert verdicts["Multi-step", "final return"] == "reproduced"
    assert verdicts["Marginalized", "area under the curve"] == "not reproduced"
    assert verdicts["Variations", next(k[1] for k in verdicts if k[0] == "Variations")] == "reproduced"
    lower = [c for c in _claims("task", found) if "lower variance" in c.text]
    np.testing.assert_allclose(lower[0].effect, np.log(0.5))
    assert lower[0].verdict == "reproduced"


def test_curves_stop_where_every_seed_has_arrived():
    row = {"operator": "a", "seed": 0, "step": 10, "return": 1.0, "failed_at": -1.0}
    rows = [row, {**row, "step": 20}, {**row, "seed": 1}, {**row, "seed": 1, "step": 10, "failed_at": 10.0}]
    found = curves(rows)["a"]
    assert found.steps.tolist() == [10]
    assert found.failed.tolist() == [False, True]


def test_runs_of_other_lengths_and_seeds_are_compared_where_they_overlap():
    row = {"operator": "one-step", "seed": 0, "step": 10, "return": 100.0, "failed_at": -1.0}
    long = [{**row, "seed": s, "step": t} for s in range(4) for t in (10, 20)]
    short = [{**row, "operator": "retrace", "seed": s, "return": 150.0, "step": 10} for s in range(1, 4)]
    long = [{**r, "return": 1000.0} if r["seed"] == 0 or r["step"] == 20 else r for r in long]
    claims = _claims("task", curves([*long, *short]))
    np.testing.assert_allclose([c.effect for c in claims], 0.5)


def test_the_report_can_be_made_from_an_unfinished_run(tmp_path, capsys):
    place = tmp_path / "control" / "Pendulum-v1"
    place.mkdir(parents=True)
    columns = ["operator", "seed", "step", "return", "failed_at", "seconds"]
    columns += ["trace_mean", "weight_mean", "error_variance"]
    rows = [["one-step", s, t, s + t, -1, 60 * t, 0.0, 0.0, 1.0] for s in (0, 1) for t in (10, 20)]
    text = "\n".join(",".join(map(str, line)) for line in [columns, *rows])
    (place / "metrics-0-of-1.csv").write_text(text)
    words = ["--tasks", "Pendulum-v1", "--operators", "one-step", "--seeds", "2"]
    assert main([*words, "--report-only", "--out", str(tmp_path)]) == 0
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "control" / "control-final.png").stat().st_size > 1000
    assert "here they took 20.0 minutes" in (tmp_path / "report.html").read_text()
