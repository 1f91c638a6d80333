"""Softmax over the in-edges of destinations against `torch.softmax` of each destination's logits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sar.kernels import (
    EdgeMessage,
    EdgeOperand,
    OnlineSoftmax,
    Op,
    Target,
    aggregate_sum,
    edge_softmax_backward,
    edge_softmax_forward,
)
from tests.kernels import oracle

pytestmark = pytest.mark.usefixtures("implementation", "num_threads")


def softmax(graph: oracle.Graph, logits: Tensor) -> Tensor:
    out = 0 * logits
    for dst in set(graph.dst):
        rows = torch.tensor([row for row, d in zip(graph.ids, graph.dst, strict=True) if d == dst])
        out = out.index_copy(0, rows, logits[rows].softmax(0))
    return out


@given(
    oracle.tiled_graphs(),
    st.sampled_from([(), (1,), (3,), (2, 20), (0,)]),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.integers(0, 2**20),
)
def test_forward_and_backward(
    tiled: tuple[oracle.Graph, list[oracle.Tile]], shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    graph, tiles = tiled
    rows = max(graph.ids, default=-1) + 1
    logits = 40 * oracle.draw_values(seed, rows, shape, dtype)  # exp(100) overflows float32
    blocks = [tile[2] for tile in tiles]
    out = edge_softmax_forward(blocks, logits)
    leaf = logits.double().requires_grad_()
    expected = softmax(graph, leaf)
    has_edge = torch.zeros(rows, dtype=torch.bool)
    has_edge[graph.ids] = True
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype.itemsize > 2 else {"rtol": 1e-2, "atol": 1e-3}
    torch.testing.assert_close(out[has_edge], expected.detach().to(dtype)[has_edge], **tolerance)
    assert out.dtype == dtype

    grad = oracle.draw_values(seed + 1, rows, shape, dtype)
    expected.backward(grad.double())
    exact = edge_softmax_backward(blocks, expected.detach(), grad.double())
    torch.testing.assert_close(exact[has_edge], leaf.grad[has_edge])
    rounded = expected.detach().to(dtype)
    exact = edge_softmax_backward(blocks, rounded.double(), grad.double())
    grad_logits = edge_softmax_backward(blocks, rounded, grad)
    torch.testing.assert_close(grad_logits[has_edge], exact.to(dtype)[has_edge], **tolerance)
    assert grad_logits.dtype == dtype


def test_nan_and_infinity_as_in_torch() -> None:
    inf, nan = torch.inf, torch.nan
    columns = [
        [0.0, 1.0, 2.0],
        [nan, 1.0, 2.0],
        [inf, 1.0, 2.0],
        [-inf, 1.0, 2.0],
        [-inf] * 3,
        [inf, inf, -inf],
        [nan] * 3,
    ]
    logits = torch.tensor(columns).T.contiguous()
    block = oracle.make_graph([(0, 0), (1, 0), (2, 0)], 3, 1).block
    blocks = [block.select_sources(1, 3), block.select_sources(0, 1)]
    torch.testing.assert_close(edge_softmax_forward(blocks, logits), logits.softmax(0), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_shrink_when_a_block_raises_the_peak(dtype: torch.dtype) -> None:
    """Two heads of scores and of values, in blocks whose greatest scores ascend, descend, or are all -inf."""
    edges, heads = 12, 2
    scores = torch.stack([torch.arange(edges) * 30.0, torch.arange(edges) * -30.0], 1).to(dtype)
    scores[:3] = scores[9] = -torch.inf
    values = oracle.draw_values(0, edges, (heads, 3), torch.float64)
    block = oracle.make_graph([(row, 0) for row in range(edges)], edges, 1).block
    total, weighted = torch.zeros(1, heads, dtype=torch.float64), torch.zeros(1, heads * 3, dtype=torch.float64)
    running = OnlineSoftmax(1, [total, weighted])
    for begin in range(0, edges, 3):
        part, rows = block.select_sources(begin, begin + 3).renumbered, slice(begin, begin + 3)
        made = running.rise(scores[rows], part).double()
        assert made.shape == (3, heads)
        products = (made.unsqueeze(2) * values[rows]).flatten(1)
        for new, out in (made, total), (products, weighted):
            aggregate_sum(part, EdgeMessage(Op.COPY, EdgeOperand.of(new, Target.E)), out)
    weights = scores.double().softmax(0)
    tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(
        weighted.view(heads, 3) / total.view(heads, 1), (weights.unsqueeze(2) * values).sum(0), **tolerance
    )
    torch.testing.assert_close(running.exponentials(scores, block).double() / total, weights, **tolerance)


def test_no_blocks() -> None:
    assert edge_softmax_forward([], torch.zeros(0, 2)).shape == (0, 2)
    assert edge_softmax_backward([], torch.zeros(0, 2), torch.zeros(0, 2)).shape == (0, 2)
