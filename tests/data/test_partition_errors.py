"""What is wrong with a partition directory, or does not fit the run, is a PartitionError that names it and the mend.

`tests/bad_inputs/directories.py` has more of these, word for word.
"""

import os
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
KINDS = ["part_graph", "node_feats", "edge_feats"]


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return write_directory(tmp_path, homogeneous_graph(), 2)


def refusal(directory: Directory, part: int = 0) -> str:
    """The message with which the reader refuses a directory."""
    with pytest.raises(PartitionError) as error:
        load_dgl_partition_data(directory.path, part, "cpu")
    return str(error.value)


def json_with(change: Callable[[dict[str, Any]], Any]) -> Harm:
    return lambda directory: directory.edit(change)


# -- the JSON file


@pytest.mark.parametrize("content", ["null", None])
def test_invalid_json(directory, content):
    directory.path.unlink() if content is None else directory.path.write_text(content)
    message = refusal(directory)
    assert str(directory.path) in message
    assert ("No such file" if content is None else "JSON") in message


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda content: content.update(num_parts=0), "num_parts is 0; expected a positive integer"),
        (lambda content: content.update({"part-2": content["part-1"]}), "there are files for 3 partitions"),
        (lambda content: content.update({"part-1": "part1"}), r"there are files for 1 partitions \(part-0\)"),
        (lambda content: content.update(ntypes={"_N": 1}), "expected type names with the IDs 0, 1"),
        (lambda content: content.update(etypes=[]), "etypes is"),
        (lambda content: content["node_map"]["_N"][0].append(3), "node_map of _N in partition 0 is"),
        (lambda content: content.update(num_edges=301), "num_edges is 301, but the ID ranges cover 300 edges"),
    ],
)
def test_json_that_contradicts_itself(directory, change, expected):
    directory.edit(change)
    message = refusal(directory)
    assert re.search(expected, message)
    assert str(directory.path) in message
    assert "Write the directory again" in message


# -- the run


@pytest.mark.parametrize("part", [-1, 1.0, True])
def test_partition_index_out_of_range(directory, part):
    assert f"own_partition_idx is {part!r}; expected a number from 0 to 1" in refusal(directory, part)


def load_and_construct(path: Path) -> None:
    sar.comm.all_reduce(torch.zeros(1))  # all workers are connected, whatever case came before
    sar.construct_full_graph(sar.load_dgl_partition_data(path, sar.rank(), "cpu"))


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


@pytest.mark.parametrize("world_size", [2])
def test_a_file_missing_on_one_worker_stops_all_with_the_reason(pool, directory):
    missing = directory.file(1, "edge_feats")
    missing.unlink()
    first, second = pool.outcomes(load_and_construct, directory.path)
    assert (first.kind, second.kind) == ("PeerError", "PartitionError")
    assert str(missing) in first.message
    assert str(missing) in second.message


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


def without_first_edges(directory: Directory) -> None:
    """Without cut edges, which shows in the JSON file."""
    without_cut_edges(directory)

    def leave_out_the_first_edges(content):
        ((start, end), _) = content["edge_map"]["_N:_E:_N"]
        content["edge_map"]["_N:_E:_N"][0] = [start + 3, end]

    directory.edit(leave_out_the_first_edges)


def name_graphbolt(directory: Directory) -> None:
    path = directory.file(0, "part_graph")
    path.rename(path.with_name("fused_csc_sampling_graph.pt"))
    files = directory.json()["part-0"]
    files["part_graph_graphbolt"] = files.pop("part_graph").replace("graph.dgl", "fused_csc_sampling_graph.pt")
    directory.edit(lambda content: content.update({"part-0": files}))


def features_of_some_partitions(directory: Directory) -> Directory:
    directory = to_dispatch(directory, features=True, orig_ids=False)
    directory.file(0, "node_feats").unlink()
    return directory


ONE_TYPE: dict[str, tuple[Harm, list[str]]] = {
    "no num_parts": (json_with(lambda c: c.pop("num_parts")), ["has no num_parts"]),
    "no node_map": (json_with(lambda c: c.pop("node_map")), ["has no node_map"]),
    "no edge_map": (json_with(lambda c: c.pop("edge_map")), ["has no edge_map"]),
    "no types": (json_with(lambda c: c.pop("ntypes")), ["has no ntypes", "DGL 0.5 to 0.9"]),
    "ends of ranges": (json_with(lambda c: c.update(node_map=[30, 60])), ["node_map is", "DGL 0.5 to 0.9"]),
    "not reshuffled, by type": (
        json_with(lambda c: c.update(node_map={"_N": "node_map.npy"})),
        ["node_map.npy", "DGL 0.5 to 0.9"],
    ),
    "no halo": (without_cut_edges, ["halo_hops is 0", "num_hops=1"]),
    "no halo, in the JSON file": (without_first_edges, ["edge_map of _N:_E:_N in partition 0", "num_hops=1"]),
    "missing edges": (
        lambda d: without_cut_edges(d, halo_hops=1),
        [r"part0/graph.dgl .*edges into the nodes of partition 0; expected one for every edge ID(?!.*halo)"],
    ),
    "GraphBolt only, named": (name_graphbolt, ["dgl_partition_to_graphbolt", "use_graphbolt=False"]),
    "features of no partition": (  # which is fine in output of the dispatch pipeline only
        lambda d: [d.file(part, "edge_feats").unlink() for part in range(2)],
        ["part0/edge_feat.dgl"],
    ),
    "features of some partitions": (features_of_some_partitions, ["part0/node_feat.dgl"]),
}


def original_ids_of_one_type(directory: Directory) -> Directory:
    directory = to_dispatch(directory, features=True, orig_ids=True)
    path = directory.file(0, "part_graph").with_name("orig_nids.dgl")
    dgl.data.utils.save_tensors(str(path), {"venue": dgl.data.utils.load_tensors(str(path))["venue"]})
    return directory


def plain_names(content: dict[str, Any]) -> None:
    for key in ("etypes", "edge_map"):
        content[key] = {name.split(":")[1]: value for name, value in content[key].items()}


SEVERAL_TYPES: dict[str, tuple[Harm, list[str]]] = {
    "feature without a type": (
        lambda d: d.edit_features(0, "node_feats", lambda old: {"feat": old["paper/feat"]}),
        ["'feat'; expected the types author, paper, venue"],
    ),
    "original IDs of some types": (original_ids_of_one_type, ["part0/orig_nids.dgl has IDs for 1 of 3 types of nodes"]),
    "edge types of DGL 0.9": (
        lambda d: d.edit(plain_names),
        [r"etypes is \['writes', 'cites', .*DGL 0.5 to 0.9.* Write it again with .* DGL 1.x or 2.x"],
    ),
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


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_cannot_be_read_or_are_something_else(directory, kind):
    path = directory.file(0, kind)
    content = path.read_bytes()
    size = len(content)
    for length in (0, 1, 7, 8, 23, 24, 25, 60, 100, size // 3, size // 2, size - 8, size - 1):
        path.write_bytes(content[:length])
        message = refusal(directory)
        assert str(path) in message
        assert "truncated" in message
    path.write_bytes(b"something else " * 1000)
    assert str(path) in refusal(directory)
    path.unlink()
    assert str(path) in refusal(directory)
    assert load_dgl_partition_data(directory.path, 1, "cpu").all_shard_edges
    path.mkdir()
    message = refusal(directory)
    assert str(path) in message
    assert os.strerror(21) in message  # Is a directory


def test_edge_feature_with_a_wrong_number_of_rows(directory):
    directory.edit_features(0, "edge_feats", lambda old: old | {"_N:_E:_N/w": old["_N:_E:_N/w"][:-1].clone()})
    start, end = directory.json()["edge_map"]["_N:_E:_N"][0]
    message = refusal(directory)
    assert f"'_N:_E:_N/w' in {directory.file(0, 'edge_feats')} has shape ({end - start - 1}," in message
    assert f"expected {end - start} rows, as many as the partition has edges" in message
