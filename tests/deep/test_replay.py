"""Sequences from the ring buffer against a brute-force walk over the list of transitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marginax.deep import replay
from reference.episodes import filled, sample, sequence, transitions


@pytest.mark.parametrize("count", [1, 7, 30, 31, 64, 150])
@pytest.mark.parametrize("length", [1, 4])
def test_sequences_are_those_of_a_brute_force_walk(count, length):
    capacity = 31
    stream = transitions(count, count)
    batch = sample(filled(stream, capacity), jax.random.key(count), batch=200, length=length)
    batch = jax.tree.map(np.asarray, batch)
    place = {tuple(step["observation"]): i for i, step in enumerate(stream)}
    for b in range(200):
        start = place[tuple(batch.observations[0, b])]
        assert start >= count - capacity
        expected = sequence(stream, start, length)
        np.testing.assert_array_equal(batch.valid[:, b], np.arange(length) < len(expected))
        for t, step in enumerate(expected):
            np.testing.assert_array_equal(batch.observations[t, b], step["observation"])
            np.testing.assert_array_equal(batch.actions[t, b], step["action"])
            np.testing.assert_array_equal(batch.next_observations[t, b], step["next_observation"])
            assert batch.rewards[t, b] == step["reward"]
            assert batch.log_behaviour[t, b] == step["log_behaviour"]
            assert batch.terminal[t, b] == step["terminal"]
            assert batch.truncated[t, b] == (t == len(expected) - 1 and not step["terminal"])


def test_every_stored_transition_is_an_equally_likely_start():
    stream = transitions(0, 50)
    batch = sample(filled(stream, 20), jax.random.key(0), batch=40_000, length=2)
    place = {float(step["reward"]): i for i, step in enumerate(stream)}
    starts = np.array([place[float(r)] for r in np.asarray(batch.rewards[0])])
    counts = np.bincount(starts, minlength=50)
    assert (counts[:30] == 0).all()
    chi_square = np.sum((counts[30:] - 2000) ** 2 / 2000)
    assert chi_square < 43.8  # the 99.9% point for 19 degrees of freedom


def test_what_lies_behind_an_episodes_end_or_the_write_head_is_never_called_valid():
    buffer = filled(transitions(3, 40), 16)
    poisoned = replay.Replay(buffer.rows.at[40 % 16].set(jnp.nan), buffer.added, 2)
    batch = sample(poisoned, jax.random.key(0), batch=500, length=6)
    oldest = np.isnan(np.asarray(batch.observations[0, :, 0]))
    assert oldest.any()
    later = np.asarray(batch.valid)[1:] & np.isnan(np.asarray(batch.rewards))[1:]
    assert not later.any()


def test_a_block_longer_than_the_buffer_is_refused():
    with pytest.raises(ValueError, match="5 transitions, more than the buffer's 4"):
        replay.add(replay.empty(4, 2, 1), np.zeros((5, 9), np.float32))
