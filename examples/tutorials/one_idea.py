"""Tutorial 1, the one idea in pictures: `.venv/bin/uv run --no-active --group tutorials marimo edit examples/tutorials/one_idea.py`."""

import marimo

app = marimo.App(app_title="The one idea in pictures")


@app.cell
def _():
    import marimo as mo
    import matplotlib.pyplot as plt
    import numpy as np

    import marginax as mx

    return mo, mx, np, plt


@app.cell
def _(mo):
    mo.md("""
    # The one idea in pictures

    What is policy π worth, when the data were gathered by another policy μ? Every answer in this library is one line:

        Q  →  Q + D (r + γ P^π Q − Q)

    The *credit* `D` says how much a Bellman error met at one state and action counts for the value of another. We look at a
    10 × 10 world: π goes right or down, μ wanders anywhere, and the lower right corner pays 1. Each picture is one row of `D`:
    how much an error met in each cell counts for going right from the upper left corner.
    """)
    return


@app.cell
def _(mx):
    mdp, pi, mu = mx.problems.open_world(n=10)
    start = (0, 2)  # the upper left corner, going right
    return mdp, mu, pi, start


@app.cell
def _(mo):
    clip = mo.ui.slider(
        steps=[0.5, 1.0, 1.5, 1.9, 2.0], value=1.0, label="c̄, the clip of Retrace's traces", show_value=True
    )
    clip
    return (clip,)


@app.cell
def _(clip, mdp, mu, mx, pi, plt, start):
    c = mx.traces.retrace(pi, mu, clip=clip.value)
    credit = {
        "one-step": mx.one_step(mdp, pi).credit()[start].sum(axis=1),
        f"Retrace, c̄ = {clip.value:g}": mx.multi_step(mdp, pi, mu, c).credit()[start].sum(axis=1),
        "all of π's future": mdp.credit_row(pi, start).sum(axis=1),
    }
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    for axis, (title, row) in zip(axes, credit.items(), strict=True):
        image = axis.imshow(row.reshape(10, 10), vmin=0, vmax=1)
        axis.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=axes, label="credit D")
    figure
    return (c,)


@app.cell
def _(mo):
    mo.md("""
    One-step credit stays where it is. With c̄ = 2 Retrace's credit is exactly that of π, and one application of the operator
    reaches the values. The price is noise: a trace is a product of ratios. The *marginalized* operator replaces the product by its
    mean given where the trajectory is now, the TD weight `w`. The operator stays the same:
    """)
    return


@app.cell
def _(c, mdp, mu, mx, np, pi):
    w = mx.weights.exact(mdp, mu, c)
    retrace, marginalized = mx.multi_step(mdp, pi, mu, c), mx.marginalized(mdp, pi, mu, w)
    q = np.random.default_rng(0).normal(size=pi.shape)
    difference = float(abs(retrace(q) - marginalized(q)).max())
    rates = {"one-step": mx.one_step(mdp, pi).contraction_rate(), "this clip": retrace.contraction_rate()}
    return difference, rates


@app.cell
def _(difference, mo, rates):
    mo.md(f"""
    Largest difference between the two operators on a random Q: **{difference:.1e}**. Contraction rates:
    one-step **{rates["one-step"]:.3f}**, at this clip **{rates["this clip"]:.3f}**. Now turn the clip above.

    Next: `marginax explore` shows the noise, too. Then read `docs/idea.md`.
    """)
    return


if __name__ == "__main__":
    app.run()
