"""The edges of one tile or shard as a compressed sparse block, the structure that every kernel walks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sar.tensors.ids import to_offsets
from sar.tensors.lasting import lasting
from sar.tensors.spillable import moved_to_file


class Transposed(NamedTuple):
    """The edges of a block grouped by source; within a source in block order."""

    indptr: Tensor  # (groups + 1,) int32 or int64
    dst: Tensor  # (E,) int32: destination row of each edge
    positions: Tensor | None  # (E,) int32 or int64: position of each edge in the block; None if not asked for
    sources: Tensor | None = None  # (groups,) int32: source row of each group; None: source i has group i


class EdgeBlock:
    """Edges as CSC over the destination rows that have any.

    Args:
        rows: (R,) int32, ascending destination rows that have an edge here.
        indptr: (R + 1,) int32, int64 from 2**31 edges on; the edges of rows[i] are indptr[i]:indptr[i + 1].
        cols: (E,) int32, source row of each edge.
        edge_ids: (E,) int32 or int64, row of each edge in edge operands, or a function that computes them at first
            use; None stands for edge_offset + position.
        edge_offset: row of the first edge in edge operands when `edge_ids` is None.
        num_src, num_dst: rows of source and destination operands.
    """

    def __init__(
        self,
        rows: Tensor,
        indptr: Tensor,
        cols: Tensor,
        num_src: int,
        num_dst: int,
        edge_ids: Tensor | Callable[[], Tensor] | None = None,
        edge_offset: int = 0,
    ) -> None:
        self.rows = moved_to_file(rows)
        self.indptr = moved_to_file(indptr)
        self.cols = moved_to_file(cols)
        self._edge_ids = edge_ids
        self._transposed: Transposed | None = None
        self._pieces: dict[int, list[EdgeBlock]] = {}  # by size, the latest used last
        self.derived: dict[Any, Any] = {}  # what backends keep; tensors count as memory, all else is small
        self.num_edges = self.cols.numel()
        self.edge_offset = edge_offset
        self.num_src = num_src
        self.num_dst = num_dst

    @classmethod
    def from_coo(cls, src: Tensor, dst: Tensor, num_src: int, num_dst: int, **ids: Any) -> EdgeBlock:
        """A block from (E,) source and destination rows that are sorted by destination; `ids` as of the constructor."""
        return cls(*compress(dst), src.to(torch.int32), num_src, num_dst, **ids)

    @property
    def edge_ids(self) -> Tensor | None:
        """Row of each edge in edge operands, (E,); None stands for edge_offset + position."""
        if callable(self._edge_ids):
            self._edge_ids = moved_to_file(lasting(self._edge_ids)())
        return self._edge_ids

    @property
    def nbytes(self) -> int:
        """Bytes of the structure, including its transpose and pieces so far."""
        ids = self._edge_ids if isinstance(self._edge_ids, Tensor) else None
        blocks = [self, *(piece for cut in self._pieces.values() for piece in cut)]
        made = [value for block in blocks for value in (*(block._transposed or ()), *block.derived.values())]
        return sum(each.nbytes for each in (self.rows, self.indptr, self.cols, ids, *made) if isinstance(each, Tensor))

    @property
    def device(self) -> torch.device:
        """The device of the structure."""
        return self.cols.device

    @cached_property
    def edge_bound(self) -> int:
        """One more than the greatest edge ID: the rows that an edge operand must have at least.

        Without values (torch's device "meta") it is the number of edges.
        """
        if self.num_edges == 0:
            return 0
        ids = self.edge_ids
        return self.edge_offset + self.num_edges if ids is None or ids.is_meta else int(ids.max()) + 1

    @property
    def renumbered(self) -> EdgeBlock:
        """The same block with positions as edge IDs, for operands that have rows for its own edges only."""
        return self if self._edge_ids is None and self.edge_offset == 0 else self._renumbered

    @cached_property
    def _renumbered(self) -> EdgeBlock:
        return EdgeBlock(self.rows, self.indptr, self.cols, self.num_src, self.num_dst)

    @property
    def dst(self) -> Tensor:
        """Destination row of each edge, (E,) int32; computed at each access."""
        return self.rows.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)

    def destinations(self, begin: int, end: int) -> Tensor:
        """Destination rows, (end - begin,) int64, of the edges at positions begin to end."""
        positions = torch.arange(begin, end, dtype=self.indptr.dtype, device=self.device)
        return self.rows[torch.searchsorted(self.indptr, positions, right=True) - 1].long()

    def ids(self, begin: int, end: int) -> Tensor:
        """Edge IDs, (end - begin,) int64, of the edges at positions begin to end."""
        if self.edge_ids is None:
            return torch.arange(self.edge_offset + begin, self.edge_offset + end, device=self.device)
        return self.edge_ids[begin:end].long()

    @lasting
    def select_sources(self, begin: int, end: int) -> EdgeBlock:
        """The block of edges whose source is in begin to end, sources renumbered from `begin`, in the same order."""
        if begin == 0 and end == self.num_src:
            return self
        positions = self._positions_of_sources(begin, end)
        counts = torch.searchsorted(positions, self.indptr.long()).diff()
        rows, indptr = self.rows[counts > 0], to_offsets(counts[counts > 0]).to(index_dtype(positions.numel()))
        cols, ids = self.cols[positions] - begin, partial(self._ids_of_sources, begin, end)
        return EdgeBlock(rows, indptr, cols, end - begin, self.num_dst, ids)

    @lasting
    def within(self, sources: Tensor) -> EdgeBlock:
        """Reindex the sources: source i of this block is row `sources[i]` of the operands. (num_src,), ascending."""
        return _Within(self, sources)

    def pieces(self, size: int) -> list[EdgeBlock]:
        """The block in runs of at most `size` edges, in order; kept with those of the size used before."""
        if self.num_edges <= size:
            return [self]
        made = self._pieces.pop(size, None) or [
            self._run(begin, min(begin + size, self.num_edges)) for begin in range(0, self.num_edges, size)
        ]
        self._pieces = {**dict(list(self._pieces.items())[-1:]), size: made}
        return made

    def shifted(self, count: int) -> EdgeBlock:
        """The same edges for edge operands in which their rows come `count` rows later."""
        ids = None if self.edge_ids is None else self.edge_ids.long() + count
        offset = self.edge_offset + count
        return EdgeBlock(self.rows, self.indptr, self.cols, self.num_src, self.num_dst, ids, offset)

    @lasting
    def _run(self, begin: int, end: int) -> EdgeBlock:
        if self.cols.is_meta:  # no values: the average number
            first, last = len(self.rows) * begin // self.num_edges, -(-len(self.rows) * end // self.num_edges)
        else:
            first = int(torch.searchsorted(self.indptr, begin, right=True)) - 1
            last = int(torch.searchsorted(self.indptr, end))
        indptr = self.indptr[first : last + 1].clamp(begin, end) - begin
        rows, cols, ids = self.rows[first:last], self.cols[begin:end], self.edge_ids
        ids = None if ids is None else ids[begin:end]
        return EdgeBlock(rows, indptr, cols, self.num_src, self.num_dst, ids, self.edge_offset + begin)

    def _positions_of_sources(self, begin: int, end: int) -> Tensor:
        return ((self.cols >= begin) & (self.cols < end)).nonzero().squeeze(1)

    def _ids_of_sources(self, begin: int, end: int) -> Tensor:
        positions = self._positions_of_sources(begin, end)
        if self.edge_ids is None:
            return (positions + self.edge_offset).to(index_dtype(self.edge_bound))
        return self.edge_ids[positions]

    def transposed(self, transpose: Callable[[EdgeBlock], Transposed], *, with_positions: bool = True) -> Transposed:
        """The same edges grouped by source, cached.

        `transpose` computes it as the backend needs it; with positions if an operand has rows of edges.
        """
        if self._transposed is None or (with_positions and self._transposed.positions is None):
            result = lasting(transpose)(self)
            if self._transposed is None:
                self._transposed = Transposed(moved_to_file(result.indptr), moved_to_file(result.dst), None)
            if with_positions and result.positions is not None:  # the rest stays, as views of it may be kept
                self._transposed = self._transposed._replace(positions=moved_to_file(result.positions))
        return self._transposed

    def to(self, device: torch.device | str) -> EdgeBlock:
        """The block with its structure on `device`."""
        if self.device == torch.device(device):
            return self
        rows, indptr, cols = self.rows.to(device), self.indptr.to(device), self.cols.to(device)
        ids = None if self.edge_ids is None else self.edge_ids.to(device)
        return EdgeBlock(rows, indptr, cols, self.num_src, self.num_dst, ids, self.edge_offset)


class _Within(EdgeBlock):
    """A block that shares all but the sources of its edges: see `EdgeBlock.within`."""

    def __init__(self, block: EdgeBlock, sources: Tensor) -> None:
        self._block = block
        self._sources = sources.to(torch.int32)
        num_src = int(sources[-1]) + 1 if len(sources) and not sources.is_meta else 0
        cols = self._sources.index_select(0, block.cols)
        super().__init__(block.rows, block.indptr, cols, num_src, block.num_dst, block.edge_ids, block.edge_offset)

    @property
    def nbytes(self) -> int:
        """As `EdgeBlock.nbytes`, without the shared tensors."""
        return super().nbytes - sum(each.nbytes for each in (self.rows, self.indptr, self.edge_ids) if each is not None)

    def transposed(self, transpose: Callable[[EdgeBlock], Transposed], *, with_positions: bool = True) -> Transposed:
        return self._block.transposed(transpose, with_positions=with_positions)._replace(sources=self._sources)


def compress(dst: Tensor) -> tuple[Tensor, Tensor]:
    """The `rows` and `indptr` of a block whose edges have the ascending destination rows `dst`, (E,)."""
    rows, counts = dst.unique_consecutive(return_counts=True)
    return rows.to(torch.int32), to_offsets(counts).to(index_dtype(dst.numel()))


def index_dtype(bound: int) -> torch.dtype:
    """The smallest integer type that kernels index with and that holds `bound`."""
    return torch.int32 if bound < 2**31 else torch.int64
