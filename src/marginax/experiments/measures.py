"""What the tabular experiments share: the stream of trajectories, the operators' estimators, measures on curves."""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

import marginax as mx
from marginax.experiments.runner import Arrays, Experiment, Part

if TYPE_CHECKING:
    from marginax.problems import Problem
    from marginax.trajectories import Trajectory

ONE, RETRACE = "one-step", "retrace"
MONTE_CARLO, CERTAINTY = "marginalized-monte-carlo", "marginalized-certainty-equivalence"
EXACT, AS_PRINTED = "marginalized-exact", "marginalized-as-printed"
PATHS, REVERSE = "marginalized-monte-carlo-paths", "marginalized-reverse-td"
REFRESH = {CERTAINTY: 1.05, REVERSE: 1.2}
"""Weights that take long to solve for are solved for again when the data have grown by this factor, others every time."""


def streams(problem: "Problem", seeds: range, iterations: int, horizon: int, seed: int = 0) -> "Trajectory":
    """One trajectory per iteration for each seed, by the behaviour policy: fields `[seeds, iterations, T]`.

    Seed k draws the same trajectories whichever seeds stand beside it.
    """
    import jax
    import jax.numpy as jnp

    keys = jax.vmap(lambda k: jax.random.fold_in(jax.random.key(seed), k))(np.asarray(seeds))
    return _sampler(iterations, horizon)(
        mx.trajectories.sampling_tables(problem.mdp), jnp.asarray(problem.mu), keys
    )


@cache
def _sampler(iterations: int, horizon: int) -> Callable[..., "Trajectory"]:
    import jax

    draw = partial(mx.trajectories.sample, episodes=iterations, horizon=horizon)
    return jax.jit(jax.vmap(draw, in_axes=(None, None, 0)))


def estimator(operator: str, problem: "Problem", c: np.ndarray) -> Any:
    """The estimator, or the table, of a marginalized operator's TD weights; None for the other operators."""
    size = (*problem.mdp.r.shape, problem.mdp.discount)
    if operator == EXACT:
        return mx.weights.exact(problem.mdp, problem.mu, c)
    if operator == CERTAINTY:
        return mx.weights.CertaintyEquivalence.init(*size)
    if operator in (MONTE_CARLO, AS_PRINTED):
        return mx.weights.MonteCarlo.init(*size, factored=False, as_printed=operator == AS_PRINTED)
    if operator == PATHS:
        return mx.weights.MonteCarlo.init(*size)
    if operator == REVERSE:
        return mx.weights.ReverseTD.init(*size)
    return None


def parts_by_seeds(
    experiment: Experiment,
    chunk: int,
    compute: Callable[[range], Arrays],
    without: tuple[str, ...] = (),
    *,
    cost: float,
    setup: float,
) -> list[Part]:
    """Parts of `chunk` seeds each, whose settings leave out the number of seeds: more seeds add parts.

    `cost` and `setup` are the seconds that a seed and compiling take.
    """
    kept = {name: value for name, value in experiment.settings().items() if name not in ("seeds", *without)}
    parts = []
    for first in range(0, experiment.seeds, chunk):
        seeds = range(first, min(first + chunk, experiment.seeds))
        settings = {**kept, "first": seeds.start, "last": seeds.stop}
        parts.append(
            Part(
                f"seeds-{seeds.start}-{seeds.stop}",
                settings,
                partial(compute, seeds),
                cost=cost * len(seeds),
                program=str(len(seeds)),
                title=f"seeds {seeds.start} to {seeds.stop - 1}",
                setup=setup,
            )
        )
    return parts


def relative_error(q: ArrayLike, q_pi: ArrayLike) -> np.ndarray:
    """The paper's error at the start state, `Σ_a |Q(x0,a) - Q^π(x0,a)| / |Q^π(x0,a)|`, of `q[..., S, A]`."""
    truth = np.asarray(q_pi)[0]
    return (np.abs(np.asarray(q)[..., 0, :] - truth) / np.abs(truth)).sum(axis=-1)


def time_to(errors: np.ndarray, level: float) -> int:
    """Iterations until the mean of `errors[seeds, iterations]` is at or below a level for good; one more than there are
    if never. A mean that is NaN is above every level.
    """
    above = np.flatnonzero(~(errors.mean(axis=0) <= level))
    return int(above[-1]) + 2 if above.size else 1


def final(errors: np.ndarray) -> float:
    """Mean over seeds and over the last fifth of the iterations of `errors[seeds, iterations]`: where a curve ends up."""
    return float(errors[:, -max(1, round(0.2 * errors.shape[1])) :].mean())


def log_ratio(x: np.ndarray, y: np.ndarray) -> float:
    """log10 of the ratio of two means."""
    return float(np.log10(x.mean() / y.mean()))


def reached(errors: np.ndarray, level: float, steps: np.ndarray) -> str:
    """The iteration that `time_to` finds, as text, where `errors[seeds, n]` are those of the iterations `steps[n]`."""
    place = time_to(errors, level)
    return f"{steps[place - 1]}" if place <= len(steps) else f"more than {steps[-1]}"
