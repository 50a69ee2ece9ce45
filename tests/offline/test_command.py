"""`marginax evaluate` from end to end: table, JSON, page, and one line for each mistake."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pytest

from marginax import cli
from marginax.offline import Log, evaluate, write_report
from reference.offline_logs import garnet_log


@pytest.fixture
def files(tmp_path):
    _, pi, _, log = garnet_log(0)
    table = {
        "episode": np.repeat(np.arange(log.num_episodes), log.lengths),
        "step": log.times,
        "state": log.states,
        "action": log.actions,
        "reward": log.rewards,
        "next_state": log.next_states,
        "terminal": log.terminal,
        "truncated": log.truncated,
        "behaviour": log.behaviour,
    }
    csv.write_csv(pa.table(table), tmp_path / "log.csv")
    np.save(tmp_path / "pi.npy", pi)
    return tmp_path


def test_evaluate_writes_table_json_and_page(files, capsys):
    words = ["evaluate", str(files / "log.csv"), "--policy", str(files / "pi.npy"), "--discount", "0.9"]
    assert cli.main([*words, "--out", str(files / "report")]) == 0
    printed = capsys.readouterr().out
    assert "certainty-equivalence" in printed
    assert "truncated" in printed
    result = json.loads((files / "report" / "evaluation.json").read_text())
    assert len(result["answers"]) == 10
    assert result["settings"]["discount"] == 0.9
    low, high = (result["answers"]["certainty-equivalence"]["interval"][k] for k in ("low", "high"))
    assert low < result["answers"]["certainty-equivalence"]["value"] < high
    page = (files / "report" / "evaluation.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # nothing is loaded from elsewhere
    for name in ("estimates.csv", "estimates.pdf", "weights.png", "overlap.png"):
        assert (files / "report" / name).stat().st_size > 0
    lines = (files / "report" / "estimates.csv").read_text().splitlines()
    assert len(lines) == 12  # a header, ten estimators, the log's own return


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere.csv"}, "there is no file"),
        ({"policy": "nowhere.npy"}, "there is no policy file"),
        ({"discount": "1.5"}, "discount must lie in"),
        ({"estimators": "magic"}, "unknown estimator 'magic'"),
        ({"out": "log.csv/inside"}, "cannot write to the folder"),
    ],
)
def test_mistakes_are_one_line(files, capsys, monkeypatch, change, message):
    monkeypatch.chdir(files)
    words = {"data": "log.csv", "policy": "pi.npy", "discount": "0.9", "estimators": "per-decision-is"}
    words |= change
    arguments = ["evaluate", words.pop("data")]
    for name, value in words.items():
        arguments += [f"--{name}", value]
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("marginax: ")
    assert message in error
    assert "\n" not in error


def test_a_report_of_a_log_that_cannot_tell(tmp_path):
    log = Log.from_episodes([{"states": [0, 0], "actions": [0], "rewards": [1.0], "terminal": True}] * 5)
    page = write_report(evaluate(log, [[0.0, 1.0]]), tmp_path).read_text()
    assert "The data cannot tell." in page
    assert "Where the policy leaves the log" in page


def test_observations_and_a_function_from_the_command_line(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    table = {
        "episode": np.repeat(np.arange(40), 10),
        "step": np.tile(np.arange(10), 40),
        "obs_0": x[:, 0],
        "obs_1": x[:, 1],
        "action": rng.integers(2, size=400),
        "reward": x[:, 0],
        "terminal": np.tile(np.arange(10) == 9, 40),
    }
    csv.write_csv(pa.table(table), tmp_path / "seen.csv")
    (tmp_path / "coin.py").write_text(
        "import numpy as np\ndef fair(observations):\n    return np.full((len(observations), 2), 0.5)\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "seen.csv", "--policy", "coin:fair", "--discount", "0.9", "--network-steps", "50"]
    assert cli.main([*words, "--estimators", "per-decision-is", "certainty-equivalence", "--out", "out"]) == 0
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert result["settings"]["behaviour"] == "estimated"
    assert set(result["answers"]) == {"per-decision-is", "certainty-equivalence"}
    assert "estimated" in capsys.readouterr().out
