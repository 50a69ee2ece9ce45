"""Tutorial 4, put a target into your agent: `.venv/bin/uv run --no-active --group tutorials marimo edit examples/tutorials/target_in_your_agent.py`."""

import marimo

app = marimo.App(app_title="Put a target into your agent")


@app.cell
def _():
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import marimo as mo
    import numpy as np
    import optax

    import marginax as mx

    return eqx, jax, jnp, mo, mx, np, optax


@app.cell
def _(mo):
    mo.md("""
    # Put a target into your agent

    An agent's critic loss needs one number per step: a target. Every target of this library is a pure function of one sequence, so a
    batch is a `vmap`. We train a small Q-network by Retrace on replayed sequences and watch its error against the exact values.
    """)
    return


@app.cell
def _(eqx, jax, jnp, mx, np):
    mdp, pi, mu = mx.problems.chain(n=8, actions=3)
    truth = mdp.q_values(pi)
    data = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=2000, horizon=8)
    network = eqx.nn.MLP(8, 3, 32, 1, key=jax.random.key(1))
    ratios = jnp.asarray(np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0))
    policy = jnp.asarray(pi)
    return data, mu, network, policy, ratios, truth


@app.cell
def _(eqx, jax, jnp, mx):
    def loss(network, target_network, episode, policy, ratios):
        """Squared error to Retrace's targets along one sequence."""
        values = jax.vmap(network)(jax.nn.one_hot(episode.states, 8))
        frozen = jax.vmap(target_network)(jax.nn.one_hot(episode.states, 8))
        following = jax.vmap(target_network)(jax.nn.one_hot(episode.next_states, 8))
        q = mx.targets.select_actions(frozen, episode.actions)  # Q(x_t, a_t)
        v_next = mx.targets.expectation(following, policy[episode.next_states])  # Q(x_{t+1}, π)
        traces = jnp.minimum(1.0, ratios[episode.states, episode.actions])  # Retrace, c̄ = 1
        goals = mx.targets.multi_step(
            q, v_next, episode.rewards, episode.discounts, traces, episode.truncated
        )
        errors = mx.targets.select_actions(values, episode.actions) - jax.lax.stop_gradient(goals)
        return jnp.sum(jnp.where(episode.valid, errors**2, 0.0))

    @eqx.filter_value_and_grad
    def batch_loss(network, target_network, episodes, policy, ratios):
        losses = jax.vmap(loss, in_axes=(None, None, 0, None, None))(
            network, target_network, episodes, policy, ratios
        )
        return losses.mean()

    return (batch_loss,)


@app.cell
def _(batch_loss, data, eqx, jax, jnp, network, optax, policy, ratios, truth):
    optimiser = optax.adam(3e-3)

    @eqx.filter_jit
    def update(network, state, key):
        chosen = jax.random.randint(key, (32,), 0, 2000)
        episodes = jax.tree.map(lambda field: field[chosen], data)
        _, gradients = batch_loss(network, network, episodes, policy, ratios)
        updates, state = optimiser.update(gradients, state)
        return eqx.apply_updates(network, updates), state

    trained, state = network, optimiser.init(eqx.filter(network, eqx.is_array))
    errors = []
    for step in range(600):
        trained, state = update(trained, state, jax.random.key(step))
        if step % 100 == 99:
            found = jax.vmap(trained)(jnp.eye(8))
            errors.append({"updates": step + 1, "largest error": float(abs(found - truth).max())})
    return (errors,)


@app.cell
def _(errors, mo):
    mo.vstack(
        [
            mo.ui.table(errors, selection=None),
            mo.md("""
    Change one line for another operator: `mx.targets.peng`, `n_step`, `vtrace`, or `marginalized` with TD weights. In PyTorch the same
    functions are in `marginax.torch.targets`. `marginax.testing.check_targets` tells whether a Retrace of your own is right.
    """),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
