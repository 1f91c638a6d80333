"""The graph with every edge the other way around."""

import torch

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.common_tuples import PartitionData, ShardEdgesAndFeatures
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.graph.in_edges import source_ids
from sar.core.relation import build_structure
from sar.errors import GraphError


def reversed_graph(graph: GraphShardManager) -> GraphShardManager:
    """The graph with an edge from v to u for each one from u to v, without fields; a collective call.

    Args:
        graph: homogeneous, and no message flow graph.

    Raises:
        GraphError: for another graph.
    """
    if not graph.is_homogeneous or graph.is_block:
        raise GraphError("Only whole homogeneous graphs can be reversed.")
    structure, relation = graph._structure, graph._relation(None)
    with structure.group.guard():
        structure.group.agree("reversing the graph")
        own = structure.dst.ids[relation.etype[2]]
        sources = source_ids(structure, relation)
        pairs = [
            torch.stack([ids[block.cols.long()], own[block.destinations(0, block.num_edges)]], dim=1)
            for ids, block in zip(sources, relation.blocks, strict=True)
        ]
        shards = []
        for ends in exchange_tensors(pairs):
            dst, src = ends.to(graph.device).unbind(1)
            order = torch.argsort(dst, stable=True)
            shards.append(ShardEdgesAndFeatures((src[order], dst[order]), {}))
    ntype = relation.etype[0]
    data = PartitionData(shards, structure.node_ranges, {}, [ntype], [relation.etype])
    made, features = build_structure(data, session.current_group(), None)
    result = make_graph(made, features, graph.partition_book)
    return result.get_full_partition_graph() if graph.one_shot else result
