"""Write a graph in DGL's chunked format: what `open_graph` reads, and what the tools of DGL's pipeline take."""

import json
from collections.abc import Mapping
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.csv

from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import Column, EdgeSource, GraphSource
from sar.partition.ingest.objects import from_object

_SLICE_BYTES = 8 << 20
_PAIRS = 1 << 17  # formatted at a time
_CSV = pyarrow.csv.WriteOptions(include_header=False, delimiter=" ")


def write_chunked(
    graph: GraphSource | Any, folder: str | PathLike[str], *, name: str = "graph", num_chunks: int = 1
) -> Path:
    """Write a graph in the chunked format: edges as CSV, features as `.npy`.

    Args:
        graph: the graph, also in memory, as `partition_graph` takes it.
        folder: directory to make or to fill.
        name: of the graph, for `dgl.distributed`.
        num_chunks: files that each list of edges and each feature is divided into.

    Returns:
        The `metadata.json`, with both spellings of the counts (`_per_chunk` and `_per_type`).

    Raises:
        ConfigError: the folder has a `metadata.json`, or a file with the name of a chunk; or the number of chunks is no
            positive one.
        PartitionError: the disk is full.
    """
    graph, folder = from_object(graph), Path(folder)
    file = folder / "metadata.json"
    if file.exists():
        raise ConfigError(
            f"there is a graph in '{folder}' already, and nothing is overwritten; name another directory."
        )
    if num_chunks < 1:
        raise ConfigError(f"num_chunks is {num_chunks}; expected 1 or more.")
    (folder / "edges").mkdir(parents=True, exist_ok=True)
    etypes = {":".join(etype): etype for etype in graph.edges}
    nodes = {ntype: _chunks(count, num_chunks) for ntype, count in graph.num_nodes.items()}
    edges = {key: _chunks(graph.edges[etype].num_edges, num_chunks) for key, etype in etypes.items()}
    try:
        edge_files = {
            key: _write_edges(graph.edges[etype], folder, f"edges/{quote(key, safe='')}", edges[key])
            for key, etype in etypes.items()
        }
        node_data = {ntype: _write_columns(graph.node_data.get(ntype, {}), folder, "node_data", ntype, nodes[ntype])
                     for ntype in nodes}  # fmt: skip
        edge_data = {key: _write_columns(graph.edge_data.get(etype, {}), folder, "edge_data", key, edges[key])
                     for key, etype in etypes.items()}  # fmt: skip
        content = {
            "graph_name": name,
            "node_type": list(nodes),
            "num_nodes_per_chunk": list(nodes.values()),
            "num_nodes_per_type": list(graph.num_nodes.values()),
            "edge_type": list(edges),
            "num_edges_per_chunk": list(edges.values()),
            "num_edges_per_type": [sum(chunks) for chunks in edges.values()],
            "edges": edge_files,
            "node_data": {ntype: fields for ntype, fields in node_data.items() if fields},
            "edge_data": {key: fields for key, fields in edge_data.items() if fields},
        }
        file.write_text(json.dumps(content, indent=2))  # last, so that half a graph is not taken for one
    except FileExistsError as error:
        raise ConfigError(
            f"'{error.filename}' is there already, and nothing is overwritten; name another directory."
        ) from error
    except OSError as error:
        raise PartitionError(f"cannot write to '{folder}' ({error.strerror}); make room there.") from error
    return file


def _chunks(count: int, parts: int) -> list[int]:
    """The sizes of parts as equal as can be."""
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]


def _write_edges(source: EdgeSource, folder: Path, stem: str, counts: list[int]) -> dict[str, Any]:
    """Write the edges of a type and return their file specification."""
    files = [f"{stem}-{number}.csv" for number in range(len(counts))]
    chunks = source.chunks(_PAIRS)
    src = dst = np.empty(0, np.int64)
    for name, count in zip(files, counts, strict=True):
        with (folder / name).open("xb") as file:
            while count:
                if not len(src):
                    src, dst = next(chunks)
                written = min(count, len(src))
                table = pyarrow.table({"src": src[:written], "dst": dst[:written]})
                pyarrow.csv.write_csv(table, file, _CSV)
                count -= written
                src, dst = src[written:], dst[written:]
    return {"format": {"name": "csv", "delimiter": " "}, "data": files}


def _write_columns(
    columns: Mapping[str, Column], folder: Path, section: str, kind: str, counts: list[int]
) -> dict[str, Any]:
    """Write the features of a type and return their file specifications."""
    subfolder = f"{section}/{quote(kind, safe='')}"
    specs = {}
    for name, column in columns.items():
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        files = [f"{subfolder}/{quote(name, safe='')}-{number}.npy" for number in range(len(counts))]
        first = 0
        for file, count in zip(files, counts, strict=True):
            _write_npy(folder / file, column, first, count)
            first += count
        specs[name] = {"format": {"name": "numpy"}, "data": files}
    return specs


def _write_npy(path: Path, column: Column, first: int, count: int) -> None:
    """Write `count` rows of a column, slice by slice."""
    shape = count, *column.shape[1:]
    header = {"descr": np.lib.format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": shape}
    step = max(1, _SLICE_BYTES // max(1, prod(column.shape[1:]) * column.dtype.itemsize))
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(first, first + count, step):
            rows = column[start : min(start + step, first + count)]
            file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
