"""Reading logs: every format gives the same log, and each way of being broken its own sentence."""

import sys

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from marginax.offline import Log, evaluate, load_policy, open_data
from marginax.offline.sources import check_encoding

EPISODES = [
    {"states": [0, 1, 2], "actions": [0, 1, 1], "rewards": [0.0, 1.0, -1.0], "terminal": True},
    {"states": [1, 0, 2], "actions": [1, 0], "rewards": [0.5, 0.25], "terminal": False},
    {"states": [2, 2], "actions": [0], "rewards": [3.0], "terminal": True},
]
BEHAVIOUR = [[0.5, 0.25, 1.0], [0.75, 0.5], [0.5]]


def log():
    return Log.from_episodes([dict(e, behaviour=b) for e, b in zip(EPISODES, BEHAVIOUR, strict=True)])


def columns(**changes):
    """The three episodes as columns, the truncated one with its final observation as an extra row."""
    table = {
        "episode": [0, 0, 0, 1, 1, 1, 2],
        "step": [0, 1, 2, 0, 1, 2, 0],
        "state": [0, 1, 2, 1, 0, 2, 2],
        "action": [0, 1, 1, 1, 0, None, 0],
        "reward": [0.0, 1.0, -1.0, 0.5, 0.25, None, 3.0],
        "terminal": [False, False, True, False, False, None, True],
        "truncated": [False, False, False, False, True, None, False],
        "behaviour": [0.5, 0.25, 1.0, 0.75, 0.5, None, 0.5],
    }
    table.update(changes)
    return {k: v for k, v in table.items() if v is not None}


def write(tmp_path, table, kind="parquet"):
    path = tmp_path / f"log.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table(table), path)
    else:
        csv.write_csv(pa.table(table), path)
    return path


def same(a, b):
    for name in ("states", "actions", "rewards", "terminal", "offsets", "behaviour"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    goes_on = ~a.terminal
    np.testing.assert_array_equal(a.next_states[goes_on], b.next_states[goes_on])


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_table_files_give_the_log(tmp_path, kind):
    same(open_data(write(tmp_path, columns(), kind)).read(), log())


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_next_state_column_instead_of_an_extra_row(tmp_path, kind):
    keep = [0, 1, 2, 3, 4, 6]
    table = {k: [v[i] for i in keep] for k, v in columns().items()}
    table["next_state"] = [1, 2, 0, 0, 2, 0]
    same(open_data(write(tmp_path, table, kind)).read(), log())


def test_a_truncated_episode_without_its_last_observation_loses_a_step(tmp_path):
    keep = [0, 1, 2, 3, 4, 6]
    source = open_data(write(tmp_path, {k: [v[i] for i in keep] for k, v in columns().items()}))
    found = source.read()
    assert found.lengths.tolist() == [3, 1, 1]
    assert found.rows.tolist() == [0, 1, 2, 3, 5]
    assert "last step was set aside" in source.notes[0]
    lists = [dict(e, states=e["states"][:2]) if i == 1 else e for i, e in enumerate(EPISODES)]
    assert Log.from_episodes(lists).lengths.tolist() == [3, 1, 1]


def test_steps_may_count_from_one_and_columns_have_other_names(tmp_path):
    table = columns(step=[1, 2, 3, 1, 2, 3, 1])
    table["terminated"], table["propensity"] = table.pop("terminal"), table.pop("behaviour")
    same(open_data(write(tmp_path, table)).read(), log())


def test_labels_of_a_csv_with_a_last_row_that_has_only_a_state(tmp_path):
    names = {"state": "abc", "action": ["go", "stop"]}
    table = {
        k: [None if x is None else names[k][int(x)] for x in v] if k in names else v
        for k, v in columns().items()
    }
    source = open_data(write(tmp_path, table, "csv"))
    assert source.encoding == {"state": ["a", "b", "c"], "action": ["go", "stop"]}
    same(source.read(), log())


@pytest.mark.parametrize("names", [("action",), ("state", "action")])
def test_a_policy_has_as_many_actions_as_there_are_labels(names):
    labels = {"state": list("abc"), "action": ["down", "left", "up"]}
    plain = columns()
    named = {n: [None if x is None else labels[n][x] for x in plain[n]] for n in names}
    pi = np.full((3, 3), 1 / 3)
    policies = [
        (pi, "table"),
        (lambda x: np.full((len(x), 3), 1 / 3), None),
        (np.full((7, 3), 1 / 3), "rows"),
    ]
    for policy, kind in policies:
        with pytest.raises(ValueError, match=r"the log has (labels for 2|3 states and 2 actions)"):
            evaluate(open_data(columns(**named), "sorted"), policy, policy_kind=kind)  # the log has no 'up'
        given = open_data(columns(**named), {n: labels[n] for n in names})
        found, expected = (evaluate(data, policy, policy_kind=kind).answers for data in (given, plain))
        assert {n: a.value for n, a in found.items()} == {n: a.value for n, a in expected.items()}


def test_labelled_actions_beside_observations_have_all_their_labels():
    table = columns(action=["left", "up", "up", "up", "left", None, "left"])
    table["obs_0"] = [float(x) for x in table.pop("state")]
    with pytest.raises(ValueError, match="has 3 actions, and the log has labels for 2"):
        evaluate(open_data(table, "sorted"), lambda x: np.full((len(x), 3), 1 / 3))


def test_what_numbers_labels_is_refused_until_their_order_is_said():
    table = columns(step=None, state=list("abcbacc"), action=["go", "stop", "stop", "stop", "go", None, "go"])
    pi, rows, taken = np.full((3, 2), 0.5), np.full((7, 2), 0.5), np.full(7, 0.5)
    orders = {"state": ["c", "b", "a"], "action": ["go", "stop"]}
    for given in (None, {"state": orders["state"]}):
        source = open_data(table, given)
        for policy in (pi, rows):
            with pytest.raises(ValueError, match="actions, and the log has labels for them"):
                load_policy(policy, source)
        load_policy(taken, source)  # of the logged actions alone: no order to say
    with pytest.raises(ValueError, match="the behaviour table numbers states and actions"):
        evaluate(open_data(table), taken, behaviour=pi, discount=0.9)
    for given in ("sorted", orders):
        load_policy(pi, open_data(table, given))
    assert open_data(table, orders).first().states[0] == 2


def test_small_chunks_are_cut_between_episodes(tmp_path):
    path = write(tmp_path, columns())
    source = open_data(path)
    source.chunk = 4
    assert [len(part) for part in source.chunks()] == [3, 2, 1]
    same(source.read(), log())


def test_observation_columns_and_lists(tmp_path):
    table = columns(state=None)
    table["obs_0"], table["obs_1"] = np.arange(7.0), np.arange(7.0) + 0.5
    found = open_data(write(tmp_path, table)).read()
    assert found.states.shape == (6, 2)
    assert not found.tabular
    np.testing.assert_array_equal(found.next_states[4], [5.0, 5.5])
    table = columns(state=None, observation=[[float(i), i + 0.5] for i in range(7)])
    np.testing.assert_array_equal(open_data(write(tmp_path, table)).read().states, found.states)


def edit(name, index, value):
    table = columns()
    table[name] = [value if i == index else v for i, v in enumerate(table[name])]
    return table


BROKEN = {
    "missing column": (
        lambda: columns(reward=None),
        "^log.parquet has no column for the reward .* its columns are 'episode', 'step'",
    ),
    "terminal on the final observation": (
        lambda: columns(terminal=[False, False, True, False, False, True, True], truncated=None),
        "episode 1, step 2: terminal belongs on the last step",
    ),
    "no episode": (
        lambda: columns(step=None, episode=[0.0, 0.0, None, 1.0, 1.0, 1.0, 2.0]),
        r"column 'episode': row 2 \(from 0\) has no episode",
    ),
    "no date of an episode": (
        lambda: columns(step=None, episode=np.array(["2024-01-01", "NaT"] + ["2024-01-02"] * 5, "M8[s]")),
        r"column 'episode': row 1 \(from 0\) has no episode",
    ),
    "lists of rewards": (
        lambda: columns(reward=[[0.0]] * 7),
        r"^log.parquet: column 'reward' has an array of shape \(1,\) in each row, not a single value",
    ),
    "lists of episodes": (lambda: columns(episode=[[0]] * 7), "column 'episode' has an array of shape"),
    "records": (
        lambda: columns(episode=[{"id": 0}] * 7),
        r"^log.parquet: column 'episode' cannot be read: it holds records",
    ),
    "words in lists": (
        lambda: columns(state=[["a"]] * 7),
        "^log.parquet: column 'state' cannot be read: could not convert string to float",
    ),
    "missing state": (lambda: edit("state", 4, None), "episode 1, step 1: the state is missing"),
    "state beyond integers": (
        lambda: columns(state=pa.array([0, 1, 2, 1, 2**63, 2, 2], pa.uint64())),
        r"episode 1, step 1: state 9.*e\+18 is not an index",
    ),
    "dates as rewards": (
        lambda: columns(reward=np.array(["2024-01-01"] * 7, "M8[s]")),
        r"column 'reward' holds datetime64.*, and not real numbers",
    ),
    "reward in words": (
        lambda: columns(reward=["0", "1", "-1", "bad", "0.25", None, "3"]),
        r"column 'reward', row 3 \(from 0\): 'bad' is not a number",
    ),
    "flag in words": (
        lambda: columns(terminal=["False", "False", "True", "yes", "False", None, "True"]),
        r"column 'terminal', row 3 \(from 0\): 'yes' is not true or false",
    ),
    "observation in words": (
        lambda: columns(state=None, obs_0=["0", "1", "x", "1", "0", "2", "2"], obs_1=[0.5] * 7),
        r"column 'obs_0', row 2 \(from 0\): 'x' is not a number",
    ),
    "repeated observation": (
        lambda: columns(state=None, obs_0=[0.5] * 7, observation_0=[0.5] * 7),
        "'obs_0' and 'observation_0' both give number 0",
    ),
    "short next observation": (
        lambda: columns(state=None, obs_0=[0.5] * 7, obs_1=[0.5] * 7, next_obs_0=[0.5] * 7),
        r"next state \(next_obs_0\) has shape \(1,\), and the state \(2,\)",
    ),
    "done": (lambda: columns(terminal=None, done=[False] * 7), "'done' does not say"),
    "two columns": (lambda: columns(observation=[0] * 7), "both give the state"),
    "index and vector": (
        lambda: columns(obs_0=[0.5] * 7, obs_1=[0.5] * 7),
        "columns 'state' and 'obs_0' both give the state",
    ),
    "nan reward": (lambda: edit("reward", 1, float("nan")), "episode 0, step 1: reward nan"),
    "negative state": (lambda: edit("state", 4, -1), "episode 1, step 1: state -1 is negative"),
    "fractional state": (
        lambda: columns(state=[0, 1, 2, 1.5, 0, 2, 2]),
        "episode 1, step 0: state 1.5 is not an index",
    ),
    "negative action": (lambda: edit("action", 0, -3), "episode 0, step 0: action -3 is negative"),
    "gap in steps": (lambda: edit("step", 2, 3), "episode 0: step 3 where 2 was expected"),
    "repeated step": (lambda: edit("step", 1, 0), "episode 0: step 0 where 1 was expected"),
    "split episode": (lambda: edit("episode", 6, 0), "episode 0 appears again"),
    "early terminal": (
        lambda: edit("terminal", 1, True),
        "episode 0, step 1: the step is terminal, yet more steps",
    ),
    "early truncated": (
        lambda: edit("truncated", 0, True),
        "episode 0, step 0: the step is truncated, yet more steps",
    ),
    "open end": (lambda: edit("truncated", 4, False), "episode 1, step 1: the last step is neither"),
    "missing action": (lambda: edit("action", 1, None), "episode 0, step 1: the action is missing"),
    "log-probability": (lambda: edit("behaviour", 3, -0.7), "episode 1, step 0: .* log-probability"),
    "zero probability": (lambda: edit("behaviour", 0, 0.0), "episode 0, step 0: behaviour probability is 0"),
    "probability above one": (lambda: edit("behaviour", 6, 1.5), "episode 2, step 0: .* 1.5 is above 1"),
    "missing probability": (lambda: edit("behaviour", 1, None), "episode 0, step 1: .* missing"),
    "flag": (
        lambda: columns(terminal=[0, 0, 2, 0, 0, None, 1]),
        "episode 0, step 2: terminal is 2.0, not true or false",
    ),
    "shifted next state": (
        lambda: columns(next_state=[0, 1, 2, 1, 0, 0, 2]),
        "episode 0, step 0: next_state is not the state of the next row",
    ),
    "empty": (lambda: {k: pa.array([], pa.int64()) for k in columns()}, "is empty"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused_with_episode_and_step(tmp_path, case):
    make, message = BROKEN[case]
    with pytest.raises(ValueError, match=message):
        open_data(write(tmp_path, make())).read()


@pytest.mark.parametrize(("name", "role"), [("Reward", "reward"), ("reward", "reward"), ("STATE", "state")])
def test_a_column_whose_name_is_there_twice_is_refused(tmp_path, name, role):
    """Names are read without regard to case; wherever the second one stands."""
    good = pa.table(columns())
    twice = good.append_column(name, pa.array([7] * 7))
    csv.write_csv(twice, tmp_path / "log.csv")
    for place in (tmp_path / "log.parquet", tmp_path / "folder" / "2.parquet"):
        place.parent.mkdir(exist_ok=True)
        pq.write_table(twice, place)
    pq.write_table(good, tmp_path / "folder" / "1.parquet")
    message = f"the columns '{role}' and '{name}' both give the {role}; keep one"
    for data, of in (
        (tmp_path / "log.csv", "log.csv"),
        (tmp_path / "log.parquet", "log.parquet"),
        (tmp_path / "folder", "2.parquet"),
        (twice, "table"),
    ):
        with pytest.raises(ValueError, match=f"^{of}: {message}"):
            open_data(data)


def test_files_of_a_folder_have_the_same_columns(tmp_path):
    """Else the first file decides what is read of the others."""
    both = pa.table(columns())
    for name in ("behaviour", "truncated"):
        folder = tmp_path / name
        folder.mkdir()
        for files in ("12", "21"):
            pq.write_table(both, folder / f"{files[0]}.parquet")
            pq.write_table(both.drop_columns([name]), folder / f"{files[1]}.parquet")
            has = "has no column" if files == "12" else "has a column"
            with pytest.raises(ValueError, match=f"^2.parquet {has} '{name}', which 1.parquet has"):
                open_data(folder)


def test_columns_that_are_not_read_may_share_a_name(tmp_path, monkeypatch):
    twice = (
        pa.table(columns()).append_column("info", pa.array([7] * 7)).append_column("info", pa.array([8] * 7))
    )
    csv.write_csv(twice, tmp_path / "log.csv")
    pq.write_table(twice, tmp_path / "log.parquet")
    same(open_data(twice).read(), log())
    same(open_data(tmp_path / "log.parquet").read(), log())
    same(open_data(tmp_path / "log.csv").read(), log())
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    same(open_data(tmp_path / "log.csv").read(), log())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"terminal": None}, "episode 0: it has no 'terminal'"),
        ({"terminal": [False, False, False]}, "episode 0: terminal must be True or False, for its last step"),
        ({"states": ["a", "b", "c"]}, "episode 0: states must be numbers"),
        ({"rewards": ["x", "y", "z"]}, "episode 0: rewards must be numbers"),
        ({"states": [0]}, "episode 0: 1 observations for 3 steps; expected 3 or 4"),
        ({"actions": [0]}, "episode 0: 1 actions for 3 steps"),
        ({"rewards": [], "actions": [], "states": [0]}, "episode 0: it has no steps"),
        ({"behaviour": [0.5]}, "episode 0: 1 behaviour for 3 steps"),
        (
            {"behaviour": [[0.5, 0.5]] * 3},
            r"behaviour must be numbers: one for each step, got shape \(3, 2\)",
        ),
        ({"rewards": [[0.0]] * 3}, r"rewards must be numbers: one for each step, got shape \(3, 1\)"),
        ({"rewards": 1.0}, r"rewards must be numbers: one for each step, got shape \(\)"),
        ({"states": 1}, r"states must be numbers: one for each step, got shape \(\)"),
        ({"rewards": [0.0, np.inf, 1.0]}, "episode 0, step 1: reward inf"),
        (
            {"behavior": [0.5]},
            "episode 0: a column must be one of .*, got 'behavior'; did you mean 'behaviour'",
        ),
    ],
)
def test_broken_episodes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Log.from_episodes([dict(EPISODES[0], **change)])


def test_episodes_must_agree_with_each_other():
    with pytest.raises(ValueError, match="episode 1: behaviour probabilities are missing here"):
        Log.from_episodes([dict(EPISODES[0], behaviour=BEHAVIOUR[0]), EPISODES[1]])
    with pytest.raises(
        ValueError, match=r"actions have different shapes in different episodes: \[\(\), \(1,\)\]"
    ):
        Log.from_episodes([EPISODES[0], dict(EPISODES[1], actions=[[1], [0]])])
    with pytest.raises(ValueError, match="the log is empty"):
        Log.from_episodes([])


def test_what_is_not_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with pytest.raises(ValueError, match="not int"):
        open_data(3)
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.csv"):
        open_data(tmp_path / "missing.csv")
    for name in ("nowhere", "a/b-v0", "not an id!"):
        with pytest.raises(FileNotFoundError, match="nor the id of a dataset"):
            open_data(name)


def buffers(minari):
    parts = []
    for i, (e, b) in enumerate(zip(EPISODES, BEHAVIOUR, strict=True)):
        n = len(e["rewards"])
        states = e["states"] + [0] * (n + 1 - len(e["states"]))
        parts.append(
            minari.data_collector.EpisodeBuffer(
                id=i,
                observations=np.array(states),
                actions=np.array(e["actions"]),
                rewards=e["rewards"],
                terminations=[False] * (n - 1) + [e["terminal"]],
                truncations=[False] * (n - 1) + [not e["terminal"]],
                infos={"behaviour": np.array([0.0, *b])},
            )
        )
    return parts


def test_minari_by_id_and_by_folder(tmp_path, monkeypatch):
    import gymnasium
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    minari.create_dataset_from_buffers(
        "tests/tiny-v0",
        buffers(minari),
        observation_space=gymnasium.spaces.Discrete(4),
        action_space=gymnasium.spaces.Discrete(2),
    )
    for place in (
        "tests/tiny-v0",
        str(tmp_path / "tests" / "tiny-v0"),
        tmp_path / "tests" / "tiny-v0" / "data",
    ):
        source = open_data(place)
        assert source.sizes == (4, 2)
        same(source.read(), log())
    with pytest.raises(ValueError, match=r"table \(3, 2\), and the log has 4 states"):
        evaluate("tests/tiny-v0", np.full((3, 2), 0.5))
    assert set(evaluate("tests/tiny-v0", np.full((4, 2), 0.5)).answers) > {"per-decision-is"}


def test_trajectories_are_cut_at_ends_truncations_and_padding():
    from marginax.trajectories import Trajectory

    batch = Trajectory(
        states=np.array([[0, 1, 2, 0], [3, 3, 9, 9]], np.int32),
        actions=np.array([[0, 1, 0, 1], [1, 0, 9, 9]], np.int32),
        rewards=np.array([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, np.nan, np.nan]], np.float32),
        discounts=np.array([[0.9, 0.0, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]], np.float32),
        next_states=np.array([[1, 0, 0, 1], [3, 2, 9, 9]], np.int32),
        truncated=np.array([[False, False, True, False], [False, False, False, False]]),
        behaviour=None,
        valid=np.array([[True] * 4, [True, True, False, False]]),
    )
    found = Log.from_trajectories(batch)
    assert found.offsets.tolist() == [0, 2, 3, 4, 6]
    assert found.terminal.tolist() == [False, True, False, False, False, False]
    assert found.truncated.tolist() == [False, False, True, True, False, True]
    assert found.rewards.tolist() == [1, 2, 3, 4, 5, 6]


def test_archives_frames_folders_and_compressed_files_give_the_log(tmp_path):
    import gzip

    keep = [0, 1, 2, 3, 4, 6]
    table = {k: np.array([v[i] for i in keep]) for k, v in columns().items()}
    table |= {"next_state": np.array([1, 2, 0, 0, 2, 0]), "action": np.array([0, 1, 1, 1, 0, 0])}
    table |= {k: table[k].astype(bool) for k in ("terminal", "truncated")}
    table |= {k: table[k].astype(float) for k in ("reward", "behaviour")}
    np.savez(tmp_path / "log.npz", **table)
    same(open_data(tmp_path / "log.npz").read(), log())
    same(open_data(table).read(), log())

    class Frame:  # what pandas and polars share
        columns = tuple(table)

        def __getitem__(self, name):
            return table[name]

    same(open_data(Frame()).read(), log())
    same(open_data(pa.table(columns())).read(), log())
    same(open_data(pa.record_batch(columns())).read(), log())
    path = write(tmp_path, columns(), "csv")
    for name in ("packed.csv.gz", "PACKED.CSV.GZ"):
        (tmp_path / name).write_bytes(gzip.compress(path.read_bytes()))
        same(open_data(tmp_path / name).read(), log())
    parts = tmp_path / "parts"
    parts.mkdir()
    for i, rows in enumerate((slice(0, 3), slice(3, 7))):
        pq.write_table(pa.table({k: v[rows] for k, v in columns().items()}), parts / f"part-{i}.parquet")
    same(open_data(parts).read(), log())


def test_missing_cells_of_a_frame_s_nullable_columns():
    class Nullable:  # a column of pandas: what is missing is an object of its own, which is no number and equals nothing
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return np.array([pytest if x is None else x for x in self.values], object)

        def isna(self):
            return np.array([x is None for x in self.values])

    class Frame:
        columns = tuple(columns())

        def __getitem__(self, name):
            return Nullable(columns()[name])

    same(open_data(Frame()).read(), log())


def test_columns_that_are_not_read_may_be_anything(tmp_path):
    keep = [0, 1, 2, 3, 4, 6]
    table = {k: [v[i] for i in keep] for k, v in columns().items()} | {"next_state": [1, 2, 0, 0, 2, 0]}
    more = {"version": 3, "info": np.array([{}, None], object), 0: [1, 2]}
    same(open_data(table | more).read(), log())
    np.savez(tmp_path / "log.npz", **table, version=3, info=more["info"])
    same(open_data(tmp_path / "log.npz").read(), log())
    with pytest.raises(ValueError, match=r"^dict: the columns have different lengths: .*'behaviour': 1"):
        open_data(table | {"behaviour": 0.5}).read()
    np.savez(tmp_path / "objects.npz", **(table | {"reward": more["info"]}))
    with pytest.raises(ValueError, match=r"^objects.npz: column 'reward' cannot be read: Object arrays"):
        open_data(tmp_path / "objects.npz").read()
    np.savez(tmp_path / "images.npz", **(table | {"state": np.zeros((6, 2, 2))}))
    with pytest.raises(ValueError, match=r"^images.npz: column 'state' has an array of shape \(2, 2\)"):
        open_data(tmp_path / "images.npz").read()


@pytest.mark.parametrize("arrow", [True, False])
def test_names_of_episodes_beyond_integers_stay_apart(tmp_path, monkeypatch, arrow):
    """Without a column of steps, episodes that are taken for one another would be one."""
    if not arrow:
        monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    names = [10**20 + i for i in columns()["episode"]]
    same(open_data(write(tmp_path, columns(step=None, episode=list(map(str, names))), "csv")).read(), log())
    far = np.array(columns()["episode"]) * 1e19
    same(open_data(write(tmp_path, columns(step=None, episode=far + 1e20), "parquet")).read(), log())


def test_csv_without_pyarrow(tmp_path, monkeypatch):
    import sys

    path = write(tmp_path, columns(), "csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.csv", None)
    same(open_data(path).read(), log())


def test_files_that_are_not_what_they_seem(tmp_path):
    import gzip

    path = write(tmp_path, columns(), "csv")
    (tmp_path / "zipped.csv").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=r"zipped.csv is a gzip file: name it .csv.gz"):
        open_data(tmp_path / "zipped.csv")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 is not enough")
    with pytest.raises(ValueError, match=r"bad.parquet cannot be read: "):
        open_data(tmp_path / "bad.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder .*empty' holds no \.parquet"):
        open_data(tmp_path / "empty")
    whole = write(tmp_path, columns())
    data = bytearray(whole.read_bytes())
    data[20:60] = b"\0" * 40
    (tmp_path / "broken.parquet").write_bytes(data)
    with pytest.raises(ValueError, match=r"broken.parquet cannot be read"):
        open_data(tmp_path / "broken.parquet").read()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"action": [0, 0.5, 1, 1, 0, None, 0]}, "episode 0, step 1: action 0.5 is not an index"),
        (
            {"truncated": [False, False, True, False, True, None, False]},
            "step 2: the step is both terminal and trunc",
        ),
    ],
)
def test_more_broken_rows(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        open_data(write(tmp_path, columns(**change))).read()


def test_one_step_truncated_episodes_without_successors_leave_nothing(tmp_path):
    table = {
        "episode": [0, 1],
        "state": [0, 1],
        "action": [0, 1],
        "reward": [1.0, 2.0],
        "terminal": [False, False],
    }
    with pytest.raises(ValueError, match="nothing is left of the log"):
        evaluate(write(tmp_path, table), np.full((3, 2), 0.5))


def test_whole_observations_in_numbered_columns_are_no_indices(tmp_path):
    found = open_data(write(tmp_path, columns(state=None, obs_0=[0, 1, 2, 1, 0, 2, 2]))).read()
    assert found.states.shape == (6, 1)
    assert not found.tabular


@pytest.mark.parametrize("suffix", ["csv", "csv.gz"])
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, suffix):
    import gzip

    text = b"\xef\xbb\xbf" + write(tmp_path, columns(), "csv").read_bytes().replace(b'"', b"")
    path = tmp_path / f"marked.{suffix}"
    path.write_bytes(gzip.compress(text) if suffix == "csv.gz" else text)
    same(open_data(path).read(), log())


def test_separators_other_than_commas_are_named(tmp_path):
    path = write(tmp_path, columns(), "csv")
    for mark in ";\t|":
        path.write_text(path.read_text().replace(",", mark))
        with pytest.raises(ValueError, match=r"^log.csv has no comma in its first line"):
            open_data(path)
        path.write_text(path.read_text().replace(mark, ","))


def test_hidden_files_of_a_folder_are_no_part_of_the_log(tmp_path):
    (tmp_path / "._log.csv").write_bytes(b"\0\5")
    write(tmp_path, columns(), "csv")
    same(open_data(tmp_path).read(), log())


def test_files_without_steps_hold_whole_episodes(tmp_path):
    """Two files that both have an episode 0 are not one episode of them."""
    for name in ("a", "b"):
        table = {"episode": [0, 0], "state": [0, 1], "action": [0, 1], "reward": [1.0, 0.0]}
        pq.write_table(pa.table(table | {"terminal": [False, False]}), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"b.parquet begins with episode 0, with which a.parquet ends"):
        open_data(tmp_path).read()


def test_batches_of_batches_of_trajectories():
    import jax

    import marginax as mx

    mdp, _, mu = mx.problems.chain(n=4, actions=2)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=6, horizon=5)
    nested = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), batch)
    same(Log.from_trajectories(nested), Log.from_trajectories(batch))


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        ({"state": 3}, "state must be a list of strings, got 3"),
        ({"state": "abc"}, "state must be a list of strings"),
        ({"states": ["a"]}, "encoding has the key 'states'"),
        ({"state": ["a", "b", "a"]}, "the state 'a' is given twice"),
        ("alphabetical", "encoding must be 'sorted' or a mapping"),
    ],
)
def test_what_is_no_encoding_is_refused(encoding, message):
    with pytest.raises(ValueError, match=message):
        check_encoding(encoding)


def test_an_encoding_of_many_labels_is_checked_in_one_pass():
    class Label(str):
        compared = 0
        __hash__ = str.__hash__

        def __eq__(self, other):
            Label.compared += 1
            return super().__eq__(other)

    check_encoding({"state": [Label(i) for i in range(1000)]})
    assert Label.compared < 1000


def test_an_index_beyond_every_table_is_refused_with_its_place():
    table = columns(state=[0, 1, 10**10, 1, 0, 2, 2])
    with pytest.raises(ValueError, match="episode 0, step 2: state 10000000000 is too large for an index"):
        evaluate(table, lambda x: np.full((len(x), 2), 0.5))


def test_labels_of_numpy_archives_may_be_bytes(tmp_path):
    table = {"episode": [0, 0], "state": ["über", "home"], "action": [0, 1], "reward": [0.0, 1.0]}
    table |= {"terminal": [False, True]}
    words, coded = (dict(table), dict(table, state=np.char.encode(table["state"], "utf-8")))
    np.savez(tmp_path / "log.npz", **coded)
    found = open_data(tmp_path / "log.npz", "sorted")
    assert found.encoding == {"state": ["home", "über"]}
    same(found.read(), open_data(words, "sorted").read())


def test_types_of_a_long_csv_file_fit_all_of_its_rows(tmp_path, monkeypatch):
    """pyarrow takes the types of columns from the first block."""
    monkeypatch.setattr("marginax.offline.columns.BLOCK", 256)
    path = tmp_path / "log.csv"
    head = "episode,state,next_state,obs_0,action,terminal,reward,behaviour\n"
    table, vectors = head.replace("obs_0", "a"), head.replace("next_state", "a").replace("state", "b")

    def written(last, head):
        rows = [f"{i},{i},,{i},0,1,1,1" for i in range(50)]
        path.write_text(head + "\n".join([*rows, last]))
        return open_data(path, "sorted" if "x" in last else None)

    found = written("50,,,0.5,0,1,0.5,0.25", vectors).read()
    np.testing.assert_array_equal(found.states[-2:], [[49], [0.5]])
    assert found.rewards[-2:].tolist() == [1, 0.5]
    assert found.behaviour[-2:].tolist() == [1, 0.25]
    assert found.actions.dtype == np.int64
    for name in ("x50", "50.5"):
        assert list(written(f"{name},50,7,0,0,1,1,1", table).read().names)[-2:] == ["49", name]
    source = written("50,x,,,0,1,1,1", table)
    assert source.encoding["state"][-2:] == ["9", "x"]
    assert source.read().states[-1] == 50
    for last, message in (
        ("50,1.5,7,,0,1,1,1", "episode 50, step 0: state 1.5 is not an index"),
        ("50,1,7,,0,1,bad,1", r"column 'reward', row 50 \(from 0\): 'bad' is not a number"),
        ("50,1,7,,0,maybe,1,1", r"column 'terminal', row 50 \(from 0\): 'maybe' is not true or false"),
    ):
        with pytest.raises(ValueError, match=message):
            written(last, table).read()
