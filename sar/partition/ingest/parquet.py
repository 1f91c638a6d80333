"""Edges and features in Parquet files, read in batches through pyarrow."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow
import pyarrow.parquet
import pyarrow.types as kinds

from sar.data.arrays import Array
from sar.errors import PartitionError
from sar.partition.graph_source import RowsRead, check_ends
from sar.partition.ingest.files import ADVICE, ColumnChoice, NotNumbersError

T = TypeVar("T")

_BATCH_ROWS = 1 << 17


def parquet_edges(
    path: Path, choice: ColumnChoice, limits: tuple[int, int], advice: str
) -> Iterator[tuple[Array, Array]]:
    """The edges of a file in chunks of int64.

    Columns are those of the choice; sources and destinations are below the limits. `PartitionError` if the file is
    missing or damaged, or an ID is missing, no integer, negative or too large.
    """
    file = _open(path)
    names = file.schema_arrow.names
    ends = choice.numbers(path, names, ", ".join(names))
    for end in ends:
        kind = file.schema_arrow.field(end).type
        if not kinds.is_integer(kind):
            raise PartitionError(
                f"{path}: column {names[end]!r} is of type {kind}; expected integers, node IDs. {ADVICE}"
            )
    row = 0
    for src, dst in _batches(path, file, [names[end] for end in ends], _numbers):
        src, dst = (ids.astype(np.int64, copy=False) for ids in (src, dst))
        check_ends(src, dst, limits, str(path), row, advice)
        yield src, dst
        row += len(src)


def parquet_rows(path: Path, choice: ColumnChoice) -> Iterator[Array]:
    """A feature in chunks of rows: (n,) of one column, (n, F) of a column of lists, (n, C) of several columns.

    `PartitionError` if the file is missing or damaged, `NotNumbersError` if it holds other things than numbers.
    """
    file = _open(path)
    every = file.schema_arrow.names
    names = [every[column] for column in choice.numbers(path, every, ", ".join(every))]
    for values in _batches(path, file, names, _numbers):
        if len(values) > 1 and any(value.ndim > 1 for value in values):
            raise PartitionError(
                f"{path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
            )
        yield values[0] if len(values) == 1 else np.stack(values, axis=1)


def parquet_ids(path: Path, choice: ColumnChoice) -> Iterator[list[pyarrow.Array]]:
    """The IDs of nodes in chunks: integers or strings, (n,) in each column.

    `PartitionError` if the file is missing or damaged, or holds other things.
    """
    file = _open(path)
    names = file.schema_arrow.names
    chosen = choice.numbers(path, names, ", ".join(names))
    yield from _batches(path, file, [names[column] for column in chosen], _ids)


def _open(path: Path) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise PartitionError(f"{path} cannot be read as a Parquet file: {error}. Copy or write it again.") from error


def _batches(
    path: Path, file: pyarrow.parquet.ParquetFile, names: Sequence[str], convert: Callable[..., T]
) -> Iterator[list[T]]:
    """The values of some columns, batch by batch."""
    row, read = 0, RowsRead(path)
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
            yield [convert(path, batch.column(name), name, row) for name in names]
            row += batch.num_rows
            read.note(row)
    except (OSError, pyarrow.ArrowException) as error:
        raise PartitionError(f"{path} is damaged: {error}. Copy or write it again.") from error


def _numbers(path: Path, column: pyarrow.Array, name: str, first_row: int) -> Array:
    """A column of a batch: (n,), or (n, F) if rows are lists."""
    _check_values(path, column, name, first_row)
    count, kind = len(column), column.type
    row_shape: tuple[int, ...] = ()
    if kinds.is_fixed_size_list(kind):
        row_shape = (kind.list_size,)
        column = column.flatten()
    elif kinds.is_list(kind) or kinds.is_large_list(kind):
        lengths = np.asarray(column.value_lengths())
        if (lengths != lengths[:1]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise PartitionError(
                f"{path}, row {first_row + row} (from 0): column {name!r} has a list of {lengths[row]}; expected "
                f"{lengths[0]} numbers, as in the rows before."
            )
        row_shape = (int(lengths[0]) if count else 0,)
        column = column.flatten()
    is_numbers = kinds.is_integer(column.type) or kinds.is_floating(column.type) or kinds.is_boolean(column.type)
    if column.null_count or not is_numbers:
        missing = " with missing values in it" if column.null_count else ""
        raise NotNumbersError(f"{path}: column {name!r} is of type {kind}{missing}; expected numbers.")
    values: Array = column.to_numpy(zero_copy_only=False)
    return values.reshape(count, *row_shape)


def _ids(path: Path, column: pyarrow.Array, name: str, first_row: int) -> pyarrow.Array:
    """A column of a batch: (n,) integers or strings."""
    _check_values(path, column, name, first_row)
    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if any(kind in str(column.type) for kind in ("string", "binary")):
        column = column.cast(pyarrow.string())  # checks that bytes are UTF-8
    if not (kinds.is_integer(column.type) or kinds.is_string(column.type)):
        raise PartitionError(f"{path}: column {name!r} is of type {column.type}; expected integers or strings, IDs.")
    return column


def _check_values(path: Path, column: pyarrow.Array, name: str, first_row: int) -> None:
    if column.null_count:
        row = first_row + int(np.argmax(np.asarray(column.is_null())))
        raise PartitionError(
            f"{path}, row {row} (from 0): column {name!r} has no value there; expected one in each row."
        )
