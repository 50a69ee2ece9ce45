"""A conformance kit: does another implementation of Retrace, V-trace, n-step, Peng's Q(λ) or marginalized targets keep the rules?

`check_targets` feeds a function small sequences with known answers, and says which rule it breaks and at which step. NumPy
only: the answers are the papers' sums, written out for one start at a time.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from marginax import _checks as checks

__all__ = ["Report", "Row", "check_targets"]


# What the function is called with, by name.
ARGUMENTS = {
    "retrace": ("q", "v_next", "rewards", "discounts", "ratios", "truncated"),
    "vtrace": ("v", "v_next", "rewards", "discounts", "ratios", "truncated"),
    "n-step": ("v_next", "rewards", "discounts", "steps", "truncated"),
    "peng": ("v_next", "rewards", "discounts", "decay", "truncated"),
    "marginalized": ("q", "v_next", "rewards", "discounts", "weights", "truncated"),
}


@dataclass(frozen=True)
class Row:
    """How one rule was kept.

    >>> Row("an episode that ends", "kept")
    Row(rule='an episode that ends', status='kept', step=None, expected=None, got=None, note='')
    """

    rule: str
    """The rule."""
    status: Literal["kept", "broken", "not tested"]
    """The outcome."""
    step: int | None = None
    """The last step with a wrong target: errors travel backwards in time from there."""
    expected: float | None = None
    """The target there."""
    got: float | None = None
    """What the function returned instead."""
    note: str = ""
    """The known mistake that gives the same answer, or why there is none."""


@dataclass(frozen=True)
class Report:
    """All rules with their outcome; printed, a table.

    >>> print(Report("peng", (Row("an episode that ends", "broken", 1, 0.5, 0.25),)))
    peng: 1 of 1 rules broken
    rule                  outcome  step  expected  got
    an episode that ends  broken   1     0.5       0.25
    """

    algorithm: str
    """What was checked."""
    rows: tuple[Row, ...]
    """One row for each rule."""

    @property
    def passed(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[str, ...]:
        """The rules that are broken."""
        return tuple(row.rule for row in self.rows if row.status == "broken")

    def __str__(self) -> str:
        def cell(value: Any) -> str:
            return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

        table = [("rule", "outcome", "step", "expected", "got", "note")]
        table += [
            (row.rule, row.status, cell(row.step), cell(row.expected), cell(row.got), row.note)
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in table) for i in range(5)]
        lines = ["  ".join(x.ljust(w) for x, w in zip(line, [*widths, 0], strict=True)) for line in table]
        if not any(row.note for row in self.rows):
            lines[0] = lines[0].removesuffix("note")
        title = f"{self.algorithm}: {len(self.broken)} of {len(self.rows)} rules broken"
        return "\n".join([title, *(line.rstrip() for line in lines)])


@dataclass(frozen=True)
class _Sequence:
    """One sequence, all arrays `[T]` but `weights[t, s]`; `values` are Q(x_t, a_t) or V(x_t)."""

    values: np.ndarray
    v_next: np.ndarray
    rewards: np.ndarray
    discounts: np.ndarray
    ratios: np.ndarray
    weights: np.ndarray
    truncated: np.ndarray


@dataclass(frozen=True)
class _Settings:
    clip: float
    rho_clip: float
    decay: float
    steps: int


def _target(algorithm: str, s: _Sequence, t: int, settings: _Settings) -> float:
    """The target at step t: a sum over the steps that t reaches."""
    stop = t
    while stop < len(s.rewards) - 1 and s.discounts[stop] != 0 and not s.truncated[stop]:
        stop += 1
    gamma, total, product = 1.0, 0.0, 1.0
    for i in range(t, stop + 1):
        bootstrap = s.discounts[i] * s.v_next[i] if s.discounts[i] else 0.0
        error = s.rewards[i] + bootstrap - s.values[i]
        if algorithm == "retrace":
            product *= settings.decay * min(settings.clip, s.ratios[i]) if i > t else 1.0
            total += gamma * product * error
        elif algorithm == "vtrace":
            total += gamma * product * min(settings.rho_clip, s.ratios[i]) * error
            product *= settings.decay * min(settings.clip, s.ratios[i])
        elif algorithm == "marginalized":
            total += gamma * s.weights[t, i] * error
        else:  # a mixture of returns: of n steps alone, or of k = 1, 2, ... with shares (1 - λ) λ^(k-1)
            last = i == stop or (algorithm == "n-step" and i == t + settings.steps - 1)
            share = 1.0 if last else 0.0 if algorithm == "n-step" else 1 - settings.decay
            total += gamma * (product * s.rewards[i] + product * share * bootstrap)
            product *= 1.0 if algorithm == "n-step" else settings.decay
            if last:
                return total
        gamma *= s.discounts[i]
    return s.values[t] + total


def _targets(algorithm: str, s: _Sequence, settings: _Settings) -> np.ndarray:
    return np.array([_target(algorithm, s, t, settings) for t in range(len(s.rewards))])


def _wrong_bootstrap(s: _Sequence) -> _Sequence:
    """The second-to-last step bootstraps from the state after the last one."""
    v_next = s.v_next.copy()
    v_next[-2:-1] = v_next[-1]
    return replace(s, v_next=v_next)


# Mistakes that people make, as the sequence for which their answer would be right.
MISTAKES: dict[str, Callable[[_Sequence], _Sequence]] = {
    "credit passes a truncation": lambda s: replace(s, truncated=np.zeros_like(s.truncated)),
    "a truncated step does not bootstrap": lambda s: replace(
        s, discounts=np.where(s.truncated, 0, s.discounts)
    ),
    "the last step does not bootstrap": lambda s: replace(
        s, v_next=np.where(np.arange(len(s.v_next)) == len(s.v_next) - 1, 0, s.v_next)
    ),
    "the second-to-last step bootstraps from the wrong state": _wrong_bootstrap,
    "ratios of the next step": lambda s: replace(s, ratios=np.append(s.ratios[1:], 1.0)),
    "ratios of the step before": lambda s: replace(s, ratios=np.append(1.0, s.ratios[:-1])),
    "rewards of the next step": lambda s: replace(s, rewards=np.append(s.rewards[1:], 0.0)),
    "weights transposed": lambda s: replace(s, weights=s.weights.T),
}


def _named_mistake(
    algorithm: str, s: _Sequence, settings: _Settings, got: np.ndarray, tolerance: float
) -> str:
    """The known mistake that gives this answer, if any."""
    answers = {name: _targets(algorithm, change(s), settings) for name, change in MISTAKES.items()}
    answers["ratios are not clipped"] = _targets(
        algorithm, s, replace(settings, clip=np.inf, rho_clip=np.inf)
    )
    return next((n for n, a in answers.items() if np.allclose(a, got, tolerance, tolerance)), "")


def _cases(algorithm: str, discount: float) -> Iterator[tuple[str, _Sequence, _Sequence]]:
    """Rules, each with a sequence without NaN (for the answer) and with NaN (for the function)."""
    rng = np.random.default_rng(0)

    def sequence(length: int, ends: tuple[int, ...] = (), cuts: tuple[int, ...] = ()) -> _Sequence:
        values, v_next, rewards = rng.normal(size=(3, length))
        steps = np.arange(length)
        return _Sequence(
            values,
            v_next,
            rewards,
            np.where(np.isin(steps, ends), 0.0, discount),
            np.exp(rng.normal(scale=0.7, size=length)),
            rng.uniform(0.2, 1.5, size=(length, length)),
            np.isin(steps, cuts),
        )

    def same(rule: str, s: _Sequence) -> tuple[str, _Sequence, _Sequence]:
        return rule, s, s

    def poisoned(rule: str, s: _Sequence, name: str, where: Any) -> tuple[str, _Sequence, _Sequence]:
        array = getattr(s, name).copy()
        array[where] = np.nan
        return rule, s, replace(s, **{name: array})

    yield same("a sequence of one step", sequence(1))
    yield same("the array ends before the episode: bootstrap", sequence(6))
    yield same("an episode that ends: no bootstrap", sequence(6, ends=(5,)))
    yield same("two episodes, packed", sequence(8, ends=(3, 7)))
    yield same("every step ends (discounts of 0)", sequence(4, ends=(0, 1, 2, 3)))
    if algorithm in ("retrace", "vtrace"):
        base = sequence(6)
        yield same("ratios of 1 (on-policy)", replace(base, ratios=np.ones(6)))
        yield same("ratios below 1", replace(base, ratios=rng.uniform(0.1, 0.9, size=6)))
        yield same("ratios above 1", replace(base, ratios=rng.uniform(1.1, 3.0, size=6)))
        yield same("a ratio of 0", replace(base, ratios=np.where(np.arange(6) == 3, 0.0, base.ratios)))
    yield same("truncated inside: bootstrap, no credit passes", sequence(7, cuts=(3,)))
    yield same("truncated at the end", sequence(5, cuts=(4,)))
    yield same("packed: ended, truncated, cut by the array", sequence(9, ends=(2,), cuts=(5,)))
    yield poisoned("NaN in v_next after an end is not read", sequence(6, ends=(2, 5)), "v_next", [2, 5])
    if algorithm == "retrace":
        yield poisoned(
            "NaN in an episode's first ratio is not read", sequence(6, ends=(2,)), "ratios", [0, 3]
        )
    if algorithm == "marginalized":
        s = sequence(6, ends=(2,))
        past = np.tri(6, k=-1, dtype=bool)
        past[:3, 3:] = True
        yield poisoned("NaN in weights of steps that are not reached is not read", s, "weights", past)


def check_targets(
    fn: Callable[..., Any],
    algorithm: str,
    *,
    clip: float = 1.0,
    rho_clip: float = 1.0,
    decay: float | None = None,
    steps: int = 3,
    discount: float = 0.9,
    tolerance: float = 1e-4,
) -> Report:
    """Checks another implementation of a target against the definition, rule by rule.

    Args:
        fn: called with the arrays of one sequence, by name, in float32; it returns `[T]` targets. It may leave out
            `truncated`; then rules on truncation are not tested.

            | algorithm    | arguments                                                                  |
            |--------------|----------------------------------------------------------------------------|
            | retrace      | `q, v_next, rewards, discounts, ratios, truncated`                         |
            | vtrace       | `v, v_next, rewards, discounts, ratios, truncated`                         |
            | n-step       | `v_next, rewards, discounts, steps, truncated`                             |
            | peng         | `v_next, rewards, discounts, decay, truncated`                             |
            | marginalized | `q, v_next, rewards, discounts, weights, truncated`; `weights[t, s]` for start `t` |

            `q[t] = Q(x_t, a_t)`, `v_next[t] = Q(x_{t+1}, π)`, `discounts[t]` is γ or 0 where step `t` ended the
            episode, `ratios[t] = π/μ` at step `t`, as they are: `fn` clips them.
        algorithm: which target it is.
        clip: c̄ of Retrace and V-trace.
        rho_clip: ρ̄ of V-trace.
        decay: λ; 1 unless given, and 0.8 for Peng's Q(λ).
        steps: n of n-step.
        discount: γ in (0, 1]; 0 would say that every step ends its episode.
        tolerance: relative and absolute.

    Returns:
        A report: print it, or assert its `passed`.

    Raises:
        ValueError: if the algorithm has another name, or a number is out of range.

    >>> def retrace(q, v_next, rewards, discounts, ratios):  # one episode at a time
    ...     target, targets = v_next[-1], []
    ...     for t in reversed(range(len(q))):
    ...         target = rewards[t] + discounts[t] * target
    ...         targets.insert(0, target)
    ...         target = v_next[t - 1] + np.minimum(1, ratios[t]) * (target - q[t])
    ...     return targets
    >>> check_targets(retrace, "retrace").broken
    ('NaN in v_next after an end is not read', "NaN in an episode's first ratio is not read")
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function that returns targets, got {type(fn).__name__}")
    checks.choice("algorithm", algorithm, ARGUMENTS)
    if decay is None:
        decay = 0.8 if algorithm == "peng" else 1.0
    settings = _Settings(
        checks.at_least("clip", clip, 0.0, infinite=True),
        checks.at_least("rho_clip", rho_clip, 0.0, infinite=True),
        checks.fraction("decay", decay),
        checks.count("steps", steps),
    )
    checks.step_size(discount, "discount")
    checks.positive("tolerance", tolerance)
    parameters = inspect.signature(fn).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes_truncated = open_ended or "truncated" in parameters
    names = [name for name in ARGUMENTS[algorithm] if takes_truncated or name != "truncated"]
    rows = []
    for rule, clean, given in _cases(algorithm, discount):
        if clean.truncated[:-1].any() and not takes_truncated:
            rows.append(Row(rule, "not tested", note="takes no `truncated`"))
            continue
        arrays = vars(given) | {"q": given.values, "v": given.values} | vars(settings)
        named = {name: _in_single_precision(arrays[name]) for name in names}
        rows.append(_outcome(rule, fn, named, algorithm, clean, settings, tolerance))
    return Report(algorithm, tuple(rows))


def _outcome(
    rule: str,
    fn: Callable[..., Any],
    arguments: dict[str, Any],
    algorithm: str,
    clean: _Sequence,
    settings: _Settings,
    tolerance: float,
) -> Row:
    """How `fn` keeps one rule: what it returns, against the targets of a sequence without NaN."""
    expected = _targets(algorithm, clean, settings)
    try:
        got = np.asarray(fn(**arguments), float)
    except Exception as error:
        return Row(rule, "broken", note=f"{type(error).__name__}: {error}")
    if got.shape != expected.shape:
        return Row(rule, "broken", note=f"returned shape {got.shape} instead of {expected.shape}")
    wrong = np.flatnonzero(~np.isclose(got, expected, tolerance, tolerance))
    if wrong.size == 0:
        return Row(rule, "kept")
    # Errors travel backwards in time: the last wrong step is where they come from.
    step = int(wrong[-1])
    note = _named_mistake(algorithm, clean, settings, got, tolerance)
    return Row(rule, "broken", step, float(expected[step]), float(got[step]), note)


def _in_single_precision(value: Any) -> Any:
    return value.astype(np.float32) if isinstance(value, np.ndarray) and value.dtype != bool else value
