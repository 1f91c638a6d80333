"""The order of sums and products in layers of PyTorch Geometric.

[Note: the narrower side]
These layers multiply features by a weight, and add up over in-edges. PyTorch Geometric always takes the product first,
or always last. Both are linear, so the results are equal to round-off; but workers exchange the rows that are added up.
`multiplies_first` chooses, as for DGL's layers. To reverse the order, the layer's own forward runs on products, or with
a linear layer that is an identity. A layer keeps its order if something could tell: a subclass, hooks, functions of the
user's own, parametrizations, a module in two places, autocast, other aggregations than sum and mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear
from torch_geometric.nn import MLP, Linear, conv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.adapters.pyg.guarded import Original, Replacements
from sar.adapters.pyg.propagate import ADDING, can_tile, source_rows
from sar.core.collective import uncompiled
from sar.core.modules import is_autocast, is_exactly, is_written_in
from sar.core.passing.messages import PRODUCTS, meanwhile, multiplies_first


def _product_first(original: Original, layer: Any, linears: list[Any], x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """The forward on products, with a linear layer that only adds its bias."""
    [module], (sources, own) = linears, (x, x) if isinstance(x, Tensor) else x
    weight, bias = module.weight, module.bias
    product = linear(sources, weight)
    if isinstance(layer, conv.GINConv) and own is not None:  # which adds own rows to the sum
        own = product if own is sources else linear(own, weight)
    module.forward = lambda sums: sums if bias is None else sums + bias
    try:
        return original(layer, product if isinstance(layer, conv.SGConv) else (product, own), *args, **kwargs)
    finally:
        del module.forward


def _product_last(original: Original, layer: Any, linears: list[Any], *args: Any, **kwargs: Any) -> Tensor:
    """The forward without the linear layer and the bias, and these after it."""
    [module], bias = linears, layer.bias
    module.forward, vars(layer)["bias"] = lambda x: x, None  # before the parameter, which is not in `__dict__`
    try:
        sums = original(layer, *args, **kwargs)
    finally:
        del module.forward, vars(layer)["bias"]
    return linear(sums, module.weight, bias)


def _last_power_first(
    original: Original, layer: Any, linears: list[Any], x: Tensor, edges: Tensor,
    edge_weight: Tensor | None = None, batch: Tensor | None = None, lambda_max: Any = None,
) -> Tensor:  # fmt: skip
    """The scheme of Horner, or for ChebConv that of Clenshaw."""
    size, chebyshev = x.size(layer.node_dim), isinstance(layer, conv.ChebConv)
    if chebyshev:
        edges, edge_weight = layer.__norm__(edges, size, edge_weight, layer.normalization, lambda_max, x.dtype, batch)
    elif layer.normalize:
        edges, edge_weight = gcn_norm(edges, edge_weight, size, add_self_loops=False, dtype=x.dtype)
    out, last = linears[-1](x), 0.0
    for power in reversed(range(len(linears) - 1)):
        with meanwhile(partial(linears[power], x)) as own:
            sums = layer.propagate(edges, x=out, **{"norm" if chebyshev else "edge_weight": edge_weight})
        sums = (2 if power else 1) * sums - last if chebyshev else sums
        out, last = own() + sums, out
    return out if layer.bias is None else out + layer.bias


ORDERS: dict[type, tuple[str, Callable[..., Tensor]]] = {
    conv.GCNConv: ("lin", _product_last),
    conv.SAGEConv: ("lin_l", _product_first),
    conv.GraphConv: ("lin_rel", _product_first),
    conv.GINConv: ("nn", _product_first),
    conv.SGConv: ("lin", _product_first),
    **dict.fromkeys((conv.TAGConv, conv.ChebConv), ("lins", _last_power_first)),
}
"""Layers, the linear layer of each, or a module that begins with it, and the forward in the other order."""


@uncompiled
def _reversed(original: Original, layer: Any, x: Any, edges: DistributedEdgeIndex, *args: Any, **kwargs: Any) -> Any:
    """The result of the other order; None if that is no better, or cannot be."""
    source, (name, run) = x if isinstance(x, Tensor) else x[0], ORDERS[type(layer)]
    module = getattr(layer, name)
    while is_exactly(module, nn.Sequential, MLP):
        module = next(iter(module.lins if isinstance(module, MLP) else module), None)
    linears = [*module] if run is _last_power_first else [module]
    modules = [each for _, each in layer.named_modules(remove_duplicate=False)]
    functions = layer.message, layer.aggregate, layer.update, layer.propagate
    if not (
        all(is_exactly(each, Linear, nn.Linear) and modules.count(each) == 1 for each in linears)
        and (run is _product_first or all(each.bias is None for each in linears))
        and all(is_written_in(each, "torch_geometric") for each in functions)
        and is_exactly(layer.aggr_module, *ADDING)
        and can_tile(layer)
        and not (source.is_sparse or is_autocast(source))
        and not getattr(layer, "project", False)
        and not (isinstance(layer, conv.SGConv) and layer.cached)  # sums of features, for all calls
    ):
        return None
    first = multiplies_first(edges.numbering.graph.call_context(), source, *reversed(linears[0].weight.shape))
    if first == (run is _product_last):
        return None
    with source_rows.set_to(PRODUCTS):
        return run(original, layer, linears, x, edges, *args, **kwargs)


def _narrowest(original: Original, layer: Any, /, x: Any, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer in the order in which fewer columns travel."""
    known = isinstance(edge_index, DistributedEdgeIndex) and type(layer) in ORDERS
    out = _reversed(original, layer, x, edge_index, *args, **kwargs) if known else None
    return original(layer, x, edge_index, *args, **kwargs) if out is None else out


REPLACED: Replacements = [(kind, "forward", _narrowest) for kind in ORDERS]
