"""The commands train, plot and play: bad input is refused before any work, and what they print and write."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import rich.console

from marginax.cli import main
from marginax.deep.command import _warn, finish
from marginax.deep.config import TD3Config
from marginax.deep.curves import curves_of, load_curves
from marginax.deep.discrete_config import ActorCriticConfig, QConfig
from marginax.deep.display import Display
from marginax.deep.policy import Policy, load_policy
from marginax.deep.run import open_run
from marginax.deep.run_config import PopulationConfig
from marginax.simulators.gymnasium import GymnasiumSimulator

SMALL = ["--steps", "200", "--episodes", "1", "--hidden", "8", "--batch-size", "8", "--update-after", "50"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "retrace"
    assert main(["train", "Pendulum-v1", "--operator", "retrace", *SMALL, "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_train_writes_what_play_and_plot_read(trained, tmp_path, capsys):
    assert main(["play", str(trained), "--episodes", "2"]) == 0
    assert "Pendulum-v1: 2 episodes" in capsys.readouterr().out
    assert main(["plot", str(trained), "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "retrace" in out
    assert "200" in out
    assert "[" not in out  # one seed has no interval
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.csv", "curves.pdf", "curves.png"]


@pytest.mark.slow
def test_more_steps_make_a_finished_run_longer(tmp_path, capsys):
    """Settings that were derived from the steps stay what they were; one that is given may not change."""
    words = ["train", "Pendulum-v1", *SMALL, "--out", str(tmp_path)]
    assert main(words) == 0
    words[words.index("200")] = "400"
    assert main(words) == 0
    (curve,) = load_curves([tmp_path])
    assert curve.steps.tolist() == list(range(50, 450, 50))
    capsys.readouterr()
    assert main([*words, "--evaluate-every", "100"]) == 2
    assert "evaluate_every = 50, not 100" in capsys.readouterr().err


@pytest.mark.slow
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
        (
            ["--target-steps", "one", "--weights", "fenchel"],
            "target_steps must be 'all' for weights 'fenchel'",
        ),
        (
            ["--target-steps", "one", "--normalisation", "power"],
            "target_steps must be 'all' for normalisation 'power'",
        ),
        (["--clip", "0"], "clip must be above 0"),
        (["--clip", "inf"], "clip must be above 0 and finite, got inf."),
        (["--checkpoint-minutes", "0"], "checkpoint-minutes must be above 0"),
        (["--evaluate-every", "0"], "evaluate_every must be a positive multiple"),
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


@pytest.mark.slow
def test_another_runs_folder_is_refused(trained, capsys):
    assert main(["train", "Pendulum-v1", "--operator", "one-step", *SMALL, "--out", str(trained)]) == 2
    assert "operator = 'retrace', not 'one-step'" in capsys.readouterr().err


def log(folder: Path, config: PopulationConfig, lines: list[dict]) -> None:
    run = open_run(folder, config, together=True)
    (part,) = run.parts
    (folder / part).mkdir()
    (folder / part / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def line_of(seed: int, step: int, value: float, failed_at: int | None = None) -> dict:
    return {"operator": "retrace", "seed": seed, "step": step, "return": value, "failed_at": failed_at}


def test_curves_stop_where_all_seeds_have_been_and_failures_count(tmp_path):
    config = PopulationConfig(
        simulator="Pendulum-v1", groups={"retrace": TD3Config(operator="retrace")}, seeds=(0, 1, 2)
    )
    lines = [line_of(0, step, float(step)) for step in (100, 200, 300)]
    lines += [line_of(1, 100, 1.0), line_of(1, 200, 2.0), line_of(2, 100, 5.0, 50)]
    log(tmp_path, config, lines)
    (curve,) = load_curves([tmp_path])
    np.testing.assert_array_equal(curve.failed, [False, False, True])
    np.testing.assert_array_equal(curve.steps, [100, 200])
    np.testing.assert_array_equal(curve.returns, [[100, 200], [1, 2], [5, 5]])


def test_a_seed_that_failed_between_evaluations_keeps_its_last_return_to_the_end():
    lines = [line_of(0, step, float(step)) for step in (100, 200, 300)]
    lines += [line_of(1, 100, 1.0), line_of(1, 150, 1.5, 150), line_of(2, 50, 5.0, 50)]
    curve = curves_of("task", lines)["retrace"]
    np.testing.assert_array_equal(curve.failed, [False, True, True])
    np.testing.assert_array_equal(curve.steps, [100, 200, 300])
    np.testing.assert_array_equal(curve.returns, [[100, 200, 300], [1, 1.5, 1.5], [5, 5, 5]])


def test_operators_whose_seeds_all_failed_are_compared_on_the_steps_of_the_others():
    failed = [line_of(0, 100, 1.0), line_of(0, 250, 2.0, 250), line_of(1, 50, 3.0, 50)]
    well = [{**line_of(0, step, 9.0), "operator": "one-step"} for step in (100, 200, 300)]
    curve = curves_of("task", [*failed, *well])["retrace"]
    np.testing.assert_array_equal(curve.steps, [100, 200, 300])
    np.testing.assert_array_equal(curve.returns, [[1, 1, 2], [3, 3, 3]])
    alone = curves_of("task", failed)["retrace"]
    np.testing.assert_array_equal(alone.steps, [100, 250])
    np.testing.assert_array_equal(alone.returns, [[1, 2], [3, 3]])


def test_runs_of_one_operator_are_told_apart_by_what_differs(tmp_path):
    for name, decay in (("a", 0.5), ("b", 0.9)):
        agent = TD3Config(operator="retrace", decay=decay)
        config = PopulationConfig(simulator="Pendulum-v1", groups={"retrace": agent})
        log(tmp_path / name, config, [line_of(0, 100, 1.0)])
    labels = [curve.label for curve in load_curves([tmp_path / "a", tmp_path / "b"])]
    assert labels == ["retrace, decay 0.5", "retrace, decay 0.9"]


def test_an_evaluation_without_a_return_is_an_empty_cell_beside_the_curve(tmp_path, capsys):
    config = PopulationConfig(simulator="Pendulum-v1", groups={"retrace": TD3Config(operator="retrace")})
    log(tmp_path, config, [line_of(0, 100, 1.5), {**line_of(0, 200, 0.0), "return": None}])
    assert main(["plot", str(tmp_path), "--out", str(tmp_path)]) == 0
    _, first, second = (tmp_path / "curves.csv").read_text().splitlines()
    assert (first, second) == ("Pendulum-v1,retrace,100,1.5,1.5,1.5", "Pendulum-v1,retrace,200,,,")


def test_seeds_without_a_common_step_are_not_drawn(tmp_path, capsys):
    """Seed 0 is to go on from its end between two evaluations; seed 1, which began later, is already past it."""
    agent = TD3Config(operator="retrace")
    config = PopulationConfig(simulator="Pendulum-v1", groups={"retrace": agent}, seeds=(0, 1))
    log(tmp_path, config, [line_of(0, 500, 1.0), line_of(1, 1000, 1.0)])
    assert main(["plot", str(tmp_path)]) == 2
    assert "the seeds of 'retrace' in" in capsys.readouterr().err


def test_runs_of_one_operator_by_two_agents_are_told_apart(tmp_path):
    marginalized = {"operator": "marginalized", "weights": "paths"}
    agents = {"a": ActorCriticConfig(**marginalized), "b": QConfig(**marginalized)}
    agents["c"] = QConfig(**marginalized, decay=0.5)
    for name, agent in agents.items():
        config = PopulationConfig(simulator="CartPole-v1", groups={agent.label: agent}, steps=1280)
        log(tmp_path / name, config, [{**line_of(0, 100, 1.0), "operator": agent.label}])
    labels = [curve.label for curve in load_curves([tmp_path / name for name in agents])]
    assert labels == [
        "marginalized-paths, agent actor-critic",
        "marginalized-paths, agent q-learning, decay 0.9",
        "marginalized-paths, agent q-learning, decay 0.5",
    ]


def test_play_imports_nothing_that_a_file_names(tmp_path, monkeypatch, capsys):
    (tmp_path / "evil.py").write_text("open('sprung', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    layers = [(np.zeros((3, 1), np.float32), np.zeros(1, np.float32))]
    Policy(layers, np.array([-2.0]), np.array([2.0]), 0.1, "evil:Pendulum-v1").save(tmp_path / "evil.npz")
    assert main(["play", "evil.npz"]) == 2
    assert "give --simulator evil:Pendulum-v1" in capsys.readouterr().err
    assert not (tmp_path / "sprung").exists()
    assert load_policy("evil.npz").simulator == "evil:Pendulum-v1"


@pytest.mark.parametrize(
    ("inputs", "outputs", "high", "other", "message"),
    [
        (
            4,
            1,
            [1.0],
            "Pendulum-v1",
            "observations of 4 numbers, as 'X-v0' has them, but those of 'Pendulum-v1'",
        ),
        (11, 1, [1.0], "Hopper-v5", "chooses actions of 1 numbers, as 'X-v0' has them, but 'Hopper-v5' has"),
        (
            4,
            3,
            [2.0],
            "CartPole-v1",
            "chooses 3 discrete actions, as 'X-v0' has them, but 'CartPole-v1' has 2",
        ),
        (
            4,
            2,
            [1.0, 1.0],
            "CartPole-v1",
            "chooses actions of 2 numbers, as 'X-v0' has them, but 'CartPole-v1'",
        ),
    ],
)
@pytest.mark.parametrize("words", [[], ["--render"]])
def test_a_policy_that_does_not_fit_a_simulator_is_refused(
    inputs, outputs, high, other, message, words, tmp_path, capsys
):
    layers = [(np.zeros((inputs, outputs), np.float32), np.zeros(outputs, np.float32))]
    Policy(layers, np.zeros(len(high)), np.array(high), 0.1, "X-v0").save(tmp_path / "policy-a.npz")
    assert main(["play", str(tmp_path), "--simulator", other, "--episodes", "1", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_preset_gives_the_settings_that_flags_change(monkeypatch):
    seen = []
    monkeypatch.setattr("marginax.deep.command._train", lambda settings, *_, **__: seen.append(settings))
    words = ["train", "Pendulum-v1", "--out", "x", "--preset=paper", "--batch-size", "7"]
    assert main(words) == 0
    assert main([*words, "--operator", "retrace"]) == 0
    assert seen == [
        TD3Config.preset("paper", batch_size=7),
        TD3Config.preset("paper", batch_size=7, operator="retrace"),
    ]


@pytest.mark.parametrize(("speed", "left"), [(50.0, "50:00:00"), (1000.0, "02:30:00")])
def test_days_that_are_left_are_not_cut(speed, left):
    display = Display("title", 10_000_000, ["agents"])
    display.listen("agents", {"step": 1_000_000, "speed": speed})
    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(display._table())
    assert left in console.file.getvalue()


def test_the_reason_of_a_failure_is_told_at_the_end_alone(capsys):
    failed = {"state": "failed", "step": 1050, "reason": "KeyError: 'a'"}
    diverged = {"state": "diverged", "step": 90, "reason": "Q grew at step 80"}
    display = Display("title", 2000, ["a", "b"])
    display.listen("a", failed)
    display.listen("b", diverged)
    assert capsys.readouterr().out == ("a: failed at step 1,050\nb: diverged at step 90: Q grew at step 80\n")
    sentence = "2 of 2 did not finish. a failed at step 1,050: KeyError: 'a'; b diverged: Q grew at step 80"
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        finish({"a": failed, "b": diverged})


@pytest.mark.parametrize(
    "words",
    [
        ["--out=x", "CartPole-v1"],
        ["--overlap", "CartPole-v1", "--out", "x"],
        ["--no-start-conditioned", "CartPole-v1", "--out", "x"],
        ["--hidden", "8", "8", "--out", "x", "CartPole-v1"],
        ["--operator", "retrace", "CartPole-v1", "--out", "x"],
    ],
)
def test_the_agent_fits_the_task_wherever_that_stands(monkeypatch, words):
    seen = []
    monkeypatch.setattr("marginax.deep.command._train", lambda settings, *_, **__: seen.append(settings.kind))
    assert main(["train", *words]) == 0
    assert seen == ["q-learning"]


def test_a_saved_policy_of_discrete_actions_gives_their_indices_and_films_the_first_episode(
    tmp_path, monkeypatch, capsys
):
    layers = [(np.eye(4, 2, dtype=np.float32), np.zeros(2, np.float32))]
    Policy(layers, np.array([0.0]), np.array([1.0]), 0.0, "CartPole-v1").save(tmp_path / "policy-a.npz")
    policy = load_policy(tmp_path)
    observations = np.array([[2.0, 1.0, 0.0, 0.0], [1.0, 2.0, 0.0, 0.0]], np.float32)
    assert policy(observations).tolist() == [0, 1]
    assert policy(observations[1]) == 1
    monkeypatch.setattr("marginax.deep.policy._show", lambda frames: None)
    monkeypatch.setattr(GymnasiumSimulator, "render", lambda self: np.zeros((2, 2, 3), np.uint8))
    assert main(["play", str(tmp_path), "--episodes", "1", "--render"]) == 0
    frames, count, result = capsys.readouterr().out.splitlines()
    assert count == f"CartPole-v1: 1 episode of {tmp_path / 'policy-a.npz'}"
    steps = int(frames.split()[0]) - 1
    assert result.startswith(f"return {steps}.00 ")  # a step earns 1


def test_a_film_that_cannot_be_written_is_refused_before_the_episode(tmp_path, monkeypatch, capsys):
    layers = [(np.eye(4, 2, dtype=np.float32), np.zeros(2, np.float32))]
    Policy(layers, np.array([0.0]), np.array([1.0]), 0.0, "CartPole-v1").save(tmp_path / "policy-a.npz")
    monkeypatch.setattr(GymnasiumSimulator, "step", lambda *_: pytest.fail("an episode was played"))
    film = tmp_path / "policy-a.npz" / "film.gif"
    assert main(["play", str(tmp_path), "--video", str(film)]) == 2
    assert f"cannot write to the folder {str(film.parent)!r}" in capsys.readouterr().err


def test_what_a_user_may_not_expect_of_a_run_is_said_on_standard_error(capsys):
    groups = {"td3": TD3Config(update_after=201)}
    own = "simulators.own_environments:"
    _warn(PopulationConfig(simulator=f"{own}Lazy-v0", groups=groups, steps=200))
    resume, learning = capsys.readouterr().err.splitlines()
    assert f"{own}Lazy-v0' keeps state that is no plain data" in resume
    assert learning.startswith("marginax: nothing is learned in 200 steps")
    groups = {"td3": TD3Config(update_after=200)}  # the last block is followed by updates
    _warn(PopulationConfig(simulator=f"{own}Printing-v0", groups=groups, steps=200))
    said = capsys.readouterr()
    assert said.err == said.out == ""


def test_a_folder_without_a_name_is_refused(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "CartPole-v1", "--out", ""]) == 2
    assert "--out must be a folder, got ''" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_preset_of_td3_is_refused_for_other_agents(capsys):
    assert main(["train", "CartPole-v1", "--out", "x", "--preset", "paper"]) == 2
    assert "--preset must be 'default' for the agent 'q-learning', got 'paper'" in capsys.readouterr().err


def test_a_dumb_terminal_gets_lines(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    monkeypatch.setenv("COLUMNS", "100")
    with Display("one run", 10, ["seed 0"]) as display:
        display.listen("seed 0", {"step": 5, "state": "finished"})
        assert capsys.readouterr().out == "seed 0: finished at step 5\n"


@pytest.mark.parametrize("columns", [40, 100])
def test_a_terminal_that_is_too_narrow_for_the_table_gets_lines(monkeypatch, capsys, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    line = {"operator": "retrace", "step": 1500, "return": -12.5}
    with Display("one run", 2000, ["seed-0"]) as display:
        display.listen("seed-0", {"step": 1500, "lines": [line]})
    out = capsys.readouterr().out
    assert ("seed-0: step 1,500, return retrace -12.50\n" in out) == (columns == 40)
    assert ("time left" in out) == (columns == 100)
