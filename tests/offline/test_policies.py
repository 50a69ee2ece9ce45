"""Target policies in all their forms, and what is refused."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from marginax.offline import Log, evaluate, load_policy, open_data
from marginax.offline.pipeline import _estimators
from reference.offline_logs import GAMMA, garnet_log

NAMES = ("per-decision-is", "weighted-doubly-robust", "certainty-equivalence")


@pytest.fixture
def case(tmp_path):
    """A log as a Parquet file, its policy, and the answers for the policy as a table."""
    _, pi, _, log = garnet_log(0)
    table = {
        "episode": np.repeat(np.arange(log.num_episodes), log.lengths),
        "state": log.states,
        "action": log.actions,
        "reward": log.rewards,
        "next_state": log.next_states,
        "terminal": log.terminal,
        "behaviour": log.behaviour,
    }
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table(table), path)
    return path, pi, log


def values(path, policy, kind=None):
    answers = evaluate(path, policy, discount=GAMMA, estimators=NAMES, policy_kind=kind).answers
    return [answers[name].value for name in NAMES]


def test_every_form_of_a_policy_gives_the_same_answers(case, tmp_path, monkeypatch):
    path, pi, log = case
    expected = values(path, pi)
    np.save(tmp_path / "pi.npy", pi)
    np.savetxt(tmp_path / "pi.csv", pi, delimiter=",", header="left,stay,right", comments="")
    np.save(tmp_path / "rows.npy", pi[log.states])
    pq.write_table(pa.table({f"p{k}": pi[log.states, k] for k in range(3)}), tmp_path / "rows.parquet")
    np.save(tmp_path / "taken.npy", pi[log.states, log.actions])
    (tmp_path / "my_policies.py").write_text(
        "import numpy as np\nimport pathlib\n"
        "TABLE = np.load(pathlib.Path(__file__).with_name('pi.npy'))\n"
        "def target(states):\n    return TABLE[states]\n"
    )
    monkeypatch.chdir(tmp_path)
    names = ("pi.npy", "pi.csv", "rows.npy", "rows.parquet", "taken.npy")
    for form in (*(str(tmp_path / name) for name in names), "my_policies:target", lambda x: pi[x]):
        kind = "rows" if "rows" in str(form) else None
        np.testing.assert_allclose(values(path, form, kind), expected, rtol=1e-6, err_msg=str(form))


def test_a_saved_agent_is_a_gaussian_around_its_actor(tmp_path):
    from marginax.deep.policy import Policy

    layers = [(np.full((3, 1), 0.2, np.float32), np.zeros(1, np.float32))]
    saved = Policy(layers, np.array([-2.0]), np.array([2.0]), 0.1, "Pendulum-v1")
    saved.save(tmp_path / "policy-a-seed-0.npz")
    policy = load_policy(tmp_path)
    observations = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    mean, std = policy(observations)
    np.testing.assert_allclose(mean, saved(observations), rtol=1e-6)
    np.testing.assert_allclose(std, 0.2)  # 0.1 of half the width of the bounds
    with pytest.raises(
        ValueError, match=r"takes observations of 3 numbers, and those of the log have shape \(2,\)"
    ):
        policy(observations[:, :2])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no policy"):
        load_policy(tmp_path / "empty")


def test_a_saved_agent_of_discrete_actions_takes_the_best_one(tmp_path):
    from marginax.deep.policy import Policy

    layers = [(np.eye(3, dtype=np.float32), np.zeros(3, np.float32))]
    Policy(layers, np.array([0.0]), np.array([2.0]), 0.0, "grid/catch").save(tmp_path / "policy-a-seed-0.npz")
    found = load_policy(tmp_path)(np.array([[0.1, 0.9, 0.2], [0.0, 0.0, 1.0]]))
    np.testing.assert_array_equal(found, [[0, 1, 0], [0, 0, 1]])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0.5, 0.6]], "row 0 sums to 1.1"),
        ([[0.5, 0.5], [-0.5, 1.5]], r"negative, but policy\[1, 0\] = -0.5"),
        ([[0.5, np.nan]], "finite"),
        ([0.5, 0.5], "shape"),
        (np.zeros((0, 2)), r"policy: expected \[S, A\] or one probability per row, got shape \(0, 2\)"),
        ("half", "array of real numbers|is not a .npy"),
    ],
)
def test_broken_tables_are_refused(table, message):
    with pytest.raises(ValueError, match=message):
        load_policy(table)


def test_broken_files_and_names_are_refused(case, tmp_path):
    path, pi, _ = case
    with pytest.raises(FileNotFoundError, match="no policy file"):
        load_policy(tmp_path / "missing.npy")
    with pytest.raises(ValueError, match="cannot import 'no_such_module'"):
        load_policy("no_such_module:f")
    with pytest.raises(ValueError, match="has no function 'nothing'"):
        load_policy("marginax.policies:nothing")
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="not a plain NumPy array"):
        load_policy(tmp_path / "object.npy")
    (tmp_path / "words.csv").write_text("a,b\nyes,no\n")
    with pytest.raises(ValueError, match="not a table of numbers"):
        load_policy(tmp_path / "words.csv")
    (tmp_path / "empty.npy").touch()
    with pytest.raises(ValueError, match=r"empty.npy is not a plain NumPy array: No data left in file"):
        load_policy(tmp_path / "empty.npy")
    (tmp_path / "latin.csv").write_bytes(b"gauche,\xe0 droite\n0.5,0.5\n")
    with pytest.raises(ValueError, match=r"latin.csv cannot be read: "):
        load_policy(tmp_path / "latin.csv")
    np.save(tmp_path / "short.npy", np.full(3, 0.5))
    with pytest.raises(ValueError, match=r"short.npy has 3 rows of probabilities, and the log has \d+ rows"):
        evaluate(path, str(tmp_path / "short.npy"), discount=GAMMA)
    with pytest.raises(ValueError, match=r"state \d is outside the policy's table, which has 2 states"):
        evaluate(path, pi[:2], discount=GAMMA)
    with pytest.raises(ValueError, match="outside the policy's table, which has 1 actions"):
        evaluate(path, np.ones((5, 1)), discount=GAMMA)


def test_a_policy_outside_the_support_is_not_scored(case):
    """All mass on actions that the log of action 0 alone never took."""
    _, _, log = case
    from marginax.offline import Log

    states = [list(log.states[a:b]) for a, b in zip(log.offsets[:-1], log.offsets[1:], strict=True)]
    only = Log.from_episodes(
        [
            {"states": s, "actions": [0] * len(s), "rewards": [1.0] * len(s), "terminal": True}
            | {"behaviour": [1.0] * len(s)}
            for s in states
        ]
    )
    outside = np.tile([0.0, 0.5, 0.5], (5, 1))
    result = evaluate(only, outside, discount=GAMMA)
    assert result.verdict.status == "cannot tell"
    assert result.verdict.estimator is None
    assert result.diagnostics["unsupported"] == pytest.approx(1.0)
    assert result.diagnostics["unsupported_pairs"]
    partly = evaluate(only, np.tile([0.97, 0.03, 0.0], (5, 1)), discount=GAMMA)
    assert partly.verdict.status != "trust"
    lost = partly.diagnostics["unsupported"]
    assert 0 < lost < 0.2
    # Beside sampling error the interval leaves room for any value of what was never seen.
    chosen = partly.answers["certainty-equivalence"]
    assert chosen.interval.width > 2 * 1.95 * chosen.error + 1e-3
    full = evaluate(only, np.tile([1.0, 0.0, 0.0], (5, 1)), discount=GAMMA)
    assert full.verdict.status == "trust"


def test_behaviour_probabilities_that_are_wrong_are_noticed(case):
    _, pi, log = case
    from dataclasses import replace

    _, pi, _, log = garnet_log(1, episodes=400)
    wrong = replace(log, behaviour=np.full(len(log), 0.9))
    result = evaluate(wrong, pi, discount=GAMMA)
    assert result.diagnostics["behaviour_suspicious"]
    assert "do not match how often" in " ".join(result.verdict.text)
    assert not evaluate(log, pi, discount=GAMMA).diagnostics["behaviour_suspicious"]


def test_behaviour_may_be_estimated_or_given(case):
    path, pi, log = case
    _, _, mu, _ = garnet_log(0)
    given = evaluate(path, pi, discount=GAMMA, behaviour=mu, estimators=NAMES)
    logged = evaluate(path, pi, discount=GAMMA, estimators=NAMES)
    np.testing.assert_allclose(given.answers[NAMES[0]].value, logged.answers[NAMES[0]].value, rtol=1e-4)
    estimated = evaluate(path, pi, discount=GAMMA, behaviour="estimated", estimators=NAMES)
    assert estimated.settings["behaviour"] == "estimated"
    assert estimated.answers[NAMES[0]].value != logged.answers[NAMES[0]].value
    assert estimated.answers[NAMES[0]].bound is None
    assert logged.answers[NAMES[0]].bound is not None
    frequencies = np.zeros((5, 3))
    np.add.at(frequencies, (log.states, log.actions), 1)
    frequencies /= frequencies.sum(axis=1, keepdims=True)
    same = evaluate(path, pi, discount=GAMMA, behaviour=frequencies, estimators=NAMES)
    np.testing.assert_allclose(same.answers[NAMES[0]].value, estimated.answers[NAMES[0]].value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"discount": 1.5}, "discount must lie in"),
        ({"horizon": 0}, "horizon must be"),
        ({"engine": "spark"}, "engine must be 'local' or 'ray', got 'spark'"),
        ({"policy_kind": "guess"}, "policy_kind must be table or rows"),
        ({"estimators": ["sorcery"]}, "an estimator must be one of"),
        ({"behaviour": "guess"}, "behaviour must be auto, logged, estimated"),
        ({"behaviour": np.ones((2, 2)) / 2}, r"behaviour must have shape \(5, 3\)"),
        ({"reward_range": (0.0, 0.1)}, "does not contain the log's rewards"),
        ({"reward_range": (0.0, float("inf"))}, "reward_range must be finite"),
        ({"level": 2.0}, "level must lie in"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"estimators": []}, "estimators is empty"),
        ({"discount": 1.0, "horizon": 10**12}, "values of 1,000,000,000,000 steps for 15 pairs needs"),
    ],
)
def test_impossible_settings_are_refused(case, settings, message):
    path, pi, _ = case
    with pytest.raises(ValueError, match=message):
        evaluate(path, pi, **settings)


@pytest.mark.parametrize("given", [3, ["regression", 3]])
def test_estimators_that_are_no_names_are_refused(given):
    with pytest.raises(ValueError, match=r"estimators must be names, got .*3"):
        _estimators(given)


def test_a_single_episode_is_refused():
    from marginax.offline import Log

    log = Log.from_episodes([{"states": [0, 0], "actions": [0], "rewards": [1.0], "terminal": True}])
    with pytest.raises(ValueError, match="single episode"):
        evaluate(log, [[1.0]], policy_kind="table")
    assert len(open_data(log).read()) == 1


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_rows_and_tables_are_never_mixed_up(case, tmp_path, suffix):
    """An array with as many rows as the log could be either: we ask. Everywhere else the shape decides."""
    path, pi, log = case
    if suffix == "csv":
        import pyarrow.csv as csv

        csv.write_csv(pq.read_table(path), tmp_path / "log.csv")
        path = tmp_path / "log.csv"
    rows = tmp_path / "rows.npy"
    np.save(rows, pi[log.states])
    with pytest.raises(ValueError, match=r"as many as the log: .*--policy-kind table, or --policy-kind rows"):
        values(path, str(rows))
    np.testing.assert_allclose(values(path, str(rows), "rows"), values(path, pi), rtol=1e-6)
    np.save(rows, np.concatenate([pi[log.states], pi[:1]]))
    with pytest.raises(
        ValueError, match=f"has {len(log) + 1} rows of probabilities, and the log has {len(log)} rows"
    ):
        values(path, str(rows), "rows")
    table = np.concatenate([pi, np.full((len(log) - 5, 3), 1 / 3)])  # as many states as the log has rows
    with pytest.raises(ValueError, match="as many as the log"):
        values(path, table)
    np.testing.assert_allclose(values(path, table, "table"), values(path, pi), rtol=1e-6)


def test_row_probabilities_above_one_are_refused(case, tmp_path):
    path, pi, log = case
    taken = pi[log.states, log.actions]
    taken[7] = 1.7
    np.save(tmp_path / "taken.npy", taken)
    with pytest.raises(
        ValueError, match=r"episode \d+, step \d+: the policy taken.npy gives probability 1.7, above 1"
    ):
        values(path, str(tmp_path / "taken.npy"))


def test_a_policy_that_raises_is_named_with_its_last_line(case, tmp_path, monkeypatch):
    path, _, _ = case
    (tmp_path / "broken_policies.py").write_text("def f(x):\n    return x['missing']\n")
    (tmp_path / "worse_policies.py").write_text("def f(x:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="the policy broken_policies:f raised IndexError: only integers"):
        evaluate(path, "broken_policies:f", discount=GAMMA)
    with pytest.raises(ValueError, match="cannot import 'worse_policies': SyntaxError"):
        evaluate(path, "worse_policies:f", discount=GAMMA)


def test_headers_of_policy_files(tmp_path):
    rows = "0.9,0.1\n0.8,0.2\n"
    path = tmp_path / "pi.csv"
    for head in ("", "left,right\n", "\ufeff"):
        path.write_text(head + rows, encoding="utf-8")
        np.testing.assert_allclose(load_policy(path).table, [[0.9, 0.1], [0.8, 0.2]])
    path.write_text("0,1,2\n0.5,0.25,0.25\n")  # no probabilities: the names of three actions
    np.testing.assert_allclose(load_policy(path).table, [[0.5, 0.25, 0.25]])
    path.write_text('"left","right"\n"0.9","0.1"\n"0.8","0.2"\n')
    np.testing.assert_allclose(load_policy(path).table, [[0.9, 0.1], [0.8, 0.2]])
    path.write_text("left,right\n")
    with pytest.raises(ValueError, match=r"pi.csv is empty: it has no probabilities"):
        load_policy(path)
    for head, message in (
        ("0,1\n", "may be a header or probabilities"),
        ("nan,0.5\n", "must be finite"),
        ("0.5,\n", "is not a table of numbers"),
    ):
        path.write_text(head + rows)
        with pytest.raises(ValueError, match=message):
            load_policy(path)
    path.write_text("1.0\n1.0\n")
    assert load_policy(path, kind="table").table.shape == (2, 1)


def test_rows_that_do_not_fit_the_actions_are_refused():
    rows = {"states": np.zeros((2, 1)), "rewards": [0.0, 0.0], "terminal": True, "behaviour": [0.5, 0.5]}
    two = Log.from_episodes([dict(rows, actions=[0, 1])] * 3)
    with pytest.raises(ValueError, match="episode 0, step 1: action 1, and the policy policy has 1 columns"):
        evaluate(two, np.ones((6, 1)), policy_kind="rows")
    vectors = Log.from_episodes([dict(rows, actions=[[0.5], [0.1]])] * 3)
    with pytest.raises(ValueError, match="2 numbers per row, and the log's actions are vectors"):
        evaluate(vectors, np.full((6, 2), 0.5), policy_kind="rows")


@pytest.mark.parametrize(
    ("std", "message"),
    [
        (np.zeros((3, 7)), r"means of shape \(4, 1\) and a std of shape \(3, 7\)"),
        (-0.4, "must not be negative"),
    ],
)
def test_a_std_that_is_none_is_refused(std, message):
    with pytest.raises(ValueError, match=message):
        load_policy(lambda x: (np.zeros((len(x), 1)), std))(np.zeros((4, 2)))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[1.0], [0.5, 0.5]], "the policy <lambda> must be an array of real numbers"),
        (None, "the policy <lambda> returned None"),
        (([["far"]] * 2, 1.0), "the mean of the policy <lambda> must be an array of real numbers"),
        (([[0.0]] * 2, [[1.0], [np.inf]]), r"the std of the policy <lambda>\[1, 0\] = inf"),
    ],
)
def test_answers_of_a_policy_that_are_no_numbers_name_it(answer, message):
    with pytest.raises(ValueError, match=message):
        load_policy(lambda x: answer)(np.zeros((2, 1)))


def test_names_of_policies_are_strings():
    log = Log.from_episodes([{"states": [0, 0], "actions": [0], "rewards": [1.0], "terminal": True}] * 3)
    with pytest.raises(ValueError, match=r"the names of policies must be strings, got 0.1"):
        evaluate(log, {0.1: [[1.0]], 0.5: [[1.0]]})
