"""Plain edge lists: files with edges and nothing else, of one type or of several."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from sar.common_tuples import CanonicalEtype
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.ingest.edges import EdgeFormat, open_edges
from sar.partition.ingest.features import open_features
from sar.partition.ingest.files import Files, detect_format, find_files

ONLY_TYPE: CanonicalEtype = ("_N", "_E", "_N")


def open_edge_lists(
    edges: Mapping[CanonicalEtype, Files],
    how: EdgeFormat,
    num_nodes: int | Mapping[str, int] | None,
    node_features: Mapping[str, Files],
    scratch: Path,
    *,
    allow_nan: bool,
) -> GraphSource:
    """A graph of edge lists and node features.

    Args:
        edges: files by edge type.
        how: their format; with an empty name it is found out from the files.
        num_nodes: in all, or by node type. Where it is not given, a type has as many nodes as its features have rows,
            and without features one more than the greatest ID that is found in a first pass over the edges.
        node_features: as in `open_features`.
        scratch: directory for copies in binary.
        allow_nan: whether there may be NaN in other columns than labels and masks.

    Raises:
        PartitionError: files are missing or damaged, or do not fit together.
        ConfigError: options do not fit the files, or name types that are not there.
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

    columns = open_features(node_features, counts, scratch, allow_nan=allow_nan)
    for ntype, fields in columns.items():
        for column in fields.values():
            counts[ntype] = column.shape[0]
    is_known = {ntype: count is not None for ntype, count in counts.items()}
    opened = {}
    for number, (etype, files) in enumerate(edges.items()):
        found = find_files(files)
        one = how if how.name else replace(how, name=detect_format(found))
        opened[etype] = open_edges(found, one, (counts[etype[0]], counts[etype[2]]), scratch, f"edges-{number}")
    for etype, one_type in opened.items():
        for ntype, needed in zip(etype[::2], one_type.least_nodes or (), strict=False):
            if not is_known[ntype]:
                counts[ntype] = max(counts[ntype] or 0, needed)
    known = {ntype: count or 0 for ntype, count in counts.items()}
    return GraphSource(known, {etype: one_type.edges for etype, one_type in opened.items()}, columns, {})
