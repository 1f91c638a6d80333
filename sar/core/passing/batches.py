"""Batches of edges and nodes for Python functions, as in DGL, and checks of the functions' results.

A reduce function takes the messages of all nodes of one in-degree as one tensor, (nodes, degree, ...). This needs much
memory: the worker holds the messages of all its edges.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from sar.common_tuples import CanonicalEtype
from sar.core.graph.frames import Frame
from sar.core.passing.captured import AmbientState
from sar.core.passing.spot_check import Change, SpotCheck, refuse_batch_norms, unchanged
from sar.core.relation import Relation
from sar.errors import FieldError, GraphError
from sar.logging_setup import logger

Fields = Mapping[str, Tensor]


class EdgeFields(NamedTuple):
    """Fields of the sources, destinations and edges of a relation at the time of a call."""

    src: Frame
    dst: Frame
    edge: Frame


@dataclass(eq=False, repr=False)
class RowView(MutableMapping[str, Tensor]):
    """Mapping of fields to some of their rows, copied on first lookup. `read` collects the names looked up.

    The function may change it, and the rows in place: neither changes the fields.
    """

    _fields: Fields
    _copy: Callable[[Tensor], Tensor]
    _read: set[str] = field(default_factory=set)
    _rows: dict[str, Tensor] = field(init=False, default_factory=dict)
    _deleted: set[str] = field(init=False, default_factory=set)

    def __getitem__(self, key: str) -> Tensor:
        if key in self._deleted:
            raise FieldError(f"The function has removed {key!r} from this batch.")
        if key not in self._rows:
            self._rows[key] = self._copy(self._fields[key])  # raises the error of the frame
            self._read.add(key)
        return self._rows[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self._rows[key] = value
        self._deleted.discard(key)

    def __delitem__(self, key: str) -> None:
        self[key]
        del self._rows[key]
        self._deleted.add(key)

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys([*self._fields, *self._rows])
        return (name for name in names if name not in self._deleted)

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(eq=False, repr=False)
class EdgeBatch:
    """The edges that a message function is called with.

    `src`, `dst` and `data` map field names to rows, (E_batch, ...), of the edges' sources, of their destinations and of
    the edges. They and the rows may be changed, which changes nothing outside of the batch. `exponentials` is for
    layers that weight their messages: see [Note: softmax in a message].
    """

    src: MutableMapping[str, Tensor]
    dst: MutableMapping[str, Tensor]
    data: MutableMapping[str, Tensor]
    canonical_etype: CanonicalEtype
    _size: int
    # Returns the global IDs of sources and destinations, and the edges' rows in `edata`, (E_batch,) int64 each.
    edges: Callable[[], tuple[Tensor, Tensor, Tensor]]
    exponentials: Callable[[Tensor], Tensor] = Tensor.exp

    def __len__(self) -> int:
        """Number of edges."""
        return self._size

    batch_size = __len__


@dataclass(eq=False, repr=False)
class NodeBatch:
    """The destination nodes that a reduce or apply function is called with."""

    _nodes: Tensor
    data: MutableMapping[str, Tensor]  # fields of the nodes, (N_batch, ...)
    # Messages of each node's in-edges, (N_batch, degree, ...), in the order of `Relation.message_order`.
    mailbox: MutableMapping[str, Tensor] | None
    ntype: str

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self._nodes)

    batch_size = __len__

    def nodes(self) -> Tensor:
        """Local IDs, (N_batch,) int64."""
        return self._nodes.clone()


def function_name(function: object) -> str:
    """Name of a Python function, for errors."""
    return getattr(function, "__qualname__", repr(function))


def checked_results(function: Callable[..., object], results: object, rows: int) -> Mapping[str, Tensor]:
    """Return the results of a Python function. Raise a GraphError unless they map names to tensors of `rows` rows."""
    name = function_name(function)
    if not isinstance(results, Mapping):
        raise GraphError(
            f"{name} returned a {type(results).__name__}; expected a dictionary from field name to tensor."
        )
    for key, value in results.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != rows:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise GraphError(f"{name} returned {key!r} with {shape}; expected a tensor of {rows} rows.")
    return results


def results_on_nothing(
    function: Callable[..., object], call: Callable[[int], Mapping[str, Tensor]]
) -> Mapping[str, Tensor]:
    """Empty results of a Python function, (0, ...) each. If it fails on an empty batch, it runs on one row.

    `call(n)` runs the function on n rows; `function` is for the log.
    """
    try:
        return call(0)
    except Exception as error:
        _log_once(f"{function_name(function)} fails on an empty batch, so it is shown one row: {error!r}")
        try:
            results = call(1)
        except Exception as again:
            raise again from error
        return {name: rows[:0] for name, rows in results.items()}


_log_once = lru_cache(maxsize=256)(logger.info)

MessageFunction = Callable[[EdgeBatch], Fields]
NodeFunction = Callable[[NodeBatch], Fields]


def reduce_mailboxes(
    relation: Relation, function: NodeFunction, messages: dict[str, Tensor], nodes: Fields, has_peers: bool
) -> dict[str, Tensor]:
    """Call `function` once for every in-degree, as DGL does, and join the results.

    Args:
        messages: (E, ...) each, in the visible edge order.
        nodes: fields of the destinations, (N_dst, ...) each.
        has_peers: whether other workers have more nodes, so that a node's result must not depend on other nodes.

    Returns:
        (N_dst, ...) each, 0 for nodes without messages.
    """
    indptr, edge_ids = relation.in_edges
    pieces: list[Fields] = []
    rows: list[Tensor] = []
    name, state = function_name(function), AmbientState(indptr.device, function)
    spot_check = SpotCheck(relation, name, function, state)

    def call(degree: int, members: Tensor, few: Tensor | slice, change: Change) -> Mapping[str, Tensor]:
        """The results at some nodes of one in-degree; `change` is applied to all inputs of the function."""
        members = members[few]
        slots = torch.arange(degree, device=members.device)
        chosen = edge_ids[(indptr[members].unsqueeze(1) + slots).flatten()]
        mailbox = {
            name: change(m.index_select(0, chosen)).view(len(members), degree, *m.shape[1:])
            for name, m in messages.items()
        }
        data = RowView(nodes, lambda column: change(column.index_select(0, members)))
        return checked_results(function, function(NodeBatch(members, data, mailbox, relation.etype[2])), len(members))

    for degree, members in relation.nodes_by_degree:
        with refuse_batch_norms(name, state) if has_peers else nullcontext():
            results = call(degree, members, slice(None), unchanged)
        if has_peers and spot_check.is_due:
            spot_check.compare(results, partial(call, degree, members))
        rows.append(members)
        pieces.append(results)
    if not pieces:

        def call_on(count: int) -> Mapping[str, Tensor]:
            # The mailbox depends on the messages, so this worker's backward also reaches the other workers.
            mailbox = {
                name: torch.cat([m[:0], m.new_zeros(count, *m.shape[1:])]).unsqueeze(1) for name, m in messages.items()
            }
            data = RowView(nodes, lambda column: column.new_zeros(count, *column.shape[1:]))
            members = relation.in_degrees.new_zeros(count)
            return checked_results(function, function(NodeBatch(members, data, mailbox, relation.etype[2])), count)

        rows.append(relation.in_degrees.new_empty(0))
        pieces.append(results_on_nothing(function, call_on))
    index, whole = torch.cat(rows), {}
    for name in pieces[0]:
        values = torch.cat([piece[name] for piece in pieces])
        whole[name] = values.new_zeros(relation.num_dst, *values.shape[1:]).index_copy(0, index, values)
    return whole


def apply_nodes(function: NodeFunction, new: Mapping[str, Tensor], frame: Frame, ntype: str) -> dict[str, Tensor]:
    """Call an apply function on all nodes of a frame. It sees the frame's fields with the `new` ones, (N, ...) each."""
    nodes = torch.arange(frame.rows, device=frame.device)
    results = function(NodeBatch(nodes, {**frame, **new}, None, ntype))
    return dict(checked_results(function, results, frame.rows))
