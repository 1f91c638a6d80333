"""The data with which one worker samples, in plain tensors: its in-edges, their features, and features of its nodes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, CanonicalEtype
from sar.core.graph.edges import InEdges
from sar.core.graph.graph import GraphShardManager
from sar.errors import FieldError, GraphError
from sar.logging_setup import logger
from sar.sampling.draws import MOST_WEIGHT
from sar.sampling.owner_requests import ID_FORMAT
from sar.tensors.lasting import lasting

Features = dict[str, dict[str, Tensor]]  # by node type and name, (N_type, ...) each


@dataclass(frozen=True)
class WorkerRelation:
    """The edges of one type into this worker."""

    etype: CanonicalEtype
    indptr: Tensor  # (N_dst + 1,) int64; edges have positions by destination
    src: Tensor  # (E,) global IDs of the sources, int32 or int64
    ids: Tensor  # (E,) int64, `dgl.EID` of the edges
    weights: Tensor | None  # (E,) floating point, by which edges are drawn; None for equal ones
    rows: Tensor  # (E,) int64, rows of the edges in `features`; empty if there are none
    features: dict[str, Tensor]  # further features to copy, (E, ...) each

    @property
    def formats(self) -> list[FieldFormat]:
        """The columns of drawn edges that travel: their number at each node, sources, IDs and further features."""
        columns = (self.src, self.ids, *self.features.values())
        return [ID_FORMAT, *map(FieldFormat.of, columns)]


class TypeRuns(NamedTuple):
    """Consecutive global IDs of nodes of one type, of all workers, ascending."""

    starts: Tensor  # (R,) int64, the first ID of each run
    types: Tensor  # (R,) int64, numbers of node types; types that the graph of one edge type lacks come last
    rows: Tensor  # (R,) int64, the row of the first node among its worker's nodes of the type

    @classmethod
    def gathered(cls, graph: GraphShardManager) -> "TypeRuns":
        """Gather the runs of all workers; a collective call."""
        columns = []
        for number, ntype in enumerate(dict.fromkeys([*graph.ntypes, *graph._structure.src.ids])):
            ids = graph._structure.src.ids[ntype].cpu()
            rows = torch.cat(
                [torch.zeros(min(len(ids), 1), dtype=torch.int64, device="cpu"), (ids.diff() != 1).nonzero()[:, 0] + 1]
            )
            columns.append(torch.stack([ids[rows], torch.full_like(rows, number), rows], dim=1))
        own = torch.cat(columns)
        everywhere = torch.cat(exchange_tensors([own] * session.world_size())).cpu()
        return cls(*everywhere[everywhere[:, 0].argsort()].T.contiguous())

    def of(self, nodes: Tensor) -> Tensor:
        """Numbers of the runs that nodes are in."""
        return torch.searchsorted(self.starts, nodes, right=True) - 1


@dataclass(frozen=True)
class WorkerGraph:
    """One worker's part of the graph, as samplers read it."""

    part: int  # this worker's partition; the nodes of partition p are on worker p
    node_ranges: list[tuple[int, int]]  # [start, end) of global node IDs of every partition
    runs: TypeRuns  # the types of all nodes, as numbers
    node_types: list[str]  # names of the types
    relations: list[WorkerRelation]  # one for every edge type
    inputs: Features  # of this worker's nodes, to set on the sources of the first layer
    outputs: Features  # and on the destinations of the last
    signature: str  # the workers agree on it before each exchange

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.node_ranges[-1][1]

    def rows(self, ntype: str, nodes: Tensor) -> Tensor:
        """Rows of this worker's nodes among those of their type."""
        if (start := self._only_starts.get(ntype)) is not None:
            return nodes - start
        runs = self.runs.of(nodes)
        return nodes - self.runs.starts[runs] + self.runs.rows[runs]

    @cached_property
    def _only_starts(self) -> dict[str, int]:
        """The first of this worker's nodes of each type whose nodes form a single run, as from partitioners."""
        start, end = self.node_ranges[self.part]
        own = (self.runs.starts >= start) & (self.runs.starts < end)
        found = {ntype: self.runs.starts[own & (self.runs.types == k)] for k, ntype in enumerate(self.node_types)}
        return {ntype: int(starts.sum()) for ntype, starts in found.items() if len(starts) <= 1}

    def by_type(self, nodes: Tensor) -> dict[str, Tensor]:
        """The nodes of every type, in the order given; a `GraphError` if a node has a type that the graph lacks."""
        if not bool(self.runs.types.any()):  # all nodes have the first type
            return {self.node_types[0]: nodes}
        types = self.runs.types[self.runs.of(nodes)]
        if bool((types >= len(self.node_types)).any()):
            raise GraphError(f"Some seeds are not of the node types {self.node_types} of this graph; leave them out.")
        return {ntype: nodes[types == number] for number, ntype in enumerate(self.node_types)}


@lasting
def make_worker_graph(
    graph: GraphShardManager,
    edges: Sequence[InEdges],
    settings: str,
    prob: str | None,
    copy_edata: bool,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> WorkerGraph:
    """The data with which this worker samples, agreed on with all workers; inside `group.guard()`.

    `edges` are the graph's in-edges, `settings` the sampler in words; the rest is as in `DistNeighborSampler`. Raises
    `FieldError` for fields that are not there or not fit.
    """
    logger.info("preparing %s", settings)
    group = session.current_group()
    part = graph._structure.group.rank
    etypes = [found.etype for found in edges]
    if prob is not None and not any(prob in graph.edges[etype].data for etype in etypes):
        raise FieldError(f"prob={prob!r} is not an edge field of the graph; expected one of {sorted(graph.edata)}.")
    relations = [_make_relation(graph, found, prob, copy_edata) for found in edges]
    of_inputs, of_outputs = _by_type(graph, inputs, "input"), _by_type(graph, outputs, "output")
    signature = f"{settings} on the graph {graph._structure.signature}"
    edge_formats = [(relation.etype, list(relation.features), relation.formats) for relation in relations]
    node_formats = [
        [(ntype, name, FieldFormat.of(table)) for ntype, named in features.items() for name, table in named.items()]
        for features in (of_inputs, of_outputs)
    ]
    group.agree(f"{signature}, with edge features {edge_formats} and node features {node_formats}")
    runs = TypeRuns.gathered(graph)
    return WorkerGraph(part, graph.node_ranges, runs, graph.ntypes, relations, of_inputs, of_outputs, signature)


def _make_relation(graph: GraphShardManager, found: InEdges, prob: str | None, copy_edata: bool) -> WorkerRelation:
    columns = dict(graph.edges[found.etype].data)
    ids = columns.pop(EID).cpu()[found.edges]
    weights = _weights(prob, columns[prob], found) if prob in columns else None
    features = {name: _plain(column) for name, column in sorted(columns.items())} if copy_edata else {}
    small = graph.node_ranges[-1][1] < 2**31
    src = found.src.to(torch.int32 if small else torch.int64)
    rows = found.edges if features else found.edges[:0]
    return WorkerRelation(found.etype, found.indptr, src, ids, weights, rows, features)


def _weights(prob: str, feature: Tensor, edges: InEdges) -> Tensor:
    """Weights by position."""
    feature = feature.detach().cpu()
    feature = feature.squeeze(1) if feature.dim() == 2 and feature.shape[1] == 1 else feature
    if feature.dim() != 1 or feature.is_complex():
        raise FieldError(
            f"prob={prob!r} has shape {tuple(feature.shape)} and {feature.dtype}; expected one number an edge."
        )
    feature = feature if feature.dtype in (torch.float32, torch.float64) else feature.double()
    if not bool(((feature >= 0) & feature.isfinite() & (feature <= MOST_WEIGHT)).all()):
        raise FieldError(
            f"prob={prob!r} has entries that are negative, infinite, NaN or above {MOST_WEIGHT:g}; expected weights of "
            "at least 0, if need be divided by the greatest."
        )
    return feature[edges.edges]


def _by_type(graph: GraphShardManager, given: Mapping[str, Tensor], what: str) -> Features:
    features: Features = {}
    for key, value in given.items():
        ntype, _, name = key.rpartition("/")
        if not ntype and len(graph.ntypes) == 1:
            ntype = graph.ntypes[0]
        if ntype not in graph.ntypes:
            raise FieldError(
                f"{what}_node_features has {key!r}, but the graph has the node types {graph.ntypes}; name them "
                "'type/name', or just 'name' if there is one type."
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
