"""The actor-critic: V-trace written out, weights between states, fresh and replayed data, and training."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.deep import actor_critic, replay
from marginax.deep.discrete_config import ActorCriticConfig

SETTINGS = {
    "hidden": (8,),
    "environments": 2,
    "sequence_length": 4,
    "update_every": 8,
    "batch_size": 6,
    "replay_size": 64,
}
ACTIONS = 3
init = jax.jit(actor_critic.init, static_argnames=("config", "observation_shape", "num_actions"))
draw = jax.jit(actor_critic.draw, static_argnames="config")
targets = jax.jit(actor_critic.targets, static_argnames=("config", "train"))


def agent(**settings):
    config = ActorCriticConfig(**SETTINGS, **settings)
    return config, init(config, observation_shape=(2,), num_actions=ACTIONS, key=jax.random.key(0))


@pytest.fixture(scope="module")
def buffer() -> replay.Replay:
    generator, steps = np.random.default_rng(0), 48
    states = generator.normal(size=(steps + 2, 2))  # two environments in turn: the successor is two rows on
    arrays = (generator.integers(ACTIONS, size=(steps, 1)), generator.normal(size=steps))
    ends = (np.arange(steps) % 14 == 5, np.arange(steps) % 17 == 9)
    rows = replay.pack(states[:-2], *arrays, *ends, np.log(generator.uniform(0.2, 0.9, steps)), states[2:])
    return replay.add(replay.empty(64, 2, 1), rows)


@pytest.mark.parametrize("operator", ["vtrace", "marginalized"])
def test_targets_and_advantages_are_the_sums_of_their_definitions(buffer, operator):
    config, state = agent(operator=operator, clip=1.3, rho_clip=1.6, decay=0.9)
    batches, keys = draw(config, buffer, jax.random.split(jax.random.key(1), 1))
    found, _, _ = targets(config, state, batches, keys, train=False)
    batch = jax.tree.map(lambda x: np.asarray(x[0]), batches)
    out, ahead = (
        np.asarray(state.network(jnp.asarray(x))) for x in (batch.observations, batch.next_observations)
    )
    pi = np.exp(out[..., :-1]) / np.exp(out[..., :-1]).sum(-1, keepdims=True)
    for b in range(6):
        for t in np.flatnonzero(batch.valid[:, b]):
            value = [0.0, 0.0]
            for start in (t, t + 1):
                total, product, s = 0.0, 1.0, start
                going = start == t or not (batch.terminal[t, b] or batch.truncated[t, b])
                first = out[start, b, -1] if going else ahead[t, b, -1]
                while going and s < 4:
                    ratio = pi[s, b, int(batch.actions[s, b, 0])] / np.exp(batch.log_behaviour[s, b])
                    # An untrained network says 1: then only the decay is left of the marginalized weights.
                    credit = product if operator == "vtrace" else 0.9 ** (s - start)
                    v_next = 0.0 if batch.terminal[s, b] else ahead[s, b, -1]
                    error = batch.rewards[s, b] + 0.99 * v_next - out[s, b, -1]
                    total += 0.99 ** (s - start) * credit * min(1.6, ratio) * error
                    product *= 0.9 * min(1.3, ratio)
                    going = not (batch.terminal[s, b] or batch.truncated[s, b])
                    s += 1
                value[start - t] = first + total
            ratio = pi[t, b, int(batch.actions[t, b, 0])] / np.exp(batch.log_behaviour[t, b])
            follows = 0.0 if batch.terminal[t, b] else value[1]
            gain = min(1.6, ratio) * (batch.rewards[t, b] + 0.99 * follows - out[t, b, -1])
            np.testing.assert_allclose(found.target[0, t, b], [value[0], gain, 1.0], atol=1e-5)


def test_a_share_of_the_batch_comes_from_replay_and_the_rest_from_the_last_block(buffer):
    rows = np.asarray(buffer.rows[:48, :2])
    for share, expected in ((0.0, 6), (0.5, 3)):
        config, _ = agent(replay_share=share)
        seen = []
        for seed in range(5):
            batches, _ = draw(config, buffer, jax.random.split(jax.random.key(seed), 1))
            starts = np.asarray(batches.observations[0, 0])
            number = np.abs(rows[None] - starts[:, None]).sum(-1).argmin(1)
            seen.append(number)
            assert np.all(number[6 - expected :] >= 40)  # the last block has rows 40 to 47
            assert np.all(number[6 - expected :] <= 41)  # of which two begin whole sequences
        assert (np.concatenate(seen) < 40).any() == (share > 0)


def test_weights_between_states_learn_the_mean_product_of_all_traces_from_the_first_state_on():
    """One state after another, whatever is done: u after n steps is the mean product of n traces."""
    config, state = agent(operator="marginalized", clip=2.0, weight_learning_rate=3e-3, path_mixture=1.0)
    generator = np.random.default_rng(0)
    ratios = generator.choice([0.2, 1.8], size=(4, 256), p=[0.25, 0.75])  # mean 1.4
    states = np.repeat(np.eye(2)[[0, 1, 1, 1]][:, None], 256, 1)
    states[2], states[3] = [1.0, 1.0], [-1.0, 0.5]
    zeros = jnp.zeros((4, 256), bool)
    batch = replay.Sequences(
        jnp.asarray(states), jnp.zeros((4, 256, 1)), jnp.zeros((4, 256)), zeros, zeros, jnp.zeros((4, 256)),
        jnp.asarray(states), ~zeros,
    )  # fmt: skip
    step = jax.jit(lambda paths: actor_critic.train_paths(config, paths, batch, jnp.asarray(ratios))[0])
    paths = state.paths
    for _ in range(600):
        paths = step(paths)
    u = np.exp(paths.network(jnp.asarray(states[:, 0]), jnp.broadcast_to(jnp.asarray(states[0, 0]), (4, 2))))
    np.testing.assert_allclose(u[1:], np.cumprod(ratios, 0)[:-1].mean(1), rtol=0.05)


def test_behaviour_is_the_actor_mixed_with_uniform_actions():
    _, state = agent()
    observations, epsilon = jnp.ones((3, 2)), jnp.array([0.0, 0.4, 1.0])
    logits = np.asarray(state.acting(observations))[:, :-1]
    pi = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [pi[0], 0.6 * pi[1] + 0.4 / ACTIONS, np.full(ACTIONS, 1 / ACTIONS)]
    np.testing.assert_allclose(
        actor_critic.behaviour(state, observations, epsilon), np.stack(expected), rtol=1e-6
    )


def test_the_mean_trace_has_its_decay(buffer):
    means = []
    for decay in (1.0, 0.5):
        config, state = agent(decay=decay)
        batches, keys = draw(config, buffer, jax.random.split(jax.random.key(1), 1))
        batch = jax.tree.map(lambda x: x[0], batches)
        measured = actor_critic.measure(config, state, batch, keys[0])
        means.append(float(measured[actor_critic.METRICS.index("trace_mean")]))
    assert means[1] == pytest.approx(0.5 * means[0])


@pytest.mark.parametrize(
    ("name", "value", "only"),
    [
        ("weights", "regression", "'paths'"),
        ("normalisation", "power", "'none'"),
        ("start_conditioned", False, "True"),
        ("exact_first_weight", False, "True"),
        ("weight_critic_penalty", 0.0, "1.0"),
    ],
)
def test_settings_without_an_effect_are_refused(name, value, only):
    with pytest.raises(ValueError, match=f"{name} must be {only} for this agent, got"):
        ActorCriticConfig(operator="marginalized", **{name: value})
