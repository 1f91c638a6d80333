"""The compiled kernels of one-pass attention: softmax over in-edges and weighted sum, and their gradients.

Scores are computed where they are used, so nothing has the size of the edges. A destination's edges may come in several
blocks: it keeps the greatest score so far, and the sums relative to it (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao 2022, "FlashAttention"). The backward makes each weight anew from the
greatest score of all and the sum.

Arrays are flat; `width` is heads * dim. The ends of an edge are called as in `sar.kernels.cpu.walks`: "own" is the row
by which edges are grouped, "other" that at the other end. See [Note: chunks of edges] in `attention_steps`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sar.kernels.cpu.attention_steps import (
    AHEAD,
    ALONG,
    CHUNK,
    DOT,
    DYNAMIC,
    LOWEST_32,
    LOWEST_64,
    STATISTICS,
    Chunk,
    Heads,
    Scored,
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
    write_additive_weights,
    write_alongs,
    write_pair_weights,
    write_shares,
)
from sar.kernels.cpu.compile import inline, kernel
from sar.kernels.cpu.vector import add_dot, add_leaky, add_scaled, add_slopes, nothing_of, thin
from sar.kernels.cpu.walks import ONE, OTHER, OWN, ZERO, Array, Index, Walk, look_ahead


class Sums(NamedTuple):
    """As `sar.kernels.attention_operands.Running`."""

    out: Array
    peak: Array
    total: Array


class Incoming(NamedTuple):
    """What a backward knows of destinations."""

    grad: Array  # (N_dst, width) gradient of the result
    stats: Array  # (N_dst, STATISTICS, heads), in which `theirs` of ADDITIVE scores are


class SourceGradients(NamedTuple):
    """What sources' gradients are added to, and those of edge weights written to."""

    x: Array
    mine: Array
    weight: Array


def _over_chunks(step: Any) -> Any:
    """A function that calls step(chunk, to, *operands) for the edges of groups begin to end, a chunk at a time."""
    step = inline(step)

    @inline
    def run(begin: int, end: int, walk: Walk, scratch: Scratch, to: Heads, *operands: Any) -> None:
        first, last, group = u64(walk.indptr[begin]), u64(walk.indptr[end]), u64(begin)
        while first < last:
            stop = min(first + u64(CHUNK), last)
            count, group = lay_out(walk, group, first, stop, scratch)
            step(Chunk(walk, first, stop - first, count, scratch), to, *operands)
            first = stop

    return run


def _attending(additive: bool) -> Any:
    """The loop for ADDITIVE scores, or for the others: a kernel has the code of those only that it computes."""

    @_over_chunks
    def attend(chunk: Chunk, to: Heads, x: Array, scored: Scored, weight: Array, sums: Sums) -> None:
        slope, lowest = x.dtype.type(to.factor), x.dtype.type(LOWEST_32 if x.itemsize == 4 else LOWEST_64)
        heads, step = to.heads, to.heads * (ONE if additive else to.dim)
        walk, scratch = chunk.walk, chunk.scratch
        out, peak, total = sums.out, sums.peak, sums.total
        scores, tops, shrinks = scratch.scores, scratch.tops, scratch.shares
        for k in range(chunk.count):
            copy(heads, tops, k * heads, peak, scratch.owns[k] * heads)
        for q in range(chunk.size):
            look_ahead(OTHER, walk, chunk.first + q, scored.theirs, step, AHEAD)
            own, other, i, t = (
                scratch.own_of[q],
                u64(walk.other[chunk.first + q]),
                q * heads,
                scratch.place_of[q] * heads,
            )
            if additive:
                score_additive(heads, scores, i, tops, t, scored.mine, own * heads, scored.theirs, other * heads, slope)
            else:
                score_pair(to, scored, own, other, scores, i)
                raise_to(heads, tops, t, scores, i)
        for k in range(chunk.count):
            own, t = scratch.owns[k] * heads, k * heads
            rise(heads, peak, total, own, tops, shrinks, t, lowest)
            for h in range(heads):
                # Not by the total: that has shrunk already, to 0 where the peak has risen by much.
                if peak[own + h] >= lowest and shrinks[t + h] != 1:
                    scale(to.dim, out, (own + h) * to.dim, shrinks[t + h])
            copy(heads, peak, own, tops, t)
        for q in range(chunk.size):
            weigh_and_count(
                heads, scores, q * heads, tops, scratch.place_of[q] * heads, total, scratch.own_of[q] * heads
            )
        if has_shares(to, weight):
            write_shares(chunk, to, weight)
            multiply(chunk.size * heads, scores, scratch.shares)
        add_rows(chunk, to, x, scores, out)

    return attend


_attend_additive, _attend_pairs = _attending(True), _attending(False)


@kernel
def attend_additive(
    begin: int, end: int, walk: Walk, to: Heads, x: Array, scored: Scored, weight: Array, sums: Sums, scratch: Scratch
) -> None:
    """Add the edges of groups begin to end to the sums of their destinations, by ADDITIVE scores.

    x: (N_src, width) features of the sources.
    """
    _attend_additive(begin, end, *thin((walk, scratch, to, x, scored, weight, sums)))


@kernel
def attend_pairs(
    begin: int, end: int, walk: Walk, to: Heads, x: Array, scored: Scored, weight: Array, sums: Sums, scratch: Scratch
) -> None:
    """As `attend_additive`, by DYNAMIC or DOT scores."""
    _attend_pairs(begin, end, *thin((walk, scratch, to, x, scored, weight, sums)))


@inline
def _add_score_grads_of_pairs(chunk: Chunk, to: Heads, scored: Scored, out: Array) -> None:
    """Add the derivatives of DYNAMIC and DOT scores by own features, times the scores' gradients in `alongs`."""
    scratch, factor = chunk.scratch, out.dtype.type(to.factor)
    if to.kind == DOT:
        scale(chunk.size * to.heads, scratch.alongs, ZERO, factor)
        add_rows(chunk, to, scored.theirs, scratch.alongs, out)
        return
    width = to.heads * to.dim
    for q in range(chunk.size):
        i, j = scratch.own_of[q] * width, u64(chunk.walk.other[chunk.first + q]) * width
        for h in range(to.heads):
            c, score_grad = h * to.dim, scratch.alongs[q * to.heads + h]
            add_slopes(to.dim, out, i + c, scored.attn, c, scored.mine, i + c, scored.theirs, j + c, factor, score_grad)


def _of_sources(additive: bool) -> Any:
    """As `_attending`."""

    @_over_chunks
    def gradients(
        chunk: Chunk, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming, out: SourceGradients,
        theirs_grad: Array,
    ) -> None:  # fmt: skip
        heads, scratch, stats = to.heads, chunk.scratch, incoming.stats
        parts = scratch.alongs, scratch.scores, scratch.slopes
        if additive:
            write_additive_weights(chunk, to, scored, stats)
        else:
            write_pair_weights(chunk, to, OTHER, scored, stats)
        write_alongs(chunk, to, x, incoming.grad, weight, out.weight)
        for q in range(chunk.size):
            own, other, i = scratch.own_of[q] * heads, u64(chunk.walk.other[chunk.first + q]) * heads, q * heads
            mean = STATISTICS * other + ALONG * heads
            if additive:
                look_ahead(OTHER, chunk.walk, chunk.first + q, theirs_grad, heads, AHEAD)
                add_score_grads(heads, *parts, i, stats, mean, out.mine, own, theirs_grad, other)
            else:
                score_grads(heads, scratch.alongs, scratch.scores, i, stats, mean)
        if has_shares(to, weight):
            multiply(chunk.size * heads, scratch.scores, scratch.shares)
        add_rows(chunk, to, incoming.grad, scratch.scores, out.x)
        if not additive:
            _add_score_grads_of_pairs(chunk, to, scored, out.x)

    return gradients


_of_additive, _of_pairs = _of_sources(True), _of_sources(False)


@kernel
def additive_source_gradients(
    begin: int, end: int, walk: Walk, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming,
    out: SourceGradients, theirs_grad: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """Add the gradients of sources, and write those of edge weights, over the edges of the sources begin to end.

    Also theirs_grad, (N_dst, heads), to which other sources may not be adding at the same time.

    x: (N_src, width) features.
    scored: `theirs` is not read.
    """
    _of_additive(begin, end, *thin((walk, scratch, to, x, scored, weight, incoming, out, theirs_grad)))


@kernel
def pair_source_gradients(
    begin: int, end: int, walk: Walk, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming,
    out: SourceGradients, theirs_grad: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """As `additive_source_gradients`, of DYNAMIC and DOT scores; theirs_grad is not touched."""
    _of_pairs(begin, end, *thin((walk, scratch, to, x, scored, weight, incoming, out, theirs_grad)))


@_over_chunks
def _destination_gradients(
    chunk: Chunk, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming, y_grad: Array,
    attn_grad: Array,
) -> None:  # fmt: skip
    heads, width, scratch, factor = to.heads, to.heads * to.dim, chunk.scratch, x.dtype.type(to.factor)
    write_pair_weights(chunk, to, OWN, scored, incoming.stats)
    write_alongs(chunk, to, incoming.grad, x, weight, nothing_of(weight))
    for q in range(chunk.size):
        mean = (STATISTICS * scratch.own_of[q] + ALONG) * heads
        score_grads(heads, scratch.alongs, scratch.scores, q * heads, incoming.stats, mean)
    _add_score_grads_of_pairs(chunk, to, scored, y_grad)
    if to.kind == DYNAMIC:
        for q in range(chunk.size):
            i, j = scratch.own_of[q] * width, u64(chunk.walk.other[chunk.first + q]) * width
            for h in range(heads):
                c, score_grad = h * to.dim, scratch.alongs[q * heads + h]
                add_leaky(to.dim, attn_grad, c, scored.mine, i + c, x, j + c, factor, score_grad)


@kernel
def destination_gradients(
    begin: int, end: int, walk: Walk, to: Heads, x: Array, scored: Scored, weight: Array, incoming: Incoming,
    y_grad: Array, attn_grad: Array, scratch: Scratch,
) -> None:  # fmt: skip
    """Add the gradients of destinations, over the edges of groups begin to end, of DYNAMIC and DOT scores.

    Also of `attn`, to which others may not be adding at the same time.
    """
    _destination_gradients(begin, end, *thin((walk, scratch, to, x, scored, weight, incoming, y_grad, attn_grad)))


@kernel
def head_sums(begin: int, end: int, to: Heads, grad: Array, out: Array, stats: Array) -> None:
    """Write the sum over each head of grad * out to the row ALONG of stats, for destinations begin to end."""
    grad, out, stats = thin((grad, out, stats))
    for d in range(u64(begin), u64(end)):
        for h in range(to.heads):
            i = (d * to.heads + h) * to.dim
            o = (STATISTICS * d + ALONG) * to.heads + h
            stats[o] = 0
            add_dot(to.dim, stats, o, grad, i, out, i)


@kernel
def project(begin: int, end: int, heads: Index, dim: Index, x: Array, attn: Array, out: Array) -> None:
    """Write the product of each head of rows begin to end of x with its row of attn to out, (N, heads)."""
    x, attn, out = thin((x, attn, out))
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
    x, attn, grad, x_grad, attn_grad = thin((x, attn, grad, x_grad, attn_grad))
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            i = (n * heads + h) * dim
            add_scaled(dim, x_grad, i, attn, h * dim, grad[n * heads + h])
            add_scaled(dim, attn_grad, h * dim, x, i, grad[n * heads + h])
