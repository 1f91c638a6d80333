"""What is wrong with a partition directory, or does not fit the run, is a PartitionError that names it and the mend."""

import os
import re
from pathlib import Path

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
    insert_empty_partition,
    to_dgl_09,
    to_dispatch,
    write_directory,
)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return write_directory(tmp_path, homogeneous_graph(), 2)


def refusal(directory: Directory, part: int = 0) -> str:
    """The message with which the reader refuses a directory."""
    with pytest.raises(PartitionError) as error:
        load_dgl_partition_data(directory.path, part, "cpu")
    return str(error.value)


def test_missing_json(directory):
    directory.path = directory.path.with_name("other.json")
    message = refusal(directory)
    assert str(directory.path) in message
    assert "No such file" in message


@pytest.mark.parametrize("content", ['{"num_parts": 2,', "", "[1, 2]", "null"])
def test_invalid_json(directory, content):
    directory.path.write_text(content)
    message = refusal(directory)
    assert str(directory.path) in message
    assert "JSON" in message


@pytest.mark.parametrize("key", ["num_parts", "node_map", "edge_map"])
def test_missing_key(directory, key):
    directory.edit(lambda content: content.pop(key))
    assert re.search(f"has no {key}", refusal(directory))


@pytest.mark.parametrize(
    "change, expected",
    [
        (lambda content: content.update(num_parts=0), "num_parts is 0; expected a positive integer"),
        (lambda content: content.update(num_parts="2"), "num_parts is '2'"),
        (lambda content: content.update(num_parts=3), r"node_map of _N is \[.*expected one range for each of 3"),
        (lambda content: content.pop("part-1"), r"num_parts is 2, but there are files for 1 partitions \(part-0\)"),
        (lambda content: content.update({"part-2": content["part-1"]}), "there are files for 3 partitions"),
        (lambda content: content.update({"part-1": "part1"}), r"there are files for 1 partitions \(part-0\)"),
        (lambda content: content.update(ntypes={"_N": 1}), "expected type names with the IDs 0, 1"),
        (lambda content: content.update(etypes=[]), "etypes is"),
        (
            lambda content: content["node_map"].update(other=[[0, 1], [1, 2]]),
            r"types \['_N', 'other'\]; expected \['_N'\]",
        ),
        (lambda content: content["node_map"]["_N"][0].append(3), "node_map of _N in partition 0 is"),
        (
            lambda content: content["node_map"]["_N"].__setitem__(1, [7, 60]),
            "in partition 1 is .7, 60.; expected a range that",
        ),
        (lambda content: content["node_map"]["_N"].__setitem__(1, "x"), "in partition 1 is x"),
        (lambda content: content.update(num_nodes=61), "num_nodes is 61, but the ID ranges cover 60 nodes"),
        (lambda content: content.update(num_edges=301), "num_edges is 301, but the ID ranges cover 300 edges"),
    ],
)
def test_json_that_contradicts_itself(directory, change, expected):
    directory.edit(change)
    message = refusal(directory)
    assert re.search(expected, message)
    assert str(directory.path) in message
    assert "Write the directory again" in message


@pytest.mark.parametrize("part", [-1, 2, 1.0, True, "0"])
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


@pytest.mark.parametrize("nested", [False, True])
def test_written_without_reshuffling(directory, nested):
    def maps_in_files(content):
        content["node_map"] = {"_N": "node_map.npy"} if nested else "node_map.npy"
        content["edge_map"] = "edge_map.npy"

    directory.edit(maps_in_files)
    message = refusal(directory)
    assert "node_map.npy" in message
    assert "reshuffle=True" in message


def without_cut_edges(directory: Directory) -> None:
    """Rewrite a directory as `num_hops=0` leaves it."""

    def drop(graph):
        inner = graph.ndata["inner_node"].bool()
        src, dst = graph.edges(order="eid")
        return dgl.edge_subgraph(graph, inner[src] & inner[dst], relabel_nodes=False, store_ids=False)

    for part in range(directory.num_parts):
        directory.edit_graph(part, drop)
    directory.edit(lambda content: content.update(halo_hops=0))


def test_missing_halo(directory):
    without_cut_edges(directory)
    message = refusal(directory)
    assert "halo_hops is 0" in message
    assert "num_hops=1" in message


def test_missing_halo_that_shows_in_the_json_file(directory):
    without_cut_edges(directory)

    def leave_out_the_first_edges(content):
        ((start, end), _) = content["edge_map"]["_N:_E:_N"]
        content["edge_map"]["_N:_E:_N"][0] = [start + 3, end]

    directory.edit(leave_out_the_first_edges)
    message = refusal(directory)
    assert "edge_map of _N:_E:_N in partition 0" in message
    assert "num_hops=1" in message


def test_no_halo_is_fine_where_nothing_is_cut(tmp_path):
    ring = torch.arange(10)
    graph = dgl.graph((torch.cat([ring, ring]), torch.cat([ring, ring])), num_nodes=10)  # self-loops only
    directory = write_directory(tmp_path, graph, 2, num_hops=0)
    assert directory.json()["halo_hops"] == 0
    shards = load_dgl_partition_data(directory.path, 1, "cpu").all_shard_edges
    assert len(shards[0].edges[0]) == 0
    assert len(shards[1].edges[0]) > 0


def test_edges_that_are_missing_though_there_is_a_halo(directory):
    without_cut_edges(directory)
    directory.edit(lambda content: content.update(halo_hops=1))
    message = refusal(directory)
    assert str(directory.file(0, "part_graph")) in message
    assert "edges into the nodes of partition 0; expected one for every edge ID" in message
    assert "halo" not in message


def test_graph_of_another_partition(directory):
    directory.edit(lambda content: content["part-0"].update(part_graph="part1/graph.dgl"))
    assert re.search(
        r"part1/graph.dgl holds \d+ nodes of partition 0; expected one for every node ID", refusal(directory)
    )


def test_graph_that_is_no_partition(directory):
    dgl.save_graphs(str(directory.file(0, "part_graph")), [homogeneous_graph()])
    message = refusal(directory)
    assert "['feat', 'label', 'mask']" in message
    assert "inner_node" in message


def test_halo_outside_of_the_graph(directory):
    def shift(graph):
        halo = graph.ndata["inner_node"] == 0
        graph.ndata["_ID"][halo] += 100
        return graph

    directory.edit_graph(0, shift)
    assert "node IDs outside [0, 60)" in refusal(directory)


@pytest.mark.parametrize("kind", ["part_graph", "node_feats", "edge_feats"])
def test_missing_file(directory, kind):
    path = directory.file(0, kind)
    path.unlink()
    assert str(path) in refusal(directory)
    assert load_dgl_partition_data(directory.path, 1, "cpu").all_shard_edges


@pytest.mark.parametrize("kind", ["part_graph", "node_feats", "edge_feats"])
def test_unreadable_file(directory, kind):
    path = directory.file(0, kind)
    path.unlink()
    path.mkdir()
    message = refusal(directory)
    assert str(path) in message
    assert os.strerror(21) in message  # Is a directory


@pytest.mark.parametrize("kind", ["part_graph", "node_feats", "edge_feats"])
def test_truncated_file_at_any_length(directory, kind):
    path = directory.file(0, kind)
    content = path.read_bytes()
    lengths = {
        0,
        1,
        7,
        8,
        23,
        24,
        25,
        60,
        100,
        len(content) // 3,
        len(content) // 2,
        len(content) - 8,
        len(content) - 1,
    }
    for length in sorted(lengths):
        path.write_bytes(content[:length])
        message = refusal(directory)
        assert str(path) in message
        assert "truncated" in message


@pytest.mark.parametrize("kind", ["part_graph", "node_feats", "edge_feats"])
def test_file_that_is_something_else(directory, kind):
    path = directory.file(0, kind)
    path.write_bytes(b"something else " * 1000)
    assert str(path) in refusal(directory)


@pytest.mark.parametrize("kind, key, of", [("node_feats", "_N/feat", "nodes"), ("edge_feats", "_N:_E:_N/w", "edges")])
def test_feature_with_a_wrong_number_of_rows(directory, kind, key, of):
    directory.edit_features(0, kind, lambda features: features | {key: features[key][:-1].clone()})
    start, end = directory.json()["node_map" if of == "nodes" else "edge_map"][key.split("/")[0]][0]
    message = refusal(directory)
    assert f"{key!r} in {directory.file(0, kind)} has shape ({end - start - 1}," in message
    assert f"expected {end - start} rows, as many as the partition has {of}" in message


def test_feature_of_an_unknown_type(directory):
    directory.edit_features(0, "node_feats", lambda features: features | {"paper/feat": features["_N/feat"]})
    assert "'paper/feat'; expected the types _N" in refusal(directory)


def test_feature_without_a_type_needs_a_single_type(tmp_path, directory):
    directory.edit_features(0, "node_feats", lambda features: {"feat": features["_N/feat"]})
    assert set(load_dgl_partition_data(directory.path, 0, "cpu").node_features) >= {"_N/feat"}
    other = write_directory(tmp_path / "other", heterogeneous_graph(), 2)
    other.edit_features(0, "node_feats", lambda features: {"feat": features["paper/feat"]})
    assert "'feat'; expected the types author, paper, venue" in refusal(other)


def test_original_ids_of_some_types_only(tmp_path):
    directory = to_dispatch(write_directory(tmp_path, heterogeneous_graph(), 2), features=True, orig_ids=True)
    path = directory.file(0, "part_graph").with_name("orig_nids.dgl")
    dgl.data.utils.save_tensors(str(path), {"venue": dgl.data.utils.load_tensors(str(path))["venue"]})
    assert f"{path} has IDs for 1 of 3 types of nodes" in refusal(directory)


@pytest.mark.parametrize("named", [False, True])
def test_graphbolt_only(directory, named):
    path = directory.file(0, "part_graph")
    path.rename(path.with_name("fused_csc_sampling_graph.pt"))
    if named:
        directory.edit(
            lambda content: content["part-0"].update(
                part_graph_graphbolt=content["part-0"]
                .pop("part_graph")
                .replace("graph.dgl", "fused_csc_sampling_graph.pt")
            )
        )
    message = refusal(directory)
    assert "dgl_partition_to_graphbolt" in message
    assert "use_graphbolt=False" in message


def test_dispatch_output_with_features_on_some_partitions_only(tmp_path):
    directory = to_dispatch(write_directory(tmp_path, homogeneous_graph(), 2), features=True, orig_ids=False)
    path = directory.file(0, "node_feats")
    path.unlink()
    assert str(path) in refusal(directory)


def test_absent_features_are_fine_in_dispatch_output_only(directory):
    for part in range(2):
        directory.file(part, "edge_feats").unlink()
    assert "edge_feat.dgl" in refusal(directory)


def test_plain_edge_type_without_any_edge(tmp_path):
    directory = to_dgl_09(write_directory(tmp_path, heterogeneous_graph(), 2))

    def add_relation(content):
        content["etypes"]["reads"] = 4
        content["edge_map"]["reads"] = [[-1, -1], [-1, -1]]

    directory.edit(add_relation)
    message = refusal(directory)
    assert "['reads']" in message
    assert "source:relation:destination" in message


def test_plain_edge_types_where_the_other_partitions_are_elsewhere(tmp_path):
    directory = insert_empty_partition(to_dgl_09(write_directory(tmp_path, heterogeneous_graph(), 2)), 0)
    for part in (1, 2):
        directory.file(part, "part_graph").unlink()
    assert "cannot tell the node types of the edge types ['writes', 'cites'" in refusal(directory)
