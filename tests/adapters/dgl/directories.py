"""Partition directories for tests: written by the installed DGL, and rewritten into the formats of other writers."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sar.adapters.dgl.shim import require_dgl

dgl = require_dgl()

from dgl.data.utils import load_tensors, save_graphs, save_tensors  # noqa: E402


@dataclass
class Directory:
    """A partition directory and what it was made of.

    path: the JSON file.
    node_ids, edge_ids: original IDs by new per-type ID, for every node type and canonical edge type.
    """

    path: Path
    graph: Any
    num_parts: int
    node_ids: dict[str, Tensor]
    edge_ids: dict[tuple[str, str, str], Tensor]

    def json(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def edit(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Apply a change to the JSON file's content."""
        content = self.json()
        change(content)
        self.path.write_text(json.dumps(content))

    def file(self, part: int, kind: str) -> Path:
        return self.path.parent / self.json()[f"part-{part}"][kind]

    def edit_graph(self, part: int, change: Callable[[Any], Any]) -> None:
        """Replace the graph of a partition."""
        path = self.file(part, "part_graph")
        save_graphs(str(path), [change(dgl.load_graphs(str(path))[0][0])])

    def edit_features(self, part: int, kind: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """Replace the features of a partition."""
        path = self.file(part, kind)
        save_tensors(str(path), change(load_tensors(str(path))))


def homogeneous_graph(num_nodes: int = 60, num_edges: int = 300, seed: int = 0) -> Any:
    """A multigraph with self-loops, isolated nodes, and every kind of feature."""
    random = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_nodes - 5, (num_edges,), generator=random)
    dst = torch.randint(0, num_nodes - 5, (num_edges,), generator=random)
    dst[:10] = src[:10]
    graph = dgl.graph((src, dst), num_nodes=num_nodes)
    graph.ndata["feat"] = torch.randn(num_nodes, 3, generator=random)
    graph.ndata["label"] = torch.arange(num_nodes)
    graph.ndata["mask"] = torch.rand(num_nodes, generator=random) < 0.5
    graph.edata["w"] = torch.randn(num_edges, generator=random)
    graph.edata["e/f"] = torch.randn(num_edges, 2, 2, generator=random).double()
    return graph


def heterogeneous_graph(seed: int = 0, venues: int = 12) -> Any:
    """Three node types, four relations, one of them under a name that two of them share."""
    random = torch.Generator().manual_seed(seed)
    sizes = {"author": 30, "paper": 40, "venue": venues}

    def draw(src_type: str, dst_type: str, count: int) -> tuple[Tensor, Tensor]:
        ends = [torch.randint(0, sizes[ntype], (count,), generator=random) for ntype in (src_type, dst_type)]
        return ends[0], ends[1]

    graph = dgl.heterograph(
        {
            ("author", "writes", "paper"): draw("author", "paper", 150),
            ("paper", "cites", "paper"): draw("paper", "paper", 120),
            ("paper", "in", "venue"): draw("paper", "venue", 90),
            ("venue", "prints", "paper"): draw("venue", "paper", 80),
        },
        num_nodes_dict=sizes,
    )
    graph.nodes["paper"].data["feat"] = torch.randn(40, 5, generator=random)
    graph.nodes["author"].data["feat"] = torch.randn(30, 2, generator=random)
    for etype in ("writes", "in"):
        graph.edges[etype].data["w"] = torch.randn(graph.num_edges(etype), generator=random)
    graph.edges["cites"].data["year"] = torch.arange(120)
    return graph


def write_directory(folder: Path, graph: Any, num_parts: int, method: str = "random", **options: Any) -> Directory:
    """Partition a graph with DGL; random assignments are fixed."""
    dgl.seed(1)
    node_ids, edge_ids = dgl.distributed.partition_graph(
        graph, "graph", num_parts, str(folder), part_method=method, return_mapping=True, **options
    )
    if graph.is_homogeneous:
        node_ids, edge_ids = {graph.ntypes[0]: node_ids}, {graph.canonical_etypes[0]: edge_ids}
    return Directory(folder / "graph.json", graph, num_parts, node_ids, edge_ids)


def to_dispatch(directory: Directory, *, features: bool, orig_ids: bool) -> Directory:
    """Rewrite a directory as DGL's dispatch pipeline writes it: in-edges only, types always, no `part_id`."""
    book = _book(directory)

    def rewrite(graph: Any) -> Any:
        inner = graph.edata["inner_edge"].bool()
        src, dst = (ends[inner] for ends in graph.edges(order="eid"))
        result = dgl.graph((src, dst), num_nodes=graph.num_nodes())
        for key in ("_ID", "inner_node"):
            result.ndata[key] = graph.ndata[key]
        for key in ("_ID", "inner_edge"):
            result.edata[key] = graph.edata[key][inner]
        result.ndata["_TYPE"] = book.map_to_per_ntype(graph.ndata["_ID"])[0].int()
        result.edata["_TYPE"] = book.map_to_per_etype(result.edata["_ID"])[0].int()
        return result

    for part in range(directory.num_parts):
        directory.edit_graph(part, rewrite)
        if not features:
            directory.file(part, "node_feats").unlink()
            directory.file(part, "edge_feats").unlink()
        if orig_ids:
            folder = directory.file(part, "part_graph").parent
            nodes = {name: ids[book.partid2nids(part, name)] for name, ids in directory.node_ids.items()}
            edges = {":".join(name): ids[book.partid2eids(part, name)] for name, ids in directory.edge_ids.items()}
            save_tensors(str(folder / "orig_nids.dgl"), nodes)
            save_tensors(str(folder / "orig_eids.dgl"), edges)
    directory.path = directory.path.rename(directory.path.with_name("metadata.json"))
    return directory


def insert_empty_partition(directory: Directory, at: int) -> Directory:
    """Put a partition without nodes and edges among the others, its ranges written as [-1, -1]."""
    parts = directory.json()["num_parts"]
    for part in reversed(range(at, parts)):
        shutil.move(directory.path.parent / f"part{part}", directory.path.parent / f"part{part + 1}")
    empty = dgl.graph(([], []))
    for fields in (empty.ndata, empty.edata):
        fields["_ID"] = torch.zeros(0, dtype=torch.int64)
    empty.ndata["inner_node"] = torch.zeros(0, dtype=torch.uint8)

    def change(content: dict[str, Any]) -> None:
        for key in ("node_map", "edge_map"):
            for ranges in content[key].values():
                ranges.insert(at, [-1, -1])
        content["num_parts"] = parts + 1
        files = {"part_graph": "graph.dgl", "node_feats": "node_feat.dgl", "edge_feats": "edge_feat.dgl"}
        for part in range(parts + 1):
            content[f"part-{part}"] = {kind: f"part{part}/{name}" for kind, name in files.items()}

    directory.edit(change)
    directory.num_parts = parts + 1
    folder = directory.path.parent / f"part{at}"
    folder.mkdir()
    save_graphs(str(folder / "graph.dgl"), [empty])
    save_tensors(str(folder / "node_feat.dgl"), {})
    save_tensors(str(folder / "edge_feat.dgl"), {})
    return directory


def _book(directory: Directory) -> Any:
    return dgl.distributed.load_partition_book(str(directory.path), 0)[0]
