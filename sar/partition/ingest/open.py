"""Open a graph of any format as a `GraphSource`: files are found, each edge type and each feature is opened, and the
numbers of nodes are put together.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Literal

from sar.common_tuples import GIVEN_ID, SPLIT, CanonicalEtype, StrPath
from sar.data.arrays import Array, StoredArray, as_column
from sar.data.graph_files import open_graph_file
from sar.data.part_files import parse_edge_type
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ONLY_TYPE, ArrayEdges, Column, GraphSource
from sar.partition.ingest.chunked import METADATA, open_chunked
from sar.partition.ingest.edges import open_edges
from sar.partition.ingest.features import open_features, without_nan
from sar.partition.ingest.files import ADVICE, FORMATS, Files, InputFiles, Reading, TextFormat, with_format
from sar.partition.ingest.ids import map_ids
from sar.partition.ingest.masks import check_splits, mask_of_files, with_masks
from sar.partition.npz_files import read_npz


def open_graph(
    path: Files | Mapping[str, Files],
    scratch: StrPath,
    *,
    format: str | None = None,
    num_nodes: int | Mapping[str, int] | None = None,
    node_features: Mapping[str, Files] | None = None,
    edge_features: Mapping[str, Files] | None = None,
    delimiter: str | None = None,
    header: bool | None = None,
    columns: tuple[str | int, str | int] | None = None,
    dtype: str | None = None,
    allow_nan: bool = False,
    allow_outside: bool = False,
    ids: Literal["map"] | None = None,
    comment: str | None = None,
    train_nodes: Files | Mapping[str, Files] | None = None,
    val_nodes: Files | Mapping[str, Files] | None = None,
    test_nodes: Files | Mapping[str, Files] | None = None,
    mask_column: int | None = None,
    allow_empty: bool = False,
) -> GraphSource:
    """Open a graph that may be larger than memory.

    Binary edges and features are streamed from their files, again in each pass; text and Parquet are parsed once,
    into raw files under `scratch`, which have to stay as long as the graph is used. A DGL graph file or an `.npz` file
    is read into memory, because its format has no other way.

    Args:
        path: the input:
            a DGL graph file (`dgl.save_graphs`) with one graph;
            an `.npz` file as `sar.partition.npz_files` describes it;
            DGL's chunked graph format: its directory or `metadata.json`;
            edges as text (CSV, any delimiter), Parquet, `.npy` of (E, 2) or (2, E), or raw integers in pairs: a file, a
            list of files in order, a directory or a glob pattern (`part-2` comes before `part-10`); `.npy` of (E,), and
            raw files with `src` and `dst` in their names, hold sources and destinations apart;
            or edges of several types: a mapping of `NTYPE:RELATION:NTYPE` to such files.
        scratch: directory for copies in binary; made if it is not there.
        format: `dgl`, `npz`, `chunked`, `text`, `parquet`, `npy` or `raw`; None: by the names of the files.
        num_nodes: of edge lists: number of nodes, by type if there are several. None: as many as node features have
            rows, and without these one more than the greatest ID, which takes a pass over binary edges.
        node_features: more features: files (as above) by `name` or `ntype/name`: `.npy`, Parquet, DGL's tensor files,
            or text; of a table with several columns (Parquet or text) `file.csv#a` takes column a, by name or number,
            `file.csv#a,b` two together as (N, 2), `file.csv#0-99` a range, and `file.csv#*` all; `file.dgl#x` takes
            the tensor x. A `label` may have names of classes, which are numbered in alphabetical order.
        edge_features: likewise, by `name` or `NTYPE:RELATION:NTYPE/name`, in the order of the edges.
        delimiter: of text: one character, and no other; None: found out in each file.
        header: whether text files begin with names of columns; None: found out. Files of which columns are named do.
        columns: of sources and destinations in text and Parquet files, by name or number from 0; None: `src`
            and `dst` or the like, else the only two.
        dtype: of raw edges: `int32` or `int64`.
        allow_nan: take NaN in features; never in labels and masks. Features are checked while they are read.
        allow_outside: whether a `metadata.json` may name files outside of its directory, also by links.
        ids: `map` for edge lists whose IDs are strings, or integers with gaps: the nodes that they name are numbered,
            and their IDs kept as the node field `id`: (N,) int64, or strings in UTF-8, (N, L) uint8 with zeros at the
            end. A node feature `id` (or `ntype/id`) names the IDs of a table: then node i is that of row i, there may
            be nodes without edges, and the other features' rows are in the same order. None: IDs are 0 to N - 1.
        comment: begins lines of text to pass over, `""` none; None: `#` and `%`, but only before the first row.
        train_nodes: files with the IDs of the nodes to train on, by node type if there are several: `train_mask`.
        val_nodes, test_nodes: likewise.
        mask_column: the column to take of masks with several, (N, k).
        allow_empty: whether there may be no edge in the files of an edge type.

    Returns:
        The graph. Its `notes` say how many lines were passed over, and other changes to the input.

    Raises:
        PartitionError: files are missing, truncated or damaged, do not fit together, or hold IDs that are no nodes;
            file and row are named. Binary edges and features are checked when they are read.
        ConfigError: options do not fit the files, or name formats, types or columns that are not there.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"the format {format!r} was asked for; expected one of {', '.join(FORMATS)}.")
    Path(scratch).mkdir(parents=True, exist_ok=True)
    how = Reading(
        Path(tempfile.mkdtemp(prefix="input-", dir=scratch)), TextFormat(delimiter, header, comment), allow_nan
    )
    node_features, edge_features = node_features or {}, edge_features or {}
    lists = [(mask, files) for mask, files in zip(SPLIT, (train_nodes, val_nodes, test_nodes), strict=True)
             if files is not None]  # fmt: skip
    whole = None if isinstance(path, Mapping) else _whole_graph(path, format, how, allow_outside, mask_column)
    if whole is not None:
        tables = [*node_features, *edge_features, *lists]
        unused = [num_nodes, ids, columns, dtype, *(() if tables else (delimiter, header, comment))]
        if any(option is not None for option in unused):
            raise ConfigError(
                f"'{path}' says itself what is in it; expected no num_nodes, ids, columns or dtype, and "
                "delimiter, header or comment only for features beside it."
            )
        graph = _with_features(whole, how, node_features, edge_features)
    else:
        by_type = path.items() if isinstance(path, Mapping) else [(":".join(ONLY_TYPE), path)]
        edges = {
            _edge_type(name): InputFiles.of(files, how.text, format=format, columns=columns, dtype=dtype)
            for name, files in by_type
        }
        if ids is None:
            graph = _open_edge_lists(edges, num_nodes, node_features, how)
        elif num_nodes is None:
            graph = _open_mapped(edges, node_features, how)
        else:
            raise ConfigError(f"num_nodes={num_nodes} (--num-nodes) and ids={ids!r} (--ids) exclude each other.")
        for etype, some in graph.edges.items() if not allow_empty else ():
            if not some.num_edges:
                raise PartitionError(
                    f"there are no edges of {':'.join(etype)} in '{edges[etype].shown}'; expected at least one "
                    f"(or allow_empty=True, --allow-empty). {' '.join(how.text.notes)}"
                )
        graph = _with_features(graph, how, {}, edge_features)

    def mask_of(files: Files, ntype: str) -> Array:
        given = graph.node_data.get(ntype, {}).get(GIVEN_ID) if ids == "map" else None
        return mask_of_files(InputFiles.named(files, how.text), graph.num_nodes[ntype], given)

    graph = with_masks(graph, lists, mask_of)
    is_npz = whole is not None and (format == "npz" or str(path).endswith(".npz"))  # whose masks are (k, N)
    return replace(check_splits(graph, None if is_npz else mask_column), notes=(*graph.notes, *how.text.notes))


def _whole_graph(
    path: Files, format: str | None, how: Reading, allow_outside: bool, split: int | None
) -> GraphSource | None:
    """The graph if the format tells types and counts; None if there are edges only."""
    if isinstance(path, str | PathLike) and (Path(path) / METADATA).is_file():
        path = Path(path) / METADATA
    files, format = with_format(path, format)
    if format not in ("dgl", "npz", "chunked"):
        return None
    if len(files) != 1:
        raise ConfigError(f"'{path}' names {len(files)} files of the format {format!r}; expected one.")
    (file,) = files
    if format == "chunked":
        return open_chunked(file, how, allow_outside=allow_outside)
    if format == "npz":
        graph = read_npz(file, split)
    else:
        stored = open_graph_file(file)
        edges = {of.etype: ArrayEdges(*(end.numpy() for end in of.edges.ends())) for of in stored.relations}
        graph = GraphSource(stored.num_nodes, edges, stored.fields, {of.etype: of.fields for of in stored.relations})

    def checked(kind: str, fields: Mapping[str, Column]) -> dict[str, Column]:
        columns = {name: as_column(one, name) if isinstance(one, StoredArray) else one for name, one in fields.items()}
        return {
            name: without_nan(column, name, f"{file}, field '{kind}/{name}'", allow_nan=how.allow_nan)
            for name, column in columns.items()
        }

    return replace(
        graph,
        node_data={ntype: checked(ntype, fields) for ntype, fields in graph.node_data.items()},
        edge_data={etype: checked(":".join(etype), fields) for etype, fields in graph.edge_data.items()},
    )


def _with_features(
    graph: GraphSource, how: Reading, node_features: Mapping[str, Files], edge_features: Mapping[str, Files]
) -> GraphSource:
    """The graph with more fields, from files beside it."""
    names = {":".join(etype): etype for etype in graph.edges}
    num_edges = {name: graph.edges[etype].num_edges for name, etype in names.items()}
    node_data, edge_data = {**graph.node_data}, {**graph.edge_data}
    for ntype, fields in open_features(node_features, graph.num_nodes, how).items():
        node_data[ntype] = _joined(ntype, graph.node_data.get(ntype, {}), fields)
    for name, fields in open_features(edge_features, num_edges, how).items():
        edge_data[names[name]] = _joined(name, graph.edge_data.get(names[name], {}), fields)
    return replace(graph, node_data=node_data, edge_data=edge_data)


def _open_edge_lists(
    edges: Mapping[CanonicalEtype, InputFiles],
    num_nodes: int | Mapping[str, int] | None,
    node_features: Mapping[str, Files],
    how: Reading,
) -> GraphSource:
    """A graph of edge lists and node features.

    If a number of nodes is not given, a type has as many as its features have rows, and without features one more
    than the greatest ID, which is found in a first pass over the edges.
    """
    given = num_nodes if isinstance(num_nodes, Mapping) else {}
    types = list(dict.fromkeys([*given, *(end for source, _, destination in edges for end in (source, destination))]))
    counts: dict[str, int | None] = {ntype: given.get(ntype) for ntype in types}
    if isinstance(num_nodes, int):
        if len(types) != 1:
            raise ConfigError(f"{num_nodes} nodes were named for the types {', '.join(types)}; name a number for each.")
        counts[types[0]] = num_nodes
    if any(count is not None and count < 0 for count in counts.values()):
        raise ConfigError(f"numbers of nodes are {counts}; expected none below 0.")

    columns, advice = open_features(node_features, counts, how), ADVICE
    for ntype, fields in columns.items():
        for name, column in fields.items():
            if counts[ntype] is None:
                files = node_features.get(name, node_features.get(f"{ntype}/{name}"))
                advice = (
                    f" That there are {column.shape[0]} nodes follows from the rows of {files}, whose first line is a "
                    f"row or names columns: --header, --no-header (header=).{advice}"
                )
            counts[ntype] = column.shape[0]
    opened = {}
    for number, (etype, source) in enumerate(edges.items()):
        limits = counts[etype[0]], counts[etype[2]]
        opened[etype], _ = open_edges(source, limits, how.scratch, f"edges-{number}", advice=advice)
    least = dict.fromkeys(types, 0)
    for etype, some in opened.items():
        for ends in some.chunks() if None in (counts[etype[0]], counts[etype[2]]) else ():
            for ntype, ids in zip(etype[::2], ends, strict=True):
                least[ntype] = max(least[ntype], int(ids.max(initial=-1)) + 1)
    known = {ntype: least[ntype] if count is None else count for ntype, count in counts.items()}
    return GraphSource(known, opened, columns, {})


def _open_mapped(
    edges: Mapping[CanonicalEtype, InputFiles], node_features: Mapping[str, Files], how: Reading
) -> GraphSource:
    """A graph of edge lists whose nodes are numbered, and node features in the order of these numbers."""
    types = dict.fromkeys(end for source, _, destination in edges for end in (source, destination))
    prefix = f"{next(iter(types))}/" if len(types) == 1 else ""
    features = {key if "/" in key else f"{prefix}{key}": files for key, files in node_features.items()}
    tables = {}
    for ntype in types:
        if f"{ntype}/{GIVEN_ID}" in features:
            tables[ntype] = InputFiles.named(features.pop(f"{ntype}/{GIVEN_ID}"), how.text)
        elif unknown := [key for key in features if key.startswith(f"{ntype}/")]:
            raise ConfigError(
                f"whose rows '{unknown[0]}' has is not known where nodes are numbered (ids='map', --ids map); name the "
                f"IDs of its rows, too: --node-feature {ntype}/{GIVEN_ID}=FILE#COLUMN."
            )
    mapped = map_ids(edges, tables, how.scratch)
    columns = open_features(features, mapped.num_nodes, how)
    node_data = {ntype: {GIVEN_ID: ids, **columns[ntype]} for ntype, ids in mapped.ids.items()}
    return GraphSource(mapped.num_nodes, mapped.edges, node_data, {})


def _edge_type(name: str) -> CanonicalEtype:
    etype = parse_edge_type(name)
    if etype is None or not all(etype) or "/" in name:
        raise ConfigError(f"the edge type '{name}' was named; expected NTYPE:RELATION:NTYPE.")
    return etype


def _joined(kind: str, there: Mapping[str, Column], more: Mapping[str, Column]) -> dict[str, Column]:
    """The fields of a type, of the graph itself and named beside it."""
    both = sorted(there.keys() & more.keys())
    if both:
        raise ConfigError(f"'{kind}' has the fields {', '.join(both)} already; name the new ones otherwise.")
    return {**there, **more}
