"""A worker's edges with both their ends, in plain tensors, and the way from there to a graph of a library.

The engine imports no such library. `sar/__init__.py`, which puts the parts together, says who makes the graph.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from sar.common_tuples import CanonicalEtype


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


Maker = Callable[[HaloGraph], Any]
_makers: list[Maker] = []


def set_maker(maker: Maker) -> None:
    """Let `maker` turn halo graphs into the graphs that users sample from."""
    _makers[:] = [maker]


def make(graph: HaloGraph) -> Any:
    """The graph that users sample from."""
    return _makers[0](graph)
