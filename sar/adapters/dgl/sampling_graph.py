"""A worker's edges as a graph of DGL's own, laid out as DGL's partitions are: own nodes first, then the halo."""

from typing import Any

import torch

from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import NID
from sar.core.graph.edges import source_ids
from sar.core.relation import Structure

INNER_NODE = "inner_node"


def make_sampling_graph(structure: Structure) -> Any:
    """A `DGLGraph` on the CPU, where DGL samples, of this worker's nodes, the remote ones that it reads, and its edges.

    Nodes of each type, (N_own + N_halo,): own ones in the order of their rows, then the halo, ascending, with global
    IDs (`_ID`) and `inner_node`. Edges of each type in the visible order.
    """
    read = {relation.etype: source_ids(structure, relation) for relation in structure.relations}
    halos = {ntype: ids[:0] for ntype, ids in structure.src.ids.items()}
    for (ntype, _, _), ids_by_part in read.items():
        remote = [ids for part, ids in enumerate(ids_by_part) if part != structure.part]
        halos[ntype] = torch.cat([halos[ntype], *remote]).unique()
    edges = {}
    for relation in structure.relations:
        places = [torch.searchsorted(halos[relation.etype[0]], ids) + relation.num_src for ids in read[relation.etype]]
        places[structure.part] = torch.arange(relation.num_src, device=structure.device)
        src = [place[block.cols.long()] for place, block in zip(places, relation.blocks, strict=True)]
        dst = [block.destinations(0, block.num_edges) for block in relation.blocks]
        edges[relation.etype] = (torch.cat(src).cpu(), torch.cat(dst).cpu())
    nodes = {ntype: torch.cat([ids, halos[ntype]]).cpu() for ntype, ids in structure.src.ids.items()}
    counts = {ntype: len(ids) for ntype, ids in nodes.items()}
    graph = require_dgl().heterograph(edges, num_nodes_dict=counts)
    for ntype, ids in nodes.items():
        data = graph.nodes[ntype].data
        data[NID] = ids
        data[INNER_NODE] = torch.arange(len(ids)) < structure.src.counts[ntype]
    return graph
