"""Graphs before partitioning: names of dgl.data and OGB, and what training needs."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sar.adapters.dgl.shim import require_dgl
from sar.cli.demo import community_graph
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.in_memory import training_graph
from sar.partition.ingest.datasets import load_dataset


def tiny(**node_data: Any) -> GraphSource:
    return GraphSource.homogeneous(np.array([0, 1, 1, 2]), np.array([1, 0, 1, 3]), 4, node_data)


def test_reverse_edges_and_self_loops() -> None:
    graph = training_graph(tiny(label=np.zeros(4, np.int64)))
    edges = list(zip(*graph.ends(), strict=True))
    assert edges == [(0, 1), (1, 0), (2, 3), (3, 2), (0, 0), (1, 1), (2, 2), (3, 3)]


def test_a_split_covers_the_labelled_nodes_once() -> None:
    graph = community_graph(1000, 4000)
    graph.node_data["_N"]["label"][:100] = -1
    split = training_graph(graph, seed=1).node_data["_N"]
    masks = [split[key] for key in ("train_mask", "val_mask", "test_mask")]
    assert [int(mask.sum()) for mask in masks] == [540, 180, 180]
    assert np.array_equal(sum(mask.astype(int) for mask in masks), (split["label"] >= 0).astype(int))
    own = training_graph(GraphSource.homogeneous(*graph.ends(), 1000, split), seed=2).node_data["_N"]
    assert all(np.array_equal(own[key], column) for key, column in split.items())
    with pytest.raises(ConfigError, match="has train_mask already"):
        training_graph(tiny(label=np.zeros(4, np.int64), train_mask=np.ones(4, np.bool_)))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'nope': .* citeseer"):
        load_dataset("nope")


def test_a_graph_of_dgl_data_is_loaded() -> None:
    graph = load_dataset("karate")  # Zachary's karate club, which comes with NetworkX
    assert (graph.total_nodes, graph.total_edges, int(graph.node_data["_N"]["label"].sum())) == (34, 156, 17)


def test_dgl_data_gets_the_folder_and_gives_all_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    require_dgl()
    import dgl
    import dgl.data

    asked = {}

    def dataset(**options: Any) -> list[Any]:
        asked.update(options)
        graph = dgl.graph(([0, 1], [1, 2]), num_nodes=3)
        graph.ndata["feat"] = torch.ones(3, 2)
        graph.ndata["label"] = torch.tensor([0, 1, 0])
        graph.ndata["train_mask"] = torch.tensor([1, 0, 0], dtype=torch.uint8)
        return [graph]

    monkeypatch.setattr(dgl.data, "PubmedGraphDataset", dataset)
    graph = load_dataset("Pubmed", "somewhere")
    assert asked == {"raw_dir": "somewhere", "verbose": False}
    assert graph.node_data["_N"]["train_mask"].tolist() == [True, False, False]
    assert graph.node_data["_N"]["feat"].shape == (3, 2)
    assert graph.ends()[0].tolist() == [0, 1]


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_dgl()
    import dgl.data

    def dataset(**_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(dgl.data, "RedditDataset", dataset)
    with pytest.raises(ConfigError, match=r"no route to host. Without a network"):
        load_dataset("reddit")


class FakeOgb:
    """Behaves as `ogb.nodeproppred.NodePropPredDataset` does, pickled cache included."""

    graph: dict[str, Any]
    labels: Any

    def __init__(self, name: str, root: str):
        self.cache = Path(root) / name.replace("-", "_") / "processed" / "data_processed"
        self.cache.parent.mkdir(parents=True)
        self.cache.write_bytes(b"pickle")

    def __getitem__(self, index: int) -> tuple[dict[str, Any], Any]:
        return self.graph, self.labels

    def get_idx_split(self) -> dict[str, Any]:
        return {"train": np.array([0, 3]), "valid": np.array([1]), "test": np.array([2])}


@pytest.fixture
def ogb(monkeypatch: pytest.MonkeyPatch) -> type[FakeOgb]:
    edges = np.array([[0, 1, 2], [1, 2, 3]])
    graph = {"edge_index": edges, "edge_feat": None, "node_feat": np.ones((4, 2), np.float32), "num_nodes": 4}
    dataset = type("Dataset", (FakeOgb,), {"graph": graph, "labels": np.array([[0.0], [2.0], [np.nan], [1.0]])})
    package, module = ModuleType("ogb"), ModuleType("ogb.nodeproppred")
    module.NodePropPredDataset = dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ogb", package)
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    return dataset


def test_ogb_graphs_are_converted_and_leave_no_pickle(ogb: type[FakeOgb], tmp_path: Path) -> None:
    graph = load_dataset("ogbn-arxiv", tmp_path)
    assert [ids.tolist() for ids in graph.ends()] == [[0, 1, 2], [1, 2, 3]]
    assert graph.total_nodes == 4
    assert graph.node_data["_N"]["label"].tolist() == [0, 2, -1, 1]
    assert graph.node_data["_N"]["train_mask"].tolist() == [True, False, False, True]
    assert graph.node_data["_N"]["val_mask"].tolist() == [False, True, False, False]
    assert list(tmp_path.rglob("data_processed")) == []


def test_a_pickled_ogb_cache_is_refused(ogb: type[FakeOgb], tmp_path: Path) -> None:
    ogb("ogbn-arxiv", str(tmp_path))
    with pytest.raises(ConfigError, match=r"data_processed' is a pickle, which is not read; delete it"):
        load_dataset("ogbn-arxiv", tmp_path)


def test_ogb_graphs_of_other_kinds_are_refused(ogb: type[FakeOgb], tmp_path: Path) -> None:
    ogb.labels = np.zeros((4, 112))
    with pytest.raises(ConfigError, match="112 labels each"):
        load_dataset("ogbn-proteins", tmp_path)
    del ogb.graph["edge_index"]
    with pytest.raises(ConfigError, match="heterogeneous"):
        load_dataset("ogbn-mag", tmp_path)


def test_a_missing_ogb_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ogb", None)
    with pytest.raises(ConfigError, match="needs the package ogb"):
        load_dataset("ogbn-arxiv")
