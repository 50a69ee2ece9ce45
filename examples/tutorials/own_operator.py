"""Tutorial 2, an operator of your own: `.venv/bin/uv run --no-active --group tutorials marimo edit examples/tutorials/own_operator.py`."""

import marimo

app = marimo.App(app_title="An operator of your own")


@app.cell
def _():
    import jax
    import jax.numpy as jnp
    import marimo as mo
    import numpy as np

    import marginax as mx

    return jax, jnp, mo, mx, np


@app.cell
def _(mo):
    mo.md("""
    # An operator of your own

    A multi-step operator is given by its traces `c[S, A]`. Any non-negative table will do. Here is one that is not in the paper:
    *softened* Retrace, `c = min(1, (π/μ)^p)`. With p = 1 it is Retrace; with smaller p it keeps more of a long trajectory.
    """)
    return


@app.cell
def _(mx, np):
    def softened(pi, mu, power):
        """c = min(1, (π/μ)^p), zero where π is."""
        ratio = np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0)
        return np.minimum(1.0, ratio**power)

    mdp, pi, mu = mx.problems.garnet(20, 4, 3, seed=0, termination=0.05)
    return mdp, mu, pi, softened


@app.cell
def _(mdp, mo, mu, mx, pi, softened):
    rows = []
    for power in (1.0, 0.75, 0.5, 0.25):
        operator = mx.multi_step(mdp, pi, mu, softened(pi, mu, power))
        # An operator with traces above π/μ may not contract.
        right = operator.is_contractive() and abs(operator.fixed_point() - mdp.q_values(pi)).max() < 1e-9
        rows.append({"power": power, "rate": operator.contraction_rate(), "fixed point is Q^π": bool(right)})
    mo.ui.table(rows, selection=None)
    return (rows,)


@app.cell
def _(mo):
    mo.md("""
    The fixed point is Q^π whatever the traces are, as long as the operator contracts: traces move the rate, not the answer.

    Now from data. The same traces, per step, go into a target. `marginax.targets` works on one sequence; `vmap` gives batches.
    """)
    return


@app.cell
def _(jax, jnp, mdp, mu, mx, np, pi, softened):
    c = softened(pi, mu, 0.5)
    batch = mx.trajectories.sample(
        mdp, mu, jax.random.key(0), episodes=20_000, horizon=60, start_states=0, start_actions=1
    )
    q = jnp.asarray(np.random.default_rng(1).normal(size=pi.shape))
    here, v_next = mx.trajectories.gather(batch, q, jnp.asarray(pi))
    traces = mx.trajectories.gather_pairs(batch, jnp.asarray(c))
    targets = jax.vmap(mx.targets.multi_step)(
        here, v_next, batch.rewards, batch.discounts, traces, batch.truncated
    )
    sampled = float(targets[:, 0].mean())
    error = float(targets[:, 0].std() / np.sqrt(20_000))
    exact = float(mx.multi_step(mdp, pi, mu, c)(np.asarray(q, float))[0, 1])
    return error, exact, sampled


@app.cell
def _(error, exact, mo, sampled):
    mo.md(f"""
    Mean of 20,000 sampled targets at the start pair: **{sampled:.3f} ± {error:.3f}**. The exact operator says **{exact:.3f}**.

    That is all an operator of your own needs: a table of traces for the exact side, the same numbers per step for the sampled one.
    """)
    return


if __name__ == "__main__":
    app.run()
