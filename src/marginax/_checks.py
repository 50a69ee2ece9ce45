"""Checks of what users pass in: each raises a ``ValueError`` that names the argument, the place and the value."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE = 1e-8
"""How far a sum of probabilities may lie from 1 before it is an error."""

SINGLE_TOLERANCE = 1e-5
"""The same for probabilities that come in single precision, such as the policies of a JAX program."""

ROUNDING = 1e-12
"""How far a sum of probabilities may lie from 1 in double precision."""

FloatArray = np.ndarray[Any, np.dtype[np.float64]]


class TooLarge(MemoryError, ValueError):
    """A dense answer was asked for that does not fit into memory."""


def where(index: Iterable[Any]) -> str:
    """Writes an index as ``[3, 0]``; that of a single number is empty."""
    numbers = ", ".join(str(int(i)) for i in index)
    return f"[{numbers}]" if numbers else ""


def reals(name: str, value: ArrayLike) -> FloatArray:
    """Returns ``value`` as a new float64 array in C order, whose entries need not be finite."""
    try:
        given = np.asarray(value)  # a PyTorch tensor with a gradient is a RuntimeError
        if value is None or given.dtype.kind in "cmMSU":
            raise TypeError(f"its entries are {given.dtype}")
        return np.array(given, dtype=np.float64, order="C")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(
            f"{name} must be an array of real numbers, got {type(value).__name__}: {error}"
        ) from None


def array(name: str, value: ArrayLike, shape: Sequence[int | None] | None = None) -> FloatArray:
    """Returns ``value`` as a new float64 array in C order, all entries finite, of the given shape (``None``: any length)."""
    result = reals(name, value)
    if shape is not None:
        shaped(name, result.shape, shape)
    finite(name, result)
    return result


def shaped(name: str, have: tuple[int, ...], want: Sequence[int | None]) -> None:
    """Raises if a shape is not the one that is wanted (``None``: any length)."""
    fits = len(have) == len(want) and all(n is None or m == n for m, n in zip(have, want, strict=True))
    if not fits:
        wanted = str(tuple(-1 if n is None else n for n in want)).replace("-1", "any")
        raise ValueError(f"{name} must have shape {wanted}, got {have}")


def finite(name: str, values: np.ndarray) -> None:
    """Raises if an entry is NaN or infinite."""
    bad = ~np.isfinite(values)
    if bad.any():
        index = np.argwhere(bad)[0]
        raise ValueError(f"{name} must be finite, but {name}{where(index)} = {values[tuple(index)]}")


def non_negative(name: str, values: np.ndarray) -> None:
    """Raises if an entry is negative."""
    if values.size and values.min() < 0:
        index = np.argwhere(values < 0)[0]
        raise ValueError(f"{name} must not be negative, but {name}{where(index)} = {values[tuple(index)]}")


def tolerance(value: object) -> float:
    """How far sums of the probabilities in ``value`` may lie from 1: more where they come in single precision."""
    dtype = getattr(value, "dtype", None)
    if not isinstance(dtype, np.dtype):  # a list, or a tensor of another library
        dtype = np.asarray(value).dtype
    single = dtype.itemsize < 8 and dtype.kind not in "biu"
    return SINGLE_TOLERANCE if single else TOLERANCE


def distribution(name: str, value: ArrayLike, shape: Sequence[int | None]) -> FloatArray:
    """Returns ``value`` as probabilities: non-negative, summing to 1 along the last axis, to which sums close to it are scaled."""
    result = array(name, value, shape)
    non_negative(name, result)
    sums = result.sum(axis=-1)
    bad = np.abs(sums - 1.0) > tolerance(value)
    if bad.any():
        place = tuple(np.argwhere(bad)[0])
        raise ValueError(f"{name} must sum to 1, but {name}{where(place)} sums to {sums[place]}")
    return result / np.where(np.abs(sums - 1.0) > ROUNDING, sums, 1.0)[..., None]


def policy(name: str, value: ArrayLike, num_states: int, num_actions: int) -> FloatArray:
    """Returns ``value`` as a policy ``[S, A]`` whose rows sum to 1."""
    return distribution(name, value, (num_states, num_actions))


def discount(value: Any, name: str = "discount") -> float:
    """Returns a discount in [0, 1)."""
    result = number(name, value)
    if not 0.0 <= result < 1.0:
        raise ValueError(f"{name} must lie in [0, 1), got {value}")
    return result


def number(name: str, value: Any, *, infinite: bool = False) -> float:
    """Returns ``value`` as a float, which must be finite unless ``infinite``."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not (infinite or np.isfinite(result)):
        raise ValueError(f"{name} must be finite, got {value}")
    return result


def at_least(name: str, value: Any, least: float, *, infinite: bool = False) -> float:
    """Returns ``value`` as a float of at least ``least``; with ``infinite``, infinity is allowed too."""
    result = number(name, value, infinite=infinite)
    if not result >= least:
        raise ValueError(f"{name} must be at least {least:g}, got {value}")
    return result


def positive(name: str, value: Any, *, infinite: bool = False) -> float:
    """Returns ``value`` as a float above 0; with ``infinite``, infinity is allowed too."""
    result = number(name, value, infinite=infinite)
    if not result > 0.0:
        raise ValueError(f"{name} must be positive, got {value}")
    return result


def step_size(value: Any, name: str = "step_size") -> float:
    """Returns a step size in (0, 1]."""
    result = number(name, value)
    if not 0.0 < result <= 1.0:
        raise ValueError(f"{name} must lie in (0, 1], got {value}")
    return result


def fraction(name: str, value: Any) -> float:
    """Returns ``value`` as a float in [0, 1]."""
    result = number(name, value)
    if not 0.0 <= result <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
    return result


def count(name: str, value: Any, least: int = 1) -> int:
    """Returns ``value`` as an integer of at least ``least``."""
    result = whole(name, value)
    if result < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return result


def whole(name: str, value: Any) -> int:
    """Returns ``value`` as an integer."""
    try:
        is_whole = not isinstance(value, bool) and int(value) == value
    except (TypeError, ValueError, OverflowError):
        is_whole = False
    if not is_whole:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def index(name: str, value: Any, size: int) -> int:
    """Returns ``value`` as an index in ``range(size)``."""
    result = count(name, value, least=0)
    if result >= size:
        raise ValueError(f"{name} must lie in range({size}), got {value}")
    return result


def indices(name: str, value: Any, size: int, counted: np.ndarray | None = None) -> np.ndarray:
    """Returns ``value`` as an array of indices in ``range(size)``; entries that are not ``counted`` may be anything."""
    result = np.asarray(value)
    if not result.size:
        return result.astype(np.int64)  # an empty list comes as one of real numbers
    if result.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, got {result.dtype}")
    if result.min() < 0 or result.max() >= size:
        bad = (result < 0) | (result >= size)
        bad = bad if counted is None else bad & counted
        if bad.any():
            place = np.argwhere(bad)[0]
            raise ValueError(
                f"{name} must lie in range({size}), but {name}{where(place)} = {result[tuple(place)]}"
            )
    return result


def steps(trajectories: Any, num_states: int, num_actions: int) -> None:
    """Raises if trajectories hold a state or action outside the tables; padding and what follows an end are not read."""
    valid = np.asarray(trajectories.valid)
    indices("trajectories.states", trajectories.states, num_states, valid)
    indices("trajectories.actions", trajectories.actions, num_actions, valid)
    arrives = valid & (np.asarray(trajectories.discounts) != 0)
    indices("trajectories.next_states", trajectories.next_states, num_states, arrives)


def pair(name: str, value: Any, num_states: int, num_actions: int) -> tuple[int, int]:
    """Returns ``value`` as a pair ``(x, a)`` of indices in ``range(S)`` and ``range(A)``."""
    try:
        state, action = value
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a pair (state, action), got {value!r}") from None
    return index(f"{name}[0]", state, num_states), index(f"{name}[1]", action, num_actions)


def choice(name: str, value: str, choices: Iterable[str]) -> str:
    """Returns ``value`` if it is one of ``choices``, and else names the nearest of them."""
    known = list(choices)
    if value in known:
        return value
    near = difflib.get_close_matches(str(value), known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{hint}")


def last_given(words: Sequence[str], flag: str, default: str) -> str:
    """Returns the word after the last ``flag`` (or after ``flag=``) of a command line that is yet to be parsed."""
    found = [default]
    for i, word in enumerate(words):
        if word.startswith(f"{flag}="):
            found.append(word.partition("=")[2])
        elif word == flag and i + 1 < len(words):
            found.append(words[i + 1])
    return found[-1]


def ratio(pi: FloatArray, mu: FloatArray) -> FloatArray:
    """Returns π/μ, zero where both are zero; raises where π has support and μ has none."""
    missing = (mu == 0.0) & (pi > 0.0)
    if missing.any():
        place = np.argwhere(missing)[0]
        raise ValueError(
            f"mu has no support where pi has some: mu{where(place)} = 0 while pi{where(place)} = {pi[tuple(place)]}"
        )
    return np.divide(pi, mu, out=np.zeros_like(pi), where=mu > 0.0)


def two_policies(pi: ArrayLike, mu: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Returns a target and a behaviour policy of the same shape ``[S, A]``."""
    target = distribution("pi", pi, (None, None))
    behaviour = distribution("mu", mu, target.shape)
    return target, behaviour


def fits_in_memory(what: str, entries: int, *, copies: int = 4, instead: str) -> None:
    """Raises ``TooLarge`` before a dense array of ``entries`` float64 numbers would exhaust the memory."""
    needed = entries * 8 * copies
    available = available_memory()
    if needed > available:
        raise TooLarge(
            f"{what} needs about {needed / 2**30:.1f} GiB as a dense array and {available / 2**30:.1f} GiB are free: {instead}"
        )


def available_memory() -> int:
    """Bytes of memory that can be taken now."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * 2**30


def missing_package(what: str, package: str, extra: str) -> ImportError:
    """The error for a package that only an extra of marginax brings, with a command that works as printed in a clone."""
    return ImportError(
        f"{what} needs the package {package}: in the clone of marginax, "
        f"`.venv/bin/uv sync --inexact --extra {extra}` or `pip install '.[{extra}]'` brings it"
    )
