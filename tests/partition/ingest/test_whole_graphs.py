"""A format that holds whole graphs: DGL's graph files."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sar.adapters.dgl.shim import require_dgl
from sar.errors import ConfigError, PartitionError
from sar.partition.ingest.objects import from_object
from sar.partition.ingest.open import open_graph
from tests.partition.ingest.sources import assert_same


def save_graphs(path, *graphs) -> None:
    require_dgl()
    import dgl

    dgl.save_graphs(str(path), list(graphs))


@pytest.mark.parametrize("name", ["graph.dgl", "graph.bin", "graph"])
def test_dgl_homogeneous(tmp_path, name):
    graph = require_dgl().graph((torch.tensor([3, 1, 1, 0]).int(), torch.tensor([0, 1, 2, 3]).int()), num_nodes=6)
    graph.ndata["feat"], graph.edata["weight"] = torch.rand(6, 2), torch.rand(4)
    save_graphs(tmp_path / name, graph)
    assert_same(open_graph(tmp_path / name, tmp_path / "scratch"), from_object(graph))


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
    expected = from_object(graph)
    assert_same(
        found,
        replace(
            expected,
            node_data=expected.node_data | {"user": {"x": np.arange(3)}},
            edge_data=expected.edge_data | {likes: {"x": np.arange(3)}},
        ),
    )
    with pytest.raises(
        ConfigError, match="no type for the feature 'x'; expected TYPE/NAME with a type among item, user"
    ):
        open_graph(tmp_path / "graph.dgl", tmp_path / "scratch", node_features={"x": tmp_path / "x.npy"})
    np.save(tmp_path / "x.npy", np.arange(4))
    with pytest.raises(ConfigError, match="'item' already has the fields feat"):
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
    with pytest.raises(ConfigError, match="describes its own content"):
        open_graph(path, tmp_path / "scratch", num_nodes=2)
    save_graphs(tmp_path / "other.dgl", graph)
    with pytest.raises(ConfigError, match=r"names 2 files of the format 'dgl'; expected one"):
        open_graph(str(tmp_path / "*.dgl"), tmp_path / "scratch")
