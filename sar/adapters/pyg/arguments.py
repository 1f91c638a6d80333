"""The arguments of a layer's `message`: values of sources, destinations and edges, and shared arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch_geometric.nn import MessagePassing

from sar.adapters.pyg import attention
from sar.adapters.pyg.edge_index import DistributedEdgeIndex, check_rows
from sar.adapters.pyg.guarded import GuardedTensor


@dataclass(frozen=True)
class Arguments:
    """The arguments of a message, by name."""

    src: dict[str, Tensor]  # one row per node, like `dst`, for any `node_dim`
    dst: dict[str, Tensor]
    edge: dict[str, Tensor]  # one row per edge
    others: dict[str, Any]

    def part(self, src: slice, dst: slice, edge: slice) -> Arguments:
        """The arguments of some of the nodes and edges."""
        sides = (self.src, src), (self.dst, dst), (self.edge, edge)
        of_src, of_dst, of_edges = ({name: values[rows] for name, values in side.items()} for side, rows in sides)
        return Arguments(of_src, of_dst, of_edges, self.others)


def arguments_of(conv: MessagePassing, edges: DistributedEdgeIndex, kwargs: Mapping[str, Any]) -> Arguments | None:
    """Return the arguments of `message`; None if an argument may combine several edges."""
    found, names = Arguments({}, {}, {}, {}), conv.inspector.get_param_names
    group, num_edges = edges.numbering.graph._structure.group, edges.size(1)
    weights = kwargs.get("alpha")
    sources = [(name, kwargs) for name in names("message")]
    if isinstance(weights, attention.Weights):
        sources += [(name, weights.given) for name in names("edge_update")]
    for name, given in sources:
        if name in conv.special_args:
            if name not in attention.SOFTMAX_ARGUMENTS or not attention.in_one_pass(conv):
                return None
            found.others[name] = attention.SOFTMAX_ARGUMENTS[name]
        elif name[-2:] in ("_j", "_i"):
            of_targets, value = name[-1] == "i", given.get(name[:-2])
            value = value[of_targets] if isinstance(value, tuple | list) else value
            if isinstance(value, Tensor):
                (found.dst if of_targets else found.src)[name] = value.movedim(conv.node_dim, 0)
            else:
                found.others[name] = value
        elif name in given:
            value = given[name]
            if isinstance(value, GuardedTensor):
                return None
            is_edge = isinstance(value, Tensor) and value.dim() > 0
            if is_edge:  # a tensor of another kind may have as many rows as this worker has edges
                what = f"{type(conv).__name__} has a row of {name}, {tuple(value.shape[1:])}, for each edge"
                with group.guard():
                    is_edge = all(group.agree(what, len(value) == num_edges))
                if not is_edge and name.startswith("edge_") and len(value) > 1:
                    return None  # PyTorch Geometric decides
            (found.edge if is_edge else found.others)[name] = value
    return found


def check_sizes(conv: MessagePassing, edges: DistributedEdgeIndex, size: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise a `GraphError` unless node values have one row for each of this worker's sources or destinations."""
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
