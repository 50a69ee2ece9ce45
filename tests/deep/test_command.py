"""The commands train, plot and play: bad input is refused before any work, and what they print and write."""

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import trim_mean

from marginax.cli import main
from marginax.deep.config import TD3Config
from marginax.deep.curves import Curve, bootstrap, interquartile_mean, load_curves, summarise
from marginax.deep.run import Run, seed_folder, write_status

SMALL = [
    *("--steps", "200", "--evaluate-every", "100", "--checkpoint-every", "100", "--episodes", "1"),
    *("--hidden", "8", "--batch-size", "8", "--random-steps", "50", "--update-after", "50"),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "retrace"
    assert main(["train", "Pendulum-v1", "--operator", "retrace", *SMALL, "--out", str(folder)]) == 0
    return folder


def test_train_writes_what_play_and_plot_read(trained, tmp_path, capsys):
    assert main(["play", str(trained), "--episodes", "2"]) == 0
    assert "Pendulum-v1: 2 episodes" in capsys.readouterr().out
    assert main(["plot", str(trained), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "retrace" in out
    assert "200" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.csv", "curves.pdf", "curves.png"]


def test_the_same_command_again_has_nothing_to_do(trained, capsys):
    assert main(["train", "Pendulum-v1", "--operator", "retrace", *SMALL, "--out", str(trained)]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "0"], "seeds must be at least 1"),
        (["--discount", "1.0"], "discount must lie in [0, 1)"),
        (["--steps", "75"], "steps must be a positive multiple of update_every 50"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--decay", "1.5"], "decay must lie in [0, 1]"),
        (["--learning-rate", "nan"], "learning_rate must be above 0"),
        (["--sequence-length", "0"], "sequence_length must be at least 1"),
        (["--episodes", "0"], "episodes must be at least 1"),
        (["--later-steps", "one", "--weights", "fenchel"], "later_steps must be 'all' for weights 'fenchel'"),
        (["--workers", "0"], "workers must be at least 1"),
        (["--evaluate-every", "30"], "evaluate_every must be a positive multiple"),
    ],
)
def test_bad_settings_are_refused_before_any_work(words, message, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "Pendulum-v1", "--steps", "200", *words, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_simulator_or_run_is_refused(tmp_path, capsys):
    assert main(["train", "NoSuchThing-v0", "--out", str(tmp_path / "run")]) == 2
    assert "NoSuchThing" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    for command in ("play", "plot"):
        assert main([command, str(tmp_path / "nothing")]) == 2
        assert "nothing" in capsys.readouterr().err


def test_another_runs_folder_is_refused(trained, capsys):
    assert main(["train", "Pendulum-v1", "--operator", "one-step", *SMALL, "--out", str(trained)]) == 2
    assert "operator = 'retrace', not 'one-step'" in capsys.readouterr().err


def test_interquartile_mean_is_the_trimmed_mean_where_quarters_are_whole():
    values = np.random.default_rng(0).normal(size=(8, 3))
    np.testing.assert_allclose(interquartile_mean(values), trim_mean(values, 0.25, axis=0))
    five = np.array([0.0, 1.0, 2.0, 3.0, 100.0])
    assert interquartile_mean(five) == pytest.approx((0.75 * 1 + 2 + 0.75 * 3) / 2.5)


def test_bootstrap_intervals_cover_the_truth_about_as_often_as_they_say():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        low, high = bootstrap(random.normal(size=20), resamples=300)
        inside += low <= 0 <= high
    assert 86 <= inside <= 99


def test_curves_stop_where_all_seeds_have_been_and_failures_count(tmp_path):
    run = Run(simulator="Pendulum-v1", agent=TD3Config(operator="retrace", decay=0.5))
    run.save(tmp_path)

    def log(seed: int, returns: list[float]) -> Path:
        folder = seed_folder(tmp_path, seed)
        folder.mkdir()
        lines = [f'{{"step": {100 * (i + 1)}, "return": {value}}}\n' for i, value in enumerate(returns)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        return folder

    log(0, [1.0, 2.0, 3.0])
    log(1, [1.0, 2.0])
    write_status(log(2, [5.0]), "diverged", 150, reason="NaN")
    (curve,) = load_curves([tmp_path])
    assert curve.failures == 1
    np.testing.assert_array_equal(curve.steps, [100, 200])
    np.testing.assert_array_equal(curve.returns, [[1, 2], [1, 2], [5, 5]])
    assert summarise(Curve("a", "b", np.arange(10), np.tile(np.arange(10.0), (4, 1)), 0)).final == (9, 9, 9)


def test_runs_of_one_operator_are_told_apart_by_what_differs(tmp_path):
    for name, decay in (("a", 0.5), ("b", 0.9)):
        folder = tmp_path / name
        folder.mkdir()
        Run(simulator="Pendulum-v1", agent=TD3Config(operator="retrace", decay=decay)).save(folder)
        seed_folder(folder, 0).mkdir()
        (seed_folder(folder, 0) / "metrics.jsonl").write_text('{"step": 100, "return": 1.0}\n')
    labels = [curve.label for curve in load_curves([tmp_path / "a", tmp_path / "b"])]
    assert labels == ["retrace, decay 0.5", "retrace, decay 0.9"]
