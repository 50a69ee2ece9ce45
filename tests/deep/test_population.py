"""A population against a plain loop; workers, fusing, interruptions and failures change nothing they should not."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.deep import replay, td3
from marginax.deep.config import TD3Config
from marginax.deep.learner import METRICS, Learner, Plan, actor_vector
from marginax.deep.population import COLUMNS, Population, PopulationConfig
from marginax.simulators.policy import unpack
from marginax.simulators.rollout import Actor, AgentSpec, Transitions, evaluate, row_width

SMALL = {"hidden": (8,), "batch_size": 8, "update_every": 10, "update_after": 20, "random_steps": 30}
GROUPS = {
    "one-step": TD3Config(**SMALL),
    "marginalized": TD3Config(operator="marginalized", sequence_length=3, **SMALL),
}
CONFIG = PopulationConfig(
    simulator="Pendulum-v1", groups=GROUPS, seeds=(3, 4), steps=240, evaluate_every=80, episodes=1
)


def numbers(population):
    """All that should repeat exactly: everything but the seconds."""
    left_out = (0, COLUMNS.index("seconds"))
    return np.array(
        [[x for i, x in enumerate(r) if i not in left_out] for r in sorted(population.rows)], float
    )


def run(config=CONFIG, **options):
    population = Population(config, **options)
    try:
        population.run()
    finally:
        population.close()
    return population


@pytest.fixture(scope="module")
def plain():
    return run()


def test_equals_a_plain_loop_with_policies_one_block_old(plain):
    """One agent after the other, block by block: play with the parameters of two blocks ago, then td3.update_block."""
    for name, seed, agent in (("one-step", 4, 1), ("marginalized", 3, 2)):
        config, spec = GROUPS[name], AgentSpec("Pendulum-v1", seed, 0.1, 30)
        state = td3.init(config, observation_size=3, action_size=1, key=jax.random.key(seed))
        buffer, actor = replay.empty(240, 3, 1), Actor(spec)
        update = jax.jit(lambda s, b, k, c=config: td3.update_block(c, s, b, k, updates=10))
        vectors = [np.asarray(actor_vector(state.actor))] * 2
        for b in range(24):
            block = Transitions(np.zeros((10, row_width(3, 1)), np.float32), 3)
            actor.play(b, unpack(vectors[b], [3, 8, 1]), block)
            buffer = replay.add(buffer, jnp.asarray(block.rows))
            if (b + 1) * 10 >= 20:
                key = jax.random.fold_in(jax.random.key(seed), b)
                state, _ = update(state, buffer, key)
            vectors.append(np.asarray(actor_vector(state.actor)))
        np.testing.assert_allclose(plain._newest[agent], vectors[-1], atol=2e-4)
        row = next(r for r in plain.rows if r[:3] == (name, seed, 240))
        sample_key, noise_key = jax.random.split(jax.random.split(key, 10)[-1])
        batch = replay.sample(buffer, sample_key, batch=8, length=config.length)
        _, metrics = td3.update(config, state, batch, noise_key, delayed=True)  # on the last batch once more
        np.testing.assert_allclose(row[COLUMNS.index("critic_loss")], metrics.critic_loss, rtol=1e-2)
        _, retraced = td3.update(
            dataclasses.replace(config, operator="retrace"), state, batch, noise_key, delayed=False
        )
        if name == "marginalized":  # what Retrace's targets would have been on this batch
            rival = row[COLUMNS.index("error_variance_retrace")]
            np.testing.assert_allclose(rival, retraced.error_variance, rtol=1e-2)
        *_, returns = evaluate(spec, unpack(plain._newest[agent], [3, 8, 1]), 240, 1)
        assert row[COLUMNS.index("return")] == returns.mean()


def test_rows_are_complete(plain):
    assert sorted(r[:3] for r in plain.rows) == [
        (name, seed, step)
        for name in ("marginalized", "one-step")
        for seed in (3, 4)
        for step in (80, 160, 240)
    ]
    assert np.isfinite(numbers(plain)[:, 2]).all()
    assert plain.finished


def test_workers_change_nothing(plain):
    np.testing.assert_array_equal(numbers(plain), numbers(run(workers=2)))


def test_fusing_changes_no_curve(plain):
    np.testing.assert_allclose(numbers(plain), numbers(run(fuse=False)), rtol=1e-3, atol=1e-3)


def test_stopped_and_resumed_equals_left_alone(plain, tmp_path):
    """Stopped by its time limit again and again, with and without workers in between."""
    pieces = 0
    while pieces < 30:
        population = Population(CONFIG, workers=pieces % 2, folder=tmp_path)
        begun = population.block
        limit = 5.0 + population._time_to_save() - 5.0  # room for one block or a few
        population.run(deadline=time.monotonic() + limit)
        population.close()
        pieces += 1
        if population.finished:
            break
        assert population.block > begun
        assert len(list(tmp_path.glob("block-*"))) == 1
    assert pieces > 2
    np.testing.assert_array_equal(numbers(plain), numbers(population))


def test_checkpoint_of_another_population_is_refused(tmp_path):
    population = Population(CONFIG, folder=tmp_path)
    population.save()
    other = PopulationConfig(**{**CONFIG.__dict__, "seeds": (3, 5)})
    with pytest.raises(ValueError, match="another population \\(seeds differs\\)"):
        Population(other, folder=tmp_path)
    (next(tmp_path.glob("block-*")) / "arrays.npz").write_bytes(b"PK half a file")
    with pytest.raises(ValueError, match="damaged"):
        Population(CONFIG, folder=tmp_path)


def test_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    population = Population(CONFIG, folder=tmp_path)
    kept = population.save()
    population.block = 5

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        population.save()
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


def test_failed_agent_is_noted_and_others_go_on(plain):
    """An agent whose parameters turn to NaN is counted, keeps its last policy, and disturbs nobody."""
    population = Population(CONFIG)
    learner, agent = population.learners[0], 1
    original = learner.advance

    def poisoned(index, rows):
        if index == 10:
            agents = jax.tree.map(
                lambda x: x.at[agent].set(jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x,
                learner.state.agents,
            )
            learner.state = learner.state._replace(agents=agents)
        return original(index, rows)

    learner.advance = poisoned
    population.run()
    failed = {r[:3]: r[COLUMNS.index("failed_at")] for r in population.rows}
    assert failed["one-step", 4, 80] == -1
    assert failed["one-step", 4, 240] == 110
    assert np.isfinite(population._newest).all()
    others = [i for i, r in enumerate(sorted(population.rows)) if r[:2] != ("one-step", 4)]
    np.testing.assert_array_equal(numbers(population)[others], numbers(plain)[others])


def test_replay_ring_keeps_the_newest():
    """With a capacity below the steps, old transitions are overwritten block by block."""
    config = TD3Config(**{**SMALL, "update_after": 1000})
    learner = Learner(Plan((config,), 2, observation_size=3, action_size=1, capacity=30), seeds=(0, 1))
    for b in range(5):
        _, metrics = learner.advance(b, np.full((2, 10, 11), b, np.float32))
    assert np.isnan(np.asarray(metrics)).all()
    assert metrics.shape == (2, len(METRICS))
    found = np.asarray(learner.state.rows[0])[:, :, 0]
    np.testing.assert_array_equal(found, np.repeat([[3, 4, 2]], 2, axis=0).repeat(10, axis=1))
    assert int(learner.state.added) == 50


def test_bad_settings():
    with pytest.raises(ValueError, match="steps must be a multiple of update_every 10, got 15"):
        PopulationConfig(simulator="Pendulum-v1", groups=GROUPS, seeds=(0,), steps=15, evaluate_every=10)
    with pytest.raises(ValueError, match="seeds must be different"):
        PopulationConfig(simulator="Pendulum-v1", groups=GROUPS, seeds=(0, 0))
    with pytest.raises(ValueError, match="policy_delay must divide update_every 10, got 3"):
        Plan((TD3Config(**SMALL, policy_delay=3),), 1, 3, 1, 30)
    with pytest.raises(ValueError, match="capacity must be a multiple of update_every 10, got 35"):
        Plan((TD3Config(**SMALL),), 1, 3, 1, 35)
    with pytest.raises(ValueError, match="hidden must be the same"):
        Plan((TD3Config(**SMALL), TD3Config(**{**SMALL, "hidden": (4,)})), 1, 3, 1, 30)
