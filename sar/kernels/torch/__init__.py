"""The kernels in plain torch, a backend of `sar.kernels.backend`: they run on GPUs and check the compiled ones."""

from sar.kernels.torch.aggregate import add_rows, aggregate_cmp, aggregate_grad, aggregate_sum, edge_apply
from sar.kernels.torch.attention import attend, attend_grad, head_sums, project, project_grad

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
