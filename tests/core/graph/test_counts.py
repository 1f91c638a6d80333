"""Types, counts, degrees and IDs that a distributed graph reports."""

import pytest
import torch

import sar
from tests.matrix import corner
from tests.parity.harness import build
from tests.parity.scenarios import SCENARIOS

COUNTS = [
    f"{prefix}{what}" for prefix in ("num_", "number_of_") for what in ("nodes", "src_nodes", "dst_nodes", "edges")
]


def counts(partition, mode):
    graph = build(partition, mode)
    return {name: (getattr(graph, name)(), getattr(graph, f"{name}_global")()) for name in COUNTS}


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_counts_are_local_and_global(pool, world_size, scenario, mode):
    parts = SCENARIOS[scenario](world_size)
    for rank, found in enumerate(pool.run(counts, mode, per_rank=parts.partitions)):
        for name in COUNTS:
            local, whole = (
                (parts.edge_counts[rank], len(parts.src))
                if name.endswith("edges")
                else (parts.node_counts[rank], parts.num_nodes)
            )
            assert found[name] == (local, whole), name


def degrees(partition, mode):
    graph = build(partition, mode)
    some = torch.arange(0, graph.num_nodes(), 2)
    chosen = graph.in_degrees(some), graph.out_degrees(some)
    return graph.in_degrees(), graph.out_degrees(), *chosen, graph.in_degrees(etype="_E"), graph.nodes()


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("world_size", [1, 2, corner(4)])
def test_degrees_are_true_with_zeros(pool, world_size, scenario, mode):
    parts = SCENARIOS[scenario](world_size)
    graph = parts.reference()
    into, out = parts.split_nodes(graph.in_degrees()), parts.split_nodes(graph.out_degrees())
    for rank, found in enumerate(pool.run(degrees, mode, per_rank=parts.partitions)):
        expected = (into[rank], out[rank], into[rank][::2], out[rank][::2], into[rank])
        for actual, value in zip(found, (*expected, torch.arange(parts.node_counts[rank])), strict=True):
            assert actual.dtype == torch.int64
            assert torch.equal(actual, value)


def description(partition, mode):
    graph = build(partition, mode)
    view = graph["_N", "_E", "_N"]
    return {
        "ntypes": graph.ntypes,
        "srctypes": graph.srctypes,
        "dsttypes": graph.dsttypes,
        "etypes": graph.etypes,
        "canonical_etypes": graph.canonical_etypes,
        "to_canonical_etype": graph.to_canonical_etype("_E"),
        "is_homogeneous": graph.is_homogeneous,
        "is_block": graph.is_block,
        "device": str(graph.device),
        "idtype": graph.idtype,
        "node_ranges": [tuple(pair) for pair in graph.node_ranges],
        "partition_book": graph.partition_book,
        "view": (view.num_nodes(), view.num_edges(), view.canonical_etypes),
        "same device": graph.to("cpu").num_edges(),
        "another name for it": graph.to("cpu:0") is graph,
        "class": isinstance(graph, sar.GraphShardManager),
        "old name": sar.HeteroGraphShardManager is sar.GraphShardManager,
        "one-shot": isinstance(graph, sar.DistributedBlock),
    }


@pytest.mark.parametrize("mode", [1, 3])
@pytest.mark.parametrize("world_size", [2])
def test_description(pool, mode):
    parts = SCENARIOS["random"](2)
    ends = [parts.node_counts[0], 40]
    for rank, found in enumerate(pool.run(description, mode, per_rank=parts.partitions)):
        assert found == {
            "ntypes": ["_N"],
            "srctypes": ["_N"],
            "dsttypes": ["_N"],
            "etypes": ["_E"],
            "canonical_etypes": [("_N", "_E", "_N")],
            "to_canonical_etype": ("_N", "_E", "_N"),
            "is_homogeneous": True,
            "is_block": False,
            "device": "cpu",
            "idtype": torch.int64,
            "node_ranges": [(0, ends[0]), (ends[0], 40)],
            "partition_book": None,
            "view": (parts.node_counts[rank], parts.edge_counts[rank], [("_N", "_E", "_N")]),
            "same device": parts.edge_counts[rank],
            "another name for it": True,
            "class": True,
            "old name": True,
            "one-shot": mode == 3,
        }
