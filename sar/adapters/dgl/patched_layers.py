"""`patch_dgl`: DGL's layers on distributed graphs. `PATCHED_LAYERS` lists the layers whose methods are replaced.

To add a layer, write a function here, add a line to the table, and add the layer to `tests/parity/conv_layers.py`,
which compares it with DGL on one machine.

A function takes the layer's original method, the layer, the graph and the method's other arguments. It is called for
distributed graphs only.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, partialmethod, wraps
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor, nn

from sar.adapters.dgl.advice import INSTEAD, asked_by_dgl
from sar.adapters.dgl.gat_layers import Forward, dot_gat_conv, gat_conv, gatv2_conv
from sar.adapters.dgl.shim import require_dgl
from sar.comm.collectives import all_max
from sar.config import Config
from sar.core.graph.graph import GraphShardManager, layer_inputs
from sar.core.graph.queries import ALL
from sar.core.modules import as_autocast, is_autocast, is_exactly, views_of_nothing
from sar.core.passing.at_sources import sum_at_sources
from sar.core.passing.messages import (
    COPY_SOURCE,
    PRODUCTS,
    SCALED_SOURCE,
    aggregate,
    copy_to_edges,
    meanwhile,
    multiplies_first,
)
from sar.errors import GraphError
from sar.logging_setup import logger
from sar.nn.edge_softmax import edge_softmax
from sar.nn.statistics import DistributedBN1D, normalise

_FORWARD = "forward"

COPY_PRODUCT, SCALED_PRODUCT = (message._replace(lhs=PRODUCTS) for message in (COPY_SOURCE, SCALED_SOURCE))
"""Named messages: if some workers send products and others send features, the names make them disagree."""


def sage_conv(original: Forward, layer: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None) -> Tensor:
    """`SAGEConv`: the self term is computed while neighbors' rows travel, and the mean is added to it in place.

    With equal widths, we multiply before the mean, which then need not be saved.
    """
    if layer._aggre_type != "mean" or edge_weight is not None:
        return original(layer, graph, feat, edge_weight)
    context, source, destination = layer_inputs(graph, feat, layer.feat_drop)
    exact = is_exactly(layer.fc_self, nn.Linear) and is_exactly(layer.fc_neigh, nn.Linear)
    exact = exact and layer.fc_neigh.bias is None
    if exact:
        shared, source = destination is source, as_autocast(source)
        destination = source if shared else as_autocast(destination)
    width, out_width = layer._in_src_feats, layer._out_feats
    first = multiplies_first(context, source, width, out_width) if exact else width > out_width
    rows = layer.fc_neigh(source) if first else source
    with meanwhile(partial(layer.fc_self, destination)) as own:
        mean = aggregate(context, COPY_PRODUCT if first else COPY_SOURCE, "mean", rows)
    if exact:
        out = own().add_(mean) if first else own().addmm_(mean, as_autocast(layer.fc_neigh.weight).T)
    else:
        out = (mean if first else layer.fc_neigh(mean)) + own()
    out = out if layer.activation is None else layer.activation(out)
    return out if layer.norm is None else layer.norm(out)


def graph_conv(
    original: Forward, layer: Any, graph: Any, feat: Any, weight: Tensor | None = None,
    edge_weight: Tensor | None = None,
) -> Any:  # fmt: skip
    """`GraphConv`: destination norms are factors of messages, and products start from the bias.

    The original creates a tensor of all rows for each of the two. See also `multiplies_first`. Under autocast
    features are converted before they travel, and the result has the dtype that the original's norms and bias give it.
    """
    context, source, _ = layer_inputs(graph, feat)
    relation, norm, dtype = context.relation, layer._norm, source.dtype
    plain = weight is None and edge_weight is None and source.dim() == 2 and source.itemsize > 2
    lacking = not layer._allow_zero_in_degree and relation.has_isolated
    if not plain or lacking:
        return original(layer, graph, feat, weight, edge_weight)
    kernel, bias = layer.weight, layer.bias  # read once: a parametrization such as spectral_norm may count reads
    if kernel is None or kernel.dtype != dtype:
        return original(layer, graph, feat, weight, edge_weight)
    first = multiplies_first(context, source, layer._in_feats, layer._out_feats)
    out = as_autocast(source)
    out = out @ kernel if first else out
    if norm in ("left", "both"):
        sent = relation.degrees(out.dtype, out=True, power=-0.5 if norm == "both" else -1.0)
        out = out.mul_(sent) if first else out * sent
    if norm in ("right", "both"):
        received = relation.degrees(dtype, power=-0.5 if norm == "both" else -1.0)
        out = aggregate(context, SCALED_PRODUCT if first else SCALED_SOURCE, "sum", out, received)
    else:
        out = aggregate(context, COPY_PRODUCT if first else COPY_SOURCE, "sum", out)
    if not first:
        out = out @ kernel if bias is None else torch.addmm(bias, out, kernel)
    out = out if bias is None and norm in ("left", "none") else out.to(dtype)
    if first and bias is not None:
        out = out.add_(bias)
    return out if layer._activation is None else layer._activation(out)


def gin_conv(original: Forward, layer: Any, graph: Any, feat: Any, edge_weight: Tensor | None = None) -> Any:
    """`GINConv`: own rows are added to the sums in place, without tensors of products and of the result.

    A linear layer may come before the sums: see `multiplies_first`.
    """
    context, source, destination = layer_inputs(graph, feat)
    alike = source.shape[1:] == destination.shape[1:] and source.dtype == destination.dtype
    eps = layer._buffers.get("eps")  # None if it is learned or parametrized
    plain = eps is not None and eps.numel() == 1 and eps.dtype == source.dtype
    if edge_weight is not None or not (plain and alike and destination.is_cpu):
        return original(layer, graph, feat, edge_weight)
    linear, is_sum = layer.apply_func, layer._aggregator_type != "max" and not is_autocast(source)
    first = is_sum and is_exactly(linear, nn.Linear)
    first = first and multiplies_first(context, source, linear.in_features, linear.out_features)
    if first:
        rows = nn.functional.linear(source, linear.weight)
        source, destination = rows, rows if destination is source else nn.functional.linear(destination, linear.weight)
    out = aggregate(context, COPY_PRODUCT if first else COPY_SOURCE, layer._aggregator_type, source)
    out = out.add_(destination, alpha=(1 + eps).item())
    if first:
        out = out if linear.bias is None else out.add_(linear.bias)
    elif linear is not None:
        out = linear(out)
    return out if layer.activation is None else layer.activation(out)


def edge_weight_norm(original: Forward, layer: Any, graph: Any, edge_weight: Tensor) -> Tensor:
    """`EdgeWeightNorm`: the original sums weights at sources on the reversed graph; this graph cannot be reversed."""
    fn = require_dgl().function
    context = graph.call_context()
    with graph.local_scope():
        if edge_weight.dim() != 1:
            raise GraphError(f"EdgeWeightNorm takes one weight an edge, (E,); got {tuple(edge_weight.shape)}.")
        if layer._norm == "both" and not bool((edge_weight > 0).all()):
            raise GraphError("EdgeWeightNorm with norm='both' needs positive edge weights; some are not.")
        graph.edata["w"] = edge_weight
        if layer._norm == "none":
            return edge_weight
        graph.update_all(fn.copy_e("w", "m"), fn.sum("m", "in"))
        received = graph.dstdata["in"] + layer._eps
        power = -0.5 if layer._norm == "both" else -1.0
        graph.dstdata["in"] = received**power
        graph.apply_edges(fn.v_mul_e("in", "w", "normalised"))
        normalised: Tensor = graph.edata["normalised"]
        if layer._norm == "both":
            sent = (sum_at_sources(context, edge_weight) + layer._eps) ** power
            normalised = copy_to_edges(context, sent) * normalised
        return normalised


def pna_tower(original: Forward, layer: Any, graph: Any, node_feat: Tensor, edge_feat: Tensor | None = None) -> Tensor:
    """A tower of `PNAConv` or `DGNConv`: the original divides by the number of local nodes and normalises over them."""
    scale = graph.num_nodes_global() ** -0.5
    with graph.local_scope():
        graph.ndata["h"] = node_feat
        if layer.edge_feat_size > 0:
            if edge_feat is None:
                raise GraphError("The layer was made with edge_feat_size > 0; pass edge features.")
            graph.edata["a"] = edge_feat
        graph.update_all(layer.message, layer.reduce_func)
        h = layer.U(torch.cat([node_feat, graph.ndata["h_neigh"]], dim=-1)) * scale
        dropped: Tensor = layer.dropout(normalising_together(lambda norm, _: norm(h), layer.batchnorm, graph))
        return dropped


def gated_graph_conv(original: Forward, layer: Any, graph: Any, feat: Tensor, etypes: Tensor | None = None) -> Tensor:
    """`GatedGraphConv`: the original skips an edge type without edges, which another worker may have."""
    fn = require_dgl().function
    with graph.local_scope():
        if etypes is None and layer._n_etypes > 1:
            raise GraphError(f"The layer was made for {layer._n_etypes} edge types; pass etypes.")
        if etypes is not None and len(etypes) and not 0 <= int(etypes.min()) <= int(etypes.max()) < layer._n_etypes:
            raise GraphError(
                f"Edge types reach from {etypes.min()} to {etypes.max()}; expected [0, {layer._n_etypes})."
            )
        feat = nn.functional.pad(feat, (0, layer._out_feats - feat.shape[1]))
        for _ in range(layer._n_steps):
            total = torch.zeros_like(feat)
            for kind, linear in enumerate(layer.linears):
                if etypes is None:
                    graph.ndata["h"] = linear(feat)
                    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "a"))
                elif is_exactly(linear, nn.Linear):  # apply it to nodes, which are fewer than edges
                    graph.ndata["h"] = linear(feat)
                    graph.edata["is_kind"] = (etypes == kind).to(feat.dtype).unsqueeze(1)
                    graph.update_all(fn.u_mul_e("h", "is_kind", "m"), fn.sum("m", "a"))
                else:
                    rows = (etypes == kind).nonzero().squeeze(1)
                    made = linear(copy_to_edges(graph.call_context(), feat)[rows])
                    graph.edata["made"] = made.new_zeros(len(etypes), made.shape[1]).index_copy(0, rows, made)
                    graph.update_all(fn.copy_e("made", "m"), fn.sum("m", "a"))
                total = total + graph.ndata["a"]
            feat = layer.gru(total, feat)
        return feat


def label_propagation(original: Forward, layer: Any, graph: Any, labels: Tensor, mask: Tensor | None = None) -> Tensor:
    """`LabelPropagation`: the original counts the classes of one worker."""
    if labels.dim() > 1 and labels.shape[1] != 1:
        return original(layer, graph, labels, mask)
    classes = 1 + all_max(int(labels.max()) if len(labels) else -1)
    scores = nn.functional.one_hot(labels.view(-1), max(classes, 2))  # a single column would count as labels again
    return original(layer, graph, scores, mask)[:, :classes]


def in_any_order(original: Forward, layer: Any, graph: Any, *args: Any, presorted: bool = False, **kwargs: Any) -> Any:
    """`RelGraphConv`, `HGTConv`: ignore `presorted`, because a worker's edges are never sorted by type."""
    return original(layer, graph, *args, presorted=False, **kwargs)


def typed_linear(original: Forward) -> Forward:
    """`TypedLinear`, used in `RelGraphConv` and `HGTConv`: in torch on GPUs, because most DGL builds lack CUDA."""

    @wraps(original)
    def forward(layer: Any, x: Tensor, x_type: Tensor, sorted_by_type: bool = False) -> Any:
        if x.is_cpu or layer.regularizer == "bdd":  # the original uses torch
            return original(layer, x, x_type, sorted_by_type)
        weights = layer.get_weight()  # (T, D, O)
        order, counts = x_type.argsort(stable=True), torch.bincount(x_type, minlength=len(weights)).tolist()
        if len(counts) != len(weights):
            raise GraphError(f"Types reach to {len(counts) - 1}; the layer was made for {len(weights)}.")
        rows = x.index_select(0, order).split(counts)
        product = torch.cat([of_type @ weight for of_type, weight in zip(rows, weights, strict=True)])
        return product.index_select(0, order.argsort())

    return forward


def group_rev_res(original: Forward, layer: Any, graph: Any, x: Tensor, *args: Any) -> Any:
    """`GroupRevRes`: the original frees its input's memory, which torch refuses while a kernel's array shares it."""
    return original(layer, graph, x if x.untyped_storage().resizable() else x.clone(), *args)


def group_rev_res_inverse(original: Forward, layer: Any, graph: Any, y: Tensor, *args: Any) -> Any:
    """The inverse of `GroupRevRes`: the original frees `y`, but kernels share slices of it."""
    return original(layer, graph, y.clone(), *args)


def normalising_together(original: Forward, layer: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `original` with the batch norms of the layer, or the layer itself, over the rows of all workers."""
    norms = (module for module in layer.modules() if isinstance(module, (nn.BatchNorm1d, nn.LazyBatchNorm1d)))
    norms = (norm for norm in norms if not isinstance(norm, DistributedBN1D))
    modules: list[Any] = [norm for norm in norms if norm.training or norm.running_mean is None]
    for module in modules:
        if _FORWARD in vars(module) or type(module).forward is not nn.BatchNorm1d.forward:
            raise GraphError(f"{module} overrides forward; expected torch's, or a sar.DistributedBN1D.")
    for module in modules:
        module.__dict__[_FORWARD] = partial(normalise, module, group=graph._structure.group)
    try:
        return original(layer, graph, *args, **kwargs)
    finally:
        for module in modules:
            del module.__dict__[_FORWARD]


@contextmanager
def local_scope(graph: Any, original: Forward) -> Iterator[None]:
    """`DGLGraph.local_scope` that lets layers run on empty batches, which workers with few seeds get."""
    with original(graph), views_of_nothing(graph.num_edges()):
        yield


class LayerPatch(NamedTuple):
    """A method of a layer, and its replacement on distributed graphs."""

    layer: str  # its name in `dgl.nn.pytorch`
    distributed: Forward  # called with the original method, the layer, the graph and the method's other arguments
    method: str = _FORWARD
    since: str = "1.1"  # the first version of DGL with this layer, if the oldest supported one lacks it


PATCHED_LAYERS = [
    LayerPatch("conv.GraphConv", graph_conv),
    LayerPatch("conv.SAGEConv", sage_conv),
    LayerPatch("conv.GINConv", gin_conv),
    LayerPatch("conv.GATConv", gat_conv),
    LayerPatch("conv.GATv2Conv", gatv2_conv),
    LayerPatch("conv.DotGatConv", dot_gat_conv),
    LayerPatch("conv.EdgeWeightNorm", edge_weight_norm),
    LayerPatch("conv.GatedGraphConv", gated_graph_conv),
    LayerPatch("conv.pnaconv.PNAConvTower", pna_tower),
    LayerPatch("conv.RelGraphConv", in_any_order),
    LayerPatch("conv.HGTConv", in_any_order),
    LayerPatch("conv.GroupRevRes", group_rev_res),
    LayerPatch("conv.GroupRevRes", group_rev_res_inverse, method="_inverse"),
    LayerPatch("conv.EdgeConv", normalising_together),
    LayerPatch("conv.TWIRLSConv", normalising_together),
    LayerPatch("conv.GatedGCNConv", normalising_together, since="2.1"),
    LayerPatch("utils.LabelPropagation", label_propagation),
]
"""Every layer that `patch_dgl` changes, in addition to `edge_softmax` and `TypedLinear`."""


# -- replacing DGL's methods

_READOUTS = ("readout_nodes", "softmax_nodes", "topk_nodes")
"""Functions that would mistake a worker's nodes for all. Edge readouts already fail without `batch_num_edges`."""

_replaced: list[tuple[Any, str, Any]] = []
"""Replacements: the module, class or function, the replaced name in it, and the original."""


def patch_if_imported() -> None:
    """Call `patch_dgl` if DGL is imported and `Config.patch_dgl` allows it."""
    if Config.patch_dgl and sys.modules.get("dgl") is not None:
        patch_dgl()


def patch_dgl() -> None:
    """Patch DGL's layers to run on distributed graphs. On ordinary graphs they are unchanged.

    `construct_full_graph`, `construct_mfgs` and `convert_dist_graph` call it if DGL is imported, unless
    `Config.patch_dgl` is False. Replaces DGL's `edge_softmax`, under whatever name it was imported; the methods of the
    layers in `patched_layers.PATCHED_LAYERS`; and readouts and explainers, which raise a `GraphError` on distributed
    graphs. Further calls have no effect. `unpatch_dgl` undoes it.

    Raises:
        DglError: DGL cannot be imported.
    """
    if _replaced:
        return
    dgl = require_dgl()
    layers = importlib.import_module("dgl.nn.pytorch")
    _take_over(importlib.import_module("dgl.ops.edge_softmax").edge_softmax, _edge_softmax)
    for name in _READOUTS:
        _take_over(getattr(dgl.readout, name), _refuse)
    for explainer in vars(layers.explain).values():
        for name, method in list(vars(explainer).items()) if isinstance(explainer, type) else ():
            if name.startswith(("explain_", "train_")):
                _replace(explainer, name, _on_either_graph(method, _refuse_to_explain))
    _replace(layers.TypedLinear, _FORWARD, typed_linear(layers.TypedLinear.forward))
    _replace(dgl.DGLGraph, "local_scope", partialmethod(local_scope, dgl.DGLGraph.local_scope))
    for patch in PATCHED_LAYERS:
        if Version(dgl.__version__) >= Version(patch.since):
            layer = attrgetter(patch.layer)(layers)
            method = getattr(layer, patch.method)
            _replace(layer, patch.method, _on_either_graph(method, patch.distributed, guarded=True))
    logger.info("DGL's layers are patched for distributed graphs (sar.Config.patch_dgl)")


def unpatch_dgl() -> None:
    """Undo `patch_dgl`."""
    while _replaced:
        owner, name, original = _replaced.pop()
        setattr(owner, name, original)


def patched_edge_softmax(graph: Any, logits: Any, eids: Any = ALL, norm_by: str = "dst") -> Any:
    """`sar.edge_softmax` on distributed graphs, DGL's `edge_softmax` on ordinary graphs."""
    if isinstance(graph, GraphShardManager):
        return edge_softmax(graph, logits, eids, norm_by)
    return importlib.import_module("dgl.ops.edge_softmax").edge_softmax(graph, logits, eids=eids, norm_by=norm_by)


def _edge_softmax(original: Forward, graph: GraphShardManager, *args: Any, **kwargs: Any) -> Any:
    return edge_softmax(graph, *args, **kwargs)


def _take_over(function: Any, distributed: Forward) -> None:
    """Replace a function by `distributed` on distributed graphs, under whatever name it was imported or stored.

    The function's code is replaced by that of `call`, which finds the other function in the globals of DGL's module.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return taken_over(*args, **kwargs)  # type: ignore[name-defined] # noqa: F821

    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__wrapped__ = original  # for its signature
    name = f"_sar_{function.__name__}"
    function.__globals__[name] = _on_either_graph(original, distributed)
    code = call.__code__.replace(co_names=(name,), co_name=function.__name__)
    for attribute, value in (("__code__", code), ("__defaults__", None)):
        _replace(function, attribute, value)


def _on_either_graph(original: Forward, distributed: Forward, *, guarded: bool = False) -> Forward:
    """Return a function or method that calls `distributed` on distributed graphs and `original` on all others.

    With `guarded`, its errors are sent to all workers.
    """
    parameters = list(inspect.signature(original).parameters)
    position = parameters.index("graph") if "graph" in parameters else 1 if parameters[0] == "self" else 0

    @wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        graph = args[position] if len(args) > position else kwargs.get(parameters[position])
        if not isinstance(graph, GraphShardManager):
            return original(*args, **kwargs)
        kwargs.pop(parameters[position], None)
        with graph._structure.group.guard() if guarded else nullcontext():
            return distributed(original, *args[:position], graph, *args[position + 1 :], **kwargs)

    return either


def _refuse(original: Forward, graph: GraphShardManager, *args: Any, **kwargs: Any) -> Any:
    name = original.__name__
    raise GraphError(f"{asked_by_dgl()[0] or f'dgl.{name}'} takes no distributed graph: {INSTEAD[name]}.")


def _refuse_to_explain(original: Forward, explainer: Any, *_: Any, **__: Any) -> Any:
    raise GraphError(
        f"{type(explainer).__name__}.{original.__name__} takes no distributed graph, because each worker would learn "
        "a separate mask. Explain on one machine, with the graph before partitioning and the model of any worker."
    )


def _replace(owner: Any, name: str, value: Any) -> None:
    _replaced.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
