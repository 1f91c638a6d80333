"""What one worker needs to sample, in plain tensors: its in-edges, their features, and features of its nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.in_edges import InEdges
from sar.errors import FieldError, GraphError
from sar.sampling.owner_requests import ID_FORMAT, NodesByOwner

Features = dict[str, dict[str, Tensor]]  # by node type and name, (N_type, ...) each


@dataclass(frozen=True)
class WorkerRelation:
    """The edges of one type into this worker.

    indptr: (N_dst + 1,) int64; edges have positions by destination.
    src: (E,) global IDs of the sources, int32 or int64.
    ids: (E,) int64, `dgl.EID` of the edges.
    weights: (E,) floating point, by which edges are drawn; None for equal ones.
    rows: (E,) int64, rows of the edges in `features`; empty where there are none.
    features: further fields to copy, (E, ...) each.
    """

    etype: CanonicalEtype
    indptr: Tensor
    src: Tensor
    ids: Tensor
    weights: Tensor | None
    rows: Tensor
    features: dict[str, Tensor]

    @property
    def formats(self) -> list[FieldFormat]:
        """What travels of drawn edges: their number at each node, sources, IDs and further fields."""
        columns = (self.src, self.ids, *self.features.values())
        return [ID_FORMAT, *map(FieldFormat.of, columns)]


@dataclass(frozen=True)
class WorkerGraph:
    """One worker's part of the graph, as samplers read it.

    part: this worker's partition. The nodes of partition p are on worker p.
    node_ranges: [start, end) of global node IDs of every partition.
    type_starts: (P, types) int64, the first node of every type in every partition, which has its nodes by type.
    node_types: their names.
    relations: one for every edge type.
    inputs, outputs: features of this worker's nodes that go with the first sources and the last destinations.
    signature: what the workers agree on before each exchange.
    """

    part: int
    node_ranges: list[tuple[int, int]]
    type_starts: Tensor
    node_types: list[str]
    relations: list[WorkerRelation]
    inputs: Features
    outputs: Features
    signature: str

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.node_ranges[-1][1]

    def rows(self, ntype: str, nodes: Tensor) -> Tensor:
        """Rows of this worker's nodes among those of their type."""
        return nodes - self.type_starts[self.part, self.node_types.index(ntype)]

    def is_own(self, nodes: Tensor) -> Tensor:
        """Which of the nodes are this worker's, bool."""
        start, end = self.node_ranges[self.part]
        return (nodes >= start) & (nodes < end)

    def sort_by_owner(self, nodes: Tensor) -> NodesByOwner:
        """The nodes sorted by the worker that has them."""
        return NodesByOwner.sort(nodes, [end for _, end in self.node_ranges])

    def by_type(self, nodes: Tensor) -> dict[str, Tensor]:
        """The nodes of every type, in the order given."""
        if len(self.node_types) == 1:
            return {self.node_types[0]: nodes}
        # Of types without nodes the last of equal starts is the one that has some.
        types = (torch.searchsorted(self.type_starts.flatten(), nodes, right=True) - 1) % len(self.node_types)
        return {ntype: nodes[types == number] for number, ntype in enumerate(self.node_types)}


@dataclass(frozen=True)
class BatchFields:
    """Which fields go with sampled edges and nodes.

    prob: edge field with weights to draw by; None for equal ones.
    copy_edata: all edge fields, not only IDs.
    inputs, outputs: features of this worker's nodes by `name`, or `type/name`.
    """

    prob: str | None
    copy_edata: bool
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


def make_worker_graph(
    graph: GraphShardManager, edges: Sequence[InEdges], fields: BatchFields, settings: str
) -> WorkerGraph:
    """What this worker needs to sample, agreed on with all workers; inside `group.guard()`.

    Args:
        graph: the distributed graph.
        edges: its in-edges.
        fields: which fields are wanted.
        settings: the sampler in words.

    Raises:
        FieldError, GraphError: for fields that are not there or not fit.
        CommunicationError: where another worker raised, or disagrees.
    """
    group = session.current_group()
    part = graph._structure.part
    starts = _type_starts(graph, part)
    etypes = [found.etype for found in edges]
    if fields.prob is not None and not any(fields.prob in graph.edges[etype].data for etype in etypes):
        raise FieldError(
            f"prob={fields.prob!r} is not an edge field of the graph; expected one of {sorted(graph.edata)}."
        )
    relations = [_make_relation(graph, found, fields) for found in edges]
    inputs = _by_type(graph, fields.inputs, "input")
    outputs = _by_type(graph, fields.outputs, "output")
    signature = f"{settings} on the graph {graph._structure.signature}"
    edge_formats = [(relation.etype, list(relation.features), relation.formats) for relation in relations]
    node_formats = [
        [(ntype, name, FieldFormat.of(table)) for ntype, tables in features.items() for name, table in tables.items()]
        for features in (inputs, outputs)
    ]
    group.agree(f"{signature}, with edge fields {edge_formats} and node features {node_formats}")
    everywhere = torch.stack(group.all_gather(starts, "type starts of a sampler"))
    return WorkerGraph(part, graph.node_ranges, everywhere, graph.ntypes, relations, inputs, outputs, signature)


def _make_relation(graph: GraphShardManager, found: InEdges, fields: BatchFields) -> WorkerRelation:
    columns = dict(graph.edges[found.etype].data)
    ids = columns.pop(EID).cpu()[found.edges]
    weights = None
    if fields.prob in columns:
        weights = _weights(fields.prob, columns[fields.prob], found)
    features = {}
    if fields.copy_edata:
        features = {name: _plain(column) for name, column in sorted(columns.items())}
    small = graph.node_ranges[-1][1] < 2**31
    src = found.src.to(torch.int32 if small else torch.int64)
    rows = found.edges if features else found.edges[:0]
    return WorkerRelation(found.etype, found.indptr, src, ids, weights, rows, features)


def _type_starts(graph: GraphShardManager, part: int) -> Tensor:
    """The first global ID of every type in a partition, (types,) int64."""
    start = graph.node_ranges[part][0]
    starts = []
    for ntype, ids in graph._structure.src.ids.items():
        starts.append(start)
        if len(ids) and (int(ids[0]), int(ids[-1])) != (start, start + len(ids) - 1):
            raise GraphError(
                f"The nodes of type {ntype!r} do not follow each other in the partition, from {start} on; expected its "
                "nodes sorted by type, as DGL's partitioner leaves them."
            )
        start += len(ids)
    return torch.tensor(starts, dtype=torch.int64)


def _weights(prob: str, field: Tensor, edges: InEdges) -> Tensor:
    """Weights by position."""
    field = field.detach().cpu()
    field = field.squeeze(1) if field.dim() == 2 and field.shape[1] == 1 else field
    if field.dim() != 1 or field.is_complex():
        raise FieldError(
            f"prob={prob!r} has shape {tuple(field.shape)} and {field.dtype}; expected one number an edge."
        )
    field = field if field.dtype in (torch.float32, torch.float64) else field.float()
    if not bool(((field >= 0) & field.isfinite()).all()):
        raise FieldError(
            f"prob={prob!r} has entries that are negative, infinite or NaN; expected weights of at least 0."
        )
    return field[edges.edges]


def _by_type(graph: GraphShardManager, given: Mapping[str, Tensor], what: str) -> Features:
    features: Features = {}
    for key, value in given.items():
        ntype, _, name = key.rpartition("/")
        if not ntype and len(graph.ntypes) == 1:
            ntype = graph.ntypes[0]
        if ntype not in graph.ntypes:
            raise FieldError(
                f"{what}_node_features has {key!r}, but the graph has the node types {graph.ntypes}; name them "
                "'type/name', or just 'name' where there is one type."
            )
        if value.dim() == 0 or len(value) != graph.num_nodes(ntype):
            raise FieldError(
                f"{what}_node_features[{key!r}] has shape {tuple(value.shape)}; expected a row for each of this "
                f"worker's {graph.num_nodes(ntype)} nodes of type {ntype!r}."
            )
        features.setdefault(ntype, {})[name] = _plain(value)
    return {ntype: features[ntype] for ntype in graph.ntypes if ntype in features}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
