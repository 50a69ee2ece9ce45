"""The environment that a user registered is the one that is played: wrappers, bounds, discrete actions, imports."""

import numpy as np
import pytest

from marginax.simulators import make
from marginax.simulators.registry import check_actions, warn_if_resume_differs

gymnasium = pytest.importorskip("gymnasium")

OWN = "simulators.own_environments:"


def own(name, seed=0, **options):
    return make(OWN + name, seed, allow_import=True, **options)


def play(simulator, steps, seed):
    generator = np.random.default_rng(seed)
    record = []
    for _ in range(steps):
        if simulator.num_actions is not None:
            action = generator.integers(simulator.num_actions, size=1)
        else:
            action = generator.uniform(simulator.action_low, simulator.action_high).astype(np.float32)
        observation, reward, terminated, truncated = simulator.step(action)
        record.append([*observation, reward, terminated, truncated])
        if terminated or truncated:
            record.append([*simulator.reset(), 0, 0, 0])
    return np.array(record, float)


@pytest.mark.parametrize(
    "name", ["Point-v0", "Thousand-v0", "Rescaled-v0", "Flattened-v0", "Normalised-v0", "Discrete-v0"]
)
def test_equal_to_the_registered_environment(name):
    """Step by step what `gymnasium.make` gives, all wrappers included; the first reset is taken by ours."""
    ours, theirs = own(name), gymnasium.make(OWN + name)
    theirs.reset(seed=0)
    generator = np.random.default_rng(0)
    for episode in range(3):
        seed = np.random.SeedSequence((0, episode)).generate_state(1, np.uint32)[0]
        np.testing.assert_array_equal(ours.reset(), theirs.reset(seed=int(seed))[0])
        for _ in range(20):
            if name == "Discrete-v0":
                action = int(generator.integers(3))
                expected = theirs.step(action - 1)  # its actions are -1, 0 and 1
            else:
                action = generator.uniform(ours.action_low, ours.action_high).astype(np.float32)
                expected = theirs.step(action.copy())
            observation, reward, terminated, truncated = ours.step(action)
            np.testing.assert_array_equal(observation, np.float32(expected[0]))
            assert (reward, terminated, truncated) == tuple(expected[1:4])
        assert truncated


def test_wrappers_are_not_dropped():
    thousand, rescaled = own("Thousand-v0"), own("Rescaled-v0")
    assert (rescaled.action_low, rescaled.action_high) == (-1, 1)
    thousand.reset()
    start = rescaled.reset()
    assert thousand.step(np.zeros(1))[1] > 900
    assert rescaled.step(np.ones(1))[0][0] == pytest.approx(start[0] + 0.5)  # 1 stands for 5
    assert own("Flattened-v0").observation_size == 2


@pytest.mark.parametrize(
    "name",
    ["Point-v0", "Rescaled-v0", "Flattened-v0", "Normalised-v0", "Discrete-v0", "Changing-v0", "Nested-v0"],
)
@pytest.mark.parametrize("steps", [7, 47])
def test_checkpoints_hold_every_layer(name, steps):
    """Normalised-v0 has running means, Point-v0 a counter, and Nested-v0 generators and objects, that outlive episodes."""
    first, second = own(name, 1), own(name, 2)
    first.reset()
    second.reset()
    play(first, steps, seed=0)
    play(second, 30, seed=3)  # a used simulator continues as well as a fresh one
    state = first.get_state()
    assert all(isinstance(v, (int, np.ndarray)) for v in state.values())
    for simulator in (second, own(name, 3)):
        simulator.set_state({k: np.array(v) for k, v in state.items()})
        assert simulator.get_state().keys() == state.keys()
    np.testing.assert_array_equal(play(first, 50, seed=1), play(second, 50, seed=1))


def test_classic_and_mujoco_environments_resume():
    for name in ("CartPole-v1", "Acrobot-v1", "MountainCarContinuous-v0", "Hopper-v5"):
        first, second = make(name, 1), make(name, 2)
        first.reset()
        play(first, 70, seed=0)
        second.set_state(first.get_state())
        np.testing.assert_array_equal(play(first, 70, seed=1), play(second, 70, seed=1))


def test_an_action_belongs_to_the_caller():
    simulator = own("Changing-v0")
    simulator.reset()
    action = np.ones(1, np.float32)
    simulator.step(action)
    assert action == 1
    assert simulator.get_state()["actions"] == [[1]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Infinite-v0", "finite bounds for its actions, got \\[-inf, inf\\] for action 0"),
        ("Huge-v0", "finite bounds"),
        ("Integers-v0", "actions of real numbers, got a box of int64"),
        ("Dictionary-v0", "FlattenObservation"),
        ("Old-reset-v0", "perhaps old Gym's: reset must accept a seed and return \\(observation, info\\)"),
        ("Old-seed-v0", "perhaps old Gym's: reset must accept a seed"),
        ("Lost-v0", "Lost-v0' cannot be made: AttributeError: .* 'NoSuchClass'"),
    ],
)
def test_what_does_not_fit_is_named_when_it_is_made(name, message):
    with pytest.raises(ValueError, match=message):
        own(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Old-step-v0",
            "perhaps old Gym's: step must return \\(observation, reward, terminated, truncated, info",
        ),
        ("Old-shape-v0", "observations of the shape of its observation_space, \\(2,\\), got \\(1,\\)"),
    ],
)
def test_what_a_step_returns_is_looked_at_before_training(name, message):
    with pytest.raises(ValueError, match=message):
        check_actions(OWN + name, own(name), discrete=False)


def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="'broken_module:Id-v0' cannot be made: ZeroDivisionError"):
        make("broken_module:Id-v0", 0, allow_import=True)
    with pytest.raises(ImportError, match=r"'no_such_module:Id-v0' cannot be made: .*No module named"):
        make("no_such_module:Id-v0", 0, allow_import=True)


def test_discrete_actions():
    simulator = make("CartPole-v1", 0)
    assert (simulator.num_actions, simulator.action_size, simulator.time_limit) == (2, 1, 500)
    simulator.reset()
    with pytest.raises(ValueError, match="index below 2, got 2"):
        simulator.step(2)
    with pytest.raises(
        ValueError, match="has 2 discrete actions, but this agent needs actions in a box: use X"
    ):
        check_actions("CartPole-v1", simulator, discrete=False, command="X")
    check_actions("CartPole-v1", simulator, discrete=True)


@pytest.mark.parametrize("name", ["Secret-v0", "Lazy-v0"])
def test_a_state_that_is_not_data_is_told_early(name):
    with pytest.warns(UserWarning, match=f"'simulators.own_environments:{name}' keeps state"):
        warn_if_resume_differs(OWN + name, True)


def test_modules_are_imported_only_on_request(tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("raise SystemExit('this code ran')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="must be a known simulator, got 'evil:Id-v0'"):
        make("evil:Id-v0", 0)
    with pytest.raises(SystemExit, match="this code ran"):
        make("evil:Id-v0", 0, allow_import=True)


def test_pictures():
    simulator = own("Point-v0", render=True)
    simulator.reset()
    assert simulator.render().tolist() == np.full((4, 4, 3), 7).tolist()
    with pytest.raises(RuntimeError, match="made with render=True"):
        own("Point-v0").render()
