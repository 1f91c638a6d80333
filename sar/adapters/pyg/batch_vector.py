"""The batch vector of graphs that span several workers, for pooling and normalisation in PyTorch Geometric.

[Note: graphs across workers]
A batch vector maps each node to its graph. Layers of PyTorch Geometric that pool or normalise take sums, products and
extremes over the nodes of each graph (`scatter`), and copy the results back to the nodes (`mean[batch]`). A
`BatchVector` has the graphs of this worker's nodes; other workers have more nodes of the same graphs. Reductions are
combined over all workers, with gradients. Copying back is local. Any other operation raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from sar.adapters.pyg.edge_index import SourceIndex
from sar.adapters.pyg.guarded import EQUALITY, GuardedTensor, Handlers, plain, plainly
from sar.comm import session
from sar.comm.collectives import all_max, all_sum
from sar.errors import GraphError
from sar.kernels import accumulation_dtype
from sar.nn.statistics import global_sum, zeros_of


class BatchVector(GuardedTensor):
    """The graph of each of this worker's nodes, (N_i,) int64. Graphs may have nodes on all workers."""

    count: int  # B, the number of graphs
    handlers: ClassVar[Handlers] = dict(GuardedTensor.handlers)
    what = "a batch vector of graphs across workers"
    advice = "To pool, call sar.pyg.global_add_pool(x, batch), or torch_geometric.utils.scatter(x, batch, 0, size)."

    @classmethod
    def of(cls, numbers: Tensor, count: int) -> BatchVector:
        return cls.over(numbers, count=count)


def batch_vector(batch: Tensor, size: int | None = None) -> BatchVector:
    """Create a batch vector whose graphs may have nodes on all workers, for pooling and norm layers.

    `data.batch` from `load_partition` is one. See docs/pyg.md.

    Args:
        batch: the graph of each of this worker's nodes, (N_i,) integer from 0.
        size: B, the number of graphs. Default: one more than the greatest number on any worker, in a collective call.

    Raises:
        GraphError: for numbers below 0 or not below `size`.
    """
    if isinstance(batch, BatchVector):
        return batch
    with session.current_group().guard() if session.is_initialized() else nullcontext():
        least, greatest = (int(batch.min()), int(batch.max())) if len(batch) and not batch.is_meta else (0, -1)
        size = all_max(greatest) + 1 if size is None else size
        if least < 0 or greatest >= size:
            raise GraphError(f"batch has graphs from {least} to {greatest}; expected 0 to {size - 1}, below `size`.")
    return BatchVector.of(batch.long(), size)


def whole_graph(count: int, device: torch.device) -> BatchVector:
    """The batch vector of `count` nodes of one graph, without memory for the nodes."""
    return BatchVector.of(torch.zeros(1, dtype=torch.int64, device=device).expand(count), 1)


# -- operations


_CHANGES = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.view, Tensor.reshape, Tensor.expand, Tensor.expand_as)


@BatchVector.handles(*_CHANGES, told=True)
def _change(func: Callable[..., Any], vector: BatchVector, *args: Any, **kwargs: Any) -> BatchVector:
    """The batch vector on another device, or in the shape of `scatter`'s index."""
    return BatchVector.of(plainly(func, vector, *args, **kwargs), vector.count)


BatchVector.handles(*EQUALITY, told=True)(plainly)  # graphs have one number on all workers


@BatchVector.handles(Tensor.numel, Tensor.nelement, torch.numel)
def _numel(vector: BatchVector) -> int:
    """At least 1, because graphs without nodes on this worker may have some on others."""
    return max(len(plain(vector)), 1)


@BatchVector.handles(Tensor.max, torch.max)
def _greatest(vector: BatchVector) -> Tensor:
    return torch.tensor(vector.count - 1, device="cpu")


@BatchVector.handles(torch.unique, Tensor.unique, torch._unique2)
def _unique(vector: BatchVector, **options: Any) -> Tensor:
    """The graphs that have nodes, on any worker."""
    if any(options.get(name) for name in ("return_inverse", "return_counts", "dim")):
        raise GraphError(f"unique was called with {vector.what} and {options}; expected no options.")
    return all_sum(torch.bincount(plain(vector), minlength=vector.count)).nonzero().squeeze(1)


@BatchVector.handles(Tensor.__getitem__)
def _getitem(value: Tensor, index: Any) -> Any:
    if isinstance(value, BatchVector):  # some of the nodes, or the ends of edges
        rows = index.edges.at_edges(plain(value)) if isinstance(index, SourceIndex) else plain(value)[index]
        return BatchVector.of(rows, value.count)
    if isinstance(index, BatchVector):
        return _select(value, 0, index)
    return value[tuple(map(plain, index))]


@BatchVector.handles(Tensor.index_select, torch.index_select)
def _select(value: Tensor, dim: int, index: Tensor) -> Any:
    if isinstance(value, BatchVector):
        return _getitem(value, index)
    if isinstance(index, BatchVector) and index.count == value.size(dim) == 1:  # no copies of one row
        shape = list(value.shape)
        shape[dim] = len(plain(index))
        return value.expand(shape)
    return plainly(torch.index_select, value, dim, index)


def _check_size(out: Tensor, dim: int, index: BatchVector) -> None:
    if index.count > out.size(dim):
        raise GraphError(f"{index.count} graphs were pooled into {out.size(dim)}; leave `size` out, or make it larger.")


def _summed(out: Tensor, dim: int, index: BatchVector, values: Tensor) -> Tensor:
    """Sums over this worker's nodes of each graph, in the shape of `out`; half precision becomes float32."""
    dtype = accumulation_dtype(values.dtype)
    if out.size(dim) == 1:
        return values.sum(dim, keepdim=True, dtype=dtype)
    return torch.zeros_like(out, dtype=dtype).scatter_add(dim, plain(index), values.to(dtype))


@BatchVector.handles(Tensor.scatter_add, torch.scatter_add)
def _scatter_add(out: Tensor, dim: int, index: BatchVector, src: Tensor) -> Tensor:
    _check_size(out, dim, index)
    return (out + global_sum(_summed(out, dim, index, src))).to(out.dtype)


@BatchVector.handles(Tensor.scatter_reduce_)
def _scatter_reduce(
    out: Tensor, dim: int, index: BatchVector, src: Tensor, reduce: str, *, include_self: bool = True
) -> Tensor:
    """Multiply `out` by products, or replace it by extremes if the graph has nodes, as `scatter` expects."""
    _check_size(out, dim, index)
    if reduce == "prod" and include_self:
        own = torch.ones_like(out).scatter_reduce(dim, plain(index), src, "prod")
        rows = [own if rank == session.rank() else torch.zeros_like(own) for rank in range(session.world_size())]
        return out.copy_(out.clone() * global_sum(torch.stack(rows)).prod(0))
    if reduce not in ("amax", "amin") or include_self:
        raise GraphError(f"Reducing by {reduce} over graphs across workers is not supported; expected sums and such.")
    if not out.is_floating_point():
        raise GraphError(f"{reduce} over graphs across workers got {out.dtype}; expected floating point: x.double().")
    sign = 1 if reduce == "amax" else -1
    return out.copy_(sign * _maxima(out, dim, plain(index), sign * src))


def _maxima(out: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """The maxima over all nodes of each graph, 0 if it has none. Equal maxima share the gradient, as in torch."""
    zeros = torch.zeros_like(out, dtype=accumulation_dtype(out.dtype))
    with torch.no_grad():
        greatest = all_max(torch.full_like(out, -torch.inf).scatter_reduce(dim, index, src, "amax"))
        equal = (src == greatest.gather(dim, index)).to(zeros.dtype)
        ties = global_sum(zeros.scatter_add(dim, index, equal))
        greatest = greatest.masked_fill((ties == 0) & ~greatest.isnan(), 0)
        ties += greatest == 0  # if the maximum is zero, the initial zeros of `scatter` share the gradient
    return greatest + global_sum(zeros.scatter_add(dim, index, zeros_of(src) * equal)) / ties
