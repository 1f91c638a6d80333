"""Sampling where a worker has a type's nodes in several runs, and from the graph of one edge type."""

import pytest
import torch

import sar
from sar.common_tuples import EID, NID, NTYPE, ORIG_ID
from sar.data.regroup import deal_parts, regroup
from tests.core.attempts import catch_and_recover
from tests.sampling.scenes import typed_parts

PARTS = 5


def regrouped(world_size):
    """The partitions of every worker, and by worker and type the original IDs of its nodes."""
    parts = typed_parts(PARTS).partitions
    runs = deal_parts([1] * PARTS, world_size)
    ends = [(parts[0].node_ranges[run[0]][0], parts[0].node_ranges[run[-1]][1]) for run in runs]
    given = [regroup({p: typed_parts(PARTS).partitions[p] for p in run}, ends, w) for w, run in enumerate(runs)]
    originals = []
    for data in given:
        kinds, ids = data.node_features[NTYPE], data.node_features[ORIG_ID]
        originals.append({ntype: ids[kinds == kind] for kind, ntype in enumerate(data.node_type_names)})
    return given, originals


def sample_all(mine):
    data, originals = mine
    graph = sar.construct_full_graph(data)
    features = {f"{ntype}/x": ids for ntype, ids in originals.items()}
    sampler = sar.DistNeighborSampler([-1], input_node_features=features, output_node_features=features)
    (block,) = sampler.sample(graph, {ntype: torch.arange(len(ids)).flip(0) for ntype, ids in originals.items()})
    found = {}
    for etype in block.canonical_etypes:
        src, dst = block.edges(etype=etype)
        src, dst = block.srcnodes[etype[0]].data["x"][src], block.dstnodes[etype[2]].data["x"][dst]
        found[etype] = sorted(zip(src.tolist(), dst.tolist(), block.edges[etype].data["orig_id"].tolist(), strict=True))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_neighbourhoods_of_several_partitions(pool, world_size):
    given, originals = regrouped(world_size)
    expected = {}
    for data in typed_parts(PARTS).partitions:
        for (src, dst), fields in data.all_shard_edges:
            for source, destination, kind, number in zip(
                src.tolist(), dst.tolist(), fields[NTYPE].tolist(), fields[ORIG_ID].tolist(), strict=True
            ):
                expected[data.edge_type_names[kind], number] = (source, destination)
    by_rank = pool.run(sample_all, per_rank=list(zip(given, originals, strict=True)))
    found = {}
    for edges in by_rank:
        for etype, rows in edges.items():
            found |= {(etype, number): (source, destination) for source, destination, number in rows}
    original = torch.cat([data.node_features[ORIG_ID] for data in typed_parts(PARTS).partitions]).tolist()
    assert found == {key: (original[src], original[dst]) for key, (src, dst) in expected.items()}


def sample_one_type(partition):
    """Edges drawn from the graph of each edge type, by type, and what samplers say that it is not for."""
    graph, found = sar.construct_full_graph(partition), {}
    for etype in graph.canonical_etypes:
        ids = graph.node_ids(etype[2])
        for seeds in (ids, {etype[2]: torch.arange(len(ids))}):
            (block,) = sar.DistNeighborSampler([-1]).sample(graph[etype], seeds)
            src, dst = block.edges()
            columns = block.srcnodes[etype[0]].data[NID][src], block.dstnodes[etype[2]].data[NID][dst], block.edata[EID]
            edges = sorted(zip(*(column.tolist() for column in columns), strict=True))
            assert found.setdefault(etype, edges) == edges
    refused = catch_and_recover(sar.DistNeighborSampler([2]).sample, graph["follows"], graph.node_ids("item"))
    return found, refused.bases


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_graph_of_one_edge_type(pool, world_size):
    """Its nodes' rows are counted within their types, although it has not all types of the whole graph."""
    partitions = typed_parts(world_size).partitions
    for data, (found, bases) in zip(partitions, pool.run(sample_one_type, per_rank=partitions), strict=True):
        columns = [torch.cat(values) for values in zip(*(s.edges for s in data.all_shard_edges), strict=True)]
        columns += [torch.cat([s.edge_features[name] for s in data.all_shard_edges]) for name in (EID, NTYPE)]
        edges = sorted(zip(*(column.tolist() for column in columns), strict=True))
        for kind, etype in enumerate(data.edge_type_names):
            assert found[etype] == [edge[:3] for edge in edges if edge[3] == kind]
        assert "GraphError" in bases or "PeerError" in bases
