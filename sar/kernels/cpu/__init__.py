"""The kernels compiled with Numba, a backend of `sar.kernels.backend`: float32 and float64 tensors in CPU memory.

`docs/kernels.md` tells how this folder works and how to maintain it. Importing it loads the compiler.
"""

from sar.kernels.cpu.aggregate import add_rows, aggregate_cmp, aggregate_grad, aggregate_sum, edge_apply
from sar.kernels.cpu.attention import attend, attend_grad, head_sums, project, project_grad

__all__ = [
    "add_rows",
    "aggregate_cmp",
    "aggregate_grad",
    "aggregate_sum",
    "attend",
    "attend_grad",
    "edge_apply",
    "head_sums",
    "project",
    "project_grad",
]
