"""Graphs before partitioning: names of dgl.data, and what training needs."""

from typing import Any

import numpy as np
import pytest

from sar.adapters.dgl.shim import require_dgl
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


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown data set 'nope'.* citeseer"):
        load_dataset("nope")


def test_a_graph_of_dgl_data_is_loaded() -> None:
    graph = load_dataset("karate")  # Zachary's karate club, which comes with NetworkX
    assert (graph.total_nodes, graph.total_edges, int(graph.node_data["_N"]["label"].sum())) == (34, 156, 17)


def test_a_failed_download_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    require_dgl()
    import dgl.data

    def dataset(**_: Any) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr(dgl.data, "RedditDataset", dataset)
    with pytest.raises(ConfigError, match=r"no route to host. Without a network"):
        load_dataset("reddit")
