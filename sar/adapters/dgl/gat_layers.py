"""DGL's attention layers on distributed graphs, in one pass over the edges and without tensors of their number.

Each function computes the `forward` of a layer, with the layer's own parameters, for node features (N, D). Other
arguments go to DGL's own `forward`, which is exact on distributed graphs too, but holds the scores of all edges.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

from sar.core.eager import is_exactly, views_of_nothing
from sar.core.graph.graph import Features, GraphShardManager, layer_inputs, own_rows
from sar.core.passing.attention import attention, recompute_linear
from sar.errors import GraphError
from sar.kernels.ops import Score
from sar.logging_setup import logger

Forward = Callable[..., Any]


def is_served(layer: Any, feat: Features) -> bool:
    """Whether features are (N, D), and the layer's modules are a LeakyReLU that increases and a Dropout."""
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
    _refuse_isolated(layer, context.relation.has_isolated)
    project_src, project_dst = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc, layer.fc)
    with views_of_nothing(context.relation.num_edges):
        x = _heads(layer, project_src(source))
        y = _heads(layer, project_dst(destination)) if isinstance(feat, tuple) else own_rows(context, x)
        result = attention(
            context,
            Score.ADDITIVE,
            x,
            y,
            attn=layer.attn_l[0],
            attn_dst=layer.attn_r[0],
            factor=layer.leaky_relu.negative_slope,
            dropout=layer.attn_drop.p if layer.attn_drop.training else 0.0,
            edge_weight=edge_weight,
            recompute=recompute_linear(project_src, source, (layer._num_heads, layer._out_feats)),
        )
        return _finish(layer, result, destination, layer.bias if layer.has_explicit_bias else None)


def gatv2_conv(
    original: Forward, layer: Any, graph: GraphShardManager, feat: Features, get_attention: bool = False
) -> Any:
    """`GATv2Conv`: scores are attn . leaky_relu(W_src h_src + W_dst h_dst)."""
    if not is_served(layer, feat) or get_attention:
        return original(layer, graph, feat, get_attention)
    context, source, destination = layer_inputs(graph, feat, layer.feat_drop)
    _refuse_isolated(layer, context.relation.has_isolated)
    with views_of_nothing(context.relation.num_edges):
        x = _heads(layer, layer.fc_src(source))
        shared = layer.share_weights and not isinstance(feat, tuple)
        y = own_rows(context, x) if shared else _heads(layer, layer.fc_dst(destination))
        result = attention(
            context,
            Score.DYNAMIC,
            x,
            y,
            attn=layer.attn[0],
            factor=layer.leaky_relu.negative_slope,
            dropout=layer.attn_drop.p if layer.attn_drop.training else 0.0,
            recompute=recompute_linear(layer.fc_src, source, (layer._num_heads, layer._out_feats)),
        )
        return _finish(layer, result, destination, None)


def dot_gat_conv(
    original: Forward, layer: Any, graph: GraphShardManager, feat: Features, get_attention: bool = False
) -> Any:
    """`DotGatConv`: scores are products of projected features over the square root of their length."""
    if not is_served(layer, feat) or get_attention:
        return original(layer, graph, feat, get_attention)
    context = graph.call_context()
    _refuse_isolated(layer, context.relation.has_isolated)
    shares_ends = graph.srcdata is graph.dstdata
    if not isinstance(feat, tuple):
        source, project_src = feat, layer.fc
    elif shares_ends:
        # The layer keeps the features of both ends under one name: if sources are destinations, it has the latter.
        source, project_src = feat[1], layer.fc_dst
    else:
        source, project_src = feat[0], layer.fc_src
    x = _heads(layer, project_src(source))
    several = isinstance(feat, tuple) and not shares_ends
    y = _heads(layer, layer.fc_dst(feat[1])) if several else own_rows(context, x)
    recompute = recompute_linear(project_src, source, (layer._num_heads, layer._out_feats))
    return attention(context, Score.DOT, x, y, factor=layer._out_feats**-0.5, recompute=recompute)


def _refuse_isolated(layer: Any, has_isolated: bool) -> None:
    if has_isolated and not layer._allow_zero_in_degree:
        raise GraphError("There are nodes without in-edges; add self-loops, or set allow_zero_in_degree=True.")


def _heads(layer: Any, projected: Tensor) -> Tensor:
    return projected.view(len(projected), layer._num_heads, layer._out_feats)


def _finish(layer: Any, result: Tensor, destination: Tensor, bias: Tensor | None) -> Tensor:
    """Add the layer's residual connection and bias, if any, and apply its activation."""
    if layer.res_fc is not None:
        residual = layer.res_fc(destination)
        result = result + residual.view(len(residual), residual.shape[1] // layer._out_feats, layer._out_feats)
    if bias is not None:
        result = result + bias.view(layer._num_heads, layer._out_feats)
    return layer.activation(result) if layer.activation else result
