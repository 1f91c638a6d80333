"""Reads and writes DGL's chunked graph format: a `metadata.json` with types, counts, and files of edges and fields."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow
import pyarrow.csv

from sar.common_tuples import StrPath
from sar.data.arrays import unreadable
from sar.data.partition_json import check_inside, parse_edge_type
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, Column, EdgeSource, GraphSource
from sar.partition.ingest.edges import open_edges
from sar.partition.ingest.features import open_column
from sar.partition.ingest.objects import from_object
from sar.partition.ingest.sources import ALL_COLUMNS, METADATA, InputFiles, Reading, Selected, TextFormat, find_files
from sar.partition.new_directory import new_directory

_FORMATS = {"csv": "text", "numpy": "npy", "parquet": "parquet"}
_SLICE_BYTES = 8 << 20
_PAIRS = 1 << 17  # formatted at a time
_CSV = pyarrow.csv.WriteOptions(include_header=False, delimiter=" ")


def open_chunked(path: Path, how: Reading) -> GraphSource:
    """Open a graph in the chunked format by its `metadata.json`, with paths relative to its folder or absolute.

    Raises `PartitionError` if a file is missing, damaged or outside the folder, also through a link, or if entries
    contradict each other or the files.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise PartitionError(f"{path} is not a JSON file: {error}. Write or copy it again.") from error
    if not isinstance(content, dict):
        raise PartitionError(f"{path} holds a {type(content).__name__}; expected an object with node_type and so on.")
    meta = _Metadata(path, content)
    name = content.get("graph_name", "")
    if not isinstance(name, str):
        raise meta.error(f"graph_name is {_short(name)}; expected a name")
    ntypes, canonical = meta.types("node_type"), {}
    for key in meta.types("edge_type"):
        etype = parse_edge_type(key)
        if etype is None or not {etype[0], etype[2]} <= {*ntypes}:
            raise meta.error(f"edge type '{key}' is not NTYPE:RELATION:NTYPE with node types among {', '.join(ntypes)}")
        canonical[key] = etype
    num_nodes, num_edges = meta.counts("num_nodes", ntypes), meta.counts("num_edges", [*canonical])
    edge_files = meta.section("edges", [*canonical])
    edges = {}
    for number, (key, etype) in enumerate(canonical.items()):
        ends = num_nodes[etype[0]], num_nodes[etype[2]]
        edges[etype] = meta.edges(key, edge_files.get(key), ends, num_edges[key], how.scratch / f"edges-{number}")
    node_data = meta.columns("node_data", num_nodes, how)
    edge_data = meta.columns("edge_data", num_edges, how)
    return GraphSource(num_nodes, edges, node_data, {canonical[key]: edge_data[key] for key in canonical}, name)


@dataclass(frozen=True)
class _Metadata:
    """The content of the JSON file. Every method checks the entries that it reads."""

    path: Path
    content: Mapping[str, Any]

    def error(self, what: str) -> PartitionError:
        return PartitionError(f"{self.path}: {what}. Correct this file, or the files that it names.")

    def types(self, key: str) -> list[str]:
        names = self.content.get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
            raise self.error(f"{key} is {_short(names)}; expected a list of names")
        if not names or len(set(names)) < len(names):
            raise self.error(f"{key} has {_short(names)}; expected at least one name, and none twice")
        return names

    def counts(self, key: str, names: Sequence[str]) -> dict[str, int]:
        """The number of nodes or edges of each type, from counts per chunk or per type."""
        per_chunk, per_type = self.content.get(f"{key}_per_chunk"), self.content.get(f"{key}_per_type")
        if per_chunk is None and per_type is None:
            raise self.error(f"there is neither {key}_per_chunk nor {key}_per_type; expected one of them")
        for which, found in ((f"{key}_per_chunk", per_chunk), (f"{key}_per_type", per_type)):
            if found is not None and (not isinstance(found, list) or len(found) != len(names)):
                raise self.error(f"{which} is {_short(found)}; expected an entry for each of {', '.join(names)}")
        chunks = [[count] for count in per_type or []] if per_chunk is None else per_chunk
        for name, found in zip(names, chunks, strict=True):
            if not isinstance(found, list) or not all(type(count) is int and count >= 0 for count in found):
                raise self.error(f"the counts of '{name}' under {key} are {_short(found)}; expected numbers from 0 on")
        counts = [sum(found) for found in chunks]
        if per_type not in (None, counts):
            raise self.error(f"{key}_per_type is {_short(per_type)}; expected {counts}, the sums of {key}_per_chunk")
        return dict(zip(names, counts, strict=True))

    def section(self, key: str, names: Sequence[str]) -> Mapping[str, Any]:
        """The object under a key, a dictionary by type; empty if absent."""
        found = self.content.get(key) or {}
        if not isinstance(found, dict):
            raise self.error(f"{key} is {_short(found)}; expected an object with an entry for each type")
        unknown = sorted(found.keys() - {*names})
        if unknown:
            raise self.error(f"{key} has the types {', '.join(unknown)}; expected some of {', '.join(names)}")
        return found

    def edges(self, name: str, spec: Any, num_nodes: tuple[int, int], count: int, copy: Path) -> EdgeSource:
        """The edges of one type, whose number must match the counts."""
        source = self._source(f"edges of '{name}'", spec or {"format": {"name": "csv"}, "data": []})
        if not source.files and count:
            raise self.error(f"there are no files for the {count} edges of '{name}'")
        if not source.files:
            return ArrayEdges(np.empty(0, np.int64), np.empty(0, np.int64))
        edges = open_edges(source, num_nodes, copy, ambiguous_are_pairs=True)
        if edges.num_edges != count:
            found = f"the files of '{name}', {source.shown}, have {edges.num_edges} edges"
            raise self.error(f"{found}; expected {count} as its counts say")
        return edges

    def columns(self, key: str, rows: Mapping[str, int], how: Reading) -> dict[str, dict[str, Column]]:
        found: dict[str, dict[str, Column]] = {name: {} for name in rows}
        for name, fields in self.section(key, list(rows)).items():
            if not isinstance(fields, dict):
                raise self.error(
                    f"{key} of '{name}' is {_short(fields)}; expected an object with an entry for each field"
                )
            for field, spec in fields.items():
                source = self._source(f"{key} of '{name}/{field}'", spec, (ALL_COLUMNS,))
                if not source.files:
                    raise self.error(f"there are no files for {key} of '{name}/{field}'")
                found[name][field] = open_column(source, f"{name}/{field}", rows[name], how)
        return found

    def _source(self, what: str, spec: Any, columns: Selected = None) -> InputFiles:
        """The files of a file specification."""
        try:
            name, delimiter, data = spec["format"]["name"], spec["format"].get("delimiter"), spec["data"]
        except (TypeError, KeyError, AttributeError) as error:
            raise self.error(f"{what} is {_short(spec)}; expected format (with a name) and data") from error
        if name not in _FORMATS:
            raise self.error(f"{what} has the format {name!r}; expected one of {', '.join(_FORMATS)}")
        if not isinstance(data, list) or not all(isinstance(file, str) for file in data):
            raise self.error(f"{what} has the data {_short(data)}; expected a list of file names")
        if columns is None and name == "parquet":
            columns = 0, 1  # by position, as in DGL
        files = [self.path.parent / file for file in data]
        for file in files:
            check_inside(f"{self.path}: {what}", file, os.path.realpath(self.path.parent))
        text = TextFormat(delimiter or None, header=False)
        return InputFiles(find_files(files) if files else [], _FORMATS[name], columns, text)


def _short(found: Any) -> str:
    text = "missing" if found is None else json.dumps(found)
    return text if len(text) < 80 else f"{text[:77]}..."


def write_chunked(graph: GraphSource | Any, folder: StrPath, *, name: str = "graph", num_chunks: int = 1) -> Path:
    """Write a graph in DGL's chunked graph format: edges as CSV, features as `.npy`.

    Args:
        graph: the graph, also in memory as for `partition_graph`.
        folder: directory to create. It must not exist, or be empty.
        name: name of the graph, for `dgl.distributed`. Default "graph".
        num_chunks: number of files for each edge type and each feature. Default 1.

    Returns:
        The path of `metadata.json`, which has both spellings of the counts (`_per_chunk` and `_per_type`).

    Raises:
        ConfigError: the folder is not empty, or the number of chunks is not positive.
        PartitionError: the disk is full.
    """
    with new_directory(Path(folder)) as directory:
        write_chunks(from_object(graph), directory.path, name, num_chunks)
    return directory.target / METADATA


def write_chunks(graph: GraphSource, folder: Path, name: str, num_chunks: int) -> None:
    """Write the files of `write_chunked` into an empty directory."""
    if num_chunks < 1:
        raise ConfigError(f"num_chunks is {num_chunks}; expected 1 or more.")
    (folder / "edges").mkdir()
    etypes = {":".join(etype): etype for etype in graph.edges}
    nodes = {ntype: _chunks(count, num_chunks) for ntype, count in graph.num_nodes.items()}
    edges = {key: _chunks(graph.edges[etype].num_edges, num_chunks) for key, etype in etypes.items()}
    edge_files = {}
    for key, etype in etypes.items():
        files = [f"edges/{quote(key, safe='')}-{number}.csv" for number in range(num_chunks)]
        for file_name, chunk in zip(files, edges[key], strict=True):
            with (folder / file_name).open("wb") as file:
                for start in range(chunk.start, chunk.stop, _PAIRS):
                    src, dst = graph.edges[etype].read(start, min(start + _PAIRS, chunk.stop))
                    pyarrow.csv.write_csv(pyarrow.table({"src": src, "dst": dst}), file, _CSV)
        edge_files[key] = {"format": {"name": "csv", "delimiter": " "}, "data": files}
    node_data = {ntype: _write_columns(graph.node_data.get(ntype, {}), folder, "node_data", ntype, nodes[ntype])
                 for ntype in nodes}  # fmt: skip
    edge_data = {key: _write_columns(graph.edge_data.get(etype, {}), folder, "edge_data", key, edges[key])
                 for key, etype in etypes.items()}  # fmt: skip
    content = {
        "graph_name": name,
        "node_type": list(nodes),
        "num_nodes_per_chunk": [[chunk.stop - chunk.start for chunk in chunks] for chunks in nodes.values()],
        "num_nodes_per_type": list(graph.num_nodes.values()),
        "edge_type": list(edges),
        "num_edges_per_chunk": [[chunk.stop - chunk.start for chunk in chunks] for chunks in edges.values()],
        "num_edges_per_type": [of_type.num_edges for of_type in graph.edges.values()],
        "edges": edge_files,
        "node_data": {ntype: fields for ntype, fields in node_data.items() if fields},
        "edge_data": {key: fields for key, fields in edge_data.items() if fields},
    }
    (folder / METADATA).write_text(json.dumps(content, indent=2))


def _chunks(count: int, parts: int) -> list[slice]:
    """Parts whose sizes differ by at most one."""
    return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def _write_columns(
    columns: Mapping[str, Column], folder: Path, section: str, kind: str, chunks: list[slice]
) -> dict[str, Any]:
    """Write the features of a type and return their file specifications."""
    subfolder = f"{section}/{quote(kind, safe='')}"
    specs = {}
    for name, column in columns.items():
        (folder / subfolder).mkdir(parents=True, exist_ok=True)
        files = [f"{subfolder}/{quote(name, safe='')}-{number}.npy" for number in range(len(chunks))]
        step = max(1, _SLICE_BYTES // max(1, prod(column.shape[1:]) * column.dtype.itemsize))
        for file_name, chunk in zip(files, chunks, strict=True):
            shape = chunk.stop - chunk.start, *column.shape[1:]
            header = {"descr": np.lib.format.dtype_to_descr(column.dtype), "fortran_order": False, "shape": shape}
            with (folder / file_name).open("wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(chunk.start, chunk.stop, step):
                    rows = column[start : min(start + step, chunk.stop)]
                    file.write(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
        specs[name] = {"format": {"name": "numpy"}, "data": files}
    return specs
