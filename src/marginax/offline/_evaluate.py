"""`evaluate`: what is this policy worth?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from marginax import _checks as checks
from marginax.offline._answers import ESTIMATORS, Evaluation
from marginax.offline._conclude import Request
from marginax.offline._networks import Training
from marginax.offline._neural import evaluate_observations
from marginax.offline._policies import load_policy
from marginax.offline._sources import open_data
from marginax.offline._tabular import evaluate_tabular


def evaluate(
    data: Any,
    policy: Any,
    *,
    discount: float = 0.99,
    estimators: Iterable[str] | None = None,
    behaviour: Any = "auto",
    reward_range: tuple[float, float] | None = None,
    level: float = 0.95,
    seed: int = 0,
    progress: Callable[[str, Iterable[Any]], Iterator[Any]] | None = None,
    training: Training | None = None,
) -> Evaluation:
    """Estimates the value of `policy` from a log that another policy made, by every estimator that applies.

    The value is E[Σ_t γ^t r_t] under π until the episode terminates, started where the log's episodes start.
    Truncated episodes go on unseen: estimators that bootstrap account for that, the others stop there.

    Args:
        data: a `Log`, a `Trajectory`, a Parquet or CSV file, a Minari id or folder (see `open_data`).
        policy: the target policy π (see `load_policy`).
        discount: γ in [0, 1).
        estimators: names from `ESTIMATORS`; None takes all that apply.
        behaviour: `auto` (the log's probabilities, or estimated where it has none), `logged`, `estimated`,
            or a table [S, A].
        reward_range: least and largest possible reward, for the concentration bound; None takes the log's.
        level: of the intervals.
        seed: of the bootstrap.
        progress: called as `progress(name, parts)` and yields the parts (chunks of the log, or things to do).
        training: how networks are fitted, for logs with observations.

    Returns:
        Answers, diagnostics and a verdict.

    Raises:
        ValueError: where data, policy and settings do not fit together, naming the place.

    >>> import jax, marginax as mx
    >>> mdp, pi, mu = mx.problems.chain(n=5, actions=2)
    >>> batch = mx.trajectories.sample(mdp, mu, jax.random.key(0), episodes=200, horizon=200)
    >>> result = evaluate(batch, pi, discount=mdp.discount, estimators=["certainty-equivalence"])
    >>> float(mdp.initial @ mdp.v_values(pi)) in result.answers["certainty-equivalence"].interval
    True
    """
    discount = checks.discount(discount)
    if not 0.5 <= level < 1:
        raise ValueError(f"level must lie in [0.5, 1), got {level}")
    names = tuple(ESTIMATORS) if estimators is None else tuple(estimators)
    for name in names:
        if name not in ESTIMATORS:
            raise ValueError(f"unknown estimator {name!r}: choose from {', '.join(ESTIMATORS)}")
    source = open_data(data)
    target = load_policy(policy, source)
    first = next(iter(source.chunks()))
    request = Request(
        discount=discount,
        estimators=names,
        behaviour=behaviour,
        reward_range=reward_range,
        level=level,
        seed=seed,
        progress=progress or (lambda _, parts: iter(parts)),
        training=training or Training(),
    )
    return (evaluate_tabular if first.tabular else evaluate_observations)(source, target, request)
