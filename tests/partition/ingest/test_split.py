"""Masks drawn for graphs without: shares, labels that are missing, several types, and what is refused."""

import numpy as np
import pytest

from sar.common_tuples import SPLIT
from sar.errors import ConfigError
from sar.partition.graph_source import GraphSource
from sar.partition.ingest.masks import with_split


def graph_of(**labels: np.ndarray) -> GraphSource:
    return GraphSource({t: len(x) for t, x in labels.items()}, {}, {t: {"label": x} for t, x in labels.items()}, {})


def masks_of(graph: GraphSource, ntype: str) -> np.ndarray:  # (3, N)
    return np.stack([graph.node_data[ntype][name][:] for name in SPLIT])


def test_shares_of_the_labelled_nodes_and_of_no_others() -> None:
    label = np.where(np.arange(250) % 5 == 0, -1, 1)
    masks = masks_of(with_split(graph_of(a=label, b=label.astype(np.float32)), (0.6, 0.2, 0.1), 0), "a")
    assert masks.dtype == np.bool_
    assert masks.sum(1).tolist() == [120, 40, 20]
    assert masks.sum(0).max() == 1
    assert not masks[:, label < 0].any()


def test_whole_shares_leave_no_node_out_and_the_seed_decides() -> None:
    graph = graph_of(a=np.zeros(101, np.int64), b=np.full(7, np.nan))
    first, again, other = (with_split(graph, (0.6, 0.2, 0.2), seed) for seed in (1, 1, 2))
    assert masks_of(first, "a").sum(0).tolist() == [1] * 101
    assert not masks_of(first, "b").any()
    assert (masks_of(first, "a") == masks_of(again, "a")).all()
    assert (masks_of(first, "a") != masks_of(other, "a")).any()


def test_graphs_without_labels_and_with_several_labels_a_node() -> None:
    plain = GraphSource({"_N": 10}, {}, {}, {})
    assert masks_of(with_split(plain, (0.5, 0.5, 0), 0), "_N").sum(1).tolist() == [5, 5, 0]
    many = GraphSource({"_N": 10}, {}, {"_N": {"label": np.zeros((10, 3))}}, {})
    assert masks_of(with_split(many, (1, 0, 0), 0), "_N").sum(1).tolist() == [10, 0, 0]


@pytest.mark.parametrize("shares", [(0.6, 0.4), (0.6, 0.3, 0.2), (-0.1, 0.5, 0.5), (0, 0, 0), (np.nan, 0.1, 0.1)])
def test_shares_that_are_none_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="expected three shares"):
        with_split(graph_of(a=np.zeros(4)), shares, 0)


def test_graphs_that_cannot_be_split_are_refused() -> None:
    masked = GraphSource({"a": 2}, {}, {"a": {"val_mask": np.ones(2, np.bool_)}}, {})
    with pytest.raises(ConfigError, match="'a' already has val_mask"):
        with_split(masked, (0.6, 0.2, 0.2), 0)
    with pytest.raises(ConfigError, match="no node type among a, b has a label"):
        with_split(GraphSource({"a": 2, "b": 2}, {}, {}, {}), (0.6, 0.2, 0.2), 0)
