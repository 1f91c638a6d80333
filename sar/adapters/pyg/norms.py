"""Normalisation and pooling of PyTorch Geometric over the nodes of all workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import norm
from torch_geometric.utils import scatter

from sar.comm.totals import all_max
from sar.errors import GraphError
from sar.nn.batch_norm import convert_batchnorm
from sar.nn.global_reductions import global_mean, global_sum


def convert_norms(model: nn.Module) -> nn.Module:
    """Let the normalisation layers of a model that look at all nodes of a graph look at those of all workers.

    These are `BatchNorm` (`torch.nn.BatchNorm1d` too, see `sar.convert_batchnorm`), `DiffGroupNorm`, `GraphNorm`,
    `GraphSizeNorm`, `InstanceNorm`, `LayerNorm` with mode "graph", `MeanSubtractionNorm` and `PairNorm`. Parameters and
    the state dict stay.

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
    return model


class _OneGraph(nn.Module):
    """A layer of which `normalise` is given all nodes of one graph."""

    def forward(self, x: Tensor, batch: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
        if batch is not None:
            raise GraphError(
                f"{type(self).__name__} was given batch; expected the nodes of one graph on all workers, without it."
            )
        out: Tensor = self.normalise(x)
        return out

    def normalise(self, x: Tensor) -> Any:
        raise NotImplementedError


class GraphNorm(_OneGraph, norm.GraphNorm):  # type: ignore[misc]
    """`GraphNorm` over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        out = x - global_mean(x) * self.mean_scale
        return self.weight * out / (global_mean(out.square()) + self.eps).sqrt() + self.bias


class PairNorm(_OneGraph, norm.PairNorm):  # type: ignore[misc]
    """`PairNorm` over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        x = x - global_mean(x)
        if self.scale_individually:
            return self.scale * x / (self.eps + x.norm(2, -1, keepdim=True))
        return self.scale * x / (self.eps + global_mean(x.square().sum(-1))).sqrt()


class MeanSubtractionNorm(_OneGraph, norm.MeanSubtractionNorm):  # type: ignore[misc]
    """`MeanSubtractionNorm` over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        return x - global_mean(x)


class LayerNorm(_OneGraph, norm.LayerNorm):  # type: ignore[misc]
    """`LayerNorm` with mode "graph" over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        x = x - global_mean(x).mean()
        out = x / (global_mean(x.square()).mean().sqrt() + self.eps)
        return out if self.weight is None or self.bias is None else out * self.weight + self.bias


class InstanceNorm(_OneGraph, norm.InstanceNorm):  # type: ignore[misc]
    """`InstanceNorm` over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        if self.training or not self.track_running_stats:
            mean = global_mean(x)
            var = global_mean((x - mean).square())
            if self.running_mean is not None and self.running_var is not None:
                count = float(global_sum(x.new_full((1,), len(x))))
                self.running_mean = self.running_mean.lerp(mean.detach(), self.momentum)
                self.running_var = self.running_var.lerp(var.detach() * count / (count - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        out = (x - mean) / (var + self.eps).sqrt()
        return out if self.weight is None else out * self.weight + self.bias


class GraphSizeNorm(_OneGraph, norm.GraphSizeNorm):  # type: ignore[misc]
    """`GraphSizeNorm` over the nodes of all workers."""

    def normalise(self: Any, x: Tensor) -> Any:
        return x / global_sum(x.new_full((1,), len(x))).sqrt()


_ACROSS: dict[type, type] = {
    kind.__bases__[-1]: kind
    for kind in (GraphNorm, PairNorm, MeanSubtractionNorm, LayerNorm, InstanceNorm, GraphSizeNorm)
}


def global_add_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The sum over the nodes of each graph, on all workers: `torch_geometric.nn.global_add_pool`.

    Args:
        x: rows of this worker's nodes, (N_i, F).
        batch: the graph of each node, (N_i,) integer; None where there is one.
        size: B, the number of graphs; needed with `batch`.

    Returns:
        (B, F), equal on all workers.

    Raises:
        GraphError: for `batch` without `size`.
    """
    return global_sum(_by_graph(x, batch, size))


def global_mean_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The mean over the nodes of each graph; as `global_add_pool`."""
    counted = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
    total = global_add_pool(counted, batch, size)
    return total[:, :-1] / total[:, -1:].detach().clamp(min=1)


def global_max_pool(x: Tensor, batch: Tensor | None = None, size: int | None = None) -> Tensor:
    """The maximum over the nodes of each graph; as `global_add_pool`. Equal maxima share the gradient."""
    with torch.no_grad():
        place, count = _graphs(x, batch, size)
        own = x.new_full((count, x.shape[1]), -torch.inf)
        greatest = all_max(own.scatter_reduce_(0, place.view(-1, 1).expand_as(x), x, "amax"))
        equal = (x == greatest[place]).to(x.dtype)
        ties = global_sum(_by_graph(equal, batch, size)) + (greatest == 0)
        greatest = greatest.nan_to_num(neginf=0.0)
    # The value is that of the maximum; the second term is 0 and brings the gradient.
    return greatest + global_sum(_by_graph((x - x.detach()) * equal, batch, size)) / ties.clamp(min=1)


def _by_graph(x: Tensor, batch: Tensor | None, size: int | None) -> Tensor:
    """Sums over this worker's nodes of each graph, (B, F)."""
    place, count = _graphs(x, batch, size)
    total: Tensor = scatter(x, place, 0, count, "sum")
    return total


def _graphs(x: Tensor, batch: Tensor | None, size: int | None) -> tuple[Tensor, int]:
    """The graph of each node, (N_i,), and how many there are."""
    if batch is None:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device), 1
    if size is None:
        raise GraphError("Pooling over the graphs of all workers got batch without size; pass the number of graphs.")
    return batch, size
