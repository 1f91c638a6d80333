"""`MessagePassing.propagate` on a distributed edge index: tile by tile if a message needs its own edge only.

[Note: messages of PyTorch Geometric]
A layer's `message` runs on one tile of edges at a time, and again in the backward, if `aggregate` is one of sum, mean,
max, min and mul, and if the message of an edge depends on that edge alone, or on a softmax that it is proportional to
([Note: attention in one pass]). We try this before each call: `message` runs on a few edges twice, and the second time
the values of half of them are NaN. The messages of the others have to stay the same. `message` also has to leave the
layer as it is, and to call no module with hooks and no norm layer, because these see all edges in one call. If any of
this fails on any worker, `propagate` runs as it is written: the values of all edges' sources are fetched once ([Note:
numbers of nodes]), and memory holds all that it makes for each edge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing, aggr

from sar.adapters.pyg import attention
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, JoinedEdgeIndex, check_rows
from sar.adapters.pyg.guarded import Original, replace
from sar.adapters.pyg.norms import refuse_unconverted, takes_statistics
from sar.comm.collectives import all_max
from sar.core.eager import has_hooks, is_exactly, is_written_in, uncompiled, views_of_nothing
from sar.core.graph.frames import Frame
from sar.core.passing.batches import EdgeBatch, EdgeFields
from sar.core.passing.builtin import COPY_SOURCE, Message, Operand, aggregate
from sar.core.passing.captured import AmbientState
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


@dataclass(frozen=True)
class _Arguments:
    """The arguments of a message, by name."""

    src: dict[str, Tensor]  # with a row for each node, as has `dst`, whatever `node_dim` is
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]  # with a row for each edge
    others: dict[str, Any]

    def few(self, count: int, spoilt: int) -> _Arguments:
        """The arguments on `count` edges, of which the last `spoilt` have NaN, or integers of the first edge."""

        def rows(values: Tensor) -> Tensor:
            values = values.detach() if len(values) else values.new_zeros(1, *values.shape[1:])
            made = values[torch.arange(count, device=values.device) % len(values)]
            if spoilt:
                made[-spoilt:] = torch.nan if made.is_floating_point() or made.is_complex() else made[:1]
            return made

        src, dst, edge = ({name: rows(x) for name, x in side.items()} for side in (self.src, self.dst, self.edge))
        return _Arguments(src, dst, edge, self.others)

    def part(self, src: slice, dst: slice, edge: slice) -> _Arguments:
        """The arguments of some of the nodes and edges."""
        sides = (self.src, src), (self.dst, dst), (self.edge, edge)
        of_src, of_dst, of_edges = ({name: values[rows] for name, values in side.items()} for side, rows in sides)
        return _Arguments(of_src, of_dst, of_edges, self.others)


def _arguments(conv: MessagePassing, edges: DistributedEdgeIndex, kwargs: Mapping[str, Any]) -> _Arguments | None:
    """The arguments of `message`; None if one of them may span edges."""
    found = _Arguments({}, {}, {}, {})
    group, num_edges = edges.numbering.graph._structure.group, edges.size(1)
    weights = kwargs.get("alpha")
    sources = [(name, kwargs) for name in attention.parameters(conv, "message")]
    if isinstance(weights, attention.Weights):
        sources += [(name, weights.given) for name in attention.parameters(conv, "edge_update")]
    for name, given in sources:
        if name in conv.special_args:
            if name not in attention.SOFTMAX_ARGUMENTS or not attention.in_one_pass(conv):
                return None
            found.others[name] = attention.SOFTMAX_ARGUMENTS[name]
            continue
        side = {"_j": 0, "_i": 1}.get(name[-2:])
        if side is None:
            if name in given:
                value = given[name]
                is_edge = isinstance(value, Tensor) and value.dim() > 0
                if is_edge:  # a tensor of another kind may have as many rows as this worker has edges
                    what = f"{type(conv).__name__} has a row of {name}, {tuple(value.shape[1:])}, for each edge"
                    with group.guard():
                        is_edge = all(group.agree(what, len(value) == num_edges))
                    if not is_edge and name.startswith("edge_") and len(value) > 1:
                        return None  # to whatever PyTorch Geometric makes of it
                (found.edge if is_edge else found.others)[name] = value
            continue
        value = given.get(name[:-2])
        if isinstance(value, tuple | list):
            value = value[side]
        if not isinstance(value, Tensor):
            found.others[name] = value
        else:
            (found.dst if side else found.src)[name] = value.movedim(conv.node_dim, 0)
    return found


def _check_sizes(conv: MessagePassing, edges: DistributedEdgeIndex, size: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise a `GraphError` unless values of nodes have a row for each of this worker's sources or destinations."""
    name = type(conv).__name__
    for given, expected in zip(size or (), edges.sides, strict=False):
        check_rows(f"{name} was given a size of", expected if given is None else given, expected)
    weights = kwargs.get("alpha")
    of_edges = weights.given if isinstance(weights, attention.Weights) else {}
    for names, values in ((conv._user_args, kwargs), (conv._edge_user_args, of_edges)):
        for argument in [each for each in names if each[-2:] in ("_j", "_i")]:
            value = values.get(argument[:-2])
            pair = value if isinstance(value, tuple | list) else [None] * (argument[-1] == "i") + [value]
            for rows, expected in zip(pair, edges.sides, strict=False):
                if isinstance(rows, Tensor):
                    check_rows(f"{name} was given {argument[:-2]} of", rows.size(conv.node_dim), expected)


TRIED = 4  # edges on which we try whether messages depend on their own edge alone


@uncompiled
def _is_by_edge(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: _Arguments) -> bool:
    """Whether `message` may run on some edges at a time: see [Note: messages of PyTorch Geometric]."""

    def stop(*_: Any) -> None:
        raise GraphError("This module sees all edges in one call.")

    relation, made, state = edges.numbering.relation, [], AmbientState(edges.device, conv)
    with ExitStack() as stack:
        for module in conv.modules():
            if module is not conv and (has_hooks(module) or takes_statistics(module)):
                stack.callback(module.register_forward_pre_hook(stop, prepend=True).remove)
        for is_second in (False, True):
            few = arguments.few(TRIED, spoilt=TRIED // 2 if is_second else 0)
            batch = EdgeBatch(few.src, few.dst, few.edge, relation.etype, TRIED, lambda: NotImplemented)
            try:
                with state.restored(), _unchanged(conv):
                    made.append(attention.message(conv, batch, few.others)["message"][: TRIED // 2])
            except Exception:  # if it is the user's, the call with all edges raises it
                return False
    first, second = made
    return torch.allclose(first, second, equal_nan=True)


@contextmanager
def _unchanged(conv: MessagePassing) -> Iterator[None]:
    """Context in which a layer has copies of its buffers, and after which it is as it was; raises if it has changed."""
    owners = [owner for module in conv.modules() for owner in (vars(module), module._buffers)]
    if any(len(owner) for owner in owners if not isinstance(owner, dict)):
        raise GraphError("TorchScript has buffers that cannot be put back.")
    owners = [owner for owner in owners if isinstance(owner, dict)]
    before = [dict(owner) for owner in owners]
    unread = "_alpha" if isinstance(conv, attention.RETURNING) and not attention.returns_weights(conv) else None
    try:
        for owner in owners:
            owner.update({name: value.clone() for name, value in owner.items() if isinstance(value, Tensor)})
        copies = [{name: (value, _version(value)) for name, value in owner.items()} for owner in owners]
        yield
        for owner, copied in zip(owners, copies, strict=True):
            for name, value in owner.items():
                old, version = copied.get(name, (None, 0))
                if name != unread and (value is not old or _version(value) != version):
                    raise GraphError(f"The message of {type(conv).__name__} keeps {name} in the layer.")
    finally:
        for owner, old in zip(owners, before, strict=True):
            owner.clear()
            owner.update(old)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


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


def _by_tiles(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: _Arguments) -> Tensor | None:
    """The combined messages at this worker's destinations, (N_dst, ...); None if messages have to see all edges."""
    if not _is_weighted_copy(conv, arguments):
        group = edges.numbering.graph._structure.group
        with group.guard():
            if not all(group.agree(f"messages of {type(conv).__name__}", _is_by_edge(conv, edges, arguments))):
                return None
    if isinstance(edges, JoinedEdgeIndex):
        combined = _of_all_types(conv, edges, arguments)
    else:
        combined = attention.normalised([_sums(conv, edges, arguments)])
    return combined.movedim(0, conv.node_dim)


def _of_all_types(conv: MessagePassing, joined: JoinedEdgeIndex, arguments: _Arguments) -> Tensor:
    """Like `_by_tiles`, if a node's in-edges are of several types under one softmax."""
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


def _sums(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: _Arguments) -> attention.Sums:
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


def _is_weighted_copy(conv: MessagePassing, arguments: _Arguments) -> bool:
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


def _aggregate(original: Original, self: Any, x: Tensor, index: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """As `original`. If there are no messages, adds some to one more node, because LSTMs and others need some."""
    kwargs |= dict(zip(("ptr", "dim_size", "dim"), args, strict=False))
    count, dim = kwargs.get("dim_size"), kwargs.get("dim", -2)
    more = 2 if isinstance(self, aggr.QuantileAggregation) else 1  # which fails if the first node gets none, too
    if type(index) is not Tensor or count is None or (len(index) and more == 1):
        return original(self, x, index, **kwargs)
    x = nn.functional.pad(x, (0, 0) * (x.dim() - 1 - dim % x.dim()) + (more, 0))
    index = nn.functional.pad(index + 1, (more, 0))
    out: Tensor = original(self, x, index, **kwargs | {"ptr": None, "dim_size": count + 1})
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
        refuse_unconverted(conv, type(conv).__name__, takes_statistics)
    can_tile = _can_tile(conv)
    _check_sizes(conv, edges, size, kwargs)
    if can_tile:
        combined = attention.attend(conv, edges, kwargs) if attention.in_one_pass(conv) else None
        arguments = _arguments(conv, edges, kwargs) if combined is None else None
        if arguments is not None:
            combined = _by_tiles(conv, edges, arguments)
        if combined is not None:
            names = attention.parameters(conv, "update")
            return conv.update(combined, **{name: kwargs[name] for name in names if name in kwargs})
    with group.guard():
        if isinstance(kwargs.get("alpha"), attention.Weights):
            kwargs["alpha"] = kwargs["alpha"].make(conv)
        with _is_distributed.set_to(True), views_of_nothing(edges.size(1)):
            return original(conv, edges, size=edges.sides, **kwargs)


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
    attention.replace_updater(kind)
    for name in ("propagate", "_orig_propagate", "_jinja_propagate"):
        if name in vars(kind):
            replace(kind, name, _propagate)
