"""The layouts of broadcast operands, made once for each combination of trailing shapes."""

from __future__ import annotations

from functools import lru_cache
from math import prod

import numpy as np

from sar.kernels.cpu.loops import Layout
from sar.kernels.ops import Shape


@lru_cache(maxsize=1024)
def make_layout(full: Shape, a: Shape, b: Shape, out: Shape) -> Layout:
    """The layout of operands with shapes a, b and out of equal length that broadcast to `full`; no size is 0."""
    operands = (a, b, out)
    start, steps = len(full), None
    while start > 0:  # the longest tail of dimensions that each operand has as a whole or not at all
        if full[start - 1] != 1:
            present = tuple(shape[start - 1] != 1 for shape in operands)
            if steps not in (None, present):
                break
            steps = present
        start -= 1
    length = prod(full[start:])
    offsets = (np.broadcast_to(np.arange(prod(s), dtype=np.uint64).reshape(s), full) for s in operands)
    return Layout(
        np.uint64(length),
        *(offset.reshape(-1, length)[:, 0].copy() for offset in offsets),
        *(np.uint64(step) for step in steps or (True, True, True)),
        *(np.uint64(prod(shape)) for shape in operands),
    )
