"""How the sources of a graph's edges are numbered on one worker, and the graphs of selections of the edges."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from sar.comm.group import Group
from sar.core.graph.edges import source_ids
from sar.core.graph.frames import Frame
from sar.core.graph.graph import GraphShardManager, reversed_graph
from sar.core.relation import Relation
from sar.errors import GraphError
from sar.id_slices import count_ids
from sar.kernels import EdgeBlock

KEPT = 4
"""As many times the edges of a graph are those of the selections of them that are kept."""


class Numbering:
    """How the sources along one edge type are numbered; see [Note: numbers of nodes].

    Args:
        graph: with one edge type, all of whose edges count.

    Attributes:
        starts: number of the first source in each partition; 0 for this worker's.
        count: sources in all.
    """

    def __init__(self, graph: GraphShardManager) -> None:
        self.graph = graph
        self.relation = graph.call_context().relation
        self.part = graph._structure.part
        *starts, self.count = accumulate(map(len, self.relation.halos), initial=self.relation.num_src)
        self.starts = [0 if part == self.part else start for part, start in enumerate(starts)]
        self._joined: Tensor | None = None
        self._selected: list[tuple[Tensor, int, GraphShardManager, Tensor]] = []

    @property
    def group(self) -> Group:
        return self.graph._structure.group

    def all_ranks_agree(self, what: str, here: bool) -> bool:
        """Whether `what` is true on all workers. A collective call."""
        with self.group.guard():
            return all(self.group.agree(what, int(here)))

    @property
    def has_loops(self) -> bool:
        """Whether equal numbers of a source and a destination are one node."""
        (source, _, target), nodes = self.relation.etype, self.graph._structure
        if source != target or nodes.src is nodes.dst:
            return source == target
        return torch.equal(nodes.src.ids[source][: self.relation.num_dst], nodes.dst.ids[source])

    @property
    def loops(self) -> Tensor:
        """A self-loop of each of this worker's nodes, (2, N_i); none where sources and destinations are others."""
        count = min(self.relation.num_src, self.relation.num_dst) if self.has_loops else 0
        return torch.arange(count, device=self.graph.device).expand(2, -1)

    @property
    def joined(self) -> Tensor:
        """u * N_i + v of the pairs of any node u and this worker's node v that are one, or joined by an edge, (P,).

        Of a homogeneous graph; made at the first use, which is a collective call. So it is no `cached_property`: until
        Python 3.12 those keep a lock meanwhile, which is one for all workers of the process.
        """
        if self._joined is not None:
            return self._joined
        count = self.relation.num_dst
        own = torch.arange(count, device=self.graph.device)
        pairs = [self.graph.node_ids() * count + own]
        for graph in (self.graph, reversed_graph(self.graph)):
            relation = graph.call_context().relation
            for ids, block in zip(source_ids(graph._structure, relation), relation.blocks, strict=True):
                pairs.append(ids[block.cols.long()] * count + block.destinations(0, block.num_edges))
        self._joined = torch.cat(pairs).unique()
        return self._joined

    def select(self, ends: Tensor, num_dst: int) -> tuple[GraphShardManager, Tensor]:
        """The graph of other edges between the same nodes, and for each of its edges the position given here, (E,).

        Layers make the same edges anew in every call, so the latest graphs are kept, with `KEPT` times the edges.

        Args:
            ends: numbers of sources and rows of destinations, (2, E).
            num_dst: destinations, which need not be nodes.
        """
        for i, (known, count, graph, order) in enumerate(self._selected):
            if count == num_dst and torch.equal(known, ends):
                self._selected.append(self._selected.pop(i))
                return graph, order
        graph, order = self._make(ends[0], ends[1], num_dst)
        self._selected.append((ends, num_dst, graph, order))
        while len(self._selected) > 1 and sum(len(kept[3]) for kept in self._selected) > KEPT * self.relation.num_edges:
            del self._selected[0]
        return graph, order

    def _make(self, src: Tensor, dst: Tensor, num_dst: int) -> tuple[GraphShardManager, Tensor]:
        old = self.relation
        if len(dst) and not 0 <= int(dst.min()) <= int(dst.max()) < num_dst:
            found = f"{int(dst.min())} to {int(dst.max())}"
            raise GraphError(
                f"A distributed edge_index got destinations {found}; expected numbers of this worker's {num_dst} nodes."
            )
        bounds = torch.tensor([old.num_src, *accumulate(map(len, old.halos), initial=old.num_src)], device=src.device)
        parts = torch.bucketize(src, bounds[1:], right=True) - 1
        parts = torch.where(src < old.num_src, self.part, parts)
        order = torch.argsort(parts * num_dst + dst, stable=True)
        counts = torch.bincount(parts, minlength=len(old.blocks)).tolist()
        blocks, offset = [], 0
        for part, count in enumerate(counts):
            rows = order[offset : offset + count]
            cols = src[rows] - self.starts[part]
            num_src = old.blocks[part].num_src
            blocks.append(EdgeBlock.from_coo(cols, dst[rows], num_src, num_dst, edge_offset=offset))
            offset += count
        degrees = count_ids(dst, num_dst)
        relation = replace(old, blocks=blocks, num_dst=num_dst, in_degrees=degrees, message_order=order)
        relation = replace(relation, num_edges_global=-1)
        return self._graph_of(relation, len(src), num_dst), order

    def _graph_of(self, relation: Relation, num_edges: int, num_dst: int) -> GraphShardManager:
        graph, etype = self.graph, relation.etype
        structure = graph._structure.with_relations([relation], "with edges of an edge index")
        frames = graph._frames
        edge = {etype: Frame(num_edges, graph.device, "columns of the edge index")}
        dst = {**frames.dst, etype[2]: Frame(num_dst, graph.device, "destinations")}
        return graph._with(structure, [relation], replace(frames, src=dict(frames.src), dst=dst, edge=edge))
