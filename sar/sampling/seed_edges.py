"""Seed edges: reading them from arguments, splitting them evenly over workers, and finding their reverse edges.

[Note: seed edges]
An edge is on the owner of its destination, but its ID does not tell the owner. So a new loader looks up once the data
that batches need. A seed is then a row of a table, (S, 7) int64, with the columns below.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from sar.comm import session
from sar.comm.rows import FieldFormat
from sar.common_tuples import EID, ORIG_ID, CanonicalEtype
from sar.core.graph.edges import in_edges
from sar.core.graph.graph import GraphShardManager
from sar.errors import GraphError
from sar.sampling.owner_requests import ID_FORMAT, NodesByOwner, send_requests
from sar.sampling.seeds import check_seeds, equal_share, ids_of_rows
from sar.sampling.worker_graph import WorkerGraph
from sar.tensors.ids import find_sorted

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


def edge_ids(graph: GraphShardManager, edges: SeedEdges) -> Tensor:
    """Like `global_ids` for edges: returns their `dgl.EID`. A mask without a type requires a graph of one edge type.

    Raises `FieldError` for unknown types.
    """
    if not isinstance(edges, Mapping):
        edges = torch.as_tensor(edges, device="cpu")
        if edges.dtype != torch.bool:
            return edges
        edges = {graph._relation(None).etype: edges}
    given = {graph.to_canonical_etype(etype): rows for etype, rows in edges.items()}
    return ids_of_rows(given, {etype: graph.edges[etype].data[EID] for etype in given})


def split_edges(graph: GraphShardManager, edges: SeedEdges) -> Tensor:
    """Redistribute seed edges evenly over the workers, as `split_seeds` does with nodes.

    All workers must call this together.

    Args:
        graph: the whole graph.
        edges: edges into this worker's nodes: `dgl.EID`, rows by type, or masks, as for `DataLoader`.

    Returns:
        (S,) int64 `dgl.EID` of all types, ascending; some may be edges into other workers' nodes.

    Raises:
        GraphError, FieldError: for edges of other workers, edges that do not exist, or duplicates.
    """
    with session.current_group().guard() as group:
        group.agree("split_edges")
        ids = check_seeds(edge_ids(graph, edges), None)
        own = torch.cat([graph.edges[etype].data[EID].cpu() for etype in graph.canonical_etypes])
        _refuse(ids[~torch.isin(ids, own)], "edges into this worker's nodes")
        return equal_share(ids)


def look_up_edges(
    graph: GraphShardManager, source: WorkerGraph, ids: Tensor, reverse: Sequence[Tensor | None], *, foreign: bool
) -> Tensor:
    """Return the rows of this worker's seed edges: see [Note: seed edges]. A collective call, inside `group.guard()`.

    `reverse` holds, for every edge type, `SeedColumn.REVERSE` of this worker's edges by position, (E_type,) int64.
    `foreign` and errors are as in `check_seeds`; edges without IDs are also an error.
    """
    group = session.current_group()
    ids = check_seeds(ids, None, foreign=foreign)
    own = torch.cat([relation.ids for relation in source.relations]).sort().values
    if bool((own.diff() == 0).any()):
        raise GraphError(
            "Several edges have the same ID in `graph.edata[dgl.EID]`; seeds need edges with distinct IDs."
        )
    ranges = group.gather_numbers([int(own[0]), int(own[-1])] if len(own) else [0, -1], "edge IDs")
    asked = [
        ((ids >= begin) & (ids <= end) & (foreign or rank == group.rank)).nonzero().squeeze(1)
        for rank, (begin, end) in enumerate(ranges)
    ]
    by_id = [relation.ids.sort() for relation in source.relations]

    def rows_of(request: list[Tensor]) -> list[Tensor]:
        """Rows of this worker's edges; -1 for other edges."""
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
    responses = send_requests(group, "looking up seed edges", requests, rows_of, formats)
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
    """Find the reverse edge (v, u) of each of this worker's edges (u, v). All workers must call this together.

    The k-th of several edges between two nodes is matched with the k-th reverse edge, in order of original ID if
    available, else of `dgl.EID`.

    Args:
        graph: the whole graph.
        etype: edge type; optional if there is only one.
        reverse_etype: type of the reverse edges. Default: `etype`.

    Returns:
        (E_i,) int64 `dgl.EID`, in the order of `graph.edges[etype].data`; -1 for edges without a reverse edge.

    Raises:
        GraphError: `reverse_etype` does not lead back, or the graph is a message flow graph.
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
        keys_back = pad(keys_back, (0, 1), value=-1)  # matches no edge

        def find(request: list[Tensor]) -> list[Tensor]:
            """IDs of edges, -1 if there are none; `copy` counts the edges between the same nodes before each."""
            src, dst, copy = request
            keys = (dst - first) * num_nodes + src
            place = (torch.searchsorted(keys_back[:-1], keys) + copy).clamp_(max=len(keys_back) - 1)
            return [torch.where(keys_back[place] == keys, ids_back[place], -1)]

        rows, src, dst, keys = by_ends(there)
        copy = torch.arange(len(keys), device="cpu") - torch.searchsorted(keys, keys)
        asked = NodesByOwner.sort(src, graph.node_ranges)
        requests = [[column[positions] for column in (dst, src, copy)] for positions in asked.positions]
        responses = send_requests(group, call, requests, find, [ID_FORMAT])
        found = asked.restore(torch.cat([ids for (ids,) in responses]))
        return torch.empty_like(found).index_copy_(0, rows, found)
