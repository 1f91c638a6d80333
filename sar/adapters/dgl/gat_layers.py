"""DGL's attention layers on distributed graphs, in one pass over the edges and without tensors of their number.

Each function computes the `forward` of a layer, with the layer's own parameters, for node features (N, D). Other
arguments go to DGL's own `forward`, which is exact on distributed graphs too, but holds the scores of all edges.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor, nn

from sar.core.eager import is_exactly
from sar.core.graph.graph import GraphShardManager
from sar.core.passing.attention import attention, recompute_linear
from sar.errors import GraphError
from sar.kernels.ops import Score
from sar.logging_setup import logger

Features = Tensor | tuple[Tensor, Tensor]
Forward = Callable[..., Any]


def in_one_pass(one_pass: Forward) -> Forward:
    """`one_pass` for arguments that it serves, DGL's own forward for others, with the signature of `patched_layers`."""

    @wraps(one_pass)
    def forward(
        original: Forward,
        layer: Any,
        graph: GraphShardManager,
        feat: Features,
        *args: Any,
        get_attention: bool = False,
        **kwargs: Any,
    ) -> Any:
        if args and not isinstance(args[-1], Tensor | None):  # the last parameter, given by position
            *args, get_attention = args  # type: ignore[assignment]
        is_served = _is_served(layer, feat)
        if not is_served:
            _say_once(type(layer).__name__)
        if get_attention or not is_served:
            return original(layer, graph, feat, *args, get_attention=get_attention, **kwargs)
        with graph.local_scope():
            if not layer._allow_zero_in_degree and bool((graph.in_degrees() == 0).any()):
                raise GraphError("There are nodes without in-edges; add self-loops, or set allow_zero_in_degree=True.")
            return one_pass(layer, graph, feat, *args, **kwargs)

    return forward


def _is_served(layer: Any, feat: Features) -> bool:
    """Whether features are (N, D), and the layer's modules are a LeakyReLU that increases and a Dropout."""
    are_rows = all(x.dim() == 2 for x in (feat if isinstance(feat, tuple) else (feat,)))
    if not are_rows or not hasattr(layer, "leaky_relu"):  # as DotGatConv
        return are_rows
    relu, drop = layer.leaky_relu, layer.attn_drop
    exact = is_exactly(relu, nn.LeakyReLU) and is_exactly(drop, nn.Dropout)
    return exact and relu.negative_slope >= 0 and 0 <= drop.p <= 1


@cache
def _say_once(layer: str) -> None:
    """Log that a class of layers cannot use one pass, the first time."""
    logger.warning(
        "%s runs DGL's own forward, which holds the scores of all edges in memory; the one pass needs features (N, D), "
        "a LeakyReLU with a slope of at least 0, and a Dropout, both without hooks",
        layer,
    )


@in_one_pass
def gat_conv(layer: Any, graph: GraphShardManager, feat: Features, edge_weight: Tensor | None = None) -> Tensor:
    """`GATConv`: scores are leaky_relu(attn_l . W h_src + attn_r . W h_dst)."""
    source, destination = ends_of(graph, feat, layer.feat_drop)
    project_src, project_dst = (layer.fc_src, layer.fc_dst) if hasattr(layer, "fc_src") else (layer.fc, layer.fc)
    x = _heads(layer, project_src(source))
    y = _heads(layer, project_dst(destination)) if isinstance(feat, tuple) else _own(graph, x)
    result = attention(
        graph.call_context(),
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


@in_one_pass
def gatv2_conv(layer: Any, graph: GraphShardManager, feat: Features) -> Tensor:
    """`GATv2Conv`: scores are attn . leaky_relu(W_src h_src + W_dst h_dst)."""
    source, destination = ends_of(graph, feat, layer.feat_drop)
    x = _heads(layer, layer.fc_src(source))
    shared = layer.share_weights and not isinstance(feat, tuple)
    y = _own(graph, x) if shared else _heads(layer, layer.fc_dst(destination))
    result = attention(
        graph.call_context(),
        Score.DYNAMIC,
        x,
        y,
        attn=layer.attn[0],
        factor=layer.leaky_relu.negative_slope,
        dropout=layer.attn_drop.p if layer.attn_drop.training else 0.0,
        recompute=recompute_linear(layer.fc_src, source, (layer._num_heads, layer._out_feats)),
    )
    return _finish(layer, result, destination, None)


@in_one_pass
def dot_gat_conv(layer: Any, graph: GraphShardManager, feat: Features) -> Tensor:
    """`DotGatConv`: scores are products of projected features over the square root of their length."""
    if not isinstance(feat, tuple):
        source, project_src = feat, layer.fc
    elif graph.srcdata is graph.dstdata:
        # The layer keeps the features of both ends under one name: if sources are destinations, it has the latter.
        source, project_src = feat[1], layer.fc_dst
    else:
        source, project_src = feat[0], layer.fc_src
    x = _heads(layer, project_src(source))
    y = _own(graph, x) if project_src is not getattr(layer, "fc_src", None) else _heads(layer, layer.fc_dst(feat[1]))
    recompute = recompute_linear(project_src, source, (layer._num_heads, layer._out_feats))
    return attention(graph.call_context(), Score.DOT, x, y, factor=layer._out_feats**-0.5, recompute=recompute)


def ends_of(graph: GraphShardManager, feat: Features, drop: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Features of the sources and the destinations, after dropout; `GraphError` if they do not fit."""
    with graph.local_scope():  # a frame takes a row for each node, dense and on the graph's device
        graph.srcdata["h"], graph.dstdata["h"] = feat if isinstance(feat, tuple) else (feat, _own(graph, feat))
    if isinstance(feat, tuple):
        return drop(feat[0]), drop(feat[1])
    source = drop(feat)
    return source, _own(graph, source)


def _own(graph: GraphShardManager, values: Tensor) -> Tensor:
    """The rows of the destinations among (N_src, ...) values: on a message flow graph they come first."""
    return values[: graph.num_dst_nodes()] if graph.is_block else values


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
