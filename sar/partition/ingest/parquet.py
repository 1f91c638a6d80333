"""Edges and features in Parquet files, through pyarrow, which is optional."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sar.errors import ConfigError, PartitionError
from sar.partition.graph_data import Array
from sar.partition.ingest.checks import check_ids

_BATCH_ROWS = 1 << 17
_END_NAMES = (("src", "dst"), ("source", "destination"), ("source", "target"), ("src_id", "dst_id"))


def parquet_edges(
    path: Path, columns: tuple[str | int, str | int] | None, num_sources: int, num_destinations: int
) -> Iterator[tuple[Array, Array]]:
    """The edges of a file in chunks of int64.

    Args:
        path: Parquet file.
        columns: those of sources and destinations, by name or by number from 0; None: the file has only two, or calls
            them `src` and `dst` or the like.
        num_sources: sources are 0 to this - 1.
        num_destinations: destinations likewise.

    Raises:
        PartitionError: the file is missing or damaged, or an ID is missing, no integer, negative or too large.
        ConfigError: there are no such columns, or pyarrow is not installed.
    """
    file = _open(path)
    names = file.schema_arrow.names
    if columns is None:
        columns = next((ends for ends in _END_NAMES if set(ends) <= set(names)), (0, 1))
        if isinstance(columns[0], int) and len(names) != 2:
            raise ConfigError(
                f"{path} has the columns {', '.join(names)}; expected two, source and destination. Name these two."
            )
    ends = [_name(path, names, column) for column in columns]
    for name in ends:
        if not _is_integer(file.schema_arrow.field(name).type):
            raise PartitionError(
                f"{path}: column {name!r} is of type {file.schema_arrow.field(name).type}; expected integers, node IDs."
            )
    row = 0
    for batch in _batches(path, file, ends):
        src, dst = (_numbers(path, batch, name, row).astype(np.int64, copy=False) for name in ends)
        check_ids(src, num_sources, str(path), row, "source")
        check_ids(dst, num_destinations, str(path), row, "destination")
        yield src, dst
        row += len(src)


def parquet_rows(path: Path, columns: Sequence[str] | None) -> Iterator[Array]:
    """A feature in chunks of rows: (n,) of one column, (n, F) of a column of lists, (n, C) of several columns.

    Args:
        path: Parquet file.
        columns: their names; None: all.

    Raises:
        PartitionError: the file is missing or damaged, or holds other things than numbers.
        ConfigError: there are no such columns, or pyarrow is not installed.
    """
    file = _open(path)
    names = [_name(path, file.schema_arrow.names, column) for column in columns or file.schema_arrow.names]
    row = 0
    for batch in _batches(path, file, names):
        values = [_numbers(path, batch, name, row) for name in names]
        if len(values) > 1 and any(value.ndim > 1 for value in values):
            raise PartitionError(
                f"{path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
            )
        yield values[0] if len(values) == 1 else np.stack(values, axis=1)
        row += batch.num_rows


def parquet_num_rows(path: Path) -> int:
    """Rows of a file, from its footer.

    Raises:
        PartitionError: the file is missing or damaged.
        ConfigError: pyarrow is not installed.
    """
    return int(_open(path).metadata.num_rows)


def _open(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} is read through pyarrow, which is not installed. Install it: pip install 'sar[parquet]'."
        ) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise PartitionError(f"{path} cannot be read as a Parquet file: {error}. Copy or write it again.") from error


def _batches(path: Path, file: Any, names: Sequence[str]) -> Iterator[Any]:
    import pyarrow

    try:
        yield from file.iter_batches(_BATCH_ROWS, columns=list(names), use_threads=False)
    except (OSError, pyarrow.ArrowException) as error:
        raise PartitionError(f"{path} is damaged: {error}. Copy or write it again.") from error


def _name(path: Path, names: Sequence[str], column: str | int) -> str:
    if isinstance(column, int) and 0 <= column < len(names):
        return names[column]
    if isinstance(column, str) and column in names:
        return column
    raise ConfigError(f"{path} has no column {column!r}; expected one of {', '.join(names)}.")


def _is_integer(kind: Any) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_integer(kind))


def _numbers(path: Path, batch: Any, name: str, first_row: int) -> Array:
    """A column of a batch as an array: (n,), or (n, F) where rows are lists."""
    import pyarrow

    column = batch.column(name)
    if column.null_count:
        row = first_row + int(np.argmax(np.asarray(column.is_null())))
        raise PartitionError(
            f"{path}, row {row} (from 0): column {name!r} has no value there; expected one in each row."
        )
    row_shape: tuple[int, ...] = ()
    if pyarrow.types.is_fixed_size_list(column.type):
        row_shape = (column.type.list_size,)
        column = column.flatten()
    elif pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
        lengths = np.asarray(column.value_lengths())
        if (lengths != lengths[:1]).any():
            row = int(np.argmax(lengths != lengths[0]))
            raise PartitionError(
                f"{path}, row {first_row + row} (from 0): column {name!r} has a list of {lengths[row]}; expected "
                f"{lengths[0]} numbers, as in the rows before."
            )
        row_shape = (int(lengths[0]) if len(lengths) else 0,)
        column = column.flatten()
    if column.null_count or not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)
                                 or pyarrow.types.is_boolean(column.type)):  # fmt: skip
        raise PartitionError(
            f"{path}: column {name!r} is of type {batch.column(name).type}"
            f"{' with missing values in it' if column.null_count else ''}; expected numbers."
        )
    values: Array = column.to_numpy(zero_copy_only=False)
    rows: Array = values.reshape(batch.num_rows, *row_shape)
    return rows
