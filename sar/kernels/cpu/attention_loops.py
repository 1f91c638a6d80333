"""The compiled kernels of one-pass attention: softmax over in-edges and weighted sum, and their gradients.

Scores are computed when they are used, so nothing has the size of the edges. A destination's edges may come in several
blocks: it keeps the greatest score so far, and the sums relative to it (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao 2022, "FlashAttention"). The backward recomputes each weight from the greatest score and
the sum.

Arrays are flat; `width` is heads * dim. The ends of an edge are called as in `sar.kernels.cpu.csr_view`: "own" is the
row by which edges are grouped, "other" that at the other end.

[Note: chunks of edges]
The kernels pass CHUNK edges at a time, of any number of rows, through one short loop after another. Most rows have few
edges, so the ends of loops over single rows would be the most frequent branch mispredictions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sar.host.compiler import inline, inline_distinct, kernel
from sar.kernels import ops as operands
from sar.kernels.cpu.csr_view import ONE, OTHER, OWN, ZERO, Array, CSRView, Index, edge_row, look_ahead, own_row
from sar.kernels.cpu.rows import add_leaky, add_scaled, add_slopes, dot, dot_leaky, exponentials, row_sums, scale
from sar.tensors import splitmix
from sar.tensors.splitmix import STEP

ADDITIVE, DYNAMIC, DOT = 0, 1, 2
CHUNK = 64  # edges that are worked on at a time
LOWEST_32, LOWEST_64 = (float(np.finfo(dtype).min) for dtype in (np.float32, np.float64))
PEAK, INVERSE = np.uint64(operands.PEAK), np.uint64(operands.INVERSE)
GRAD_DOT, SCORE = np.uint64(operands.GRAD_DOT), np.uint64(operands.SCORE)
STATISTICS = np.uint64(operands.STATISTICS)

u64 = np.uint64
HALF = u64(32)  # bits
mix = inline(splitmix.mix)


class Heads(NamedTuple):
    """The settings of a call."""

    kind: int  # ADDITIVE, DYNAMIC or DOT
    heads: Index
    dim: Index
    factor: float  # slope of the leaky ReLU below 0, or factor of dot products
    seed: Index  # of dropout
    drop: Index  # weights whose hash is below this are dropped; 0: none
    scale: float  # of weights that are kept


class Scratch(NamedTuple):
    """Working memory for a chunk: (CHUNK * heads,) numbers each, and indices (CHUNK + 1,)."""

    scores: Array  # of each edge and head: logits, then exponentials, then factors of rows
    slopes: Array  # of each edge and head: derivative of the leaky ReLU
    grad_dot: Array  # of each edge and head: gradient of the weight, which is grad . x; then gradient of the score
    shares: Array  # of each edge and head: factor of dropout and edge weight
    tops: Array  # of each row and head: the greatest score so far
    owns: Array  # of each row: its number
    bounds: Array  # of each row: its first edge; of one more, the end of the chunk
    own_of: Array  # of each edge: own row
    place_of: Array  # of each edge: which row of the chunk


class Chunk(NamedTuple):
    """The edges first to first + size of a view, of `count` rows."""

    csr: CSRView
    first: Index
    size: Index
    count: Index
    scratch: Scratch


class Scored(NamedTuple):
    """The operands of scores, of own and other rows: a number a head for ADDITIVE scores, features for the others."""

    own: Array
    other: Array
    attn: Array


class Sums(NamedTuple):
    """As `sar.kernels.ops.OnlineSoftmaxState`."""

    out: Array
    peak: Array
    total: Array


class Incoming(NamedTuple):
    """The operands of a backward that belong to destinations."""

    grad: Array  # (N_dst, width) gradient of the result
    stats: Array  # (N_dst, STATISTICS, heads), in which `Scored.other` of ADDITIVE scores is


class SourceGradients(NamedTuple):
    """The results to which gradients of sources are added, and those of edge weights written."""

    x: Array
    x_score: Array
    weight: Array


@inline
def next_chunk(csr: CSRView, group: Index, first: Index, last: Index, scratch: Scratch) -> Any:
    """The chunk from edge `first` of a group on, ending before `last`; and the group in which it ends."""
    stop, count, p = min(first + u64(CHUNK), last), ZERO, first
    scratch.bounds[ZERO] = first
    while p < stop:
        end = u64(csr.indptr[group + ONE])
        until = min(end, stop)
        if until > p:
            own = own_row(csr, group)
            for q in range(p - first, until - first):
                scratch.own_of[q] = own
                scratch.place_of[q] = count
            scratch.owns[count] = own
            count += ONE
            scratch.bounds[count] = p = until
        if p == end:
            group += ONE
    return Chunk(csr, first, stop - first, count, scratch), group


_add_scaled_rows = row_sums(lambda p, factors, first, heads, h: factors[(p - first) * heads + h])


@inline
def add_rows(chunk: Chunk, to: Heads, rows: Array, factors: Array, out: Array) -> None:
    """Add other rows to own rows of out, each head multiplied by its factor.

    They are added in the order of edges, so that results do not depend on where a chunk begins.
    """
    csr, scratch, width = chunk.csr, chunk.scratch, to.heads * to.dim
    for row in range(chunk.count):
        o, first, last = scratch.owns[row] * width, scratch.bounds[row], scratch.bounds[row + ONE]
        for h in range(to.heads):
            i = h * to.dim
            where = csr, first, last, rows, i, width, to.dim, out, o + i, False
            _add_scaled_rows(*where, factors, chunk.first, to.heads, h)


@inline
def _kept(to: Heads, edge: Index, h: Index, x: Array) -> Any:
    """The factor of dropout; a counter is hashed, so that the backward draws the same in any order."""
    if to.drop == ZERO:
        return x.dtype.type(1)
    kept = mix(to.seed + (edge * to.heads + h + ONE) * STEP) >> HALF >= to.drop
    return x.dtype.type(to.scale) if kept else x.dtype.type(0)


@inline
def write_shares(chunk: Chunk, to: Heads, weight: Array) -> None:
    """Write the factors of dropout and edge weights for a chunk's edges, if any."""
    if to.drop != ZERO or weight.size:
        for q in range(chunk.size):
            edge = edge_row(chunk.csr, chunk.first + q)
            for h in range(to.heads):
                share = _kept(to, edge, h, weight)
                chunk.scratch.shares[q * to.heads + h] = share * weight[edge] if weight.size else share


@inline
def multiply_by_shares(chunk: Chunk, to: Heads, weight: Array, a: Array) -> None:
    """Multiply numbers of each edge and head by the factors of `write_shares`."""
    if to.drop != ZERO or weight.size:
        for i in range(chunk.size * to.heads):
            a[i] *= chunk.scratch.shares[i]


@inline_distinct
def _add_and_slope(
    heads: Index, scores: Array, slopes: Array, i: Index, a: Array, ia: Index, b: Array, ib: Index, slope: Any
) -> None:
    """scores[i] = leaky_relu(a[ia] + b[ib]), and slopes[i] the leaky ReLU's derivative, for each head."""
    for h in range(heads):
        raw = a[ia + h] + b[ib + h]
        scores[i + h] = raw if raw > 0 else raw * slope
        slopes[i + h] = a.dtype.type(1) if raw > 0 else slope


@inline
def write_scores(chunk: Chunk, to: Heads, scored: Scored, first: Index, step: Index) -> None:
    """Write the scores of a chunk's edges and, if they are ADDITIVE, `slopes`.

    first, step: the place of ADDITIVE scores' numbers in the rows of `scored.other`, and the length of these.
    """
    csr, scratch, own_values, other_values = chunk.csr, chunk.scratch, scored.own, scored.other
    heads, width, factor = to.heads, to.heads * to.dim, scratch.scores.dtype.type(to.factor)
    for q in range(chunk.size):
        own, other, i = scratch.own_of[q], u64(csr.other[chunk.first + q]), q * heads
        if to.kind == ADDITIVE:
            look_ahead(OTHER, csr, chunk.first + q, other_values, step)
            x, y = own * heads, other * step + first
            _add_and_slope(heads, scratch.scores, scratch.slopes, i, own_values, x, other_values, y, factor)
        else:
            look_ahead(OTHER, csr, chunk.first + q, other_values, width)
            for h in range(heads):
                c = h * to.dim
                x, y = own * width + c, other * width + c
                if to.kind == DYNAMIC:
                    scratch.scores[i + h] = dot_leaky(to.dim, scored.attn, c, own_values, x, other_values, y, factor)
                else:
                    scratch.scores[i + h] = dot(to.dim, own_values, x, other_values, y) * factor


@kernel
def attend(
    begin: int, end: int, csr: CSRView, to: Heads, x: Array, scored: Scored, weight: Array, sums: Sums, scratch: Scratch
) -> None:
    """Add the edges of groups begin to end to the sums of their destinations. x: (N_src, width) source features."""
    heads, out, peak, total = to.heads, sums.out, sums.peak, sums.total
    lowest = out.dtype.type(LOWEST_32 if out.itemsize == 4 else LOWEST_64)
    scores, tops, shrinks = scratch.scores, scratch.tops, scratch.shares
    group, first, last = u64(begin), u64(csr.indptr[begin]), u64(csr.indptr[end])
    while first < last:
        chunk, group = next_chunk(csr, group, first, last, scratch)
        first += chunk.size
        write_scores(chunk, to, scored, ZERO, heads)
        for k in range(chunk.count):
            for h in range(heads):
                tops[k * heads + h] = peak[scratch.owns[k] * heads + h]
        for q in range(chunk.size):
            i, t = q * heads, scratch.place_of[q] * heads
            for h in range(heads):  # NaN is not greater than anything
                tops[t + h] = scores[i + h] if scores[i + h] > tops[t + h] else tops[t + h]
        for k in range(chunk.count):
            own, t = scratch.owns[k] * heads, k * heads
            for h in range(heads):  # not -inf, because -inf less -inf would be NaN
                tops[t + h] = max(tops[t + h], lowest)
                shrinks[t + h] = peak[own + h] - tops[t + h]
        exponentials(shrinks, chunk.count * heads)
        for k in range(chunk.count):
            own, t = scratch.owns[k] * heads, k * heads
            for h in range(heads):
                total[own + h] *= shrinks[t + h]
                # Not by the total: that has shrunk already, to 0 if the peak has risen by much.
                if peak[own + h] >= lowest and shrinks[t + h] != 1:
                    scale(to.dim, out, (own + h) * to.dim, shrinks[t + h])
                peak[own + h] = tops[t + h]
        for q in range(chunk.size):
            i, t = q * heads, scratch.place_of[q] * heads
            for h in range(heads):
                scores[i + h] -= tops[t + h]
        exponentials(scores, chunk.size * heads)
        for q in range(chunk.size):
            i, own = q * heads, scratch.own_of[q] * heads
            for h in range(heads):
                total[own + h] += scores[i + h]
        write_shares(chunk, to, weight)
        multiply_by_shares(chunk, to, weight, scores)
        add_rows(chunk, to, x, scores, out)


@inline
def write_weights(chunk: Chunk, to: Heads, whose: int, scored: Scored, stats: Array) -> None:
    """Write the softmax of each edge to `scores`, as the forward rounds it. whose: the destination is OWN or OTHER."""
    csr, scratch, heads = chunk.csr, chunk.scratch, to.heads
    write_scores(chunk, to, scored, SCORE * heads, STATISTICS * heads)
    for q in range(chunk.size):
        d = scratch.own_of[q] if whose == OWN else u64(csr.other[chunk.first + q])
        i, peak = q * heads, (d * STATISTICS + PEAK) * heads
        for h in range(heads):
            scratch.scores[i + h] -= stats[peak + h]
    exponentials(scratch.scores, chunk.size * heads)
    for q in range(chunk.size):
        d = scratch.own_of[q] if whose == OWN else u64(csr.other[chunk.first + q])
        i, inverse = q * heads, (d * STATISTICS + INVERSE) * heads
        for h in range(heads):
            scratch.scores[i + h] *= stats[inverse + h]


@inline
def write_weight_grads(
    chunk: Chunk, to: Heads, own_rows: Array, other_rows: Array, weight: Array, edge_grad: Array, writes: bool
) -> None:
    """Write the gradient of each softmax, own row . other row and its share, to `grad_dot`.

    edge_grad: also those of edge weights, unless this is empty; not where `writes` is False.
    """
    csr, scratch = chunk.csr, chunk.scratch
    heads, width = to.heads, to.heads * to.dim
    for q in range(chunk.size):
        look_ahead(OTHER, csr, chunk.first + q, other_rows, width)
        i, j = scratch.own_of[q] * width, u64(csr.other[chunk.first + q]) * width
        for h in range(heads):
            c = h * to.dim
            scratch.grad_dot[q * heads + h] = dot(to.dim, own_rows, i + c, other_rows, j + c)
    if writes and edge_grad.size:
        for q in range(chunk.size):
            edge, total = edge_row(csr, chunk.first + q), weight.dtype.type(0)
            for h in range(heads):
                i = q * heads + h
                total += scratch.scores[i] * scratch.grad_dot[i] * _kept(to, edge, h, weight)
            edge_grad[edge] = total
    write_shares(chunk, to, weight)
    multiply_by_shares(chunk, to, weight, scratch.grad_dot)


@inline
def _to_score_grads(chunk: Chunk, to: Heads, whose: int, stats: Array) -> None:
    """Turn gradients of weights into those of scores: softmax * (grad_dot - its mean over the destination's edges)."""
    csr, scratch, heads = chunk.csr, chunk.scratch, to.heads
    for q in range(chunk.size):
        d = scratch.own_of[q] if whose == OWN else u64(csr.other[chunk.first + q])
        i, mean = q * heads, (d * STATISTICS + GRAD_DOT) * heads
        for h in range(heads):
            scratch.grad_dot[i + h] = scratch.scores[i + h] * (scratch.grad_dot[i + h] - stats[mean + h])


@inline
def _add_score_grads_of_pairs(chunk: Chunk, to: Heads, scored: Scored, out: Array) -> None:
    """Add the derivatives of DYNAMIC and DOT scores by own features, times the scores' gradients in `grad_dot`."""
    scratch, factor = chunk.scratch, out.dtype.type(to.factor)
    if to.kind == DOT:
        scale(chunk.size * to.heads, scratch.grad_dot, ZERO, factor)
        add_rows(chunk, to, scored.other, scratch.grad_dot, out)
        return
    width = to.heads * to.dim
    for q in range(chunk.size):
        i, j = scratch.own_of[q] * width, u64(chunk.csr.other[chunk.first + q]) * width
        for h in range(to.heads):
            c, score_grad = h * to.dim, scratch.grad_dot[q * to.heads + h]
            add_slopes(to.dim, out, i + c, scored.attn, c, scored.own, i + c, scored.other, j + c, factor, score_grad)


@kernel
def source_gradients(
    begin: int, end: int, csr: CSRView, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming,
    out: SourceGradients, y_grad: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """Add the gradients of sources begin to end, and write those of edge weights. x: (N_src, width) source features.

    Of ADDITIVE scores, whose `scored.other` has the statistics of destinations, also y_grad, (N_dst, heads), to which
    other sources may not be adding at the same time.
    """
    heads, stats = to.heads, incoming.stats
    group, first, last = u64(begin), u64(csr.indptr[begin]), u64(csr.indptr[end])
    while first < last:
        chunk, group = next_chunk(csr, group, first, last, scratch)
        first += chunk.size
        write_weights(chunk, to, OTHER, scored, stats)
        write_weight_grads(chunk, to, x, incoming.grad, weight, out.weight, True)
        _to_score_grads(chunk, to, OTHER, stats)
        if to.kind == ADDITIVE:
            for q in range(chunk.size):
                look_ahead(OTHER, csr, chunk.first + q, y_grad, heads)
                own, other, i = scratch.own_of[q] * heads, u64(csr.other[chunk.first + q]) * heads, q * heads
                for h in range(heads):
                    score_grad = scratch.grad_dot[i + h] * scratch.slopes[i + h]
                    out.x_score[own + h] += score_grad
                    y_grad[other + h] += score_grad
        multiply_by_shares(chunk, to, weight, scratch.scores)
        add_rows(chunk, to, incoming.grad, scratch.scores, out.x)
        if to.kind != ADDITIVE:
            _add_score_grads_of_pairs(chunk, to, scored, out.x)


@kernel
def destination_gradients(
    begin: int, end: int, csr: CSRView, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming,
    y_grad: Array, attn_grad: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """Add the gradients of destinations begin to end, of DYNAMIC and DOT scores.

    Also of `attn`, to which others may not be adding at the same time.
    """
    heads, width, factor = to.heads, to.heads * to.dim, y_grad.dtype.type(to.factor)
    group, first, last = u64(begin), u64(csr.indptr[begin]), u64(csr.indptr[end])
    while first < last:
        chunk, group = next_chunk(csr, group, first, last, scratch)
        first += chunk.size
        write_weights(chunk, to, OWN, scored, incoming.stats)
        write_weight_grads(chunk, to, incoming.grad, x, weight, weight, False)
        _to_score_grads(chunk, to, OWN, incoming.stats)
        _add_score_grads_of_pairs(chunk, to, scored, y_grad)
        if to.kind == DYNAMIC:
            for q in range(chunk.size):
                i, j = scratch.own_of[q] * width, u64(csr.other[chunk.first + q]) * width
                for h in range(heads):
                    c, score_grad = h * to.dim, scratch.grad_dot[q * heads + h]
                    add_leaky(to.dim, attn_grad, c, scored.own, i + c, x, j + c, factor, score_grad)


@kernel
def head_sums(begin: int, end: int, to: Heads, grad: Array, out: Array, stats: Array) -> None:
    """Write the sum over each head of grad * out to the row GRAD_DOT of stats, for destinations begin to end."""
    for d in range(u64(begin), u64(end)):
        for h in range(to.heads):
            i = (d * to.heads + h) * to.dim
            stats[(STATISTICS * d + GRAD_DOT) * to.heads + h] = dot(to.dim, grad, i, out, i)


@kernel
def project(begin: int, end: int, heads: Index, dim: Index, x: Array, attn: Array, out: Array) -> None:
    """Write the product of each head of rows begin to end of x with its row of attn to out, (N, heads)."""
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            out[n * heads + h] = dot(dim, x, (n * heads + h) * dim, attn, h * dim)


@kernel
def project_grad(
    begin: int, end: int, heads: Index, dim: Index, x: Array, attn: Array, grad: Array, x_grad: Array, attn_grad: Array
) -> None:
    """Add the gradients of `project`; to attn_grad others may not be adding at the same time."""
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            i = (n * heads + h) * dim
            add_scaled(dim, x_grad, i, attn, h * dim, grad[n * heads + h])
            add_scaled(dim, attn_grad, h * dim, x, i, grad[n * heads + h])
