"""The edges of one type, from files of any format: binary files are read where they lie, others copied once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sar.errors import ConfigError
from sar.partition.graph_data import Array
from sar.partition.graph_source import CHUNK_ROWS, ArrayEdges, EdgeSource, index_dtype
from sar.partition.ingest.binary_edges import open_npy_edges, open_raw_edges
from sar.partition.ingest.parquet import parquet_edges
from sar.partition.ingest.tables import check_edges
from sar.partition.ingest.text import TextFormat, text_edges
from sar.storage.arrays import ArrayFile

_ANY = int(np.iinfo(np.int64).max)


@dataclass(frozen=True)
class EdgeFormat:
    """What edge files look like.

    name: `text`, `parquet`, `npy` or `raw`.
    text: of text files.
    columns: of sources and destinations in text and Parquet files, by name or number from 0; None: found out.
    dtype: of raw files, `int32` or `int64`.
    ambiguous_are_pairs: whether `.npy` arrays of (2, 2) are two edges, a row each, where nothing shows it.
    """

    name: str
    text: TextFormat = field(default_factory=TextFormat)
    columns: tuple[str | int, str | int] | None = None
    dtype: str | None = None
    ambiguous_are_pairs: bool = False


@dataclass(frozen=True)
class OpenedEdges:
    """Edges found in files.

    edges: all of them; checked against the numbers of nodes where these are known.
    counts: of each file, or pair of files.
    least_nodes: numbers of nodes of the source and the destination type that the edges need; None where not looked for.
    """

    edges: EdgeSource
    counts: list[int]
    least_nodes: tuple[int, int] | None


@dataclass(frozen=True)
class CheckedEdges:
    """Edges of binary files, one after the other; IDs are checked in every pass, in the chunk just read.

    parts: the edges of each file, with its name for errors.
    limits: sources and destinations are below these.
    """

    parts: Sequence[tuple[str, EdgeSource]]
    limits: tuple[int, int]

    @property
    def num_edges(self) -> int:
        return sum(edges.num_edges for _, edges in self.parts)

    def chunks(self, rows: int = CHUNK_ROWS) -> Iterator[tuple[Array, Array]]:
        """As in `EdgeSource`.

        Raises:
            PartitionError: an ID is negative or too large.
        """
        for where, edges in self.parts:
            row = 0
            for src, dst in edges.chunks(rows):
                check_edges(src, dst, self.limits, where, row)
                yield src, dst
                row += len(src)


def open_edges(
    files: Sequence[Path], how: EdgeFormat, num_nodes: tuple[int | None, int | None], scratch: Path, name: str
) -> OpenedEdges:
    """Find the edges of one type.

    Text and Parquet are parsed now, into raw files. Where a number of nodes is unknown, all edges are read now.

    Args:
        files: in order.
        how: their format.
        num_nodes: of the source and the destination type; None: to be found.
        scratch: directory for copies in binary.
        name: of these copies.

    Raises:
        PartitionError: a file is missing or damaged, or an ID is no integer, negative or too large.
        ConfigError: the format does not fit.
    """
    limits = (_ANY if num_nodes[0] is None else num_nodes[0], _ANY if num_nodes[1] is None else num_nodes[1])
    if how.name in ("text", "parquet"):
        return _copied(files, how, limits, scratch, name)
    if how.name == "npy":
        parts = open_npy_edges(files, ambiguous_are_pairs=how.ambiguous_are_pairs)
    elif how.name == "raw":
        parts = open_raw_edges(files, how.dtype)
    else:
        raise ConfigError(f"edges in the format {how.name!r} were asked for; expected text, parquet, npy or raw.")
    edges = CheckedEdges(parts, limits)
    least_nodes = None
    if None in num_nodes:
        least = np.zeros(2, np.int64)
        for ends in edges.chunks():
            least = np.maximum(least, [ids.max(initial=-1) + 1 for ids in ends])
        least_nodes = int(least[0]), int(least[1])
    return OpenedEdges(edges, [part.num_edges for _, part in parts], least_nodes)


def _copied(files: Sequence[Path], how: EdgeFormat, limits: tuple[int, int], scratch: Path, name: str) -> OpenedEdges:
    """Edges that are parsed into raw files, of 32 bits where all IDs are known to fit."""
    dtype = index_dtype(max(limits) - 1)
    counts, least = [], [0, 0]
    with ArrayFile(scratch / f"{name}.src", dtype) as src, ArrayFile(scratch / f"{name}.dst", dtype) as dst:
        for file in files:
            before = src.rows
            for ends in _parsed(file, how, limits):
                for i, (kept, ids) in enumerate(zip((src, dst), ends, strict=True)):
                    kept.append(ids)
                    least[i] = max(least[i], int(ids.max(initial=-1)) + 1)
            counts.append(src.rows - before)
        return OpenedEdges(ArrayEdges(src.array(), dst.array()), counts, (least[0], least[1]))


def _parsed(file: Path, how: EdgeFormat, limits: tuple[int, int]) -> Iterator[tuple[Array, Array]]:
    if how.name == "text":
        return text_edges(file, how.text, how.columns, limits)
    return parquet_edges(file, how.columns, limits)
