"""A population against a plain loop; workers, fusing, interruptions and failures change nothing they should not."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.deep import checkpoint, replay, td3
from marginax.deep.config import TD3Config
from marginax.deep.curves import curves_of
from marginax.deep.discrete_config import ActorCriticConfig, QConfig
from marginax.deep.display import Display
from marginax.deep.learner import AGENTS, Learner, Plan
from marginax.deep.metrics import read_metrics
from marginax.deep.population import Population
from marginax.deep.run_config import PopulationConfig
from marginax.simulators.policy import unpack
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, evaluate, row_width

SMALL = {"hidden": (8,), "batch_size": 8, "update_every": 10, "update_after": 20, "random_steps": 30}
SMALL |= {"replay_size": 80}  # so that runs of other lengths share a program
GROUPS = {
    "one-step": TD3Config(**SMALL),
    "marginalized": TD3Config(operator="marginalized", sequence_length=3, **SMALL),
}
CONFIG = PopulationConfig(
    simulator="Pendulum-v1",
    groups=GROUPS,
    seeds=(3, 4),
    steps=240,
    evaluate_every=80,
    episodes=1,
    overlap=True,
)


def run(config=CONFIG, **options) -> Population:
    with Population(config, **options) as population:
        population.run()
    return population


def numbers(population: Population) -> dict:
    """All numbers of the metrics, by agent and step."""
    return {
        (line["operator"], line["seed"], line["step"]): [
            np.nan if value is None else value
            for name, value in line.items()
            if name not in ("operator", "seed", "step", "returns")
        ]
        for line in population.lines
    }


def assert_close(one: Population, other: Population, **tolerance) -> None:
    first, second = numbers(one), numbers(other)
    assert first.keys() == second.keys()
    for key in first:
        np.testing.assert_allclose(first[key], second[key], err_msg=str(key), **tolerance)


@pytest.fixture(scope="module")
def plain():
    return run()


@pytest.mark.long
def test_equals_a_plain_loop_with_policies_one_block_old(plain):
    """One agent after the other, block by block: play with the parameters of two blocks ago, then td3.update_block."""
    for name, seed, agent in (("one-step", 4, 1), ("marginalized", 3, 2)):
        config = GROUPS[name]
        spec = AgentSpec("Pendulum-v1", seed, config.act_noise, 30)
        state = td3.init(config, observation_size=3, action_size=1, key=jax.random.key(seed))
        buffer, actor = replay.empty(80, 3, 1), Actor(spec)
        update = jax.jit(lambda s, b, k, c=config: td3.update_block(c, s, b, k, updates=10))
        vectors, measured = [np.asarray(td3.policy(state))] * 2, []
        for b in range(24):
            block = Transitions(np.zeros((10, row_width(3, 1)), np.float32), 3)
            actor.play(b, unpack(vectors[b], [3, 8, 1]), block)
            rows = jnp.asarray(block.rows)
            buffer, state = replay.add(buffer, rows), td3.observe(state, rows)
            if (b + 1) * 10 >= 20:
                key = jax.random.fold_in(jax.random.key(seed), b)
                state, _ = update(state, buffer, key)
                if b >= 16:  # since the evaluation at step 160
                    sample_key, noise_key = jax.random.split(jax.random.split(key, 10)[-1])
                    batch = replay.sample(buffer, sample_key, batch=8, length=config.length)
                    _, metrics = td3.update(config, state, batch, noise_key, delayed=True)
                    rival = dataclasses.replace(config, operator="retrace")
                    _, retraced = td3.update(rival, state, batch, noise_key, delayed=False)
                    measured.append((metrics.critic_loss, retraced.error_variance))
            vectors.append(np.asarray(td3.policy(state)))
        np.testing.assert_allclose(plain.newest[agent], vectors[-1], atol=2e-4)
        line = next(x for x in plain.lines if (x["operator"], x["seed"], x["step"]) == (name, seed, 240))
        loss, variance = np.mean(measured, axis=0)
        np.testing.assert_allclose(line["critic_loss"], loss, rtol=1e-2)
        if name == "marginalized":  # what Retrace's targets would have been on these batches
            np.testing.assert_allclose(line["error_variance_retrace"], variance, rtol=1e-2)
        *_, returns = evaluate(spec, unpack(plain.newest[agent], [3, 8, 1]), 240, 1)
        assert line["return"] == returns.mean()


@pytest.mark.long
def test_lines_are_complete(plain):
    assert list(numbers(plain)) == [
        (name, seed, step)
        for step in (80, 160, 240)
        for name in ("one-step", "marginalized")
        for seed in (3, 4)
    ]
    assert plain.finished


@pytest.mark.slow
def test_workers_change_nothing(plain):
    assert_close(plain, run(workers=2), rtol=0)


@pytest.mark.long
def test_groups_apart_learn_as_they_do_together(plain):
    for label in GROUPS:
        alone = run(dataclasses.replace(CONFIG, groups={label: GROUPS[label]}))
        together = {key: value for key, value in numbers(plain).items() if key[0] == label}
        for key, value in numbers(alone).items():
            np.testing.assert_allclose(value, together[key], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("overlap", [True, False])
def test_stopped_and_resumed_equals_left_alone(plain, overlap, tmp_path):
    """Stopped after every few blocks, with and without a worker in between."""
    config = dataclasses.replace(CONFIG, overlap=overlap)
    whole = plain if overlap else run(config)
    for piece in range(30):
        with Population(config, workers=piece % 2 if piece < 2 else 0, folder=tmp_path) as population:
            begun = population.step
            population.run(stop=lambda p=population, b=begun: p.step >= b + 50)
        if population.finished:
            break
        assert population.step == begun + 50
    assert piece == 4
    assert_close(whole, population, rtol=0)


DISCRETE = {
    "q-learning": QConfig(operator="marginalized", sequence_length=3, environments=2, **SMALL),
    "actor-critic": ActorCriticConfig(operator="marginalized", sequence_length=5, environments=2, **SMALL),
}


@pytest.mark.slow
@pytest.mark.parametrize("simulator", ["CartPole-v1", "gymnax/CartPole-v1"])
@pytest.mark.parametrize("agent", DISCRETE)
def test_a_stopped_agent_for_discrete_actions_ends_as_one_that_was_not(agent, simulator, tmp_path):
    settings = {"groups": {agent: DISCRETE[agent]}, "steps": 160, "evaluate_every": 80, "episodes": 1}
    config = PopulationConfig(simulator=simulator, **settings)
    whole = run(config)
    with Population(config, folder=tmp_path) as first:
        first.run(stop=lambda: first.step >= 80)
    assert 80 <= first.step < 160
    second = run(config, folder=tmp_path)
    assert second.lines == whole.lines
    np.testing.assert_array_equal(second.newest, whole.newest)


@pytest.mark.long
def test_returns_of_training_belong_to_the_block_they_ended_in(tmp_path):
    """With overlap too, and whenever a checkpoint is written: Pendulum's episodes end every 200 steps."""
    agent = TD3Config(**{**SMALL, "update_every": 50, "update_after": 5000})
    config = dataclasses.replace(CONFIG, groups={"a": agent}, seeds=(0,), steps=800, evaluate_every=50)
    whole = run(config)
    assert [x["step"] for x in whole.lines if x["train_return"] is not None] == [200, 400, 600, 800]
    population = None
    while population is None or not population.finished:
        with Population(config, folder=tmp_path) as population:
            population.run(stop=lambda p=population: p.step % 150 == 0)
    assert population.lines == whole.lines


@pytest.mark.slow
def test_returns_of_training_are_known_where_all_stays_on_the_accelerator():
    """CartPole pays 1 a step, and uniform actions keep the pole up for 22 steps on average."""
    agent = dataclasses.replace(DISCRETE["q-learning"], random_steps=4000)
    settings = {"groups": {"a": agent}, "steps": 4000, "evaluate_every": 2000, "episodes": 1}
    lines = run(PopulationConfig(simulator="gymnax/CartPole-v1", **settings)).lines
    assert [line["train_return"] for line in lines] == pytest.approx([22.0, 22.0], abs=5.0)


def test_what_is_no_number_is_null_in_the_metrics(tmp_path, capsys):
    """The evaluation earns NaN, no episode of training has ended, and nothing was learned."""
    agent = TD3Config(**{**SMALL, "update_after": 5000})
    config = dataclasses.replace(CONFIG, groups={"a": agent}, seeds=(0, 1), steps=80)
    with Population(config, folder=tmp_path) as population:
        collect = population.pool.evaluations

        def poisoned(**options):
            found = collect(**options)
            return [each._replace(returns=each.returns * [np.nan, 1][each.agent]) for each in found]

        population.pool.evaluations = poisoned
        population.run()
    first, second = read_metrics(tmp_path)
    unknown = dict.fromkeys(population.names) | {"return": None, "train_return": None}
    assert first == {"operator": "a", "seed": 0, "step": 80, "returns": [None], "failed_at": None, **unknown}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    curve = curves_of("task", [first, second])["a"]
    np.testing.assert_array_equal(curve.returns, [[np.nan], [second["return"]]])
    Display("title", 80, ["agents"]).listen("agents", {"step": 80, "lines": [first, second]})
    assert f"return a {second['return']:.2f}\n" in capsys.readouterr().out


@pytest.mark.long
def test_a_longer_run_carries_on(plain, tmp_path):
    short = dataclasses.replace(CONFIG, steps=160)
    run(short, folder=tmp_path)
    assert_close(plain, run(folder=tmp_path), rtol=0)


def test_a_run_that_ended_without_its_replay_buffer_says_so(tmp_path):
    with Population(dataclasses.replace(CONFIG, steps=80), folder=tmp_path) as population:
        population.run(keep_replay=False)
    with pytest.raises(ValueError, match="ended at step 80 without its replay buffers"):
        Population(CONFIG, folder=tmp_path)


def test_checkpoint_of_another_population_is_refused(tmp_path):
    Population(CONFIG, folder=tmp_path).close()
    with pytest.raises(ValueError, match=r"holds a run with seeds = \[3, 4\], not \[3, 5\]"):
        Population(dataclasses.replace(CONFIG, seeds=(3, 5)), folder=tmp_path)


@pytest.mark.parametrize("damage", ["shortened", "changed", "missing"])
def test_metrics_that_were_damaged_are_named(damage, tmp_path):
    with Population(CONFIG, folder=tmp_path) as population:
        population.run(stop=lambda: population.step >= 100)
    path = tmp_path / "metrics.jsonl"
    content = path.read_bytes()
    if damage == "shortened":
        path.write_bytes(content[:-5])
    elif damage == "changed":
        path.write_bytes(content.replace(b"one-step", b"two-step", 1))
    else:
        path.unlink()
    with pytest.raises(ValueError, match=f"metrics.jsonl' is .*{damage}"):
        Population(CONFIG, folder=tmp_path)


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    with Population(CONFIG, folder=tmp_path) as population:
        population.run(stop=lambda: population.step >= 100)
        kept = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
        population.step = 110

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(checkpoint, "save_arrays", full)
        with pytest.raises(OSError, match="the disk is full; the last good checkpoint is kept"):
            population.save()
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == kept


def test_failed_agent_is_noted_and_others_go_on(plain):
    """An agent whose parameters turn to NaN is counted, keeps its last policy, and disturbs nobody."""
    with Population(CONFIG) as population:
        learner = population.learners[0]
        original = learner.advance

        def poisoned(index, rows):
            if index == 10:
                agents = jax.tree.map(
                    lambda x: x.at[1].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                    learner.state.agents,
                )
                learner.state = learner.state._replace(agents=agents)
            return original(index, rows)

        learner.advance = poisoned
        population.run()
    failed = {(x["operator"], x["seed"], x["step"]): x["failed_at"] for x in population.lines}
    assert failed["one-step", 4, 80] is None
    assert failed["one-step", 4, 240] == 110
    reason = "the policy's parameters were no longer finite at step 110"
    assert population.failures == {1: {"step": 110, "reason": reason}}
    assert np.isfinite(population.newest).all()
    for key, value in numbers(plain).items():
        if key[:2] != ("one-step", 4):
            np.testing.assert_array_equal(numbers(population)[key], value)


def settings_read(config, function) -> set[str]:
    """Names of the settings that a function reads."""
    names, known = set(), {field.name for field in dataclasses.fields(config)}

    class Recorded(type(config)):
        def __getattribute__(self, name):
            names.add(name)
            return super().__getattribute__(name)

    recorded = Recorded(**{name: getattr(config, name) for name in known})
    names.clear()
    function(recorded)
    return names & known


@pytest.mark.parametrize("kind", AGENTS, ids=lambda kind: kind.kind)
def test_what_all_groups_of_a_program_learn_with_is_shared_by_them(kind):
    module, config = AGENTS[kind], kind(hidden=(4,))
    discrete = {"observation_shape": (2,), "num_actions": 3}
    sizes = discrete if config.discrete else {"observation_size": 2, "action_size": 3}
    state = jax.eval_shape(lambda: module.init(config, **sizes, key=jax.random.key(0)))
    lead = (config.sequence_length, 6, 3) if kind is ActorCriticConfig else (6,)
    batch = (np.zeros((*lead[:2], 5), np.float32), np.zeros(lead, np.float32))

    def learn(config):
        jax.eval_shape(partial(module.learn, config, delayed=True), state, *batch)
        return module.delayed_rounds(config, config.updates, 0), config.update_after

    shared = settings_read(config, lambda config: [getattr(config, name) for name in module.SHARED])
    assert settings_read(config, learn) <= shared


def test_groups_that_cannot_share_a_program_get_programs_of_their_own():
    """Sequences of other lengths, of which the actor-critic learns every step, do not fit into one array."""
    agent = DISCRETE["actor-critic"]
    groups = {"a": agent, "b": dataclasses.replace(agent, sequence_length=4)}
    with Population(PopulationConfig(simulator="CartPole-v1", groups=groups, steps=100)) as population:
        assert [len(x.plan.configs) for x in population.learners] == [1, 1]


@pytest.mark.long
def test_settings_of_each_group_count():
    """Replay size, discount and the bound of divergence are a group's own; other programs get learners of their own."""
    groups = {
        "a": TD3Config(**{**SMALL, "replay_size": 100}, divergence_factor=1e-6),
        "b": TD3Config(**SMALL, discount=0.5),
        "c": TD3Config(**SMALL, learning_rate=1e-4),
    }
    population = run(dataclasses.replace(CONFIG, groups=groups, seeds=(0,)))
    assert [len(x.plan.configs) for x in population.learners] == [2, 1]
    assert population.learners[0].plan.capacities == (100, 80)
    assert list(population.failures) == [0]
    assert "the mean of |Q| reached" in population.failures[0]["reason"]


@pytest.mark.long
def test_replay_ring_keeps_the_newest():
    """With a capacity below the steps, old transitions are overwritten block by block."""
    config = TD3Config(**{**SMALL, "update_after": 1000})
    learner = Learner(Plan((config,), 2, observation_size=3, action_size=1, capacities=(30,)), seeds=(0, 1))
    for b in range(5):
        _, metrics = learner.advance(b, np.full((2, 10, 11), b, np.float32))
    assert np.isnan(np.asarray(metrics)).all()
    assert metrics.shape == (2, len(td3.METRICS))
    found = np.asarray(learner.state.rows[0])[:, :, 0]
    np.testing.assert_array_equal(found, np.repeat([[3, 4, 2]], 2, axis=0).repeat(10, axis=1))
    assert int(learner.state.added) == 50


@pytest.mark.long
def test_a_delay_that_does_not_divide_the_block_counts_on():
    """Blocks of 3 updates with a policy delay of 2, against updates one by one."""
    config = TD3Config(hidden=(8,), batch_size=8, update_every=3, update_after=6, policy_delay=2)
    plan = Plan((config,), 1, observation_size=3, action_size=1, capacities=(30,))
    learner, rows = Learner(plan, seeds=(0,)), np.random.default_rng(0).normal(size=(5, 1, 3, 11))
    rows[..., 5:7] = 0
    state = td3.init(config, observation_size=3, action_size=1, key=jax.random.key(0))
    buffer, count = replay.empty(30, 3, 1), 0
    for b, block in enumerate(rows.astype(np.float32)):
        vector, _ = learner.advance(b, block)
        buffer, state = replay.add(buffer, block[0]), td3.observe(state, jnp.asarray(block[0]))
        if b >= 1:
            key = jax.random.fold_in(jax.random.key(0), b)
            for own in jax.random.split(key, 3):
                sample_key, noise_key = jax.random.split(own)
                batch = replay.sample(buffer, sample_key, batch=8, length=1)
                count += 1
                state, _ = td3.update(config, state, batch, noise_key, delayed=count % 2 == 0)
        np.testing.assert_allclose(vector[0], td3.policy(state), atol=1e-5)


def test_bad_settings():
    with pytest.raises(ValueError, match="steps must be a positive multiple of update_every 10, got 15"):
        PopulationConfig(simulator="Pendulum-v1", groups=GROUPS, steps=15, evaluate_every=10)
    with pytest.raises(ValueError, match=r"evaluate_every must be a positive multiple .* got 0"):
        PopulationConfig(simulator="Pendulum-v1", groups=GROUPS, steps=20, evaluate_every=0)
    with pytest.raises(ValueError, match="seeds must be different"):
        PopulationConfig(simulator="Pendulum-v1", groups=GROUPS, seeds=(0, 0))
    with pytest.raises(ValueError, match="capacity must be a multiple of update_every 10, got 35"):
        Plan((TD3Config(**SMALL),), 1, 3, 1, (35,))
    with pytest.raises(ValueError, match="hidden must be the same"):
        PopulationConfig(
            simulator="Pendulum-v1",
            groups={"a": TD3Config(**SMALL), "b": TD3Config(**{**SMALL, "hidden": (4,)})},
        )
    games = {str(n): QConfig(filters=n) for n in (4, 8)}
    with pytest.raises(ValueError, match="filters must be the same"):
        PopulationConfig(simulator="gymnax/Breakout-MinAtar", groups=games)
    with pytest.raises(ValueError, match="groups must differ in names of files, but 'λ = 1' and 'ε = 1' are"):
        PopulationConfig(simulator="CartPole-v1", groups={"λ = 1": QConfig(), "ε = 1": QConfig()})
