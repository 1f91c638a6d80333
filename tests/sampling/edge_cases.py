"""What tests of seed edges share: graphs with their maps to original IDs, and batches described by plain tensors."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype, PartitionData
from sar.partition.graph_source import ONLY_TYPE
from tests.graphs import partition_in_memory, random_graph
from tests.hetero_graphs import heterograph
from tests.sampling.scenes import typed_graph, typed_parts


@dataclass(repr=False)
class Case:
    """A graph on one machine and its partitions; `dgl.NID` and `dgl.EID` of these are rows of the maps."""

    whole: Any
    partitions: list[PartitionData]
    node_orig: Tensor  # (N,) original ID, within its type, of every global ID
    edge_orig: Tensor  # (E,)

    def new_edge_ids(self, etype: CanonicalEtype) -> Tensor:
        """`dgl.EID` of every original edge of a type, (E_type,)."""
        kind = self.whole.canonical_etypes.index(etype)
        ids = torch.empty(self.whole.num_edges(etype), dtype=torch.int64)
        for partition in self.partitions:
            for shard in partition.all_shard_edges:
                new = shard.edge_features["_ID"]
                if "_TYPE" in shard.edge_features:
                    new = new[shard.edge_features["_TYPE"] == kind]
                ids[self.edge_orig[new]] = new
        return ids


def plain_case(world_size: int, kind: str = "") -> Case:
    """Self-loops, edges alike, nodes without edges.

    Where `kind` is "empty", worker 0 has nothing; where it is "scattered", a worker's edge IDs are not consecutive, as
    where workers share a partition.
    """
    edges = random_graph(4, 30, 110, isolated=3, no_in_edges=2)
    assignment = torch.arange(30) * 7 % world_size if kind != "empty" else torch.full((30,), world_size - 1)
    w = torch.rand(len(edges.src), 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts = partition_in_memory(edges, assignment, world_size, {"w": w})
    whole = heterograph({ONLY_TYPE: (edges.src, edges.dst)}, {"_N": edges.num_nodes})
    whole.edges[ONLY_TYPE].data["w"] = w
    shards = [shard.edge_features for partition in parts.partitions for shard in partition.all_shard_edges]
    if kind == "scattered":
        for fields in shards:
            fields["_ID"] = (fields["orig_id"] * 7 + 3) % len(edges.src)
    edge_orig = torch.empty(len(edges.src), dtype=torch.int64)
    for fields in shards:
        edge_orig[fields["_ID"]] = fields["orig_id"]
    return Case(whole, parts.partitions, parts.node_ids, edge_orig)


def typed_case(world_size: int) -> Case:
    """That of `typed_parts`."""
    parts, whole = typed_parts(world_size), typed_graph()
    node_orig = torch.empty(whole.num_nodes(), dtype=torch.int64)
    edge_orig = torch.empty(whole.num_edges(), dtype=torch.int64)
    for partition in parts.partitions:
        node_orig[partition.node_features["_ID"]] = partition.node_features["orig_id"]
        for shard in partition.all_shard_edges:
            edge_orig[shard.edge_features["_ID"]] = shard.edge_features["orig_id"]
    return Case(whole, parts.partitions, node_orig, edge_orig)


def describe_batch(batch: tuple[Any, ...]) -> dict[str, Any]:
    """All of a batch as tensors: nodes by type, edges by type as IDs of their ends, and fields."""
    nodes, positive, *negative, blocks = batch
    return {
        "input_nodes": nodes if isinstance(nodes, dict) else {"_N": nodes},
        "pairs": [_described(graph, graph.ntypes) for graph in (positive, *negative)],
        "blocks": [_described(block, block.dsttypes) for block in blocks],
    }


def _described(graph: Any, ntypes: list[str]) -> dict[str, Any]:
    edges = {}
    for etype in graph.canonical_etypes:
        src, dst = graph.edges(etype=etype, order="eid")
        ends = graph.srcnodes[etype[0]].data["_ID"][src], graph.dstnodes[etype[2]].data["_ID"][dst]
        edges[etype] = (*ends, dict(graph.edges[etype].data))
    return {"nodes": {t: graph.dstnodes[t].data["_ID"] for t in ntypes}, "edges": edges}


def sorted_edges(src: Tensor, dst: Tensor, ids: Tensor) -> Tensor:
    """(E, 3), in an order of their own."""
    rows = torch.stack([src, dst, ids], 1)
    return rows[rows[:, 2].argsort()]


def check_batch(
    case: Case, found: dict[str, Any], seeds: dict[CanonicalEtype, Tensor], exclude: Any, fanouts: Any
) -> Any:
    """Compare a described batch with all neighbours to what DGL makes of the same seeds, in original IDs.

    Args:
        case: the graph.
        found: the batch.
        seeds: original IDs by type, in the order of the batch.
        exclude: from seeds by type to original IDs to exclude by type; None for none.
        fanouts: layers, all -1.

    Returns:
        DGL's own batch.
    """
    import dgl

    node, edge = case.node_orig, case.edge_orig
    negative = None
    if len(found["pairs"]) == 2:
        pairs = found["pairs"][1]["edges"]
        negative = lambda *_: {etype: (node[u], node[v]) for etype, (u, v, _) in pairs.items()}  # noqa: E731
    sampler = dgl.dataloading.as_edge_prediction_sampler(
        dgl.dataloading.NeighborSampler(fanouts, fused=False), exclude=exclude, negative_sampler=negative
    )
    batch = sampler.sample(case.whole, {etype: ids.clone() for etype, ids in seeds.items()})  # DGL sorts in place
    expected = describe_batch(batch)
    for theirs, mine in zip(expected["pairs"], found["pairs"], strict=True):
        for ntype, ids in theirs["nodes"].items():
            assert torch.equal(node[mine["nodes"][ntype]], ids), "in DGL's order"
        for etype, (src, dst, _) in theirs["edges"].items():
            u, v, _ = mine["edges"][etype]
            assert torch.equal(node[u], src)
            assert torch.equal(node[v], dst)
    for etype, (_, _, fields) in found["pairs"][0]["edges"].items():
        ids = seeds.get(etype, torch.empty(0, dtype=torch.int64))
        assert torch.equal(edge[fields["_ID"]], ids)
        for name, column in case.whole.edges[etype].data.items():
            assert torch.equal(fields[name], column[ids]), name
    for theirs, mine in zip(expected["blocks"], found["blocks"], strict=True):
        for etype, (src, dst, fields) in theirs["edges"].items():
            u, v, own = mine["edges"][etype]
            assert torch.equal(
                sorted_edges(node[u], node[v], edge[own["_ID"]]), sorted_edges(src, dst, fields["_ID"])
            ), etype
    for ntype, ids in found["pairs"][0]["nodes"].items():
        assert torch.equal(found["blocks"][-1]["nodes"][ntype], ids)
        assert torch.equal(
            node[found["input_nodes"][ntype]].sort().values, expected["input_nodes"][ntype].sort().values
        )
    return batch
