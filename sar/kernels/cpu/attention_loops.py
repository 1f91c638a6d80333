"""The kernels of one-pass attention: softmax over in-edges and weighted sum, and their gradients.

Scores are computed where they are used, so nothing has the size of the edges. A destination's edges may come in several
blocks: it keeps the greatest score so far, and the sums relative to it (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao 2022, "FlashAttention"). The backward makes each weight anew from the logarithm
of its sum.

Arrays are flat; `width` is heads * dim. The ends of an edge are called as in `sar.kernels.cpu.walks`: "own" is the row
by which edges are grouped, "other" that at the other end. `mine` and `theirs` are what scores are made of: of own and
other rows, a number per head for ADDITIVE scores, features for the others. See [Note: pieces of edges].
"""

from __future__ import annotations

from sar.kernels.cpu.attention_steps import (
    ADDITIVE,
    AHEAD,
    ALONG,
    DOT,
    DYNAMIC,
    LOWEST_32,
    LOWEST_64,
    PIECE,
    STATISTICS,
    Heads,
    Scratch,
    add_rows,
    add_score_grads,
    copy,
    has_shares,
    lay_out,
    multiply,
    raise_to,
    rise,
    scale,
    score_additive,
    score_grads,
    score_pair,
    u64,
    weigh_and_count,
    write_alongs,
    write_shares,
    write_weights,
)
from sar.kernels.cpu.intrinsics import inline, kernel
from sar.kernels.cpu.vectors import add_dot, add_leaky, add_scaled, add_slopes
from sar.kernels.cpu.walks import ONE, OTHER, OWN, ZERO, Array, Index, Walk, look_ahead


@kernel
def attend(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    mine: Array,
    theirs: Array,
    attn: Array,
    weight: Array,
    out: Array,
    peak: Array,
    total: Array,
    scratch: Scratch,
) -> None:
    """Add the edges of groups begin to end to out, (N_dst, width), and total, (N_dst, heads), relative to exp(peak).

    x: (N_src, width) features of the sources.
    """
    slope, lowest = x.dtype.type(to.factor), x.dtype.type(LOWEST_32 if x.itemsize == 4 else LOWEST_64)
    heads, step = to.heads, to.heads * (ONE if to.kind == ADDITIVE else to.dim)
    first, last, group = u64(walk.indptr[begin]), u64(walk.indptr[end]), u64(begin)
    while first < last:
        stop = min(first + u64(PIECE), last)
        size = stop - first
        count, group = lay_out(walk, group, first, stop, scratch)
        for k in range(count):
            copy(heads, scratch.tops, k * heads, peak, scratch.owns[k] * heads)
        for q in range(size):
            look_ahead(OTHER, walk, first + q, theirs, step, AHEAD)
            own, other, i, t = scratch.own_of[q], u64(walk.other[first + q]), q * heads, scratch.place_of[q] * heads
            if to.kind == ADDITIVE:
                score_additive(
                    heads, scratch.scores, i, scratch.tops, t, mine, own * heads, theirs, other * heads, slope
                )
            else:
                score_pair(to, mine, own, theirs, other, attn, scratch.scores, i)
                raise_to(heads, scratch.tops, t, scratch.scores, i)
        for k in range(count):
            rise(heads, peak, total, scratch.owns[k] * heads, scratch.tops, scratch.shares, k * heads, lowest)
            for h in range(heads):
                i = scratch.owns[k] * heads + h
                if total[i] != 0 and scratch.shares[k * heads + h] != 1:
                    scale(to.dim, out, i * to.dim, scratch.shares[k * heads + h])
        for q in range(size):
            weigh_and_count(
                heads,
                scratch.scores,
                q * heads,
                scratch.tops,
                scratch.place_of[q] * heads,
                total,
                scratch.own_of[q] * heads,
            )
        if has_shares(to, weight):
            write_shares(to, walk, first, size, weight, scratch)
            multiply(size * heads, scratch.scores, scratch.shares)
        add_rows(to, walk, first, count, x, scratch.scores, out, scratch)
        first = stop


@kernel
def source_gradients(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    mine: Array,
    theirs: Array,
    attn: Array,
    weight: Array,
    grad: Array,
    stats: Array,
    x_grad: Array,
    mine_grad: Array,
    weight_grad: Array,
    theirs_grad: Array,
    scratch: Scratch,
) -> None:
    """Add the gradients of sources, and of edge weights, over the edges of the sources begin to end.

    Of ADDITIVE scores also theirs_grad, (N_dst, heads), to which other sources may not be adding at the same time.

    x: (N_src, width) features.
    grad: (N_dst, width) gradient of the result.
    stats: (N_dst, STATISTICS, heads), in which ADDITIVE scores are; `theirs` is not read then.
    """
    heads, factor = to.heads, x.dtype.type(to.factor)
    parts = scratch.alongs, scratch.scores, scratch.slopes
    first, last, group = u64(walk.indptr[begin]), u64(walk.indptr[end]), u64(begin)
    while first < last:
        stop = min(first + u64(PIECE), last)
        size = stop - first
        count, group = lay_out(walk, group, first, stop, scratch)
        write_weights(to, walk, first, size, OTHER, mine, theirs, attn, stats, scratch)
        write_alongs(to, walk, first, size, x, grad, weight, weight_grad, scratch)
        for q in range(size):
            own, other, i = scratch.own_of[q] * heads, u64(walk.other[first + q]) * heads, q * heads
            mean = STATISTICS * other + ALONG * heads
            if to.kind == ADDITIVE:
                look_ahead(OTHER, walk, first + q, theirs_grad, heads, AHEAD)
                add_score_grads(heads, *parts, i, stats, mean, mine_grad, own, theirs_grad, other)
            else:
                score_grads(heads, scratch.alongs, scratch.scores, i, stats, mean)
        if has_shares(to, weight):
            multiply(size * heads, scratch.scores, scratch.shares)
        add_rows(to, walk, first, count, grad, scratch.scores, x_grad, scratch)
        if to.kind == DOT:
            scale(size * heads, scratch.alongs, ZERO, factor)
            add_rows(to, walk, first, count, theirs, scratch.alongs, x_grad, scratch)
        elif to.kind == DYNAMIC:
            _add_dynamic(to, walk, first, size, attn, mine, theirs, x_grad, scratch)
        first = stop


@inline
def _add_dynamic(
    to: Heads,
    walk: Walk,
    first: Index,
    size: Index,
    attn: Array,
    mine: Array,
    theirs: Array,
    out: Array,
    scratch: Scratch,
) -> None:
    """Add the derivatives of DYNAMIC scores with respect to own features, times the scores' gradients."""
    width, factor = to.heads * to.dim, mine.dtype.type(to.factor)
    for q in range(size):
        i, j = scratch.own_of[q] * width, u64(walk.other[first + q]) * width
        for h in range(to.heads):
            c, score_grad = h * to.dim, scratch.alongs[q * to.heads + h]
            add_slopes(to.dim, out, i + c, attn, c, mine, i + c, theirs, j + c, factor, score_grad)


@kernel
def destination_gradients(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    y: Array,
    attn: Array,
    weight: Array,
    grad: Array,
    stats: Array,
    y_grad: Array,
    attn_grad: Array,
    scratch: Scratch,
) -> None:
    """Add the gradients of destinations, over the edges of groups begin to end, of DYNAMIC and DOT scores.

    Also of `attn`, to which others may not be adding at the same time.
    """
    heads, width, factor = to.heads, to.heads * to.dim, x.dtype.type(to.factor)
    first, last, group = u64(walk.indptr[begin]), u64(walk.indptr[end]), u64(begin)
    while first < last:
        stop = min(first + u64(PIECE), last)
        size = stop - first
        count, group = lay_out(walk, group, first, stop, scratch)
        write_weights(to, walk, first, size, OWN, y, x, attn, stats, scratch)
        write_alongs(to, walk, first, size, grad, x, weight, weight[:0], scratch)
        for q in range(size):
            mean = (STATISTICS * scratch.own_of[q] + ALONG) * heads
            score_grads(heads, scratch.alongs, scratch.scores, q * heads, stats, mean)
        if to.kind == DOT:
            scale(size * heads, scratch.alongs, ZERO, factor)
            add_rows(to, walk, first, count, x, scratch.alongs, y_grad, scratch)
        else:
            _add_dynamic(to, walk, first, size, attn, y, x, y_grad, scratch)
            for q in range(size):
                i, j = scratch.own_of[q] * width, u64(walk.other[first + q]) * width
                for h in range(heads):
                    c, score_grad = h * to.dim, scratch.alongs[q * heads + h]
                    add_leaky(to.dim, attn_grad, c, y, i + c, x, j + c, factor, score_grad)
        first = stop


@kernel
def head_sums(begin: int, end: int, to: Heads, grad: Array, out: Array, stats: Array) -> None:
    """Write the sum over each head of grad * out to the row ALONG of stats, for destinations begin to end."""
    for d in range(u64(begin), u64(end)):
        for h in range(to.heads):
            i = (d * to.heads + h) * to.dim
            o = (STATISTICS * d + ALONG) * to.heads + h
            stats[o] = 0
            add_dot(to.dim, stats, o, grad, i, out, i)


@kernel
def project(begin: int, end: int, heads: Index, dim: Index, x: Array, attn: Array, out: Array) -> None:
    """Write the product of each head of rows begin to end of x with its row of attn to out, (N, heads)."""
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            out[n * heads + h] = 0
            add_dot(dim, out, n * heads + h, x, (n * heads + h) * dim, attn, h * dim)


@kernel
def project_grad(
    begin: int,
    end: int,
    heads: Index,
    dim: Index,
    x: Array,
    attn: Array,
    grad: Array,
    x_grad: Array,
    attn_grad: Array,
) -> None:
    """Add the gradients of `project`; to attn_grad others may not be adding at the same time."""
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            i = (n * heads + h) * dim
            add_scaled(dim, x_grad, i, attn, h * dim, grad[n * heads + h])
            add_scaled(dim, attn_grad, h * dim, x, i, grad[n * heads + h])
