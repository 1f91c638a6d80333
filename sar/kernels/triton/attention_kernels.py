"""The kernels of one-pass attention in Triton.

A program takes a few heads of one row, and goes through the row's edges, some at a time. The forward keeps the greatest
score so far and sums relative to it, as in `sar.kernels.cpu.attention_loops`. The backward makes each weight anew, once
by destination and once by source: from tiles of one shape, so that the products of a score are added in one order.

[Note: lanes]
Of the edges that a program takes at a time each has its own running sums ("lane"), which meet when all edges are done:
within the loop threads add up the products of a score, and wait for nothing else.
"""

from __future__ import annotations

import triton.language as tl

from sar import splitmix
from sar.kernels import attention_operands as statistics
from sar.kernels.attention_operands import Score
from sar.kernels.triton.edge_kernels import bounds, edge_rows, kernel, other_rows, own_row, result_row

PEAK, INVERSE = tl.constexpr(statistics.PEAK), tl.constexpr(statistics.INVERSE)
GRAD_DOT, SCORE = tl.constexpr(statistics.GRAD_DOT), tl.constexpr(statistics.SCORE)
STATISTICS = tl.constexpr(statistics.STATISTICS)
ADDITIVE, DYNAMIC = tl.constexpr(int(Score.ADDITIVE)), tl.constexpr(int(Score.DYNAMIC))
STEP, FACTOR_1, FACTOR_2 = (
    tl.constexpr(int(number)) for number in (splitmix.STEP, splitmix.FACTOR_1, splitmix.FACTOR_2)
)


@kernel
def _places(heads, dim, first, HEADS: tl.constexpr, DIM: tl.constexpr):
    """A block of heads: their numbers, the places of their features in a row, (HEADS, DIM), and a mask of these."""
    h = first * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    return h, h[:, None] * dim + d[None, :], (h < heads)[:, None] & (d < dim)[None, :]


@kernel
def _features(values, rows, here, width, at, exists, SUM: tl.constexpr):
    """The features of rows where `here`, (rows, HEADS, DIM); 0 elsewhere."""
    place = (rows * width)[:, None, None] + at[None, :, :]
    return tl.load(values + place, mask=here[:, None, None] & exists[None, :, :], other=0).to(SUM)


@kernel
def _numbers(values, rows, here, width, h, heads, SUM: tl.constexpr):
    """A number of each row and head, (rows, HEADS); 0 where there is none."""
    mask = here[:, None] & (h < heads)[None, :]
    return tl.load(values + (rows * width)[:, None] + h[None, :], mask=mask, other=0).to(SUM)


@kernel
def _own_features(values, place, at, exists, SUM: tl.constexpr):
    """The features of one row, which begin at `place`, (1, HEADS, DIM)."""
    return tl.load(values + place + at, mask=exists, other=0).to(SUM)[None, :, :]


@kernel
def _own_numbers(values, place, h, heads, SUM: tl.constexpr):
    """The numbers of one row, which begin at `place`, (1, HEADS)."""
    return tl.load(values + place + h, mask=h < heads, other=0).to(SUM)[None, :]


@kernel
def _leaky(raw, factor):
    return tl.where(raw > 0, raw, raw * factor)


@kernel
def _scores_of_pairs(x, y, attn, factor, KIND: tl.constexpr):
    """The scores of DYNAMIC and DOT, (LANES, HEADS), from features of LANES rows and of one row."""
    return tl.sum(_leaky(x + y, factor) * attn, 2) if KIND == DYNAMIC else tl.sum(x * y, 2) * factor


@kernel
def _kept(ids, h, heads, seed, drop, scale, DROPS: tl.constexpr, SUM: tl.constexpr):
    """The factors of dropout, (LANES, HEADS) or (1, 1): see `sar.kernels.cpu.attention_loops`."""
    if DROPS:
        z = (ids[:, None] * heads + h[None, :] + 1).to(tl.uint64) * STEP + seed.to(tl.uint64)
        z = (z ^ (z >> 30)) * FACTOR_1
        z = (z ^ (z >> 27)) * FACTOR_2
        z = (z ^ (z >> 31)) >> 32
        kept = tl.where(z.to(tl.uint32) >= drop, scale, 0.0)
    else:
        kept = tl.full((1, 1), 1.0, SUM)
    return kept


@kernel
def _weighted(kept, ends, ids, here, SUM: tl.constexpr):
    """The factors of dropout and edge weights together."""
    if ends.weight is not None:
        kept = kept * tl.load(ends.weight + ids, mask=here, other=0).to(SUM)[:, None]
    return kept


@kernel
def attend_kernel(
    edges, ends, factor: tl.float64, seed: tl.int64, drop: tl.uint32, scale: tl.float64, heads, dim,
    out, peak, total,
    KIND: tl.constexpr, DROPS: tl.constexpr,
    LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add a group's edges to the sums of its row: see `OnlineSoftmaxState`, and [Note: lanes]."""
    group = tl.program_id(0)
    begin, end = bounds(edges, group)
    own = own_row(edges, group)
    h, at, exists = _places(heads, dim, tl.program_id(1), HEADS, DIM)
    width, factor, scale = heads * dim, tl.full((), factor, SUM), tl.full((), scale, SUM)
    attn = tl.zeros((1, HEADS, DIM), SUM)
    if KIND == DYNAMIC:
        attn = _own_features(ends.attn, 0, at, exists, SUM)
    if KIND == ADDITIVE:
        y = _own_numbers(ends.y, own * heads, h, heads, SUM)
    else:
        y = _own_features(ends.y, own * width, at, exists, SUM)
    tops = tl.full((LANES, HEADS), -float("inf"), SUM)
    totals = tl.zeros((LANES, HEADS), SUM)
    sums = tl.zeros((LANES, HEADS, DIM), SUM)
    for first in range(begin, end, LANES):
        p = first + tl.arange(0, LANES)
        here = p < end
        src, ids = other_rows(edges, p, here), edge_rows(edges, p, here)
        x = _features(ends.x, src, here, width, at, exists, SUM)
        if KIND == ADDITIVE:
            score = _leaky(_numbers(ends.x_score, src, here, heads, h, heads, SUM) + y, factor)
        else:
            score = _scores_of_pairs(x, y, attn, factor, KIND)
        score = tl.where(here[:, None], score, -float("inf"))
        top = tl.where(score > tops, score, tops)  # NaN is not greater than anything
        shrink = tl.where(top > tops, tl.exp(tops - top), 1.0)
        # -inf weighs nothing, even where all scores are; NaN goes through.
        weight = tl.where(score == -float("inf"), 0.0, tl.exp(score - top))
        totals = totals * shrink + weight
        weight *= _weighted(_kept(ids, h, heads, seed, drop, scale, DROPS, SUM), ends, ids, here, SUM)
        sums = sums * shrink[:, :, None] + weight[:, :, None] * x
        tops = top

    row = result_row(edges, group, own)
    at_heads = row * heads + h
    before = tl.load(peak + at_heads, mask=h < heads, other=-float("inf")).to(SUM)
    top = tl.maximum(tl.max(tops, 0), before)
    shrink = tl.where(top[None, :] > tops, tl.exp(tops - top[None, :]), 1.0)
    shrink_before = tl.where(top > before, tl.exp(before - top), 1.0)
    totals_before = tl.load(total + at_heads, mask=h < heads, other=0).to(SUM)
    sums_before = tl.load(out + row * width + at, mask=exists, other=0).to(SUM)
    tl.debug_barrier()  # all threads have read the peak before it changes
    tl.store(peak + at_heads, top, mask=h < heads)
    tl.store(total + at_heads, totals_before * shrink_before + tl.sum(totals * shrink, 0), mask=h < heads)
    result = sums_before * shrink_before[:, None] + tl.sum(sums * shrink[:, :, None], 0)
    tl.store(out + row * width + at, result, mask=exists)


@kernel
def destination_gradients(
    edges, ends, factor: tl.float64, seed: tl.int64, drop: tl.uint32, scale: tl.float64, heads, dim,
    grad, stats, y_grad, attn_sums, weight_grad, groups, first_block,
    KIND: tl.constexpr, DROPS: tl.constexpr,
    LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add the gradients of destinations, over the edges of every group whose turn it is, and write those of weights.

    Of DYNAMIC scores also write this program's part of the gradient of `attn`.
    """
    block = first_block + tl.program_id(1)
    h, at, exists = _places(heads, dim, block, HEADS, DIM)
    width, factor, scale = heads * dim, tl.full((), factor, SUM), tl.full((), scale, SUM)
    attn = tl.zeros((1, HEADS, DIM), SUM)
    if KIND == DYNAMIC:
        attn = _own_features(ends.attn, 0, at, exists, SUM)
        attn_sum = tl.zeros((LANES, HEADS, DIM), SUM)
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        begin, end = bounds(edges, group)
        own = own_row(edges, group)
        out_grad = _own_features(grad, own * width, at, exists, SUM)
        peak = _own_numbers(stats, (own * STATISTICS + PEAK) * heads, h, heads, SUM)
        inverse = _own_numbers(stats, (own * STATISTICS + INVERSE) * heads, h, heads, SUM)
        mean = _own_numbers(stats, (own * STATISTICS + GRAD_DOT) * heads, h, heads, SUM)
        if KIND == ADDITIVE:
            y = _own_numbers(ends.y, own * heads, h, heads, SUM)
            y_sum = tl.zeros((LANES, HEADS), SUM)
        else:
            y = _own_features(ends.y, own * width, at, exists, SUM)
            y_sum = tl.zeros((LANES, HEADS, DIM), SUM)
        for first in range(begin, end, LANES):
            p = first + tl.arange(0, LANES)
            here = p < end
            src, ids = other_rows(edges, p, here), edge_rows(edges, p, here)
            x = _features(ends.x, src, here, width, at, exists, SUM)
            if KIND == ADDITIVE:
                score = _leaky(_numbers(ends.x_score, src, here, heads, h, heads, SUM) + y, factor)
            else:
                score = _scores_of_pairs(x, y, attn, factor, KIND)
            softmax = tl.exp(score - peak) * inverse
            kept = _kept(ids, h, heads, seed, drop, scale, DROPS, SUM)
            grad_dot = tl.sum(out_grad * x, 2)
            if weight_grad is not None:
                others = tl.where(block > 0, tl.load(weight_grad + ids, mask=here, other=0).to(SUM), 0.0)
                tl.store(weight_grad + ids, others + tl.sum(softmax * kept * grad_dot, 1), mask=here)
            share = _weighted(kept, ends, ids, here, SUM)
            score_grad = tl.where(here[:, None], softmax * (share * grad_dot - mean), 0.0)
            if KIND == ADDITIVE:
                y_sum += tl.where(score > 0, score_grad, score_grad * factor)
            elif KIND == DYNAMIC:
                score_grad = score_grad[:, :, None]
                y_sum += tl.where(x + y > 0, score_grad, score_grad * factor)
                attn_sum += score_grad * _leaky(x + y, factor)
            else:
                y_sum += score_grad[:, :, None] * x
        row = result_row(edges, group, own)
        if KIND == ADDITIVE:
            to = y_grad + row * heads + h
            tl.store(to, tl.load(to, mask=h < heads, other=0).to(SUM) + tl.sum(y_sum, 0), mask=h < heads)
        else:
            to = y_grad + row * width + at
            given = tl.sum(y_sum * (attn if KIND == DYNAMIC else factor), 0)
            tl.store(to, tl.load(to, mask=exists, other=0).to(SUM) + given, mask=exists)
    if KIND == DYNAMIC:
        tl.store(attn_sums + tl.program_id(0).to(tl.int64) * width + at, tl.sum(attn_sum, 0), mask=exists)


@kernel
def source_gradients(
    edges, ends, factor: tl.float64, seed: tl.int64, drop: tl.uint32, scale: tl.float64, heads, dim,
    grad, stats, x_grad, x_score_grad,
    KIND: tl.constexpr, DROPS: tl.constexpr,
    LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a source over its edges, those of ADDITIVE scores to x_score_grad."""
    group = tl.program_id(0)
    begin, end = bounds(edges, group)
    width, factor, scale = heads * dim, tl.full((), factor, SUM), tl.full((), scale, SUM)
    if begin < end:
        own = own_row(edges, group)
        h, at, exists = _places(heads, dim, tl.program_id(1), HEADS, DIM)
        x = _own_features(ends.x, own * width, at, exists, SUM)
        attn = tl.zeros((1, HEADS, DIM), SUM)
        if KIND == DYNAMIC:
            attn = _own_features(ends.attn, 0, at, exists, SUM)
            slopes = tl.zeros((LANES, HEADS, DIM), SUM)
        if KIND == ADDITIVE:
            x_score = _own_numbers(ends.x_score, own * heads, h, heads, SUM)
            score_sum = tl.zeros((LANES, HEADS), SUM)
        sums = tl.zeros((LANES, HEADS, DIM), SUM)
        for first in range(begin, end, LANES):
            p = first + tl.arange(0, LANES)
            here = p < end
            dst, ids = other_rows(edges, p, here), edge_rows(edges, p, here)
            out_grad = _features(grad, dst, here, width, at, exists, SUM)
            known = heads * STATISTICS
            peak = _numbers(stats + heads * PEAK, dst, here, known, h, heads, SUM)
            inverse = _numbers(stats + heads * INVERSE, dst, here, known, h, heads, SUM)
            mean = _numbers(stats + heads * GRAD_DOT, dst, here, known, h, heads, SUM)
            if KIND == ADDITIVE:
                score = _leaky(x_score + _numbers(stats + heads * SCORE, dst, here, known, h, heads, SUM), factor)
            else:
                y = _features(ends.y, dst, here, width, at, exists, SUM)
                score = _scores_of_pairs(x, y, attn, factor, KIND)
            softmax = tl.where(here[:, None], tl.exp(score - peak) * inverse, 0.0)
            kept = _kept(ids, h, heads, seed, drop, scale, DROPS, SUM)
            share = _weighted(kept, ends, ids, here, SUM)
            score_grad = tl.where(here[:, None], softmax * (share * tl.sum(out_grad * x, 2) - mean), 0.0)
            sums += (softmax * share)[:, :, None] * out_grad
            if KIND == ADDITIVE:
                score_sum += tl.where(score > 0, score_grad, score_grad * factor)
            elif KIND == DYNAMIC:
                score_grad = score_grad[:, :, None]
                slopes += tl.where(x + y > 0, score_grad, score_grad * factor)
            else:
                sums += (score_grad * factor)[:, :, None] * y
        row = result_row(edges, group, own)
        to = x_grad + row * width + at
        if KIND == DYNAMIC:
            sums += slopes * attn
        tl.store(to, tl.load(to, mask=exists, other=0).to(SUM) + tl.sum(sums, 0), mask=exists)
        if KIND == ADDITIVE:
            to_score = x_score_grad + row * heads + h
            before = tl.load(to_score, mask=h < heads, other=0).to(SUM)
            tl.store(to_score, before + tl.sum(score_sum, 0), mask=h < heads)


@kernel
def dot_kernel(
    a, b, out, count, b_step, out_step, heads, dim,
    LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Write the products of each head of rows of a and b; see `_dot`."""
    rows = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    here = rows < count
    h, at, exists = _places(heads, dim, tl.program_id(1), HEADS, DIM)
    product = _features(a, rows, here, heads * dim, at, exists, SUM) * _features(b, rows, here, b_step, at, exists, SUM)
    to = out + (rows * out_step)[:, None] + h[None, :]
    tl.store(to, tl.sum(product, 2), mask=here[:, None] & (h < heads)[None, :])


@kernel
def project_grad_kernel(
    x, attn, grad, x_grad, attn_sums, count, heads, dim,
    LANES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Add the gradient of x, and write this program's part of that of attn: see `sar.kernels.attention`."""
    h, at, exists = _places(heads, dim, tl.program_id(1), HEADS, DIM)
    width = heads * dim
    attn_row = _own_features(attn, 0, at, exists, SUM)
    attn_sum = tl.zeros((LANES, HEADS, DIM), SUM)
    for first in range(tl.program_id(0) * LANES, count, tl.num_programs(0) * LANES):
        rows = (first + tl.arange(0, LANES)).to(tl.int64)
        here = rows < count
        given = _numbers(grad, rows, here, heads, h, heads, SUM)[:, :, None]
        to = x_grad + (rows * width)[:, None, None] + at[None, :, :]
        mask = here[:, None, None] & exists[None, :, :]
        tl.store(to, tl.load(to, mask=mask, other=0).to(SUM) + given * attn_row, mask=mask)
        attn_sum += given * _features(x, rows, here, width, at, exists, SUM)
    tl.store(attn_sums + tl.program_id(0).to(tl.int64) * width + at, tl.sum(attn_sum, 0), mask=exists)
