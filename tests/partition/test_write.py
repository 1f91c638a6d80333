"""Partition directories that `divide` makes, read back with sar."""

from pathlib import Path

import numpy as np
import pytest
import torch

import sar
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.in_memory import divide


def small_types() -> GraphSource:
    """Types with fewer nodes and relations with fewer edges than parts, or none at all."""
    rng = np.random.default_rng(0)
    counts = {"paper": 60, "author": 25, "prize": 1, "editor": 0}
    relations = {
        ("author", "writes", "paper"): 150,
        ("paper", "cites", "paper"): 200,
        ("paper", "wins", "prize"): 2,
        ("prize", "honours", "author"): 1,
        ("editor", "accepts", "paper"): 0,
    }
    edges = {
        e: ArrayEdges(rng.integers(0, max(1, counts[e[0]]), n), rng.integers(0, counts[e[2]], n))
        for e, n in relations.items()
    }
    fields = {"paper": {"label": np.arange(60)}, "author": {"feat": rng.random((25, 3))}}
    return GraphSource(counts, edges, fields, {})


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_heterogeneous_graph_is_read_back_whole(tmp_path: Path, num_parts: int) -> None:
    graph = small_types()
    report = divide(graph, tmp_path, "typed", num_parts)
    loaded = [sar.load_dgl_partition_data(report.json_file, part, "cpu") for part in range(num_parts)]
    assert loaded[0].node_type_names == list(graph.num_nodes)
    assert loaded[0].edge_type_names == list(graph.edges)
    assert [len(data.node_features["orig_id"]) for data in loaded] == report.nodes

    kinds, original = (torch.cat([data.node_features[key] for data in loaded]) for key in ("_TYPE", "orig_id"))
    for kind, ntype in enumerate(loaded[0].node_type_names):
        assert sorted(original[kinds == kind].tolist()) == list(range(graph.num_nodes[ntype]))
    for ntype, key in (("paper", "label"), ("author", "feat")):
        rows = torch.cat([data.node_features[f"{ntype}/{key}"] for data in loaded])
        ids = original[kinds == loaded[0].node_type_names.index(ntype)]
        assert torch.equal(rows, torch.from_numpy(graph.node_data[ntype][key])[ids])

    shards = [
        (part, peer, shard) for part in range(num_parts) for peer, shard in enumerate(loaded[part].all_shard_edges)
    ]
    src, dst = (torch.cat([original[shard.edges[end]] for _, _, shard in shards]).numpy() for end in (0, 1))
    kind, ids = (
        torch.cat([shard.edge_features[key] for _, _, shard in shards]).numpy() for key in ("_TYPE", "orig_id")
    )
    for number, etype in enumerate(loaded[0].edge_type_names):
        mine = kind == number
        assert sorted(ids[mine]) == list(range(graph.edges[etype].num_edges))
        sources, destinations = graph.edges[etype].read(0, graph.edges[etype].num_edges)
        assert np.array_equal(src[mine], sources[ids[mine]])
        assert np.array_equal(dst[mine], destinations[ids[mine]])
    cut = sum(len(shard.edges[0]) for part, peer, shard in shards if part != peer)
    assert report.edge_cut == cut / sum(report.edges)
