"""Normalisation and pooling of PyTorch Geometric over the nodes of all workers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch_geometric.nn import norm
from torch_geometric.utils import scatter

from sar.adapters.pyg.batch_vector import batch_vector, whole_graph
from sar.comm.totals import all_sum
from sar.nn.batch_norm import convert_batchnorm
from sar.nn.global_reductions import global_mean


def convert_norms(model: nn.Module) -> nn.Module:
    """Let the normalisation layers of a model that look at all nodes of a graph look at those of all workers.

    These are `BatchNorm` (`torch.nn.BatchNorm1d` too, see `sar.convert_batchnorm`), `DiffGroupNorm`, `GraphNorm`,
    `GraphSizeNorm`, `HeteroBatchNorm`, `InstanceNorm`, `LayerNorm` with mode "graph", `MeanSubtractionNorm` and
    `PairNorm`. The others look at each row by itself. Parameters and the state dict stay. A batch vector that a layer
    is given then says which of several graphs on all workers each node is of.

    Args:
        model: changed in place.

    Returns:
        The model, or what replaces it where it is a `BatchNorm1d` itself.

    Raises:
        ConfigError: as `sar.convert_batchnorm`.
    """
    model = convert_batchnorm(model)
    for module in model.modules():
        kind = _ACROSS.get(type(module))
        if kind is not None and getattr(module, "mode", "graph") == "graph":  # LayerNorm has others
            module.__class__ = kind
        elif type(module) is norm.BatchNorm and module.allow_single_element:
            module.__class__ = BatchNorm
    return model


class _AcrossWorkers(nn.Module):
    """A layer that is given a batch vector of graphs across workers; without one all nodes are of one graph."""

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        vector = whole_graph(len(x), x.device) if batch is None else batch_vector(batch, batch_size)
        out: Tensor = super().forward(x, vector, vector.count)
        return out


class GraphNorm(_AcrossWorkers, norm.GraphNorm):  # type: ignore[misc]
    """`GraphNorm` over the nodes of all workers."""


class PairNorm(_AcrossWorkers, norm.PairNorm):  # type: ignore[misc]
    """`PairNorm` over the nodes of all workers."""


class MeanSubtractionNorm(_AcrossWorkers, norm.MeanSubtractionNorm):  # type: ignore[misc]
    """`MeanSubtractionNorm` over the nodes of all workers."""


class GraphSizeNorm(_AcrossWorkers, norm.GraphSizeNorm):  # type: ignore[misc]
    """`GraphSizeNorm` over the nodes of all workers."""


class LayerNorm(_AcrossWorkers, norm.LayerNorm):  # type: ignore[misc]
    """`LayerNorm` with mode "graph" over the nodes of all workers."""

    def forward(self: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        if batch is not None:
            out: Tensor = super().forward(x, batch, batch_size)
            return out
        x = x - global_mean(x).mean()  # of one graph it is another formula
        out = x / (global_mean(x.square()).mean().sqrt() + self.eps)
        return out if self.weight is None or self.bias is None else out * self.weight + self.bias


class InstanceNorm(_AcrossWorkers, norm.InstanceNorm):  # type: ignore[misc]
    """`InstanceNorm` over the nodes of all workers."""

    def forward(self: Any, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        out: Tensor = super().forward(x, batch, batch_size)
        if self.running_mean is not None:  # the original lets gradients into the next call
            self.running_mean, self.running_var = self.running_mean.detach(), self.running_var.detach()
        return out


class HeteroBatchNorm(norm.HeteroBatchNorm):  # type: ignore[misc]
    """`HeteroBatchNorm` over the nodes of all workers."""

    def forward(self, x: Tensor, type_vec: Tensor) -> Tensor:
        """Normalise the rows of this worker's nodes, (N_i, F), of the types `type_vec`, (N_i,)."""
        out: Tensor = super().forward(x, batch_vector(type_vec, self.num_types))
        return out


class BatchNorm(norm.BatchNorm):  # type: ignore[misc]
    """`BatchNorm`, of which `convert_batchnorm` has replaced the module, with `allow_single_element`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the rows of this worker's nodes, (N_i, F)."""
        if all_sum(len(x)) > 1:
            normalised: Tensor = self.module(x)
            return normalised
        out: Tensor = super().forward(x)
        return out


_ACROSS: dict[type, type] = {
    kind.__bases__[-1]: kind
    for kind in (GraphNorm, PairNorm, MeanSubtractionNorm, LayerNorm, InstanceNorm, GraphSizeNorm, HeteroBatchNorm)
}


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
    pooled: Tensor = scatter(x, vector, -2, vector.count, reduce)
    return pooled
