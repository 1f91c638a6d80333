"""The report on a directory by what its writer knows, so that nothing is read again."""

from collections.abc import Mapping

import numpy as np

from sar.common_tuples import SPLIT
from sar.partition.graph_data import Array
from sar.partition.graph_source import CHUNK_ROWS, Column, GraphSource
from sar.partition.inspect.directory_report import DirectoryReport, FeatureReport, PartReport
from sar.partition.write.write import Written
from sar.partition.write.write_job import stored_spec
from sar.storage.partition_writer import ORIGINAL_EDGES, ORIGINAL_NODES


def written_report(graph: GraphSource, part_of: Array, written: Written, name: str, method: str) -> DirectoryReport:
    """What `sar.partition.inspect.inspection.inspect_directory` finds in a directory that was just written.

    Args:
        graph: what was written.
        part_of: (N,) the part of every node.
        written: what the writer has counted.
        name: of the graph.
        method: what assigned nodes to parts.
    """
    ntypes, etypes = list(graph.num_nodes), list(graph.edges)
    edge_names = [":".join(etype) for etype in etypes]
    features = [one for t in ntypes for one in _features("nodes", t, graph.node_data.get(t, {}))]
    for etype, edge_name in zip(etypes, edge_names, strict=True):
        features += _features("edges", edge_name, graph.edge_data.get(etype, {}))
    split = _split(graph, part_of, len(written.nodes))
    parts = [
        PartReport(
            nodes=dict(zip(ntypes, written.nodes[part].tolist(), strict=True)),
            in_edges=dict(zip(edge_names, written.edges[part].tolist(), strict=True)),
            edges_from=written.edges_from[part].tolist(),
            rows_from=written.rows_from[part].tolist(),
            split={mask: int(counts[part]) for mask, counts in split.items()},
        )
        for part in range(len(written.nodes))
    ]
    return DirectoryReport(
        name=name,
        method=method,
        format="dgl.distributed.partition_graph",
        orig_node_ids=ORIGINAL_NODES,
        orig_edge_ids=ORIGINAL_EDGES,
        num_nodes={ntype: graph.num_nodes[ntype] for ntype in ntypes},
        num_edges={":".join(etype): graph.edges[etype].num_edges for etype in etypes},
        features=features,
        parts=parts,
        problems=[],
    )


def _features(of: str, kind: str, columns: Mapping[str, Column]) -> list[FeatureReport]:
    return [
        FeatureReport(of, kind, name, stored_spec(name, column).dtype.name, tuple(column.shape[1:]), None)
        for name, column in columns.items()
    ]


def _split(graph: GraphSource, part_of: Array, num_parts: int) -> dict[str, Array]:
    """By mask, how many nodes it chooses in each part, (P,)."""
    chosen: dict[str, Array] = {}
    for ntype, columns in graph.node_data.items():
        first = graph.first_node[ntype]
        for mask in (mask for mask in SPLIT if mask in columns):
            counts = chosen.setdefault(mask, np.zeros(num_parts, np.int64))
            for start in range(0, graph.num_nodes[ntype], CHUNK_ROWS):
                rows = np.asarray(columns[mask][start : start + CHUNK_ROWS])
                here = part_of[first + start : first + start + len(rows)]
                counts += np.bincount(here[rows != 0], minlength=num_parts)
    return chosen
