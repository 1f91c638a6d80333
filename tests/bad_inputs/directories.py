"""Partition directories that do not load: damaged, incomplete, of other things, or not to be trusted."""

import json

import torch

import sar
from tests.adapters.dgl.directories import dgl, load_tensors, save_graphs, save_tensors

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


def as_of_dgl_0_5():
    return content(json.dumps({key: value for key, value in CONTENT.items() if key != "ntypes"}))


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


CASES = {
    "PartitionError": {
        "own_partition_idx is 2": load(part=2),
        "own_partition_idx is '0'": load(part="0"),
        "graph.json is not valid JSON: Expecting": content('{"num_parts": 2,'),
        "graph.json has no num_parts, node_map": content("[1, 2]"),
        "graph.json has no ntypes: it was written by": as_of_dgl_0_5(),
        "graph.json: etypes is ['cites']": json_with(etypes={"cites": 0}, edge_map={"cites": [[0, 2], [2, 4]]}),
        "graph.json: num_parts is 'two'": json_with(num_parts="two"),
        "graph.json: node_map of _N is [[0, 2], [2": json_with(num_parts=3),
        "graph.json: node_map of _N in partition 1": json_with(node_map={"_N": [[0, 2], [3, 4]]}),
        "graph.json: edge_map of _N:_E:_N in": json_with(edge_map={"_N:_E:_N": ["0-2", "2-4"]}),
        "graph.json: node_map is 'node_map.npy'": json_with(node_map="node_map.npy"),
        "graph.json: node_map is for the types": json_with(node_map={"user": [[0, 2], [2, 4]]}),
        "graph.json: num_nodes is 5, but the ID": json_with(num_nodes=5),
        "graph.json: ntypes is {'_N': 'first'}": json_with(ntypes={"_N": "first"}),
        "the edge types are [('a', 'b'": json_with(etypes={"a:b:c": 0}, edge_map={"a:b:c": [[0, 2], [2, 4]]}),
        "graph.json: num_parts is 2, but there are": json_with(**{"part-1": None}),
        "graph.json: node_feats of part-0 is": named("node_feats", "../other/node_feat.dgl"),
        "graph.json: part_graph of part-0 is /dev/zero": named("part_graph", "/dev/zero"),
        "graph.json: part_graph of part-0 is /etc/hostname": load(linked),
        "graph.json: part_graph of part-0 is 'part0": named("part_graph", "part0/\0"),
        "Partition 0 of graph.json lacks its graph": load(lambda folder: (folder / "part0/graph.dgl").unlink()),
        "Cannot read part0/edge_feat.dgl": load(lambda folder: (folder / "part0/edge_feat.dgl").unlink()),
        "Cannot read part0/node_feat.dgl": load(lambda folder: (folder / "part0/node_feat.dgl").unlink()),
        "Partition 0 of graph.json is there for": load(to_graphbolt),
        "part0/graph.dgl is truncated, or no DGL": replaced("part0/graph.dgl", lambda old: old[:5000]),
        "part0/node_feat.dgl is truncated: it ends": replaced("part0/node_feat.dgl", lambda old: old[:80]),
        "part0/graph.dgl has 0x0": replaced("part0/graph.dgl", lambda old: old[:4096] + bytes(600) + old[4696:]),
        "part0/node_feat.dgl has 0x0 where the mark": replaced("part0/node_feat.dgl", lambda old: bytes(len(old))),
        "part0/node_feat.dgl is truncated, or no DGL": named("part_graph", "part0/node_feat.dgl"),
        "part1/graph.dgl holds 2 nodes of partition 0": named("part_graph", "part1/graph.dgl"),
        "part0/graph.dgl holds 2 graphs": graph_with(lambda graph: [graph, graph]),
        "part0/graph.dgl has the node fields ['_ID']": graph_with(without_inner_node),
        "part0/graph.dgl has _ID of float32": node_field("_ID", torch.rand(3)),
        "part0/graph.dgl has node IDs outside [0": node_field("_ID", torch.tensor([0, 1, 9])),
        "part0/graph.dgl holds 2 edges into the": graph_with(other_edges),
        "'_N/feat' in part0/node_feat.dgl has shape": features(_N__feat=torch.ones(1, 3)),
        "part0/node_feat.dgl has 'paper/feat'": features(paper__feat=torch.ones(2, 3)),
    },
}
