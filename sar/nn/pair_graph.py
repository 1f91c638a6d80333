"""Graphs of node pairs that the workers give, such as the positive and negative pairs of link prediction.

Each pair travels to the owner of its destination, as the engine keeps edges; what is computed there can travel back.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.common_tuples import EID, NTYPE, ORIG_ID, CanonicalEtype, PartitionData, ShardEdgesAndFeatures
from sar.core.collective import Collective, Made
from sar.core.eager import uncompiled
from sar.core.graph.frames import Frames
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import Relation, Structure, build_structure
from sar.errors import GraphError
from sar.nn.fetch_rows import RowOwners

Pairs = TypeVar("Pairs", bound="PairGraph")


@dataclass(frozen=True)
class _Route:
    """How pairs went from the workers that gave them to those that have them as edges.

    given: this worker's pairs by the worker that has them, then as given, (K,); `sent` to each worker.
    edges: this worker's edges by the worker that gave them, then as given, (E,); `arrived` from each worker.
    """

    given: Tensor
    sent: list[int]
    edges: Tensor
    arrived: list[int]


class PairGraph(GraphShardManager):
    """A graph of pairs, without edge features; `edata["_ID"]` numbers the pairs of worker 0 as given, then of worker 1.

    Made by `pair_graph`.
    """

    _route: _Route

    @uncompiled
    def in_given_order(self, values: Tensor) -> Tensor:
        """Values of the edges, at the workers that gave the pairs and in their order, with gradients; collective.

        Args:
            values: a row for each edge into this worker, (E, ...), such as `edata["score"]`; equal dtype and width on
                all workers.

        Returns:
            (K, ...), a row for each pair that this worker gave.

        Raises:
            GraphError: for values of another length, such as those of a graph made of this one by `add_self_loop`.
        """
        group, count = self._structure.group, len(self._route.edges)
        with group.guard():
            if values.dim() == 0 or len(values) != count:
                raise GraphError(
                    f"The values have shape {tuple(values.shape)}; expected {count} rows, one for each pair into this "
                    "worker."
                )
            return _Return(self._structure, self._route, values).apply(values)[0]

    def _with(
        self: Pairs,
        structure: Structure | None = None,
        relations: list[Relation] | None = None,
        frames: Frames | None = None,
    ) -> Pairs:
        made = super()._with(structure, relations, frames)
        made._route = self._route
        return made


class _Return(Collective):
    def __init__(self, structure: Structure, route: _Route, values: Tensor) -> None:
        call = f"in_given_order of {values.dtype} {list(values.shape[1:])}, graph {structure.signature}"
        super().__init__(structure.group, call)
        self.route = route

    def forward(self, values: Tensor) -> Made:
        return Made((_carried(values, self.route.edges, self.route.arrived, self.route.given),))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> tuple[Tensor]:
        return (_carried(grads[0], self.route.given, self.route.sent, self.route.edges),)


def _carried(values: Tensor, order: Tensor, counts: list[int], places: Tensor) -> Tensor:
    """What arrives, at `places`, where each worker sends its values in `order`, `counts` of them to each worker."""
    arrived = torch.cat(exchange_tensors(values[order.to(values.device)].split(counts))).to(values.device)
    return torch.empty_like(arrived).index_copy_(0, places.to(values.device), arrived)


@uncompiled
def pair_graph(
    graph: GraphShardManager, src: Tensor, dst: Tensor, etype: str | CanonicalEtype | None = None
) -> PairGraph:
    """A graph of the same nodes whose edges are the pairs that all workers give; called by all workers together.

    It takes the place of `dgl.graph((src, dst), num_nodes=g.num_nodes())`: set fields in `ndata`, score the pairs with
    `apply_edges`, or run layers on it. Frames begin empty. Nodes are this worker's, edges are those into them in the
    visible order; `in_given_order` brings values back to where the pairs were given. Pairs may be given repeatedly.

    Args:
        graph: the whole graph.
        src: global IDs of the pairs' sources, (K,) int64, also other workers' nodes; may be empty.
        dst: those of their destinations, (K,).
        etype: edge type of the pairs: one of the graph, or a new (source type, relation, destination type); may be left
            out where there is one.

    Raises:
        GraphError: for a message flow graph, or IDs that are not of nodes of the right type.
        FieldError: for an unknown type.
    """
    group = session.current_group()
    with group.guard():
        kind = etype if isinstance(etype, tuple) and len(etype) == 3 else graph._relation(etype).etype
        sources, destinations = RowOwners(graph, kind[0]), RowOwners(graph, kind[2])
        src, dst = sources.checked(src), destinations.checked(dst)
        if len(src) != len(dst):
            raise GraphError(f"There are {len(src)} sources and {len(dst)} destinations; expected one of each a pair.")
        call = f"pair_graph along {kind}, graph {graph._structure.signature}"
        group.agree(call)
        counts = group.all_gather(torch.tensor([len(src)]), call)
        ids = torch.arange(len(src)) + sum(int(count) for count in counts[: group.rank])
        given, sent = destinations.sort(dst)
        pieces = exchange_tensors(torch.stack([src, dst, ids], 1)[given].split(sent))
        src, dst, ids = torch.cat(pieces).t().contiguous().cpu()
        if len(graph._structure.dst.ids) > 1:  # else all nodes are of the right type
            destinations.rows(dst)
            distinct = src.unique()
            for asked in exchange_tensors(sources.split(distinct, distinct)):
                sources.rows(asked)
        data = _partition_of_pairs(graph, kind, sources.sort(src), (src, dst, ids))
        structure, features = build_structure(data, group, graph._structure.make_sampling_graph)
        # Positive and negative pairs may have the same numbers of edges, and must not be taken for each other.
        structure = structure.with_relations(structure.relations, f"of the pairs of call {group.call_id}")
    made = make_graph(structure, features, graph.partition_book)
    pairs = PairGraph(structure, structure.relations, made._frames, graph.partition_book)
    pairs._route = _Route(given, sent, made.edata[EID].argsort(), [len(piece) for piece in pieces])
    return pairs


def _partition_of_pairs(
    graph: GraphShardManager,
    etype: CanonicalEtype,
    by_source: tuple[Tensor, list[int]],
    edges: tuple[Tensor, Tensor, Tensor],
) -> PartitionData:
    """This worker's nodes with edges into them: global IDs of the ends, and edge IDs, (E,) each; and their order."""
    old = graph._structure
    order, counts = by_source
    shards = [column[order].to(graph.device).split(counts) for column in edges]
    start, end = old.node_ranges[old.part]
    kinds = torch.zeros(end - start, dtype=torch.int64, device=graph.device)
    for number, of_type in enumerate(old.dst.ids.values()):
        kinds[of_type - start] = number
    node_features = {NTYPE: kinds} if old.original_ids is None else {NTYPE: kinds, ORIG_ID: old.original_ids}
    return PartitionData(
        [ShardEdgesAndFeatures((s, d), {EID: i}) for s, d, i in zip(*shards, strict=True)],
        old.node_ranges,
        node_features,
        list(old.dst.ids),
        [etype],
        graph.partition_book,
    )
