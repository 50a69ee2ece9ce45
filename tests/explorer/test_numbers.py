"""The explorer's numbers against sampling, linear programs and the operators themselves."""

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.explorer import numbers
from marginax.explorer.numbers import Setting, frontier, learning_curves, look, world

WORLDS = [("open-world", 4), ("chain", 5), ("garnet", 12)]


@pytest.mark.parametrize(("name", "size"), WORLDS)
def test_deviations_are_those_of_sampled_targets(name, size):
    here, setting = world(name, size, discount=0.9), Setting(towards=0.3, clip=1.5, decay=0.9, action=1)
    picture = look(here, setting)
    start = (setting.state, setting.action)
    pi = 0.7 * here.pi + 0.3 * here.mu
    c = mx.traces.retrace(pi, here.mu, clip=1.5, decay=0.9)
    w = mx.weights.exact(here.mdp, here.mu, c, start=start)
    batch = mx.trajectories.sample(
        here.mdp, here.mu, jax.random.key(0), episodes=30_000, horizon=60, start_states=0, start_actions=1
    )
    states, actions = np.asarray(batch.states), np.asarray(batch.actions)
    rewards = np.where(batch.valid, batch.rewards, 0.0)
    powers = 0.9 ** np.arange(60)
    traces = c[states, actions]
    traces[:, 0] = 1.0
    samples = {
        "Retrace": (powers * np.cumprod(traces, axis=1) * rewards).sum(axis=1),
        "marginalized": (powers * w[states, actions] * rewards).sum(axis=1),
    }
    for operator, values in samples.items():
        assert picture.operators[operator][2] == pytest.approx(values.std(), rel=0.05)


@pytest.mark.parametrize(("name", "size"), WORLDS)
def test_fastest_rows_are_those_of_the_linear_program(name, size):
    here = world(name, size)
    rows = numbers.fastest_rows(here.mdp, here.pi, here.mu, (0, 1), [0.5, 2.0])
    for cap, row in zip([0.5, 2.0], rows, strict=True):
        expected = mx.linear_programs.fastest(here.mdp, here.pi, here.mu, cap, start=(0, 1))
        np.testing.assert_allclose(row, expected, atol=1e-6)


def test_rates_and_values_are_the_operators():
    here, setting = world("open-world", 5), Setting(clip=1.0, action=2)
    picture = look(here, setting)
    retrace = mx.multi_step(here.mdp, here.pi, here.mu, mx.traces.retrace(here.pi, here.mu))
    assert picture.operators["Retrace"][0] == retrace.contraction_rate()
    assert picture.operators["marginalized"][1] == retrace.contraction_rates()[0, 2]
    np.testing.assert_allclose(picture.credit, retrace.credit()[0, 2].sum(axis=1), atol=1e-12)
    curve = frontier(here, setting)
    k = numbers.CLIPS.index(1.0)
    np.testing.assert_allclose(curve.retrace[k], picture.operators["Retrace"][1:], atol=1e-12)
    rates = curve.fastest[:, 0]
    assert np.all(np.diff(rates) <= 1e-12), "a larger cap is never slower"


@pytest.mark.slow
def test_learning_curves_go_down():
    *_, last = learning_curves(world("chain", 4), Setting(clip=1.0), seeds=3, chunk=10, chunks=2)
    assert {values.shape for values in last.values()} == {(3, 20)}
    assert all(values[:, -1].mean() < values[:, 0].mean() for values in last.values())


def test_own_problem_and_its_mistakes(tmp_path):
    mdp, pi, mu = mx.problems.garnet(4, 2, 2, seed=0)
    np.savez(tmp_path / "own.npz", p=mdp.dense_p(), r=mdp.r, pi=pi, mu=mu, discount=0.9, columns=2)
    here = world(str(tmp_path / "own.npz"))
    assert (here.columns, here.mdp.discount, here.own_discount) == (2, 0.9, True)
    for wrong, message in (
        ({"discount": [0.9, 0.8]}, "discount must be a number"),
        ({"columns": [1, 2]}, "columns must be a number"),
        ({"columns": 1.5}, "columns must be a whole number"),
        ({"columns": 5}, "columns must be at most the number of states 4, got 5"),
    ):
        np.savez(tmp_path / "wrong.npz", p=mdp.dense_p(), r=mdp.r, pi=pi, mu=mu, **wrong)
        with pytest.raises(ValueError, match=message):
            world(str(tmp_path / "wrong.npz"))
    np.savez(tmp_path / "half.npz", p=mdp.dense_p())
    with pytest.raises(ValueError, match=r"half.npz' has no array 'r'"):
        world(str(tmp_path / "half.npz"))
    (tmp_path / "text.npz").write_text("no archive")
    with (tmp_path / "array.npz").open("wb") as file:
        np.save(file, mdp.r)
    for name in ("text", "array"):
        with pytest.raises(
            ValueError, match=rf"cannot read the problem .*{name}.npz': it is not a file that"
        ):
            world(str(tmp_path / f"{name}.npz"))
    with pytest.raises(ValueError, match="unknown problem 'maze'"):
        world("maze")
