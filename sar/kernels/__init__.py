"""Aggregations over the edges of a block, their gradients, and edge softmax: one interface, compiled or plain torch.

A message is `op(lhs, rhs)` per edge, where each operand has rows of sources (`Target.U`), destinations (`V`) or
edges (`E`) and trailing shapes broadcast as in NumPy. Kernels accumulate into tensors of the caller, so that the
edges of a graph may come in several blocks.
"""

from sar.kernels.api import add_rows, aggregate_cmp, aggregate_grad, aggregate_sum, edge_apply, load_kernels
from sar.kernels.attention import OnlineSoftmax, edge_softmax_backward, edge_softmax_forward
from sar.kernels.edge_block import EdgeBlock, index_dtype
from sar.kernels.ops import EdgeMessage, EdgeOperand, Op, Target, operand_values_needed
from sar.tensors.views import accumulation_dtype
