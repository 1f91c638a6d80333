"""Tables of any format: Parquet and arrays are read here, text in `text.py`; users of the batches do not know which."""

import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import pyarrow.types as kinds

from sar.data.arrays import Array, open_npy
from sar.errors import ConfigError, PartitionError
from sar.id_slices import pieces
from sar.logging_setup import logger
from sar.partition.graph_source import Column
from sar.partition.ingest.columns import END_NAMES, Batch, Kind, NotNumbersError, order_of_two
from sar.partition.ingest.files import ALL_COLUMNS, LIST_FORMATS, Files, InputFiles, TextFormat
from sar.partition.ingest.text import TextTable

SAYING_SECONDS = 30.0  # between lines of the log, as reading may take minutes
_BATCH_ROWS = 1 << 17


class ArrayTable:
    """An `.npy` file whose columns are named by number: one of (N,), C of (N, C)."""

    has_names = is_empty = False

    def __init__(self, path: Path) -> None:
        self.path = path
        array, is_transposed = open_npy(path)
        try:
            self.array: Column = np.load(path, mmap_mode="r", allow_pickle=False) if is_transposed else array
        except (OSError, ValueError) as error:
            raise PartitionError(f"{path} cannot be mapped into memory: {error}. Save it in C order.") from error
        shape = self.array.shape
        self.names = [*map(str, range(1 if len(shape) == 1 else shape[1] if len(shape) == 2 else 0))]
        self.shown = f"shape {shape}"

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """The rows of one column of integers."""
        if self.array.dtype.kind not in "iu":
            raise PartitionError(
                f"{self.path} holds {self.array.dtype} {self.array.shape}; expected integers, IDs of nodes."
            )
        for rows in pieces(self.array.shape[0]):
            some = self.array[rows].reshape(rows.stop - rows.start, -1)
            where = partial(lambda first, row: f"{self.path}, row {first + row} (from 0)", rows.start)
            yield Batch([pyarrow.array(np.ascontiguousarray(some[:, column])) for column in columns], where)


class ParquetTable:
    """A Parquet file. Features are read as they are stored, whatever kind of numbers is asked for."""

    has_names, is_empty = True, False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pyarrow.parquet.ParquetFile(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(
                f"{path} cannot be read as a Parquet file: {error}. Copy or write it again."
            ) from error
        self.names = self._file.schema_arrow.names
        self.shown = ", ".join(self.names)

    def batches(self, columns: Sequence[int], kind: Kind) -> Iterator[Batch]:
        """The rows; a batch without rows if there are none, for the types of a feature."""
        names, row, schema = [self.names[column] for column in columns], 0, self._file.schema_arrow
        can_choose = len({*self.names}) == len(self.names)
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=names if can_choose else None, use_threads=False):
                places = names if can_choose else columns
                if batch.num_rows:
                    yield self._batch([batch.column(place) for place in places], names, kind, row)
                row += batch.num_rows
            if not row and kind not in ("nodes", "ids"):
                yield self._batch([pyarrow.array([], schema.field(place).type) for place in columns], names, kind, 0)
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(f"{self.path} is damaged: {error}. Copy or write it again.") from error

    def _batch(self, columns: Sequence[pyarrow.Array], names: Sequence[str], kind: Kind, first: int) -> Batch:
        where, values = partial(lambda row: f"{self.path}, row {first + row} (from 0)"), []
        for name, column in zip(names, columns, strict=True):
            if column.null_count:
                missing = int(np.argmax(np.asarray(column.is_null())))
                raise PartitionError(f"{where(missing)}: column {name!r} has no value there; expected one.")
            values.append((_node_ids if kind in ("nodes", "ids") else _numbers)(column, name, kind, where))
        if len(values) > 1 and any(isinstance(value, np.ndarray) and value.ndim > 1 for value in values):
            raise PartitionError(
                f"{self.path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
            )
        return Batch(values, where)


Table = TextTable | ParquetTable | ArrayTable


class ColumnChoice:
    """Finds the columns to read in each file of a table: the same ones, by their names if the files name them.

    Args:
        of: `edges`: two columns, source and destination, by default told by their names, else the only two.
            `ids`: one column. `feature`: any number; by default the only one.
        source: the files, with the columns that are wanted: names, or numbers from 0, also in digits; of a feature also
            ranges such as `0-1432`, and `ALL_COLUMNS` alone.
    """

    def __init__(self, of: Literal["edges", "ids", "feature"], source: InputFiles) -> None:
        self._of, self._source = of, source
        self._wanted = source.columns if source.columns is None else [*source.columns]
        self._first: Table | None = None  # the first file that has rows or names
        self._chosen: list[int] = []  # in that file

    def numbers(self, table: Table) -> list[int]:
        """The numbers of the columns in one more file.

        Raises `ConfigError` if the columns are not there, if it is unclear which are meant, or if they differ between
        files.
        """
        path, names, first = table.path, table.names, self._first
        if first is None:
            self._first = table
            self._chosen = self._find_ends(table) if self._of == "edges" else self._find(table)
            return self._chosen
        if table.has_names and not first.has_names:
            raise ConfigError(
                f"{path} has names of columns, {table.shown}, and {first.path} has none; name them in both."
            )
        if list(names) == list(first.names) or (not table.has_names and len(names) == len(first.names)):
            return self._chosen
        expected = [first.names[i] for i in self._chosen]
        if not all(names.count(name) == 1 for name in expected) or (
            self._wanted == [ALL_COLUMNS] and len(names) != len(first.names)
        ):
            raise ConfigError(
                f"{path} has the columns {_shown(names)}; expected {_shown(expected)} among them, as "
                f"in {first.path}. Write all files with the same columns."
            )
        return [names.index(name) for name in expected]

    def _find(self, table: Table) -> list[int]:
        path, names, wanted = table.path, table.names, self._wanted
        if wanted is None and len(names) > 1:
            several = f", with several names '#{names[0]},{names[1]}', or all with '#{ALL_COLUMNS}'"
            raise ConfigError(
                f"{path} has {len(names)} columns, {_shown(names)}; say which of them "
                f"{'has the IDs' if self._of == 'ids' else 'are the feature'}: '{path.name}#{names[0]}'"
                f"{several if self._of == 'feature' else ''}."
            )
        found: list[int] = []
        for column in range(len(names)) if wanted is None or wanted == [ALL_COLUMNS] else wanted:
            ends = None if column in names else re.fullmatch(r"(\d{1,9})-(\d{1,9})", str(column))
            first, last = (find_column(table, end) for end in ((column, column) if ends is None else ends.groups()))
            if first > last:
                raise ConfigError(f"{path}: {column!r} has no column; expected a range from left to right.")
            found += range(first, last + 1)
        if self._of == "ids" and len(found) != 1:
            raise ConfigError(f"{path}: {len(found)} columns were named for the IDs of nodes; expected one.")
        return found

    def _find_ends(self, table: Table) -> list[int]:
        path, names, wanted = table.path, table.names, self._wanted
        if wanted is not None:
            source, destination = (find_column(table, column) for column in wanted)
            if source == destination:
                raise ConfigError(f"sources and destinations are both to come from column {names[source]!r} of {path}.")
            return [source, destination]
        lower = [name.casefold() for name in names]
        pairs = [ends for ends in END_NAMES if all(lower.count(end) == 1 for end in ends)]
        if len({end for ends in pairs for end in ends}) == 2:
            return [lower.index(end) for end in pairs[0]]
        if len(names) != 2 or len(pairs) > 1:
            raise ConfigError(
                f"{path} has {len(names)} columns, {table.shown}; expected two, source and destination. Name these "
                "two (--columns), or the delimiter between them (--delimiter)."
            )
        if not table.has_names:
            return [0, 1]
        return order_of_two(path, names, self._source.ends, self._source.text.note)


def find_column(table: Table, wanted: str | int) -> int:
    """The number of a column, from its name or number, also in digits; `ConfigError` if there is not one such."""
    names = table.names
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    if wanted in names:
        raise ConfigError(f"{table.path} has {names.count(str(wanted))} columns called {wanted!r}; expected one.")
    expected = f"one of the columns {_shown(names)}" if names else f"none, as it has {table.shown}"
    raise ConfigError(f"{table.path} has no column {wanted!r}; expected {expected}.")


def _shown(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"


def open_table(path: Path, source: InputFiles) -> Table:
    """One of the files of a table."""
    if source.format == "text":
        return TextTable(path, source.text)
    return ParquetTable(path) if source.format == "parquet" else ArrayTable(path)


def read_table(path: Path, source: InputFiles, choice: ColumnChoice, kind: Kind) -> Iterator[Batch]:
    """The rows of one of the files of a table; errors are those of `ColumnChoice` and of `TextTable.batches`."""
    table, rows, said = open_table(path, source), 0, time.monotonic()
    for batch in () if table.is_empty else table.batches(choice.numbers(table), kind):
        yield batch
        rows += len(batch.columns[0])
        if time.monotonic() - said >= SAYING_SECONDS:
            logger.info("read %s rows of %s", f"{rows:,}", path)
            said = time.monotonic()


def checked(source: InputFiles, of: Literal["edges", "ids", "feature"]) -> InputFiles:
    """The files, whose columns are found, so that a wrong one is told before other files are read for minutes."""
    if source.format in ("text", "parquet") or (
        source.format == "npy" and of != "edges" and source.columns is not None
    ):
        choice = ColumnChoice(of, source)
        for table in (open_table(path, source) for path in source.files):
            if not table.is_empty:
                choice.numbers(table)
    return source


def read_ids(source: InputFiles) -> Iterator[tuple[int, pyarrow.Array]]:
    """The IDs in the one column that is meant, integers or strings, in chunks, each with the number of its file."""
    choice = ColumnChoice("ids", source)
    for number, file in enumerate(source.files):
        yield from ((number, batch.columns[0]) for batch in read_table(file, source, choice, "ids"))


def read_node_list(files: Files, header: bool | None = None) -> Array:
    """The IDs in a list of nodes, (S,): integers, or strings in UTF-8, as which text files give all IDs."""
    columns = [column for _, column in read_ids(InputFiles.named(files, TextFormat(header=header), LIST_FORMATS))]
    ids = pyarrow.concat_arrays(columns or [pyarrow.array([], pyarrow.int64())])
    return ids.to_numpy() if kinds.is_integer(ids.type) else as_bytes(ids)


def as_bytes(texts: pyarrow.Array) -> Array:
    """Strings in UTF-8, (n,), of the width of the longest one."""
    return np.array([b"", *texts.cast(pyarrow.binary()).to_pylist()])[1:]


def _numbers(column: pyarrow.Array, name: str, kind: Kind, where: partial[str]) -> Any:
    """A column of a feature in Parquet: (n,), or (n, F) if rows are lists."""
    count, stored = len(column), column.type
    row_shape: tuple[int, ...] = ()
    if kinds.is_fixed_size_list(stored):
        column, row_shape = column.flatten(), (stored.list_size,)
    elif kinds.is_list(stored) or kinds.is_large_list(stored):
        lengths = np.asarray(column.value_lengths())
        if (lengths != lengths[:1]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise PartitionError(
                f"{where(row)}: column {name!r} has a list of {lengths[row]}; expected {lengths[0]} numbers, as in "
                "the rows before."
            )
        column, row_shape = column.flatten(), (int(lengths[0]) if count else 0,)
    is_numbers = kinds.is_integer(column.type) or kinds.is_floating(column.type) or kinds.is_boolean(column.type)
    if column.null_count or not is_numbers:
        missing = " with missing values in it" if column.null_count else ""
        raise NotNumbersError(f"{where(0)}: column {name!r} is of type {stored}{missing}; expected numbers.")
    return column.to_numpy(zero_copy_only=False).reshape(count, *row_shape)


def _node_ids(column: pyarrow.Array, name: str, kind: Kind, where: partial[str]) -> Any:
    """A column of IDs in Parquet: (n,) integers, or if any IDs are asked for also strings."""
    if kind == "ids" and kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "ids" and any(form in str(column.type) for form in ("string", "binary")):
        column = column.cast(pyarrow.string())  # checks that bytes are UTF-8
    if not (kinds.is_integer(column.type) or (kind == "ids" and kinds.is_string(column.type))):
        expected = "integers or strings, IDs" if kind == "ids" else "integers, node IDs"
        raise NotNumbersError(f"{where(0)}: column {name!r} is of type {column.type}; expected {expected}.")
    return column if kind == "ids" else column.to_numpy()
