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
from sar.errors import ConfigError, PartitionError
from sar.partition.graph_source import ArrayEdges, GraphSource
from sar.partition.ingest.objects import from_object
from tests.partition.ingest.sources import ONE, assert_same


def hetero_data(nodes: dict[str, Any], edges: dict[Any, Any]) -> HeteroData:
    data = HeteroData()
    for key, of_type in [*nodes.items(), *edges.items()]:
        data[key].update(of_type)
    return data


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def as_numpy(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: values.numpy() for name, values in fields.items()}


def test_a_graph_of_one_type() -> None:
    index = torch.randint(0, 30, (2, 140), generator=torch.Generator().manual_seed(0))
    fields = {"x": numbers(30, 4), "y": torch.arange(30), "train_mask": numbers(30, seed=2) < 0.5}
    weight = {"edge_weight": numbers(140)}
    data = Data(edge_index=index, **fields, **weight, title="left out", scale=numbers(7))
    with pytest.warns(UserWarning, match="scale, title: skipped"):
        found = from_object(data)
    edges = {ONE: ArrayEdges(*index.numpy())}
    assert_same(found, GraphSource({"_N": 30}, edges, {"_N": as_numpy(fields)}, {ONE: as_numpy(weight)}))


@pytest.mark.parametrize("name", ["y", "train_mask"])
def test_labels_and_masks_have_a_row_for_each_node(name: str) -> None:
    data = Data(edge_index=torch.zeros(2, 5, dtype=torch.int64), x=numbers(30, 4), **{name: torch.ones(27)})
    with pytest.raises(ConfigError, match=f"'{name}' of type '_N' has 27 rows; expected 30, one for each node"):
        from_object(data)


def test_rows_are_counted_by_type_and_a_label_of_the_graph_is_skipped() -> None:
    ends, graph = torch.zeros(2, 5, dtype=torch.int64), HeteroData()
    for ntype, rows in (("paper", 20), ("author", 7)):
        graph[ntype].x, graph[ntype].y = numbers(20, 3), torch.arange(rows)
    graph["paper", "by", "author"].edge_index = ends
    with pytest.raises(ConfigError, match="'y' of type 'author' has 7 rows; expected 20, one for each node"):
        from_object(graph)
    for label in (torch.tensor(3), 3, torch.ones(1, 4)):
        with pytest.warns(UserWarning, match="y: skipped"):
            assert "y" not in from_object(Data(edge_index=ends, x=numbers(30, 4), y=label)).node_data["_N"]


def test_a_graph_of_several_types() -> None:
    random = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randint(0, count, (90,), generator=random) for count in (20, 8)])
    papers, attributes = {"x": numbers(20, 3), "y": torch.arange(20)}, {"edge_attr": numbers(90, 2)}
    by, of = ("paper", "by", "author"), ("author", "rev_by", "paper")
    nodes = {"paper": papers, "author": {"num_nodes": 8}}
    edges = {by: {"edge_index": index, **attributes}, of: {"edge_index": index.flip(0)}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = from_object(hetero_data(nodes, edges))
    ends = {by: ArrayEdges(*index.numpy()), of: ArrayEdges(*index.flip(0).numpy())}
    expected = GraphSource({"paper": 20, "author": 8}, ends, {"paper": as_numpy(papers)}, {by: as_numpy(attributes)})
    assert_same(found, expected)


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
