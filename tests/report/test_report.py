"""The report: sections that survive the disk, styles that tell operators apart, a page on its own."""

import html.parser
import importlib.metadata
import json

import numpy as np
import pytest

import marginax
from marginax import report
from marginax._files import write_csv
from marginax.statistics import Interval

CLAIM = report.Claim(
    r"faster <than> `Retrace` at $\bar c = 2$",
    "Fig. 1",
    "ratio",
    0.5,
    Interval(0.4, 0.6),
    "reproduced",
    main=True,
)


def section(folder, **changes):
    with report.panels(folder, "picture", (2, 1)) as (_, axes):
        axes[0, 0].plot([0, 1], [0, 1])
    write_csv(folder / "data.csv", ["x"], [[1.5]])
    fields = {
        "name": "chain",
        "title": "Chain",
        "text": ("One & two.",),
        "figures": (report.Figure("picture", "A caption", "A line", "It rises."),),
        "tables": (report.Table("Rates", ("c", "rate"), ((1.0, 0.123456), ("two", None))),),
        "claims": (CLAIM,),
        "data": ("data.csv",),
        "settings": {"seeds": 3},
        "command": "marginax reproduce chain",
        "key": "abc",
    }
    return report.Section(**{**fields, **changes})


def test_every_column_of_panels_is_labelled_below_its_lowest(tmp_path):
    for count, (rows, columns) in {1: (1, 1), 3: (1, 3), 4: (2, 2), 5: (2, 3)}.items():
        titles = [f"task {i}" for i in range(count)]
        with report.panel_each(tmp_path, "tasks", titles, (1, 1), "steps", "return") as (figure, axes):
            assert [axis.get_title() for axis in axes] == titles
            grid = axes[0].get_subplotspec().get_gridspec()
            assert (grid.nrows, grid.ncols) == (rows, columns)
            lowest = {axis.get_subplotspec().colspan.start: axis for axis in axes}.values()
            assert all((axis.get_xlabel() == "steps") == (axis in lowest) for axis in axes)
            hidden = [axis for axis in figure.axes if not axis.get_visible()]
            assert len(hidden) == rows * columns - count


def test_a_section_read_back_is_the_section_saved(tmp_path):
    saved = section(tmp_path)
    report.save_section(tmp_path, saved)
    assert report.load_section(tmp_path) == saved
    raw = json.loads((tmp_path / "result.json").read_text())
    assert raw["claims"][0]["interval"] == {"low": 0.4, "high": 0.6, "level": 0.95}


def test_a_folder_without_a_finished_result_of_this_format_has_none(tmp_path):
    assert report.load_section(tmp_path) is None
    report.save_section(tmp_path, section(tmp_path))
    other = json.loads((tmp_path / "result.json").read_text())
    from marginax._files import save_json

    save_json(tmp_path / "result.json", {**{k: v for k, v in other.items() if k != "sha256"}, "format": 1})
    assert report.load_section(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "name": "x"}', "\x00\xff"])
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"result\.json.*damaged"):
        report.load_section(tmp_path)


def test_a_changed_byte_is_noticed(tmp_path):
    report.save_section(tmp_path, section(tmp_path))
    path = tmp_path / "result.json"
    path.write_text(path.read_text().replace("0.4", "0.5"))
    with pytest.raises(ValueError, match=r"result\.json.*damaged.*remove it to compute it again"):
        report.load_section(tmp_path)


def test_a_result_whose_figure_is_gone_is_damaged(tmp_path):
    report.save_section(tmp_path, section(tmp_path))
    (tmp_path / "picture.pdf").unlink()
    with pytest.raises(ValueError, match=r"'picture\.pdf' is missing"):
        report.load_section(tmp_path)


def test_a_section_cannot_be_saved_before_its_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.csv"):
        report.save_section(tmp_path, section(tmp_path, data=("nothing.csv",)))


def test_verdicts_follow_from_the_interval():
    noise = np.random.default_rng(0).normal(size=50)
    assert report.claim("", "", "", np.mean, noise + 5, low=0).verdict == "reproduced"
    assert report.claim("", "", "", np.mean, noise + 5, high=0).verdict == "not reproduced"
    assert report.claim("", "", "", np.mean, noise, high=0).verdict == "cannot be decided"
    assert report.claim("", "", "", lambda x: np.log(-x.mean()), noise + 5).verdict == "cannot be decided"
    assert report.verdict(Interval(np.nan, np.nan), low=0) == "cannot be decided"
    for diverged in (np.nan, np.inf):
        seeds = np.array([1.0, diverged, 2.0])
        assert report.claim("", "", "", np.mean, seeds, low=0).verdict == "cannot be decided"


def test_an_interval_that_only_touches_a_bound_does_not_support_the_claim():
    for bounds in ({"low": 0.0}, {"high": 0.0}, {"low": 0.0, "high": 1.0}):
        assert report.verdict(Interval(0.0, 0.0), **bounds) == "not reproduced"
    assert report.verdict(Interval(0.0, 0.5), low=0.0) == "cannot be decided"
    assert report.verdict(Interval(-0.5, 0.0), low=0.0) == "not reproduced"
    assert report.verdict(Interval(0.0, 0.0), high=1e-9) == "reproduced"  # an identity, up to rounding


def test_every_operator_has_a_colour_and_a_marker_of_its_own():
    for kind in ("label", "colour", "marker"):
        assert len({getattr(style, kind) for style in report.OPERATORS.values()}) == len(report.OPERATORS)
    one, two = (report.operator_style(f"marginalized-regression, decay {decay}") for decay in (0.9, 1))
    assert one.colour == two.colour == report.operator_style("marginalized-regression").colour
    assert (one.marker, two.marker) == ("$d0.9$", "$d1$")


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
    assert "faster &lt;than&gt; <code>Retrace</code> at <math" in text
    assert (
        text.index("It rises.") < text.index("<img") < text.index("A caption") < text.index("One &amp; two")
    )
    assert text.index('<ul class="main">') < text.index("<h2>Chain</h2>")
    assert text.count("marginax reproduce chain") == 2  # once per section
    assert "0.5 [0.4, 0.6]" in text
    assert "0.123" in text
    assert "0.123456" not in text


def test_names_of_users_are_no_markup_on_the_page(tmp_path):
    name = "*a* `b` $5-$10 \\frac{"
    table = report.Table("Rates", ("c",), ((report.literal(name),),))
    fields = {"tables": (table,), "text": (report.literal(name) + " at $c$",), "claims": ()}
    report.write_page(tmp_path / "page.html", "Names", [(tmp_path, section(tmp_path, **fields))])
    text = (tmp_path / "page.html").read_text("utf-8")
    assert f"<td>{name}</td>" in text
    assert f"<p>{name} at <math" in text
    assert report.plain(report.literal(name)) == name


def test_many_sections_do_not_push_the_page_away_with_their_links(tmp_path):
    many = [(tmp_path, report.Section(f"s{i}", f"Section {i}")) for i in range(13)]
    for count, folded in ((12, False), (13, True)):
        report.write_page(tmp_path / "page.html", "Many", many[:count])
        text = (tmp_path / "page.html").read_text("utf-8")
        assert (f"<details><summary>{count} sections</summary>" in text) == folded
        reader = Reader()
        reader.feed(text)
        assert reader.open == []


def test_the_page_names_data_by_their_place_beside_it(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder, name in ((tmp_path, "data.csv"), (inner, "inner/data.csv")):
        report.write_page(tmp_path / "page.html", "Data", [(folder, section(folder))])
        assert f"Data: <code>{name}</code>" in (tmp_path / "page.html").read_text("utf-8")
        assert (tmp_path / name).is_file()


def test_a_clone_that_is_not_installed_has_a_version(monkeypatch):
    def version(name):
        if name == "marginax":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert report.versions()["marginax"] == marginax.__version__
