"""Graphs before partitioning: `.npz` files, and names of dgl.data and OGB."""

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
from sar.partition.ingest.masks import with_split
from sar.partition.ingest.open import open_graph
from sar.partition.npz_files import read_npz, write_npz
from tests.graphs import DATA
from tests.partition.ingest.sources import assert_same


def tiny(**node_data: Any) -> GraphSource:
    return GraphSource.homogeneous(np.array([0, 1, 1, 2]), np.array([1, 0, 1, 3]), 4, node_data)


def test_npz_comes_back_as_written(tmp_path: Path) -> None:
    graph = with_split(community_graph(200, 1000, num_classes=3))
    write_npz(graph, tmp_path / "graph.npz")
    assert_same(read_npz(tmp_path / "graph.npz"), graph)


def test_sparse_features_are_read_as_dense_ones(tmp_path: Path) -> None:
    dense = np.array([[0, 2, 0], [0, 0, 0], [1, 0, 3], [0, 0, 4]], dtype=np.float32)
    rows, columns = np.nonzero(dense)
    np.savez(
        tmp_path / "graph.npz",
        src=np.array([0], np.int32),
        dst=np.array([1], np.int32),
        num_nodes=np.int64(4),
        feat_data=dense[rows, columns],
        feat_indices=columns.astype(np.int32),
        feat_indptr=np.searchsorted(rows, np.arange(5)),
        feat_shape=np.array([4, 3]),
    )
    graph = read_npz(tmp_path / "graph.npz")
    assert np.array_equal(graph.node_data["_N"]["feat"], dense)
    assert graph.ends()[0].dtype == np.int64


def test_one_of_several_splits_is_taken(tmp_path: Path) -> None:
    masks = np.eye(3, 4, dtype=bool)
    np.savez(tmp_path / "graph.npz", src=[0], dst=[1], num_nodes=4, label=[0, 1, 0, 1], train_mask=masks)
    graph = read_npz(tmp_path / "graph.npz", split=2)
    assert graph.node_data["_N"]["train_mask"].tolist() == [False, False, True, False]
    assert not graph.notes
    assert open_graph(tmp_path / "graph.npz", tmp_path).notes == (
        "the first of 3 splits was taken; --mask-column chooses another.",
    )
    with pytest.raises(ConfigError, match=r"split 3 .* splits 0 to 2"):
        read_npz(tmp_path / "graph.npz", split=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dst": None}, r"not \['dst'\]"),
        ({"dst": [1]}, r"shapes \(2,\) and \(1,\)"),
        ({"dst": [1, 3]}, r"edge 1 .*the destination is node 3; expected 0 to 2"),
        ({"src": [0, -1]}, r"edge 1 .*the source is node -1; expected 0 to 2"),
        ({"src": [0, 0.5]}, "src or dst has numbers that are not whole"),
        ({"feat": np.zeros((2, 5))}, r"'feat' has shape \(2, 5\); expected \(3, F\)"),
        ({"label": np.zeros((3, 2))}, r"'label' has shape \(3, 2\); expected \(3,\)"),
        ({"train_mask": np.array([0, 2, 1])}, "'train_mask' has other values than True and False"),
        ({"label": np.array([0, np.nan, 1])}, "labels are NaN"),
        ({"feat_data": np.ones(1)}, "sparse features lack"),
        ({"label": np.array([{}, 1, 2], dtype=object)}, "cannot be read"),
    ],
)
def test_bad_npz_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    arrays = {"src": [0, 1], "dst": [1, 2], "num_nodes": 3} | change
    np.savez(tmp_path / "graph.npz", **{key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(ConfigError, match=message):
        read_npz(tmp_path / "graph.npz")


TYPED = {
    "num_nodes/paper": 3,
    "num_nodes/author": 2,
    "edges/author:writes:paper/src": np.array([0, 1, 1], np.int32),
    "edges/author:writes:paper/dst": np.array([0, 0, 2], np.int32),
    "label/paper": [0, 1, -1],
    "train_idx/paper": [1],
    "train_idx_40/paper": [0, 1],
    "test_idx/paper": [0],
    "feat_data/author": np.array([5.0], np.float32),
    "feat_indices/author": np.array([2], np.int32),
    "feat_indptr/author": [0, 0, 1],
    "feat_shape/author": [2, 3],
    "target": "paper",
}
"""A small heterogeneous graph as in its `.npz` file."""


def test_a_heterogeneous_npz_file_is_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "typed.npz", **TYPED)
    graph = load_dataset("typed", tmp_path).with_reverse_edges()
    assert isinstance(graph, GraphSource)
    assert graph.num_nodes == {"paper": 3, "author": 2}
    assert {etype: [ids.tolist() for ids in next(ends.chunks())] for etype, ends in graph.edges.items()} == {
        ("author", "writes", "paper"): [[0, 1, 1], [0, 0, 2]],
        ("paper", "writes reversed", "author"): [[0, 0, 2], [0, 1, 1]],
    }
    assert {
        ntype: {key: value.tolist() for key, value in fields.items()} for ntype, fields in graph.node_data.items()
    } == {
        "paper": {"label": [0, 1, -1], "train_mask": [False, True, False], "test_mask": [True, False, False]},
        "author": {"feat": [[0, 0, 0], [0, 0, 5]]},
    }
    with pytest.raises(ConfigError, match=r"there is a relation .*writes reversed.* already"):
        graph.with_reverse_edges()
    assert list(graph.without(["author:writes:paper"]).edges) == [("paper", "writes reversed", "author")]
    with pytest.raises(ConfigError, match=r"no edge types \['author:reads:paper'\]"):
        graph.without(["author:reads:paper"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes/author": None}, r"'author:writes:paper' is not NTYPE:RELATION:NTYPE of the types \['paper'\]"),
        ({"edges/writes/src": [0]}, "'writes' is not NTYPE:RELATION:NTYPE"),
        ({"edges/author:writes:paper/dst": None}, "edges/author:writes:paper/dst is missing"),
        ({"edges/author:writes:paper/src": [0, 1, 2]}, "edge 2 .*the source is node 2; expected 0 to 1"),
        ({"label/paper": [0, 1]}, r"'label' has shape \(2,\); expected \(3,\)"),
        ({"train_idx/paper": [0, 3]}, "train_idx/paper has others than IDs of the 3 nodes"),
        ({"num_nodes/a/b": 1}, r"\['a/b'\] have a slash"),
        ({"num_nodes/author": None, "num_nodes/paper": None}, "expected num_nodes/NTYPE"),
    ],
)
def test_bad_heterogeneous_npz_files_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "typed.npz", **{key: value for key, value in (TYPED | change).items() if value is not None})
    with pytest.raises(ConfigError, match=message):
        load_dataset("typed", tmp_path)


def test_missing_and_truncated_npz_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        read_npz(tmp_path / "graph.npz")
    write_npz(community_graph(200, 1000), tmp_path / "graph.npz")
    whole = (tmp_path / "graph.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.arange(3))
    for damaged in (whole[: len(whole) // 2], b"", (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "graph.npz").write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            read_npz(tmp_path / "graph.npz")


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


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'nope': no nope.npz in .* citeseer"):
        load_dataset("nope", tmp_path)


def test_a_file_in_the_folder_goes_before_dgl_data(tmp_path: Path) -> None:
    graph = community_graph(100, 400)
    write_npz(graph, tmp_path / "cora.npz")
    assert_same(load_dataset("cora", tmp_path), graph)
    assert_same(load_dataset(str(tmp_path / "cora.npz")), graph)


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
    with pytest.raises(ConfigError, match=r"no route to host. Without a network, name a folder that holds reddit.npz"):
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


@pytest.mark.skipif(not (DATA / "cora.npz").exists(), reason="SAR_TEST_DATA names the folder of the test data sets")
def test_cora() -> None:
    graph = load_dataset("cora", DATA)
    assert (graph.total_nodes, graph.total_edges, graph.node_data["_N"]["feat"].shape) == (2708, 10556, (2708, 1433))
    sizes = [int(graph.node_data["_N"][key].sum()) for key in ("train_mask", "val_mask", "test_mask")]
    assert sizes == [140, 500, 1000]
