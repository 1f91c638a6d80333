"""A feature of nodes or edges in files: `.npy` and DGL's tensor files are read where they lie, others copied once."""

from collections.abc import Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch

from sar.adapters.dgl.reader.tensor_file import load, open_tensors
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_data import Array
from sar.partition.graph_source import Column
from sar.partition.ingest.checks import without_nan
from sar.partition.ingest.files import Files, detect_format, find_files
from sar.partition.ingest.parquet import parquet_rows
from sar.partition.ingest.text import text_rows
from sar.partition.stored import ArrayFile, JoinedColumn, StoredArray, open_npy


class ColumnFiles:
    """The files of a feature, one after the other.

    files: in order.
    format: `npy`, `parquet`, `dgl` or `text`.
    inside: what to take of a file: columns of a table (by name or number), or a tensor by name; None: all, or the only
        one.
    delimiter: of text files; None: found out.
    """

    def __init__(
        self,
        files: Sequence[Path],
        format: str | None = None,
        inside: Sequence[str] | None = None,
        delimiter: str | None = None,
    ) -> None:
        self.files, self.inside, self.delimiter = files, inside, delimiter
        self.format = format or detect_format(files)

    @classmethod
    def named(cls, files: Files) -> "ColumnFiles":
        """From a file, directory, pattern or list; after `#` may stand what to take of it, separated by commas.

        Raises:
            PartitionError: there is no such file.
            ConfigError: the format is unknown.
        """
        if isinstance(files, str | PathLike) and not Path(files).exists() and "#" in fspath(files):
            path, _, inside = fspath(files).rpartition("#")
            return cls(find_files(path), inside=inside.split(","))
        return cls(find_files(files))

    def __str__(self) -> str:
        return f"{self.files[0]}" + (f" to {self.files[-1]}" if len(self.files) > 1 else "")


def open_column(source: ColumnFiles, key: str, rows: int | None, scratch: Path, *, allow_nan: bool) -> Column:
    """Find a feature.

    Text and Parquet are parsed now, into raw files.

    Args:
        source: where it is.
        key: of the feature, `type/name`.
        rows: expected; None: any number.
        scratch: directory for copies in binary.
        allow_nan: whether there may be NaN; never in labels and masks.

    Raises:
        PartitionError: a file is missing or damaged, the files do not fit together or have another number of rows.
        ConfigError: a file has nothing of the name asked for.
    """
    parts = [_open_part(source, number, key, scratch) for number in range(len(source.files))]
    for file, part in zip(source.files, parts, strict=True):
        if (part.shape[1:], part.dtype) != (parts[0].shape[1:], parts[0].dtype):
            raise PartitionError(
                f"{file} has rows of shape {part.shape[1:]} and {part.dtype}; expected {parts[0].shape[1:]} and "
                f"{parts[0].dtype} as in {source.files[0]}, as both belong to '{key}'. Write them alike."
            )
    found = sum(part.shape[0] for part in parts)
    if rows is not None and found != rows:
        raise PartitionError(
            f"{source} has {found} rows; expected {rows}, as many as there are nodes or edges of the type that '{key}' "
            "belongs to. Mend the file, or the number of nodes."
        )
    name = key.rpartition("/")[2]
    checked = [
        without_nan(part, name, str(file), allow_nan=allow_nan) for file, part in zip(source.files, parts, strict=True)
    ]
    return checked[0] if len(checked) == 1 else JoinedColumn(checked)


def _open_part(source: ColumnFiles, number: int, key: str, scratch: Path) -> Column:
    file = source.files[number]
    if source.format == "npy":
        array, transposed = open_npy(file)
        return np.load(file, mmap_mode="r", allow_pickle=False) if transposed else array
    if source.format == "dgl":
        return _open_tensor(file, source.inside, key)
    if source.format == "parquet":
        rows = parquet_rows(file, source.inside)
    elif source.format == "text":
        rows = text_rows(file, source.delimiter, source.inside)
    else:
        raise ConfigError(f"'{key}' in the format {source.format!r} was asked for; expected npy, parquet, dgl or text.")
    return _copied(rows, file, scratch / f"{quote(key, safe='')}.{number}")


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
    dtype = str(found.dtype).removeprefix("torch.")
    if dtype == "bfloat16":
        raise PartitionError(f"{file} holds bfloat16, which numpy lacks; expected float16, float32 or another type.")
    if found.values is None:
        return StoredArray(found.path, found.offset, found.shape, np.dtype(dtype))
    values: Array = load(found, torch.device("cpu")).numpy()
    return values
