"""Parquet tables, read by `pyarrow.parquet` in batches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
import pyarrow.types as kinds

from sar.errors import ConfigError, PartitionError

_BATCH_ROWS = 1 << 17

Kind = Literal["integers", "fractions", "booleans", "nodes", "ids"]
"""The requested values of a table: feature values, node numbers, or unchanged IDs."""


class NotNumbersError(PartitionError):
    """A feature has values that are not numbers of the requested kind."""


class Batch(NamedTuple):
    """Some rows of a table."""

    columns: list[Any]  # numbers as numpy arrays, (n,) or (n, F); IDs as pyarrow arrays of strings or integers, (n,)
    where: Callable[[int], str]  # describes a row of the batch by its number, for errors


class ParquetTable:
    """A Parquet file. Features keep their stored dtype, regardless of the requested kind of numbers."""

    has_names, is_empty, share = True, False, 0.0
    unclear_ids = unclear_feature = ""

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
        """Read the rows; an empty table yields one batch without rows, for the dtypes of features."""
        names, row = [self.names[column] for column in columns], 0
        for name in names:
            if self.names.count(name) > 1:
                raise ConfigError(f"{self.path} has {self.names.count(name)} columns called {name!r}; expected one.")
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                self.share = (row + batch.num_rows) / self._file.metadata.num_rows
                if batch.num_rows:
                    yield self._batch([batch.column(name) for name in names], names, kind, row)
                row += batch.num_rows
            if not row and kind not in ("nodes", "ids"):
                types = [self._file.schema_arrow.field(name).type for name in names]
                yield self._batch([pyarrow.array([], one) for one in types], names, kind, 0)
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(f"{self.path} is damaged: {error}. Copy or write it again.") from error

    def _batch(self, columns: Sequence[pyarrow.Array], names: Sequence[str], kind: Kind, first: int) -> Batch:
        where, values = lambda row: f"{self.path}, row {first + row} (from 0)", []
        for name, column in zip(names, columns, strict=True):
            if column.null_count:
                missing = int(np.argmax(np.asarray(column.is_null())))
                raise PartitionError(f"{where(missing)}: column {name!r} has no value there; expected one.")
            is_ids = kind in ("nodes", "ids")
            values.append(_node_ids(column, name, kind, where) if is_ids else _numbers(column, name, where))
        if len(values) > 1 and any(isinstance(value, np.ndarray) and value.ndim > 1 for value in values):
            raise PartitionError(
                f"{self.path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
            )
        return Batch(values, where)


def _numbers(column: pyarrow.Array, name: str, where: Callable[[int], str]) -> Any:
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


def _node_ids(column: pyarrow.Array, name: str, kind: Kind, where: Callable[[int], str]) -> Any:
    """A column of IDs in Parquet: (n,) integers, or strings if the kind is "ids"."""
    if kind == "ids" and kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    if kind == "ids" and any(form in str(column.type) for form in ("string", "binary")):
        column = column.cast(pyarrow.string())  # checks that bytes are UTF-8
    if not (kinds.is_integer(column.type) or (kind == "ids" and kinds.is_string(column.type))):
        expected = "integers or strings, IDs" if kind == "ids" else "integers, node IDs"
        raise NotNumbersError(f"{where(0)}: column {name!r} is of type {column.type}; expected {expected}.")
    return column if kind == "ids" else column.to_numpy()
