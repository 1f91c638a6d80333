"""The loops of neighbor sampling that Numba compiles: draws of in-edges, numbering of nodes, copies of rows.

[Note: draws]
Each (key, node) has a separate random sequence, a hashed counter (`sar.tensors.splitmix`). The draws depend neither
on threads nor on the worker that draws.

Without replacement and weights: the first steps of a Fisher-Yates shuffle on a permutation that is restored afterwards,
whose cost depends on the draws, not on the degree. Without replacement, weighted: the smallest of exponential variates
divided by the weights, which are distributed as successive draws (Efraimidis and Spirakis 2006, "Weighted random
sampling with a reservoir"). With replacement, weighted: inversion of the cumulative weights.
"""

from __future__ import annotations

import math

import numpy as np

from sar.host.compiler import inline, kernel
from sar.kernels.cpu.csr_view import ONE, Array, Index, prefetch_row, rows_ahead
from sar.tensors import splitmix
from sar.tensors.splitmix import STEP

u64 = np.uint64
HALF = u64(32)  # bits
TO_DOUBLE = u64(11)
UNIT = 2.0**-53
SCALE = np.float64(2.0**300)  # Weights are multiplied by it, exactly, as quotients by the least, 2**-1074, overflow.


mix = inline(splitmix.mix)


@inline
def draw(state: Index, count: Index) -> Index:
    """Random number `count` of the sequence `state`."""
    return mix(state + (count + ONE) * STEP)


@inline
def below(random: Index, bound: Index) -> Index:
    """A number below `bound`, which is below 2**32: uniform up to a relative error of bound / 2**32."""
    return ((random >> HALF) * bound) >> HALF


@inline
def uniform(random: Index) -> float:
    """A number in (0, 1]."""
    return float((random >> TO_DOUBLE) + ONE) * UNIT


@kernel
def count_draws(
    begin: int, end: int, rows: Array, indptr: Array, weights: Array, fanout: int, replace: bool, counts: Array
) -> None:
    """Count the in-edges to draw for each of rows[begin:end]; edges of weight 0 are never drawn."""
    for i in range(u64(begin), u64(end)):
        row = u64(rows[i])
        first, last = u64(indptr[row]), u64(indptr[row + ONE])
        available = np.int64(last - first)
        if weights.size > 0:
            available = np.int64(0)
            for edge in range(first, last):
                if weights[edge] > 0:
                    available += 1
                    if available >= fanout or replace:
                        break
        counts[i] = fanout if replace and available > 0 else min(available, fanout)


@inline
def _shuffle(state: Index, first: Index, degree: Index, picked: Array, to: Index, count: Index, order: Array) -> None:
    for i in range(count):
        j = i + below(draw(state, i), degree - i)
        order[i], order[j] = order[j], order[i]
        picked[to + i] = order[i]
    for i in range(count):
        # A position beyond `count` was left by its own number, which therefore was picked.
        order[u64(picked[to + i])] = picked[to + i]
        order[i] = i
    for i in range(count):
        picked[to + i] = first + u64(picked[to + i])  # not +=, which would go through float64


@inline
def _sink(keys: Array, picked: Array, to: Index, count: Index) -> None:
    """Move the root of the heap, greatest key first, to its place."""
    at = u64(0)
    while True:
        child = at + at + ONE
        if child >= count:
            return
        if child + ONE < count and keys[child + ONE] > keys[child]:
            child += ONE
        if keys[child] <= keys[at]:
            return
        keys[at], keys[child] = keys[child], keys[at]
        picked[to + at], picked[to + child] = picked[to + child], picked[to + at]
        at = child


@inline
def _smallest(
    state: Index, first: Index, last: Index, weights: Array, picked: Array, to: Index, count: Index, keys: Array
) -> None:
    for i in range(count):
        keys[i], picked[to + i] = np.inf, first
    for edge in range(first, last):
        if weights[edge] > 0:
            key = -math.log(uniform(draw(state, edge - first))) / (weights[edge] * SCALE)
            if key < keys[0]:
                keys[0], picked[to] = key, edge
                _sink(keys, picked, to, count)


@inline
def _invert(
    state: Index, first: Index, last: Index, weights: Array, picked: Array, to: Index, count: Index, sums: Array
) -> None:
    total = 0.0
    for edge in range(first, last):
        total += weights[edge] * SCALE
        sums[edge - first] = total
    for i in range(count):
        # At most the total, and above 0, so the edge has a positive weight.
        wanted = uniform(draw(state, i)) * total
        picked[to + i] = first + u64(np.searchsorted(sums[: last - first], wanted))


@kernel
def draw_edges(
    begin: int, end: int, rows: Array, nodes: Array, indptr: Array, weights: Array, replace: bool, key: Index,
    offsets: Array, picked: Array, order: Array, scratch: Array,
) -> None:  # fmt: skip
    """Draw in-edges of rows[begin:end] for `draw_in_edges`; `weights` may be empty. See [Note: draws].

    offsets: (n + 1,) bounds of the draws of each node in `picked`, with counts from `count_draws`.
    order, scratch: of the length of the greatest degree; int64 0, 1, 2, ..., which is restored, and float64.
    """
    for i in range(u64(begin), u64(end)):
        row, to = u64(rows[i]), u64(offsets[i])
        count = u64(offsets[i + ONE]) - to
        if count == 0:
            continue
        first, last = u64(indptr[row]), u64(indptr[row + ONE])
        degree = last - first
        state = mix(key ^ mix(u64(nodes[i]) + STEP))
        if weights.size > 0:
            if replace:
                _invert(state, first, last, weights, picked, to, count, scratch)
            else:
                _smallest(state, first, last, weights, picked, to, count, scratch)
        elif replace:
            for k in range(count):
                picked[to + k] = first + below(draw(state, k), degree)
        elif count == degree:
            for k in range(count):
                picked[to + k] = first + k
        else:
            _shuffle(state, first, degree, picked, to, count, order)


@kernel
def number_nodes(
    given: Array, slots: Array, factor: Index, shift: Index, nodes: Array, counts: Array, numbers: Array
) -> None:
    """Write the numbers of the `given` global IDs to `numbers`; new IDs get the next numbers.

    slots: hash table of 2**k numbers, -1 if free, by a hash function with this factor and shift.
    nodes, counts: the node of every number so far, and, (1,), the count.
    """
    count, mask = u64(counts[0]), u64(slots.size) - ONE
    for i in range(u64(given.size)):
        node = u64(given[i])
        slot = ((node * factor) >> shift) & mask
        while slots[slot] >= 0 and u64(nodes[u64(slots[slot])]) != node:  # linear probing
            slot = (slot + ONE) & mask
        if slots[slot] < 0:
            slots[slot] = count
            nodes[count] = node
            count += ONE
        numbers[i] = slots[slot]
    counts[0] = count


@kernel
def copy_rows(begin: int, end: int, table: Array, rows: Array, out: Array, places: Array, width: Index) -> None:
    """out[places[i]] = table[rows[i]] for begin <= i < end, of `width` elements each; empty indices stand for i."""
    for i in range(u64(begin), u64(end)):
        source = (u64(rows[i]) if rows.size > 0 else i) * width
        target = (u64(places[i]) if places.size > 0 else i) * width
        if rows.size > 0 and i + rows_ahead(table, width) < u64(end):
            prefetch_row(table, u64(rows[i + rows_ahead(table, width)]) * width, width)
        for k in range(width):
            out[target + k] = table[source + k]
