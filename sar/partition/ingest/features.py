"""Features of nodes and edges, from files of any format: `.npy` and DGL's tensor files are read where they lie, others
are copied once.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from sar.common_tuples import SPLIT
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Column, JoinedColumn
from sar.partition.ingest.files import Files, detect_format, find_files
from sar.partition.ingest.parquet import parquet_rows
from sar.partition.ingest.text import text_rows
from sar.storage.arrays import Array, ArrayFile, StoredArray, as_column, open_npy
from sar.storage.tensor_files import open_tensors

_NEVER_NAN = ("label", *SPLIT)


@dataclass(frozen=True)
class FeatureSource:
    """The files of a feature, one after the other."""

    files: Sequence[Path]
    format: str  # `npy`, `parquet`, `dgl` or `text`
    inside: Sequence[str] | None = None  # columns by name or number, `*` for all; or a tensor; None: the only one
    delimiter: str | None = None  # of text files; None: found out

    @classmethod
    def named(cls, files: Files) -> "FeatureSource":
        """From a file, directory, pattern or list; after `#` may stand what to take of it, separated by commas."""
        inside = None
        if isinstance(files, str | PathLike) and not Path(files).exists() and "#" in fspath(files):
            files, _, columns = fspath(files).rpartition("#")
            inside = columns.split(",")
        found = find_files(files)
        return cls(found, detect_format(found), inside)


@dataclass(frozen=True)
class CheckedColumn:
    """A column of floating-point numbers from a file, without NaN; checked in every slice that is read."""

    column: Column
    where: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.column.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column.dtype

    def __getitem__(self, rows: slice, /) -> Array:
        """The rows of a slice without a step; `PartitionError` where a number among them is NaN."""
        values = self.column[rows]
        with np.errstate(over="ignore", invalid="ignore"):
            suspicious = values.size and np.isnan(values.sum())  # also where inf - inf is; the sum costs least
        if suspicious and (found := np.isnan(values).reshape(len(values), -1).any(1)).any():
            row = rows.indices(self.shape[0])[0] + int(np.argmax(found))
            raise PartitionError(
                f"{self.where}, row {row} (from 0), has NaN; expected numbers. Fill the missing values in, or allow "
                "NaN (allow_nan=True, --allow-nan), which labels and masks may never have."
            )
        return values


def without_nan(column: Column, name: str, where: str, *, allow_nan: bool) -> Column:
    """The column, checked for NaN where it could have some and may not, as labels and masks never may."""
    if column.dtype.kind != "f" or (allow_nan and name not in _NEVER_NAN):
        return column
    return CheckedColumn(column, where)


def open_features(
    features: Mapping[str, Files], rows: Mapping[str, int | None], scratch: Path, *, allow_nan: bool
) -> dict[str, dict[str, Column]]:
    """The columns, by type and name, of features that were named by `type/name`, or by `name` where there is one type.

    `rows` are nodes or edges by type; None: as many as the first of its features has. `scratch` is for copies in
    binary. `ConfigError` where there is no such type, `PartitionError` where files are missing, damaged, or have
    another number of rows.
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
        column = open_column(FeatureSource.named(files), f"{kind}/{name}", known[kind], scratch, allow_nan=allow_nan)
        known[kind] = column.shape[0]
        found[kind][name] = column
    return found


def open_column(source: FeatureSource, key: str, rows: int | None, scratch: Path, *, allow_nan: bool) -> Column:
    """Find the feature with the key `type/name`; text and Parquet are parsed now, into raw files under `scratch`.

    `rows` is the number expected; None: any. `PartitionError` where a file is missing or damaged, the files do not fit
    together or have another number of rows; `ConfigError` where one has nothing of the name asked for.
    """
    name = key.rpartition("/")[2]
    parts = []
    for number, file in enumerate(source.files):
        part = _open_file(source, file, key, scratch / f"{quote(key, safe='')}.{number}")
        parts.append(without_nan(part, name, str(file), allow_nan=allow_nan))
    for file, part in zip(source.files, parts, strict=True):
        if (part.shape[1:], part.dtype) != (parts[0].shape[1:], parts[0].dtype):
            raise PartitionError(
                f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {parts[0].shape[1:]} and "
                f"{parts[0].dtype} as in {source.files[0]}, as both belong to '{key}'. Write them alike."
            )
    found = sum(part.shape[0] for part in parts)
    if rows is not None and found != rows:
        last = f" to {source.files[-1]}" if len(source.files) > 1 else ""
        raise PartitionError(
            f"{source.files[0]}{last} has {found} rows; expected {rows}, as many as there are nodes or edges of the "
            f"type that '{key}' belongs to. Correct the file, or the number of nodes."
        )
    return parts[0] if len(parts) == 1 else JoinedColumn(parts)


def _open_file(source: FeatureSource, file: Path, key: str, copy: Path) -> Column:
    if source.format == "npy":
        array, transposed = open_npy(file)
        return np.load(file, mmap_mode="r", allow_pickle=False) if transposed else array
    if source.format == "dgl":
        return _open_tensor(file, source.inside, key)
    if source.format == "parquet":
        return _copied(parquet_rows(file, source.inside), file, copy)
    if source.format == "text":
        return _copied(text_rows(file, source.delimiter, source.inside), file, copy)
    raise ConfigError(f"'{key}' in the format {source.format!r} was asked for; expected npy, parquet, dgl or text.")


def _copied(rows: Iterator[Array], file: Path, copy: Path) -> StoredArray:
    """The rows of a file that is no array, in one that is."""
    first = next(rows, np.empty(0, np.float32))
    with ArrayFile(copy, first.dtype, first.shape[1:]) as kept:
        kept.append(first)
        for chunk in rows:
            if chunk.shape[1:] != first.shape[1:]:
                raise PartitionError(
                    f"{file} has rows of shape {chunk.shape[1:]} from row {kept.rows} (from 0) on; expected "
                    f"{first.shape[1:]}, as before. Write rows of one length."
                )
            kept.append(chunk)
        return kept.array()


def _open_tensor(file: Path, inside: Sequence[str] | None, key: str) -> Column:
    """A tensor of one of DGL's files: the one asked for, else that with the feature's name, else the only one."""
    tensors = open_tensors(file)
    wanted = [*inside] if inside is not None else [key, key.rpartition("/")[2]]
    found = next((tensors[name] for name in wanted if name in tensors), None)
    if found is None and inside is None and len(tensors) == 1:
        (found,) = tensors.values()
    if found is None:
        raise ConfigError(f"{file} has no tensor {wanted[-1]!r}; expected one of {', '.join(sorted(tensors))}.")
    return as_column(found)
