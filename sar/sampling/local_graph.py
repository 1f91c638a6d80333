"""What one worker needs to sample, in plain tensors: its in-edges, their features, and features of its nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sar.comm import session
from sar.common_tuples import EID, CanonicalEtype
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.in_edges import InEdges
from sar.errors import FieldError, GraphError
from sar.sampling.packing import Form

Features = dict[str, dict[str, Tensor]]  # by node type and name, (N_type, ...) each


@dataclass(frozen=True)
class LocalRelation:
    """The edges of one type into this worker.

    indptr: (N_dst + 1,) int64; edges have positions by destination.
    src: (E,) global IDs of the sources, of `LocalGraph.id_dtype`.
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
    def forms(self) -> list[Form]:
        """What travels of drawn edges: their number at each node, sources, IDs and further fields."""
        columns = (self.src, self.ids, *self.features.values())
        return [Form(torch.int64), *map(Form.of, columns)]


@dataclass(frozen=True)
class LocalGraph:
    """One worker's part of the graph, as samplers read it.

    rank: this worker.
    node_ranges: [start, end) of global node IDs of every partition.
    type_starts: (W, types) int64, the first node of every type on every worker; nodes of a partition are by type.
    node_types: their names.
    relations: one for every edge type.
    inputs, outputs: features of this worker's nodes that go with the first sources and the last destinations.
    signature: what the workers agree on before each exchange.
    """

    rank: int
    node_ranges: list[tuple[int, int]]
    type_starts: Tensor
    node_types: list[str]
    relations: list[LocalRelation]
    inputs: Features
    outputs: Features
    signature: str

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.node_ranges[-1][1]

    def rows(self, ntype: str, nodes: Tensor) -> Tensor:
        """Rows of this worker's nodes among those of their type."""
        return nodes - self.type_starts[self.rank, self.node_types.index(ntype)]

    def owners(self, nodes: Tensor) -> Tensor:
        """The worker of each node."""
        ends = torch.tensor([end for _, end in self.node_ranges])
        return torch.searchsorted(ends, nodes, right=True)

    def by_type(self, nodes: Tensor) -> dict[str, Tensor]:
        """The nodes of every type, in the order given."""
        if len(self.node_types) == 1:
            return {self.node_types[0]: nodes}
        # Of types without nodes the last of equal starts is the one that has some.
        kinds = (torch.searchsorted(self.type_starts.flatten(), nodes, right=True) - 1) % len(self.node_types)
        return {ntype: nodes[kinds == kind] for kind, ntype in enumerate(self.node_types)}


def make_local_graph(
    graph: GraphShardManager,
    edges: Sequence[InEdges],
    prob: str | None,
    copy_edata: bool,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    settings: str,
) -> LocalGraph:
    """What this worker needs to sample, agreed on with all workers; inside `group.guard()`.

    Args:
        graph: the distributed graph.
        edges: its in-edges.
        prob: edge field with weights; None for equal ones.
        copy_edata: hand out all edge fields, not only IDs.
        inputs, outputs: features of this worker's nodes by `name`, or `type/name`.
        settings: the sampler in words.

    Raises:
        FieldError, GraphError: for fields that are not there or not fit.
        CommunicationError: where another worker raised, or disagrees.
    """
    group = session.current_group()
    starts = _type_starts(graph)
    columns = [dict(graph.edges[relation.etype].data) for relation in edges]
    if prob is not None and not any(prob in fields for fields in columns):
        raise FieldError(f"prob={prob!r} is not an edge field of the graph; expected one of {sorted(graph.edata)}.")
    small = graph.node_ranges[-1][1] < 2**31
    relations = [
        LocalRelation(
            found.etype,
            found.indptr,
            found.src.to(torch.int32 if small else torch.int64),
            fields.pop(EID).cpu()[found.edges],
            _weights(prob, fields[prob], found) if prob in fields else None,
            found.edges if copy_edata and fields else found.edges[:0],
            {name: _plain(value) for name, value in sorted(fields.items())} if copy_edata else {},
        )
        for found, fields in zip(edges, columns, strict=True)
    ]
    tables = [_by_type(graph, given, what) for given, what in ((inputs, "input"), (outputs, "output"))]
    signature = f"{settings} on the graph {graph._structure.signature}"
    edge_forms = [(relation.etype, list(relation.features), relation.forms) for relation in relations]
    node_forms = [
        [(ntype, name, Form.of(table)) for ntype, named in features.items() for name, table in named.items()]
        for features in tables
    ]
    group.agree(f"{signature}, with edge fields {edge_forms} and node features {node_forms}")
    everywhere = torch.stack(group.all_gather(starts, "type starts of a sampler"))
    return LocalGraph(
        group.rank, graph.node_ranges, everywhere, graph.ntypes, relations, tables[0], tables[1], signature
    )


def _type_starts(graph: GraphShardManager) -> Tensor:
    """The first global ID of this worker's nodes of every type, (types,) int64."""
    start = graph.node_ranges[session.rank()][0]
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
