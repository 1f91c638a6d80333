"""`MessagePassing.propagate` on a distributed edge index: tile by tile if a message needs its own edge only.

[Note: messages of PyTorch Geometric]
A layer's `message` runs on one tile of edges at a time, and again in the backward, if `aggregate` is one of sum, mean,
max, min and mul, and if the message of an edge depends on that edge alone, or on a softmax that it is proportional to
([Note: attention in one pass]). We try this before each call ([Note: own rows]). `message` also has to leave the layer
as it is, and to call no module with hooks and no norm layer, because these see all edges in one call. If any of this
fails on any worker, `propagate` runs as it is written: the values of all edges' sources are fetched once ([Note:
numbers of nodes]), and memory holds all that it makes for each edge. Results at a node may then depend on all edges
into it. If those of a user's layer depend on edges into other nodes, too, which may be on other workers, we raise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, aggr

from sar.adapters.pyg import attention
from sar.adapters.pyg.arguments import Arguments, arguments_of, check_sizes
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, JoinedEdgeIndex
from sar.adapters.pyg.guarded import Original, replace
from sar.adapters.pyg.norms import refuse_unconverted
from sar.adapters.pyg.tries import is_by_edge, is_of_library, looks_at_other_nodes
from sar.comm import session
from sar.comm.collectives import all_max
from sar.core.eager import is_exactly, is_written_in, uncompiled, views_of_nothing
from sar.core.graph.frames import Frame
from sar.core.passing.batches import EdgeBatch, EdgeFields
from sar.core.passing.messages import COPY_SOURCE, Message, Operand, aggregate
from sar.core.passing.python_messages import run_python
from sar.errors import GraphError
from sar.kernels import Op, Target
from sar.per_thread import PerThread

REDUCERS: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "amax",
    aggr.MinAggregation: "amin",
    aggr.MulAggregation: "prod",
}

ADDING = (aggr.SumAggregation, aggr.MeanAggregation)

WEIGHTED_SOURCE = Message(Op.MUL, Operand(Target.U, "values"), Operand(Target.E, "weights"), "values")


def _can_tile(conv: MessagePassing) -> bool:
    if conv.flow != "source_to_target":
        raise GraphError(
            f"{type(conv).__name__} has flow={conv.flow!r}; expected 'source_to_target' on a distributed edge_index, "
            "which holds the edges into this worker's nodes. Partition the graph with its edges the other way around; "
            "or give a layer that takes no values of edges edge_index.reversed, without this flow."
        )
    kinds = [f"{step}_forward{pre}" for step in ("propagate", "message", "aggregate") for pre in ("_pre", "")]
    hooks = [getattr(conv, f"_{kind}_hooks") for kind in kinds]
    updates = conv.inspector.get_param_names("update")
    return (
        is_exactly(conv.aggr_module, *REDUCERS)
        and conv.decomposed_layers == 1
        and getattr(conv.aggregate, "__func__", None) is MessagePassing.aggregate
        and not conv.explain
        and not any(hooks)
        and not any(name in conv.special_args or name[-2:] in ("_i", "_j") for name in updates)
    )


@uncompiled
def _may_run_by_edge(
    original: Original,
    conv: MessagePassing,
    edges: DistributedEdgeIndex,
    kwargs: Mapping[str, Any],
    arguments: Arguments | None = None,
    *,
    at_edges: bool = False,
) -> bool:
    """Whether messages may be made on some edges at a time, on all workers.

    Raises a GraphError if `propagate`, or with `at_edges` `edge_updater`, would take a worker's edges for all.
    """
    group = edges.numbering.graph._structure.group
    is_copy = arguments is not None and _is_weighted_copy(conv, arguments)
    is_tried = group.world_size > 1 and not is_of_library(conv)
    if not is_tried and (is_copy or arguments is None):
        return is_copy
    by_edge = is_copy or (arguments is not None and is_by_edge(conv, edges, arguments))
    with group.guard():
        by_others = is_tried and looks_at_other_nodes(original, conv, edges, kwargs, at_edges=at_edges)
        found = group.agree(f"messages of {type(conv).__name__}", by_edge + 2 * by_others)
    if max(found) > 1:
        raise GraphError(
            f"{type(conv).__name__} makes other results at a node if there are other edges into other nodes, as "
            "with x_j.mean(0), len(x_j) or size_i, so that it would take a worker's edges for all. Combine the "
            "workers by sar.nn.global_sum, or compute such values before the call."
        )
    return all(found)


def _of_all_types(conv: MessagePassing, joined: JoinedEdgeIndex, arguments: Arguments) -> Tensor:
    """The combined messages if a node's in-edges are of several types under one softmax."""
    sums: dict[tuple[int, int], list[attention.Sums]] = {}  # a type without nodes here begins where the next one does
    begin = 0
    for edges, src, dst in joined.parts:
        relation, end = edges.numbering.relation, begin + edges.size(1)
        rows = slice(src, src + relation.num_src), slice(dst, dst + relation.num_dst), slice(begin, end)
        sums.setdefault((dst, dst + relation.num_dst), []).append(_sums(conv, edges, arguments.part(*rows)))
        begin = end
    made = [attention.normalised(of_node_type) for of_node_type in sums.values()]
    count, *_ = map(len, arguments.dst.values())
    places = torch.cat([torch.arange(*rows, device=made[0].device) for rows in sums])
    return made[0].new_zeros(count, *made[0].shape[1:]).index_copy(0, places, torch.cat(made))


def _sums(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: Arguments) -> attention.Sums:
    """Sums over the in-edges of one type at each destination."""
    graph, _ = edges.passes
    context, others = graph.call_context(), arguments.others
    relation, reducer = context.relation, REDUCERS[type(conv.aggr_module)]

    def message(batch: EdgeBatch) -> dict[str, Tensor]:
        return attention.message(conv, batch, others)

    of_edges = {k: edges.in_graph_order(v) for k, v in arguments.edge.items()}
    fields = EdgeFields(
        Frame(relation.num_src, graph.device, "sources", arguments.src),
        Frame(relation.num_dst, graph.device, "destinations", arguments.dst),
        Frame(relation.num_edges, graph.device, "edges", of_edges),
    )
    with graph._structure.group.guard():
        if _is_weighted_copy(conv, arguments):
            (x,) = arguments.src.values()
            weights = [weight.reshape(-1, *[1] * (x.dim() - 1)) for weight in fields.edge.values()]
            formula = WEIGHTED_SOURCE if weights else COPY_SOURCE
            made = {"message": aggregate(context, formula, reducer, x, *weights)}
        else:
            made = run_python(context, message, fields, reducer, None)
    return attention.Sums(made, relation.in_degrees)


def _is_weighted_copy(conv: MessagePassing, arguments: Arguments) -> bool:
    """Whether messages are the sources' values, perhaps times a weight of the edge, as built-in messages are.

    This holds for all layers of PyTorch Geometric whose `message` takes these arguments only.
    """
    x = arguments.src.get("x_j")
    given = {name for name, value in arguments.others.items() if value is not None}
    return (
        is_written_in(conv.message, "torch_geometric.nn")
        and {*attention.parameters(conv, "message")} <= {"x_j", "edge_weight", "norm", "edge_type_ptr"}
        and isinstance(conv.aggr_module, ADDING)
        and x is not None
        and x.is_floating_point()
        and len(arguments.src) == 1
        and not arguments.dst
        and not given
        and set(arguments.edge) <= {"edge_weight", "norm"}
        and all(weight.dtype == x.dtype and weight.numel() == len(weight) for weight in arguments.edge.values())
    )


_is_distributed = PerThread(False)  # whether `propagate` runs as it is written, along a distributed edge index


def _aggregate(
    original: Original, self: Any, x: Tensor, index: Any = None, ptr: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """As `original`. If there are no messages, adds some to one more node, because LSTMs and others need some."""
    if index is None and ptr is None and session.has_peers():
        raise GraphError(
            f"{type(self).__name__} was called without index, and would take this worker's rows for all. Pass "
            "data.batch of sar.pyg.load_partition, or sar.pyg.batch_vector; or zeros, to pool this worker's rows alone."
        )
    kwargs |= dict(zip(("dim_size", "dim"), args, strict=False))
    count, dim = kwargs.get("dim_size"), kwargs.get("dim", -2)
    more = 2 if isinstance(self, aggr.QuantileAggregation) else 1  # which fails if the first node gets none, too
    if type(index) is not Tensor or count is None or (len(index) and more == 1):
        return original(self, x, index, ptr, **kwargs)
    x = nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (more, 0))
    index = nn.functional.pad(index + 1, (more, 0))
    out: Tensor = original(self, x, index, **kwargs | {"dim_size": count + 1})
    return out.narrow(dim, 1, count)


def _to_dense_batch(
    original: Original, self: Any, x: Tensor, index: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """As `original`, but pads to the greatest in-degree on any worker, because LSTMs and such see the padding."""
    if _is_distributed.value and index is not None and kwargs.get("max_num_elements") is None:
        kwargs["max_num_elements"] = all_max(int(torch.bincount(index).max()))
    return original(self, x, index, *args, **kwargs)


def _propagate(original: Original, conv: MessagePassing, /, edge_index: Any, size: Any = None, **kwargs: Any) -> Tensor:
    if isinstance(edge_index, DistributedEdgeIndex):
        return _across_workers(original, conv, edge_index, size, kwargs)
    with views_of_nothing(edge_index.size(1)):
        return original(conv, edge_index, size=size, **kwargs)


@uncompiled
def _across_workers(
    original: Original, conv: MessagePassing, edges: DistributedEdgeIndex, size: Any, kwargs: dict[str, Any]
) -> Tensor:
    group = edges.numbering.graph._structure.group
    if group.world_size > 1:
        refuse_unconverted(conv, type(conv).__name__)
    can_tile = _can_tile(conv)
    check_sizes(conv, edges, size, kwargs)
    combined = attention.attend(conv, edges, kwargs) if can_tile and attention.in_one_pass(conv) else None
    if combined is None:
        arguments = arguments_of(conv, edges, kwargs) if can_tile else None
        if _may_run_by_edge(original, conv, edges, kwargs, arguments) and arguments is not None:
            if isinstance(edges, JoinedEdgeIndex):
                combined = _of_all_types(conv, edges, arguments)
            else:
                combined = attention.normalised([_sums(conv, edges, arguments)])
            combined = combined.movedim(0, conv.node_dim)
    if combined is not None:
        names = attention.parameters(conv, "update")
        return conv.update(combined, **{name: kwargs[name] for name in names if name in kwargs})
    with group.guard():
        if isinstance(kwargs.get("alpha"), attention.Weights):
            kwargs["alpha"] = kwargs["alpha"].make(conv)
        with _is_distributed.set_to(True), views_of_nothing(edges.size(1)):
            return original(conv, edges, size=edges.sides, **kwargs)


def _edge_updater(original: Original, layer: Any, /, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(edge_index, DistributedEdgeIndex) and not args:
        if isinstance(layer, attention.GAT) and attention.in_one_pass(layer):
            return attention.Weights(original, edge_index, kwargs)
        _may_run_by_edge(original, layer, edge_index, kwargs, at_edges=True)
    return original(layer, edge_index, *args, **kwargs)


def _set_templates(original: Original, conv: MessagePassing, *args: Any, **kwargs: Any) -> None:
    original(conv, *args, **kwargs)  # gives the class a `propagate` of its own
    _replace_in(type(conv))


def install() -> None:
    """Let layers, those made already too, go tile by tile along a distributed edge index; called once."""
    replace(MessagePassing, "_set_jittable_templates", _set_templates)
    replace(aggr.Aggregation, "__call__", _aggregate)
    replace(aggr.Aggregation, "to_dense_batch", _to_dense_batch)
    waiting = [MessagePassing]
    while waiting:
        kind = waiting.pop()
        _replace_in(kind)
        waiting += kind.__subclasses__()


def _replace_in(kind: type) -> None:
    functions = dict.fromkeys(("propagate", "_orig_propagate", "_jinja_propagate"), _propagate)
    for name, function in (functions | {"edge_updater": _edge_updater}).items():
        if name in vars(kind):
            replace(kind, name, function)
