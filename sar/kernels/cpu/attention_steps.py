"""Steps of one-pass attention on a chunk of edges, of which `sar.kernels.cpu.attention_loops` makes kernels.

[Note: chunks of edges]
The kernels take CHUNK edges at a time, of as many rows as these have, through one short loop after another. Most rows
have few edges: a loop over each row's would end, and be mispredicted, more often than anything else.

A loop may not load what the one before has just stored in vectors of another length: the processor then waits until
that is in its cache. Hence all that is kept of an edge is stored, and loaded, four heads at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sar.kernels import attention_operands as operands
from sar.kernels.cpu.compile import inline
from sar.kernels.cpu.vector import (
    FOUR,
    WIDE,
    Lanes,
    Run,
    add_dot,
    add_leaky_dot,
    add_scaled,
    exp,
    lanes,
    larger,
    over_columns,
    over_heads,
    where_positive,
)
from sar.kernels.cpu.walks import ONE, OTHER, OWN, ZERO, Array, Index, Walk, edge_row, look_ahead, own_row

ADDITIVE, DYNAMIC, DOT = 0, 1, 2
CHUNK = 64  # edges that are worked on at a time
AHEAD = np.uint64(32)  # edges between asking for a row and using it; most loops here take few nanoseconds an edge
LOWEST_32, LOWEST_64 = (float(np.finfo(dtype).min) for dtype in (np.float32, np.float64))
PEAK, INVERSE = np.uint64(operands.PEAK), np.uint64(operands.INVERSE)
ALONG, SCORE = np.uint64(operands.ALONG), np.uint64(operands.SCORE)
STATISTICS = np.uint64(operands.STATISTICS)

u64 = np.uint64
HASH_STEP, HASH_1, HASH_2 = u64(0x9E3779B97F4A7C15), u64(0xBF58476D1CE4E5B9), u64(0x94D049BB133111EB)


class Heads(NamedTuple):
    """What all edges have in common."""

    kind: int  # ADDITIVE, DYNAMIC or DOT
    heads: Index
    dim: Index
    factor: float  # slope of the leaky ReLU below 0, or what dot products are multiplied with
    seed: Index  # of dropout
    drop: Index  # weights whose hash is below this are dropped; 0: none
    scale: float  # of weights that are kept


class Scratch(NamedTuple):
    """What is known about a chunk: (CHUNK * heads,) numbers each, and (CHUNK + 1,) indices."""

    scores: Array  # of each edge and head: logits, then exponentials, then what rows are multiplied with
    slopes: Array  # derivative of the leaky ReLU
    alongs: Array  # the other row's gradient along the own one, or the other way round; then the score's gradient
    shares: Array  # what dropout and edge weight multiply a weight with
    tops: Array  # of each row and head: the greatest score so far
    owns: Array  # of each row: its number
    bounds: Array  # of each row: its first edge; of one more, the end of the chunk
    own_of: Array  # of each edge: own row
    place_of: Array  # of each edge: which row of the chunk


class Chunk(NamedTuple):
    """The edges first to first + size of a walk, of `count` rows."""

    walk: Walk
    first: Index
    size: Index
    count: Index
    scratch: Scratch


class Scored(NamedTuple):
    """What scores are made of, of own and other rows: a number a head for ADDITIVE scores, features for the others."""

    mine: Array
    theirs: Array
    attn: Array


@inline
def _kept(to: Heads, edge: Index, h: Index, x: Array) -> Any:
    """What dropout multiplies a weight with.

    The generator counts instead of going from state to state (SplitMix64: Steele, Lea and Flood 2014, "Fast splittable
    pseudorandom number generators"), so that the backward draws the same in another order.
    """
    if to.drop == ZERO:
        return x.dtype.type(1)
    z = to.seed + (edge * to.heads + h + ONE) * HASH_STEP
    z = (z ^ (z >> u64(30))) * HASH_1
    z = (z ^ (z >> u64(27))) * HASH_2
    z ^= z >> u64(31)
    return x.dtype.type(to.scale) if z >> u64(32) >= to.drop else x.dtype.type(0)


@inline
def lay_out(walk: Walk, group: Index, first: Index, stop: Index, scratch: Scratch) -> Any:
    """Note the rows that edges first to stop belong to; returns how many these are, and the group of edge `stop`."""
    count, p = ZERO, first
    scratch.bounds[ZERO] = first
    while p < stop:
        end = u64(walk.indptr[group + ONE])
        until = min(end, stop)
        if until > p:
            own = own_row(walk, group)
            for q in range(p - first, until - first):
                scratch.own_of[q] = own
                scratch.place_of[q] = count
            scratch.owns[count] = own
            count += ONE
            scratch.bounds[count] = p = until
        if p == end:
            group += ONE
    return count, group


@over_heads
def score_additive(of: Lanes) -> Run:
    """scores[i] = leaky_relu(a[ia] + b[ib]), and tops[t] rises to it; NaN is not greater than anything."""
    load, store, everywhere = of.load, of.store, of.everywhere

    def run(
        h: Index, scores: Array, i: Index, tops: Array, t: Index, a: Array, ia: Index, b: Array, ib: Index, slope: Any
    ) -> None:
        raw = load(a, ia + h) + load(b, ib + h)
        score = where_positive(raw, raw, raw * everywhere(slope))
        store(scores, i + h, score)
        store(tops, t + h, larger(score, load(tops, t + h)))

    return run


@over_heads
def weigh_additive(of: Lanes) -> Run:
    """weights[i] = exp(leaky_relu(a[ia] + b[ib]) - b[peak]) * b[inverse], and slopes[i] the leaky ReLU's derivative.

    Scores are rounded as in `score_additive`: of large ones the last bit counts.
    """
    load, store, everywhere = of.load, of.store, of.everywhere

    def run(
        h: Index, weights: Array, slopes: Array, i: Index, a: Array, ia: Index, b: Array, ib: Index, peak: Index,
        inverse: Index, slope: Any, one: Any,
    ) -> None:  # fmt: skip
        raw = load(a, ia + h) + load(b, ib + h)
        score = where_positive(raw, raw, raw * everywhere(slope))
        store(slopes, i + h, where_positive(raw, everywhere(one), everywhere(slope)))
        store(weights, i + h, exp(score - load(b, peak + h)) * load(b, inverse + h))

    return run


@over_heads
def raise_to(of: Lanes) -> Run:
    """out[io] rises to a[ia]; NaN is not greater than anything."""
    load, store = of.load, of.store
    return lambda h, out, io, a, ia: store(out, io + h, larger(load(a, ia + h), load(out, io + h)))


@over_heads
def copy(of: Lanes) -> Run:
    """out[io] = a[ia]"""
    load, store = of.load, of.store
    return lambda h, out, io, a, ia: store(out, io + h, load(a, ia + h))


@over_heads
def weigh(of: Lanes) -> Run:
    """a[i] = exp(a[i] - stats[peak]) * stats[inverse]"""
    load, store = of.load, of.store
    return lambda h, a, i, stats, peak, inverse: store(
        a, i + h, exp(load(a, i + h) - load(stats, peak + h)) * load(stats, inverse + h)
    )


@over_heads
def weigh_and_count(of: Lanes) -> Run:
    """a[i] = exp(a[i] - tops[t]), and total[o] grows by it."""
    load, store = of.load, of.store

    def run(h: Index, a: Array, i: Index, tops: Array, t: Index, total: Array, o: Index) -> None:
        weight = exp(load(a, i + h) - load(tops, t + h))
        store(a, i + h, weight)
        store(total, o + h, load(total, o + h) + weight)

    return run


@over_heads
def score_grads(of: Lanes) -> Run:
    """alongs[i] = weights[i] * (alongs[i] - means[m])"""
    load, store = of.load, of.store

    def run(h: Index, alongs: Array, weights: Array, i: Index, means: Array, m: Index) -> None:
        store(alongs, i + h, load(weights, i + h) * (load(alongs, i + h) - load(means, m + h)))

    return run


@over_heads
def add_score_grads(of: Lanes) -> Run:
    """a[ia] and b[ib] grow by weights[i] * (alongs[i] - means[m]) * slopes[i]"""
    load, store = of.load, of.store

    def run(
        h: Index, alongs: Array, weights: Array, slopes: Array, i: Index, means: Array, m: Index,
        a: Array, ia: Index, b: Array, ib: Index,
    ) -> None:  # fmt: skip
        grads = load(weights, i + h) * (load(alongs, i + h) - load(means, m + h)) * load(slopes, i + h)
        store(a, ia + h, load(a, ia + h) + grads)
        store(b, ib + h, load(b, ib + h) + grads)

    return run


@over_columns
def multiply(of: Lanes) -> Run:
    """a[i] *= b[i]: (length, a, b)"""
    load, store = of.load, of.store
    return lambda i, a, b: store(a, i, load(a, i) * load(b, i))


@over_columns
def scale(of: Lanes) -> Run:
    """out[io] *= factor"""
    load, store, everywhere = of.load, of.store, of.everywhere
    return lambda i, out, io, factor: store(out, io + i, load(out, io + i) * everywhere(factor))


@inline
def score_pair(to: Heads, scored: Scored, own: Index, other: Index, scores: Array, i: Index) -> None:
    """Write the DYNAMIC or DOT scores of an edge."""
    mine, theirs, factor = scored.mine, scored.theirs, scored.mine.dtype.type(to.factor)
    for h in range(to.heads):
        column = h * to.dim
        x, y = own * to.heads * to.dim + column, other * to.heads * to.dim + column
        scores[i + h] = 0
        if to.kind == DYNAMIC:
            add_leaky_dot(to.dim, scores, i + h, scored.attn, column, mine, x, theirs, y, factor)
        else:
            add_dot(to.dim, scores, i + h, mine, x, theirs, y)
            scores[i + h] *= factor


@inline
def write_shares(chunk: Chunk, to: Heads, weight: Array) -> None:
    """Write what dropout and edge weights multiply the weights of a chunk's edges with."""
    for q in range(chunk.size):
        edge = edge_row(chunk.walk, chunk.first + q)
        for h in range(to.heads):
            share = _kept(to, edge, h, weight)
            chunk.scratch.shares[q * to.heads + h] = share * weight[edge] if weight.size else share


@inline
def has_shares(to: Heads, weight: Array) -> Any:
    """Whether weights are more than softmax."""
    return to.drop != ZERO or weight.size != 0


@inline
def add_rows(chunk: Chunk, to: Heads, rows: Array, factors: Array, out: Array) -> None:
    """Add other rows, each head multiplied with its factor, to own rows of out."""
    walk, scratch, first = chunk.walk, chunk.scratch, chunk.first
    if to.dim == WIDE and to.heads % FOUR == ZERO:
        for k in range(chunk.count):
            for h in range(ZERO, to.heads, FOUR):
                _add_four_heads(chunk, to, h, k, rows, factors, out)
        return
    width = to.heads * to.dim
    for q in range(scratch.bounds[chunk.count] - first):
        look_ahead(OTHER, walk, first + q, rows, width, AHEAD)
        i, o = u64(walk.other[first + q]) * width, scratch.own_of[q] * width
        for h in range(to.heads):
            column = h * to.dim
            add_scaled(to.dim, out, o + column, rows, i + column, factors[q * to.heads + h])


_, _load, _store, _everywhere, _prefetch = lanes(int(WIDE))


@inline
def _add_four_heads(chunk: Chunk, to: Heads, h: Index, k: Index, rows: Array, factors: Array, out: Array) -> None:
    """`add_rows` for four heads of WIDE elements and the chunk's row k, which stay in registers."""
    walk, scratch = chunk.walk, chunk.scratch
    width, column = to.heads * WIDE, h * WIDE
    o, last = scratch.owns[k] * width + column, u64(walk.other.size) - ONE
    a, b = _load(out, o), _load(out, o + WIDE)
    c, d = _load(out, o + u64(2) * WIDE), _load(out, o + u64(3) * WIDE)
    for p in range(scratch.bounds[k], scratch.bounds[k + ONE]):
        coming = u64(walk.other[min(p + AHEAD, last)]) * width + column
        for block in range(4):
            _prefetch(rows, coming + u64(block) * WIDE)
        i, f = u64(walk.other[p]) * width + column, (p - chunk.first) * to.heads + h
        a += _load(rows, i) * _everywhere(factors[f])
        b += _load(rows, i + WIDE) * _everywhere(factors[f + ONE])
        c += _load(rows, i + u64(2) * WIDE) * _everywhere(factors[f + u64(2)])
        d += _load(rows, i + u64(3) * WIDE) * _everywhere(factors[f + u64(3)])
    _store(out, o, a)
    _store(out, o + WIDE, b)
    _store(out, o + u64(2) * WIDE, c)
    _store(out, o + u64(3) * WIDE, d)


@over_heads
def rise(of: Lanes) -> Run:
    """Make total[o] relative to tops[t] instead of peak[o]; shrinks[t] is what it was multiplied with.

    A top of -inf becomes `lowest`, the lowest finite number, because -inf less -inf would be NaN.
    """
    load, store, everywhere = of.load, of.store, of.everywhere

    def run(h: Index, peak: Array, total: Array, o: Index, tops: Array, shrinks: Array, t: Index, lowest: Any) -> None:
        top = larger(load(tops, t + h), everywhere(lowest))
        shrink = exp(load(peak, o + h) - top)
        store(tops, t + h, top)
        store(shrinks, t + h, shrink)
        store(total, o + h, load(total, o + h) * shrink)

    return run


@inline
def write_additive_weights(chunk: Chunk, to: Heads, scored: Scored, stats: Array) -> None:
    """Write softmax of ADDITIVE scores to `scores`; the destinations are other rows, and theirs are in stats."""
    walk, scratch = chunk.walk, chunk.scratch
    heads, step = to.heads, STATISTICS * to.heads
    factor, one = scored.mine.dtype.type(to.factor), scored.mine.dtype.type(1)
    for q in range(chunk.size):
        own, other, i = scratch.own_of[q], u64(walk.other[chunk.first + q]), q * heads
        look_ahead(OTHER, walk, chunk.first + q, stats, step, AHEAD)
        at, peak = other * step + SCORE * heads, other * step + PEAK * heads
        inverse = other * step + INVERSE * heads
        weigh_additive(
            heads, scratch.scores, scratch.slopes, i, scored.mine, own * heads, stats, at, peak, inverse, factor, one
        )


@inline
def write_pair_weights(chunk: Chunk, to: Heads, whose: int, scored: Scored, stats: Array) -> None:
    """Write softmax of DYNAMIC and DOT scores to `scores`. whose: the destination is OWN or OTHER."""
    walk, scratch = chunk.walk, chunk.scratch
    heads, step = to.heads, STATISTICS * to.heads
    for q in range(chunk.size):
        own, other, i = scratch.own_of[q], u64(walk.other[chunk.first + q]), q * heads
        look_ahead(OTHER, walk, chunk.first + q, scored.theirs, heads * to.dim, AHEAD)
        score_pair(to, scored, own, other, scratch.scores, i)
        d = own if whose == OWN else other
        weigh(heads, scratch.scores, i, stats, d * step + PEAK * heads, d * step + INVERSE * heads)


@inline
def write_alongs(
    chunk: Chunk, to: Heads, own_rows: Array, other_rows: Array, weight: Array, weight_grad: Array
) -> None:
    """Write the gradient of each softmax: own row times other row, and its share. Also those of edge weights."""
    walk, scratch = chunk.walk, chunk.scratch
    heads, width = to.heads, to.heads * to.dim
    for q in range(chunk.size):
        look_ahead(OTHER, walk, chunk.first + q, other_rows, width, AHEAD)
        i, j = scratch.own_of[q] * width, u64(walk.other[chunk.first + q]) * width
        for h in range(heads):
            column = h * to.dim
            scratch.alongs[q * heads + h] = 0
            add_dot(to.dim, scratch.alongs, q * heads + h, own_rows, i + column, other_rows, j + column)
    if has_shares(to, weight):
        write_shares(chunk, to, weight)
        if weight_grad.size:
            for q in range(chunk.size):
                edge, total = edge_row(walk, chunk.first + q), weight.dtype.type(0)
                for h in range(heads):
                    i = q * heads + h
                    total += scratch.scores[i] * scratch.alongs[i] * _kept(to, edge, h, weight)
                weight_grad[edge] = total
        multiply(chunk.size * heads, scratch.alongs, scratch.shares)
