"""The vectors of compiled loops in plain NumPy, so that the loops also run, and are measured, as the Python they are.

A plugin for pytest in a process of its own, with Numba's compiler off (`tests/kernels/test_plain_loops.py`): it stands
in for the four files that emit LLVM's instructions, before anything imports them.
"""

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

assert os.environ.get("NUMBA_DISABLE_JIT") == "1"
for name in ("vector_type", "exponential", "intrinsics", "flat_array"):
    sys.modules[f"sar.kernels.cpu.vector.{name}"] = sys.modules[__name__]

CACHE_LINE = 64  # bytes


class Lanes(NamedTuple):
    """As `sar.kernels.cpu.vector.vector_type.Lanes`."""

    length: int
    load: Callable[..., Any]
    store: Callable[..., Any]
    everywhere: Callable[..., Any]
    prefetch: Callable[..., Any]


def lanes(count: int) -> Lanes:
    def load(array, index):
        assert index + np.uint64(count) <= array.size  # compiled loops do not look
        return array[int(index) : int(index) + count].copy()

    def store(array, index, vector):
        assert index + np.uint64(count) <= array.size
        array[int(index) : int(index) + count] = vector

    return Lanes(count, load, store, lambda number: np.full(count, number), lambda array, index: None)


def larger(left, right):
    return np.fmax(left, right)


def where_positive(vector, left, right):
    return np.where(vector > 0, left, right)


def sum_of(vector):
    return vector.sum()


def exp(vector):
    if vector.dtype == np.float64:
        return np.exp(vector)
    return np.where(vector < -87, np.float32(0), np.exp(np.where(vector > 88, np.float32(88), vector)))


def thin(value):
    return value


def nothing_of(array):
    return array[:0]


def prefetch(array, index):
    pass


def line_length(array):
    return np.uint64(CACHE_LINE // array.itemsize)
