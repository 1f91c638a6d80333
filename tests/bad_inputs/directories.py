"""Partition directories that do not load: damaged, incomplete, of other things, or not to be trusted."""

import json
from functools import partial

import torch

import sar
from tests.adapters.dgl.directories import dgl, load_tensors, save_graphs, save_tensors
from tests.bad_inputs import Case

PART = {
    "part_graph": "part{}/graph.dgl",
    "node_feats": "part{}/node_feat.dgl",
    "edge_feats": "part{}/edge_feat.dgl",
}
CONTENT = {
    "graph_name": "graph",
    "num_nodes": 4,
    "num_edges": 4,
    "part_method": "random",
    "num_parts": 2,
    "halo_hops": 1,
    "node_map": {"_N": [[0, 2], [2, 4]]},
    "edge_map": {"_N:_E:_N": [[0, 2], [2, 4]]},
    "ntypes": {"_N": 0},
    "etypes": {"_N:_E:_N": 0},
    **{f"part-{part}": {kind: file.format(part) for kind, file in PART.items()} for part in range(2)},
}


def write(folder):
    """Two parts of a graph of four nodes in a ring; each has its two nodes and one of the other part."""
    (folder / "graph.json").write_text(json.dumps(CONTENT))
    for part, ids in enumerate(([0, 1, 3], [2, 3, 1])):
        graph = dgl.graph((torch.tensor([2, 0]), torch.tensor([0, 1])), num_nodes=3)
        graph.ndata["_ID"], graph.edata["_ID"] = torch.tensor(ids), torch.tensor([2 * part, 2 * part + 1])
        graph.ndata["inner_node"] = torch.tensor([1, 1, 0], dtype=torch.uint8)
        graph.edata["inner_edge"] = torch.ones(2, dtype=torch.uint8)
        (folder / f"part{part}").mkdir()
        save_graphs(str(folder / f"part{part}/graph.dgl"), [graph])
        save_tensors(str(folder / f"part{part}/node_feat.dgl"), {"_N/feat": torch.ones(2, 3)})
        save_tensors(str(folder / f"part{part}/edge_feat.dgl"), {})


def load(damage=lambda folder: None, part=0):
    """Load a part of the directory after some damage."""

    def run(folder):
        write(folder)
        damage(folder)
        sar.load_dgl_partition_data("graph.json", part, "cpu")

    return run


def content(text):
    return load(lambda folder: (folder / "graph.json").write_text(text))


def json_with(**changes):
    return content(json.dumps(CONTENT | changes))


def named(kind, file):
    return json_with(**{"part-0": CONTENT["part-0"] | {kind: file}})


def graph_with(change):
    def damage(folder):
        path = str(folder / "part0/graph.dgl")
        [graph], _ = dgl.load_graphs(path)
        save_graphs(path, change(graph))

    return load(damage)


def node_field(name, values):
    def change(graph):
        graph.ndata[name] = values
        return [graph]

    return graph_with(change)


def without_inner_node(graph):
    del graph.ndata["inner_node"]
    return [graph]


def other_edges(graph):
    graph.edata["_ID"] += 1
    return [graph]


def features(**changes):
    def damage(folder):
        path = str(folder / "part0/node_feat.dgl")
        save_tensors(path, {key.replace("__", "/"): values for key, values in changes.items()} or load_tensors(path))

    return load(damage)


def replaced(name, change):
    return load(lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())))


def to_graphbolt(folder):
    (folder / "part0/graph.dgl").rename(folder / "part0/fused_csc_sampling_graph.pt")


def linked(folder):
    (folder / "part0/graph.dgl").unlink()
    (folder / "part0/graph.dgl").symlink_to("/etc/hostname")


case = partial(Case, error="PartitionError")

CASES = {
    "a rank beyond the partitions": case(load(part=2), "own_partition_idx is 2"),
    "a rank that is text": case(load(part="0"), "own_partition_idx is '0'"),
    "JSON that ends too early": case(content('{"num_parts": 2,'), "graph.json is not valid JSON: Expecting"),
    "JSON of nothing": case(content(""), "graph.json is not valid JSON: Expecting"),
    "JSON of a list": case(content("[1, 2]"), "graph.json has no num_parts, node_map"),
    "JSON of something else": case(content('{"name": "x"}'), "graph.json has no num_parts, node_map"),
    "partitions counted in words": case(json_with(num_parts="two"), "graph.json: num_parts is 'two'"),
    "more partitions than ranges": case(json_with(num_parts=3), "graph.json: node_map of _N is [[0, 2], [2"),
    "ranges with a hole": case(
        json_with(node_map={"_N": [[0, 2], [3, 4]]}), "graph.json: node_map of _N in partition 1"
    ),
    "ranges of text": case(json_with(edge_map={"_N:_E:_N": ["0-2", "2-4"]}), "graph.json: edge_map of _N:_E:_N in"),
    "ranges in a file": case(json_with(node_map="node_map.npy"), "graph.json: node_map is 'node_map.npy'"),
    "ranges of another node type": case(
        json_with(node_map={"user": [[0, 2], [2, 4]]}), "graph.json: node_map is for the types"
    ),
    "another number of nodes": case(json_with(num_nodes=5), "graph.json: num_nodes is 5, but the ID"),
    "node types without numbers": case(json_with(ntypes={"_N": "first"}), "graph.json: ntypes is {'_N': 'first'}"),
    "edge types between unknown node types": case(
        json_with(etypes={"a:b:c": 0}, edge_map={"a:b:c": [[0, 2], [2, 4]]}),
        "graph.json: the edge types are [('a', 'b'",
    ),
    "a partition that is not named": case(json_with(**{"part-1": None}), "graph.json: num_parts is 2, but there are"),
    "a file outside of the directory": case(
        named("node_feats", "../other/node_feat.dgl"), "graph.json: node_feats of part-0 is"
    ),
    "a file of the system": case(named("part_graph", "/dev/zero"), "graph.json: part_graph of part-0 is"),
    "a link that leads outside": case(load(linked), "graph.json: part_graph of part-0 is"),
    "a file that cannot be": case(named("part_graph", "part0/\0"), "graph.json: part_graph of part-0 is"),
    "a graph that is missing": case(
        load(lambda folder: (folder / "part0/graph.dgl").unlink()), "Partition 0 of graph.json lacks its graph"
    ),
    "features that are missing": case(
        load(lambda folder: (folder / "part0/node_feat.dgl").unlink()), "Cannot read part0/node_feat.dgl"
    ),
    "GraphBolt's format only": case(load(to_graphbolt), "Partition 0 of graph.json is there for"),
    "a graph that ends too early": case(
        replaced("part0/graph.dgl", lambda old: old[:5000]), "part0/graph.dgl is truncated, or no DGL"
    ),
    "features that end too early": case(
        replaced("part0/node_feat.dgl", lambda old: old[:80]), "part0/node_feat.dgl is truncated: it ends"
    ),
    "a graph with a page of zeros": case(
        replaced("part0/graph.dgl", lambda old: old[:4096] + bytes(600) + old[4696:]),
        "part0/graph.dgl has 0x0 where the mark of a",
    ),
    "features of zeros": case(
        replaced("part0/node_feat.dgl", lambda old: bytes(len(old))), "part0/node_feat.dgl has 0x0 where the mark"
    ),
    "a file of features for a graph": case(
        named("part_graph", "part0/node_feat.dgl"), "part0/node_feat.dgl is truncated, or no DGL"
    ),
    "the graph of another partition": case(
        named("part_graph", "part1/graph.dgl"), "part1/graph.dgl holds 2 nodes of partition 0"
    ),
    "a file of two graphs": case(graph_with(lambda graph: [graph, graph]), "part0/graph.dgl holds 2 graphs"),
    "a graph that is no partition": case(graph_with(without_inner_node), "part0/graph.dgl has the node fields ['_ID']"),
    "IDs that are no whole numbers": case(node_field("_ID", torch.rand(3)), "part0/graph.dgl has _ID of torch.float32"),
    "a halo outside of the graph": case(
        node_field("_ID", torch.tensor([0, 1, 9])), "part0/graph.dgl has node IDs outside [0"
    ),
    "edges of another partition": case(graph_with(other_edges), "part0/graph.dgl holds 2 edges into the"),
    "features of fewer nodes": case(features(_N__feat=torch.ones(1, 3)), "'_N/feat' in part0/node_feat.dgl has shape"),
    "features of an unknown type": case(features(paper__feat=torch.ones(2, 3)), "part0/node_feat.dgl has 'paper/feat'"),
}
