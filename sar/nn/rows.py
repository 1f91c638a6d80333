"""Fetches rows of any nodes from their owners, and builds graphs of any pairs of nodes. Both have gradients.

Each pair, such as a positive or negative one of link prediction, goes to the owner of its destination, because the
engine keeps edges there. Values of the pairs can be sent back to the workers that passed them.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.common_tuples import EID, NTYPE, ORIG_ID, AnyEtype, PartitionData, ShardEdgesAndFeatures
from sar.core.build import build_structure
from sar.core.collective import Collective, ForwardOutput, uncompiled
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.relation import Structure
from sar.errors import GraphError
from sar.kernels import accumulation_dtype
from sar.tensors.ids import find_sorted
from sar.tensors.lasting import lasting
from sar.tensors.views import to_device

Pairs = TypeVar("Pairs", bound="PairGraph")


def send(ids: Tensor, values: Tensor, ends: Tensor) -> list[Tensor]:
    """Send values of ascending `ids`, (K,), to the workers whose ranges of IDs have these `ends`; a collective call.

    Returns the values that arrive, by sender.
    """
    sizes = torch.searchsorted(ids, ends).diff(prepend=ends.new_zeros(1)).tolist()
    return exchange_tensors(to_device(values, session.comm_device()).split(sizes))


class RowOwners:
    """The owners of the nodes of a type, and the rows that they have there.

    `node_ids` are the global IDs of this worker's nodes, (N_i,) int64, ascending, in the order of their rows;
    `ends`, (W,), the ends of all workers' ranges of IDs.
    """

    def __init__(self, graph: GraphShardManager, ntype: str | None) -> None:
        if graph.is_block:
            raise GraphError("A message flow graph has only some of the nodes; give the whole graph.")
        self.node_ids = graph.node_ids(ntype)
        self.ntype = ntype or "nodes"
        self.ends = torch.tensor([end for _, end in graph.node_ranges], device="cpu")
        self._rank = graph._structure.group.rank
        start, end = graph.node_ranges[self._rank]
        self._first = start if len(self.node_ids) == end - start else None  # of this worker's nodes, if all are these

    def checked(self, node_ids: Tensor) -> Tensor:
        """The IDs as int64 on the CPU. Raises a GraphError for IDs that do not exist."""
        node_ids = torch.as_tensor(node_ids, device="cpu")
        if node_ids.dim() != 1 or (node_ids.numel() and node_ids.dtype not in (torch.int64, torch.int32)):
            raise GraphError(
                f"The nodes are {node_ids.dtype} {tuple(node_ids.shape)}; expected global IDs, (K,) int64."
            )
        ids, bound = node_ids.detach().long(), int(self.ends[-1])
        outside = ids[(ids < 0) | (ids >= bound)]
        if len(outside):
            raise GraphError(
                f"{len(outside)} of the IDs, such as {int(outside[0])}, are not of the graph's nodes; expected global "
                f"IDs from 0 to {bound - 1}."
            )
        return ids

    def sort(self, ids: Tensor) -> tuple[Tensor, list[int]]:
        """Positions in `ids`, (K,), sorted stably by the worker that owns the node, and the number for each worker."""
        owners = torch.searchsorted(self.ends, ids, right=True)
        return owners.argsort(stable=True), owners.bincount(minlength=len(self.ends)).tolist()

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of this worker's nodes by global ID. Raises a GraphError for nodes of another type."""
        ids = to_device(ids, self.node_ids.device)
        if self._first is not None:
            return ids - self._first
        rows, is_own = find_sorted(self.node_ids, ids)
        if not bool(is_own.all()):
            raise GraphError(
                f"A worker asked for node {int(ids[~is_own][0])}, which is not of the type {self.ntype!r}."
            )
        return rows

    def fetch(self, tensor: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Fetch the rows of ascending `ids`, (K,); a collective call. `tensor` has the rows of this worker's nodes.

        Returns:
            (K, ...), on the device of `tensor`, and the indices of this worker's rows that each worker fetches.
        """
        asked = send(ids, ids, self.ends)
        rows_sent = list(self.rows(torch.cat(asked)).split(list(map(len, asked))))
        rows = [tensor[rows] for rows in rows_sent]
        own, rows[self._rank] = rows[self._rank], tensor[:0]  # own rows do not leave their device
        arrived = [to_device(received, tensor.device) for received in exchange_tensors(rows)]
        arrived[self._rank] = own
        return torch.cat(arrived), rows_sent


@uncompiled
def fetch_rows(graph: GraphShardManager, tensor: Tensor, node_ids: Tensor, ntype: str | None = None) -> Tensor:
    """Fetch rows of any nodes from the workers that own them. A collective call.

    Each worker receives a row once, even if it asks for it repeatedly. The backward returns gradients to the owners,
    which sum them.

    Args:
        graph: the whole graph.
        tensor: (N_i, ...), one row for each of this worker's nodes of the type; equal dtype and width on all workers.
        node_ids: global IDs of nodes on any worker, (K,) int64. IDs may repeat; K may be 0.
        ntype: node type; optional if there is only one.

    Returns:
        (K, ...), on the device of `tensor`.

    Raises:
        GraphError: for a tensor of another length, IDs that are not nodes of this type, or a message flow graph.
    """
    with session.current_group().guard() as group:
        owners = RowOwners(graph, ntype)
        if tensor.dim() == 0 or len(tensor) != len(owners.node_ids):
            raise GraphError(
                f"The tensor has shape {tuple(tensor.shape)}; expected {len(owners.node_ids)} rows, one for each of "
                f"this worker's {owners.ntype}."
            )
        wanted = owners.checked(node_ids)
    return _Fetch(group, owners, tensor, wanted).apply(tensor)[0]


@uncompiled
def global_ids(graph: GraphShardManager, original_ids: Tensor, ntype: str | None = None) -> Tensor:
    """Convert node IDs of the input graph to global IDs. A collective call.

    Datasets of pairs, such as those of the Open Graph Benchmark and PyTorch Geometric's `RandomLinkSplit`, contain IDs
    of the input graph; `pair_graph`, `fetch_rows` and data loaders take global IDs.

    Args:
        graph: the whole graph.
        original_ids: IDs in the input graph, on any worker: integers of any shape, such as (2, K) for pairs. IDs may
            repeat. With several node types they are counted per type, from 0.
        ntype: node type; optional if there is only one.

    Returns:
        int64 of the shape of `original_ids`, on its device.

    Raises:
        GraphError: for IDs that no node has, or partitions without original IDs.
    """
    call = f"global_ids of {ntype or 'nodes'}"
    with session.current_group().guard() as group:
        own, wanted = graph.original_ids(ntype), torch.as_tensor(original_ids, device="cpu").detach().long()
        if own is None:
            raise GraphError("The partitions do not have the nodes' IDs in the input graph (orig_id).")
        group.agree(call)
        # The worker of the o-th node, counted from worker 0 on, receives the global ID of the node with original ID o.
        counts = torch.tensor(group.gather_numbers(len(own), call), device="cpu")
        ends = counts.cumsum(0)
        first, total = int(ends[group.rank] - counts[group.rank]), int(ends[-1])
        wanted, place = wanted.unique(return_inverse=True)
        own, order = own.cpu().sort()
        for ids in (own, wanted):
            if len(ids) and not 0 <= int(ids[0]) <= int(ids[-1]) < total:
                raise GraphError(f"The original IDs are {ids[0]} to {ids[-1]}; expected some of 0 to {total - 1}.")
        told = torch.cat(send(own, torch.stack([own, graph.node_ids(ntype).cpu()[order]], 1), ends)).cpu()
        known = torch.full((int(counts[group.rank]),), -1, device="cpu")
        known[told[:, 0] - first] = told[:, 1]
        answers = [known[asked.cpu() - first] for asked in send(wanted, wanted, ends)]
        found = torch.cat(exchange_tensors([to_device(ids, session.comm_device()) for ids in answers])).cpu()
        if (missing := wanted[found < 0]).numel():
            raise GraphError(f"{len(missing)} of the original IDs, such as {missing[0]}, are of no node.")
    return to_device(found[place], torch.device(getattr(original_ids, "device", "cpu")))


def added_up(values: Tensor, place: Tensor, count: int) -> Tensor:
    """Sum the values, (n, ...), of each of `count` places, in float32 at least. All runs give the same bits."""
    values = values.to(accumulation_dtype(values.dtype))
    sums, place = values.new_zeros(count, *values.shape[1:]), to_device(place, values.device)
    if values.is_cpu:
        return sums.index_add_(0, place, values)
    return sums.index_put_((place,), values, accumulate=True)  # sorted on CUDA, where index_add_ is atomic


class _Fetch(Collective):
    def __init__(self, group: Group, owners: RowOwners, tensor: Tensor, node_ids: Tensor) -> None:
        super().__init__(group, f"fetch_rows of {owners.ntype}, {tensor.dtype} {list(tensor.shape[1:])}")
        self.owners = owners
        self.shape = tensor.shape
        self.wanted, self.place = node_ids.unique(return_inverse=True)
        self.sent: list[Tensor] = []  # indices of this worker's rows that each worker has fetched

    def forward(self, tensor: Tensor) -> ForwardOutput:
        rows, self.sent = self.owners.fetch(tensor, self.wanted)
        self.place = to_device(self.place, tensor.device)
        return ForwardOutput((rows[self.place],))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> tuple[Tensor]:
        sums = added_up(grads[0], self.place, len(self.wanted))
        total = sums.new_zeros(self.shape)
        for rows, gradients in zip(self.sent, send(self.wanted, sums, self.owners.ends), strict=True):
            total.index_add_(0, rows, to_device(gradients, total.device))
        return (total,)


@dataclass(frozen=True)
class _Route:
    """The permutations between pairs on the workers that passed them and edges on the workers that own them."""

    pairs: Tensor  # this worker's pairs, sorted stably by the worker that has them as edges, (K,)
    sent: list[int]  # number of pairs sent to each worker
    edges: Tensor  # this worker's edges, by the worker that passed them and in its order, (E,)
    arrived: list[int]  # number of edges from each worker


class PairGraph(GraphShardManager):
    """A graph of node pairs, created by `pair_graph`. It has no edge features.

    `edata["_ID"]` numbers the pairs: first worker 0's, in the order it passed them, then worker 1's, and so on.
    """

    _route: _Route

    @uncompiled
    def in_given_order(self, values: Tensor) -> Tensor:
        """Return edge values in the order of the pairs that this worker passed to `pair_graph`. A collective call.

        Differentiable.

        Args:
            values: one row for each edge on this worker, (E, ...), such as `edata["score"]`; dtype and width are the
                same on all workers.

        Returns:
            (K, ...), one row for each pair that this worker passed.

        Raises:
            GraphError: for values of another length, for example from a graph that `add_self_loop` returned.
        """
        group, count = self._structure.group, len(self._route.edges)
        with group.guard():
            if values.dim() == 0 or len(values) != count:
                raise GraphError(
                    f"The values have shape {tuple(values.shape)}; expected {count} rows, one for each pair into this "
                    "worker."
                )
            return _Return(self._structure, self._route, values).apply(values)[0]

    def _with(self: Pairs, *args: Any, **kwargs: Any) -> Pairs:
        pairs = super()._with(*args, **kwargs)
        pairs._route = self._route
        return pairs


class _Return(Collective):
    def __init__(self, structure: Structure, route: _Route, values: Tensor) -> None:
        call = f"in_given_order of {values.dtype} {list(values.shape[1:])}, graph {structure.signature}"
        super().__init__(structure.group, call)
        self.route = route

    def forward(self, values: Tensor) -> ForwardOutput:
        return ForwardOutput((_carried(values, self.route.edges, self.route.arrived, self.route.pairs),))

    def backward(self, saved: list[Tensor | None], *grads: Tensor) -> tuple[Tensor]:
        return (_carried(grads[0], self.route.pairs, self.route.sent, self.route.edges),)


def _carried(values: Tensor, order: Tensor, counts: list[int], places: Tensor) -> Tensor:
    """Send values in `order`, `counts` of them to each worker, and put those that arrive at `places`."""
    arrived = torch.cat(exchange_tensors(values[order.to(values.device)].split(counts))).to(values.device)
    return torch.empty_like(arrived).index_copy_(0, places.to(values.device), arrived)


@uncompiled
@lasting
def pair_graph(graph: GraphShardManager, src: Tensor, dst: Tensor, etype: AnyEtype = None) -> PairGraph:
    """Build a graph on the same nodes whose edges are pairs of nodes, from all workers. A collective call.

    It replaces `dgl.graph((src, dst), num_nodes=g.num_nodes())`: set features in `ndata`, score pairs with
    `apply_edges`, or run layers. The new graph has no features. Each pair becomes an edge on the worker of its
    destination; `in_given_order` returns edge values in the order of `src` and `dst`.

    Args:
        graph: the whole graph.
        src: global IDs of source nodes on any worker, (K,) int64. Pairs may repeat; K may be 0.
        dst: global IDs of destination nodes, (K,).
        etype: edge type of the pairs: an existing type, or a new (source type, relation, destination type); optional if
            the graph has only one.

    Raises:
        GraphError: for a message flow graph, or IDs that are not nodes of the right type.
        FieldError: for an unknown type.
    """
    with session.current_group().guard() as group:
        kind = etype if isinstance(etype, tuple) and len(etype) == 3 else graph._relation(etype).etype
        sources, destinations = RowOwners(graph, kind[0]), RowOwners(graph, kind[2])
        src, dst = sources.checked(src), destinations.checked(dst)
        if len(src) != len(dst):
            raise GraphError(f"There are {len(src)} sources and {len(dst)} destinations; expected one each per pair.")
        call = f"pair_graph along {kind}, graph {graph._structure.signature}"
        group.agree(call)
        ids = torch.arange(len(src), device="cpu") + sum(group.gather_numbers(len(src), call)[: group.rank])
        by_owner, sent = destinations.sort(dst)
        pieces = exchange_tensors(torch.stack([src, dst, ids], 1)[by_owner].split(sent))
        src, dst, ids = torch.cat(pieces).t().contiguous().cpu()
        if len(graph._structure.dst.ids) > 1:  # else all nodes are of the right type
            destinations.rows(dst)
            distinct = src.unique()
            for asked in send(distinct, distinct, sources.ends):
                sources.rows(asked)
        old, (order, counts) = graph._structure, sources.sort(src)
        shards = [column[order].to(graph.device).split(counts) for column in (src, dst, ids)]
        start, end = old.node_ranges[group.rank]
        kinds = torch.zeros(end - start, dtype=torch.int64, device=graph.device)
        for number, of_type in enumerate(old.dst.ids.values()):
            kinds[of_type - start] = number
        node_features = {NTYPE: kinds} if old.original_ids is None else {NTYPE: kinds, ORIG_ID: old.original_ids}
        edges = [ShardEdgesAndFeatures((s, d), {EID: i}) for s, d, i in zip(*shards, strict=True)]
        data = PartitionData(edges, old.node_ranges, node_features, list(old.dst.ids), [kind], graph.partition_book)
        structure, features = build_structure(data, group, old.library)
        # Positive and negative pairs may have the same numbers of edges, and must not be taken for each other.
        structure = structure.with_relations(structure.relations, f"of the pairs of call {group.call_id}")
    plain = make_graph(structure, features, graph.partition_book)
    pairs = PairGraph(structure, structure.relations, plain._frames, graph.partition_book)
    pairs._route = _Route(by_owner, sent, plain.edata[EID].argsort(), [len(piece) for piece in pieces])
    return pairs
