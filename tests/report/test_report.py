"""The report: files that are whole or absent, sections that survive the disk, a page on its own."""

import html.parser
import json

import numpy as np
import pytest
from matplotlib.figure import Figure

from marginax import report
from marginax._files import write_csv


def figure(folder, name="picture"):
    with report.plot_style():
        fig = Figure(figsize=(2, 1))
        fig.subplots().plot([0, 1], [0, 1])
        report.save_figure(fig, folder, name)


def section(folder, **changes):
    figure(folder)
    write_csv(folder / "data.csv", ["x"], [[1.5]])
    claim = report.Claim(
        "faster <than> `Retrace`",
        "Fig. 1",
        "ratio",
        report.Interval(0.5, 0.4, 0.6),
        "reproduced",
        "marginax reproduce chain",
    )
    fields = {
        "name": "chain",
        "title": "Chain",
        "text": ("One & two.",),
        "figures": (report.Figure("picture", "A caption", "A line"),),
        "tables": (report.Table("Rates", ("c", "rate"), ((1.0, 0.123456), ("two", None))),),
        "claims": (claim,),
        "data": ("data.csv",),
        "settings": {"seeds": 3},
        "command": "marginax reproduce chain",
        "key": "abc",
    }
    return report.Section(**{**fields, **changes})


def test_a_section_read_back_is_the_section_saved(tmp_path):
    saved = section(tmp_path)
    report.save_section(tmp_path, saved)
    assert report.load_section(tmp_path) == saved


def test_a_folder_without_a_finished_result_has_none(tmp_path):
    assert report.load_section(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}', '{"format": 1, "name": "x"}', "\x00\xff"])
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"result\.json.*damaged"):
        report.load_section(tmp_path)


def test_a_result_whose_figure_is_gone_is_damaged(tmp_path):
    report.save_section(tmp_path, section(tmp_path))
    (tmp_path / "picture.pdf").unlink()
    with pytest.raises(ValueError, match=r"'picture\.pdf' is missing"):
        report.load_section(tmp_path)


def test_a_section_cannot_be_saved_before_its_files(tmp_path):
    saved = section(tmp_path, data=("nothing.csv",))
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        report.save_section(tmp_path, saved)


def test_bootstrap_interval_covers_a_mean():
    rng = np.random.default_rng(1)
    hits = 0
    for repetition in range(200):
        interval = report.bootstrap(lambda x: x.mean(1), rng.normal(size=60), resamples=400, seed=repetition)
        hits += interval.low <= 0 <= interval.high
    assert 180 <= hits <= 199


def test_bootstrap_is_paired():
    noise = np.random.default_rng(2).normal(size=50)
    interval = report.bootstrap(lambda x, y: (x - y).mean(1), noise + 1, noise)
    assert interval.high - interval.low < 1e-12


def test_bootstrap_refuses_samples_of_different_length():
    with pytest.raises(ValueError, match="same, non-zero number of seeds"):
        report.bootstrap(lambda x, y: x.mean(1) - y.mean(1), np.zeros(3), np.zeros(4))


def test_verdict_of_an_infinite_interval_is_undecided():
    assert report.verdict(report.Interval(np.nan, np.nan, np.nan), low=0) == "cannot be decided"


class Reader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.ids = [], [], set()

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in {"meta", "link", "img", "br"}:
            self.open.append(tag)
        self.links += [attrs[name] for name in ("src", "href") if name in attrs]
        self.ids.add(attrs.get("id"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_self_contained(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    sections = [(one, section(one)), (two, section(two, name="two words", title="Two", claims=()))]
    report.write_page(
        tmp_path / "report.html", "Title", sections, lead=["A `code` word."], versions={"jax": "1"}
    )
    text = (tmp_path / "report.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= reader.ids
    assert "faster &lt;than&gt; <code>Retrace</code>" in text
    assert "0.5 [0.4, 0.6]" in text
    assert "0.123" in text
    assert "0.123456" not in text


def test_result_json_is_plain_json(tmp_path):
    report.save_section(tmp_path, section(tmp_path))
    raw = json.loads((tmp_path / "result.json").read_text())
    assert raw["claims"][0]["interval"] == {"effect": 0.5, "low": 0.4, "high": 0.6}
