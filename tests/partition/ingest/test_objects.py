"""Graphs of PyTorch Geometric in memory."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

import sar
from sar.adapters.dgl.shim import require_dgl
from sar.errors import ConfigError, PartitionError

dgl = require_dgl()


def hetero_data(nodes: dict[str, Any], edges: dict[Any, Any]) -> HeteroData:
    data = HeteroData()
    for key, of_type in [*nodes.items(), *edges.items()]:
        data[key].update(of_type)
    return data


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def typed_fields() -> tuple[dict[str, Any], dict[Any, Any]]:
    random = torch.Generator().manual_seed(1)
    ends = [torch.randint(0, 20, (90,), generator=random), torch.randint(0, 8, (90,), generator=random)]
    index = torch.stack(ends)
    nodes = {"paper": {"x": numbers(20, 3), "y": torch.arange(20)}, "author": {"num_nodes": 8}}
    edges = {
        ("paper", "by", "author"): {"edge_index": index, "edge_attr": numbers(90, 2), "weight": numbers(90)},
        ("author", "rev_by", "paper"): {"edge_index": index.flip(0)},
    }
    return nodes, edges


def test_a_graph_of_one_type(tmp_path: Path) -> None:
    index = torch.randint(0, 30, (2, 140), generator=torch.Generator().manual_seed(0))
    mask = numbers(30, seed=2) < 0.5
    fields = {"x": numbers(30, 4), "y": torch.arange(30), "train_mask": mask, "edge_weight": numbers(140)}
    data = Data(edge_index=index, **fields, title="left out", scale=numbers(7))
    with pytest.warns(UserWarning, match="scale, title: left out"):
        mapping = sar.partition_graph(data, "graph", 3, tmp_path / "parts", return_mapping=True)
    nodes, edges = mapping
    for part in range(3):
        json_file = str(tmp_path / "parts" / "graph.json")
        local, found, of_edges, book, *_ = dgl.distributed.load_partition(json_file, part)
        own, into = nodes[book.partid2nids(part)], edges[book.partid2eids(part)]
        assert found.keys() == {f"_N/{name}" for name in ("x", "y", "train_mask")}
        for name in ("x", "y", "train_mask"):
            assert torch.equal(found[f"_N/{name}"], fields[name][own].to(found[f"_N/{name}"].dtype))
        assert torch.equal(of_edges["_N:_E:_N/edge_weight"], fields["edge_weight"][into])
        src, dst = (nodes[local.ndata["_ID"]][end] for end in local.edges(order="eid"))
        assert torch.equal(torch.stack([src, dst]), index[:, edges[local.edata["_ID"]]])


def test_a_graph_of_several_types(tmp_path: Path) -> None:
    nodes, edges = typed_fields()
    graph = hetero_data(nodes, edges)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        orig_nodes, orig_edges = sar.partition_graph(graph, "graph", 2, tmp_path / "parts", return_mapping=True)
    assert list(orig_nodes) == ["paper", "author"]
    assert {etype: len(ids) for etype, ids in orig_edges.items()} == dict.fromkeys(edges, 90)
    seen = 0
    for part in range(2):
        json_file = str(tmp_path / "parts" / "graph.json")
        local, of_nodes, of_edges, book, *_ = dgl.distributed.load_partition(json_file, part)
        own = orig_nodes["paper"][book.partid2nids(part, "paper")]
        assert torch.equal(of_nodes["paper/x"], nodes["paper"]["x"][own])
        assert torch.equal(of_nodes["paper/y"], own)
        _, ids = book.map_to_per_ntype(local.ndata["_ID"])
        kinds, edge_ids = book.map_to_per_etype(local.edata["_ID"])
        ends = torch.stack([ids[end] for end in local.edges(order="eid")])
        for kind, (source, relation, destination) in enumerate(edges):
            etype = source, relation, destination
            into = orig_edges[etype][book.partid2eids(part, etype)]
            for name in edges[etype].keys() - {"edge_index"}:
                assert torch.equal(of_edges[f"{':'.join(etype)}/{name}"], edges[etype][name][into])
            src, dst = ends[:, kinds == kind]
            found = torch.stack([orig_nodes[source][src], orig_nodes[destination][dst]])
            assert torch.equal(found, edges[etype]["edge_index"][:, orig_edges[etype][edge_ids[kinds == kind]]])
            seen += len(into)
    assert seen == 180


INDEX = torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"x": numbers(3), "edge_index": torch.tensor([[0, 1], [1, 3]])}, "_N:_E:_N, row 1 .*node 3; expected 0"),
        ({"x": numbers(3), "edge_index": INDEX.float()}, r"shape \(2, 2\) of float32; expected \(2, E\)"),
        ({"x": numbers(3), "edge_index": torch.zeros(3, 2).long()}, r"shape \(3, 2\)"),
        ({"x": numbers(3)}, r"have \['x'\]; expected edge_index"),
        ({"x": numbers(3), "adj_t": INDEX}, "_N:_E:_N/adj_t is a Tensor; expected a sparse matrix"),
        ({"x": numbers(3, 3).to_sparse(), "edge_index": INDEX}, "'_N/x' is of layout torch.sparse_coo"),
        ({"x": ["a", "b", "c"], "edge_index": INDEX, "num_nodes": 3}, "'_N/x' cannot be written: its type is <U1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, PartitionError), match=words):
        sar.partition_graph(Data(**fields), "graph", 2, tmp_path / "parts")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:Unable to accurately infer")  # PyTorch Geometric says so too
def test_types_without_nodes_are_named(tmp_path: Path) -> None:
    edges = {("a", "r", "b"): {"edge_index": INDEX}}
    with pytest.raises(ConfigError, match=r"join nodes of types \['b'\]"):
        sar.partition_graph(hetero_data({"a": {"x": numbers(3)}}, edges), "graph", 1, tmp_path / "parts")
    nodes = {"a": {"x": numbers(3)}, "b": {"label": np.zeros(3)}}
    with pytest.raises(ConfigError, match="nodes of type 'b' is not known"):
        sar.partition_graph(hetero_data(nodes, edges), "graph", 1, tmp_path / "parts")
