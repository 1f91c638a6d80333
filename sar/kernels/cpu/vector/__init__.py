"""Vectors as values in compiled code: all that touches the insides of Numba and LLVM, behind this one interface.

`docs/kernels.md` says what each function must do, what breaks with a new Numba, and how to look at the machine code.
"""

from sar.kernels.cpu.vector.exponential import exp
from sar.kernels.cpu.vector.flat_array import nothing_of, thin
from sar.kernels.cpu.vector.intrinsics import line_length, prefetch
from sar.kernels.cpu.vector.runs import (
    FOUR,
    WIDE,
    Run,
    add_dot,
    add_leaky,
    add_leaky_dot,
    add_product,
    add_scaled,
    add_slopes,
    over_columns,
    over_heads,
)
from sar.kernels.cpu.vector.vector_type import Lanes, lanes, larger, sum_of, where_positive

__all__ = [
    "FOUR",
    "WIDE",
    "Lanes",
    "Run",
    "add_dot",
    "add_leaky",
    "add_leaky_dot",
    "add_product",
    "add_scaled",
    "add_slopes",
    "exp",
    "lanes",
    "larger",
    "line_length",
    "nothing_of",
    "over_columns",
    "over_heads",
    "prefetch",
    "sum_of",
    "thin",
    "where_positive",
]
