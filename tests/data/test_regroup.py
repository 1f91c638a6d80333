"""Partitions put together and divided: every node and edge at its worker, with its own features, in visible order."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID, PartitionData
from sar.core.build import check_partition
from sar.data.part_files import DST, SRC, LocalGraph
from sar.data.regroup import deal_parts, deal_workers, equal_runs, order_edges, regroup
from sar.errors import PartitionError
from tests.graphs import partition_in_memory, random_graph
from tests.hetero_graphs import partition_hetero

COUNTS = {"a": 11, "b": 6, "c": 1}
RELATIONS = {("a", "to", "b"): 25, ("b", "of", "a"): 18, ("a", "near", "a"): 30, ("c", "in", "b"): 3}


def homogeneous(parts: int, seed: int) -> list[PartitionData]:
    graph = random_graph(seed, 23, 80, isolated=2, no_in_edges=3)
    fields = {"w": torch.arange(80.0)[:, None] * 2}
    nodes = {"x": torch.arange(23) * 3}
    generator = torch.Generator().manual_seed(seed)
    assignment = torch.randint(parts, (23,), generator=generator)
    return partition_in_memory(graph, assignment, parts, fields, nodes).partitions


def heterogeneous(parts: int, seed: int) -> list[PartitionData]:
    import dgl

    generator = torch.Generator().manual_seed(seed)
    edges = {
        etype: tuple(torch.randint(COUNTS[etype[end]], (count,), generator=generator) for end in (0, 2))
        for etype, count in RELATIONS.items()
    }
    graph = dgl.heterograph(edges, num_nodes_dict=COUNTS)
    for ntype, count in COUNTS.items():
        graph.nodes[ntype].data["x"] = torch.arange(count) * 3
    for etype, count in RELATIONS.items():
        graph.edges[etype].data["w"] = torch.arange(count)[:, None] * 2.0
    assignment = {ntype: torch.randint(parts, (count,), generator=generator) for ntype, count in COUNTS.items()}
    return partition_hetero(graph, assignment, parts).partitions


def nodes_of(data: PartitionData) -> dict[int, Any]:
    """What is known of each node, by global ID."""
    features = data.node_features
    kinds = features.get(NTYPE, torch.zeros(len(features[NID]), dtype=torch.int64)).tolist()
    places = dict.fromkeys(range(len(data.node_type_names)), 0)
    found = {}
    for row, (node, kind) in enumerate(zip(features[NID].tolist(), kinds, strict=True)):
        x = features[f"{data.node_type_names[kind]}/x"][places[kind]]
        places[kind] += 1
        found[node] = (kind, int(features[ORIG_ID][row]), int(x))
    return found


def edges_of(data: PartitionData, worker: int) -> dict[int, Any]:
    """What is known of each edge, by global ID; their order is checked on the way."""
    several, found = len(data.edge_type_names) > 1, {}
    for (start, end), (ends, features) in zip(data.node_ranges, data.all_shard_edges, strict=True):
        src, dst, ids = ends[0].tolist(), ends[1].tolist(), features[EID].tolist()
        assert all(start <= node < end for node in src)
        assert list(zip(dst, ids, strict=True)) == sorted(zip(dst, ids, strict=True))
        kinds = features[ETYPE].tolist() if several else [0] * len(src)
        places = dict.fromkeys(range(len(data.edge_type_names)), 0)
        for row, edge in enumerate(ids):
            kind = kinds[row]
            w = features[f"{':'.join(data.edge_type_names[kind])}/w" if several else "w"][places[kind]]
            places[kind] += 1
            found[edge] = (src[row], dst[row], kind, int(features[ORIG_ID][row]), float(w))
    return found


@pytest.mark.parametrize("make", [homogeneous, heterogeneous])
@settings(max_examples=12, deadline=None)
@given(num_parts=st.integers(1, 6), seed=st.integers(0, 50), data=st.data())
def test_every_node_and_edge_is_with_its_worker(make: Any, num_parts: int, seed: int, data: st.DataObject) -> None:
    parts = make(num_parts, seed)
    total = parts[0].node_ranges[-1][1]
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=6)))
    ranges = list(pairwise([0, *cuts, total]))
    nodes: dict[int, Any] = {}
    edges: dict[int, Any] = {}
    for part, one in enumerate(parts):
        nodes |= nodes_of(one)
        edges |= edges_of(one, part)
    for worker, (start, end) in enumerate(ranges):
        fresh = make(num_parts, seed)
        owners = [p for p, (low, high) in enumerate(parts[0].node_ranges) if low < end and start < high] or [0]
        mine = regroup({p: fresh[p] for p in owners}, ranges, worker)
        check_partition(mine, worker, len(ranges))
        assert mine.node_features[NID].tolist() == list(range(start, end))
        assert nodes_of(mine) == {node: nodes[node] for node in range(start, end)}
        assert edges_of(mine, worker) == {edge: row for edge, row in edges.items() if start <= row[1] < end}


def test_a_feature_that_a_partition_lacks_is_refused() -> None:
    parts = homogeneous(2, 0)
    del parts[1].node_features["_N/x"]
    with pytest.raises(PartitionError, match=r"node feature '_N/x' is missing in a partition; expected torch.int64"):
        regroup(dict(enumerate(parts)), [(0, 23)], 0)
    parts = homogeneous(2, 0)
    shard = next(shard for shard in parts[1].all_shard_edges if len(shard.edges[0]))
    shard.edge_features["w"] = shard.edge_features["w"].double()
    with pytest.raises(PartitionError, match=r"edge feature 'w' is torch.float64 .*expected torch.float32"):
        regroup(dict(enumerate(parts)), [(0, 23)], 0)


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), data=st.data())
def test_shares_are_consecutive_and_none_is_empty(sizes: list[int], data: st.DataObject) -> None:
    fewer, more = data.draw(st.integers(1, len(sizes))), data.draw(st.integers(len(sizes), 20))
    for runs, owners, owned in (
        (deal_parts(sizes, fewer), fewer, len(sizes)),
        (deal_workers(sizes, more), len(sizes), more),
    ):
        assert [one for run in runs for one in run] == list(range(owned))
        assert len(runs) == owners
        assert all(len(run) for run in runs)


def test_shares_are_about_equal() -> None:
    assert deal_parts([10] * 8, 3) == [range(3), range(3, 5), range(5, 8)]
    assert deal_parts([70, 10, 10, 10], 2) == [range(1), range(1, 4)]
    assert [len(run) for run in deal_workers([10, 30, 20], 6)] == [1, 3, 2]
    costs = torch.tensor([5, 1, 1, 1, 1, 1])
    assert equal_runs(costs, 2) == [(0, 1), (1, 6)]
    assert list(accumulate(end - begin for begin, end in equal_runs(torch.zeros(4), 3)))[-1] == 4


@pytest.mark.parametrize("by_id", [True, False])
@pytest.mark.parametrize("own_first", [True, False])
def test_edges_are_put_into_visible_order(own_first: bool, by_id: bool) -> None:
    random = torch.Generator().manual_seed(0)
    node_id = torch.randperm(20, generator=random)
    is_inner = (node_id >= 6) & (node_id < 13)
    src, dst = torch.randint(20, (2, 90), generator=random)
    if own_first:
        src, dst = (end[is_inner[dst].sort(descending=True, stable=True).indices] for end in (src, dst))
    ids = torch.randperm(90, generator=random).sort().values if by_id else torch.randperm(90, generator=random)
    edges = {SRC: src.int(), DST: dst, EID: ids + 7}
    ranges = [(0, 6), (6, 13), (13, 13), (13, 20)]
    known = (node_id[src], node_id[dst], edges[EID])
    rows = list(zip(*(column.tolist() for column in known), strict=True))
    part_of = [0] * 6 + [1] * 7 + [3] * 7
    expected = sorted((row for row in rows if 6 <= row[1] < 13), key=lambda row: (part_of[row[0]], *row[1:]))
    found = order_edges(
        LocalGraph(node_id.numpy(), is_inner.numpy(), {name: ids.numpy() for name, ids in edges.items()}), ranges, 1
    )
    columns = (found.src, found.dst, found.edge_id)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert found.bounds.tolist() == [sum(part_of[row[0]] < p for row in expected) for p in range(5)]
