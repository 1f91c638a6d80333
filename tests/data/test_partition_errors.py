"""What is wrong with a partition directory, or does not fit the run, is a PartitionError that names it and the mend.

`tests/bad_inputs/directories.py` has more of these, word for word.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sar
from sar.adapters.dgl.load import load_dgl_partition_data
from sar.errors import PartitionError
from tests.adapters.dgl.directories import (
    Directory,
    dgl,
    heterogeneous_graph,
    homogeneous_graph,
    to_dispatch,
    write_directory,
)

Harm = Callable[[Directory], Any]  # what it returns, if that is a directory, is the one to read


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return write_directory(tmp_path, homogeneous_graph(), 2)


def refusal(directory: Directory, part: int = 0) -> str:
    """The message with which the reader refuses a directory."""
    with pytest.raises(PartitionError) as error:
        load_dgl_partition_data(directory.path, part, "cpu")
    return str(error.value)


# -- the run


def load_shares(mistake: str, path: Path) -> None:
    worker, parts = sar.rank(), [[0, 2], [1]][sar.rank()]
    if mistake == "another worker's":
        worker, parts = 0, None
    elif sar.rank() == 1:
        parts = {"none": [], "beyond": [3], "twice": [1, 1], "shared": [0, 1]}[mistake]
    sar.load_dgl_partition_data(path, worker, "cpu", parts=parts)


@pytest.mark.parametrize(
    "mistake, words",
    [
        ("another worker's", "own_partition_idx is 0, but this is worker 1; with 3 partitions for 2 workers"),
        ("none", r"are with \[1, 0, 1\] workers each, and this worker chose \[\]"),
        ("beyond", r"parts is \[3\]; expected some of 0 to 2"),
        ("twice", r"this worker chose \[1, 1\]; expected each with one worker, once"),
        ("shared", r"are with \[2, 1, 1\] workers each, and this worker chose"),
    ],
)
@pytest.mark.parametrize("world_size", [2])
def test_shares_that_do_not_fit(pool, tmp_path, mistake, words):
    path = write_directory(tmp_path, homogeneous_graph(), 3).path
    outcomes = pool.outcomes(load_shares, mistake, path)
    assert re.search(words, outcomes[1].message)
    assert all(outcome.kind in ("PartitionError", "PeerError") for outcome in outcomes)


# -- the files


def without_cut_edges(directory: Directory, halo_hops: int = 0) -> None:
    """Rewrite a directory as `num_hops=0` leaves it."""

    def drop(graph):
        inner = graph.ndata["inner_node"].bool()
        src, dst = graph.edges(order="eid")
        return dgl.edge_subgraph(graph, inner[src] & inner[dst], relabel_nodes=False, store_ids=False)

    for part in range(directory.num_parts):
        directory.edit_graph(part, drop)
    directory.edit(lambda content: content.update(halo_hops=halo_hops))


def features_of_some_partitions(directory: Directory) -> Directory:
    directory = to_dispatch(directory, features=True, orig_ids=False)
    directory.file(0, "node_feats").unlink()
    return directory


ONE_TYPE: dict[str, tuple[Harm, list[str]]] = {
    "no halo": (without_cut_edges, ["halo_hops is 0", "num_hops=1"]),
    "missing edges": (
        lambda d: without_cut_edges(d, halo_hops=1),
        [r"part0/graph.dgl .*edges into the nodes of partition 0; expected one for every edge ID(?!.*halo)"],
    ),
    "features of some partitions": (features_of_some_partitions, ["part0/node_feat.dgl"]),
}


def original_ids_of_one_type(directory: Directory) -> Directory:
    directory = to_dispatch(directory, features=True, orig_ids=True)
    path = directory.file(0, "part_graph").with_name("orig_nids.dgl")
    dgl.data.utils.save_tensors(str(path), {"venue": dgl.data.utils.load_tensors(str(path))["venue"]})
    return directory


SEVERAL_TYPES: dict[str, tuple[Harm, list[str]]] = {
    "feature without a type": (
        lambda d: d.edit_features(0, "node_feats", lambda old: {"feat": old["paper/feat"]}),
        ["'feat'; expected the types author, paper, venue"],
    ),
    "original IDs of some types": (original_ids_of_one_type, ["part0/orig_nids.dgl has IDs for 1 of 3 types of nodes"]),
}


@pytest.mark.parametrize("case", [*ONE_TYPE, *SEVERAL_TYPES])
def test_damage_is_named_with_its_mend(tmp_path, case):
    harm, words = (ONE_TYPE | SEVERAL_TYPES)[case]
    directory = write_directory(tmp_path, homogeneous_graph() if case in ONE_TYPE else heterogeneous_graph(), 2)
    made = harm(directory)
    message = refusal(made if isinstance(made, Directory) else directory)
    assert str(tmp_path) in message
    for some in words:
        assert re.search(some, message), message


def test_a_feature_without_a_type_is_fine_if_there_is_one_type(directory):
    directory.edit_features(0, "node_feats", lambda features: {"feat": features["_N/feat"]})
    assert set(load_dgl_partition_data(directory.path, 0, "cpu").node_features) >= {"_N/feat"}


def test_no_halo_is_fine_where_nothing_is_cut(tmp_path):
    ring = torch.arange(10)
    graph = dgl.graph((torch.cat([ring, ring]), torch.cat([ring, ring])), num_nodes=10)  # self-loops only
    directory = write_directory(tmp_path, graph, 2, num_hops=0)
    assert directory.json()["halo_hops"] == 0
    shards = load_dgl_partition_data(directory.path, 1, "cpu").all_shard_edges
    assert len(shards[0].edges[0]) == 0
    assert len(shards[1].edges[0]) > 0
