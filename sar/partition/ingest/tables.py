"""Tables in text or Parquet: selects columns and reads rows."""

import re
from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow
import pyarrow.types as kinds

from sar.common_tuples import StrPath
from sar.data.arrays import Array, open_npy
from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.parquet import Batch, Kind, ParquetTable
from sar.partition.ingest.sources import ALL_COLUMNS, COLUMN_FORMATS, Files, InputFiles, TextFormat
from sar.partition.ingest.text import TextTable, shortened
from sar.tensors.id_arrays import pieces

Purpose = Literal["edges", "ids", "feature"]
"""The purpose of reading a table: two columns of edges, one of IDs, or any number for a feature."""
Table = TextTable | ParquetTable


def read_table(source: InputFiles, purpose: Purpose, kind: Kind) -> Iterator[Batch]:
    """Read the rows of a table.

    Raises the errors of `TextTable.batches`, and `ConfigError` if a first line may be a header or a row.
    """
    for table, columns in open_table(source, purpose):
        unclear = table.unclear_feature if purpose == "feature" else table.unclear_ids if kind == "ids" else ""
        names_tell_ends = purpose == "edges" and source.columns is None and table.has_names
        if unclear and not names_tell_ends:
            raise ConfigError(
                f"{table.path} begins with {shortened(unclear)}: a row, names of columns, or a comment? Say it "
                "(--header, --no-header), name a column (FILE#NAME), or put a blank after the mark of a comment."
            )
        for batch in () if table.is_empty else table.batches(columns, kind):
            source.text.progress(f"reading {table.path.name}", table.share)
            yield batch


def read_ids(source: InputFiles) -> Iterator[pyarrow.Array]:
    """Read the IDs in the selected column in chunks, integers or strings."""
    if source.format != "npy":
        yield from (batch.columns[0] for batch in read_table(source, "ids", "ids"))
        return
    for file in source.files:
        array, _ = open_npy(file)
        if source.columns is not None or array.shape[1:] not in ((), (1,)) or array.dtype.kind not in "iu":
            raise PartitionError(f"{file} holds {array.dtype} {array.shape}; expected integers (N,), IDs of nodes.")
        yield from (pyarrow.array(array[rows].reshape(-1)) for rows in pieces(array.shape[0]))


def select(files: Files, text: TextFormat, purpose: Purpose) -> InputFiles:
    """Find the files of a feature or a list of nodes; `FILE#COLUMN,COLUMN` selects columns.

    The selector follows all files or each file. Raises the errors of `InputFiles.find`, and `ConfigError` for
    unknown columns, before other files are read for minutes.
    """
    selectors = set()

    def without_selector(one: StrPath) -> StrPath:
        file, mark, names = fspath(one).rpartition("#")
        is_named = bool(mark) and not Path(one).exists()
        selectors.add(names if is_named else None)
        return file if is_named else one

    files = without_selector(files) if isinstance(files, str | PathLike) else [*map(without_selector, files)]
    if len(selectors) > 1:
        raise ConfigError(f"files of one feature name other columns, {selectors}; expected the same for all.")
    names = next(iter(selectors), None)
    columns = None if names is None else names.split(",")
    source = InputFiles.find(files, text, columns=columns, among=COLUMN_FORMATS)
    if source.format != "npy":
        open_table(source, purpose)
    elif columns not in (None, [ALL_COLUMNS]):
        raise ConfigError(f"{source.files[0]} is an array without columns to choose from; save those to take.")
    return source


def read_node_list(files: Files, header: bool | None = None) -> Array:
    """Read the IDs of a list of nodes, (S,): integers, or UTF-8 strings, which is the type of all IDs in text files."""
    columns = [*read_ids(select(files, TextFormat(header=header), "ids"))]
    ids = pyarrow.concat_arrays(columns or [pyarrow.array([], pyarrow.int64())])
    return ids.to_numpy() if kinds.is_integer(ids.type) else as_bytes(ids)


def as_bytes(texts: pyarrow.Array) -> Array:
    """UTF-8 strings, (n,), padded to the longest one."""
    return np.array([b"", *texts.cast(pyarrow.binary()).to_pylist()])[1:]


def open_table(source: InputFiles, purpose: Purpose) -> list[tuple[Table, list[int]]]:
    """The files of a table, each with the numbers of the columns to read; columns are matched by name if they have any.

    Columns are selected by name or number from 0, also as text; for features also by ranges such as `0-1432`, or
    `ALL_COLUMNS`. By default edges use two columns with known names, or the only two; other tables the only column.
    `ConfigError` for columns that are missing, ambiguous, or different between files.
    """
    opened: list[tuple[Table, list[int]]] = []
    for path in source.files:
        table: Table = ParquetTable(path) if source.format == "parquet" else TextTable(path, source.text)
        first, columns = next((one for one in opened if not one[0].is_empty), (table, []))
        if first is table and not table.is_empty:
            of_edges = purpose == "edges"
            columns = _end_columns(table, source.columns) if of_edges else _columns(table, source.columns, purpose)
        names, expected = table.names, first.names
        # If one file was split, only the first piece has column names.
        is_same = names == expected or (not table.has_names and len(names) == len(expected))
        if not is_same and not table.is_empty:
            raise ConfigError(
                f"{path} has the columns {_listed(names)}; expected {_listed(expected)}, as in {first.path}. Write all "
                "files with the same columns."
            )
        opened.append((table, columns))
    return opened


def _columns(table: Table, wanted: Sequence[str | int] | None, purpose: Purpose) -> list[int]:
    """The columns of a list of IDs, or of a feature."""
    path, names = table.path, table.names
    if wanted is None and len(names) > 1:
        several = f", with several names '#{names[0]},{names[1]}', or all with '#{ALL_COLUMNS}'"
        raise ConfigError(
            f"{path} has {len(names)} columns, {_listed(names)}; say which of them "
            f"{'has the IDs' if purpose == 'ids' else 'are the feature'}: '{path.name}#{names[0]}'"
            f"{several if purpose == 'feature' else ''}."
        )
    found: list[int] = []
    for column in range(len(names)) if wanted is None or [*wanted] == [ALL_COLUMNS] else wanted:
        ends = None if column in names else re.fullmatch(r"(\d{1,9})-(\d{1,9})", str(column))
        first, last = (_find_column(table, end) for end in ((column, column) if ends is None else ends.groups()))
        if first > last:
            raise ConfigError(f"{path}: {column!r} has no column; expected a range from left to right.")
        found += range(first, last + 1)
    if purpose == "ids" and len(found) != 1:
        raise ConfigError(f"{path}: {len(found)} columns were named for the IDs of nodes; expected one.")
    return found


_END_WORDS = (
    "src source from subject subj sender origin citing follower caller u",
    "dst destination to target tgt object obj receiver recipient cited followee callee v",
)
"""Words for sources and destinations in column names."""


def _named_ends(names: Sequence[str]) -> list[int] | None:
    """The columns of sources and destinations, if names such as `FromNodeId` or `dst_id` identify one of each."""
    words = [re.sub(r"[^a-z]|node|id", "", name.casefold()) for name in names]
    ends = [[i for i, word in enumerate(words) if word in of_end.split()] for of_end in _END_WORDS]
    return [found[0] for found in ends] if all(len(found) == 1 for found in ends) else None


def _end_columns(table: Table, wanted: Sequence[str | int] | None) -> list[int]:
    """The columns of sources and destinations."""
    path, names = table.path, table.names
    if wanted is not None:
        src, dst = (_find_column(table, column) for column in wanted)
        if src == dst:
            raise ConfigError(f"sources and destinations both come from column {names[src]!r} of {path}.")
        return [src, dst]
    if table.has_names and (ends := _named_ends(names)) is not None:
        return ends
    if table.has_names and len(names) > 1:  # also `0` and `1`, which pandas writes without names
        raise ConfigError(
            f"{path} has the columns {_listed(names)}, which do not tell sources from destinations. Name the two in "
            f"this order: --columns '{names[0]}' '{names[1]}', for instance; or say that they are a row: --no-header."
        )
    if len(names) != 2:
        raise ConfigError(
            f"{path} has {len(names)} columns, {table.shown}; expected two, source and destination. Name these two "
            "(--columns), or the delimiter between them (--delimiter)."
        )
    return [0, 1]


def _find_column(table: Table, wanted: str | int) -> int:
    """The number of a column from its name or number, also as text; `ConfigError` unless there is exactly one."""
    names = table.names
    if isinstance(wanted, str) and names.count(wanted) == 1:
        return names.index(wanted)
    number = int(wanted) if isinstance(wanted, int) or wanted.isdecimal() else -1
    if 0 <= number < len(names) and wanted not in names:
        return number
    if wanted in names:
        raise ConfigError(f"{table.path} has {names.count(str(wanted))} columns called {wanted!r}; expected one.")
    expected = f"one of the columns {_listed(names)}" if names else f"none, as it has {table.shown}"
    raise ConfigError(f"{table.path} has no column {wanted!r}; expected {expected}.")


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:10])}{', ...' * (len(names) > 10)}"
