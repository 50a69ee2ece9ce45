"""Columns of one file, or of arrays in memory, in batches of rows: Parquet, CSV plain or compressed, and NumPy archives."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from marginax import _checks as checks

Batch = dict[str, np.ndarray]
PARQUET = (".parquet", ".pq")
SUFFIXES = (*PARQUET, ".csv", ".csv.gz", ".npz")
BLOCK = 1 << 24  # bytes of a CSV file that pyarrow reads at a time
_FLAGS = {"true": "1", "false": "0", "": "nan"}


class Columns:
    """Columns in memory.

    Attributes:
        name: of the file, for messages.
        names: of its columns; a table, a frame or a file may have a name twice.
        total: number of rows, if known.
        path: of the file, if there is one that is read in batches.
        system: pyarrow's file system on which it is, if not the machine's own.
        reals: columns of real numbers, even if the first of them are whole or missing.
    """

    total: int | None = None
    path: Path | None = None
    system: Any = None
    reals: frozenset[str] = frozenset()

    def __init__(self, name: str, columns: dict[str, Any], names: list[str] | None = None) -> None:
        self.name, self.names = name, names or list(columns)
        self._columns = {key: _decoded(np.asarray(values)) for key, values in columns.items()}
        lengths = {key: len(values) for key, values in self._columns.items() if values.ndim}
        if len(set(lengths.values())) != 1 or len(lengths) != len(self._columns):
            raise ValueError(f"the columns of {name} have different lengths: {lengths}")
        self.total = next(iter(lengths.values()))

    def batches(self, columns: list[str], size: int) -> Iterator[Batch]:
        """The columns, in blocks of about `size` rows."""
        if self.total:
            yield {name: self._columns[name] for name in columns}


class ParquetColumns(Columns):
    """A Parquet file."""

    def __init__(self, path: Path, system: Any = None) -> None:
        self.path, self.name, self.system = path, path.name, system
        with self._file() as file:
            self.total, self.names = file.metadata.num_rows, list(file.schema_arrow.names)

    def _file(self) -> Any:
        try:
            import pyarrow.parquet as pq
        except ImportError as error:
            raise checks.missing_package("a Parquet log", "pyarrow", "offline") from error
        with reading(self.name):
            return pq.ParquetFile(str(self.path), filesystem=self.system)

    def batches(self, columns: list[str], size: int) -> Iterator[Batch]:
        """The columns, in blocks of `size` rows."""
        with self._file() as file, reading(self.name):
            for batch in file.iter_batches(batch_size=size, columns=columns):
                yield {name: _array(batch.column(name), name) for name in columns}


class CsvColumns(Columns):
    """A CSV file, plain or compressed: by pyarrow where it is installed, else by the standard library."""

    path: Path

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        self.packed = path.suffix.lower() == ".gz"
        if packed != self.packed:
            what = "a gzip file: name it .csv.gz" if packed else "not a gzip file, as its name says"
            raise ValueError(f"{self.name} is {what}")
        with self._text() as text, reading(self.name):
            self.names = next(csv.reader(text), [])

    def _text(self) -> Any:
        if self.packed:
            return io.TextIOWrapper(gzip.open(self.path), "utf-8-sig", newline="")
        return open(self.path, encoding="utf-8-sig", newline="")

    def batches(self, columns: list[str], size: int) -> Iterator[Batch]:
        """The columns, in blocks of `size` rows, or of `BLOCK` bytes."""
        try:
            import pyarrow as pa
            import pyarrow.csv as arrow
        except ImportError:
            yield from self._plain(columns, size)
            return

        def opened(types: dict[str, Any]) -> Any:
            settings = {"include_columns": columns, "strings_can_be_null": True, "column_types": types}
            return arrow.open_csv(
                self.path,
                convert_options=arrow.ConvertOptions(**settings),
                read_options=arrow.ReadOptions(block_size=BLOCK),
            )

        with reading(self.name):
            with opened({}) as reader:  # types are those of the first block
                guessed = {name: reader.schema.field(name).type for name in columns if name in self.reals}
            vague = (name for name, t in guessed.items() if pa.types.is_integer(t) or pa.types.is_null(t))
            with opened(dict.fromkeys(vague, pa.float64())) as reader:
                for batch in reader:
                    yield {name: _array(batch.column(name), name) for name in columns}

    def _plain(self, columns: list[str], size: int) -> Iterator[Batch]:
        with self._text() as file, reading(self.name):
            reader = csv.reader(file)
            header = next(reader)
            place = {name: i for i, name in enumerate(header)}

            def rows() -> Iterator[list[str]]:
                for row in reader:
                    if row and len(row) != len(header):
                        counts = f"{len(row)} entries, the header {len(header)}"
                        raise ValueError(f"line {reader.line_num} has {counts}")
                    if row:
                        yield row

            whole = rows()
            while block := list(itertools.islice(whole, size)):
                yield {name: _parsed([row[place[name]] for row in block]) for name in columns}


def open_columns(path: Path) -> Columns:
    """The columns of a file, by its name."""
    name = path.name.lower()
    if name.endswith((".csv", ".csv.gz")):
        return CsvColumns(path)
    if name.endswith(".npz"):
        with reading(path.name), np.load(path, allow_pickle=False) as arrays:
            return Columns(path.name, {key: arrays[key] for key in arrays.files})
    return ParquetColumns(path)


def parquet_files(system: Any, path: str) -> list[Columns]:
    """A Parquet file, or those of a folder, on one of pyarrow's file systems."""
    from pyarrow.fs import FileSelector

    files = [path]
    if not path.endswith(PARQUET):
        found = system.get_file_info(FileSelector(path, allow_not_found=True))
        files = sorted(info.path for info in found if info.path.endswith(PARQUET))
    if not files:
        raise FileNotFoundError(f"the folder {path!r} holds no Parquet file")
    return [ParquetColumns(Path(file), system) for file in files]


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Puts a file's name before the message of whatever reading it raises."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        if str(error).startswith(name):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name} cannot be read: {text}") from error


def _array(column: Any, name: str) -> np.ndarray:
    """The cells of an array of pyarrow."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = column.to_pylist()
        width = max((len(row) for row in rows if row is not None), default=0)
        for i, row in enumerate(rows):
            if row is not None and len(row) != width:
                raise ValueError(f"column {name!r}: row {i} has {len(row)} entries where others have {width}")
        return np.array([[np.nan] * width if row is None else row for row in rows], dtype=np.float64)
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    return column.to_numpy(zero_copy_only=False)


def columns_in_memory(data: Any) -> Columns | None:
    """The columns of a dict, of a pyarrow table, or of a frame of pandas or polars; None for anything else."""
    if isinstance(data, Mapping):
        return Columns("columns", dict(data))
    if hasattr(data, "column_names"):  # a table of pyarrow
        pairs = zip(data.column_names, data.columns, strict=True)
        arrays = {name: _array(column.combine_chunks(), name) for name, column in pairs}
        return Columns("table", arrays, list(data.column_names))
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):  # pandas, polars
        cells = {str(name): _cells(data[name]) for name in data.columns}
        return Columns("frame", cells, [str(name) for name in data.columns])
    return None


def _decoded(cells: np.ndarray) -> np.ndarray:
    """Words that are stored as bytes, as other words."""
    return np.char.decode(cells, "utf-8") if cells.dtype.kind == "S" else cells


def _cells(column: Any) -> np.ndarray:
    """A column of a frame; what pandas holds as missing among objects is None."""
    cells = np.asarray(column)
    if cells.dtype == object and hasattr(column, "isna"):
        cells = cells.copy()
        cells[np.asarray(column.isna())] = None
    return cells


def _parsed(cells: list[str]) -> np.ndarray:
    """The cells of a CSV column: integers, else numbers (with nan where a cell is empty), else words."""
    try:
        return np.array(cells).astype(np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([_FLAGS.get(cell.strip().lower(), cell) for cell in cells]).astype(np.float64)
    except ValueError:
        return np.array([cell if cell else None for cell in cells], dtype=object)


def has_words(values: np.ndarray) -> bool:
    """Whether a column holds labels, and not only numbers."""
    if values.dtype == object:
        return any(isinstance(value, str) for value in values)
    return values.dtype.kind == "U"


def words(values: np.ndarray) -> np.ndarray:
    """Cells as words, the empty word where one is missing."""
    if values.dtype.kind == "U":
        return values
    return np.array(["" if v is None or v != v else str(v) for v in values.tolist()], dtype=str)


def missing(values: np.ndarray) -> np.ndarray:
    """[N] which cells of a column are missing."""
    if values.dtype.kind == "f":
        return np.isnan(values) if values.ndim == 1 else np.isnan(values).all(axis=1)
    if values.dtype == object:
        return np.array([value is None or value != value for value in values])
    if values.dtype.kind == "U":
        return values == ""
    return np.zeros(len(values), dtype=bool)


def whole(values: np.ndarray) -> np.ndarray:
    """Numbers that are all whole as integers, as people read them."""
    if values.dtype.kind == "f" and np.isfinite(values).all() and (values == np.floor(values)).all():
        return values.astype(np.int64)
    return values


def floats(values: np.ndarray, column: str, first: int) -> np.ndarray:
    """A column of numbers, whose first row has that number in the file."""
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        for row, value in enumerate(values.tolist()):
            try:
                float("nan" if value is None else value)
            except (TypeError, ValueError):
                place = f"row {first + row} (from 0)"
                raise ValueError(f"column {column!r}, {place}: {value!r} is not a number") from None
        raise
