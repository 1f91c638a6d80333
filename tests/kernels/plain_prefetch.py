"""Has the compiled loops run, and be measured, as the Python they are.

A plugin for pytest in a process of its own, with Numba's compiler off (`tests/kernels/test_plain_loops.py`): it stands
in for the functions that emit LLVM's instructions, before anything imports them.
"""

import os

import numpy as np
import torch

from sar.host import compiler
from sar.kernels import vectors
from sar.tensors.views import HALF_BITS

assert os.environ.get("NUMBA_DISABLE_JIT") == "1"


def prefetch(array, index, line):
    pass


def wide(element):
    """As torch widens what has these bits."""
    dtype = HALVES.get(np.asarray(element).dtype)
    return element if dtype is None else torch.tensor(element).view(dtype).float().numpy()[()]


def narrow(number, array):
    """As torch rounds it."""
    dtype = HALVES.get(array.dtype)
    return number if dtype is None else torch.tensor(number).to(dtype).view(HALF_BITS[dtype]).numpy()[()]


HALVES = {torch.empty(0, dtype=bits).numpy().dtype: dtype for dtype, bits in HALF_BITS.items()}


def functions(lanes, *, whole):
    """Vectors are arrays, and every bound is checked."""

    def part(array, at, count):
        size = lanes if whole else int(count)
        assert 0 < size <= lanes
        assert at + size <= len(array)
        return array[int(at) : int(at) + size]

    def zeros(array, count):
        return np.zeros(lanes if whole else int(count), np.float64 if array.dtype == np.float64 else np.float32)

    def load(array, at, count):
        values = part(array, at, count)
        dtype = HALVES.get(values.dtype)
        return values.copy() if dtype is None else torch.from_numpy(values.copy()).view(dtype).float().numpy()

    def store(array, at, count, vector):
        part(array, at, count)[:] = vector

    def add_scaled(total, vector, factor):
        return total + (vector if factor is None else factor * vector)

    return vectors.Functions(zeros, load, store, add_scaled)


compiler.prefetch, compiler.wide, compiler.narrow, vectors.functions = prefetch, wide, narrow, functions
