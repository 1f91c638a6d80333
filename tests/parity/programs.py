"""Small layers of one message and one reduce function each, written alike for DGL's graph and for sar's."""

import dgl.function as fn
import torch
from torch import Tensor


def weighted(graph, h: Tensor, w: Tensor) -> Tensor:
    """Sum of h * w over in-edges; the gradient of w needs the source rows again."""
    return _aggregate(graph, fn.u_mul_e("h", "w", "m"), fn.sum("m", "out"), h, w)


def pairwise(graph, h: Tensor, w: Tensor) -> Tensor:
    """Mean of the product of both ends over in-edges; its gradient needs both ends again."""
    return _aggregate(graph, fn.u_mul_v("h", "h", "m"), fn.mean("m", "out"), h, w)


def largest(graph, h: Tensor, w: Tensor) -> Tensor:
    """Largest h over in-edges; its gradient needs nothing but arguments."""
    return _aggregate(graph, fn.copy_u("h", "m"), fn.max("m", "out"), h, w)


def scored(graph, h: Tensor, w: Tensor) -> Tensor:
    """Edge scores by apply_edges, then summed with their weight."""
    with graph.local_scope():
        graph.ndata["h"] = h
        graph.apply_edges(fn.u_dot_v("h", "h", "s"))
        graph.edata["s"] = (graph.edata["s"] * w).tanh()
        graph.update_all(fn.v_mul_e("h", "s", "m"), fn.sum("m", "out"))
        return graph.ndata["out"]


def gated(graph, h: Tensor, w: Tensor) -> Tensor:
    """A Python message function of both ends and the edge, summed."""

    def message(edges):
        return {"m": torch.tanh(edges.src["h"] * edges.data["w"] - edges.dst["h"])}

    return _aggregate(graph, message, fn.sum("m", "out"), h, w)


def ordered(graph, h: Tensor, w: Tensor) -> Tensor:
    """A Python reduce function in which the order of the messages matters."""

    def reduce(nodes):
        messages = nodes.mailbox["m"]
        place = torch.arange(1.0, messages.shape[1] + 1, dtype=messages.dtype)
        return {"out": (messages / place[:, None]).sum(1) * nodes.data["h"].cos()}

    return _aggregate(graph, fn.u_mul_e("h", "w", "m"), reduce, h, w)


LAYERS = {layer.__name__: layer for layer in (weighted, pairwise, largest, scored, gated, ordered)}


def _aggregate(graph, message, reducer, h: Tensor, w: Tensor) -> Tensor:
    with graph.local_scope():
        graph.ndata["h"] = h
        graph.edata["w"] = w
        graph.update_all(message, reducer)
        return graph.ndata["out"]
