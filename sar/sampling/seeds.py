"""Seeds, nodes or edges: as users give them, as IDs that are known to be sound, and in equal shares for all workers.

[Note: seed edges]
An edge is on the owner of its destination, but its ID does not say who that is. So the data that batches need of their
seeds is looked up once, when a loader is made. A seed is then a row of a table, (S, 7) int64, with the columns below.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, ORIG_ID, CanonicalEtype
from sar.core.graph.edges import in_edges
from sar.core.graph.graph import GraphShardManager
from sar.core.graph.mfg import Seeds, checked_nodes
from sar.errors import GraphError
from sar.id_slices import find_sorted
from sar.sampling.owner_requests import ID_FORMAT, NodesByOwner, look_up, send_requests
from sar.sampling.worker_graph import WorkerGraph

CPU: Final = torch.device("cpu")

SeedEdges = Tensor | Mapping[str | CanonicalEtype, Tensor]


class SeedColumn:
    """Columns of the table of seed edges."""

    ID: Final = 0  # `dgl.EID`
    TYPE: Final = 1  # number of the edge type
    PLACE: Final = 2  # position among the edges of the type on the owner of DST
    SRC: Final = 3  # global ID
    DST: Final = 4
    REVERSE: Final = 5  # `dgl.EID` of an edge that is left out with this one, -1 for none
    NUMBER: Final = 6  # position among the worker's seeds of the type, as they were given


def global_ids(graph: GraphShardManager, nodes: Seeds) -> Tensor:
    """The nodes as global IDs of all types together, (S,), in the order given; masks in ascending order.

    They are given as `DataLoader` takes them. IDs are not looked at; `GraphError` for unknown types, rows that do not
    exist or are given twice, and masks of another length. Inside `group.guard()`.
    """
    if not isinstance(nodes, Mapping):
        nodes = torch.as_tensor(nodes, device="cpu")
        first, last = graph.node_ranges[session.rank()]
        return _rows_of_mask("seeds", nodes, last - first) + first if nodes.dtype == torch.bool else nodes
    if not set(nodes) <= set(graph.ntypes):
        raise GraphError(f"The seeds have the node types {sorted(nodes)}; expected some of {graph.ntypes}.")
    return _ids_of_rows(nodes, {ntype: graph.node_ids(ntype) for ntype in nodes})


def _ids_of_rows(given: Mapping[Any, Tensor], ids: Mapping[Any, Tensor]) -> Tensor:
    """The IDs of rows by type, or of masks over them, (S,) int64; `ids` has those of all rows."""
    pieces = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for kind, rows in given.items():
        what, rows, count = f"seeds[{kind!r}]", torch.as_tensor(rows, device="cpu"), len(ids[kind])
        if rows.dtype == torch.bool:
            rows = _rows_of_mask(what, rows, count)
        pieces.append(ids[kind].cpu()[checked_nodes(what, rows, (0, count), "rows", CPU)])
    return torch.cat(pieces)


def check_seeds(seeds: Tensor, node_ranges: Sequence[tuple[int, int]] | None, *, foreign: bool = False) -> Tensor:
    """This worker's seeds as int64 on the CPU; `GraphError` for those that are no nodes, given twice, or of others.

    `node_ranges` are those of the graph, None if the seeds are known to be nodes that this worker may use. `foreign`
    allows nodes of other partitions that no other worker has too, and makes this a collective call. Inside
    `group.guard()`.
    """
    group = session.current_group()
    allowed, whole = (0, node_ranges[-1][1] if node_ranges else 2**63 - 1), "the graph"
    if node_ranges and not foreign:
        allowed, whole = node_ranges[group.rank], "this worker's partition"
    seeds = checked_nodes(f"the seeds of worker {group.rank}", seeds, allowed, "global IDs", CPU, whole)
    if not foreign:
        return seeds
    # Worker s % W looks at seed s.
    ranks = range(group.world_size)
    arrived = [t.cpu() for t in exchange_tensors([seeds[seeds % group.world_size == q] for q in ranks])]
    owners = torch.repeat_interleave(
        torch.tensor(ranks, device="cpu"), torch.tensor([len(t) for t in arrived], device="cpu")
    )
    nodes = torch.cat(arrived)
    distinct, counts = nodes.unique(return_counts=True)
    if len(distinct) < len(nodes):
        shared = distinct[counts > 1]
        raise GraphError(
            f"{len(shared)} seeds are given to several workers, such as {int(shared[0])} to workers "
            f"{owners[nodes == shared[0]].tolist()}; give each to one."
        )
    return seeds


def split_seeds(graph: GraphShardManager, seeds: Seeds) -> Tensor:
    """Give every worker the same number of seeds, or one more; called by all workers together.

    The first level of the split in "DistDGL: Distributed Graph Neural Network Training for Billion-Scale Graphs" (Zheng
    et al., 2020), which cuts the seeds into equal ranges of IDs; the second, among the trainers of one partition, has
    nothing to do here, if a partition has one worker. A worker keeps as many of its own seeds as its share allows,
    so that no other split into equal shares has fewer foreign seeds; only the surplus moves, the highest IDs first.

    Args:
        graph: the whole graph.
        seeds: this worker's own: global IDs, rows by type, or masks, as `DataLoader` takes them.

    Returns:
        (S,) int64 global IDs, ascending; some may be of other partitions. Equal seeds give equal shares.

    Raises:
        GraphError: for seeds that are not this worker's own, do not exist, or are given twice.
    """
    with session.current_group().guard() as group:
        group.agree("split_seeds")
        return _equal_share(check_seeds(global_ids(graph, seeds), graph.node_ranges))


def _equal_share(seeds: Tensor) -> Tensor:
    """This worker's share of all workers' seeds, (S,) int64, ascending; `seeds` are its own; inside `guard()`."""
    group, own = session.current_group(), seeds.sort().values
    moves = plan_moves(group.gather_numbers(len(own), "numbers of seeds"))[group.rank]
    kept = moves[group.rank]
    moves[group.rank] = 0
    sent = list(own[kept:].split(moves))
    sent[group.rank] = own[:kept]
    return torch.cat([piece.cpu() for piece in exchange_tensors(sent)]).sort().values


def plan_moves(counts: Sequence[int]) -> list[list[int]]:
    """How many of its `counts[p]` seeds each worker p gives to each worker q, [p][q]; it keeps [p][p].

    A worker with c seeds and a share of q takes at least max(0, q - c) foreign ones. The sum of these is least when the
    shares that are one larger go to the workers with most seeds.
    """
    workers = range(len(counts))
    share, rest = divmod(sum(counts), len(counts))
    shares = [share] * len(counts)
    for worker in sorted(workers, key=lambda p: -counts[p])[:rest]:
        shares[worker] += 1
    # All surplus in one line, and all that is missing beside it: what lies next to each other moves.
    surplus = [max(count - wanted, 0) for count, wanted in zip(counts, shares, strict=True)]
    missing = [max(wanted - count, 0) for count, wanted in zip(counts, shares, strict=True)]
    given = [0, *accumulate(surplus)]
    taken = [0, *accumulate(missing)]
    moves = [[max(0, min(given[p + 1], taken[q + 1]) - max(given[p], taken[q])) for q in workers] for p in workers]
    for p in workers:
        moves[p][p] = min(counts[p], shares[p])
    return moves


def _rows_of_mask(what: str, mask: Tensor, count: int) -> Tensor:
    if mask.shape != (count,):
        raise GraphError(f"{what} is a mask of {tuple(mask.shape)}; expected one over this worker's nodes, ({count},).")
    return mask.nonzero().squeeze(1)


def edge_ids(graph: GraphShardManager, edges: SeedEdges) -> Tensor:
    """As `global_ids`, of edges: their `dgl.EID`. A mask that is not by type is for a graph of one edge type.

    Unknown types are a `FieldError`.
    """
    if not isinstance(edges, Mapping):
        edges = torch.as_tensor(edges, device="cpu")
        if edges.dtype != torch.bool:
            return edges
        edges = {graph._relation(None).etype: edges}
    given = {graph.to_canonical_etype(etype): rows for etype, rows in edges.items()}
    return _ids_of_rows(given, {etype: graph.edges[etype].data[EID] for etype in given})


def split_edges(graph: GraphShardManager, edges: SeedEdges) -> Tensor:
    """Give every worker the same number of seed edges, or one more, as `split_seeds` does with nodes.

    Called by all workers together.

    Args:
        graph: the whole graph.
        edges: edges into this worker's nodes: `dgl.EID`, rows by type, or masks, as `DataLoader` takes them.

    Returns:
        (S,) int64 `dgl.EID`, of all types, ascending; some may be of edges into other workers' nodes.

    Raises:
        GraphError, FieldError: for edges that are not this worker's own, do not exist, or are given twice.
    """
    with session.current_group().guard() as group:
        group.agree("split_edges")
        ids = check_seeds(edge_ids(graph, edges), None)
        own = torch.cat([graph.edges[etype].data[EID].cpu() for etype in graph.canonical_etypes])
        _refuse(ids[~torch.isin(ids, own)], "edges into this worker's nodes")
        return _equal_share(ids)


def look_up_edges(
    graph: GraphShardManager, source: WorkerGraph, ids: Tensor, reverse: Sequence[Tensor | None], *, foreign: bool
) -> Tensor:
    """Rows of this worker's seed edges: see [Note: seed edges]; by all workers together, inside `group.guard()`.

    `reverse` has, for every edge type, `SeedColumn.REVERSE` of this worker's edges by position, (E_type,) int64.
    `foreign` is as of `check_seeds`, and so are errors; edges without IDs of their own are one, too.
    """
    group = session.current_group()
    ids = check_seeds(ids, None, foreign=foreign)
    own = torch.cat([relation.ids for relation in source.relations]).sort().values
    if bool((own.diff() == 0).any()):
        raise GraphError(
            "Several edges have one ID, in `graph.edata[dgl.EID]`; seeds need edges with IDs of their own."
        )
    ranges = group.gather_numbers([int(own[0]), int(own[-1])] if len(own) else [0, -1], "edge IDs")
    asked = [
        ((ids >= begin) & (ids <= end) & (foreign or rank == group.rank)).nonzero().squeeze(1)
        for rank, (begin, end) in enumerate(ranges)
    ]
    by_id = [relation.ids.sort() for relation in source.relations]

    def rows_of(request: list[Tensor]) -> list[Tensor]:
        """Rows of those edges that this worker has; -1 of others."""
        (wanted,) = request
        rows = torch.full((len(wanted), SeedColumn.NUMBER), -1, device="cpu")
        for number, (relation, (known, order), back) in enumerate(zip(source.relations, by_id, reverse, strict=True)):
            place, found = find_sorted(known, wanted)
            here, place = found.nonzero().squeeze(1), order[place[found]]
            nodes = graph.node_ids(relation.etype[2]).cpu()
            dst = nodes[torch.searchsorted(relation.indptr, place, right=True) - 1]
            of_back = torch.full_like(place, -1) if back is None else back[place]
            columns = [wanted[here], torch.full_like(place, number), place, relation.src[place].long(), dst, of_back]
            rows[here] = torch.stack(columns, 1)
        return [rows]

    requests, formats = [[ids[places]] for places in asked], [FieldFormat(torch.int64, (SeedColumn.NUMBER,))]
    responses = send_requests(group, "looking up seed edges", requests, rows_of, formats)()
    seeds = torch.full((len(ids), 7), -1, device="cpu")
    for places, (rows,) in zip(asked, responses, strict=True):
        found = rows[:, SeedColumn.TYPE] >= 0
        seeds[places[found], : SeedColumn.NUMBER] = rows[found]
    whose = "edges of the graph" if foreign else "edges into this worker's nodes (foreign_seeds=True allows others)"
    _refuse(ids[seeds[:, SeedColumn.TYPE] < 0], whose)
    for number in range(len(source.relations)):
        of_type = seeds[:, SeedColumn.TYPE] == number
        seeds[of_type, SeedColumn.NUMBER] = torch.arange(int(of_type.sum()), device="cpu")
    return seeds


def _refuse(ids: Tensor, expected: str) -> None:
    if len(ids):
        raise GraphError(
            f"{len(ids)} of the seeds of worker {session.rank()}, such as {int(ids[0])}, are not {expected}; expected "
            "IDs of graph.edata[dgl.EID]."
        )


def reverse_edges(
    graph: GraphShardManager,
    etype: str | CanonicalEtype | None = None,
    reverse_etype: str | CanonicalEtype | None = None,
) -> Tensor:
    """For each of this worker's edges (u, v) the ID of an edge (v, u); called by all workers together.

    Of several edges between two nodes the k-th belongs to the k-th back, by original ID if the data has these, else
    by `dgl.EID`.

    Args:
        graph: the whole graph.
        etype: edge type; may be left out if there is one.
        reverse_etype: the type of the edges back; default `etype`.

    Returns:
        (E_i,) int64 `dgl.EID`, in the order of `graph.edges[etype].data`; -1 if there is no edge back.

    Raises:
        GraphError: if `reverse_etype` does not lead back, or for a message flow graph.
        FieldError: for unknown types.
    """
    with session.current_group().guard() as group:
        there = graph._relation(etype).etype
        back = there if reverse_etype is None else graph.to_canonical_etype(reverse_etype)
        if (there[0], there[2]) != (back[2], back[0]):
            raise GraphError(f"Edges of type {back} do not lead back from where those of type {there} lead.")
        call = f"reverse_edges of {there} in {back}"
        group.agree(call)
        edges_of = {edges.etype: edges for edges in in_edges(graph)}
        first, num_nodes = graph.node_ranges[group.rank][0], graph.node_ranges[-1][1]

        def by_ends(etype: CanonicalEtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            """This worker's edges of a type, (E,) int64 each, by the nodes that they join.

            Rows in `graph.edges[etype].data`, sources, destinations, and keys, equal for edges between the same nodes.
            """
            edges, columns = edges_of[etype], graph.edges[etype].data
            dst = graph.node_ids(etype[2]).cpu().repeat_interleave(edges.indptr.diff())
            keys = (dst - first) * num_nodes + edges.src
            order = columns.get(ORIG_ID, columns[EID]).cpu()[edges.edges].argsort()
            order = order[keys[order].argsort(stable=True)]
            return edges.edges[order], edges.src[order], dst[order], keys[order]

        rows_back, _, _, keys_back = by_ends(back)
        ids_back = pad(graph.edges[back].data[EID].cpu()[rows_back], (0, 1), value=-1)
        keys_back = pad(keys_back, (0, 1), value=-1)  # which is of no edge

        def find(request: list[Tensor]) -> list[Tensor]:
            """IDs of edges, -1 if there are none; `copy` counts the edges between the same nodes before each."""
            src, dst, copy = request
            keys = (dst - first) * num_nodes + src
            place = (torch.searchsorted(keys_back[:-1], keys) + copy).clamp_(max=len(keys_back) - 1)
            return [torch.where(keys_back[place] == keys, ids_back[place], -1)]

        rows, src, dst, keys = by_ends(there)
        copy = torch.arange(len(keys), device="cpu") - torch.searchsorted(keys, keys)
        asked = NodesByOwner.sort(src, graph.node_ranges)
        (found,) = look_up(group, call, asked, [dst, src, copy], find, [ID_FORMAT])
        return torch.empty_like(found).index_copy_(0, rows, found)
