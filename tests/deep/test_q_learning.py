"""Q-learning: targets against sums written out, probabilities, and training that carries on bit by bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.cli import main
from marginax.deep import q_learning, replay
from marginax.deep.discrete_config import QConfig
from marginax.deep.networks import layer_sizes, observation_network
from marginax.simulators.policy import outputs, unpack
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, row_width

OPERATORS = ("one-step", "n-step", "peng", "tree-backup", "retrace", "marginalized")
LENGTH, ACTIONS = 4, 3
init = jax.jit(q_learning.init, static_argnames=("config", "observation_shape", "num_actions"))
targets = jax.jit(q_learning.targets, static_argnames=("config", "train"))
learn = jax.jit(q_learning.learn, static_argnames=("config", "delayed"))


@pytest.fixture(scope="module")
def batch() -> replay.Sequences:
    """Sequences of a ring in which episodes end after four steps, or are cut off after seven."""
    generator = np.random.default_rng(0)
    steps = 40
    terminal, truncated = np.arange(steps) % 11 == 3, np.arange(steps) % 11 == 10
    states = generator.normal(size=(steps + 1, 2))
    arrays = (generator.integers(ACTIONS, size=(steps, 1)), generator.normal(size=steps), terminal, truncated)
    rows = replay.pack(states[:-1], *arrays, np.log(generator.uniform(0.1, 0.9, steps)), states[1:])
    buffer = replay.add(replay.empty(64, 2, 1), rows)
    return jax.tree.map(np.asarray, replay.sample(buffer, jax.random.key(1), batch=32, length=LENGTH))


def test_networks_start_as_flax_starts_them():
    network = observation_network((10, 10, 4), 3, (256,), key=jax.random.key(0))
    for layers in (network.dense, network.filters):
        for weight, bias in zip(layers.weights, layers.biases, strict=True):
            assert not bias.any()
            assert float(weight.var() * weight.shape[0]) == pytest.approx(1, rel=0.15)


def agent(**settings):
    config = QConfig(hidden=(8,), batch_size=32, sequence_length=LENGTH, decay=0.8, clip=1.5, **settings)
    state = init(config, observation_shape=(2,), num_actions=ACTIONS, key=jax.random.key(0))
    other = observation_network((2,), ACTIONS, (8,), key=jax.random.key(7))
    return config, dataclasses.replace(state, target=other)


def naive(config, state, batch, b: int, credits=None) -> float:
    """Q + Σ γ^t w_t (r_t + γ Q(x_{t+1}, π) - Q(x_t, ·)), one sequence, step by step."""
    tables = [
        [np.asarray(net(jnp.asarray(x[:, b]))) for x in (batch.observations, batch.next_observations)]
        for net in (state.target, state.network)
    ]

    def look(later, t):
        q, seen = tables[0][later][t], tables[int(config.double)][later][t]
        pi = np.eye(ACTIONS)[seen.argmax()]
        if config.target_policy == "epsilon-greedy":
            pi = (1 - config.target_epsilon) * pi + config.target_epsilon / ACTIONS
        if config.target_policy == "softmax":
            pi = np.exp(seen / config.temperature)
            pi /= pi.sum()
        return q, pi, pi @ q

    total, discount, product = 0.0, 1.0, 1.0
    for t in range(config.length):
        q, pi, v = look(0, t)
        a = int(batch.actions[t, b, 0])
        ratio = pi[a] / np.exp(batch.log_behaviour[t, b])
        trace = {
            "one-step": 0.0,
            "n-step": 1.0,
            "peng": config.decay,
            "tree-backup": config.decay * pi[a],
        }.get(config.operator, config.decay * min(config.clip, ratio))
        product *= trace if t else 1.0
        weight = product if credits is None else credits[t]
        baseline = v if config.operator in ("n-step", "peng") and t else q[a]
        v_next = 0.0 if batch.terminal[t, b] else look(1, t)[2]
        error = batch.rewards[t, b] + config.discount * v_next - baseline
        total += discount * weight * error + (q[a] if t == 0 else 0.0)
        discount *= config.discount
        if batch.terminal[t, b] or batch.truncated[t, b]:
            break
    return total


@pytest.mark.parametrize(
    ("operator", "policy"), list(zip(OPERATORS, 2 * ("softmax", "epsilon-greedy", "greedy"), strict=True))
)
def test_targets_are_the_sums_of_their_definitions(batch, operator, policy):
    config, state = agent(operator=operator, target_policy=policy, double=policy != "softmax")
    short = jax.tree.map(lambda x: jnp.asarray(x[None, : config.length]), batch)
    found, _, _ = targets(config, state, short, jax.random.split(jax.random.key(0), 1), train=True)
    credit = np.asarray(found.credit[0]) if operator == "marginalized" else None
    expected = [naive(config, state, batch, b, None if credit is None else credit[:, b]) for b in range(16)]
    np.testing.assert_allclose(found.target[0, :16], expected, atol=2e-5)
    if credit is not None:
        assert np.all(credit[0] == 1)
        assert credit[1:].std() > 0


def test_an_update_moves_q_towards_the_targets_and_renews_the_target_network_in_time(batch):
    config, state = agent(target_every=3)
    pairs = jnp.concatenate(
        [jnp.asarray(batch.observations[0]), np.eye(ACTIONS)[batch.actions[0, :, 0].astype(int)]], -1
    )
    target, losses = jnp.ones(32), []
    for count in range(1, 7):
        state, loss, values = learn(config, state, pairs, target, delayed=True)
        losses.append(float(loss))
        np.testing.assert_allclose(loss, np.mean((np.asarray(values) - 1) ** 2), rtol=1e-6)
        same = bool(jnp.all(state.network.dense.weights[0] == state.target.dense.weights[0]))
        assert same == (count % 3 == 0)
    assert losses[-1] < losses[0]


def test_a_convolution_acts_as_the_perceptron_that_is_saved():
    network = observation_network((5, 4, 2), 3, (8,), key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 40))
    vector = np.asarray(q_learning.dense_vector(network))
    layers = unpack(vector, layer_sizes((5, 4, 2), 3, (8,)))
    np.testing.assert_allclose(outputs(layers, np.asarray(x)), network(x), atol=1e-5)


def test_environments_in_turn_have_their_own_epsilon_and_sequences_stay_in_one():
    """Rows of two CartPoles interleave: their states continue every second row, and so do replayed sequences."""
    epsilons = (1.0, 0.1)
    actor = Actor(AgentSpec("CartPole-v1", 0, random_steps=0, epsilons=epsilons))
    block, second = (Transitions(np.zeros((60, row_width(4, 1)), np.float32), 4) for _ in range(2))
    layers = unpack(
        np.asarray(q_learning.dense_vector(observation_network((4,), 2, (8,), key=jax.random.key(0)))),
        [4, 8, 2],
    )
    actor.play(0, layers, block)
    greedy = outputs(layers, block.observations).argmax(-1)
    same = block.actions[:, 0] == greedy
    epsilon = np.resize(epsilons, 60)
    np.testing.assert_allclose(np.exp(block.log_behaviour), epsilon / 2 + (1 - epsilon) * same, rtol=1e-5)
    actor.play(1, layers, second)
    buffer = replay.add(replay.empty(84, 4, 1), block.rows)
    buffer = replay.add(buffer, second.rows)  # goes round the ring: row 83 is followed by row 0
    batch = replay.sample(buffer, jax.random.key(0), batch=256, length=4, environments=2)
    follows = np.asarray(batch.valid[1:])
    across = np.all(np.asarray(batch.observations[1:]) == np.asarray(buffer.rows[1, :4]), -1)
    assert (follows & across).any()
    np.testing.assert_array_equal(
        np.asarray(batch.observations[1:])[follows], np.asarray(batch.next_observations[:-1])[follows]
    )
    again = Actor(AgentSpec("CartPole-v1", 0, random_steps=0, epsilons=epsilons))
    again.set_state(actor.get_state())
    rows = [Transitions(np.zeros((20, row_width(4, 1)), np.float32), 4) for _ in range(2)]
    for each, out in zip((actor, again), rows, strict=True):
        each.play(3, layers, out)
    np.testing.assert_array_equal(rows[0].rows, rows[1].rows)


def test_the_agent_that_does_not_fit_is_named_with_the_command_that_does(tmp_path, capsys):
    for task, agent, fits in (("CartPole-v1", "td3", "q-learning"), ("Pendulum-v1", "q-learning", "td3")):
        assert main(["train", task, "--agent", agent, "--out", str(tmp_path)]) == 2
        assert f"use marginax train {task} --agent {fits}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environments": 4}, "update_every must be a multiple of environments 4, got 10"),
        ({"epsilon": 0.0}, r"epsilon must lie in \(0, 1\], got 0.0"),
        ({"ladder": -1.0}, "ladder must be at least 0 and finite, got -1.0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        QConfig(**settings)


def test_settings_that_follow_from_the_length_of_a_run():
    derived = QConfig(random_steps=None).derived(3000)
    assert (derived.random_steps, derived.epsilon_steps) == (300, 1500)
    assert QConfig(epsilon_steps=7).derived(3000).random_steps == 0
