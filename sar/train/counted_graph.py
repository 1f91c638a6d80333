"""For plans: a graph that has sizes and no edges, and a group of which only one worker exists.

Tensors are on torch's device "meta", which holds no values. Messages are counted, and go nowhere.
"""

import math
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.graphs import DGL
from sar.comm.group import Group
from sar.comm.tiles import HaloPlan
from sar.comm.transport import Member, Message, Transport
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import NodeSet, Relation, Structure
from sar.kernels import EdgeBlock, index_dtype
from sar.train.graph_counts import GraphCounts, RelationCounts

META = torch.device("meta")


def counted_graph(counts: GraphCounts, worker: int, group: Group) -> tuple[GraphShardManager, Structure]:
    """The graph of one worker, with its edge features and IDs; the group stands for all workers."""
    ids = {ntype: _ids(count, torch.int64) for ntype, count in counts.nodes[worker].items()}
    nodes = NodeSet(ids, ids, counts.info.num_nodes)
    ends = torch.tensor([sum(of_worker.values()) for of_worker in counts.nodes], device="cpu").cumsum(0).tolist()
    node_ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    relations = [_relation(counts, relation, worker) for relation in counts.relations]
    structure = Structure(group, META, node_ranges, nodes, nodes, relations, "planned", DGL)
    features = [
        {
            name: torch.empty(sum(relation.edges[worker]), *shape, dtype=dtype, device=META)
            for name, (shape, dtype) in relation.features.items()
        }
        for relation in counts.relations
    ]
    return make_graph(structure, features, None), structure


def _relation(counts: GraphCounts, relation: RelationCounts, worker: int) -> Relation:
    source, _, destination = relation.etype
    nodes = counts.nodes[worker]
    blocks: list[EdgeBlock] = []
    offset = 0
    for p, edges in enumerate(relation.edges[worker]):
        num_src = nodes[source] if p == worker else relation.halo[worker][p]
        blocks.append(CountedBlock(edges, num_src, nodes[destination], offset))
        offset += edges
    send_rows = [_ids(reader[worker], torch.int32) for reader in relation.halo]
    mean_rows = sum(of_worker[source] for of_worker in counts.nodes) // counts.num_workers
    plan = HaloPlan(worker, send_rows, torch.tensor(relation.halo, device="cpu").T, mean_rows)
    return Relation(
        etype=relation.etype,
        blocks=blocks,
        halos=[_ids(rows, torch.int32) for rows in relation.halo[worker]],
        plan=plan,
        num_src=nodes[source],
        num_dst=nodes[destination],
        num_edges_global=sum(map(sum, relation.edges)),
        in_degrees=_ids(nodes[destination], torch.int64),
        out_degrees=_ids(nodes[source], torch.int64),
        message_order=_ids(offset, torch.int64),
    )


class CountedBlock(EdgeBlock):
    """Edges of which only the number is known; their ends are taken to be drawn at random."""

    def __init__(
        self, num_edges: int, num_src: int, num_dst: int, edge_offset: int = 0, edge_ids: bool = False
    ) -> None:
        # The expected number of different destinations.
        rows = round(num_dst * -math.expm1(-num_edges / num_dst)) if num_dst else 0
        dtype = index_dtype(edge_offset + num_edges)
        super().__init__(
            rows=_ids(rows, torch.int32),
            indptr=_ids(rows + 1, index_dtype(num_edges)),
            cols=_ids(num_edges, torch.int32),
            num_src=num_src,
            num_dst=num_dst,
            edge_ids=(lambda: _ids(num_edges, dtype)) if edge_ids else None,
            edge_offset=0 if edge_ids else edge_offset,
        )

    def select_sources(self, begin: int, end: int) -> EdgeBlock:
        """The block of edges whose source is in begin to end: as many as these are of all sources."""
        if begin == 0 and end == self.num_src:
            return self
        edges = self.num_edges * end // self.num_src - self.num_edges * begin // self.num_src
        return CountedBlock(edges, end - begin, self.num_dst, self.edge_offset, edge_ids=True)


def _ids(count: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(count, dtype=dtype, device=META)


class CountingGroup(Group):
    """A group in which everybody agrees with this worker and sends the same.

    Only its transport is another one, so that everything is counted in the same place as by a real worker.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(CountingTransport(rank, world_size, torch.device("cpu")))


class CountingTransport(Transport):
    """Carries nothing; every operation is done at once."""

    def _done(self, *_: Any, **__: Any) -> None:
        pass

    connect = all_reduce = broadcast = wait = abort = close = explain = _done

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.clone() for _ in range(self.world_size)]

    def post(self, inbound: Message | None, outbound: Message | None, tag: int) -> tuple[Any, Any]:
        return inbound, outbound

    def whereabouts(self, group: Member, call: str) -> str:
        return f"  worker {self.rank}: {call}"
