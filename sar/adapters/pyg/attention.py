"""Attention of PyTorch Geometric's layers in one pass over the edges, without tensors of size E.

[Note: attention in one pass]
GATConv and GATv2Conv compute a weight for each edge (`edge_updater`), and pass it to `propagate`. If nothing else uses
the weights, `edge_updater` only returns `Weights`, which `propagate` recognises. The other layers call `softmax` in
`message`. In both cases scores are computed and used tile by tile. GATConv, GATv2Conv and TransformerConv without edge
features use the engine's attention; other layers use their own functions, in which `softmax` returns exponentials
([Note: softmax in a message]). The rest of the layers is unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing, aggr, conv

from sar.adapters.pyg.edge_index import DistributedEdgeIndex
from sar.adapters.pyg.guarded import Original, Replacements
from sar.core.modules import is_written_in
from sar.core.passing.attention import attention
from sar.core.passing.batches import EdgeBatch
from sar.core.passing.reducers import PEAKS, by_head
from sar.host.per_thread import PerThread
from sar.kernels.ops import Score

GAT = (conv.GATConv, conv.GATv2Conv)
WITH_SOFTMAX = (
    *GAT,
    conv.AGNNConv,
    conv.GeneralConv,
    conv.HANConv,
    conv.HEATConv,
    conv.HGTConv,
    conv.PointTransformerConv,
    conv.RGATConv,
    conv.SuperGATConv,
    conv.TransformerConv,
)
"""Layers whose messages are proportional to one softmax over in-edges, head by head."""

RETURNING = (conv.FAConv, *GAT, conv.RGATConv, conv.TransformerConv)
"""Layers that can return the weights of edges (`return_attention_weights`)."""

SOFTMAX_ARGUMENTS: dict[str, Any] = {
    **dict.fromkeys(
        ("index", "edge_index_i"), torch.zeros(1, dtype=torch.int64, device="cpu")
    ),  # GATConv makes none if it is empty
    **dict.fromkeys(("ptr", "size_i", "dim_size")),
}
"""Arguments that these layers only pass to `softmax`, which ignores them here."""

METHODS = ("message", "edge_update", "update", "aggregate", "get_attention", "message_basic")
"""Methods that a subclass may override."""


@dataclass(frozen=True)
class Weights:
    """Placeholder for the weights of edges, which are computed on demand."""

    updater: Callable[..., Tensor]  # the original `edge_updater`
    edges: DistributedEdgeIndex
    given: dict[str, Any]  # the arguments of `edge_updater`

    def make(self, layer: MessagePassing) -> Tensor:
        """The weights of all edges, (E, H)."""
        return self.updater(layer, self.edges, **self.given)


def in_one_pass(layer: MessagePassing) -> bool:
    """Whether `softmax` may return exponentials to the layer in this call."""
    if not isinstance(layer, WITH_SOFTMAX) or not isinstance(layer.aggr_module, aggr.SumAggregation):
        return False
    if isinstance(layer, conv.RGATConv) and (layer.mod or layer.attention_mechanism != "across-relation"):
        return False
    # Outside its forward the layer might return the weights.
    if layer.__dict__.get("_returns_weights", isinstance(layer, RETURNING)) or layer._edge_update_forward_pre_hooks:
        return False
    own = [getattr(layer, name, None) for name in METHODS]
    unchanged = all(method is None or is_written_in(method, "torch_geometric") for method in own)
    return unchanged and not layer._edge_update_forward_hooks


def attend(layer: MessagePassing, edges: DistributedEdgeIndex, given: dict[str, Any]) -> Tensor | None:
    """Compute `propagate`, (N_dst, H, C), by the engine's attention; None if it lacks an option of the layer."""
    weights, dropout = given.get("alpha"), getattr(layer, "dropout", 0.0) if layer.training else 0.0
    if not isinstance(layer, (conv.TransformerConv, *GAT)) or not 0 <= dropout <= 1:
        return None
    if not isinstance(weights, Weights) and not in_one_pass(layer):
        return None
    context = edges.passes[0].call_context()
    if isinstance(layer, conv.TransformerConv) and layer.lin_edge is None and given.get("edge_attr") is None:
        query, value, size = given["query"], given["value"], layer.out_channels
        both = torch.cat([given["key"], value], -1)  # sent and summed together; scores only read the keys
        query = torch.cat([query, torch.zeros_like(query)], -1)
        out = attention(context, Score.DOT, both, query, factor=size**-0.5, dropout=dropout)
        return out[..., size:].contiguous()
    if not isinstance(weights, Weights) or weights.given.get("edge_attr") is not None or layer.negative_slope < 0:
        return None
    source, destination = given["x"]
    if not isinstance(destination, Tensor):
        return None
    call = partial(attention, context, factor=layer.negative_slope, dropout=dropout)
    if isinstance(layer, conv.GATConv):
        return call(Score.ADDITIVE, source, destination, attn=layer.att_src[0], attn_dst=layer.att_dst[0])
    return call(Score.DYNAMIC, source, destination, attn=layer.att[0])


def message(layer: MessagePassing, batch: EdgeBatch, others: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the messages of the layer on some edges, with the exponentials of its softmax in `weight`.

    The batch holds the arguments of `message` that have rows, and `others` the rest.
    """
    exponentials: list[Tensor] = []
    rows = {name: values.movedim(0, layer.node_dim) for side in (batch.src, batch.dst) for name, values in side.items()}
    given = {**rows, **batch.data, **others}
    with _asked.set_to((batch, exponentials)):
        names = layer.inspector.get_param_names
        if isinstance(given.get("alpha"), Weights):
            given["alpha"] = layer.edge_update(**{name: given[name] for name in names("edge_update")})
        made = layer.message(**{name: given[name] for name in names("message") if name in given})
    if isinstance(layer.__dict__.get("_alpha"), Tensor):
        layer._alpha = layer._alpha.new_empty(0)  # nobody reads it
    sent = {"message": made.movedim(layer.node_dim, 0)}
    return {**sent, "weight": exponentials[0]} if exponentials else sent


class Sums(NamedTuple):
    """Sums over the in-edges of each destination."""

    made: dict[str, Tensor]  # sums of the messages, and the maximum scores that exponentials are relative to
    in_degrees: Tensor  # (N_dst,)


def normalised(parts: Sequence[Sums]) -> Tensor:
    """Combine several parts of a node's in-edges, (N_dst, ...), with one softmax if they are weighted."""
    made = [part.made for part in parts]
    totals, shape = [each["message"] for each in made], made[0]["message"].shape
    if "weight" not in made[0]:
        return totals[0]
    peaks, weights = [each[PEAKS] for each in made], [by_head(each["weight"]) for each in made]
    totals = [by_head(total, peaks[0].shape[1]) for total in totals]
    if len(parts) > 1:
        greatest = reduce(torch.maximum, peaks)
        shrink = [(peak - greatest.masked_fill(greatest == -torch.inf, 0)).exp() for peak in peaks]
        totals = [total * factor.unsqueeze(2) for total, factor in zip(totals, shrink, strict=True)]
        weights = [weight * factor for weight, factor in zip(weights, shrink, strict=True)]
    in_degrees = reduce(torch.add, [part.in_degrees for part in parts])
    weight = reduce(torch.add, weights).masked_fill((in_degrees == 0).unsqueeze(1), 1)
    return (reduce(torch.add, totals) / weight.unsqueeze(2)).view(shape)


_asked: PerThread[tuple[EdgeBatch, list[Tensor]] | None] = PerThread(None)
"""The edges whose messages are being computed, and the exponentials that `softmax` has returned."""


def _softmax(original: Original, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if _asked.value is None:
        return original(src, *args, **kwargs)
    batch, exponentials = _asked.value
    exponentials.append(batch.exponentials(src))
    return exponentials[-1]


def _noting(place: int) -> Callable[..., Any]:
    """Wrap a forward to record whether the argument at this position requests the weights of edges."""

    def forward(original: Original, layer: Any, /, *args: Any, **kwargs: Any) -> Any:
        asked = args[place] if len(args) > place else kwargs.get("return_attention_weights")
        layer.__dict__["_returns_weights"] = asked is not None
        try:
            return original(layer, *args, **kwargs)
        finally:
            del layer.__dict__["_returns_weights"]

    return forward


REPLACED: Replacements = [
    *(
        (kind, "forward", _noting([*signature(kind.forward).parameters].index("return_attention_weights") - 1))
        for kind in RETURNING
    ),
    *((sys.modules[kind.__module__], "softmax", _softmax) for kind in WITH_SOFTMAX),
]
