"""Tutorial 3, evaluate a log: `.venv/bin/uv run --no-active --group tutorials marimo edit examples/tutorials/evaluate_a_log.py`."""

import marimo

app = marimo.App(app_title="Evaluate a log")


@app.cell
def _():
    import jax
    import marimo as mo
    import numpy as np

    import marginax as mx

    return jax, mo, mx, np


@app.cell
def _(mo):
    mo.md("""
    # Evaluate a log

    A shop has logged what its present policy μ did. Is the new policy π better? We make a log of 500 episodes whose truth we know,
    and ask `marginax.offline.evaluate`, which is what the command `marginax evaluate` runs.
    """)
    return


@app.cell
def _(jax, mx, np):
    mdp, pi, mu = mx.problems.garnet(30, 3, 4, seed=3, termination=0.1, discount=0.95)
    mu = 0.5 * mu + 0.5 / 3  # every action is tried now and then
    log = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=500, horizon=100)
    start = np.bincount(np.asarray(log.states[:, 0]), minlength=30) / 500
    truth = {"new": float(start @ mdp.v_values(pi)), "logged": float(start @ mdp.v_values(mu))}
    return log, pi, truth


@app.cell
def _(log, mx, pi):
    result = mx.offline.evaluate(log, pi, discount=0.95)
    return (result,)


@app.cell
def _(mo, result, truth):
    rows = [
        {
            "estimator": name,
            "value": round(answer.value, 3),
            "low": round(answer.interval.low, 3),
            "high": round(answer.interval.high, 3),
        }
        for name, answer in result.answers.items()
    ]
    mo.vstack(
        [
            mo.ui.table(rows, selection=None),
            mo.md(f"The truth is **{truth['new']:.3f}**; the logged policy has {truth['logged']:.3f}."),
        ]
    )
    return


@app.cell
def _(mo, result):
    mo.md(f"""
    ## The verdict

    > {" ".join(result.verdict.text)}

    The verdict names the estimator to rely on, what speaks against it, and whether the new policy is better than the one that was logged.
    The same from the shell, with a page of figures:

        marginax evaluate log.csv --policy policy.npy --discount 0.95 --out evaluation
    """)
    return


if __name__ == "__main__":
    app.run()
