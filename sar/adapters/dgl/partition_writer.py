"""Writes partition directories in the format of `dgl.distributed.partition_graph`.

DGL's own writer needs nodes and edges of every type in every part, which small types cannot have; METIS is DGL's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sar.adapters.dgl.metis import metis_of_edges
from sar.adapters.dgl.shim import require_dgl
from sar.common_tuples import EID, ETYPE, NID, NTYPE, CanonicalEtype

Array = NDArray[Any]

ORIGINAL_NODES = "orig_nids.dgl"
ORIGINAL_EDGES = "orig_eids.dgl"
"""The files in which DGL's distributed partitioning pipeline leaves the original IDs of each part."""


class PartSize(NamedTuple):
    """The size of one part.

    nodes: its nodes, of all types.
    edges: the edges into them.
    cut: how many of these come from other parts.
    """

    nodes: int
    edges: int
    cut: int


@dataclass(frozen=True)
class _Ordered:
    """Nodes or edges of all types in their new order: by part, then type, then original ID.

    old: (N,) ID with all types counted through, of each new ID.
    ranges: (num_parts, num_types, 2), the new IDs [start, end) by part and type.
    """

    old: Tensor
    ranges: Tensor

    @classmethod
    def by_part(cls, part_of: Tensor, counts: list[int], num_parts: int) -> "_Ordered":
        """Order by `part_of`, (N,), what is already ordered by type; `counts` by type."""
        kind = torch.repeat_interleave(torch.tensor(counts))
        sizes = torch.bincount(part_of * len(counts) + kind, minlength=num_parts * len(counts))
        ends = sizes.cumsum(0)
        return cls(part_of.argsort(stable=True), torch.stack([ends - sizes, ends], 1).view(num_parts, len(counts), 2))

    def bounds(self, part: int) -> tuple[int, int]:
        """The new IDs [start, end) of a part."""
        return int(self.ranges[part, 0, 0]), int(self.ranges[part, -1, 1])

    def originals(self, part: int) -> list[Tensor]:
        """By type, the IDs within the type of what a part has."""
        sizes = (self.ranges[..., 1] - self.ranges[..., 0]).sum(0)
        firsts = (sizes.cumsum(0) - sizes).tolist()
        ranges = self.ranges[part].tolist()
        return [self.old[start:end] - first for (start, end), first in zip(ranges, firsts, strict=True)]

    def types(self, part: int) -> Tensor:
        """The type of each of a part's new IDs, int32."""
        return torch.repeat_interleave(self.ranges[part, :, 1] - self.ranges[part, :, 0]).int()


def write_metis_partitions(
    num_nodes: Mapping[str, int],
    edges: Mapping[CanonicalEtype, tuple[Array, Array]],
    node_data: Mapping[str, Mapping[str, Array]],
    out_dir: Path,
    graph_name: str,
    num_parts: int,
) -> list[PartSize]:
    """Assign nodes to parts with METIS, with about equal numbers of edges into them, and write a directory for each.

    Args:
        num_nodes: N_t by node type.
        edges: (source, destination) by canonical edge type, int64, (E_r,) each.
        node_data: node fields by node type, (N_t, ...) each.
        out_dir: an existing directory.
        graph_name: the JSON file becomes `out_dir/graph_name.json`.
        num_parts: W.

    Returns:
        The size of each part. Original IDs, within types, are written beside it.
    """
    require_dgl()
    ntypes, etypes = sorted(num_nodes), sorted(edges)
    names = [":".join(etype) for etype in etypes]
    node_counts, edge_counts = [num_nodes[t] for t in ntypes], [len(edges[etype][0]) for etype in etypes]
    src, dst = _counted_through(num_nodes, edges)
    part_of = metis_of_edges(src, dst, sum(node_counts), num_parts)
    nodes = _Ordered.by_part(part_of, node_counts, num_parts)
    in_edges = _Ordered.by_part(part_of[dst], edge_counts, num_parts)
    new_id = torch.empty_like(nodes.old)
    new_id[nodes.old] = torch.arange(len(new_id))
    sizes = []
    for part in range(num_parts):
        folder = out_dir / f"part{part}"
        folder.mkdir()
        mine = in_edges.old[slice(*in_edges.bounds(part))]
        sizes.append(_write_graph(folder, part, nodes, in_edges, new_id[src[mine]], new_id[dst[mine]]))
        _write_fields(folder, node_data, dict(zip(ntypes, nodes.originals(part), strict=True)))
        _save(folder / ORIGINAL_EDGES, dict(zip(names, in_edges.originals(part), strict=True)))
    content = {
        "graph_name": graph_name,
        "num_nodes": sum(node_counts),
        "num_edges": sum(edge_counts),
        "part_method": "metis",
        "num_parts": num_parts,
        "halo_hops": 1,
        "node_map": {t: nodes.ranges[:, i].tolist() for i, t in enumerate(ntypes)},
        "edge_map": {name: in_edges.ranges[:, i].tolist() for i, name in enumerate(names)},
        "ntypes": {t: i for i, t in enumerate(ntypes)},
        "etypes": {name: i for i, name in enumerate(names)},
    }
    files = {"node_feats": "node_feat.dgl", "edge_feats": "edge_feat.dgl", "part_graph": "graph.dgl"}
    for part in range(num_parts):
        content[f"part-{part}"] = {kind: f"part{part}/{file}" for kind, file in files.items()}
    (out_dir / f"{graph_name}.json").write_text(json.dumps(content, indent=1))
    return sizes


def _counted_through(
    num_nodes: Mapping[str, int], edges: Mapping[CanonicalEtype, tuple[Array, Array]]
) -> tuple[Tensor, Tensor]:
    """Sources and destinations of all edges, types one after the other, with node IDs counted through the types."""
    ntypes = sorted(num_nodes)
    first = dict(zip(ntypes, np.cumsum([0, *(num_nodes[t] for t in ntypes)]).tolist(), strict=False))
    src = np.concatenate([edges[etype][0] + first[etype[0]] for etype in sorted(edges)])
    dst = np.concatenate([edges[etype][1] + first[etype[2]] for etype in sorted(edges)])
    return torch.from_numpy(src), torch.from_numpy(dst)


def _write_graph(folder: Path, part: int, nodes: _Ordered, in_edges: _Ordered, src: Tensor, dst: Tensor) -> PartSize:
    """Write a part's nodes, the edges into them (new IDs, (E_i,) each), and the halo that these come from."""
    dgl = require_dgl()
    start, end = nodes.bounds(part)
    own = (src >= start) & (src < end)
    halo = src[~own].unique()
    local_src = torch.where(own, src - start, end - start + torch.searchsorted(halo, src))
    graph = dgl.graph((local_src, dst - start), num_nodes=end - start + len(halo))
    ids = torch.cat([torch.arange(start, end), halo])
    place = torch.searchsorted(nodes.ranges[..., 1].contiguous().view(-1), ids, right=True)  # part-major, then type
    num_types = nodes.ranges.shape[1]
    graph.ndata[NID] = ids
    graph.ndata[NTYPE] = (place % num_types).int()
    graph.ndata["part_id"] = place // num_types
    graph.ndata["inner_node"] = (torch.arange(len(ids)) < end - start).to(torch.uint8)
    graph.edata[EID] = torch.arange(*in_edges.bounds(part))
    graph.edata[ETYPE] = in_edges.types(part)
    graph.edata["inner_edge"] = torch.ones(len(src), dtype=torch.uint8)
    dgl.save_graphs(str(folder / "graph.dgl"), [graph])
    return PartSize(end - start, len(src), int((~own).sum()))


def _write_fields(folder: Path, node_data: Mapping[str, Mapping[str, Array]], originals: dict[str, Tensor]) -> None:
    """Write the node fields of a part, whose original IDs are given by node type, and these IDs."""
    fields = {
        f"{ntype}/{key}": torch.from_numpy(value)[originals[ntype]]
        for ntype, columns in node_data.items()
        for key, value in columns.items()
    }
    # Like DGL, which has no bool in its files.
    _save(folder / "node_feat.dgl", {k: v.to(torch.uint8) if v.dtype == torch.bool else v for k, v in fields.items()})
    _save(folder / "edge_feat.dgl", {})
    _save(folder / ORIGINAL_NODES, originals)


def _save(file: Path, tensors: dict[str, Tensor]) -> None:
    require_dgl()
    import dgl.data.utils

    dgl.data.utils.save_tensors(str(file), tensors)
