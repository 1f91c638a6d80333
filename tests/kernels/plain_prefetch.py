"""Has the compiled loops run, and be measured, as the Python they are.

A plugin for pytest in a process of its own, with Numba's compiler off (`tests/kernels/test_plain_loops.py`): it stands
in for the one function that emits LLVM's instructions, before anything imports it.
"""

import os

from sar.kernels import compiler

assert os.environ.get("NUMBA_DISABLE_JIT") == "1"


def prefetch(array, index, line):
    pass


compiler.prefetch = prefetch
