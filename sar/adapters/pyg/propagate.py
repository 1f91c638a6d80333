"""`MessagePassing.propagate` on a distributed edge index: tile by tile if a message depends on its edge only.

[Note: messages of PyTorch Geometric]
A layer's `message` runs on one tile of edges at a time, and again in the backward, if `aggregate` is one of sum, mean,
max, min and mul, and `message` only takes values of edges and of their ends, or is proportional to a softmax
([Note: attention in one pass]). Then the message of an edge must depend on that edge only (`SpotCheck`). The original
`propagate` runs if, for example, `message` takes `index`, sets an attribute of the layer, or calls another worker, a
norm layer or a module with hooks: the values of all edges' sources are fetched once ([Note: numbers of nodes]), and
memory holds all values of each edge. Messages may then depend on all edges into the same node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, aggr

from sar.adapters.pyg import attention
from sar.adapters.pyg.arguments import Arguments, arguments_of, check_sizes
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, JoinedEdgeIndex, SourceIndex
from sar.adapters.pyg.guarded import Original, Replacements, replace
from sar.adapters.pyg.norms import refuse_unconverted, takes_statistics
from sar.comm import session
from sar.comm.collectives import all_max
from sar.core.collective import uncompiled
from sar.core.graph.frames import Frame
from sar.core.modules import has_hooks, is_autocast, is_exactly, is_written_in, views_of_nothing
from sar.core.passing.batches import EdgeBatch, EdgeFields
from sar.core.passing.captured import AmbientState
from sar.core.passing.messages import COPY_SOURCE, Message, Operand, aggregate
from sar.core.passing.python_messages import run_python
from sar.core.passing.spot_check import Change, SpotCheck
from sar.errors import GraphError
from sar.host.per_thread import PerThread
from sar.kernels import Op, Target

REDUCERS: dict[type, str] = {
    aggr.SumAggregation: "sum",
    aggr.MeanAggregation: "mean",
    aggr.MaxAggregation: "amax",
    aggr.MinAggregation: "amin",
    aggr.MulAggregation: "prod",
}

ADDING = (aggr.SumAggregation, aggr.MeanAggregation)

WEIGHTED_SOURCE = Message(Op.MUL, Operand(Target.U, "values"), Operand(Target.E, "weights"), "values")

source_rows = PerThread(COPY_SOURCE.lhs)  # how errors name the rows that are added up


def can_tile(conv: MessagePassing) -> bool:
    """Whether `propagate` in this call does nothing but combine messages by one of `REDUCERS`."""
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
def _may_run_by_edge(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: Arguments | None) -> bool:
    """Whether all workers may compute messages on some edges at a time."""
    if arguments is None or _is_weighted_copy(conv, arguments):
        return arguments is not None
    group = edges.numbering.graph._structure.group
    with group.guard():
        needs_all = _needs_all_edges(conv, edges, arguments)
        return not any(group.agree(f"messages of {type(conv).__name__}", needs_all))


class _NeedsAllEdges(Exception):
    """Raised if a module must process all edges in one call."""


def _needs_all_edges(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: Arguments) -> bool:
    """Run `message` on no edges, and return whether it does something that must happen once for all edges."""

    def stop(*_: Any) -> None:
        raise _NeedsAllEdges

    def nothing(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: of_rows[:0].clone() for name, of_rows in values.items()}

    def attributes() -> dict[tuple[int, str], tuple[int, int]]:
        return {
            (number, name): (id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else 0)
            for number, module in enumerate(conv.modules())
            for name, value in (*vars(module).items(), *module._buffers.items())
            if is_read or name != "_alpha"
        }

    scripted = [module for module in conv.modules() if isinstance(module, torch.jit.ScriptModule)]
    if any(True for module in scripted for _ in module.buffers()):  # they may be statistics
        return True
    is_read = not isinstance(conv, attention.RETURNING) or conv.__dict__.get("_returns_weights", True)
    group, etype = edges.numbering.graph._structure.group, edges.numbering.relation.etype
    with torch.inference_mode(False), torch.no_grad(), views_of_nothing(0), ExitStack() as stack:
        stack.enter_context(AmbientState(edges.device, conv).with_spare_modules())
        src, dst, edge = map(nothing, (arguments.src, arguments.dst, arguments.edge))
        batch = EdgeBatch(src, dst, edge, etype, 0, lambda: NotImplemented)
        for module in conv.modules():
            if module is not conv and (has_hooks(module) or takes_statistics(module)):
                stack.callback(module.register_forward_pre_hook(stop, prepend=True).remove)
        call_id, before, has_summed = group.call_id, attributes(), group.has_summed
        group.has_summed = False
        try:
            attention.message(conv, batch, arguments.others)
        except _NeedsAllEdges:
            return True
        except Exception:  # the call with edges raises errors of the user's code again
            return False
        finally:
            combines_workers = group.call_id > call_id or group.has_summed
            group.has_summed = has_summed
        changed = attributes() != before or any(values._version > 0 for values in edge.values())
        return combines_workers or changed


@contextmanager
def _spot_checked(conv: MessagePassing, name: str, edges: DistributedEdgeIndex) -> Iterator[None]:
    """Context that checks that `message` or `edge_update` on all edges does not depend on edges into other nodes."""
    function, group = getattr(conv, name), edges.numbering.graph._structure.group
    if group.world_size == 1 or is_written_in(function, "torch_geometric"):
        yield
        return
    destinations, state = edges.plain[1], AmbientState(edges.device, conv)
    check = SpotCheck(edges.numbering.relation, f"{type(conv).__name__}.{name}", function, state, _ADVICE)

    def rows_first(values: Tensor) -> Tensor:
        return values.movedim(conv.node_dim, 0) if values.dim() > max(conv.node_dim, -1 - conv.node_dim) else values

    def on_some_edges(given: Mapping[str, Any], rows: Tensor, change: Change) -> dict[str, Tensor]:
        few = dict(given)
        for argument, value in given.items():
            if isinstance(value, DistributedEdgeIndex):
                few[argument] = value[:, rows]
            elif isinstance(value, SourceIndex):
                few[argument] = value[rows]
            elif isinstance(value, Tensor) and value.dim() and len(rows_first(value)) == len(destinations):
                selected = change(rows_first(value)[rows])
                few[argument] = selected.movedim(0, conv.node_dim) if rows_first(value) is not value else selected
        return {"result": rows_first(function(**few))}

    def call(**given: Any) -> Tensor:
        before, call_id = given, group.call_id
        if check.is_due:  # the function may change its operands in place
            indices = DistributedEdgeIndex | SourceIndex
            before = {
                k: x.clone() if isinstance(x, Tensor) and not isinstance(x, indices) else x for k, x in given.items()
            }
        result: Tensor = function(**given)
        if group.call_id == call_id:  # otherwise the function combines workers
            check.compare({"result": rows_first(result)}, partial(on_some_edges, before), destinations)
        return result

    own = vars(conv).get(name)
    vars(conv)[name] = call
    try:
        yield
    finally:
        vars(conv).pop(name) if own is None else vars(conv).update({name: own})


_ADVICE = (
    "The worker's edges are not all. Combine the workers by sar.nn.global_sum, or compute such values before the call."
)


def _of_all_types(conv: MessagePassing, joined: JoinedEdgeIndex, arguments: Arguments) -> Tensor:
    """The combined messages if one softmax spans a node's in-edges of several types."""
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

    @wraps(conv.message)  # for the name, and the spot check
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
            formula = (WEIGHTED_SOURCE if weights else COPY_SOURCE)._replace(lhs=source_rows.value)
            made = {"message": aggregate(context, formula, reducer, x, *weights)}
        else:
            made = run_python(context, message, fields, reducer, None)
    return attention.Sums(made, relation.in_degrees)


def _is_weighted_copy(conv: MessagePassing, arguments: Arguments) -> bool:
    """Whether messages are source values, optionally times an edge weight, as for built-in messages.

    This holds for all layers of PyTorch Geometric whose `message` takes these arguments only.
    """
    x = arguments.src.get("x_j")
    given = {name for name, value in arguments.others.items() if value is not None}
    return (
        is_written_in(conv.message, "torch_geometric.nn")
        and {*conv.inspector.get_param_names("message")} <= {"x_j", "edge_weight", "norm", "edge_type_ptr"}
        and isinstance(conv.aggr_module, ADDING)
        and x is not None
        and x.is_floating_point()
        and len(arguments.src) == 1
        and not arguments.dst
        and not given
        and set(arguments.edge) <= {"edge_weight", "norm"}
        and all(weight.numel() == len(weight) for weight in arguments.edge.values())
        and all(weight.dtype == x.dtype or is_autocast(x) for weight in arguments.edge.values())
    )


_is_distributed = PerThread(False)  # whether the original `propagate` runs on a distributed edge index


def _aggregate(
    original: Original, self: Any, x: Tensor, index: Any = None, ptr: Any = None, *args: Any, **kwargs: Any
) -> Tensor:
    """Like `original`. Without messages, add a node with some, because LSTMs and other aggregations need some."""
    if index is None and ptr is None and session.has_peers():
        raise GraphError(
            f"{type(self).__name__} was called without index, and would take this worker's rows for all. Pass "
            "data.batch of sar.pyg.load_partition, or sar.pyg.batch_vector; or zeros, to pool this worker's rows alone."
        )
    kwargs |= dict(zip(("dim_size", "dim"), args, strict=False))
    count, dim = kwargs.get("dim_size"), kwargs.get("dim", -2)
    more = 2 if isinstance(self, aggr.QuantileAggregation) else 1  # it also fails if the first node gets none
    if type(index) is not Tensor or count is None or (len(index) and more == 1):
        return original(self, x, index, ptr, **kwargs)
    x = nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (more, 0))
    index = nn.functional.pad(index + 1, (more, 0))
    out: Tensor = original(self, x, index, **kwargs | {"dim_size": count + 1})
    return out.narrow(dim, 1, count)


def _to_dense_batch(
    original: Original, self: Any, x: Tensor, index: Tensor | None = None, *args: Any, **kwargs: Any
) -> Any:
    """Like `original`, but pad to the greatest in-degree on any worker, because LSTMs read the padding."""
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
    tiled = can_tile(conv)
    check_sizes(conv, edges, size, kwargs)
    combined = attention.attend(conv, edges, kwargs) if tiled else None
    if combined is None:
        arguments = arguments_of(conv, edges, kwargs) if tiled else None
        if _may_run_by_edge(conv, edges, arguments) and arguments is not None:
            if isinstance(edges, JoinedEdgeIndex):
                combined = _of_all_types(conv, edges, arguments)
            else:
                combined = attention.normalised([_sums(conv, edges, arguments)])
            combined = combined.movedim(0, conv.node_dim)
    if combined is not None:
        names = conv.inspector.get_param_names("update")
        return conv.update(combined, **{name: kwargs[name] for name in names if name in kwargs})
    with group.guard():
        if isinstance(kwargs.get("alpha"), attention.Weights):
            kwargs["alpha"] = kwargs["alpha"].make(conv)
        with _is_distributed.set_to(True), views_of_nothing(edges.size(1)), _spot_checked(conv, "message", edges):
            return original(conv, edges, size=edges.sides, **kwargs)


def _edge_updater(original: Original, layer: Any, /, edge_index: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(edge_index, DistributedEdgeIndex) and not args:
        if isinstance(layer, attention.GAT) and attention.in_one_pass(layer):
            return attention.Weights(original, edge_index, kwargs)
        with _spot_checked(layer, "edge_update", edge_index):
            return original(layer, edge_index, **kwargs)
    return original(layer, edge_index, *args, **kwargs)


def _replacements(kind: type) -> Replacements:
    functions = dict.fromkeys(("propagate", "_orig_propagate", "_jinja_propagate"), _propagate)
    functions |= {"edge_updater": _edge_updater}
    return [(kind, name, function) for name, function in functions.items() if name in vars(kind)]


def _set_templates(original: Original, conv: MessagePassing, *args: Any, **kwargs: Any) -> None:
    original(conv, *args, **kwargs)  # defines `propagate` in the class
    replace(_replacements(type(conv)))


def _with_subclasses(kind: Any) -> list[type]:
    return [kind, *(each for subclass in kind.__subclasses__() for each in _with_subclasses(subclass))]


REPLACED: Replacements = [
    (MessagePassing, "_set_jittable_templates", _set_templates),
    (aggr.Aggregation, "__call__", _aggregate),
    (aggr.Aggregation, "to_dense_batch", _to_dense_batch),
    *(each for kind in dict.fromkeys(_with_subclasses(MessagePassing)) for each in _replacements(kind)),
]
"""These make all layers, including existing ones, process a distributed edge index tile by tile."""
