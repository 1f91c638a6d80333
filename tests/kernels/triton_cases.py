"""Each kernel in Triton against plain torch, with hubs; `test_triton.py` runs this with Triton's interpreter."""

import mmap
import os
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import sar.kernels.torch as torch_kernels
import sar.kernels.triton as triton_kernels
from sar.kernels import EdgeBlock, EdgeOperand, Op, Target
from sar.kernels.attention import destination_statistics, note_scores
from sar.kernels.attention_operands import (
    SCORE,
    STATISTICS,
    Attention,
    AttentionOperands,
    Gradients,
    OnlineSoftmaxState,
    Score,
)
from sar.kernels.backend import Backend
from sar.kernels.cpu.csr_view import transpose as compiled_transpose
from sar.kernels.triton.edges import PIECE, by_destination, by_source, transpose
from tests.kernels import oracle
from tests.matrix import corner

U, V, E = Target.U, Target.V, Target.E
NODES, EDGES, HEADS, DIM = 5, 40, 3, 5
BACKENDS: tuple[Backend, Backend] = triton_kernels, torch_kernels


@pytest.fixture
def block() -> EdgeBlock:
    return block_of(EDGES)


def block_of(edges: int) -> EdgeBlock:
    """Node 0 has most of the edges; edge IDs are in any order."""
    random = torch.Generator().manual_seed(0)
    ends = (torch.rand(edges, 2, generator=random) ** 3 * NODES).long().tolist()
    ids = torch.randperm(edges, generator=random).tolist()
    return oracle.make_graph([tuple(pair) for pair in ends], NODES, NODES, ids=ids).block


UNTOUCHED = 7.0


def within(values: Tensor, margin: float = torch.nan) -> Tensor:
    """The values as rows of a larger tensor, so that what is read or written beyond them shows."""
    larger = values.new_full((len(values) + 40, *values.shape[1:]), margin)
    larger[20:-20] = values
    return larger[20:-20]


def draw(*shape: int, dtype: torch.dtype = torch.float64, margin: float = torch.nan) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return within(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype), margin)


def result(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Where kernels add to what is there."""
    return draw(*shape, dtype=dtype, margin=UNTOUCHED)


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted)
    whole = found._base
    if whole is not None and len(whole) == len(found) + 40:
        assert (whole[:20] == UNTOUCHED).all()
        assert (whole[-20:] == UNTOUCHED).all()


def test_hubs_are_cut() -> None:
    """Into pieces, of which there may be so many that they are cut again."""
    ends = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    forward, backward = EdgeBlock.from_coo(*ends, 200, 1), EdgeBlock.from_coo(*ends[::-1], 1, 200)
    for grouping in (by_destination(forward), by_source(backward)):
        assert grouping.hubs is not None
        edges, merge = grouping.hubs
        assert edges.groups == merge.num_edges == -(-200 // PIECE) - 1
        assert by_destination(merge).hubs is not None
    x, total = draw(200, 3), result(1, 3)
    wanted = total + x.sum(0)
    triton_kernels.aggregate_sum(forward, oracle.message("copy_lhs", x, U), total)
    close(total, wanted)
    best, arg = torch.zeros(1, 3, dtype=torch.float64), torch.full((1, 3), -1)
    triton_kernels.aggregate_cmp(forward, oracle.message("copy_lhs", x, U), best, arg, False)
    close(best, x.amin(0, keepdim=True))
    assert torch.equal(arg, x.argmin(0, keepdim=True))


@pytest.mark.parametrize("wide", [False, True])
def test_edges_by_source_are_in_the_order_of_the_block(block: EdgeBlock, wide: bool) -> None:
    if wide:
        block = EdgeBlock(block.rows, block.indptr.long(), block.cols, NODES, NODES)
    for found, wanted in zip(transpose(block)[:3], compiled_transpose(block)[:3], strict=True):
        assert found is not None
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_aggregation(block: EdgeBlock, dtype: torch.dtype) -> None:
    """Of features and weights of a head, as plain torch has it; nothing is read or written beyond rows."""
    x, w = draw(NODES, HEADS, DIM, dtype=dtype), draw(EDGES, HEADS, 1, dtype=dtype)
    y, sums = x.flip(0), torch.promote_types(dtype, torch.float32)
    weighted, dot = oracle.message("mul", x, U, w, E), oracle.message("dot", x, U, y, V)
    results: list[list[Tensor]] = [[], []]
    for kernels, found in zip(BACKENDS, results, strict=True):
        total, scores = result(NODES, HEADS, DIM, dtype=sums), result(EDGES, HEADS, 1, dtype=sums)
        kernels.aggregate_sum(block, weighted, total)
        kernels.edge_apply(block, dot, scores)
        best, arg = torch.full((NODES, HEADS, DIM), -torch.inf, dtype=sums), torch.full((NODES, HEADS, DIM), -1)
        best = within(best, UNTOUCHED)
        kernels.aggregate_cmp(block, weighted, best, arg, True)
        x_grad, best_grad = result(NODES, HEADS, DIM, dtype=sums), result(NODES, HEADS, DIM, dtype=sums)
        w_grad = result(EDGES, HEADS, 1, dtype=sums)
        kernels.aggregate_grad(block, weighted, "lhs", EdgeOperand.of(y, V), x_grad, None)
        kernels.aggregate_grad(block, weighted, "rhs", EdgeOperand.of(y, V), w_grad, None)
        kernels.aggregate_grad(block, weighted, "lhs", EdgeOperand.of(y, V), best_grad, arg)
        rows = torch.tensor([4, 0, 2])
        kernels.add_rows(rows, x[:3].to(sums), total)
        found += [total, scores, best, arg, x_grad, w_grad, best_grad]
    for found, wanted in zip(*results, strict=True):
        close(found, wanted)


@pytest.mark.parametrize("op", [op.value for op in Op])
def test_operations(op: str) -> None:
    """With operands that are broadcast in several ways, some of which need tables of offsets."""
    small = oracle.make_graph([(0, 0), (1, 0), (1, 1), (2, 1), (2, 1)], 3, 2).block
    for lhs, rhs in ((4, 3), (4, 3)), ((2, 1, 3), (1, 2, 1)), ((3,), (2, 3)):
        if op == "dot" and lhs[-1] != rhs[-1]:
            continue
        x, w = draw(3, *lhs), draw(5, *rhs)
        message = oracle.message(op, x, U, None if op == "copy_lhs" else w, E)
        grad, results = EdgeOperand.of(draw(2, *message.shape), V), []
        for kernels in BACKENDS:
            total, x_grad, w_grad = result(2, *message.shape), result(3, *lhs), result(5, *rhs)
            kernels.aggregate_sum(small, message, total)
            kernels.aggregate_grad(small, message, "lhs", grad, x_grad, None)
            if op != "copy_lhs":
                kernels.aggregate_grad(small, message, "rhs", grad, w_grad, None)
            results.append([total, x_grad, w_grad])
        for found, wanted in zip(*results, strict=True):
            close(found, wanted)


@pytest.mark.parametrize(
    "score, heads, dim, edges, dropout",
    [
        *((score, HEADS, DIM, EDGES, dropout) for score in Score for dropout in (0.0, 0.4)),
        (Score.DYNAMIC, 5, 20, EDGES // 2, 0.4),
        *(corner(score, 5, 20, EDGES, 0.4) for score in Score),
    ],
)
def test_attention(score: Score, heads: int, dim: int, edges: int, dropout: float) -> None:
    """Forward and backward, in one block of heads and in several, without and with dropout and edge weights."""
    block = block_of(edges)
    how = Attention(score, 0.3, dropout, 2**63 + 12345)
    x, attn = draw(NODES, heads, dim), None if score is Score.DOT else draw(heads, dim)
    y = draw(NODES, heads) if score is Score.ADDITIVE else draw(NODES, heads, dim)
    x_score = draw(NODES, heads) if score is Score.ADDITIVE else None
    ends = AttentionOperands(x, y, attn, draw(edges) if dropout else None, x_score)
    grad, results = draw(NODES, heads, dim), []
    for kernels in BACKENDS:
        state = OnlineSoftmaxState.start(NODES, x)
        kernels.attend(block, how, ends, state)
        out, normaliser = state.finish(torch.bincount(torch.arange(NODES)))
        stats = destination_statistics(how, normaliser, grad, out)
        kernels.head_sums(how, grad, out, stats)
        note_scores(how, stats, y)
        grads = Gradients(*(None if each is None else within(torch.ones_like(each), UNTOUCHED) for each in ends))
        kernels.attend_grad(block, how, ends, grad, within(stats), grads)
        results.append([out, stats[:, :SCORE], *(each for each in grads if each is not None)])
    for found, wanted in zip(*results, strict=True):
        close(found, wanted)


def test_infinite_and_undefined_scores() -> None:
    """Every pair of these has a head, in one piece of a hub and in two."""
    pairs = list(product([-torch.inf, torch.inf, torch.nan, 0.0, -1000.0], repeat=2))
    scores = torch.tensor(pairs, dtype=torch.float64).T.repeat_interleave(5, 0)
    count, heads = scores.shape
    how, block = (
        Attention(Score.ADDITIVE, 1.0),
        EdgeBlock.from_coo(torch.arange(count), torch.zeros(count).int(), count, 1),
    )
    ends = AttentionOperands(draw(count, heads, 1), torch.zeros(1, heads).double(), draw(heads, 1), None, scores)
    grad, results = draw(1, heads, 1), []
    for kernels in BACKENDS:
        state = OnlineSoftmaxState.start(1, ends.x)
        kernels.attend(block, how, ends, state)
        out, normaliser = state.finish(torch.ones(1))
        stats = destination_statistics(how, normaliser, grad, out)
        note_scores(how, stats, ends.y)
        grads = Gradients(*(None if each is None else torch.zeros_like(each) for each in ends))
        kernels.attend_grad(block, how, ends, grad, stats, grads)
        stats = stats[:, 1:]  # the peak of scores that are all -inf is that, or the least number
        results.append([out, stats, *(each for each in grads if each is not None)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, equal_nan=True)


def test_projection() -> None:
    for heads, dim in (HEADS, DIM), (5, 20):
        x, attn, grad = draw(NODES, heads, dim), draw(heads, dim), draw(NODES, heads)
        results = []
        for kernels in BACKENDS:
            x_grad, attn_grad = result(NODES, heads, dim), result(heads, dim)
            kernels.project_grad(x, attn, grad, x_grad, attn_grad)
            results.append([kernels.project(x, attn), x_grad, attn_grad])
        for found, wanted in zip(*results, strict=True):
            close(found, wanted)


LAST, WIDE = 2**21, 1024
"""A row whose elements begin beyond 2**31, and how many it has."""


def first_and_last(rows: Tensor) -> Tensor:
    """Two rows as the first and the last of a tensor of zeros, whose other rows take no memory."""
    memory = mmap.mmap(-1, (LAST + 1) * rows[0].nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=rows.dtype).view(LAST + 1, *rows.shape[1:])
    whole[0], whole[LAST] = rows
    return whole


def kernels_on_two_rows(block: EdgeBlock, spread: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What kernels make of the two rows of operands, and add to those of results, all of which are spread."""
    x, w = (spread(torch.randn(2, WIDE, generator=torch.Generator().manual_seed(i)).half()) for i in range(2))
    made = [spread(torch.ones(2, WIDE).half()) for _ in range(5)]
    total, best, x_grad, of_edges, added = made
    arg, message = spread(torch.full((2, WIDE), -1)), oracle.message("mul", x, U, w, E)
    triton_kernels.aggregate_sum(block, message, total)
    triton_kernels.aggregate_cmp(block, message, best, arg, True)
    triton_kernels.aggregate_grad(block, message, "lhs", EdgeOperand.of(x, V), x_grad, None)
    triton_kernels.edge_apply(block, message, of_edges)
    triton_kernels.add_rows(torch.tensor([len(x) - 1, 0]), draw(2, WIDE, dtype=torch.float16), added)
    how, attn, heads = Attention(Score.DYNAMIC, 0.3), draw(1, WIDE, dtype=torch.float16), x.unsqueeze(1)
    ends = AttentionOperands(heads, heads, attn, None)
    state = OnlineSoftmaxState(*(spread(torch.zeros(2, 1, *more)) for more in ((WIDE,), (), ())))
    triton_kernels.attend(block, how, ends, state)
    stats, grads = spread(torch.ones(2, STATISTICS, 1)), [spread(torch.ones(2, 1, WIDE)) for _ in range(2)]
    attn_grad = torch.ones(1, WIDE)
    triton_kernels.attend_grad(block, how, ends, state.out, stats, Gradients(*grads, attn_grad, None))
    return [*(rows[[0, -1]] for rows in (*made, arg, *state, *grads)), attn_grad]


@pytest.mark.skipif("CARRIED_TO" in os.environ, reason="each kernel would copy tensors of many GB")
def test_offsets_beyond_32_bits() -> None:
    """Of rows of sources, destinations, edges and results."""
    ends = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)
    near = EdgeBlock(torch.tensor([0, 1], dtype=torch.int32), *ends, 2, 2, torch.tensor([1, 0]))
    ids, rows = torch.tensor([LAST, 0]), torch.tensor([0, LAST], dtype=torch.int32)
    far = EdgeBlock(rows, *ends, 2, LAST + 1, ids).within(rows)
    expected = kernels_on_two_rows(near, lambda tensor: tensor)
    for found, wanted in zip(kernels_on_two_rows(far, first_and_last), expected, strict=True):
        wanted = torch.where(wanted == 1, LAST, wanted) if wanted.dtype == torch.int64 else wanted
        assert torch.equal(found, wanted)
