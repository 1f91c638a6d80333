"""Features of nodes and edges, from files of any format: `.npy` and DGL's tensor files are read in place, others
are copied once.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import GIVEN_ID, SPLIT
from sar.data.arrays import Array, ArrayFile, StoredArray, as_column
from sar.data.tensor_files import open_tensors
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Column, JoinedColumn
from sar.partition.ingest.columns import Kind, NotNumbersError
from sar.partition.ingest.files import ALL_COLUMNS, Files, InputFiles, Reading, TextFormat, Wanted
from sar.partition.ingest.tables import ArrayTable, ColumnChoice, checked, read_ids, read_table
from sar.partition.ingest.text import is_number

LABEL = "label"
_NEVER_NAN = (LABEL, *SPLIT)
_MOST_CLASSES, _LONGEST_CLASS = 1 << 16, 100
_EXACT_FLOAT32 = 2.0**24  # from here on float32 does not tell integers apart
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
    read: Callable[[Array, int], Array]  # of rows as stored, and the number of the first one

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        return self.read(self.column[rows], rows.indices(self.shape[0])[0])


def without_nan(column: Column, name: str, where: str, *, allow_nan: bool) -> Column:
    """The column, checked for NaN if it could have some and may not, as labels and masks never may.

    Every slice that is read is checked; `PartitionError`, which describes the column as `where`, if a number is NaN.
    """
    if column.dtype.kind != "f" or (allow_nan and name not in _NEVER_NAN):
        return column

    def checked(values: Array, first: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = values.size and np.isnan(values.sum())  # also for inf - inf; the sum costs least
        if suspicious and (found := np.isnan(values).reshape(len(values), -1).any(1)).any():
            raise PartitionError(
                f"{where}, row {first + int(np.argmax(found))} (from 0), has NaN; expected numbers. Fill the missing "
                "values in"
                + (" (labels with -1)." if name in _NEVER_NAN else ", or allow NaN (--allow-nan, allow_nan=True).")
            )
        return values

    return ColumnView(column, column.shape, checked)


def features_by_type(
    features: Mapping[str, Files], types: Sequence[str], text: TextFormat
) -> dict[str, dict[str, InputFiles]]:
    """The files, by type and name, of features that were named by `type/name`, or by `name` if there is one type.

    Raises `ConfigError` if there is no such type or column, `PartitionError` if a file is not there.
    """
    found: dict[str, dict[str, InputFiles]] = {kind: {} for kind in types}
    for key, files in features.items():
        kind, slash, name = key.rpartition("/")
        if not slash and len(types) == 1:
            (kind,) = types
        if kind not in found or not name:
            raise ConfigError(
                f"there is no type for the feature '{key}'; expected TYPE/NAME with a type among {', '.join(types)}"
                f"{' (or NAME alone)' if len(types) == 1 else ''}."
            )
        source = InputFiles.named(files, text)
        found[kind][name] = checked(source, "ids" if name == GIVEN_ID else "feature")
        if source.format == "dgl":
            _open_tensor(source.files[0], source.columns, f"{kind}/{name}")
    return found


def open_features(
    kind: str, sources: Mapping[str, InputFiles], rows: int | None, how: Reading, beside: InputFiles | None = None
) -> dict[str, Column]:
    """The features of one type, by name.

    `rows` are its nodes or edges; None: as many as the first feature has. `beside` are the files to whose rows those of
    features belong, by default the first of these. Raises the errors of `open_column` and `InputFiles.in_order_of`,
    and `PartitionError` if files are divided otherwise.
    """
    found: dict[str, Column] = {}
    for name, given in sources.items():
        source = given if beside is None else given.in_order_of(beside)
        column, counts = open_column(source, f"{kind}/{name}", rows, how)
        source = replace(source, rows=counts)
        if beside is None or len(beside.files) == 1:
            beside = source
        if len(counts) == len(beside.rows) and counts != beside.rows:
            number = next(i for i, count in enumerate(counts) if count != beside.rows[i])
            raise PartitionError(
                f"{source.files[number]} has {counts[number]} rows; expected {beside.rows[number]}, as "
                f"{beside.files[number]} has, to whose rows they belong. Divide both alike, or join the files."
            )
        found[name], rows = column, column.shape[0]
    return found


def open_column(source: InputFiles, key: str, rows: int | None, how: Reading) -> tuple[Column, list[int]]:
    """Find the feature with the key `type/name`, and how many rows each file has.

    Text and Parquet are parsed now, into raw files.

    `rows` is the number expected; None: any. `PartitionError` if a file is missing or damaged, the files do not fit
    together or have another number of rows; `ConfigError` if one has nothing of the name asked for.
    """
    name = key.rpartition("/")[2]
    parts: list[Column] = []
    if source.format in ("text", "parquet"):
        try:
            parts = [*_copied(source, name, how.scratch / quote(key, safe=""))]
        except PartitionError as error:
            if name == LABEL and re.search("has ''|has no value", str(error)):
                raise PartitionError(f"{error} Write -1 for nodes without a label.") from error
            raise
    elif source.format == "npy":
        choice = ColumnChoice("feature", source)
        parts = [_array_columns(ArrayTable(file), choice, source.columns) for file in source.files]
    else:
        parts = [_open_tensor(file, source.columns, key) for file in source.files]
    counts = [part.shape[0] for part in parts]
    kept = [
        (file, without_nan(part, name, str(file), allow_nan=how.allow_nan))
        for file, part in zip(source.files, parts, strict=True)
        if part.shape[0] or not any(counts)  # those without rows have no say in the type
    ]
    first_file, first = kept[0]
    dtype = _common_dtype([part.dtype for _, part in kept])
    for file, part in kept:
        if part.shape[1:] != first.shape[1:] or (dtype is None and part.dtype != first.dtype):
            raise PartitionError(
                f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {first.shape[1:]} and "
                f"{first.dtype} as in {first_file}, as both belong to '{key}'. Write them alike."
            )
    if rows is not None and sum(counts) != rows:
        hint = ""
        if name in SPLIT:
            hint = f" A list of the IDs of nodes is named with --{name.partition('_')[0]}-nodes FILE."
        elif source.format == "text" and abs(sum(counts) - rows) == 1:
            hint = " Whether its first line is a row, or names columns, is told with --header or --no-header."
        raise PartitionError(
            f"{source.shown} has {sum(counts)} rows; expected {rows}, as many as there are nodes or edges of the type "
            f"that '{key}' belongs to. Correct the file, or the number of nodes.{hint}"
        )
    if len(kept) == 1:
        return first, counts
    return JoinedColumn([_unchanged_column(part, dtype or part.dtype, str(file)) for file, part in kept]), counts


def _array_columns(table: ArrayTable, choice: ColumnChoice, wanted: Wanted) -> Column:
    """The columns that are wanted of an `.npy` file: one as (N,), all as they are stored."""
    array = table.array
    if wanted is None or [*wanted] == [ALL_COLUMNS]:
        return array
    columns = choice.numbers(table)
    shape = (array.shape[0], len(columns))[: 1 + (len(columns) > 1)]
    return ColumnView(array, shape, lambda rows, _: rows.reshape(len(rows), -1)[:, columns].reshape(-1, *shape[1:]))


def _common_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any] | None:
    """A dtype that holds the values of all; None if there is none, as for int64 and uint64."""
    if len({*dtypes}) == 1:
        return dtypes[0]
    if any(dtype.kind not in "biuf" for dtype in dtypes):
        return None
    common = np.result_type(*dtypes)
    return None if common.kind == "f" and not any(dtype.kind == "f" for dtype in dtypes) else common


def _copied(source: InputFiles, name: str, copy: Path) -> list[StoredArray]:
    """A copy of each file of a table, all of the first of several types that holds the values of all files."""
    errors: dict[str, NotNumbersError] = {}
    for kind, dtype in _TYPES if source.format == "text" else _TYPES[:1]:
        try:
            return [*_copies(source, kind, dtype, copy)]
        except NotNumbersError as error:
            errors[kind] = error
    one_column = source.columns is None or (len(source.columns) == 1 and source.columns[0] != ALL_COLUMNS)
    if name == LABEL and (one_column or source.format == "parquet"):
        try:
            return _class_columns(source, name, copy)
        except NotNumbersError as error:
            raise NotNumbersError(f"{errors.get('fractions', errors['integers'])} {error}") from error
    raise errors.get("fractions", errors["integers"])


def _copies(source: InputFiles, kind: Kind, dtype: type[np.float32] | None, copy: Path) -> Iterator[StoredArray]:
    """A copy of each file, of a dtype; None: of that of its values. `NotNumbersError` if one is of another kind."""
    choice = ColumnChoice("feature", source)
    for number, path in enumerate(source.files):
        chunks = (_as_rows(path, batch.columns) for batch in read_table(path, source, choice, kind))
        first = next(chunks, np.empty(0, np.float32))
        with ArrayFile(Path(f"{copy}.{number}"), np.dtype(dtype or first.dtype), first.shape[1:]) as kept:
            for rows in chain([first], chunks):
                if rows.shape[1:] != first.shape[1:]:
                    raise PartitionError(
                        f"{path} has rows of shape {rows.shape[1:]} from row {kept.rows} (from 0) on; expected "
                        f"{first.shape[1:]}, as before. Write rows of one length."
                    )
                if dtype is np.float32 and (np.isfinite(rows) & (np.abs(rows) >= _EXACT_FLOAT32)).any():
                    raise NotNumbersError(f"{path} has numbers that float32 does not tell apart.")
                kept.append(rows)
            yield kept.array()


def _as_rows(path: Path, columns: Sequence[Array]) -> Array:
    """One column as it is, several as (n, C)."""
    dtype = _common_dtype([column.dtype for column in columns])
    if dtype is None:
        types = ", ".join(str(column.dtype) for column in columns)
        raise PartitionError(f"{path} has columns of the types {types}, which no type holds all; write them alike.")
    if len(columns) == 1:
        return columns[0]
    return np.stack([_unchanged(column, dtype, str(path)) for column in columns], axis=1)


def _unchanged(values: Array, dtype: np.dtype[Any], where: str) -> Array:
    """Values in another dtype; `PartitionError`, which says `where`, for integers that it would change."""
    if dtype.kind == "f" and values.dtype.kind in "iu" and ((values > 2**53) | (values < -(2**53))).any():
        raise PartitionError(
            f"{where} has integers beyond 2**53, and belongs together with fractions, among which they would change. "
            "Make them a feature of their own."
        )
    return values.astype(dtype, copy=False)


def _unchanged_column(column: Column, dtype: np.dtype[Any], where: str) -> Column:
    if column.dtype.kind not in "iu" or dtype.kind != "f":
        return column
    return ColumnView(column, column.shape, lambda values, _: _unchanged(values, dtype, where))


def _class_columns(source: InputFiles, name: str, copy: Path) -> list[StoredArray]:
    """A column of integers for each file of class names, which are numbered in alphabetical order."""
    distinct: set[str] = set()
    for _, column in read_ids(source):
        distinct.update(map(str, column.unique().to_pylist()))
        if len(distinct) > _MOST_CLASSES or sum(map(len, distinct)) > _MOST_CLASSES * _LONGEST_CLASS:
            raise PartitionError(
                f"{source.files[0]} has more than {_MOST_CLASSES} class names, or of more than {_LONGEST_CLASS} "
                "characters; expected fewer and shorter ones. Number the classes."
            )
    names = sorted(distinct - {"-1"})
    for one in filter(is_number, names):
        raise NotNumbersError(f"If these are class names, {one!r} is none: write another name, or -1 if unknown.")
    number_of = pyarrow.array(names, pyarrow.string())
    shown = ", ".join(f"{i} {one}" for i, one in enumerate(names[:20]))
    source.text.note(f"'{name}': {len(names)} class names were numbered: {shown}{', ...' * (len(names) > 20)}.")
    with ExitStack() as stack:
        copies = [Path(f"{copy}.{i}") for i in range(len(source.files))]
        out = [stack.enter_context(ArrayFile(path, np.dtype(np.int64))) for path in copies]
        for i, column in read_ids(source):
            out[i].append(compute.index_in(column, number_of).fill_null(-1).to_numpy())
        return [file.array() for file in out]


def _open_tensor(file: Path, inside: Wanted, key: str) -> Column:
    """A tensor of one of DGL's files: the one asked for, else that with the feature's name, else the only one."""
    tensors = open_tensors(file)
    if inside is not None and len(inside) != 1:
        raise ConfigError(f"{file}: {len(inside)} tensors were named; expected one tensor, FILE#NAME.")
    wanted = [*map(str, inside)] if inside is not None else [key, key.rpartition("/")[2]]
    found = next((tensors[name] for name in wanted if name in tensors), None)
    if found is None and inside is None and len(tensors) == 1:
        (found,) = tensors.values()
    if found is None:
        raise ConfigError(f"{file} has no tensor {wanted[-1]!r}; expected one of {', '.join(sorted(tensors))}.")
    return as_column(found)
