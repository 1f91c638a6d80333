"""Tables of any format: Parquet is read here, text in `text.py`; whoever takes the batches does not know which."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pyarrow.types as kinds

from sar.data.arrays import Array, open_npy
from sar.errors import PartitionError
from sar.id_slices import pieces
from sar.logging_setup import logger
from sar.partition.ingest.columns import Batch, ColumnChoice, Kind, NotNumbersError
from sar.partition.ingest.files import Files, InputFiles, TextFormat
from sar.partition.ingest.text import TextTable

SAYING_SECONDS = 30.0  # between lines of the log, as reading may take minutes
_BATCH_ROWS = 1 << 17


def read_table(path: Path, source: InputFiles, choice: ColumnChoice, kind: Kind) -> Iterator[Batch]:
    """The rows of one of the files of a table.

    Raises `PartitionError`, which names the row, if the file is damaged or a value is missing, `NotNumbersError` if
    values are of another kind, and `ConfigError` if the columns chosen are not there.
    """
    table = TextTable(path, source.text) if source.format == "text" else _ParquetTable(path)
    rows, said = 0, time.monotonic()
    for batch in table.batches(choice, kind):
        yield batch
        rows += len(batch.columns[0])
        if time.monotonic() - said >= SAYING_SECONDS:
            logger.info("read %s rows of %s", f"{rows:,}", path)
            said = time.monotonic()


def read_ids(source: InputFiles) -> Iterator[tuple[int, pyarrow.Array]]:
    """The IDs in the one column that is meant, integers or strings, in chunks, each with the number of its file."""
    choice = ColumnChoice("ids", source.columns)
    for number, file in enumerate(source.files):
        if source.format in ("text", "parquet"):
            yield from ((number, batch.columns[0]) for batch in read_table(file, source, choice, "ids"))
        else:
            column, _ = open_npy(file)
            if len(column.shape) != 1 or column.dtype.kind not in "iu":
                raise PartitionError(f"{file} holds {column.dtype} {column.shape}; expected integers (N,), IDs.")
            yield from ((number, pyarrow.array(column[rows])) for rows in pieces(column.shape[0]))


def read_node_list(files: Files, header: bool | None = None) -> Array:
    """The IDs in a list of nodes, (S,): integers, or strings in UTF-8, as which text files give all IDs."""
    columns = [column for _, column in read_ids(InputFiles.named(files, TextFormat(header=header)))]
    ids = pyarrow.concat_arrays(columns or [pyarrow.array([], pyarrow.int64())])
    return ids.to_numpy() if kinds.is_integer(ids.type) else as_bytes(ids)


def as_bytes(texts: pyarrow.Array) -> Array:
    """Strings in UTF-8, (n,), of the width of the longest one."""
    return np.array([b"", *texts.cast(pyarrow.binary()).to_pylist()])[1:]


class _ParquetTable:
    """A Parquet file. Features are read as they are stored, whatever kind of numbers is asked for."""

    has_names = True

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

    def batches(self, choice: ColumnChoice, kind: Kind) -> Iterator[Batch]:
        """The rows."""
        names, row = [self.names[column] for column in choice.numbers(self)], 0
        try:
            for batch in self._file.iter_batches(_BATCH_ROWS, columns=names, use_threads=False):
                where = partial(self._where, row)
                values = []
                for name in names:
                    column = batch.column(name)
                    if column.null_count:
                        missing = int(np.argmax(np.asarray(column.is_null())))
                        raise PartitionError(f"{where(missing)}: column {name!r} has no value there; expected one.")
                    if choice.of == "feature":
                        values.append(self._numbers(column, name, where))
                    else:
                        values.append(self._node_ids(column, name, kind))
                if len(values) > 1 and any(value.ndim > 1 for value in values if choice.of == "feature"):
                    raise PartitionError(
                        f"{self.path} has lists in one of {', '.join(names)}; name one column of lists, or scalars."
                    )
                yield Batch(values, where)
                row += batch.num_rows
        except (OSError, pyarrow.ArrowException) as error:
            raise PartitionError(f"{self.path} is damaged: {error}. Copy or write it again.") from error

    def _where(self, first: int, row: int) -> str:
        return f"{self.path}, row {first + row} (from 0)"

    def _numbers(self, column: pyarrow.Array, name: str, where: partial[str]) -> Any:
        """A column of a feature: (n,), or (n, F) if rows are lists."""
        count, kind = len(column), column.type
        row_shape: tuple[int, ...] = ()
        if kinds.is_fixed_size_list(kind):
            column, row_shape = column.flatten(), (kind.list_size,)
        elif kinds.is_list(kind) or kinds.is_large_list(kind):
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
            raise NotNumbersError(f"{self.path}: column {name!r} is of type {kind}{missing}; expected numbers.")
        return column.to_numpy(zero_copy_only=False).reshape(count, *row_shape)

    def _node_ids(self, column: pyarrow.Array, name: str, kind: Kind) -> Any:
        """A column of IDs: (n,) integers, or if any IDs are asked for also strings."""
        if kind == "ids" and kinds.is_dictionary(column.type):
            column = column.dictionary_decode()
        if kind == "ids" and any(form in str(column.type) for form in ("string", "binary")):
            column = column.cast(pyarrow.string())  # checks that bytes are UTF-8
        if not (kinds.is_integer(column.type) or (kind == "ids" and kinds.is_string(column.type))):
            expected = "integers or strings, IDs" if kind == "ids" else "integers, node IDs"
            raise NotNumbersError(f"{self.path}: column {name!r} is of type {column.type}; expected {expected}.")
        return column if kind == "ids" else column.to_numpy()
