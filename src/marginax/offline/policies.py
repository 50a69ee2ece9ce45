"""Target policies: a table, a file of probabilities, a saved agent, or a function given by name."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from marginax import _checks as checks
from marginax.offline.columns import reading
from marginax.offline.log import Log, divided
from marginax.offline.sources import Source

TABLES = (".npy", ".csv", ".parquet")
_SUM = 1e-5  # files often hold single precision


@dataclass(frozen=True)
class TablePolicy:
    """π(a|x) as a table [S, A]."""

    table: np.ndarray
    name: str = "table"


@dataclass(frozen=True)
class RowPolicy:
    """π at each row of the file: [N] probabilities of the logged actions, or [N, A] of all actions."""

    probabilities: np.ndarray
    name: str = "rows"

    def at(self, log: Log) -> np.ndarray:
        """π(a_n|x_n) of each transition of a log."""
        if log.rows is None:
            raise ValueError("probabilities aligned with rows need a log that was read from a file")
        if int(log.rows.max()) >= len(self.probabilities):
            raise ValueError(
                f"the policy has {len(self.probabilities)} rows of probabilities, and the log has more: "
                f"{log.where(int(np.argmax(log.rows >= len(self.probabilities))))} has none"
            )
        rows = self.probabilities[log.rows]
        if rows.ndim == 2:
            if not log.discrete_actions:
                raise ValueError(
                    f"the policy {self.name} gives {rows.shape[1]} numbers per row, and the log's actions are vectors: give one "
                    "density per row"
                )
            if int(log.actions.max()) >= rows.shape[1]:
                row = int(np.argmax(log.actions >= rows.shape[1]))
                raise ValueError(
                    f"{log.where(row)}: action {log.actions[row]}, and the policy {self.name} has {rows.shape[1]} columns"
                )
            return np.take_along_axis(rows, log.actions[:, None], axis=1)[:, 0]
        if log.discrete_actions and (rows > 1 + 1e-6).any():
            row = int(np.argmax(rows > 1 + 1e-6))
            raise ValueError(
                f"{log.where(row)}: the policy {self.name} gives probability {rows[row]:g}, above 1"
            )
        return rows


@dataclass(frozen=True)
class FunctionPolicy:
    """A function of observations [N, …] that returns [N, A] probabilities, or Gaussian (mean, std) [N, K]."""

    function: Callable[[np.ndarray], Any]
    name: str = "function"

    def __call__(self, observations: np.ndarray) -> Any:
        """Probabilities [N, A], or mean and standard deviation [N, K], checked."""
        try:
            result = self.function(observations)
        except Exception as error:  # whatever a user's function raises
            raise ValueError(f"the policy {self.name} raised {_last_line(error)}") from error
        if result is None:
            raise ValueError(f"the policy {self.name} returned None, not probabilities or (mean, std)")
        if isinstance(result, tuple):
            if len(result) != 2:
                raise ValueError(f"the policy {self.name} returned {len(result)} arrays, not (mean, std)")
            mean, std = (
                checks.array(f"the {what} of the policy {self.name}", part)
                for what, part in zip(("mean", "std"), result, strict=True)
            )
            try:
                std = np.broadcast_to(std, mean.shape)
            except ValueError:
                raise ValueError(
                    f"the policy {self.name} returned means of shape {mean.shape} and a std of shape {std.shape}"
                ) from None
            if mean.ndim != 2 or len(mean) != len(observations):
                raise ValueError(
                    f"the policy {self.name} returned means of shape {mean.shape} for {len(observations)} observations"
                )
            checks.non_negative(f"the std of the policy {self.name}", std)
            return mean, std
        table = checks.array(f"the policy {self.name}", result)
        if table.ndim != 2 or len(table) != len(observations):
            raise ValueError(
                f"the policy {self.name} returned shape {table.shape} for {len(observations)} observations; "
                "expected one row of probabilities for each"
            )
        return probabilities(f"the policy {self.name}", table)


Policy = TablePolicy | RowPolicy | FunctionPolicy


def load_policy(policy: Any, source: Source | None = None, kind: str | None = None) -> Policy:
    """The target policy behind `policy`.

    Args:
        policy: a table [S, A]; probabilities for each row of the log, [N] of the logged action or [N, A] of all actions; a function
            of observations; or a string: the path of a `.npy`, `.csv` or `.parquet` file with such an array, of a folder
            written by `marginax train`, or `module:function` (imported from the current folder or the Python path).
        source: the log, to tell a table from probabilities of its rows.
        kind: what a two-dimensional array is, `table` or `rows`. It has to be given where the shape does not say.

    Raises:
        ValueError: naming what is wrong with it.
        FileNotFoundError: if there is no such file.

    >>> load_policy([[0.5, 0.5], [1.0, 0.0]]).table.shape
    (2, 2)
    """
    if kind not in (None, "table", "rows"):
        raise ValueError(f"policy_kind must be table or rows, got {kind!r}")
    found = policy if isinstance(policy, Policy) else _load(policy, source, kind)
    if not isinstance(found, RowPolicy):
        require_order(found.name, source, "state", "action")
    elif found.probabilities.ndim == 2:
        require_order(found.name, source, "action")
        require_sizes(f"the policy {found.name}", source, action=found.probabilities.shape[1])
    return found


def require_order(name: str, source: Source | None, *kinds: str) -> None:
    """Refuse what has an order of states or actions of its own, where the log has labels and nobody said in which order."""
    if source is None or source.encoding is None:
        return
    unsaid = [kind for kind in kinds if kind in source.unsaid]
    if not unsaid:
        return
    labels = source.encoding[unsaid[0]]
    shown = ", ".join(labels[:5]) + (", …" if len(labels) > 5 else "")
    example = json.dumps({kind: [*source.encoding[kind][:2], "…"] for kind in unsaid}, ensure_ascii=False)
    raise ValueError(
        f"{name} numbers {' and '.join(f'{kind}s' for kind in unsaid)}, and the log has labels for them ({shown}): in which "
        f"order? Say so with --encoding FILE, a JSON file such as {example}, or with --encoding sorted; from Python with "
        "open_data(data, encoding)"
    )


def require_sizes(name: str, source: Source | None, **sizes: int) -> None:
    """Refuse what has more or fewer states or actions than the log has labels for: they would not be the same ones."""
    encoding = {} if source is None else source.encoding or {}
    for kind, size in sizes.items():
        labels = encoding.get(kind)
        if labels is not None and len(labels) != size:
            raise ValueError(f"{name} has {size} {kind}s, and the log has labels for {len(labels)}")


def _load(policy: Any, source: Source | None, kind: str | None) -> Policy:
    if callable(policy):
        return FunctionPolicy(policy, getattr(policy, "__name__", "function"))
    if not isinstance(policy, str | Path):
        return _from_array(checks.array("policy", policy), "policy", source, kind)
    path = Path(policy)
    if path.suffix.lower() in TABLES:
        if not path.is_file():
            raise FileNotFoundError(f"there is no policy file {str(path)!r}")
        array = _read(path)
        column = array.ndim == 2 and array.shape[1] == 1 and path.suffix.lower() != ".npy" and kind != "table"
        return _from_array(array[:, 0] if column else array, path.name, source, kind)
    if path.is_dir():
        return _from_run(path)
    if ":" in str(policy):
        return FunctionPolicy(_imported(str(policy)), str(policy))
    raise ValueError(
        f"policy {str(policy)!r} is not a .npy, .csv or .parquet file, a folder of `marginax train`, "
        "or module:function"
    )


def _from_array(array: np.ndarray, name: str, source: Source | None, kind: str | None) -> Policy:
    if array.ndim == 1:
        if kind == "table" or source is None:
            raise ValueError(f"{name}: a table must have shape [states, actions], got shape {array.shape}")
        bad = ~((array >= 0) & np.isfinite(array))
        if bad.any():
            row = int(np.argmax(bad))
            raise ValueError(f"{name}: row {row} is {array[row]}, not a probability or density")
        return _rows(array, name, source)
    if array.ndim != 2 or not array.size:
        raise ValueError(f"{name}: expected [S, A] or one probability per row, got shape {array.shape}")
    table = probabilities(name, array)
    if kind is None:
        kind = _kind(table, name, source)
    if kind == "table":
        return TablePolicy(table, name)
    if source is None:
        raise ValueError(f"{name}: probabilities of rows need a log")
    return _rows(table, name, source)


def _kind(table: np.ndarray, name: str, source: Source | None) -> str:
    """What an array [n, A] is: a table of states, unless it has one row for each row of the log. If it could be both, we ask."""
    if source is None or len(table) != source.rows():
        return "table"
    if not source.first().tabular or source.table_sizes()[0] > len(table):
        return "rows"
    if source.sizes is not None and source.sizes[0] != len(table):
        return "rows"
    raise ValueError(
        f"{name} has {len(table)} rows, as many as the log: is it a table of states or probabilities of the log's rows? "
        "Say so with policy_kind (--policy-kind table, or --policy-kind rows)"
    )


def _rows(array: np.ndarray, name: str, source: Source) -> RowPolicy:
    if len(array) != source.rows():
        raise ValueError(
            f"{name} has {len(array)} rows of probabilities, and the log has {source.rows()} rows"
        )
    return RowPolicy(array, name)


def _last_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def target_table(policy: Policy, source: Source) -> tuple[np.ndarray, list[str]]:
    """π as a table [S, A]; rows may sum to less than 1 where the policy is only known on the log's pairs."""
    table, notes = _table(policy, source)
    require_sizes(f"the policy {policy.name}", source, state=len(table), action=table.shape[1])
    return table, notes


def _table(policy: Policy, source: Source) -> tuple[np.ndarray, list[str]]:
    if isinstance(policy, TablePolicy):
        declared = source.sizes
        if declared is not None and declared != policy.table.shape:
            raise ValueError(
                f"the policy is a table {policy.table.shape}, and the log has {declared[0]} states and "
                f"{declared[1]} actions"
            )
        return policy.table, []
    s, a = source.table_sizes()
    if isinstance(policy, FunctionPolicy):
        table = policy(np.arange(s))
        if isinstance(table, tuple) or table.shape[1] < a:
            raise ValueError(f"the policy {policy.name} must return probabilities of all {a} actions")
        return table, []
    width = policy.probabilities.shape[1] if policy.probabilities.ndim == 2 else a
    if width < a:
        raise ValueError(f"the policy {policy.name} gives {width} actions, and the log has {a}")
    return _table_of_rows(policy, source, s, width)


def _table_of_rows(policy: RowPolicy, source: Source, s: int, a: int) -> tuple[np.ndarray, list[str]]:
    total, n = np.zeros((s, a)), np.zeros((s, a))
    for log in source.chunks():
        if policy.probabilities.ndim == 2:
            for k in range(a):
                weight = policy.probabilities[log.rows, k]
                total[:, k] += np.bincount(log.states, weight, minlength=s)
            n += np.bincount(log.states, minlength=s)[:, None]
        else:
            pairs = log.pairs(a)
            total += np.bincount(pairs, policy.at(log), minlength=s * a).reshape(s, a)
            n += np.bincount(pairs, minlength=s * a).reshape(s, a)
    table = divided(total, n)
    sums = table.sum(axis=1)
    notes = ["the policy is known on the log's rows only; elsewhere it counts as unsupported"]
    if (sums > 1 + 1e-3).any():
        x = int(np.argmax(sums))
        notes.append(
            f"the policy's probabilities in state {x} add up to {sums[x]:.3f}: it depends on more than the state"
        )
        table /= np.maximum(sums, 1)[:, None]
    return table, notes


def probabilities(name: str, table: np.ndarray) -> np.ndarray:
    """Checked rows of probabilities; sums off by single precision are put right."""
    checks.finite(name, table)
    checks.non_negative(name, table)
    sums = table.sum(axis=-1, keepdims=True)
    bad = np.abs(sums - 1) > _SUM
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name} must sum to 1 in every row, but row {row} sums to {sums.ravel()[row]}")
    return table / sums


def _read(path: Path) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path.name} is not a plain NumPy array: {error}") from None
    elif path.suffix.lower() == ".csv":
        with reading(path.name):
            array = _read_csv(path)
    else:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise checks.missing_package("a Parquet file", "pyarrow", "offline") from error
        with reading(path.name):
            columns = pq.read_table(path)
            array = np.stack([column.to_numpy() for column in columns.columns], axis=1)
    try:
        return np.asarray(array, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{path.name} does not hold numbers") from None


def _read_csv(path: Path) -> np.ndarray:
    """The numbers of a CSV file, after a header if it has one.

    A first line with a word is a header, and so is 0,1,2,… for three actions or more, which are no probabilities. For two actions
    0,1 may be either. An empty cell among numbers is a missing probability.
    """
    with open(path, encoding="utf-8-sig") as file:
        lines = [line for line in file if line.strip()]
    empty = f"{path.name} is empty: it has no probabilities"
    if not lines:
        raise ValueError(empty)
    first = [cell.strip().strip('"') for cell in lines[0].split(",")]
    numbered = first == [str(a) for a in range(len(first))]
    if numbered and len(first) == 2:
        raise ValueError(
            f"{path.name}: the first line, 0,1, may be a header or probabilities; remove the header, or write 0.0,1.0"
        )
    header = (numbered and len(first) > 2) or not all(_is_number(cell) for cell in first if cell)
    if len(lines) == header:
        raise ValueError(empty)
    try:
        return np.loadtxt(lines[header:], delimiter=",", quotechar='"', ndmin=2)
    except ValueError as error:
        raise ValueError(f"{path.name} is not a table of numbers: {error}") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _imported(address: str) -> Callable[[np.ndarray], Any]:
    module, _, name = address.partition(":")
    with _current_folder():
        try:
            found = importlib.import_module(module)
        except Exception as error:  # whatever a user's module raises
            raise ValueError(f"policy {address!r}: cannot import {module!r}: {_last_line(error)}") from error
    function = getattr(found, name, None)
    if not callable(function):
        raise ValueError(f"policy {address!r}: {module!r} has no function {name!r}")
    return function


@contextmanager
def _current_folder() -> Iterator[None]:
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _from_run(folder: Path) -> Policy:
    """The policy of a run of `marginax train`: Gaussian around its actor in a box, the best action where actions are discrete."""
    from marginax.deep.policy import load_policy as load_saved

    saved = load_saved(folder)
    std = saved.scale * (saved.high - saved.low) / 2

    def policy(observations: np.ndarray) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        width = saved.layers[0][0].shape[0]
        if observations.ndim != 2 or observations.shape[1] != width:
            raise ValueError(
                f"the policy in {folder} takes observations of {width} numbers, "
                f"and those of the log have shape {observations.shape[1:]}"
            )
        actions = saved(observations.astype(np.float32))
        if saved.num_actions is not None:
            return np.eye(saved.num_actions)[actions]
        return np.asarray(actions, dtype=np.float64), std

    return FunctionPolicy(policy, str(folder))
