"""Coverage at the nominal rate, on a problem small enough to repeat."""

import jax
import numpy as np
import pytest
from scipy.stats import binomtest, norm

import marginax as mx
from marginax.offline import Log, concentration, evaluate
from marginax.offline.diagnostics import distribution
from marginax.offline.importance import ImportanceSums
from marginax.offline.results import clipped_lower_bound

REPETITIONS = 200
HALF = np.full(50, 0.5)
NAMES = (
    "per-decision-is",
    "weighted-per-decision-is",
    "doubly-robust",
    "weighted-doubly-robust",
    "certainty-equivalence",
    "regression",
)


@pytest.fixture(scope="module")
def coverage():
    """How often the truth lies in the interval of each estimator: a chain of four, 100 episodes a log."""
    mdp, pi, mu = mx.problems.chain(n=4, actions=2, noise=0.3, discount=0.9)
    pi = 0.6 * pi + 0.4 * mu
    truth = float(mdp.initial @ mdp.v_values(pi))
    episodes = 100
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=REPETITIONS * episodes, horizon=5)
    log = Log.from_trajectories(batch)
    inside = dict.fromkeys((*NAMES, "bound"), 0)
    for k in range(REPETITIONS):
        part = log.select(np.arange(k * episodes, (k + 1) * episodes))
        answers = evaluate(part, pi, discount=0.9, estimators=NAMES).answers
        for name in NAMES:
            inside[name] += truth in answers[name].interval
        inside["bound"] += truth in answers["per-decision-is"].bound
    return {name: n / REPETITIONS for name, n in inside.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_intervals_cover_at_their_nominal_rate(coverage, name):
    """95%, within three standard errors of 200 repetitions (1.5% each); doubly robust ones leave room for heavy tails."""
    assert 0.904 <= coverage[name] <= (1.0 if name.endswith("doubly-robust") else 0.996)


@pytest.mark.slow
def test_the_concentration_bound_always_covers(coverage):
    assert coverage["bound"] == 1.0


def test_the_clipped_bound_is_a_lower_bound_for_heavy_tails():
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = rng.pareto(1.5, size=2000)  # mean 2, infinite variance
        assert 0.0 < clipped_lower_bound(x, 0.05) < 2.0
    assert clipped_lower_bound(np.ones(10), 0.05) == 0.0
    assert clipped_lower_bound(np.zeros(1000), 0.05) == 0.0


def test_the_concentration_bound_stays_within_what_is_possible():
    bound = concentration(np.zeros(100), np.zeros(100), (-1.0, 3.0))
    assert (bound.low, bound.high) == (-1.0, 3.0)
    bound = concentration(np.full(100, 1e9), np.full(100, 1e9), (-1.0, 3.0))  # weights that cannot be right
    assert (bound.low, bound.high) == (-1.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lower": HALF[:-1]}, r"upper must have shape \(49,\), got \(50,\)"),
        ({"upper": HALF - 1}, r"upper must not be negative, but upper\[0\] = -0.5"),
        ({"upper": HALF * np.nan}, r"upper must be finite, but upper\[0\] = nan"),
        ({"value_range": (1.0, 0.0)}, "value_range must be the least and the largest value"),
        ({"level": 1.0}, r"level must lie in \(0, 1\), got 1.0"),
    ],
)
def test_a_concentration_bound_of_nonsense_is_refused(changes, sentence):
    settings = {"lower": HALF, "upper": HALF, "value_range": (0.0, 1.0)} | changes
    with pytest.raises(ValueError, match=sentence):
        concentration(**settings)


def test_the_concentration_bound_of_a_sorted_log_is_no_looser():
    """The clipping level was chosen on the first twentieth: all zeros if the log is sorted, so that nothing was bounded."""
    half = np.tile([0.0, 1.0], 1000)
    for order in (half, np.sort(half), np.sort(half)[::-1]):
        bound = concentration(order, 1 - order, (0.0, 1.0))
        assert 0.4 < bound.low < 0.5 < bound.high < 0.6


def test_heavy_tails_of_weights_are_noticed():
    """A Pareto tail of index 0.5 or more has no variance; an exponential one has."""
    rng = np.random.default_rng(0)

    def index(weights):
        weighted = ImportanceSums(len(weights), 1, 0.9, (0.0, 1.0))
        weighted.weights[:] = weights
        return weighted.tail_index()

    assert 0.5 < np.mean([index(rng.pareto(1.25, size=1000) + 1) for _ in range(50)]) < 0.8  # truly 0.8
    assert abs(np.mean([index(rng.exponential(size=1000)) for _ in range(50)])) < 0.1
    assert index(np.ones(100)) == 0.0


def test_a_heavy_tail_that_was_missed_is_left_open():
    """Two in a thousand episodes carry most of the value; logs without them must not be sure of it."""
    rng = np.random.default_rng(0)
    weights = rng.pareto(1.1, size=300) * 0.05
    log = Log.from_episodes(
        [
            {"states": [0], "actions": [0], "rewards": [r], "terminal": True, "behaviour": [0.5]}
            for r in rng.random(300)
        ]
    )
    weighted = ImportanceSums(300, 1, 0.9, (0.0, 1.0))
    weighted.update(log, weights)
    assert weighted.heavy
    missing = 1 - weighted.weights.mean()
    assert missing > 0.2
    for name, estimate in weighted.estimates().items():
        assert estimate.bias_bound >= 0.9 * missing, name


def failures(seed, chance, episodes=40):
    """Episodes of one step that pay 1, and -1 with a small chance, whatever the action."""
    rng = np.random.default_rng(seed)
    rewards, actions = np.where(rng.random(episodes) < chance, -1.0, 1.0), rng.integers(2, size=episodes)
    return Log.from_episodes(
        [
            {"states": [0], "actions": [a], "rewards": [r], "terminal": True, "behaviour": [0.5]}
            for a, r in zip(actions, rewards, strict=True)
        ]
    )


ALIKE = ("weighted-is", "weighted-doubly-robust", "state-ratio", "certainty-equivalence")
BOUNDED = {"discount": 0.0, "reward_range": (-1.0, 1.0)}


def test_a_log_without_a_failure_is_not_sure_that_there_is_none():
    """Half of the logs show no failure: the intervals of theirs must hold the truth as well."""
    inside = dict.fromkeys((*ALIKE, "behaviour"), 0)
    for seed in range(40):
        result = evaluate(failures(seed, 0.02), [[0.4, 0.6]], estimators=ALIKE, **BOUNDED)
        for name, found in (result.answers | {"behaviour": result.behaviour}).items():
            inside[name] += 1.0 - 2 * 0.02 in found.interval
    assert min(inside.values()) >= 38, inside


def test_the_room_where_episodes_are_alike_is_clopper_and_pearsons():
    log = failures(0, 0.0)
    ranked = evaluate(log, {"a": [[0.5, 0.5]], "b": [[0.4, 0.6]]}, estimators=ALIKE, **BOUNDED)

    def low(episodes, level=0.95):
        return 1.0 - 2 * binomtest(0, episodes).proportion_ci(level).high

    a = ranked.policies["a"]
    assert a.behaviour.interval.low == pytest.approx(low(40), abs=1e-5)
    assert a.answers["weighted-is"].interval.low == pytest.approx(low(40), abs=1e-5)
    chosen = a.answers[a.verdict.estimator].interval  # one of three families
    assert chosen.low == pytest.approx(low(40, 1 - 0.05 / 3), abs=1e-5)
    assert f"a probability of up to {(1 - low(40, 1 - 0.05 / 3)) / 2:.2%}" in " ".join(a.verdict.text)
    assert a.advantage.low == pytest.approx(chosen.low - 1.0, abs=1e-5)
    assert a.verdict.better == "cannot tell"
    [d] = ranked.differences
    assert not d.real
    assert d.interval.low == pytest.approx(chosen.low - 1.0, abs=1e-5)  # the choice counts here, too


def test_two_actions_that_each_always_pay_the_same_are_compared_with_room_for_what_they_may_pay():
    """Certainty equivalence sees no episode that differs from its model; the log has seen each action forty times."""
    few = Log.from_episodes(
        [
            {"states": [0], "actions": [a], "rewards": [0.4 * a], "terminal": True, "behaviour": [0.5]}
            for a in [0, 1, 1, 0] * 20
        ]
    )
    pair = {"one": [[0.0, 1.0]], "zero": [[1.0, 0.0]]}
    ranked = evaluate(few, pair, estimators=["certainty-equivalence"], **BOUNDED)
    [d] = ranked.differences
    chance = binomtest(0, 40).proportion_ci(0.95).high
    assert d.value == pytest.approx(0.4)
    assert d.interval.low == pytest.approx(0.4 - chance * 1.4 - chance * 1.0, abs=1e-5)
    endless = evaluate(few, pair["one"], estimators=["certainty-equivalence"], discount=1.0)
    assert endless.verdict.status == "cannot tell"
    assert "a horizon or a discount below 1 would bound" in endless.verdict.text[-1]


def test_equal_returns_of_episodes_that_end_differently_are_ordinary_variation():
    ends = np.random.default_rng(0).random(100) < 0.3
    log = Log.from_episodes(
        [
            {"states": [0, 0], "actions": [0], "rewards": [1.0], "terminal": bool(end), "behaviour": [1.0]}
            for end in ends
        ]
    )
    result = evaluate(log, [[1.0]], discount=0.9, estimators=["certainty-equivalence"])
    assert result.estimates["certainty-equivalence"].left_open() == (0.0, 0.0)
    assert "No episode differs" not in " ".join(result.verdict.text)


@pytest.mark.parametrize("failed", [0, 1, 3, 4, 8, 12, 15])
def test_the_interval_of_a_quantile_of_equal_returns_holds_what_the_binomial_does_not_rule_out(failed):
    """Of 200 episodes some failed: the 5% quantile is a failure if at least 5% of episodes fail, which an exact test may leave open."""
    found = distribution(np.repeat([0.0, 1.0], [failed, 200 - failed]), np.ones(200), 0.95, (-1.0, 2.0))
    [ends] = [(entry["low"], entry["high"]) for entry in found["quantiles"] if entry["share"] == 0.05]
    open_ = binomtest(failed, 200).proportion_ci(0.95)
    assert ends == (float(open_.high < 0.05), float(open_.low < 0.05))


def test_the_worst_part_of_few_returns_is_not_sure():
    """Normal returns, and failures with 2%: the mean of the worst 5% of 50 episodes rests on two or three of them, or none that failed."""
    rng, inside = np.random.default_rng(0), np.zeros(2)
    truths = -norm.pdf(norm.ppf(0.05)) / 0.05, 1 - 0.02 / 0.05
    for _ in range(100):
        draws = rng.normal(size=50), (rng.random(50) > 0.02).astype(float)
        for k, possible in enumerate([(-9.0, 9.0), (0.0, 1.0)]):
            found = distribution(draws[k], np.ones(50), 0.95, possible)
            [cvar] = [entry for entry in found["cvar"] if entry["share"] == 0.05]
            inside[k] += cvar["low"] <= truths[k] <= cvar["high"]
            assert possible[0] <= cvar["low"] <= cvar["high"] <= possible[1]
    assert inside.min() >= 88
    five, *_ = distribution(rng.normal(size=50), np.ones(50), 0.95, (-9.0, 9.0))["quantiles"]
    assert five["low"] == -9.0  # 0.95^50 = 8% of such logs have none of the worst 5%
