"""A block's edges a chunk at a time, so that what plain torch gathers by the edge stays small beside the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from sar.kernels.edge_block import EdgeBlock
from sar.kernels.ops import Shape, Target

CHUNK_ELEMENTS = 4 * 2**20
"""How many elements a tensor with a row per edge of a chunk has at most."""


@dataclass(frozen=True)
class EdgeChunk:
    """The edges at positions begin to end of a block, with the rows of their sources, destinations and themselves."""

    begin: int
    end: int
    src: Tensor  # (end - begin,) int64, as are the others
    dst: Tensor
    ids: Tensor

    def rows(self, target: Target) -> Tensor:
        """The row of each edge in operands of this target."""
        return (self.src, self.dst, self.ids)[target]


def edge_chunks(block: EdgeBlock, shape: Shape) -> Iterator[EdgeChunk]:
    """All edges of a block, in chunks of as many as `CHUNK_ELEMENTS` allows for `shape` elements an edge."""
    step = max(1, CHUNK_ELEMENTS // max(1, prod(shape)))
    for begin in range(0, block.num_edges, step):
        end = min(begin + step, block.num_edges)
        src, dst = block.cols[begin:end].long(), block.destinations(begin, end)
        yield EdgeChunk(begin, end, src, dst, block.ids(begin, end))
