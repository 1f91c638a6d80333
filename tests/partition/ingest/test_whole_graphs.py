"""A format that holds whole graphs: DGL's graph files."""

import numpy as np
import pytest
import torch

from sar.adapters.dgl.shim import require_dgl
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.ingest.open import open_graph
from tests.partition.ingest.sources import assert_same


def save_graphs(path, *graphs) -> None:
    require_dgl()
    import dgl

    dgl.save_graphs(str(path), list(graphs))


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["graph.dgl", "graph.bin", "graph"])
def test_dgl_homogeneous(tmp_path, idtype, name):
    dgl = require_dgl()
    src, dst = torch.tensor([3, 1, 1, 0], dtype=idtype), torch.tensor([0, 1, 2, 3], dtype=idtype)
    graph = dgl.graph((src, dst), num_nodes=6)
    graph.ndata["feat"] = torch.rand(6, 2)
    graph.edata["weight"] = torch.rand(4)
    save_graphs(tmp_path / name, graph)
    expected = GraphSource(
        {"_N": 6},
        {("_N", "_E", "_N"): ArrayEdges(src.numpy(), dst.numpy())},
        {"_N": {"feat": graph.ndata["feat"].numpy()}},
        {("_N", "_E", "_N"): {"weight": graph.edata["weight"].numpy()}},
    )
    assert_same(open_graph(tmp_path / name, tmp_path / "scratch"), expected)


def test_dgl_heterogeneous_and_more_features(tmp_path):
    dgl = require_dgl()
    likes, follows = ("user", "likes", "item"), ("user", "follows", "user")
    graph = dgl.heterograph({likes: ([1, 0, 1], [0, 2, 0]), follows: ([0, 1], [1, 1])}, {"user": 3, "item": 4})
    graph.nodes["item"].data["feat"] = torch.rand(4, 2)
    save_graphs(tmp_path / "graph.dgl", graph)
    np.save(tmp_path / "x.npy", np.arange(3))
    found = open_graph(
        tmp_path / "graph.dgl",
        tmp_path / "scratch",
        node_features={"user/x": tmp_path / "x.npy"},
        edge_features={"user:likes:item/x": tmp_path / "x.npy"},
    )
    edges = {
        etype: ArrayEdges(*(end.numpy() for end in graph.edges(order="eid", etype=etype)))
        for etype in graph.canonical_etypes
    }
    feat = graph.nodes["item"].data["feat"].numpy()
    nodes = {"item": {"feat": feat}, "user": {"x": np.arange(3)}}
    assert_same(found, GraphSource({"item": 4, "user": 3}, edges, nodes, {likes: {"x": np.arange(3)}}))
    with pytest.raises(
        ConfigError, match="no type for the feature 'x'; expected TYPE/NAME with a type among item, user"
    ):
        open_graph(tmp_path / "graph.dgl", tmp_path / "scratch", node_features={"x": tmp_path / "x.npy"})
    np.save(tmp_path / "x.npy", np.arange(4))
    with pytest.raises(ConfigError, match="'item' has the fields feat already"):
        open_graph(tmp_path / "graph.dgl", tmp_path / "scratch", node_features={"item/feat": tmp_path / "x.npy"})


def test_bad_dgl_files(tmp_path):
    dgl = require_dgl()
    graph = dgl.graph(([0], [1]))
    path = tmp_path / "graph.dgl"
    save_graphs(path, graph, graph)
    with pytest.raises(PartitionError, match="holds 2 graphs; expected one"):
        open_graph(path, tmp_path / "scratch")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(PartitionError, match=r"graph.dgl is truncated"):
        open_graph(path, tmp_path / "scratch")
    graph.ndata["x"] = torch.ones(2, dtype=torch.bfloat16)
    save_graphs(path, graph)
    with pytest.raises(PartitionError, match=r"the field 'x' in .* is bfloat16"):
        open_graph(path, tmp_path / "scratch")
    graph.ndata["x"] = torch.tensor([0.0, torch.nan])
    save_graphs(path, graph)
    with pytest.raises(PartitionError, match=r"graph.dgl, field '_N/x', row 1 \(from 0\), has NaN"):
        open_graph(path, tmp_path / "scratch").node_data["_N"]["x"][0:2]
    with pytest.raises(ConfigError, match="says itself what is in it"):
        open_graph(path, tmp_path / "scratch", num_nodes=2)
    save_graphs(tmp_path / "other.dgl", graph)
    with pytest.raises(ConfigError, match=r"names 2 files of the format 'dgl'; expected one"):
        open_graph(str(tmp_path / "*.dgl"), tmp_path / "scratch")
