"""`marginax reproduce` and `marginax show`, small, from end to end."""

import csv
import dataclasses
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tyro

from marginax import cli, learning, problems, report, traces
from marginax.deep.config import TD3Config
from marginax.experiments import command, measures
from marginax.experiments.chain import METHODS, Chain
from marginax.experiments.control import Control

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SMALL = {
    "chain": "--iterations 60 --actions 2 --horizon 3 --off-policy 0 0.7 --noise 0.1 --clip 1 2",
    "open-world": "--size 3 --iterations 20 --horizon 30 --no-family",
    "weights": "--size 3 --trajectories 20 --horizon 30",
    "policy-iteration": "--size 3 --iterations 20 --horizon 30",
    "variance": "--trajectories 20",
    "theory": "--trajectories 10",
}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A function that runs an experiment at toy size through the command line, once, and returns the folder of all."""
    out, done = tmp_path_factory.mktemp("results"), set()

    def run(name):
        if name not in done:
            words = ["reproduce", name, "--seeds", "3", "--out", str(out), *SMALL[name].split()]
            assert cli.main(words) == 0
            done.add(name)
        return out

    return run


@pytest.mark.long
@pytest.mark.parametrize("name", SMALL)
def test_an_experiment_leaves_figures_data_and_claims(toy, name):
    results = toy(name)
    section = report.load_section(results / name)
    assert section is not None
    assert section.figures
    assert section.claims
    for figure in section.figures:
        assert (results / name / f"{figure.file}.png").read_bytes().startswith(b"\x89PNG")
        assert (results / name / f"{figure.file}.pdf").read_bytes().startswith(b"%PDF")
    for data in section.data:
        with (results / name / data).open() as file:
            header, *rows = csv.reader(file)
        assert rows
        assert all(len(row) == len(header) for row in rows)
    assert section.settings["seeds"] == 3
    assert "jax" in section.versions
    for claim in section.claims:  # the verdict is what interval and bounds say: see tests/report
        low, high = claim.interval.low, claim.interval.high
        assert np.isnan(low) or low <= high
        assert claim.measure
    assert all(figure.finding.endswith(".") for figure in section.figures)


@pytest.mark.long
def test_the_report_shows_all_of_them(toy):
    for name in SMALL:
        results = toy(name)
    text = (results / "report.html").read_text()
    for name in SMALL:
        assert f'id="{name}"' in text
    assert text.count("data:image/png;base64,") == 7
    assert not re.search(r'(src|href)="(?!data:|#)', text)
    with (results / "claims.csv").open() as file:
        claims = list(csv.DictReader(file))
    main = [c for name in SMALL for c in report.load_section(results / name).claims if c.main]
    assert len(claims) == text.count('data-label="Effect"')
    assert not any("$" in cell for row in claims for cell in row.values())
    assert len(main) == 5


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_report_prints_on_twelve_pages(toy, tmp_path):
    for name in SMALL:
        results = toy(name)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    printed = [f"--print-to-pdf={tmp_path / 'report.pdf'}", (results / "report.html").as_uri()]
    subprocess.run([BROWSER, *options, *printed], check=True, capture_output=True, timeout=300)
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", (tmp_path / "report.pdf").read_bytes())) <= 12


@pytest.mark.long
@pytest.mark.parametrize("name", ["weights", "theory"])
def test_a_fresh_run_gives_the_numbers_of_the_docs(name, tmp_path):
    """The two experiments that take seconds at full size; the pages are checked against the same stored results."""
    stored = json.loads((Path(__file__).parents[2] / "docs" / "data" / "results.json").read_text())[name]
    assert cli.main(["reproduce", name, "--out", str(tmp_path)]) == 0
    fresh = report.load_section(tmp_path / name)
    assert [figure.finding for figure in fresh.figures] == [figure["finding"] for figure in stored["figures"]]
    assert [claim.verdict for claim in fresh.claims] == [claim["verdict"] for claim in stored["claims"]]
    effects = [claim["effect"] for claim in stored["claims"]]
    np.testing.assert_allclose([claim.effect for claim in fresh.claims], effects, rtol=1e-3, atol=1e-9)


@pytest.mark.long
def test_a_second_run_finds_everything_finished(toy, capsys):
    results = toy("chain")
    before = (results / "chain" / "result.json").stat().st_mtime_ns
    flags = SMALL["chain"].split()
    assert cli.main(["reproduce", "chain", "--seeds", "3", "--out", str(results), *flags]) == 0
    assert "finished earlier" in capsys.readouterr().err
    assert (results / "chain" / "result.json").stat().st_mtime_ns == before


@pytest.mark.long
def test_curves_in_the_csv_are_those_of_the_library(toy):
    """One number of the chain's CSV, learned again by hand."""
    with (toy("chain") / "chain" / "chain.csv").open() as file:
        rows = list(csv.DictReader(file))
    wanted = ("clip", "2", "retrace", "60")
    row = next(r for r in rows if (r["panel"], r["value"], r["operator"], r["iteration"]) == wanted)
    problem = problems.chain(3, 2, 0.0, 0.1)
    stream = measures.streams(problem, range(3), 60, 3)
    q = learning.evaluate(stream, problem.pi, traces.retrace(problem.pi, problem.mu, clip=2.0))
    error = measures.relative_error(q, problem.mdp.q_values(problem.pi))[:, -1].mean()
    assert float(row["mean"]) == pytest.approx(float(error), rel=1e-5)


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_quick_is_smaller_and_the_default_is_the_papers(name):
    default = command.load(name)()
    assert default.name == name
    assert default.quick().seeds < default.seeds
    if name in ("chain", "open-world", "variance"):
        assert default.seeds == 100
    if name == "policy-iteration":
        assert default.seeds == 50
    assert json.dumps(default.settings())


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("control", {"tasks": ("Hopper-v5",), "steps": 500}),
        ("control", {"preset": "default", "evaluate_every": 500}),
        ("discrete", {"games": ("grid/catch",), "frames": 5120}),
        ("prediction", {"games": ("grid/catch",), "period": 20}),
    ],
)
def test_quick_leaves_what_was_asked_for(name, given):
    quick = command.load(name)(**given).quick()
    plain = command.load(name)(**{k: v for k, v in given.items() if k == "preset"}).quick()
    assert quick == dataclasses.replace(plain, **given) != plain


def test_quick_leaves_the_agents_settings_that_were_asked_for():
    agent = Control(agent=TD3Config.preset("spinning-up", hidden=(32,))).quick().agent
    assert agent == TD3Config.preset("spinning-up", hidden=(32,), random_steps=1000)


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_the_command_of_a_report_gives_the_experiment_again(name, monkeypatch):
    ours = dataclasses.replace(command.load(name)().quick(), seeds=4, seed=3, discount=0.97)
    words = shlex.split(ours.command)
    assert words[:3] == ["marginax", "reproduce", name]
    seen = []
    monkeypatch.setattr(command, "_reproduce", lambda experiments, options: seen.extend(experiments))
    _, function, rest = command.reproduce(words[2:])
    tyro.cli(function, args=rest)
    assert seen == [ours]


def test_the_chain_has_the_panels_of_table_1():
    panels = {name: [] for name, _ in Chain().curves()}
    for (name, _), setting in Chain().curves().items():
        panels[name].append(setting[name])
    assert panels["actions"] == [5, 10, 20]
    assert panels["horizon"] == [10, 20, 30]
    assert panels["off_policy"] == [0.0, 0.3, 0.7]
    assert panels["noise"] == [0.1, 0.5, 1.0]
    assert panels["clip"] == [1.0, 2.0, 5.0]
    assert [part.label for part in Chain().parts()][:3] == ["default", "actions-10", "actions-20"]
    assert len(Chain().parts()) == 11
    assert METHODS[:3] == ("one-step", "retrace", "marginalized-monte-carlo")


def test_the_chain_compares_no_value_with_itself_and_the_larger_with_the_smaller():
    def claims(chain):
        """Of errors that are as large as the product of what was set."""
        errors = {
            curve: np.full((len(METHODS), 3, 5), float(np.prod([*setting.values()])), np.float32)
            for curve, setting in chain.curves().items()
        }
        return {report.plain(claim.text): claim for claim in chain._claims(errors)}

    ones = {"actions": (5,), "horizon": (10,), "off_policy": (0.1,), "noise": (1.0,), "clip": (2.0,)}
    assert not any(
        "against" in claim.measure and "default" not in claim.measure
        for claim in claims(Chain(**ones)).values()
    )
    assert len(claims(Chain().quick())) == len(claims(Chain())) - 6
    found = claims(Chain(**{**ones, "actions": (20, 5), "horizon": (30, 10)}))
    fewer, shorter = (
        found[f"{text} make evaluation harder (Retrace)"] for text in ("more actions", "longer horizons")
    )
    assert fewer.measure == "log10 ratio of mean error per action over all iterations, 20 against 5"
    assert fewer.effect == pytest.approx(0, abs=1e-6)
    assert shorter.measure == "log10 ratio of mean error over all iterations, 30 against 10"
    assert shorter.effect == pytest.approx(np.log10(3))


def test_curves_too_short_for_a_tenth_of_the_first_error_decide_nothing_about_speed():
    """A ratio of two times that are not known is not 1."""
    chain = Chain(seeds=3, iterations=100)
    start = np.full((len(METHODS), 3, 100), 5.0, np.float32)
    faster = start.copy()
    faster[METHODS.index("retrace"), :, 50:] = 0.1

    def verdict(curves):
        claims = chain._claims(dict.fromkeys(chain.curves(), curves))
        return next(
            each.verdict for each in claims if each.text == "Retrace outperforms the one-step operator"
        )

    assert verdict(start) == "cannot be decided"
    assert verdict(faster) == "reproduced"


def test_the_chain_compares_marginalized_with_retrace_at_every_off_policy_level():
    chain = Chain(seeds=3, iterations=100)
    errors = {curve: np.ones((len(METHODS), 3, 100), np.float32) for curve in chain.curves()}
    errors["off_policy", 0.3][METHODS.index("marginalized-monte-carlo")] = (
        0.98  # less than the margin of 3.5%
    )
    errors["off_policy", 0.7][METHODS.index("marginalized-monte-carlo")] = 0.5
    found = [claim for claim in chain._claims(errors) if "has an advantage over Retrace" in claim.text]
    assert [claim.verdict for claim in found] == ["not reproduced", "not reproduced", "reproduced"]
    assert [claim.effect for claim in found] == pytest.approx([0, np.log10(0.98), np.log10(0.5)], abs=1e-6)


def test_a_curve_that_diverged_stays_in_the_chains_table():
    chain = Chain(seeds=2, iterations=250)
    curves = np.full((len(METHODS), 2, 250), 0.01, np.float32)
    curves[:, :, 0] = 1.0
    curves[METHODS.index("retrace"), 1, 200:] = np.nan
    rows = chain._table({("clip", 1.0): curves}).rows
    assert [row[2:] for row in rows if row[1] != "Retrace"] == [("2", pytest.approx(0.01))] * (
        len(METHODS) - 1
    )
    assert [row[2:] for row in rows if row[1] == "Retrace"] == [
        ("more than 250", pytest.approx(np.nan, nan_ok=True))
    ]


@pytest.mark.slow
def test_verdicts_of_the_chain_follow_from_its_curves(tmp_path):
    """Made-up curves: one-step is slow, certainty equivalence faster at a larger clip, all else alike."""
    chain = Chain(seeds=5, iterations=500)
    noise = np.random.default_rng(0).uniform(0.99, 1.01, (5, 1))
    data = {}
    for setting in chain.curves().values():
        rates = dict.fromkeys(METHODS, 0.02) | {"one-step": 0.01}
        if setting["clip"] > 1:
            rates["marginalized-certainty-equivalence"] = 0.04
        curves = [5 * noise * np.exp(-rates[method] * chain.shown) for method in METHODS]
        data[chain.label(setting)] = {"errors": np.array(curves, np.float32)}
    section = chain.section(tmp_path, data)
    verdicts = {report.plain(claim.text): claim.verdict for claim in section.claims}
    assert verdicts["Retrace outperforms the one-step operator"] == "reproduced"
    faster = [verdict for text, verdict in verdicts.items() if "converges faster than Retrace" in text]
    assert faster == ["not reproduced", "reproduced"]  # at the default clip, and at the second
    # exp(-rate t) = exp(-2 rate) / 10, rounded up to an iteration that is shown: 117.1, 232.3 and 59.6.
    times = "after 118 trajectories at clip 1, Retrace after 118, one-step after 234; with certainty-equivalent weights"
    assert times in section.figures[0].finding
    assert section.figures[0].finding.endswith("at clip 2 it takes 60.")
    assert (tmp_path / "chain.png").read_bytes().startswith(b"\x89PNG")


def test_the_experiment_may_stand_after_the_flags(tmp_path):
    program, _, rest = command.reproduce(["--quick", "theory", "--seeds", "3"])
    assert (program, rest) == ("marginax reproduce theory", ["--quick", "--seeds", "3"])
    program, _, rest = command.reproduce(["--quick", "all"])
    assert (program, rest) == ("marginax reproduce [EXPERIMENT]", ["--quick"])
    program, _, rest = command.reproduce(["--out", "chain"])  # a folder of that name
    assert rest == ["--out", "chain"]
    program, _, rest = command.reproduce(["--out", "chain", "theory"])
    assert (program, rest) == ("marginax reproduce theory", ["--out", "chain"])


def test_the_claims_end_the_run_in_a_few_lines(capsys):
    claims = [
        report.claim(
            rf"claim {k} at $\bar c$ = 1", "here", "mean", np.mean, np.full(3, k), low=2.5, main=k == 7
        )
        for k in range(9)
    ]
    command.print_claims(claims)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "9 claims: 6 reproduced, 3 not reproduced"
    assert [line[:9] for line in lines[1:]] == [
        "✓ claim 7",
        "✗ claim 0",
        "✗ claim 1",
        "✗ claim 2",
        "✓ claim 3",
    ]
    assert lines[1].endswith("at c̄ = 1: 7 [7, 7]")
    command.print_claims(claims[:1])
    assert capsys.readouterr().out.splitlines()[0] == "1 claim: 1 not reproduced"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("reproduce nothing", "nothing"),
        ("reproduce chain --iterations 0", "--iterations must be at least 10, got 0"),
        ("reproduce chain --step-size 0", "--step-size must lie in (0, 1], got 0.0"),
        ("reproduce chain --actions 5 0", "--actions must be at least 1, got 0"),
        ("reproduce chain --horizon 1", "--horizon must be at least 2, got 1"),
        ("reproduce chain --off-policy 2", "--off-policy must lie in [0, 1], got 2.0"),
        ("reproduce chain --noise -1", "--noise must be at least 0, got -1.0"),
        ("reproduce chain --clip 1 2 3 4", "--clip must have one to three values"),
        ("reproduce chain --clip -1", "--clip must be at least 0, got -1.0"),
        ("reproduce open-world --clip 2 1", "--clip must be two increasing"),
        ("reproduce open-world --step-size 3", "--step-size must lie in (0, 1], got 3.0"),
        ("reproduce open-world --horizon 0", "--horizon must be at least 1, got 0"),
        ("reproduce weights --size 1", "--size must be at least 3, got 1"),
        ("reproduce weights --clip nan", "--clip must be at least 0, got nan"),
        ("reproduce policy-iteration --iterations 1", "--iterations must be at least 10, got 1"),
        ("reproduce policy-iteration --refresh-every 0", "--refresh-every must be at least 1, got 0"),
        ("reproduce policy-iteration --soft 0", "--soft must lie in (0, 1], got 0.0"),
        ("reproduce policy-iteration --clip -1", "--clip must be at least 0, got -1.0"),
        ("reproduce variance --trajectories 1", "--trajectories must be at least 10, got 1"),
        ("reproduce theory --trajectories 1", "--trajectories must be at least 10, got 1"),
        ("reproduce --seeds 1", "--seeds must be at least 2"),
        ("reproduce --seed -1", "--seed must be at least 0, got -1"),
        ("reproduce --seed 4294967296", "--seed must be below 2**32, got 4294967296"),
        ("reproduce --discount 1.5", "--discount must lie"),
        ("reproduce --workers 0", "--workers must be at least 1, got 0"),
        ("show chain --n 0", "n must be"),
        ("show nothing", "nothing"),
        ("show open-world --off-policy 0.5", "--off-policy is no setting of the problem open-world, got 0.5"),
        ("show garnet --noise 0.5", "--noise is no setting of the problem garnet, got 0.5"),
        ("show chain --seed 1", "--seed is no setting of the problem chain, got 1"),
    ],
)
def test_bad_input_is_one_clear_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.split()) != 0
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_an_unwritable_folder_is_one_clear_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["reproduce", "theory", "--quick", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to the folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["runs[new]", "a:cat:[/b]"])
def test_the_folder_is_named_as_it_was_given(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.runner, "run", lambda *arguments, **options: [])
    (tmp_path / name).mkdir(parents=True)
    assert cli.main(["reproduce", "theory", "--out", name]) == 0
    assert capsys.readouterr().err.endswith(f"✓ {name}/report.html\n")


def test_a_damaged_result_is_one_clear_line_and_stays(tmp_path, capsys):
    (tmp_path / "theory").mkdir()
    damaged = tmp_path / "theory" / "result.json"
    damaged.write_text("{")
    assert cli.main(["reproduce", "theory", "--quick", "--out", str(tmp_path)]) == 2
    assert "result.json" in capsys.readouterr().err
    assert damaged.read_text() == "{"


@pytest.mark.parametrize("problem", ["chain", "open-world", "garnet"])
def test_show_prints_the_rates(problem, capsys):
    assert cli.main(["show", problem, "--n", "4", "--discount", "0.9"]) == 0
    text = capsys.readouterr().out
    assert "0.900000" in text  # one-step
    assert "Retrace, c̄ = 2" in text


def test_show_prints_every_action_whole_and_names_its_problems(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["show", "chain", "--n", "3", "--actions", "12"]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert all(f" a{a} " in text for a in range(12))
    assert cli.main(["show", "--help"]) == 0
    assert "chain, open-world or garnet" in capsys.readouterr().out


def test_show_keeps_every_column_and_digit_on_a_narrow_terminal(capsys, monkeypatch):
    def words(width):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.main(["show", "garnet", "--n", "4", "--actions", "7"]) == 0
        return set(re.findall(r"[\w.-]+", capsys.readouterr().out))

    wide = words(200)
    assert {"contracts", "a0", "a6"} < wide
    assert words(40) == words(12) == wide


def test_report_of_an_empty_folder_is_an_empty_page(tmp_path):
    assert command.write_report(tmp_path).read_text().startswith("<!DOCTYPE html>")
