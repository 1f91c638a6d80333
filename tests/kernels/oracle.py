"""Kernels as anybody would write them down: one edge after the other, in float64, differentiated by autograd."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from sar.kernels import EdgeBlock, EdgeMessage, EdgeOperand, Op, Target
from sar.kernels.edge_block import compress

MESSAGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy_lhs": lambda x, y: x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "dot": lambda x, y: (x * y).sum(-1, keepdim=True) if x.dim() or y.dim() else x * y,
}

OPS = [op.value for op in Op]

# Trailing shapes of both operands: equal, scalar, by heads, and every other way to broadcast.
SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((3,), (3,)),
    ((20,), (20,)),
    ((45,), (45,)),
    ((3,), ()),
    ((45,), ()),
    ((1,), (45,)),
    ((), (3,)),
    ((3,), (1,)),
    ((1,), (3,)),
    ((2, 3), (2, 1)),
    ((2, 1), (2, 3)),
    ((2, 3), (3,)),
    ((3, 1), (1, 4)),
    ((1, 4), (2, 3, 1)),
    ((2, 1, 3), (1, 2, 1)),
    ((2, 1, 3, 1), (2, 2, 1, 3)),
    ((0,), (0,)),
    ((0,), (1,)),
    ((2, 0), (2, 1)),
]
DOT_SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((), (1,)),
    ((3,), (3,)),
    ((20,), (20,)),
    ((45,), (45,)),
    ((2, 3), (2, 3)),
    ((2, 3), (3,)),
    ((1, 3), (2, 3)),
    ((3, 1, 2), (4, 2)),
    ((2, 1), (2, 1)),
    ((2, 0), (2, 0)),
    ((0,), (0,)),
]


@dataclass
class Graph:
    """Edges sorted by destination, the edge ID of each, and the block that holds them."""

    src: list[int]
    dst: list[int]
    ids: list[int]
    num_src: int
    num_dst: int
    num_edge_rows: int
    block: EdgeBlock

    def rows(self, target: Target) -> int:
        """Rows of an operand with this target."""
        return (self.num_src, self.num_dst, self.num_edge_rows)[target]

    def ends(self) -> list[tuple[int, int, int]]:
        """Source, destination and edge rows of each edge: `ends[i][target]`."""
        return list(zip(self.src, self.dst, self.ids, strict=True))


def make_graph(
    edges: list[tuple[int, int]], num_src: int, num_dst: int, *, ids: list[int] | None = None, offset: int = 0
) -> Graph:
    """A graph of (source, destination) pairs with the given edge IDs, else numbered from `offset`."""
    edges = sorted(edges, key=lambda edge: edge[1])
    src, dst = [s for s, _ in edges], [d for _, d in edges]
    rows, indptr = compress(torch.tensor(dst, dtype=torch.int64))
    cols = torch.tensor(src, dtype=torch.int32)
    edge_ids = None if ids is None else torch.tensor(ids, dtype=torch.int32)
    block = EdgeBlock(rows, indptr, cols, num_src, num_dst, edge_ids, offset)
    ids = list(range(offset, offset + len(edges))) if ids is None else ids
    return Graph(src, dst, ids, num_src, num_dst, max(ids, default=-1) + 2, block)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs with multi-edges, rows without edges, hubs, or nothing at all; edge IDs contiguous or in any order."""
    num_src, num_dst = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    pairs = st.tuples(st.integers(0, max(num_src - 1, 0)), st.integers(0, max(num_dst - 1, 0)))
    edges = draw(st.lists(pairs, max_size=25)) if num_src and num_dst else []
    if draw(st.booleans()):
        return make_graph(edges, num_src, num_dst, offset=draw(st.integers(0, 3)))
    return make_graph(edges, num_src, num_dst, ids=draw(st.permutations(range(len(edges)))))


Tile = tuple[int, int, EdgeBlock]  # edges, and the sources begin to end that their operands have rows for


@st.composite
def tiled_graphs(draw: st.DrawFn) -> tuple[Graph, list[Tile]]:
    """A graph, and its block cut by source into tiles that come in any order; some for operands with all sources."""
    graph = draw(graphs())
    cuts = draw(st.sets(st.integers(0, graph.num_src), max_size=3))
    bounds = sorted({0, graph.num_src} | cuts)
    tiles = [(begin, end, graph.block.select_sources(begin, end)) for begin, end in pairwise(bounds)]
    if draw(st.booleans()):
        tiles = [(0, graph.num_src, tile.within(torch.arange(begin, end))) for begin, end, tile in tiles]
    return graph, draw(st.permutations(tiles))


def rows_of_tile(operand: Tensor | None, target: Target, tile: Tile) -> Tensor | None:
    """The operand as the tile's block numbers its rows."""
    return operand[tile[0] : tile[1]] if operand is not None and target is Target.U else operand


def draw_values(seed: int, rows: int, shape: tuple[int, ...], dtype: torch.dtype, kind: str = "any") -> Tensor:
    """Random values: `any`, `nonzero` (divisors), or `few` different ones, so that many are equal."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, *shape, generator=random, dtype=torch.float64)
    if kind == "nonzero":
        values = values.clamp(-1.5, 1.5) + values.sign() * 0.5
    elif kind == "few":
        values = values.round().clamp(-1, 1)
    values = values.to(dtype)
    return torch.stack([values, values], -1)[..., 0] if seed % 3 == 0 else values  # at times not contiguous


class Operation(NamedTuple):
    """An operation on operands that broadcast, over a graph in tiles."""

    graph: Graph
    tiles: list[Tile]
    op: str
    lhs: Tensor
    lhs_target: Target
    rhs: Tensor
    rhs_target: Target
    seed: int
    wrt: str = "lhs"  # the operand of a derivative

    @property
    def shape(self) -> tuple[int, ...]:
        """Trailing shape of the messages."""
        return message_shape(self.op, tuple(self.lhs.shape[1:]), tuple(self.rhs.shape[1:]))


@st.composite
def operations(draw: st.DrawFn, dtypes: list[torch.dtype], kind: str = "any") -> Operation:
    """Operations on random values, as `draw_values` draws them."""
    graph, tiles = draw(tiled_graphs())
    op = draw(st.sampled_from(OPS))
    lhs_shape, rhs_shape = draw(st.sampled_from(DOT_SHAPES if op == "dot" else SHAPES))
    lhs_target, rhs_target = draw(st.sampled_from(Target)), draw(st.sampled_from(Target))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**20))
    lhs = draw_values(seed, graph.rows(lhs_target), lhs_shape, dtype, kind)
    rhs = draw_values(seed + 1, graph.rows(rhs_target), rhs_shape, dtype, kind if op != "div" else "nonzero")
    wrt = draw(st.sampled_from(("lhs", "rhs"))) if op != "copy_lhs" else "lhs"
    return Operation(graph, tiles, op, lhs, lhs_target, rhs, rhs_target, seed, wrt)


def message(
    op: str, lhs: Tensor, lhs_target: Target, rhs: Tensor | None = None, rhs_target: Target = Target.U
) -> EdgeMessage:
    """What kernels are asked to send along edges."""
    right = None if rhs is None else EdgeOperand.of(rhs, rhs_target)
    return EdgeMessage(Op(op), EdgeOperand.of(lhs, lhs_target), right)


def message_shape(op: str, lhs: tuple[int, ...], rhs: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The trailing shape of messages, by those of their operands."""
    right = None if op == "copy_lhs" or rhs is None else EdgeOperand(None, Target.U, rhs)
    return EdgeMessage(Op(op), EdgeOperand(None, Target.U, lhs), right).shape


def messages(graph: Graph, op: str, lhs: Tensor, lhs_target: Target, rhs: Tensor, rhs_target: Target) -> list[Tensor]:
    """The message of each edge."""
    return [MESSAGES[op](lhs[ends[lhs_target]], rhs[ends[rhs_target]]) for ends in graph.ends()]


def aggregated_sum(graph: Graph, values: list[Tensor], shape: tuple[int, ...]) -> Tensor:
    """(num_dst, *shape) sums of the messages."""
    rows = [torch.zeros(shape, dtype=torch.float64) for _ in range(graph.num_dst)]
    for dst, value in zip(graph.dst, values, strict=True):
        rows[dst] = rows[dst] + value
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


def aggregated_best(graph: Graph, values: list[Tensor], shape: tuple[int, ...], largest: bool) -> tuple[Tensor, Tensor]:
    """(num_dst, *shape) greatest or least messages and their edge IDs; of equal ones the last ID, NaN never."""
    best = [torch.full(shape, -torch.inf if largest else torch.inf, dtype=torch.float64) for _ in range(graph.num_dst)]
    arg = [torch.full(shape, -1) for _ in range(graph.num_dst)]
    for i in sorted(range(len(values)), key=lambda i: graph.ids[i]):
        dst = graph.dst[i]
        wins = values[i] >= best[dst] if largest else values[i] <= best[dst]
        best[dst] = values[i].where(wins, best[dst])
        arg[dst] = torch.where(wins, graph.ids[i], arg[dst])
    if not best:
        return torch.zeros(0, *shape, dtype=torch.float64), torch.zeros(0, *shape, dtype=torch.int64)
    return torch.stack(best), torch.stack(arg)
