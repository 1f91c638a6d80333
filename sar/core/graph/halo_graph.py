"""A worker's edges with both their ends, in plain tensors, and the graph of another library that is made of them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.core.graph.in_edges import source_ids
from sar.core.relation import Structure


class HaloGraph(NamedTuple):
    """This worker's nodes, the remote nodes that have an edge into them, and these edges.

    nodes: global IDs of every type, (N_own + N_halo,) int64 each: own nodes in the order of their rows, then the halo,
        ascending.
    num_own: how many of these are the worker's own.
    edges: sources and destinations of every edge type in the visible order, as positions in `nodes`, (E,) int64 each.
    """

    nodes: dict[str, Tensor]
    num_own: dict[str, int]
    edges: dict[CanonicalEtype, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LibraryGraph:
    """The graph that a library has of a worker's edges.

    structure: where the edges are.
    make: turns them into a graph of that library, none of which the engine imports.
    """

    structure: Structure
    make: Callable[[HaloGraph], Any]

    @cached_property
    def graph(self) -> Any:
        """The graph; made at the first use."""
        return self.make(halo_graph(self.structure))


def halo_graph(structure: Structure) -> HaloGraph:
    """All edges of this worker; not for message flow graphs."""
    read = {relation.etype: source_ids(structure, relation) for relation in structure.relations}
    halos = {ntype: ids[:0] for ntype, ids in structure.src.ids.items()}
    for (ntype, _, _), ids_by_part in read.items():
        remote = [ids for part, ids in enumerate(ids_by_part) if part != structure.part]
        halos[ntype] = torch.cat([halos[ntype], *remote]).unique()
    edges = {}
    for relation in structure.relations:
        places = [torch.searchsorted(halos[relation.etype[0]], ids) + relation.num_src for ids in read[relation.etype]]
        places[structure.part] = torch.arange(relation.num_src, device=structure.device)
        src = [place[block.cols.long()] for place, block in zip(places, relation.blocks, strict=True)]
        dst = [block.destinations(0, block.num_edges) for block in relation.blocks]
        edges[relation.etype] = (torch.cat(src), torch.cat(dst))
    nodes = {ntype: torch.cat([ids, halos[ntype]]) for ntype, ids in structure.src.ids.items()}
    return HaloGraph(nodes, structure.src.counts, edges)
