"""The options of TD3, each against the formula it stands for."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from marginax.deep import replay, td3
from marginax.deep.config import TD3Config
from marginax.deep.networks import MLP, Scaler, actor_vector
from marginax.deep.policy import load_policy
from marginax.deep.population import Population
from marginax.deep.run_config import PopulationConfig
from marginax.simulators import make
from marginax.simulators.policy import act, unpack
from reference.episodes import filled, sample, transitions

SIZES = {"observation_size": 2, "action_size": 1}
SMALL = {"hidden": (8, 8), "batch_size": 16}
update = jax.jit(td3.update, static_argnames=("config", "delayed"))


def agent(config: TD3Config) -> td3.TD3State:
    return td3.init(config, **SIZES, key=jax.random.key(0))


def batch_of(config: TD3Config) -> replay.Sequences:
    return sample(filled(transitions(5, 40), 31), jax.random.key(2), batch=16, length=config.length)


def test_the_scaler_has_the_mean_and_deviation_of_everything_it_met():
    rows = np.random.default_rng(0).normal(3.0, [1.0, 20.0, 0.0], (70, 3)).astype(np.float32)
    scaler = Scaler.fresh(3)
    np.testing.assert_array_equal(scaler(jnp.asarray(rows)), rows)  # nothing seen: nothing scaled
    for part in np.split(rows, [1, 20, 45]):
        scaler = scaler.add(jnp.asarray(part))
    np.testing.assert_allclose(scaler.mean, rows.mean(0), rtol=1e-5)
    np.testing.assert_allclose(scaler.deviation[:2], rows.std(0)[:2], rtol=1e-5)
    assert scaler.deviation[2] == pytest.approx(0.01)  # a constant is not blown up


def test_the_policy_that_acts_needs_no_scaling():
    rows = np.random.default_rng(1).normal(5.0, 3.0, (50, 2)).astype(np.float32)
    config = TD3Config(scale_observations=True, **SMALL)
    block = replay.pack(rows, np.zeros((50, 1)), *(np.zeros(50) for _ in range(4)), rows)
    state = td3.observe(agent(config), jnp.asarray(block))
    layers = unpack(np.asarray(td3.policy(state)), [2, 8, 8, 1])
    expected = jnp.tanh(state.actor(jnp.asarray((rows - rows.mean(0)) / rows.std(0))))
    np.testing.assert_allclose(act(layers, rows), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"operator": "one-step"},
        {"operator": "retrace"},
        {"operator": "marginalized"},
        {"operator": "marginalized", "weights": "saddle-point"},
        {"operator": "marginalized", "weights": "paths"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_learning_with_scaled_observations_is_learning_from_a_scaled_batch(settings):
    plain = TD3Config(sequence_length=3, scale_observations=False, **settings, **SMALL)
    scaling = dataclasses.replace(plain, scale_observations=True)
    scaler = Scaler.fresh(2).add(jnp.array([[1.0, -2.0], [3.0, 5.0], [0.0, 1.0]]))
    batch, key = batch_of(plain), jax.random.key(1)
    scaled = dataclasses.replace(
        batch,
        observations=scaler(batch.observations),
        next_observations=scaler(batch.next_observations),
    )
    state = dataclasses.replace(agent(scaling), scaler=scaler)
    one, first = update(scaling, state, batch, key, delayed=True)
    other, second = update(plain, agent(plain), scaled, key, delayed=True)
    for name in ("actor", "critic", "estimator"):
        for a, b in zip(*(jax.tree.leaves(getattr(each, name)) for each in (one, other)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert float(first.critic_loss) == pytest.approx(float(second.critic_loss), rel=1e-4)


def test_layer_norm_scales_every_hidden_layer_before_its_relu():
    network = MLP(2, 1, (8, 8), key=jax.random.key(0), layer_norm=True)
    x = np.array([[0.3, -1.2], [2.0, 0.1]])
    for weight, bias in list(zip(network.weights, network.biases, strict=True))[:-1]:
        x = x @ np.asarray(weight) + np.asarray(bias)
        x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        x = np.maximum(x, 0)
    expected = x @ np.asarray(network.weights[-1]) + np.asarray(network.biases[-1])
    found = network(jnp.array([[0.3, -1.2], [2.0, 0.1]]))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    both = MLP(2, 1, (8, 8), key=jax.random.key(1), layer_norm=True, copies=2)  # as on an accelerator
    for i, values in enumerate(both(jnp.array([[0.3, -1.2], [2.0, 0.1]]))):
        one = jax.tree.map(lambda x, i=i: x[i], both)
        np.testing.assert_allclose(one(jnp.array([[0.3, -1.2], [2.0, 0.1]])), values, rtol=1e-5)
    critic = agent(TD3Config(layer_norm=True, **SMALL)).critic
    assert all(part.layer_norm for part in (critic if isinstance(critic, tuple) else (critic,)))


def test_a_small_last_layer_begins_with_small_actions():
    large, small = (agent(TD3Config(actor_scale=scale, **SMALL)).actor for scale in (1.0, 0.01))
    np.testing.assert_allclose(small.weights[-1], 0.01 * large.weights[-1], rtol=1e-6)
    np.testing.assert_allclose(small.biases[-1], 0.01 * large.biases[-1], rtol=1e-6)
    np.testing.assert_array_equal(small.weights[0], large.weights[0])


def test_the_penalty_is_the_mean_square_before_the_tanh():
    state, observations = agent(TD3Config(**SMALL)), batch_of(TD3Config(**SMALL)).observations[0]
    loss = partial(td3.actor_loss, state.actor, state.critic, observations)
    raw = np.asarray(state.actor(observations))
    assert float(loss(0.5) - loss()) == pytest.approx(0.5 * float((raw**2).mean()), rel=1e-4)


def test_the_actor_waits_and_then_moves():
    config = TD3Config(actor_after=2, **SMALL)
    state, batch = agent(config), batch_of(config)
    first = actor_vector(state.actor)
    moved = []
    for i in range(3):
        state, _ = update(config, state, batch, jax.random.key(i), delayed=True)
        moved.append(bool(jnp.any(actor_vector(state.actor) != first)))
    assert moved == [False, False, True]


@pytest.mark.parametrize(("given", "expected"), [(None, 1e-3), (2e-4, 2e-4)])
def test_the_actor_has_a_step_size_of_its_own(given, expected):
    # Adam's first step is its step size in every direction with a slope.
    config = TD3Config(learning_rate=1e-3, actor_learning_rate=given, **SMALL)
    state = agent(config)
    moved, _ = update(config, state, batch_of(config), jax.random.key(0), delayed=True)
    for name, size in (("actor", expected), ("critic", 1e-3)):
        steps = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)), getattr(moved, name), getattr(state, name))
        assert max(jax.tree.leaves(steps)) == pytest.approx(size, rel=1e-2)


def test_a_time_limit_counts_as_the_end_only_if_asked():
    rows = replay.pack(np.zeros((2, 1)), np.zeros((2, 1)), [1, 1], [0, 0], [0, 1], [0, 0], np.ones((2, 1)))
    buffer = replay.add(replay.empty(2, 1, 1), rows)
    for ends in (False, True):
        found = replay.sample(buffer, jax.random.key(0), batch=32, length=2, time_limits_end=ends)
        last = np.asarray(found.valid) & (np.cumsum(found.valid, 0) == np.sum(found.valid, 0))
        np.testing.assert_array_equal(found.terminal[last], ends)
        np.testing.assert_array_equal(found.truncated[last], not ends)


def test_a_simulator_with_time_tells_what_is_left_and_resumes_exactly():
    simulator, plain = make("Pendulum-v1+time", 3), make("Pendulum-v1", 3)
    assert simulator.observation_size == plain.observation_size + 1
    observation, other = simulator.reset(), plain.reset()
    for t in range(5):
        np.testing.assert_array_equal(observation, [*other, np.float32(1 - t / 200)])
        (observation, *rest), (other, *expected) = (
            simulator.step(np.full(1, 0.5)),
            plain.step(np.full(1, 0.5)),
        )
        assert rest == expected
    again = make("Pendulum-v1+time", 4)
    again.set_state(simulator.get_state())
    np.testing.assert_array_equal(again.step(np.ones(1))[0], simulator.step(np.ones(1))[0])


def test_all_agents_of_a_population_see_the_time_or_none():
    groups = {"a": TD3Config(**SMALL), "b": TD3Config(time_feature=True, **SMALL)}
    with pytest.raises(ValueError, match="time_feature must be the same"):
        PopulationConfig(simulator="Pendulum-v1", groups=groups, steps=100)
    alone = PopulationConfig(simulator="Pendulum-v1", groups={"b": groups["b"]}, steps=100)
    assert alone.played == "Pendulum-v1+time"
    assert dataclasses.replace(alone, simulator="Pendulum-v1+time").played == "Pendulum-v1+time"


def test_a_run_with_every_option_resumes_exactly_and_its_policy_plays(tmp_path):
    every = {"scale_observations": True, "time_feature": True, "layer_norm": True, "actor_after": 60}
    every |= {"saturation_penalty": 0.01, "time_limits_end": True, "actor_scale": 0.1}
    config = TD3Config(operator="marginalized", hidden=(8,), batch_size=8, update_after=50, **every)
    whole = PopulationConfig(
        simulator="Pendulum-v1", groups={"a": config}, seeds=(0, 1), steps=300, episodes=1, evaluate_every=100
    )
    ends = {"straight": (10**9,), "stopped": (100, 250, 10**9)}
    found = {}
    for name, stops in ends.items():
        for stop in stops:
            with Population(whole, folder=tmp_path / name) as population:
                population.run(stop=lambda stop=stop, p=population: p.step >= stop)
        scaler = population.learners[0].state.agents.scaler
        found[name] = ([line["return"] for line in population.lines], np.asarray(scaler.mean).tolist())
        np.testing.assert_array_equal(scaler.count, 300)  # each of the two agents has met its own steps
    assert found["straight"] == found["stopped"]
    policy = load_policy(tmp_path / "straight")
    world = make(policy.simulator, 0)
    assert policy(world.reset()).shape == (1,)


def test_runs_from_before_an_option_was_there_go_on(tmp_path):
    before = TD3Config.preset("spinning-up", **SMALL)
    config = PopulationConfig(simulator="Pendulum-v1", groups={"a": before}, steps=100)
    earlier = config.to_json()
    new = ("time_limits_end", "layer_norm", "scale_observations", "saturation_penalty", "actor_learning_rate")
    for name in new:
        del earlier["groups"]["a"][name]
    config.require_same(earlier, tmp_path)
    changed = dataclasses.replace(config, groups={"a": dataclasses.replace(before, layer_norm=True)})
    with pytest.raises(ValueError, match="holds a run with layer_norm = False, not True"):
        changed.require_same(earlier, tmp_path)


@pytest.fixture
def as_users_have_it(monkeypatch):
    """Without the run-time type check of the tests, which refuses what users may pass."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_lists_and_numbers_of_numpy_are_taken_as_pythons_own(as_users_have_it, tmp_path):
    plain = TD3Config(hidden=(8, 4), batch_size=16, act_noise=0.25, layer_norm=True)
    given = {"hidden": [8, np.int64(4)], "batch_size": jnp.int32(16), "act_noise": np.float32(0.25)}
    agent = TD3Config(**given, layer_norm=np.bool_(True))
    assert agent == plain and hash(agent) == hash(plain)
    sizes = {"seeds": np.arange(2), "steps": np.int64(100), "episodes": 2.0}
    config = PopulationConfig(simulator="Pendulum-v1", groups={"a": agent}, **sizes)
    stored = json.loads(json.dumps(config.to_json()))
    assert (stored["seeds"], stored["steps"], stored["groups"]["a"]["hidden"]) == ([0, 1], 100, [8, 4])
    config.require_same(stored, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("batch_size", 1.5, "batch_size must be a whole number, got 1.5"),
        ("hidden", 64, "hidden must be a list of whole numbers, got 64"),
        ("hidden", b"@", "hidden must be a list of whole numbers, got b'@'"),
        ("learning_rate", "fast", "learning_rate must be a number, got 'fast'"),
        ("layer_norm", "no", "layer_norm must be True or False, got 'no'"),
        ("actor_scale", 0.0, "actor_scale must be above 0"),
        ("saturation_penalty", -1.0, "saturation_penalty must be at least 0"),
        ("actor_after", -1, "actor_after must be at least 0"),
        ("actor_learning_rate", 0.0, "actor_learning_rate must be above 0"),
    ],
)
def test_bad_options_are_named(as_users_have_it, name, value, message):
    with pytest.raises(ValueError, match=message):
        TD3Config(**{name: value})


def test_what_is_no_population_is_refused(as_users_have_it):
    with pytest.raises(ValueError, match="simulator must be a name, got None"):
        PopulationConfig(simulator=None, groups={"a": TD3Config()})
    for groups in (TD3Config(), [TD3Config()], {"a": 1}, {1: TD3Config()}):
        with pytest.raises(ValueError, match="groups must map labels to settings of agents, got "):
            PopulationConfig(simulator="Pendulum-v1", groups=groups)


def test_presets_are_settings_by_name():
    assert TD3Config.preset("default") == TD3Config()
    assert TD3Config().scale_observations and TD3Config().saturation_penalty > 0
    spinning_up = TD3Config.preset("spinning-up")
    # From Spinning Up's documentation of td3_pytorch.
    published = {"discount": 0.99, "polyak": 0.995, "learning_rate": 1e-3, "batch_size": 100}
    published |= {"update_after": 1000, "update_every": 50, "act_noise": 0.1, "target_noise": 0.2}
    published |= {"noise_clip": 0.5, "policy_delay": 2, "replay_size": 1_000_000, "hidden": (256, 256)}
    assert {name: getattr(spinning_up, name) for name in published} == published
    assert not (spinning_up.scale_observations or spinning_up.layer_norm or spinning_up.saturation_penalty)
    paper = TD3Config.preset("paper")
    assert paper.operator == "marginalized"
    # Appendix: batches of 100, Adam at 1e-3, 1e-4 for the weights, λ = 0.7, T = 0.1, networks of [x, a].
    found = (paper.batch_size, paper.learning_rate, paper.weight_learning_rate, paper.decay)
    assert found == (100, 1e-3, 1e-4, 0.7)
    assert (paper.normalisation, paper.normalisation_power, paper.start_conditioned) == ("power", 0.1, False)
    assert (paper.weights, paper.weight_critic_penalty) == ("saddle-point", 0.0)
    with pytest.raises(ValueError, match="preset must be one of default, spinning-up, paper, got 'tonic'"):
        TD3Config.preset("tonic")
