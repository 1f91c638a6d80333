"""The edges of one type, from files of any format: binary files are read in place, others copied once."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from sar.data.arrays import Array, ArrayFile, StoredArray, open_npy, open_raw
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, Column, EdgeSource, check_ends, index_dtype
from sar.partition.ingest.files import ADVICE, ColumnChoice, Files, Wanted, with_format
from sar.partition.ingest.parquet import parquet_edges
from sar.partition.ingest.text import TextFormat, text_edges

_ANY = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class EdgeFormat:
    """The form of edge files."""

    name: str  # `text`, `parquet`, `npy` or `raw`; empty: found out from the files
    text: TextFormat = field(default_factory=TextFormat)
    columns: Wanted = None  # of text and Parquet
    dtype: str | None = None  # of raw files, `int32` or `int64`
    ambiguous_are_pairs: bool = False  # whether `.npy` arrays of (2, 2) alone are two edges, a row each
    advice: str = ADVICE  # ends errors about an ID that is no node


@dataclass(frozen=True)
class OpenedEdges:
    """Edges found in files."""

    edges: EdgeSource  # all of them; checked against the numbers of nodes if these are known
    counts: list[int]  # of each file, or pair of files
    least_nodes: tuple[int, int] | None  # of source and destination type, that edges need; None if not looked for


@dataclass(frozen=True)
class CheckedEdges(EdgeSource):
    """Edges of binary files, one after the other; IDs are checked in every pass, in the chunk just read."""

    parts: Sequence[tuple[str, EdgeSource]]  # the edges of each file, with its name for errors
    limits: tuple[int, int]  # sources and destinations are below these
    advice: str = ADVICE

    @property
    def num_edges(self) -> int:
        return sum(edges.num_edges for _, edges in self.parts)

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        """`PartitionError` if an ID is negative or too large."""
        pieces, first = [(np.empty(0, np.int64), np.empty(0, np.int64))], 0
        for where, edges in self.parts:
            low, high = max(start - first, 0), min(stop - first, edges.num_edges)
            if low < high:
                pieces.append(edges.read(low, high))
                check_ends(*pieces[-1], self.limits, where, low, self.advice)
            first += edges.num_edges
        if len(pieces) == 2:
            return pieces[1]
        src, dst = (np.concatenate(ids) for ids in zip(*pieces, strict=True))
        return src, dst


def open_edges(
    files: Files, how: EdgeFormat, num_nodes: tuple[int | None, int | None], scratch: Path, name: str
) -> OpenedEdges:
    """Find the edges of one type.

    Text and Parquet are parsed now, into raw files called `name` under `scratch`, of 32 bits if all IDs are known to
    fit. If a number of nodes, of the source or the destination type, is None, all edges are read now to find it. Raises
    `PartitionError` if a file is missing or damaged, or an ID is no integer, negative or too large; `ConfigError` if
    the format does not fit.
    """
    found, form = with_format(files, how.name)
    limits = (_ANY if num_nodes[0] is None else num_nodes[0], _ANY if num_nodes[1] is None else num_nodes[1])
    if form in ("text", "parquet"):
        dtype = index_dtype(max(limits) - 1)
        counts, least, choice = [], [0, 0], ColumnChoice("edges", how.columns)
        with ArrayFile(scratch / f"{name}.src", dtype) as src, ArrayFile(scratch / f"{name}.dst", dtype) as dst:
            for file in found:
                before = src.rows
                if form == "text":
                    parsed = text_edges(file, how.text, choice, limits, how.advice)
                else:
                    parsed = parquet_edges(file, choice, limits, how.advice)
                for ends in parsed:
                    for i, (kept, ids) in enumerate(zip((src, dst), ends, strict=True)):
                        kept.append(ids)
                        least[i] = max(least[i], int(ids.max(initial=-1)) + 1)
                counts.append(src.rows - before)
            return OpenedEdges(ArrayEdges(src.array(), dst.array()), counts, (least[0], least[1]))
    if form not in ("npy", "raw"):
        raise ConfigError(f"edges in the format {form!r} were asked for; expected text, parquet, npy or raw.")
    parts = open_npy_edges(found, how.ambiguous_are_pairs) if form == "npy" else open_raw_edges(found, how.dtype)
    edges = CheckedEdges(parts, limits, how.advice)
    least_nodes = None
    if None in num_nodes:
        most = np.full(2, -1)
        for ends in edges.chunks():
            most = np.maximum(most, [ids.max(initial=-1) for ids in ends])
        least_nodes = int(most[0]) + 1, int(most[1]) + 1
    return OpenedEdges(edges, [part.num_edges for _, part in parts], least_nodes)


@dataclass(frozen=True)
class PairEdges(EdgeSource):
    """Edges as rows (source, destination): pairs, (E_r, 2) integers."""

    pairs: Column

    @property
    def num_edges(self) -> int:
        return self.pairs.shape[0]

    def read(self, start: int, stop: int) -> tuple[Array, Array]:
        pairs = self.pairs[start:stop]
        return np.ascontiguousarray(pairs[:, 0], np.int64), np.ascontiguousarray(pairs[:, 1], np.int64)


def open_npy_edges(files: Sequence[Path], ambiguous_are_pairs: bool) -> list[tuple[str, EdgeSource]]:
    """Edges of `.npy` files, with their names: (E, 2) or (2, E) each, or two files of (E,), sources and destinations.

    Of two files of (E,), names with `src` and `dst` tell which is which, else the first one has the
    sources. `PartitionError` if the files are damaged, hold no integers or have other shapes.
    """
    arrays = [open_npy(file) for file in files]
    for file, (array, _) in zip(files, arrays, strict=True):
        if array.dtype.kind not in "iu":
            raise PartitionError(f"{file} holds {array.dtype}; expected integers, IDs of nodes.")
    if all(len(array.shape) == 1 for array, _ in arrays):
        if len(files) != 2:
            raise PartitionError(
                f"{files[0]} and its like, {len(files)} in all, are lists of numbers; expected two, sources and "
                "destinations, or arrays of (E, 2)."
            )
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
    edges: list[tuple[str, EdgeSource]] = []
    for file, (array, transposed) in zip(files, arrays, strict=True):
        if transposed is not are_pairs:  # in the file, one pair follows the other
            edges.append((str(file), PairEdges(array)))
        else:
            src = StoredArray(array.path, array.offset, array.shape[1:], array.stored)
            edges.append((str(file), ArrayEdges(src, replace(src, offset=array.offset + array.row_bytes))))
    return edges


def open_raw_edges(files: Sequence[Path], dtype: str | None) -> list[tuple[str, EdgeSource]]:
    """Edges of files of nothing but integers: pairs; or sources and destinations in two files with `src` and `dst` in
    their names. The dtype is `>i4` or `>i8` if the most significant byte comes first.
    """
    if dtype not in ("int32", "int64", ">i4", ">i8"):
        raise ConfigError(f"raw edges of dtype {dtype} were asked for; expected dtype='int32' or 'int64'.")
    kind = np.dtype(dtype)
    if _named_ends(files) is not None:
        return [_two_ends(files, [open_raw(file, kind) for file in files])]
    return [(str(file), PairEdges(open_raw(file, kind, (2,)))) for file in files]


def _named_ends(files: Sequence[Path]) -> tuple[int, int] | None:
    """Which of two files has the sources and which the destinations, by their names."""
    names = [file.name.lower() for file in files]
    sources = [i for i, name in enumerate(names) if "src" in name and "dst" not in name]
    destinations = [i for i, name in enumerate(names) if "dst" in name and "src" not in name]
    return (sources[0], destinations[0]) if len(files) == 2 and sources and destinations else None


def _two_ends(files: Sequence[Path], arrays: Sequence[StoredArray]) -> tuple[str, EdgeSource]:
    """The edges of two files, with their names."""
    source, destination = _named_ends(files) or (0, 1)
    if arrays[0].shape != arrays[1].shape:
        raise PartitionError(
            f"{files[0]} has {arrays[0].shape[0]} rows and {files[1]} {arrays[1].shape[0]}; expected as many sources "
            "as destinations. One of them may be truncated."
        )
    return f"{files[source]} with {files[destination].name}", ArrayEdges(arrays[source], arrays[destination])
