"""Seed edges: as users give them, looked up at their owners, with their reverse edges, and in equal shares.

[Note: seed edges]
An edge is on the owner of its destination, but its ID does not say who that is. So what batches need to know of their
seeds is looked up once, when a loader is made. A seed is then a row of a table, (S, 7) int64, with the columns below.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from sar.comm import session
from sar.comm.collectives import exchange_tensors
from sar.common_tuples import EID, ORIG_ID, CanonicalEtype
from sar.core.graph.edges import InEdges, in_edges
from sar.core.graph.graph import GraphShardManager
from sar.errors import GraphError
from sar.sampling.owner_requests import NodesByOwner
from sar.sampling.seeds import check_seeds, equal_share, ids_of_rows
from sar.sampling.worker_graph import WorkerGraph

ID: Final = 0  # `dgl.EID`
TYPE: Final = 1  # number of the edge type
PLACE: Final = 2  # position among the edges of the type on the owner of DST
SRC: Final = 3  # global ID
DST: Final = 4
REVERSE: Final = 5  # `dgl.EID` of an edge that is left out with this one, -1 for none
NUMBER: Final = 6  # position among the worker's seeds of the type, as they were given

Edges = Tensor | Mapping[str | CanonicalEtype, Tensor]


def edge_ids(graph: GraphShardManager, edges: Edges) -> Tensor:
    """The edges as `dgl.EID`, of all types together, in the order given; masks in ascending order of rows.

    Args:
        graph: the whole graph.
        edges: `dgl.EID` as in `graph.edata`, (S,) integer; rows of this worker's edges by type, {etype: (S_type,)}, as
            in `graph.edges[etype].data`; or masks over these, {etype: (E_type,) bool}, or (E_i,) with one type.

    Returns:
        (S,), int64 but for IDs, which are not looked at.

    Raises:
        FieldError: for unknown types.
        GraphError: for rows that do not exist or are given twice, and masks of another length.
    """
    if not isinstance(edges, Mapping):
        edges = torch.as_tensor(edges)
        if edges.dtype != torch.bool:
            return edges
        edges = {graph._relation(None).etype: edges}
    given = {graph.to_canonical_etype(etype): rows for etype, rows in edges.items()}
    return ids_of_rows(given, {etype: graph.edges[etype].data[EID] for etype in given})


def split_edges(graph: GraphShardManager, edges: Edges) -> Tensor:
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
    group = session.current_group()
    with group.guard():
        group.agree("split_edges")
        ids = check_seeds(edge_ids(graph, edges), group, None)
        own = torch.cat([graph.edges[etype].data[EID].cpu() for etype in graph.canonical_etypes])
        _refuse(ids[~torch.isin(ids, own)], "edges into this worker's nodes")
        return equal_share(ids)


def look_up_edges(
    graph: GraphShardManager, source: WorkerGraph, ids: Tensor, reverse: Sequence[Tensor | None], *, foreign: bool
) -> Tensor:
    """Rows of seed edges: see [Note: seed edges]; by all workers together, inside `group.guard()`.

    Args:
        graph: the whole graph.
        source: the same, as it is sampled from.
        ids: this worker's seeds, (S,) integer.
        reverse: for every edge type, REVERSE of this worker's edges by position, (E_type,) int64; None for none.
        foreign: allow edges into other workers' nodes, as long as no other worker has them too.

    Raises:
        GraphError: where seeds do not exist, are given twice, or are foreign; or edge IDs are not distinct.
    """
    group = session.current_group()
    ids = check_seeds(ids, group, None, foreign=foreign)
    own = torch.cat([relation.ids for relation in source.relations]).sort().values
    if bool((own.diff() == 0).any()):
        raise GraphError(
            "Several edges have one ID, in `graph.edata[dgl.EID]`; seeds need edges with IDs of their own."
        )
    first, last = (int(own[0]), int(own[-1])) if len(own) else (0, -1)
    ranges = group.all_gather(torch.tensor([first, last]), "edge IDs")
    asked = [
        ((ids >= begin) & (ids <= end) & (foreign or rank == group.rank)).nonzero().squeeze(1)
        for rank, (begin, end) in enumerate(ranges)
    ]
    questions = [question.cpu() for question in exchange_tensors([ids[places] for places in asked])]
    answers = _rows_of(graph, source, torch.cat(questions), reverse).split([len(question) for question in questions])
    seeds = torch.full((len(ids), 7), -1)
    for places, rows in zip(asked, exchange_tensors(answers), strict=True):
        found = rows[:, TYPE] >= 0
        seeds[places[found.cpu()], :NUMBER] = rows[found].cpu()
    whose = "edges of the graph" if foreign else "edges into this worker's nodes (foreign_seeds=True allows others)"
    _refuse(ids[seeds[:, TYPE] < 0], whose)
    for number in range(len(source.relations)):
        of_type = seeds[:, TYPE] == number
        seeds[of_type, NUMBER] = torch.arange(int(of_type.sum()))
    return seeds


def _refuse(ids: Tensor, expected: str) -> None:
    if len(ids):
        raise GraphError(
            f"{len(ids)} of the seeds of worker {session.rank()}, such as {int(ids[0])}, are not {expected}; expected "
            "IDs of graph.edata[dgl.EID]."
        )


def _rows_of(graph: GraphShardManager, source: WorkerGraph, ids: Tensor, reverse: Sequence[Tensor | None]) -> Tensor:
    """Rows of those edges that this worker has; -1 of others."""
    rows = torch.full((len(ids), NUMBER), -1)
    for number, relation in enumerate(source.relations):
        known, order = relation.ids.sort()
        place = torch.searchsorted(known, ids)
        here = (place < len(known)).nonzero().squeeze(1)
        here = here[known[place[here]] == ids[here]]
        place = order[place[here]]
        nodes = graph.node_ids(relation.etype[2]).cpu()
        dst = nodes[torch.searchsorted(relation.indptr, place, right=True) - 1]
        back = reverse[number]
        back = torch.full_like(place, -1) if back is None else back[place]
        columns = [ids[here], torch.full_like(place, number), place, relation.src[place].long(), dst, back]
        rows[here] = torch.stack(columns, 1)
    return rows


def reverse_edges(
    graph: GraphShardManager,
    etype: str | CanonicalEtype | None = None,
    reverse_etype: str | CanonicalEtype | None = None,
) -> Tensor:
    """For each of this worker's edges (u, v) the ID of an edge (v, u); called by all workers together.

    Of several edges between two nodes the k-th belongs to the k-th back, by original ID where the data has these, else
    by `dgl.EID`.

    Args:
        graph: the whole graph.
        etype: edge type; may be left out where there is one.
        reverse_etype: the type of the edges back; default `etype`.

    Returns:
        (E_i,) int64 `dgl.EID`, in the order of `graph.edges[etype].data`; -1 where there is no edge back.

    Raises:
        GraphError: where `reverse_etype` does not lead back, or for a message flow graph.
        FieldError: for unknown types.
    """
    group = session.current_group()
    with group.guard():
        there = graph._relation(etype).etype
        back = there if reverse_etype is None else graph.to_canonical_etype(reverse_etype)
        if (there[0], there[2]) != (back[2], back[0]):
            raise GraphError(f"Edges of type {back} do not lead back from where those of type {there} lead.")
        group.agree(f"reverse_edges of {there} in {back}")
        by_type = {edges.etype: _Numbered.of(graph, edges) for edges in in_edges(graph) if edges.etype in (there, back)}
        edges = by_type[there]
        asked = NodesByOwner.sort(edges.src, [end for _, end in graph.node_ranges])
        question = torch.stack([edges.dst, edges.src, edges.copy], 1)
        arrived = exchange_tensors([question[asked.positions_of(worker)] for worker in range(group.world_size)])
        answers = exchange_tensors([by_type[back].find(*rows.cpu().unbind(1)) for rows in arrived])
        found = torch.empty_like(edges.rows)
        found[edges.rows[asked.positions]] = torch.cat([answer.cpu() for answer in answers])
        return found


class _Numbered(NamedTuple):
    """This worker's edges of a type, (E,) int64 each, by the nodes that they join."""

    rows: Tensor  # in `graph.edges[etype].data`
    ids: Tensor  # `dgl.EID`
    src: Tensor  # global ID
    dst: Tensor
    copy: Tensor  # how many edges between the same nodes come before
    keys: Tensor  # ascending, equal for edges between the same nodes
    spread: tuple[int, int]

    @classmethod
    def of(cls, graph: GraphShardManager, edges: InEdges) -> "_Numbered":
        columns, nodes = graph.edges[edges.etype].data, graph.node_ids(edges.etype[2]).cpu()
        dst = nodes.repeat_interleave(edges.indptr.diff())
        spread = graph.node_ranges[session.current_group().rank][0], graph.node_ranges[-1][1]
        keys = _keys(edges.src, dst, spread)
        order = columns.get(ORIG_ID, columns[EID]).cpu()[edges.edges].argsort()
        order = order[keys[order].argsort(stable=True)]
        rows, keys = edges.edges[order], keys[order]
        copy = torch.arange(len(keys)) - torch.searchsorted(keys, keys)
        return cls(rows, columns[EID].cpu()[rows], edges.src[order], dst[order], copy, keys, spread)

    def find(self, src: Tensor, dst: Tensor, copy: Tensor) -> Tensor:
        """IDs of edges; -1 of those that are not there."""
        if not len(self.keys):
            return torch.full_like(src, -1)
        keys = _keys(src, dst, self.spread)
        place = torch.searchsorted(self.keys, keys) + copy
        there = place < len(self.keys)
        place.clamp_(max=len(self.keys) - 1)
        return torch.where(there & (self.keys[place] == keys), self.ids[place], -1)


def _keys(src: Tensor, dst: Tensor, spread: tuple[int, int]) -> Tensor:
    first, num_nodes = spread
    return (dst - first) * num_nodes + src
