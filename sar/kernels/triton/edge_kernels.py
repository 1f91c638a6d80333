"""Access to edges for all kernels in Triton: see `sar.kernels.triton.edges`.

Only one side of a condition on None or on a constant is compiled. `p` are positions of edges, in blocks of a power of
two; `here` says which of them there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

VARYING = ["seed", "drop", "count", "groups", "first_block"]
"""Numbers that differ between calls; kernels are not compiled anew if one is 1 or a multiple of 16."""
kernel: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=VARYING)


@kernel
def bounds(edges, group):
    """The first edge of a group, and the end of those that a program takes."""
    begin = tl.load(edges.begin + group)
    return begin, tl.minimum(tl.load(edges.end + group), begin + edges.most)


@kernel
def own_row(edges, group):
    """The row that the edges of a group have in common, as int64."""
    return group.to(tl.int64) if edges.own is None else tl.load(edges.own + group).to(tl.int64)


@kernel
def result_row(edges, group, own):
    """The row of a group in results."""
    return own if edges.into is None else tl.load(edges.into + group).to(tl.int64)


@kernel
def other_rows(edges, p, here):
    """The rows at the other end of the edges p, as int64; 0 where not `here`."""
    return tl.load(edges.other + p, mask=here, other=0).to(tl.int64)


@kernel
def edge_rows(edges, p, here):
    """The IDs of the edges p, as int64."""
    position = p if edges.positions is None else tl.load(edges.positions + p, mask=here, other=0)
    if edges.ids is None:
        row = position.to(tl.int64) + edges.offset
    else:
        row = tl.load(edges.ids + position, mask=here, other=0).to(tl.int64)
    return row
