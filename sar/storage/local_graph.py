"""The graph of one partition as its `graph.dgl` has it: homogeneous, of own nodes and halo, with local node numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from sar.common_tuples import EID, ETYPE, NID, NTYPE, ORIG_ID
from sar.errors import PartitionError
from sar.storage.graph_file import StoredGraph, open_graph
from sar.storage.partition_json import REWRITE, PartitionJson
from sar.storage.stored_tensor import load

SRC: Final = "src"
DST: Final = "dst"
INNER_NODE: Final = "inner_node"
INNER_EDGE: Final = "inner_edge"
PART_ID: Final = "part_id"


@dataclass
class LocalGraph:
    """The graph of one partition, with everything that the reader has no use for dropped.

    node_id: (N,) global IDs of the partition's nodes and halo.
    is_inner: (N,) whether the partition owns the node.
    orig_node_id: (N,) IDs in the input graph, which DGL wrote up to 0.9.
    edges: (E,) each: `src` and `dst` (local nodes), `_ID` (global), and `orig_id` where DGL wrote it.
    """

    node_id: Tensor
    is_inner: Tensor
    orig_node_id: Tensor | None
    edges: dict[str, Tensor]


class PartFile:
    """A `graph.dgl`: what it has, before it is read.

    nodes, edges: fields of DGL's own, a whole number for each node or edge.

    Raises:
        PartitionError: the file is missing or damaged, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        graph = open_graph(path)
        if len(graph.num_nodes) != 1 or len(graph.relations) != 1:
            raise _no_partition(graph, f"{len(graph.num_nodes)} types of nodes and {len(graph.relations)} of edges")
        [self._relation], [nodes] = graph.relations, graph.fields.values()
        edges = self._relation.fields
        if NID not in nodes or EID not in edges or INNER_NODE not in nodes:
            raise _no_partition(graph, f"the node fields {sorted(nodes)} and edge fields {sorted(edges)}")
        self.nodes = {key: nodes[key] for key in (NID, NTYPE, INNER_NODE, PART_ID, ORIG_ID) if key in nodes}
        self.edges = {key: edges[key] for key in (EID, ETYPE, INNER_EDGE, ORIG_ID) if key in edges}
        for name, stored in (*self.nodes.items(), *self.edges.items()):
            if len(stored.shape) != 1 or stored.dtype.is_floating_point or stored.dtype.is_complex:
                raise PartitionError(
                    f"{path} has {name} of {stored.dtype} and shape {stored.shape}; expected one whole number for each "
                    f"node or edge. {REWRITE}"
                )

    def read(self) -> LocalGraph:
        """Read what the reader needs."""
        src, dst = self._relation.edges.ends()
        fields = {key: load(self.edges[key]).long() for key in (EID, ORIG_ID) if key in self.edges}
        return LocalGraph(
            node_id=load(self.nodes[NID]).long(),
            is_inner=load(self.nodes[INNER_NODE]).bool(),
            orig_node_id=load(self.nodes[ORIG_ID]) if ORIG_ID in self.nodes else None,
            edges={SRC: src, DST: dst} | fields,
        )


def check_node_ids(spec: PartitionJson, part: int, graph: LocalGraph) -> None:
    """Raise `PartitionError` where a partition's graph has other nodes than the JSON file says."""
    path = spec.files[part]["part_graph"]
    own = graph.node_id[graph.is_inner].sort().values
    start, end = spec.partition_ranges[part]
    if len(own) != end - start or not torch.equal(own, torch.arange(start, end)):
        raise PartitionError(
            f"{path} holds {len(own)} nodes of partition {part}; expected one for every node ID in [{start}, {end}), "
            f"as {spec.path.name} says. {REWRITE}"
        )
    num_nodes = spec.partition_ranges[-1][1]
    if not bool(((graph.node_id >= 0) & (graph.node_id < num_nodes)).all()):
        raise PartitionError(f"{path} has node IDs outside [0, {num_nodes}), the nodes of {spec.path.name}. {REWRITE}")


def _no_partition(graph: StoredGraph, found: str) -> PartitionError:
    return PartitionError(
        f"{graph.path} has {found}; expected a graph of one type, with at least {NID} and {INNER_NODE} on nodes, {EID} "
        "on edges. It is not the graph of a partition: check the JSON file's paths."
    )
