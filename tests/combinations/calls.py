"""Calls that users make on a graph, written alike for DGL's graph and for sar's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import dgl
import dgl.function as fn
import dgl.nn.pytorch as dglnn
import torch
import torch.distributed as dist
import torch_geometric.nn as pyg
from dgl.nn.functional import edge_softmax
from torch import Tensor, nn
from torch.nn.functional import softsign

import sar
from tests.parity.harness import extremum

WIDTH = 6


@dataclass
class Scene:
    """A graph to call, and what there is to give to a call.

    nodes: global IDs of this worker's nodes.
    count: nodes on all workers.
    h: rows of the nodes, (N, 6).
    w: weights of the edges, (E, 1).
    """

    graph: Any
    nodes: Tensor
    count: int
    h: Tensor
    w: Tensor

    def edge_softmax(self, scores: Tensor, by: str) -> Tensor:
        function = edge_softmax if isinstance(self.graph, dgl.DGLGraph) else sar.edge_softmax
        made: Tensor = function(self.graph, scores, norm_by=by)
        return made

    def others(self) -> Tensor:
        """A node for each of this worker's nodes, which may be anywhere."""
        return (7 * self.nodes + 3) % self.count


class Rows(nn.Module):
    """A learnable row of every node: `DistEmbedding`, or the rows themselves on one machine."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = None

    def forward(self, s: Scene, ids: Tensor) -> Tensor:
        if self.table is None:
            rows = s.h.detach().clone()
            if dist.is_initialized():
                made = sar.nn.DistEmbedding(s.graph, WIDTH, init_func=lambda shape, dtype: rows, dtype=rows.dtype)
            else:
                made = rows.requires_grad_()
            object.__setattr__(self, "table", made)  # no part of the model, as its rows are not on all workers
        return self.table(ids) if dist.is_initialized() else self.table[ids]

    def gradient(self) -> Tensor:
        """(N, 6), of this worker's rows."""
        if not dist.is_initialized():
            return torch.zeros_like(self.table) if self.table.grad is None else self.table.grad
        grad = torch.zeros_like(self.table.weight)
        found = self.table.sum_gradients()
        return grad if found is None else grad.index_copy(0, found[0], found[1].to(grad.dtype))


@dataclass(frozen=True)
class Call:
    """A call, and where it makes sense.

    run: (layer, scene) -> rows of the destinations, or of edges.
    make: the layer.
    edges: whether the result has rows of edges.
    exact: whether the results jump where values are rounded, as arguments of maxima do.
    attention: whether errors grow with the square of the features.
    several: whether one machine, too, needs more than one node and an edge.
    """

    run: Callable[[Any, Scene], Tensor]
    make: Callable[[], nn.Module] = nn.Identity
    edges: bool = False
    exact: bool = False
    attention: bool = False
    several: bool = False


def _update(message: Any, reducer: Any) -> Callable[[Any, Scene], Tensor]:
    """A built-in message, and a built-in reducer's maker."""

    def run(layer: Any, s: Scene) -> Tensor:
        return _aggregated(s, message, reducer)

    return run


def _aggregated(s: Scene, message: Any, reducer: Any) -> Tensor:
    s.graph.srcdata["h"], s.graph.dstdata["g"], s.graph.edata["w"] = s.h, s.h, s.w
    if reducer in (fn.max, fn.min) and not dist.is_initialized():
        return extremum(s.graph, message, "max" if reducer is fn.max else "min")
    s.graph.update_all(message, reducer("m", "out"))
    return s.graph.dstdata.pop("out")


def _apply(message: Any) -> Callable[[Any, Scene], Tensor]:
    def run(layer: Any, s: Scene) -> Tensor:
        s.graph.srcdata["h"], s.graph.dstdata["g"], s.graph.edata["w"] = s.h, s.h, s.w
        s.graph.apply_edges(message)
        return s.graph.edata.pop("m")

    return run


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, 4)


def _messages(layer: Any) -> Any:
    """A Python message function that captures a layer, and so its weights."""
    return lambda edges: {"m": layer(edges.src["h"] * edges.data["w"]) + softsign(edges.dst["g"][:, :4])}


def _reduce(nodes: Any) -> dict[str, Tensor]:
    """A Python reduce function in which the order of messages does not matter."""
    return {"out": nodes.mailbox["m"].square().sum(1) + nodes.data["g"][:, :4]}


def _python_reduce(layer: Any, s: Scene) -> Tensor:
    s.graph.srcdata["h"], s.graph.dstdata["g"], s.graph.edata["w"] = s.h, s.h, s.w
    s.graph.update_all(_messages(layer), _reduce)
    return s.graph.dstdata.pop("out")


def _softmax(by: str, layer: Any, s: Scene) -> Tensor:
    """Attention by hand: scores, their softmax over in-edges or out-edges, and a weighted sum."""
    s.graph.srcdata["h"], s.graph.dstdata["g"] = s.h, s.h
    s.graph.apply_edges(fn.u_dot_v("h", "g", "score"))
    s.graph.edata["w"] = s.edge_softmax(s.graph.edata.pop("score"), by) * s.w
    s.graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"))
    return s.graph.dstdata.pop("out")


def _conv(layer: Any, s: Scene) -> Tensor:
    return layer(s.graph, s.h)


def _weighted_conv(layer: Any, s: Scene) -> Tensor:
    return layer(s.graph, s.h, edge_weight=s.w.squeeze(1))


def _with_edges(layer: Any, s: Scene) -> Tensor:
    return layer(s.graph, s.h, s.w)


def _fetched(layer: Any, s: Scene) -> Tensor:
    ids = s.others()
    return sar.fetch_rows(s.graph, s.h, ids) if dist.is_initialized() else s.h[ids]


def _learned(layer: Any, s: Scene) -> Tensor:
    return layer(s, s.others())


class _Norm(nn.Module):
    """Batch normalisation over all workers' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = sar.DistributedBN1D(WIDTH) if dist.is_initialized() else nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def _edge_index(s: Scene) -> Tensor:
    return sar.pyg.edge_index(s.graph) if dist.is_initialized() else torch.stack(s.graph.edges())


def _pyg(layer: Any, s: Scene) -> Tensor:
    out: Tensor = layer(s.h, _edge_index(s))
    return out


def _pyg_weighted(layer: Any, s: Scene) -> Tensor:
    out: Tensor = layer(s.h, _edge_index(s), s.w.squeeze(1))
    return out


CALLS: dict[str, Call] = {
    "copy_u, sum": Call(_update(fn.copy_u("h", "m"), fn.sum)),
    "u_mul_e, sum": Call(_update(fn.u_mul_e("h", "w", "m"), fn.sum)),
    "u_add_v, mean": Call(_update(fn.u_add_v("h", "g", "m"), fn.mean)),
    "u_mul_e, max": Call(_update(fn.u_mul_e("h", "w", "m"), fn.max), exact=True),
    "v_sub_u, min": Call(_update(fn.v_sub_u("g", "h", "m"), fn.min), exact=True),
    "u_dot_v, on edges": Call(_apply(fn.u_dot_v("h", "g", "m")), edges=True),
    "edge_softmax": Call(partial(_softmax, "dst"), attention=True),
    "edge_softmax by source": Call(partial(_softmax, "src"), attention=True),
    "Python message, sum": Call(lambda layer, s: _aggregated(s, _messages(layer), fn.sum), _linear),
    "Python message, max": Call(lambda layer, s: _aggregated(s, _messages(layer), fn.max), _linear, exact=True),
    "Python message, on edges": Call(lambda layer, s: _apply(_messages(layer))(layer, s), _linear, edges=True),
    "Python reduce": Call(_python_reduce, _linear, several=True),
    "GraphConv": Call(_weighted_conv, lambda: dglnn.GraphConv(WIDTH, 4, "right", allow_zero_in_degree=True)),
    "SAGEConv mean": Call(_weighted_conv, lambda: dglnn.SAGEConv(WIDTH, 4, "mean")),
    "SAGEConv pool": Call(_conv, lambda: dglnn.SAGEConv(WIDTH, 4, "pool"), exact=True, several=True),
    "SAGEConv lstm": Call(_conv, lambda: dglnn.SAGEConv(WIDTH, 4, "lstm"), several=True),
    "GATConv": Call(
        _conv, lambda: dglnn.GATConv(WIDTH, 3, 2, residual=True, allow_zero_in_degree=True), attention=True
    ),
    "GATv2Conv": Call(_conv, lambda: dglnn.GATv2Conv(WIDTH, 3, 2, allow_zero_in_degree=True), attention=True),
    "DotGatConv": Call(_conv, lambda: dglnn.DotGatConv(WIDTH, 3, 2, allow_zero_in_degree=True), attention=True),
    "EdgeConv": Call(_conv, lambda: dglnn.EdgeConv(WIDTH, 4, allow_zero_in_degree=True), exact=True, several=True),
    "NNConv": Call(_with_edges, lambda: dglnn.NNConv(WIDTH, 4, nn.Linear(1, WIDTH * 4), "mean")),
    "fetch_rows": Call(_fetched),
    "DistEmbedding": Call(_learned, Rows),
    "DistributedBN1D": Call(lambda layer, s: layer(s.h), _Norm, several=True),
    "PyG GCNConv": Call(_pyg_weighted, lambda: pyg.GCNConv(WIDTH, 4)),
    "PyG GATConv": Call(_pyg, lambda: pyg.GATConv(WIDTH, 3, 2), attention=True),
    "PyG SAGEConv max": Call(_pyg, lambda: pyg.SAGEConv(WIDTH, 4, "max"), exact=True),
    "PyG EdgeConv": Call(_pyg, lambda: pyg.EdgeConv(nn.Linear(2 * WIDTH, 4)), exact=True),
    "PyG TransformerConv": Call(_pyg, lambda: pyg.TransformerConv(WIDTH, 3, 2), attention=True),
}
