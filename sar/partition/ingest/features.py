"""Opens features of nodes and edges: `.npy` files are read in place, text and Parquet are copied once."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import GIVEN_ID, SPLIT, CanonicalEtype
from sar.data.arrays import Array, ArrayFile, StoredArray, open_npy
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Column, JoinedColumn
from sar.partition.ingest.parquet import Batch, Kind, NotNumbersError
from sar.partition.ingest.sources import ALL_COLUMNS, Files, InputFiles, Reading, TextFormat
from sar.partition.ingest.tables import read_ids, read_table, select

T = TypeVar("T", str, CanonicalEtype)

LABEL = "label"
_NEVER_NAN = (LABEL, *SPLIT)
_MOST_CLASSES, _LONGEST_CLASS = 1 << 16, 100
_EXACT_FLOAT32 = 2.0**24  # float32 does not represent all integers above this
_TYPES: tuple[tuple[Kind, type[np.float32] | None], ...] = (
    ("integers", None),
    ("fractions", np.float32),
    ("fractions", None),
    ("booleans", None),
)
"""Kinds of numbers in text and their dtypes, by preference."""


@dataclass(frozen=True)
class ColumnView:
    """A column whose rows are checked or changed when they are read."""

    column: Column
    shape: tuple[int, ...]  # (rows, ...)
    read: Callable[[Array, int], Array]  # called with stored rows and the number of the first row

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        return self.read(self.column[rows], rows.indices(self.shape[0])[0])


def without_nan(column: Column, name: str, where: str, *, allow_nan: bool) -> Column:
    """Return the column with a check for NaN and infinity, if they are not allowed; labels and masks never allow them.

    Slices are checked when they are read. `PartitionError` describes the column as `where`.
    """
    if column.dtype.kind != "f" or (allow_nan and name not in _NEVER_NAN):
        return column

    def checked(values: Array, first: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = values.size and not np.isfinite(values.sum())  # the sum is the cheapest test
        if suspicious and (found := ~np.isfinite(values).reshape(len(values), -1).all(1)).any():
            row = int(np.argmax(found))
            what = "NaN" if np.isnan(values[row]).any() else "infinity"
            raise PartitionError(
                f"{where}, row {first + row} (from 0), has {what}; expected numbers. Fill the missing values in"
                + (" (labels with -1)." if name in _NEVER_NAN else f", or allow {what} (--allow-nan, allow_nan=True).")
            )
        return values

    return ColumnView(column, column.shape, checked)


def fields_without_nan(
    data: Mapping[T, Mapping[str, Column]], where: str = "", *, allow_nan: bool = False
) -> dict[T, dict[str, Column]]:
    """Apply `without_nan` to the fields of all types; `where` begins error messages."""
    checked: dict[T, dict[str, Column]] = {}
    for kind, fields in data.items():
        type_name = kind if isinstance(kind, str) else ":".join(kind)
        checked[kind] = {
            name: without_nan(column, name, f"{where}field '{type_name}/{name}'", allow_nan=allow_nan)
            for name, column in fields.items()
        }
    return checked


def features_by_type(
    features: Mapping[str, Files], types: Sequence[str], text: TextFormat
) -> dict[str, dict[str, InputFiles]]:
    """Group the files of features named `type/name`, or `name` if there is one type, by type and name.

    Raises `ConfigError` for unknown types and columns, `PartitionError` for missing files.
    """
    found: dict[str, dict[str, InputFiles]] = {kind: {} for kind in types}
    for key, files in features.items():
        kind, slash, name = key.rpartition("/")
        if not slash and len(types) == 1:
            (kind,) = types
        if kind not in found or not name:
            raise ConfigError(
                f"there is no type for the feature '{key}'; expected TYPE/NAME with a type among {', '.join(types)}"
                f"{' (or just NAME)' if len(types) == 1 else ''}."
            )
        found[kind][name] = select(files, text, "ids" if name == GIVEN_ID else "feature")
    return found


def open_features(
    kind: str, sources: Mapping[str, InputFiles], rows: int | None, how: Reading, beside: InputFiles | None = None
) -> dict[str, Column]:
    """Open the features of one type, by name.

    `rows` is the number of nodes or edges; None takes it from the first feature. Rows must match those of the files
    `beside`, by default of the first feature. Raises the errors of `open_column` and `InputFiles.check_order`.
    """
    found: dict[str, Column] = {}
    first = "" if rows is not None or not sources else next(iter(sources.values())).shown
    for name, source in sources.items():
        if beside is None or len(beside.files) == 1:
            beside = source
        source.check_order(beside)
        found[name] = open_column(source, f"{kind}/{name}", rows, how, first)
        rows = found[name].shape[0]
    return found


def open_column(source: InputFiles, key: str, rows: int | None, how: Reading, first: str = "") -> Column:
    """Open the feature with the key `type/name`. Text and Parquet are parsed now, into raw files.

    `rows` is the expected number, as in the file `first`, if any; None: any. `PartitionError` if a file is missing or
    damaged, or files are inconsistent or have another number of rows; `ConfigError` for unknown columns.
    """
    name = key.rpartition("/")[2]
    column: Column
    if source.format != "npy":
        try:
            column = _copied(source, name, how.scratch / quote(key, safe=""))
        except PartitionError as error:
            if name == LABEL and re.search("value ''|has no value", str(error)):
                raise PartitionError(f"{error} Write -1 for nodes without a label.") from error
            raise
        column = without_nan(column, name, source.shown, allow_nan=how.allow_nan)
    else:
        opened = [_open_array(file) for file in source.files]
        are_empty = not any(part.shape[0] for part in opened)
        parts = [
            (file, without_nan(part, name, str(file), allow_nan=how.allow_nan))
            for file, part in zip(source.files, opened, strict=True)
            if part.shape[0] or are_empty  # files without rows do not affect the dtype
        ]
        first_file, column = parts[0]
        for file, part in parts:
            if part.shape[1:] != column.shape[1:] or part.dtype != column.dtype:
                raise PartitionError(
                    f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {column.shape[1:]} and "
                    f"{column.dtype} as in {first_file}, as both belong to '{key}'. Write them alike."
                )
        column = column if len(parts) == 1 else JoinedColumn([part for _, part in parts])
    num_rows = column.shape[0]
    if rows is not None and num_rows != rows:
        hint = ""
        if name in SPLIT:
            hint = f" A list of the IDs of nodes is named with --{name.partition('_')[0]}-nodes FILE."
        elif source.format == "text" and abs(num_rows - rows) == 1:
            hint = " If its first line was misread, use --header or --no-header."
        raise PartitionError(
            f"{source.shown} has {num_rows} rows; expected {rows}{f' as in {first}' if first else ''}, one for each "
            f"node or edge of the type of '{key}'. Correct {'one of them' if first else 'the file'}, or the number of "
            f"nodes.{hint}"
        )
    return column


def _open_array(file: Path) -> Column:
    array, is_transposed = open_npy(file)
    if not is_transposed:
        return array
    try:
        mapped: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise PartitionError(f"{file} cannot be mapped into memory: {error}. Save it in C order.") from error
    return mapped


def _copied(source: InputFiles, name: str, copy: Path) -> StoredArray:
    """Copy a table with the first of several dtypes that holds the values of all files."""
    errors: dict[str, NotNumbersError] = {}
    for kind, dtype in _TYPES if source.format == "text" else _TYPES[:1]:
        try:
            return _copied_as(kind, dtype, source, copy)
        except NotNumbersError as error:
            errors[kind] = error
    one_column = source.columns is None or (len(source.columns) == 1 and source.columns[0] != ALL_COLUMNS)
    if name == LABEL and (one_column or source.format == "parquet"):
        try:
            return _classes(source, name, copy)
        except NotNumbersError as error:
            raise NotNumbersError(f"{errors.get('fractions', errors['integers'])} {error}") from error
    raise errors.get("fractions", errors["integers"])


def _copied_as(kind: Kind, dtype: type[np.float32] | None, source: InputFiles, copy: Path) -> StoredArray:
    """Copy a table as a dtype; None keeps the dtype of the values. `NotNumbersError` for values of another kind."""
    form = np.dtype(np.float32), tuple[int, ...]()
    with ExitStack() as stack:
        out: ArrayFile | None = None
        for batch in read_table(source, "feature", kind):
            rows = _as_rows(batch)
            if dtype is np.float32 and (np.isfinite(rows) & (np.abs(rows) >= _EXACT_FLOAT32)).any():
                raise NotNumbersError(f"{source.shown} has numbers that float32 does not tell apart.")
            found = np.dtype(dtype or rows.dtype), rows.shape[1:]
            if out is None:
                form = found  # a file without rows only decides if no file has rows
            if len(rows):
                out = out or stack.enter_context(ArrayFile(copy, *form))
                if found != form:
                    raise PartitionError(
                        f"{batch.where(0)}: rows have shape {found[1]} and {found[0]} from here on; expected {form[1]} "
                        f"and {form[0]}, as before. Write them alike."
                    )
                out.append(rows)
        out = out or stack.enter_context(ArrayFile(copy, *form))
    return out.array()


def _as_rows(batch: Batch) -> Array:
    """One column unchanged, several as (n, C) with a dtype that holds all values."""
    columns = batch.columns
    if len(columns) == 1:
        values: Array = columns[0]
        return values
    dtypes = {column.dtype for column in columns}
    dtype = np.result_type(*dtypes)
    for column in columns if len(dtypes) > 1 and dtype.kind == "f" else ():
        if column.dtype.kind in "iu" and ((column > 2**53) | (column < -(2**53))).any():
            raise PartitionError(
                f"{batch.where(0)} and following: integers beyond 2**53 would change next to columns of other types "
                f"({', '.join(map(str, dtypes))}). Make them a separate feature."
            )
    return np.stack([column.astype(dtype, copy=False) for column in columns], axis=1)


def _classes(source: InputFiles, name: str, copy: Path) -> StoredArray:
    """Copy a column with class names replaced by integers, in alphabetical order."""
    distinct: set[str] = set()
    for column in read_ids(source):
        distinct.update(map(str, column.unique().to_pylist()))
        if len(distinct) > _MOST_CLASSES or sum(map(len, distinct)) > _MOST_CLASSES * _LONGEST_CLASS:
            raise PartitionError(
                f"{source.files[0]} has more than {_MOST_CLASSES} class names, or of more than {_LONGEST_CLASS} "
                "characters; expected fewer and shorter ones. Number the classes."
            )
    names = sorted(distinct - {"-1"})
    for one in names:
        try:
            float(one)
        except ValueError:
            continue
        raise NotNumbersError(f"If these are class names, {one!r} is none: write another name, or -1 if unknown.")
    number_of = pyarrow.array(names, pyarrow.string())
    shown = ", ".join(f"{i} {one}" for i, one in enumerate(names[:20]))
    source.text.note(f"'{name}': {len(names)} class names were numbered: {shown}{', ...' * (len(names) > 20)}.")
    with ArrayFile(copy, np.dtype(np.int64)) as out:
        for column in read_ids(source):
            out.append(compute.index_in(column, number_of).fill_null(-1).to_numpy())
    return out.array()
