"""Normalisation and pooling of PyTorch Geometric over the nodes of all workers.

[Note: whose rows]
A normalisation is given rows, not a graph. They are those of a graph on all workers where the module that it is in was
called with a distributed edge index, for each of whose nodes here there is a row; where a batch vector of such a graph
comes with them; or where `convert_norms` has said so. In a module that was called with edges of this worker alone, as
mini-batches are, they are this worker's. Where there is nothing to tell by, it takes this worker's rows, and warns.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import norm
from torch_geometric.utils import scatter

from sar.adapters.pyg.batch_vector import BatchVector, batch_vector, whole_graph
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, edge_indices
from sar.comm import session
from sar.comm.collectives import all_sum
from sar.core.eager import uncompiled
from sar.nn.statistics import convert_batchnorm, global_mean, normalise


def convert_norms(model: nn.Module) -> nn.Module:
    """Let the normalisation layers of a model look at the nodes of all workers in whatever call.

    In a model that is called with a distributed `edge_index` they do so by themselves. Those that look at all nodes of
    a graph are `BatchNorm` (`torch.nn.BatchNorm1d` too, see `sar.convert_batchnorm`), `DiffGroupNorm`, `GraphNorm`,
    `GraphSizeNorm`, `HeteroBatchNorm`, `InstanceNorm`, `LayerNorm` with mode "graph", `MeanSubtractionNorm` and
    `PairNorm`. Parameters and the state dict stay. A batch vector that a layer is given then says which of several
    graphs on all workers each node is of.

    Args:
        model: changed in place.

    Returns:
        The model, or what replaces it where it is a `BatchNorm1d` itself.

    Raises:
        ConfigError: as `sar.convert_batchnorm`.
    """
    install()
    model = convert_batchnorm(model)
    for module in model.modules():
        if isinstance(module, tuple(OVER_ALL)):
            module.__dict__[_ALWAYS] = True
    return model


_ALWAYS = "_rows_of_all_workers"  # set for a module whose rows are those of all workers in any call
_LATEST = "_latest_rows_of_all_workers"  # set for a module: whose rows it got last, for when it runs in a backward


@cache
def install() -> None:
    """Let the layers find out whose rows they get."""
    for kind in OVER_ALL:
        kind.__call__ = _asking(kind)  # type: ignore[method-assign]  # `forward` would be in the way of TorchScript


def _asking(kind: type[nn.Module]) -> Callable[..., Tensor]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        asks = session.is_initialized() and session.world_size() > 1 and takes_statistics(self)
        return (ask if asks else nn.Module.__call__)(self, *args, **kwargs)

    @uncompiled
    def ask(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        values = (*args, *kwargs.values())  # those of a class of one's own may have other names
        given = any(isinstance(value, BatchVector) for value in values)
        x = next((value for value in values if isinstance(value, Tensor)), None)
        if given or x is None or not _are_of_all_workers(self, kind, len(x)):
            return nn.Module.__call__(self, *args, **kwargs)
        self.__dict__["forward"] = partial(OVER_ALL[kind], self)  # hooks, and what else is of a call, stay
        try:
            return nn.Module.__call__(self, *args, **kwargs)
        finally:
            del self.__dict__["forward"]

    return call


def takes_statistics(module: Any) -> bool:
    """Whether the result for a row depends on other rows."""
    if isinstance(module, norm.BatchNorm):
        return bool(module.allow_single_element) and takes_statistics(module.module)  # else its module asks
    if isinstance(module, norm.LayerNorm):
        return bool(module.mode == "graph")
    return module.training or getattr(module, "running_mean", None) is None


def _are_of_all_workers(module: Any, kind: type[nn.Module], count: int) -> bool:
    """See [Note: whose rows]."""
    known = True if module.__dict__.get(_ALWAYS) else _known(count)
    if known is None and torch._C._current_graph_task_id() >= 0:  # a checkpoint's second run, outside of the model
        known = module.__dict__.get(_LATEST)
    module.__dict__[_LATEST] = known
    changed = type(module).forward is not kind.forward or "forward" in vars(module)
    if known is None or (known and changed):
        warnings.warn(
            f"{module} takes the statistics of this worker's rows alone. A layer takes those of all workers where "
            "its model is called with a distributed edge_index and there is a row for each node, where it is given "
            "data.batch, and after sar.pyg.convert_norms(model); no class of one's own may replace its forward.",
            stacklevel=5,
        )
    return bool(known) and not changed


def _known(count: int) -> bool | None:
    """Whether `count` rows are of a graph on all workers; None where nothing tells."""
    known, frame = None, sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            edges = list(edge_indices((frame.f_locals["args"], frame.f_locals["kwargs"])))
            ours = [each for each in edges if isinstance(each, DistributedEdgeIndex)]
            if ours:  # with pairs of this worker's further in, nothing is known
                return (known is None and any(count in (*each.sides, each.size(1)) for each in ours)) or None
            known = False if edges else known
    return known


# -- forwards over the rows of all workers


def _by_graph(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    """The layer's own forward, with all nodes of one graph where it is given no batch vector."""
    vector = whole_graph(len(x), x.device) if batch is None else batch_vector(batch, batch_size)
    return type(module).forward(module, x, vector, vector.count)


def _layer_norm(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    if batch is not None:
        return _by_graph(module, x, batch, batch_size)
    x = x - global_mean(x).mean()  # of one graph it is another formula
    out = x / (global_mean(x.square()).mean().sqrt() + module.eps)
    return out if module.weight is None or module.bias is None else out * module.weight + module.bias


def _instance_norm(module: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
    out = _by_graph(module, x, batch, batch_size)
    if module.running_mean is not None:  # the original lets gradients into the next call
        module.running_mean, module.running_var = module.running_mean.detach(), module.running_var.detach()
    return out


def _by_type(module: Any, x: Tensor, type_vec: Tensor) -> Tensor:
    return norm.HeteroBatchNorm.forward(module, x, batch_vector(type_vec, module.num_types))


def _batch_norm(module: Any, x: Tensor) -> Tensor:
    """PyTorch Geometric's, whose module is one of torch's or what `convert_batchnorm` has made of it."""
    single = module.allow_single_element and all_sum(len(x)) <= 1
    return norm.BatchNorm.forward(module, x) if single else module.module(x)


OVER_ALL: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.BatchNorm1d: lambda module, input: normalise(module, input, session.current_group()),
    norm.BatchNorm: _batch_norm,
    norm.HeteroBatchNorm: _by_type,
    norm.InstanceNorm: _instance_norm,
    norm.LayerNorm: _layer_norm,
    **dict.fromkeys((norm.GraphNorm, norm.GraphSizeNorm, norm.MeanSubtractionNorm, norm.PairNorm), _by_graph),
}
"""The layers that look at all nodes of a graph, and their forwards over those of all workers."""


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The sum over the nodes of each graph, on all workers: `torch_geometric.nn.global_add_pool`.

    Args:
        x: rows of this worker's nodes, (N_i, F).
        batch: the graph of each node, (N_i,) integer; None where there is one.
        size: B, the number of graphs. Default: by the greatest in `batch` on any worker.

    Returns:
        (B, F), equal on all workers.
    """
    return _pooled("sum", x, batch, size)


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The mean over the nodes of each graph; as `global_add_pool`."""
    return _pooled("mean", x, batch, size)


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The maximum over the nodes of each graph; as `global_add_pool`. Equal maxima share the gradient."""
    return _pooled("max", x, batch, size)


def _pooled(reduce: str, x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    vector = whole_graph(len(x), x.device) if batch is None else batch_vector(batch, size)
    return scatter(x, vector, -2, vector.count, reduce)
