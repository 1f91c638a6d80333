"""Small layers of one built-in each, for tests of how calls combine; written alike for DGL's graph and for sar's."""

import dgl.function as fn
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


LAYERS = {layer.__name__: layer for layer in (weighted, pairwise, largest, scored)}


def _aggregate(graph, message, reducer, h: Tensor, w: Tensor) -> Tensor:
    with graph.local_scope():
        graph.ndata["h"] = h
        graph.edata["w"] = w
        graph.update_all(message, reducer)
        return graph.ndata["out"]
