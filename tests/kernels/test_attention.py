"""One-pass attention, forward and backward, against softmax and sum by the edge in float64."""

from functools import partial
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import leaky_relu

from sar.kernels import EdgeBlock
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores
from sar.kernels.ops import Attention, AttentionOperands, Gradients, OnlineSoftmaxState, Score
from sar.kernels.torch import dropout_factors

pytestmark = pytest.mark.usefixtures("implementation", "num_threads")

Case = tuple[
    Attention, Tensor, Tensor, AttentionOperands, list[int]
]  # src, dst, operands, where sources are cut into tiles


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Attention over a small graph with isolated nodes and multi-edges."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    score = draw(st.sampled_from(Score))
    num_src, num_dst, edges = draw(st.integers(1, 8)), draw(st.integers(1, 8)), draw(st.integers(0, 300))
    heads, dim = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 8, 45]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))

    def values(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    src = torch.randint(num_src, (edges,), generator=generator)
    dst = torch.randint(num_dst, (edges,), generator=generator).sort().values
    y = values(num_dst, heads) if score is Score.ADDITIVE else values(num_dst, heads, dim)
    attn = None if score is Score.DOT else values(heads, dim)
    weight = values(edges) if draw(st.booleans()) else None
    dropout = draw(st.sampled_from([0.0, 0.0, 0.4, 1.0]))
    how = Attention(score, draw(st.sampled_from([0.0, 0.2])), dropout, draw(st.integers(0, 2**64 - 1)))
    cuts = sorted({0, num_src, *draw(st.lists(st.integers(0, num_src), max_size=3))})
    return how, src, dst, AttentionOperands(values(num_src, heads, dim), y, attn, weight), cuts


def expected(how: Attention, src: Tensor, dst: Tensor, ends: AttentionOperands) -> Tensor:
    """Attention with tensors of the size of the edges."""
    x, y, attn, weight, _ = ends
    if how.score is Score.ADDITIVE:
        score = leaky_relu((x * attn).sum(-1)[src] + y[dst], how.factor)
    elif how.score is Score.DYNAMIC:
        score = (leaky_relu(x[src] + y[dst], how.factor) * attn).sum(-1)
    else:
        score = how.factor * (x[src] * y[dst]).sum(-1)
    alpha = torch.zeros_like(score)
    for d in dst.unique():
        alpha = alpha + torch.where((dst == d).unsqueeze(1), score, -torch.inf).softmax(0)
    alpha = alpha * dropout_factors(how, torch.arange(len(src)), score.shape[1], score.dtype)
    if weight is not None:
        alpha = alpha * weight.unsqueeze(1)
    return x.new_zeros(len(y), *x.shape[1:]).index_add(0, dst, alpha.unsqueeze(2) * x[src])


def attention(case: Case, grad: Tensor, *, in_place: bool = False) -> tuple[Tensor, Gradients]:
    """The result by the kernels, tile by tile, and the gradients of the operands from that of the result.

    If `in_place`, the sources of a tile are some among all.
    """
    how, src, dst, ends, cuts = case
    whole, bounds = EdgeBlock.from_coo(src, dst, len(ends.x), len(ends.y)), list(pairwise(cuts))
    blocks = [whole.select_sources(*bound) for bound in bounds]
    if in_place:
        blocks = [block.within(torch.arange(*bound)) for bound, block in zip(bounds, blocks, strict=True)]
        bounds = [(0, len(ends.x))] * len(bounds)

    def of_tile(operands: Any, begin: int, end: int) -> Any:
        x_score = None if operands.x_score is None else operands.x_score[begin:end]
        return operands._replace(x=operands.x[begin:end], x_score=x_score)

    running = OnlineSoftmaxState.start(len(ends.y), ends.x)
    for bound, block in zip(bounds, blocks, strict=True):
        attend(block, how, of_tile(ends, *bound), running)
    result, normaliser = running.finish(torch.bincount(dst, minlength=len(ends.y)))
    stats = destination_statistics(how, normaliser, grad, result)
    note_scores(how, stats, ends.y)
    grads = Gradients(*(None if t is None else torch.zeros_like(t) for t in ends))
    for bound, block in zip(bounds, blocks, strict=True):
        attend_grad(block, how, of_tile(ends, *bound), grad, stats, of_tile(grads, *bound))
    return result, grads


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(case=cases(), seed=st.integers(0, 100), in_place=st.booleans())
def test_result_and_gradients(case: Case, seed: int, in_place: bool) -> None:
    """In tiles as all at once, for every score, with dropout and edge weights."""
    *_, ends, _ = case
    grad = torch.randn(ends.y.shape[:1] + ends.x.shape[1:], generator=torch.Generator().manual_seed(seed)).double()
    result, grads = attention(case, grad.to(ends.x.dtype), in_place=in_place)
    leaves = AttentionOperands(*(None if t is None else t.double().requires_grad_() for t in ends))
    wanted = expected(*case[:3], leaves)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if ends.x.dtype is torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(result.double(), wanted, **tolerance)
    wanted.backward(grad)
    for found, leaf in zip(grads, leaves, strict=True):
        if leaf is not None:
            assert found is not None
            wanted_grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(found.double(), wanted_grad, **tolerance)


def levels(count: int, generator: torch.Generator) -> Tensor:
    """Integers in many orders, a head each, (count, 8); in most the greatest stands twice or more."""
    ascending = torch.arange(count) // 2
    shuffled = ascending[torch.randperm(count, generator=generator)]
    middle = torch.minimum(ascending, ascending.flip(0))
    alternating = torch.where(torch.arange(count) % 2 == 0, ascending, ascending.flip(0))
    equal = torch.full_like(ascending, 3)
    orders = [ascending, ascending.flip(0), middle, alternating, shuffled, equal, equal.clone(), equal.clone()]
    orders[-2][0] = orders[-1][-1] = count // 2  # the first is the greatest, or the last
    return torch.stack(orders, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", Score)
def test_scores_of_any_size_in_any_order(score: Score, dtype: torch.dtype) -> None:
    """The greatest in any chunk of edges, and in any tile. Numbers are such that scores are exact."""
    for size, dim in (1, 9), (32, 32), (1024, 9), (16384, 32):
        generator = torch.Generator().manual_seed(size)

        def few(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(-1, 2, shape, generator=generator).to(dtype)

        count, heads = 200, 8
        x, attn = few(count, heads, dim), few(heads, dim)
        x[:, :, 0], attn[:, 0] = levels(count, generator).to(dtype), 1
        y = few(3, heads) if score is Score.ADDITIVE else few(3, heads, dim)
        if score is Score.DOT:
            y[:, :, 0] = torch.tensor([[1], [-1], [0]])
        src, dst = torch.arange(count).repeat(3), torch.arange(3).repeat_interleave(count)
        weight = 1 + few(len(src)).abs()
        ends = AttentionOperands(x * size, y * size, None if score is Score.DOT else attn, weight)
        for cuts in ([0, count], [0, 30, 94, 100, count]):
            case = Attention(score, 0.5), src, dst, ends, cuts
            grad = 1 + few(3, heads, dim)
            result, grads = attention(case, grad)
            leaves = AttentionOperands(
                *(None if t is None else t.to(torch.float64, copy=True).requires_grad_() for t in ends)
            )
            wanted = expected(*case[:3], leaves)
            wanted.backward(grad.double())

            # What is subtracted from each other in a gradient, at most, by operand.
            along, slope = 200 * size * dim, 200 * size if score is Score.DOT else 1
            scales = AttentionOperands(along * slope, along * slope, along * 200 * size, along)
            close = partial(torch.testing.assert_close, rtol=0)
            accuracy = 100 * torch.finfo(dtype).eps
            close(result.double(), wanted, atol=200 * size * accuracy)
            for found, leaf, scale in zip(grads, leaves, scales, strict=True):
                if leaf is not None:
                    assert found is not None
                    close(found.double(), leaf.grad, atol=scale * accuracy)


@settings(max_examples=settings.default.max_examples // 4)
@given(seed=st.integers(0, 1000), score=st.sampled_from(Score), dim=st.sampled_from([1, 3, 8, 45]))
def test_the_backward_has_the_weights_of_the_forward(seed: int, score: Score, dim: int) -> None:
    """Scores that large change by much if one operation on them is rounded in another way."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(50, (1000,), generator=generator)
    dst = torch.randint(3, (1000,), generator=generator).sort().values
    y = (3, 5) if score is Score.ADDITIVE else (3, 5, dim)
    x, y, attn, grad = (torch.randn(shape, generator=generator) for shape in ((50, 5, dim), y, (5, dim), (3, 5, dim)))
    ends = AttentionOperands(3000 * x, 3000 * y, None if score is Score.DOT else attn, torch.ones(1000))
    case = Attention(score, 0.2), src, dst, ends, [0, 20, 50]
    result, grads = attention(case, grad)
    found = grads.weight
    assert found is not None
    # The gradient of an edge's weight is the softmax times grad * x, of which the result is the sum.
    along = torch.zeros(3).index_add(0, dst, found)
    torch.testing.assert_close(along, (grad * result).sum((1, 2)), rtol=0, atol=1e-5 * float(ends.x.abs().max()) * dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinite_undefined_and_tiny_scores(dtype: torch.dtype) -> None:
    """As softmax has them, in one tile as in two, and in as many chunks; gradients too."""
    info, most = torch.finfo(dtype), 140
    values = [-torch.inf, torch.inf, torch.nan, 0.0, info.max, info.min, info.smallest_normal / 8, -1000.0]
    generator = torch.Generator().manual_seed(0)
    for first, then in product(values, values):
        scores = torch.tensor([first, then], dtype=dtype).repeat_interleave(most // 2).unsqueeze(1)
        x = torch.randn(most, 1, 3, generator=generator, dtype=dtype)
        given, theirs = x.clone().requires_grad_(), scores.clone().requires_grad_()
        wanted = (theirs.softmax(0).unsqueeze(2) * given).sum(0, keepdim=True)
        grad = torch.randn(1, 1, 3, generator=generator, dtype=dtype)
        wanted.backward(grad)
        how, y, attn = Attention(Score.ADDITIVE, 1.0), torch.zeros(1, 1, dtype=dtype), torch.ones(1, 3, dtype=dtype)
        ends, edges = AttentionOperands(x, y, attn, None, scores), (torch.arange(most), torch.zeros(most).long())
        for cuts in ([0, most], [0, most // 2, most]):
            out, grads = attention((how, *edges, ends, cuts), grad)
            close = partial(torch.testing.assert_close, equal_nan=True, msg=f"scores {first} and {then} in {cuts}")
            close(out, wanted)
            close(grads.x, given.grad)
            close(grads.x_score, theirs.grad)


def test_dropout_is_uniform_over_edges_and_heads() -> None:
    """Neighbouring edges, heads and seeds draw independently."""
    ids = torch.arange(40_000)
    drawn = [dropout_factors(Attention(Score.DOT, 1.0, 0.3, seed), ids, 5, torch.float32) > 0 for seed in (1, 2)]
    for kept in drawn:
        assert (kept.double().mean(0) - 0.7).abs().max() < 0.012  # five standard deviations
    pairs = [(drawn[0], drawn[1]), (drawn[0][1:], drawn[0][:-1]), (drawn[0][:, 1:], drawn[0][:, :-1])]
    for one, other in pairs:
        assert abs((one & other).double().mean() - 0.49) < 0.007
