"""Opens a graph of any format as a `GraphSource`: finds files, opens each edge type and feature, and determines the
numbers of nodes.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from sar.common_tuples import GIVEN_ID, SPLIT, CanonicalEtype, StrPath
from sar.data.arrays import BFLOAT16, Array
from sar.data.graph_files import open_graph_file
from sar.data.partition_json import parse_edge_type
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ONLY_TYPE, ArrayEdges, Column, EdgeSource, GraphSource, Progress
from sar.partition.ingest.chunked import open_chunked
from sar.partition.ingest.edges import open_edges
from sar.partition.ingest.features import features_by_type, fields_without_nan, open_features
from sar.partition.ingest.ids import map_ids
from sar.partition.ingest.masks import check_splits, mask_of_files, with_masks
from sar.partition.ingest.sources import ADVICE, FORMATS, Files, InputFiles, Reading, TextFormat
from sar.partition.ingest.tables import open_table, select
from sar.partition.ingest.text import TextTable

T = TypeVar("T", str, CanonicalEtype)


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
    allow_nan: bool = False,
    ids: Literal["map"] | None = None,
    train_nodes: Files | Mapping[str, Files] | None = None,
    val_nodes: Files | Mapping[str, Files] | None = None,
    test_nodes: Files | Mapping[str, Files] | None = None,
    progress: Progress = lambda doing, share: None,
) -> GraphSource:
    """Open a graph that may be larger than memory.

    Binary edges and features are streamed from their files in every pass. Text and Parquet are parsed once into raw
    files under `scratch`, which must exist as long as the graph is used. A DGL graph file is read into memory. Error
    messages name the options of `sar partition`: `--no-header` is `header=False`.

    Args:
        path: the input, one of: a DGL graph file (`dgl.save_graphs`) with one graph; DGL's chunked graph format: its
            directory or `metadata.json`; edges as text, Parquet, `.npy` of (E, 2) or (2, E), or raw integers in pairs:
            a file, a list of files in order (or separated by commas), a directory or a glob pattern (sorted so that
            `part-2` precedes `part-10`). `.npy` of (E,), and raw files with `src` and `dst` in their names, hold
            sources and destinations separately; edges of several types: a mapping from `NTYPE:RELATION:NTYPE` to such
            files.
        scratch: directory for binary copies; created if missing.
        format: format of the graph or the edges: `dgl`, `chunked`, `text`, `parquet` or `npy`. Default None: from the
            file names or their first bytes.
        num_nodes: number of nodes of edge lists, by type if there are several. Default None: the number of rows of node
            features, or without features the greatest ID plus one, which takes a pass over binary edges.
        node_features: more features, a mapping from `name` or `ntype/name` to files (as above), `.npy`, Parquet or
            text. `file.csv#a` selects column a by name or number from 0, `file.csv#a,b` two columns as (N, 2),
            `file.csv#0-99` a range, and `file.csv#*` all. Rows of several files are in the order of the first feature.
            A `label` of strings is converted to class numbers.
        edge_features: likewise, by `name` or `NTYPE:RELATION:NTYPE/name`, in the order of the edges.
        delimiter: delimiter of text files, one character. Default None: detected from the first row of each file.
            Leading lines that begin with `#` or `%` are comments.
        header: whether text files begin with column names. Default None: detected; True for files with selected
            columns.
        columns: columns of sources and destinations in text and Parquet files, by name or number from 0. Default None:
            detected from names such as `src` and `dst`, or the only two columns if they have no names.
        allow_nan: accept NaN and infinity in features, never in labels and masks. Features are checked when read.
        ids: `map` for edge lists whose IDs are strings, or integers with gaps. Nodes are numbered, and their IDs stored
            as the node feature `id`: (N,) int64, or strings in UTF-8, (N, L) uint8, padded with zeros. A node feature
            `id` (or `ntype/id`) names the IDs of a table: node i is then row i, nodes without edges are kept, and other
            features have the same row order. Default None: IDs are 0 to N - 1.
        train_nodes: files with the IDs of training nodes, by node type if there are several.
        val_nodes, test_nodes: likewise for validation and test nodes.
        progress: called while tables are read.

    Returns:
        The graph. Its `notes` list skipped lines and other changes to the input.

    Raises:
        PartitionError: files are missing, truncated, damaged or inconsistent, or contain IDs that are not nodes; the
            message names file and row. Binary edges and features are checked when they are read.
        ConfigError: options do not fit the files, or name missing formats, types or columns.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"the format {format!r} was asked for; expected one of {', '.join(FORMATS)}.")
    Path(scratch).mkdir(parents=True, exist_ok=True)
    text = TextFormat(delimiter, header, progress=progress)
    how = Reading(Path(tempfile.mkdtemp(prefix="input-", dir=scratch)), text, allow_nan)
    node_features, edge_features = node_features or {}, edge_features or {}

    lists: list[tuple[str, InputFiles | dict[str, InputFiles]]] = [
        (mask, {ntype: select(one, text, "ids") for ntype, one in of.items()} if isinstance(of, Mapping)
         else select(of, text, "ids"))
        for mask, of in zip(SPLIT, (train_nodes, val_nodes, test_nodes), strict=True) if of is not None
    ]  # fmt: skip
    named = (
        {_edge_type(name): files for name, files in path.items()} if isinstance(path, Mapping) else {ONLY_TYPE: path}
    )
    edges = {etype: InputFiles.find(files, text, format=format, columns=columns) for etype, files in named.items()}
    whole = None if isinstance(path, Mapping) else edges[ONLY_TYPE]
    if whole is not None and whole.format in ("dgl", "chunked"):  # these formats contain types and counts
        tables = [*node_features, *edge_features, *lists]
        unused = [num_nodes, ids, columns, *(() if tables else (delimiter, header))]
        if any(option is not None for option in unused):
            raise ConfigError(
                f"'{path}' describes its own content; expected no number of nodes, --ids or --columns, and "
                "--delimiter or --header only for additional features."
            )
        if len(whole.files) != 1:
            raise ConfigError(f"'{path}' names {len(whole.files)} files of the format {whole.format!r}; expected one.")
        edges = {}
        graph = open_chunked(whole.files[0], how) if whole.format == "chunked" else _open_dgl(whole.files[0], how)
        of_nodes = features_by_type(node_features, [*graph.num_nodes], text)
        fields = {ntype: open_features(ntype, of_nodes[ntype], count, how) for ntype, count in graph.num_nodes.items()}
        graph = replace(graph, node_data=_joined(graph.node_data, fields))
    else:
        for source in edges.values():
            if source.format in ("text", "parquet"):
                open_table(source, "edges")
        of_nodes = features_by_type(node_features, [*dict.fromkeys(end for etype in edges for end in etype[::2])], text)
        if ids is None:
            graph = _open_edge_lists(edges, num_nodes, of_nodes, how)
        elif num_nodes is None:
            graph = _open_mapped(edges, of_nodes, how)
        else:
            raise ConfigError(f"the number of nodes (--num-nodes {num_nodes}) and --ids {ids} exclude each other.")
        for etype, some in graph.edges.items():
            if not some.num_edges:
                raise PartitionError(
                    f"there are no edges of {':'.join(etype)} in '{edges[etype].shown}'; expected at least one, or "
                    f"leave the edge type out. {' '.join(text.notes)}"
                )
    of_edges = features_by_type(edge_features, [":".join(etype) for etype in graph.edges], text)
    edge_fields = {
        etype: open_features(":".join(etype), of_edges[":".join(etype)], some.num_edges, how, edges.get(etype))
        for etype, some in graph.edges.items()
    }
    graph = replace(graph, edge_data=_joined(graph.edge_data, edge_fields))

    def mask_of(mask: str, source: InputFiles, ntype: str) -> Array:
        given = graph.node_data.get(ntype, {}).get(GIVEN_ID) if ids == "map" else None
        return mask_of_files(mask, source, graph.num_nodes[ntype], given)

    graph = check_splits(with_masks(graph, lists, mask_of))
    return replace(graph, notes=(*graph.notes, *text.notes))


def _open_dgl(file: Path, how: Reading) -> GraphSource:
    """The graph of a file of `dgl.save_graphs`."""
    stored = open_graph_file(file)
    edges = {of.etype: ArrayEdges(*of.edges.ends()) for of in stored.relations}
    for fields in (*stored.fields.values(), *(of.fields for of in stored.relations)):
        for name, field in fields.items():
            if field.stored == BFLOAT16:
                raise PartitionError(
                    f"the field {name!r} in {file} is bfloat16, which numpy lacks; expected float16 or another."
                )
    where = f"{file}, "
    node_data = fields_without_nan(stored.fields, where, allow_nan=how.allow_nan)
    edge_data = fields_without_nan({of.etype: of.fields for of in stored.relations}, where, allow_nan=how.allow_nan)
    return GraphSource(stored.num_nodes, edges, node_data, edge_data)


def _open_edge_lists(
    edges: Mapping[CanonicalEtype, InputFiles],
    num_nodes: int | Mapping[str, int] | None,
    node_features: Mapping[str, Mapping[str, InputFiles]],
    how: Reading,
) -> GraphSource:
    """Open a graph of edge lists and node features.

    If the number of nodes of a type is not given, it is the number of rows of its features, or without features the
    greatest ID plus one, which takes a first pass over the edges.
    """
    types, given = [*node_features], num_nodes if isinstance(num_nodes, Mapping) else {}
    if isinstance(num_nodes, int):
        if len(types) != 1:
            raise ConfigError(f"{num_nodes} nodes were named for the types {', '.join(types)}; name a number for each.")
        given = {types[0]: num_nodes}
    if unknown := [ntype for ntype in given if ntype not in types]:
        raise ConfigError(
            f"--num-nodes names {', '.join(unknown)}, and edges have no such node type; expected {', '.join(types)}."
        )
    if any(count < 0 for count in given.values()):
        raise ConfigError(f"numbers of nodes are {given}; expected none below 0.")
    counts: dict[str, int | None] = {ntype: given.get(ntype) for ntype in types}
    fields = {ntype: open_features(ntype, node_features[ntype], counts[ntype], how) for ntype in types}
    advice = ADVICE
    uncertain: dict[str, InputFiles] = {}  # tables whose first line may be a header, or else a node
    for ntype, columns in fields.items():
        if counts[ntype] is None and columns:
            source = next(iter(node_features[ntype].values()))
            counts[ntype] = next(iter(columns.values())).shape[0]
            header = ", whose first line is a row or names columns: --header, --no-header" * (source.format == "text")
            advice = f" The number of nodes, {counts[ntype]}, is that of the rows of {source.shown}{header}.{advice}"
            is_open = source.format == "text" and source.text.header is None
            if is_open and not TextTable(source.files[0], source.text).has_names:
                uncertain[ntype] = source
    opened: dict[CanonicalEtype, EdgeSource] = {}
    for number, (etype, source) in enumerate(edges.items()):
        limits, copy = (counts[etype[0]], counts[etype[2]]), how.scratch / f"edges-{number}"
        opened[etype] = open_edges(source, limits, copy, advice=advice)
    least = dict.fromkeys(types, 0)
    for etype, some in opened.items():
        to_find = {ntype for ntype in etype[::2] if counts[ntype] is None or ntype in uncertain}
        for ends in some.chunks() if to_find else ():
            for ntype, ids in zip(etype[::2], ends, strict=True):
                least[ntype] = max(least[ntype], int(ids.max(initial=-1)) + 1)
    for ntype, source in uncertain.items():
        if counts[ntype] == least[ntype] + len(source.files):
            how.text.note(
                f"{source.shown} has {counts[ntype]} rows, so there are {counts[ntype]} nodes, but edges name only "
                f"{least[ntype]}. If its first line names the column, as pandas writes it: --header."
            )
    known = {ntype: least[ntype] if count is None else count for ntype, count in counts.items()}
    return GraphSource(known, opened, fields, {})


def _open_mapped(
    edges: Mapping[CanonicalEtype, InputFiles],
    node_features: Mapping[str, Mapping[str, InputFiles]],
    how: Reading,
) -> GraphSource:
    """Open a graph of edge lists with mapped IDs, and features in the order of the new numbers."""
    tables = {ntype: sources[GIVEN_ID] for ntype, sources in node_features.items() if GIVEN_ID in sources}
    for ntype, sources in node_features.items():
        if sources and ntype not in tables:
            raise ConfigError(
                f"the rows of '{ntype}/{next(iter(sources))}' belong to nodes with mapped IDs (--ids map), but their "
                f"IDs are unknown. Also name the IDs of the rows: --node-feature {ntype}/{GIVEN_ID}=FILE#COLUMN."
            )
    mapped = map_ids(edges, tables, how.scratch)
    node_data = {}
    for ntype, ids in mapped.ids.items():
        others = {name: source for name, source in node_features[ntype].items() if name != GIVEN_ID}
        fields = open_features(ntype, others, mapped.num_nodes[ntype], how, tables.get(ntype))
        node_data[ntype] = {GIVEN_ID: ids, **fields}
    return GraphSource(mapped.num_nodes, mapped.edges, node_data, {})


def _edge_type(name: str) -> CanonicalEtype:
    etype = parse_edge_type(name)
    if etype is None or not all(etype):
        raise ConfigError(f"the edge type '{name}' was named; expected NTYPE:RELATION:NTYPE.")
    if "/" in name:
        raise ConfigError(
            f"the edge type '{name}' has slashes, which end the type in names of features; expected none. Name it "
            f"'{name.replace('/', '.')}', for instance."
        )
    return etype


def _joined(there: Mapping[T, Mapping[str, Column]], more: Mapping[T, Mapping[str, Column]]) -> dict[T, Any]:
    """Merge the fields of the graph itself with additional fields, by type."""
    for kind in more:
        if both := sorted(there.get(kind, {}).keys() & more[kind].keys()):
            name = kind if isinstance(kind, str) else ":".join(kind)
            raise ConfigError(f"'{name}' already has the fields {', '.join(both)}; rename the new ones.")
    return {kind: {**there.get(kind, {}), **more.get(kind, {})} for kind in {**there, **more}}
