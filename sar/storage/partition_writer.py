"""What a partition directory consists of, in the format of `dgl.distributed.partition_graph`.

DGL's own writer needs nodes and edges of every type in every part, which small types cannot have.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sar.common_tuples import EID, ETYPE, NID, NTYPE
from sar.storage.binary_layout import FileLayout, graph_file_layout
from sar.storage.partition_json import BOOL_FIELDS, IdRanges

GRAPH = "graph.dgl"
NODE_FEATURES = "node_feat.dgl"
EDGE_FEATURES = "edge_feat.dgl"
ORIGINAL_NODES = "orig_nids.dgl"
ORIGINAL_EDGES = "orig_eids.dgl"
"""The last two are where DGL's distributed partitioning pipeline leaves the original IDs of each part."""

NODE_FIELDS = {NID: np.int64, NTYPE: np.int32, "part_id": np.int64, "inner_node": np.uint8}
EDGE_FIELDS = {EID: np.int64, ETYPE: np.int32, "inner_edge": np.uint8}


def part_folder(directory: Path, part: int) -> Path:
    """Where the files of a part lie."""
    return directory / f"part{part}"


def part_graph_layout(num_nodes: int, num_edges: int) -> FileLayout:
    """The file `GRAPH` of a part with `num_nodes` nodes, its halo among them, and `num_edges` edges."""
    return graph_file_layout(num_nodes, num_edges, NODE_FIELDS, EDGE_FIELDS)


def write_partition_json(
    directory: Path,
    graph_name: str,
    method: str,
    node_types: Sequence[str],
    edge_types: Sequence[str],
    node_ranges: IdRanges,
    edge_ranges: IdRanges,
    num_hops: int = 1,
    bool_fields: Sequence[str] = (),
) -> None:
    """Write the file at the head of a directory, `graph_name.json`.

    Args:
        directory: where the folders of the parts are.
        graph_name: for DGL and for the file's name.
        method: what assigned nodes to parts.
        node_types: by type ID.
        edge_types: by type ID, as SOURCE:RELATION:DESTINATION.
        node_ranges: [start, end) of new IDs by part and type, (P, T, 2).
        edge_ranges: the same of edges, (P, R, 2).
        num_hops: of the parts' halo.
        bool_fields: names in the parts' files of fields of bool, which DGL's files hold as uint8.
    """
    content = {
        "graph_name": graph_name,
        "num_nodes": int(node_ranges[-1, -1, 1]),
        "num_edges": int(edge_ranges[-1, -1, 1]),
        "part_method": method,
        "num_parts": len(node_ranges),
        "halo_hops": num_hops,
        "node_map": {name: node_ranges[:, i].tolist() for i, name in enumerate(node_types)},
        "edge_map": {name: edge_ranges[:, i].tolist() for i, name in enumerate(edge_types)},
        "ntypes": {name: i for i, name in enumerate(node_types)},
        "etypes": {name: i for i, name in enumerate(edge_types)},
        BOOL_FIELDS: list(bool_fields),
    }
    files = {"node_feats": NODE_FEATURES, "edge_feats": EDGE_FEATURES, "part_graph": GRAPH}
    for part in range(len(node_ranges)):
        content[f"part-{part}"] = {kind: f"part{part}/{file}" for kind, file in files.items()}
    (directory / f"{graph_name}.json").write_text(json.dumps(content, indent=1))
