"""The reader of files of graphs, against DGL's own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sar.data.graph_files import open_graph_file
from tests.adapters.dgl.directories import dgl, heterogeneous_graph, homogeneous_graph

FORMATS = ("coo", "csr", "csc", ["coo", "csc"], ["csr", "csc"], ["coo", "csr", "csc"])
DTYPES = (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float64)


def csc_with_edge_ids() -> Any:
    """A graph made from CSC whose entries are not in the order of edge IDs."""
    offsets, sources, edge_ids = torch.tensor([0, 1, 2, 4, 4]), torch.tensor([0, 1, 2, 2]), torch.tensor([2, 0, 3, 1])
    graph = dgl.graph(("csc", (offsets, sources, edge_ids)), num_nodes=4)
    graph.edata["x"] = torch.arange(4)
    return graph


def all_dtypes() -> Any:
    graph = dgl.graph(([0, 2, 1, 2], [1, 1, 0, 2]), num_nodes=4)
    for dtype in DTYPES:
        graph.ndata[f"{dtype}"] = torch.tensor([[0, 1, 1]] * 4).to(dtype)
        graph.edata[f"{dtype}"] = torch.tensor([0, 1, 1, 0]).to(dtype)
    graph.edata["no columns"] = torch.zeros(4, 0)
    return graph


def no_relation_has_edges() -> Any:
    none: tuple[list[int], list[int]] = [], []
    return dgl.heterograph({("a", "r", "b"): none, ("b", "r", "a"): none}, num_nodes_dict={"a": 3, "b": 0, "c": 2})


GRAPHS = {
    "homogeneous": homogeneous_graph,
    "heterogeneous": heterogeneous_graph,
    "int32": lambda: heterogeneous_graph().int(),
    "csc with edge IDs": csc_with_edge_ids,
    "all dtypes": all_dtypes,
    "nothing": lambda: dgl.graph(([], [])),
    "isolated nodes": lambda: dgl.graph(([], []), num_nodes=5),
    "no edges": no_relation_has_edges,
    "batch": lambda: dgl.batch([homogeneous_graph(), homogeneous_graph(20)]),
}


def assert_same(path: Path, expected: Any) -> None:
    """Compare what the reader makes of a file, field by field, with a graph of DGL's."""
    found = open_graph_file(path)
    assert found.num_nodes == {ntype: expected.num_nodes(ntype) for ntype in expected.ntypes}
    assert [relation.etype for relation in found.relations] == expected.canonical_etypes
    frames = [(found.fields[ntype], expected.nodes[ntype].data) for ntype in expected.ntypes]
    for relation in found.relations:
        assert relation.edges.num_edges == expected.num_edges(relation.etype)
        for mine, theirs in zip(relation.edges.ends(), expected.edges(order="eid", etype=relation.etype), strict=True):
            assert mine.tolist() == theirs.tolist()
        frames.append((relation.fields, expected.edges[relation.etype].data))
    for fields, frame in frames:
        assert fields.keys() == frame.keys()
        for name, stored in fields.items():
            assert torch.equal(stored.load(), frame[name]), name
            assert stored.load().dtype == frame[name].dtype


@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("kind", GRAPHS)
def test_what_dgl_reads(tmp_path, kind, formats):
    path = tmp_path / "graph.dgl"
    dgl.save_graphs(str(path), [GRAPHS[kind]()], labels={"passed by": torch.arange(3)}, formats=formats)
    assert_same(path, dgl.load_graphs(str(path))[0][0])
