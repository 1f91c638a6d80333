"""DGL's attention layers on distributed graphs, in one pass over the edges and without tensors of size E.

Each function computes the `forward` of a layer, with its parameters, for node features (N, D). Other arguments go to
DGL's `forward`, which is also exact on distributed graphs, but stores the scores of all edges.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from sar.core.collective import CallContext
from sar.core.graph.graph import Features, GraphShardManager, layer_inputs, own_rows
from sar.core.modules import as_autocast, is_autocast, is_exactly, views_of_nothing
from sar.core.passing.attention import attention, recompute_linear
from sar.errors import GraphError
from sar.kernels.ops import Score
from sar.logging_setup import logger

Forward = Callable[..., Any]


def is_served(layer: Any, feat: Features) -> bool:
    """Whether features are (N, D), and the layer's modules are an increasing LeakyReLU and a Dropout."""
    served = feat[0].dim() == feat[1].dim() == 2 if isinstance(feat, tuple) else feat.dim() == 2
    if served and hasattr(layer, "leaky_relu"):  # DotGatConv has none
        relu, drop = layer.leaky_relu, layer.attn_drop
        served = is_exactly(relu, nn.LeakyReLU) and is_exactly(drop, nn.Dropout)
        served = served and relu.negative_slope >= 0 and 0 <= drop.p <= 1
    if not served:
        _say_once(type(layer).__name__)
    return served


@cache
def _say_once(layer: str) -> None:
    """Log that a class of layers cannot use one pass, the first time."""
    logger.warning(
        "%s runs DGL's own forward, which holds the scores of all edges in memory; the one pass needs features (N, D), "
        "a LeakyReLU with a slope of at least 0, and a Dropout, both without hooks",
        layer,
    )


def gat_conv(
    original: Forward, layer: Any, graph: GraphShardManager, feat: Features, edge_weight: Tensor | None = None,
    get_attention: bool = False,
) -> Any:  # fmt: skip
    """`GATConv`: scores are leaky_relu(attn_l . W h_src + attn_r . W h_dst)."""
    if not is_served(layer, feat) or get_attention:
        return original(layer, graph, feat, edge_weight, get_attention)
    context, source, destination = layer_inputs(graph, feat, layer.feat_drop)
    projections = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc, layer.fc)
    own = destination if isinstance(feat, tuple) else None
    vectors = {"attn": layer.attn_l[0], "attn_dst": layer.attn_r[0]}
    result = _attend(layer, context, Score.ADDITIVE, projections, source, own, edge_weight=edge_weight, **vectors)
    return _finish(layer, result, destination, layer.bias if layer.has_explicit_bias else None)


def gatv2_conv(
    original: Forward, layer: Any, graph: GraphShardManager, feat: Features, get_attention: bool = False
) -> Any:
    """`GATv2Conv`: scores are attn . leaky_relu(W_src h_src + W_dst h_dst)."""
    if not is_served(layer, feat) or get_attention:
        return original(layer, graph, feat, get_attention)
    context, source, destination = layer_inputs(graph, feat, layer.feat_drop)
    own = None if layer.share_weights and not isinstance(feat, tuple) else destination
    projections = layer.fc_src, layer.fc_dst
    result = _attend(layer, context, Score.DYNAMIC, projections, source, own, attn=layer.attn[0])
    return _finish(layer, result, destination, None)


def dot_gat_conv(
    original: Forward, layer: Any, graph: GraphShardManager, feat: Features, get_attention: bool = False
) -> Any:
    """`DotGatConv`: scores are dot products of projected features divided by the square root of their length."""
    if not is_served(layer, feat) or get_attention:
        return original(layer, graph, feat, get_attention)
    own: Tensor | None = None
    if not isinstance(feat, tuple):
        projections, source = (layer.fc, layer.fc), feat
    elif graph.srcdata is graph.dstdata:
        # The layer stores both ends' features under one name: if sources are destinations, destinations overwrite.
        projections, source = (layer.fc_dst, layer.fc_dst), feat[1]
    else:
        projections, (source, own) = (layer.fc_src, layer.fc_dst), feat
    return _attend(layer, graph.call_context(), Score.DOT, projections, source, own)


def _attend(
    layer: Any, context: CallContext, score: Score, projections: tuple[Any, Any], source: Tensor, own: Tensor | None,
    **operands: Tensor | None,
) -> Tensor:  # fmt: skip
    """Apply the layer's attention, (N_dst, H, C), to projected features of the sources.

    Destinations are projected from `own`; if it is None they are the first sources.
    """
    if context.relation.has_isolated and not layer._allow_zero_in_degree:
        raise GraphError("There are nodes without in-edges; add self-loops, or set allow_zero_in_degree=True.")
    heads = layer._num_heads, layer._out_feats
    factor, dropout = heads[1] ** -0.5, 0.0  # of DotGatConv
    if score is not Score.DOT:
        drop = layer.attn_drop
        factor, dropout = layer.leaky_relu.negative_slope, drop.p if drop.training else 0.0
    if is_autocast(source) and is_exactly(projections[0], nn.Linear):
        rows = as_autocast(source)
        own, source = rows if own is source else own, rows
    with views_of_nothing(context.relation.num_edges):
        x, y = projections[0](source), None if own is None else projections[1](own)
        x = x.view(len(x), *heads)
        y = own_rows(context, x) if y is None else y.view(len(y), *heads)
        recompute = recompute_linear(projections[0], source, heads)
        return attention(context, score, x, y, factor=factor, dropout=dropout, recompute=recompute, **operands)


def _finish(layer: Any, result: Tensor, destination: Tensor, bias: Tensor | None) -> Tensor:
    """Add the layer's residual connection and bias, if any, and apply its activation."""
    if layer.res_fc is not None:
        residual = layer.res_fc(destination)
        result = result + residual.view(len(residual), residual.shape[1] // layer._out_feats, layer._out_feats)
    if bias is not None:
        result = result + bias.view(layer._num_heads, layer._out_feats)
    return layer.activation(result) if layer.activation else result
