"""Message flow graphs: for each layer only the edges that its output at the seed nodes depends on.

[Note: from seeds to inputs]
The last layer's destinations are the seeds. Its edges are found in the partition's shards, which are sorted by
destination; what the edges read of other partitions is asked of their owners; and all nodes of a worker that anybody
reads, with its own destinations first, are its sources, which are the destinations of the layer before. So each layer
costs what it contains, and two passes over a mask of the nodes. The full graph is never indexed: its edges are gone
through once, to check them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.group import Group
from sar.comm.plan import HaloPlan
from sar.common_tuples import CanonicalEtype, PartitionData
from sar.core.graph.graph import GraphShardManager, make_graph
from sar.core.partition_data import Shard, check_edge_ids, join_features
from sar.core.relation import NodeSet, Outline, Relation, Structure, agree_on_graph, digest
from sar.errors import GraphError
from sar.kernels import EdgeBlock
from sar.kernels.pieces import number_distinct

Rows = dict[str, Tensor]  # rows within each node type, int64
Seeds = Tensor | Mapping[str, Tensor]


def construct_mfgs(
    partition_data: PartitionData, seed_nodes: Seeds, n_layers: int, keep_seed_nodes: bool = True
) -> list[GraphShardManager]:
    """Make the message flow graphs of a model with `n_layers` layers; called by all workers together.

    Degrees count the edges of the message flow graph, on all workers. `input_nodes` of the first graph are the nodes
    whose features the model starts from, as rows of this partition's features; output rows follow `seed_nodes`.

    Args:
        partition_data: this worker's partition.
        seed_nodes: nodes of this partition whose output is wanted; may be empty. Either their global IDs, (S,) integer,
            of all types together, or a dictionary from node type to rows of the partition's nodes of that type,
            {ntype: (S_type,) integer}, such as `{"paper": train_mask.nonzero().squeeze(1)}`.
        n_layers: number of layers, at least 1.
        keep_seed_nodes: let each layer's sources begin with its destinations, as in DGL's blocks; without, sources are
            just the nodes that are read.

    Returns:
        One graph a layer, the input layer first.

    Raises:
        GraphError: for seeds that are not integers, not of this partition, of an unknown type, or given twice.
        PartitionError, CommunicationError: as `construct_full_graph`.
    """
    group = session.current_group()
    with group.guard():
        graph = agree_on_graph(partition_data, group)
        check_edge_ids(list(graph.shards.values()), group)
        group.agree(f"construct_mfgs of {n_layers} layers, keep_seed_nodes {keep_seed_nodes}")
        if n_layers < 1:
            raise GraphError(f"construct_mfgs got n_layers={n_layers}; expected at least 1.")
        rows = _find_rows(graph, seed_nodes)
        layers: list[GraphShardManager] = []
        for depth in range(n_layers):
            structure, features, rows = _layer(graph, rows, keep_seed_nodes, depth)
            layers.insert(0, make_graph(structure, features, partition_data.partition_book))
    return layers


def _find_rows(graph: Outline, seed_nodes: Seeds) -> Rows:
    """The rows of the seeds within their types, in the order given."""
    device = graph.device
    if isinstance(seed_nodes, Mapping):
        counts = graph.nodes.counts
        if not set(seed_nodes) <= set(counts):
            raise GraphError(f"seed_nodes has the node types {sorted(seed_nodes)}; expected some of {list(counts)}.")
        none = torch.empty(0, dtype=torch.int64)
        return {
            ntype: checked_nodes(f"seed_nodes[{ntype!r}]", seed_nodes.get(ntype, none), (0, count), "rows", device)
            for ntype, count in counts.items()
        }
    own = graph.data.node_ranges[graph.group.rank]
    seeds = checked_nodes("seed_nodes", seed_nodes, own, "global IDs", device)
    rows = {}
    for ntype, ids in graph.nodes.ids.items():
        place = torch.searchsorted(ids, seeds)
        found = ids[place.clamp(max=max(len(ids) - 1, 0))] == seeds if len(ids) else torch.zeros_like(place).bool()
        rows[ntype] = place[found]
    return rows


def checked_nodes(
    what: str,
    nodes: Tensor,
    allowed: tuple[int, int],
    kind: str,
    device: torch.device,
    whole: str = "this worker's partition",
) -> Tensor:
    """The nodes as int64, once it is sure that they are distinct integers in the allowed range, which `whole` has."""
    nodes = torch.as_tensor(nodes, device=device)
    if nodes.dim() != 1 or (nodes.numel() and nodes.dtype not in (torch.int64, torch.int32)):
        raise GraphError(f"{what} is {nodes.dtype} {tuple(nodes.shape)}; expected integer {kind}, (S,).")
    nodes = nodes.long()
    foreign = nodes[(nodes < allowed[0]) | (nodes >= allowed[1])]
    if len(foreign):
        raise GraphError(
            f"{len(foreign)} of {what}, such as {int(foreign[0])}, are not of {whole}, which has the {kind} "
            f"[{allowed[0]}, {allowed[1]}) there; pass {kind} of its own nodes."
        )
    if len(nodes.unique()) < len(nodes):
        raise GraphError(f"{len(nodes) - len(nodes.unique())} of {what} are given twice; pass each once.")
    return nodes


class _Selection(NamedTuple):
    """The edges of one relation that a layer needs.

    cols: by source partition, columns of the edges: rows of the partition's nodes for the own one, else of `halos`.
    dst: by source partition, positions of their destinations among the layer's.
    features: of the edges, (E, ...) each.
    halos: by source partition, the nodes that are read, partition-local over all types, ascending; the own one's empty.
    asked: by reader, this worker's rows that it reads.
    degrees: by reader, the edges at each of these rows.
    """

    cols: list[Tensor]
    dst: list[Tensor]
    features: dict[str, Tensor]
    halos: list[Tensor]
    asked: list[Tensor]
    degrees: list[Tensor]

    @property
    def num_edges(self) -> int:
        return sum(len(dst) for dst in self.dst)


def _layer(graph: Outline, rows: Rows, keep_seeds: bool, depth: int) -> tuple[Structure, list[dict[str, Tensor]], Rows]:
    """One layer with destinations `rows`: its structure, its edge features, and the rows of its sources."""
    group, device = graph.group, graph.device
    chosen = {
        etype: _select(graph, shards, graph.nodes.ids[etype[2]][rows[etype[2]]])
        for etype, shards in graph.shards.items()
    }
    sources = {}
    for ntype, count in graph.nodes.counts.items():
        first = rows[ntype] if keep_seeds else rows[ntype][:0]
        read = torch.zeros(count, dtype=torch.bool, device=device)
        for etype, selection in chosen.items():
            if etype[0] == ntype:
                for used in (selection.cols[group.rank], *selection.asked):
                    read[used.long()] = True
        read[first] = False
        sources[ntype] = torch.cat([first, read.nonzero().squeeze(1)])
    counts = [len(sources[t]) for t in sources] + [len(rows[t]) for t in rows] + [c.num_edges for c in chosen.values()]
    totals = torch.stack(group.all_gather(torch.tensor(counts), "counts of a message flow graph")).sum(0).tolist()
    types = len(sources)
    src = NodeSet(_ids(graph, sources), sources, dict(zip(sources, totals[:types], strict=True)))
    dst = NodeSet(_ids(graph, rows), rows, dict(zip(rows, totals[types : 2 * types], strict=True)))
    relations = [
        _relation(etype, selection, sources[etype[0]], graph.nodes.counts[etype[0]], len(rows[etype[2]]), total, group)
        for (etype, selection), total in zip(chosen.items(), totals[2 * types :], strict=True)
    ]
    signature = digest(f"{graph.signature} {depth} layers below the last {totals}")
    structure = Structure(group, device, list(graph.data.node_ranges), src, dst, relations, signature)
    return structure, [selection.features for selection in chosen.values()], sources


def _ids(graph: Outline, rows: Rows) -> dict[str, Tensor]:
    return {ntype: graph.nodes.ids[ntype][index] for ntype, index in rows.items()}


def _select(graph: Outline, shards: list[Shard], destinations: Tensor) -> _Selection:
    """The edges into `destinations`, (N_dst,) global IDs."""
    rank, index = graph.group.rank, graph.index
    cols, dst, pieces, halos, degrees = [], [], [], [], []
    for p, shard in enumerate(shards):
        place, owner = _edges_at(shard.dst, destinations)
        first, last = graph.data.node_ranges[p]
        sources = shard.src[place] - first
        if p == rank:
            halo, column = sources[:0].to(torch.int32), index(sources)
        else:
            halo, column = number_distinct(sources, last - first)
        cols.append(column)
        dst.append(owner)
        pieces.append(Shard(sources, owner, {name: values[place] for name, values in shard.features.items()}))
        halos.append(halo)
        degrees.append(torch.bincount(column, minlength=len(halo))[: len(halo)])
    asked = [index(nodes.to(graph.device)) for nodes in exchange_tensors(halos)]
    theirs = [d.to(graph.device) for d in exchange_tensors(degrees)]
    return _Selection(cols, dst, join_features(pieces), halos, asked, theirs)


def _edges_at(dst: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in ascending `dst` of all edges into `nodes`, node after node, and for each the index of its node."""
    begin, end = torch.searchsorted(dst, nodes), torch.searchsorted(dst, nodes, right=True)
    counts = end - begin
    offset = torch.repeat_interleave(begin - (counts.cumsum(0) - counts), counts)
    owner = torch.repeat_interleave(torch.arange(len(nodes), device=nodes.device), counts)
    return torch.arange(len(offset), device=nodes.device) + offset, owner


def _relation(
    etype: CanonicalEtype,
    chosen: _Selection,
    sources: Tensor,
    num_rows: int,
    num_dst: int,
    num_edges_global: int,
    group: Group,
) -> Relation:
    """The relation of a layer; `sources` are those of the partition's `num_rows` nodes that it has."""
    number = torch.full((num_rows,), -1, dtype=torch.int32, device=sources.device)
    number[sources] = torch.arange(len(sources), dtype=torch.int32, device=sources.device)
    blocks, offset = [], 0
    in_degrees = torch.zeros(num_dst, dtype=torch.int64, device=sources.device)
    for p, (cols, dst) in enumerate(zip(chosen.cols, chosen.dst, strict=True)):
        own = p == group.rank
        num_src = len(sources) if own else len(chosen.halos[p])
        columns = number[cols.long()] if own else cols
        blocks.append(EdgeBlock.from_coo(columns, dst, num_src, num_dst, edge_offset=offset))
        in_degrees += torch.bincount(dst, minlength=num_dst)
        offset += len(dst)
    send_rows = [number[rows.long()] for rows in chosen.asked]
    out_degrees = torch.bincount(blocks[group.rank].cols, minlength=len(sources))
    for rows, degrees in zip(send_rows, chosen.degrees, strict=True):
        out_degrees.index_add_(0, rows, degrees)
    plan = HaloPlan.agreed(group, send_rows, chosen.halos, len(sources), f"{etype}")
    return Relation(etype, blocks, chosen.halos, plan, len(sources), num_dst, num_edges_global, in_degrees, out_degrees)
