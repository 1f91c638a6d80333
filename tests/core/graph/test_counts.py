"""IDs of a graph: results can be matched to the input graph."""

import pytest
import torch

import sar
from tests.adapters.dgl.directories import (
    heterogeneous_graph,
    homogeneous_graph,
    to_dispatch,
    write_directory,
)
from tests.parity.harness import build

FORMATS = {
    "dispatch": lambda directory: to_dispatch(directory, features=True, orig_ids=True),
    "1.x, no original IDs": lambda directory: directory,
}


def by_type(columns, ids):
    """Some rows of every node type; `ids` as `seeds` or `input_nodes` give them."""
    return {ntype: columns[ntype][rows] for ntype, rows in ids.items()}


def edges_in_original_ids(path, how, node_ids, edge_ids):
    """For every edge of every graph: its ID and those of its ends in the input graph, and its features."""
    data = sar.load_dgl_partition_data(path, sar.rank(), "cpu")
    kinds, names = data.node_features["_TYPE"], data.node_type_names
    if "orig_id" in data.node_features:
        original = {t: data.node_features["orig_id"][kinds == kind] for kind, t in enumerate(names)}
    else:
        of_type = data.partition_book.map_to_per_ntype(data.node_features["_ID"])[1]
        original = {t: node_ids[t][of_type[kinds == kind]] for kind, t in enumerate(names)}
    if how == "blocks":
        graphs = sar.construct_mfgs(data, {names[0]: torch.arange(0, len(original[names[0]]), 2)}, 2)
    else:
        graphs = [build(data, how)]
    found = []
    for graph in graphs:
        nodes = [graph.input_nodes, graph.seeds]
        if len(names) == 1:
            first = data.node_ranges[sar.rank()][0]
            nodes = [{names[0]: nodes[0]}, {names[0]: nodes[1] - first}]
        sources, destinations = (by_type(original, ids) for ids in nodes)
        for etype in graph.canonical_etypes:
            view = graph[etype]
            view.srcdata["s"], view.dstdata["d"] = sources[etype[0]], destinations[etype[2]]
            view.apply_edges(lambda edges: {"ends": torch.stack([edges.src["s"], edges.dst["d"]], 1)})
            columns = dict(view.edata)
            if "orig_id" not in columns:
                of_type = data.partition_book.map_to_per_etype(columns["_ID"])[1]
                columns["orig_id"] = edge_ids[etype][of_type]
            found.append((etype, columns))
    return found


@pytest.mark.parametrize("how", [1, 3, "blocks"])
@pytest.mark.parametrize("make", [homogeneous_graph, heterogeneous_graph])
@pytest.mark.parametrize("written_by", FORMATS)
@pytest.mark.parametrize("world_size", [2])
def test_edges_are_found_in_the_input_graph(pool, world_size, written_by, make, how, tmp_path):
    # DGL raises where a part has no node of some type.
    graph = make() if world_size == 2 or make is homogeneous_graph else make(venues=60)
    directory = FORMATS[written_by](write_directory(tmp_path, graph, world_size))
    by_rank = pool.run(edges_in_original_ids, str(directory.path), how, directory.node_ids, directory.edge_ids)
    for number, (etype, _) in enumerate(by_rank[0]):
        columns = [found[number][1] for found in by_rank]
        ids = torch.cat([column["orig_id"] for column in columns])
        assert len(ids.unique()) == len(ids)
        assert len(ids) == graph.num_edges(etype) or how == "blocks"
        assert torch.equal(
            torch.cat([column["ends"] for column in columns]), torch.stack(graph.find_edges(ids, etype), 1)
        )
        features = graph.edges[etype].data
        for name in features:
            assert torch.equal(torch.cat([column[name] for column in columns]), features[name][ids])
