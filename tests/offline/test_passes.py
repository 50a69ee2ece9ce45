"""Passes over a log in many files: any partition gives the numbers of one pass after another."""

import numpy as np
import pytest

from marginax.engine.local import Local
from marginax.offline import evaluate
from marginax.offline.passes import _groups, _scattered
from reference.log_files import same_answers, write_log
from reference.offline_logs import GAMMA, garnet_log

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")


class Spread(Local):
    """Objects as on a cluster, in this process."""

    remote = True

    def __init__(self, places):
        super().__init__(1)
        self.places = places


@pytest.fixture(scope="module")
def log():
    return garnet_log(3, episodes=1500)


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 3, 40])
def test_any_partition_gives_the_same_answers(log, tmp_path, places):
    _, pi, _, rows = log
    write_log(tmp_path / "log", rows, parts=20)
    alone = evaluate(tmp_path / "log", pi, discount=GAMMA)
    same_answers(evaluate(tmp_path / "log", pi, discount=GAMMA, engine=Spread(places)), alone)


def test_probabilities_of_rows_follow_their_rows_on_any_file_system(log, tmp_path):
    pytest.importorskip("fsspec")
    _, pi, _, rows = log
    write_log(tmp_path / "log", rows, parts=5)
    chosen = pi[rows.states]
    given = {"discount": GAMMA, "policy_kind": "rows", "estimators": ["per-decision-is", "weighted-is"]}
    alone = evaluate(tmp_path / "log", chosen, **given)
    elsewhere = f"dir://log::file://{tmp_path}"
    same_answers(evaluate(elsewhere, chosen, engine=Spread(3), **given), alone)


def test_what_cannot_be_spread_is_refused(log, tmp_path):
    _, pi, _, rows = log
    with pytest.raises(ValueError, match="the engine 'ray' evaluates logs in Parquet or CSV files"):
        evaluate(rows, pi, discount=GAMMA, engine=Spread(2))


def test_files_are_cut_only_where_an_episode_ends():
    ids = [np.array(part) for part in ([0, 1], [1], [1, 2], [3], [4, 5])]
    rows = [10, 10, 10, 10, 10]
    assert _groups(ids, rows, 5) == [[0, 1, 2], [3], [4]]
    assert _groups(ids, rows, 2) == [[0, 1, 2], [3, 4]]
    assert _groups(ids, rows, 1) == [[0, 1, 2, 3, 4]]
    assert not _scattered(ids)
    assert _scattered([np.array([0, 1]), np.array([2]), np.array([1])])
    assert _scattered([np.array([0, 1, 0])])


def test_a_share_without_a_step_that_can_be_used_adds_nothing(tmp_path):
    """Its episodes have one step, are truncated and come without their final observation."""
    columns = {"state": [0] * 40, "action": [0, 1] * 20, "reward": [0.0, 1.0] * 20}
    columns["behaviour"] = [0.5] * 40
    for k, terminal in enumerate((True, False)):
        table = {"episode": np.arange(40) + 40 * k, "terminal": [terminal] * 40} | columns
        pq.write_table(pa.table(table), tmp_path / f"{k}.parquet")
    names = ["per-decision-is", "certainty-equivalence", "fqe-retrace"]
    alone, spread = (
        evaluate(tmp_path, [[0.3, 0.7]], discount=GAMMA, estimators=names, engine=engine)
        for engine in ("local", Spread(2))
    )
    assert alone.diagnostics["episodes"] == 40
    same_answers(spread, alone)
