"""The agent's targets against sums written out step by step, and gradients that reach only what they should."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.deep import critic_targets, replay, td3, weight_network
from marginax.deep.config import TD3Config
from marginax.deep.update_metrics import update_metrics
from reference.episodes import filled, sample, sequence, target, transitions

OPERATORS = ["one-step", "n-step", "retrace", "retrace-paper", "marginalized"]
SLOWER = [
    "retrace",
    "marginalized",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("one-step", "n-step", "retrace-paper")),
]
SIZES = {"observation_size": 2, "action_size": 1}
init = jax.jit(td3.init, static_argnames=("config", *SIZES))
update = jax.jit(td3.update, static_argnames=("config", "delayed"))
update_block = jax.jit(td3.update_block, static_argnames=("config", "updates"))
bootstrap = jax.jit(critic_targets.bootstrap, static_argnames="config")
td_weights = jax.jit(critic_targets.td_weights, static_argnames=("config", "train"))


def agent(config: TD3Config) -> td3.TD3State:
    """An agent whose target networks differ from the networks themselves."""
    state, other = (init(config, **SIZES, key=jax.random.key(seed)) for seed in range(2))
    return dataclasses.replace(state, target_actor=other.actor, target_critic=other.critic)


def batch_of(config: TD3Config, length: int | None = None) -> replay.Sequences:
    stream = filled(transitions(5, 40), 31)
    return sample(stream, jax.random.key(2), batch=64, length=length or config.length)


def one(tree):
    """A round of a single batch."""
    return jax.tree.map(lambda x: x[None], tree)


@partial(jax.jit, static_argnames=("config", "train"))
def targets(config, state, batch, key, *, train):
    """Targets, estimator and loss of one batch."""
    found, estimator, loss = td3.targets(config, state, one(batch), key[None], train=train)
    return jax.tree.map(lambda x: x[0], found), estimator, loss


def config_of(operator: str, **settings) -> TD3Config:
    return TD3Config(operator=operator, hidden=(16, 16), batch_size=64, sequence_length=4, **settings)


def forward(network, x):
    """A network's output for one input, in NumPy."""
    for i, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        x = x @ np.asarray(weight) + np.asarray(bias)[0]
        x = x if i == len(network.weights) - 1 else np.maximum(x, 0)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operator", "conditioned", "clip"),
    [(operator, True, 1.0) for operator in OPERATORS]
    + [("marginalized", False, 1.0), ("retrace", True, 2.5)],
)
def test_targets_equal_the_naive_sum_over_each_sequence(operator, conditioned, clip):
    settings = {"target_noise": 0.0, "trace_scale": 0.8, "trace_temperature": 0.5, "clip": clip}
    config = config_of(operator, start_conditioned=conditioned, **settings)
    state, stream = agent(config), transitions(5, 40)
    batch = batch_of(config)
    networks = (state.target_actor, state.target_critic)
    ahead = bootstrap(config, *networks, batch, jax.random.key(3))
    credit = jax.random.uniform(jax.random.key(4), batch.rewards.shape)
    if conditioned:
        credit = credit.at[0].set(1.0)
    computed = critic_targets.operator_target(config, batch, ahead, credit)
    products = np.asarray(critic_targets.products(ahead.traces, batch))
    twins = state.target_critic

    def q_of(x, a):
        return min(forward(twin, np.concatenate([x, np.clip(a, -1, 1)]))[0] for twin in twins)

    def pi(x):
        return np.tanh(forward(state.target_actor, x))

    place = {tuple(step["observation"]): i for i, step in enumerate(stream)}
    for b in range(64):
        steps = sequence(stream, place[tuple(np.asarray(batch.observations[0, b]))], config.length)
        v_next = [q_of(s["next_observation"], pi(s["next_observation"])) for s in steps]
        q = [q_of(s["observation"], s["action"]) for s in steps]
        traces = []
        for s in steps:
            z = (s["action"][0] - pi(s["observation"])[0]) / 0.8
            log_pi = -0.5 * z**2 - np.log(0.8) - 0.5 * np.log(2 * np.pi)
            traces.append(0.7 * min(clip, np.exp(log_pi - s["log_behaviour"]) ** 0.5))
        weights = [float(credit[t, b]) for t in range(len(steps))]
        if operator == "one-step":
            weights = [1.0]
        if operator in ("retrace", "retrace-paper"):
            weights = [float(np.prod(traces[1 : t + 1])) for t in range(len(steps))]
        if operator == "n-step":
            weights = [1.0] * len(steps)
        if operator in ("n-step", "retrace-paper"):
            q = [q[0], *v_next[:-1]]
        discounts = [0.0 if s["terminal"] else 0.99 for s in steps]
        expected = target(q, v_next, [s["reward"] for s in steps], discounts, weights)
        assert computed[b] == pytest.approx(expected, rel=1e-4, abs=1e-4)
        if operator.startswith("retrace"):
            np.testing.assert_allclose(products[: len(steps), b], weights, rtol=1e-4)
            assert (products[len(steps) :, b] == 0).all()


@pytest.mark.slow
def test_n_step_is_the_sum_of_rewards_and_one_bootstrap():
    config = config_of("n-step", target_noise=0.0)
    state, batch = agent(config), batch_of(config)
    networks = (state.target_actor, state.target_critic)
    ahead = bootstrap(config, *networks, batch, jax.random.key(3))
    computed = targets(config, state, batch, jax.random.key(3), train=False)[0].target
    for b in range(64):
        n = int(batch.valid[:, b].sum())
        rewards = np.asarray(batch.rewards[:n, b])
        expected = float(np.sum(0.99 ** np.arange(n) * rewards))
        if not batch.terminal[n - 1, b]:
            expected += 0.99**n * float(ahead.v_next[n - 1, b])
        assert computed[b] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("conditioned", [True, False])
def test_a_target_from_one_later_step_is_right_on_average(conditioned, monkeypatch):
    """Over the law of the drawn step, targets and losses of the weights equal those of whole sequences."""
    settings = {"target_noise": 0.0, "start_conditioned": conditioned, "trace_scale": 0.8}
    whole, single = (config_of("marginalized", target_steps=n, **settings) for n in ("all", "one"))
    state = agent(whole)
    batch = batch_of(whole)
    expected, _, expected_loss = targets(whole, state, batch, jax.random.key(0), train=True)
    law = critic_targets.draw_steps
    _, probabilities = law(single, 10_000, jax.random.key(1))
    total, loss, length = jnp.zeros(64), 0.0, 0.0
    for step, p in zip((1, 2, 3), np.unique(probabilities)[::-1], strict=True):
        drawn = (jnp.full(64, step, jnp.int32), jnp.full(64, p))
        monkeypatch.setattr(critic_targets, "draw_steps", lambda *_, drawn=drawn: drawn)
        # Not jitted: the law of the drawn step changes from call to call.
        found, _, weight_loss = targets.__wrapped__(single, state, batch, jax.random.key(0), train=True)
        total, loss = total + p * found.target, loss + p * weight_loss
        length += p * jnp.sum(found.credit / found.share, axis=0)
        monkeypatch.setattr(critic_targets, "draw_steps", law)
    np.testing.assert_allclose(total, expected.target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
    np.testing.assert_allclose(length, jnp.sum(expected.credit, axis=0), rtol=1e-4)


def test_steps_are_drawn_by_the_law_they_claim():
    config = config_of("marginalized", target_steps="one")
    steps, share = critic_targets.draw_steps(config, 20_000, jax.random.key(0))
    counts = np.bincount(np.asarray(steps), minlength=4)
    assert counts[0] == 0
    law = 0.693 ** np.arange(1, 4) / np.sum(0.693 ** np.arange(1, 4))
    np.testing.assert_allclose(counts[1:] / 20_000, law, atol=0.015)
    np.testing.assert_allclose(share, law[np.asarray(steps) - 1], rtol=1e-4)


@pytest.mark.parametrize("operator", SLOWER)
def test_padding_and_what_follows_a_terminal_step_are_never_read(operator):
    config = config_of(operator)
    state = agent(config)
    batch = batch_of(config)
    poison = poisoner(batch.valid)
    spoilt = replay.Sequences(
        poison(batch.observations),
        poison(batch.actions),
        poison(batch.rewards),
        batch.terminal,
        batch.truncated,
        poison(batch.log_behaviour),
        poison(batch.next_observations),
        batch.valid,
    )
    spoilt = jax.tree.map(jnp.asarray, spoilt)
    clean = update(config, state, batch, jax.random.key(0), delayed=False)
    other = update(config, state, spoilt, jax.random.key(0), delayed=False)
    for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("operator", SLOWER)
def test_gradients_reach_only_what_they_should(operator):
    config = config_of(operator)
    state = agent(config)
    batch = batch_of(config)
    critics, _ = update(config, state, batch, jax.random.key(0), delayed=False)
    moved = {name for name in vars(state) if not same(getattr(state, name), getattr(critics, name))}
    assert moved == {"critic", "critic_optimiser"}
    everything, _ = update(config, state, batch, jax.random.key(0), delayed=True)
    moved = {name for name in vars(state) if not same(getattr(state, name), getattr(everything, name))}
    weights = {"estimator"} if operator == "marginalized" else set()
    assert moved == set(vars(state)) - {"estimator", "scaler"} | weights
    # The critics take the same step whether or not the others move with them.
    for a, b in zip(jax.tree.leaves(critics.critic), jax.tree.leaves(everything.critic), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

    def total(networks):
        target_actor, target_critic, learned = networks
        state_of = dataclasses.replace(
            state, target_actor=target_actor, target_critic=target_critic, estimator=learned
        )
        return jnp.sum(targets(config, state_of, batch, jax.random.key(0), train=False)[0].target)

    slopes = jax.jit(jax.grad(total))(
        (state.target_actor, state.target_critic, state.estimator and strip(state.estimator))
    )
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(slopes))


@pytest.mark.parametrize(("start_conditioned", "clip"), [(True, 1.0), (False, 1.0), (True, 2.0)])
def test_learned_weights_stay_where_exact_ones_can_be(start_conditioned, clip):
    """No product of traces exceeds (λ c̄)^3, so no TD weight does; the paper's normalisation sees them all."""
    config = config_of(
        "marginalized", weights="fenchel", start_conditioned=start_conditioned, clip=clip, decay=1.0
    )
    state, batch = agent(config), batch_of(config)
    networks = (state.target_actor, state.target_critic)
    ahead = bootstrap(config, *networks, batch, jax.random.key(0))
    wild = jax.tree.map(lambda x: 19 * abs(x), state.estimator)
    arrays = (x[None] for x in (ahead.features, ahead.traces, ahead.traces))
    data = critic_targets.WeightData(one(batch), *arrays)
    plain = td_weights(config, wild, data, train=False)[0][0]
    raw = weight_network.predict(config, wild.weights, weight_network.inputs(config, ahead.features))
    assert raw.max() > 8
    np.testing.assert_array_equal(plain, np.where(batch.valid, np.clip(raw, 0, clip**3), 0))
    paper = dataclasses.replace(config, normalisation="power")
    raised = np.where(batch.valid, np.asarray(raw), 0) ** 0.1
    expected = raised / raised[np.asarray(batch.valid)].mean()
    normalised = td_weights(paper, wild, data, train=False)[0][0]
    np.testing.assert_allclose(normalised, expected, rtol=1e-4)


def strip(networks):
    """The estimator without its optimisers' integer counters, which cannot be differentiated."""
    return type(networks)(networks.weights, networks.critic, None, None)


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def poisoner(valid):
    return lambda x: jnp.where(valid.reshape(valid.shape + (1,) * (x.ndim - 2)), x, jnp.nan)


@pytest.mark.slow
def test_agents_side_by_side_learn_as_they_do_alone():
    """A vmapped block of updates, three of them so that a group is left over, equals the blocks one by one."""
    config = config_of("retrace")
    buffer = filled(transitions(5, 40), 31)
    keys = jax.random.split(jax.random.key(0), 2)
    agents = [init(config, **SIZES, key=key) for key in keys]

    def block(state, key):
        return td3.update_block(config, state, buffer, key, updates=3)

    together = jax.tree.map(lambda *x: jnp.stack(x), *agents)
    together, metrics = jax.jit(jax.vmap(block))(together, keys)
    assert metrics.critic_loss.shape == (2, 3)
    for i in range(2):
        alone, own = jax.jit(block)(agents[i], keys[i])
        for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(a, b[i], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(own.target_mean, metrics.target_mean[i], rtol=1e-4)


PAPER = {"weights": "saddle-point", "start_conditioned": False, "normalisation": "power"}


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        pytest.param({"operator": "marginalized"}, (4,), marks=pytest.mark.slow),
        ({"operator": "retrace"}, (1, 1, 1)),
        pytest.param({"operator": "retrace"}, (5, 5), marks=pytest.mark.slow),
        pytest.param({"operator": "marginalized"}, (3, 3), marks=pytest.mark.slow),
        pytest.param({"operator": "marginalized", **PAPER}, (4,), marks=pytest.mark.slow),
    ],
)
def test_blocks_equal_their_updates_one_by_one(settings, sizes):
    """Batches side by side change nothing, and the policy delay of 2 counts on from block to block."""
    config = config_of(**settings)
    buffer, state = filled(transitions(5, 40), 31), agent(config)
    blocks, done = state, 0
    for number, updates in enumerate(sizes):
        key = jax.random.key(number)
        blocks, metrics = update_block(config, blocks, buffer, key, updates=updates, done=done)
        for i, own in enumerate(jax.random.split(key, updates)):
            sample_key, noise_key = jax.random.split(own)
            batch = sample(buffer, sample_key, batch=64, length=config.length)
            done += 1
            state, single = update(config, state, batch, noise_key, delayed=done % 2 == 0)
            for name, value in vars(single).items():
                np.testing.assert_allclose(
                    getattr(metrics, name)[i], value, rtol=1e-3, atol=1e-5, err_msg=name
                )
    for a, b in zip(jax.tree.leaves(blocks), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_the_policy_delay_is_decided_once_for_all_agents():
    """Where blocks have no whole number of rounds, a vmapped block still has a conditional, not both of its branches."""
    config = config_of("retrace", policy_delay=3)
    buffer = filled(transitions(5, 40), 31)
    states = jax.vmap(lambda key: td3.init(config, **SIZES, key=key))(jax.random.split(jax.random.key(0), 2))

    def block(state, key, done):
        return td3.update_block(config, state, buffer, key, updates=2, done=done)

    mapped = jax.vmap(block, in_axes=(0, 0, None))
    text = str(jax.make_jaxpr(mapped)(states, jax.random.split(jax.random.key(1), 2), 4))
    assert " cond[" in text


def test_one_later_step_is_refused_where_it_would_be_biased():
    for settings in ({"normalisation": "power"}, {"normalisation": "mean"}, {"weights": "fenchel"}):
        with pytest.raises(ValueError, match="target_steps must be 'all' for"):
            config_of("marginalized", target_steps="one", **settings)
        assert not config_of("marginalized", **settings).samples_a_step
    assert config_of("marginalized").samples_a_step


def test_metrics_of_an_update_are_those_of_its_targets_and_values():
    """Two batches of three sequences with two steps, the last of which is padding; the second step was drawn with probability 1/2."""
    rng = np.random.default_rng(0)
    aim, values, credit = rng.normal(size=(2, 3)), rng.normal(size=(2, 3)), rng.uniform(size=(2, 2, 3))
    credit[0, 1, 2] = 0
    valid = np.ones((2, 2, 3), bool)
    valid[0, 1, 2] = False
    share = np.stack([np.ones((2, 3)), np.full((2, 3), 0.5)], axis=1)
    arrays = (aim, np.zeros((2, 3, 1)), credit, share, valid, np.array([0.1, 0.2]))
    round_of_two = critic_targets.CriticTarget(*map(jnp.asarray, arrays))
    found = update_metrics(round_of_two, jnp.array([1.0, 2.0]), jnp.asarray(values), jnp.asarray(3.0))
    expected = {
        "critic_loss": [1, 2],
        "q_mean": values.mean(axis=1),
        "q_size": abs(values).mean(axis=1),
        "target_mean": aim.mean(axis=1),
        "target_variance": aim.var(axis=1),
        "error_variance": (aim - values).var(axis=1),
        "trace_mean": [0.1, 0.2],
        "weight_mean": [credit[0, 1, :2].mean(), credit[1, 1].mean()],
        "weight_max": credit.max(axis=(1, 2)),
        "effective_length": (credit[:, 0] + 2 * credit[:, 1]).mean(axis=1),
        "weight_loss": [0, 3],
    }
    assert [field.name for field in dataclasses.fields(found)] == list(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, err_msg=name)
