"""The kernels in Triton, a backend of `sar.kernels.backend`: tensors of floating point numbers on GPUs.

Sums are in float32, or float64 if results have that. `docs/gpus.md` lists the GPUs that this was run on. Importing this
loads Triton; with TRITON_INTERPRET=1 in the environment before that, kernels run as Python, on tensors of the CPU.
"""

from sar.kernels.triton.aggregate import add_rows, aggregate_cmp, aggregate_grad, aggregate_sum, edge_apply
from sar.kernels.triton.attention import attend, attend_grad, head_sums, project, project_grad
