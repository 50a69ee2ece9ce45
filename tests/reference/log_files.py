"""A log in many Parquet files."""

import numpy as np


def write_log(folder, log, parts, order=None):
    """Writes rows of a log to `parts` files, cut anywhere: also in the middle of an episode."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    episode = np.repeat(np.arange(log.num_episodes), log.lengths)
    table = {
        "episode": episode,
        "step": log.times,
        "state": log.states,
        "action": log.actions,
        "reward": log.rewards,
        "next_state": np.where(log.terminal, 0, log.next_states),
        "terminal": log.terminal,
        "behaviour": log.behaviour,
    }
    rows = np.arange(len(log)) if order is None else order
    folder.mkdir()
    for k, share in enumerate(np.array_split(rows, parts)):
        pq.write_table(
            pa.table({name: column[share] for name, column in table.items()}), folder / f"{k:03}.parquet"
        )


def same_answers(one, other):
    """Values to 1e-9, intervals to 1e-6, and everything else that is said."""
    assert one.answers.keys() == other.answers.keys() and one.answers
    for name, mine in one.answers.items():
        theirs = other.answers[name]
        np.testing.assert_allclose(mine.value, theirs.value, rtol=1e-9, atol=1e-9, err_msg=name)
        for end in ("low", "high"):
            low_or_high = getattr(mine.interval, end), getattr(theirs.interval, end)
            np.testing.assert_allclose(*low_or_high, rtol=1e-6, atol=1e-6, err_msg=name)
    assert one.verdict == other.verdict or one.verdict.word == other.verdict.word
