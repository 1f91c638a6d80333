"""Replacements of forwards of PyTorch Geometric's layers that would be wrong across workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch_geometric.nn import conv
from torch_geometric.nn.attention import performer
from torch_geometric.nn.conv import gat_conv, gatv2_conv, han_conv, hgt_conv
from torch_geometric.utils import get_laplacian

from sar.adapters.pyg.edge_index import DistributedEdgeIndex, JoinedEdgeIndex, check_rows
from sar.adapters.pyg.guarded import Original, Replacements
from sar.core.collective import uncompiled
from sar.core.modules import views_of_nothing
from sar.core.passing.messages import meanwhile
from sar.host.per_thread import PerThread
from sar.nn.statistics import global_max, global_mean, global_sum
from sar.tensors.lasting import lasting

_of_all_workers = PerThread(False)
"""Whether a layer runs on a distributed edge index, for replaced functions of its module."""

ROOTS = {conv.SAGEConv: "lin_r", conv.GraphConv: "lin_root"}
"""Modules for the self term of these layers, which is added to the result of `propagate`."""


def _beside(name: str) -> Callable[..., Any]:
    """A forward that computes the module of that name while neighbors' rows travel."""

    def forward(original: Original, self: Any, /, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
        own = x if isinstance(x, Tensor) else x[1]
        known = type(self) in ROOTS and getattr(self, "root_weight", True)  # subclasses may use the module otherwise
        whole = own is None or not known or not isinstance(edge_index, DistributedEdgeIndex)
        if whole or any(map(is_lazy, self.parameters())):  # lazy parameters are drawn in the order of calls
            return original(self, x, edge_index, *args, **kwargs)
        with meanwhile(partial(getattr(self, name), own)) as made:
            self.__dict__[name] = lambda _: made()  # hides the module, which is not in `__dict__`
            try:
                return original(self, x, edge_index, *args, **kwargs)
            finally:
                del self.__dict__[name]

    return forward


LOOPS = ("remove_self_loops", "add_self_loops")


def _kept(name: str) -> Callable[..., Any]:
    """`remove_self_loops` or `add_self_loops` with a cache at the edges, to avoid sorting them again."""

    @uncompiled
    def of_edges(original: Original, edges: Any, edge_attr: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        key = name, kwargs.get("num_nodes")
        if not isinstance(edges, DistributedEdgeIndex) or edge_attr is not None or args:
            return original(edges, edge_attr, *args, **kwargs)
        kept = edges.__dict__.setdefault("loops", {})
        if edges.sides and key not in kept:  # which raise if destinations have changed
            kept[key], _ = lasting(original)(edges, None, **kwargs)
        return kept[key], None

    return of_edges


def _both_ways(original: Original, self: Any, x: Tensor, edge_index: Tensor) -> Tensor:
    """DirGNNConv on the edges and the reversed edges, which are on other workers."""
    if not isinstance(edge_index, DistributedEdgeIndex):
        return original(self, x, edge_index)
    inwards = self.conv_in(x, edge_index)
    outwards = self.conv_out(x, edge_index.reversed)
    out: Tensor = self.alpha * outwards + (1 - self.alpha) * inwards
    return out + self.lin(x) if self.root_weight else out


def _total(counts: Mapping[Any, int], starts: Mapping[Any, int]) -> int:
    """The number of rows of several concatenated types, after checking the first row of each."""
    for kind, start, end in zip(starts, starts.values(), [*starts.values()][1:], strict=False):
        check_rows(f"HGTConv was given {kind} of", end - start, counts[kind])
    last = [*starts][-1]
    return starts[last] + counts[last]


def _joined(
    original: Original, edges: Any, src: Any, dst: Any, edge_attr_dict: Any = None, num_nodes: int | None = None
) -> Any:
    """HGTConv's one edge index for all edge types."""
    if not any(isinstance(value, DistributedEdgeIndex) for value in edges.values()):
        return original(edges, src, dst, edge_attr_dict, num_nodes)
    counts = next(iter(edges.values())).numbering.graph._structure.dst.counts
    sides = _total({etype: edges[etype].sides[0] for etype in src}, src), _total(counts, dst)
    joined = JoinedEdgeIndex.join([(edges[etype], start, dst[etype[2]]) for etype, start in src.items()], sides)
    values = [edge_attr_dict["__".join(etype)].expand(edges[etype].size(1), -1) for etype in src]
    return joined, torch.cat(values)


def _over_all_nodes(original: Original, self: Any, x_dict: Any, edge_index_dict: Any, *args: Any, **kwargs: Any) -> Any:
    """HANConv's meta-path weights, which depend on the mean over all nodes of a type."""
    with _of_all_workers.set_to(any(isinstance(value, DistributedEdgeIndex) for value in edge_index_dict.values())):
        return original(self, x_dict, edge_index_dict, *args, **kwargs)


def _weigh_paths(
    original: Original, paths: list[Tensor], query: Tensor, key: Callable[[Tensor], Tensor]
) -> tuple[Any, Any]:
    """Mean of the paths' results, (N_i, F) each, weighted by the softmax of query times mean key."""
    if not _of_all_workers.value:
        return original(paths, query, key)
    if not paths:
        return None, None
    scores = [(query * global_mean(torch.tanh(key(path)))).sum(-1) for path in paths]
    weights = torch.cat(scores).softmax(0)
    return sum(weight * path for weight, path in zip(weights, paths, strict=True)), weights


def _greatest_of_all(
    original: Original,
    self: Any,
    edge_index: Tensor,
    num_nodes: int | None,
    edge_weight: Tensor | None,
    normalization: str | None,
    lambda_max: Tensor | float | None = None,
    dtype: Any = None,
    batch: Tensor | None = None,
) -> Any:
    """ChebConv's upper bound of eigenvalues, by default twice the greatest weight of the Laplacian."""
    if lambda_max is None and isinstance(edge_index, DistributedEdgeIndex):
        _, weight = get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
        lambda_max = 2.0 * global_max(weight)
    elif lambda_max is None and num_nodes == 0:
        lambda_max = 1.0  # of an empty batch
    return original(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)


def _linearly(
    original: Original, self: Any, x: Tensor, edge_index: Tensor, batch: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """GPSConv with linear attention, which only needs sums over all nodes."""
    with _of_all_workers.set_to(isinstance(edge_index, DistributedEdgeIndex)), views_of_nothing(len(x)):
        return original(self, x, edge_index, batch, **kwargs)


def _linear_attention(original: Original, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q K' V / (q K' 1), (B, H, N_i, D), with keys and values of the nodes of all workers."""
    if not _of_all_workers.value:
        return original(q, k, v)
    sums = global_sum(k.transpose(-2, -1) @ torch.cat([v, torch.ones_like(v[..., :1])], -1))
    return q @ sums[..., :-1] / (q @ sums[..., -1:])


REPLACED: Replacements = [
    (conv.ChebConv, "__norm__", _greatest_of_all),
    (hgt_conv, "construct_bipartite_edge_index", _joined),
    (han_conv, "group", _weigh_paths),
    (conv.HANConv, "forward", _over_all_nodes),
    (performer, "linear_attention", _linear_attention),
    (conv.GPSConv, "forward", _linearly),
    (conv.DirGNNConv, "forward", _both_ways),
    *((gat_conv, name, _kept(name)) for name in LOOPS),
    *((gatv2_conv, name, _kept(name)) for name in LOOPS),
    *((kind, "forward", _beside(root)) for kind, root in ROOTS.items()),
]
