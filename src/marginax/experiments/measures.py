"""What the experiments measure on learning curves, and the claims made of it."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpy.typing import ArrayLike

from marginax.problems import Problem
from marginax.report import Claim, bootstrap, verdict
from marginax.trajectories import SamplingTables, Trajectory, sample, sampling_tables


def streams(problem: Problem, seeds: range, iterations: int, horizon: int, seed: int = 0) -> Trajectory:
    """One trajectory an iteration for each of some seeds, by the behaviour policy: fields `[seeds, iterations, T]`.

    Seed k draws the same trajectories whichever seeds stand beside it.

    >>> import marginax as mx
    >>> problem = mx.problems.chain(n=3)
    >>> both, one = streams(problem, range(2), 5, 3), streams(problem, range(1, 2), 5, 3)
    >>> bool((both.actions[1] == one.actions[0]).all())
    True
    """
    keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.key(seed), k))(np.asarray(seeds))
    return _draw(sampling_tables(problem.mdp), jnp.asarray(problem.mu), keys, iterations, horizon)


@partial(jax.jit, static_argnums=(3, 4))
def _draw(tables: SamplingTables, mu: Array, keys: Array, iterations: int, horizon: int) -> Trajectory:
    return jax.vmap(lambda key: sample(tables, mu, key, episodes=iterations, horizon=horizon))(keys)


def relative_error(q: ArrayLike, q_pi: ArrayLike, state: int = 0) -> np.ndarray:
    """The paper's error at the start state, `Σ_a |Q(x0,a) - Q^π(x0,a)| / |Q^π(x0,a)|`.

    Args:
        q: `[..., S, A]`.
        q_pi: `[S, A]`.
        state: x0.

    >>> relative_error([[[1.0, 3.0]]], [[2.0, 2.0]])
    array([1.])
    """
    truth = np.asarray(q_pi)[state]
    return (np.abs(np.asarray(q)[..., state, :] - truth) / np.abs(truth)).sum(axis=-1)


def time_to(errors: ArrayLike, level: float) -> np.ndarray:
    """Iterations until the mean curve over seeds is at or below a level for good; one more than there are if never.

    Args:
        errors: `[..., seeds, iterations]`.
        level: the level.

    >>> time_to([[3.0, 1.0, 2.0, 0.5, 0.4]], 1.0)
    array(4)
    """
    above = np.asarray(errors, dtype=float).mean(axis=-2) > level
    last = np.where(above.any(axis=-1), above.shape[-1] - 1 - above[..., ::-1].argmax(axis=-1), -1)
    return np.asarray(last + 2)


def final(errors: ArrayLike, share: float = 0.2) -> np.ndarray:
    """Mean over seeds and over the last part of the iterations: where a curve ends up.

    Args:
        errors: `[..., seeds, iterations]`.
        share: the part.

    >>> final([[5.0, 5.0, 5.0, 5.0, 1.0]])
    array(1.)
    """
    errors = np.asarray(errors, dtype=float)
    last = max(1, round(share * errors.shape[-1]))
    return np.asarray(errors[..., -last:].mean(axis=(-2, -1)))


def claim(
    text: str,
    where: str,
    measure: str,
    statistic: Callable[..., np.ndarray],
    samples: list[np.ndarray],
    command: str,
    *,
    low: float = -np.inf,
    high: float = np.inf,
) -> Claim:
    """A claim that a statistic of some samples lies in `[low, high]`, with its verdict.

    Args:
        text: the claim, in brief.
        where: where it is made.
        measure: what `statistic` is, in words.
        statistic: as `report.bootstrap` takes it.
        samples: arrays whose first axis is the seed.
        command: how to measure it.
        low: where the claim's region begins.
        high: where it ends.

    >>> made = claim("positive", "here", "mean", lambda x: x.mean(1), [np.ones(5)], "true", low=0.0)
    >>> made.verdict
    'reproduced'
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # what is not finite cannot be decided
        interval = bootstrap(statistic, *samples)
    return Claim(text, where, measure, interval, verdict(interval, low, high), command)
