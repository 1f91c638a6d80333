"""The structure of blocks: building, cutting by source, transposing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from sar.kernels import EdgeBlock
from sar.kernels.cpu.csr_view import transpose
from tests.kernels import oracle


def edges_of(block: EdgeBlock, first_source: int = 0) -> list[tuple[int, int, int]]:
    """(source, destination, edge ID) of each edge in order, read off the CSC arrays."""
    edges = []
    for i, row in enumerate(block.rows.tolist()):
        for p in range(int(block.indptr[i]), int(block.indptr[i + 1])):
            edge_id = block.edge_offset + p if block.edge_ids is None else int(block.edge_ids[p])
            edges.append((int(block.cols[p]) + first_source, row, edge_id))
    return edges


def test_bytes_beside_those_of_another_block() -> None:
    """Of `EdgeBlock.within`: the sources of the edges, and what a backend has made."""
    block = EdgeBlock.from_coo(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 2]), num_src=2, num_dst=3)
    there = block.within(torch.tensor([3, 7]))
    assert there.nbytes == there.cols.nbytes == 12
    kept = there.derived["destinations"] = there.destinations(0, 3)
    assert there.nbytes == 12 + kept.nbytes
    assert block.nbytes == sum(each.nbytes for each in (block.rows, block.indptr, block.cols))


@given(oracle.graphs(), st.data())
def test_select_sources(graph: oracle.Graph, data: st.DataObject) -> None:
    begin, end = sorted(data.draw(st.tuples(*[st.integers(0, graph.num_src)] * 2)))
    tile = graph.block.select_sources(begin, end)
    assert edges_of(tile, begin) == [edge for edge in graph.ends() if begin <= edge[0] < end]
    assert (tile.num_src, tile.num_dst) == (end - begin, graph.num_dst)
    assert tile.rows.tolist() == sorted({row for _, row, _ in edges_of(tile)})
    assert {tile.rows.dtype, tile.indptr.dtype, tile.cols.dtype} == {torch.int32}
    middle = data.draw(st.integers(0, tile.num_src))
    part = tile.select_sources(middle, tile.num_src)  # a tile of a tile
    assert edges_of(part, begin + middle) == [edge for edge in edges_of(tile, begin) if edge[0] >= begin + middle]


@given(oracle.graphs(), st.integers(1, 12))
def test_pieces(graph: oracle.Graph, size: int) -> None:
    block = graph.block
    pieces = block.pieces(size)
    assert [edge for piece in pieces for edge in edges_of(piece)] == graph.ends()
    assert all(0 < piece.num_edges <= size for piece in pieces) or pieces == [block]
    for piece in pieces:
        assert piece.rows.tolist() == sorted({row for _, row, _ in edges_of(piece)})
        assert (piece.num_src, piece.num_dst, piece.indptr.dtype) == (block.num_src, block.num_dst, torch.int32)
    assert block.pieces(size)[0] is pieces[0]
    counts = [(piece.num_edges, len(piece.indptr) - len(piece.rows)) for piece in block.to("meta").pieces(size)]
    assert counts == [(piece.num_edges, 1) for piece in pieces]


@given(graph=oracle.graphs(), wide=st.booleans())
def test_transposed(graph: oracle.Graph, wide: bool) -> None:
    block = graph.block
    if wide:
        block = EdgeBlock(block.rows, block.indptr.long(), block.cols, block.num_src, block.num_dst)
    indptr, dst, positions, sources = block.transposed(transpose)
    assert sources is None
    by_source = sorted(range(block.num_edges), key=lambda p: graph.src[p])
    assert positions.tolist() == by_source
    assert dst.tolist() == [graph.dst[p] for p in by_source]
    assert indptr.tolist() == [sum(s < source for s in graph.src) for source in range(block.num_src + 1)]
    assert (indptr.dtype, dst.dtype, positions.dtype) == (torch.int32,) * 3
    assert block.transposed(transpose) is block.transposed(transpose)
