"""A worker's edges as a graph of DGL's own, laid out as DGL's partitions are: own nodes first, then the halo."""

from typing import Any

import torch

from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import NID
from sar.core.graph.halo_graph import HaloGraph

INNER_NODE = "inner_node"


def make_sampling_graph(local: HaloGraph) -> Any:
    """A `DGLGraph` on the CPU, where DGL samples, with global node IDs (`_ID`) and `inner_node`, (N_own + N_halo,)."""
    graph = require_dgl().heterograph(
        {etype: (src.cpu(), dst.cpu()) for etype, (src, dst) in local.edges.items()},
        num_nodes_dict={ntype: len(ids) for ntype, ids in local.nodes.items()},
    )
    for ntype, ids in local.nodes.items():
        data = graph.nodes[ntype].data
        data[NID] = ids.cpu()
        data[INNER_NODE] = torch.arange(len(ids)) < local.num_own[ntype]
    return graph
