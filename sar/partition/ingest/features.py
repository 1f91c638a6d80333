"""Features of nodes and edges, from files of any format: `.npy` and DGL's tensor files are read in place, others
are copied once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.compute as compute

from sar.common_tuples import SPLIT
from sar.data.arrays import Array, ArrayFile, StoredArray, as_column, open_npy
from sar.data.tensor_files import open_tensors
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Column, JoinedColumn
from sar.partition.ingest.columns import ColumnChoice, Kind, NotNumbersError
from sar.partition.ingest.files import ALL_COLUMNS, Files, InputFiles, Reading
from sar.partition.ingest.tables import read_ids, read_table
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
                f"values in{' (labels with -1)' if name in _NEVER_NAN else ', or allow NaN (allow_nan=, --allow-nan)'}."
            )
        return values

    return ColumnView(column, column.shape, checked)


def open_features(
    features: Mapping[str, Files], rows: Mapping[str, int | None], how: Reading
) -> dict[str, dict[str, Column]]:
    """The columns, by type and name, of features that were named by `type/name`, or by `name` if there is one type.

    `rows` are nodes or edges by type; None: as many as the first of its features has. `ConfigError` if there is no such
    type, `PartitionError` if files are missing, damaged, or have another number of rows.
    """
    found: dict[str, dict[str, Column]] = {kind: {} for kind in rows}
    known = dict(rows)
    for key, files in features.items():
        kind, slash, name = key.rpartition("/")
        if not slash and len(rows) == 1:
            (kind,) = rows
        if kind not in rows or not name:
            raise ConfigError(
                f"there is no type for the feature '{key}'; expected TYPE/NAME with a type among {', '.join(rows)}"
                f"{' (or NAME alone)' if len(rows) == 1 else ''}."
            )
        column = open_column(InputFiles.named(files, how.text), f"{kind}/{name}", known[kind], how)
        known[kind] = column.shape[0]
        found[kind][name] = column
    return found


def open_column(source: InputFiles, key: str, rows: int | None, how: Reading) -> Column:
    """Find the feature with the key `type/name`; text and Parquet are parsed now, into raw files.

    `rows` is the number expected; None: any. `PartitionError` if a file is missing or damaged, the files do not fit
    together or have another number of rows; `ConfigError` if one has nothing of the name asked for.
    """
    name = key.rpartition("/")[2]
    parts: list[Column] = []
    if source.format in ("text", "parquet"):
        parts = [*_copied(source, name, how.scratch / quote(key, safe=""))]
    elif source.format == "npy":
        for file in source.files:
            array, transposed = open_npy(file)
            parts.append(np.load(file, mmap_mode="r", allow_pickle=False) if transposed else array)
    elif source.format == "dgl":
        parts = [_open_tensor(file, source.columns, key) for file in source.files]
    else:
        raise ConfigError(f"'{key}' in the format {source.format!r} was asked for; expected npy, parquet, dgl or text.")
    parts = [
        without_nan(part, name, str(file), allow_nan=how.allow_nan)
        for file, part in zip(source.files, parts, strict=True)
    ]
    dtype = _common_dtype([part.dtype for part in parts])
    for file, part in zip(source.files, parts, strict=True):
        if part.shape[1:] != parts[0].shape[1:] or (dtype is None and part.dtype != parts[0].dtype):
            raise PartitionError(
                f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {parts[0].shape[1:]} and "
                f"{parts[0].dtype} as in {source.files[0]}, as both belong to '{key}'. Write them alike."
            )
    found = sum(part.shape[0] for part in parts)
    if rows is not None and found != rows:
        hint = ""
        if name in SPLIT:
            hint = f" A list of the IDs of nodes is named with --{name.partition('_')[0]}-nodes FILE."
        elif source.format == "text" and abs(found - rows) == 1:
            hint = " Whether its first line is a row, or names columns, is told with --header or --no-header (header=)."
        raise PartitionError(
            f"{source.shown} has {found} rows; expected {rows}, as many as there are nodes or edges of the type that "
            f"'{key}' belongs to. Correct the file, or the number of nodes.{hint}"
        )
    return parts[0] if len(parts) == 1 else JoinedColumn(parts)


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
    choice = ColumnChoice("feature", source.columns)
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
    if _common_dtype([column.dtype for column in columns]) is None:
        types = ", ".join(str(column.dtype) for column in columns)
        raise PartitionError(f"{path} has columns of the types {types}, which no type holds all; write them alike.")
    return columns[0] if len(columns) == 1 else np.stack(columns, axis=1)


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


def _open_tensor(file: Path, inside: Sequence[str | int] | None, key: str) -> Column:
    """A tensor of one of DGL's files: the one asked for, else that with the feature's name, else the only one."""
    tensors = open_tensors(file)
    wanted = [*inside] if inside is not None else [key, key.rpartition("/")[2]]
    found = next((tensors[name] for name in wanted if name in tensors), None)
    if found is None and inside is None and len(tensors) == 1:
        (found,) = tensors.values()
    if found is None:
        raise ConfigError(f"{file} has no tensor {wanted[-1]!r}; expected one of {', '.join(sorted(tensors))}.")
    return as_column(found)
