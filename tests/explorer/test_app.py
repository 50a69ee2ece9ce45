"""The explorer before anything is served: mistakes are one clear line, and widgets say what they do."""

import socket

import numpy as np
import pytest

import marginax as mx
from marginax import cli

pytest.importorskip("panel")


def save(path, **changed):
    mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
    np.savez(path, **{"p": mdp.dense_p(), "r": mdp.r, "pi": pi, "mu": mu, **changed})
    return str(path)


def fails(words, capsys):
    """The error of a command that says nothing before it."""
    assert cli.main(["explore", *words, "--no-browser"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_nothing_is_announced_that_is_not_served(tmp_path, capsys):
    assert "cannot read the problem" in fails([str(tmp_path / "nope.npz")], capsys)
    one = np.eye(2)[np.zeros(4, int)]
    other = save(tmp_path / "other.npz", pi=one, mu=one[:, ::-1])
    assert "mu has no support where pi has some: mu[0, 0] = 0" in fails([other], capsys)
    assert "--port must lie between 1 and 65535, got 70000" in fails(["--port", "70000"], capsys)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot use port {port}" in fails(["chain", "--port", port], capsys)


def test_the_discount_of_a_file_is_shown_in_place_of_the_slider(tmp_path):
    from marginax.explorer.app import Explorer

    page = Explorer(save(tmp_path / "own.npz", discount=0.3))
    assert page.discount.disabled and page.discount.name == "γ, discount, 0.3 in the file"
    page.problem.value = "chain"
    assert not page.discount.disabled and page.discount.name == "γ, discount"
    assert not Explorer(save(tmp_path / "open.npz")).discount.disabled


def test_the_legend_lies_outside_the_curves():
    import panel
    from bokeh.models import Legend

    from marginax.explorer.app import Explorer

    plots = [pane.object for pane in Explorer("chain").page().select(panel.pane.Bokeh)]
    (plot,) = [each for each in plots if each.title.text.startswith("Rate against noise")]
    assert any(isinstance(part, Legend) for part in plot.above)
    assert not any(isinstance(part, Legend) for part in plot.center)
