"""One-pass attention, forward and backward, against softmax and sum by the edge in float64."""

from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import leaky_relu

from sar.kernels import EdgeBlock
from sar.kernels.attention import attend, attend_grad, destination_statistics, note_scores
from sar.kernels.attention_operands import Attention, Ends, Gradients, Running, Score
from sar.kernels.torch.attention import dropout_factors

pytestmark = pytest.mark.usefixtures("implementation", "num_threads")

Case = tuple[Attention, Tensor, Tensor, Ends, list[int]]  # src, dst, operands, where sources are cut into tiles


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
    return how, src, dst, Ends(values(num_src, heads, dim), y, attn, weight), cuts


def expected(how: Attention, src: Tensor, dst: Tensor, ends: Ends) -> Tensor:
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


class Tiles(NamedTuple):
    """The edges by source tile."""

    bounds: list[tuple[int, int]]
    blocks: list[EdgeBlock]

    @classmethod
    def cut(cls, case: Case, *, in_place: bool) -> "Tiles":
        """The tiles of a case; `in_place`, their sources are some among all."""
        _, src, dst, ends, cuts = case
        whole = EdgeBlock.from_coo(src, dst, len(ends.x), len(ends.y))
        bounds = list(pairwise(cuts))
        blocks = [whole.select_sources(*bound) for bound in bounds]
        if in_place:
            blocks = [block.within(torch.arange(*bound)) for bound, block in zip(bounds, blocks, strict=True)]
            bounds = [(0, len(ends.x))] * len(bounds)
        return cls(bounds, blocks)

    def forward(self, case: Case) -> tuple[Tensor, Tensor]:
        """The result and the logarithm of the sum."""
        how, _, dst, ends, _ = case
        running = Running.start(len(ends.y), ends.x)
        for (begin, end), block in zip(*self, strict=True):
            attend(block, how, ends._replace(x=ends.x[begin:end]), running)
        return running.finish(torch.bincount(dst, minlength=len(ends.y)))


@settings(max_examples=settings.default.max_examples * 3 // 2)
@given(case=cases(), seed=st.integers(0, 100), in_place=st.booleans())
def test_result_and_gradients(case: Case, seed: int, in_place: bool) -> None:
    """In tiles as all at once, for every score, with dropout and edge weights."""
    how, src, dst, ends, _ = case
    tiles = Tiles.cut(case, in_place=in_place)
    result, log_total = tiles.forward(case)
    leaves = Ends(*(None if t is None else t.double().requires_grad_() for t in ends))
    wanted = expected(how, src, dst, leaves)
    tolerance = {"rtol": 1e-9, "atol": 1e-9} if ends.x.dtype is torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(result.double(), wanted, **tolerance)

    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    wanted.backward(grad)
    grad = grad.to(ends.x.dtype)
    stats = destination_statistics(how, log_total, grad, result)
    note_scores(how, stats, ends.y)
    grads = Gradients(*(None if t is None else torch.zeros_like(t) for t in ends))
    for (begin, end), block in zip(*tiles, strict=True):
        here = ends._replace(x=ends.x[begin:end])
        attend_grad(block, how, here, grad, stats, grads._replace(x=grads.x[begin:end]))
    for found, leaf in zip(grads, leaves, strict=True):
        if leaf is not None:
            assert found is not None
            wanted_grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(found.double(), wanted_grad, **tolerance)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([torch.inf, 0.0], [torch.nan, torch.nan]),
        ([torch.nan, 0.0], [torch.nan, torch.nan]),
        ([-torch.inf, 0.0], [0.0, 1.0]),
        ([-torch.inf, -torch.inf], [torch.nan, torch.nan]),
    ],
)
def test_infinite_and_undefined_scores(values: list[float], wanted: list[float]) -> None:
    """As softmax has it, in one tile as in two; `y` carries the special values, one head each."""
    src, dst = torch.tensor([0, 1]), torch.tensor([0, 0])
    x = torch.tensor([[[values[0]]], [[values[1]]]])
    reference = torch.tensor(values).softmax(0)
    torch.testing.assert_close(reference, torch.tensor(wanted), equal_nan=True)
    whole = EdgeBlock.from_coo(src, dst, 2, 1)
    for tiles in ([(0, 2)], [(0, 1), (1, 2)]):
        running = Running.start(1, x)
        for begin, end in tiles:
            ends = Ends(x[begin:end], torch.zeros(1, 1), torch.ones(1, 1), None)
            attend(whole.select_sources(begin, end), Attention(Score.ADDITIVE, 1.0), ends, running)
        _, log_total = running.finish(torch.tensor([2]))
        weights = (torch.tensor(values) - log_total[0, 0]).exp()
        torch.testing.assert_close(weights, torch.tensor(wanted), equal_nan=True)


def test_dropout_is_uniform_over_edges_and_heads() -> None:
    """Neighbouring edges, heads and seeds draw independently."""
    ids = torch.arange(40_000)
    drawn = [dropout_factors(Attention(Score.DOT, 1.0, 0.3, seed), ids, 5, torch.float32) > 0 for seed in (1, 2)]
    for kept in drawn:
        assert (kept.double().mean(0) - 0.7).abs().max() < 0.012  # five standard deviations
    pairs = [(drawn[0], drawn[1]), (drawn[0][1:], drawn[0][:-1]), (drawn[0][:, 1:], drawn[0][:, :-1])]
    for one, other in pairs:
        assert abs((one & other).double().mean() - 0.49) < 0.007
