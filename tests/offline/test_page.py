"""The page of an evaluation: what it says where something does not apply, and names that look like markup or like one another."""

import html
import re

import numpy as np
import pytest

from marginax.offline import Log, evaluate, open_data, page, write_report
from offline.test_observations import QUICK, gaussian, log_of, softmax
from offline.test_support import bandit


def text_of(path):
    """What a reader sees of a page, in one line."""
    body = path.read_text("utf-8").split("<body>")[1]
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.mark.slow
def test_names_are_shown_as_they_are_and_each_policy_has_its_own_figures(tmp_path):
    """Two Greek letters shared their files, so that both showed the figure of the second; dollar signs were read as mathematics."""
    names = ["α", "β", "a b", "A_B", "*cost* $5-$10 \\frac{", "long/" * 60]
    pi = [[[0.5 - i / 20, 0.5 + i / 20]] for i in range(len(names))]
    settings = {"discount": 0.0, "estimators": ["weighted-is", "per-decision-is"]}
    noisy = bandit(rewards=(0.0, 1.0))
    path = write_report(evaluate(noisy, dict(zip(names, pi, strict=True)), **settings), tmp_path)
    written = path.read_text("utf-8")
    assert "<math" not in written
    assert len(set(re.findall(r"data:image/png;base64,[^\"]+", written))) >= 1 + len(names)
    assert len(list(tmp_path.glob("*estimates.csv"))) == len(names)
    assert len({file.name.lower() for file in tmp_path.iterdir()}) == len(list(tmp_path.iterdir()))
    links = re.findall(r'<a href="#([^"]+)"', written)
    assert len(set(links)) == len(links)
    assert all(name in text_of(path) for name in names)


def test_labels_of_the_log_are_no_markup(tmp_path):
    labels = ["$5-$10", "*", "`x`"]
    rows = {
        "episode": np.arange(60),
        "state": [labels[i % 3] for i in range(60)],
        "action": [["up", "down"][i // 3 % 2] for i in range(60)],
        "reward": np.arange(60) % 4,
        "terminal": np.ones(60, int),
        "behaviour": np.full(60, 0.5),
    }
    order = {"state": labels, "action": ["up", "down"]}
    names = ["weighted-is"]
    result = evaluate(open_data(rows, order), np.tile([0.4, 0.6], (3, 1)), discount=0.0, estimators=names)
    written = write_report(result, tmp_path).read_text("utf-8")
    assert "<math" not in written
    assert all(f"<td>{label}</td>" in written for label in labels)


def test_a_policy_known_on_rows_alone_has_no_overlap_and_no_untrue_sentence(tmp_path):
    log = log_of(softmax(0.3), episodes=40, steps=5)
    names = list(
        np.array(["weighted-is", "per-decision-is"])
    )  # strings of NumPy, which were no names for a CSV file
    result = evaluate(log, log.behaviour, discount=0.9, estimators=names)
    assert result.curves["overlap"] is None
    found = text_of(write_report(result, tmp_path))
    assert "The Markov assumption was not tested" in found
    assert "has seen: not known. Behaviour probabilities: logged." in found
    assert "(the log's own return)" in found
    assert "differ from frequencies" not in found
    axes = page.draw_overlap(result).axes
    assert [[text.get_text() for text in one.texts] for one in axes] == [["not known"], ["not compared"]]


@pytest.mark.slow
def test_the_page_of_a_policy_without_weights_says_so(tmp_path):
    """It had 0 effective episodes, an average weight of 0 ± 0, and a bar of one episode with weight 1."""
    log = log_of(gaussian(0.1), episodes=40, steps=10)
    names = ["per-decision-is", "certainty-equivalence"]
    result = evaluate(log, gaussian(0.1, std=0.0), discount=0.9, estimators=names, training=QUICK)
    assert result.diagnostics["largest_weights"] == []
    assert sum(result.curves["weight_histogram"]["heights"]) == 0
    found = text_of(write_report(result, tmp_path))
    assert "Importance sampling does not apply to this policy" in found
    assert "they should average 1" not in found
    assert "under this one" not in found
    assert "differ from frequencies" not in found  # they were logged; a fitted policy is another matter
    assert "Share of the policy's discounted steps" in found
    assert not (tmp_path / "weights.png").exists()


@pytest.mark.filterwarnings("error")
def test_figures_of_equal_numbers_raise_no_warning(tmp_path):
    write_report(evaluate(bandit(), [[0.5, 0.5]], estimators=["weighted-is"]), tmp_path)


def test_few_rows_of_a_figure_are_not_on_its_edges():
    log = Log.from_episodes(
        [{"states": [0], "actions": [i % 2], "rewards": [i % 3], "terminal": True} for i in range(40)]
    )
    axes = page.draw_estimates(evaluate(log, [[0.5, 0.5]], estimators=["weighted-is"])).axes[0]
    assert axes.get_ylim() == (0.5, 2.5)
