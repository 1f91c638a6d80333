"""A worker's partitions as graphs of DGL's own, to be trained on without the other workers."""

from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.sampling_graph import INNER_NODE
from sar.adapters.dgl.shim import require_dgl
from sar.comm import session
from sar.common_tuples import NID, SPLIT, PartitionData
from sar.core.graph.graph import GraphShardManager
from sar.nn.rows import fetch_rows


def local_subgraphs(graph: GraphShardManager, data: PartitionData) -> list[Any]:
    """A `dgl.DGLGraph` of each of this worker's partitions and its halo; called by all workers together.

    Each has the partition's nodes, then the sources of edges into them that belong elsewhere (the halo), and all edges
    into the partition's nodes, in visible order. Halo nodes have no in-edges: a second layer sees of them what the
    first made of their own features. Features of halo nodes are fetched here, once.

    Args:
        graph: of `construct_full_graph(data)`, with the edge fields to take over.
        data: this worker's, with node features.

    Returns:
        On the CPU, one for each partition in the order of its nodes; where workers share a partition, or have none, one
        of the worker's nodes. All node features by their names; `train_mask`, `val_mask` and `test_mask` are False on
        the halo. Also `_ID`, the global node and edge IDs, and `inner_node`, which is False on the halo.

    Raises:
        GraphError: for a message flow graph, or node features of another length.
        CommunicationError: where another worker raised, or has other features.
    """
    group = session.current_group()
    with group.guard():
        whole = graph.sampling_graph
        ranges = data.part_ranges or [graph.node_ranges[group.rank]]
        parts = [_in_subgraph(whole, start, end) for start, end in ranges]
        for key in sorted(key for key in data.node_features if "/" in key):
            ntype, _, name = key.partition("/")
            values = data.node_features[key].detach()
            fetched = fetch_rows(graph, values, whole.nodes[ntype].data[NID][graph.num_nodes(ntype) :], ntype)
            values = torch.cat([values, fetched]).cpu()
            for part, rows in parts:
                column = values[rows[ntype]]
                if name in SPLIT:
                    column[~part.nodes[ntype].data[INNER_NODE]] = False
                part.nodes[ntype].data[name] = column
    return [part for part, _ in parts]


def _in_subgraph(whole: Any, start: int, end: int) -> tuple[Any, dict[str, Tensor]]:
    """All edges into the nodes with global IDs in [start, end), and by type the rows in `whole` of its nodes."""
    inner = {t: (whole.nodes[t].data[NID] >= start) & (whole.nodes[t].data[NID] < end) for t in whole.ntypes}
    read = {ntype: torch.zeros_like(own) for ntype, own in inner.items()}
    edges, chosen = {}, {}
    for etype in whole.canonical_etypes:
        src, dst = whole.edges(etype=etype, order="eid")
        chosen[etype] = inner[etype[2]][dst].nonzero().squeeze(1)
        edges[etype] = src[chosen[etype]], dst[chosen[etype]]
        read[etype[0]][edges[etype][0]] = True
    rows, place = {}, {}
    for ntype, own in inner.items():
        rows[ntype] = torch.cat([own.nonzero().squeeze(1), (read[ntype] & ~own).nonzero().squeeze(1)])
        place[ntype] = torch.empty(len(own), dtype=torch.int64)
        place[ntype][rows[ntype]] = torch.arange(len(rows[ntype]))
    renumbered = {etype: (place[etype[0]][src], place[etype[2]][dst]) for etype, (src, dst) in edges.items()}
    part = require_dgl().heterograph(renumbered, num_nodes_dict={ntype: len(ids) for ntype, ids in rows.items()})
    for ntype, ids in rows.items():
        part.nodes[ntype].data[NID] = whole.nodes[ntype].data[NID][ids]
        part.nodes[ntype].data[INNER_NODE] = inner[ntype][ids]
    for etype, ids in chosen.items():
        part.edges[etype].data.update({name: values[ids] for name, values in whole.edges[etype].data.items()})
    return part, rows
