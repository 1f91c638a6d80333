"""Opens the edges of one type: `.npy` files are read in place, text and Parquet are copied once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow

from sar.data.arrays import Array, ArrayFile, StoredArray, open_npy
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, Column, EdgeSource, find_outside, index_dtype, parts_of_slice
from sar.partition.ingest.parquet import NotNumbersError
from sar.partition.ingest.sources import ADVICE, InputFiles
from sar.partition.ingest.tables import read_table

_ANY = int(np.iinfo(np.int64).max)


class NpyFile(NamedTuple):
    """The edges of a file, or of two files with sources and destinations."""

    shown: str  # for errors
    columns: Sequence[Column]  # sources and destinations, (n,) each, or one column of both, (n, 2)

    @property
    def num_edges(self) -> int:
        return self.columns[0].shape[0]

    def read(self, rows: slice) -> Array:  # (2, n) int64
        found = [column[rows] for column in self.columns]
        return np.asarray(found if len(found) == 2 else found[0].T, np.int64, order="C")


@dataclass(frozen=True)
class NpyEdges(EdgeSource):
    """The concatenated edges of `.npy` files."""

    files: Sequence[NpyFile]
    advice: str = ADVICE

    @property
    def num_edges(self) -> int:
        return sum(file.num_edges for file in self.files)

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        slices = parts_of_slice([file.num_edges for file in self.files], start, stop)
        pieces = [self.files[number].read(slice(first, last)) for number, first, last in slices]
        src, dst = pieces[0] if len(pieces) == 1 else np.concatenate([np.empty((2, 0), np.int64), *pieces], axis=1)
        return src, dst

    def describe(self, row: int, problem: str) -> str:
        [(number, first, _)] = parts_of_slice([file.num_edges for file in self.files], row, row + 1)
        return f"{self.files[number].shown}, row {first} (from 0): {problem}{self.advice}"


def open_edges(
    source: InputFiles,
    num_nodes: tuple[int | None, int | None],
    copy: Path,
    *,
    advice: str = ADVICE,
    ambiguous_are_pairs: bool = False,
) -> EdgeSource:
    """Open the edges of one type.

    Text and Parquet are parsed now, into raw files whose names begin with `copy`, of 32 bits if all IDs are known to
    fit. `advice` is appended to errors about invalid IDs. With `ambiguous_are_pairs`, if all `.npy` arrays are (2, 2),
    rows are edges. Raises `PartitionError` if a file is missing or damaged, or an ID in text or Parquet is not an
    integer, negative or, if the number of nodes is known, too large; `ConfigError` if the format does not fit.
    """
    if source.format not in ("text", "parquet"):
        return NpyEdges(_npy_files(source, ambiguous_are_pairs), advice)
    limits = (_ANY if num_nodes[0] is None else num_nodes[0], _ANY if num_nodes[1] is None else num_nodes[1])
    dtype = index_dtype(max(limits) - 1)
    with ArrayFile(Path(f"{copy}.src"), dtype) as src, ArrayFile(Path(f"{copy}.dst"), dtype) as dst:
        try:
            for batch in read_table(source, "edges", "nodes"):
                sources, destinations = (ids.astype(np.int64, copy=False) for ids in batch.columns)
                if (found := find_outside(sources, destinations, limits)) is not None:
                    row, problem = found
                    raise PartitionError(f"{batch.where(row)}: {problem}{advice}")
                src.append(sources)
                dst.append(destinations)
        except NotNumbersError as error:
            raise PartitionError(f"{error}{advice}") from error
    return ArrayEdges(src.array(), dst.array())


def read_edge_ids(source: InputFiles) -> Iterator[Sequence[pyarrow.Array]]:
    """Read the IDs of sources and destinations in chunks, integers or strings, (n,) each."""
    if source.format in ("text", "parquet"):
        yield from (batch.columns for batch in read_table(source, "edges", "ids"))
        return
    unsigned = any(open_npy(file)[0].dtype == np.uint64 for file in source.files)
    for ends in NpyEdges(_npy_files(source)).chunks():
        yield [pyarrow.array(ids.view(np.uint64) if unsigned else ids) for ids in ends]


def _npy_files(source: InputFiles, ambiguous_are_pairs: bool = False) -> list[NpyFile]:
    """Edges from arrays of (E, 2) or (2, E), or from two arrays (E,) of sources and destinations.

    Arrays of (2, 2) are read like the other files, or if there are none, as `ambiguous_are_pairs` says.
    `PartitionError` for other dtypes than integers or other shapes, `ConfigError` for another format.
    """
    files = source.files
    if source.format != "npy":
        raise ConfigError(f"edges in the format {source.format!r} were asked for; expected text, parquet or npy.")
    if source.columns is not None:
        raise ConfigError(f"{files[0]} has no columns to choose from; expected text or Parquet (--columns).")
    arrays = [open_npy(file) for file in files]
    for file, (array, _) in zip(files, arrays, strict=True):
        if array.dtype.kind not in "iu":
            raise PartitionError(f"{file} holds {array.dtype}; expected integers, IDs of nodes (.astype(numpy.int64)).")
    if all(len(array.shape) == 1 for array, _ in arrays):
        return [_two_ends(files, [array for array, _ in arrays])]
    layouts = set()
    for file, (array, transposed) in zip(files, arrays, strict=True):
        shape = array.shape[::-1] if transposed else array.shape
        if len(shape) != 2 or 2 not in shape:
            raise PartitionError(f"{file} has shape {shape}; expected (E, 2), (2, E), or two files of (E,).")
        layouts |= set() if shape == (2, 2) else {shape[1] == 2}
    layouts = layouts or ({True} if ambiguous_are_pairs else set())
    if len(layouts) != 1:
        what = "both (E, 2) and (2, E)" if layouts else "only (2, 2), which may be either of (E, 2) and (2, E)"
        raise PartitionError(f"{files[0]} and its like have {what}; expected one of these. Save them all as (E, 2).")
    are_pairs = layouts == {True}
    edges: list[NpyFile] = []
    for file, (array, transposed) in zip(files, arrays, strict=True):
        columns = [array]
        if transposed is are_pairs:  # the file stores all sources, then all destinations
            src = StoredArray(array.path, array.offset, array.shape[1:], array.stored)
            columns = [src, replace(src, offset=array.offset + array.row_bytes)]
        edges.append(NpyFile(str(file), columns))
    return edges


def _two_ends(files: Sequence[Path], arrays: Sequence[StoredArray]) -> NpyFile:
    """The edges of two files and their names: `src` and `dst` in the names identify sources, else the first file has
    them."""
    if len(files) != 2:
        raise PartitionError(
            f"{files[0]} and its like, {len(files)} in all, are lists of numbers; expected two, sources and "
            "destinations, or arrays of (E, 2)."
        )
    first, second = (file.name.lower() for file in files)
    is_turned = "dst" in first and "src" not in first and "src" in second and "dst" not in second
    source, destination = (1, 0) if is_turned else (0, 1)
    if arrays[0].shape != arrays[1].shape:
        raise PartitionError(
            f"{files[0]} has {arrays[0].shape[0]} rows and {files[1]} {arrays[1].shape[0]}; expected the same "
            "number of sources and destinations. One file may be truncated."
        )
    return NpyFile(f"{files[source]} with {files[destination].name}", [arrays[source], arrays[destination]])
