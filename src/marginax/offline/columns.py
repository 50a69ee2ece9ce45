"""Columns of one file, or of arrays in memory, in batches of rows: Parquet, CSV plain or compressed, and NumPy archives."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
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
LARGEST_WHOLE = 2.0**53  # above it not every integer is a number of double precision
_FLAGS = {"true": "1", "false": "0", "": "nan"}


class Columns:
    """Columns in memory; only those that are asked for are read.

    Attributes:
        name: of the file, for messages.
        names: of its columns; a table, a frame or a file may have a name twice.
        total: number of rows, if known.
        path: of the file, if there is one that is read in batches.
        system: pyarrow's file system on which it is, if not the machine's own.
        reals: columns of real numbers, even if the first of them are whole or missing.
        ids: columns of names, which are read as words unless all of them are integers.
    """

    total: int | None = None
    path: Path | None = None
    system: Any = None
    reals: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()

    def __init__(self, name: str, columns: Mapping[str, Any], names: list[str] | None = None) -> None:
        self.name, self.names, self._columns = name, names or list(columns), columns
        self._arrays: Batch = {}

    def batches(self, columns: list[str], size: int) -> Iterator[Batch]:
        """The columns, in blocks of about `size` rows."""
        for name in columns:
            if name not in self._arrays:
                with reading(f"{self.name}: column {name!r}"):
                    self._arrays[name] = _cells(self._columns[name])
        block = {name: self._arrays[name] for name in columns}
        lengths = {name: len(values) for name, values in block.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.name}: the columns have different lengths: {lengths}")
        if lengths[columns[0]]:
            yield block

    def _arrays_of(self, batch: Any, columns: list[str]) -> Batch:
        """Columns of a batch of pyarrow."""
        block = {}
        for name in columns:
            with reading(f"{self.name}: column {name!r}"):
                block[name] = _array(batch.column(name))
        return block


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
                yield self._arrays_of(batch, columns)


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
        self._types: dict[str, Any] = {}  # of pyarrow
        with self._text() as text, reading(self.name):
            self.names = next(csv.reader(text), [])
        if len(self.names) == 1 and any(mark in self.names[0] for mark in ";\t|"):
            raise ValueError(
                f"{self.name} has no comma in its first line: its columns must be separated by commas"
            )

    def _text(self) -> Any:
        if self.packed:
            return io.TextIOWrapper(gzip.open(self.path), "utf-8-sig", newline="")
        return open(self.path, encoding="utf-8-sig", newline="")

    def batches(self, columns: list[str], size: int) -> Iterator[Batch]:
        """The columns, in blocks of `size` rows, or of `BLOCK` bytes."""
        try:
            import pyarrow.csv as arrow
        except ImportError:
            yield from self._plain(columns, size)
            return
        with reading(self.name):
            self._types |= self._find_types(arrow, [name for name in columns if name not in self._types])
            with self._opened(arrow, columns, self._types) as reader:
                for batch in reader:
                    yield self._arrays_of(batch, columns)

    def _find_types(self, arrow: Any, columns: list[str]) -> dict[str, Any]:
        """The type of each column that fits all of its cells; pyarrow guesses from the first block alone."""
        import pyarrow as pa

        types = {name: pa.float64() for name in columns if name in self.reals}
        types |= {name: pa.int64() for name in columns if name in self.ids}
        wider = {pa.null(): pa.int64(), pa.int64(): pa.float64()}
        while columns:
            try:
                with self._opened(arrow, columns, types) as reader:
                    types = {field.name: field.type for field in reader.schema}
                    for _ in reader:
                        pass
                break
            except pa.ArrowInvalid as error:
                found = re.search(r"In CSV column #(\d+): .*conversion error", str(error))
                if found is None:
                    raise
                name = self.names[int(found[1])]
                types[name] = pa.string() if name in self.ids else wider.get(types[name], pa.string())
        return types

    def _opened(self, arrow: Any, columns: list[str], types: dict[str, Any]) -> Any:
        import pyarrow as pa

        return arrow.open_csv(
            pa.input_stream(str(self.path), compression="gzip" if self.packed else None),
            read_options=arrow.ReadOptions(block_size=BLOCK),
            convert_options=arrow.ConvertOptions(
                include_columns=columns, strings_can_be_null=True, column_types=types
            ),
        )

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
                cells = {name: [row[place[name]] for row in block] for name in columns}
                yield {
                    name: _text(found) if name in self.ids else _parsed(found)
                    for name, found in cells.items()
                }


def open_columns(path: Path) -> Columns:
    """The columns of a file, by its name."""
    name = path.name.lower()
    if name.endswith((".csv", ".csv.gz")):
        return CsvColumns(path)
    if name.endswith(".npz"):
        with reading(path.name):
            arrays = np.load(path, allow_pickle=False)
        if not isinstance(arrays, Mapping):
            raise ValueError(f"{path.name} is a single array, not an archive of columns")
        return Columns(path.name, arrays)
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
    """Puts a name before the message of any error in reading what it names."""
    try:
        yield
    except (FileNotFoundError, MemoryError):
        raise
    except Exception as error:
        if str(error).startswith(name):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{name} cannot be read: {text}") from error


def _array(column: Any) -> np.ndarray:
    """The cells of an array of pyarrow."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = column.to_pylist()
        width = max((len(row) for row in rows if row is not None), default=0)
        for i, row in enumerate(rows):
            if row is not None and len(row) != width:
                raise ValueError(f"row {i} has {len(row)} entries where others have {width}")
        return np.array([[np.nan] * width if row is None else row for row in rows], dtype=np.float64)
    if pa.types.is_nested(kind):
        raise ValueError(f"it holds records ({kind}), neither numbers nor words")
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_dictionary(kind):
        column = column.dictionary_decode()
    return column.to_numpy(zero_copy_only=False)


def columns_in_memory(data: Any) -> Columns | None:
    """The columns of a dict, of a pyarrow table, or of a frame of pandas or polars; None for anything else."""
    if isinstance(data, Mapping):
        return Columns("dict", {str(name): column for name, column in data.items()})
    if hasattr(data, "column_names"):  # a table of pyarrow
        names = list(data.column_names)
        return Columns("table", dict(zip(names, data.columns, strict=True)), names)
    if hasattr(data, "columns") and hasattr(data, "__getitem__"):  # pandas, polars
        return Columns("frame", {str(n): data[n] for n in data.columns}, [str(n) for n in data.columns])
    return None


def _cells(column: Any) -> np.ndarray:
    """A column in memory: bytes are decoded, and None stands for what pandas holds as missing among objects."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    if hasattr(column, "to_pylist"):
        return _array(column)
    cells = np.atleast_1d(np.asarray(column))
    if cells.dtype == object and hasattr(column, "isna"):
        cells = cells.copy()
        cells[np.asarray(column.isna())] = None
    return np.char.decode(cells, "utf-8") if cells.dtype.kind == "S" else cells


def _parsed(cells: list[str]) -> np.ndarray:
    """The cells of a CSV column: integers, else numbers (with nan where a cell is empty), else words."""
    try:
        return np.array(cells).astype(np.int64)
    except (ValueError, OverflowError):
        pass
    try:
        return np.array([_FLAGS.get(cell.strip().lower(), cell) for cell in cells]).astype(np.float64)
    except ValueError:
        return _text(cells)


def _text(cells: list[str]) -> np.ndarray:
    """The cells of a CSV column as words, None where one is empty."""
    return np.array([cell or None for cell in cells], dtype=object)


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
    if values.dtype.kind in "mM":
        return np.isnat(values)
    return np.zeros(len(values), dtype=bool)


def whole(values: np.ndarray) -> np.ndarray:
    """Numbers that are all whole as integers, as people read them, if integers can hold them."""
    if (
        values.dtype.kind == "f"
        and (np.abs(values, dtype=np.float64) < LARGEST_WHOLE).all()
        and (values == np.floor(values)).all()
    ):
        return values.astype(np.int64)
    return values


def floats(values: np.ndarray, column: str, first: int, expected: str = "a number") -> np.ndarray:
    """A column of numbers, whose first row has the number `first` in the file."""
    if values.dtype.kind in "cmM":
        raise ValueError(f"column {column!r} holds {values.dtype.name}, and not real numbers")
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        for row, value in enumerate(values.tolist()):
            try:
                float("nan" if value is None else value)
            except (TypeError, ValueError):
                place = f"row {first + row} (from 0)"
                raise ValueError(f"column {column!r}, {place}: {value!r} is not {expected}") from None
        raise
