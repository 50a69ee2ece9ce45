"""What the verdict makes of hidden states, missing support, wrong probabilities and impossible values."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import marginax as mx
from marginax.offline import Log, evaluate
from marginax.offline.behaviour import doubts
from marginax.offline.certainty_equivalence import Counts, certainty_equivalence
from marginax.offline.features import prepare
from marginax.offline.markov import MarkovSums
from marginax.offline.observations import DOUBTS
from marginax.offline.policies import FunctionPolicy
from marginax.offline.results import Estimate, answer
from marginax.offline.verdict import difference_score, judge
from offline.test_observations import QUICK, gaussian, log_of, softmax
from reference.offline_logs import GAMMA, garnet_log

NAMES = ("weighted-per-decision-is", "weighted-doubly-robust", "certainty-equivalence")


def two_rows(episodes, seed, hide=True):
    """Two rows of six cells: the action chooses the next row (3/4), the row pays ±1, and the log may hide it."""
    p, r = np.zeros((12, 2, 12)), np.zeros((12, 2))
    for x in range(12):
        column, row = divmod(x, 2)
        r[x] = 1.0 if row == 0 else -1.0
        for a in range(2):
            for other in range(2):
                if column < 5:
                    p[x, a, 2 * (column + 1) + other] = 0.75 if other == a else 0.25
    start = np.r_[0.5, 0.5, np.zeros(10)]
    mdp = mx.TabularMDP(p, r, 0.98, initial=start, reward_std=np.full((12, 2), 0.3))
    pi, mu = np.tile([0.3, 0.7], (12, 1)), np.tile([0.6, 0.4], (12, 1))
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(seed), episodes=episodes, horizon=10)
    log, truth = Log.from_trajectories(batch), float(mdp.initial @ mdp.v_values(pi))
    if hide:
        log, pi = replace(log, states=log.states // 2, next_states=log.next_states // 2), pi[::2]
    return log, pi, truth


@pytest.mark.slow
def test_hidden_states_are_noticed_and_the_recommendation_moves():
    wrong = moved = 0
    for seed in range(8):
        log, pi, truth = two_rows(400, seed)
        result = evaluate(log, pi, discount=0.98, estimators=NAMES)
        wrong += truth in result.answers["certainty-equivalence"].interval
        assert result.diagnostics["markov_fails"]
        assert result.verdict.status != "trust"
        if result.verdict.estimator is not None:
            moved += 1
            assert result.verdict.estimator == "weighted-doubly-robust"
            assert truth in result.answers["weighted-doubly-robust"].interval
        assert "The states leave out something that matters" in result.verdict.text[0]
    assert wrong == 0
    assert moved >= 6
    for seed in range(4):  # the same log with the row in its states
        log, pi, _ = two_rows(400, seed, hide=False)
        assert not evaluate(log, pi, discount=0.98, estimators=NAMES).diagnostics["markov_fails"]


@pytest.mark.slow
def test_the_markov_test_seldom_fails_on_markov_data():
    scores = []
    mdp, pi, mu, _ = garnet_log(0)
    for seed in range(30):
        batch = mx.trajectories.sample(mdp, mu, jax.random.key(seed), episodes=200, horizon=20)
        log = Log.from_trajectories(batch)
        counts = Counts(5, 3)
        counts.update(log)
        sums, parts = (MarkovSums(certainty_equivalence(counts.whole, pi, GAMMA), len(log)) for _ in range(2))
        sums.update(log)
        for half in (np.arange(100), np.arange(100, 200)):
            part = MarkovSums(sums.model, len(log))
            part.update(log.select(half))
            parts.merge(part)
        assert parts.result().score == pytest.approx(sums.result().score)
        scores.append(sums.result().score)
    assert abs(np.mean(scores)) < 1.0
    assert max(scores) < 3.5


def test_paired_differences_are_sharper_than_intervals():
    rng = np.random.default_rng(0)
    shared, own = rng.normal(size=500), 0.1 * rng.normal(size=500)
    a, b = Estimate(1.0, shared), Estimate(1.05, shared + own)
    assert abs(difference_score(a, b)) > 5  # the intervals, ±0.09, overlap widely
    assert difference_score(a, replace(b, room=(0.1, 0.0))) == 0.0
    assert difference_score(a, replace(b, room=(0.0, 0.1))) < -5  # room on the other side is none
    assert difference_score(a, Estimate(1.0, shared[:10])) is None


@pytest.mark.filterwarnings("error")
def test_large_estimates_without_an_error_are_infinitely_many_standard_errors_apart():
    exact = [Estimate(np.float64(value), np.zeros(100)) for value in (0.0, 1e10)]
    assert difference_score(*exact) == -np.inf
    assert difference_score(*exact[::-1]) == np.inf


def test_what_was_never_seen_may_be_as_bad_as_rewards_permit():
    """The log never takes the second action; in truth it leads to -1 for ever, and the log has seen a -1 once in a while."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(200):
        n = rng.geometric(0.1)
        rewards = np.where(rng.random(n) < 0.1, -1.0, 0.5)
        episodes.append(
            {
                "states": [0] * n,
                "actions": [0] * n,
                "rewards": rewards,
                "terminal": True,
                "behaviour": [1.0] * n,
            }
        )
    pi = np.array([[0.97, 0.03]])
    result = evaluate(Log.from_episodes(episodes), pi, discount=0.9, estimators=NAMES)
    # V = 0.97 (0.35 + 0.9·0.9 V) + 0.03·(-10)
    truth = (0.97 * 0.35 - 0.3) / (1 - 0.97 * 0.81)
    assert truth in result.answers["certainty-equivalence"].interval
    assert result.verdict.status != "trust"


def test_values_that_rewards_do_not_permit_are_cut_and_flagged():
    """Few episodes with large weights: importance sampling says more than any policy can earn."""
    rng = np.random.default_rng(3)
    actions = rng.random(40) < 0.2
    log = Log.from_episodes(
        [
            {
                "states": [0],
                "actions": [int(a)],
                "rewards": [1.0 - 0.1 * i % 1],
                "terminal": True,
                "behaviour": [0.02 if a else 0.98],
            }
            for i, a in enumerate(actions)
        ]
    )
    result = evaluate(
        log, [[0.1, 0.9]], discount=0.0, estimators=["per-decision-is", "weighted-per-decision-is"]
    )
    assert result.answers["per-decision-is"].value == 1.0
    assert result.answers["per-decision-is"].beyond
    assert not result.answers["weighted-per-decision-is"].beyond
    assert any("per-decision-is went beyond what rewards from" in note for note in result.notes)


def test_the_interval_of_the_logs_own_return_stays_within_what_rewards_permit():
    rewards = [0.0, 0.4, 1.0]
    episodes = [{"states": [0], "actions": [0], "rewards": [r], "terminal": True} for r in rewards]
    own = evaluate(Log.from_episodes(episodes), [[1.0]], discount=0.0).behaviour
    assert (own.interval.low, own.interval.high) == (0.0, 1.0)
    assert own.value == pytest.approx(np.mean(rewards))


@pytest.mark.slow
def test_a_truncated_log_is_compared_with_its_own_policy():
    """Logged for a few steps only, both policies are compared by values that bootstrap; the exact difference is in the interval."""
    mdp, pi, mu, _ = garnet_log(4)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=500, horizon=4)
    result = evaluate(batch, pi, discount=GAMMA)
    assert result.diagnostics["tail_behaviour"] > 0.05
    exact = float(mdp.initial @ (mdp.v_values(pi) - mdp.v_values(mu)))
    assert exact in result.advantage
    own = float(mdp.initial @ mdp.v_values(mu))
    assert abs(result.diagnostics["behaviour_value"] - own) < 0.3
    assert abs(result.behaviour.value - own) > abs(result.diagnostics["behaviour_value"] - own)


@pytest.mark.slow
def test_the_distribution_of_returns():
    """With the log's own policy it is that of the log; with another, that of episodes drawn from it."""
    mdp, pi, mu, _ = garnet_log(5)

    def draw(policy, seed, episodes):
        batch = mx.trajectories.sample(mdp, policy, jax.random.key(seed), episodes=episodes, horizon=100)
        return Log.from_trajectories(batch)

    log = draw(mu, 0, 3000)
    same = evaluate(log, mu, discount=GAMMA, estimators=["per-decision-is"]).diagnostics["returns"]
    for one, other in zip(same["target"]["quantiles"], same["behaviour"]["quantiles"], strict=True):
        np.testing.assert_allclose([*one.values()], [*other.values()], atol=0.02)
    found = evaluate(log, pi, discount=GAMMA, estimators=["per-decision-is"]).diagnostics["returns"]["target"]
    fresh = draw(pi, 1, 20_000)
    returns = fresh.sums(GAMMA**fresh.times * fresh.rewards)
    for entry in found["quantiles"]:
        share_low, share_high = (returns <= entry["low"]).mean(), (returns <= entry["high"]).mean()
        assert share_low - 0.02 <= entry["share"] <= share_high + 0.02
    for entry in found["cvar"]:
        worst = np.sort(returns)[: int(entry["share"] * len(returns))].mean()
        assert entry["low"] - 0.1 <= worst <= entry["high"] + 0.1


def test_magic_and_slope_lie_between_the_critic_and_doubly_robust():
    _, pi, _, log = garnet_log(6, episodes=300)
    answers = evaluate(log, pi, discount=GAMMA).answers
    ends = sorted([answers["weighted-doubly-robust"].value, answers["certainty-equivalence"].value])
    for name in ("magic", "slope"):
        assert ends[0] - 0.1 <= answers[name].value <= ends[1] + 0.1
        assert answers[name].error <= 1.2 * answers["weighted-doubly-robust"].error
    log, pi, truth = two_rows(400, 0)  # where the critic is biased, MAGIC goes with the weights
    answers = evaluate(log, pi, discount=0.98).answers
    assert abs(answers["magic"].value - truth) < 0.5 * abs(answers["certainty-equivalence"].value - truth)


@pytest.mark.slow
def test_state_ratios_lose_nothing_where_an_action_was_missed_by_chance():
    """Twelve actions that all do the same, taken uniformly: the log misses some of them somewhere, and logged probabilities say so."""
    rng = np.random.default_rng(0)
    p = np.repeat(rng.dirichlet(np.ones(6), size=6)[:, None], 12, axis=1) * 0.95
    mdp = mx.TabularMDP(
        p, np.repeat(rng.normal(size=(6, 1)), 12, axis=1), 0.9, reward_std=np.full((6, 12), 0.1)
    )
    mu = np.full((6, 12), 1 / 12)
    pi = rng.dirichlet(np.ones(12), size=6)
    batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=12, horizon=12)
    result = evaluate(batch, pi, discount=0.9)
    truth = float(mdp.initial @ mdp.v_values(pi))
    assert result.diagnostics["unsupported"] > 0.02
    assert result.diagnostics["unreachable"] == 0.0
    for name in ("state-ratio", "doubly-robust-state-ratio"):
        assert abs(result.answers[name].value - truth) < 4 * result.answers[name].error, name


def test_wrong_propensities_of_observations_are_noticed_and_right_ones_are_not():
    """Uniform probabilities for a softmax that leans a little, and a spread 1.3 times too large for a Gaussian."""
    for policy, wrong in ((softmax(0.5), lambda log: np.full(len(log), 1 / 3)), (gaussian(0.5), too_wide)):
        scores = {"right": [], "wrong": []}
        for seed in range(5):
            log = log_of(policy, episodes=150, steps=20, seed=seed)
            pairs = prepare(log, FunctionPolicy(policy), 0)
            scores["right"].append(doubts(pairs, log.behaviour, seed))
            scores["wrong"].append(doubts(pairs, wrong(log), seed))
        assert max(scores["right"]) < 2
        assert min(scores["wrong"]) > DOUBTS


def too_wide(log):
    z = (log.actions + 0.5 * log.states[:, :1])[:, 0] / 0.52
    return np.exp(-0.5 * z**2) / (np.sqrt(2 * np.pi) * 0.52)


@pytest.mark.slow
def test_wrong_propensities_of_observations_change_the_verdict():
    log = log_of(softmax(0.5), episodes=150, steps=20)
    log = replace(log, behaviour=np.full(len(log), 1 / 3))
    names = ("per-decision-is", "certainty-equivalence")
    result = evaluate(log, softmax(0.8), discount=0.9, estimators=names, training=QUICK)
    assert result.diagnostics["behaviour_suspicious"]
    assert "do not match how often" in result.verdict.text[0]
    assert result.verdict.better == "cannot tell"  # truncated observations: the log's own value is not known
    assert "its own value past that point is not known" in result.verdict.text[-1]


def test_what_the_behaviour_policy_saw_beyond_the_states_forbids_trust_unless_it_was_logged():
    """A hidden coin pays, and the action follows it in nine of ten episodes: whoever estimates the probabilities finds 0.9, not 0.5."""
    rng = np.random.default_rng(0)
    coin, follows = rng.random((2, 400)) < [[0.5], [0.9]]
    log = Log.from_episodes(
        [
            {"states": [0], "actions": [int(u == f)], "rewards": [float(u)], "terminal": True}
            | {"behaviour": [0.9 if f else 0.1]}
            for u, f in zip(coin, follows, strict=True)
        ]
    )
    settings = {"discount": 0.0, "reward_range": (0.0, 1.0), "estimators": NAMES}
    result = evaluate(replace(log, behaviour=None), [[0.1, 0.9]], **settings)
    assert result.answers["weighted-doubly-robust"].value == pytest.approx(
        result.answers["certainty-equivalence"].value, abs=0.02
    )
    assert 0.5 not in result.answers[result.verdict.estimator].interval
    assert result.verdict.status == "caution"
    assert "The behaviour probabilities were estimated from the states" in " ".join(result.verdict.text)
    logged = evaluate(log, [[0.1, 0.9]], **settings)
    assert "were estimated" not in " ".join(logged.verdict.text)
    assert 0.5 in logged.answers["weighted-doubly-robust"].interval


def test_where_two_families_disagree_the_interval_holds_both():
    """Half of the rewards depend on a coin that no state shows and that the first action follows: only weights know."""
    rng = np.random.default_rng(0)
    episodes = []
    for _ in range(400):
        first, second = rng.random(2) < 0.5
        episodes.append(
            {
                "states": [0, 1],
                "actions": [int(first), int(second)],
                "rewards": [0.0, float(first == second) + 0.1 * rng.normal()],
                "terminal": True,
                "behaviour": [0.5, 0.5],
            }
        )
    log = Log.from_episodes(episodes)
    result = evaluate(log, [[0.2, 0.8], [0.2, 0.8]], discount=0.9, estimators=NAMES)
    model, chosen = result.answers["certainty-equivalence"], result.answers[result.verdict.estimator]
    assert result.verdict.status == "caution"
    assert chosen.name == "weighted-doubly-robust"
    assert 0.9 * 0.68 in chosen.interval  # the truth: both actions are the same with 0.8² + 0.2²
    if not result.diagnostics["markov_fails"]:
        assert chosen.interval.low <= model.interval.low < model.interval.high <= chosen.interval.high
        assert "widened" in " ".join(result.verdict.text)


def judgement_on(answers, **diagnostics):
    """`judge` on intervals of standard errors around values, from 400 episodes that vary alike."""
    psi = np.random.default_rng(0).normal(size=400)
    estimates = {
        name: Estimate(value, error * 20 * psi / psi.std(ddof=1)) for name, (value, error) in answers.items()
    }
    found = {name: answer(name, one) for name, one in estimates.items()}
    found = {name: replace(one, ess=100.0) for name, one in found.items()}
    sound = {"ess": 100.0, "mean_weight": 1.0, "mean_weight_error": 0.1, "unsupported": 0.0, "span": 10.0}
    sound |= {"tail_target": 0.0, "tail_behaviour": 0.0}
    verdict, reach, other = judge(found, estimates, sound | diagnostics, ("certainty-equivalence",))
    return verdict, reach, found, other


def verdict_on(answers, **diagnostics):
    """The same, without the answer that contradicts."""
    return judgement_on(answers, **diagnostics)[:3]


def test_the_interval_has_room_for_the_choice():
    """Two families: the recommended interval is that of level 97.5%, 2.24 standard errors for 1.96."""
    one = {"certainty-equivalence": (1.0, 0.1)}
    verdict, reach, _ = verdict_on(one)
    assert (verdict.estimator, reach) == ("certainty-equivalence", (0.0, 0.0))
    verdict, reach, found = verdict_on(one | {"weighted-doubly-robust": (1.02, 0.2)})
    assert (verdict.status, verdict.estimator) == ("trust", "certainty-equivalence")
    assert sum(reach) / found["certainty-equivalence"].interval.width == pytest.approx(
        2.24 / 1.96 - 1, abs=0.04
    )


def test_far_from_the_log_weights_are_taken_and_not_ratios_of_states():
    both = {"state-ratio": (1.0, 0.05), "weighted-doubly-robust": (1.1, 0.2)}
    near, _, _ = verdict_on(both, unsupported=0.1, unreachable=0.0)
    far, _, _ = verdict_on(both, unsupported=0.4, unreachable=0.0)
    assert (near.estimator, far.estimator) == ("state-ratio", "weighted-doubly-robust")
    assert far.status == "caution"
    few, _, _ = verdict_on(both, unsupported=0.4, unreachable=0.0, ess=3.0)
    assert few.estimator == "state-ratio"


def test_an_interval_wider_than_all_returns_gives_way_to_one_that_is_not():
    both = {"certainty-equivalence": (1.0, 9.0), "weighted-doubly-robust": (1.1, 0.2)}
    verdict, _, _ = verdict_on(both, ess=20.0)
    assert (verdict.status, verdict.estimator) == ("caution", "weighted-doubly-robust")
    assert verdict_on(both, ess=3.0)[0].status == "cannot tell"


def test_weights_alone_are_trusted_as_far_as_the_log_goes():
    """After a truncated step weighted doubly robust has the values of its critic, which rest on the states."""
    alone = {"weighted-doubly-robust": (1.0, 0.2)}
    for hidden, status in ((0.0, "trust"), (0.005, "trust"), (0.5, "caution")):
        verdict, _, _ = verdict_on(alone, tail_target=hidden, tail_behaviour=hidden)
        assert verdict.status == status
    assert "What follows truncated steps it takes from the states" in verdict.text[0]
    assert "importance sampling and regression count it as zero" in verdict.text[1]


def test_truncation_hides_no_more_than_all():
    """All episodes happen to take the action with weight 2: 180% of the discounted future was said to be hidden."""
    one = {"states": [0, 0], "actions": [1], "rewards": [1.0], "terminal": False, "behaviour": [0.5]}
    found = evaluate(Log.from_episodes([one] * 40), [[0.0, 1.0]], discount=0.9, estimators=NAMES)
    assert (found.diagnostics["tail_behaviour"], found.diagnostics["tail_target"]) == (
        pytest.approx(0.9),
        1.0,
    )


def test_estimates_that_nearly_coincide_agree_although_their_difference_hardly_varies():
    """A tenth of a standard error apart, with a paired difference whose standard error is a hundred times smaller still."""
    for value, status in ((1.01, "trust"), (1.05, "caution")):
        both = {"certainty-equivalence": (1.0, 0.1), "weighted-doubly-robust": (value, 0.1001)}
        assert verdict_on(both)[0].status == status


def test_an_interval_wider_than_all_returns_gives_way_to_any_that_is_not():
    """The returns of the log span 10. A state ratio had to be narrower than the model by 0.6, or nothing was recommended."""
    both = {"certainty-equivalence": (1.0, 2.8), "state-ratio": (1.0, 2.3)}  # widths of 11 and 9
    assert verdict_on(both)[0].estimator == "state-ratio"
    both["certainty-equivalence"] = (1.0, 2.4)
    assert verdict_on(both)[0].estimator == "certainty-equivalence"


def test_an_interval_that_says_nothing_does_not_agree():
    """Both estimates are 1; the returns of the log span 10."""
    for error, status in ((2.0, "trust"), (3.0, "caution")):  # widths of 7.8 and 11.8
        answers = {"certainty-equivalence": (1.0, 0.1), "weighted-doubly-robust": (1.0, error)}
        verdict, _, _ = verdict_on(answers)
        assert (verdict.status, verdict.estimator) == (status, "certainty-equivalence")
    assert "weighted-doubly-robust is wider than the range of returns in the log." in verdict.text[-1]
    answers = {"certainty-equivalence": (1.0, 3.0), "weighted-doubly-robust": (1.0, 0.1)}
    verdict, _, _ = verdict_on(answers)
    assert verdict.text[0] == "Take weighted-doubly-robust: it has 100 effective episodes."


@pytest.mark.parametrize(
    "states",
    [
        {"state-ratio": (1.0, 0.1)},
        {"state-ratio": (1.0, 0.3)},
        {"certainty-equivalence": (5.0, 0.6), "state-ratio": (1.0, 0.1)},  # only the narrower one disagrees
        {"certainty-equivalence": (5.0, 3.0), "state-ratio": (1.0, 0.1)},  # the model says nothing
        {"certainty-equivalence": (5.0, 3.0), "state-ratio": (1.0, 2.0)},  # episodes are chosen
    ],
)
def test_a_family_that_disagrees_is_never_said_to_agree(states):
    """Every estimator on states was taken to agree with episodes if the model did, or if there was no model."""
    verdict, _, _, other = judgement_on(states | {"weighted-doubly-robust": (5.0, 0.2)})
    assert verdict.status == "caution"
    assert {verdict.estimator, other} == {"state-ratio", "weighted-doubly-robust"}
    assert f"The interval of {verdict.estimator} is widened to hold that of {other}" in " ".join(verdict.text)
    assert "agrees" not in " ".join(verdict.text).replace("disagrees", "")
    near = {name: (5.0, error) for name, (_, error) in states.items()}
    assert judgement_on(near | {"weighted-doubly-robust": (5.0, 0.2)})[0].status == "trust"


@pytest.mark.parametrize(
    "diagnostics", [{"unsupported": 0.4, "unreachable": 0.0}, {"markov_fails": True, "markov_score": 8.0}]
)
def test_what_cannot_be_told_recommends_nothing(diagnostics):
    both = {"state-ratio": (1.0, 9.0), "weighted-doubly-robust": (1.1, 9.0)}
    verdict, _, _ = verdict_on(both, ess=40.0, **diagnostics)
    assert (verdict.status, verdict.estimator) == ("cannot tell", None)
    assert "is wider than the range of returns" in verdict.text[-1]
    assert not any("Take" in sentence for sentence in verdict.text)


STATES, WEIGHTS = {"certainty-equivalence": (1.0, 0.1)}, {"weighted-per-decision-is": (1.0, 0.1)}
NOT_ONE = {"mean_weight": 0.5, "mean_weight_error": 0.02, "ess": 381.0}


@pytest.mark.parametrize(
    ("answers", "diagnostics", "reason"),
    [
        ({}, {"ess": 105.0}, "No estimator ran: the notes say why."),
        (
            STATES,
            {"ess": 0.0},
            "none of weighted-doubly-robust, weighted-per-decision-is, per-decision-is was run",
        ),
        (STATES | WEIGHTS, NOT_ONE, "because the weights of episodes average 0.5 and not 1."),
        (
            STATES | WEIGHTS,
            NOT_ONE | {"unsupported": 0.15},
            "seen with (discounted) probability 15.0%, and the weights of ep",
        ),
        (
            WEIGHTS,
            NOT_ONE | {"unsupported": 0.65, "unreachable": 0.0},
            "The policy leaves what the log has seen with (discounted) probability 65.0%, by actions",
        ),
        (
            WEIGHTS,
            {"tail_target": 0.07},
            "No estimate can be recommended: importance sampling counts nothing after",
        ),
        (STATES | WEIGHTS, {"ess": 1.0}, "importance sampling has only 1 effective episode (30 are needed)."),
        (
            STATES | WEIGHTS,
            {"ess": 9.0, "markov_fails": True, "markov_score": 8.0},
            "9 effective episodes are too few",
        ),
        (STATES, {"markov_fails": True, "markov_score": 8.0}, "and none of weighted-doubly-robust,"),
    ],
)
def test_the_reason_is_the_one_that_holds(answers, diagnostics, reason):
    verdict, _, _ = verdict_on(answers, **diagnostics)
    assert verdict.status != "trust"
    assert reason in " ".join(verdict.text)


def cut_off(steps, final, episodes=600, end=0.05):
    """Episodes that pay 1 a step, end with 5% and are cut off after so many steps, with their final observation or without."""
    lengths = np.random.default_rng(0).geometric(end, size=episodes)
    found = []
    for length in lengths:
        n, over = min(int(length), steps), bool(length <= steps)
        states = [0] * (n + (final and not over))
        found.append(
            {
                "states": states,
                "actions": [0] * n,
                "rewards": [1.0] * n,
                "terminal": over,
                "behaviour": [1.0] * n,
            }
        )
    return found, int((lengths > steps).sum())


ALONE = {"discount": 0.9, "estimators": ["certainty-equivalence"]}


@pytest.mark.parametrize(("steps", "status"), [(2, "cannot tell"), (20, "caution")])
def test_last_steps_that_were_set_aside_make_ends_look_frequent(steps, status):
    """The last steps that are left are those that ended an episode."""
    episodes, lost = cut_off(steps, final=False)
    log = Log.from_episodes(episodes)
    found = evaluate(log, [[1.0]], **ALONE)
    assert log.set_aside == lost
    assert found.diagnostics["set_aside"] == pytest.approx(lost / (len(log) + lost))
    assert f"{lost:,} truncated episodes came without the final observation" in found.notes[0]
    assert found.verdict.status == status
    assert "ends look more frequent" in " ".join(found.verdict.text)
    truth = 1 / (1 - 0.9 * 0.95)
    assert (truth in found.answers["certainty-equivalence"].interval) == (status == "caution")
    half = evaluate(log.select(np.arange(0, log.num_episodes, 2)), [[1.0]], **ALONE)
    assert half.diagnostics["set_aside"] == pytest.approx(found.diagnostics["set_aside"], rel=0.2)
    whole = evaluate(Log.from_episodes(cut_off(steps, final=True)[0]), [[1.0]], **ALONE)
    assert whole.diagnostics["set_aside"] == 0.0
    assert truth in whole.answers["certainty-equivalence"].interval


def test_where_every_episode_lost_its_last_step_none_is_missing():
    log = Log.from_episodes(cut_off(3, final=False, end=1e-12)[0])
    found = evaluate(log, [[1.0]], **ALONE)
    assert (log.set_aside, found.diagnostics["set_aside"]) == (600, 0.0)
    assert found.answers["certainty-equivalence"].value == pytest.approx(10.0)
