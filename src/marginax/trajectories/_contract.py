"""The contract of an episode, and its one validator for every source of data.

An episode of N steps has N actions, N rewards and N + 1 states: `states[t]` is what action t was chosen on, and `states[N]` is
what the last step returned. Its last step is terminal (nothing follows) or truncated (the process went on, the data do not).
Every error names the episode and, where there is one, the step.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np


def check_lengths(
    name: object, states: Sequence[Any] | np.ndarray, steps: int, *, final: bool | None = None, **columns: Any
) -> None:
    """Checks that the arrays of one episode fit together.

    Args:
        name: what errors call the episode.
        states: its states or observations, N + 1 of them.
        steps: N.
        final: whether the state after the last step is included: True for N + 1 states, False for N, None for either.
        **columns: what has one entry per step, by name; None is skipped.

    Raises:
        ValueError: for an episode without steps, and naming the column whose length does not fit.

    >>> check_lengths(3, [0, 1, 0], 2, actions=[1, 0], rewards=[0.0, 1.0])
    >>> check_lengths(3, [0, 1, 0], 2, actions=[1], rewards=[0.0, 1.0])
    Traceback (most recent call last):
    ValueError: episode 3: 1 actions for 2 steps
    """
    if steps == 0:
        raise ValueError(f"episode {name}: it has no steps")
    for label, values in columns.items():
        if values is not None and len(values) != steps:
            raise ValueError(f"episode {name}: {len(values)} {label} for {steps} steps")
    allowed = {True: (steps + 1,), False: (steps,), None: (steps, steps + 1)}[final]
    if len(states) not in allowed:
        expected = " or ".join(str(n) for n in allowed)
        raise ValueError(f"episode {name}: {len(states)} observations for {steps} steps; expected {expected}")


def check_steps(
    states: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    next_states: np.ndarray,
    terminal: np.ndarray,
    offsets: np.ndarray,
    *,
    truncated: np.ndarray | None = None,
    behaviour: np.ndarray | None = None,
    names: Sequence[Any] | np.ndarray | None = None,
) -> None:
    """Checks the steps of whole episodes laid end to end; episode i has rows `offsets[i]` to `offsets[i+1] - 1`.

    Args:
        states: `[N]` indices, or `[N, D]` observations.
        actions: `[N]` indices, or `[N, K]` continuous actions.
        rewards: `[N]`.
        next_states: as `states`; not read where terminal.
        terminal: `[N]` bool; True at most in the last row of an episode.
        offsets: `[E + 1]`, the first row of each episode, then N.
        truncated: `[N]` bool; True at most in the last row of an episode. Not checked when omitted.
        behaviour: `[N]` probabilities (densities for continuous actions) of the actions taken, or None.
        names: what errors call the episodes; numbers from 0 when omitted.

    Raises:
        ValueError: naming episode and step of the first entry that is negative, not finite or after an end, or of a behaviour
            probability outside (0, 1].

    >>> one = np.ones(2, int)
    >>> check_steps(one, one, np.array([0.0, np.nan]), one, one > 1, np.array([0, 2]))
    Traceback (most recent call last):
    ValueError: episode 0, step 1: reward nan is not a finite number
    """

    def refuse(bad: np.ndarray, message: str, values: np.ndarray) -> None:
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f"{step_name(row, offsets, names)}: {message.format(values[row])}")

    refuse(~np.isfinite(rewards), "reward {} is not a finite number", rewards)
    everywhere = np.zeros(len(rewards), bool)
    for label, values, skipped in (
        ("state", states, everywhere),
        ("action", actions, everywhere),
        ("next state", next_states, terminal),
    ):
        if values.ndim == 1 and values.dtype.kind in "iu":
            refuse((values < 0) & ~skipped, label + " {} is negative", values)
        else:
            broken = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
            refuse(broken & ~skipped, label + " {} is not finite", values)
    last = offsets[1:] - 1
    for label, flags in (("terminal", terminal), ("truncated", truncated)):
        if flags is not None:
            early = flags.copy()
            early[last] = False
            refuse(early, f"the step is {label}, yet more steps of the episode follow", flags)
    if behaviour is not None:
        refuse(np.isnan(behaviour), "behaviour probability is missing (NaN)", behaviour)
        refuse(behaviour < 0, "behaviour probability {} is negative; is it a log-probability?", behaviour)
        refuse(behaviour == 0, "behaviour probability is 0 for an action that was taken", behaviour)
        if actions.ndim == 1 and actions.dtype.kind in "iu":
            refuse(behaviour > 1 + 1e-6, "behaviour probability {} is above 1", behaviour)
        refuse(~np.isfinite(behaviour), "behaviour density {} is not finite", behaviour)


def step_name(row: int, offsets: np.ndarray, names: Sequence[Any] | np.ndarray | None = None) -> str:
    """`episode E, step T` of a row, as errors call it.

    >>> step_name(5, np.array([0, 3, 7]))
    'episode 1, step 2'
    """
    episode = int(np.searchsorted(offsets, row, side="right")) - 1
    return f"episode {episode if names is None else names[episode]}, step {row - int(offsets[episode])}"
