"""Normalisation and pooling of PyTorch Geometric over the nodes of all workers.

[Note: whose rows]
Norm layers receive features without graph information. So they cannot tell whether their rows are nodes of a graph on
all workers, or of a mini-batch of this worker. `sar.convert_batchnorm` decides for all layers of a model. Until then,
`sync_params` and `gather_grads` refuse the model if the worker has a distributed edge index, and a convolution refuses
it if the norm layer is part of the convolution. Otherwise the layer would silently normalise over one worker's rows.
A layer frozen by `eval()` uses its running statistics, so it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_geometric.nn import MessagePassing, norm
from torch_geometric.utils import scatter

from sar.adapters.pyg.batch_vector import batch_vector, whole_graph
from sar.comm import session
from sar.comm.collectives import all_sum
from sar.core.collective import uncompiled
from sar.errors import ConfigError
from sar.kernels import accumulation_dtype
from sar.nn.statistics import global_max, global_mean, global_sum


def takes_statistics(module: nn.Module) -> bool:
    """Whether the module is a norm layer that computes statistics of its input rows in its current mode."""
    if isinstance(module, norm.LayerNorm):
        return bool(module.mode == "graph")
    if isinstance(module, norm.BatchNorm):
        return bool(module.allow_single_element) and takes_statistics(module.module)
    frozen = not module.training and getattr(module, "running_mean", None) is not None
    if isinstance(module, norm.InstanceNorm | norm.HeteroBatchNorm):
        frozen &= module.track_running_stats
    return isinstance(module, _KINDS) and not frozen


def refuse_unconverted(model: nn.Module, call: str) -> None:
    """Raise a ConfigError if a norm layer that takes statistics has not been converted; see [Note: whose rows].

    Skips models without layers of PyTorch Geometric, for which `sync_params` warns.
    """
    if not any(isinstance(module, (MessagePassing, *OVER_ALL)) for module in model.modules()):
        return
    for name, module in model.named_modules():
        converted = isinstance(module, nn.SyncBatchNorm) or hasattr(module, "knows_its_rows")
        if not converted and takes_statistics(module):
            raise ConfigError(
                f"{call}: {name or 'the model'} is a {type(module).__name__}, which normalises by the rows of one "
                "worker. Call sar.convert_batchnorm(model), after which it normalises by those of all workers; "
                "for mini-batches, sar.convert_batchnorm(model, distributed=False) leaves it as it is. Frozen by "
                "eval() it uses no rows if it has running statistics."
            )


# -- forwards over the rows of all workers


@uncompiled
def _by_graph(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    """The layer's original forward. Without a batch vector, all nodes belong to one graph."""
    if not session.has_peers():
        return type(module).forward(module, x, batch, batch_size)
    vector = whole_graph(len(x), x.device) if batch is None else batch_vector(batch, batch_size)
    return type(module).forward(module, x, vector, vector.count)


@uncompiled
def _layer_norm(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    if module.mode == "node":
        return norm.LayerNorm.forward(module, x)
    if batch is not None or not session.has_peers():
        return _by_graph(module, x, batch, batch_size)
    x = x - global_mean(x).mean()  # like the original, which has a separate formula for one graph
    out = x / (global_mean(x.square()).mean().sqrt() + module.eps)
    return out if module.weight is None or module.bias is None else out * module.weight + module.bias


def _instance_norm(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    out = _by_graph(module, x, batch, batch_size)
    if module.running_mean is not None:  # the original lets gradients into the next call
        module.running_mean, module.running_var = module.running_mean.detach(), module.running_var.detach()
    return out


@uncompiled
def _by_type(module: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    types = type_vec if not session.has_peers() else batch_vector(type_vec, module.num_types)
    return norm.HeteroBatchNorm.forward(module, x, types)


@uncompiled
def _batch_norm(module: Any, x: Tensor) -> Tensor:
    """Counts the rows of all workers for `allow_single_element`."""
    several = session.has_peers() and takes_statistics(module) and all_sum(len(x)) > 1
    return module.module(x) if several else norm.BatchNorm.forward(module, x)


OVER_ALL: dict[type[nn.Module], Callable[..., Tensor]] = {
    norm.BatchNorm: _batch_norm,
    norm.HeteroBatchNorm: _by_type,
    norm.InstanceNorm: _instance_norm,
    norm.LayerNorm: _layer_norm,
    **dict.fromkeys((norm.GraphNorm, norm.GraphSizeNorm, norm.MeanSubtractionNorm, norm.PairNorm), _by_graph),
}
"""Norm layers that use all nodes of a graph, and their forwards over the nodes of all workers."""

_KINDS: tuple[type[nn.Module], ...] = (_BatchNorm, *OVER_ALL)


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Sum over the nodes of each graph, on all workers, like `torch_geometric.nn.global_add_pool`.

    Args:
        x: rows of this worker's nodes, (N_i, F).
        batch: the graph of each node, (N_i,) integer; None for a single graph.
        size: B, the number of graphs. Default: one more than the greatest number in `batch` on any worker.

    Returns:
        (B, F), equal on all workers.
    """
    return _pooled("sum", x, batch, size)


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Mean over the nodes of each graph, (B, F); arguments as for `global_add_pool`."""
    return _pooled("mean", x, batch, size)


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """Maximum over the nodes of each graph; arguments as for `global_add_pool`. Equal maxima share the gradient."""
    return _pooled("max", x, batch, size)


def _pooled(reduce: str, x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    if batch is None:  # PyTorch Geometric uses torch's reductions here, with other dtypes than `scatter`
        if reduce != "sum":
            return (global_mean if reduce == "mean" else global_max)(x).unsqueeze(0)
        is_float = x.is_floating_point()
        total = global_sum(x.sum(-2, keepdim=True, dtype=accumulation_dtype(x.dtype) if is_float else None))
        return total.to(x.dtype) if is_float else total
    vector = batch_vector(batch, size)
    return scatter(x, vector, -2, vector.count, reduce)
