"""The loops of one-pass attention that Numba compiles: softmax over in-edges and weighted sum, and their gradients.

Scores are computed where they are used, so nothing has the size of the edges. A destination's edges may come in several
blocks: it keeps the greatest score so far, and the sums relative to it (Milakov and Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao 2022, "FlashAttention"). The backward makes each weight anew from the logarithm
of its sum.

Arrays are flat; `width` is heads * dim. Of destinations, `to` holds a number per head for ADDITIVE scores, a row of
features for the others.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from sar.kernels._numba import inline, kernel
from sar.kernels.compiled import ONE, OTHER, ZERO, Array, Index, Walk, edge_row, look_ahead, own_row
from sar.kernels.vectors import add_scaled, dot, exp

ADDITIVE, DYNAMIC, DOT = 0, 1, 2
CHUNK = 128  # edges of a destination whose scores are held at a time

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


@inline
def _leaky(x: Any, slope: Any) -> Any:
    return x if x > 0 else x * slope


@inline
def _score(to: Heads, h: Index, x: Array, s: Index, from_score: Array, y: Array, d: Index, attn: Array) -> Any:
    """The logit of head h between source row s, features x, and destination row d, features or scores y."""
    factor = x.dtype.type(to.factor)
    if to.kind == ADDITIVE:
        return _leaky(from_score[s * to.heads + h] + y[d * to.heads + h], factor)
    i, j = (s * to.heads + h) * to.dim, (d * to.heads + h) * to.dim
    if to.kind == DOT:
        return factor * dot(x, i, y, j, to.dim)
    total, a = x.dtype.type(0), h * to.dim
    for k in range(to.dim):
        total += attn[a + k] * _leaky(x[i + k] + y[j + k], factor)
    return total


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
def _weight(weight: Array, edge: Index) -> Any:
    return weight[edge] if weight.size else weight.dtype.type(1)


@kernel
def attend(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    from_score: Array,
    y: Array,
    attn: Array,
    weight: Array,
    out: Array,
    peak: Array,
    total: Array,
    scores: Array,
) -> None:
    """Add the edges of groups begin to end to out, (N_dst, width), and total, (N_dst, heads), relative to exp(peak).

    scores: (CHUNK * heads,), to work with.
    """
    width, chunk = to.heads * to.dim, u64(CHUNK)
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        first, last = u64(walk.indptr[group]), u64(walk.indptr[group + ONE])
        while first < last:
            stop = min(first + chunk, last)
            for p in range(first, stop):
                if to.kind == ADDITIVE:
                    look_ahead(OTHER, walk, p, from_score, to.heads)
                else:
                    look_ahead(OTHER, walk, p, x, width)
                source = u64(walk.other[p])
                for h in range(to.heads):
                    scores[h * chunk + p - first] = _score(to, h, x, source, from_score, y, own, attn)
            for h in range(to.heads):
                _weigh(walk, to, h, first, stop, scores, weight, own, out, peak, total)
            for p in range(first, stop):
                if to.kind == ADDITIVE:
                    look_ahead(OTHER, walk, p, x, width)
                start, target = u64(walk.other[p]) * width, own * width
                for h in range(to.heads):
                    add_scaled(out, target + h * to.dim, x, start + h * to.dim, scores[h * chunk + p - first], to.dim)
            first = stop


@inline
def _weigh(
    walk: Walk,
    to: Heads,
    h: Index,
    first: Index,
    stop: Index,
    scores: Array,
    weight: Array,
    own: Index,
    out: Array,
    peak: Array,
    total: Array,
) -> None:
    """Turn scores of one destination and head into factors relative to the greatest so far, and count them in total."""
    o, begin = own * to.heads + h, h * u64(CHUNK)
    end = begin + stop - first
    greatest = peak[o]
    for i in range(begin, end):
        greatest = scores[i] if scores[i] > greatest else greatest
    if greatest > peak[o] and total[o] != 0:
        shrink = exp(peak[o] - greatest)
        total[o] *= shrink
        for i in range(o * to.dim, (o + ONE) * to.dim):
            out[i] *= shrink
    peak[o] = greatest
    sum_here = total.dtype.type(0)
    for i in range(begin, end):
        # -inf weighs nothing, even where all scores are; NaN goes through.
        scores[i] = total.dtype.type(0) if scores[i] == -math.inf else exp(scores[i] - greatest)
        sum_here += scores[i]
    total[o] += sum_here
    if to.drop != ZERO or weight.size:
        for i in range(begin, end):
            edge = edge_row(walk, first + i - begin)
            scores[i] *= _kept(to, edge, h, total) * _weight(weight, edge)


@kernel
def source_gradients(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    from_score: Array,
    y: Array,
    attn: Array,
    weight: Array,
    grad: Array,
    stats: Array,
    x_grad: Array,
    from_score_grad: Array,
    weight_grad: Array,
    y_grad: Array,
) -> None:
    """Add the gradients of sources, and of edge weights, over the edges of the sources begin to end.

    Of ADDITIVE scores also y_grad, (N_dst, heads), to which other sources may not be adding at the same time.

    grad: (N_dst, width) gradient of the result.
    stats: (N_dst, 2, heads): logarithm of the sum of exponentials, and sum over the head of gradient * result.
    """
    width = to.heads * to.dim
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(OTHER, walk, p, grad, width)
            look_ahead(OTHER, walk, p, stats, u64(2) * to.heads)
            look_ahead(OTHER, walk, p, y, to.heads if to.kind == ADDITIVE else width)
            d, edge = u64(walk.other[p]), edge_row(walk, p)
            weight_total = weight.dtype.type(0)
            for h in range(to.heads):
                s, i, j = own * to.heads + h, own * width + h * to.dim, d * width + h * to.dim
                score = _score(to, h, x, own, from_score, y, d, attn)
                softmax = exp(score - stats[u64(2) * d * to.heads + h])
                kept = _kept(to, edge, h, x)
                share = kept * _weight(weight, edge)
                along = dot(grad, j, x, i, to.dim)
                score_grad = softmax * (share * along - stats[(u64(2) * d + ONE) * to.heads + h])
                add_scaled(x_grad, i, grad, j, softmax * share, to.dim)
                if to.kind == ADDITIVE:
                    # A score below 0 was made of a sum below 0, because slopes are not negative.
                    raw_grad = score_grad if score > 0 else score_grad * x.dtype.type(to.factor)
                    from_score_grad[s] += raw_grad
                    y_grad[d * to.heads + h] += raw_grad
                elif to.kind == DOT:
                    add_scaled(x_grad, i, y, j, score_grad * x.dtype.type(to.factor), to.dim)
                else:
                    _add_slopes(to, x_grad, i, x, i, y, j, attn, h * to.dim, score_grad)
                weight_total += softmax * kept * along
            if weight_grad.size:
                weight_grad[edge] = weight_total


@kernel
def destination_gradients(
    begin: int,
    end: int,
    walk: Walk,
    to: Heads,
    x: Array,
    from_score: Array,
    y: Array,
    attn: Array,
    weight: Array,
    grad: Array,
    stats: Array,
    y_grad: Array,
    attn_grad: Array,
) -> None:
    """Add the gradients of destinations, over the edges of groups begin to end, of DYNAMIC and DOT scores.

    Also of `attn`, to which others may not be adding at the same time.
    """
    width = to.heads * to.dim
    for group in range(u64(begin), u64(end)):
        own = own_row(walk, group)
        for p in range(u64(walk.indptr[group]), u64(walk.indptr[group + ONE])):
            look_ahead(OTHER, walk, p, x, width)
            s, edge = u64(walk.other[p]), edge_row(walk, p)
            for h in range(to.heads):
                i, j = s * width + h * to.dim, own * width + h * to.dim
                score = _score(to, h, x, s, from_score, y, own, attn)
                softmax = exp(score - stats[u64(2) * own * to.heads + h])
                along = dot(grad, j, x, i, to.dim)
                share = _kept(to, edge, h, x) * _weight(weight, edge)
                score_grad = softmax * (share * along - stats[(u64(2) * own + ONE) * to.heads + h])
                if to.kind == DOT:
                    add_scaled(y_grad, j, x, i, score_grad * x.dtype.type(to.factor), to.dim)
                else:
                    _add_slopes(to, y_grad, j, x, i, y, j, attn, h * to.dim, score_grad)
                    for k in range(to.dim):
                        attn_grad[h * to.dim + k] += score_grad * _leaky(x[i + k] + y[j + k], x.dtype.type(to.factor))


@inline
def _add_slopes(
    to: Heads,
    out: Array,
    o: Index,
    x: Array,
    i: Index,
    y: Array,
    j: Index,
    attn: Array,
    a: Index,
    score_grad: Any,
) -> None:
    """Add to `out` the derivative of a DYNAMIC score with respect to the features of either end."""
    factor = x.dtype.type(to.factor)
    for k in range(to.dim):
        slope = score_grad if x[i + k] + y[j + k] > 0 else score_grad * factor
        out[o + k] += attn[a + k] * slope


@kernel
def head_sums(begin: int, end: int, to: Heads, grad: Array, out: Array, stats: Array) -> None:
    """Write the sum over each head of grad * out to the second row of stats, for destinations begin to end."""
    for d in range(u64(begin), u64(end)):
        for h in range(to.heads):
            i = (d * to.heads + h) * to.dim
            stats[(u64(2) * d + ONE) * to.heads + h] = dot(grad, i, out, i, to.dim)


@kernel
def project(begin: int, end: int, heads: Index, dim: Index, x: Array, attn: Array, out: Array) -> None:
    """Write the product of each head of rows begin to end of x with its row of attn to out, (N, heads)."""
    for n in range(u64(begin), u64(end)):
        for h in range(heads):
            out[n * heads + h] = dot(x, (n * heads + h) * dim, attn, h * dim, dim)


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
            add_scaled(x_grad, i, attn, h * dim, grad[n * heads + h], dim)
            add_scaled(attn_grad, h * dim, x, i, grad[n * heads + h], dim)
