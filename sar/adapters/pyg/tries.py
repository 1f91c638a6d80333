"""Tries on a few edges what a user's layer looks at: its own edges, those into its own node, or all of them.

See [Note: own rows] and [Note: messages of PyTorch Geometric].
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from sar.adapters.pyg import attention
from sar.adapters.pyg.arguments import Arguments
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, SourceIndex
from sar.adapters.pyg.guarded import Original
from sar.adapters.pyg.norms import takes_statistics
from sar.core.eager import has_hooks, is_exactly, is_written_in, uncompiled
from sar.core.passing.batches import EdgeBatch
from sar.core.passing.own_rows import FewRows, is_close, makes_own_rows
from sar.errors import GraphError
from sar.nn.statistics import DistributedBN1D

BY_ROW = {nn.Linear, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.LayerNorm, nn.Identity}
BY_ROW |= {nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid}
"""Modules that run row by row."""

NORMS = {nn.BatchNorm1d, nn.SyncBatchNorm, DistributedBN1D}
"""Modules that are combined over all workers, or refused: see [Note: whose rows]."""

HOOKS = {f"_{direction}{pre}_hooks" for direction in ("forward", "backward") for pre in ("", "_pre")}


@uncompiled
def is_by_edge(conv: MessagePassing, edges: DistributedEdgeIndex, arguments: Arguments) -> bool:
    """Whether `message` may run on some edges at a time: see [Note: messages of PyTorch Geometric]."""

    def stop(*_: Any) -> None:
        raise GraphError("This module sees all edges in one call.")

    def run(rows: FewRows) -> Iterable[Tensor]:
        few, etype = arguments.few(rows), edges.numbering.relation.etype
        before = [values.clone() for values in few.edge.values()]
        batch = EdgeBatch(few.src, few.dst, few.edge, etype, len(rows.numbers), lambda: NotImplemented)
        with _put_back(conv) as kept:
            messages = attention.message(conv, batch, few.others)
            if kept() or not all(map(is_close, before, few.edge.values())):
                raise GraphError(f"The message of {type(conv).__name__} changes the layer, or values of edges.")
        return [messages["message"]]

    with ExitStack() as stack:
        for module in conv.modules():
            if module is not conv and (has_hooks(module) or takes_statistics(module)):
                stack.callback(module.register_forward_pre_hook(stop, prepend=True).remove)
        try:
            return bool(makes_own_rows(run, edges.device, conv))
        except Exception:  # if it is the user's, the call with all edges raises it
            return False


@uncompiled
def looks_at_other_nodes(
    original: Original, conv: MessagePassing, edges: DistributedEdgeIndex, kwargs: Mapping[str, Any], *, at_edges: bool
) -> bool:
    """Whether results at a node, or `at_edges` into it, depend on edges into others: see [Note: own rows].

    `original` runs on a few nodes with two in-edges each. A layer that makes collective calls is trusted.
    """
    group = edges.numbering.graph._structure.group
    nodes = {name[:-2] for name in (*conv._user_args, *conv._edge_user_args) if name[-2:] in ("_i", "_j")}
    before = group.call_id

    def few(name: str, value: Any, ends: Tensor, rows: FewRows) -> Any:
        """A value of a few nodes, or of the edges between these."""
        if isinstance(value, DistributedEdgeIndex | SourceIndex):
            return ends if isinstance(value, DistributedEdgeIndex) else ends[0]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if name not in nodes and len(value) == edges.size(1):
            destinations = edges.plain[1]
            if value.dtype == destinations.dtype and torch.equal(value, destinations):
                return ends[1]
            return rows.of(value).repeat_interleave(2, 0)
        if name not in nodes and len(value) not in edges.sides:
            return value
        return rows.of(value.movedim(conv.node_dim, 0)).movedim(0, conv.node_dim)

    def run(rows: FewRows) -> Iterable[Tensor]:
        count = len(rows.numbers)
        own = torch.arange(count, device=edges.device)
        others = torch.tensor([1, 0, 3, 2] if count == 4 else [1, 2, 0, 4, 3, 6, 5], device=edges.device)
        ends = torch.stack([torch.stack([own, others], 1).flatten(), own.repeat_interleave(2)])
        given = {
            name: tuple(few(name, each, ends, rows) for each in value)
            if isinstance(value, tuple | list)
            else few(name, value, ends, rows)
            for name, value in kwargs.items()
        }
        with _put_back(conv, hooks=False):
            if at_edges:
                return [original(conv, ends, **given).unflatten(0, (count, 2))]
            return [original(conv, ends, size=(count, count), **given).movedim(conv.node_dim, 0)]

    try:
        is_wrong = makes_own_rows(run, edges.device, conv) is False and group.call_id == before
        return is_wrong and edges.size(1) > 0  # without edges we do not know what has a row for each
    except Exception:  # if it is the user's, the call with all edges raises it
        return False


def is_of_library(conv: MessagePassing) -> bool:
    """Whether all that the layer calls is PyTorch Geometric's, which is known to be right, or runs row by row."""
    functions = [getattr(conv, name, None) for name in attention.METHODS]
    modules = [module for module in conv.modules() if module is not conv and type(module) not in NORMS]
    functions += [module.forward for module in modules if not is_exactly(module, *BY_ROW)]
    for name, value in vars(conv).items():
        is_hooks = name.startswith(("_propagate", "_message", "_aggregate", "_edge_update")) and name.endswith("_hooks")
        functions += value.values() if is_hooks else [value] if isinstance(value, FunctionType) else []
    return all(each is None or is_written_in(each, "torch_geometric") for each in functions)


@contextmanager
def _put_back(conv: MessagePassing, *, hooks: bool = True) -> Iterator[Callable[[], bool]]:
    """Context in which a layer has copies of its buffers, and after which it is as it was; gives whether it changed.

    Without `hooks`, those of its modules do not run: they may record what they see.
    """
    owners = [owner for module in conv.modules() for owner in (vars(module), module._buffers)]
    if any(len(owner) for owner in owners if not isinstance(owner, dict)):
        raise GraphError("TorchScript has buffers that cannot be put back.")
    owners = [owner for owner in owners if isinstance(owner, dict)]
    before = [dict(owner) for owner in owners]
    unread = "_alpha" if isinstance(conv, attention.RETURNING) and not attention.returns_weights(conv) else None

    def changed() -> bool:
        return any(
            name != unread and (value is not known.get(name, (None, 0))[0] or _version(value) != known[name][1])
            for owner, known in zip(owners, copies, strict=True)
            for name, value in owner.items()
        )

    try:
        for owner in owners:
            owner.update({name: value.clone() for name, value in owner.items() if isinstance(value, Tensor)})
            owner.update({name: OrderedDict() for name in owner if name in HOOKS and not hooks})
        copies = [{name: (value, _version(value)) for name, value in owner.items()} for owner in owners]
        yield changed
    finally:
        for owner, old in zip(owners, before, strict=True):
            owner.clear()
            owner.update(old)


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
