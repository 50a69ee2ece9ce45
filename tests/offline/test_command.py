"""`marginax evaluate` from end to end: table, JSON, page, and one line for each mistake."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pytest

from marginax import cli
from marginax.offline import Log, evaluate, write_report
from marginax.offline.command import _named, _open
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
    assert len(result["answers"]) == 14
    assert result["settings"]["discount"] == 0.9
    low, high = (result["answers"]["certainty-equivalence"]["interval"][k] for k in ("low", "high"))
    assert low < result["answers"]["certainty-equivalence"]["value"] < high
    page = (files / "report" / "evaluation.html").read_text()
    assert page.count("data:image/png;base64,") == 3  # returns are left out: truncation hides a part
    assert not re.search(r'(src|href)="(?!data:|#)', page)  # nothing is loaded from elsewhere
    for name in ("estimates.csv", "estimates.pdf", "weights.png", "overlap.png"):
        assert (files / "report" / name).stat().st_size > 0
    lines = (files / "report" / "estimates.csv").read_text().splitlines()
    assert len(lines) == 16  # a header, fourteen estimators, the log's own return


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "nowhere.csv"}, "there is no file"),
        ({"policy": "nowhere.npy"}, "there is no policy file"),
        ({"discount": "1.5"}, "discount must lie in"),
        ({"behaviour": "foo"}, "behaviour must be auto, logged, estimated or a table, got 'foo'"),
        ({"seed": "-1"}, "seed must be at least 0"),
        ({"estimators": "sorcery"}, "an estimator must be one of"),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_several_policies_are_ranked_on_one_page(files, capsys):
    np.save(files / "other.npy", np.full((5, 3), 1 / 3))
    words = [
        "evaluate",
        str(files / "log.csv"),
        "--discount",
        "0.9",
        "--out",
        str(files / "both"),
        "--policy",
    ]
    names = ["--estimators", "weighted-doubly-robust", "certainty-equivalence"]
    assert cli.main([*words, str(files / "pi.npy"), str(files / "other.npy"), *names]) == 0
    assert "2 policies" in capsys.readouterr().out
    result = json.loads((files / "both" / "evaluation.json").read_text())
    assert set(result) == {"policies", "ranking"}
    assert set(result["policies"]) == {"pi.npy", "other.npy"}
    alone = files / "alone"
    assert cli.main([*words[:4], "--out", str(alone), "--policy", str(files / "pi.npy"), *names]) == 0
    assert json.loads((alone / "evaluation.json").read_text()) == result["policies"]["pi.npy"]
    difference = result["ranking"]["differences"][0]
    values = {
        name: one["answers"][one["verdict"]["estimator"]]["value"] for name, one in result["policies"].items()
    }
    expected = values[difference["first"]] - values[difference["second"]]
    np.testing.assert_allclose(difference["value"], expected)
    assert "Ranking" in (files / "both" / "evaluation.html").read_text()


@pytest.mark.slow
def test_labels_are_encoded_and_the_encoding_can_be_given_again(files, capsys):
    text = (files / "log.csv").read_text().splitlines()
    header = text[0].replace('"', "").split(",")
    places = [header.index(name) for name in ("state", "action", "next_state")]
    lines = [",".join(header)]
    for line in text[1:]:
        cells = line.split(",")
        for place, stem in zip(places, ("room ", "go ", "room "), strict=True):
            cells[place] = stem + cells[place]
        lines.append(",".join(cells))
    (files / "words.csv").write_text("\n".join(lines))
    names = ["--discount", "0.9", "--estimators", "certainty-equivalence"]
    policy = ["--policy", str(files / "pi.npy")]
    found = []
    for data, more in (
        ("log.csv", []),
        ("words.csv", ["--encoding", "sorted"]),
        ("words.csv", ["--encoding", str(files / "1/encoding.json")]),
    ):
        out = files / str(len(found))
        assert cli.main(["evaluate", str(files / data), *policy, *names, *more, "--out", str(out)]) == 0
        found.append(json.loads((out / "evaluation.json").read_text())["answers"])
    assert found[0] == found[1] == found[2]
    listed = json.loads((files / "1" / "evaluation.json").read_text())["diagnostics"]
    for name in ("largest_weights", "largest_ratios"):
        assert listed[name][0]["state"].startswith("room ")
        assert listed[name][0]["action"].startswith("go ")
    assert json.loads((files / "1" / "encoding.json").read_text())["action"] == ["go 0", "go 1", "go 2"]
    (files / "short.json").write_text('{"state": ["room 0"], "action": ["go 0", "go 1", "go 2"]}')
    words = ["evaluate", str(files / "words.csv"), *policy, "--encoding", str(files / "short.json")]
    assert cli.main(words) == 2
    assert "the encoding has no state 'room 1'" in capsys.readouterr().err
    assert cli.main(["evaluate", str(files / "words.csv"), *policy]) == 2
    assert "pi.npy numbers states and actions" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_cannot_be_written_is_noticed_before_any_work(files, capsys):
    assert (
        cli.main(["evaluate", "no such data", "--policy", "none", "--out", str(files / "log.csv" / "x")]) == 2
    )
    assert "cannot write to the folder" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupt_ends_at_once(files):
    """In the middle of reading, compiling or computing: status 130 within two seconds."""
    words = [
        sys.executable,
        "-m",
        "marginax",
        "evaluate",
        str(files / "log.csv"),
        "--policy",
        str(files / "pi.npy"),
    ]
    for pause in (3.0, 4.0, 5.0):
        process = subprocess.Popen(
            [*words, "--discount", "0.9"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        time.sleep(pause)
        if process.poll() is not None:
            continue  # it was quicker
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=20)[1].decode()
        if process.returncode == 0:
            continue  # it was done, and about to end
        assert process.returncode == 130
        assert "interrupted" in error
        assert "Traceback" not in error
        assert time.monotonic() - begin < 10  # two seconds on an idle machine


def test_a_policy_given_twice_and_a_missing_encoding_are_named():
    with pytest.raises(ValueError, match=r"'b\.npy' is given twice"):
        _named(("a.npy", "b.npy", "b.npy"))
    with pytest.raises(FileNotFoundError, match=r"there is no encoding file 'missing\.json'"):
        _open("log.csv", "missing.json")


def test_a_level_is_printed_as_given_and_lines_fit(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = ["evaluate", str(files / "log.csv"), "--policy", str(files / "pi.npy"), "--discount", "0.9"]
    words += ["--estimators", "weighted-doubly-robust", "certainty-equivalence"]
    assert cli.main([*words, "--level", "0.999", "--horizon", "1"]) == 0
    printed = capsys.readouterr().out
    assert "99.9% interval" in printed
    assert "γ = 0.9, the first step;" in printed
    assert max(len(line) for line in printed.splitlines()) <= 80


def test_policies_whose_names_begin_alike_stay_apart_in_the_table(files, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"candidate_policy_{which}.npy" for which in ("one", "two")]
    for name in names:
        np.save(files / name, np.load(files / "pi.npy"))
    words = ["evaluate", str(files / "log.csv"), "--discount", "0.9", "--estimators", "certainty-equivalence"]
    assert cli.main([*words, "--policy", *(str(files / name) for name in names)]) == 0
    printed = capsys.readouterr().out
    first_column = "".join(re.findall(r"^ (\S+)", printed, re.MULTILINE))
    assert all(name in first_column for name in names), printed
